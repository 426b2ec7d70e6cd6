"""Batches: the same samples for any number of ranks, after any resume, at any batch size."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.data.loader import Batch, Loader, source_seed, validation_batches
from xlstm7b.data.pack import PackedDataset
from xlstm7b.data.shards import (
    ShardFolder,
    ShardWriter,
    TokenShard,
    open_folder,
    write_manifest,
)

T = 16


def folder_of(lengths: list[int], first_id: int, shards: int = 2) -> ShardFolder:
    """Documents whose tokens count up from `first_id`; odd tokens are not in the loss."""
    opened, token = [], first_id
    for part in np.array_split(np.array(lengths), shards):
        tokens: list[int] = []
        ends = []
        for length in part.tolist():
            tokens += [*range(token, token + length), 0]
            token += length
            ends.append(len(tokens))
        ids = np.array(tokens, np.uint16)
        counts = (ids % 2 == 0).astype(np.uint8)
        opened.append(TokenShard(Path("memory"), ids, np.array(ends), counts))
    return ShardFolder(Path("memory"), opened, 50254, "fingerprint", has_mask=True)


SOURCES = {
    "web": (folder_of([3, 0, 25, 11, 1, 40], 2), 50.0),
    "code": (folder_of([7, 60, 2], 10_000), 30.0),
    "books": (folder_of([90, 30], 20_000), 19.0),  # they need not sum to 100
}


def loader(**changes) -> Loader:
    return Loader(
        changes.pop("sources", SOURCES),
        **{"context_length": T, "global_batch": 8, "seed": 5, **changes},
    )


def rows(batches: list[Batch]) -> Tensor:
    """All of the batches as [samples, 4, T]."""
    return torch.cat([torch.stack([part.long() for part in batch], dim=1) for batch in batches])


REFERENCE = rows(list(islice(loader(), 64)))


def test_every_source_gives_its_share_of_its_own_windows():
    for number, (name, (folder, weight)) in enumerate(SOURCES.items()):
        mine = REFERENCE[REFERENCE[:, 1].amax(dim=1) // 10_000 == number]
        assert abs(len(mine) - len(REFERENCE) * weight / 99) < 1
        dataset = PackedDataset(folder, context_length=T, seed=source_seed(5, 0, name))
        for index, row in enumerate(mine):
            for got, want in zip(row, dataset.sample(index), strict=True):
                assert got.tolist() == want.tolist()
        assert ((mine[:, 1] % 2 == 0) == mine[:, 3]).all()
        # No token inside a document is 0 here: resets are exactly the zeros.
        assert ((mine[:, 0] == 0) == mine[:, 2]).all()


def test_batches_are_contiguous_tensors():
    batch = next(loader())
    assert {name: part.dtype for name, part in batch._asdict().items()} == {
        "tokens": torch.int64,
        "targets": torch.int64,
        "resets": torch.bool,
        "mask": torch.bool,
    }
    assert all(part.shape == (8, T) and part.is_contiguous() for part in batch)


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_share_the_same_global_batches(world_size, packing):
    ranks = [
        loader(rank=rank, world_size=world_size, packing=packing) for rank in range(world_size)
    ]
    whole = loader(packing=packing)
    for _ in range(12):
        want = rows([next(whole)])
        assert torch.equal(rows([next(rank) for rank in ranks]), want)
    assert {rank.samples for rank in ranks} == {12 * 8}


@given(
    stops=st.lists(st.integers(0, 6), max_size=5),
    sizes=st.lists(st.sampled_from([(8, 1), (8, 4), (4, 2), (16, 2), (2, 1)]), min_size=6),
    prefetch=st.integers(0, 3),
)
def test_resumes_anywhere_with_other_ranks_and_batches(stops, sizes, prefetch):
    state, got = loader().state_dict(), []
    for stop, (global_batch, world_size) in zip([*stops, 1], sizes, strict=False):
        ranks = [
            loader(global_batch=global_batch, rank=r, world_size=world_size, prefetch=prefetch)
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        got += [rows([next(rank) for rank in ranks]) for _ in range(stop)]
        state = ranks[-1].state_dict()
        for rank in ranks:
            rank.close()
    assert state == json.loads(json.dumps(state))
    assert state["samples"] == sum(map(len, got))
    assert torch.equal(torch.cat(got), REFERENCE[: state["samples"]])


def test_a_batch_ramp_reads_the_same_samples():
    ranks = [loader(global_batch=2, rank=rank, world_size=2) for rank in range(2)]
    got = []
    for global_batch, steps in ((2, 3), (4, 5), (8, 4)):
        for rank in ranks:
            rank.set_global_batch(global_batch)
            assert rank.global_batch == global_batch
        got += [rows([next(rank) for rank in ranks]) for _ in range(steps)]
    assert torch.equal(torch.cat(got), REFERENCE[: 6 + 20 + 32])


def test_the_first_sample_can_be_read_at_any_time():
    batches = loader()
    for number in range(40):
        assert torch.equal(rows([next(batches)]), REFERENCE[8 * number :][:8])
        assert torch.equal(rows([batches.first_sample()]), REFERENCE[:1])


def test_a_later_stage_reads_the_same_documents_in_another_order():
    folder = folder_of([T - 1] * 12, 2)  # a document a window
    windows = {}
    for stage in (0, 7):
        epoch = loader(sources={"web": (folder, 1.0)}, global_batch=12, stage=stage)
        windows[stage] = [tuple(row) for row in next(epoch).tokens.tolist()]
    assert windows[0] != windows[7]
    assert set(windows[0]) == set(windows[7])
    assert len(set(windows[0])) == 12


MANY_SHARDS = """
import resource, sys
from pathlib import Path

