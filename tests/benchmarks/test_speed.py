"""benchmarks/speed.py: every figure of tiny models, limits, and what is recorded."""

import json
import math
import sys
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

import speed
from peers import PEERS, Llama3
from speed import LIMITS, Plan, TransformerLimit, app, fastest_batch
from xlstm7b.bench.measure import Timing
from xlstm7b.cli import main
from xlstm7b.config import SIZES

TINY = (
    *("--size", "tiny", "--device", "cpu", "--weights", "float32", "--seconds", "0.001"),
    *("--contexts", "0,20", "--prompts", "12", "--first", "3", "--generated", "4"),
    *("--tokens", "32", "--lengths", "32,16", "--full-contexts", "20,40", "--batches", "1,2"),
)
NEEDS = {"xlstm": "xlstm", "rwkv7": "fla"}


@pytest.fixture(autouse=True)
def _fewer_blocks(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 2})
    yield
    torch.set_grad_enabled(True)


def run(file, *arguments):
    outcome = CliRunner().invoke(app, [*arguments, *TINY, "--json", str(file), "--call", "a"])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return outcome, rows


@pytest.mark.long
@pytest.mark.parametrize("system", ["xlstm7b", *PEERS])
def test_every_figure_is_measured(system, tmp_path):
    if system != "xlstm7b":
        pytest.importorskip("transformers")
    if system in NEEDS and find_spec(NEEDS[system]) is None:
        pytest.skip(f"{NEEDS[system]} is not installed")
    outcome, rows = run(tmp_path / "a.jsonl", system, "--here")
    assert outcome.exit_code == 0, outcome.output
    found = [(row["what"], row["shape"].get("context", "")) for row in rows]
    assert found == [
        *(("decode", 0), ("peak memory", 0), ("decode", 20), ("peak memory", 20)),
        *(("first token", ""), ("3 tokens", ""), ("generation time", ""), ("peak memory", "")),
        *(("prefill", ""), ("prefill", ""), ("full GPU", 20), ("full GPU", 40)),
    ]
    for row in rows:
        assert row["value"] > 0
        assert row["unit"] == {"decode": "tok/s", "peak memory": "GB"}.get(row["what"], row["unit"])
        if row["what"] in ("decode", "full GPU"):
            assert 0 < row["value"] < row["limit"]
            assert row["shape"]["batch"] in (1, 2)


def test_limits_of_a_transformer():
    """Llama 3.1 8B on an H200, which has 139 GiB and reads 4.27 TB/s."""
    memory = 139 * 2**30
    wide, narrow = (TransformerLimit(4.27e12, itemsize) for itemsize in (2, 1))

    def full(limit, context):
        return limit.decode(context, limit.largest_batch(context, memory)) / 1000

    assert [round(wide.decode(context)) for context in (0, 131072)] == [284, 133]
    assert [round(full(wide, 2048), 1), round(full(wide, 131072), 2)] == [14.2, 0.22]
    assert [round(full(narrow, 2048), 1), round(full(narrow, 131072), 2)] == [30.1, 0.47]


def test_the_limit_counts_what_the_model_has():
    pytest.importorskip("transformers")
    peer, limit = Llama3("7b", "meta"), TransformerLimit(1e12)
    assert limit.memory(0) == sum(each.nbytes for each in peer.model.parameters())
    for batch, context in ((1, 0), (1, 1000), (7, 4096)):
        seconds = peer.step_bytes(batch, context) / 1e12
        assert batch / limit.decode(context, batch) == pytest.approx(seconds, rel=1e-9)


def test_what_the_file_has_is_not_measured_again(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    _, rows = run(file, LIMITS, "--here")
    assert {row["system"] for row in rows} == {"limit of Llama 3.1 8B"}
    assert len(rows) == 2 * (2 * 2 + 2)

    def start(*given):
        raise RuntimeError("measured again")

    monkeypatch.setattr(speed, "_start", start)
    assert run(file, LIMITS, "--here")[1] == rows
    file.write_text(file.read_text().split("\n", 1)[1])
    outcome, again = run(file, LIMITS, "--here")
    assert again[-1]["error"] == "RuntimeError: measured again"
    assert outcome.exit_code == 1


@pytest.mark.long
def test_a_process_for_each_system(tmp_path):
    """A peer that cannot be built is a failed line; the next system is measured."""
    if find_spec("fla") is not None:
        pytest.skip("fla is installed")
    outcome, rows = run(tmp_path / "a.jsonl", "rwkv7", LIMITS, "--figures", "context")
    assert outcome.exit_code == 1
    assert [row["error"] for row in rows[:4]] == ["ModuleNotFoundError: No module named 'fla'"] * 4
    assert [row["system"] for row in rows[4:]] == ["limit of Llama 3.1 8B"] * 8
    assert "benchmarks/speed.py limits --figures context" in rows[-1]["command"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no system 'nosuch'"),
        (["--figures", "nosuch"], "there is no figure 'nosuch'"),
        (["--weights", "int3"], "there is no dtype of weights 'int3'"),
        (["--contexts", "a"], "--contexts takes numbers of at least 0, such as 1,8,64, not 'a'"),
        (["--contexts", "-1"], "--contexts takes numbers of at least 0"),
        (["--full-contexts", "0"], "--full-contexts takes numbers of at least 1"),
        (["--lengths", "3"], "prompts of 3 do not divide 65536 tokens"),
        (["--size", "nosuch"], "nosuch"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--json", "nosuch/a.jsonl"], "there is no folder"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speed.py", LIMITS, *arguments])
    if arguments == ["nosuch"]:
        monkeypatch.setattr(sys, "argv", ["speed.py", "nosuch"])
    with pytest.raises(SystemExit) as end:
        main(app)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def plan(**changes):
    sizes = dict.fromkeys(("contexts", "prompts", "generated", "lengths", "full_contexts"), (8,))
    values = {"size": "tiny", "device": "cpu", "weights": "bfloat16", "states": "float32"}
    more = {"figures": ("full",), "first": 1, "tokens": 8, "batches": (), "seconds": 1.0}
    return Plan(**values | sizes | more | changes)


def test_the_largest_batch_shrinks_until_it_fits(monkeypatch):
    monkeypatch.setattr(speed, "free_memory", lambda device: 1000)
    tried = []

    def step(batch):
        tried.append(batch)
        if batch > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Timing(1.0, 0.0)

    assert fastest_batch(10, step, plan())[0] == 59
    assert tried == [90, 78, 68, 59]
    with pytest.raises(torch.OutOfMemoryError):
        fastest_batch(10**6, step, plan())


def test_the_fastest_of_several_batches():
    batch, step = fastest_batch(
        1, lambda batch: Timing(math.sqrt(batch), 0.0), plan(batches=(4, 9))
    )
    assert (batch, step.seconds) == (9, 3.0)
    times = {4: 0.5, 9: 3.0}
    assert fastest_batch(1, lambda n: Timing(times[n], 0.0), plan(batches=(9, 4)))[0] == 4
