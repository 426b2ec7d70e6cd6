"""Sampling on a GPU in two to four launches, without a sort: the tokens of `Sampler`'s own code.

`Sampler._scores`, `_weights` and `draw` in `sampler.py` define what is computed. Weights are whole
numbers whose sums float64 holds exactly. So they may be added in any order, also by atomics.

1. `score_kernel` edits the logits, and finds the best score of each block of tokens.
2. `weigh_kernel` computes the weights from the best score of the row, and their sum in each block.
   If the row has top_k or top_p, it puts tokens into bins by score, and counts and sums each bin.
   Batches without sampling skip this launch.
3. `list_kernel` is for batches with top_k or top_p. These keep the tokens down to a cut: a score,
   and the last token of those with just this score. The bins tell in which of them the cut lies,
   and the tokens of these bins are listed. Those of the bins before are kept, and summed by block.
4. `draw_kernel` finds the cut among the listed tokens, by bisection. Then it finds the block, and
   in it the token, that the random number falls on.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a program; in `list_kernel`, which starts with a sum over all bins; and those that are
# read at a time from the list.
_BLOCK, _TILE, _LISTED = 1024, 4096, 1024
# A bin is 1/32 wide in the exponent of a weight. The smallest weight of 50304 tokens has exponent
# −26.3. In smaller vocabularies weights reach further down; the last bin holds those beyond −32.
_BINS, _BINS_PER_UNIT = 1024, 32


# The names are those of `Sampler`, where B rows have one element each.


class Draws(NamedTuple):
    """What decides a draw."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    last_rank: Tensor
    key: Tensor
    number: Tensor  # how many tokens come before: [B], or [B, T] with T positions a row


class Edits(NamedTuple):
    """What changes the logits. All of it is applied, which changes no row that does not need it."""

    bias: Tensor  # [B, V], as are in_prompt and ends
    in_prompt: Tensor
    ends: Tensor
    counts: Tensor  # [B, V], or [B, T, V]
    allowed: Tensor  # [B, words], or [B, T, words]
    has_grammar: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_new: Tensor


class Progress(NamedTuple):
    """What a call changes in rows with one position."""

    pending: Tensor
    tokens: Tensor
    max_new: Tensor
    ends: Tensor


