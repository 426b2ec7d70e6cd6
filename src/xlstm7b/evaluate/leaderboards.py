"""Columns and averages of the Open LLM Leaderboards, from results in the harness's layout.

The v2 board shows normalised scores: chance becomes 0, all right 100, and less than chance is 0
too. The paper prints the scores themselves, and their mean; both are given here.
https://huggingface.co/docs/leaderboards/open_llm_leaderboard/normalization
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from xlstm7b.report import table

# Tasks of the v2 groups, by the number of answers to choose from. In MMLU-Pro it is at most 10.
BBH = {
    2: "boolean_expressions causal_judgement formal_fallacies hyperbaton navigate snarks "
    "sports_understanding web_of_lies",
    3: "disambiguation_qa logical_deduction_three_objects tracking_shuffled_objects_three_objects",
    4: "temporal_sequences",
    5: "logical_deduction_five_objects penguins_in_a_table tracking_shuffled_objects_five_objects",
    6: "date_understanding movie_recommendation ruin_names salient_translation_error_detection",
    7: "logical_deduction_seven_objects tracking_shuffled_objects_seven_objects",
    11: "geometric_shapes",
    18: "reasoning_about_colored_objects",
    19: "object_counting",
}
MUSR = {2: "murder_mysteries", 3: "team_allocation", 5: "object_placements"}
GPQA, MMLU_PRO = 4, 10
_GENERATED = float("inf")  # an answer that is generated: chance is 0
_BOARD_V1 = 5  # the first tasks of the preset were on the board


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
    cells = [
        [row.name, *(f"{share:.2f}" for share in row[1:] if share is not None)] for row in rows
    ]
    return table([f"{name}, %", "score", "normalised"][: len(cells[0])], cells)


def _v2(results: Mapping[str, Any]) -> list[Row]:
    scores = results["results"]

    def row(name: str, score: float, choices: float) -> Row:
        return Row(name, 100 * score, _above_chance(score, choices))

    def group(name: str, group: str, tasks: Mapping[int, str]) -> Row:
        parts = [
            _above_chance(scores[f"{group}_{task}"]["acc_norm,none"], choices)
            for choices, names in tasks.items()
            for task in names.split()
        ]
        return Row(name, 100 * scores[group]["acc_norm,none"], fmean(parts))

    ifeval = scores["leaderboard_ifeval"]
    strict = fmean(ifeval[f"{level}_level_strict_acc,none"] for level in ("prompt", "inst"))
    rows = [
        group("BBH", "leaderboard_bbh", BBH),
        row("MMLU-Pro", scores["leaderboard_mmlu_pro"]["acc,none"], MMLU_PRO),
        row("MATH", scores["leaderboard_math_hard"]["exact_match,none"], _GENERATED),
        group("MuSR", "leaderboard_musr", MUSR),
        row("GPQA", scores["leaderboard_gpqa"]["acc_norm,none"], GPQA),
        row("IFEval", strict, _GENERATED),
    ]
    normalised = [row.normalised or 0.0 for row in rows]
    return [*rows, Row("average", fmean(row.score for row in rows), fmean(normalised))]


def _above_chance(score: float, choices: float) -> float:
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
    return [
        *(Row(name, 100 * share) for name, share in shares.items()),
        Row("average of the board's five", 100 * fmean([*shares.values()][:_BOARD_V1])),
        Row("average of all", 100 * fmean(shares.values())),
    ]


def _tasks_of(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group and of the groups in it."""
    inner = subtasks.get(name, [])
    return [task for part in inner for task in _tasks_of(part, subtasks)] if inner else [name]
