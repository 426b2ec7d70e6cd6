"""`xlstm7b generate`: outputs, prompts, states, Ctrl-C, speeds, and one sentence per mistake."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import names_in, save_small
from commands import (
    Cli,
    Outcome,
    environment,
    greedy_text,
    refused,
    save_reciter,
    succeeded,
)

from xlstm7b.accounting import decode_bytes
from xlstm7b.checkpoint import read_config
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SavedState
from xlstm7b.generate.request import OutputText
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

GREEDY = ("--temperature", 0)


def bytes_of(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def as_options(sampling: dict[str, object]) -> list[object]:
    pairs = (("--" + name.replace("_", "-"), value) for name, value in sampling.items())
    return [part for pair in pairs for part in pair]


# Outputs


def test_generate_greedily(cli: Cli, speller: Path) -> None:
    arguments = ("generate", speller, "Once upon ä", "--max-new-tokens", 40, "--temperature", 0)
    want = greedy_text(speller, "Once upon ä", 40)
    assert len(set(want)) > 12
    assert succeeded(cli(*arguments)) == want + "\n"
    assert succeeded(cli(*arguments, "--seed", 5, "--top-p", 0.5, "--device", "cpu")) == want + "\n"


def test_generate_with_seeds(cli: Cli, speller: Path) -> None:
    def text(seed: int, *options: object) -> str:
        return succeeded(cli("generate", speller, "The ", "--seed", seed, *options))

    short = ("--max-new-tokens", 30, "--temperature", 1.5)
    assert text(1, *short) == text(1, *short) != text(2, *short)
    assert text(1, *short, "--top-k", 1) == greedy_text(speller, "The ", 30) + "\n"
    assert text(1, *short, "--top-p", 1e-9) == greedy_text(speller, "The ", 30) + "\n"


def test_generate_by_a_json_schema(cli: Cli, speller: Path, tmp_path: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema), encoding="utf-8-sig")
    options = ("--json-schema", file, "--no-echo", "--seed", 3)
    for more in ((), ("-n", 2)):
        printed = succeeded(cli("generate", speller, "List:", *options, *more))
        texts = re.split(r"=== \d of 2 ===\n", printed)[1:] or [printed]
        assert len(texts) == 1 + len(more) // 2
        for text in texts:
            assert {*json.loads(text)} <= {"x", "y"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file "),
        (b"\xff", "is not UTF-8 text"),
        (b"{", "schema.json: structured_outputs.json is not JSON: "),
        (b"[]", "schema.json: structured_outputs.json must be a JSON schema: an object"),
        (b'{"type": "x"}', "structured_outputs.json is not valid: Invalid type: x"),
    ],
)
def test_mistakes_in_a_json_schema(
    cli: Cli, speller: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    error = refused(cli("generate", speller, "a", "--json-schema", file))
    assert message in error
    assert str(file) in error


def test_a_folder_is_no_input_file(cli: Cli, speller: Path, tmp_path: Path) -> None:
    for options in (["--file"], ["a", "--json-schema"], ["--jsonl"]):
        error = refused(cli("generate", speller, *options, tmp_path))
        assert error.startswith(f"{tmp_path} is a folder, not a file")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"top_k": 2},
        {"top_p": 0.2},
        {"min_p": 0.9},
        {"seed": 5},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 40.0},
        {"frequency_penalty": 20.0},
        {"max_new_tokens": 29},
        {"temperature": 50.0, "min_new_tokens": 30, "top_p": 1.0, "top_k": 0},
    ],
)
def test_sampling_options_are_those_of_the_generator(
    cli: Cli, speller: Path, sampling: dict[str, object]
) -> None:
    hot = {"max_new_tokens": 30, "temperature": 9.0, "top_k": 12, "top_p": 0.8, "seed": 4}
    generator = Generator.from_pretrained(speller)
    (base,) = generator.generate("The ", **hot)
    (want,) = generator.generate("The ", **{**hot, **sampling})
    assert (base.text == want.text) == (not sampling)
    out = succeeded(cli("generate", speller, "The ", *as_options({**hot, **sampling})))
    assert out == f"The {want.text}\n"


def test_generate_max_new_tokens(cli: Cli, speller: Path) -> None:
    for count in (1, 17):
        out = succeeded(
            cli("generate", speller, "é", "--max-new-tokens", count, "--top-k", 3, "--seed", 0)
        )
        assert out.startswith("é")
        tokens = ByteTokenizer().encode(out.removesuffix("\n"))
        # Half characters that were never completed are shown as U+FFFD, three bytes for one.
        assert len(tokens) - 2 * (1 + out.count("\ufffd")) == count


def test_generate_in_bfloat16_and_from_an_empty_prompt(cli: Cli, speller: Path) -> None:
    out = succeeded(cli("generate", speller, "", "--max-new-tokens", 5, "--temperature", 0))
    assert out == greedy_text(speller, "", 5) + "\n"
    narrow = cli(
        "generate", speller, "a", "--max-new-tokens", 3, "--temperature", 0, "--dtype", "bfloat16"
    )
    assert succeeded(narrow).startswith("a")


@pytest.fixture(scope="module")
def fox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates aé🦊, a line break and b. Most characters take several tokens."""
    return save_reciter(tmp_path_factory.mktemp("fox"), bytes_of("aé🦊\nb"))


