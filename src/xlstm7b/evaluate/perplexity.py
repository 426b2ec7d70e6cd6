"""Perplexity of any text, and the loss by position in the document.

If a model uses its context, the loss falls with the position.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlstm7b.data.input_files import Columns, find_input_files, read_batches
from xlstm7b.evaluate.scoring import Progress, Scorer
from xlstm7b.generate.request import LOGITS_ARE_BAD
from xlstm7b.model import XLSTM
from xlstm7b.model.saved_state import SavedState
from xlstm7b.report import counted, figure, table
from xlstm7b.tokenizer import Tokenizer

MAX_HELD_TOKENS = 1 << 22  # documents held in memory before they are scored
_FIRST_BUCKET = 128  # tokens; each later bucket is as long as all before it


@dataclass(frozen=True)
class Bucket:
    """The tokens at positions first … last of all documents. The loss is in nats per token."""

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
    text_sha256: str  # of all documents
    kl: float | None = None  # nats per token, of the predictions from those of a reference model
    top1_agreement: float | None = None  # share of tokens with the reference's most likely token

    def to_results(self, task: str) -> dict[str, Any]:
        """The harness's layout: one task, and one more for each bucket."""
        metrics = {"loss": self.loss, "perplexity": self.perplexity}
        metrics["bits_per_byte"] = self.bits_per_byte
        if self.kl is not None and self.top1_agreement is not None:
            metrics |= {"kl": self.kl, "top1_agreement": self.top1_agreement}
        results = {task: {"alias": task, **{f"{name},none": x for name, x in metrics.items()}}}
        for bucket in self.buckets:
            positions = f"{bucket.first}–{bucket.last}"
            results[f"{task}, tokens {positions}"] = {
                "alias": f" - {positions}",
                "loss,none": bucket.loss,
            }
        return {
            "results": results,
            "versions": {task: 1},
            "n-shot": {task: 0},
            "n-samples": {task: {"original": self.documents, "effective": self.documents}},
            "higher_is_better": {task: {name: name == "top1_agreement" for name in metrics}},
            "perplexity": asdict(self),
        }

    def __str__(self) -> str:
        rows = [
            (f"{b.first:,}–{b.last:,}", f"{b.tokens:,}", f"{b.loss:.4f}", f"{b.perplexity:.3f}")
            for b in self.buckets
        ]
        compared = ""
        if self.kl is not None and self.top1_agreement is not None:
            compared = (
                f"beside the reference: KL {self.kl:.5f} nats per token, "
                f"same most likely token in {self.top1_agreement:.2%}\n"
            )
        return (
            f"{counted(self.documents, 'document')}, {counted(self.tokens, 'token')}, "
            f"{counted(self.bytes, 'byte')}\n"
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.3f}, "
            f"{self.bits_per_byte:.4f} bits per byte\n{compared}"
        ) + table(("position", "tokens", "loss", "perplexity"), rows)


def read_documents(inputs: Iterable[str | Path], column: str = "text") -> Iterator[str]:
    """Documents of files and folders, as `xlstm7b prepare` reads them."""
    columns = Columns(text=column)
    for path in find_input_files(inputs).files:
        for batch in read_batches(path, columns):
            for _, document in batch.documents():
                yield document.segments[0][0]


def perplexity(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    progress: Progress | None = None,
    *,
    state: SavedState | None = None,
    reference: XLSTM | None = None,
) -> Perplexity:
    """Scores every document from its beginning to its end, each from a new state or from `state`.

    Empty documents are left out, as in `xlstm7b prepare`.
    With a `reference`, the documents are read a second time by both models, and the distributions
    of the next token are compared. It cannot be combined with a `state`.
    For a model without a first token, the first token of a document that continues no state is
    given: it has no loss, and its bytes do not count.

    Raises a `FloatingPointError` if the model's logits are not numbers.
    """
    if reference is not None and state is not None:
        raise ValueError("a reference cannot be combined with a state")
    first_is_given = state is None and not scorer.config.force_bos_token_insert
    continues = {"continues": True} if state is not None and state.has_text else {}
    count = size = held = 0
    text = hashlib.sha256()
    sums = torch.zeros(64, dtype=torch.float64)
    counts = torch.zeros(64, dtype=torch.long)
    waiting: list[list[int]] = []
    differences: list[float] = [0, 0, 0]

    def score_waiting() -> None:
        if reference is not None:
            found = scorer.divergence(reference, waiting, progress)
            differences[:] = [a + b for a, b in zip(differences, found, strict=True)]
        for logprobs in scorer.logprobs(waiting, progress, state=state):
            buckets = _bucket_of_positions(len(logprobs))
            sums.index_add_(0, buckets, -logprobs.double())
            counts.index_add_(0, buckets, torch.ones_like(buckets))
        if sums.isnan().any():
            raise FloatingPointError(LOGITS_ARE_BAD)
        waiting.clear()

    for document in filter(None, documents):
        content = document.encode()
        count, size = count + 1, size + len(content)
        text.update(hashlib.sha256(content).digest())
        waiting.append(tokenizer.encode(document, **continues))
        if first_is_given and waiting[-1]:
            size -= len(tokenizer.token_bytes(waiting[-1][0]).removeprefix(tokenizer.prefix))
        held += len(waiting[-1])
        if held >= MAX_HELD_TOKENS:
            score_waiting()
            held = 0
    score_waiting()
    tokens, total = int(counts.sum()), float(sums.sum())
    if not tokens:
        raise ValueError("there is no text to measure")
    buckets = []
    for index in counts.nonzero().flatten().tolist():
        first = 0 if index == 0 else _FIRST_BUCKET << (index - 1)
        last = (_FIRST_BUCKET << index) - 1
        loss = float(sums[index] / counts[index])
        buckets.append(Bucket(first, last, int(counts[index]), loss, math.exp(loss)))
    loss = total / tokens
    compared: dict[str, float] = {}
    if reference is not None:
        compared = {"kl": differences[1] / tokens, "top1_agreement": differences[2] / tokens}
    return Perplexity(
        documents=count,
        tokens=tokens,
        bytes=size,
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=total / math.log(2) / size,
        buckets=buckets,
        text_sha256=text.hexdigest(),
        **compared,
    )


def _bucket_of_positions(length: int) -> Tensor:
    """Bucket 0 for the first 128 positions, then one bucket for each doubling."""
    blocks = torch.arange(length) // _FIRST_BUCKET
    return torch.frexp(blocks.double()).exponent.long()


def plot_loss(measured: Perplexity, path: Path, label: str) -> None:
    """Draws the loss over the position in the document."""
    with figure(path) as axes:
        edges = [max(1, bucket.first) for bucket in measured.buckets]
        edges.append(measured.buckets[-1].last + 1)
        losses = [bucket.loss for bucket in measured.buckets]
        axes.stairs(losses, edges, baseline=None, label=label)
        axes.axhline(measured.loss, linestyle=":", label=f"mean: {measured.loss:.3f}")
        axes.set(xlabel="position in the document, tokens", ylabel="nats per token")
        axes.set_xscale("log", base=2)
        axes.legend()
