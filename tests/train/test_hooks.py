"""Hooks and training from Python: what hooks see and change, and what happens if they fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_processes
from commands import environment
from train_processes import fails_in_one_process, in_processes, run
from train_runs import losses, recipe, weights

import xlstm7b
from xlstm7b.train import Hook, HookError, Trainer, export_run, trainer
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.processes import process_group, run_folder
from xlstm7b.train.run_checkpoints import read_run, saved_steps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ```python blocks of the page on training, as files."""
    folder = tmp_path_factory.mktemp("files")
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n# (\S+)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["train_mine.py", "my_hooks.py"]
    for name, text in blocks:
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> Path:
    """A run without hooks."""
    folder = tmp_path_factory.mktemp("plain")
    run(0, recipe(data), folder)
    return folder


class Meddler(Hook):
    """Runs the model forward and backward, and returns numbers."""

    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_step(self, trainer, metrics):
        assert metrics["step"] == trainer.step - 1
        with pytest.raises(TypeError):
            metrics["loss"] = 0.0
        tokens = torch.arange(12).view(2, 6)
        with torch.no_grad():
            trainer.model(tokens)
        trainer.model.token_logprobs(tokens, tokens)[0].sum().backward()
        return {"seen": [trainer.step, True], "half_loss": metrics["loss"] / 2}

    def on_validation(self, trainer, metrics):
        self.validated.append(trainer.step)
        assert len(metrics["validation_loss_by_position"]) == 8
        return {"twice": 2 * metrics["validation_loss"]}


class SameLoss(Hook):
    def loss(self, model, batch):
        return super().loss(model, batch)


class Logprobs(Hook):
    """The model's own loss, computed in another way."""

    def loss(self, model, batch):
        assert batch.weights.dtype == torch.float32
        found, _ = model.token_logprobs(batch.tokens, batch.targets, resets=batch.resets)
        return -(found * batch.weights).sum()


def test_hooks_see_every_step_and_change_no_weight(plain, data, tmp_path):
    hook = Meddler()
    Trainer(recipe(data), tmp_path, "cpu", hooks=[hook, SameLoss()]).train()
    assert hook.validated == [4, 8]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    for line in lines:
        assert line["seen"] == [line["step"] + 1, True]
        assert line["half_loss"] == line["loss"] / 2
        assert ("twice" in line) == ("validation_loss" in line) == (line["step"] in (3, 7))
    assert losses(tmp_path) == losses(plain)
    once, other = weights(plain, recipe(data)), weights(tmp_path, recipe(data))
    assert all(torch.equal(once[name], other[name]) for name in once)
    recorded = read_run(tmp_path / "checkpoints/step-00000008")["hooks"]
    assert [(hook["name"].rpartition(":")[2], hook["loss"]) for hook in recorded] == [
        ("Meddler", False),
        ("SameLoss", True),
    ]
    assert read_run(plain / "checkpoints/step-00000008")["hooks"] == []


def test_a_loss_from_logprobs_trains_as_the_models_own(plain, data, tmp_path):
    chosen = recipe(data, "batch.micro_batch=2", "run.save_every=0")
    Trainer(chosen, tmp_path, "cpu", hooks=[Logprobs()]).train()
    assert losses(tmp_path) == pytest.approx(losses(plain), abs=2e-6)


@pytest.fixture(scope="module")
def z_loss(data, files, tmp_path_factory) -> Path:
    """A run with the loss of the docs, in one process."""
    folder = tmp_path_factory.mktemp("z-loss")
    run(0, recipe(data, f'run.hooks=["{files}/my_hooks.py:ZLoss"]'), folder)
    return folder


