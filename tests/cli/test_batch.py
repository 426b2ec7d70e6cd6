"""`xlstm7b generate --jsonl`: lines in, lines out, and finished lines survive an interruption."""

import fcntl
import json
import re
from pathlib import Path

import pytest
from checkpoint_files import names_in
from commands import Cli, Outcome, refused
from train_processes import full_disk

from xlstm7b.generate import Completion, Generator, Request, SamplingParams
from xlstm7b.generate.request import OutputText
from xlstm7b.report import counted

LINES = [
    {"id": 7, "prompt": "Once upon", "max_new_tokens": 12, "temperature": 0},
    {"prompt": "ä", "seed": 3, "temperature": 2, "note": {"kept": ["as it is", None, 1.5, "ü🦊"]}},
    {"prompt": [67, 68], "max_new_tokens": 5, "logprobs": 2, "seed": 1, "logit_bias": {"67": -9}},
    {"prompt": "", "max_new_tokens": 8, "temperature": 0.0, "eos_token_id": [*range(99, 113)]},
    {
        "prompt": "The",
        "seed": 5,
        "stop_strings": [*"abcdefghijklmn"],
        "min_new_tokens": 0,
        "top_k": 9,
    },
]
DEFAULTS = {"max_new_tokens": 6, "top_p": 0.9, "seed": 11}
OPTIONS = ("--max-new-tokens", 6, "--top-p", 0.9, "--seed", 11)


COPIED = ("--copy-fields", "id,note")


def summary(err: str) -> str:
    """The sentence that closes a run: all that is printed on stderr."""
    (line,) = err.splitlines()
    assert re.fullmatch(
        r"xlstm7b: [\d,]+ lines? completed( \(.*\))?; [\d,]+ prompt tokens?, [\d,]+ generated "
        r"tokens? in [\d.]+ s, [\d,.]+ tok/s",
        line,
    )
    return line


def completed(outcome: Outcome) -> str:
    assert outcome.code == 0
    summary(outcome.err)
    return outcome.out


