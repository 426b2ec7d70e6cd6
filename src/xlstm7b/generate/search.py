"""Test-time compute: many continuations of one prompt, all from the state that has read it.

The prompt is read once, and a fork costs the same after any length of it: a copy of the state,
134 MB in the 7B. Log-probabilities are the model's own, before temperature and all else, with that
of the end of text where a text ends so.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from xlstm7b.generate.generator import Generator
from xlstm7b.generate.requests import Prompt, Request
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion, GrowingText, Speeds, peak_memory

Ranked = list[tuple[float, Completion]]  # with scores, best first


class Vote(NamedTuple):
    """The answer of most completions, if any has one; votes by answer, most first; all texts."""

    winner: str | None
    counts: dict[str, int]
    completions: list[Completion]  # likeliest first


def best_of_n(
    generator: Generator, prompt: Prompt | None, n: int, *,
    score: Callable[[str, Completion], float] | None = None, length_penalty: float = 1.0,
    state: TextState | None = None, **settings: Any,
) -> Ranked:  # fmt: skip
    """n samples, best first: by `score(prompt, completion)`, or by what the model thinks of them.

    That is log-probability / tokens^length_penalty: 0 takes the sum, 1 the mean. The prompt is
    read on top of `state`, of one row, if there is one. Settings are those of `generate`, with
    `stop_strings`; a seed s stands for s … s + n − 1. `batch_size` states are forked at a time.
    """
    _check(length_penalty, n=n)
    request, place, (tokens, seconds, *_) = _read(generator, prompt, state, settings)
    text, ranked = _text(generator, prompt), []
    for sample, logprob, length in _samples(generator, [(request.once_read(), place)] * n):
        completion = replace(sample, state=None, prompt_tokens=tokens)
        completion = replace(completion, prompt_tokens_per_second=tokens / seconds)
        likely = logprob / length**length_penalty
        ranked.append((score(text, completion) if score else likely, completion))
    return sorted(ranked, key=lambda scored: -scored[0])


def self_consistency(
    generator: Generator, prompt: Prompt | None, n: int, *, answer: Callable[[str], str | None],
    state: TextState | None = None, **settings: Any,
) -> Vote:  # fmt: skip
    """n samples vote by the answers that `answer` finds in their texts; None is no vote.

    Between answers with as many votes, the sum of their texts' log-probabilities decides.
    """
    ranked = best_of_n(
        generator, prompt, n, score=None, length_penalty=0.0, state=state, **settings
    )
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
    generator: Generator, prompt: Prompt | None, *, num_beams: int, max_new_tokens: int,
    length_penalty: float = 1.0, num_return_sequences: int = 1,
    early_stopping: bool | Literal["never"] = False,
    eos_token_id: int | Sequence[int] | None = None, state: TextState | None = None,
) -> Ranked:  # fmt: skip
    """The likeliest texts that `num_beams` beams find, scored and stopped as in `transformers`.

    A finished text is worth log-probability / tokens^length_penalty, its end of text included.
    With `num_beams` of them the search stops: at once if `early_stopping`; if False, when the best
    beam as it is would be worth no more than the worst of them; if "never", when it would not at
    its final length either. Every step copies the beams' states, a few at a time in memory.
    """
    _check(length_penalty, num_beams=num_beams, num_return_sequences=num_return_sequences)
    if num_return_sequences > num_beams:
        raise ValueError(f"{num_beams} beams do not return {num_return_sequences} sequences")
    if early_stopping not in (False, True, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")
    wanted = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
    request, place, read = _read(generator, prompt, state, wanted)
    ends = request.settings.eos_token_ids
    # So many that `num_beams` go on even if every beam could end in all ways there are.
    candidates = max(2, 1 + len(ends)) * num_beams
    final_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else 0
    started = time.perf_counter()
    beams, finished = [_Beam(0, 0.0, ())], list[tuple[float, _Beam]]()
    for length in range(1, max_new_tokens + 1):
        logprobs = place.logits.double().log_softmax(-1)
        totals = logprobs + logprobs.new_tensor([beam.total for beam in beams])[:, None]
        best = totals.flatten().topk(min(candidates, totals.numel()))
        chosen = logprobs.flatten()[best.indices].tolist()
        going_on = []
        for rank, (total, index) in enumerate(zip(*map(torch.Tensor.tolist, best), strict=True)):
            row, token = divmod(index, logprobs.shape[1])
            beam = _Beam(row, total, (*beams[row].tokens, (token, chosen[rank])))
            if token not in ends and length < max_new_tokens:
                going_on.append(beam)
            elif rank < num_beams:  # the candidates beyond are there to go on, not to end
                finished.append((total / length**length_penalty, beam))
        finished = sorted(finished, reverse=True)[:num_beams]
        if not going_on:
            break
        hope = going_on[0].total / (final_length or length) ** length_penalty
        if len(finished) == num_beams and (early_stopping is True or hope <= finished[-1][0]):
            break
        beams = going_on[:num_beams]
        # Under one name, so that the states before are gone when the next are made.
        place = place.select([beam.row for beam in beams])
        place = generator.read([[beam.tokens[-1][0]] for beam in beams], state=place)
    seconds, memory = time.perf_counter() - started, peak_memory(generator.model.device)
    ranked = []
    for score, beam in finished[:num_return_sequences]:
        text = GrowingText(generator.tokenizer, request.settings)
        for token, logprob in beam.tokens:
            text.push(token, logprob)
        speeds = read._replace(seconds=seconds, peak_memory=memory)
        ranked.append((score, text.completion(speeds, None)))
    return ranked


class _Beam(NamedTuple):
    row: int  # of the states before its last token
    total: float
    tokens: tuple[tuple[int, float], ...]  # with their log-probabilities


@dataclass(eq=False)
class Node:
    """A text as far as one thought of it, all since the prompt: what `state` has read."""

    text: str
    token_ids: list[int]
    logprob: float
    score: float
    state: TextState | None = field(repr=False)  # None if it is finished or was pruned
    parent: "Node | None" = field(repr=False)
    depth: int
    finished: bool  # by the end of text, or because the tree's `done` says so


class Tree:
    """Thoughts that grow from one prompt: `leaves`, best first, and their parents.

    Nodes are scored by `score(prompt, node)`, or as in `best_of_n`; `done(text)` says that a text
    needs no more. An unfinished leaf holds a state, an expanded node does so until `prune`.
    """

    def __init__(
        self, generator: Generator, prompt: Prompt | None, *,
        score: Callable[[str, Node], float] | None = None, length_penalty: float = 1.0,
        done: Callable[[str], bool] | None = None, state: TextState | None = None,
    ) -> None:  # fmt: skip
        _check(length_penalty)
        request, place, _ = _read(generator, prompt, state, {})
        self.generator, self.prompt = generator, _text(generator, prompt)
        self._already_read = (*request.ids,)
        self._score, self._length_penalty, self._done = score, length_penalty, done
        self.samples = self.tokens = 0  # drawn so far, in all
        self.root = Node("", [], 0.0, 0.0, place, None, 0, False)
        self.leaves, self._expanded = [self.root], list[Node]()

    @property
    def best(self) -> Node:
        """The best finished leaf, or the best of all while none is."""
        return next((leaf for leaf in self.leaves if leaf.finished), self.leaves[0])

    def expand(self, nodes: Node | Sequence[Node], n: int, **settings: Any) -> list[Node]:
        """n samples go on from each node, in one batch; those that say the same are one child.

        A thought ends at a stop string, which is part of it, or after `max_new_tokens`. The i-th
        sample that the tree draws has the seed + i, so that no two thoughts share their luck.
        """
        nodes = [nodes] if isinstance(nodes, Node) else nodes
        _check(n=n)
        if not nodes:
            return []
        starts = []
        for node in nodes:
            if node.state is None:
                raise ValueError("only nodes that are neither finished nor pruned can be expanded")
            asked, so_far = _request(self.generator, (), node.state, settings), (*node.token_ids,)
            asked = replace(asked, already_read=self._already_read, already_generated=so_far)
            starts += [(asked, node.state)] * n
        children: dict[tuple[int, bool, tuple[int, ...]], Node] = {}
        for index, sample in enumerate(_samples(self.generator, starts, self.samples)):
            child = self._child(nodes[index // n], *sample)
            children.setdefault((id(child.parent), child.finished, (*child.token_ids,)), child)
            self.tokens += sample[2]
        self.samples += len(starts)
        self._expanded += nodes
        leaves = [leaf for leaf in self.leaves if leaf not in nodes] + [*children.values()]
        self.leaves = sorted(leaves, key=lambda leaf: -leaf.score)
        return [*children.values()]

    def prune(self, keep: int) -> None:
        """Drops all but the best leaves, and every state but theirs."""
        _check(keep=keep)
        for node in self.leaves[keep:] + self._expanded:
            node.state = None
        self.leaves, self._expanded = self.leaves[:keep], []

    def _child(self, parent: Node, completion: Completion, logprob: float, length: int) -> Node:
        ids, logprob = parent.token_ids + completion.token_ids, parent.logprob + logprob
        text, length = self.generator.tokenizer.decode(ids), len(parent.token_ids) + length
        finished = length > len(ids) or (self._done is not None and self._done(text))
        score = logprob / length**self._length_penalty
        state = None if finished else completion.state
        child = Node(text, ids, logprob, score, state, parent, parent.depth + 1, finished)
        if self._score is not None:
            child.score = self._score(self.prompt, child)
        return child


def tree_search(
    generator: Generator, prompt: Prompt | None, *, width: int, depth: int, expand: int,
    score: Callable[[str, Node], float] | None = None, length_penalty: float = 1.0,
    done: Callable[[str], bool] | None = None, state: TextState | None = None, **settings: Any,
) -> Tree:  # fmt: skip
    """A beam of thoughts: `depth` times, each leaf grows `expand` thoughts and `width` leaves stay.

    Up to width · (expand + 1) states are held beside a batch's own, and `width` in the end.
    """
    _check(length_penalty, width=width, depth=depth, expand=expand)
    _request(generator, prompt, state, settings)  # a mistake shows before anything is read
    tree = Tree(
        generator, prompt, score=score, length_penalty=length_penalty, done=done, state=state
    )
    for _ in range(depth):
        tree.expand([leaf for leaf in tree.leaves if not leaf.finished], expand, **settings)
        tree.prune(width)
    return tree


def _request(
    generator: Generator, prompt: Prompt | None, state: TextState | None, settings: dict[str, Any]
) -> Request:
    """What every continuation asks for, or one clear sentence."""
    if state is not None and len(state) != 1:
        raise ValueError(f"a search starts from one text, but the state has {len(state)}")
    [request] = generator.requests(None if prompt is None else [prompt], state=state, **settings)
    chosen = replace(request.settings, logprobs=request.settings.logprobs or 0)
    [request] = generator.check([replace(request, settings=chosen)], state)
    return request


def _read(
    generator: Generator, prompt: Prompt | None, state: TextState | None, settings: dict[str, Any]
) -> tuple[Request, TextState, Speeds]:
    """The request, the place after its prompt, and what it took to get there."""
    request, started = _request(generator, prompt, state, settings), time.perf_counter()
    place = generator.read([request.prompt], state=state)
    tokens = place.tokens_seen[0] - (0 if state is None else state.tokens_seen[0])
    return request, place, Speeds(tokens, time.perf_counter() - started, 0.0, 0)


def _samples(
    generator: Generator, starts: Sequence[tuple[Request, TextState]], first: int = 0
) -> Iterator[tuple[Completion, float, int]]:
    """One continuation of each start, its log-probability and length, the end of text included."""
    for start in range(0, len(starts), generator.batch_size):
        group, places = zip(*starts[start : start + generator.batch_size], strict=True)
        requests = [request.nth(first + start + index) for index, request in enumerate(group)]
        settings = requests[0].settings
        for completion in generator.run(requests, state=TextState.join(places), keep_state=True):
            assert completion.state is not None
            logprob, length = sum(completion.logprobs or ()), len(completion.token_ids)
            # "stop" may also be a stop string, which the ids hold and the text doesn't.
            whole = generator.tokenizer.decode(completion.token_ids)
            if completion.finish_reason == "stop" and completion.text == whole:
                following = completion.state.logits[0].log_softmax(-1)
                logprob += float(following[[*settings.eos_token_ids]].logsumexp(0))
                length += 1
            yield completion, logprob, length


def _text(generator: Generator, prompt: Prompt | None) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(prompt or ())


def _check(length_penalty: float = 1.0, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be a finite number, not {length_penalty}")
