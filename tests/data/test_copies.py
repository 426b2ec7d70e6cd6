"""examples/copies.py and copies_model.py: texts and first weights of a model that copies."""

import gzip
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from xlstm7b import XLSTM, ModelConfig
from xlstm7b.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def copies() -> ModuleType:
    return example("copies")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_each_text_is_a_passage_and_equal_edited_copies(
    copies: ModuleType, tmp_path: Path, suffix: str
) -> None:
    books = [" ".join(f"Word{n} of\nbook {b} here." for n in range(40)) for b in range(3)]
    lines = "".join(json.dumps({"text": book}) + "\n" for book in books).encode()
    texts = tmp_path / f"books{suffix}"
    texts.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    found = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        output = tmp_path / f"{name}.jsonl"
        copies.main([str(texts), str(output), "--count", "50", "--seed", seed])
        found.append([json.loads(line)["text"] for line in output.read_text().splitlines()])
    assert found[0] == found[1] != found[2]
    changed = short = in_order = 0
    for text in found[0]:
        passage, copy, *more = text.split("\n\n")
        assert more == [copy] * len(more)
        assert 1 <= len(more) < 8
        words, new = passage.split(), copy.split()
        assert len(words) == len(new)
        changed += sum(word != other for word, other in zip(words, new, strict=True))
        short += passage.count(".") < 6
        in_order += any(passage in " ".join(book.split()) for book in books)
    assert 10 < changed < 150  # a word of about every third sentence
    assert short > 20
    assert 10 < in_order < 45  # the words of the others are shuffled
    assert not [*tmp_path.glob("*.partial")]


def test_the_recipe_starts_from_first_weights_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    example("copies_model").main([str(folder), "--size", "tiny"])
    model = XLSTM.from_pretrained(folder)
    recipe = load_recipe(str(ROOT / "examples/copies-160m.toml"))
    bias = model.config.igate_bias_init_range
    assert recipe.model == replace(ModelConfig.named("160m"), igate_bias_init_range=bias)
    first, *others = (block.mlstm_layer for block in model.backbone.blocks)
    kept = [torch.sigmoid(layer.fgate_preact.bias) for layer in (first, *others)]
    assert (kept[0] < 0.75).all()
    assert all((one > 0.9).all() for one in kept[1:])
    assert all((layer.igate_preact.bias == -2).all() for layer in (first, *others))
    assert torch.equal(model.lm_head.weight, model.backbone.embeddings.weight)
