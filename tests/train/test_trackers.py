"""Trackers: every step arrives once, whatever fails, and training does not notice."""

import json
import re
import sqlite3
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_processes import in_processes, run
from train_runs import losses, recipe, weights

from xlstm7b.train import TrackedRun, Tracker, Trainer, trackers
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.recipe import Recipe

Numbers = dict[str, dict[int, float]]  # by name and step


class Recorder(Tracker):
    """Keeps what it gets, as a service would: also over several starts."""

    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []
        self.ids: list[str | None] = []
        self.got: list[tuple[int, dict[str, float]]] = []
        self.finished: list[bool] = []
        self.threads: set[str] = set()

    def start(self, run: TrackedRun) -> int:
        self.runs.append(run)
        self.ids.append(self.id)
        self.id = self.id or f"id-{len(self.runs)}"
        return self.got[-1][0] + 1 if self.got else 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.got.append((step, dict(metrics)))
        self.threads.add(threading.current_thread().name)

    def finish(self, *, failed: bool) -> None:
        self.finished.append(failed)

    @property
    def numbers(self) -> Numbers:
        found: Numbers = {}
        for step, metrics in self.got:
            for name, value in metrics.items():
                found.setdefault(name, {})[step] = value
        return found


def of_file(folder: Path) -> Numbers:
    """The numbers of metrics.jsonl as trackers get them."""
    found: Numbers = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        step = line.pop("step")
        for name, value in line.items():
            parts = (
                {f"{name}/{at}": part for at, part in enumerate(value)}
                if isinstance(value, list)
                else {name: value}
            )
            for tag, part in parts.items():
                if part is not None:
                    found.setdefault(tag, {})[step] = float(part)
    return found