limits = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
import numpy as np
from xlstm7b.data.pack import PackedDataset
from xlstm7b.data.shards import open_folder

def opened():
    return len([*Path("/proc/self/fd").iterdir()])

before = opened()
folders = [open_folder(path) for path in sys.argv[4:]]
assert all(folder.documents == 120 for folder in folders)
datasets = [
    PackedDataset(folder, context_length=16, seed=3, packing=packing)
    for folder in folders
    for packing in ("windows", "best-fit")
]
samples = [dataset.sample(index) for index in range(80) for dataset in datasets]
np.savez(sys.argv[3], *(np.stack(part) for part in zip(*samples)))
assert opened() - before <= (limits[1] // 2 if limits[1] < 1200 else 1200), opened()
assert (opened() > 500) == (limits[1] > 1000)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]  # raised
"""


@pytest.mark.parametrize("limits", [(64, 4096), (64, 96), (64, 64)])
def test_more_shards_than_files_may_be_open(limits, tmp_path):
    """A map keeps a file open. The limit is raised; where that is too little, maps are closed."""
    draw = np.random.default_rng(0)
    for name in ("web", "code"):
        entries = []
        for number in range(120):
            path = tmp_path / name / f"{number:05d}.ds"
            path.parent.mkdir(exist_ok=True)
            with ShardWriter(path, vocab_size=320, has_mask=name == "code") as writer:
                ids = draw.integers(1, 320, draw.integers(1, 30))
                writer.add(ids, ids % 2 if name == "code" else None)
            entries.append(writer.entry)
        write_manifest(path.parent, entries, vocab_size=320, tokenizer_fingerprint="bytes")
    folders = [str(tmp_path / name) for name in ("web", "code")]
    script, file = tmp_path / "script.py", tmp_path / "samples.npz"
    script.write_text(MANY_SHARDS)
    command = [sys.executable, script, *map(str, limits), file, *folders]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    datasets = [
        PackedDataset(open_folder(folder), context_length=T, seed=3, packing=packing)
        for folder in folders
        for packing in ("windows", "best-fit")
    ]
    samples = [dataset.sample(index) for index in range(80) for dataset in datasets]
    with np.load(file) as found:
        for part, name in zip(zip(*samples, strict=True), found.files, strict=True):
            np.testing.assert_array_equal(np.stack(part), found[name])


def test_seeds_and_names_give_orders_of_their_own():
    assert not torch.equal(rows([next(loader(seed=6))]), REFERENCE[:8])
    folder = folder_of([5] * 40, 2)
    one, other = (next(loader(sources={name: (folder, 1)})) for name in ("one", "other"))
    assert not torch.equal(one.tokens, other.tokens)


def test_a_failure_while_reading_ahead_is_raised():
    folder, weight = SOURCES["web"]
    torn = folder.shards[1]._replace(tokens=folder.shards[1].tokens[:5])
    broken = replace(folder, shards=[folder.shards[0], torn])
    batches = loader(sources={"web": (broken, weight)})
    with pytest.raises(ValueError, match="broadcast"):
        list(islice(batches, 10))
    before = batches.samples
    with pytest.raises(ValueError, match="broadcast"):  # it is not skipped
        next(batches)
    assert batches.samples == before


@pytest.mark.parametrize("packing", ["windows", "best-fit", "documents"])
def test_an_id_above_the_vocabulary_names_its_file_before_the_model_reads_it(packing):
    """The batches before it are as usual."""
    folder = folder_of([40, 30, 20, 50], 2)
    clean = validation_batches(folder, T, 1, packing=packing)
    last = folder.shards[1]._replace(
        path=Path("web/00001.ds"), tokens=folder.shards[1].tokens.copy()
    )
    last.tokens[33] = 50_254
    damaged = replace(folder, path=Path("web"), shards=[folder.shards[0], last])
    batches = validation_batches(damaged, T, 1, packing=packing)
    message = (
        r"^web/00001.ds is damaged: token 33 is the id 50254, but the ids of web end at 50253; "
        r"check it with `xlstm7b prepare --verify web`$"
    )
    for _ in range(4):
        assert torch.equal(next(batches).targets, next(clean).targets)
    with pytest.raises(ValueError, match=message):
        list(batches)
    with pytest.raises(ValueError, match=message):
        list(islice(loader(sources={"web": (damaged, 1.0)}, packing=packing), 8))


@pytest.mark.parametrize("at", [T - 1, T, 3 * T - 1])
def test_an_id_above_the_vocabulary_before_a_window_is_not_read_either(at):
    """A window's first input may be the last token of the window before it."""
    folder = folder_of([70], 2, shards=1)
    clean = PackedDataset(folder, context_length=T, seed=None)
    samples = [clean.sample(index) for index in range(4)]
    damaged = [2 + at in sample.tokens or 2 + at in sample.targets for sample in samples]
    assert sum(damaged) == (1 if at == T else 2)
    folder.shards[0].tokens[at] = 60_000
    dataset = PackedDataset(folder, context_length=T, seed=None)
    for index, is_damaged in enumerate(damaged):
        if is_damaged:
            with pytest.raises(ValueError, match=f"token {at} is the id 60000, but the ids of mem"):
                dataset.sample(index)
        else:
            dataset.sample(index)


