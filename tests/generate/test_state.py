"""SavedState: copied, saved and loaded without a bit changed. StateStore: files, two policies."""

import gc
import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import CONFIG, names_in, save_small
from descriptors import few_descriptors
from models import assert_states_match, tensors
from safetensors.torch import load_file

from xlstm7b import files
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SavedState, StateStore
from xlstm7b.generate.state import StateLabel, StoreFull, state_bytes
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import XLSTM, ModelState, saved_state
from xlstm7b.tokenizer import ByteTokenizer

SMALL = ModelConfig(embedding_dim=32, num_blocks=3, num_heads=2, vocab_size=320)
DTYPES = [torch.float32, torch.bfloat16]


def random_state(
    rows: int, dtype: torch.dtype = torch.float32, config: ModelConfig = SMALL
) -> SavedState:
    model_state = ModelState.zeros(config, rows, dtype=dtype)
    for block in model_state.blocks:
        for part in block:
            part.copy_(torch.randn(part.shape) * 10 ** torch.empty(part.shape).uniform_(-30, 30))
    model_state.tokens_seen.copy_(torch.randint(0, 2**40, (rows,)))
    return SavedState(config, model_state, torch.randn(rows, config.vocab_size))


def fill_with_ones(state: SavedState) -> None:
    for tensor in tensors(state):
        tensor.fill_(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_size(dtype):
    """3 blocks of 2 heads of 8 × 16 + 8 + 1 numbers, 320 logits, one counter: for any length.

    Of the numbers only the 8 × 16 of C may be bfloat16.
    """
    state = random_state(4, dtype)
    row = 3 * 2 * (8 * 16 * dtype.itemsize + (8 + 1) * 4) + 320 * 4 + 8
    assert len(state) == 4
    assert state.nbytes == 4 * row
    assert state_bytes(SMALL, dtype) == row
    assert state.tokens_seen == state.model_state.tokens_seen.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clone_fork_select_cat(dtype):
    state = random_state(3, dtype)
    before = state.clone()
    assert_states_match(before, state, 0)

    forks = state.fork(2)
    assert len(forks) == 6
    assert forks.tokens_seen == [seen for seen in state.tokens_seen for _ in range(2)]
    for row in range(3):
        assert_states_match(forks.select([2 * row]), state.select([row]), 0)
        assert_states_match(forks.select([2 * row + 1]), state.select([row]), 0)
    chosen = state.select([2, 0, 2])
    assert_states_match(chosen, SavedState.cat([state.select([row]) for row in (2, 0, 2)]), 0)
    assert_states_match(state.select(torch.tensor([1])), state.select([1]), 0)
    assert_states_match(SavedState.cat([state.select([0, 1]), state.select([2])]), state, 0)
    assert_states_match(SavedState.cat([state]), state, 0)
    for other in (state.clone(), forks, chosen, SavedState.cat([state, state]), state.fork(1)):
        fill_with_ones(other)
    assert_states_match(state, before, 0)
    with pytest.raises(ValueError, match=r"^rows must be between 0 and 2, not \[0, 3\]$"):
        state.select([0, 3])
    with pytest.raises(ValueError, match=r"^the number of copies must be at least 1, not 0$"):
        state.fork(0)
    other = replace(state, config=replace(SMALL, num_blocks=2))
    sentence = "this state was saved by another model: it has num_blocks 2, the loaded model 3"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        SavedState.cat([state, other])
    with pytest.raises(ValueError, match=r"^there are no states to join$"):
        SavedState.cat([])


def test_to_the_device_where_it_is():
    state = random_state(2)
    moved = state.to("cpu")
    assert_states_match(moved, state, 0)
    assert all(x is y for x, y in zip(tensors(moved), tensors(state), strict=True))  # no copy


@pytest.mark.gpu
@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_a_gpu_and_back(non_blocking):
    state = random_state(2)
    on_gpu = state.to("cuda", non_blocking=non_blocking)
    assert all(tensor.is_cuda for tensor in tensors(on_gpu))
    back = on_gpu.to("cpu", non_blocking=non_blocking)
    if non_blocking:
        torch.cuda.synchronize()
    assert_states_match(back, state, 0)
    assert all(tensor.is_pinned() for tensor in tensors(back))


# Save and load


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_loaded_bit_by_bit(tmp_path, dtype):
    state = random_state(3, dtype)
    state.logits[1, 5] = -torch.inf
    state.save(tmp_path / "state")
    assert names_in(tmp_path) == {"state"}
    loaded = SavedState.load(tmp_path / "state", SMALL)
    assert_states_match(loaded, state, 0)
    other = random_state(1, dtype)
    other.save(str(tmp_path / "state"))  # another replaces the file; what was loaded stays
    assert_states_match(loaded, state, 0)
    assert_states_match(SavedState.load(str(tmp_path / "state"), SMALL, device="cpu"), other, 0)
    assert names_in(tmp_path) == {"state"}
    # States that are views, as a runner's, are saved by what they hold.
    state.select([2]).save(tmp_path / "row")
    rows = SavedState(SMALL, state.model_state.rows(2, 3), state.logits[2:3])
    rows.save(tmp_path / "view")
    assert (tmp_path / "row").read_bytes() == (tmp_path / "view").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_generation_continues_from_a_file(tmp_path, dtype):
    model = XLSTM(SMALL)
    with torch.no_grad():
        model.lm_head.weight *= 20
    generator = Generator(model, ByteTokenizer(), state_dtype=dtype)
    state = generator.read(["some text", "and another"])
    assert state.model_state.blocks[0].C.dtype == dtype
    state.save(tmp_path / "state")
    options = {"max_new_tokens": 12, "seed": 4, "logprobs": 0, "keep_state": True}
    want = generator.generate(["", " more"], state=state, **options)
    loaded = SavedState.load(tmp_path / "state", model.config)
    got = generator.generate(["", " more"], state=loaded, **options)
    for completion, same in zip(got, want, strict=True):
        assert completion.token_ids == same.token_ids
        assert completion.logprobs == same.logprobs
        assert_states_match(completion.state, same.state, 0)


def test_notes(tmp_path):
    """A caller's strings, next to what the file says of itself."""
    path, state = tmp_path / "state", random_state(1)
    state.save(path)
    assert SavedState.read_notes(path) == {}
    notes = {"prefix": "00ff" * 50, "exchanges": "3", "text": "é😀\n"}
    state.save(path, **notes)
    assert SavedState.read_notes(path) == notes
    state.save(path, mine="kept")
    for name in ("format", "config", "tokens_seen", "checksum"):
        with pytest.raises(ValueError, match=f"^the file has its own '{name}': give the note"):
            state.save(path, **{name: "mine"})
    assert_states_match(SavedState.load(path, SMALL), state, 0)
    with pytest.raises(ValueError, match="there is no file"):
        SavedState.read_notes(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^the note 'mine' must be a string, not 3$"):
        state.save(path, mine=3)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        state.save(path, mine="\ud800")
    assert SavedState.read_notes(path) == {"mine": "kept"}


def test_a_state_made_of_what_the_model_returns(tmp_path):
    model = XLSTM(SMALL)
    with torch.no_grad():
        logits, model_state = model(torch.randint(0, 320, (2, 9)), logits="last")
    state = SavedState(SMALL, model_state, logits)
    state.save(tmp_path / "state")
    assert_states_match(SavedState.load(tmp_path / "state", SMALL), state, 0)


# What cannot be loaded


def refusal(path: Path, config: ModelConfig = SMALL) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        SavedState.load(path, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_device_that_cannot_be_used(tmp_path):
    path = tmp_path / "state"
    random_state(1).save(path)
    for device in ("cuda:99", "toaster", *["cuda"] * (not torch.cuda.is_available())):
        message = rf"^the device '{device}' cannot be used here: [^\n]+$"
        with pytest.raises(ValueError, match=message):
            SavedState.load(path, SMALL, device=device)


def test_files_that_are_no_states(tmp_path):
    path = tmp_path / "file"
    assert refusal(path) == f"there is no file {path}"
    assert refusal(tmp_path) == f"{tmp_path} is a folder, not a file"
    for content in (b"\0" * 100, b"hello", b"xlstm" * 100, bytes(range(256)) * 9):
        path.write_bytes(content)
        assert refusal(path) == f"{path} is not a safetensors file"
    for content in (b"", b"\0"):  # perhaps the beginning of one
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path} is damaged: ")
    checkpoint, _ = save_small(tmp_path)
    weights = checkpoint / "model.safetensors"
    assert refusal(weights, CONFIG) == f"{weights} holds no saved state"


def test_a_truncated_file(tmp_path):
    path = tmp_path / "state"
    random_state(2).save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (1, 7, 8, 100, header - 1, header, header + 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(path).startswith(f"{path} is damaged")
    assert "it ends within 'logits'" in refusal(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_is_found(tmp_path, dtype, monkeypatch):
    """Wherever it is: in the header or in the numbers, which are read in blocks."""
    monkeypatch.setattr(saved_state, "_BLOCK", 1024)
    monkeypatch.setattr(saved_state, "_ROW", 16)
    path, state = tmp_path / "state", random_state(2, dtype)
    state.save(path, note="text")
    assert_states_match(SavedState.load(path, SMALL), state, 0)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    for position in [*range(0, header, 5), *draw.choices(range(header, len(whole)), k=100)]:
        changed = bytearray(whole)
        changed[position] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert refusal(path).startswith(str(path)), position
    for apart in (4, 8, 128, 136, 1024):  # two signs, or numbers swapped: rows, columns, blocks
        for start in (header, len(whole) - 1024 - 8):
            changed = bytearray(whole)
            changed[start + 7] ^= 128
            changed[start + apart + 7 if apart > 4 else start + 3] ^= 128
            path.write_bytes(changed)
            assert refusal(path) == f"{path} {BAD_SUM}"
            changed = bytearray(whole)
            one, other = slice(start, start + 4), slice(start + apart, start + apart + 4)
            changed[one], changed[other] = whole[other], whole[one]
            path.write_bytes(changed)
            assert refusal(path) == f"{path} {BAD_SUM}"
    path.write_bytes(whole)
    assert_states_match(SavedState.load(path, SMALL), state, 0)


def test_a_file_that_is_replaced_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    path, opened = tmp_path / "state", saved_state.opened_safetensors
    random_state(1).save(path)

    @contextmanager
    def slow(path):
        with opened(path) as file:
            monkeypatch.undo()
            random_state(2).save(path)
            yield file

    monkeypatch.setattr(saved_state, "opened_safetensors", slow)
    with pytest.raises(OSError, match="was replaced while it was read"):
        SavedState.load(path, SMALL)
    assert len(SavedState.load(path, SMALL)) == 2


def rewritten(path: Path, metadata: dict[str, str | None], **replaced: torch.Tensor | None) -> None:
    """A state's file of an earlier version, without a checksum.

    Some of its metadata and tensors are replaced, or left out if None.
    """
    state = random_state(2)
    C, n, m = (torch.stack(parts, dim=1) for parts in zip(*state.model_state.blocks, strict=True))
    described = {
        "format": "xlstm7b-state-1",
        "config": json.dumps(SMALL.to_dict()),
        "tokens_seen": "[5, 6]",
        **metadata,
    }
    parts = {"C": C, "n": n, "m": m, "logits": state.logits, **replaced}
    files.write_safetensors(
        path,
        {name: part for name, part in parts.items() if part is not None},
        {name: text for name, text in described.items() if text is not None},
    )


def test_missing_tensors_and_wrong_shapes(tmp_path):
    path = tmp_path / "state"
    rewritten(path, {})
    assert SavedState.load(path, SMALL).tokens_seen == [5, 6]
    for name in ("C", "n", "m", "logits"):
        rewritten(path, {}, **{name: None})
        assert refusal(path) == f"{path} is damaged: it has no {name!r}"
        rewritten(path, {}, **{name: torch.zeros(2, 3)})
        assert refusal(path) == f"{path} is damaged: its {name!r} is float32 [2, 3]"
        rewritten(path, {})
        spoiled = load_file(path)[name].clone()
        spoiled.view(-1)[-1] = torch.nan
        rewritten(path, {}, **{name: spoiled})
        assert refusal(path) == f"{path} is damaged: some numbers of its {name!r} are NaN"
    rewritten(path, {"tokens_seen": "[5, 6, 7]"})
    assert refusal(path) == f"{path} is damaged: its 'C' is float32 [2, 3, 2, 8, 16]"


NO_MODEL = "is damaged: it does not say which model it is of"
BAD_SUM = "is damaged: its checksum is wrong"
NO_LENGTH = "is damaged: it does not say how much it has read"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"format": None}, "holds no saved state"),
        ({"format": "pt"}, "holds no saved state"),
        ({"format": "xlstm7b-state-"}, "holds no saved state"),
        (
            {"format": "xlstm7b-state-3"},
            "has format 3, and this version of xlstm7b reads formats up to 2: upgrade xlstm7b",
        ),
        ({"format": "xlstm7b-state-2"}, BAD_SUM),  # without a checksum
        ({"format": "xlstm7b-state-2", "checksum": "01234567"}, BAD_SUM),
        ({"config": None}, NO_MODEL),
        ({"config": "{"}, NO_MODEL),
        ({"config": "[]"}, NO_MODEL),
        ({"config": '{"num_heads": 2}'}, NO_MODEL),
        ({"config": json.dumps({**SMALL.to_dict(), "num_heads": 0})}, NO_MODEL),
        ({"config": "[" * 100_000}, NO_MODEL),
        ({"tokens_seen": "[" * 100_000}, NO_LENGTH),
        ({"tokens_seen": None}, NO_LENGTH),
        ({"tokens_seen": "[5,"}, NO_LENGTH),
        ({"tokens_seen": "7"}, "is damaged: it has read 7 tokens"),
        ({"tokens_seen": "[5, -1]"}, "is damaged: it has read [5, -1] tokens"),
        ({"tokens_seen": '[5, "6"]'}, "is damaged: it has read [5, '6'] tokens"),
        ({"tokens_seen": f"[5, {2**63}]"}, f"is damaged: it has read [5, {2**63}] tokens"),
    ],
)
def test_garbled_metadata(tmp_path, metadata, sentence):
    path = tmp_path / "state"
    rewritten(path, metadata)
    assert refusal(path) == f"{path} {sentence}"


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 4},
        {"num_heads": 4},
        {"vocab_size": 384},
        {"eos_token_id": 5},
        {"eps": 1e-5},
        {"gate_soft_cap": 14.0},
    ],
)
def test_a_state_of_another_model(tmp_path, change):
    path, state = tmp_path / "state", random_state(2)
    state.save(path)
    (name, value), other = *change.items(), replace(SMALL, **change)
    sentence = refusal(path, other)
    assert sentence.startswith(f"{path} was saved from another model: it has ")
    assert f"{name} {getattr(SMALL, name)}, the loaded model {value}" in sentence
    with pytest.raises(ValueError, match=r"^this state was saved by another model: it ") as caught:
        state.check_model(other)
    assert f"{name} {getattr(SMALL, name)}, the loaded model {value}" in str(caught.value)
    state.check_model(SMALL)


