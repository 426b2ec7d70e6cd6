"""The kernels of replay decoding against the equations in float64 (`mlstm/replay.py`).

Without a GPU it runs in Triton's interpreter. The reference gets the same rounded inputs.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from torch import Tensor

from xlstm7b.mlstm import MLSTMState, headwise_norm
from xlstm7b.mlstm.replay import Cursor, Pass, Ring, folded_state, replay_pass, replay_step

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.mlstm.triton import replay
from xlstm7b.mlstm.triton.launch_params import Tile, pass_tile, replay_tile
from xlstm7b.mlstm.triton.replay import launch_advance, launch_order, launch_replay, step_tokens
from xlstm7b.mlstm.triton.replay_pass import launch_advance_pass, launch_pass
from xlstm7b.mlstm.triton.step import launch_step, take_counters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes bfloat16 wrongly, so it is only tested on a GPU.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DIGITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-6
GUARD = 64  # NaNs around each tensor: a kernel that reads too far returns NaN


def guarded(x: Tensor) -> Tensor:
    """The same numbers with NaNs before and after them in memory."""
    padded = F.pad(x.flatten(), (GUARD, GUARD), value=torch.nan)
    return padded[GUARD:-GUARD].view(x.shape)


class Layer:
    """One layer that the kernel decodes, and the same in float64."""

    def __init__(self, batch, heads, d_qk, d_hv, size, interval, dtype, state_dtype) -> None:
        self.sizes, self.dtype, self.interval = (batch, heads, d_qk, d_hv), dtype, interval
        # As in the engine: states and rings of other layers lie between those of two rows.
        whole = MLSTMState.zeros(2 * batch, heads, d_qk, d_hv, dtype=state_dtype, device=DEVICE)
        self.whole = [guarded(torch.randn(x.shape, device=DEVICE).to(x.dtype)) for x in whole]
        self.state = MLSTMState(*(x.unflatten(0, (batch, 2))[:, 1] for x in self.whole))
        shape = 2 * batch, heads, size, d_qk, d_hv
        ring = Ring.zeros(*shape, dtype=dtype, device=DEVICE)
        self.ring = Ring(
            *(x.fill_(torch.nan).unflatten(0, (batch, 2))[:, 1] for x in map(guarded, ring))
        )
        self.want_state = MLSTMState(*(x.double() for x in self.state))
        self.want_ring = Ring(*(x.double() for x in self.ring))
        self.norm = (1 + 0.3 * torch.randn(heads * d_hv, device=DEVICE)).to(dtype)
        seen = torch.randint(0, 40, (batch,), device=DEVICE)
        self.seen, self.folded = guarded_ints(seen), guarded_ints(seen)
        self.want_seen, self.want_folded = seen.clone(), seen.clone()
        self.steps = 0

    def tokens(self, live: Tensor, gates: float = 3.0) -> list[Tensor]:
        """q, k, v and the output gate as views of one projection; shut gates where not live."""
        _, heads, d_qk, d_hv = self.sizes
        widths = [heads * d for d in (d_qk, d_qk, d_hv, d_hv)]
        projected = guarded(torch.randn(*live.shape, sum(widths), device=DEVICE).to(self.dtype))
        parts = [x.unflatten(-1, (heads, -1)) for x in projected.split(widths, dim=-1)]
        i, f = guarded(gates * torch.randn(*live.shape, 2, heads, device=DEVICE)).unbind(-2)
        i[~live], f[~live] = -torch.inf, torch.inf
        return [*parts, i, f]

    def step(
        self, live: Tensor, tile: Tile | None = None, *, folds_all: bool = False, **options
    ) -> tuple[Tensor, Tensor]:
        """h of the kernel and of the reference."""
        q, k, v, gate, i, f = self.tokens(live, **options)
        cursor = Cursor(self.folded, self.seen, live, self.interval, folds_all=folds_all)
        self.steps += 1
        if self.steps % 2:  # the order of the rows changes nothing
            cursor = cursor._replace(order=launch_order(cursor))
        h = launch_replay(
            q, k, v, i, f, self.state, self.ring, cursor, gate, self.norm, EPS, EPS,
            tile or self.tile(cursor),
        )  # fmt: skip
        launch_advance(cursor)
        cursor = Cursor(self.want_folded, self.want_seen, live, self.interval, folds_all=folds_all)
        wide = [x.double() for x in (q, k, v, i, f)]
        want = replay_step(*wide, self.want_state, self.want_ring, cursor, eps=EPS)
        cursor.advance()
        want = headwise_norm(want, self.norm.double(), EPS) * torch.sigmoid(gate.double())
        return h, want

    def tile(self, cursor: Cursor) -> Tile:
        batch, heads, d_qk, d_hv = self.sizes
        tokens = step_tokens(self.ring.k.shape[2], cursor)
        return replay_tile(batch * heads, tokens, d_qk, d_hv, self.state.C.dtype)

    def read(
        self, lengths: Tensor, kept: Tensor, count: int, tile: Tile | None = None, **options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A pass of `count` tokens: h of the kernel and of the reference, and which are read."""
        live = torch.arange(count, device=DEVICE) < lengths[:, None]
        q, k, v, gate, i, f = self.tokens(torch.ones_like(live), **options)
        for x in (q, k, v, i, f):
            x[~live] = torch.nan  # not to be read
        rows = Pass(self.folded, self.seen, lengths, self.interval)
        h = launch_pass(
            q, k, v, i, f, self.state, self.ring, rows, gate, self.norm, EPS, EPS,
            tile or pass_tile(self.sizes[0] * self.sizes[1], *self.sizes[2:]),
        )  # fmt: skip
        launch_advance_pass(rows, kept)
        rows = Pass(self.want_folded, self.want_seen, lengths, self.interval)
        wide = [x.double() for x in (q, k, v, i, f)]
        want = replay_pass(*wide, self.want_state, self.want_ring, rows, eps=EPS)
        rows.advance(kept)
        want = headwise_norm(want, self.norm.double(), EPS) * torch.sigmoid(gate.double())
        return h, want, live

    def check(self, got: Tensor, want: Tensor, live: Tensor) -> None:
        digits = DIGITS[self.state.C.dtype]
        assert got.dtype == self.dtype
        if live.any():
            assert error(got[live], want[live]) < max(digits, 2 * DIGITS[self.dtype])
        assert not got[~live].any()  # and so it is finite
        assert torch.equal(self.seen, self.want_seen)
        assert torch.equal(self.folded, self.want_folded)
        for part, want_part in zip(self.state, self.want_state, strict=True):
            assert error(part, want_part) < digits
        now = folded_state(self.state, self.ring, self.folded, self.seen)
        wide = folded_state(self.want_state, self.want_ring, self.want_folded, self.want_seen)
        for part, want_part in zip(now, wide, strict=True):
            assert error(part, want_part) < digits