def as_lines(values: list[dict[str, object]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def from_lines(text: str) -> list[dict[str, object]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def prompt_tokens(completion: Completion) -> int:
    return completion.prompt_tokens


def output_tokens(completion: Completion) -> int:
    return len(completion.token_ids)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(as_lines(LINES))
    return path


@pytest.fixture(scope="module")
def wanted(speller: Path) -> list[Completion]:
    """The completions of the same requests through the library."""
    requests = []
    for line in LINES:
        own = {**line, **({"logit_bias": {67: -9}} if "logit_bias" in line else {})}
        for name in ("id", "note", "prompt"):
            own.pop(name, None)
        params = SamplingParams(**{"temperature": 0.8, **DEFAULTS, **own})
        requests.append(Request(line["prompt"], params))
    return Generator.from_pretrained(speller).run(requests)


def test_a_line_has_its_own_form(cli: Cli, speller: Path, tmp_path: Path) -> None:
    source, schema = tmp_path / "in.jsonl", tmp_path / "schema.json"
    schema.write_text('{"const": "from the option"}')
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "json_schema": {"const": 1}},
        {"prompt": "a", "structured_outputs": {"choice": ["two"]}},
    ]
    source.write_text(as_lines(lines))
    files = ("--jsonl", source, "--json-schema", schema)
    got = from_lines(completed(cli("generate", speller, *files)))
    assert [line["text"] for line in got] == ['"from the option"', "1", "two"]
    assert [line["finish_reason"] for line in got] == ["stop"] * 3


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_jsonl_round_trip(
    cli: Cli, speller: Path, source: Path, wanted: list[Completion], batch_size: int
) -> None:
    target = source.with_name("out.jsonl")
    target.touch()  # as `mktemp` does
    files = ("--jsonl", source, "--output", target, "--batch-size", batch_size, *COPIED)
    code, out, err = cli("generate", speller, *files, *OPTIONS)
    assert (code, out) == (0, "")
    tokens = [sum(map(count, wanted)) for count in (prompt_tokens, output_tokens)]
    ends = [one.finish_reason for one in wanted]
    assert summary(err).startswith(
        f"xlstm7b: 5 lines completed ({ends.count('length')} length, {ends.count('stop')} stop); "
        f"{tokens[0]} prompt tokens, {tokens[1]} generated tokens in "
    )
    got = from_lines(target.read_text())
    for line, given, want in zip(got, LINES, wanted, strict=True):
        outcome = {
            "text": want.text,
            "finish_reason": want.finish_reason,
            "prompt_tokens": want.prompt_tokens,
            "completion_tokens": len(want.token_ids),
        }
        if "logprobs" in given:
            assert want.logprobs == pytest.approx(line["logprobs"], abs=1e-4)
            for tops, line_tops in zip(want.top_logprobs, line["top_logprobs"], strict=True):
                assert tops == pytest.approx({int(k): v for k, v in line_tops.items()}, abs=1e-4)
            outcome |= {name: line[name] for name in ("logprobs", "top_logprobs")}
        assert line == {**given, **outcome}
        assert list(line)[: len(given)] == list(given)
    assert {line["finish_reason"] for line in got} == {"stop", "length"}
    assert "ü🦊" in target.read_text()
    assert names_in(source.parent) == {source.name, target.name}


def test_jsonl_through_pipes(cli: Cli, speller: Path, wanted: list[Completion]) -> None:
    given = "\ufeff" + as_lines(LINES[:2]) + "\n  \n" + as_lines(LINES[2:]).rstrip("\n")
    more = ("--token-ids", "--logprobs", 0, "--ignore-eos", *COPIED)
    out = completed(cli("generate", speller, "--jsonl", "-", *more, *OPTIONS, stdin=given))
    got = from_lines(out)
    assert [line["token_ids"] for line in got] == [want.token_ids for want in wanted]
    assert [len(line["logprobs"]) for line in got] == [len(want.token_ids) for want in wanted]
    assert ["top_logprobs" in line for line in got] == [False, False, True, False, False]
    dashes = ("--jsonl", "-", "--output", "-", "--stop", "x", *COPIED)
    again = completed(cli("generate", speller, *dashes, *OPTIONS, stdin=given))
    assert len(from_lines(again)) == len(LINES)


def test_jsonl_lines_that_do_not_sample(cli: Cli, speller: Path) -> None:
    common = {"prompt": "Once", "max_new_tokens": 9}
    ways = ({"temperature": 0}, {"do_sample": False}, {"do_sample": False})
    given = as_lines([{**common, **way} for way in ways])
    options = ("--jsonl", "-", "--temperature", 3, "--seed", 1)
    texts = [
        line["text"]
        for line in from_lines(completed(cli("generate", speller, *options, stdin=given)))
    ]
    assert len(set(texts)) == 1
    for way in ({"do_sample": True}, {"do_sample": None}, {}):
        [line] = from_lines(
            completed(cli("generate", speller, *options, stdin=as_lines([{**common, **way}])))
        )
        assert line["text"] != texts[0]


def test_jsonl_verbose(cli: Cli, speller: Path, source: Path) -> None:
    code, out, err = cli("generate", speller, "--jsonl", source, "--verbose", *COPIED)
    tokens = sum(line["completion_tokens"] for line in from_lines(out))
    closing, memory = err.splitlines()
    assert code == 0
    assert f" {tokens:,} generated tokens in " in summary(closing)
    assert memory.startswith("peak memory ")
    lookup = "--speculate", "lookup"
    code, _, err = cli("generate", speller, "--jsonl", source, "--verbose", *COPIED, *lookup)
    assert code == 0
    assert re.fullmatch(r"drafted +[\d,]+ tok, of which [\d,]+ were accepted", err.splitlines()[-1])


def test_a_line_may_do_without_drafts(cli: Cli, speller: Path) -> None:
    """The model drafts for itself, so all drafts are right."""
    line = {"prompt": "Once", "max_new_tokens": 20, "temperature": 0, "eos_token_id": []}
    run = ("generate", speller, "--jsonl", "-", "--verbose", "--speculate", speller)
    texts, drafted = set(), []
    for own in ({}, {"speculate": True}, {"speculate": None}, {"speculate": False}):
        code, out, err = cli(*run, stdin=as_lines([line | own]))
        assert code == 0
        (done,) = from_lines(out)
        assert {**done, **line, **own} == done
        texts.add(done["text"])
        drafted.append(int(err.splitlines()[-1].split()[1]))
    assert len(texts) == 1
    assert drafted[0] == drafted[1] == drafted[2] > 0
    assert drafted[3] == 0


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", 'a line must be a JSON object such as {"prompt": "…"}'),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        (b'{"text": "x"}', '"prompt" is missing'),
        (b'{"prompt": "\xff"}', "'utf-8' codec can't decode"),
        (
            b'{"prompt": "\\ud800"}',
            "'prompt' is not valid Unicode: it has half of a surrogate pair",
        ),
        (b'{"prompt": "x", "id": "\\ud800"}', "'id' is not valid Unicode: it has half of a"),
        (b'{"\\ud800": 1}', r"'\ud800' is not valid Unicode: it has half of a"),
        (b'{"prompt": "x", "id": 1e400}', "'id' has a number that is NaN or too large for a float"),
        (b'{"prompt": "x", "id": [{"a": NaN}]}', "'id' has a number that is NaN or too large"),
        (b'{"prompt": 3}', "the prompt must be a string or a list of ids"),
        (b'{"prompt": [true]}', "the prompt must be a string or a list of ids"),
        (b'{"prompt": [3, 320]}', "token 320 is outside the vocabulary of 320"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature must be a number, not 'hot'"),
        (b'{"prompt": "x", "temperature": true}', "temperature must be a number, not True"),
        (b'{"prompt": "x", "temperature": null}', "temperature must be a number, not None"),
        (b'{"prompt": "x", "temperature": -1}', "temperature must be 0 or a positive number"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature must be 0 or a positive number"),
        (
            b'{"prompt": "x", "min_p": 1' + b"0" * 400 + b"}",
            "min_p must be within the range of a float, not 1000",
        ),
        (b'{"prompt": "x", "top_k": 1.5}', "top_k must be a whole number, not 1.5"),
        (b'{"prompt": "x", "max_new_tokens": 0}', "max_new_tokens must be at least 1, not 0"),
        (b'{"prompt": "x", "logprobs": 21}', "logprobs must be between 0 and 20, not 21"),
        (b'{"prompt": "x", "logit_bias": 3}', "logit_bias must be numbers by token id, not 3"),
        (
            b'{"prompt": "x", "logit_bias": {"a": 3}}',
            "logit_bias must be numbers by token id, not ",
        ),
        (b'{"prompt": "x", "logit_bias": {"320": 3}}', "token 320 of logit_bias is outside"),
        (b'{"prompt": "x", "eos_token_id": "0"}', "eos_token_id must be an id or a list of ids"),
        (b'{"prompt": "x", "eos_token_id": [999]}', "eos_token_id 999 is outside the vocabulary"),
        (b'{"prompt": "x", "stop_strings": [""]}', "a stop string must not be empty"),
        (b'{"prompt": "x", "json_schema": 5}', "structured_outputs.json must be a JSON schema"),
        (
            b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
            "structured_outputs.regex has an invalid regex: unclosed group",
        ),
        (b'{"prompt": "x", "do_sample": 0}', "do_sample must be true or false, not 0"),
        (b'{"prompt": "x", "speculate": "false"}', 'speculate must be true or false, not "false"'),
        (
            b'{"prompt": "x", "do_sample": false, "temperature": 1}',
            "do_sample=False contradicts temperature 1",
        ),
        (
            b'{"prompt": "x", "num_return_sequences": 3}',
            "a line has one output: repeat the line instead",
        ),
        (b'{"prompt": "x", "text": "mine"}', "'text' is a field of the result: rename it"),
        (b'{"prompt": "x", "top_logprobs": 1}', "'top_logprobs' is a field of the result"),
        (
            b'{"prompt": "x", "id": 1, "max_tokens": 3}',
            "'max_tokens' is not a sampling parameter; if it should be copied to the output, name "
            "it in --copy-fields",
        ),
        (
            b'{"prompt": "x", "stop_strings": 3}',
            "stop_strings must be a string or a list of strings",
        ),
    ],
)
def test_jsonl_malformed_lines(
    cli: Cli, speller: Path, source: Path, line: bytes, sentence: str
) -> None:
    source.write_bytes(b'{"prompt": "x"}\n\n' + line + b'\n{"prompt": "y"}\n')
    target = source.with_name("out")
    got = refused(cli("generate", speller, "--jsonl", source, "--output", target))
    assert got.startswith(f"{source}, line 3: {sentence}")
    assert names_in(source.parent) == {source.name}


@pytest.mark.usefixtures("no_weights")
def test_jsonl_mistakes(cli: Cli, speller: Path, source: Path, tmp_path: Path) -> None:
    lines = ("generate", speller, "--jsonl", source, *COPIED)
    for options, name in (
        (["x"], "a prompt argument"),
        (["-"], "a prompt argument"),
        (["--file", source], "--file"),
        (["-n", 2], "-n"),
        (["--load-state", source], "--load-state"),
        (["--save-state", tmp_path / "s"], "--save-state"),
    ):
        want = f"--jsonl cannot be combined with {name}"
        assert refused(cli(*lines, *options, stdin="x")) == want
    want = f"cannot write {tmp_path / 'no/out'}: there is no folder {tmp_path / 'no'}"
    assert refused(cli(*lines, "--output", tmp_path / "no" / "out")) == want
    want = "cannot write /dev/null: it exists and is not a regular file"
    assert refused(cli(*lines, "--output", "/dev/null")) == want
    want = f"--output {source} is the input of --jsonl: choose another file"
    assert refused(cli(*lines, "--output", source)) == want
    (tmp_path / "old").write_text("precious")
    want = f"{tmp_path / 'old'} exists already: choose another file"
    assert refused(cli(*lines, "--output", tmp_path / "old")) == want
    assert (tmp_path / "old").read_text() == "precious"
    partial = tmp_path / "out.partial"
    partial.write_text("precious")
    want = f"{partial} holds the results of another input, model or sampling options: repeat its "
    want += "command to continue it, or move the file away"
    assert refused(cli(*lines, "--output", tmp_path / "out")) == want
    assert partial.read_text() == "precious"
    with partial.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        want = f"another run is writing {partial}"
        assert refused(cli(*lines, "--output", tmp_path / "out")) == want
    assert refused(cli("generate", speller, "--jsonl", "-", stdin="\n")) == "stdin holds no prompts"
    assert refused(cli("generate", speller, "--jsonl", tmp_path / "none")) == (
        f"there is no file {tmp_path / 'none'}; --jsonl takes a JSONL file, or - for stdin"
    )
    assert refused(cli(*lines, "--temperature", -1)).startswith("temperature must be 0 or")


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Raises the error at the `call`-th token of all outputs together."""
    push, calls = OutputText.push, 0

    def failing(output: OutputText, *given: object) -> str:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return push(output, *given)

    monkeypatch.setattr(OutputText, "push", failing)


def test_jsonl_keeps_what_was_finished(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, partial = (tmp_path / name for name in ("in", "out", "out.partial"))
    lengths = (6, 3, 7, 2)  # two at a time: line 1 is finished first, then 0, then 3, then 2
    jobs = [{"prompt": "x", "id": n, "max_new_tokens": most} for n, most in enumerate(lengths)]
    source.write_text(as_lines(jobs))
    run = ("generate", speller, "--jsonl", source, "--batch-size", 2, "--ignore-eos", "--seed", 0)
    everything = from_lines(completed(cli(*run)))

    for call, error, code, finished in (
        (4, KeyboardInterrupt(), 130, []),
        (9, KeyboardInterrupt(), 130, [1]),
        (9, RuntimeError("out of memory"), None, [1]),
        (9, ValueError("a mistake"), 2, [1]),
        (17, KeyboardInterrupt(), 130, [1, 0, 3]),
    ):
        with monkeypatch.context() as patch:
            fail_at(patch, call, error)
            if code is None:
                with pytest.raises(RuntimeError):
                    cli(*run, "--output", target)
            else:
                outcome = cli(*run, "--output", target)
                kept = f"{partial} holds {len(finished)} of 4 lines; the "
                kept += "same command continues"
                assert (outcome.code, outcome.out) == (code, "")
                assert outcome.err.splitlines()[:1] == ([f"xlstm7b: {kept}"] if finished else [])
        assert not target.exists()
        assert partial.exists() == bool(finished)
        if finished:
            _, *kept = from_lines(partial.read_text())
            assert kept == [[n, everything[n]] for n in finished]
            # The same command continues, even if a kill has cut the last line, and no other.
            partial.write_text(partial.read_text() + '[2, {"prompt": "x", "id"')
            before, other = partial.read_text(), refused(cli(*run, "--seed", 1, "--output", target))
            assert other.startswith(f"{partial} holds the results of another input, model or ")
            assert (partial.read_text(), target.exists()) == (before, False)
            outcome = cli(*run, "--output", target)
            there = f"which holds {len(finished)} of 4 lines"
            continuing, closing = outcome.err.splitlines()
            assert (outcome.code, outcome.out) == (0, "")
            assert continuing == f"xlstm7b: continuing {partial}, {there}"
            assert f"{counted(4 - len(finished), 'line')} completed" in closing
            assert f", {len(finished)} there already; " in closing
            assert from_lines(target.read_text()) == everything
            target.unlink()
        assert names_in(tmp_path) == {"in"}
    with monkeypatch.context() as patch:
        fail_at(patch, 17, KeyboardInterrupt())
        outcome = cli(*run)
    assert outcome == Outcome(130, outcome.out, "")
    assert from_lines(outcome.out) == [everything[n] for n in (0, 1, 3)]


def test_a_run_that_was_killed_between_its_two_last_steps_continues(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there, and the partial file not yet removed."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(as_lines([{"prompt": "x", "id": n} for n in range(2)]))
    run = ("generate", speller, "--jsonl", source, "--output", target, "--seed", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        assert cli(*run).code == 0
    done = target.read_text()
    assert names_in(tmp_path) == {"in", "out", "out.partial"}
    assert "0 lines completed, 2 there already" in cli(*run).err
    assert target.read_text() == done
    assert names_in(tmp_path) == {"in", "out"}


def test_a_full_disk_names_the_file_and_keeps_what_was_finished(
    cli: Cli, speller: Path, tmp_path: Path
) -> None:
    source, target, partial = (tmp_path / name for name in ("in", "out", "out.partial"))
    source.write_text(as_lines([{"prompt": "x" * 500, "id": n} for n in range(4)]))
    run = ("generate", speller, "--jsonl", source, "--output", target, "--max-new-tokens", 1)
    run = (*run, "--batch-size", 1, "--seed", 0)
    with full_disk(1500):
        outcome = cli(*run)
    kept, error = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert kept.startswith(f"xlstm7b: {partial} holds 2 of 4 lines")
    assert re.fullmatch(rf"xlstm7b: {partial} could not be written \(.*File too large\)", error)
    assert names_in(tmp_path) == {"in", "out.partial"}
    assert cli(*run).code == 0
    assert [line["id"] for line in from_lines(target.read_text())] == [0, 1, 2, 3]
    assert names_in(tmp_path) == {"in", "out"}
