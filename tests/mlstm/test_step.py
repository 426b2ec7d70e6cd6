"""The single step: equal to the sequence, with the norm and the output gate, in place or not."""

import pytest
import torch
from cell_cases import FORMS, random_case
from measure import error

from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step


def one_token(case, t):
    return [getattr(case, name)[:, t] for name in "qkvif"]


def test_steps_equal_the_sequence():
    case = random_case(0, 3, 40, 2, 5, 7)
    want_h, want_state = case.run(FORMS["parallel"])
    state = case.state
    for t in range(40):
        h, state = mlstm_step(*one_token(case, t), state)
        assert error(h, want_h[:, t]) < 1e-11
    for part, want in zip(state, want_state, strict=True):
        assert error(part, want) < 1e-11


def test_norm_and_gate_by_hand():
    case = random_case(1, 2, 1, 3, 5, 8)
    weight, gate = torch.rand(24, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    plain, _ = mlstm_step(*one_token(case, 0), case.state)
    got, _ = mlstm_step(
        *one_token(case, 0), case.state, gate=gate, norm_weight=weight, norm_eps=1e-3
    )
    centred = plain - plain.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    want = normed * weight.reshape(3, 8) / (1 + torch.exp(-gate))
    assert error(got, want) < 1e-14


def test_only_inplace_overwrites_the_given_state():
    case = random_case(2, 2, 1, 2, 4, 4)
    before = MLSTMState(*(part.clone() for part in case.state))
    _, new = mlstm_step(*one_token(case, 0), case.state)
    for part, old in zip(case.state, before, strict=True):
        assert torch.equal(part, old)
    _, same = mlstm_step(*one_token(case, 0), case.state, inplace=True)
    assert same is case.state
    for part, want in zip(same, new, strict=True):
        assert torch.equal(part, want)


def test_a_sequence_of_one_is_a_step():
    case = random_case(3, 2, 1, 2, 4, 6)
    step_h, _ = mlstm_step(*one_token(case, 0), case.state)
    for backend in ("auto", "recurrent", "parallel", "chunkwise"):
        h, _ = mlstm_sequence(
            *(getattr(case, name) for name in "qkvif"), state=case.state, backend=backend
        )
        assert error(h[:, 0], step_h) < 1e-13


def test_bfloat16_state_is_computed_in_float32():
    case = random_case(4, 2, 1, 2, 8, 8, dtype=torch.float32)
    rounded = MLSTMState(*(part.bfloat16() for part in case.state))
    h, _ = mlstm_step(*one_token(case, 0), rounded)
    want, _ = mlstm_step(*one_token(case, 0), MLSTMState(*(part.float() for part in rounded)))
    assert torch.equal(h, want)


def test_a_state_with_c_in_bfloat16_forgets_as_float64_does():
    """4,096 tokens in place, one head for each forget gate. n and m stay float32."""
    forget, length, d = torch.tensor([3.0, 4.0, 5.0, 6.0]), 4096, 16
    q, k, v = torch.randn(3, 1, length, 4, d)
    i, f = (bias + 0.5 * torch.randn(1, length, 4) for bias in (torch.full((4,), -4.0), forget))
    wide = [x.double() for x in (q, k, v, i, f)]
    want, _ = mlstm_sequence(*wide, backend="chunkwise")
    state = MLSTMState.zeros(1, 4, d, d, dtype=torch.bfloat16)
    assert [part.dtype for part in state] == [torch.bfloat16, torch.float32, torch.float32]
    last = []
    for t in range(length):
        h, state = mlstm_step(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t], state, inplace=True)
        last.append(h)
    got, want = torch.stack(last[-300:], 1), want[:, -300:]
    for head, largest in enumerate((0.008, 0.012, 0.02, 0.035)):
        assert error(got[:, :, head], want[:, :, head]) < largest


@pytest.mark.parametrize("part", ["n", "m"])
def test_n_and_m_in_bfloat16_are_not_overwritten(part):
    case = random_case(6, 2, 1, 2, 4, 6, dtype=torch.float32)
    state = case.state._replace(**{part: getattr(case.state, part).bfloat16()})
    with pytest.raises(ValueError, match=f"the state's {part} must be float32, not torch.bfloat16"):
        mlstm_step(*one_token(case, 0), state, inplace=True)
    mlstm_step(*one_token(case, 0), state)  # returns a new state, in float32