@pytest.mark.parametrize(
    "change", [{"mlstm_round_up_to_multiple_of": 16}, {"vocab_size": 50304, "eos_token_id": 2}]
)
def test_a_config_that_its_json_spells_differently(tmp_path, change):
    """The loaded state has the config that was asked for, so that the model accepts it."""
    config = replace(SMALL, **change)
    random_state(1, config=config).save(tmp_path / "state")
    loaded = SavedState.load(tmp_path / "state", config)
    assert loaded.config == config
    loaded.check_model(config)


# Writing


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path, old = tmp_path / "state", random_state(2)
    old.save(path)
    pieces = files.safetensors_pieces

    def broken(tensors, *arguments, **options):
        for index, piece in enumerate(pieces(tensors, *arguments, **options)):
            if index == 2:
                raise OSError(28, "No space left on device")
            yield piece

    monkeypatch.setattr(files, "safetensors_pieces", broken)
    for target in (path, tmp_path / "new"):
        with pytest.raises(OSError, match=rf"^{target} could not be written \(.*No space left"):
            random_state(1).save(target)
        assert names_in(tmp_path) == {"state"}
    monkeypatch.undo()
    assert_states_match(SavedState.load(path, SMALL), old, 0)


def test_a_save_interrupted_before_the_rename(tmp_path, monkeypatch):
    path, old, new = tmp_path / "state", random_state(2), random_state(1)
    old.save(path)

    def interrupted(aside, target):
        # The new file is complete by now, beside the old one.
        assert_states_match(SavedState.load(aside, SMALL), new, 0)
        assert_states_match(SavedState.load(target, SMALL), old, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new.save(path)
    assert names_in(tmp_path) == {"state"}
    assert_states_match(SavedState.load(path, SMALL), old, 0)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        random_state(1).save(tmp_path / "missing" / "state")
    assert names_in(tmp_path) == set()


# The store

SIZE = random_state(1).nbytes
HEADER = 2048  # a file's own description is shorter


def test_an_older_file_with_n_and_m_in_bfloat16_is_read(tmp_path):
    state = random_state(2, torch.bfloat16)
    blocks = tuple(
        MLSTMState(*(part.bfloat16() for part in block)) for block in state.model_state.blocks
    )
    old = replace(state, model_state=state.model_state._replace(blocks=blocks))
    old.save(tmp_path / "old.safetensors")
    got = SavedState.load(tmp_path / "old.safetensors", SMALL)
    for block, want in zip(got.model_state.blocks, blocks, strict=True):
        assert [part.dtype for part in block] == [torch.bfloat16, torch.float32, torch.float32]
        assert all(torch.equal(part, w.to(part.dtype)) for part, w in zip(block, want, strict=True))
    got.save(tmp_path / "new.safetensors")
    assert_states_match(SavedState.load(tmp_path / "new.safetensors", SMALL), got, 0)


def store(folder: Path, states: float = 100, *, evict: bool = False, **options: str) -> StateStore:
    """A store with room for some states of one row."""
    return StateStore(folder, SMALL, int(states * (SIZE + HEADER)), evict=evict, **options)


def aged(store: StateStore, *names: str) -> None:
    """Sets the times of last use, the oldest first: files written at once have the same."""
    for second, name in enumerate(names):
        os.utime(store.folder / f"{name}.safetensors", (1000 + second, 1000 + second))


@pytest.mark.parametrize("evict", [False, True])
def test_a_store_saves_finds_lists_loads_and_deletes(tmp_path, evict):
    one, two = random_state(1), random_state(2, torch.bfloat16)
    kept = store(tmp_path, evict=evict)
    assert (kept.list(), kept.nbytes) == ([], 0)
    saved = kept.save("state-one", one, title="first")
    kept.save("state-two", two)
    assert (saved.name, saved.tokens_seen, saved.notes) == (
        "state-one", one.tokens_seen, {"title": "first"})  # fmt: skip
    path = tmp_path / "state-one.safetensors"
    assert saved.nbytes == path.stat().st_size
    assert saved.created == path.stat().st_mtime
    assert kept.find("state-one") == saved
    assert_states_match(kept.load("state-one"), one, 0)
    assert_states_match(kept.load("state-two", device="cpu"), two, 0)
    aged(kept, "state-two", "state-one")
    assert [found.name for found in kept.list()] == ["state-one", "state-two"]  # newest first
    aged(kept, "state-one", "state-two")
    assert [found.name for found in kept.list()] == ["state-two", "state-one"]
    assert kept.nbytes == sum(found.nbytes for found in kept.list())
    # Another process sees the same.
    assert store(tmp_path, evict=evict).list() == kept.list()
    kept.save("state-one", two)  # replaced
    assert_states_match(kept.load("state-one"), two, 0)
    kept.delete("state-one")
    for action in (kept.find, kept.load, kept.delete):
        with pytest.raises(KeyError, match="state-one"):
            action("state-one")
    assert names_in(tmp_path) == {"state-two.safetensors"}


@pytest.mark.parametrize(
    "name",
    [
        *("one", "", "state", "prefix-one", "state-a.b", "state-\0", "state-\n", "state-é"),
        *("state-/etc/passwd", "state-../state-one", "../state-one", "state-a/../one"),
        "state-" + "x" * 300,
    ],
)
def test_a_name_is_never_a_path(tmp_path, name):
    kept = store(tmp_path)
    kept.save("state-one", random_state(1))
    actions = (kept.find, kept.load, kept.delete, lambda name: kept.save(name, random_state(1)))
    for action in actions:
        with pytest.raises(KeyError):
            action(name)
    assert names_in(tmp_path) == {"state-one.safetensors"}


@pytest.mark.parametrize("evict", [False, True])
def test_files_of_others_are_neither_counted_nor_touched(tmp_path, evict):
    foreign = ["others.safetensors", "prefix-1.safetensors", "state-note.txt", "state-5"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"not ours" * 10_000)
    (tmp_path / "folder").mkdir()
    kept = store(tmp_path, 1.5, evict=evict)
    assert (kept.nbytes, kept.list()) == (0, [])
    kept.save("state-one", random_state(1))
    if evict:
        kept.save("state-two", random_state(1))
        assert [found.name for found in kept.list()] == ["state-two"]
    others = store(tmp_path, prefix="prefix-")
    assert others.nbytes == 80_000
    assert [(found.name, found.status) for found in others.list()] == [("prefix-1", "damaged")]
    for name in foreign:
        assert (tmp_path / name).read_bytes() == b"not ours" * 10_000


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "other model"])
def test_a_damaged_file_is_listed_as_such_and_can_be_deleted(tmp_path, damage):
    kept = store(tmp_path)
    kept.save("state-one", random_state(1))
    kept.save("state-two", random_state(1))
    path = tmp_path / "state-one.safetensors"
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "garbage":
            path.write_bytes(b"\xff" * 100)
        case "empty":
            path.write_bytes(b"")
        case "other model":
            random_state(1, config=replace(SMALL, num_blocks=4)).save(path)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        kept.load("state-one")
    status = "other_model" if damage == "other model" else "damaged"
    listed = {found.name: found.status for found in kept.list()}
    assert listed == {"state-one": status, "state-two": "ok"}
    assert kept.find("state-one").nbytes == path.stat().st_size
    kept.delete("state-one")
    assert names_in(tmp_path) == {"state-two.safetensors"}


