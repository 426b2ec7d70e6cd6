"""Adapters on the command line: `merge` and `--adapter`."""

import json
from pathlib import Path

import pytest
import torch
from adapters import random_adapter
from commands import CHATML, Cli, refused, succeeded

from xlstm7b.cli.loading import open_model
from xlstm7b.cli.serve import read_adapters
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import load_adapter, merge_adapter


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
        assert missing.endswith("is neither a folder nor the id of a hub repository")
    assert "holds no adapter_config.json" in refused(
        cli("generate", speller, "x", "--adapter", speller)
    )


def test_adapters_of_a_server(cli: Cli, speller: Path, adapter: Path, tmp_path: Path) -> None:
    other = random_adapter(tmp_path / "other", speller, seed=1)
    (other / "chat_template.jinja").write_text(CHATML)
    opened = open_model(str(speller), None, None, "cpu")
    found = read_adapters([str(adapter), f"second={other}"], opened)
    assert [*found] == ["adapter", "second"]
    assert type(found["adapter"][1]).__name__ == "PlainFormat"
    assert type(found["second"][1]).__name__ == "TemplateFormat"
    for given, message in (
        ([adapter, f"adapter={other}"], "two adapters are called 'adapter': use NAME=FOLDER"),
        ([adapter, f"again={adapter}"], f"{adapter} is the same as {adapter}"),
        ([f"a:b={adapter}"], "a colon or a character that is not printable: use NAME=FOLDER"),
        ([speller], "holds no adapter_config.json: not an adapter"),
        (
            [f"{speller.name}={adapter}"],
            f"{speller.name!r} is the name of the model too: use NAME=FOLDER, or --name",
        ),
    ):
        options = [part for one in given for part in ("--adapter", one)]
        assert refused(cli("serve", speller, *options)).endswith(message)