@pytest.mark.parametrize(
    ("part", "index"),
    [
        ("C", (slice(1),)),  # would broadcast over rows
        ("n", (slice(None), slice(1))),  # would broadcast over heads
        ("m", (slice(1),)),
        ("C", (..., slice(3))),
        ("gate", (slice(1),)),
        ("norm_weight", (slice(6),)),
    ],
)
def test_wrong_shapes_are_refused(part, index):
    case = random_case(5, 2, 1, 2, 4, 6)
    extras = {"gate": torch.zeros(2, 2, 6), "norm_weight": torch.ones(12)}
    state = case.state
    if part in extras:
        extras[part] = extras[part][index]
    else:
        state = state._replace(**{part: getattr(state, part)[index]})
    name = part if part in extras else f"the state's {part}"
    with pytest.raises(ValueError, match=f"{name} must have the shape"):
        mlstm_step(*one_token(case, 0), state, **extras)


@pytest.mark.parametrize("backend", ["recurrent", "triton"])
def test_slots_of_a_larger_state_are_updated_in_place(backend):
    """The rows of the larger state are apart in memory, as in the cache of vLLM."""
    case = random_case(5, 3, 1, 2, 16, 32, dtype=torch.float32)
    weight, gate = torch.rand(64), torch.randn(3, 2, 32)
    options = {"gate": gate, "norm_weight": weight, "backend": backend}
    want, want_state = mlstm_step(*one_token(case, 0), case.state, **options)
    memory = torch.randn(6, 2 * (16 * 32 + 16 + 1) + 30)
    C, n, m, _ = memory.split([2 * 16 * 32, 2 * 16, 2, 30], dim=1)
    larger = MLSTMState(C.unflatten(1, (2, 16, 32)), n.unflatten(1, (2, 16)), m)
    slots = torch.tensor([4, 1, 3], dtype=torch.int32)
    for part, rows in zip(larger, case.state, strict=True):
        part[slots.long()] = rows
    before = memory.clone()
    got, same = mlstm_step(*one_token(case, 0), larger, **options, inplace=True, slots=slots)
    assert same is larger
    assert torch.equal(got, want)
    for part, want_part in zip(larger, want_state, strict=True):
        assert torch.equal(part[slots.long()], want_part)
    others = [0, 2, 5]
    assert torch.equal(memory[others], before[others])
    assert torch.equal(memory[:, -30:], before[:, -30:])


def test_slots_are_checked():
    case = random_case(6, 2, 1, 2, 4, 4)
    with pytest.raises(ValueError, match="slots can only be given with inplace=True"):
        mlstm_step(*one_token(case, 0), case.state, slots=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"slots must have the shape \[2\], not \[3\]"):
        mlstm_step(*one_token(case, 0), case.state, inplace=True, slots=torch.tensor([0, 1, 1]))


def test_streams_never_share_counters(monkeypatch):
    """Two engines in one process: the counters that one uses are not those of the other.

    Warming up 256 slots took 1.98M counters, in turn from 1.05M. Then both had the same ones.
    """
    step = pytest.importorskip("xlstm7b.mlstm.triton.step")
    now = {"stream": 0, "captures": False}
    monkeypatch.setattr(step, "_current_stream", lambda _: now["stream"])
    monkeypatch.setattr(step, "_is_capturing", lambda _: now["captures"])
    counters, used = step._Counters(torch.device("cpu")), {}
    memory = []  # a block that was freed could come again at the same address

    def launch(stream: int, rows: int, captures: bool = False) -> None:
        now.update(stream=stream, captures=captures)
        taken = counters.take(rows)
        assert len(taken) == rows
        assert taken.data_ptr() % 16 == 0
        assert not taken.any()
        memory.append(taken)
        used.setdefault(stream, set()).add(taken.untyped_storage().data_ptr())

    for rows in (8, 256 * 8, 3000, 8):
        for capture_stream in (1, 2):  # of two engines, which run in streams 0 and 3
            for _ in range(500):
                launch(0, rows)
                launch(3, rows)
                launch(capture_stream, rows, captures=True)
    every = [address for addresses in used.values() for address in addresses]
    assert len(every) == len(set(every))
    assert all(len(addresses) <= 3 for addresses in used.values())  # as large as what is used
    now.update(stream=4, captures=True)
    with pytest.raises(RuntimeError, match="call mlstm_step once before you capture"):
        counters.take(5000)