def test_a_store_without_descriptors_forgets_nothing(tmp_path):
    """A file that cannot be opened now is not damaged, and its label is not gone."""
    store, label = StateStore(tmp_path, SMALL, 1 << 30, evict=False), StateLabel("a", ("b",))
    store.save("state-1", random_state(1), label)
    fresh = StateStore(tmp_path, SMALL, 1 << 30, evict=False)
    with few_descriptors(0):
        fresh.find("state-1")
    assert fresh.find("state-1").status == "ok"
    assert fresh.find("state-1").label == label
    fresh = StateStore(tmp_path, SMALL, 1 << 30, evict=False)
    with few_descriptors(1), pytest.raises(OSError, match="Too many open files"):
        fresh.change_label("state-1", lambda before: before._replace(name="c"))
    assert fresh.find("state-1").label == label


def test_a_full_store_that_does_not_evict(tmp_path):
    kept = store(tmp_path, 2.5)
    for name in ("state-one", "state-two"):
        kept.check_room(SIZE)
        kept.save(name, random_state(1))
    held = kept.nbytes
    sentence = (
        f"a state of {SIZE / 1e6:,.1f} MB does not fit: the store holds "
        f"{held / 1e9:,.2f} of at most {kept.max_bytes / 1e9:,.2f} GB"
    )
    with pytest.raises(StoreFull, match=f"^{re.escape(sentence)}$"):
        kept.check_room(SIZE)
    with pytest.raises(StoreFull, match=f"^{re.escape(sentence)}$"):
        kept.save("state-three", random_state(1))
    assert names_in(tmp_path) == {"state-one.safetensors", "state-two.safetensors"}
    # A store that is opened with less room deletes nothing.
    smaller = store(tmp_path, 0.5)
    with pytest.raises(StoreFull):
        smaller.check_room(1)
    assert len(smaller.list()) == 2
    kept.delete("state-one")
    kept.save("state-three", random_state(1))
    assert [found.name for found in kept.list()] == ["state-three", "state-two"]


