"""The paper's leaderboards as tasks of the LM Evaluation Harness, with those boards' shots."""

# None: as the task itself says.
PRESETS: dict[str, dict[str, int | None]] = {
    "leaderboard-v1": {
        "arc_challenge": 25,
        "hellaswag": 10,
        "truthfulqa_mc2": 0,
        "mmlu": 5,
        "winogrande": 5,
        "openbookqa": 0,
        "piqa": 0,
    },
    # BBH 3, GPQA 0, MMLU-Pro 5, MuSR 0, IFEval 0, MATH level 5 4: the harness's own group.
    "leaderboard-v2": {"leaderboard": None},
}


def with_shots(names: list[str]) -> dict[str, int | None]:
    """Tasks by name, presets spelled out, each with its number of shots."""
    tasks: dict[str, int | None] = {}
    for name in names:
        for task, shots in PRESETS.get(name, {name: None}).items():
            if task in tasks:
                raise ValueError(f"the task {task!r} is asked for twice")
            tasks[task] = shots
    if not tasks:
        raise ValueError(f"no task is given; presets: {', '.join(PRESETS)}")
    return tasks