def sample(
    logits: Tensor,
    scale: float,
    draws: Draws,
    edits: Edits | None,
    progress: Progress | None,
    *,
    sampling: bool,
    filters: bool,
    bad_logits: int,
) -> tuple[Tensor, Tensor]:
    """The best score and the token of each row of logits [B, V] or [B, T, V], both [..., 1].

    scale: the weight of the most likely token.
    sampling: whether a row has a temperature above 0. filters: whether one has top_k or top_p.
    progress: if given, the tokens also become those of the rows, as `Sampler.__call__` says. Tokens
        are then counted in `edits.counts`.
    bad_logits: the token of a row whose logits are not finite.
    """
    shape, vocab_size = (*logits.shape[:-1], 1), logits.shape[-1]
    logits = logits.reshape(-1, vocab_size).contiguous()
    rows, device = len(logits), logits.device
    positions = rows // draws.temperature.numel()
    blocks = triton.cdiv(vocab_size, _BLOCK)
    padded = max(triton.next_power_of_2(blocks), _TILE // _BLOCK)
    # Greedy rows with edits take the kernels of sampling, so that fewer kernels are compiled.
    sampling |= edits is not None

    def new(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *sizes, dtype=dtype, device=device)

    best, token = new(dtype=torch.float64), new(dtype=torch.int64)
    block_best, block_token = new(padded, dtype=torch.float64), new(padded, dtype=torch.int32)
    weights = bins = histogram = block_sums = listed = size = None
    if sampling:
        weights, bins = new(vocab_size, dtype=torch.float64), new(vocab_size, dtype=torch.int16)
        histogram = new(2, _BINS, dtype=torch.int64)  # the tokens of each bin, and their weights
        block_sums = new(padded, dtype=torch.int64)
        listed, size = new(vocab_size, dtype=torch.int32), new(dtype=torch.int32)
    scores, shared_counts, shared_allowed = logits, positions, positions
    if edits is not None:
        scores = new(vocab_size, dtype=torch.float64)
        shared_counts = rows * vocab_size // edits.counts.numel()
        shared_allowed = rows * edits.allowed.shape[-1] // edits.allowed.numel()
    sizes = {"BLOCK": _BLOCK, "BLOCKS": padded}
    # A fused multiply-add would round the frequency penalty differently.
    options = {"enable_fp_fusion": False, "num_warps": 8}
    score_kernel[(blocks, rows)](
        logits, scores, block_best, block_token, histogram, size, draws.number,
        *(edits or [None] * len(Edits._fields)),
        vocab_size, positions, shared_counts, shared_allowed,
        EDITS=edits is not None, SAMPLING=sampling, BINS=_BINS, **sizes, **options,
    )  # fmt: skip
    if sampling:
        weigh_kernel[(blocks, rows)](
            scores, block_best, weights, bins, histogram, block_sums,
            draws.temperature, draws.top_p, draws.min_p, draws.last_rank, vocab_size, positions,
            SCALE=scale, BINS=_BINS, PER_UNIT=_BINS_PER_UNIT, **sizes, **options,
        )  # fmt: skip
    if filters:
        list_kernel[(triton.cdiv(vocab_size, _TILE), rows)](
            block_best, weights, bins, histogram, block_sums, listed, size,
            draws.temperature, draws.top_p, draws.min_p, draws.last_rank, vocab_size, positions,
            SCALE=scale, BINS=_BINS, TILE=_TILE, **sizes, **options,
        )  # fmt: skip
    draw_kernel[(rows,)](
        scores, block_best, block_token, weights, histogram, block_sums, listed, size,
        best, token, *draws, *(progress or [None] * len(Progress._fields)),
        None if edits is None else edits.counts, vocab_size, positions,
        SAMPLING=sampling, ADVANCE=progress is not None, COUNT=edits is not None,
        BAD_LOGITS=bad_logits, SCALE=scale, BINS=_BINS, LISTED=_LISTED, **sizes, **options,
    )  # fmt: skip
    return best.view(shape), token.view(shape)


@triton.jit
def score_kernel(
    logits, scores, block_best, block_token, histogram, size, index,
    bias, in_prompt, ends, counts, allowed, has_grammar,
    repetition, presence, frequency, min_new,
    V, POSITIONS, SHARED_COUNTS, SHARED_ALLOWED,
    EDITS: tl.constexpr, SAMPLING: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The scores of BLOCK tokens of one row, if they are not the logits, and the best of them.

    NaN counts as +∞: both are noticed as a best score that is not finite. `counts` and `allowed`
    have a row for this many rows of logits, other parameters one for POSITIONS.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    owner = row // POSITIONS
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(logits + row * V + token, mask=inside, other=float("-inf"))
    if EDITS:
        at = owner * V + token
        score = (score + tl.load(bias + at, mask=inside, other=0.0)).to(tl.float64)
        # Penalties.
        count = tl.load(counts + row // SHARED_COUNTS * V + token, mask=inside, other=0)
        seen = tl.load(in_prompt + at, mask=inside, other=0).to(tl.int1) | (count > 0)
        factor = tl.load(repetition + owner)
        score = tl.where(seen, tl.where(score > 0, score / factor, score * factor), score)
        score -= tl.load(presence + owner) * (count > 0).to(tl.float64)
        score -= tl.load(frequency + owner) * count.to(tl.float64)
        # Tokens that are banned.
        if tl.load(index + row) < tl.load(min_new + owner):
            is_end = tl.load(ends + at, mask=inside, other=0).to(tl.int1)
            score = tl.where(is_end, float("-inf"), score)
        if tl.load(has_grammar + owner):
            words = allowed + row // SHARED_ALLOWED * tl.cdiv(V, 32)
            bits = tl.load(words + token // 32, mask=inside, other=0)
            lowest: tl.constexpr = -3.4028234663852886e38  # float32's
            score = tl.where(score < lowest, lowest, score)
            score = tl.where((bits >> token % 32) & 1 != 0, score, float("-inf"))
        tl.store(scores + row * V + token, score, mask=inside)
    score = tl.where(score != score, float("inf"), score)
    best = tl.max(score, 0)
    first = tl.min(tl.where(inside & (score == best), token, V), 0)
    tl.store(block_best + row * BLOCKS + block, best.to(tl.float64))
    tl.store(block_token + row * BLOCKS + block, first)
    if SAMPLING and block == 0:
        bin = tl.arange(0, 2 * BINS)  # noqa: A001
        tl.store(histogram + row * 2 * BINS + bin, tl.zeros([2 * BINS], tl.int64))
        tl.store(size + row, 0)


@triton.jit
def weigh_kernel(
    scores, block_best, weights, bins, histogram, block_sums,
    temperature, top_p, min_p, last_rank, V, POSITIONS,
    SCALE: tl.constexpr, BINS: tl.constexpr, PER_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The weights of BLOCK tokens of one row.

    Without top_k and top_p, their sum is already that of the tokens that may be drawn.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    owner = row // POSITIONS
    heat = tl.load(temperature + owner)
    best = _best_of_row(block_best + row * BLOCKS, V, BLOCK, BLOCKS)
    if _is_drawn(heat, best):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < V
        score = tl.load(scores + row * V + token, mask=inside, other=float("-inf"))
        exponent = (score.to(tl.float64) - best) / tl.maximum(heat, 1e-300)
        # From 2^52 on float64 holds whole numbers only. So this rounds, and halves to even.
        whole: tl.constexpr = 4503599627370496.0
        weight = tl.exp(exponent) * SCALE + whole - whole
        tl.store(weights + row * V + token, weight, mask=inside)
        if _has_cut(tl.load(top_p + owner), tl.load(last_rank + owner), V):
            # A weight of 0 has no bin: BINS. Bins are in the order of scores, best first.
            bin = tl.minimum(-exponent * PER_UNIT, BINS - 1).to(tl.int32)  # noqa: A001
            bin = tl.where(weight > 0, bin, BINS)  # noqa: A001
            tl.store(bins + row * V + token, bin.to(tl.int16), mask=inside)
            at = histogram + row * 2 * BINS + bin
            tl.atomic_add(at, tl.full([BLOCK], 1, tl.int64), mask=bin < BINS, sem="relaxed")
            tl.atomic_add(at + BINS, weight.to(tl.int64), mask=bin < BINS, sem="relaxed")
        else:
            kept = tl.where(weight >= tl.load(min_p + owner) * SCALE, weight, 0.0)
            tl.store(block_sums + row * BLOCKS + block, tl.sum(kept, 0).to(tl.int64))


@triton.jit
def list_kernel(
    block_best, weights, bins, histogram, block_sums, listed, size,
    temperature, top_p, min_p, last_rank, V, POSITIONS,
    SCALE: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Lists those of TILE tokens that the cut may be at, in any order; sums those before them."""
    start, row = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    owner = row // POSITIONS
    p, rank = tl.load(top_p + owner), tl.load(last_rank + owner)
    best = _best_of_row(block_best + row * BLOCKS, V, BLOCK, BLOCKS)
    if _is_drawn(tl.load(temperature + owner), best) & _has_cut(p, rank, V):
        first, last, _, _, _ = _bins_of_cut(histogram + row * 2 * BINS, p, rank, BINS)
        token = start + tl.arange(0, TILE)
        bin = tl.load(bins + row * V + token, mask=token < V, other=BINS)  # noqa: A001
        weight = tl.load(weights + row * V + token, mask=bin < first, other=0.0)
        weight = tl.where(weight >= tl.load(min_p + owner) * SCALE, weight, 0.0)
        sums = tl.sum(tl.reshape(weight, [TILE // BLOCK, BLOCK]), 1).to(tl.int64)
        block = start // BLOCK + tl.arange(0, TILE // BLOCK)
        tl.store(block_sums + row * BLOCKS + block, sums)
        is_open = ((bin >= first) & (bin <= last)).to(tl.int32)
        place = tl.atomic_add(size + row, tl.sum(is_open, 0), sem="relaxed")
        place += tl.cumsum(is_open, 0) - 1
        tl.store(listed + row * V + place, token, mask=is_open != 0)


@triton.jit
def draw_kernel(
    scores, block_best, block_token, weights, histogram, block_sums, listed, size,
    best_of, token_of, temperature, top_p, min_p, last_rank, key, index,
    pending, tokens, max_new, ends, counts, V, POSITIONS,
    SAMPLING: tl.constexpr, ADVANCE: tl.constexpr, COUNT: tl.constexpr, BAD_LOGITS: tl.constexpr,
    SCALE: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    owner = row // POSITIONS
    # 1. The first of the best tokens.
    best = _best_of_row(block_best + row * BLOCKS, V, BLOCK, BLOCKS)
    block = tl.arange(0, BLOCKS)
    used = block * BLOCK < V
    is_best = used & (tl.load(block_best + row * BLOCKS + block, mask=used, other=0.0) == best)
    token = tl.min(tl.load(block_token + row * BLOCKS + block, mask=is_best, other=V), 0)
    # 2. A token that is drawn.
    if SAMPLING and _is_drawn(tl.load(temperature + owner), best):
        p, rank = tl.load(top_p + owner), tl.load(last_rank + owner)
        least = tl.load(min_p + owner) * SCALE
        fraction = _uniform(tl.load(key + owner), tl.load(index + row))
        scores += row * V
        weights += row * V
        block_sums += row * BLOCKS
        cut, last_tie = tl.full((), float("-inf"), tl.float64), -1
        if _has_cut(p, rank, V):
            cut, last_tie = _find_cut(
                scores, weights, histogram + row * 2 * BINS, block_sums, listed + row * V,
                tl.load(size + row), p, rank, least, BINS, LISTED, BLOCK,
            )  # fmt: skip
        sums = tl.load(block_sums + block, mask=used, other=0).to(tl.float64)
        target = fraction * tl.sum(sums, 0)
        at = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(block < at, sums, 0.0), 0)
        place = at * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + place, mask=place < V, other=float("-inf")).to(tl.float64)
        weight = tl.load(weights + place, mask=place < V, other=0.0)
        weight = tl.where(_is_kept(place, score, weight, cut, last_tie, least), weight, 0.0)
        sum_to = before + tl.cumsum(weight, 0)
        token = at * BLOCK + tl.sum((sum_to <= target).to(tl.int32), 0)
        # Only an idle row exceeds the end: `list_kernel` may not have run for its parameters.
        token = tl.minimum(token, V - 1)
    tl.store(best_of + row, best)
    tl.store(token_of + row, token.to(tl.int64))
    # 3. The row goes on with it.
    if ADVANCE:
        done = tl.load(index + row)
        alive = (tl.load(pending + row) >= 0) & (done < tl.load(max_new + row))
        goes_on = alive & (tl.load(ends + row * V + token) == 0)
        sampled = tl.where(best < float("inf"), token, BAD_LOGITS).to(tl.int64)
        tl.store(tokens + row, tl.where(alive, sampled, -1))
        tl.store(pending + row, tl.where(goes_on, sampled, -1))
        tl.store(index + row, done + alive.to(tl.int64))
        if COUNT:
            at = counts + row * V + token
            tl.store(at, tl.load(at) + alive.to(tl.int32))


@triton.jit
def _best_of_row(block_best, V, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(block_best + block, mask=block * BLOCK < V, other=float("-inf")), 0)


@triton.jit
def _is_drawn(temperature, best):
    """Else the token is the best one: as asked for, or because all are banned or not finite."""
    return (temperature > 0) & (best > float("-inf")) & (best < float("inf"))


@triton.jit
def _has_cut(top_p, last_rank, V):
    return (top_p < 1) | (last_rank < V - 1)


@triton.jit
def _is_kept(token, score, weight, cut, last_tie, least):
    return ((score > cut) | ((score == cut) & (token <= last_tie))) & (weight >= least)


@triton.jit
def _bins_of_cut(histogram, p, last_rank, BINS: tl.constexpr):
    """The first and the last bin to list, count and sum before both, and the sum of k weights.

    All tokens of the bins before the first are kept. Top_p asks for a share of the sum of the first
    k weights. This sum is known if no more than k tokens have a weight. Then the cut is in the
    first bin. Else the sum is returned as −1, and the last bin is that of token k.
    """
    bin = tl.arange(0, BINS)  # noqa: A001
    count = tl.load(histogram + bin).to(tl.float64)
    weight = tl.load(histogram + BINS + bin).to(tl.float64)
    k_bin = tl.sum((tl.cumsum(count, 0) <= last_rank).to(tl.int32), 0)
    before_k = tl.sum(tl.where(bin < k_bin, weight, 0.0), 0)  # the sum of k weights is not less
    first = tl.sum((tl.cumsum(weight, 0) < p * before_k).to(tl.int32), 0)
    last = tl.where(k_bin < BINS, k_bin, first)
    count_before = tl.sum(tl.where(bin < first, count, 0.0), 0)
    sum_before = tl.sum(tl.where(bin < first, weight, 0.0), 0)
    return first, last, count_before, sum_before, tl.where(k_bin < BINS, -1.0, before_k)


@triton.jit
def _find_cut(
    scores, weights, histogram, block_sums, listed, size, p, last_rank, least,
    BINS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest score that is kept, and the last token that is kept of those that have it.

    Adds the listed tokens that are kept to `block_sums`. All arguments are those of one row.
    """
    _, _, count_before, sum_before, total = _bins_of_cut(histogram, p, last_rank, BINS)
    # 1. The sum of the first k weights. Tokens with the score of the last one weigh the same.
    if total < 0:
        k = (last_rank + 1).to(tl.float64)
        cut = _bisect(scores, weights, listed, size, 0.0, count_before, k, "count", LISTED)
        count, above, tie = _sum_above(scores, weights, listed, size, cut, LISTED)
        total = sum_before + above + (k - count_before - count) * tie
    # 2. Tokens are kept as long as the sum before them is not enough. Equal scores are in the order
    #    of the vocabulary.
    enough = p * total
    cut = _bisect(scores, weights, listed, size, 0.0, sum_before, enough, "weight", LISTED)
    _, above, _ = _sum_above(scores, weights, listed, size, cut, LISTED)
    before = sum_before + above
    tie = _bisect(scores, weights, listed, size, cut, before, enough, "tie", LISTED)
    last_tie = -tie.to(tl.int32)
    # 3. Add what is kept.
    for start in range(0, size, LISTED):
        token, score, weight = _read(scores, weights, listed, size, start, LISTED)
        kept = _is_kept(token, score, weight, cut, last_tie, least)
        at = block_sums + token // BLOCK
        tl.atomic_add(at, weight.to(tl.int64), mask=kept, sem="relaxed")
    tl.debug_barrier()  # all threads have added theirs
    return cut, last_tie


@triton.jit
def _bisect(
    scores, weights, listed, size, cut, before, enough, BY: tl.constexpr, LISTED: tl.constexpr
):
    """The lowest listed score for which `before` and the weights above it are not yet `enough`.

    BY "count": each token weighs 1. BY "tie": only tokens with the score `cut` count, and the first
    has the highest score, −token.
    """
    low = tl.full((), float("inf"), tl.float64)
    high = tl.full((), float("-inf"), tl.float64)
    for start in range(0, size, LISTED):
        score, weight = _read_by(scores, weights, listed, size, start, cut, BY, LISTED)
        low = tl.minimum(low, tl.min(tl.where(score > float("-inf"), score, float("inf")), 0))
        high = tl.maximum(high, tl.max(score, 0))
    while low < high:  # both are listed scores
        middle = low + (high - low) / 2
        middle = tl.where(middle < high, middle, low)
        above, lowest_above, highest_below = before, high, low
        for start in range(0, size, LISTED):
            score, weight = _read_by(scores, weights, listed, size, start, cut, BY, LISTED)
            is_above = score > middle
            above += tl.sum(tl.where(is_above, weight, 0.0), 0)
            lowest_above = tl.minimum(lowest_above, tl.min(tl.where(is_above, score, high), 0))
            highest_below = tl.maximum(highest_below, tl.max(tl.where(is_above, low, score), 0))
        high = tl.where(above < enough, highest_below, high)
        low = tl.where(above < enough, low, lowest_above)
    return low


@triton.jit
def _read_by(scores, weights, listed, size, start, cut, BY: tl.constexpr, LISTED: tl.constexpr):
    token, score, weight = _read(scores, weights, listed, size, start, LISTED)
    if BY == "count":
        weight = tl.full([LISTED], 1.0, tl.float64)
    if BY == "tie":
        score = tl.where(score == cut, -token.to(tl.float64), float("-inf"))
    return score, weight


@triton.jit
def _sum_above(scores, weights, listed, size, cut, LISTED: tl.constexpr):
    """How many listed tokens score above the cut, their weights' sum, and the weight at the cut."""
    number = tl.full((), 0.0, tl.float64)
    above, tie = number, number
    for start in range(0, size, LISTED):
        _, score, weight = _read(scores, weights, listed, size, start, LISTED)
        number += tl.sum((score > cut).to(tl.float64), 0)
        above += tl.sum(tl.where(score > cut, weight, 0.0), 0)
        tie = tl.maximum(tie, tl.max(tl.where(score == cut, weight, 0.0), 0))
    return number, above, tie


@triton.jit
def _read(scores, weights, listed, size, start, LISTED: tl.constexpr):
    """Token, score and weight of LISTED listed tokens. After the end the score is −∞."""
    place = start + tl.arange(0, LISTED)
    token = tl.load(listed + place, mask=place < size, other=0)
    score = tl.load(scores + token, mask=place < size, other=float("-inf")).to(tl.float64)
    weight = tl.load(weights + token, mask=place < size, other=0.0)
    return token, score, weight


@triton.jit
def _uniform(key, index):
    """`uniform` of `sampler.py`: the index-th number of the key's splitmix64 sequence."""
    x = key.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