def test_the_loss_of_the_docs_has_its_formula(z_loss, plain, data):
    with process_group("cpu"):
        new = Trainer(recipe(data), z_loss / "new", "cpu")
        batch = next(new.loader)
        with torch.no_grad():
            logits, _ = new.model(batch.tokens, resets=batch.resets)
        new.loader.close()
    extra = 1e-4 * logits.double().logsumexp(-1).square().mean()
    assert losses(z_loss)[0] - losses(plain)[0] == pytest.approx(float(extra), abs=2e-6)
    assert losses(z_loss)[-1] < losses(z_loss)[0] - 1
    valid = [read_metrics(run / "metrics.jsonl")[3]["validation_loss"] for run in (z_loss, plain)]
    assert valid[0] == pytest.approx(valid[1], abs=0.05)  # not of the custom loss


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["batch.micro_batch=2", "run.activation_checkpointing=block"]),
        (2, ["batch.micro_batch=2"]),
        (2, ["parallel.tp=2"]),
        (2, ["parallel.dp_shard=1", "parallel.dp_replicate=2"]),
    ],
)
def test_a_custom_loss_is_the_same_on_every_layout(z_loss, data, files, tmp_path, world, settings):
    hooks = f'run.hooks=["{files}/my_hooks.py:ZLoss"]'
    chosen = recipe(data, *settings, hooks, "run.save_every=0")
    if world == 1:
        run(0, chosen, tmp_path)
    else:
        in_processes(world, run, chosen, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(z_loss), abs=2e-6)
    once, other = weights(z_loss, chosen), weights(tmp_path, chosen)
    assert max(float((once[name] - other[name]).abs().max()) for name in once) < 1e-5


def test_a_loss_may_call_the_model_several_times(plain, data, tmp_path):
    hooks = f'run.hooks=["{train_processes.__file__}:TwoCalls"]'
    in_processes(2, run, recipe(data, hooks, "run.save_every=0"), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(plain), abs=2e-6)


def test_a_hook_can_stop_the_run(data, files, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "validation_loss", lambda *_: {"validation_loss": 5.0})
    hooks = f'run.hooks=["{files}/my_hooks.py:StopEarly"]'
    Trainer(recipe(data, "run.validate_every=1", hooks), tmp_path, "cpu").train()
    counts = [line["validations_since_best"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert counts == [0, 1, 2, 3, 4]  # it ends with the step after the call of stop
    assert saved_steps(tmp_path / "checkpoints")[-1] == 5


# Failures


class Fails(Hook):
    def on_step(self, trainer, metrics):
        if trainer.step == 5:
            raise KeyError("lost")


class Exits(Hook):
    def on_step(self, trainer, metrics):
        sys.exit()


class FailsInLoss(Hook):
    def loss(self, model, batch):
        raise RuntimeError("many\nlines")


class Answers(Hook):
    """Returns what a test wants from `on_validation` or `loss`."""

    def __init__(self, metrics=None, loss=None) -> None:
        self.metrics, self.find = metrics, loss

    def on_validation(self, trainer, metrics):
        return self.metrics

    def loss(self, model, batch):
        return self.find(model, batch) if self.find else super().loss(model, batch)


def test_a_failing_hook_is_named_and_damages_no_checkpoint(plain, data, tmp_path):
    sentence = r"hook \S+:Fails failed in on_step at step 5: KeyError: 'lost'; the last good "
    with pytest.raises(HookError, match=sentence + "checkpoint is of step 4") as raised:
        Trainer(recipe(data), tmp_path, "cpu", hooks=[Fails()]).train()
    assert isinstance(raised.value.__cause__, KeyError)
    assert saved_steps(tmp_path / "checkpoints") == [3, 4]
    assert not list((tmp_path / "checkpoints").glob("writing-*"))
    assert len(losses(tmp_path)) == 4
    Trainer(recipe(data), tmp_path, "cpu").train()
    assert losses(tmp_path) == losses(plain)
    once, other = weights(plain, recipe(data)), weights(tmp_path, recipe(data))
    assert all(torch.equal(once[name], other[name]) for name in once)


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        (
            FailsInLoss(),
            "FailsInLoss failed in loss at step 1: RuntimeError: many; no check",
        ),
        (Answers(loss=lambda *_: sys.exit(3)), "Answers failed in loss at step 1: SystemExit: 3;"),
        (Exits(), "Exits failed in on_step at step 1: SystemExit; no checkpoint is saved"),
        (Answers(5), "Answers failed in on_validation at step 4: TypeError: it must return a dict"),
        (Answers({"loss": 1.0}), "ValueError: it returned 'loss', which is not a new name"),
        (
            Answers({"norm": torch.tensor(1)}),
            r"it returned norm = tensor\(1\), not a number or a list of numbers",
        ),
        (Answers(loss=lambda *_: 1.0), r"a float tensor of shape \[\], not 1\.0"),
        (
            Answers(loss=lambda model, batch: model(batch.tokens)[0]),
            r"a float tensor of shape \[\], not torch\.float32 \[4, 32, 320\]",
        ),
        (Answers(loss=lambda *_: torch.tensor(1.0)), "it returned a number without a gradient"),
        (
            Answers(loss=lambda model, batch: model.lm_head.weight.square().sum()),
            "a DTensor, because it used the model's parameters, which are DTensors; call the model",
        ),
    ],
)
def test_what_a_hook_may_not_do(data, tmp_path, hook, sentence):
    with pytest.raises(HookError, match=sentence) as raised:
        Trainer(recipe(data), tmp_path, "cpu", hooks=[hook]).train()
    assert "\n" not in str(raised.value)