def crash(trainer: Trainer, step: int) -> None:
    """Trains until an error after this step has been logged."""

    def fail(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise RuntimeError("a crash")

    with pytest.raises(RuntimeError, match="a crash"):
        trainer.train(fail)


def crashed_and_continued(data: Path, folder: Path, *settings: str) -> tuple[list[float], Numbers]:
    """A run with a crash after step 5 that continues from step 3 with another learning rate.

    Returns the losses before the crash, and the numbers of metrics.jsonl at the end.
    """
    given = "run.validate_every=3", "run.keep_best=false", *settings
    crash(Trainer(recipe(data, *given, "run.save_every=3"), folder, "cpu"), 4)
    before = losses(folder)
    Trainer(recipe(data, *given, "optimizer.lr=0.001"), folder, "cpu").train()
    found = of_file(folder)
    assert list(found["loss"]) == list(range(8))
    assert before[:4] == [found["loss"][step] for step in range(4)]
    assert before[4] != found["loss"][4]
    return before, found


def expected_of_first(before: list[float], found: Numbers) -> dict[int, float]:
    """The losses of a tracker that keeps the first number of each step."""
    return found["loss"] | dict(enumerate(before))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, to import a package and to make a database may take a while."""
    monkeypatch.setattr(trackers, "_LAST_SECONDS", 600.0)


# The run and its tracker


def test_a_tracker_gets_every_number_and_the_recipe(data, tmp_path):
    tracker, chosen = Recorder(), recipe(data)
    Trainer(chosen, tmp_path / "mine", "cpu", trackers=[tracker]).train()
    assert tracker.numbers == of_file(tmp_path / "mine")
    assert {"validation_loss", "validation_loss_by_position/7", "forget_gate_min/1"} <= set(
        tracker.numbers
    )
    [opened] = tracker.runs
    assert (opened.name, opened.folder) == ("mine", tmp_path / "mine")
    assert (opened.step, opened.logged) == (0, 0)
    assert Recipe.from_dict(opened.settings) == chosen
    assert tracker.finished == [False]
    [thread] = tracker.threads
    assert thread != threading.main_thread().name


def test_a_continued_run_continues_in_its_trackers(data, tmp_path):
    tracker = Recorder()

    def train(*settings: str) -> None:
        Trainer(recipe(data, *settings), tmp_path, "cpu", trackers=[tracker]).train()

    crash(Trainer(recipe(data, "run.save_every=0"), tmp_path, "cpu", trackers=[tracker]), 1)
    assert tracker.finished == [True]
    del tracker.got[:]
    train("run.steps=4")  # there was no checkpoint: another run
    train("run.steps=6")
    crash(Trainer(recipe(data), tmp_path, "cpu", trackers=[tracker]), 7)
    train("run.steps=9")
    assert tracker.ids == [None, None, "id-2", "id-2", "id-2"]
    assert [(opened.step, opened.logged) for opened in tracker.runs] == [
        (0, 0),
        (0, 0),
        (4, 4),
        (6, 6),
        (6, 8),
    ]
    assert [step for step, _ in tracker.got] == list(range(9))


def test_steps_that_a_tracker_missed_arrive_with_the_next_start(data, tmp_path, capsys):
    class Broken(Recorder):
        is_up = False

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2 and not self.is_up:
                raise OSError("no network\nat all")
            super().log(step, metrics)

    tracker = Broken()
    Trainer(recipe(data, "run.steps=6"), tmp_path, "cpu", trackers=[tracker]).train()
    assert [step for step, _ in tracker.got] == [0, 1]
    said = capsys.readouterr().err
    assert said.count("it lacks steps") == 1
    assert "Broken failed (OSError: no network): it lacks steps that metrics.jsonl has" in said
    tracker.is_up = True
    late = Recorder()
    Trainer(recipe(data), tmp_path, "cpu", trackers=[tracker, late]).train()
    assert tracker.numbers == of_file(tmp_path) == late.numbers


class Fails(Tracker):
    def __init__(self, where: str) -> None:
        self.where = where

    def start(self, run):
        return self._do("start") or 0

    def log(self, step, metrics):
        self._do("log")

    def finish(self, *, failed):
        self._do("finish")

    def _do(self, where: str) -> None:
        if self.where == where:
            raise SystemExit("lost")


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_failing_tracker_changes_nothing(data, tmp_path, capsys, where):
    chosen = recipe(data, "run.steps=4", "run.save_every=0", "run.validate_every=0")
    Trainer(chosen, tmp_path / "plain", "cpu").train()
    Trainer(chosen, tmp_path / "tracked", "cpu", trackers=[Fails(where)]).train()
    assert capsys.readouterr().err.count("Fails failed (SystemExit: lost)") == 1
    once, other = (weights(tmp_path / name, chosen) for name in ("plain", "tracked"))
    assert all(torch.equal(once[name], other[name]) for name in once)


@pytest.mark.parametrize(
    ("most", "words"), [(3, "is 3 steps behind"), (100, "has not finished in 0 s")]
)
def test_a_tracker_that_hangs_is_given_up(data, tmp_path, capsys, monkeypatch, most, words):
    monkeypatch.setattr(trackers, "_MOST_WAITING", most)
    monkeypatch.setattr(trackers, "_LAST_SECONDS", 0.05)
    free = threading.Event()

    class Hangs(Recorder):
        def start(self, run: TrackedRun) -> int:
            free.wait(60)
            return 0

    trainer = Trainer(recipe(data, "run.validate_every=0"), tmp_path, "cpu", trackers=[Hangs()])
    trainer.train()
    free.set()
    said = capsys.readouterr().err
    assert f"Hangs {words}: it lacks steps" in said
    assert said.count("it lacks steps") == 1
    assert trainer.step == 8


def test_only_the_first_process_has_trackers(data, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from xlstm7b.train import Tracker\n"
        "class Lines(Tracker):\n"
        "    def __init__(self):\n"
        "        self.file = Path(__file__).with_name('rank-' + os.environ['RANK'])\n"
        "        self.file.touch()\n"
        "    def log(self, step, metrics):\n"
        "        with self.file.open('a') as file:\n"
        "            print(step, metrics['loss'], file=file)\n"
    )
    chosen = recipe(data, f'run.trackers=["{file}:Lines"]')
    in_processes(2, run, chosen, tmp_path / "run")
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"]
    lines = [line.split() for line in (tmp_path / "rank-0").read_text().splitlines()]
    assert [float(loss) for _, loss in lines] == losses(tmp_path / "run")
    assert [int(step) for step, _ in lines] == list(range(8))


def test_the_tracker_of_the_docs(data, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n# my_tracker.py\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("my_tracker.py").write_text(code, encoding="utf-8")
    chosen = 'run.trackers=["my_tracker.py:Database"]'
    _, found = crashed_and_continued(data, tmp_path / "mine", chosen)
    with closing(sqlite3.connect("losses.db")) as database:
        rows = database.execute("select run, step, loss from losses order by step").fetchall()
    assert rows == [("mine", step, loss) for step, loss in found["loss"].items()]


# TensorBoard


def events(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_tensorboard_shows_what_metrics_jsonl_has(data, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    _, found = crashed_and_continued(data, tmp_path, 'run.trackers=["tensorboard"]')
    board = events(tmp_path)
    got = {
        tag: {event.step: event.value for event in board.Scalars(tag)}
        for tag in board.Tags()["scalars"]
    }
    assert all(len(board.Scalars(tag)) == len(found[tag]) for tag in found)
    assert got == {
        tag: {step: float(torch.tensor(value)) for step, value in values.items()}
        for tag, values in found.items()
    }
    settings = [event.tensor_proto.string_val[0] for event in board.Tensors("recipe/text_summary")]
    assert b'"lr": 0.001' in settings[-1]


# Weights & Biases


@pytest.fixture
def wandb(tmp_path, monkeypatch) -> Iterator[Any]:
    """W&B offline, with nothing of this machine's settings."""
    found = pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("exit", "excepthook"):  # W&B replaces them for good
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    found.teardown()  # it reads its settings once
    yield found
    found.teardown()


def offline_records(folder: Path) -> list[list[Any]]:
    """The records of each start. A file is a log in LevelDB's format, with W&B's own header."""
    from wandb.proto.wandb_internal_pb2 import Record

    starts = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, parts, records = file.read_bytes(), 7, b"", []
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:  # the rest of a block is padding
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
            parts += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or its last part
                records.append(Record.FromString(parts))
                parts = b""
        starts.append(records)
    return starts


def history(records: list[Any]) -> list[dict[str, float]]:
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]


