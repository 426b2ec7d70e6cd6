"""Log-probabilities of given tokens: of continuations after contexts, and of whole documents.

A recurrent model reads a context once into a state, and the state is copied for everything that
follows. So contexts form a prefix tree, which is walked depth first, and the siblings in it go
through the model as one ragged batch.

`XLSTM` does the reading, not the generator's fused model: it does not change the state it is given,
it returns logits at every position, and batches here are large enough to hide the kernel launches.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.evaluate.prefix_tree import Node, PrefixTree
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.saved_state import SavedState
from xlstm7b.tokenizer import check_tokens, with_first_token

Progress = Callable[[int], None]
"""Called with the number of requests or tokens that were just processed."""

MAX_CHUNK_TOKENS = 1 << 14  # tokens of all rows in one forward pass
MAX_CHUNK_LOGITS = 1 << 26  # 256 MiB of float32, where the logits of every token are needed
MAX_WAITING_STATES = 16  # inner nodes of the tree whose state is kept for later
_INNER_BATCH = 4  # inner nodes read in one batch: each leaves a state that waits
_CPU_BATCH = 16
_MAX_GPU_BATCH = 64

Item = TypeVar("Item")


class Continuation(NamedTuple):
    """A request for the probability of `continuation` after `context`.

    The model's first token is added to the context if it was trained with one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    logprob: float
    is_greedy: bool  # every token is the most likely one at its position


class Divergence(NamedTuple):
    """Sums over tokens: how far the predictions of two models are from each other."""

    tokens: int
    kl: float  # Σ p log(p / q) over the vocabulary, in nats; p is the reference's
    agreements: int  # tokens at which both models find the same next token most likely


class _Contexts(NamedTuple):
    """A batch of contexts that were read. `requests` holds (row, index of a request) pairs."""

    state: ModelState
    logits: Tensor  # [rows, V], after the last token of each context
    requests: list[tuple[int, int]]


class _Chunk(NamedTuple):
    """The next tokens of the first `rows` rows of a batch."""

    rows: int
    start: int  # position of the chunk in its rows
    sizes: list[int]  # tokens of each row, without padding
    lengths: Tensor  # the same, on the device
    tensors: list[Tensor]  # [rows, longest], one for each kind of input


