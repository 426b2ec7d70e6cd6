"""Every form of the cell computes the same function: outputs, states and all gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from cell_cases import (
    FORMS,
    Case,
    closed_forget_gates,
    memory,
    random_case,
    results_and_gradients,
    results_in_both_orders,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from torch import Tensor

from xlstm7b.mlstm import MLSTMState, mlstm_sequence
from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.recurrent import recurrent_sequence


@pytest.mark.long
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(*(st.integers(1, most) for most in (3, 300, 3, 9, 9))),
    chunk_size=st.integers(1, 130),
    eps=st.sampled_from([0.0, 1e-6, 1e-2]),
    options=st.fixed_dictionaries(
        {
            "gates": st.sampled_from([1.0, 5.0, 15.0]),
            "fresh": st.booleans(),
            "resets": st.sampled_from([0.0, 0.02, 0.3]),
            "padding": st.sampled_from([0.0, 0.2, 0.9]),
        }
    ),
)
def test_forms_agree_in_float64(seed, shape, chunk_size, eps, options):
    case = random_case(seed, *shape, **options)
    want, other = results_in_both_orders(case, FORMS["recurrent"], eps)

    def chunked(*args, **kwargs):
        return chunkwise_sequence(*args, **kwargs, chunk_size=chunk_size)

    for form in (FORMS["parallel"], chunked):
        results = zip(results_and_gradients(case, form, eps), want, other, strict=True)
        for got_part, want_part, other_part in results:
            # A gradient of exactly 0 is rounding noise in every form. Where large terms cancel, the
            # reference has noise of its own.
            noise = 1e-13 + 20 * (other_part - want_part).norm()
            assert (got_part - want_part).norm() <= 1e-9 * want_part.norm() + noise


def test_gradients_are_those_of_finite_differences():
    """Of the recurrent form. The others have its gradients."""
    case = random_case(1, 2, 7, 2, 3, 2, gates=2.0, resets=0.2)
    leaves = [leaf.requires_grad_() for leaf in case.differentiable()]

    def function(q, k, v, i, f, C, n):
        state = MLSTMState(C, n, case.state.m)
        h, new = recurrent_sequence(q, k, v, i, f, state=state, resets=case.resets, eps=0.0)
        return h, *memory(new)

    assert torch.autograd.gradcheck(function, leaves)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), boundary=st.integers(1, 139), form=st.sampled_from([*FORMS]))
def test_nothing_crosses_a_document_boundary(seed, boundary, form):
    """Bit for bit in float32, with gates anywhere in ±15."""
    case = random_case(seed, 2, 140, 2, 5, 6, dtype=torch.float32, gates=15.0, resets=0.01)
    case.resets[:, boundary] = True
    other = random_case(seed + 1, 2, 140, 2, 5, 6, dtype=torch.float32, gates=15.0)
    for name in "qkvif":
        getattr(other, name)[:, boundary:] = getattr(case, name)[:, boundary:]
    other.resets = torch.rand(2, 140) < 0.05
    other.resets[:, boundary:] = case.resets[:, boundary:]
    h, state = case.run(FORMS[form])
    other_h, other_state = other.run(FORMS[form])
    assert not torch.equal(h[:, :boundary], other_h[:, :boundary])
    assert torch.equal(h[:, boundary:], other_h[:, boundary:])
    for part, other_part in zip(state, other_state, strict=True):
        assert torch.equal(part, other_part)


@pytest.mark.parametrize("form", FORMS)
def test_a_boundary_equals_a_fresh_start(form):
    case = random_case(3, 2, 90, 2, 4, 6)
    case.resets = torch.zeros(2, 90, dtype=torch.bool)
    case.resets[:, 37] = True
    h, state = case.run(FORMS[form])
    (_, before), (after, alone) = case.split(37)
    fresh = MLSTMState(*(torch.zeros_like(part) for part in case.state))
    want_h, want_state = mlstm_sequence(
        alone.q, alone.k, alone.v, alone.i, alone.f, state=fresh, backend="recurrent"
    )
    assert error(h[:, after], want_h) < 1e-12
    for part, want in zip(state, want_state, strict=True):
        assert error(part, want) < 1e-12
    assert error(h[:, :37], before.run(FORMS["recurrent"])[0]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing(form):
    case = random_case(4, 1, 150, 2, 4, 6, padding=0.5)
    kept = case.i[0, :, 0] > -torch.inf
    h, state = case.run(FORMS[form])
    dense = Case(*(getattr(case, name)[:, kept] for name in "qkvif"), case.state)
    want_h, want_state = dense.run(FORMS["recurrent"])
    assert error(h[:, kept], want_h) < 1e-12
    for part, want in zip(state, want_state, strict=True):
        assert error(part, want) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_only_padding_returns_its_state(form):
    case = random_case(5, 2, 70, 2, 4, 6, dtype=torch.float32, padding=1.0)
    results = results_and_gradients(case, FORMS[form], 1e-6)
    assert all(part.isfinite().all() for part in results)
    _, state = case.run(FORMS[form])
    for part, want in zip(state, case.state, strict=True):
        assert torch.equal(part, want)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 100), max_size=4))
def test_a_sequence_can_be_processed_in_parts(form, cuts):
    case = random_case(6, 2, 100, 2, 3, 4, resets=0.05)
    want_h, want_state = case.run(FORMS["recurrent"])
    state = case.state
    for where, part in case.split(*sorted(cuts)):
        part.state = state
        h, state = part.run(FORMS[form])
        assert error(h, want_h[:, where]) < 1e-11
    for part, want in zip(state, want_state, strict=True):
        assert error(part, want) < 1e-11


@cache
def extreme_case(i: float, f: float) -> tuple[Case, list[Tensor], list[Tensor]]:
    """In float32, with the results of the recurrent form in float64 and in float32."""
    case = random_case(7, 1, 200, 2, 8, 8, fresh=True)
    case.i, case.f = torch.full_like(case.i, i), torch.full_like(case.f, f)
    want = results_and_gradients(case, FORMS["recurrent"], 1e-6)
    case = case.to(torch.float32)
    return case, want, results_and_gradients(case, FORMS["recurrent"], 1e-6)


@pytest.mark.parametrize(
    ("i", "f"), [(15.0, 15.0), (15.0, -15.0), (-15.0, 15.0), (-15.0, -15.0), (-torch.inf, 3.0)]
)
@pytest.mark.parametrize("form", FORMS)
def test_extreme_gates_in_float32(form, i, f):
    case, want, plain = extreme_case(i, f)
    got = results_and_gradients(case, FORMS[form], 1e-6)
    for got_part, plain_part, want_part in zip(got, plain, want, strict=True):
        assert got_part.isfinite().all()
        # Where n·q cancels, float32 loses digits. No form may lose more than the recurrent one.
        allowed = 2 * (plain_part - want_part).norm() + 1e-5 * want_part.norm() + 1e-7
        assert (got_part - want_part).norm() <= allowed


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("has_resets", [True, False])
def test_a_forget_gate_of_minus_infinity_forgets_everything_before(fresh, has_resets):
    """Also at a document's first token, at the first and last token, and in heads of their own."""
    case = closed_forget_gates(random_case(11, 2, 150, 2, 5, 7, fresh=fresh, resets=0.03))
    if not has_resets:
        case = replace(case, resets=None)
    want = results_and_gradients(case, FORMS["recurrent"], 1e-6)
    for name, form in FORMS.items():
        if name != "recurrent":
            got = results_and_gradients(case, form, 1e-6)
            for got_part, want_part in zip(got, want, strict=True):
                assert (got_part - want_part).norm() <= 1e-11 * want_part.norm() + 1e-13, name


