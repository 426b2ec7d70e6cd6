"""Names of run folders, settings that change, and a learning rate that rises again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_runs import recipe

from xlstm7b.train.recipe import Recipe
from xlstm7b.train.run_settings import (
    changed_settings,
    check_continues,
    default_folder,
    raised_rate,
)
from xlstm7b.train.schedule import Decay


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "160m"),
        (["optimizer.lr=1e-3"], "160m-optimizer.lr=0.001"),
        (["schedule.warmup=5", "optimizer.lr=0.001"], "160m-optimizer.lr=0.001,schedule.warmup=5"),
        (["optimizer.betas=[0.9, 0.95]"], "160m-optimizer.betas=0.9,0.95"),
        (["model.size=a", "data.sources.b.weight=2"], "160m-data.sources.b.weight=2,model.size=a"),
        (["run.steps=9", "run.seed=1", "parallel.tp=2", "batch.micro_batch=4"], "160m"),
        (
            [
                "init_from=models/a",
                "data.validation=b",
                "data.verify=true",
                "data.sources.a.path=c/d",
            ],
            "160m",
        ),
        (["data.sources={a={path='c'}}", "data.validation={x='y'}", "parallel={tp=2}"], "160m"),
    ],
)
def test_the_default_folder_names_the_settings_that_make_another_run(overrides, name):
    assert default_folder("160m", overrides) == Path("runs") / name


def test_long_names_become_a_hash():
    given = [f"model.{'x' * 60}={value}" for value in (1, 2)]
    names = [default_folder("a", [text, f"model.{'y' * 60}=1"]).name for text in given]
    assert [len(name) for name in names] == [14, 14]
    assert names[0] != names[1]


def test_changed_settings_are_listed_with_both_values(data):
    before = recipe(data)
    assert changed_settings(before, before) == {}
    assert changed_settings(before, Recipe.from_dict(before.to_dict())) == {}
    now = recipe(data, "optimizer.lr=1e-4", "data.sources.more={path='x'}", "run.steps=9")
    assert changed_settings(before, replace(now, name="other")) == {
        "data.sources.more.path": (None, "x"),
        "data.sources.more.weight": (None, 1.0),
        "optimizer.lr": (before.optimizer.lr, 1e-4),
        "run.steps": (8, 9),
    }


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("model.num_heads=4", "model.num_heads 2, not 4"),
        ("data.packing=best-fit", "data.packing 'documents', not 'best-fit'"),
        ("batch.ramp=[[0, 4], [2, 8]]", "batch.ramp (), not ((0, 4), (2, 8))"),
        ("lora={rank=2}", "no [lora]"),
        ("state_tuning={rank=2}", "no [state_tuning]"),
        ("optimizer.lr=1", ""),
        ("run.steps=9", ""),
        ("parallel.tp=2", ""),
        ("data.sources.noise.path=elsewhere", ""),
    ],
)
def test_what_a_run_may_not_change(data, setting, reason):
    common = "init_from=base", "data.packing=documents"
    before, now = recipe(data, *common), recipe(data, *common, setting)
    if not reason:
        check_continues(Path("runs/a"), before, now)
        return
    with pytest.raises(ValueError, match=re.escape(f"runs/a was started with {reason}: choose")):
        check_continues(Path("runs/a"), before, now)


@given(
    kind=st.sampled_from(["exponential", "cosine", "linear", "constant"]),
    warmup=st.integers(0, 5),
    cooldown=st.integers(0, 5),
    steps=st.integers(10, 30),
    more=st.integers(0, 30),
    stopped=st.integers(1, 30),
)
def test_a_rate_rises_again_only_if_steps_are_extended(
    kind: Decay, warmup: int, cooldown: int, steps: int, more: int, stopped: int
) -> None:
    table = {"kind": kind, "warmup": warmup, "cooldown": cooldown}
    settings = [f"schedule.{name}={value}" for name, value in table.items()]
    before = recipe(Path("data"), *settings, f"run.steps={steps}")
    now = recipe(Path("data"), *settings, f"run.steps={steps + more}")
    step = min(stopped, steps)
    found = raised_rate(before, now, step)
    last, following = before.learning_rate(step - 1), now.learning_rate(step)
    if not more or step <= warmup:
        assert found is None
    else:
        assert found == ((last, following) if following > last else None)
