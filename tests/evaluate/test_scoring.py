"""Scores of continuations and documents, compared with a plain forward pass for each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_scoring import naive_score, small_model

from xlstm7b.config import ModelConfig
from xlstm7b.evaluate import prefix_tree, scoring
from xlstm7b.evaluate.scoring import Continuation, Scorer
from xlstm7b.model import XLSTM

MODEL = small_model()
TOKENS = st.integers(0, 23)
# Few different words: contexts share prefixes, are prefixes of one another, and occur twice.
WORDS = st.sampled_from([[5], [5, 6], [7] * 9, [8, 9, 10, 11] * 4])
CONTEXTS = st.lists(WORDS, max_size=5).map(
    lambda words: [token for word in words for token in word]
)
ROWS, SHORTEST, SAVED = st.integers(1, 5), st.integers(1, 12), st.integers(1, 30)
REQUESTS = st.lists(
    st.tuples(CONTEXTS, st.lists(TOKENS, min_size=1, max_size=5)), min_size=1, max_size=12
)


@given(REQUESTS, ROWS, SHORTEST, SAVED, st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=15)
def test_scores_equal_the_naive_ones(
    requests: list[tuple[list[int], list[int]]],
    rows: int,
    shortest: int,
    saved: int,
    chunk: int,
    waiting: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "MAX_CHUNK_TOKENS", chunk)
        patch.setattr(scoring, "MAX_CHUNK_LOGITS", chunk * 24)
        patch.setattr(scoring, "MAX_WAITING_STATES", waiting)
        patch.setattr(prefix_tree, "MIN_SHARED_TOKENS", shortest)
        patch.setattr(prefix_tree, "MIN_SAVED_TOKENS", saved)
        continuations = [Continuation(*request) for request in requests]
        wanted = [naive_score(MODEL, *request) for request in requests]
        grouped = Scorer(MODEL, batch_size=rows)
        plain = Scorer(MODEL, batch_size=rows, grouping=False)
        progress: list[int] = []
        for scorer in (grouped, plain):
            found = scorer.score(continuations, progress.append)
            assert [score.is_greedy for score in found] == [greedy for _, greedy in wanted]
            for score, (logprob, _) in zip(found, wanted, strict=True):
                assert score.logprob == pytest.approx(logprob, abs=1e-10)
    assert sum(progress) == 2 * len(requests)
    whole = [len(context) + 1 + len(continuation) - 1 for context, continuation in requests]
    assert plain.tokens_processed == sum(whole)
    assert grouped.tokens_processed <= plain.tokens_processed


def test_a_shared_prefix_is_read_once() -> None:
    shots = [3 + n % 20 for n in range(110)]
    questions = [[*shots, n, *[n + 1] * 9] for n in range(6)]
    options = [[1], [2], [3, 4], [5, 6, 7]]
    requests = [Continuation(q, option) for q in questions for option in options]
    scorer = Scorer(MODEL, batch_size=4)
    scorer.score(requests)
    assert scorer.tokens_processed == 1 + 110 + 6 * (10 + 0 + 0 + 1 + 2)


def test_the_prefix_of_each_of_many_tasks_is_read_once() -> None:
    """Seven tasks are more than are read in one batch."""
    contexts = [[3 + task] * 60 + [12 + n] for n in range(10) for task in range(7)]
    scorer = Scorer(MODEL)
    found = scorer.score([Continuation(context, [5]) for context in contexts])
    wanted = [naive_score(MODEL, context, [5])[0] for context in contexts]
    assert [score.logprob for score in found] == pytest.approx(wanted, abs=1e-10)
    assert scorer.tokens_processed == 7 * (1 + 60 + 10)


def test_scores_do_not_depend_on_the_batch_size() -> None:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(24, (n,), generator=draw).tolist() for n in range(1, 60, 3)]
    requests = [Continuation(context, [*context[:3], 4]) for context in ids]
    one, eight = (Scorer(MODEL, batch_size=rows).score(requests) for rows in (1, 8))
    assert [score.logprob for score in one] == pytest.approx([s.logprob for s in eight], abs=1e-10)


@given(st.lists(st.lists(TOKENS, max_size=40), max_size=8), st.integers(1, 4), st.integers(1, 50))
@settings(max_examples=40)
def test_packed_documents_score_as_if_alone(
    documents: list[list[int]], rows: int, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "MAX_CHUNK_TOKENS", chunk)
        scorer = Scorer(MODEL, batch_size=rows)
        found = scorer.logprobs(documents)
    for document, logprobs in zip(documents, found, strict=True):
        text = document if document[:1] in ([0], []) else [0, *document]
        assert len(logprobs) == max(0, len(text) - 1)
        if len(text) > 1:
            whole = torch.tensor([text])
            with torch.no_grad():
                wanted, _ = MODEL.token_logprobs(whole[:, :-1], whole[:, 1:])
            torch.testing.assert_close(logprobs, wanted[0], rtol=0, atol=1e-10)
    assert scorer.tokens_processed == sum(map(len, found))


def test_a_long_document_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_CHUNK_TOKENS", 700)
    text = torch.randint(1, 24, (5000,), generator=torch.Generator().manual_seed(2))
    (found,) = Scorer(MODEL).logprobs([text.tolist()])
    with torch.no_grad():
        before = torch.cat([torch.zeros(1, dtype=torch.long), text[:-1]])
        wanted, _ = MODEL.token_logprobs(before[None], text[None])
    assert float(found.sum()) == pytest.approx(float(wanted.sum()), abs=1e-8)


def test_a_model_without_a_first_token() -> None:
    config = ModelConfig(32, 2, 2, vocab_size=24, force_bos_token_insert=False)
    model = XLSTM(config)
    scorer = Scorer(model)
    assert [len(logprobs) for logprobs in scorer.logprobs([[5, 6, 7], [5]])] == [2, 0]


def test_nothing_to_score() -> None:
    scorer = Scorer(MODEL)
    assert scorer.score([]) == []
    assert scorer.logprobs([]) == []
    assert scorer.tokens_processed == 0
