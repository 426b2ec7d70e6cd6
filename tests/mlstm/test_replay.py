"""Replay decoding in plain PyTorch: the numbers of the plain step, at any place of the cursor."""

import pytest
import torch
from cell_cases import Case, random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import assert_states_match
from torch import Tensor

from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.recurrent import recurrent_step
from xlstm7b.mlstm.replay import Cursor, Pass, Ring, folded_state, replay_pass, replay_step


def copy_of(state: MLSTMState) -> MLSTMState:
    return MLSTMState(*(part.clone() for part in state))


class Replay:
    """A layer that is decoded from a ring."""

    def __init__(self, state: MLSTMState, size: int, interval: int, seen: Tensor, dtype) -> None:
        self.state = copy_of(state)
        shape = state.C.shape
        self.ring = Ring.zeros(*shape[:2], size, *shape[2:], dtype=dtype)
        for part in self.ring:
            part.fill_(torch.nan)  # what an earlier text may have left
        self.seen, self.folded, self.interval = seen.clone(), seen.clone(), interval

    def step(
        self, tokens: list[Tensor], live: Tensor, *, folds_all: bool = False, **options: float
    ) -> Tensor:
        cursor = Cursor(self.folded, self.seen, live, self.interval, folds_all=folds_all)
        h = replay_step(*tokens, self.state, self.ring, cursor, **options)
        cursor.advance()
        return h

    def read(self, tokens: list[Tensor], lengths: Tensor, kept: Tensor, **options: float) -> Tensor:
        """A pass over several tokens, of which `kept` are right."""
        rows = Pass(self.folded, self.seen, lengths, self.interval)
        h = replay_pass(*tokens, self.state, self.ring, rows, **options)
        rows.advance(kept)
        return h

    def current(self, back: int = 0) -> MLSTMState:
        """The state before the latest `back` tokens."""
        return folded_state(self.state, self.ring, self.folded, self.seen - back)


def tokens_at(case: Case, t: int) -> list[Tensor]:
    return [getattr(case, name)[:, t] for name in "qkvif"]


def shut(tokens: list[Tensor], live: Tensor) -> list[Tensor]:
    """The same tokens with gates that leave the state of rows that are not live unchanged."""
    *qkv, i, f = tokens
    return [
        *qkv,
        i.masked_fill(~live[:, None], -torch.inf),
        f.masked_fill(~live[:, None], torch.inf),
    ]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 2),
    interval=st.integers(1, 7),
    slack=st.integers(0, 5),
    gates=st.sampled_from([1.0, 5.0, 30.0]),
)
def test_replay_equals_the_plain_step_in_float64(seed, shape, interval, slack, gates):
    """Rows that stop and go on, at any place of the cursor, with rings of any size.

    Some steps fold all rows that are live.
    """
    batch, heads, d_qk, d_hv = shape
    case = random_case(seed, batch, 25, heads, d_qk, d_hv, gates=gates, fresh=seed % 2 == 0)
    draw = torch.Generator().manual_seed(seed)
    seen = torch.randint(0, 50, (batch,), generator=draw)
    replay = Replay(case.state, interval + slack, interval, seen, torch.float64)
    state = case.state
    for t in range(25):
        live = torch.rand(batch, generator=draw) < 0.7
        tokens = shut(tokens_at(case, t), live)
        want, state = recurrent_step(*tokens, state)
        folds_all = t % 9 == 8
        h = replay.step(tokens, live, folds_all=folds_all)
        if live.any():
            assert error(h[live], want[live]) < 1e-11
        seen += live
        assert torch.equal(replay.seen, seen)
        assert (replay.seen - replay.folded < interval).all()
        assert not folds_all or torch.equal(replay.folded[live], seen[live])
        assert_states_match(replay.current(), state, 1e-11)


