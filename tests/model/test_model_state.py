"""ModelState: its rows are copied, joined, moved and counted without a change of their values."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import SMALL, assert_states_match, random_model, random_tokens
from torch import Tensor

from xlstm7b.model import ModelState


@torch.no_grad()
def random_state(batch: int) -> ModelState:
    """Rows with different numbers of tokens."""
    lengths = torch.randint(1, 6, (batch,))
    return random_model()(random_tokens(batch, 5), lengths=lengths)[1]


def tensors(state: ModelState) -> list[Tensor]:
    return [state.tokens_seen, *(part for block in state.blocks for part in block)]


def test_forked_rows_can_be_selected() -> None:
    state = random_state(3)
    forked = state.fork(2)
    assert_states_match(forked.select([0, 2, 4]), state, 0)
    assert_states_match(forked.select(torch.tensor([1, 3, 5])), state, 0)
    for bad in ([3], [-1]):
        with pytest.raises(ValueError, match="rows must be between 0 and 2"):
            state.select(bad)
    with pytest.raises(ValueError, match="the number of copies must be at least 1, not 0"):
        state.fork(0)


def test_bytes_are_those_of_all_tensors() -> None:
    state = random_state(3)
    cell = SMALL.num_blocks * SMALL.num_heads * (SMALL.d_qk * (SMALL.d_hv + 1) + 1)
    assert state.nbytes == 3 * (8 * cell + 8)
    assert state.fork(2).nbytes == 2 * state.nbytes


def test_a_clone_shares_no_memory() -> None:
    state = random_state(3)
    copy = state.clone()
    assert_states_match(copy, state, 0)
    for ours, theirs in zip(tensors(copy), tensors(state), strict=True):
        assert ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()


@given(cuts=st.lists(st.integers(0, 7), max_size=4))
def test_joining_selected_rows_gives_the_state_back(cuts: list[int]) -> None:
    state = random_state(7)
    edges = [0, *sorted(cuts), 7]
    parts = [
        state.select(list(range(start, end)))
        for start, end in pairwise(edges)  # some have no row
    ]
    joined = ModelState.cat(parts)
    assert_states_match(joined, state, 0)
    assert [x.dtype for x in tensors(joined)] == [x.dtype for x in tensors(state)]
    order = [6, 0, 3]
    assert_states_match(
        ModelState.cat([state.select([row]) for row in order]), state.select(order), 0
    )


def test_joined_rows_are_a_copy() -> None:
    state = random_state(1)
    joined = ModelState.cat([state])
    joined.zero_()
    assert (state.blocks[0].C != 0).any()
    assert (state.tokens_seen > 0).all()


def test_states_that_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="there must be at least one state to join"):
        ModelState.cat([])
    others = (replace(SMALL, num_blocks=1), replace(SMALL, num_heads=4))
    shapes = (r"\(1, 2, 16, 32\) and \(2, 2, 16, 32\)", r"\(2, 2, 16, 32\) and \(2, 4, 8, 16\)")
    for other, shape in zip(others, shapes, strict=True):
        states = [ModelState.zeros(config, 1) for config in (SMALL, other)]
        with pytest.raises(ValueError, match=f"states of different models .* are {shape}$"):
            ModelState.cat(states)


def test_a_state_that_is_on_the_device_is_not_copied() -> None:
    state = random_state(3)
    for device in ("cpu", torch.device("cpu")):
        moved = state.to(device)
        assert all(a is b for a, b in zip(tensors(moved), tensors(state), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_the_gpu_and_back_to_pinned_memory(non_blocking: bool) -> None:
    state = random_state(3)
    on_gpu = state.to("cuda", non_blocking=non_blocking)
    assert all(x.is_cuda for x in tensors(on_gpu))
    for part, want in ((on_gpu, state), (on_gpu.rows(1, 3), state.rows(1, 3))):
        back = part.to("cpu", non_blocking=non_blocking)
        if non_blocking:
            torch.cuda.synchronize()
        assert all(x.is_pinned() for x in tensors(back))
        assert_states_match(back, want, 0)
        assert_states_match(back.to("cuda").to("cpu"), want, 0)
