"""States are gathered from slots and scattered to them, whatever their shapes and order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, DTYPES, GUARD, draw, fill_new_memory_with_nan

from xlstm7b.generate.kernels import plain
from xlstm7b.mlstm import MLSTMState

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import gpu


def check_slot_states(
    slots: list[int], count: int, blocks: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Gathers from and scatters to these of `count` slots; the last slot is the spare one.

    A buffer [slots, blocks, …] holds all blocks, so the states of one block are a strided view.
    Only the spare slot may be repeated in `slots`.
    """
    buffers = [draw(count, blocks, *sizes[:dims], dtype=dtype) for dims in (3, 2, 1)]
    index, spare = torch.tensor(slots, device=DEVICE), count - 1
    is_spare = index == spare
    for block in range(blocks):
        states = MLSTMState(*(buffer[:, block] for buffer in buffers))
        gathered, want = gpu.gather_states(states, index), plain.gather_states(states, index)
        for part, want_part in zip(gathered, want, strict=True):
            assert part.dtype == dtype
            assert part.is_contiguous()
            assert torch.equal(part, want_part)

        # The cell returns float32, whatever dtype the slots have.
        batch = MLSTMState(*(draw(*part.shape, dtype=torch.float32) for part in gathered))
        want_buffers = [buffer.clone() for buffer in buffers]
        want_states = MLSTMState(*(buffer[:, block] for buffer in want_buffers))
        plain.scatter_states(batch, want_states, index)
        gpu.scatter_states(batch, states, index)
        for buffer, want_buffer, rows in zip(buffers, want_buffers, batch, strict=True):
            if is_spare.sum() > 1:  # each element comes from one of the spare slot's rows
                candidates = rows[is_spare].to(dtype)
                assert (buffer[spare, block] == candidates).any(0).all()
                want_buffer[spare, block] = buffer[spare, block]
            assert torch.equal(buffer, want_buffer)  # other slots and blocks are unchanged
            after = buffer.as_strided((GUARD,), (1,), buffer.numel())
            assert after.isnan().all()


odd = st.integers(0, 20).map(lambda n: 2 * n + 1)


@st.composite
def chosen_slots(draw_from) -> tuple[list[int], int]:
    """Slots in any order, the spare one any number of times; and how many slots there are."""
    count = draw_from(st.integers(2, 7))
    used = draw_from(st.lists(st.integers(0, count - 2), unique=True))
    spares = draw_from(st.integers(0 if used else 1, 3))
    return draw_from(st.permutations([*used, *[count - 1] * spares])), count


@settings(max_examples=40)
@given(chosen_slots(), st.integers(1, 3), st.tuples(odd, odd, odd), st.sampled_from(DTYPES))
def test_states_of_any_slots(chosen, blocks, sizes, dtype):
    with pytest.MonkeyPatch.context() as patch:
        fill_new_memory_with_nan(patch)
        check_slot_states(*chosen, blocks, sizes, dtype)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2, 32, 64), (3, 37, 37), (5, 821, 1), (4099, 1, 1)],
    ids=["one element", "one whole block", "C over two blocks", "n over two", "m over two"],
)
def test_states_of_slots_at_the_edges_of_blocks(sizes, dtype):
    check_slot_states([4, 0, 4, 2], 5, 2, sizes, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("blocks", "sizes"), [(3, (8, 256, 512)), (2, (4, 96, 192)), (2, (5, 129, 257))]
)
def test_states_of_slots_on_a_gpu(blocks, sizes, dtype):
    check_slot_states([6, 2, 8, 0, 8, 5, 8], 9, blocks, sizes, dtype)
