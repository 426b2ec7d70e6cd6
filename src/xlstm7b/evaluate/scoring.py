"""Log-probabilities of given texts: continuations of contexts, and whole documents.

What recurrence gives: a context is read once into a state, and the state forked for everything
that follows it. Contexts form a tree of shared beginnings, walked depth first; what stands side by
side goes through the model as one ragged batch. `XLSTM` itself does the reading, not generation's
fused model: it leaves the state that it is given as it was, it has logits at every position, and
batches are large enough here to hide what launching its kernels one by one costs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xlstm7b.evaluate.batching import in_batches, pack, pieces
from xlstm7b.evaluate.prefixes import Node, PrefixTree
from xlstm7b.generate.decoder import check_tokens, with_first_token
from xlstm7b.generate.states import TextState
from xlstm7b.model import XLSTM, ModelState

Progress = Callable[[int], None]
"""Called with how many requests or tokens were just dealt with."""

_TOKENS_A_PIECE = 1 << 14  # of all rows together that go through the model at once
_LOGITS_A_PIECE = 1 << 26  # 256 MiB of float32: where a continuation's logits are all needed
_INNER = 4  # shared beginnings read at once: each leaves a state that waits
_MOST_WAITING = 16
_CPU_BATCH = 16
_MOST_ROWS = 64


class Continuation(NamedTuple):
    """How likely is `continuation` after `context`? Id 0 goes in front where it was trained so."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    logprob: float
    is_greedy: bool  # every token is the likeliest at its place


Places = tuple[TextState, list[tuple[int, int]]]
"""A batch of states at the ends of contexts, and which row each of some requests goes on from."""


