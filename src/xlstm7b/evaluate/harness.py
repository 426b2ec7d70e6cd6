"""The model for the LM Evaluation Harness, used by `xlstm7b eval` and by lm_eval's command line.

    python -m xlstm7b.evaluate.harness --model xlstm7b --model_args pretrained=FOLDER --tasks …

runs `lm_eval …` with this model registered: lm_eval 0.4.13 only finds models in its own source.
Later versions read the entry point `lm_eval.models`; there `lm_eval --model xlstm7b` is enough.
"""

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets.exceptions import DatasetsError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, sanitize_list
from tqdm import tqdm

from xlstm7b.chat_format import load_chat_template
from xlstm7b.checkpoint import read_config, resolve
from xlstm7b.devices import default_dtype, to_device, to_dtype
from xlstm7b.evaluate.prefix_tree import PrefixTree
from xlstm7b.evaluate.scoring import Continuation, Scorer, default_batch_size
from xlstm7b.files import complete_lines, write_aside, write_hashed
from xlstm7b.generate import Generator, Request, SamplingParams, SavedState
from xlstm7b.model.adapter import load_adapted, load_adapter
from xlstm7b.report import counted
from xlstm7b.tokenizer import model_tokenizer, other_end, with_first_token

NAME = "xlstm7b"