def guarded_ints(x: Tensor) -> Tensor:
    return F.pad(x, (GUARD, GUARD), value=1 << 40)[GUARD:-GUARD]


@pytest.mark.parametrize(
    ("d_qk", "d_hv", "tile", "dtype"),
    [
        (16, 16, None, NARROW),
        (24, 40, Tile(1, 16, 32, 1, 1), torch.float32),
        (33, 65, Tile(1, 64, 64, 2, 1), NARROW),
        (80, 48, Tile(1, 32, 64, 1, 1), torch.float32),
    ],
)
def test_the_kernel_equals_the_equations(d_qk, d_hv, tile, dtype):
    """Rows that stop and go on; the neighbours of a row in memory stay as they are."""
    layer = Layer(2, 2, d_qk, d_hv, 4, 4, dtype, torch.float32)
    others = [x[::2].clone() for x in layer.whole]
    for step in range(6):
        live = torch.arange(2, device=DEVICE) != step % 5
        layer.check(*layer.step(live, tile), live)
    assert all(map(torch.equal, (x[::2] for x in layer.whole), others))


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
@pytest.mark.parametrize(
    ("d_qk", "d_hv", "tile"),
    [(16, 16, None), (33, 65, Tile(1, 64, 64, 2, 1)), (80, 48, Tile(1, 32, 32, 2, 3))],
)
def test_a_state_of_16_bits(d_qk, d_hv, tile, dtype):
    layer = Layer(2, 2, d_qk, d_hv, 4, 4, dtype, NARROW)
    for step in range(6):
        live = torch.arange(2, device=DEVICE) != step % 5
        got, want = layer.step(live, tile)
        for part, want_part in zip(layer.state, layer.want_state, strict=True):
            assert error(part, want_part) < DIGITS[NARROW]
            want_part.copy_(part)  # the reference goes on from the rounded state
        layer.check(got, want, live)


