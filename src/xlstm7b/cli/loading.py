"""A model for a command, opened in two steps so that mistakes show before the weights are read."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xlstm7b.devices import default_dtype, to_device, to_dtype

if TYPE_CHECKING:
    import torch

    from xlstm7b.chat_format import ChatFormat
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate import Generator
    from xlstm7b.generate.draft_model import Speculation
    from xlstm7b.model import XLSTM
    from xlstm7b.model.adapter import Adapter
    from xlstm7b.tokenizer import AnyTokenizer


def open_model(
    model: str,
    tokenizer: Path | None,
    dtype: str | None,
    device: str | None,
    state_dtype: str = "float32",
    batch_size: int = 1,
    adapter: list[str] | None = None,
    speculate: str = "off",
) -> "OpenedModel":
    """Reads a checkpoint's config and tokenizer, and its adapter if there is one.

    The arguments are the options of a command. A draft model is checked, too.
    """
    to = to_device(device)
    weights_dtype = default_dtype(to) if dtype is None else to_dtype(dtype)
    kept_dtype = to_dtype(state_dtype, ("float32", "bfloat16"))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if adapter and len(adapter) > 1:
        raise ValueError(
            f"--adapter is given {len(adapter)} times ({', '.join(adapter)}), but one adapter can "
            "be used at a time: give one, or merge the others into the weights with xlstm7b merge"
        )
    from xlstm7b.checkpoint import read_config, resolve
    from xlstm7b.tokenizer import model_tokenizer

    folder = resolve(model)
    config = read_config(folder)
    text = model_tokenizer(folder, config, tokenizer)
    loaded = open_adapter(adapter[0], folder, text) if adapter else None
    speculation: Literal["lookup"] | Path | None = None
    if speculate != "off":
        from xlstm7b.generate.draft_model import open_speculation

        speculation = open_speculation(speculate, config, text, tokenizer)
        _check_fusable("model", folder, config)
        if isinstance(speculation, Path):
            _check_fusable("draft model", speculation, read_config(speculation))
    return OpenedModel(
        folder, config, text, weights_dtype, to, kept_dtype, batch_size, loaded, speculation
    )


def _check_fusable(which: str, folder: Path, config: "ModelConfig") -> None:
    """`ValueError` if the config names classes that speculation does not support."""
    if chosen := config.other_classes():
        names = ", ".join(f"{kind} = {name!r}" for kind, name in chosen.items())
        raise ValueError(
            f"the {which} in {folder} has {names}, which --speculate does not support: give "
            f"another {which}, or leave --speculate out"
        )


def name_of(model: str) -> str:
    """What to call a model or an adapter: the folder's name, or the hub id."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def open_adapter(adapter: str, base: Path, tokenizer: "AnyTokenizer") -> "Adapter":
    """An adapter that fits the weights in the folder `base`, with its own end of text."""
    from xlstm7b.checkpoint import open_checkpoint
    from xlstm7b.model.adapter import check_base, load_adapter
    from xlstm7b.tokenizer import other_end

    checkpoint = open_checkpoint(base)
    loaded = load_adapter(adapter, checkpoint.config)
    check_base(loaded, checkpoint)
    return replace(loaded, end=other_end(loaded.folder, tokenizer, checkpoint.config))


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint's config and tokenizer, and how to load its weights."""

    folder: Path
    config: "ModelConfig"
    tokenizer: "AnyTokenizer"
    dtype: "torch.dtype | None"
    device: "torch.device"
    state_dtype: "torch.dtype"
    batch_size: int
    adapter: "Adapter | None" = None
    speculate: Literal["lookup"] | Path | None = None  # a path is the folder of a draft model

    def check_state(self, path: Path) -> None:
        """`ValueError` if a state file belongs to other weights or to another adapter."""
        from xlstm7b.checkpoint import open_checkpoint
        from xlstm7b.model.saved_state import check_state_weights

        check_state_weights(path, open_checkpoint(self.folder), self._adapter_note)

    def state_notes(self) -> dict[str, str]:
        """Notes for a state file: the weights and the adapter that it belongs to."""
        from xlstm7b.checkpoint import open_checkpoint
        from xlstm7b.model.saved_state import ADAPTER_NOTE, WEIGHTS_NOTE

        weights = json.dumps(open_checkpoint(self.folder).fingerprint())
        return {WEIGHTS_NOTE: weights, ADAPTER_NOTE: self._adapter_note}

    @property
    def _adapter_note(self) -> str:
        """Fingerprint of the adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.fingerprint

    def load_model(self) -> "XLSTM":
        """Reads the weights."""
        from xlstm7b.model import XLSTM

        model = XLSTM.from_pretrained(self.folder, dtype=self.dtype, device=self.device)
        if self.adapter is not None:
            from xlstm7b.model.adapter import apply_adapter

            apply_adapter(model, self.adapter)
        return model

    def load(self) -> "Generator":
        """Reads the weights into a generator."""
        from xlstm7b.generate import Generator

        return Generator(
            self.load_model(),
            self.tokenizer,
            state_dtype=self.state_dtype,
            batch_size=self.batch_size,
            speculate=self.load_speculation(),
        )

    def load_speculation(self) -> "Speculation":
        """Reads the weights of the draft model, if there is one."""
        from xlstm7b.generate.draft_model import load_speculation

        return load_speculation(self.speculate, self.dtype, self.device)

    def end_ids(self, ids: Sequence[int] | None = None) -> tuple[int, ...]:
        """End-of-text ids (None: the model's own), and that of the adapter if it is another."""
        from xlstm7b.generate.request import end_ids

        own = (self.config.eos_token_id,) if ids is None else ids
        return end_ids(*own, adapter=self.adapter)

    @property
    def template_folder(self) -> Path:
        """Where the chat template is: the adapter's folder if it has one, else the base's."""
        return self.folder if self.adapter is None else self.adapter.template_folder(self.folder)

    def chat_format(self, system: str | None = None) -> "ChatFormat":
        """The chat template of the checkpoint, or User: and Assistant: if there is no usable one.

        That of the adapter's folder comes first. A warning on stderr says why a template cannot be
        used.
        """
        from xlstm7b.chat_format import ChatFormat, PlainFormat, load_chat_template

        try:
            template = load_chat_template(self.template_folder)
            return PlainFormat() if template is None else ChatFormat(template, system)
        except ValueError as error:
            warning = f"{error}; turns are written as User: and Assistant: instead"
            print(warning, file=sys.stderr, flush=True)
            return PlainFormat()
