"""`xlstm7b eval …`: LM Evaluation Harness tasks, perplexity, RULER, and comparing results.

`ruler` is one long function, because it declares every option and checks all before loading.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.cli import options
from xlstm7b.cli.loading import OpenedModel, open_model
from xlstm7b.cli.options import Command, count_progress, listed, option, to_target
from xlstm7b.report import check_figure, check_matplotlib, check_results_file


class _RunByDefault(typer.core.TyperGroup):
    """`eval FOLDER --tasks …` means `eval run FOLDER --tasks …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            if len(args) > 1 and not {args[0][:1], args[1][:1]} & {"-", ""}:  # not MODEL --tasks …
                raise ValueError(
                    f"there is no command 'eval {args[0]}'; there are {', '.join(self.commands)}, "
                    "and `eval MODEL --tasks TASKS`, which is `eval run`"
                )
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_RunByDefault, help="Measure the quality of a model.", no_args_is_help=True)

_data = partial(option, panel="Data")
_BatchSize = Annotated[
    str, option("Sequences in a batch. auto chooses by free memory.", panel="Model")
]
_Output = Annotated[Path | None, option("JSON file for the results, in the harness's layout.")]


@app.command(cls=Command)
def run(
    model: options.Model,
    tasks: Annotated[
        str,
        option(
            "Harness tasks and groups, separated by commas; also the paper's presets "
            "leaderboard-v1 and leaderboard-v2."
        ),
    ] = "",
    tasks_dir: Annotated[
        Path | None, option("Folder with more tasks as YAML files. Without --tasks, runs them all.")
    ] = None,
    limit: Annotated[int | None, option("Run only the first N questions of each task.")] = None,
    num_fewshot: Annotated[
        int | None, option("Examples before each question.", default="the task's own number")
    ] = None,
    apply_chat_template: Annotated[
        bool, option("Format questions with the chat template.", "--apply-chat-template")
    ] = False,
    log_samples: Annotated[
        bool,
        option(
            "Also write every question with its responses: one JSONL file for each task, "
            "beside --output.",
            "--log-samples",
        ),
    ] = False,
    output: _Output = None,
    batch_size: _BatchSize = "auto",
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
) -> None:
    """Run tasks of the LM Evaluation Harness. The word `run` can be left out.

    xlstm7b eval --tasks leaderboard-v2 NX-AI/xLSTM-7b --output results.json

    With --output, the same command continues a run that was stopped: finished tasks are not run
    again.
    """
    _to_rows(batch_size)
    for name, value, least in (("limit", limit, 1), ("num-fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    target = None if output is None else to_target(output)
    if target is not None:
        check_results_file(target)
    names = listed(tasks)
    if log_samples and target is None:
        raise ValueError("--log-samples needs --output: its files are written beside that file")
    if not names and tasks_dir is None:
        raise ValueError("no tasks are given; use --tasks NAME,NAME or --tasks-dir FOLDER")
    opened = open_model(model, tokenizer, dtype, device, adapter=adapter)
    from xlstm7b.chat_format import load_chat_template

    folder = opened.template_folder
    template = load_chat_template(folder) if apply_chat_template else None
    if apply_chat_template and template is None:
        raise ValueError(f"{folder} has no chat template; leave --apply-chat-template out")
    from xlstm7b.evaluate.harness import (
        XLSTM7B,
        KeptResponses,
        load_tasks,
        run_tasks,
        write_samples,
    )
    from xlstm7b.evaluate.leaderboards import leaderboard_table, leaderboards
    from xlstm7b.evaluate.results import run_info
    from xlstm7b.files import lock_folder

    loaded = load_tasks(names, tasks_dir, num_fewshot)
    info = run_info(
        _described(opened),
        tokenizer=opened.tokenizer.fingerprint,
        chat_template=template and hashlib.sha256(template.source.encode()).hexdigest(),
    )
    with ExitStack() as stack:
        kept = None
        if target is not None:
            unfinished = target.with_name(f"{target.name}.unfinished")
            unfinished.touch()
            stack.enter_context(lock_folder(unfinished, "writing finished tasks to"))
            settings = {
                "model": info["model"]["fingerprint"],
                **info["settings"],
                "dtype": _dtype_name(opened.dtype),
                "lm_eval": info["versions"]["lm_eval"],
            }
            kept = KeptResponses(unfinished, settings)
        lm = XLSTM7B(
            str(opened.folder),
            tokenizer=None if tokenizer is None else str(tokenizer),
            dtype=dtype,
            device=str(opened.device),
            batch_size=batch_size,
            adapter=adapter[0] if adapter else None,
        )
        results = run_tasks(
            lm,
            loaded,
            limit=limit,
            apply_chat_template=apply_chat_template,
            log_samples=log_samples,
            kept=kept,
        )
        from lm_eval.utils import make_table

        samples = results.pop("samples", {})
        tables = [make_table(results)]
        if results.get("groups"):
            tables.append(make_table(results, "groups"))
        boards = leaderboards(results)
        tables += [leaderboard_table(name, rows) for name, rows in boards.items()]
        info["leaderboards"] = {name: [row._asdict() for row in boards[name]] for name in boards}
        with _printing("\n".join(tables)):
            if target is not None and kept is not None:
                write_samples(target, samples)
                _write_results(target, results, info)
                kept.remove()


@app.command(cls=Command)
def ppl(
    model: options.Model,
    texts: Annotated[
        list[Path],
        typer.Argument(
            help="Files: .txt, .md, .jsonl, .ndjson, .json (also .gz, .zst), .parquet; or folders "
            "of them.",
        ),
    ],
    column: Annotated[str, option("Field with the text, in JSON and parquet files.")] = "text",
    output: _Output = None,
    plot: Annotated[
        Path | None, option("PNG file for a plot of the loss over the position.")
    ] = None,
    load_state: Annotated[
        Path | None, option("State file that every document continues.", panel="Model")
    ] = None,
    reference: Annotated[
        str | None,
        option(
            "Another checkpoint of the model, such as the one before quantising: also print how "
            "far the predictions are from its own.",
            panel="Model",
        ),
    ] = None,
    batch_size: _BatchSize = "auto",
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
) -> None:
    """Measure the perplexity of any text, and the loss by position in the document.

    Every document is read from its beginning to its end, whatever its length.
    """
    rows = _to_rows(batch_size)
    if reference is not None and load_state is not None:
        raise ValueError("--reference cannot be combined with --load-state")
    target = None if output is None else to_target(output)
    picture = None if plot is None else to_target(plot)
    from xlstm7b.data.input_files import Columns, check_input_file, find_input_files
    from xlstm7b.evaluate.perplexity import perplexity, plot_loss, read_documents
    from xlstm7b.evaluate.results import run_info

    if picture is not None:
        check_figure(picture)
    found = find_input_files(texts)
    if target in [path.resolve() for path in found.files]:
        raise ValueError(f"--output {output} is one of the texts to measure: choose another file")
    if target is not None:
        check_results_file(target)
    for source in found.files:
        check_input_file(source, Columns(text=column))
    if not any(read_documents(texts, column)):
        raise ValueError("there is no text to measure")
    from xlstm7b.evaluate.scoring import Scorer

    if found.left_out:
        print(found, file=sys.stderr)
    opened = open_model(model, tokenizer, dtype, device, adapter=adapter)
    state = other = None
    if reference is not None:
        other = _open_reference(reference, opened, tokenizer, dtype, device)
    if load_state is not None:
        from xlstm7b.model.saved_state import SavedState

        opened.check_state(load_state)
        state = SavedState.load(load_state, opened.config, device="cpu")
    info = run_info(_described(opened, load_state), tokenizer=opened.tokenizer.fingerprint)
    scorer = Scorer(opened.load_model(), batch_size=rows)
    with count_progress("reading", None, shown=True) as progress:
        measured = perplexity(
            scorer,
            opened.tokenizer,
            read_documents(texts, column),
            progress,
            state=state,
            reference=None if other is None else other.load_model(),
        )
    name = ", ".join(path.resolve().name for path in texts)
    with _printing(str(measured)):
        if target is not None:
            _write_results(target, measured.to_results(name), info)
        if picture is not None:
            plot_loss(measured, picture, opened.folder.resolve().name)


@app.command(cls=Command)
def compare(
    files: Annotated[list[Path], typer.Argument(help="Two or more results files.")],
) -> None:
    """Print results side by side, with standard errors and the differences to the first file.

    Says which files cannot be compared with the first, because text, tokenizer, limit, chat
    template, examples or seed are others.
    """
    from xlstm7b.evaluate.results import comparison_table

    if len(files) < 2:
        raise ValueError("there is nothing to compare; give at least two results files")
    print(comparison_table(files))


@app.command(cls=Command)
def ruler(
    model: options.Model,
    output: Annotated[
        Path, option("Folder for answers and scores. If it holds a run, that run is continued.")
    ],
    lengths: Annotated[
        str, option("Lengths in tokens, with the answer, separated by commas.")
    ] = "4096,8192,16384,32768,65536,131072",
    tasks: Annotated[
        str | None,
        option("Tasks, separated by commas, such as niah_single_1,vt.", default="all 13"),
    ] = None,
    samples: Annotated[int, option("Samples of each task at each length.")] = 500,
    seed: Annotated[int, option("Seed of the prompts: the same seed gives the same prompts.")] = 42,
    plot: Annotated[
        bool, option("Draw the average score: ruler.png in --output.", "--plot")
    ] = False,
    haystack: Annotated[
        Path | None, _data("Text file to hide needles in, or RULER's PaulGrahamEssays.json.")
    ] = None,
    squad: Annotated[Path | None, _data("SQuAD v2's dev-v2.0.json, for qa_1.")] = None,
    hotpotqa: Annotated[
        Path | None, _data("HotpotQA's hotpot_dev_distractor_v1.json, for qa_2.")
    ] = None,
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
    batch_size: options.BatchSize = 32,
) -> None:
    """Measure how much of a long context a model uses, with RULER's 13 tasks.

    The same command continues a run that was stopped. Tasks whose data is not given with
    --haystack, --squad or --hotpotqa are left out.
    """
    from xlstm7b.evaluate.results import run_info
    from xlstm7b.evaluate.ruler.datasets import Datasets, sentence_splitter
    from xlstm7b.evaluate.ruler.run import (
        SCORES,
        Answer,
        Plan,
        Run,
        greedy_answers,
        plot_scores,
        score_table,
    )
    from xlstm7b.evaluate.ruler.tasks import TASKS
    from xlstm7b.files import file_sha256, lock_folder

    if plot:
        check_matplotlib()
    chosen = tuple(TASKS) if tasks is None else tuple(listed(tasks))
    plan = Plan(chosen, _to_lengths(lengths), samples, seed)
    files = {"haystack": haystack, "squad": squad, "hotpotqa": hotpotqa}
    datasets = Datasets.read(**files)
    opened = open_model(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        state_dtype=state_dtype,
        batch_size=batch_size,
        adapter=adapter,
    )
    info, encode = run_info(_described(opened)), opened.tokenizer.encode
    identity = {
        "model_fingerprint": info["model"]["fingerprint"],
        "tokenizer": opened.tokenizer.fingerprint,
        "seed": seed,
        "dtype": _dtype_name(opened.dtype),
        "state_dtype": state_dtype,
        "sentences": None if haystack is None else sentence_splitter()[0],
    }
    for name, path in files.items():
        identity[name] = None if path is None else file_sha256(path)
    about = {"model": model, "xlstm7b": info}
    started = Run(
        output, plan, datasets, lambda text: len(encode(text)), identity=identity, about=about
    )
    if identity["sentences"] == "simple":
        print(
            "sentences of the haystack end at . ! ?; to split them as the benchmark does, run "
            "python -m nltk.downloader punkt_tab",
            file=sys.stderr,
        )
    for name, reason in started.left_out.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)

    def load() -> Answer:
        return greedy_answers(opened.load(), opened.end_ids())

    output.mkdir(parents=True, exist_ok=True)
    with (
        lock_folder(output, "answering in"),
        count_progress("answering", started.total, shown=True) as progress,
    ):
        document = started.answer(load, batch_size=batch_size, progress=progress)
    with _printing(score_table(document)):
        if plot:
            plot_scores([output / SCORES], output / "ruler.png")


@app.command(cls=Command)
def ruler_plot(
    scores: Annotated[list[Path], typer.Argument(help="The scores.json of each model.")],
    output: Annotated[Path, option("PNG file to write.")] = Path("ruler.png"),
) -> None:
    """Draw RULER's average score over the length, for one or more models."""
    from xlstm7b.evaluate.ruler.run import plot_scores

    plot_scores(scores, to_target(output))
    print(f"wrote {output}")


def _to_rows(batch_size: str) -> int | None:
    if batch_size == "auto":
        return None
    if not batch_size.isdecimal() or int(batch_size) < 1:
        raise ValueError(f"--batch-size must be auto or at least 1, not {batch_size}")
    return int(batch_size)


def _to_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in listed(text))
    except ValueError:
        raise ValueError(f"--lengths must be numbers such as 4096,8192, not {text!r}") from None


def _described(opened: OpenedModel, state: Path | None = None) -> dict[str, Any]:
    """The model for a results file. An adapter or a state to start from makes it another model."""
    from xlstm7b.evaluate.results import fingerprint
    from xlstm7b.files import file_sha256

    found = fingerprint(opened.folder)

    def add(name: str, path: Path, digest: str) -> None:
        both = found["fingerprint"] + digest
        found["fingerprint"] = hashlib.sha256(both.encode()).hexdigest()
        found[name] = str(path)

    if opened.adapter is not None:
        add("adapter", opened.adapter.folder, opened.adapter.fingerprint)
    if state is not None:
        add("state", state, file_sha256(state))
    return found


def _open_reference(
    name: str,
    opened: OpenedModel,
    tokenizer: Path | None,
    dtype: str | None,
    device: str | None,
) -> OpenedModel:
    """The model that another one is compared with; both must read the same tokens."""
    from xlstm7b.checkpoint import read_config, resolve

    size = read_config(resolve(name)).vocab_size
    if size != opened.config.vocab_size:
        raise ValueError(
            f"--reference {name} has a vocabulary of {size} tokens, the model has "
            f"{opened.config.vocab_size}"
        )
    found = open_model(name, tokenizer, dtype, device)
    if found.tokenizer.fingerprint != opened.tokenizer.fingerprint:
        raise ValueError(f"--reference {name} has another tokenizer than the model")
    return found


def _dtype_name(dtype: Any) -> str:
    return str(dtype or "as stored").removeprefix("torch.")


@contextmanager
def _printing(text: str) -> Iterator[None]:
    """Prints results after the block has written them: a closed pipe must not lose them.

    If writing fails, they are still printed.
    """
    try:
        yield
    finally:
        print(text)


def _write_results(target: Path, results: dict[str, Any], info: dict[str, Any]) -> None:
    from xlstm7b.files import write_json

    write_json(target, {**results, "xlstm7b": info})
