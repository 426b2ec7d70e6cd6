"""The prefix cache: the longest stored prefix, in three levels; files survive a restart."""

import os
import random
import threading
from pathlib import Path

import pytest
import torch
from descriptors import few_descriptors
from engines import ImmediateExecutor, token_lists
from hypothesis import given
from hypothesis import strategies as st
from models import spread_model

from xlstm7b.generate import prefix_cache, request
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.prefix_cache import (
    DiskLevel,
    Entry,
    PrefixCache,
    PrefixIndex,
    weights_fingerprint,
)
from xlstm7b.generate.request import HashedTokens
from xlstm7b.generate.state import SavedState, StateStore
from xlstm7b.model import ModelState

CPU = torch.device("cpu")
CONFIG = spread_model().config
LONG = random.Random(1).choices(range(320), k=400)
FINGERPRINT = b"these weights"


def state(mark: int, tokens: int = 1) -> SavedState:
    """A state after `tokens` tokens of a prompt, and the first token."""
    model_state = ModelState.zeros(CONFIG, 1)
    model_state.blocks[0].C.fill_(mark)
    model_state.tokens_seen.fill_(tokens + 1)
    return SavedState(CONFIG, model_state, torch.full((1, 320), float(mark)))


def found(match: tuple[int, SavedState] | None) -> tuple[int, int] | None:
    """Length and mark of a match."""
    if match is None:
        return None
    length, got = match
    assert float(got.model_state.blocks[0].C.mean()) == float(got.logits.mean())
    return length, int(got.logits[0, 0])


SIZE = state(0).nbytes
FILE = SIZE + 4096  # a file is at most so large: its description is shorter


def room(states: float, tokens: int = 100) -> int:
    return int(states * (SIZE + 4 * tokens))


def disk_level(
    folder: Path, states: float = 100, fingerprint: bytes = FINGERPRINT, device=CPU
) -> DiskLevel:
    store = StateStore(folder, CONFIG, int(states * FILE), evict=True, prefix="prefix-")
    return DiskLevel(store, fingerprint, device)


@pytest.fixture
def _at_once(monkeypatch):
    """Files are written when they are saved, not in the background."""
    monkeypatch.setattr("xlstm7b.generate.prefix_cache.ThreadPoolExecutor", ImmediateExecutor)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefix-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


# The index: which prefixes are stored


def entry(tokens: list[int], value: object = None, nbytes: int = 1) -> Entry[object]:
    hashed = HashedTokens(tokens)
    return Entry(hashed.key(len(tokens)), hashed.prefix_bytes(len(tokens)), value, nbytes)


@given(
    stored=st.lists(token_lists, max_size=12), asked=token_lists, longer_than=st.integers(0, 240)
)
def test_the_longest_stored_prefix_is_found(stored, asked, longer_than):
    index = PrefixIndex[object](1 << 40)
    for text in stored:
        index.add(entry(text))
    want = max((len(text) for text in stored if asked[: len(text)] == text), default=-1)
    longer_than = min(longer_than, len(asked))
    match = index.longest(HashedTokens(asked), longer_than)
    assert (None if match is None else len(match)) == (want if want > longer_than else None)
    if match is not None:
        assert match.prefix == HashedTokens(asked).prefix_bytes(want)


def test_a_hash_alone_is_not_trusted(monkeypatch):
    monkeypatch.setattr(request, "digest", lambda before, block: b"the same")
    index = PrefixIndex[object](100)
    one, other = [1] * 100, [2] * 64 + [1] * 36
    assert entry(one).key == entry(other).key
    index.add(entry([1] * 40, "short"))
    index.add(entry(one, "one"))
    assert index.longest(HashedTokens(other), 0) is None
    assert index.longest(HashedTokens(one), 0).value == "one"
    index.add(entry(other, "other"))  # replaces the entry with the same key
    assert index.longest(HashedTokens(one), 0).value == "short"  # a shorter one is found
    assert index.longest(HashedTokens(other), 0).value == "other"
    assert len(index) == 2


