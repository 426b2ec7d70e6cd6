"""Search: many continuations of one prompt, all from the state after the prompt.

The prompt is read once. A continuation starts from a copy of the state (134 MB for the 7B), which
costs the same after a prompt of any length. Log-probabilities are the model's own, before
temperature and the other sampling parameters. They include the end of text, if a continuation ends
with it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from xlstm7b.generate.engine import peak_memory
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.params import SamplingParams
from xlstm7b.generate.request import Completion, OutputText, Prompt, Request
from xlstm7b.generate.state import SavedState

Ranked = list[tuple[float, Completion]]
"""Completions with their scores, best first."""


class Vote(NamedTuple):
    winner: str | None  # None: no completion has an answer
    counts: dict[str, int]  # votes by answer, most votes first
    completions: list[Completion]  # most likely first


def best_of_n(
    generator: Generator,
    prompt: Prompt | None,
    n: int,
    *,
    score: Callable[[str, Completion], float] | None = None,
    length_penalty: float = 1.0,
    state: SavedState | None = None,
    **sampling: Any,
) -> Ranked:
    """n samples, best first: by `score(prompt, completion)`, or by the model's log-probability.

    The log-probability is divided by tokens^length_penalty: 0 ranks by the sum, 1 by the mean. The
    prompt is read on top of `state`, if given. `sampling` are fields of `SamplingParams`; with seed
    s, the samples have the seeds s … s + n − 1. At most `batch_size` copies of the state exist at a
    time.
    """
    _check(length_penalty, n=n)
    start = _read(generator, prompt, state, sampling)
    text, ranked = _text(generator, prompt), []
    request = _continuation(start.params, start.state, start.prompt_token_ids)
    for sample, logprob, length in _samples(generator, [request] * n):
        completion = replace(sample, state=None, **start.speed)
        likelihood = logprob / length**length_penalty
        ranked.append((score(text, completion) if score else likelihood, completion))
    return sorted(ranked, key=lambda scored: -scored[0])


def self_consistency(
    generator: Generator,
    prompt: Prompt | None,
    n: int,
    *,
    answer: Callable[[str], str | None],
    state: SavedState | None = None,
    **sampling: Any,
) -> Vote:
    """n samples vote. `answer` finds the answer in a sample's text; None is no vote.

    A tie is decided by the sum of the log-probabilities of each answer's samples.
    """
    ranked = best_of_n(generator, prompt, n, length_penalty=0.0, state=state, **sampling)
    votes: dict[str, list[float]] = {}
    for logprob, completion in ranked:
        found = answer(completion.text)
        if found is not None:
            votes.setdefault(found, []).append(logprob)
    order = sorted(votes, key=lambda found: (len(votes[found]), sum(votes[found])), reverse=True)
    counts = {found: len(votes[found]) for found in order}
    return Vote(next(iter(order), None), counts, [completion for _, completion in ranked])


@torch.inference_mode()
def beam_search(
    generator: Generator,
    prompt: Prompt | None,
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    num_return_sequences: int = 1,
    early_stopping: bool | Literal["never"] = False,
    eos_token_id: int | Sequence[int] | None = None,
    state: SavedState | None = None,
) -> Ranked:
    """The most likely outputs that `num_beams` beams find, scored and stopped as in transformers.

    The score of an output is log-probability / tokens^length_penalty, with its end of text. Once
    `num_beams` outputs are finished, the search stops: at once if `early_stopping` is True; if
    False, when the score of the best beam is not above the worst of them; if "never", when it could
    not rise above it at its final length either. Each step copies the states of the beams.

    One function, because transformers' rules only make sense in this order.
    """
    _check(length_penalty, num_beams=num_beams, num_return_sequences=num_return_sequences)
    if num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences ({num_return_sequences}) must not exceed num_beams ({num_beams})"
        )
    if early_stopping not in (False, True, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")
    sampling = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
    start = _read(generator, prompt, state, sampling)
    ends = start.params.eos_token_ids
    # Enough that `num_beams` of them continue, even if each beam ends with every end of text.
    candidates = max(2, 1 + len(ends)) * num_beams
    final_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else 0
    started, states = time.perf_counter(), start.state
    beams, finished = [_Beam(0, 0.0, ())], list[tuple[float, _Beam]]()
    for length in range(1, max_new_tokens + 1):
        # 1. The best candidates: a beam and one more token.
        logprobs = states.logits.double().log_softmax(-1)
        totals = logprobs + logprobs.new_tensor([beam.total for beam in beams])[:, None]
        best = totals.flatten().topk(min(candidates, totals.numel()))
        chosen = logprobs.flatten()[best.indices].tolist()
        # 2. Those that end are finished outputs, the others continue.
        unfinished = []
        for rank, (total, index) in enumerate(zip(*map(torch.Tensor.tolist, best), strict=True)):
            row, token = divmod(index, logprobs.shape[1])
            beam = _Beam(row, total, (*beams[row].tokens, (token, chosen[rank])))
            if token not in ends and length < max_new_tokens:
                unfinished.append(beam)
            elif rank < num_beams:  # candidates of a lower rank only fill up the beams
                finished.append((total / length**length_penalty, beam))
        finished = sorted(finished, reverse=True)[:num_beams]
        # 3. Stop if nothing better can come.
        if not unfinished:
            break
        hope = unfinished[0].total / (final_length or length) ** length_penalty
        if len(finished) == num_beams and (early_stopping is True or hope <= finished[-1][0]):
            break
        # 4. Read the new token of each beam. One variable, so that old states are freed at once.
        beams = unfinished[:num_beams]
        states = states.select([beam.row for beam in beams])
        states = generator.read([[beam.tokens[-1][0]] for beam in beams], state=states)
    seconds = time.perf_counter() - started
    return [
        (score, _completion(generator, start, beam, seconds))
        for score, beam in finished[:num_return_sequences]
    ]


class _Beam(NamedTuple):
    row: int  # of the states before its last token
    total: float  # log-probability
    tokens: tuple[tuple[int, float], ...]  # with their log-probabilities


def _completion(generator: Generator, start: "_Start", beam: _Beam, seconds: float) -> Completion:
    output = OutputText(generator.tokenizer, start.params)
    for token, logprob in beam.tokens:
        output.push(token, logprob)
    assert output.finish_reason is not None
    return Completion(
        output.text,
        output.token_ids,
        output.finish_reason,
        **start.speed,
        tokens_per_second=max(0, len(output.token_ids) - 1) / seconds,
        peak_memory=peak_memory(generator.device),
        logprobs=output.logprobs,
    )


@dataclass(eq=False)
class Node:
    """A partial output in a `Tree`: everything after the prompt, up to the end of one thought."""

    text: str
    token_ids: list[int]
    logprob: float
    score: float
    state: SavedState | None = field(repr=False)  # has read the text; None: finished or pruned
    parent: "Node | None" = field(repr=False)
    depth: int
    finished: bool  # ended with the end of text, or the tree's `done` returned True


class Tree:
    """Thoughts that branch from one prompt. `leaves` are sorted, best first.

    Nodes are scored by `score(prompt, node)`, or as in `best_of_n`. `done(text)` returns True for
    a text that needs no more thoughts. Unfinished leaves hold a state; expanded nodes keep their
    states until `prune`.
    """

    def __init__(
        self,
        generator: Generator,
        prompt: Prompt | None,
        *,
        score: Callable[[str, Node], float] | None = None,
        length_penalty: float = 1.0,
        done: Callable[[str], bool] | None = None,
        state: SavedState | None = None,
    ) -> None:
        _check(length_penalty)
        start = _read(generator, prompt, state, {})
        self.generator, self.prompt = generator, _text(generator, prompt)
        self._prompt_token_ids = start.prompt_token_ids
        self._score, self._length_penalty, self._done = score, length_penalty, done
        self.samples = self.tokens = 0  # sampled so far
        self.root = Node("", [], 0.0, 0.0, start.state, None, 0, False)
        self.leaves, self._expanded = [self.root], list[Node]()

    @property
    def best(self) -> Node:
        """The best finished leaf; if none is finished, the best leaf."""
        return next((leaf for leaf in self.leaves if leaf.finished), self.leaves[0])

    def expand(self, nodes: Node | Sequence[Node], n: int, **sampling: Any) -> list[Node]:
        """Samples n thoughts after each node, in one batch. Equal thoughts become one child.

        A thought ends after a stop string, which is part of it, or after `max_new_tokens`. Sample i
        of the tree has seed + i, so no two thoughts are drawn with the same random numbers.
        """
        nodes = [nodes] if isinstance(nodes, Node) else nodes
        _check(n=n)
        params, requests = _params(sampling), list[Request]()
        for node in nodes:
            if node.state is None:
                raise ValueError("a node that is finished or pruned cannot be expanded")
            ids = self._prompt_token_ids, node.token_ids
            requests += [_continuation(params, node.state, *ids)] * n
        children: dict[tuple[int, bool, tuple[int, ...]], Node] = {}
        for index, sample in enumerate(_samples(self.generator, requests, self.samples)):
            child = self._child(nodes[index // n], sample)
            children.setdefault((id(child.parent), child.finished, (*child.token_ids,)), child)
            self.tokens += sample.length
        self.samples += len(requests)
        self._expanded += nodes
        leaves = [leaf for leaf in self.leaves if leaf not in nodes] + [*children.values()]
        self.leaves = sorted(leaves, key=lambda leaf: -leaf.score)
        return [*children.values()]

    def prune(self, keep: int) -> None:
        """Keeps the `keep` best leaves and their states; frees all other states."""
        _check(keep=keep)
        for node in self.leaves[keep:] + self._expanded:
            node.state = None
        self.leaves, self._expanded = self.leaves[:keep], []

    def _child(self, parent: Node, sample: "_Sample") -> Node:
        ids = parent.token_ids + sample.completion.token_ids
        logprob, length = parent.logprob + sample.logprob, len(parent.token_ids) + sample.length
        text = self.generator.tokenizer.decode(ids, continues=True)
        finished = length > len(ids) or (self._done is not None and self._done(text))
        score = logprob / length**self._length_penalty
        state = None if finished else sample.completion.state
        child = Node(text, ids, logprob, score, state, parent, parent.depth + 1, finished)
        if self._score is not None:
            child.score = self._score(self.prompt, child)
        return child


def tree_search(
    generator: Generator,
    prompt: Prompt | None,
    *,
    width: int,
    depth: int,
    expand: int,
    score: Callable[[str, Node], float] | None = None,
    length_penalty: float = 1.0,
    done: Callable[[str], bool] | None = None,
    state: SavedState | None = None,
    **sampling: Any,
) -> Tree:
    """Beam search over thoughts: `depth` times, expand every leaf, then keep the `width` best.

    Up to width · (expand + 1) states exist at once, in addition to the generator's own.
    """
    _check(length_penalty, width=width, depth=depth, expand=expand)
    _request(generator, prompt, state, sampling)  # finds mistakes before anything is read
    tree = Tree(
        generator, prompt, score=score, length_penalty=length_penalty, done=done, state=state
    )
    for _ in range(depth):
        tree.expand([leaf for leaf in tree.leaves if not leaf.finished], expand, **sampling)
        tree.prune(width)
    return tree


class _Start(NamedTuple):
    """The start of a search: the state after the prompt."""

    params: SamplingParams
    prompt_token_ids: list[int]
    state: SavedState
    speed: dict[str, Any]  # fields of a `Completion`


def _read(
    generator: Generator, prompt: Prompt | None, state: SavedState | None, sampling: dict[str, Any]
) -> _Start:
    request, started = _request(generator, prompt, state, sampling), time.perf_counter()
    ids = request.prompt_token_ids
    after = generator.read([ids], state=state)
    per_second = len(ids) / (time.perf_counter() - started)
    speed = {"prompt_tokens": len(ids), "prompt_tokens_per_second": per_second}
    return _Start(request.params, ids, after, speed)


def _request(
    generator: Generator, prompt: Prompt | None, state: SavedState | None, sampling: dict[str, Any]
) -> Request:
    """A checked request for the prompt."""
    if prompt is None and state is None:
        raise ValueError("there is nothing to continue: give a prompt or a state")
    if state is not None and len(state) != 1:
        raise ValueError(f"a search starts from one state, not {len(state)}")
    request = Request(() if prompt is None else prompt, _params(sampling), state=state)
    return request.prepare(generator.config, generator.tokenizer)


def _params(sampling: dict[str, Any]) -> SamplingParams:
    """Sampling parameters with log-probabilities, which scores are made of."""
    params = SamplingParams.from_options(**sampling)
    return replace(params, logprobs=params.logprobs or 0)


def _continuation(
    params: SamplingParams, state: SavedState, prompt: Sequence[int], output: Sequence[int] = ()
) -> Request:
    """Continues a state that has read `prompt` and `output`, which penalties count."""
    return Request(
        (), params, state=state, keep_state=True, previous_prompt=prompt, previous_output=output
    )


class _Sample(NamedTuple):
    completion: Completion
    logprob: float
    length: int  # tokens, with the end of text


def _samples(
    generator: Generator, requests: Sequence[Request], first: int = 0
) -> Iterator[_Sample]:
    """One sample per request; request i has seed + first + i.

    In groups of `batch_size`, because each completion of a group holds a state.
    """
    seeded = [
        request.with_seed_offset(first + index).prepare(generator.config, generator.tokenizer)
        for index, request in enumerate(requests)
    ]
    for start in range(0, len(seeded), generator.batch_size):
        group = seeded[start : start + generator.batch_size]
        for request, completion in zip(group, generator.run(group), strict=True):
            assert completion.state is not None
            logprob, length = sum(completion.logprobs or ()), len(completion.token_ids)
            # After a stop string the reason is "stop", too, but the ids hold more than the text.
            whole = generator.tokenizer.decode(completion.token_ids, continues=True)
            ends = [*request.params.eos_token_ids]  # none: a grammar ended the output
            if completion.finish_reason == "stop" and completion.text == whole and ends:
                following = completion.state.logits[0].log_softmax(-1)
                logprob += float(following[ends].logsumexp(0))
                length += 1
            yield _Sample(completion, logprob, length)


def _text(generator: Generator, prompt: Prompt | None) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(prompt or ())


def _check(length_penalty: float = 1.0, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be a finite number, not {length_penalty}")