@pytest.mark.parametrize("batch", [1, 16, 37, 127, 256, 500])
@pytest.mark.parametrize("interval", [1, 2, 5, 16, 10**6])  # all rows are due, … none
def test_rows_that_are_folded_start_early(batch, interval):
    folded = torch.randint(40, (batch,), device=DEVICE)
    seen, live = folded + torch.randint(2, (batch,), device=DEVICE), folded % 3 != 1
    cursor = Cursor(folded, seen, live, interval)
    due = cursor.is_due()
    rows, others = due.nonzero().flatten().tolist(), (~due).nonzero().flatten().tolist()
    step = max(1, min(batch // 64, batch // max(1, len(rows))))
    want = []
    for row in rows:
        want += [row, *others[: step - 1]]
        del others[: step - 1]
    assert launch_order(cursor).tolist() == want + others


@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    interval=st.integers(1, 9),
    slack=st.integers(0, 4),
    gates=st.sampled_from([1.0, 5.0, 15.0]),
)
def test_rings_of_any_size_and_rows_at_any_place(seed, interval, slack, gates):
    torch.manual_seed(seed)
    layer = Layer(2, 1, 17, 20, interval + slack, interval, torch.float32, torch.float32)
    for _ in range(8):
        live = torch.rand(2, device=DEVICE) < 0.8
        layer.check(*layer.step(live, gates=gates), live)
    counters = take_counters(4, DEVICE)
    assert not counters.any()


def test_the_state_is_written_only_where_a_row_is_folded():
    layer = Layer(4, 1, 16, 16, 4, 4, torch.float32, torch.float32)
    layer.seen[:] = layer.folded[:] = layer.want_seen[:] = layer.want_folded[:] = 8
    live = torch.tensor([True, True, True, False], device=DEVICE)
    for folded_row in (3, 2, 1, 0):  # row r after the token that makes its tokens + r divisible
        before = [part.clone() for part in layer.state]
        layer.step(live)
        for part, old in zip(layer.state, before, strict=True):
            changed = (part != old).flatten(1).any(1)
            assert changed.tolist() == [row == folded_row and row != 3 for row in range(4)]


@pytest.mark.parametrize("count", [1, 5])
def test_a_step_folds_all_rows_after_a_pass(count):
    """As many tokens as a ring may hold before a step."""
    layer = Layer(3, 1, 16, 24, 4 + 2 * count, 4, torch.float32, torch.float32)
    layer.seen[:] = layer.folded[:] = layer.want_seen[:] = layer.want_folded[:] = 8
    lengths = torch.full((3,), count, device=DEVICE)
    for _ in range(3):
        layer.check(*layer.read(lengths, lengths, count))
    live = torch.tensor([True, True, False], device=DEVICE)
    layer.check(*layer.step(live, folds_all=True), live)
    assert torch.equal(layer.folded[:2], layer.seen[:2])
    assert layer.folded[2] < layer.seen[2]


def test_a_nan_of_an_earlier_text_does_not_return():
    layer = Layer(1, 1, 16, 16, 4, 4, torch.float32, torch.float32)
    live = torch.ones(1, dtype=torch.bool, device=DEVICE)
    layer.state.C.fill_(torch.nan)
    assert layer.step(live)[0].isnan().all()
    for part, want_part in zip(layer.state, layer.want_state, strict=True):
        want_part.zero_()
        part.zero_()
    layer.folded.copy_(layer.seen)
    layer.want_folded.copy_(layer.want_seen)
    for _ in range(6):
        layer.check(*layer.step(live), live)


# Passes


def some_of(lengths: Tensor) -> Tensor:
    """How many of the tokens are kept: at least one, where any are read."""
    kept = 1 + (torch.rand(lengths.shape, device=DEVICE) * lengths).long()
    return torch.minimum(kept, lengths)


@pytest.mark.parametrize(
    ("count", "d_qk", "d_hv", "tile", "dtype"),
    [
        (2, 16, 16, None, NARROW),
        (8, 24, 40, Tile(1, 16, 32, 1, 1), torch.float32),
        (4, 33, 65, Tile(1, 64, 64, 2, 1), NARROW),
        (8, 80, 48, Tile(1, 32, 64, 1, 1), torch.float32),
    ],
)
def test_a_pass_equals_the_equations(count, d_qk, d_hv, tile, dtype):
    """Rows that read nothing now and then; the neighbours of a row in memory stay as they are."""
    layer = Layer(2, 2, d_qk, d_hv, 3 + 2 * count, 4, dtype, torch.float32)
    others = [x[::2].clone() for x in layer.whole]
    for number in range(5):
        lengths = torch.tensor([count, number % 3], device=DEVICE).clamp(max=count)
        layer.check(*layer.read(lengths, some_of(lengths), count, tile))
    assert all(map(torch.equal, (x[::2] for x in layer.whole), others))
    assert not take_counters(4, DEVICE).any()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the compiler asks for which GPU it compiles")
def test_steps_and_passes_as_on_blackwell(monkeypatch):
    asked = []
    monkeypatch.setattr(replay, "sums_apart", lambda: not asked.append(1))
    test_the_kernel_equals_the_equations(33, 65, Tile(1, 64, 64, 2, 1), NARROW)
    test_a_pass_equals_the_equations(4, 33, 65, Tile(1, 64, 64, 2, 1), NARROW)
    assert asked


@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    interval=st.integers(1, 9),
    most=st.sampled_from([2, 4, 9]),
    slack=st.integers(0, 4),
    gates=st.sampled_from([1.0, 5.0, 15.0]),
)
def test_passes_and_steps_in_any_order(seed, interval, most, slack, gates):
    """All drafts of a pass are kept, or some. A step after a pass folds all rows."""
    torch.manual_seed(seed)
    size = interval + 2 * most - 1 + slack
    layer = Layer(2, 1, 17, 20, size, interval, torch.float32, torch.float32)
    after_pass = torch.zeros(2, dtype=torch.bool, device=DEVICE)
    for _ in range(7):
        count = int(torch.randint(1, most + 1, ()))
        if count == 1:
            live = torch.rand(2, device=DEVICE) < 0.8
            folds_all = bool(torch.rand(()) < 0.3 or after_pass[live].any())
            layer.check(*layer.step(live, gates=gates, folds_all=folds_all), live)
            after_pass &= ~live
            continue
        lengths = torch.randint(0, count + 1, (2,), device=DEVICE)
        kept = lengths if torch.rand(()) < 0.5 else some_of(lengths)
        layer.check(*layer.read(lengths, kept, count, gates=gates))
        after_pass |= lengths > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype"),
    [
        ((8, 256, 512), torch.bfloat16, torch.float32),
        ((8, 256, 512), torch.bfloat16, torch.bfloat16),
        ((8, 256, 512), torch.float32, torch.float32),
        ((2, 1024, 1024), torch.bfloat16, torch.float32),
        ((4, 96, 192), torch.float32, torch.bfloat16),
        ((5, 160, 320), torch.bfloat16, torch.float32),
        ((5, 160, 320), torch.float16, torch.float32),
    ],
)
def test_passes_of_real_models(heads, dtype, state_dtype):
    """Now and then a step folds all rows that are live."""
    torch.manual_seed(0)
    layer = Layer(9, *heads, 32, 14, dtype, state_dtype)
    for number in range(27):
        if number % 9 == 8:
            live = torch.rand(9, device=DEVICE) < 0.8
            got, want = layer.step(live, folds_all=True)
            assert torch.equal(layer.folded[live], layer.seen[live])
        else:
            count = (9, 2)[number % 2]
            lengths = torch.randint(0, count + 1, (9,), device=DEVICE)
            got, want, live = layer.read(lengths, some_of(lengths), count)
        if state_dtype == torch.bfloat16:  # the reference goes on from the rounded state
            for part, want_part in zip(layer.state, layer.want_state, strict=True):
                assert error(part, want_part) < DIGITS[state_dtype]
                want_part.copy_(part)
        layer.check(got, want, live)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8, 9])
