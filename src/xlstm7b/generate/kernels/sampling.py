"""Scores to tokens: the greedy token, top_k, top_p, min_p and the draw, without a sort.

`sample` draws the same tokens as the PyTorch code of `generate/sampler.py`. Weights are integers
whose sums are exact, so the order in which programs add them does not matter.

A row of scores is divided into chunks. Most kernels have one program for each chunk. The launches:

1. `best_kernel`: the highest score of each chunk, the first token that has it, and the lowest.
2. `weights_kernel`: the weights. For rows with top_k or top_p also how many tokens of a chunk, and
   how much weight, lie above each of 16 thresholds. These go in equal steps from the best score
   down to the lowest whose weight is not 0.
3. `refine_kernel`: the last token that top_k or top_p keeps lies between two thresholds. This range
   is divided by 16 new thresholds.
4. `candidates_kernel`: the tokens of the range that is left are written to a list, in order.
   Mostly they are few.
5. `border_kernel`, one program for each row: the score of the last token that is kept. It halves
   the range until one score is left, and each time sums up what lies above the middle. Of tokens
   with equal scores the first ones are kept.
6. `kept_kernel`: the weights of tokens that are not kept become 0.
7. `draw_kernel`, one program for each row: finds the chunk, then the token.

If no row has top_k or top_p, steps 3 to 6 are left out, and if all rows are greedy, step 2 as well.
A row that needs less than others skips what it does not need.

Scores are compared as integers in the same order: see `sort_key`.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlstm7b.generate.kernels.overlap import overlap_options, wait_for_previous
from xlstm7b.generate.request import BAD_LOGITS

_BLOCK = 2048  # tokens in a chunk
_THRESHOLDS = 16
_LOWEST = tl.constexpr(-(2**63))  # below all keys
_BAD_LOGITS = tl.constexpr(BAD_LOGITS)
# What a row of scores needs.
_BEST, _DRAW, _FILTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Rows(NamedTuple):
    """What a sampler knows of its rows: contiguous tensors with B numbers each."""

    pending: Tensor
    indices: Tensor  # or B · T numbers, if the scores have T positions
    max_new: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    last_rank: Tensor  # top_k − 1
    key: Tensor
    ends: Tensor  # [B, V]


def sample(
    scores: Tensor,
    rows: Rows,
    *,
    sampling: bool,
    filters: bool,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The token of each row or position of the scores [B, V] or [B, T, V], as [..., 1].

    Where scores are not finite the second result is `BAD_LOGITS`, else the token again. Both are 0
    where no token is asked for. `sampling` and `filters` are those of `Needs`. If `tokens` [B] is
    given, the kernels also write it, `rows.pending` and `rows.indices`, as `Sampler.__call__` does.
    """
    shape, vocab = scores.shape[:-1], scores.shape[-1]
    scores, count, device = scores.contiguous(), shape.numel(), scores.device
    chunks, positions = triton.cdiv(vocab, _BLOCK), shape[1:].numel()
    grid, scale = (count, chunks), 2.0 ** (53 - vocab.bit_length())
    options = {"BLOCK": _BLOCK, "num_warps": 8, **overlap_options(device)}
    sizes = {"THRESHOLDS": _THRESHOLDS, "CHUNKS": triton.next_power_of_2(chunks), **options}

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, *size, dtype=dtype, device=device)

    best_keys, lowest = empty(chunks), empty(chunks, dtype=torch.float64)
    best_ids = empty(chunks, dtype=torch.int32)
    best_kernel[grid](scores, best_keys, best_ids, lowest, vocab, chunks, **options)
    best = scores, best_keys, best_ids
    modes = weights = sums = best_keys
    if sampling:
        modes, weights = empty(dtype=torch.int32), empty(vocab)
        coarse = empty(_THRESHOLDS), empty(chunks, _THRESHOLDS), empty(chunks, _THRESHOLDS)
        sums = coarse[2]
        weights_kernel[grid](
            *best, lowest, *rows[:7], modes, weights, *coarse, positions, vocab, chunks,
            # exp(−REACH) · SCALE is less than a half: the weight is 0, even if exp is not exact.
            SCALE=scale, REACH=math.log(2 * scale) + 0.01, FILTERS=filters, **sizes,
        )  # fmt: skip
    if sampling and filters:
        fine = empty(_THRESHOLDS), empty(chunks, _THRESHOLDS), empty(chunks, _THRESHOLDS)
        goals, by_count = empty(), empty(dtype=torch.int32)
        goal = modes, goals, by_count
        refine_kernel[grid](
            scores, best_keys, rows.top_p, rows.last_rank, *goal, weights, *coarse, *fine,
            positions, vocab, chunks, **sizes,
        )  # fmt: skip
        candidates = empty(vocab, dtype=torch.int32)
        candidates_kernel[grid](
            scores, best_keys, rows.top_p, *goal, *fine, candidates,
            positions, vocab, chunks, **sizes,
        )  # fmt: skip
        borders, last = empty(), empty(dtype=torch.int32)
        border_kernel[(count,)](
            scores, best_keys, rows.top_p, *goal, weights, *fine, candidates, borders, last,
            positions, vocab, chunks, **sizes,
        )  # fmt: skip
        kept_kernel[grid](
            scores, rows.min_p, modes, borders, last, weights, sums, positions, vocab, chunks,
            SCALE=scale, **sizes,
        )  # fmt: skip
    token = torch.empty(*shape, 1, dtype=torch.int64, device=device)
    sampled = torch.empty_like(token)
    draw_kernel[(count,)](
        *best, rows.pending, rows.indices, rows.max_new, rows.key, rows.ends, modes, weights, sums,
        token, sampled, token if tokens is None else tokens, positions, vocab, chunks,
        SAMPLING=sampling, UPDATE=tokens is not None, **sizes,
    )  # fmt: skip
    return token, sampled