def test_wandb_offline_has_each_step_once(wandb, data, tmp_path):
    before, found = crashed_and_continued(data, tmp_path, 'run.trackers=["wandb"]')
    starts = offline_records(tmp_path)
    assert len(starts) == 2
    lines = [line for records in starts for line in history(records)]
    assert [line["_step"] for line in lines] == list(range(8))
    assert {line["_step"]: line["loss"] for line in lines} == expected_of_first(before, found)
    assert {line["_step"] for line in lines if "validation_loss" in line} == {2, 5}
    assert lines[5]["validation_loss_by_position/7"] == found["validation_loss_by_position/7"][5]
    opened = [record.run for records in starts for record in records if record.HasField("run")]
    ids = json.loads((tmp_path / "trackers.json").read_text())["ids"]
    assert {each.run_id for each in opened} == {ids["wandb"]}
    assert opened[0].display_name == tmp_path.name
    settings = {item.key: json.loads(item.value_json) for item in opened[0].config.update}
    assert settings["optimizer"]["lr"] == 0.005
    codes = [
        record.exit.exit_code for records in starts for record in records if record.HasField("exit")
    ]
    assert codes == [1, 0]


def test_wandb_online_gets_only_steps_that_it_does_not_have(wandb, monkeypatch):
    """W&B says which step comes next: fewer than were logged, if some never arrived."""
    logged, asked = [], []

    def init(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(
            id="abc", offline=False, starting_step=5 if options["id"] else 0, log=logged.append
        )

    monkeypatch.setattr(wandb, "init", init)
    tracker = trackers.WeightsAndBiases()
    opened = TrackedRun("mine", Path("runs/mine"), {"a": 1}, step=4, logged=7)
    assert tracker.start(opened) == 0
    assert tracker.id == "abc"
    assert tracker.start(opened) == 5
    assert [(each["id"], each["name"], each["resume"]) for each in asked] == [
        (None, "mine", "allow"),
        ("abc", None, "allow"),
    ]


def test_wandb_without_a_key_is_an_error_before_training(wandb, data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    with pytest.raises(ValueError, match=r"tracker wandb cannot log in \(.*WANDB_MODE=offline$"):
        Trainer(recipe(data, 'run.trackers=["wandb"]'), tmp_path / "run", "cpu")
    assert not (tmp_path / "run").exists()


# MLflow


def test_mlflow_in_a_local_database_has_each_step_once(data, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy, for MLflow's database, is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    before, found = crashed_and_continued(data, tmp_path / "run", 'run.trackers=["mlflow"]')
    client = mlflow.MlflowClient()
    [saved] = client.search_runs(["0"])
    ids = json.loads((tmp_path / "run/trackers.json").read_text())["ids"]
    assert ids == {"mlflow": saved.info.run_id}
    assert (saved.info.run_name, saved.info.status) == ("run", "FINISHED")
    assert saved.data.params["optimizer.lr"] == "0.005"
    got = {
        name: [(each.step, each.value) for each in client.get_metric_history(ids["mlflow"], name)]
        for name in ("loss", "validation_loss", "forget_gate_min/1")
    }
    assert sorted(got["loss"]) == sorted(expected_of_first(before, found).items())
    assert [step for step, _ in sorted(got["validation_loss"])] == [2, 5]
    assert sorted(got["forget_gate_min/1"])[-1] == (7, found["forget_gate_min/1"][7])


# Errors


def test_a_missing_package_is_named_before_training(data, tmp_path, monkeypatch):
    for name, module, extra in (
        ("tensorboard", "torch.utils.tensorboard", "train"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        words = rf"needs a package \(.*{module}.*\): pip install 'xlstm7b\[{extra}\]'$"
        with pytest.raises(ValueError, match=words):
            Trainer(recipe(data, f'run.trackers=["{name}"]'), tmp_path / "run", "cpu")
    assert not (tmp_path / "run").exists()


def test_what_is_no_tracker_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=r"trackers\[0\] is the class Recorder, not an instance"):
        Trainer(recipe(data), tmp_path, "cpu", trackers=[Recorder])
    with pytest.raises(ValueError, match=r"a run can have one tracker .*:Recorder, not two"):
        Trainer(recipe(data), tmp_path, "cpu", trackers=[Recorder(), Recorder()])
    with pytest.raises(ValueError, match="tracker json:Tracker cannot be loaded: json has no clas"):
        Trainer(recipe(data, 'run.trackers=["json:Tracker"]'), tmp_path, "cpu")


def test_a_damaged_record_is_named(data, tmp_path):
    Trainer(recipe(data, "run.steps=4"), tmp_path, "cpu", trackers=[Recorder()]).train()
    (tmp_path / "trackers.json").write_text("[]")
    with pytest.raises(ValueError, match=r"trackers\.json is damaged .*: remove it, and the track"):
        Trainer(recipe(data), tmp_path, "cpu", trackers=[Recorder()]).train()