def test_generate_characters_of_several_tokens(cli: Cli, fox: Path) -> None:
    assert succeeded(cli("generate", fox, "a")) == "aé🦊\nb\n"
    assert succeeded(cli("generate", fox, "a", "--max-new-tokens", 4)) == "aé\ufffd\n"


def test_generate_until_a_stop_string(cli: Cli, fox: Path) -> None:
    assert succeeded(cli("generate", fox, "a", "--stop", "\n")) == "aé🦊\n"
    assert succeeded(cli("generate", fox, "a", "--stop", "b", "--stop", "🦊\n")) == "aé\n"
    assert succeeded(cli("generate", fox, "a", "--stop", "é", "--no-echo")) == "\n"


def test_generate_past_the_end_of_text(cli: Cli, fox: Path) -> None:
    def tokens(*options: object) -> int:
        brief = ("--max-new-tokens", 9, "--verbose", "--peak-tbs", 1, *GREEDY)
        code, out, err = cli("generate", fox, "\n", *brief, *options)
        assert (code, out[:2]) == (0, "\nb")
        return int(re.search(r"generated +(\d+) tok ", err)[1])

    assert tokens() == 1
    assert tokens("--min-new-tokens", 3) == 3
    assert tokens("--ignore-eos") == 9


def test_generate_several_outputs(cli: Cli, speller: Path) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 3.0, "top_p": 1.0, "seed": 7}
    texts = Generator.from_pretrained(speller).generate("So ", num_return_sequences=3, **sampling)
    out = succeeded(cli("generate", speller, "So ", "-n", 3, *as_options(sampling)))
    numbered = enumerate((text.text for text in texts), 1)
    assert out == "".join(f"=== {n} of 3 ===\nSo {text}\n" for n, text in numbered)
    few = ("--num-return-sequences", 3, "--batch-size", 2, "--no-echo")
    assert succeeded(cli("generate", speller, "So ", *few, *as_options(sampling))) == out.replace(
        "\nSo ", "\n"
    )


# Prompts


@pytest.mark.parametrize("content", ["Ein Käse\n", "Ein Käse\r\n", "Ein Käse"])
def test_generate_from_a_file_and_from_a_pipe(
    cli: Cli, speller: Path, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content.encode())
    short = ("--max-new-tokens", 9, *GREEDY)
    want = succeeded(cli("generate", speller, "Ein Käse", *short))
    assert succeeded(cli("generate", speller, "--file", file, *short)) == want
    assert succeeded(cli("generate", speller, *short, stdin=content)) == want
    assert succeeded(cli("generate", speller, "-", *short, stdin=content)) == want
    read_end, write_end = os.pipe()  # a shell's --file <(command)
    os.write(write_end, content.encode())
    os.close(write_end)
    assert succeeded(cli("generate", speller, "--file", f"/dev/fd/{read_end}", *short)) == want
    os.close(read_end)
    # Some editors put a mark at the start of a file.
    marked = tmp_path / "marked.txt"
    marked.write_bytes("\ufeffEin Käse\n".encode())
    assert succeeded(cli("generate", speller, "--file", marked, *short)) == want
    # An argument is taken as it is, whatever is piped in.
    assert succeeded(cli("generate", speller, "Ein Käse", *short, stdin="x")) == want
    assert succeeded(cli("generate", speller, "--file", file, *short, stdin="x")) == want


