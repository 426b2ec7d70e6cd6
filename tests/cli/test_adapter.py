"""Adapters on the command line: `merge` and `--adapter`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import random_adapter
from commands import CHATML, Cli, loses_the_race, refused, save_chat_model, succeeded
from tokenizers import Tokenizer as Backend

from xlstm7b.cli.loading import open_model
from xlstm7b.cli.serve import read_adapters
from xlstm7b.generate import Request
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import load_adapter, merge_adapter
from xlstm7b.tokenizer import tokenizer_fingerprint


@pytest.fixture(scope="session")
def adapter(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "adapter", speller, std=0.3)


def test_merge_writes_a_checkpoint(cli: Cli, speller: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    assert succeeded(cli("merge", speller, adapter, tmp_path / "merged")).startswith("wrote ")
    want = XLSTM.from_pretrained(speller)
    merge_adapter(want, load_adapter(adapter, want.config))
    got = XLSTM.from_pretrained(tmp_path / "merged")
    assert all(map(torch.equal, got.parameters(), want.parameters()))
    succeeded(cli("verify", tmp_path / "merged"))
    again = refused(cli("merge", speller, adapter, tmp_path / "merged"))
    assert again.endswith("--overwrite replaces the checkpoint in it")
    other = refused(cli("merge", tmp_path / "merged", adapter, tmp_path / "x"))
    assert "was trained on other weights" in other
    none = refused(cli("merge", speller, speller, tmp_path / "x"))
    assert none.endswith("holds no adapter_config.json: not an adapter")
    succeeded(cli("quantize", speller, tmp_path / "int8", "--bits", 8))
    quantised = refused(cli("merge", tmp_path / "int8", adapter, tmp_path / "x"))
    assert "merge it into the float weights and quantise the result" in quantised
    assert not (tmp_path / "x").exists()


def test_merge_keeps_what_another_process_writes(
    cli: Cli, speller: Path, adapter: Path, tmp_path: Path
) -> None:
    target = tmp_path / "merged"
    loses_the_race(lambda: cli("merge", speller, adapter, target), target)


def changed(cli: Cli, adapter: Path, *command: object) -> tuple[str, str]:
    """The output of a command without and with the adapter."""
    return succeeded(cli(*command)), succeeded(cli(*command, "--adapter", adapter))


def test_generate_with_an_adapter(cli: Cli, speller: Path, adapter: Path, tmp_path: Path) -> None:
    greedy = ("--temperature", 0, "--max-new-tokens", 12)
    plain, got = changed(cli, adapter, "generate", speller, "some words", *greedy)
    succeeded(cli("merge", speller, adapter, tmp_path / "merged"))
    assert got == succeeded(cli("generate", tmp_path / "merged", "some words", *greedy)) != plain
    for bits in (8, 4):
        base = tmp_path / f"int{bits}"
        succeeded(cli("quantize", speller, base, "--bits", bits))
        plain, got = changed(cli, adapter, "generate", base, "some words", *greedy)
        assert got != plain


def test_a_state_belongs_to_its_adapter(
    cli: Cli, speller: Path, adapter: Path, tmp_path: Path
) -> None:
    """A state that the base has read is refused with an adapter, and the reverse."""
    other = random_adapter(tmp_path / "other", speller, std=0.3, seed=1)
    file = tmp_path / "state.safetensors"
    ours, theirs, none = ("--adapter", adapter), ("--adapter", other), ()
    for saver, readers in (
        (none, {none: "", ours: "without an adapter: continue it without one"}),
        (
            ours,
            {
                ours: "",
                none: "with an adapter: continue it with that adapter",
                theirs: "with another adapter: continue it with that adapter",
            },
        ),
    ):
        succeeded(
            cli("generate", speller, "a", "--max-new-tokens", 2, "--save-state", file, *saver)
        )
        for reader, message in readers.items():
            again = cli("generate", speller, "--max-new-tokens", 2, "--load-state", file, *reader)
            if message:
                assert refused(again) == f"{file} was saved {message}"
            else:
                succeeded(again)


def test_chat_and_eval_with_an_adapter(
    cli: Cli, speller: Path, adapter: Path, tmp_path: Path
) -> None:
    options = ("--temperature", 0, "--max-new-tokens", 12)
    plain = succeeded(cli("chat", speller, *options, stdin="hello\n"))
    got = succeeded(cli("chat", speller, *options, "--adapter", adapter, stdin="hello\n"))
    assert got != plain
    (tmp_path / "text.txt").write_text("a text of some length, " * 5)
    files = [tmp_path / name for name in ("plain.json", "adapted.json", "merged.json")]
    command = ("eval", "ppl", speller, tmp_path / "text.txt")
    succeeded(cli(*command, "--output", files[0]))
    succeeded(cli(*command, "--output", files[1], "--adapter", adapter))
    succeeded(cli("merge", speller, adapter, tmp_path / "merged"))
    succeeded(cli("eval", "ppl", tmp_path / "merged", tmp_path / "text.txt", "--output", files[2]))
    found = [json.loads(file.read_text()) for file in files]
    losses = [next(iter(one["results"].values())) for one in found]
    assert losses[1] == losses[2] != losses[0]
    assert len({one["xlstm7b"]["model"]["fingerprint"] for one in found}) == 3
    assert found[1]["xlstm7b"]["model"]["adapter"] == str(adapter)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that repeats "Hi!", id 2 and a line break, and an adapter that ends texts with id 2.

    The model's own end of text is id 0. The adapter changes no weight.
    """
    folder = tmp_path_factory.mktemp("ending")
    base = save_chat_model(folder / "base", repeats=True)
    adapter = random_adapter(folder / "adapter", base, std=0.0)
    (adapter / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return base, adapter


def test_the_end_of_text_of_an_adapter(cli: Cli, ending: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = ending
    command = ("generate", base, "\n", "--temperature", 0, "--max-new-tokens", 13)
    endless, got = changed(cli, adapter, *command)
    assert (endless, got) == ("\nHi!\nHi!\nHi!\n", "\nHi!\n")
    assert succeeded(cli(*command, "--adapter", adapter, "--ignore-eos")) == endless
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "\\n"}\n{"prompt": "\\n", "eos_token_id": []}\n')
    code, out, _ = cli("generate", base, "--jsonl", lines, *command[3:], "--adapter", adapter)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [one["finish_reason"] for one in found] == ["stop", "length"]
    succeeded(cli("merge", base, adapter, tmp_path / "merged"))
    assert succeeded(cli("generate", tmp_path / "merged", *command[2:])) == "\nHi!\n"
    # The adapter's own template does not name the token that ends its texts.
    plain = tmp_path / "plain"
    shutil.copytree(adapter, plain)
    template = r"{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"
    (plain / "chat_template.jinja").write_text(template)
    code, out, _ = cli("chat", base, *command[3:], "--adapter", plain, stdin="x\n")
    assert (code, out) == (0, "Hi!\n")


def test_an_end_of_text_that_is_not_the_models_is_ignored(
    cli: Cli, ending: tuple[Path, Path], tmp_path: Path
) -> None:
    """One that the tokenizer lacks, is outside the vocabulary, or has another token's id."""
    base, adapter = ending
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    (other / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    command = ("generate", base, "\n", "--temperature", 0, "--max-new-tokens", 5)
    assert succeeded(cli(*command, "--adapter", other)) == "\nHi!\n\n"
    backend = Backend.from_file(str(base / "tokenizer.json"))
    backend.add_special_tokens([f"<|{n}|>" for n in range(100)] + ["</s>"])
    assert backend.token_to_id("</s>") > 320
    backend.save(str(other / "tokenizer.json"))
    assert succeeded(cli(*command, "--adapter", other)) == "\nHi!\n\n"
    words = json.loads((base / "tokenizer.json").read_text().replace("<|im_end|>", "</s>"))
    (other / "tokenizer.json").write_text(json.dumps(words))
    assert succeeded(cli(*command, "--adapter", other)) == "\nHi!\n\n"


def test_merge_refuses_a_tokenizer_with_more_ids_than_the_model(
    cli: Cli, ending: tuple[Path, Path], tmp_path: Path
) -> None:
    """No command could read the merged folder."""
    base, adapter = ending
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    backend = Backend.from_file(str(base / "tokenizer.json"))
    backend.add_special_tokens([f"<|{n}|>" for n in range(400)])
    backend.save(str(other / "tokenizer.json"))
    error = refused(cli("merge", base, other, tmp_path / "merged"))
    assert error.startswith(f"{other / 'tokenizer.json'} has ids up to ")
    assert error.endswith("but the model's vocabulary ends at 319")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": "</s>"}, "names eos_token '</s>', which the tokenizer in BASE lacks"),
        ({"bos_token": "Hi"}, "names bos_token 'Hi', which the tokenizer in BASE lacks"),
        (
            {"bos_token": {"content": "<|im_start|>"}},
            "bos_token '<|im_start|>', whose id is 1, but the model's config.json says "
            "bos_token_id = 0",
        ),
        ({"fingerprint": "bytes"}, "was trained with the tokenizer bytes, but BASE holds the "),
    ],
)
def test_merge_refuses_an_export_that_the_tokenizer_does_not_fit(
    cli: Cli, ending: tuple[Path, Path], tmp_path: Path, changes: dict, message: str
) -> None:
    """No command could read the merged folder."""
    base, adapter = ending
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    trained = {"eos_token": "<|im_end|>", "fingerprint": tokenizer_fingerprint(base)}
    (other / "tokenizer_config.json").write_text(json.dumps(trained | changes))
    error = refused(cli("merge", base, other, tmp_path / "merged"))
    assert error.startswith(str(other))
    assert message.replace("BASE", str(base)) in error
    assert not (tmp_path / "merged").exists()
    (other / "tokenizer_config.json").write_text(json.dumps(trained))
    succeeded(cli("merge", base, other, tmp_path / "merged"))
    command = ("generate", tmp_path / "merged", "\n", "--temperature", 0)
    assert succeeded(cli(*command)) == "\nHi!\n"


