"""examples/copies.py and copies_model.py: texts and first weights of a model that copies."""

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

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
    tokenizer = tmp_path / "tokenizer.json"
    backend = Tokenizer(WordLevel({"Ġrare": 0, "Ġseldom": 1, "Ċ": 2}, unk_token="Ċ"))
    backend.decoder = ByteLevel()
    backend.save(str(tokenizer))
    found = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        output = tmp_path / f"{name}.jsonl"
        options = ["--tokenizer", str(tokenizer), "--count", "50", "--seed", seed]
        copies.main([str(texts), str(output), *options])
        found.append([json.loads(line)["text"] for line in output.read_text().splitlines()])
    assert found[0] == found[1] != found[2]
    changed = short = in_order = rare = 0
    for text in found[0]:
        passage, copy, *more = text.split("\n\n")
        assert more == [copy] * len(more)
        assert 1 <= len(more) < 8
        words, new = passage.split(), copy.split()
        assert len(words) == len(new)
        changed += sum(word != other for word, other in zip(words, new, strict=True))
        short += passage.count(".") < 6
        rare += {*words} <= {"rare", "seldom"}
        in_order += any(passage in " ".join(book.split()) for book in books)
    assert 10 < changed < 150  # a word of about every third sentence
    assert short > 20
    assert 10 < in_order < 45  # the words of the others are shuffled, or random tokens
    assert 3 < rare < 25
    written = {"a.jsonl", "b.jsonl", "c.jsonl"}
    assert {file.name for file in tmp_path.iterdir()} == written | {texts.name, tokenizer.name}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"--tokenizer": "none.json"}, "none.json"),
        ({"--count": "0"}, "--count must be at least 1"),
        ({"texts": "none.jsonl"}, "there is no file none.jsonl"),
        ({"texts": "wrong.jsonl"}, "wrong.jsonl line 2"),
        ({"texts": "empty.jsonl"}, "empty.jsonl has no text"),
        ({"output": "texts.jsonl"}, "cannot write texts.jsonl"),
        ({"output": "."}, "cannot write ."),
        ({"output": "texts.jsonl/copies"}, "texts.jsonl is not a folder"),
    ],
)
def test_a_mistake_is_one_sentence(
    copies: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"text": "One. Two."}) + "\n"
    files = {"texts.jsonl": text, "wrong.jsonl": text + '{"text": 3}\n', "empty.jsonl": ""}
    for name, content in files.items():
        Path(name).write_text(content)
    given = {"texts": "texts.jsonl", "output": "copies.jsonl", "--tokenizer": "bytes"} | options
    named = [part for each in [*given.items()][2:] for part in each]
    with pytest.raises(SystemExit, match="2"):
        copies.main([given["texts"], given["output"], *named])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("copies: ")
    assert said in line
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


@pytest.mark.parametrize("size", ["huge", "tiny-previous"])
def test_first_weights_of_other_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example("copies_model").main([str(tmp_path / "first"), "--size", size])
    assert capsys.readouterr().err.startswith("copies_model: ")
    assert not [*tmp_path.iterdir()]


def test_the_recipe_starts_from_first_weights_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    example("copies_model").main([str(folder), "--size", "tiny"])
    assert XLSTM.from_pretrained(folder).config == ModelConfig.named("tiny")
    recipe = load_recipe(str(ROOT / "examples/copies-160m.toml"))
    assert recipe.model == ModelConfig.named("160m")
    assert recipe.init_from == "copies-first"


@pytest.mark.parametrize("seed", range(3))
def test_first_weights_copy(seed: int) -> None:
    """Random tokens, once more: nothing but copying predicts the second half."""
    torch.manual_seed(seed)
    config = ModelConfig(384, 8, 4, vocab_size=512)
    model = example("copies_model").first_weights(config)
    tokens = torch.randint(2, config.vocab_size, (4, 100)).repeat(1, 2)
    with torch.no_grad():
        logits, _ = model(tokens)
    right = logits[:, 100:-1].argmax(-1) == tokens[:, 101:]
    assert right.float().mean() > 0.9
