"""Perplexity of any text: whole documents on a streamed state, and by position within them.

Does a model use its context? Then its loss falls with the position.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlstm7b.data.sources import Columns, find_sources, read_batches
from xlstm7b.evaluate.results import replace_file
from xlstm7b.evaluate.scoring import Progress, Scorer
from xlstm7b.tokenizer import Tokenizer

_FIRST_BUCKET = 128  # tokens; each one after it is as long as all before it
_TOKENS_AT_ONCE = 1 << 22  # of documents held in memory


@dataclass(frozen=True)
class Bucket:
    """Tokens at places first … last of their documents; nats per token."""

    first: int
    last: int
    tokens: int
    loss: float
    perplexity: float


@dataclass(frozen=True)
class Perplexity:
    documents: int
    tokens: int
    bytes: int
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    buckets: list[Bucket]

    def results(self, task: str) -> dict[str, Any]:
        """In the harness's layout, the buckets beside it."""
        metrics = {"loss": self.loss, "perplexity": self.perplexity}
        metrics["bits_per_byte"] = self.bits_per_byte
        by_place = {
            f"{task}, tokens {b.first}–{b.last}": {
                "alias": f" - {b.first}–{b.last}",
                "loss,none": b.loss,
            }
            for b in self.buckets
        }
        return {
            "results": {
                task: {"alias": task, **{f"{name},none": x for name, x in metrics.items()}},
                **by_place,
            },
            "versions": {task: 1},
            "n-shot": {task: 0},
            "n-samples": {task: {"original": self.documents, "effective": self.documents}},
            "higher_is_better": {task: dict.fromkeys(metrics, False)},
            "perplexity": asdict(self),
        }


def read_documents(inputs: Iterable[str | Path], column: str = "text") -> Iterator[str]:
    """The texts in files and folders: .txt is one, a line of .jsonl and a row of .parquet are."""
    columns = Columns(text=column)
    for path in find_sources(inputs):
        for batch in read_batches(path, columns):
            for _, segments in batch.documents(columns):
                yield segments[0][0]


def perplexity(
    scorer: Scorer, tokenizer: Tokenizer, documents: Iterable[str], progress: Progress | None = None
) -> Perplexity:
    """Reads every document whole, from id 0 on, as if there were no other."""
    count = size = held = 0
    sums = torch.zeros(64, dtype=torch.float64)
    counts = torch.zeros(64, dtype=torch.long)
    waiting: list[list[int]] = []

    def measure() -> None:
        for logprobs in scorer.logprobs(waiting, progress):
            places = _buckets(len(logprobs))
            sums.index_add_(0, places, -logprobs.double())
            counts.index_add_(0, places, torch.ones_like(places))
        waiting.clear()

    for document in documents:
        count, size = count + 1, size + len(document.encode())
        waiting.append(tokenizer.encode(document))
        held += len(waiting[-1])
        if held >= _TOKENS_AT_ONCE:
            measure()
            held = 0
    measure()
    tokens, total = int(counts.sum()), float(sums.sum())
    if not tokens:
        raise ValueError("there is no text to measure")
    buckets = []
    for index in counts.nonzero().flatten().tolist():
        first = 0 if index == 0 else _FIRST_BUCKET << (index - 1)
        loss = float(sums[index] / counts[index])
        last = (_FIRST_BUCKET << index) - 1
        buckets.append(Bucket(first, last, int(counts[index]), loss, math.exp(loss)))
    loss = total / tokens
    return Perplexity(
        count, tokens, size, loss, math.exp(loss), total / math.log(2) / size, buckets
    )


def _buckets(length: int) -> Tensor:
    """The bucket of each place: 0 for the first 128, then one for each doubling."""
    places = torch.arange(length) // _FIRST_BUCKET
    return torch.frexp(places.double()).exponent.long()


def plot(measured: Perplexity, path: Path, label: str) -> None:
    """Loss over the position in the document, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    edges = [max(1, bucket.first) for bucket in measured.buckets]
    edges.append(measured.buckets[-1].last + 1)
    losses = [bucket.loss for bucket in measured.buckets]
    axes.stairs(losses, edges, baseline=None, label=label)
    axes.axhline(measured.loss, linestyle=":", label=f"all: {measured.loss:.3f}")
    axes.set(xscale="log", xlabel="position in the document, tokens", ylabel="nats per token")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.tight_layout()
    replace_file(path, lambda aside: figure.savefig(aside, dpi=120, format="png"))
    pyplot.close(figure)