def test_float32_stays_exact_over_a_long_sequence():
    """With gates as in a trained model: forget gates are open, over a range of time scales."""
    case = random_case(8, 1, 8192, 2, 16, 32, gates=1.0, fresh=True)
    case.i, case.f = case.i - 3, case.f + torch.tensor([3.0, 6.0])
    want_h, want_state = case.run(FORMS["chunkwise"])
    h, state = case.to(torch.float32).run(FORMS["chunkwise"])
    assert error(h, want_h) < 1e-5
    for part, want in zip(state, want_state, strict=True):
        assert error(part, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_16_bit_inputs_lose_only_the_rounding_of_h(form, dtype):
    case = random_case(9, 2, 80, 2, 16, 16, dtype=dtype)
    h, state = case.run(FORMS[form])
    wide = case.to(torch.float32)
    want_h, want_state = wide.run(FORMS[form])
    assert h.dtype == dtype
    assert torch.equal(h, want_h.to(dtype))
    for part, want in zip(state, want_state, strict=True):
        assert part.dtype == torch.float32
        assert torch.equal(part, want)


@pytest.mark.long
def test_compiles_for_dynamic_lengths():
    """After a projection, as in the model: its backward pass depends on strides."""
    torch.compiler.reset()
    weight = torch.randn(2 * 4, 6, dtype=torch.float64, requires_grad=True)

    def layer(x, i, f):
        q = (x @ weight.mT).unflatten(-1, (2, 4))
        return mlstm_sequence(q, q, q, i, f)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (70, 65):
        x = torch.randn(1, length, 6, dtype=torch.float64)
        i, f = torch.randn(2, 1, length, 2, dtype=torch.float64)
        for tensor in (x, i, f):  # compiling fails if it needs a certain length
            torch._dynamo.mark_dynamic(tensor, 1)
        want = torch.autograd.grad(layer(x, i, f).square().sum(), weight)[0]
        got = torch.autograd.grad(compiled(x, i, f).square().sum(), weight)[0]
        assert error(got, want) < 1e-12


def test_bad_input_is_a_value_error_that_names_it():
    case = random_case(10, 2, 6, 2, 4, 6)
    good = {name: getattr(case, name) for name in "qkvif"}
    backends = "auto, recurrent, parallel, chunkwise or triton"
    for change, message in [
        ({"k": case.k[:, :5]}, r"k must have the shape \[2, 6, 2, 4\], not \[2, 5, 2, 4\]"),
        ({"v": case.v[:1]}, r"v must have the shape \[2, 6, 2, 6\], not \[1, 6, 2, 6\]"),
        ({"i": case.i.half()}, "i must be float32, not torch.float16"),
        ({"f": case.f[..., :1]}, r"f must have the shape \[2, 6, 2\], not \[2, 6, 1\]"),
        ({"resets": torch.zeros(2, 6)}, "resets must be bool, not torch.float32"),
        ({"state": MLSTMState(*(part[:1] for part in case.state))}, "the state's C must have"),
        ({"state": case.state._replace(m=case.state.m[:, :1])}, r"m must have the shape \[2, 2\]"),
        (
            {"backend": "cudnn"},
            f"backend must be {backends}, not 'cudnn'",
        ),
        ({name: part[:, :0] for name, part in good.items()}, "at least one token"),
    ]:
        with pytest.raises(ValueError, match=message):
            mlstm_sequence(**(good | change))