def test_a_pass_is_the_same_when_it_is_repeated(count):
    """The programs of a head hand over what they computed: a race would show now and then."""
    torch.manual_seed(0)
    layer = Layer(3, 8, 256, 512, 32, 14, torch.bfloat16, torch.float32)
    lengths = torch.tensor([count, count - 1, 1], device=DEVICE)
    for _ in range(3):
        layer.check(*layer.read(lengths, lengths, count))
    live = torch.arange(count, device=DEVICE) < lengths[:, None]
    q, k, v, gate, i, f = layer.tokens(live)
    rows = Pass(layer.folded, layer.seen, lengths, layer.interval)
    old, found = [x.clone() for x in layer.state], []
    for _ in range(50):
        for part, value in zip(layer.state, old, strict=True):
            part.copy_(value)
        h = launch_pass(
            q, k, v, i, f, layer.state, layer.ring, rows, gate, layer.norm, EPS, EPS,
            pass_tile(3 * 8, 256, 512),
        )  # fmt: skip
        found.append((h, *(x.clone() for x in layer.state)))
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(8, 256, 512), (2, 1024, 1024), (4, 96, 192), (5, 160, 320)])
def test_sizes_of_real_models(heads, dtype, state_dtype):
    layer = Layer(9, *heads, 16, 16, dtype, state_dtype)
    for step in range(40):
        live = torch.arange(9, device=DEVICE) != step % 10
        got, want = layer.step(live)
        if state_dtype == torch.bfloat16:  # the reference goes on from the rounded state
            for part, want_part in zip(layer.state, layer.want_state, strict=True):
                assert error(part, want_part) < DIGITS[state_dtype]
                want_part.copy_(part)
        layer.check(got, want, live)


@pytest.mark.gpu
def test_the_kernels_error_is_at_most_that_of_the_plain_step():
    """In float32 against float64, with the gates of a trained model; 160 tokens."""
    sizes = 16, 4, 128, 256
    layer = Layer(*sizes, 16, 16, torch.float32, torch.float32)
    plain = MLSTMState(*(part.clone(memory_format=torch.contiguous_format) for part in layer.state))
    live, tile = torch.ones(16, dtype=torch.bool, device=DEVICE), Tile(1, 128, 64, 4, 1)
    errors = []
    for _ in range(160):
        drawn = layer.tokens(live, gates=1.0)
        q, k, v, gate, i, f = drawn
        i -= 6
        f += 5
        layer.tokens = lambda *_, drawn=drawn, **__: drawn
        got, want = layer.step(live)
        its = launch_step(q, k, v, i, f, *plain, gate, layer.norm, EPS, EPS, tile)
        del layer.tokens
        errors.append([(x - want).norm(dim=-1) / want.norm(dim=-1) for x in (got, its)])
    mine, its = (torch.stack(each).mean() for each in zip(*errors, strict=True))
    assert mine <= its
