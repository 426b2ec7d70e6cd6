"""A model for generation, in two steps: what mistakes can be found by, then the weights."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from xlstm7b.cli.options import to_device, to_dtype

if TYPE_CHECKING:
    import torch

    from xlstm7b.config import ModelConfig
    from xlstm7b.generate import Generator, TextState
    from xlstm7b.generate.chat import Turns
    from xlstm7b.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """All of a model but its weights."""

    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    dtype: "torch.dtype | None"
    device: str
    state_dtype: "torch.dtype"
    batch_size: int

    def load(self) -> "Generator":
        """Reads the weights."""
        from xlstm7b.generate import Generator
        from xlstm7b.model import XLSTM

        model = XLSTM.from_pretrained(self.folder, dtype=self.dtype, device=self.device)
        return Generator(
            model, self.tokenizer, state_dtype=self.state_dtype, batch_size=self.batch_size
        )

    def load_state(self, path: Path) -> "TextState":
        """A saved place in one text."""
        from xlstm7b.generate import TextState

        state = TextState.load(path, self.config, device=self.device)
        if len(state) != 1:
            raise ValueError(f"{path} holds {len(state)} texts; here one goes on")
        return state

    def turns(self, system: str | None = None) -> "Turns":
        """How a conversation is written down: by the folder's chat template, if that will do."""
        from xlstm7b.generate.chat import PlainTurns, TemplateTurns
        from xlstm7b.tokenizer import load_chat_template

        try:
            template = load_chat_template(self.folder)
            return PlainTurns() if template is None else TemplateTurns(template, system)
        except ValueError as error:
            told = f"{error}; turns are written as User: and Assistant: instead"
            print(told, file=sys.stderr, flush=True)
            return PlainTurns()


def open_model(
    model: str,
    *,
    tokenizer: Path | None,
    dtype: str | None,
    device: str | None,
    state_dtype: str,
    batch_size: int = 1,
) -> OpenedModel:
    where, wanted = to_device(device), None if dtype is None else to_dtype(dtype)
    if wanted is None and where.startswith("cuda"):
        wanted = to_dtype("bfloat16")
    kept_in = to_dtype(state_dtype, ("float32", "bfloat16"))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    from xlstm7b.tokenizer import load_tokenizer
    from xlstm7b.weights import read_config, resolve

    folder = resolve(model)
    config = read_config(folder)
    text = load_tokenizer(tokenizer or folder, config.vocab_size)
    return OpenedModel(folder, config, text, wanted, where, kept_in, batch_size)


@contextmanager
def stopping_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C no longer raises: what is yielded says whether it was pressed. A second one raises.

    For that a text is still being read, say, where nothing asks.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
