"""What a text took: tokens and bytes per second beside what the memory allows."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xlstm7b.generate import Completion, Generator

_H200_READS = 4.27e12  # bytes per second, measured


def print_speeds(
    generator: "Generator", completions: "Sequence[Completion]", peak_tbs: float | None
) -> None:
    """Some lines on stderr about texts that were generated together."""
    from xlstm7b.accounting import decode_bytes

    # A text's speed counts from its first token to its last: the longest saw the most steps.
    longest = max(completions, key=lambda completion: len(completion.token_ids))
    steps = longest.tokens_per_second
    batch = min(len(completions), generator.batch_size)
    moved = steps * decode_bytes(
        generator.config,
        batch,
        weight_itemsize=generator.model.dtype.itemsize,
        state_itemsize=generator.state_dtype.itemsize,
    )
    limit = _read_speed(generator.model.device.type) if peak_tbs is None else peak_tbs * 1e12
    generated = sum(len(completion.token_ids) for completion in completions)
    together = f", {batch} texts at a time" if batch > 1 else ""
    reading, writing = longest.prompt_tokens_per_second, batch * steps
    if longest.prompt_tokens:
        tokens = longest.prompt_tokens
        print(f"prompt       {tokens:>8,} tokens {reading:>12,.1f} tok/s", file=sys.stderr)
    for line in (
        f"generated    {generated:>8,} tokens {writing:>12,.1f} tok/s{together}",
        f"memory moved {moved / 1e9:>8,.2f} GB/s, {moved / limit:.1%} of the "
        f"{limit / 1e9:,.1f} GB/s that it reads at",
        f"peak memory  {max(c.peak_memory for c in completions) / 1e9:>8,.2f} GB",
    ):
        print(line, file=sys.stderr)


def _read_speed(device_type: str) -> float:
    """Bytes per second: an H200's on a GPU; else measured on more memory than caches hold."""
    if device_type == "cuda":
        return _H200_READS
    import torch

    memory = torch.ones(64 << 20)
    fastest, end = 0.0, time.perf_counter() + 0.3
    while time.perf_counter() < end:
        start = time.perf_counter()
        memory.sum()
        fastest = max(fastest, memory.nbytes / (time.perf_counter() - start))
    return fastest
