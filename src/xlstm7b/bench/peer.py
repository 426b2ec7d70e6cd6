"""`transformers`' xLSTM as a peer: the same weights behind the two calls that we compare by."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM, ModelState


class Runner(Protocol):
    """A model as generation sees it: logits [B, T, V] or [B, 1, V], and an opaque memory."""

    def __call__(self, tokens: Tensor, memory: Any = None) -> tuple[Tensor, Any]: ...


def their_model(config: ModelConfig, folder: Path | None, dtype: torch.dtype) -> torch.nn.Module:
    """Their model with its native kernels, from a folder or with random weights."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("this needs transformers: pip install 'xlstm7b[bench]'") from error
    # Our config names their native kernels, whatever kernels the folder's own names.
    theirs = transformers.xLSTMConfig(**config.to_dict(str(dtype).removeprefix("torch.")))
    factory: Any = transformers.xLSTMForCausalLM
    if folder is None:
        model = factory(theirs).to(dtype)
    else:
        try:
            model = factory.from_pretrained(folder, config=theirs, dtype=dtype)
        except (RuntimeError, OSError) as error:
            # Widths that are no multiple of 64, for one, which it does not round up, or a
            # folder in the authors' own format, which `xlstm7b convert` turns into one it reads.
            reason = " ".join(str(error).split())
            raise ValueError(f"transformers does not load {folder}: {reason}") from error
    if config.qk_dim % 64 or config.v_dim % 64:
        widths = f"{config.qk_dim} and {config.v_dim}"
        raise ValueError(
            f"transformers runs qk and v widths that are multiples of 64, not {widths}"
        )
    module: torch.nn.Module = model.eval()
    return module


def their_runner(model: torch.nn.Module) -> Runner:
    def run(tokens: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        out = model(tokens, cache_params=memory, use_cache=True)
        return out.logits, out.cache_params

    return run


def our_runner(model: XLSTM) -> Runner:
    return lambda tokens, memory=None: model(tokens, memory)


def our_generating_runner(model: XLSTM) -> Runner:
    """As generation runs the model: fused weights, the last position's logits, memory in place."""
    fused = FusedModel(model)

    def run(tokens: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        if memory is None:
            memory = ModelState.zeros(model.config, len(tokens), device=tokens.device)
            return fused.logits(fused.read(tokens, memory))[:, None], memory
        live = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        return fused.step(tokens[:, 0], memory, live)[:, None], memory

    return run


def seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of `repeats` calls, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Speeds(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: float


@torch.inference_mode()
def speeds(run: Runner, prompt: Tensor, *, repeats: int = 3, steps: int = 8) -> Speeds:
    """Reads `prompt` [B, T] from nothing, then decodes `steps` tokens behind it, a few times."""
    device = prompt.device
    prefill = seconds(lambda: run(prompt), repeats, device)
    memory = run(prompt)[1]
    token = prompt[:, -1:]

    def decode() -> None:
        after = memory
        for _ in range(steps):
            _, after = run(token, after)

    decode_time = seconds(decode, repeats, device)
    return Speeds(prompt.numel() / prefill, len(prompt) * steps / decode_time)
