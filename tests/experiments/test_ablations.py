"""experiments/ablations.py: its recipes, runs that stop, diverge and continue, and mistakes."""

import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from commands import refused
from hypothesis import given
from hypothesis import strategies as st

from ablations import ABLATIONS, app
from variants import SMOKE, over_previous, recipe_of, record_speed
from xlstm7b.bench.results import Results, read_rows
from xlstm7b.train import Trainer, make_plan
from xlstm7b.train.metrics_log import read_metrics


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    """The results by variant and name."""
    found: dict[str, dict[str, Any]] = {}
    for row in read_rows(folder / "results.jsonl"):
        variant = found.setdefault(row["shape"]["variant"], {})
        assert row["what"] not in variant
        variant[row["what"]] = row
    return found


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_variant_has_a_recipe_that_fits_on_one_gpu(name: str) -> None:
    ablation = ABLATIONS[name]
    seen = set()
    for variant, settings in {**ablation.variants, **ablation.timed}.items():
        options: Any = {"name": variant, "data": Path("books"), "changes": []}
        options["timed"] = variant in ablation.timed
        recipe = recipe_of("160m", ablation.settings, settings, **options)
        recipe_of("quickstart", SMOKE, settings, ablation.smoke, **options)
        assert make_plan(recipe, gpus=1).memory["total"] < 130e9  # one H200 has 150 GB
        assert recipe.run.steps <= 300
        assert recipe.run.steps % (recipe.run.validate_every or 1) == 0
        seen.add(json.dumps(recipe.to_dict() | {"name": ""}))
    assert len(seen) == len(ablation.variants) + len(ablation.timed)


def test_smoke_records_what_was_trained_and_then_only_draws(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = (app, "schedule", "--smoke", "--output", out, "--variants", "cosine,exponential")
    code, printed, err = script(*command)
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith("variant")] == [
        "variant exponential",
        "variant cosine",
    ]
    for variant, found in figures(out).items():
        lines = read_metrics(out / variant / "metrics.jsonl")
        losses = [line["loss"] for line in lines]
        expected = {
            "training loss": [fmean(losses[: step + 1]) for step in range(6)],
            "learning rate": [line["learning_rate"] for line in lines],
            "validation curve": [lines[step]["validation_loss"] for step in (2, 5)],
        }
        for what, values in expected.items():
            assert found[what]["y"] == pytest.approx(values, rel=1e-4)
        assert found["validation curve"]["x"] == [2, 5]
        last = expected["validation curve"][-1]
        assert found["validation loss"]["value"] == pytest.approx(last, rel=1e-4)
        norms = [line["gradient_norm"] for line in lines[2:]]  # the warm-up has 2 steps
        assert found["highest gradient norm"]["value"] == pytest.approx(max(norms), rel=1e-4)
        high = sum(norm > 2 for norm in norms)
        assert found["steps with a gradient norm over 2"]["value"] == high
        assert found["training loss"]["shape"]["batch"] == "4 × 32"
        assert "gradient norm" not in found  # the figure does not show it
        assert not (out / variant / "checkpoints").exists()
    header, first, second, last = printed.splitlines()[-4:]
    assert header.split()[:4] == ["variant", "highest", "gradient", "norm"]
    assert [first.split()[0], second.split()[0]] == ["exponential", "cosine"]
    assert last == f"wrote {out / 'schedule.png'}"
    (out / "schedule.png").unlink()
    before = (out / "results.jsonl").read_bytes()
    assert script(*command).out.splitlines()[-4:] == printed.splitlines()[-4:]
    assert (out / "schedule.png").stat().st_size > 10_000
    assert (out / "results.jsonl").read_bytes() == before


def test_a_stopped_run_continues_and_ends_as_one_that_was_not(script: Any, tmp_path: Path) -> None:
    def command(folder: str, *more: object) -> tuple[object, ...]:
        return (
            app,
            "soft-cap",
            "--smoke",
            "--variants",
            "neither",
            "--output",
            tmp_path / folder,
            *more,
        )

    assert script(*command("whole")).code == 0
    for step in (1, 2):  # the time limit has passed after the first step of each call
        code, printed, _ = script(*command("out", "--set", "run.time_limit=1e-9"))
        assert code == 0
        assert f"stopped at step {step}; the same command continues" in printed
    assert figures(tmp_path / "out") == {}
    assert script(*command("out")).code == 0
    whole, out = (figures(tmp_path / name)["neither"] for name in ("whole", "out"))
    assert {what: (row.get("value"), row.get("y")) for what, row in out.items()} == {
        what: (row.get("value"), row.get("y")) for what, row in whole.items()
    }
    assert len({row["call"] for row in out.values()}) == 1