@given(
    st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 9)), max_size=60)
)
def test_the_least_recently_used_are_evicted(work):
    """Against a plain list, in the order of use; entry n has n bytes."""
    index, order = PrefixIndex[object](12), []
    for action, n in work:
        text = [n] * (30 * n)
        match action:
            case "add":
                evicted = index.add(entry(text, n, n))
                order = [*(other for other in order if other != n), n]
                dropped = []
                while sum(order) > 12:
                    dropped.append(order.pop(0))
                assert [one.value for one in evicted] == dropped
            case "touch":
                if n in order:
                    index.touch(entry(text).key)
                    order = [*(other for other in order if other != n), n]
            case "remove":
                index.remove(entry(text).key)
                order = [other for other in order if other != n]
        assert [one.value for one in index] == order
        assert index.nbytes == sum(order) <= 12
        assert len(index) == len(order)
        assert {*index._digests} == {one.key[0] for one in index}  # nothing is left of the others
        assert all((entry([n] * (30 * n)).key in index) == (n in order) for n in range(10))


def test_an_entry_that_is_too_large_is_returned_and_replaces_nothing_else():
    index = PrefixIndex[object](10)
    index.add(entry([1], "small", 6))
    large = entry([2], "large", 11)
    assert not index.fits(large)
    assert index.add(large) == [large]
    assert [one.value for one in index] == ["small"]
    assert index.nbytes == 6
    # The old state of the same prefix is gone, too: it is not the latest.
    larger = entry([1], "larger", 11)
    assert index.add(larger) == [larger]
    assert len(index) == index.nbytes == 0


def test_entries_may_be_removed_while_iterating():
    index = PrefixIndex[object](100)
    for n in range(5):
        index.add(entry([n], n))
    for one in index:
        index.remove(one.key)
    assert len(index) == 0
    assert index.longest(HashedTokens([1, 2]), 0) is None


# In memory


def test_the_least_recently_used_are_dropped():
    cache, prompts = PrefixCache(CPU, room(3)), [HashedTokens([n] * 100) for n in range(5)]
    for n in range(3):
        cache.add(prompts[n], 100, state(n))
    assert found(cache.longest(prompts[0], 0)) == (100, 0)
    cache.add(prompts[3], 100, state(3))
    cache.add(prompts[4], 100, state(4))
    held = [found(cache.longest(prompt, 0)) for prompt in prompts]
    assert held == [(100, 0), None, None, (100, 3), (100, 4)]
    cache.add(prompts[0], 100, state(7))  # once more: it is replaced
    assert cache.nbytes["device"] == 3 * (SIZE + 400)
    assert found(cache.longest(prompts[0], 0)) == (100, 7)
    assert cache.longest(prompts[0], 100) is None
    assert cache.hits == {"device": 5, "host": 0, "disk": 0}


def test_a_state_that_is_too_large_is_not_kept():
    cache = PrefixCache(CPU, room(0.5))
    cache.add(HashedTokens(LONG), 100, state(1))
    assert cache.longest(HashedTokens(LONG), 0) is None
    assert cache.nbytes == {"device": 0, "host": 0, "disk": 0}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
def test_the_limit_holds_and_the_order_is_that_of_use(work):
    cache, order = PrefixCache(CPU, room(3)), []
    for is_added, n in work:
        prompt = HashedTokens([n] * 100)
        if is_added:
            cache.add(prompt, 100, state(n))
        assert (found(cache.longest(prompt, 0)) == (100, n)) == (is_added or n in order)
        if is_added or n in order:
            order = [*(other for other in order if other != n), n][-3:]
        assert cache.nbytes["device"] == len(order) * (SIZE + 400) <= room(3)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_two_levels_hold_what_was_used_last(work):
    """Whatever is evicted from the device is on the host, until that is full, too."""
    cache, order = PrefixCache(CPU, room(2), room(3)), []
    for is_added, n in work:
        prompt = HashedTokens([n] * 100)
        if is_added:
            cache.add(prompt, 100, state(n))
        assert (found(cache.longest(prompt, 0)) == (100, n)) == (is_added or n in order)
        if is_added or n in order:
            order = [*(other for other in order if other != n), n][-5:]
        assert cache.nbytes["device"] == min(2, len(order)) * (SIZE + 400)
        assert cache.nbytes["host"] == max(0, len(order) - 2) * (SIZE + 400)