def test_a_full_store_evicts_the_least_recently_used(tmp_path):
    kept = store(tmp_path, 3, evict=True)
    for name in ("state-1", "state-2", "state-3"):
        kept.save(name, random_state(1))
    aged(kept, "state-1", "state-2", "state-3")
    kept.load("state-1")  # used last
    kept.find("state-2")  # not a use
    kept.save("state-4", random_state(1))
    assert {found.name for found in kept.list()} == {"state-1", "state-3", "state-4"}
    aged(kept, "state-3", "state-4", "state-1")
    kept.save("state-5", random_state(2))  # as large as two
    assert {found.name for found in kept.list()} == {"state-1", "state-5"}
    assert kept.nbytes <= kept.max_bytes
    with pytest.raises(StoreFull, match=r"^a state of .* MB does not fit: the store holds"):
        kept.save("state-6", random_state(9))
    assert {found.name for found in kept.list()} == {"state-1", "state-5"}
    # Opened with less room, it makes room at once.
    aged(kept, "state-1", "state-5")
    assert {found.name for found in store(tmp_path, 2, evict=True).list()} == {"state-5"}
    assert store(tmp_path, 0.5, evict=True).nbytes == 0


def test_long_notes_take_room(tmp_path):
    """A prompt of 100,000 tokens is a note of 800,000 letters."""
    kept = store(tmp_path, 3, evict=True)
    for n in range(5):
        kept.save(f"state-{n}", random_state(1), prefix="00" * SIZE)
        aged(kept, f"state-{n}")
        assert kept.nbytes <= kept.max_bytes


