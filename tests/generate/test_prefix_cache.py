"""The longest beginning stored, of exactly this text; the least used goes first, level by level."""

import random

import pytest
import torch
from engines import random_generator
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.generate import TextState, prefix_store
from xlstm7b.generate.prefix_cache import PrefixCache
from xlstm7b.generate.prefix_store import Beginnings, PrefixStore, Stored, TokenChain
from xlstm7b.generate.state_folder import StateFolder, fingerprint
from xlstm7b.model import ModelState

CPU = torch.device("cpu")
GENERATOR = random_generator()
LONG = random.Random(1).choices(range(320), k=400)


def state(mark: int, tokens: int = 1) -> TextState:
    memory = ModelState.zeros(GENERATOR.config, 1)
    memory.blocks[0].C.fill_(mark)
    memory.tokens_seen.fill_(tokens)
    return TextState(GENERATOR.config, memory, torch.full((1, 320), float(mark)))


def mark(found: tuple[int, TextState] | None) -> tuple[int, int] | None:
    if found is None:
        return None
    length, place = found
    assert float(place.memory.blocks[0].C.mean()) == float(place.logits.mean())
    return length, int(place.logits[0, 0])


SIZE = state(0).nbytes


def room(states: float, tokens: int = 100) -> int:
    return int(states * (SIZE + 4 * tokens))


def folder(path, states: float = 100) -> StateFolder:
    return StateFolder(path, GENERATOR.model, torch.float32, room(states))


def written(cache: PrefixCache) -> None:
    """Waits for the disk, as the end of a process does."""
    cache.close()
    cache._folder._writer = type(cache._folder._writer)(1)


ids = st.lists(st.integers(0, 2), max_size=6).map(
    lambda blocks: [token for block in blocks for token in [block] * 40]
)


@given(stored=st.lists(ids, max_size=12), asked=ids, longer_than=st.integers(0, 240))
def test_the_longest_beginning_is_found(stored, asked, longer_than):
    store = PrefixStore(1 << 40)
    for text in stored:
        chain = TokenChain(text)
        store.add(Stored(chain.key(len(text)), chain.start(len(text)), None, 1))
    want = max((len(text) for text in stored if asked[: len(text)] == text), default=-1)
    longer_than = min(longer_than, len(asked))
    found = store.longest(TokenChain(asked), longer_than)
    assert (None if found is None else len(found)) == (want if want > longer_than else None)


@given(texts=st.lists(ids, max_size=8))
def test_where_a_text_parts_from_earlier_ones(texts):
    beginnings = Beginnings()
    for place, text in enumerate(texts):
        ends = range(64, len(text) + 1, 64)
        known = [end for end in ends if any(text[:end] == other[:end] for other in texts[:place])]
        came_before = text in texts[:place]  # then its end is stored, and nothing parts
        assert beginnings.meet(TokenChain(text)) == (0 if came_before else max(known, default=0))


def test_the_ends_of_old_texts_are_forgotten_first():
    beginnings = Beginnings(most_digests=5)
    for start in (0, 200):
        assert beginnings.meet(TokenChain(LONG[start : start + 192])) == 0
    assert beginnings.meet(TokenChain(LONG[:192])) == 64


@given(first=ids, second=ids)
def test_a_chain_that_is_continued_is_the_chain_of_all(first, second):
    whole, parts = TokenChain(first + second), TokenChain(second, before=TokenChain(first))
    assert len(parts) == len(whole) == len(first + second)
    assert parts.start(len(parts)) == whole.start(len(whole))
    for length in range(0, len(whole) + 1, 7):
        assert parts.key(length) == whole.key(length)
    copy = TokenChain.from_bytes(whole.start(len(whole)))
    assert copy.key(len(copy)) == whole.key(len(whole))


def test_hashes_are_not_trusted(monkeypatch):
    monkeypatch.setattr(prefix_store, "_digest", lambda before, block: b"the same")
    cache = PrefixCache(CPU, room(9, 400))
    one, other = TokenChain([1] * 100), TokenChain([2] * 64 + [1] * 36)
    assert one.key(100) == other.key(100)
    cache.add(one, 100, state(1))
    assert cache.longest(other, 0) is None
    assert mark(cache.longest(one, 0)) == (100, 1)
    cache.add(other, 100, state(2))  # takes the other's place
    assert cache.longest(one, 0) is None
    assert mark(cache.longest(other, 0)) == (100, 2)


def test_what_was_not_used_for_longest_goes_first():
    cache, chains = PrefixCache(CPU, room(3)), [TokenChain([n] * 100) for n in range(5)]
    for n in range(3):
        cache.add(chains[n], 100, state(n))
    assert mark(cache.longest(chains[0], 0)) == (100, 0)
    cache.add(chains[3], 100, state(3))
    cache.add(chains[4], 100, state(4))
    held = [mark(cache.longest(chain, 0)) for chain in chains]
    assert held == [(100, 0), None, None, (100, 3), (100, 4)]
    cache.add(chains[0], 100, state(7))  # once more: there is one of it
    assert cache.nbytes["device"] == 3 * (SIZE + 400)
    assert mark(cache.longest(chains[0], 0)) == (100, 7)
    assert cache.longest(chains[0], 100) is None
    assert cache.hits == {"device": 5, "host": 0, "disk": 0}