WEB, OTHER = SOURCES["web"], replace(SOURCES["code"][0], tokenizer_fingerprint="other")


NEOX = ModelConfig(64, 1, 2)
LLAMA = replace(NEOX, bos_token_id=9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": {}}, "the loader needs at least one source"),
        ({"context_length": 90}, "source 'web' holds 86 tokens, less than one context of 90"),
        ({"world_size": 3}, "batch of 8 cannot be divided among 3 data-parallel ranks"),
        ({"global_batch": 0}, "batch of 0 cannot be divided"),
        ({"rank": 2, "world_size": 2}, "rank must be between 0 and 1, not 2"),
        ({"prefetch": -1}, "prefetch must be at least 0 batches, not -1"),
        (
            {"model": ModelConfig(64, 1, 2, vocab_size=50_000)},
            "'web' has a vocabulary of 50,254 tokens, but the model has 50,000",
        ),
        ({"sources": {"web": WEB, "b": (OTHER, 1)}}, "'web' and 'b' were prepared with different"),
        ({"sources": {"web": (WEB[0], 0)}}, "'web' has weight 0"),
        (
            {"sources": {"raw": (replace(WEB[0], vocab_size=None), 1)}, "model": NEOX},
            "the tokenizer of source 'raw' is unknown: adopt its folder",
        ),
        (
            {"sources": {"gpt2": (replace(WEB[0], eos_token_id=7), 1)}, "model": NEOX},
            "documents of source 'gpt2' end with id 7, but model.eos_token_id is 0: set it to 7",
        ),
        (
            {"sources": {"llama": (replace(WEB[0], bos_token_id=8), 1)}, "model": LLAMA},
            "of source 'llama' is 8, but model.bos_token_id is 9: set model.bos_token_id to 8",
        ),
        (
            {"sources": {"qwen": (replace(WEB[0], bos_token_id=None), 1)}, "model": LLAMA},
            "is None, but model.bos_token_id is 9: set model.force_bos_token_insert to false",
        ),
    ],
)
def test_impossible_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        loader(**settings)


