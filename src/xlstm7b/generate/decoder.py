"""Prefill and decode: read a prompt once, then one token at a time from the state alone."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.sampler import Sampler, on_device
from xlstm7b.generate.sampling import Needs
from xlstm7b.generate.states import TextState
from xlstm7b.model import ModelState

# Tokens of prompt read at once, so that memory does not grow with a prompt. One text has the least
# memory to spare; for several, whose states are larger than this work, it would mean short pieces.
PIECE, MOST_TOKENS = 4096, 16384
_SCORED = 512  # tokens whose logits are held at a time when a prompt's own tokens are scored
_CHUNK = 256  # the cell's kernels work in chunks of this many tokens
# One text's pieces are padded to one of these lengths, each a CUDA graph: launched kernel by kernel
# a prompt of a few hundred tokens would wait for the host.
LENGTHS = (*range(64, 768, 64), 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, PIECE)


def with_first_token(config: ModelConfig, prompt: Sequence[int]) -> list[int]:
    """The prompt with id 0 in front where the model was trained with it and the prompt lacks it."""
    first = [config.bos_token_id]
    if config.force_bos_token_insert and list(prompt[:1]) != first:
        return first + list(prompt)
    if not prompt:
        raise ValueError("the prompt is empty, and this model has no first token of its own")
    return list(prompt)


def check_tokens(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Raises a `ValueError` that names the first id that the model does not know."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        return  # there may be millions: looked at one by one only if one is wrong
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {config.vocab_size}")


class Decoder:
    """A batch of texts in fixed memory: states, logits, sampling. On a GPU a token is one graph."""

    def __init__(
        self, model: FusedModel, batch: int, *, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.batch = model, batch
        self.state = ModelState.zeros(model.config, batch, dtype=state_dtype, device=model.device)
        vocabulary = model.config.vocab_size
        wide = torch.promote_types(model.dtype, torch.float32)
        self.logits = torch.zeros(batch, vocabulary, dtype=wide, device=model.device)
        self.sampler = Sampler(batch, vocabulary, model.device)
        self._graphs: dict[Needs | int, torch.cuda.CUDAGraph] = {}
        if model.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._piece = torch.zeros(1, PIECE, dtype=torch.long, device=model.device)
            self._length = torch.zeros(1, dtype=torch.long, device=model.device)
            self._hidden = model.embedding.new_zeros(1, model.config.embedding_dim)

    def first(self, rows: int) -> Self:
        """The first rows as a decoder for `decode_one` and `results`, over the same memory."""
        view = copy.copy(self)
        view.batch, view.state, view.logits = rows, self.state.rows(0, rows), self.logits[:rows]
        view.sampler, view._graphs = self.sampler.first(rows), {}
        return view

    @torch.inference_mode()
    def start(self, place: TextState | None) -> None:
        """Puts every row at a place in a text, or before any."""
        if place is None:
            self.state.zero_()
        else:
            self.state.copy_(place.memory)
            self.logits.copy_(place.logits)
        for row in range(self.batch):
            self.sampler.clear_row(row)

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
    ) -> None:
        """Reads prompts[r] into row r, on top of what it has read. The longest come first."""
        lengths = [len(prompt) for prompt in prompts]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] > 0
        if lengths == [1] * self.batch:
            self._read_one([prompt[0] for prompt in prompts])
            if progress is not None:
                progress(self.batch)
            return
        hidden = self.model.embedding.new_empty(len(prompts), self.model.config.embedding_dim)
        position = 0
        while position < lengths[0]:
            rows = sum(length > position for length in lengths)
            size = max(1, min(PIECE, MOST_TOKENS // rows))
            size = min(size if size < _CHUNK else size - size % _CHUNK, lengths[0] - position)
            taken = [min(size, length - position) for length in lengths[:rows]]
            piece = [
                [*prompt[position : position + count], *[0] * (size - count)]
                for prompt, count in zip(prompts[:rows], taken, strict=True)
            ]
            hidden[:rows] = self._read(on_device(piece, self.model.device), taken)
            position += size
            if progress is not None:
                progress(sum(taken))
        self.logits[: len(prompts)] = self.model.logits(hidden)

    @torch.inference_mode()
    def prefill_scored(self, tokens: Sequence[int], targets: Sequence[int], top: int) -> "Results":
        """Reads tokens into row 0, and scores what follows them in the text: all or all but one.

        The results: the targets' log-probabilities, and those of the `top` likeliest tokens with
        their ids.
        """
        unknown = [0] * (len(tokens) - len(targets))
        read, wanted = on_device([tokens, [*targets, *unknown]], self.model.device)
        vectors = self.model.vectors(read[None], self.state.rows(0, 1))[0]
        scores = []
        for x, target in zip(vectors.split(_SCORED), wanted.split(_SCORED), strict=True):
            logits = self.model.logits(x)
            log_total = logits.logsumexp(-1, keepdim=True)
            likeliest = logits.topk(top)
            own = (logits.gather(-1, target[:, None]) - log_total)[:, 0]
            scores.append((own, likeliest.values - log_total, likeliest.indices))
            self.logits[:1] = logits[-1:]
        return Results([torch.cat(parts)[: len(targets)] for parts in zip(*scores, strict=True)])

    def _read_one(self, tokens: list[int]) -> None:
        """Reads one token a row as decoding does; what is sampled then means nothing."""
        self.sampler.pending.copy_(on_device(tokens, self.model.device))
        self._decode_by(Needs())
        self.sampler.pending.fill_(-1)

    def _read(self, piece: Tensor, lengths: list[int]) -> Tensor:
        """Reads the next tokens [n, T] of the first n rows; the vectors [n, d] at their last."""
        rows, size = piece.shape
        if rows > 1 or self.model.device.type != "cuda":
            ragged = min(lengths) < size
            counts = on_device(lengths, self.model.device) if ragged else None
            return self.model.read(piece, self.state.rows(0, rows), counts)
        padded = next(length for length in LENGTHS if length >= size)
        if padded not in self._graphs:
            self._length.zero_()  # rehearsed with nothing to read: the state stays as it is
            self._graphs[padded] = self._captured(partial(self._read_padded, padded))
        self._piece[:, :size] = piece
        self._length.fill_(size)
        self._graphs[padded].replay()
        return self._hidden

    def _read_padded(self, padded: int) -> None:
        tokens, state = self._piece[:, :padded], self.state.rows(0, 1)
        self._hidden.copy_(self.model.read(tokens, state, self._length))

    @torch.inference_mode()
    def sample(self) -> None:
        """The next token of every row from the logits at hand: `sampler.tokens`."""
        self.sampler(self.logits, self.sampler.needs)

    def results(self) -> "Results":
        """Starts the last step's results on their way to the host."""
        count = self.sampler.needs.logprobs
        tensors = [self.sampler.tokens]
        if count is not None:
            best = self.sampler.top_logprobs[:, :count], self.sampler.top_tokens[:, :count]
            tensors += [self.sampler.logprob, *best]
        return Results(tensors)

    @torch.inference_mode()
    def decode_one(self, needs: Needs | None = None) -> None:
        """Reads every row's pending token and samples the next, without waiting for the device.

        `needs` may be more than the rows have: then fewer graphs serve them all.
        """
        self._decode_by(needs or self.sampler.needs)

    def _decode_by(self, needs: Needs) -> None:
        if self.model.device.type != "cuda":
            self._decode(needs)
            return
        if needs not in self._graphs:
            pending = self.sampler.pending.clone()
            self.sampler.pending.fill_(-1)  # rehearsed with no row live: nothing moves
            self._graphs[needs] = self._captured(partial(self._decode, needs))
            self.sampler.pending.copy_(pending)
        self._graphs[needs].replay()

    def _decode(self, needs: Needs) -> None:
        pending = self.sampler.pending
        live = pending >= 0
        logits = self.model.step(pending.clamp(min=0), self.state, live)
        torch.where(live[:, None], logits, self.logits, out=self.logits)
        self.sampler(self.logits, needs)

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph, once it has run: what it compiles or sets up is then in place."""
        work()
        graph = torch.cuda.CUDAGraph()
        # What other threads do with the device meanwhile is their own affair.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph


class Results:
    """One step's tokens, and their log-probabilities if some row wants them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        on_gpu = tensors[0].is_cuda
        self._copies = [to_host(tensor) if on_gpu else tensor.clone() for tensor in tensors]
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def lists(self) -> list[list[Any]]:
        """Waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, on its way from the GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