# The paper's leaderboards: task -> number of few-shot examples. None: the task's own number.
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
    # The harness's own group: BBH 3, GPQA 0, MMLU-Pro 5, MuSR 0, IFEval 0, MATH level 5 4.
    "leaderboard-v2": {"leaderboard": None},
}
_MAX_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class XLSTM7B(TemplateLM):
    """The model as the harness calls it.

    Device and dtype have the usual defaults (`xlstm7b.devices`), but a "cuda" device becomes the
    CPU if there is no GPU: lm_eval's command line passes "cuda" by default. `batch_size` is a
    number or "auto" (by free memory, at most `max_batch_size`). `adapter` is a LoRA adapter of the
    model.

    The harness asks for all tasks at once. They are run one after the other, so that `kept` has
    the responses of those that are finished.
    """

    kept: "KeptResponses | None" = None

    def __init__(
        self,
        pretrained: str,
        *,
        tokenizer: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        grouping: bool = True,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        self._device, self._folder = to_device(device), resolve(pretrained)
        model_dtype = default_dtype(self._device) if dtype is None else to_dtype(dtype)
        rows = None if str(batch_size).startswith("auto") else int(batch_size)
        if rows is not None and rows < 1:
            raise ValueError(f"batch_size must be at least 1 or auto, not {rows}")
        text = model_tokenizer(self._folder, read_config(self._folder), tokenizer)
        model = load_adapted(self._folder, adapter, dtype=model_dtype, device=self._device)
        self._template_folder = self._folder
        self._ends: tuple[int, ...] | None = None  # end-of-text ids, if not the model's own alone
        if adapter is not None:
            loaded = load_adapter(adapter, model.config)
            self._template_folder = loaded.template_folder(self._folder)
            end = other_end(loaded.folder, text, model.config)
            self._ends = None if end is None else (model.config.eos_token_id, end)
        if rows is None:
            rows = min(default_batch_size(model), max_batch_size or 1 << 30)
        # Both use the same weights: the generator fuses them in place.
        self.generator = Generator(model, text, batch_size=rows)
        self.scorer = Scorer(model, batch_size=rows, grouping=grouping)

    @property
    def eot_token_id(self) -> int:
        return self.generator.config.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: the first token, or the end of text without it."""
        return self.generator.config.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._folder.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids without the model's first token: scoring and generation add it."""
        return self.generator.tokenizer.encode(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = load_chat_template(self._template_folder)
        if template is None:
            raise ValueError(f"{self._template_folder} has no chat template")
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return self._task_by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probabilities of whole texts. A text may have any length: no window is used.

        For a model without a first token, a text's first token is given, not scored.
        """
        return self._task_by_task(self._score_texts, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues prompts up to a stop string.

        Request n of a task samples with seed n: a repeated request has another output, a second run
        the same.
        """
        return self._task_by_task(self._continue_prompts, requests, disable_tqdm)

    def _task_by_task(
        self, run: Callable[..., list[Any]], requests: list[Instance], disable_tqdm: bool
    ) -> list[Any]:
        """The responses to all requests, in their order."""
        tasks: dict[str | None, list[int]] = {}
        for index, request in enumerate(requests):
            tasks.setdefault(request.task_name, []).append(index)
        responses: dict[int, Any] = {}
        for indices in tasks.values():
            chosen = [requests[index] for index in indices]
            found = self.kept.get(chosen) if self.kept else None
            if found is None:
                found = run(chosen, disable_tqdm=disable_tqdm)
                if self.kept:
                    self.kept.add(chosen, found)
                for request, response in zip(chosen, found, strict=True):  # of lm_eval's use_cache
                    self.cache_hook.add_partial(request.request_type, request.args, response)
            responses.update(zip(indices, found, strict=True))
        return [responses[index] for index in range(len(requests))]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        continuations = [Continuation(context, tokens) for _, context, tokens in requests]
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            scores = self.scorer.score(continuations, bar.update)
        return [(score.logprob, score.is_greedy) for score in scores]

    def _score_texts(self, requests: list[Instance], disable_tqdm: bool) -> list[float]:
        texts = [request.args[0] for request in requests]
        first = [self.prefix_token_id] if self.generator.config.force_bos_token_insert else []
        documents = [[*first, *self.tok_encode(text)] for text in texts]
        total = sum(map(len, documents))
        with tqdm(total=total, desc="loglikelihood_rolling, tokens", disable=disable_tqdm) as bar:
            found = self.scorer.logprobs(documents, bar.update)
        return [float(logprobs.double().sum()) for logprobs in found]

    def _continue_prompts(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        """A shared prefix is read once, and its state is copied."""
        prompts = [
            with_first_token(self.generator.config, self.tok_encode(request.args[0]))
            for request in requests
        ]
        options = [
            {"eos_token_id": self._ends, **sampling_options(request.args[1], n)}
            for n, request in enumerate(requests)
        ]
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for shared, indices in _group_by_prefix(prompts):
                state = self.generator.read([prompts[indices[0]][:shared]]) if shared else None
                completions = self.generator.run(
                    [_to_request(prompts[n], options[n], shared, state) for n in indices],
                    done=lambda index, completion: bar.update(),
                )
                texts.update(zip(indices, (c.text for c in completions), strict=True))
        return [texts[n] for n in range(len(requests))]


def _group_by_prefix(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Groups of prompts with the number of tokens they share, then all others with 0.

    Each group lists indices of prompts, the longest first.
    """
    tree = PrefixTree(prompts)
    others: list[int] = []
    for node in tree.children(tree.root):
        indices = [index for n in range(node.first, node.last) for index in tree.indices[n]]
        indices.sort(key=lambda index: -len(prompts[index]))
        if len(indices) > 1:
            yield node.end, indices
        else:
            others += indices
    others.sort(key=lambda index: -len(prompts[index]))
    yield 0, others


def sampling_options(generation_kwargs: dict[str, Any], seed: int) -> dict[str, Any]:
    """The harness's names for sampling parameters as ours. Greedy unless the task says otherwise.

    The sampling parameters' own defaults and checks apply to the rest.
    """
    given = dict(generation_kwargs)
    until = given.pop("until", None) or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    max_new_tokens = [int(given.pop(name)) for name in _MAX_NEW_TOKENS if name in given]
    if given.get("num_beams") == 1:  # plain sampling
        del given["num_beams"]
    do_sample = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if do_sample else 0.0))
    options = {
        "temperature": 0.0 if do_sample is False else temperature,
        "seed": seed,
        "stop_strings": stops,
        **given,
    }
    if max_new_tokens:
        options["max_new_tokens"] = max_new_tokens[0]
    return options


def _to_request(
    prompt: Sequence[int],
    options: dict[str, Any],
    shared: int = 0,
    state: SavedState | None = None,
) -> Request:
    """A request for a prompt whose first `shared` tokens `state` has read. `ValueError`."""
    params = SamplingParams.from_options(**options)
    params.check()
    return Request(prompt[shared:], params, state=state, previous_prompt=prompt[:shared])


def load_tasks(
    names: list[str], tasks_dir: Path | None = None, num_fewshot: int | None = None
) -> list[Any]:
    """Loads the harness's tasks and groups, presets, and tasks of a folder of YAML files.

    With a folder and no names: all tasks in the folder. `num_fewshot` replaces every task's number
    of examples, except where that is 0. `ValueError` for a task that could not run.
    """
    manager = None
    if tasks_dir is not None:
        if not tasks_dir.is_dir():
            raise ValueError(f"the tasks folder {tasks_dir} does not exist")
        _check_yaml(tasks_dir)
        manager = TaskManager(include_path=str(tasks_dir), include_defaults=False)
        names = names or manager.all_subtasks
        if not names:
            raise ValueError(f"{tasks_dir} contains no task that can be read")
    tasks = expand_presets(names)
    if manager is None or not all(name in manager.task_index for name in tasks):
        # Only if needed: listing the harness's own tasks takes seconds.
        manager = TaskManager(include_path=None if tasks_dir is None else str(tasks_dir))
    for name in tasks:
        if name not in manager.task_index:
            raise ValueError(f"the harness has no task {name!r}; `lm_eval ls tasks` lists them")
    loaded: list[Any] = []
    for name, shots in tasks.items():
        try:
            found = manager.load([name])
        except DatasetsError as error:
            reason = error.__cause__ or error
            raise ValueError(f"the data of task {name!r} cannot be read: {reason}") from error
        for task in found["tasks"].values():
            if shots is not None:
                task.set_config(key="num_fewshot", value=shots)
            if num_fewshot is not None and task.config.num_fewshot != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            _check_task(task)
        loaded += [found["groups"][name]] if name in found["groups"] else found["tasks"].values()
    return loaded


def _check_yaml(folder: Path) -> None:
    """Raises a `ValueError` if a file of tasks cannot be read: the harness would leave it out."""
    for path in sorted(folder.rglob("*.yaml")):
        try:
            deque(yaml.parse(path.read_text(encoding="utf-8"), yaml.SafeLoader), maxlen=0)
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is not a YAML file: {reason}") from error


def expand_presets(names: list[str]) -> dict[str, int | None]:
    """Task names with their number of examples; a preset's name becomes its tasks."""
    tasks: dict[str, int | None] = {}
    for name in names:
        for task, shots in PRESETS.get(name, {name: None}).items():
            if task in tasks:
                raise ValueError(f"the task {task!r} is given twice")
            tasks[task] = shots
    if not tasks:
        raise ValueError(f"no tasks are given; presets are {', '.join(PRESETS)}")
    return tasks


def _check_task(task: Any) -> None:
    """`ValueError` for mistakes that would only show after the weights are loaded, or much later.

    The task must have enough examples, and the sampling parameters must be supported.
    """
    shots = task.config.num_fewshot or 0
    if shots:
        # A question is not an example for itself.
        examples = len(task.sampler.df) - (task.fewshot_cfg.split == task.config.test_split)
        if shots > examples:
            name = task.task_name
            raise ValueError(
                f"num_fewshot is {shots}, but the task {name!r} has {counted(examples, 'example')}"
            )
    if task.OUTPUT_TYPE == "generate_until":
        _to_request([0], sampling_options(task.config.generation_kwargs or {}, seed=0))


def run_tasks(
    lm: XLSTM7B,
    tasks: list[Any],
    *,
    limit: int | None = None,
    apply_chat_template: bool = False,
    log_samples: bool = False,
    kept: "KeptResponses | None" = None,
) -> dict[str, Any]:
    """Runs loaded tasks. Returns the harness's results, with "samples" if `log_samples`.

    Tasks in `kept` are not run again; the others are added to it.
    """
    from lm_eval.evaluator import simple_evaluate

    lm.kept = kept
    # The harness prints while it computes: on stderr, so that a closed stdout does not end it.
    with redirect_stdout(sys.stderr):
        found = simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),  # the tasks are already loaded
            limit=limit,
            batch_size=lm.scorer.batch_size,
            device=str(lm.device),
            log_samples=log_samples,
            apply_chat_template=apply_chat_template,
        )
    assert found is not None
    results: dict[str, Any] = dict(found)
    results["config"]["model"] = NAME
    return results


class KeptResponses:
    """The responses to finished tasks in a file, so that a run that was stopped can continue.

    A line has the responses to one task's requests, written when the task is finished. Its key is a
    hash of the requests and of `settings`: the model and all else that responses depend on. So
    responses of another model, or to other questions, are never used.

    lm_eval's `use_cache` unpickles its file, does not know the model, and answers a request that is
    sampled several times with one output.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, settings
        self._responses: dict[str, list[Any]] = {}
        self._used = set[str]()
        for line in complete_lines(path) if path.exists() else ():
            try:
                key, responses = json.loads(line)
                self._responses[key] = [*responses]
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} is damaged: delete it to start again") from error

    def get(self, requests: Sequence[Instance]) -> list[Any] | None:
        """The responses to the requests of one task; None if it is not finished."""
        key = self._key(requests)
        self._used.add(key)
        found = self._responses.get(key)
        if found is not None and requests[0].request_type == "loglikelihood":
            return [tuple(pair) for pair in found]
        return found

    def add(self, requests: Sequence[Instance], responses: Sequence[Any]) -> None:
        line = json.dumps([self._key(requests), list(responses)])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Removes the file when the results are written. It stays if it has more than they need."""
        if self._responses.keys() <= self._used:
            self.path.unlink(missing_ok=True)

    def _key(self, requests: Sequence[Instance]) -> str:
        asked = [[each.task_name, each.request_type, each.args] for each in requests]
        content = json.dumps([self._settings, asked], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()


def write_samples(output: Path, samples: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Writes samples_TASK_NAME.jsonl beside the results file NAME.json, one for each task.

    A line is a question in lm_eval's own layout: the document, the arguments of its requests, the
    responses as they are and filtered, the target and the metrics. (lm_eval's `EvaluationTracker`
    puts the time into names, and only logs that a file could not be written.)
    """
    for task, questions in samples.items():
        name = f"samples_{task.replace('/', '_')}_{output.stem}.jsonl"
        with write_aside(output.parent / name) as aside:
            write_hashed(aside, map(_sample_line, questions))


def _sample_line(sample: Mapping[str, Any]) -> bytes:
    arguments = {
        f"gen_args_{n}": {f"arg_{m}": value for m, value in enumerate(request)}
        for n, request in enumerate(sample["arguments"])
    }
    line = {
        **sample,
        "arguments": arguments,
        "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }
    text = json.dumps(line, default=handle_non_serializable, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def main() -> None:
    """Runs lm_eval's command line with this model registered."""
    import lm_eval.models
    from lm_eval.__main__ import cli_evaluate

    assert lm_eval.models.MODEL_MAPPING  # importing it fills the registry
    if NAME not in model_registry:
        model_registry.register(NAME, target="xlstm7b.evaluate.harness:XLSTM7B")
    cli_evaluate()


if __name__ == "__main__":
    main()
