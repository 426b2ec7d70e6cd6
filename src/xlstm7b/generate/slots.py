"""A fixed pool of rows, each a text that grows, and one row beside them in which prompts are read.

All memory is taken at the start. Rows that run lie at the front of the pool, so that a step on a
GPU can leave the rest of it out: there is a CUDA graph for each of a few numbers of rows.
"""

import os
from collections.abc import Sequence

import torch

from xlstm7b.generate.decoder import LENGTHS, PIECE, Decoder, Results
from xlstm7b.generate.generator import Generator
from xlstm7b.generate.sampling import MOST_LOGPROBS, Needs, SamplingSettings
from xlstm7b.generate.states import TextState

MOST_SLOTS, CPU_SLOTS = 256, 8
_BUCKETS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, MOST_SLOTS)
_FREE_SHARE = 0.7  # of the GPU's free memory; the rest is for prompts, graphs and states given out
_KINDS = (
    Needs(),
    Needs(sampling=True),
    Needs(sampling=True, filters=True),
    Needs(True, True, True, True, True, MOST_LOGPROBS),
)


def enough(asked: Needs, vocab_size: int) -> Needs:
    """The least of a few kinds of steps that does all that is asked: each is a graph of its own."""
    kind = next(kind for kind in _KINDS if Needs.union([kind, asked]) == kind)
    if kind.logprobs is None:
        return kind
    return kind._replace(logprobs=min(kind.logprobs, vocab_size))


def state_bytes(generator: Generator) -> int:
    """Bytes of one text's `TextState`."""
    config = generator.config
    memory = config.num_heads * (config.d_qk * (config.d_hv + 1) + 1) * config.num_blocks
    return memory * generator.state_dtype.itemsize + 4 * config.vocab_size


def fitting_slots(generator: Generator, asked: int | None, other_bytes: int) -> int:
    """As many rows as are asked for, or as fit besides so many other bytes.

    More than there is memory for are a `ValueError`.
    """
    device = generator.model.device
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else _host_bytes()
    # A row of the sampler is a few vectors of the vocabulary's length.
    row = state_bytes(generator) + 16 * generator.config.vocab_size
    if asked is None:
        fitting = int((memory * _FREE_SHARE - other_bytes) // row)
        return max(1, min(MOST_SLOTS, fitting)) if on_gpu else CPU_SLOTS
    if asked * row > memory:
        raise ValueError(
            f"{asked:,} slots of {row / 1e6:,.1f} MB do not fit into {memory / 1e9:,.1f} GB"
        )
    return asked


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Slots:
    """The rows and which of them are free. A call never waits for the device."""

    def __init__(
        self, generator: Generator, count: int, buckets: Sequence[int] | None = None
    ) -> None:
        self._config, self._device = generator.config, generator.model.device
        self._on_gpu = self._device.type == "cuda"
        decoder = Decoder(generator.model, count, state_dtype=generator.state_dtype)
        self._reader = Decoder(generator.model, 1, state_dtype=generator.state_dtype)
        if buckets is None:
            # Always the same shape on a CPU: there a text is the same to the bit, whoever else is.
            buckets = _BUCKETS if self._on_gpu else ()
        self._pool = decoder
        # Made once: 97 views of a 7B's state, each time, are much work beside a step.
        self._rows = [decoder.state.rows(row, row + 1) for row in range(count)]
        self._buckets = {rows: decoder.first(rows) for rows in buckets if rows < count}
        self._buckets[count] = decoder
        self.count, self.free = count, set(range(count))

    def warm_up(self, piece_tokens: int) -> None:
        """Has a GPU's graphs made before anyone waits for them; pieces have so many at most."""
        if not self._on_gpu:
            return
        for decoder in self._buckets.values():
            for kind in _KINDS:
                decoder.decode_one(self._needs(kind))  # no row is live: nothing moves
        most = min(piece_tokens, PIECE)
        for size in (1, *(length for length in LENGTHS if length < most), most):
            self._reader.prefill([[0] * size])

    # A prompt is read in the reader, and waits in a row of the pool while others are.

    def load(self, place: TextState | int | None) -> None:
        """Puts the reader at a place: a state, where a row of the pool is, or before any text."""
        if isinstance(place, int):
            place = self.view(place)
        self._reader.start(place)

    def park(self, row: int) -> None:
        """Leaves what the reader is at in a row of the pool."""
        self._rows[row].copy_(self._reader.state)
        self._pool.logits[row] = self._reader.logits[0]

    def read(self, ids: Sequence[int]) -> None:
        self._reader.prefill([ids])

    def read_scored(self, ids: Sequence[int], targets: Sequence[int], top: int) -> Results:
        return self._reader.prefill_scored(ids, targets, top)

    def read_state(self) -> TextState:
        """A copy of what the reader is at."""
        return TextState(self._config, self._reader.state, self._reader.logits).clone()

    def begin(
        self,
        row: int,
        settings: SamplingSettings,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
    ) -> Results:
        """Moves the text in the reader to a row of the pool; its first token is under way."""
        reader = self._reader
        reader.sampler.set_row(0, settings, seed=seed, prompt=prompt, generated=generated)
        reader.sample()
        self.park(row)
        self._pool.sampler.take_row(row, reader.sampler, 0)
        return reader.results()

    # Rows of the pool.

    def view(self, row: int) -> TextState:
        """What a row is at, as long as it is there."""
        return TextState(self._config, self._rows[row], self._pool.logits[row : row + 1])

    def release(self, row: int) -> None:
        """Ends what is in a row; the next step is without it."""
        self._pool.sampler.clear_row(row)
        self.free.add(row)

    def lower_row(self, running: Sequence[int]) -> tuple[int, int] | None:
        """Moves the last running row to the front if fewer rows then do; (from, to) if it did."""
        last = max(running)
        if not self.free or self._bucket(last + 1) == self._bucket(len(running)):
            return None
        row = min(self.free)
        if row > last:
            return None
        self._rows[row].copy_(self._rows[last])
        self._pool.logits[row] = self._pool.logits[last]
        self._pool.sampler.take_row(row, self._pool.sampler, last)
        self.free.remove(row)
        self.release(last)
        return last, row

    def decode(self, running: Sequence[int]) -> Results:
        """One token more for all running rows."""
        decoder = self._buckets[self._bucket(max(running) + 1)]
        decoder.decode_one(self._needs(decoder.sampler.needs))
        return decoder.results()

    def _needs(self, asked: Needs) -> Needs:
        return enough(asked, self._config.vocab_size) if self._on_gpu else asked

    def _bucket(self, rows: int) -> int:
        return min(size for size in self._buckets if size >= rows)
