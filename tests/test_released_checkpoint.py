"""The released weights: run with XLSTM7B_RELEASED=FOLDER, the folder of NX-AI/xLSTM-7b.

Nothing here downloads them: `huggingface-cli download NX-AI/xLSTM-7b` does, and prints the folder.
"""

import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from xlstm7b import Generator, ModelConfig
from xlstm7b.checkpoint import open_checkpoint, verify
from xlstm7b.files import MANIFEST, check_sha256

FOLDER = Path(os.environ.get("XLSTM7B_RELEASED", ""))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = "The capital of France is"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason="XLSTM7B_RELEASED is not the folder of the released checkpoint",
    ),
]


@cache
def memory() -> int:
    """Bytes of the GPU's memory, or the machine's."""
    if DEVICE == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


needs_memory = pytest.mark.skipif(memory() < 20e9, reason="a 7B in bfloat16 needs 20 GB of memory")


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    yield Generator.from_pretrained(FOLDER, dtype="bfloat16", device=DEVICE)
    gc.collect()


def nano() -> Any:
    file = Path(__file__).parents[1] / "examples" / "nano_xlstm.py"
    spec = spec_from_file_location("nano_xlstm", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_is_that_of_the_7b():
    assert ModelConfig.from_pretrained(FOLDER) == ModelConfig.named("7b")
    module = nano()
    assert module.load_config(FOLDER) == module.Config()


def test_headers_list_every_parameter():
    """`open_checkpoint` compares names, shapes and file sizes."""
    checkpoint = open_checkpoint(FOLDER)
    assert checkpoint.nbytes == 6_865_424_896 * 4
    assert checkpoint.dtype == torch.float32


def test_checksums():
    """Those of SHA256SUMS, or those by which the hub's cache names its files."""
    if (FOLDER / MANIFEST).is_file():
        assert verify(FOLDER) > 6
        return
    shards = sorted(FOLDER.glob("model*.safetensors"))
    named = [path for path in shards if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name)]
    if not named:
        pytest.skip(f"{FOLDER} has no {MANIFEST} and is not in the hub's cache")
    assert named == shards
    for path in shards:
        check_sha256(path, path.resolve().name)


@needs_memory
def test_greedy_text(generator):
    [completion] = generator.generate(PROMPT, max_new_tokens=8, temperature=0)
    assert completion.text.startswith(" Paris")


@needs_memory
def test_logits_are_those_of_transformers(generator):
    transformers = pytest.importorskip("transformers")
    tokens = torch.tensor([[0, *generator.tokenizer.encode(PROMPT + " Paris, and")]], device=DEVICE)
    with torch.inference_mode():
        ours = generator.model(tokens)[0].float()
    assert ours.isfinite().all()
    assert ours.abs().max() <= 30  # the soft-cap
    if memory() < 40e9:
        pytest.skip("two copies of a 7B in bfloat16 need 40 GB of memory")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)
    with torch.inference_mode():
        other = theirs.to(DEVICE)(tokens).logits.float()
    # In bfloat16 the two round differently, so a choice counts if it is clear.
    first, second = ours.topk(2).values.unbind(-1)
    is_clear = first - second > 1
    assert is_clear.any()
    assert torch.equal(ours.argmax(-1)[is_clear], other.argmax(-1)[is_clear])