def test_a_state_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    kept = store(tmp_path)

    def full(*_arguments, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(SavedState, "save", full)
    with pytest.raises(OSError, match="no space left"):
        kept.save("state-one", random_state(1), StateLabel("one"))
    monkeypatch.undo()
    assert kept.list() == []
    assert names_in(tmp_path) == set()
    kept.save("state-one", random_state(1))  # the lock was released


def test_a_store_makes_and_locks_a_folder_that_is_not_there(tmp_path):
    folder = tmp_path / "a" / "states"
    kept = store(folder)
    half = {".state-1.safetensors.0123abcd", "state-9.json"}
    for name in half:  # a save of this store, as it is seen by another process
        (folder / name).write_bytes(b"half")
    other = store(folder)
    assert names_in(folder) == half
    del kept, other
    gc.collect()
    store(folder)
    assert names_in(folder) == set()


def test_a_store_whose_folder_is_deleted(tmp_path):
    kept = store(tmp_path / "states")
    (tmp_path / "states").rmdir()
    assert (kept.nbytes, kept.list()) == (0, [])
    with pytest.raises(KeyError):
        kept.load("state-one")
    with pytest.raises(FileNotFoundError):
        kept.save("state-one", random_state(1))


def test_saving_and_checking_for_room_do_not_list_the_folder(tmp_path, monkeypatch):
    kept = store(tmp_path)
    kept.save("state-one", random_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda *_: pytest.fail("the folder was listed"))
        for n in range(3):
            kept.check_room(SIZE)
            kept.save(f"state-{n}", random_state(1), StateLabel(str(n)))
            assert kept.find(f"state-{n}").label.name == str(n)
        kept.delete("state-1")
        kept.change_label("state-2", lambda _: StateLabel("other"))
    assert {found.name for found in kept.list()} == {"state-one", "state-0", "state-2"}
    assert kept.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_the_index_follows_other_processes(tmp_path, monkeypatch):
    one, two = store(tmp_path, 2.5), store(tmp_path, 2.5)
    one.save("state-1", random_state(1))
    assert two.find("state-1").status == "ok"
    two.change_label("state-1", lambda _: StateLabel("mine", ("a", "b")))
    assert one.find("state-1").label == StateLabel("mine", ("a", "b"))
    assert one.names(tag="a") == ["state-1"]
    two.change_label("state-1", lambda _: StateLabel())
    assert one.names(tag="a") == []
    one.save("state-2", random_state(1))
    two.delete("state-1")
    one.save("state-3", random_state(1))  # it seems full: the folder is listed first
    assert [found.name for found in two.list()] == ["state-3", "state-2"]
    with pytest.raises(StoreFull):
        two.check_room(SIZE)
    one.delete("state-2")
    two.check_room(SIZE)
    # What others save counts at the latest when the index is ten seconds old.
    one.save("state-4", random_state(1))
    two.check_room(SIZE)
    now = time.monotonic()
    monkeypatch.setattr("xlstm7b.generate.state.time.monotonic", lambda: now + 11)
    with pytest.raises(StoreFull):
        two.check_room(SIZE)


def test_changes_of_a_label_at_the_same_time_are_all_kept(tmp_path):
    stores = store(tmp_path), store(tmp_path)  # as of two processes
    stores[0].save("state-1", random_state(1))

    def add(tag: int) -> None:
        def change(label: StateLabel) -> StateLabel:
            time.sleep(0.005)
            return label._replace(tags=(*label.tags, str(tag)))

        stores[tag % 2].change_label("state-1", change)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(16)))
    assert sorted(stores[0].find("state-1").label.tags, key=int) == [*map(str, range(16))]