# On disk


@pytest.mark.usefixtures("_at_once")
def test_levels(tmp_path):
    # A file holds the prompt in letters, twice as many as bytes.
    cache = PrefixCache(CPU, room(2), room(2), disk_level(tmp_path, 2))
    prompts = [HashedTokens([n] * 100) for n in range(7)]
    for n in range(7):
        cache.add(prompts[n], 100, state(n, 100))
        for age, path in enumerate(files_in(tmp_path)):
            os.utime(path, (1000 + age, 1000 + age))
    # 5 and 6 are on the device, 3 and 4 on the host, 1 and 2 in files; 0 was deleted.
    memory = 2 * (SIZE + 400)
    in_files = sum(path.stat().st_size for path in files_in(tmp_path))
    assert 2 * (SIZE + 800) < in_files <= 2 * FILE
    assert cache.nbytes == {"device": memory, "host": memory, "disk": in_files}
    assert len(files_in(tmp_path)) == 2
    assert cache.longest(prompts[0], 0) is None
    assert found(cache.longest(prompts[3], 0)) == (100, 3)  # 5 moves down for it
    assert found(cache.longest(prompts[2], 0)) == (100, 2)  # 6 moves down, and so does 4
    assert cache.hits == {"device": 0, "host": 1, "disk": 1}
    assert found(cache.longest(prompts[2], 0)) == (100, 2)
    assert found(cache.longest(prompts[3], 0)) == (100, 3)
    assert cache.hits["device"] == 2


@pytest.mark.usefixtures("_at_once")
def test_the_longest_prefix_wins_whatever_its_level(tmp_path):
    cache = PrefixCache(CPU, room(1, 400), room(1, 400), disk_level(tmp_path))
    prompt = HashedTokens(LONG)
    for length in (300, 200, 100):
        cache.add(prompt, length, state(length, length))
    assert found(cache.longest(prompt, 0)) == (300, 300)
    assert cache.hits["disk"] == 1