def test_a_state_too_large_is_not_kept():
    cache = PrefixCache(CPU, room(0.5))
    cache.add(TokenChain(LONG), 100, state(1))
    assert cache.longest(TokenChain(LONG), 0) is None
    assert cache.nbytes == {"device": 0, "host": 0, "disk": 0}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
def test_the_budget_is_held_and_the_order_is_that_of_use(work):
    cache, order = PrefixCache(CPU, room(3)), []
    for is_added, n in work:
        chain = TokenChain([n] * 100)
        if is_added:
            cache.add(chain, 100, state(n))
        assert (mark(cache.longest(chain, 0)) == (100, n)) == (is_added or n in order)
        if is_added or n in order:
            order = [*(other for other in order if other != n), n][-3:]
        assert cache.nbytes["device"] == len(order) * (SIZE + 400) <= room(3)
        assert len(cache._on_device) == len(order)
        assert len(cache._on_device._digests) == len(order)


def test_levels(tmp_path):
    cache = PrefixCache(CPU, room(2), room(2), folder(tmp_path, 2))
    chains = [TokenChain([n] * 100) for n in range(7)]
    for n in range(7):
        cache.add(chains[n], 100, state(n, 100))
        written(cache)
    # 5, 6 on the device; 3, 4 on the host; 1, 2 in files; 0 is gone.
    assert cache.nbytes == dict.fromkeys(("device", "host", "disk"), 2 * (SIZE + 400))
    assert len([*tmp_path.iterdir()]) == 2
    assert cache.longest(chains[0], 0) is None
    assert mark(cache.longest(chains[3], 0)) == (100, 3)  # 5 sinks for it
    assert mark(cache.longest(chains[2], 0)) == (100, 2)  # 6 sinks, and 4 for it
    assert cache.hits == {"device": 0, "host": 1, "disk": 1}
    assert mark(cache.longest(chains[2], 0)) == (100, 2)
    assert mark(cache.longest(chains[3], 0)) == (100, 3)
    assert cache.hits["device"] == 2


def test_the_longest_wins_whatever_its_level(tmp_path):
    cache = PrefixCache(CPU, room(1, 400), room(1, 400), folder(tmp_path))
    chain = TokenChain(LONG)
    for length in (300, 200, 100):
        cache.add(chain, length, state(length, length))
    written(cache)
    assert mark(cache.longest(chain, 0)) == (300, 300)
    assert cache.hits["disk"] == 1


def test_files_outlive_the_process(tmp_path):
    first = PrefixCache(CPU, 0, 0, folder(tmp_path))
    first.add(TokenChain(LONG), 150, state(5, 150))
    first.close()
    (tmp_path / "others.safetensors").write_bytes(b"not ours")
    again = PrefixCache(CPU, 0, 0, folder(tmp_path))
    assert mark(again.longest(TokenChain(LONG), 0)) == (150, 5)
    assert again.longest(TokenChain(LONG[:149]), 0) is None
    # Another model of the same shape has other states.
    other = random_generator()
    other.model.head[5] += 1
    assert fingerprint(other.model, torch.float32) != fingerprint(GENERATOR.model, torch.float32)
    strange = PrefixCache(CPU, 0, 0, StateFolder(tmp_path, other.model, torch.float32, 1 << 30))
    assert strange.longest(TokenChain(LONG), 0) is None
    assert (tmp_path / "others.safetensors").read_bytes() == b"not ours"
    # With less room the oldest file goes.
    folder(tmp_path, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["others.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone", "another"])
def test_a_damaged_file_is_a_miss(tmp_path, damage, caplog):
    cache = PrefixCache(CPU, 0, 0, folder(tmp_path))
    cache.add(TokenChain(LONG), 150, state(5, 150))
    written(cache)
    cache.add(TokenChain(LONG), 40, state(4, 40))
    written(cache)
    longer = cache._folder._path(TokenChain(LONG).start(150))
    content = longer.read_bytes()
    match damage:
        case "cut":
            longer.write_bytes(content[:-1])
        case "garbage":
            longer.write_bytes(b"\xff" * 100)
        case "gone":
            longer.unlink()
        case "another":
            state(9, 151).save(longer)
    assert mark(cache.longest(TokenChain(LONG), 0)) == (40, 4)
    assert cache.nbytes["disk"] == SIZE + 160
    assert not longer.exists()
    if damage != "another":
        assert "cannot be used" in caplog.text


def test_a_disk_that_is_full_is_survived(tmp_path, monkeypatch, caplog):
    cache = PrefixCache(CPU, 0, 0, folder(tmp_path))

    def full(*_args, **_named):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TextState, "save", full)
        cache.add(TokenChain(LONG), 150, state(5, 150))
        written(cache)
    assert "no space left" in caplog.text
    assert cache.longest(TokenChain(LONG), 0) is None
    cache.add(TokenChain(LONG), 150, state(5, 150))
    written(cache)
    assert mark(cache.longest(TokenChain(LONG), 0)) == (150, 5)