@pytest.mark.usefixtures("no_weights")
def test_there_must_be_one_prompt(cli: Cli, speller: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff")
    want = "two prompts are given: use an argument or --file, not both"
    assert refused(cli("generate", speller, "x", "--file", file)) == want
    assert refused(cli("generate", speller, "-", "--file", file, stdin="x")) == want
    want = "no prompt is given: use an argument or --file, or pipe it to stdin"
    assert refused(cli("generate", speller)) == want
    assert refused(cli("generate", speller, "--file", tmp_path / "no")).startswith("there is no f")
    assert refused(cli("generate", speller, "--file", file)).startswith(f"{file} is not UTF-8 text")
    sentence = refused(cli("generate", speller, stdin=b"a\xff"))
    assert sentence.startswith("stdin is not UTF-8 text: ")
    want = "the prompt is not valid Unicode: '\\udcff' at character 0"
    assert refused(cli("generate", speller, "\udcff")) == want


@pytest.mark.usefixtures("no_weights")
def test_generate_an_empty_prompt_without_a_first_token(cli: Cli, tmp_path: Path) -> None:
    config = ModelConfig(128, 1, 2, vocab_size=320, force_bos_token_insert=False)
    XLSTM(config).save_pretrained(tmp_path)
    sentence = refused(cli("generate", tmp_path, ""))
    assert sentence == "the prompt is empty, and this model has no first token of its own"


# States


def test_generate_continues_from_a_saved_state(cli: Cli, speller: Path, tmp_path: Path) -> None:
    path = tmp_path / "a state"
    path.touch()  # as `mktemp` does: an empty file is replaced
    want = greedy_text(speller, "Once upon", 30)

    def continue_text(*arguments: object, tokens: int) -> str:
        return succeeded(
            cli("generate", speller, *arguments, "--max-new-tokens", tokens, *GREEDY)
        ).removesuffix("\n")

    first = continue_text("Once upon", "--save-state", path, tokens=12)
    assert names_in(tmp_path) == {path.name}
    state = SavedState.load(path, read_config(speller))
    assert state.tokens_seen == [1 + len("Once upon") + 12]
    again = continue_text("--load-state", path, "--save-state", path, tokens=10)
    assert SavedState.load(path, read_config(speller)).tokens_seen == [1 + len("Once upon") + 22]
    last = continue_text(
        "--load-state", path, "--dtype", "float32", "--state-dtype", "float32", tokens=8
    )
    assert first + again + last == want
    # A prompt is read on top of the state; stdin is read only if the prompt is -.
    more = continue_text("--load-state", path, want[-8:], tokens=5)
    assert more == greedy_text(speller, want, 5)[-13:]
    from_state = ("generate", speller, "--load-state", path, *GREEDY, "--max-new-tokens")
    assert succeeded(cli(*from_state, 5, "-", stdin=want[-8:])) == more + "\n"
    assert succeeded(cli(*from_state, 8, stdin=b"\xff")) == last + "\n"
    two = succeeded(cli(*from_state, 8, "-n", 2))
    assert two == f"=== 1 of 2 ===\n{last}\n=== 2 of 2 ===\n{last}\n"


def test_a_state_file_belongs_to_its_weights(cli: Cli, speller: Path, tmp_path: Path) -> None:
    """The config is the same, the weights are others: the state would mean something else."""
    other = tmp_path / "other"
    torch.manual_seed(5)
    XLSTM(read_config(speller)).save_pretrained(other)
    assert read_config(other) == read_config(speller)
    path = tmp_path / "state"
    assert cli("generate", speller, "a", "--max-new-tokens", 2, "--save-state", path).code == 0
    message = f"{path} belongs to other weights than those in {other}"
    assert message in refused(cli("generate", other, "--load-state", path))
    short = ("--max-new-tokens", 2)
    assert cli("chat", speller, *short, stdin=f"a\n/save {path}\n").code == 0
    assert message in cli("chat", other, stdin=f"/load {path}\n").err
    assert "Loaded" in cli("chat", speller, stdin=f"/load {path}\n").err


def test_generate_in_bfloat16_states(cli: Cli, speller: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    narrow = ("--state-dtype", "bfloat16", "--max-new-tokens", 3)
    out = succeeded(cli("generate", speller, "a", *narrow, "--save-state", path))
    state = SavedState.load(path, read_config(speller))
    assert state.model_state.blocks[0].C.dtype == torch.bfloat16
    assert out.startswith("a")


@pytest.mark.usefixtures("no_weights")
def test_states_are_checked_before_weights_are_loaded(
    cli: Cli, speller: Path, tmp_path: Path
) -> None:
    config = read_config(speller)
    path = tmp_path / "state"
    assert refused(cli("generate", speller, "--load-state", path)) == f"there is no file {path}"
    want = f"{tmp_path} is a folder, not a file"
    assert refused(cli("generate", speller, "--load-state", tmp_path)) == want
    path.write_bytes(b"hello")
    sentence = refused(cli("generate", speller, "--load-state", path))
    assert sentence == f"{path} is not a safetensors file"
    sentence = refused(cli("generate", speller, "--load-state", speller / "model.safetensors"))
    assert sentence == f"{speller / 'model.safetensors'} holds no saved state"
    other = Generator(XLSTM(ModelConfig(128, 1, 2, vocab_size=320)), ByteTokenizer())
    other.read("x").save(path)
    sentence = refused(cli("generate", speller, "--load-state", path))
    want = f"{path} was saved from another model: it has num_blocks 1, the loaded model 2"
    assert sentence.startswith(want)
    Generator(XLSTM(config), ByteTokenizer()).read(["x", "y"]).save(path)
    sentence = refused(cli("generate", speller, "--load-state", path))
    assert sentence == "a request continues one state, not 2"
    before = path.read_bytes()
    text, weights = tmp_path / "text", speller / "model.safetensors"
    text.write_text("hello")
    for target, reason in {
        tmp_path: f"cannot write {tmp_path}: it exists and is not a regular file",
        tmp_path
        / "a"
        / "b": f"cannot write {tmp_path / 'a/b'}: there is no folder {tmp_path / 'a'}",
        Path("/dev/null"): "cannot write /dev/null: it exists and is not a regular file",
        text: f"{text} exists and is no saved state: choose another file",
        weights: f"{weights} exists and is no saved state: choose another file",
    }.items():
        assert refused(cli("generate", speller, "x", "--save-state", target)) == reason
    sentence = refused(cli("generate", speller, "x", "--save-state", path, "-n", 2))
    assert sentence == "--save-state saves one state: it cannot be combined with -n"
    assert (path.read_bytes(), text.read_text()) == (before, "hello")


def after_tokens(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]) -> None:
    """Calls `act` when an output has this many tokens, before it gets the next one."""
    push = OutputText.push

    def counting(output: OutputText, *given: object) -> str:
        if len(output.token_ids) == count:
            act()
        return push(output, *given)

    monkeypatch.setattr(OutputText, "push", counting)


def test_ctrl_c_ends_the_output_and_saves_the_state(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "state", signal.getsignal(signal.SIGINT)
    after_tokens(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    outcome = cli("generate", speller, "So ", *GREEDY, "--save-state", path)
    assert outcome == Outcome(130, greedy_text(speller, "So ", 4) + "\n", "")
    assert SavedState.load(path, read_config(speller)).tokens_seen == [1 + len("So ") + 4]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_several_outputs_and_starts_no_more(
    cli: Cli, speller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = iter([signal.SIGINT])  # a second Ctrl-C would raise
    after_tokens(monkeypatch, 3, lambda: [*map(signal.raise_signal, once)])
    endless = ("--max-new-tokens", 100_000, "--ignore-eos", "--temperature", 0)
    outcome = cli("generate", speller, "So ", "-n", 5, "--batch-size", 2, *endless)
    text = greedy_text(speller, "So ", 4)
    assert outcome == Outcome(130, f"=== 1 of 5 ===\n{text}\n=== 2 of 5 ===\n{text}\n", "")


# Speeds


def test_generate_verbose(cli: Cli, speller: Path) -> None:
    quick = ("--max-new-tokens", 20, "--verbose", "--peak-tbs", 0.1, *GREEDY)
    for options, batch in ((["--state-dtype", "float32"], 1), (["-n", 3], 3)):
        code, out, err = cli("generate", speller, "Once", *quick, *options)
        assert (code, out.count("Once")) == (0, batch)
        prompt, generated, moved, memory = err.splitlines()
        assert re.fullmatch(r"prompt +5 tok +[\d,.]+ tok/s", prompt)
        rate = float(re.search(r"([\d,.]+) tok/s", generated)[1].replace(",", "")) / batch
        assert re.search(rf" {20 * batch} tok ", generated)
        bandwidth, share, limit = re.fullmatch(
            r"memory moved +([\d.]+) GB/s, ([\d.]+)% of the bandwidth of ([\d.]+) GB/s", moved
        ).groups()
        want = rate * decode_bytes(read_config(speller), batch, weight_itemsize=4) / 1e9
        assert float(bandwidth) == pytest.approx(want, abs=0.006)
        assert float(share) == pytest.approx(want, abs=0.06)  # of 100 GB/s
        assert limit == "100.0"
        assert re.fullmatch(r"peak memory +[\d.]+ GB", memory)


def test_generate_speculates(cli: Cli, speller: Path) -> None:
    """The same text. The one letter that is allowed repeats itself, so drafts are accepted."""
    options = ("--max-new-tokens", 60, "--ignore-eos", "--repetition-penalty", 0.01, *GREEDY)
    plain = succeeded(cli("generate", speller, "Once", *options))
    lookup = "--speculate", "lookup", "--verbose", "--peak-tbs", 0.1
    code, out, err = cli("generate", speller, "Once", *options, *lookup)
    assert (code, out) == (0, plain)
    drafted, accepted = re.search(
        r"drafted +([\d,]+) tok, of which ([\d,]+) were accepted", err
    ).groups()
    assert 20 < int(accepted) <= int(drafted)
    drafted_by = "--speculate", speller, "--verbose", "--peak-tbs", 0.1
    code, out, err = cli("generate", speller, "Once", *options[:3], *GREEDY, *drafted_by)
    assert (code, out) == (0, succeeded(cli("generate", speller, "Once", *options[:3], *GREEDY)))
    assert "0 GB/s, without what the draft model moves\n" in err
    drafted, accepted = re.search(r"drafted +(\d+) tok, of which (\d+) were", err).groups()
    assert 20 < int(accepted) <= int(drafted)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_draft_model_that_does_not_fit(
    cli: Cli, speller: Path, tmp_path: Path, command: str
) -> None:
    """It is refused before any weights are read."""
    config = json.loads((speller / "config.json").read_text())
    for name, changed in {"wide": {"vocab_size": 384}, "words": {}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **changed}))
    backend = ByteTokenizer().backend()
    backend.add_tokens(["sea"])
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    for name, message in {
        "missing": "there is no draft model: .*missing' is neither a folder nor .*lookup",
        "wide": "wide cannot be the draft model: .* vocabulary of 384 tokens, the model one of 320",
        "words": "words cannot be the draft model: it has another tokenizer .* .{12} and bytes",
    }.items():
        arguments = ["Once"] if command == "generate" else []
        error = refused(cli(command, speller, *arguments, "--speculate", tmp_path / name))
        assert re.search(message, error)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_speculation_of_other_classes(
    cli: Cli, speller: Path, tmp_path: Path, command: str
) -> None:
    config = json.loads((speller / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "block": "previous"}))
    arguments = ["Once"] if command == "generate" else []
    for model, draft, which in ((speller, other, "draft model"), (other, "lookup", "model")):
        error = refused(cli(command, model, *arguments, "--speculate", draft))
        assert error == (
            f"the {which} in {other} has block = 'previous', which --speculate does not support: "
            f"give another {which}, or leave --speculate out"
        )


def test_generate_measures_the_bandwidth_of_memory(cli: Cli, speller: Path) -> None:
    code, _, err = cli("generate", speller, "x", "--max-new-tokens", 1, "--verbose")
    assert code == 0
    assert 0.5 < float(re.search(r"bandwidth of ([\d.]+) GB/s", err)[1]) < 5000


# Pipes


def test_generate_into_a_pipe_that_closes(fox: Path) -> None:
    program = f"{sys.executable} -m xlstm7b generate {fox} --max-new-tokens 100000 --ignore-eos"
    lines = '{"prompt": "a", "max_new_tokens": 8}\n' * 200
    for given, options in (("a", ""), (lines, "--jsonl - --batch-size 1")):
        done = subprocess.run(
            ["bash", "-c", f"{program} {options} | head -c 8; exit ${{PIPESTATUS[0]}}"],
            input=given.encode(),
            capture_output=True,
            env=environment(),
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == ('{"prompt' if options else "aé🦊\né🦊").encode()[:8]


def test_what_stdout_cannot_encode_is_escaped(
    cli: Cli, fox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert cli("generate", fox, "a", "--max-new-tokens", 6) == Outcome(0, "", "")
    assert shown.buffer.getvalue() == b"a\\xe9\\U0001f98a\n"


# Mistakes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--top-p", 0], "top_p must be above 0 and at most 1, not 0.0"),
        (["--top-p", 1.5], "top_p must be above 0 and at most 1, not 1.5"),
        (["--top-k", -1], "top_k must be 0 (all tokens) or a positive number, not -1"),
        (["--temperature", -1], "temperature must be 0 or a positive number, not -1.0"),
        (["--temperature", "nan"], "temperature must be 0 or a positive number, not nan"),
        (["--max-new-tokens", 0], "max_new_tokens must be at least 1, not 0"),
        (["--min-new-tokens", 300], "min_new_tokens (300) must not exceed max_new_tokens (256)"),
        (["--min-p", 2], "min_p must be between 0 and 1, not 2.0"),
        (["--repetition-penalty", 0], "repetition_penalty must be between 0.01 and 100, not 0.0"),
        (["--presence-penalty", "inf"], "presence_penalty must be between -100 and 100, not inf"),
        (["--frequency-penalty", -101], "frequency_penalty must be between -100 and 100, not "),
        (["--stop", ""], "a stop string must not be empty"),
        (["-n", 0], "num_return_sequences must be at least 1, not 0"),
        (["-n", 10**8], "num_return_sequences must be at most 1,000,000, not 100,000,000: "),
        (["--batch-size", 0], "batch_size must be at least 1, not 0"),
        (["--peak-tbs", 0], "peak_tbs must be a positive number of TB/s, not 0.0"),
        (["--state-dtype", "float16"], "unknown dtype 'float16'; choose from float32, bfl"),
        (["--logprobs", 2], "--output, --copy-fields, --token-ids and --logprobs"),
        (["--copy-fields", "x"], "--output, --copy-fields, --token-ids and --logprobs"),
        (["--output", "x"], "--output, --copy-fields, --token-ids and --logprobs"),
        (["--seed", -1], "seed must be between 0 and 2^64 - 1, not -1"),
        (["--dtype", "int4"], "unknown dtype 'int4'; choose from float32, bfloat16, float"),
        (["--device", "cuda:99"], "the device 'cuda:99' cannot be used here: "),
        (["--device", "toaster"], "the device 'toaster' cannot be used here: "),
        (["--device", "meta"], "the device 'meta' cannot be used here: it has no memory"),
    ],
)
def test_options_are_checked_before_the_model_is_looked_for(
    cli: Cli, options: list[object], sentence: str
) -> None:
    got = refused(cli("generate", "/no/such/model", "x", *options))
    assert got.startswith(sentence)


def test_generate_mistakes(cli: Cli, speller: Path, tmp_path: Path) -> None:
    sentence = refused(cli("generate", "7b", "x"))
    assert sentence == "'7b' is neither a folder nor the id of a hub repository"
    folder, _ = save_small(tmp_path)  # a vocabulary of 7
    assert refused(cli("generate", folder, "x")) == (
        f"{folder} has no tokenizer.json, which a vocabulary of 7 needs "
        "(only a vocabulary of 320, bytes, works without a file)"
    )
    missing = tmp_path / "tokenizer.json"
    for given in missing, tmp_path:
        sentence = refused(cli("generate", speller, "x", "--tokenizer", given))
        assert sentence == f"there is no tokenizer at {missing}"
    missing.write_text("{")
    sentence = refused(cli("generate", speller, "x", "--tokenizer", missing))
    assert sentence.startswith(f"{missing} is not a readable tokenizer.json: ")


def test_a_model_whose_logits_are_nan_fails(cli: Cli, speller: Path, tmp_path: Path) -> None:
    model = XLSTM.from_pretrained(speller)
    with torch.no_grad():
        model.lm_head.weight[100, 0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    outcome = cli("generate", tmp_path / "broken", "Once")
    sentence = (
        "the model's logits are not numbers: its weights are damaged, or overflow in this dtype"
    )
    assert outcome == Outcome(1, "", f"xlstm7b: {sentence}\n")