def test_a_failure_in_one_process_ends_all(data, tmp_path):
    in_processes(2, fails_in_one_process, recipe(data), tmp_path)


@pytest.mark.parametrize(
    ("hooks", "sentence"),
    [
        ("nowhere.py:A", "hook nowhere.py:A cannot be loaded: ValueError: there is no file /"),
        ("no_such_package.b:A", "cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
        ("json:Hook", "hook json:Hook cannot be loaded: json has no class or function Hook$"),
        ("json:__all__", "json:__all__ cannot be loaded: json has no class or function __all__$"),
        ("json:loads", "json:loads cannot be loaded: TypeError: loads"),
        (
            "json:JSONDecoder",
            r"hook json:JSONDecoder is of type JSONDecoder, not an instance of a subclass of xl",
        ),
        ("{files}/bad.py:A", "bad.py:A cannot be loaded: SyntaxError: "),
        ("{files}/exits.py:A", "exits.py:A cannot be loaded: SystemExit$"),
        ("sys:exit", "hook sys:exit cannot be loaded: SystemExit$"),
    ],
)
def test_hooks_that_cannot_be_loaded_are_named(data, files, tmp_path, hooks, sentence):
    (files / "bad.py").write_text("class A(:\n", encoding="utf-8")
    (files / "exits.py").write_text("import sys\nsys.exit()\n", encoding="utf-8")
    chosen = recipe(data, f'run.hooks=["{hooks.format(files=files)}"]')
    with pytest.raises(ValueError, match=sentence):
        Trainer(chosen, tmp_path / "run", "cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_has_one_custom_loss(data, tmp_path):
    with pytest.raises(
        ValueError, match=r"one custom loss, but \S+:SameLoss and \S+:Logprobs each"
    ):
        Trainer(recipe(data), tmp_path, "cpu", hooks=[SameLoss(), Fails(), Logprobs()])
    with pytest.raises(
        ValueError, match=r"hooks\[1\] is the class Fails, not an instance of a sub"
    ):
        Trainer(recipe(data), tmp_path, "cpu", hooks=[SameLoss(), Fails])


def test_a_changed_loss_is_pointed_out_when_a_run_continues(data, tmp_path, capsys):
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(
        "from xlstm7b.train import Hook\n"
        "class A(Hook):\n"
        "    def loss(self, model, batch):\n"
        "        return super().loss(model, batch)\n"
        "class Watch(Hook):\n"
        "    def on_step(self, trainer, metrics):\n"
        "        pass\n"
    )

    def go_on(steps: int, *names: str) -> str:
        hooks = ", ".join(f'"{file}:{name}"' for name in names)
        Trainer(recipe(data, f"run.steps={steps}", f"run.hooks=[{hooks}]"), folder, "cpu").train()
        return capsys.readouterr().err

    assert go_on(4) == ""
    at = f"{folder}, from step "
    named = f"that of hook {file}:A"
    assert go_on(5, "A") == f"{at}4 on: the loss was the model's own, and is now {named}\n"
    assert go_on(6, "Watch", "A") == ""
    file.write_text(file.read_text() + "# a remark\n")
    changed = f"the file of hook {file}:A, which computes the loss, has changed"
    assert go_on(7, "A") == f"{at}6 on: {changed}\n"
    assert go_on(8, "Watch") == f"{at}7 on: the loss was {named}, and is now the model's own\n"


# From Python


def test_a_trainer_needs_no_process_group_and_continues_its_run(
    plain, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lines: list[dict] = []
    Trainer(recipe(data, "run.time_limit=1e-9"), device="cpu").train(lines.append)
    folder = Path("runs/quickstart")
    assert (saved_steps(folder / "checkpoints"), len(lines)) == ([1], 1)
    record = (folder / "recipe.json").read_bytes()
    ended = xlstm7b.Trainer(recipe(data), device="cpu")
    ended.train()
    assert losses(folder) == losses(plain)
    assert (folder / "recipe.json").read_bytes() == record
    with pytest.raises(ValueError, match="this trainer has ended: make a new one to continue"):
        ended.train()
    assert capsys.readouterr().err == ""
    Trainer(recipe(data), device="cpu").train()
    assert capsys.readouterr().err == f"{folder}: already finished, nothing trained (step 8)\n"
    changed = recipe(data, "optimizer.lr=0.001", "run.steps=9")
    Trainer(changed, device="cpu").train()
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"{folder} was trained with optimizer.lr 0.005; this recipe has 0.001"
    with pytest.raises(ValueError, match=r"was started with model\.num_blocks 2, not 1"):
        Trainer(recipe(data, "model.num_blocks=1", "run.steps=9"), device="cpu").train()
    with pytest.raises(ValueError, match=r"was started with batch\.sequences 8, not 4: choose"):
        Trainer(recipe(data, "batch.sequences=4", "run.steps=9"), device="cpu").train()
    with pytest.raises(ValueError, match="the device must be cuda or cpu, not 'tpu'"):
        Trainer(recipe(data), device="tpu")
    export_run(folder, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_only_one_trainer_trains_in_a_folder(data, tmp_path):
    code = (
        "import sys; from pathlib import Path; from xlstm7b.files import lock_folder\n"
        "with lock_folder(Path(sys.argv[1]), 'training in'): print('locked', flush=True), input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    with other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="another process is training in"):
            Trainer(recipe(data), tmp_path, "cpu").train()
        other.communicate(b"\n")
    assert list(tmp_path.iterdir()) == []
    with process_group("cpu"), run_folder(tmp_path):  # as the command line does
        Trainer(recipe(data, "run.steps=4"), tmp_path, "cpu").train()
    assert saved_steps(tmp_path / "checkpoints")[-1] == 4


def test_the_script_of_the_docs(data, files, tmp_path):
    """With the data, the steps and the batches of this test."""
    (tmp_path / "runs").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "runs" / "quickstart-data").mkdir(exist_ok=True)
        (tmp_path / "runs" / "quickstart-data" / name).symlink_to(data)
    given = ["run.steps=4", "schedule.warmup=1", "schedule.cooldown=1", "batch.sequences=4"]
    given += ["batch.micro_batch=4", "data.validation_sequences=4"]
    script = (files / "train_mine.py").read_text()
    (tmp_path / "train_mine.py").write_text(script.replace("run.steps=100", '", "'.join(given)))
    done = subprocess.run(
        [sys.executable, "train_mine.py"],
        cwd=tmp_path,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3", "4"]
    assert (tmp_path / "mine" / "config.json").is_file()
