"""Loss over whole documents and by position, compared with one forward pass for each document."""

import copy
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive_scoring import open_gates

from xlstm7b.config import ModelConfig
from xlstm7b.evaluate import perplexity as module
from xlstm7b.evaluate.perplexity import perplexity, plot_loss, read_documents
from xlstm7b.evaluate.scoring import Scorer
from xlstm7b.model import XLSTM
from xlstm7b.model.saved_state import SavedState
from xlstm7b.tokenizer import ByteTokenizer

DOCUMENTS = ["abc " * 200, "", "é", "so much depends upon " * 20, "x" * 128, "y" * 129]


@pytest.fixture(scope="module")
def model() -> XLSTM:
    torch.manual_seed(0)
    return open_gates(XLSTM(ModelConfig(32, 2, 2, vocab_size=320)).double())


@torch.no_grad()
def losses(model: XLSTM, document: str) -> list[float]:
    ids = torch.tensor([[0, *ByteTokenizer().encode(document)]])
    logprobs, _ = model.token_logprobs(ids[:, :-1], ids[:, 1:])
    found: list[float] = (-logprobs[0]).tolist()
    return found


@pytest.mark.parametrize("held", [1 << 22, 100])
def test_documents_score_as_if_alone(
    model: XLSTM, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HELD_TOKENS", held)
    found = perplexity(Scorer(model, batch_size=2), ByteTokenizer(), DOCUMENTS)
    alone = [losses(model, document) for document in DOCUMENTS if document]
    every = [loss for document in alone for loss in document]
    without = perplexity(Scorer(model, batch_size=2), ByteTokenizer(), filter(None, DOCUMENTS))
    assert found.text_sha256 == without.text_sha256
    assert (found.documents, found.tokens, found.bytes) == (5, len(every), len(every))
    assert found.loss == pytest.approx(sum(every) / len(every), abs=1e-10)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    edges = [(bucket.first, bucket.last) for bucket in found.buckets]
    assert edges == [(0, 127), (128, 255), (256, 511), (512, 1023)]
    for bucket in found.buckets:
        own = [loss for document in alone for loss in document[bucket.first : bucket.last + 1]]
        assert bucket.tokens == len(own)
        assert bucket.loss == pytest.approx(sum(own) / len(own), abs=1e-10)
        assert bucket.perplexity == pytest.approx(math.exp(bucket.loss))


def test_predictions_are_compared_with_those_of_a_reference(
    model: XLSTM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlstm7b.evaluate.scoring.MAX_CHUNK_LOGITS", 320 * 2 * 30)
    torch.manual_seed(1)
    reference = open_gates(XLSTM(ModelConfig(24, 1, 2, vocab_size=320)).double())
    found = perplexity(Scorer(model, batch_size=2), ByteTokenizer(), DOCUMENTS, reference=reference)
    plain = perplexity(Scorer(model, batch_size=2), ByteTokenizer(), DOCUMENTS)
    assert (found.loss, found.tokens) == (plain.loss, plain.tokens)
    assert (plain.kl, plain.top1_agreement) == (None, None)
    kl = agreements = 0.0
    for document in filter(None, DOCUMENTS):
        ids = torch.tensor([[0, *ByteTokenizer().encode(document)]])[:, :-1]
        with torch.no_grad():
            p, q = (each(ids)[0].log_softmax(-1) for each in (reference, model))
        kl += float((p.exp() * (p - q)).sum())
        agreements += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert found.kl == pytest.approx(kl / found.tokens, rel=1e-9)
    assert found.top1_agreement == agreements / found.tokens
    own = perplexity(Scorer(model), ByteTokenizer(), DOCUMENTS, reference=model)
    assert own.kl == pytest.approx(0, abs=1e-12)
    assert own.top1_agreement == 1
    assert "same most likely token in 100.00%" in str(own)
    results = own.to_results("books")
    assert results["results"]["books"]["top1_agreement,none"] == 1
    assert results["higher_is_better"]["books"]["top1_agreement"]


def test_results_are_in_the_harness_layout(model: XLSTM) -> None:
    found = perplexity(Scorer(model), ByteTokenizer(), DOCUMENTS)
    results = found.to_results("text")
    assert results["results"]["text"]["loss,none"] == found.loss
    assert results["results"]["text, tokens 128–255"]["loss,none"] == found.buckets[1].loss
    assert results["n-samples"]["text"] == {"original": 5, "effective": 5}
    assert json.loads(json.dumps(results["perplexity"]))["buckets"][3]["first"] == 512


def test_documents_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    lines = "".join(json.dumps({"body": body}) + "\n" for body in ("three", "four"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert list(read_documents([tmp_path / "b.jsonl.gz"], "body")) == ["three", "four"]
    assert list(read_documents([tmp_path / "a.txt"])) == ["one\ntwo"]
    with pytest.raises(ValueError, match="line 1: the column 'text' is missing"):
        list(read_documents([tmp_path]))


def test_damaged_weights_have_no_perplexity(model: XLSTM) -> None:
    broken = copy.deepcopy(model)
    torch.nn.init.constant_(broken.backbone.embeddings.weight, math.nan)
    with pytest.raises(FloatingPointError, match="the model's logits are not numbers"):
        perplexity(Scorer(broken), ByteTokenizer(), ["abc"])


def test_the_plot_is_the_only_file_written(model: XLSTM, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    measured = perplexity(Scorer(model), ByteTokenizer(), DOCUMENTS)
    plot_loss(measured, tmp_path / "loss.png", "a model")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize("has_first", [True, False])
def test_documents_continue_a_state(model: XLSTM, has_first: bool) -> None:
    """Each document has the losses that it has after the text, in the same batch or not."""
    config = replace(model.config, force_bos_token_insert=has_first)
    same = XLSTM(config).double()
    same.load_state_dict(model.state_dict())
    text = [0, *ByteTokenizer().encode("A text before.")]
    logits, after = same(torch.tensor([text]), logits="last")
    state = SavedState(config, after, logits)
    every = []
    for document in filter(None, DOCUMENTS):
        ids = torch.tensor([text + ByteTokenizer().encode(document)])
        with torch.no_grad():
            logprobs, _ = same.token_logprobs(ids[:, :-1], ids[:, 1:])
        every += (-logprobs[0, len(text) - 1 :]).tolist()
    for batch_size in (1, 2, 16):
        scorer = Scorer(same, batch_size=batch_size)
        found = perplexity(scorer, ByteTokenizer(), DOCUMENTS, state=state)
        assert (found.documents, found.tokens, found.bytes) == (5, len(every), len(every))
        assert found.loss == pytest.approx(sum(every) / len(every), abs=1e-10)