def test_models_that_diverge_or_do_not_fit_are_recorded(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[str, Exception] = {
        "rms-norm": FloatingPointError("loss nan and gradient norm nan at step 2"),
        "layer-norm": torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
    }

    update = Trainer.update

    def fail(trainer: Trainer) -> Any:
        if trainer.step < 2:
            return update(trainer)
        raise errors[trainer.folder.name]

    monkeypatch.setattr(Trainer, "update", fail)
    command = (app, "pre-norm", "--smoke", "--output", tmp_path / "out")
    assert script(*command).code == 1
    found = figures(tmp_path / "out")
    said = {name: row["validation loss"]["error"] for name, row in found.items()}
    assert said["rms-norm"].startswith("diverged: loss nan and gradient norm nan at step 2; ")
    assert said["layer-norm"] == "out of memory: CUDA out of memory."
    assert found["rms-norm"]["training loss"]["x"] == [0, 1]  # the curve ends where it diverged
    monkeypatch.setattr(Trainer, "__init__", None)  # they are not tried again
    assert script(*command).code == 1


def test_a_last_loss_that_is_not_finite_is_no_result(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(path: Path) -> list[dict[str, Any]]:
        return [line | {"loss": None} for line in read_metrics(path)]

    monkeypatch.setattr("variants.read_metrics", spoiled)
    command = (app, "pre-norm", "--smoke", "--output", tmp_path, "--variants", "rms-norm")
    assert script(*command).code == 1
    found = figures(tmp_path)["rms-norm"]["validation loss"]
    assert found["error"] == "diverged: the loss of the last step is not finite"


def test_steps_are_timed_without_validation_and_checkpoints(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (app, "head-dimension", "--smoke", "--variants", "heads-8", "--output", tmp_path)
    assert script(*command).code == 0
    assert figures(tmp_path) == {}  # a CPU's speed depends on whatever else it does
    assert not (tmp_path / "heads-8").exists()
    update = Trainer.measured_update

    def on_gpu(trainer: Trainer) -> Any:
        updated, line = update(trainer)
        return updated, line | {"peak_memory_gb": 1.0, "seconds": 0.5}

    monkeypatch.setattr(Trainer, "measured_update", on_gpu)
    assert script(*command).code == 0
    assert figures(tmp_path)["heads-8"]["step time"]["value"] == 500


def test_speeds_are_medians_without_the_first_steps(tmp_path: Path) -> None:
    """The time of a step is the measured one: tokens per second leave padding out."""
    results = Results("ablations", "cpu", file=tmp_path / "results.jsonl")
    seconds = [9.0, 8.0, 0.1, 0.2, 0.4]
    lines = [
        {"applied": True, "seconds": each, "tokens_per_second": 7.0, "peak_memory_gb": 3.0}
        for each in seconds
    ]
    record_speed(results, {"variant": "a"}, lines)
    found = figures(tmp_path)["a"]
    assert found["step time"]["value"] == 1000 * median(seconds[2:])
    assert found["training speed"]["value"] == 7
    assert found["peak memory"]["value"] == 3


@given(st.lists(st.none() | st.floats(-1e3, 1e3), max_size=120))
def test_curves_are_over_the_previous_steps_only(values: list[float | None]) -> None:
    means, maxima = over_previous(values, fmean), over_previous(values, max)
    assert len(means) == len(maxima) == len(values)
    for step in range(len(values)):
        recent = [x for x in values[max(0, step - 49) : step + 1] if x is not None]
        if recent:
            assert means[step] == pytest.approx(math.fsum(recent) / len(recent))
            assert maxima[step] == max(recent)
        else:
            assert means[step] is maxima[step] is None


def test_other_settings_and_other_experiments_need_another_folder(
    script: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = (app, "pre-norm", "--smoke", "--variants", "rms-norm", "--output", out)
    assert script(*command, "--steps", 3).code == 0
    before = sorted(out.rglob("*"))
    for option, message in (
        ([], "run.steps 3, not 6"),
        (["--steps", 3, "--set", "optimizer.lr=0.1"], "optimizer.lr 0.005, not 0.1"),
        (["--steps", 3, "--set", "run.seed=1"], "run.seed 0, not 1"),
    ):
        assert refused(script(*command, *option)) == (
            f"the run in {out / 'rms-norm'} has {message}: choose another --output"
        )
    other = script(app, "soft-cap", "--smoke", "--output", out)
    assert refused(other) == f"{out} holds the experiment pre-norm: choose another --output"
    assert sorted(out.rglob("*")) == before


def test_lists_experiments_and_variants(script: Any) -> None:
    code, printed, _ = script(app, "--list")
    assert code == 0
    assert [line.split()[0] for line in printed.splitlines()[1:]] == [*ABLATIONS]
    code, printed, _ = script(app, "input-gate-bias", "--list")
    assert code == 0
    assert "model.igate_bias_init_range=-10.0" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment; choose from previous-vs-new, "),
        (["nowhere"], "unknown experiment 'nowhere'; choose from previous-vs-new, "),
        (["nowhere", "--list"], "unknown experiment 'nowhere'; choose from previous-vs-new, "),
        (["schedule", "--variants", "cosine,line"], "there is no variant 'line'; choose from expo"),
        (["schedule"], "--data is missing: a folder with the prepared folders train and valid"),
        (["schedule", "--data", "."], ". does not hold the prepared folders train and valid"),
        (["schedule", "--smoke", "--data", "."], "--smoke makes its own data: leave out --data"),
        (["schedule", "--smoke", "--device", "tpu"], "the device must be cuda or cpu, not 'tpu'"),
        (["schedule", "--smoke", "--steps", "0"], "recipe quickstart: run.steps must "),
        (["schedule", "--smoke", "--set", "run.stp=1"], "recipe quickstart: unknown setting "),
        (["schedule", "--smoke", "--output", ""], "--output is empty: give a path"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    arguments: list[str],
    message: str,
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(script(app, *arguments)).startswith(message)
    assert not any(tmp_path.iterdir())