def accept(rows: Rows, drafts: Tensor, token: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of each row were right to read [B], and what was sampled after them [B, T].

    These are those of `Drawn`. `token` and `sampled` are from `sample`, with T positions. `rows`
    has one index for each row. Writes `rows.pending` and `rows.indices`.
    """
    batch, length = token.shape[:2]
    kept = torch.empty(batch, dtype=torch.int64, device=token.device)
    tokens = torch.empty(batch, length, dtype=torch.int64, device=token.device)
    accept_kernel[(batch,)](
        rows.pending, rows.indices, rows.max_new, rows.ends, drafts, token, sampled, kept, tokens,
        drafts.stride(0), length, rows.ends.shape[-1],
        PADDED=triton.next_power_of_2(length), num_warps=1, **overlap_options(token.device),
    )  # fmt: skip
    return kept, tokens


# In the kernels T is the number of positions: the parameters of a row are those of row // T.


@triton.jit
def best_kernel(
    scores, best_keys, best_ids, lowest, V, chunks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """The highest key of a chunk, the first token that has it, and the lowest finite score."""
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    score, key = load_scores(scores + row * V, token, token < V)
    best, at = tl.max(key, 0), row * chunks + chunk
    tl.store(best_keys + at, best)
    tl.store(best_ids + at, tl.min(tl.where(key == best, token, V), 0))
    finite = tl.where((token < V) & (score > float("-inf")), score, float("inf"))
    tl.store(lowest + at, tl.min(finite, 0).to(tl.float64))


@triton.jit
def weights_kernel(
    scores, best_keys, best_ids, lowest,
    pending, index, max_new, temperature, top_p, min_p, last_rank,
    modes, weights, thresholds, counts, sums, T, V, chunks,
    SCALE: tl.constexpr, REACH: tl.constexpr, FILTERS: tl.constexpr,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The weights of one chunk of a row, and how many and how much is above each threshold.

    The sum above the last threshold is that of all weights. A row without top_k and top_p has only
    this one; its weights are those after min_p.
    """
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = load_best(row, scores, best_keys, best_ids, V, chunks, CHUNKS)[0]
    is_finite = (best > float("-inf")) & (best < float("inf"))
    row_temperature = tl.load(temperature + row // T)
    is_drawn = is_asked(row, pending, index, max_new, T) & (row_temperature > 0) & is_finite
    has_filter = (tl.load(last_rank + row // T) < V - 1) | (tl.load(top_p + row // T) < 1)
    if chunk == 0:
        tl.store(modes + row, tl.where(is_drawn, tl.where(has_filter, _FILTER, _DRAW), _BEST))
    if is_drawn:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        score, key = load_scores(scores + row * V, token, token < V)
        row_temperature = tl.maximum(
            row_temperature, 1e-300
        )  # the sampler's clamp: it only avoids NaN
        weight = round_even(tl.exp((score.to(tl.float64) - best) / row_temperature) * SCALE)
        first = (row * chunks + chunk) * THRESHOLDS
        if not (FILTERS and has_filter):
            weight = drop_small(weight, tl.load(min_p + row // T) * SCALE)
            tl.store(sums + first + THRESHOLDS - 1, tl.sum(weight, 0))
        else:
            number = tl.arange(0, CHUNKS)
            lows = tl.load(lowest + row * chunks + number, mask=number < chunks, other=float("inf"))
            # A little more than all scores: the last threshold may be rounded.
            span = tl.minimum((best - tl.min(lows, 0)) * 1.001, row_temperature * REACH)
            threshold = key_like(best, scores)
            for step in range(THRESHOLDS):
                below = span / THRESHOLDS * (step + 1)
                threshold = tl.minimum(threshold, key_like(best - below, scores))
                store_above(step, threshold, key, weight, counts + first, sums + first)
                if chunk == 0:
                    tl.store(thresholds + row * THRESHOLDS + step, threshold)
        tl.store(weights + row * V + token, weight, mask=token < V)


@triton.jit
def refine_kernel(
    scores, best_keys, top_p, last_rank, modes, goals, by_count, weights,
    thresholds, counts, sums, fine_thresholds, fine_counts, fine_sums, T, V, chunks,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """What tokens must reach to be enough, and the fine thresholds of the range where they do.

    The goal is k tokens where top_k drops any weight, else a weight. The first fine threshold is
    above the range, so tokens above it do not reach the goal. Those above the last one do.
    """
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(modes + row) == _FILTER:
        count, total = add_chunks(row, counts, sums, chunks, THRESHOLDS, CHUNKS)
        k = tl.load(last_rank + row // T) + 1
        # Tokens below the last threshold have no weight, so top_k may leave out their number.
        has_top_k = (k < V) & (k <= pick(count, THRESHOLDS - 1, THRESHOLDS))
        whole = pick(total, THRESHOLDS - 1, THRESHOLDS)
        enough = round_up(tl.load(top_p + row // T) * whole.to(tl.float64))
        goal = tl.where(has_top_k, k, enough)
        number = first_reaching(tl.where(has_top_k, count, total), goal, THRESHOLDS)
        thresholds += row * THRESHOLDS
        best_key = tl.max(load_best_keys(row, best_keys, chunks, CHUNKS), 0)
        low, high = tl.load(thresholds + number), best_key + 1
        if number > 0:
            high = tl.load(thresholds + number - 1)
        low_score, high_score = score_of(low, scores), score_of(high, scores)
        if chunk == 0:
            tl.store(goals + row, goal)
            tl.store(by_count + row, has_top_k.to(tl.int32))
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        key = load_scores(scores + row * V, token, token < V)[1]
        weight = tl.load(weights + row * V + token, mask=token < V, other=0)
        first = (row * chunks + chunk) * THRESHOLDS
        for step in range(THRESHOLDS):
            below = (high_score - low_score) / (THRESHOLDS - 1) * step
            threshold = tl.maximum(low, tl.minimum(high, key_like(high_score - below, scores)))
            # Both ends exactly, also if `high_score` is infinite.
            threshold = tl.where(step == 0, high, tl.where(step == THRESHOLDS - 1, low, threshold))
            store_above(step, threshold, key, weight, fine_counts + first, fine_sums + first)
            if chunk == 0:
                tl.store(fine_thresholds + row * THRESHOLDS + step, threshold)


@triton.jit
def candidates_kernel(
    scores, best_keys, top_p, modes, goals, by_count,
    thresholds, counts, sums, candidates, T, V, chunks,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Lists the candidates of one chunk of a row, after those of the chunks before it."""
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(modes + row) == _FILTER:
        count, total = add_chunks(row, counts, sums, chunks, THRESHOLDS, CHUNKS)
        number, above, low, high = window(
            row, count, total, goals, by_count, top_p, thresholds, best_keys,
            T, chunks, THRESHOLDS, CHUNKS,
        )  # fmt: skip
        earlier = tl.arange(0, CHUNKS)
        at, mask = counts + (row * chunks + earlier) * THRESHOLDS, earlier < chunk
        before = tl.sum(tl.load(at + number, mask=mask, other=0), 0)
        if above >= 0:
            before -= tl.sum(tl.load(at + above, mask=mask, other=0), 0)
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        key = load_scores(scores + row * V, token, token < V)[1]
        is_candidate = (key >= low) & (key <= high)
        entry = before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        tl.store(candidates + row * V + entry, token, mask=is_candidate)


@triton.jit
def border_kernel(
    scores, best_keys, top_p, modes, goals, by_count, weights,
    thresholds, counts, sums, candidates, borders, last, T, V, chunks,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The lowest key of a row's tokens that top_k and top_p keep, and the last token that has it.

    In order of the scores, and equal ones in order of their ids, tokens are kept as long as those
    before them do not reach the goal.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(modes + row) == _FILTER:
        count, total = add_chunks(row, counts, sums, chunks, THRESHOLDS, CHUNKS)
        number, above, low, high = window(
            row, count, total, goals, by_count, top_p, thresholds, best_keys,
            T, chunks, THRESHOLDS, CHUNKS,
        )  # fmt: skip
        low_count, low_total = pick(count, number, THRESHOLDS), pick(total, number, THRESHOLDS)
        high_count, high_total = pick(count, above, THRESHOLDS), pick(total, above, THRESHOLDS)
        size = (low_count - high_count).to(tl.int32)
        goal, counted = tl.load(goals + row), tl.load(by_count + row) != 0
        scores, weights, candidates = scores + row * V, weights + row * V, candidates + row * V
        border, count_above, above_total, weight = find_border(
            goal, counted, low, high, low_count, low_total, high_count, high_total,
            scores, weights, candidates, size, BLOCK,
        )  # fmt: skip
        p = tl.load(top_p + row // T)
        if counted & (p < 1):  # top_p of the first k tokens
            whole = above_total + (goal - count_above) * weight
            goal = round_up(p * whole.to(tl.float64))
            border, count_above, above_total, weight = find_border(
                goal, counted & False, low, high, low_count, low_total, high_count, high_total,
                scores, weights, candidates, size, BLOCK,
            )  # fmt: skip
        weight = tl.maximum(weight, 1)  # it is 0 only if tokens are counted
        by_weight = (goal - above_total + weight - 1) // weight
        kept_equals = tl.where(counted & (p == 1), goal - count_above, by_weight)
        last_kept, equals = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64)
        for start in range(0, size, BLOCK):
            token, key, _ = load_candidates(start, scores, weights, candidates, size, BLOCK)
            is_equal = key == border
            rank = equals + tl.cumsum(is_equal.to(tl.int64), 0)
            is_kept = is_equal & (rank <= kept_equals)
            last_kept = tl.maximum(last_kept, tl.max(tl.where(is_kept, token, -1), 0))
            equals += tl.sum(is_equal.to(tl.int64), 0)
        tl.store(borders + row, border)
        tl.store(last + row, last_kept)


@triton.jit
def kept_kernel(
    scores, min_p, modes, borders, last, weights, sums, T, V, chunks,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Weights of 0 for the tokens of one chunk that are not kept, and the sum of the others."""
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(modes + row) == _FILTER:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        key = load_scores(scores + row * V, token, token < V)[1]
        weight = tl.load(weights + row * V + token, mask=token < V, other=0)
        border = tl.load(borders + row)
        is_kept = (key > border) | ((key == border) & (token <= tl.load(last + row)))
        least = tl.load(min_p + row // T) * SCALE
        weight = drop_small(tl.where(is_kept, weight, 0), least)
        tl.store(weights + row * V + token, weight, mask=token < V)
        tl.store(sums + (row * chunks + chunk) * THRESHOLDS + THRESHOLDS - 1, tl.sum(weight, 0))


@triton.jit
def draw_kernel(
    scores, best_keys, best_ids, pending, index, max_new, seed, ends, modes, weights, sums,
    token, sampled, tokens, T, V, chunks, SAMPLING: tl.constexpr, UPDATE: tl.constexpr,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Draws the token of one row, and with UPDATE writes the sampler's tensors."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    alive = is_asked(row, pending, index, max_new, T)
    best, chosen = load_best(row, scores, best_keys, best_ids, V, chunks, CHUNKS)
    if SAMPLING and tl.load(modes + row) != _BEST:
        fraction = uniform(tl.load(seed + row // T), tl.load(index + row))
        chosen = draw(fraction, row, weights, sums, V, chunks, BLOCK, THRESHOLDS, CHUNKS)
    chosen = tl.where(alive, tl.minimum(chosen, V - 1), 0).to(tl.int64)
    result = tl.where((best < float("inf")) | (alive == 0), chosen, _BAD_LOGITS)
    tl.store(token + row, chosen)
    tl.store(sampled + row, result)
    if UPDATE:
        tl.debug_barrier()  # all threads have read what is overwritten
        goes_on = alive & (result >= 0) & (tl.load(ends + row * V + chosen) == 0)
        tl.store(tokens + row, tl.where(alive, result, -1))
        tl.store(pending + row, tl.where(goes_on, result, -1))
        tl.store(index + row, tl.load(index + row) + alive.to(tl.int64))


@triton.jit
def accept_kernel(
    pending, index, max_new, ends, drafts, token, sampled, kept, tokens, drafts_stride, T, V,
    PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row per program. A draft is right if it equals the token sampled before it."""
    wait_for_previous(OVERLAP)
    row, t = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside, before = t < T, tl.load(index + row)
    is_live = tl.load(pending + row) >= 0
    alive = inside & is_live & (before + t < tl.load(max_new + row))
    result = tl.load(sampled + row * T + t, mask=inside, other=0)
    chosen = tl.load(token + row * T + t, mask=inside, other=0)
    is_end = tl.load(ends + row * V + chosen, mask=inside, other=1) != 0
    goes_on = alive & (result >= 0) & (is_end == 0)
    draft = tl.load(drafts + row * drafts_stride + t, mask=t < T - 1, other=-1)
    # The drafts before the first one that is not right.
    count = tl.min(tl.where(goes_on & (draft == result) & (t < T - 1), PADDED, t), 0)
    alive &= t <= count
    tl.store(tokens + row * T + t, tl.where(alive, result, -1), mask=inside)
    tl.store(kept + row, tl.where(is_live, 1 + count, 0).to(tl.int64))
    tl.debug_barrier()  # all threads have read what is overwritten
    following = tl.max(tl.where(goes_on & (t == count), result, -1), 0)
    tl.store(pending + row, following)
    tl.store(index + row, before + tl.sum(alive.to(tl.int64), 0))


@triton.jit
def draw(
    fraction, row, weights, sums, V, chunks,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The first token at which the summed weights exceed a fraction of all."""
    number = tl.arange(0, CHUNKS)
    chunk_sums = sums + (row * chunks + number) * THRESHOLDS + THRESHOLDS - 1
    reached = tl.cumsum(tl.load(chunk_sums, mask=number < chunks, other=0), 0)
    goal = (fraction * tl.max(reached, 0).to(tl.float64)).to(tl.int64)
    chunk = tl.sum((reached <= goal).to(tl.int32), 0)
    before = tl.max(tl.where(number < chunk, reached, 0), 0)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + row * V + token, mask=token < V, other=0)
    return tl.min(tl.where(before + tl.cumsum(weight, 0) > goal, token, V), 0)


@triton.jit
def find_border(
    goal, by_count, low, high, low_count, low_total, high_count, high_total,
    scores, weights, candidates, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest key such that the tokens with this key or a higher one reach the goal.

    The candidates are the tokens from `low` to `high`. Counts and totals are those of all tokens
    from `low` on, which reach the goal, and above `high`, which do not. Returns the key, the number
    and the weights of the tokens with higher keys, and the weight of one token with this key.
    """
    first_key, first_weight = load_candidates(0, scores, weights, candidates, size, BLOCK)[1:]
    base_count, base_total = high_count, high_total
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        count, total = add_above(middle, first_key, first_weight)
        for start in range(BLOCK, size, BLOCK):
            key, weight = load_candidates(start, scores, weights, candidates, size, BLOCK)[1:]
            some_count, some_total = add_above(middle, key, weight)
            count += some_count
            total += some_total
        count += base_count
        total += base_total
        if tl.where(by_count, count, total) >= goal:
            low, low_count, low_total = middle, count, total
        else:
            high, high_count, high_total = middle - 1, count, total
    # Tokens of one score have one weight.
    weight = (low_total - high_total) // (low_count - high_count)
    return low, high_count, high_total, weight


@triton.jit
def window(
    row, count, total, goals, by_count, top_p, thresholds, best_keys, T, chunks,
    THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The range of the candidates: its lower threshold, that above it, its lowest and highest key.

    With both top_k and top_p all of the first k tokens are candidates: then no threshold is above
    the range, which is −1.
    """
    counted = tl.load(by_count + row) != 0
    values = tl.where(counted, count, total)
    number = first_reaching(values, tl.load(goals + row), THRESHOLDS)
    thresholds += row * THRESHOLDS
    low, high = tl.load(thresholds + number), tl.load(thresholds + number - 1) - 1
    above = number - 1
    if counted & (tl.load(top_p + row // T) < 1):
        above = tl.full((), -1, tl.int32)
        high = tl.max(load_best_keys(row, best_keys, chunks, CHUNKS), 0)
    return number, above, low, high


@triton.jit
def first_reaching(values, goal, SIZE: tl.constexpr):
    """The index of the first of these ascending values that is not below the goal."""
    return tl.minimum(tl.sum((values < goal).to(tl.int32), 0), SIZE - 1)


@triton.jit
def pick(values, number, SIZE: tl.constexpr):
    """values[number]"""
    return tl.sum(tl.where(tl.arange(0, SIZE) == number, values, 0), 0)


@triton.jit
def add_chunks(row, counts, sums, chunks, THRESHOLDS: tl.constexpr, CHUNKS: tl.constexpr):
    """The number and the weights of a row's tokens above each threshold."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    at = (row * chunks + chunk) * THRESHOLDS + tl.arange(0, THRESHOLDS)[None, :]
    count = tl.load(counts + at, mask=chunk < chunks, other=0)
    total = tl.load(sums + at, mask=chunk < chunks, other=0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def add_above(lowest, key, weight):
    """How many tokens have this key or a higher one, and their weights."""
    is_above = key >= lowest
    return tl.sum(is_above.to(tl.int64), 0), tl.sum(tl.where(is_above, weight, 0), 0)


@triton.jit
def store_above(number, lowest, key, weight, counts, sums):
    """Writes how many tokens of a chunk are above this threshold, and their weights."""
    count, total = add_above(lowest, key, weight)
    tl.store(counts + number, count)
    tl.store(sums + number, total)


@triton.jit
def load_candidates(start, scores, weights, candidates, size, BLOCK: tl.constexpr):
    """Ids, keys and weights of BLOCK candidates of one row. After the last one ids are highest."""
    entry = start + tl.arange(0, BLOCK)
    inside = entry < size
    token = tl.load(candidates + entry, mask=inside, other=0x7FFFFFFF)
    key = load_scores(scores, token, inside)[1]
    return token, key, tl.load(weights + token, mask=inside, other=0)


@triton.jit
def load_scores(scores, token, inside):
    """The scores of some tokens of one row, and their keys. Where not `inside` keys are lowest."""
    score = tl.load(scores + token, mask=inside, other=float("-inf"))
    if score.dtype != tl.float64:
        score = score.to(tl.float32)
    return score, tl.where(inside, sort_key(score), _LOWEST)


@triton.jit
def load_best(row, scores, best_keys, best_ids, V, chunks, CHUNKS: tl.constexpr):
    """The best score of a row, in float64, and the first token that has it."""
    chunk = tl.arange(0, CHUNKS)
    key = load_best_keys(row, best_keys, chunks, CHUNKS)
    token = tl.load(best_ids + row * chunks + chunk, mask=chunk < chunks, other=0)
    best = tl.min(tl.where(key == tl.max(key, 0), token, V), 0)
    return tl.load(scores + row * V + best).to(tl.float64), best


@triton.jit
def load_best_keys(row, best_keys, chunks, CHUNKS: tl.constexpr):
    """The highest key of each chunk."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(best_keys + row * chunks + chunk, mask=chunk < chunks, other=_LOWEST)


@triton.jit
def is_asked(row, pending, index, max_new, T):
    """True if the row's request goes on."""
    goes_on = tl.load(pending + row // T) >= 0
    return goes_on & (tl.load(index + row) < tl.load(max_new + row // T))


@triton.jit
def key_like(score, scores):
    """The key that a finite float64 has among `scores`."""
    if scores.dtype.element_ty != tl.float64:
        score = tl.maximum(score, -3.4028234663852886e38).to(tl.float32)  # not infinite either
    return sort_key(score)


@triton.jit
def sort_key(score):
    """Integers in the order of scores of 32 or 64 bits. −0.0 is 0.0, and NaN is above all."""
    if score.dtype == tl.float64:
        bits = score.to(tl.int64, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(score == 0, 0, key)
    return tl.where(score == score, key, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def score_of(key, scores):
    """The score, in float64, that has this key among `scores`: `sort_key` backwards."""
    if scores.dtype.element_ty == tl.float64:
        score = tl.where(key < 0, key ^ 0x7FFFFFFFFFFFFFFF, key).to(tl.float64, bitcast=True)
    else:
        bits = key.to(tl.int32)
        score = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return score.to(tl.float64)


@triton.jit
def round_even(value):
    """The nearest integer of a float64 from 0 to 2^52; the even one of two."""
    # From 2^52 to 2^53 float64 has no fractions.
    return (value + 4503599627370496.0 - 4503599627370496.0).to(tl.int64)


@triton.jit
def round_up(value):
    """The next integer of a float64 from 0 to 2^53."""
    below = value.to(tl.int64)
    return below + (below.to(tl.float64) < value).to(tl.int64)


@triton.jit
def drop_small(weight, least):
    """0 instead of weights below `least`, a float64."""
    return tl.where(weight.to(tl.float64) >= least, weight, 0)


@triton.jit
def uniform(key, index):
    """As `uniform` of the sampler: the index-th number of splitmix64's sequence, in [0, 1)."""
    x = key.to(tl.uint64, bitcast=True)
    x += (index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
