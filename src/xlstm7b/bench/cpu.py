"""`python -m xlstm7b.bench.cpu`: our model beside `transformers`' on this machine's CPU.

A 160m reads a prompt of 1024 tokens and decodes behind it; a width-256 model of 4 blocks does a
forward and a backward pass. Theirs in float32; ours in float32 and in bfloat16. Weights are random.
The peak line is the largest square float32 matrix product PyTorch reaches here: no prefill in
float32 can be faster than its FLOPs at that rate.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.accounting import forward_flops
from xlstm7b.bench.peer import (
    our_generating_runner,
    seconds,
    speeds,
    their_model,
    their_runner,
)
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

CPU = torch.device("cpu")


def generation(length: int, repeats: int) -> dict[str, dict[str, float]]:
    """Prefill and decode, tokens per second."""
    config = ModelConfig.named("160m")
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, length), generator=draw)
    theirs = their_model(config, None, torch.float32)
    model = XLSTM(config)
    model.load_state_dict(theirs.state_dict())
    runners = {
        "transformers float32": their_runner(theirs),
        "ours float32": our_generating_runner(model),
    }
    results = {name: speeds(run, prompt, repeats=repeats) for name, run in runners.items()}
    narrow = our_generating_runner(model.bfloat16())
    results["ours bfloat16"] = speeds(narrow, prompt, repeats=repeats)
    return {name: result._asdict() for name, result in results.items()}


def training(batch: int, length: int, repeats: int) -> dict[str, float]:
    """Forward and backward of the mean next-token loss, tokens per second."""
    config = ModelConfig(256, 4, 4, vocab_size=ModelConfig.named("tiny").vocab_size)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), generator=draw)
    theirs = their_model(config, None, torch.float32)
    model = XLSTM(config)
    model.load_state_dict(theirs.state_dict())

    def their_loss() -> Tensor:
        logits: Tensor = theirs(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def our_loss() -> Tensor:
        return -model.token_logprobs(tokens[:, :-1], tokens[:, 1:])[0].mean()

    def rate(loss: Callable[[], Tensor]) -> float:
        return batch * length / seconds(lambda: loss().backward(), repeats, CPU)

    with torch.no_grad():
        difference = float(our_loss() - their_loss())
    assert abs(difference) < 1e-4, f"the two losses differ by {difference}: nothing to compare"
    return {"transformers float32": rate(their_loss), "ours float32": rate(our_loss)}


def peak_flops() -> float:
    """FLOP/s of a 2048³ float32 product."""
    a, b = torch.randn(2, 2048, 2048)
    return 2 * 2048**3 / seconds(lambda: a @ b, 3, CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=3, help="timings to take the median of")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()

    peak = peak_flops()
    config = ModelConfig.named("160m")
    flops = forward_flops(config, arguments.length)
    needed = flops["total"] - flops["head"]  # the head is asked for one position alone
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "peak_float32_flops": peak,
        "prefill_limit_float32": arguments.length * peak / needed,
        "generation_160m": generation(arguments.length, arguments.repeats),
        "training_256x4": training(4, 512, arguments.repeats),
    }
    print(f"{results['machine']}, torch {results['torch']}")
    print(
        f"float32 peak {peak / 1e9:.0f} GFLOP/s: prefill ≤ {results['prefill_limit_float32']:.0f}"
    )
    theirs = results["generation_160m"]["transformers float32"]
    print(f"{'160m, tok/s':24}{'prefill ' + str(arguments.length):>14}{'':>8}{'decode':>14}")
    for name, row in results["generation_160m"].items():
        cells = (f"{row[k]:14.1f}{row[k] / theirs[k]:7.2f}×" for k in ("prefill", "decode"))
        print(f"{name:24}{''.join(cells)}")
    rows = results["training_256x4"]
    print("width 256 × 4 blocks, forward + backward, tok/s")
    for name, rate in rows.items():
        print(f"{name:24}{rate:14.1f}{rate / rows['transformers float32']:7.2f}×")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
