"""Columns and averages of the Open LLM Leaderboards, from results in the harness's layout.

The v2 board shows normalised scores: chance becomes 0, all right 100, and less than chance is 0
too. The paper prints the scores themselves, and their mean; both are given here.
https://huggingface.co/docs/leaderboards/open_llm_leaderboard/normalization
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from xlstm7b.report import table

# The number of answers to choose from in each task of the v2 groups. In MMLU-Pro it is at most 10.
_BBH = {
    "boolean_expressions": 2,
    "causal_judgement": 2,
    "date_understanding": 6,
    "disambiguation_qa": 3,
    "formal_fallacies": 2,
    "geometric_shapes": 11,
    "hyperbaton": 2,
    "logical_deduction_five_objects": 5,
    "logical_deduction_seven_objects": 7,
    "logical_deduction_three_objects": 3,
    "movie_recommendation": 6,
    "navigate": 2,
    "object_counting": 19,
    "penguins_in_a_table": 5,
    "reasoning_about_colored_objects": 18,
    "ruin_names": 6,
    "salient_translation_error_detection": 6,
    "snarks": 2,
    "sports_understanding": 2,
    "temporal_sequences": 4,
    "tracking_shuffled_objects_five_objects": 5,
    "tracking_shuffled_objects_seven_objects": 7,
    "tracking_shuffled_objects_three_objects": 3,
    "web_of_lies": 2,
}
_MUSR = {"murder_mysteries": 2, "object_placements": 5, "team_allocation": 3}
_GPQA, _MMLU_PRO = 4, 10
_V1_BOARD = ("ARC", "HellaSwag", "TruthfulQA", "MMLU", "Winogrande")


class Row(NamedTuple):
    """A column of a board, or an average, in percent."""

    name: str
    score: float
    normalised: float | None = None


def leaderboards(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The boards whose tasks all have a score in the harness's results, by our preset's name."""
    found = {}
    for name, rows in (("leaderboard-v2", _v2), ("leaderboard-v1", _v1)):
        try:
            found[name] = rows(results)
        except (KeyError, TypeError):  # a task was not run, or the harness wrote "N/A" for it
            continue
    return found


def leaderboard_table(name: str, rows: Sequence[Row]) -> str:
    if rows[0].normalised is None:
        return table([f"{name}, %", "score"], [[row.name, f"{row.score:.2f}"] for row in rows])
    cells = [[row.name, f"{row.score:.2f}", f"{row.normalised:.2f}"] for row in rows]
    return table([f"{name}, %", "score", "normalised"], cells)


def _v2(results: Mapping[str, Any]) -> list[Row]:
    scores = results["results"]

    def of_group(title: str, group: str, choices: Mapping[str, int]) -> Row:
        parts = [
            _above_chance(scores[f"{group}_{task}"]["acc_norm,none"], count)
            for task, count in choices.items()
        ]
        return Row(title, 100 * scores[group]["acc_norm,none"], fmean(parts))

    def of_task(title: str, score: float, choices: int) -> Row:
        return Row(title, 100 * score, _above_chance(score, choices))

    ifeval = scores["leaderboard_ifeval"]
    strict = [ifeval[f"{level}_level_strict_acc,none"] for level in ("prompt", "inst")]
    math = scores["leaderboard_math_hard"]["exact_match,none"]
    rows = [
        of_group("BBH", "leaderboard_bbh", _BBH),
        of_task("MMLU-Pro", scores["leaderboard_mmlu_pro"]["acc,none"], _MMLU_PRO),
        Row("MATH", 100 * math, 100 * math),  # generated answers: chance is 0
        of_group("MuSR", "leaderboard_musr", _MUSR),
        of_task("GPQA", scores["leaderboard_gpqa"]["acc_norm,none"], _GPQA),
        Row("IFEval", 100 * fmean(strict), 100 * fmean(strict)),
    ]
    normalised = [row.normalised for row in rows if row.normalised is not None]
    return [*rows, Row("average", fmean(row.score for row in rows), fmean(normalised))]


def _above_chance(score: float, choices: int) -> float:
    chance = 1 / choices
    return 100 * max(0.0, score - chance) / (1 - chance)


def _v1(results: Mapping[str, Any]) -> list[Row]:
    scores = results["results"]
    # lighteval, which the paper used, averages MMLU over its subjects. The harness's own row
    # "mmlu" is the mean over all questions.
    subjects = [scores[task]["acc,none"] for task in _tasks_of("mmlu", results["group_subtasks"])]
    shares = {
        "ARC": scores["arc_challenge"]["acc_norm,none"],
        "HellaSwag": scores["hellaswag"]["acc_norm,none"],
        "TruthfulQA": scores["truthfulqa_mc2"]["acc,none"],
        "MMLU": fmean(subjects),
        "Winogrande": scores["winogrande"]["acc,none"],
        "OpenBookQA": scores["openbookqa"]["acc_norm,none"],
        "PIQA": scores["piqa"]["acc_norm,none"],
    }
    board = fmean(shares[name] for name in _V1_BOARD)
    return [
        *(Row(name, 100 * share) for name, share in shares.items()),
        Row("average of the board's five", 100 * board),
        Row("average of all", 100 * fmean(shares.values())),
    ]


def _tasks_of(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group and of the groups in it."""
    inner = subtasks.get(name, [])
    return [task for part in inner for task in _tasks_of(part, subtasks)] if inner else [name]