def test_files_are_found_after_a_restart(tmp_path):
    first = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    first.add(HashedTokens(LONG), 150, state(5, 150))
    first.close()  # waits until the file is written
    (tmp_path / "others.safetensors").write_bytes(b"not ours")
    again = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    assert again.nbytes["disk"] == files_in(tmp_path)[0].stat().st_size
    assert found(again.longest(HashedTokens(LONG), 0)) == (150, 5)
    assert again.longest(HashedTokens(LONG[:149]), 0) is None
    # Other weights of the same shape have other states.
    other = PrefixCache(CPU, 0, 0, disk_level(tmp_path, fingerprint=b"other weights"))
    assert other.longest(HashedTokens(LONG), 0) is None
    assert other.nbytes["disk"] == 0
    assert len(files_in(tmp_path)) == 1
    assert (tmp_path / "others.safetensors").read_bytes() == b"not ours"
    # With less room the oldest file is deleted.
    disk_level(tmp_path, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["others.safetensors"]


def test_a_prompt_without_a_first_token_is_found_after_a_restart(tmp_path):
    """A state has then read as many tokens as its prefix has."""
    config = spread_model(force_bos_token_insert=False).config
    for _ in range(2):
        store = StateStore(tmp_path, config, 1 << 30, evict=True, prefix="prefix-")
        cache = PrefixCache(CPU, 0, 0, DiskLevel(store, FINGERPRINT, CPU))
        got = cache.longest(HashedTokens(LONG), 0)
        model_state = ModelState.zeros(config, 1)
        model_state.tokens_seen.fill_(150)
        saved = SavedState(config, model_state, torch.zeros(1, 320))
        cache.add(HashedTokens(LONG), 150, saved)
        cache.close()
    assert got[0] == 150


@pytest.mark.parametrize("damage", ["cut", "garbage", "deleted", "another"])
@pytest.mark.usefixtures("_at_once")
def test_a_damaged_file_is_a_miss(tmp_path, damage, caplog):
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    cache.add(HashedTokens(LONG), 150, state(5, 150))
    (longer,) = files_in(tmp_path)
    cache.add(HashedTokens(LONG), 40, state(4, 40))
    match damage:
        case "cut":
            longer.write_bytes(longer.read_bytes()[:-1])
        case "garbage":
            longer.write_bytes(b"\xff" * 100)
        case "deleted":
            longer.unlink()
        case "another":
            state(9, 151).save(longer)
    assert found(cache.longest(HashedTokens(LONG), 0)) == (40, 4)
    assert not longer.exists()
    (shorter,) = files_in(tmp_path)
    assert cache.nbytes["disk"] == shorter.stat().st_size
    assert ("cannot be used" in caplog.text) == (damage in ("cut", "garbage"))


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.usefixtures("_at_once")
def test_a_file_that_cannot_be_read_now_is_kept(tmp_path, left, caplog):
    """With one descriptor, the file can be opened, but PyTorch cannot map it."""
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    for length in (150, 40):
        cache.add(HashedTokens(LONG), length, state(length, length))
    before = files_in(tmp_path)
    with few_descriptors(left):
        match = cache.longest(HashedTokens(LONG), 0)
    assert found(match) == ((150, 150) if left > 1 else None)
    assert ("cannot be read" in caplog.text) == (left < 2)
    assert {*files_in(tmp_path)} == {*before}
    assert found(cache.longest(HashedTokens(LONG), 0)) == (150, 150)
    assert found(cache.longest(HashedTokens(LONG[:149]), 0)) == (40, 40)


@pytest.mark.parametrize("note", ["", "xyz", "00", "0" * 7, "ff" * 600])
def test_a_file_with_another_name_or_note_is_not_used(tmp_path, note):
    """Its name is a hash of the weights and the prefix; a note that does not match is foreign."""
    tmp_path.joinpath("prefix-empty.safetensors").write_bytes(b"")
    state(1, 150).save(tmp_path / f"prefix-{'0' * 64}.safetensors", prefix=note)
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    assert cache.nbytes["disk"] == 0
    assert cache.longest(HashedTokens(LONG), 0) is None
    assert len(files_in(tmp_path)) == 2


@pytest.mark.usefixtures("_at_once")
def test_a_full_disk_is_survived(tmp_path, monkeypatch, caplog):
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path))

    def full(*_arguments, **_options):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SavedState, "save", full)
        cache.add(HashedTokens(LONG), 150, state(5, 150))
    assert "no space left" in caplog.text
    assert cache.longest(HashedTokens(LONG), 0) is None
    cache.add(HashedTokens(LONG), 150, state(5, 150))
    assert found(cache.longest(HashedTokens(LONG), 0)) == (150, 5)


@pytest.mark.usefixtures("_at_once")
def test_a_disk_limit_below_one_state_keeps_nothing(tmp_path, caplog):
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path, 0.5))
    cache.add(HashedTokens(LONG), 150, state(5, 150))
    assert cache.longest(HashedTokens(LONG), 0) is None
    assert "a cached state is dropped: a state of" in caplog.text
    assert files_in(tmp_path) == []


def test_files_are_written_in_the_background_and_few_wait(tmp_path, monkeypatch):
    """The engine does not wait for a slow disk; states that come too fast are dropped."""
    disk_is_slow, save = threading.Event(), SavedState.save

    def slow(*arguments, **options):
        assert disk_is_slow.wait(10)
        save(*arguments, **options)

    monkeypatch.setattr(SavedState, "save", slow)
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path))
    prompts = [HashedTokens([n] * 100) for n in range(6)]
    for n, prompt in enumerate(prompts):
        cache.add(prompt, 100, state(n, 100))
        cache.add(prompt, 100, state(n, 100))  # it is written once
        assert cache.longest(prompt, 0) is None  # not before the file is complete
    disk_is_slow.set()
    cache.close()
    assert [found(cache.longest(prompt, 0)) for prompt in prompts] == [
        (100, 0),
        (100, 1),
        *[None] * 4,
    ]