@pytest.mark.usefixtures("no_weights")
def test_a_damaged_tokenizer_config_of_an_adapter(
    cli: Cli, ending: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = ending
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    (other / "tokenizer_config.json").write_text("{")
    for command in (("generate", base, "x"), ("chat", base), ("serve", base)):
        error = refused(cli(*command, "--adapter", other))
        assert error.startswith(f"{other / 'tokenizer_config.json'} is not a readable JSON file")


@pytest.mark.parametrize("name", ["generate", "chat", "eval", "eval ppl", "eval ruler"])
@pytest.mark.usefixtures("no_weights")
def test_two_adapters_are_refused(
    cli: Cli, speller: Path, adapter: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "x.txt").write_text("a text")
    options = {
        "generate": ["x"],
        "eval": ["--tasks", "x"],
        "eval ppl": [tmp_path / "x.txt"],
        "eval ruler": ["--output", tmp_path / "ruler", "--tasks", "vt"],
    }
    command = (*name.split(), speller, *options.get(name, []))
    error = refused(cli(*command, "--adapter", adapter, "--adapter", "other"))
    assert error == (
        f"--adapter is given 2 times ({adapter}, other), but one adapter can be used at a time: "
        "give one, or merge the others into the weights with xlstm7b merge"
    )


@pytest.mark.usefixtures("no_weights")
def test_an_adapter_that_does_not_fit_is_refused_before_the_weights_are_read(
    cli: Cli, speller: Path, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("a text")
    for command in (
        ("generate", speller, "x"),
        ("chat", speller),
        ("eval", "ppl", speller, tmp_path / "x.txt"),
    ):
        missing = refused(cli(*command, "--adapter", tmp_path / "none"))
        assert missing.startswith("there is no adapter: '")
        assert missing.endswith("is neither a folder nor the id of a hub repository")
    assert "holds no adapter_config.json" in refused(
        cli("generate", speller, "x", "--adapter", speller)
    )


def test_a_server_ends_texts_where_the_adapter_does(
    ending: tuple[Path, Path],
) -> None:
    base, other = ending
    opened = open_model(str(base), None, None, "cpu")
    found = read_adapters([str(other)], opened)
    assert found["adapter"][0].end == 2
    request = Request("x", adapter=found["adapter"][0])
    request.prepare(opened.config, opened.tokenizer)
    assert request.params.eos_token_ids == (opened.config.eos_token_id, 2)


def test_adapters_of_a_server(cli: Cli, speller: Path, adapter: Path, tmp_path: Path) -> None:
    other = random_adapter(tmp_path / "lr=0.001", speller, seed=1)
    (other / "chat_template.jinja").write_text(CHATML)
    opened = open_model(str(speller), None, None, "cpu")
    assert [*read_adapters([str(other)], opened)] == ["lr=0.001"]
    found = read_adapters([str(adapter), f"second={other}"], opened)
    assert [*found] == ["adapter", "second"]
    assert type(found["adapter"][1]).__name__ == "PlainFormat"
    assert type(found["second"][1]).__name__ == "ChatFormat"
    for given, message in (
        ([adapter, f"adapter={other}"], "two adapters are called 'adapter': use NAME=FOLDER"),
        ([adapter, f"again={adapter}"], f"{adapter} is the same as {adapter}"),
        ([f"a:b={adapter}"], "a colon or a character that is not printable: use NAME=FOLDER"),
        ([f"={adapter}"], f"'={adapter}' has no name or no folder: use NAME=FOLDER"),
        (["second="], "'second=' has no name or no folder: use NAME=FOLDER"),
        ([speller], "holds no adapter_config.json: not an adapter"),
        (
            [f"{speller.name}={adapter}"],
            f"{speller.name!r} is the name of the model too: use NAME=FOLDER, or --name",
        ),
    ):
        options = [part for one in given for part in ("--adapter", one)]
        assert refused(cli("serve", speller, *options)).endswith(message)