@pytest.mark.parametrize("trained", [False, True])
def test_the_error_is_at_most_that_of_the_plain_step(trained):
    """In float32 against float64, over 200 tokens: the mean over all tokens and heads.

    Where a denominator is near 0, one token has a large error by chance, in either form.
    """
    case = random_case(0, 8, 200, 2, 32, 48, gates=1.0 if trained else 5.0)
    if trained:  # input gates nearly closed, forget gates open: long sums of small numbers
        case.i, case.f = case.i - 6, case.f + 5
    narrow = case.to(torch.float32)
    exact = Case(**vars(narrow)).to(torch.float64)
    live, seen = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    replay = Replay(narrow.state, 16, 16, seen, torch.float32)
    want_state, plain_state, outputs = exact.state, narrow.state, []
    for t in range(200):
        want, want_state = recurrent_step(*tokens_at(exact, t), want_state)
        plain, plain_state = recurrent_step(*tokens_at(narrow, t), plain_state)
        outputs.append((replay.step(tokens_at(narrow, t), live), plain, want))
    got, plain, want = map(torch.stack, zip(*outputs, strict=True))
    mine, its = (((x - want).norm(dim=-1) / want.norm(dim=-1)).mean() for x in (got, plain))
    assert mine <= its
    if trained:  # else the state is hardly older than the last token
        for part, its_part, want_part in zip(
            replay.current(), plain_state, want_state, strict=True
        ):
            assert error(part, want_part) <= error(its_part, want_part)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), taken=st.integers(1, 12), back=st.integers(0, 12))
def test_a_copy_is_folded_up_to_any_token(seed, taken, back):
    """The ring holds more tokens than the interval, so that a copy can end before the latest."""
    back = min(back, taken)
    case = random_case(seed, 2, taken, 2, 3, 5)
    live = torch.ones(2, dtype=torch.bool)
    replay = Replay(case.state, 13, 13, torch.tensor([0, 12]), torch.float64)
    replay.interval = 1000  # nothing is folded on the way
    states = [case.state]
    for t in range(taken):
        replay.step(tokens_at(case, t), live)
        states.append(recurrent_step(*tokens_at(case, t), states[-1])[1])
    assert_states_match(replay.state, case.state, 0)
    assert_states_match(replay.current(back), states[taken - back], 1e-11)


def test_a_cursor_moves_back_over_tokens_that_are_not_wanted():
    case = random_case(1, 1, 9, 2, 4, 6)
    live = torch.ones(1, dtype=torch.bool)
    replay = Replay(case.state, 12, 100, torch.tensor([5]), torch.float64)
    state = case.state
    for t in range(4):
        replay.step(tokens_at(case, t), live)
        _, state = recurrent_step(*tokens_at(case, t), state)
    for t in range(4, 7):  # drafts that are rejected
        replay.step(tokens_at(case, t), live)
    replay.seen -= 3
    for t in range(7, 9):
        want, state = recurrent_step(*tokens_at(case, t), state)
        assert error(replay.step(tokens_at(case, t), live), want) < 1e-12
    assert_states_match(replay.current(), state, 1e-12)