LONGER = {**SOURCES, "books": (folder_of([90, 31], 20_000), 19.0)}
SHARES = "web 50/99 of 86 tokens; code 10/33 of 72 tokens; books 19/99 of 12"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 6}, "seed 6, this one with 5: it would repeat some samples and skip others"),
        ({"stage": 3}, "stage 3, this one with 0: it would repeat"),
        ({"context_length": 8}, "context_length 8, this one with 16: it would repeat"),
        ({"packing": "best-fit"}, "packing best-fit, this one with windows: it would repeat"),
        (
            {"sources": {"web": (WEB[0], 1.0)}},
            f"sources web 1 of 86 tokens, this one with {SHARES}2",
        ),
        (
            {"sources": LONGER},
            f"sources {SHARES}3 tokens, this one with {SHARES}2 tokens: it would",
        ),
        (
            {"sources": {name: SOURCES[name] for name in ("code", "web", "books")}},
            "sources code 10/33 of 72 tokens; web 50/99 of 86 tokens; books",
        ),
    ],
)
def test_refuses_the_state_of_another_order(changes, words):
    with pytest.raises(ValueError, match=f"the saved run read its data with {words}"):
        loader().load_state_dict(loader(**changes).state_dict())


@pytest.mark.parametrize(("packing", "saved"), [("windows", "stream"), ("best-fit", "best_fit")])
def test_a_state_with_an_old_name_of_the_packing_is_read(packing, saved):
    batches = loader(packing=packing)
    batches.load_state_dict(batches.state_dict() | {"packing": saved, "samples": 8})
    assert batches.samples == 8


def test_takes_the_state_of_other_weights_with_the_same_shares():
    doubled = {name: (folder, 2 * weight) for name, (folder, weight) in SOURCES.items()}
    batches = loader(sources=doubled)
    next(batches)
    again = loader()
    again.load_state_dict(batches.state_dict())
    assert torch.equal(rows([next(again)]), REFERENCE[8:16])


@pytest.mark.parametrize("context_length", [1, 7, 16, 86, 200])
@pytest.mark.parametrize(("batch", "world_size"), [(1, 1), (4, 1), (4, 2)])
def test_validation_reads_every_token_once(context_length, batch, world_size):
    folder = WEB[0]
    ranks = [
        list(validation_batches(folder, context_length, batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    got = torch.cat([rows(list(parts)) for parts in zip(*ranks, strict=True)])
    assert len(got) % batch == 0
    tokens, targets, resets, mask = got.transpose(0, 1).flatten(1)
    want = torch.cat([torch.from_numpy(s.tokens.astype(np.int64)) for s in folder.shards])
    size = len(want)
    assert torch.equal(targets[:size], want)
    assert torch.equal(tokens[:size], torch.cat([want.new_zeros(1), want[:-1]]))
    assert torch.equal(mask[:size], (want % 2 == 0).long())
    assert not mask[size:].any()
    assert torch.equal(resets[:size], (tokens[:size] == 0).long())
    assert len(got) * context_length < size + batch * context_length


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize(("batch", "world_size"), [(1, 1), (3, 1), (8, 4), (64, 2)])
def test_validation_of_some_windows_does_not_depend_on_the_batch(batch, world_size, packing):
    """The targets that count are those of the first windows, neither more nor fewer."""
    whole = rows(list(validation_batches(WEB[0], 7, 1, packing=packing)))
    for most in (1, 5, 8, len(whole), len(whole) + 1):
        ranks = [
            validation_batches(
                WEB[0], 7, batch, rank=rank, world_size=world_size, packing=packing, most=most
            )
            for rank in range(world_size)
        ]
        got = torch.cat([rows(list(parts)) for parts in zip(*ranks, strict=True)])
        size = min(most, len(whole))
        assert torch.equal(got[:size], whole[:size])
        assert not got[size:, 3].any()
        assert len(got) < size + batch


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_with_a_document_in_each_row(world_size):
    folder = WEB[0]
    ranks = [
        list(
            validation_batches(folder, 16, 4, rank=rank, world_size=world_size, packing="documents")
        )
        for rank in range(world_size)
    ]
    got = torch.cat([rows(list(parts)) for parts in zip(*ranks, strict=True)])
    dataset = PackedDataset(folder, context_length=16, seed=None, packing="documents")
    want = [torch.from_numpy(np.stack(dataset.sample(n))) for n in range(dataset.windows)]
    assert torch.equal(got[: len(want)], torch.stack(want))
    assert len(want) <= len(got) < len(want) + 4
    assert not got[len(want) :, 3].any()


def test_validation_refuses_a_batch_or_vocabulary_that_does_not_fit():
    with pytest.raises(ValueError, match="batch of 3 cannot be divided among 2"):
        validation_batches(WEB[0], T, 3, world_size=2)
    with pytest.raises(ValueError, match="vocabulary"):
        validation_batches(WEB[0], T, 2, model=ModelConfig(64, 1, 2, vocab_size=320))