def test_labels_are_kept_and_expire(tmp_path, monkeypatch):
    kept, now = store(tmp_path), time.time()
    kept.save("state-1", random_state(1), StateLabel("é😀", ("x",), now + 100), title="note")
    kept.save("state-2", random_state(1), StateLabel(expires=now + 300))
    kept.save("state-3", random_state(1))
    found = store(tmp_path).find("state-1")
    assert (found.label, found.notes) == (StateLabel("é😀", ("x",), now + 100), {"title": "note"})
    assert names_in(tmp_path) == {
        *(f"state-{n}.safetensors" for n in (1, 2, 3)), "state-1.json", "state-2.json"}  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    monkeypatch.setattr("xlstm7b.generate.state.time.time", lambda: now + 200)
    with pytest.raises(KeyError):
        kept.find("state-1")
    assert [found.name for found in store(tmp_path).list()] == ["state-3", "state-2"]
    assert names_in(tmp_path) == {"state-2.safetensors", "state-2.json", "state-3.safetensors"}
    for content in ("", "{", "[]", '{"name": 1, "tags": [], "expires": null}', "[" * 100_000):
        (tmp_path / "state-2.json").write_text(content)
        assert kept.find("state-2").label == StateLabel()
    kept.delete("state-2")
    assert names_in(tmp_path) == {"state-3.safetensors"}
    with pytest.raises(KeyError):
        kept.change_label("state-2", lambda _: StateLabel("late"))
    assert names_in(tmp_path) == {"state-3.safetensors"}


