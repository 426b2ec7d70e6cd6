"""The LM Evaluation Harness on our model: `xlstm7b eval`, or the harness's own command line.

    python -m xlstm7b.evaluate.harness --model xlstm7b --model_args pretrained=FOLDER --tasks …

is `lm_eval …` with this model registered: lm_eval 0.4.13 looks for models in its own source alone.
Later ones find it by the entry point in `lm_eval.models`, and `lm_eval --model xlstm7b` is enough.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from xlstm7b.evaluate.batching import in_batches
from xlstm7b.evaluate.prefixes import PrefixTree
from xlstm7b.evaluate.presets import with_shots
from xlstm7b.evaluate.scoring import Continuation, Scorer, fitting_batch
from xlstm7b.generate import Generator, Request, SamplingSettings
from xlstm7b.generate.decoder import with_first_token
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import load_chat_template, load_tokenizer
from xlstm7b.weights import read_config, resolve

NAME = "xlstm7b"
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_MAX_TOKENS = 256


class XLSTM7B(TemplateLM):
    """An xLSTM as the harness asks for one.

    `batch_size` is a number or "auto", which goes by free memory, up to `max_batch_size`. On a GPU,
    if there is one, by default in bfloat16; else on the CPU, in the dtype stored: the harness's
    command line asks for a GPU whether there is one or not.
    """

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
    ) -> None:
        super().__init__()
        where = torch.device(device or "cuda")
        if where.type == "cuda" and not torch.cuda.is_available():
            where = torch.device("cpu")
        if dtype is None and where.type == "cuda":
            dtype = "bfloat16"
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
        rows = None if str(batch_size).startswith("auto") else int(batch_size)
        if rows is not None and rows < 1:
            raise ValueError(f"batch_size must be at least 1 or auto, not {rows}")
        self._device, self._folder = where, resolve(pretrained)
        text = load_tokenizer(tokenizer or self._folder, read_config(self._folder).vocab_size)
        wanted = None if dtype is None else getattr(torch, dtype)
        model = XLSTM.from_pretrained(self._folder, dtype=wanted, device=where)
        if rows is None:
            rows = min(fitting_batch(model), max_batch_size or 1 << 30)
        # Both on the same weights: the generator fuses them in place.
        self.generator = Generator(model, text, batch_size=rows)
        self.scorer = Scorer(model, batch_size=rows, grouping=grouping)

    @property
    def eot_token_id(self) -> int:
        return self.generator.config.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.generator.config.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._folder.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; never with id 0 in front, which scoring and generation see to."""
        return self.generator.tokenizer.encode(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = load_chat_template(self._folder)
        if template is None:
            raise ValueError(f"{self._folder} holds no chat template to apply")
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        asked = [Continuation(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(asked), desc="loglikelihood", disable=disable_tqdm) as bar:
            scores = self.scorer.score(asked, bar.update)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of whole texts, of any length: the state goes from piece to piece."""
        texts = [request.args[0] for request in requests]
        ids = [[self.prefix_token_id, *self.tok_encode(text)] for text in texts]
        with tqdm(total=sum(map(len, ids)), desc="loglikelihood_rolling, tokens",
                  disable=disable_tqdm) as bar:  # fmt: skip
            found = self.scorer.logprobs(ids, bar.update)
        sums = [float(logprobs.double().sum()) for logprobs in found]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string; what prompts share is read once, and its state forked."""
        asked = [self._request(n, *request.args) for n, request in enumerate(requests)]
        texts: dict[int, str] = {}
        with tqdm(total=len(asked), desc="generate_until", disable=disable_tqdm) as bar:
            for shared, places in _groups([request.ids for request in asked]):
                state = None
                if shared:
                    state = self.generator.read([asked[places[0]].ids[:shared]])
                for batch in in_batches(places, self.generator.batch_size):
                    completions = self.generator.run(
                        [_after(asked[n], shared) for n in batch],
                        state=None if state is None else state.fork(len(batch)),
                        done=lambda row, completion: bar.update(),
                    )
                    texts.update(zip(batch, (c.text for c in completions), strict=True))
        for n, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[n])
        return [texts[n] for n in range(len(requests))]

    def _request(self, number: int, context: str, given: dict[str, Any]) -> Request:
        settings, stops = _settings(dict(given), number)
        ids = with_first_token(self.generator.config, self.tok_encode(context))
        return Request(ids, settings, stops)


def _groups(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Prompts that share their first tokens, with how many; and together those that share none."""
    tree = PrefixTree(prompts)
    alone: list[int] = []
    for node in tree.children(tree.root):
        places = [place for n in range(node.first, node.last) for place in tree.asked[n]]
        places.sort(key=lambda place: -len(prompts[place]))
        if len(places) > 1:
            yield node.end, places
        else:
            alone += places
    alone.sort(key=lambda place: -len(prompts[place]))
    yield 0, alone


def _after(request: Request, shared: int) -> Request:
    """The request that is left when its first tokens were read."""
    return replace(request, prompt=request.ids[shared:], already_read=(*request.ids[:shared],))


def _settings(given: dict[str, Any], number: int) -> tuple[SamplingSettings, tuple[str, ...]]:
    """The harness's generation settings as ours: greedy unless it says otherwise.

    Request n samples by seed n: the same texts every time, and others for each repetition.
    """
    until = given.pop("until", None) or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    most = [given.pop(name) for name in _MAX_TOKENS if name in given] or [_DEFAULT_MAX_TOKENS]
    if given.get("num_beams") == 1:  # which is no search
        del given["num_beams"]
    do_sample = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if do_sample else 0.0))
    known = [field.name for field in fields(SamplingSettings)]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no generation setting {name!r}; known: {', '.join(known)}")
    settings: dict[str, Any] = {
        "max_new_tokens": int(most[0]),
        "temperature": 0.0 if do_sample is False else temperature,
        "seed": number,
        **given,
    }
    return SamplingSettings(**settings), stops


def load_tasks(
    names: list[str], tasks_dir: Path | None = None, num_fewshot: int | None = None
) -> list[Any]:
    """The harness's tasks and groups by name: its own, a folder's, and what presets stand for.

    With a folder and no names, all tasks that the folder holds. `num_fewshot` is for all of them
    but those that say 0 themselves. What cannot be run is a `ValueError`.
    """
    manager = None
    if tasks_dir is not None:
        if not tasks_dir.is_dir():
            raise ValueError(f"there is no folder {tasks_dir} of tasks")
        manager = TaskManager(include_path=str(tasks_dir), include_defaults=False)
        names = names or manager.all_subtasks
        if not names:
            raise ValueError(f"{tasks_dir} holds no task that can be read")
    tasks = with_shots(names)
    if manager is None or not all(name in manager.task_index for name in tasks):
        # It takes seconds to list the harness's own.
        manager = TaskManager(include_path=None if tasks_dir is None else str(tasks_dir))
    for name in tasks:
        if name not in manager.task_index:
            raise ValueError(f"the harness has no task {name!r}; `lm_eval ls tasks` lists them")
    loaded: list[Any] = []
    for name, shots in tasks.items():
        try:
            found = manager.load([name])
        except DatasetsError as error:
            raise ValueError(
                f"the data of {name} cannot be read: {error.__cause__ or error}"
            ) from error
        for task in found["tasks"].values():
            if shots is not None:
                task.set_config(key="num_fewshot", value=shots)
            if num_fewshot is not None and task.config.num_fewshot != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            _check(task)
        loaded += [found["groups"][name]] if name in found["groups"] else found["tasks"].values()
    return loaded


def _check(task: Any) -> None:
    """Raises a `ValueError` for what would else come up when weights are read, or hours later."""
    shots = task.config.num_fewshot or 0
    if shots:
        # A question is no example of itself.
        others = len(task.sampler.df) - (task.fewshot_cfg.split == task.config.test_split)
        if shots > others:
            raise ValueError(f"{task.task_name} has {others} examples, not the {shots} asked for")
    if task.OUTPUT_TYPE == "generate_until":
        _settings(dict(task.config.generation_kwargs or {}), 0)


def run_tasks(
    lm: XLSTM7B,
    tasks: list[Any],
    *,
    limit: int | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """The harness's results for loaded tasks."""
    from lm_eval.evaluator import simple_evaluate

    found = simple_evaluate(
        model=lm,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),  # they are loaded: it has none to find
        limit=limit,
        batch_size=lm.scorer.batch_size,
        device=str(lm.device),
        log_samples=False,
        apply_chat_template=apply_chat_template,
    )
    assert found is not None
    results: dict[str, Any] = dict(found)
    results["config"]["model"] = NAME
    return results


def main() -> None:
    """The harness's own command line, which then knows this model."""
    import lm_eval.models
    from lm_eval.__main__ import cli_evaluate

    assert lm_eval.models.MODEL_MAPPING  # the import fills the registry
    if NAME not in model_registry:
        model_registry.register(NAME, target="xlstm7b.evaluate.harness:XLSTM7B")
    cli_evaluate()


if __name__ == "__main__":
    main()
