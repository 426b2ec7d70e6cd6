"""Columns and averages of the Open LLM Leaderboards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.evaluate.leaderboards import (
    BBH,
    GPQA,
    MMLU_PRO,
    MUSR,
    leaderboard_table,
    leaderboards,
)

CHOICES = {task: choices for choices, names in BBH.items() for task in names.split()}
PARTS = {"bbh": CHOICES, "musr": [task for names in MUSR.values() for task in names.split()]}

# The released model's scores on its card, which the paper has too.
CARD = {"BBH": 38.1, "MMLU-Pro": 24.2, "MATH": 3.6, "MuSR": 37.9, "GPQA": 28.0, "IFEval": 24.4}


def v2_results(parts: dict[str, float] | None = None, **scores: float) -> dict[str, Any]:
    """Results of the harness. A task of a group has the group's score, unless `parts` has its own.

    Scores are shares, by the column's name in small letters, with _ for -.
    """
    share = {name.lower().replace("-", "_"): value / 100 for name, value in CARD.items()} | scores
    results = {
        "leaderboard_mmlu_pro": {"acc,none": share["mmlu_pro"]},
        "leaderboard_math_hard": {"exact_match,none": share["math"]},
        "leaderboard_gpqa": {"acc_norm,none": share["gpqa"]},
        "leaderboard_ifeval": {
            "prompt_level_strict_acc,none": share["ifeval"] - 0.05,
            "inst_level_strict_acc,none": share["ifeval"] + 0.05,
        },
    }
    for group, tasks in PARTS.items():
        for task in ("", *(f"_{name}" for name in tasks)):
            results[f"leaderboard_{group}{task}"] = {"acc_norm,none": share[group]}
    for task, value in (parts or {}).items():
        results[f"leaderboard_{task}"] = {"acc_norm,none": value}
    return {"results": results}


def test_choices_are_those_of_the_harness() -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    folder = Path(lm_eval.__file__).parent / "tasks" / "leaderboard"

    def choices(path: str) -> int:
        (found,) = re.findall(r"^doc_to_choice: (\[.*\])$", (folder / path).read_text(), re.M)
        return len(json.loads(found))

    names = {path.stem for path in (folder / "bbh_mc").glob("[a-z]*.yaml")}
    assert {name: choices(f"bbh_mc/{name}.yaml") for name in names} == CHOICES
    assert choices("gpqa/_template_yaml") == GPQA
    parts = re.findall(r"leaderboard_musr_(\w+)$", (folder / "musr/_musr.yaml").read_text(), re.M)
    assert sorted(parts) == sorted(PARTS["musr"])


def test_the_average_of_the_scores_is_the_papers() -> None:
    rows = {row.name: row for row in leaderboards(v2_results())["leaderboard-v2"]}
    for name, score in CARD.items():
        assert rows[name].score == pytest.approx(score)
    assert f"{rows['average'].score / 100:.3f}" == "0.260"
    lines = leaderboard_table("leaderboard-v2", [*rows.values()]).splitlines()
    assert lines[0].split() == ["leaderboard-v2,", "%", "score", "normalised"]
    assert lines[3].split() == ["MATH", "3.60", "3.60"]


def test_v2_scores_are_normalised_as_on_the_board() -> None:
    """The examples of the board's documentation, 0.6 in GPQA and 0.7, 0.4, 0.6 in MuSR's tasks."""
    parts = {"musr_murder_mysteries": 0.7, "musr_object_placements": 0.4}
    parts["musr_team_allocation"] = 0.6
    rows = {
        row.name: row
        for row in leaderboards(v2_results(parts, gpqa=0.6, musr=0.566))["leaderboard-v2"]
    }
    assert rows["GPQA"].normalised == pytest.approx(46.67, abs=0.005)
    assert rows["MuSR"].normalised == pytest.approx((40 + 25 + 40) / 3)
    assert rows["MuSR"].score == pytest.approx(56.6)
    assert rows["MMLU-Pro"].normalised == pytest.approx(100 * (0.242 - 0.1) / 0.9)
    assert rows["MATH"].normalised == rows["MATH"].score
    assert rows["IFEval"].normalised == pytest.approx(24.4)
    columns = [row.normalised for name, row in rows.items() if name != "average"]
    assert rows["average"].normalised == pytest.approx(sum(map(float, columns)) / 6)


@given(share=st.floats(0, 1))
def test_normalised_scores_are_between_0_at_chance_and_100(share: float) -> None:
    results = v2_results(gpqa=share, bbh=share, mmlu_pro=share)
    rows = {row.name: row for row in leaderboards(results)["leaderboard-v2"]}
    for name, choices in (("GPQA", [GPQA]), ("MMLU-Pro", [MMLU_PRO]), ("BBH", CHOICES.values())):
        wanted = [max(0, 100 * (share * count - 1) / (count - 1)) for count in choices]
        assert rows[name].normalised == pytest.approx(sum(wanted) / len(wanted), abs=1e-9)


def v1_results() -> dict[str, Any]:
    results = {
        "arc_challenge": {"acc,none": 0.1, "acc_norm,none": 0.5},
        "hellaswag": {"acc,none": 0.1, "acc_norm,none": 0.6},
        "truthfulqa_mc2": {"acc,none": 0.4},
        "winogrande": {"acc,none": 0.7},
        "openbookqa": {"acc,none": 0.1, "acc_norm,none": 0.3},
        "piqa": {"acc,none": 0.1, "acc_norm,none": 0.8},
        "mmlu": {"acc,none": 0.9},
        "mmlu_stem": {"acc,none": 0.9},
        "mmlu_virology": {"acc,none": 0.2},
        "mmlu_astronomy": {"acc,none": 0.6},
        "mmlu_anatomy": {"acc,none": 0.4},
        "mmlu_pro": {"acc,none": 0.9},  # of another group
    }
    groups = {"mmlu": ["mmlu_stem", "mmlu_virology"]}
    groups["mmlu_stem"] = ["mmlu_astronomy", "mmlu_anatomy"]
    return {"results": results, "group_subtasks": groups}


def test_v1_averages_mmlu_over_its_subjects() -> None:
    rows = leaderboards(v1_results())["leaderboard-v1"]
    scores = {row.name: row.score for row in rows}
    assert scores["MMLU"] == pytest.approx(40)
    assert (scores["OpenBookQA"], scores["PIQA"]) == pytest.approx((30, 80))
    assert scores["average of the board's five"] == pytest.approx((50 + 60 + 40 + 40 + 70) / 5)
    assert scores["average of all"] == pytest.approx((50 + 60 + 40 + 40 + 70 + 30 + 80) / 7)
    lines = leaderboard_table("leaderboard-v1", rows).splitlines()
    assert lines[0].split() == ["leaderboard-v1,", "%", "score"]
    assert lines[-1].split() == ["average", "of", "all", "52.86"]


@pytest.mark.parametrize("make", [v1_results, v2_results])
def test_a_board_is_there_only_if_all_its_tasks_are(make: Any) -> None:
    for task in make()["results"]:
        results = make()
        del results["results"][task]
        found = leaderboards(results)
        assert (found == {}) == (task not in ("mmlu", "mmlu_stem", "mmlu_pro")), task
    assert leaderboards({"results": {}, "group_subtasks": {}}) == {}


def test_a_score_that_is_no_number_costs_the_board_not_the_evaluation() -> None:
    for score in ("N/A", None):
        assert leaderboards(v2_results(gpqa=score)) == {}
