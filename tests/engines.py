"""A small model behind an engine, and someone who listens to it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Completion, Generator
from xlstm7b.generate.engine import Engine, Piece
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

# In float32 the logits of `random_generator` are up to 2e-4 from what float64 gives for any text,
# by another rounding for each way of cutting it: two ways may be twice that apart.
ROUNDING = 4e-4


def random_generator() -> Generator:
    """Gates that listen to their input, logits far apart: near ties are out of the question."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter.normal_(std=0.1)
        model.lm_head.weight *= 15
        model.lm_head.weight[0] = 0  # end of text: possible, not likely
    return Generator(model, ByteTokenizer())


class Listener:
    """Takes what the engine says of one text."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self.ended = threading.Event()

    def __call__(self, news: Piece | Exception) -> None:
        assert not self.ended.is_set()
        if isinstance(news, Exception):
            self.error = news
        else:
            self.pieces.append(news)
        if isinstance(news, Exception) or news.completion is not None:
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    def completion(self) -> Completion:
        """Waits for it; what came piece by piece is the whole."""
        assert self.ended.wait(60)
        assert self.error is None, self.error
        *before, last = self.pieces
        assert last.completion is not None
        assert all(piece.completion is None for piece in before)
        return last.completion


@contextmanager
def running(generator: Generator, **options) -> Iterator[Engine]:
    engine = Engine(generator, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
    assert engine.failure is None


def advance(engine: Engine, rounds: int = 1) -> None:
    """Goes round in this thread, in an engine that was not started."""
    with torch.inference_mode():
        for _ in range(rounds):
            if engine._waiting or engine._scheduler.active:  # else it would wait for someone
                engine._scheduler.step(engine._admit())


def idle(engine: Engine) -> bool:
    """Whether all slots are free and nothing is left of any text."""
    scheduler = engine._scheduler
    free = engine._slots.free == set(range(engine._slots.count))
    left = scheduler.active, scheduler._reading, scheduler._running, engine._waiting
    live = (engine._slots._pool.sampler.pending >= 0).any()
    return free and not any(left) and not live
