"""The Triton kernels against the float64 reference.

Without a GPU they run in Triton's interpreter. The reference gets the same rounded inputs, so the
errors are those of the kernels.
"""

from dataclasses import replace

import pytest
import torch
from cell_cases import Case, closed_forget_gates, random_case, results_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error

from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.chunkwise import chunkwise_sequence
from xlstm7b.mlstm.recurrent import recurrent_sequence

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.mlstm.triton import launch_params, sequence
from xlstm7b.mlstm.triton.sequence import mlstm_chunkwise, triton_sequence
from xlstm7b.mlstm.triton.step import mlstm_fused_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("h", "C", "n", "m", "dq", "dk", "dv", "di", "df", "dC", "dn")
# Triton's interpreter computes bfloat16 wrongly, so it is only tested on a GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# float16 is multiplied as TF32. df has the largest error: it is a sum of terms that cancel.
LARGEST = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _several_chunks_in_a_short_sequence(monkeypatch):
    """The interpreter is slow, so its sequences are short, and so are their chunks."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(launch_params, "_WIDE", replace(launch_params._WIDE, chunk=64))


def trained(seed, *shape, dtype=torch.float64, **options) -> Case:
    """Gates as in a trained model: the input gates nearly closed, the forget gates open."""
    case = random_case(seed, *shape, gates=1.0, **options)
    case.i = case.i - 6
    case.f = case.f + torch.linspace(3, 6, shape[2], dtype=torch.float64)
    return case.to(dtype)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    return case.to(dtype).to(torch.float64).on(DEVICE)


def assert_as_good_as_pytorch(case: Case, dtype: torch.dtype, largest: float) -> None:
    case = rounded(case, dtype)
    want = results_and_gradients(case, chunkwise_sequence, 1e-6)
    plain = results_and_gradients(case.to(dtype), chunkwise_sequence, 1e-6)
    got = results_and_gradients(case.to(dtype), triton_sequence, 1e-6)
    for name, got_part, plain_part, want_part in zip(NAMES, got, plain, want, strict=True):
        assert got_part.dtype == plain_part.dtype
        allowed = max(largest * want_part.norm(), 1.5 * (plain_part - want_part).norm(), 1e-7)
        assert (got_part - want_part).norm() <= allowed, (name, error(got_part, want_part))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 70, 2, 16, 16), (2, 150, 1, 24, 40), (1, 33, 1, 96, 48), (1, 1, 2, 17, 33)]
)
def test_trained_gates(shape, dtype):
    assert_as_good_as_pytorch(trained(1, *shape), dtype, LARGEST[dtype])


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(
        st.integers(1, 2), st.integers(1, 140), st.integers(1, 2), *[st.integers(16, 40)] * 2
    ),
    options=st.fixed_dictionaries(
        {
            "gates": st.sampled_from([1.0, 5.0]),
            "fresh": st.booleans(),
            "resets": st.sampled_from([0.0, 0.1]),
            "padding": st.sampled_from([0.0, 0.5]),
        }
    ),
)
def test_any_shape_any_gates_in_float32(seed, shape, options):
    """Untrained gates make n·q cancel. The kernels may lose no more digits than PyTorch does."""
    assert_as_good_as_pytorch(random_case(seed, *shape, **options), torch.float32, 3e-5)


def test_one_pass_over_the_chunks_equals_two(monkeypatch):
    """Many rows use other kernels for the states than few rows do."""
    case = trained(5, 2, 140, 1, 16, 24, dtype=torch.float32, resets=0.02).on(DEVICE)
    two_passes = results_and_gradients(case, triton_sequence, 1e-6)
    monkeypatch.setattr(sequence, "ROWS_TO_FILL", 1)
    one_pass = results_and_gradients(case, triton_sequence, 1e-6)
    for one, two in zip(one_pass, two_passes, strict=True):
        assert error(one, two) < 1e-5


@pytest.mark.parametrize("boundary", [1, 31, 64, 100])
def test_nothing_crosses_a_document_boundary(boundary):
    case = random_case(0, 1, 130, 1, 16, 16, dtype=torch.float32, gates=15.0).on(DEVICE)
    other = random_case(1, 1, 130, 1, 16, 16, dtype=torch.float32, gates=15.0).on(DEVICE)
    for name in "qkvif":
        getattr(other, name)[:, boundary:] = getattr(case, name)[:, boundary:]
    case.resets = torch.zeros(1, 130, dtype=torch.bool, device=DEVICE)
    case.resets[:, boundary] = True
    other.resets = case.resets.clone()
    other.resets[:, boundary // 2] = True
    h, state = case.run(triton_sequence)
    other_h, other_state = other.run(triton_sequence)
    assert torch.equal(h[:, boundary:], other_h[:, boundary:])
    for part, other_part in zip(state, other_state, strict=True):
        assert torch.equal(part, other_part)


def test_a_row_of_only_padding_returns_its_state():
    case = random_case(5, 2, 70, 2, 16, 16, dtype=torch.float32, padding=1.0).on(DEVICE)
    assert all(x.isfinite().all() for x in results_and_gradients(case, triton_sequence, 1e-6))
    _, state = case.run(triton_sequence)
    for part, want in zip(state, case.state, strict=True):
        assert torch.equal(part, want)


@pytest.mark.parametrize(
    ("i", "f"), [(15.0, 15.0), (15.0, -15.0), (-15.0, 15.0), (-15.0, -15.0), (-torch.inf, 3.0)]
)
def test_extreme_gates(i, f):
    case = random_case(7, 1, 100, 1, 16, 16, fresh=True)
    case.i, case.f = torch.full_like(case.i, i), torch.full_like(case.f, f)
    assert_as_good_as_pytorch(case, torch.float32, 3e-5)


@pytest.mark.parametrize("rows_to_fill", [1, 32])
@pytest.mark.parametrize("resets", [0.0, 0.03])
def test_a_forget_gate_of_minus_infinity_forgets_everything_before(
    resets, rows_to_fill, monkeypatch
):
    monkeypatch.setattr(sequence, "ROWS_TO_FILL", rows_to_fill)
    case = closed_forget_gates(trained(9, 2, 150, 2, 16, 24, resets=resets))
    wide = rounded(case, torch.float32)
    want = results_and_gradients(wide, recurrent_sequence, 1e-6)
    got = results_and_gradients(wide.to(torch.float32), triton_sequence, 1e-6)
    for name, got_part, want_part in zip(NAMES, got, want, strict=True):
        assert (got_part - want_part).norm() <= 1e-5 * want_part.norm() + 1e-7, name


def test_open_forget_gates_keep_their_digits():
    """logσ(15) = −3e-7 per token. Computed from 1 + exp(−15) it would be wrong by up to a fifth."""
    case = random_case(8, 1, 300, 1, 16, 16, fresh=True)
    case.f = torch.full_like(case.f, 15.0)
    got = case.to(torch.float32).on(DEVICE).run(triton_sequence)[1].m
    case.i = torch.full_like(case.i, -torch.inf)
    m = case.to(torch.float32).on(DEVICE).run(triton_sequence)[1].m
    want = 300 * torch.nn.functional.logsigmoid(torch.tensor(15.0, dtype=torch.float64))
    assert error(m.cpu().flatten(), want.reshape(1)) < 1e-5
    assert got.isfinite().all()


def test_strided_inputs_and_a_second_run_give_the_same_bits():
    case = trained(2, 2, 75, 2, 16, 32, dtype=torch.float32, resets=0.05).on(DEVICE)
    want = results_and_gradients(case, triton_sequence, 1e-6)
    fused = torch.cat([case.q, case.k, case.v], dim=-1)  # as from one projection
    case.q, case.k, case.v = fused.split([16, 16, 32], dim=-1)
    case.i, case.f = torch.stack([case.i, case.f], dim=-1).unbind(-1)
    h, state = case.run(triton_sequence)
    for got, part in zip([h, state.m], [want[0], want[3]], strict=True):
        assert torch.equal(got, part)
    case.q, case.k, case.v = (x.contiguous() for x in (case.q, case.k, case.v))
    for got, part in zip(results_and_gradients(case, triton_sequence, 1e-6), want, strict=True):
        assert torch.equal(got, part)


def test_registered_operators():
    case = trained(3, 1, 40, 1, 16, 16, dtype=torch.float32, resets=0.1).on(DEVICE)
    leaves = [leaf.requires_grad_() for leaf in case.differentiable()]
    torch.library.opcheck(
        mlstm_chunkwise, (*leaves[:5], *leaves[5:], case.state.m, case.resets, 1e-6)
    )
    q, k, v, i, f = (getattr(case, name)[:, 0].detach() for name in "qkvif")
    state = [part.detach().clone() for part in case.state]
    torch.library.opcheck(
        mlstm_fused_step,
        (q, k, v, i, f, *state, v.clone(), torch.rand(16, device=DEVICE), 1e-6, 1e-6),
    )


def test_compiles_as_one_graph():
    torch.compiler.reset()
    case = trained(4, 1, 70, 1, 16, 16, dtype=torch.float32).on(DEVICE)

    def layer(*leaves):
        q, k, v, i, f, C, n = leaves
        state = MLSTMState(C, n, case.state.m)
        h, new = mlstm_sequence(q, k, v, i, f, state=state, backend="triton")
        return h * 2, new.C

    leaves = [leaf.requires_grad_() for leaf in case.differentiable()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for form in (layer, compiled):
        h, C = form(*leaves)
        gradients = torch.autograd.grad(h.sum() + C.sum(), leaves)
        if form is layer:
            want = [h, C, *gradients]
    for got, part in zip([h, C, *gradients], want, strict=True):
        assert torch.equal(got, part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "state_dtype", [torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
def test_fused_step(dtype, state_dtype, with_norm, with_gate):
    batch, heads, d_qk, d_hv = 3, 2, 24, 40
    case = rounded(random_case(0, batch, 5, heads, d_qk, d_hv), dtype)
    gate = torch.randn(batch, heads, d_hv, device=DEVICE).to(dtype).double()
    weight = torch.rand(heads * d_hv, device=DEVICE).to(dtype).double()
    options = {"gate": gate if with_gate else None, "norm_weight": weight if with_norm else None}
    narrow = {name: x if x is None else x.to(dtype) for name, x in options.items()}
    state, fused = case.state, MLSTMState(*(part.float() for part in case.state))
    fused = fused._replace(C=fused.C.to(state_dtype))
    digits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    for t in range(5):
        token = [getattr(case, name)[:, t] for name in "qkvif"]
        small = [x.to(dtype) for x in token[:3]] + [x.float() for x in token[3:]]
        state = MLSTMState(*(part.to(torch.float64) for part in fused))
        want, want_state = mlstm_step(*token, state, **options, backend="recurrent")
        got, same = mlstm_step(*small, fused, **narrow, inplace=True, backend="triton")
        assert same is fused
        assert got.dtype == dtype
        assert error(got, want) < max(digits[dtype], digits[state_dtype])
        for part, want_part in zip(fused, want_state, strict=True):
            assert error(part, want_part) < digits[state_dtype]


def test_an_unsupported_input_is_explained():
    case = random_case(0, 1, 4, 1, 16, 16, dtype=torch.float32).on(DEVICE)
    arguments = [getattr(case, name) for name in "qkvif"]
    with pytest.raises(ValueError, match="float64"):
        mlstm_sequence(*(x.double() for x in arguments), backend="triton")
    with pytest.raises(ValueError, match="16 to 1024 elements, not 8"):
        mlstm_sequence(*(x[..., :8] for x in arguments[:3]), *arguments[3:], backend="triton")
    token = [x[:, 0].requires_grad_() for x in arguments]
    with pytest.raises(ValueError, match="the kernel for a single step has no backward pass"):
        mlstm_step(*token, case.state, backend="triton")


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "heads",
    [(4, 96, 192), (5, 160, 320), (8, 256, 512), (1, 512, 1024), (1, 1024, 1024), (2, 128, 16)],
)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 257), (1, 1000)])
def test_head_sizes_on_the_gpu(heads, batch, length, dtype):
    case = trained(length, batch, length, *heads, resets=0.01, padding=0.02)
    assert_as_good_as_pytorch(case, dtype, LARGEST[dtype])


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_sequence(dtype):
    case = trained(1, 1, 131_072, 1, 128, 128)
    assert_as_good_as_pytorch(case, dtype, LARGEST[dtype])


@gpu
def test_more_elements_than_32_bits_can_index():
    """The second half alone, from the first half's state, has the same numbers at small offsets."""
    length, heads, d_qk, d_hv = 1 << 20, 8, 256, 512
    assert length * heads * d_hv > 2**31
    q, k = (torch.randn(1, length, heads, d_qk, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    v = torch.randn(1, length, heads, d_hv, device="cuda", dtype=torch.bfloat16)
    i, f = torch.randn(2, 1, length, heads, device="cuda")
    parts = [q, k, v, i - 6, f + 4]
    h, state = mlstm_sequence(*parts)
    _, middle = mlstm_sequence(*(x[:, : length // 2] for x in parts))
    want, want_state = mlstm_sequence(*(x[:, length // 2 :] for x in parts), state=middle)
    assert (h[:, length // 2 :] - want).norm() < 1e-3 * want.norm()
    for part, want_part in zip(state, want_state, strict=True):
        assert error(part, want_part) < 1e-5


@gpu
@pytest.mark.parametrize("heads", [(8, 256, 512), (4, 96, 192), (5, 160, 320), (2, 64, 64)])
@pytest.mark.parametrize("rows", [2, 64])
def test_no_row_is_wrong_and_two_runs_give_the_same_bits_on_the_gpu(heads, rows):
    """A race in a kernel's pipeline made a few rows in a thousand wrong, other rows each time."""
    case = trained(1, -(-rows // heads[0]), 2048, *heads, resets=0.001, fresh=True)
    case = rounded(case, torch.bfloat16)
    want = results_and_gradients(case.to(torch.float32), triton_sequence, 1e-6)
    runs = [results_and_gradients(case.to(torch.bfloat16), triton_sequence, 1e-6) for _ in "ab"]
    for name, first, second, exact in zip(NAMES, *runs, want, strict=True):
        assert torch.equal(first, second), name
        if name in ("h", "dq", "dk", "dv"):
            rows = exact.norm(dim=-1)
            off = (first.float() - exact).norm(dim=-1) / (rows + rows.mean())
            # Rounding alone is below 1e-2 of a row. Wrong rows were off by 0.1 to 1.
            assert off.max() < 3e-2, (name, float(off.max()))


@gpu
def test_peak_extra_memory():
    """At most 2.5 × the bytes of q + k + v + h, without the returned gradients."""
    shape = (8, 8192, 8)
    q, k = (torch.randn(*shape, 256, device="cuda").bfloat16().requires_grad_() for _ in "qk")
    v = torch.randn(*shape, 512, device="cuda").bfloat16().requires_grad_()
    i, f = (torch.randn(*shape, device="cuda").requires_grad_() for _ in "if")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    h, _ = mlstm_sequence(q, k, v, i, f)
    dh = torch.randn_like(h)
    gradients = torch.autograd.grad(h, [q, k, v, i, f], dh)
    own = sum(x.nbytes for x in (h, dh, *gradients))
    extra = torch.cuda.max_memory_allocated() - before - own
    assert extra <= 2.5 * sum(x.nbytes for x in (q, k, v, h))


@gpu
def test_cuda_graph():
    case = trained(0, 1, 300, 8, 64, 128, dtype=torch.bfloat16).on(DEVICE)
    token = [getattr(case, name)[:, 0].contiguous() for name in "qkvif"]

    def work():
        h, state = case.run(mlstm_sequence)
        return h, mlstm_step(*token, MLSTMState(*(x.clone() for x in state)), inplace=True)[0]

    want = work()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = work()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for got, part in zip(captured, want, strict=True):
        assert torch.equal(got, part)
