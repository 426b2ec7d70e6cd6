"""Packing, compared with documents concatenated in plain Python."""

from collections import Counter
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import random_model
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.data.pack import PackedDataset, Sample, best_fit_decreasing, permutation
from xlstm7b.data.shards import (
    ShardFolder,
    ShardWriter,
    TokenShard,
    open_folder,
    write_manifest,
)
from xlstm7b.model import XLSTM

Document = list[tuple[int, bool]]  # tokens with the final 0, and whether each counts


def in_memory(shards: list[list[Document]]) -> ShardFolder:
    """What `open_folder` would return."""
    opened = []
    for documents in shards:
        flat = [pair for document in documents for pair in document]
        opened.append(
            TokenShard(
                Path("memory"),
                np.array([token for token, _ in flat], np.uint32),
                np.cumsum([len(document) for document in documents], dtype=np.int64),
                np.array([counts for _, counts in flat], np.uint8),
            )
        )
    return ShardFolder(Path("memory"), opened, 2**20, "fingerprint", has_mask=True)


@st.composite
def sharded_documents(draw: st.DrawFn) -> list[list[Document]]:
    """Documents of any length from 0. All tokens differ, except the 0 after each document."""
    ids = count(2)
    lengths = st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=8)
    return [
        [
            [(next(ids), draw(st.booleans())) for _ in range(length)] + [(0, draw(st.booleans()))]
            for length in draw(lengths)
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]


class Reference:
    """Some epochs of documents, concatenated token by token."""

    def __init__(self, documents: list[Document], seed: int | None, epochs: int) -> None:
        self.tokens: list[int] = []
        self.starts: list[bool] = []
        self.counts: list[bool] = []
        ends_count = False  # whether the end of text of the previous document counts
        for epoch in range(epochs):
            for number in permutation(len(documents), seed, epoch).tolist():
                *text, (_, this_end_counts) = documents[number]
                self.tokens += [0] + [token for token, _ in text]
                self.starts += [True] + [False] * len(text)
                self.counts += [ends_count] + [counts for _, counts in text]
                ends_count = this_end_counts


def assert_sample(got: Sample, want: Reference, start: int, length: int) -> None:
    assert got.tokens.tolist() == want.tokens[start : start + length]
    assert got.targets.tolist() == want.tokens[start + 1 : start + length + 1]
    assert got.resets.tolist() == want.starts[start : start + length]
    assert got.mask.tolist() == want.counts[start + 1 : start + length + 1]


@given(
    shards=sharded_documents(),
    length=st.integers(1, 50),
    seed=st.none() | st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_windows_are_slices_of_the_concatenated_documents(shards, length, seed, data):
    folder = in_memory(shards)
    dataset = PackedDataset(folder, context_length=length, seed=seed)
    windows = 3 * folder.tokens // length + 1
    epochs = windows * length // folder.tokens + 2
    want = Reference([document for shard in shards for document in shard], seed, epochs)
    page = max(1, min(8192, folder.tokens // length))
    for index in data.draw(st.permutations(range(windows // page * page))):
        number, slot = divmod(index, page)
        window = number * page + permutation(page, seed, 2**63 + number)[slot]
        assert_sample(dataset.sample(index), want, int(window) * length, length)


@given(shards=sharded_documents(), length=st.integers(1, 50))
def test_every_token_is_a_target_once_an_epoch(shards, length):
    """In the order on disk, and shuffled: the samples of a page are its windows."""
    folder = in_memory(shards)
    plain = PackedDataset(folder, context_length=length, seed=None)
    windows = range(-(-3 * folder.tokens // length))
    targets = [token for window in windows for token in plain.sample(window).targets.tolist()]
    want = Counter(token for shard in shards for document in shard for token, _ in document)
    for epoch in range(3):
        assert Counter(targets[epoch * folder.tokens :][: folder.tokens]) == want
    if folder.tokens % length == 0:
        shuffled = PackedDataset(folder, context_length=length, seed=3)
        page = range(min(8192, folder.tokens // length))
        assert want == Counter(token for n in page for token in shuffled.sample(n).targets.tolist())


@given(
    shards=sharded_documents(),
    length=st.integers(1, 50),
    seed=st.none() | st.integers(0, 9),
    packing=st.sampled_from(["windows", "best-fit"]),
)
def test_without_a_first_token_a_document_starts_with_its_own(shards, length, seed, packing):
    """The state is reset before it, and it is no target; all other tokens are, once an epoch."""
    folder = in_memory([[[*text, (0, True)] for *text, _ in shard] for shard in shards])
    dataset = PackedDataset(
        folder, context_length=length, seed=seed, packing=packing, first_token=None
    )
    firsts, following = set(), {}
    for shard in shards:
        for document in shard:
            *text, _ = (token for token, _ in document)
            firsts |= {*text[:1]}
            following |= dict(pairwise([*text, 0]))
    counted = {token for shard in shards for *text, _ in shard for token, counts in text if counts}
    seen = Counter()
    epoch = range(-(-folder.tokens // length)) if packing == "windows" and seed is None else None
    if packing == "best-fit":
        epoch = range(len(dataset._layout._edges) - 1)
    for index in epoch or range(5):
        context = []
        tokens, targets, resets, mask = dataset.sample(index)
        for token, target, reset, counts in zip(tokens, targets, resets, mask, strict=True):
            context = [] if reset else context
            assert not (context and token in firsts)
            context.append(int(token))
            if counts:
                assert all(following.get(a) == b for a, b in pairwise(context))
                assert following[token] == target
                seen[int(target)] += 1
    if epoch is not None:
        wanted = counted - firsts
        assert {token for token in seen if token} >= wanted
        assert packing == "windows" or {*seen} - {0} == wanted
        assert packing == "windows" or all(seen[token] == 1 for token in wanted)


def test_the_padding_and_the_first_token_are_the_models():
    folder = in_memory([[[(5, True), (6, True), (0, True)]]])
    dataset = PackedDataset(
        folder, context_length=5, seed=None, packing="best-fit", first_token=8, padding_token=9
    )
    sample = dataset.sample(0)
    assert sample.tokens.tolist() == [8, 5, 6, 9, 9]
    assert sample.targets.tolist() == [5, 6, 0, 9, 9]
    assert sample.resets.tolist() == [True, False, False, True, False]


def test_a_long_document_does_not_fill_a_batch():
    """Two long documents each give about half of every batch."""
    documents = [[(number, True)] * 4096 for number in (5, 9)]
    dataset = PackedDataset(in_memory([documents]), context_length=16, seed=1)
    for batch in range(16):
        found = [int(dataset.sample(32 * batch + row).targets[0]) for row in range(32)]
        assert 5 < found.count(5) < 27


def test_reads_shards_from_disk(tmp_path):
    entries = []
    for number, documents in enumerate(([[5, 6, 7], []], [[8], [0, 9]])):
        with ShardWriter(tmp_path / f"{number}.ds", vocab_size=10, has_mask=number == 1) as writer:
            for document in documents:
                writer.add(document, [0] * len(document) if number else None)
        entries.append(writer.entry)
    write_manifest(tmp_path, entries, vocab_size=10, tokenizer_fingerprint="f")
    dataset = PackedDataset(open_folder(tmp_path), context_length=10, seed=None)
    sample = dataset.sample(0)
    # A shard without masks counts everywhere; the 0 inside the last document starts nothing.
    assert sample.tokens.tolist() == [0, 5, 6, 7, 0, 0, 8, 0, 0, 9]
    assert sample.targets.tolist() == [5, 6, 7, 0, 0, 8, 0, 0, 9, 0]
    assert np.flatnonzero(sample.resets).tolist() == [0, 4, 5, 7]
    assert np.flatnonzero(~sample.mask).tolist() == [5, 7, 8]
    assert sample.tokens.dtype == sample.targets.dtype == np.int64


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_permutation_has_every_number_once(size, seed, epoch):
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


def test_orders_never_change():
    # Runs are resumed with other versions of NumPy, on other machines.
    assert permutation(10, 1, 0).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert permutation(10, 1, 1).tolist() == [0, 6, 5, 3, 4, 9, 7, 8, 2, 1]


def pieces_of(sample: Sample) -> list[tuple[slice, bool]]:
    """The span of each piece and of the padding, and whether it is padding."""
    edges = sorted({0, *np.flatnonzero(sample.resets).tolist()})
    spans = [slice(a, b) for a, b in pairwise([*edges, len(sample.tokens)])]
    return [(span, bool((sample.targets[span] == 1).all())) for span in spans]


@given(shards=sharded_documents(), length=st.integers(1, 50))
def test_best_fit_cuts_no_document_that_fits(shards, length):
    dataset = PackedDataset(in_memory(shards), context_length=length, seed=3, packing="best-fit")
    documents = [document for shard in shards for document in shard]
    before, counting = {}, {}  # by token
    for document in documents:
        for (left, _), (token, counts) in pairwise([(0, True), *document]):
            before[token], counting[token] = left, counts
    # Whole documents, and pieces of those that are too long.
    want = [[t for t, _ in d[a : a + length]] for d in documents for a in range(0, len(d), length)]
    windows = best_fit_decreasing(np.array([len(piece) for piece in want]), length).max() + 1
    for epoch in range(2):
        found = []
        for window in range(epoch * windows, (epoch + 1) * windows):
            sample = dataset.sample(window)
            for span, is_padding in pieces_of(sample):
                tokens, targets = sample.tokens[span].tolist(), sample.targets[span].tolist()
                assert tokens[1:] == targets[:-1]
                if is_padding:
                    assert tokens[0] == 1
                    assert span.stop == length
                    assert not sample.mask[span].any()
                    continue
                if targets[0]:  # many tokens are followed by a 0
                    assert tokens[0] == before[targets[0]]
                known = [token for token in targets if token]
                assert sample.mask[span][: len(known)].tolist() == [counting[t] for t in known]
                found.append(targets)
        assert sorted(found) == sorted(want)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40))
def test_best_fit_decreasing_fills_windows_like_the_plain_algorithm(lengths, capacity):
    windows = best_fit_decreasing(np.array(lengths), capacity)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    filled = np.bincount(windows, weights=lengths)
    assert sorted(capacity - filled) == sorted(rooms)


def loss(model: XLSTM, tokens: list[int], targets: list[int], resets: list[bool] | None) -> Tensor:
    reset = None if resets is None else torch.tensor([resets])
    return -model.token_logprobs(torch.tensor([tokens]), torch.tensor([targets]), resets=reset)[0][
        0
    ]


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
def test_packed_documents_are_read_as_if_alone(packing):
    model = random_model(ModelConfig(32, 2, 2, vocab_size=64))
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 64, length).tolist() for length in (0, 5, 17, 1, 0, 30, 9, 24)]
    folder = in_memory([[[(token, True) for token in [*text, 0]] for text in texts]])
    dataset = PackedDataset(folder, context_length=folder.tokens, seed=1, packing=packing)
    sample = dataset.sample(0)
    packed = loss(model, *(part.tolist() for part in sample[:3]))
    packed.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = {}
    for text in texts:
        losses = loss(model, [0, *text], [*text, 0], None)
        losses.sum().backward()
        alone[tuple(text)] = losses
    spans = [span for span, _ in pieces_of(sample)]
    assert len(spans) == len(texts)
    for span in spans:
        want = alone[tuple(sample.targets[span][:-1].tolist())]
        torch.testing.assert_close(packed[span], want, rtol=1e-10, atol=1e-12)
    for got, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-8, atol=1e-10)


@given(
    shards=sharded_documents(),
    length=st.integers(1, 30),
    seed=st.none() | st.integers(0, 3),
    has_first=st.booleans(),
)
def test_documents_have_windows_of_their_own(shards, length, seed, has_first):
    """Long ones are cut, and each piece begins as a document. No state is reset in a piece."""
    want = []
    for document in (document for shard in shards for document in shard):
        for start in range(0, len(document), length):
            targets, mask = map(list, zip(*document[start : start + length], strict=True))
            mask[0] &= has_first or start > 0
            padding = length - len(targets)
            tokens = [1 if has_first else 0, *targets[:-1]]
            resets = ([False] * len(targets) + [True] + [False] * padding)[:length]
            want.append(
                (tokens + [7] * padding, targets + [7] * padding, resets, mask + [False] * padding)
            )
    dataset = PackedDataset(
        in_memory(shards),
        context_length=length,
        seed=seed,
        packing="documents",
        first_token=1 if has_first else None,
        padding_token=7,
    )
    assert dataset.windows == len(want)
    for epoch in range(2):
        windows = range(epoch * len(want), (epoch + 1) * len(want))
        got = [tuple(part.tolist() for part in dataset.sample(index)) for index in windows]
        assert got == want if seed is None else sorted(got) == sorted(want)


def test_padding_and_cut_pieces_see_nothing_before_them():
    model = random_model(ModelConfig(32, 2, 2, vocab_size=64))
    folder = in_memory([[[(token, True) for token in [*range(2, 2 + n), 0]] for n in (20, 6, 3)]])
    dataset = PackedDataset(folder, context_length=16, seed=1, packing="best-fit")
    for window in range(2):
        sample = dataset.sample(window)
        packed = loss(model, *(part.tolist() for part in sample[:3]))
        for span, _ in pieces_of(sample):
            want = loss(model, sample.tokens[span].tolist(), sample.targets[span].tolist(), None)
            torch.testing.assert_close(packed[span], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 0}, "the context length must be at least 1, not 0"),
        ({"seed": -1}, r"the seed must be from 0 to 2\*\*64 - 1, not -1"),
        ({"packing": "tight"}, 'packing must be .* or "documents", not .tight.'),
    ],
)
def test_impossible_arguments_are_refused(settings, message):
    folder = in_memory([[[(2, True), (0, True)]]])
    with pytest.raises(ValueError, match=message):
        PackedDataset(folder, **{"context_length": 1, "seed": 0, **settings})