def test_files_of_a_killed_save_are_removed(tmp_path):
    """Not while another process may be writing them, unless they are old."""
    half, foreign = ".state-1.safetensors.0123abcd", ".others.safetensors.0123abcd"

    def killed():
        for name in (half, foreign, "state-9.json"):
            (tmp_path / name).write_bytes(b"half")

    killed()
    kept = store(tmp_path)
    assert names_in(tmp_path) == {foreign}
    killed()
    other = store(tmp_path)  # as of another process: each has a lock of its own
    assert names_in(tmp_path) == {half, foreign, "state-9.json"}
    os.utime(tmp_path / half, (1000, 1000))
    third = store(tmp_path)
    assert names_in(tmp_path) == {foreign, "state-9.json"}
    del kept, other, third
    gc.collect()
    store(tmp_path)
    assert names_in(tmp_path) == {foreign}


@pytest.mark.parametrize("evict", [False, True])
def test_many_threads_use_a_store_at_once(tmp_path, evict):
    """Files appear and disappear meanwhile: a state is loaded as it was saved, or not there."""
    kept = store(tmp_path, 4 if evict else 100, evict=evict)
    states = {f"state-{n}": random_state(1) for n in range(8)}
    wrong: list[object] = []

    def work(thread: int) -> None:
        names = [*states]
        for turn in range(40):
            name = names[(thread * 3 + turn * 5) % 8]
            try:
                match (thread + turn) % 4:
                    case 0:
                        kept.save(name, states[name])
                    case 1:
                        assert_states_match(kept.load(name), states[name], 0)
                    case 2:
                        assert all(found.nbytes > SIZE for found in kept.list())
                        if evict:
                            assert kept.nbytes <= kept.max_bytes
                    case 3:
                        kept.delete(name)
            except KeyError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    # Nothing but states is left: no empty file, no half of one.
    assert {f"{found.name}.safetensors" for found in kept.list()} == names_in(tmp_path)
