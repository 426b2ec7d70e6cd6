"""Low-rank additions in the fused model: the model's own, and one adapter per row."""

from pathlib import Path

import pytest
import torch
from adapters import TARGETS, adapted_model, random_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from models import open_gates

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.prefix_cache import weights_fingerprint
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.adapter import Adapter, apply_adapter, load_adapter, merge_adapter
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization

CONFIG = ModelConfig(128, 2, 2, vocab_size=97)
WIDE = torch.float64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = open_gates(XLSTM(CONFIG))
    folder = tmp_path_factory.mktemp("models") / "base"
    model.save_pretrained(folder)
    for bits in ("int8", "int4"):
        quantize_checkpoint(folder, folder.with_name(bits), Quantization.named(bits))
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Adapter]:
    """Adapters of different ranks, for different layers."""
    kinds = [
        {"targets": TARGETS, "rank": 3},
        {"targets": ["q", "ogate_preact", "proj_up"], "rank": 5},
        {"targets": ["v", "proj_down", "out_proj"], "rank": 1},
    ]
    folders = [
        random_adapter(base.with_name(f"adapter-{seed}"), base, seed=seed, std=0.3, **kind)
        for seed, kind in enumerate(kinds)
    ]
    return [load_adapter(folder, CONFIG) for folder in folders]


def read(model: FusedModel, tokens: torch.Tensor, *, steps: int = 0, **options) -> torch.Tensor:
    """Logits after a prompt and some single tokens."""
    state = ModelState.zeros(CONFIG, len(tokens), dtype=WIDE)
    cut = tokens.shape[1] - steps
    with torch.inference_mode():
        logits = model.logits(model.read(tokens[:, :cut], state, **options))
        for at in range(cut, tokens.shape[1]):
            logits = model.step(tokens[:, at], state, **options)
    return logits


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("kind", ["base", "int8", "int4"])
def test_an_adapter_on_quantised_weights(kind, base, adapters):
    tokens = torch.randint(0, 97, (2, 9))
    floats = XLSTM.from_pretrained(base, dtype=WIDE)
    if kind != "base":
        floats = XLSTM.from_pretrained(base.with_name(kind), dtype=WIDE)
    plain = FusedModel(floats)
    model = XLSTM.from_pretrained(base.with_name(kind), dtype=WIDE)
    apply_adapter(model, adapters[0])
    fused = FusedModel(model)
    want = model(tokens, logits="last")[0].detach()
    close(read(fused, tokens), want)
    close(read(fused, tokens, steps=4), want)
    assert (read(plain, tokens) - want).norm() > 1e-2 * want.norm()
    found = {
        weights_fingerprint("", computed.weights(), torch.float32) for computed in (plain, fused)
    }
    assert len(found) == 2  # prefixes on disk are not mixed up


def test_a_model_with_lora_layers_of_its_own(base):
    tokens = torch.randint(0, 97, (2, 9))
    model = adapted_model(base, dtype=WIDE)
    with torch.no_grad():
        want = model(tokens, logits="last")[0]
    close(read(FusedModel(model), tokens, steps=3), want)


@settings(max_examples=10, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    steps=st.integers(0, 4),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["base", "int8", "int4"]),
)
def test_each_row_has_its_own_adapter(numbers, steps, seed, kind, base, adapters):
    torch.manual_seed(seed)
    tokens = torch.randint(0, 97, (len(numbers), 7))
    folder = base.with_name(kind)
    fused = FusedModel(XLSTM.from_pretrained(folder, dtype=WIDE), adapters)
    got = read(fused, tokens, steps=steps, adapter_of=torch.tensor(numbers))
    alone = read(fused, tokens, steps=steps)
    for row, number in enumerate(numbers):
        single = XLSTM.from_pretrained(folder, dtype=WIDE)
        if number:
            apply_adapter(single, adapters[number - 1])
        with torch.no_grad():
            close(got[row], single(tokens[row : row + 1], logits="last")[0][0])
        assert torch.allclose(got[row], alone[row], rtol=1e-9) == (number == 0)


def test_adapters_that_cannot_be_mixed(base, adapters, tmp_path):
    gates = random_adapter(tmp_path / "gates", base, targets=["q", "igate_preact"])
    model = XLSTM.from_pretrained(base)
    with pytest.raises(ValueError, match=r"gates changes .*igate_preact, .*: merge it"):
        FusedModel(model, [load_adapter(gates, CONFIG)])
    with pytest.raises(ValueError, match="LoRA layers of its own"):
        FusedModel(adapted_model(base), adapters)
    # An adapter alone may change the gates: they are floats, and it is merged into them.
    quantised = XLSTM.from_pretrained(base.with_name("int4"), dtype=WIDE)
    apply_adapter(quantised, load_adapter(gates, CONFIG))
    tokens = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        close(read(FusedModel(quantised), tokens), quantised(tokens, logits="last")[0])


@torch.no_grad()
def test_additions_through_the_kernels(tmp_path):
    """The operations of `kernels/gpu.py` instead of `plain`'s; on a CPU in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.generate.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(64, 1, 2, vocab_size=40, ffn_proj_factor=1.0)  # interpreting is slow
    torch.manual_seed(0)
    XLSTM(config).save_pretrained(tmp_path / "base")
    folders = [
        random_adapter(tmp_path / f"{seed}", tmp_path / "base", seed=seed, std=0.3, rank=2)
        for seed in range(2)
    ]
    adapters = [load_adapter(folder, config) for folder in folders]
    fused = FusedModel(XLSTM.from_pretrained(tmp_path / "base", device=device), adapters)
    fused.operations = gpu
    for numbers in ([1], [2, 0, 1]):
        tokens, batch = torch.randint(0, 40, (len(numbers), 3), device=device), len(numbers)
        state, rows = ModelState.zeros(config, batch, device=device), torch.tensor(numbers)
        if batch > 1:
            fused.read(tokens[:, :2], state, adapter_of=rows.to(device))
        else:
            tokens = tokens[:, 2:]
        got = fused.step(tokens[:, -1], state, rows.to(device))
        for row, number in enumerate(numbers):
            merged = XLSTM.from_pretrained(tmp_path / "base", device=device)
            if number:
                merge_adapter(merged, adapters[number - 1])
            close(got[row], merged(tokens[row : row + 1], logits="last")[0][0], 1e-4)