class Scorer:
    """Scores continuations and documents.

    `batch_size` is the number of rows; None chooses it by free memory. With `grouping` off, each
    request reads its whole context again, for comparison. `tokens_processed` counts all tokens
    that the model has read.
    """

    def __init__(
        self, model: XLSTM, *, batch_size: int | None = None, grouping: bool = True
    ) -> None:
        self.model, self.config = model, model.config
        first = model.backbone.embeddings.weight  # the head may be quantised
        self.device, self.dtype = first.device, torch.promote_types(first.dtype, torch.float32)
        self.batch_size = batch_size or default_batch_size(model)
        self.grouping = grouping
        self.tokens_processed = 0

    @torch.inference_mode()
    def score(
        self, requests: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Score]:
        """One score for each request, in the same order."""
        contexts = []
        for context, continuation in requests:
            if not continuation:
                raise ValueError("a continuation must have at least one token")
            check_tokens(self.config, context)
            check_tokens(self.config, continuation)
            contexts.append(with_first_token(self.config, context))
        scores: dict[int, Score] = {}
        read = self._read_tree(contexts) if self.grouping else self._read_separately(contexts)
        for state, logits, ready in read:
            ready.sort(key=lambda pair: -len(requests[pair[1]].continuation))
            for batch in in_batches(ready, self.batch_size):
                rows, indices = map(list, zip(*batch, strict=True))
                continuations = [requests[index].continuation for index in indices]
                found = self._score_continuations(state, logits, rows, continuations)
                scores.update(zip(indices, found, strict=True))
                if progress is not None:
                    progress(len(batch))
        return [scores[index] for index in range(len(requests))]

    @torch.inference_mode()
    def logprobs(
        self,
        documents: Sequence[Sequence[int]],
        progress: Progress | None = None,
        *,
        state: SavedState | None = None,
    ) -> list[Tensor]:
        """Log-probability of each token of each document, given the tokens before it; on the CPU.

        A document's first token has one only if the model has a first token of its own, or with a
        `state`: then every document continues that state, which has one row.
        Without a state, several documents lie end to end in one row, with a reset between them.
        Rows are read chunk by chunk, so a document may have any length: no window is used.
        """
        if state is not None:
            state.check_model(self.config)
            if len(state) != 1:
                raise ValueError(f"documents continue one state, not {len(state)}")
        texts: list[Sequence[int]] = []
        for document in documents:
            check_tokens(self.config, document)
            is_new = document and state is None
            texts.append(with_first_token(self.config, document) if is_new else document)
        # 1. Lay the documents out in rows, the longest row first.
        lengths = [max(0, len(text) - 1) for text in texts]
        if state is None:
            groups = [_pack(lengths, self.batch_size)]
        else:
            order = sorted((n for n in range(len(texts)) if lengths[n]), key=lambda n: -lengths[n])
            groups = [[[n] for n in batch] for batch in in_batches(order, self.batch_size)]
        # 2. Read them chunk by chunk, and take the rows apart again.
        found: dict[int, Tensor] = {}
        for packed in groups:
            for row, result in zip(
                packed, self._read_rows(packed, texts, state, progress), strict=True
            ):
                found.update(zip(row, result.split([lengths[n] for n in row]), strict=True))
        scored = [found.get(index, torch.zeros(0)) for index in range(len(documents))]
        if state is None:
            return scored
        # 3. The state's logits score the first tokens.
        first = state.logits[0].log_softmax(-1).to("cpu", self.dtype)
        return [
            torch.cat([first[list(text[:1])], rest.to(self.dtype)])
            for text, rest in zip(texts, scored, strict=True)
        ]

    def _read_rows(
        self,
        packed: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        start: SavedState | None,
        progress: Progress | None,
    ) -> list[Tensor]:
        """Log-probabilities of the tokens of rows of texts, but the first of each text."""
        inputs = [[token for n in row for token in texts[n][:-1]] for row in packed]
        targets = [[token for n in row for token in texts[n][1:]] for row in packed]
        starts = [[at == 1 for n in row for at in range(1, len(texts[n]))] for row in packed]
        if start is None:
            state = self._new_state(len(packed))
        else:
            state = start.model_state.to(self.device).fork(len(packed))
        results = [torch.zeros(len(row), dtype=self.dtype) for row in inputs]
        for chunk in self._chunks(MAX_CHUNK_TOKENS, inputs, targets, starts):
            tokens, wanted, resets = chunk.tensors
            rows = state.rows(0, chunk.rows)
            logprobs, after = self.model.token_logprobs(
                tokens,
                wanted,
                rows,
                resets=resets.bool() if start is None else None,
                lengths=chunk.lengths,
            )
            rows.copy_(after)
            for result, part, size in zip(results, logprobs.cpu(), chunk.sizes, strict=False):
                result[chunk.start : chunk.start + size] = part[:size]
            if progress is not None:
                progress(sum(chunk.sizes))
        return results

    @torch.inference_mode()
    def divergence(
        self,
        reference: XLSTM,
        documents: Sequence[Sequence[int]],
        progress: Progress | None = None,
    ) -> Divergence:
        """Compares the next-token distributions with those of a reference model.

        Counts the tokens that `logprobs` scores. Both models must have the same vocabulary.
        """
        if reference.config.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"the reference has a vocabulary of {reference.config.vocab_size}, "
                f"the model one of {self.config.vocab_size}"
            )
        for document in documents:
            check_tokens(self.config, document)
        texts = [with_first_token(self.config, document) for document in documents if document]
        packed = _pack([len(text) - 1 for text in texts], self.batch_size)
        inputs = [[token for n in row for token in texts[n][:-1]] for row in packed]
        starts = [[at == 1 for n in row for at in range(1, len(texts[n]))] for row in packed]
        models = (reference, self.model)
        states = [self._new_state(len(packed), model.config) for model in models]
        tokens = agreements = 0
        kl = 0.0
        max_tokens = MAX_CHUNK_LOGITS // 2 // self.config.vocab_size
        for chunk in self._chunks(max_tokens, inputs, starts):
            found = []
            for model, state in zip(models, states, strict=True):
                rows = state.rows(0, chunk.rows)
                logits, after = model(
                    chunk.tensors[0],
                    rows,
                    resets=chunk.tensors[1].bool(),
                    lengths=chunk.lengths,
                )
                rows.copy_(after)
                found.append(logits.log_softmax(-1))
            p, q = found
            positions = torch.arange(p.shape[1], device=self.device)
            counted = positions < chunk.lengths[:, None]
            kl += float((p.exp() * (p - q)).sum(-1)[counted].double().sum())
            agreements += int((p.argmax(-1) == q.argmax(-1))[counted].sum())
            tokens += sum(chunk.sizes)
            if progress is not None:
                progress(sum(chunk.sizes))
        return Divergence(tokens, kl, agreements)

    def _read_separately(self, contexts: Sequence[Sequence[int]]) -> Iterator[_Contexts]:
        """Reads each context in a row of its own."""
        order = sorted(range(len(contexts)), key=lambda n: -len(contexts[n]))
        for batch in in_batches(order, self.batch_size):
            state = self._new_state(len(batch))
            logits = self._read(state, [contexts[n] for n in batch])
            yield _Contexts(state, logits, list(enumerate(batch)))

    def _read_tree(self, contexts: Sequence[Sequence[int]]) -> Iterator[_Contexts]:
        """Reads the contexts; each prefix that is worth it is read once.

        Memory is bounded. Leaves are read first, a few inner nodes at a time, and when
        `MAX_WAITING_STATES` states wait, the nodes below are read without further sharing.
        """
        tree = PrefixTree(contexts)
        waiting = [(self._new_state(1), tree.root, tree.children(tree.root))]
        while waiting:
            start, parent, children = waiting.pop()
            leaves = [child for child in children if child.is_leaf]
            inner = [child for child in children if not child.is_leaf]
            for _, found in self._read_nodes(tree, start, parent, leaves):
                yield found
            if inner[_INNER_BATCH:]:
                waiting.append((start, parent, inner[_INNER_BATCH:]))
            for batch, found in self._read_nodes(tree, start, parent, inner[:_INNER_BATCH]):
                yield found
                deeper = len(waiting) < MAX_WAITING_STATES
                for row, node in enumerate(batch):
                    below = tree.children(node) if deeper else tree.leaves(node)
                    waiting.append((found.state.select([row]), node, below))

    def _read_nodes(
        self, tree: PrefixTree, start: ModelState, parent: Node, nodes: Sequence[Node]
    ) -> Iterator[tuple[Sequence[Node], _Contexts]]:
        """Reads nodes below a parent, whose state is `start`; in batches, the longest first."""
        longest_first = sorted(nodes, key=lambda node: -node.end)
        for batch in in_batches(longest_first, self.batch_size):
            state = start.fork(len(batch))
            logits = self._read(state, [tree.tokens(node, parent.end) for node in batch])
            ended = [(row, node.first) for row, node in enumerate(batch) if tree.ends_at(node)]
            requests = [(row, index) for row, n in ended for index in tree.indices[n]]
            yield batch, _Contexts(state, logits, requests)

    def _read(self, state: ModelState, segments: Sequence[Sequence[int]]) -> Tensor:
        """Reads segments[r], the longest first, into row r of a state. Returns the last logits."""
        shape = len(segments), self.config.vocab_size
        logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        for chunk in self._chunks(MAX_CHUNK_TOKENS, segments):
            rows = state.rows(0, chunk.rows)
            logits[: chunk.rows], after = self.model(
                chunk.tensors[0], rows, lengths=chunk.lengths, logits="last"
            )
            rows.copy_(after)
        return logits

    def _score_continuations(
        self,
        state: ModelState,
        logits: Tensor,
        rows: list[int],
        continuations: Sequence[Sequence[int]],
    ) -> list[Score]:
        """Scores continuations[i], the longest first, after row rows[i] of the contexts.

        The contexts' logits score each first token. The last token is never read.
        """
        first = torch.tensor([tokens[0] for tokens in continuations], device=self.device)
        logprob, greedy = _target_logprobs(logits[rows], first)
        logprob = logprob.double()
        longer = [tokens for tokens in continuations if len(tokens) > 1]
        if longer:
            inputs, targets = [t[:-1] for t in longer], [t[1:] for t in longer]
            own = state.select(rows[: len(longer)])
            max_tokens = MAX_CHUNK_LOGITS // self.config.vocab_size
            for chunk in self._chunks(max_tokens, inputs, targets):
                tokens, wanted = chunk.tensors
                part = own.rows(0, chunk.rows)
                outputs, after = self.model(tokens, part, lengths=chunk.lengths)
                part.copy_(after)
                logprobs, best = _target_logprobs(outputs, wanted)
                positions = torch.arange(tokens.shape[1], device=self.device)
                padding = positions >= chunk.lengths[:, None]
                logprob[: chunk.rows] += logprobs.double().masked_fill(padding, 0).sum(1)
                greedy[: chunk.rows] &= (best | padding).all(1)
        return list(map(Score, logprob.tolist(), greedy.tolist()))

    def _chunks(self, max_tokens: int, *kinds: Sequence[Sequence[int]]) -> Iterator[_Chunk]:
        """Cuts rows, the longest first, into chunks of at most `max_tokens` tokens in all.

        Each kind of input has the same row lengths. A chunk has at least one token of each row
        that is not at its end, and only of these.
        """
        lengths, start = [len(row) for row in kinds[0]], 0
        while lengths and start < lengths[0]:
            count = sum(length > start for length in lengths)
            end = start + min(max(1, max_tokens // count), lengths[0] - start)
            sizes = [min(end, length) - start for length in lengths[:count]]
            tensors = [self._padded([row[start:end] for row in rows[:count]]) for rows in kinds]
            self.tokens_processed += sum(sizes)
            yield _Chunk(count, start, sizes, torch.tensor(sizes, device=self.device), tensors)
            start = end

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(padded).to(self.device)

    def _new_state(self, rows: int, config: ModelConfig | None = None) -> ModelState:
        return ModelState.zeros(config or self.config, rows, dtype=self.dtype, device=self.device)


def default_batch_size(model: XLSTM) -> int:
    """The number of rows for half of the GPU's free memory; a constant on a CPU.

    A row needs four states: the one it starts from, the one the model returns, and the same two for
    its continuation.
    """
    device = model.backbone.embeddings.weight.device
    if device.type != "cuda":
        return _CPU_BATCH
    state = ModelState.zeros(model.config, 1, device=torch.device("meta")).nbytes
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(_MAX_GPU_BATCH, free // 2 // (4 * state)))


def in_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _pack(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Distributes items over rows of similar total length. Returns the longest row first."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    filled = [0] * rows
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        if lengths[item]:
            shortest = filled.index(min(filled))
            packed[shortest].append(item)
            filled[shortest] += lengths[item]
    order = sorted((row for row in range(rows) if packed[row]), key=lambda row: -filled[row])
    return [packed[row] for row in order]


def _target_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and whether it is the most likely token."""
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == targets
