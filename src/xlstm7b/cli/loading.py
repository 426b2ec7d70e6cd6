"""A model for a command, opened in two steps so that mistakes show before the weights are read."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xlstm7b.devices import default_dtype, to_device, to_dtype

if TYPE_CHECKING:
    import torch

    from xlstm7b.chat_format import ChatFormat
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate import Generator
    from xlstm7b.model import XLSTM
    from xlstm7b.tokenizer import Tokenizer


def open_model(
    model: str,
    tokenizer: Path | None,
    dtype: str | None,
    device: str | None,
    state_dtype: str = "float32",
    batch_size: int = 1,
) -> "OpenedModel":
    """Reads a checkpoint's config and tokenizer. The arguments are the options of a command."""
    to = to_device(device)
    weights_dtype = default_dtype(to) if dtype is None else to_dtype(dtype)
    kept_dtype = to_dtype(state_dtype, ("float32", "bfloat16"))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    from xlstm7b.checkpoint import read_config, resolve
    from xlstm7b.tokenizer import model_tokenizer

    folder = resolve(model)
    config = read_config(folder)
    text = model_tokenizer(folder, config, tokenizer)
    return OpenedModel(folder, config, text, weights_dtype, to, kept_dtype, batch_size)


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint's config and tokenizer, and how to load its weights."""

    folder: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"
    dtype: "torch.dtype | None"
    device: "torch.device"
    state_dtype: "torch.dtype"
    batch_size: int

    def load_model(self) -> "XLSTM":
        """Reads the weights."""
        from xlstm7b.model import XLSTM

        return XLSTM.from_pretrained(self.folder, dtype=self.dtype, device=self.device)

    def load(self) -> "Generator":
        """Reads the weights into a generator."""
        from xlstm7b.generate import Generator

        return Generator(
            self.load_model(),
            self.tokenizer,
            state_dtype=self.state_dtype,
            batch_size=self.batch_size,
        )

    def chat_format(self, system: str | None = None) -> "ChatFormat":
        """The chat template of the checkpoint, or User: and Assistant: if there is no usable one.

        A warning on stderr says why a template cannot be used.
        """
        from xlstm7b.chat_format import PlainFormat, TemplateFormat, load_chat_template

        try:
            template = load_chat_template(self.folder)
            return PlainFormat() if template is None else TemplateFormat(template, system)
        except ValueError as error:
            warning = f"{error}; turns are written as User: and Assistant: instead"
            print(warning, file=sys.stderr, flush=True)
            return PlainFormat()