def test_an_empty_ring_leaves_the_state_as_it_is():
    case = random_case(2, 3, 1, 2, 4, 6, dtype=torch.float32)
    state = case.state._replace(C=case.state.C.bfloat16())
    replay = Replay(state, 8, 8, torch.tensor([0, 3, 8]), torch.float32)
    for got, want in zip(replay.current(), state, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_rows_that_start_together_are_folded_one_after_the_other():
    live, seen = torch.ones(32, dtype=torch.bool), torch.full((32,), 7)
    cursor = Cursor(seen.clone(), seen, live, 16)
    folds = torch.zeros(32, dtype=torch.long)
    for _ in range(16):
        due = cursor.is_due()
        assert int(due.sum()) == 2
        folds += due
        cursor.advance()
        assert torch.equal(cursor.folded == cursor.seen, due)
    assert (folds == 1).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 2),
    interval=st.integers(1, 7),
    most=st.integers(1, 5),
    gates=st.sampled_from([1.0, 5.0, 30.0]),
)
def test_a_pass_equals_single_steps_in_float64(seed, shape, interval, most, gates):
    """Rows read different numbers of tokens, of which some are dropped again."""
    batch, heads, d_qk, d_hv = shape
    passes = 8
    case = random_case(seed, batch, passes * most, heads, d_qk, d_hv, gates=gates)
    draw = torch.Generator().manual_seed(seed)
    seen = torch.randint(0, 50, (batch,), generator=draw)
    replay = Replay(case.state, interval + 2 * most, interval, seen, torch.float64)
    state = case.state
    for number in range(passes):
        tokens = [getattr(case, x)[:, number * most : (number + 1) * most] for x in "qkvif"]
        lengths = torch.randint(0, most + 1, (batch,), generator=draw)
        kept = (torch.rand(batch, generator=draw) * (lengths + 1)).long()
        kept = torch.where(lengths > 0, kept.clamp(min=1), 0)  # the first token is no draft
        before, h = replay.seen.clone(), replay.read(tokens, lengths, kept)
        states = [state]
        for t in range(most):
            live = t < lengths
            step = shut([x[:, t] for x in tokens], live)
            want, after = recurrent_step(*step, states[-1])
            states.append(after)
            if live.any():
                assert error(h[live, t], want[live]) < 1e-11
        assert torch.equal(replay.seen, before + kept)
        assert (replay.folded <= before).all()
        assert (before - replay.folded < interval)[lengths > 0].all()
        state = MLSTMState(
            *(
                torch.stack([part[kept[row]][row] for row in range(batch)])
                for part in (torch.stack(parts) for parts in zip(*states, strict=True))
            )
        )
        assert_states_match(replay.current(), state, 1e-11)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), kept=st.integers(1, 6), back=st.integers(0, 5))
def test_a_state_is_had_as_of_any_token_of_the_latest_pass(seed, kept, back):
    back = min(back, kept - 1)
    case = random_case(seed, 2, 18, 2, 3, 5)
    replay = Replay(case.state, 4 + 12, 4, torch.tensor([0, 11]), torch.float64)
    for start in (0, 6, 12):
        tokens = [getattr(case, x)[:, start : start + 6] for x in "qkvif"]
        taken = torch.full((2,), 6 if start < 12 else kept)
        replay.read(tokens, torch.full((2,), 6), taken)
    state = case.state
    for t in range(12 + kept - back):
        state = recurrent_step(*tokens_at(case, t), state)[1]
    assert_states_match(replay.current(back), state, 1e-11)


def test_a_pass_is_at_most_as_wrong_as_single_steps():
    """In float32 against float64, over 200 tokens in passes of 8: the mean over all."""
    case = random_case(0, 8, 200, 2, 32, 48)
    case.i, case.f = case.i - 6, case.f + 5  # as in a trained model
    narrow = case.to(torch.float32)
    exact = Case(**vars(narrow)).to(torch.float64)
    replay = Replay(narrow.state, 32, 16, torch.zeros(8, dtype=torch.long), torch.float32)
    want_state, plain_state, outputs = exact.state, narrow.state, []
    eight = torch.full((8,), 8)
    for t in range(200):
        if t % 8 == 0:
            tokens = [getattr(narrow, x)[:, t : t + 8] for x in "qkvif"]
            got = replay.read(tokens, eight, eight)
        want, want_state = recurrent_step(*tokens_at(exact, t), want_state)
        plain, plain_state = recurrent_step(*tokens_at(narrow, t), plain_state)
        outputs.append((got[:, t % 8], plain, want))
    got, plain, want = map(torch.stack, zip(*outputs, strict=True))
    mine, its = (((x - want).norm(dim=-1) / want.norm(dim=-1)).mean() for x in (got, plain))
    assert mine <= its


def test_rows_that_start_together_are_folded_in_different_passes():
    seen = torch.full((32,), 7)
    rows = Pass(seen.clone(), seen, torch.full((32,), 3), 16)
    folds = torch.zeros(32, dtype=torch.long)
    for _ in range(17):
        due = rows.is_due()
        assert int(due.sum()) <= 6
        folds += due
        rows.advance(torch.full((32,), 3))
    assert (folds == 3).all()