class Scorer:
    """Scores continuations and documents, and counts the tokens that the model reads for it.

    Without `grouping` every request is a row of its own, context and all: what one compares with.
    `batch_size` is chosen from free memory if it is not given.
    """

    def __init__(
        self, model: XLSTM, *, batch_size: int | None = None, grouping: bool = True
    ) -> None:
        self.model, self.config = model, model.config
        self.device = model.lm_head.weight.device
        self.dtype = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        self.batch_size = batch_size or fitting_batch(model)
        self.grouping = grouping
        self.tokens_processed = 0

    @torch.inference_mode()
    def score(
        self, requests: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Score]:
        """One score a request, in the requests' order."""
        contexts = []
        for context, continuation in requests:
            if not continuation:
                raise ValueError("a continuation must have at least one token")
            check_tokens(self.config, context)
            check_tokens(self.config, continuation)
            contexts.append(with_first_token(self.config, context))
        scores: dict[int, Score] = {}
        for place, asked in self._walk(contexts) if self.grouping else self._one_by_one(contexts):
            asked.sort(key=lambda pair: -len(requests[pair[1]].continuation))
            for batch in in_batches(asked, self.batch_size):
                rows, chosen = map(list, zip(*batch, strict=True))
                found = self._continued(place, rows, [requests[n].continuation for n in chosen])
                scores.update(zip(chosen, found, strict=True))
                if progress is not None:
                    progress(len(batch))
        return [scores[index] for index in range(len(requests))]

    @torch.inference_mode()
    def logprobs(
        self, documents: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[Tensor]:
        """log p of each document's tokens given those before them, on the CPU.

        That is all of a document's own tokens if id 0 stands before it, all but its first if none
        does. Documents lie end to end in the rows of a batch, their states reset between them, and
        are read piece by piece on the states: any length goes, with no window.
        """
        texts = []
        for document in documents:
            check_tokens(self.config, document)
            texts.append(with_first_token(self.config, document) if document else [])
        packed = pack([max(0, len(text) - 1) for text in texts], self.batch_size)
        inputs = [[token for n in places for token in texts[n][:-1]] for places in packed]
        targets = [[token for n in places for token in texts[n][1:]] for places in packed]
        starts = [[at == 1 for n in places for at in range(1, len(texts[n]))] for places in packed]
        lengths = [len(row) for row in inputs]
        state = self._fresh(len(packed))
        read = [torch.zeros(length, dtype=self.dtype) for length in lengths]
        for count, start, taken in pieces(lengths, _TOKENS_A_PIECE):
            here = slice(start, start + taken[0])
            tokens, wanted, resets = (
                self._padded([row[here] for row in rows[:count]])
                for rows in (inputs, targets, starts)
            )
            sizes = torch.tensor(taken, device=self.device)
            logprobs, after = self.model.token_logprobs(
                tokens, wanted, state.rows(0, count), resets=resets.bool(), lengths=sizes
            )
            state.rows(0, count).copy_(after)
            for row, part, size in zip(read, logprobs.cpu(), taken, strict=False):
                row[start : start + size] = part[:size]
            self._count(taken, progress)
        found: dict[int, Tensor] = {}
        for places, row in zip(packed, read, strict=True):
            own = row.split([len(texts[n]) - 1 for n in places])
            found.update(zip(places, own, strict=True))
        return [found.get(index, torch.zeros(0)) for index in range(len(documents))]

    def _one_by_one(self, contexts: Sequence[Sequence[int]]) -> Iterator[Places]:
        """Every context in a row of its own."""
        order = sorted(range(len(contexts)), key=lambda n: -len(contexts[n]))
        for batch in in_batches(order, self.batch_size):
            memory = self._fresh(len(batch))
            logits = self._read(memory, [contexts[n] for n in batch])
            yield TextState(self.config, memory, logits), list(enumerate(batch))

    def _walk(self, contexts: Sequence[Sequence[int]]) -> Iterator[Places]:
        """Every context, what it shares with others read once.

        At most `_MOST_WAITING` states, those of a few more nodes and a batch are alive at a time:
        leaves go first, and what lies below many waiting states is read without more sharing.
        """
        tree = PrefixTree(contexts)
        start = TextState(self.config, self._fresh(1), torch.zeros(1, 0, device=self.device))
        waiting = [(start, tree.root, tree.children(tree.root))]
        while waiting:
            place, node, children = waiting.pop()
            for places, batch in self._read_nodes(tree, place, node, children, leaves=True):
                yield places, _ended(tree, batch)
            inner = [child for child in children if not child.is_leaf]
            if inner[_INNER:]:
                waiting.append((place, node, inner[_INNER:]))
            for places, batch in self._read_nodes(tree, place, node, inner[:_INNER], leaves=False):
                yield places, _ended(tree, batch)
                deeper = len(waiting) < _MOST_WAITING
                for row, child in enumerate(batch):
                    below = tree.children(child) if deeper else tree.leaves(child)
                    waiting.append((places.select([row]), child, below))

    def _read_nodes(
        self,
        tree: PrefixTree,
        place: TextState,
        above: Node,
        nodes: Sequence[Node],
        *,
        leaves: bool,
    ) -> Iterator[tuple[TextState, Sequence[Node]]]:
        """The leaves among nodes below `place`, or the others; in batches, the longest first."""
        chosen = sorted((n for n in nodes if n.is_leaf == leaves), key=lambda node: -node.end)
        for batch in in_batches(chosen, self.batch_size):
            memory = place.memory.fork(len(batch))
            logits = self._read(memory, [tree.tokens(node, above.end) for node in batch])
            yield TextState(self.config, memory, logits), batch

    def _read(self, memory: ModelState, segments: Sequence[Sequence[int]]) -> Tensor:
        """Reads segments[r] into row r, in place, the longest first; logits [B, V] behind each."""
        logits = torch.empty(
            len(segments), self.config.vocab_size, dtype=self.dtype, device=self.device
        )
        for count, start, taken in pieces([len(segment) for segment in segments], _TOKENS_A_PIECE):
            piece = self._padded([s[start : start + taken[0]] for s in segments[:count]])
            sizes = torch.tensor(taken, device=self.device)
            logits[:count], after = self.model(
                piece, memory.rows(0, count), lengths=sizes, logits="last"
            )
            memory.rows(0, count).copy_(after)
            self._count(taken)
        return logits

    def _continued(
        self, place: TextState, rows: list[int], continuations: Sequence[Sequence[int]]
    ) -> list[Score]:
        """Scores of continuations, the longest first, each behind a row of the place.

        The context's own logits give the first token; only from the second on is anything read,
        and of a continuation's last token nothing follows.
        """
        first = torch.tensor([c[0] for c in continuations], device=self.device)
        logprob, greedy = _chosen(place.logits[rows], first)
        logprob = logprob.double()
        longer = sum(len(c) > 1 for c in continuations)
        if longer:
            memory = place.memory.select(rows[:longer])
            lengths = [len(c) - 1 for c in continuations[:longer]]
            tokens = _LOGITS_A_PIECE // self.config.vocab_size
            for count, start, taken in pieces(lengths, tokens):
                here = slice(start, start + taken[0])
                inputs = self._padded([c[:-1][here] for c in continuations[:count]])
                targets = self._padded([c[1:][here] for c in continuations[:count]])
                sizes = torch.tensor(taken, device=self.device)
                logits, after = self.model(inputs, memory.rows(0, count), lengths=sizes)
                memory.rows(0, count).copy_(after)
                own = torch.arange(taken[0], device=self.device) < sizes[:, None]
                logprobs, best = _chosen(logits, targets)
                logprob[:count] += logprobs.double().masked_fill(~own, 0).sum(1)
                greedy[:count] &= (best | ~own).all(1)
                self._count(taken)
        return list(map(Score, logprob.tolist(), greedy.tolist()))

    def _fresh(self, rows: int) -> ModelState:
        return ModelState.zeros(self.config, rows, dtype=self.dtype, device=self.device)

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows of whole numbers as one tensor, the first as long as any."""
        whole = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, ids in zip(whole, rows, strict=True):
            row[: len(ids)] = ids
        return torch.from_numpy(whole).to(self.device)

    def _count(self, taken: Sequence[int], progress: Progress | None = None) -> None:
        self.tokens_processed += sum(taken)
        if progress is not None:
            progress(sum(taken))


def fitting_batch(model: XLSTM) -> int:
    """How many rows go at once: on a GPU what half of its free memory holds.

    A row takes four states: what it goes on from, what the model returns, and both again for what
    continues it.
    """
    device = model.lm_head.weight.device
    if device.type != "cuda":
        return _CPU_BATCH
    state = ModelState.zeros(model.config, 1, device=torch.device("meta")).nbytes
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(_MOST_ROWS, free // 2 // (4 * state)))


def _ended(tree: PrefixTree, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """The rows of nodes at which a context ends, each with every request for it."""
    ended = [(row, node.first) for row, node in enumerate(nodes) if tree.ends_at(node)]
    return [(row, request) for row, context in ended for request in tree.asked[context]]


def _chosen(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets, and whether each is the likeliest."""
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == targets