@pytest.mark.usefixtures("_at_once")
def test_evicted_files_are_forgotten(tmp_path):
    cache = PrefixCache(CPU, 0, 0, disk_level(tmp_path, 2))
    prompts = [HashedTokens([n] * 100) for n in range(5)]
    for n, prompt in enumerate(prompts):
        cache.add(prompt, 100, state(n, 100))
        for age, path in enumerate(files_in(tmp_path)):
            os.utime(path, (1000 + age, 1000 + age))
    kept = [found(cache.longest(prompt, 0)) for prompt in prompts]
    assert kept == [None, None, None, (100, 3), (100, 4)]
    assert cache.nbytes["disk"] == sum(path.stat().st_size for path in files_in(tmp_path))
    # Using a file keeps it.
    os.utime(files_in(tmp_path)[0], (1, 1))
    assert found(cache.longest(prompts[3], 0)) == (100, 3)
    os.utime(files_in(tmp_path)[0], (1, 1))
    cache.add(prompts[0], 100, state(0, 100))
    assert found(cache.longest(prompts[3], 0)) == (100, 3)
    assert cache.longest(prompts[4], 0) is None


def fingerprint(model, dtype=torch.float32, description: object = "config") -> bytes:
    return weights_fingerprint(description, FusedModel(model).weights(), dtype)


def test_fingerprints_differ_for_other_dtypes_and_configs():
    model = spread_model()
    same = fingerprint(model)
    assert fingerprint(spread_model()) == same
    assert fingerprint(model, torch.bfloat16) != same
    assert fingerprint(model, description="other") != same


def test_every_bit_of_every_weight_is_in_the_fingerprint():
    draw, model = random.Random(5), spread_model()
    same = fingerprint(model)
    for name, parameter in model.named_parameters():
        bits = parameter.detach().view(-1).view(torch.int32)
        position, flipped = draw.randrange(len(bits)), 1 << draw.randrange(31)
        bits[position] ^= flipped
        assert fingerprint(model) != same, (name, position, flipped)
        bits[position] ^= flipped
    assert fingerprint(model) == same


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.int32], ids=str)
def test_a_fingerprint_knows_positions_and_shapes(dtype, monkeypatch):
    """Also across the pieces in which a tensor is read."""
    monkeypatch.setattr(prefix_cache, "_PIECE", 8)
    weight = torch.arange(20.0).remainder(13).to(dtype)
    weights = [[weight], [weight[:10], weight[10:]], [weight.view(2, 10)], [weight[:19]]]
    for swapped in [(0, 1), (0, 8), (7, 18)]:
        order = [*range(20)]
        order[swapped[0]], order[swapped[1]] = swapped[::-1]
        weights.append([weight.view(torch.uint8).view(20, -1)[order].view(-1).view(dtype)])
    highest = weight.clone()  # the highest bits of two values: the changes may not cancel out
    highest.view(torch.uint8).view(20, -1)[[2, 5], -1] ^= 128
    weights += [[highest], [weight.view(4, 5)]]
    found = [weights_fingerprint("", parts, torch.float32) for parts in weights]
    assert len(set(found)) == len(found)
    # Where the values lie in memory makes no difference.
    moved = torch.cat([weight.view(torch.uint8)[: weight.itemsize], weight.view(torch.uint8)])
    transposed = weight.view(4, 5).mT.contiguous().mT
    assert weights_fingerprint("", [moved.view(dtype)[1:]], torch.float32) == found[0]
    assert weights_fingerprint("", [transposed], torch.float32) == found[-1]


def test_the_fingerprint_does_not_change():
    """Else the files of an earlier version would not be found."""
    weights = torch.arange(6.0).view(2, 3), torch.arange(5.0).bfloat16(), torch.ones(()).half()
    found = weights_fingerprint({"a": 1}, weights, torch.bfloat16)
    assert found.hex() == "2723e5bd74c929b286cbfe8405003ddb1b0636788b7d7932f042fb10283aea1f"


@pytest.mark.gpu
def test_a_gpu_finds_the_same_fingerprint():
    for dtype in DTYPES:
        weights = [torch.randn(3000, 1001).to(dtype), torch.randn(7).to(dtype)]
        found = [
            weights_fingerprint("", (weight.to(device) for weight in weights), torch.float32)
            for device in ("cpu", "cuda")
        ]
        assert found[0] == found[1], dtype
