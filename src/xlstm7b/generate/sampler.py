"""Sampler: logits to tokens, each row with its own parameters, seed and history."""

import copy
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from xlstm7b.generate.params import MAX_LOGPROBS, SamplingParams
from xlstm7b.generate.request import BAD_LOGITS
from xlstm7b.kernel_verdicts import is_wrong
from xlstm7b.mlstm import has_kernels

if TYPE_CHECKING:
    from xlstm7b.generate.kernels.sampling import Rows

_FEW = 2048  # most likely tokens among which a CPU looks for those that top_k and top_p keep
_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class Needs(NamedTuple):
    """Which work a batch needs. A row that does not need some work is not changed by it."""

    sampling: bool = False  # temperature above 0
    filters: bool = False  # top_k, top_p or min_p
    penalties: bool = False
    bias: bool = False
    minimum: bool = False  # min_new_tokens
    grammar: bool = False  # structured_outputs
    logprobs: int | None = None  # the largest number that any row wants

    @classmethod
    def of(cls, params: SamplingParams) -> "Needs":
        sampling = params.temperature > 0
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(
            sampling=sampling,
            filters=sampling and (params.top_k, params.top_p, params.min_p) != (0, 1, 0),
            penalties=penalties != (1, 0, 0),
            bias=bool(params.logit_bias),
            minimum=params.min_new_tokens > 0,
            grammar=params.structured_outputs is not None,
            logprobs=params.logprobs,
        )

    @classmethod
    def union(cls, rows: Iterable["Needs"]) -> "Needs":
        """The union of the needs of several rows."""
        *flags, counts = zip(*rows, strict=True)
        return cls._make([*map(any, flags), max({*counts} - {None}, default=None)])


class Drawn(NamedTuple):
    """What `Sampler.sample_drafts` found."""

    kept: Tensor  # [B]: tokens that were right to read: the pending one and the accepted drafts
    tokens: Tensor  # [B, T], as `Sampler.tokens`; −1 after a rejected draft


class Sampler:
    """Parameters and histories of a batch as tensors at fixed addresses.

    On a GPU a call does nothing that a CUDA graph could not replay: it never waits for the device,
    and no shape depends on data. Its results stay in the public tensors until the next call.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        uses_kernels: bool | None = None,
    ) -> None:
        """`uses_kernels` says how tokens are drawn: by default with kernels on a GPU."""
        self._shape, self._device = (rows, vocab_size), device
        kind = torch.device(device)
        if uses_kernels is None:
            on_gpu = kind.type == "cuda" and has_kernels(kind)
            uses_kernels = on_gpu and not is_wrong("sampling", kind)
        self._uses_kernels = uses_kernels
        # The sampled tokens, end of text included. −1: the row was finished before; `BAD_LOGITS`:
        # its logits were not finite, which finishes it.
        self.tokens = self._new(rows) - 1
        # One tensor per type, so that one copy writes all parameters of a row. 0 suits an idle row.
        self._integers = self._new(6, rows)
        # The token that the model reads next. Below 0 there is none: the row is finished or idle.
        # In a new row it is 0 until the first call, which only marks the row as not finished.
        self.pending = self._integers[0].fill_(-1)
        self.index = self._integers[1]  # tokens sampled so far
        self._max_new, self._min_new, self._last_rank, self._key = self._integers[2:].unbind()
        self._reals = self._new(len(_REALS), rows, 1, dtype=torch.float64)
        self._temperature, self._top_p, self._min_p = self._reals[:3].unbind()
        self._repetition, self._presence, self._frequency = self._reals[3:].unbind()
        self._ends = self._new(*self._shape, dtype=torch.bool)
        self._has_grammar = self._new(rows, 1, dtype=torch.bool)
        # From the unchanged logits, before bias and penalties. The first `Needs.logprobs`
        # columns hold the most likely tokens. Rows that are finished hold garbage.
        self.logprob = self._new(rows, dtype=torch.float32)
        self.top_logprobs = self._new(rows, MAX_LOGPROBS, dtype=torch.float32)
        self.top_tokens = self._new(rows, MAX_LOGPROBS)
        self._row_needs = [Needs()] * rows

    @property
    def needs(self) -> Needs:
        """The union of the needs of all rows."""
        return Needs.union({*self._row_needs})

    def scored_rows(self, count: int) -> list[int]:
        """Those of the first rows that want log-probabilities."""
        if self.needs.logprobs is None:
            return []
        wanted = enumerate(self._row_needs[:count])
        return [row for row, needs in wanted if needs.logprobs is not None]

    # Allocated when a row first needs them, then kept: CUDA graphs hold their addresses.

    @cached_property
    def _bias(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.float32)

    @cached_property
    def _in_prompt(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.bool)

    @cached_property
    def _counts(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.int32)

    @cached_property
    def _allowed(self) -> Tensor:
        """One bit for each token, 32 in an int32. Only rows with a grammar read it."""
        rows, vocab_size = self._shape
        return self._new(rows, mask_words(vocab_size), dtype=torch.int32)

    @torch.inference_mode()
    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """Starts a request in a row. `params` were checked; `seed` replaces `params.seed`.

        Penalties count the tokens of `prompt`, and of `output`, which was generated before.
        """
        self.clear_row(row)
        vocab_size = self._shape[1]
        last_rank = min(params.top_k or vocab_size, vocab_size) - 1
        key = int(scramble(torch.tensor(_signed(seed))))
        limits = params.max_new_tokens, params.min_new_tokens, last_rank
        self._integers[:, row] = on_device([0, 0, *limits, key], self._device)
        reals = [getattr(params, name) for name in _REALS]
        self._reals[:, row, 0] = on_device(reals, self._device, torch.float64)
        _mark(self._ends[row], params.eos_token_ids)
        needs = Needs.of(params)
        if needs.penalties:
            _mark(self._in_prompt[row], prompt)
            counts, before = self._counts[row].zero_(), on_device(output, self._device)
            counts.scatter_add_(0, before, torch.ones_like(before, dtype=counts.dtype))
        if needs.bias:
            biases = on_device([*params.logit_bias.values()], self._device, torch.float32)
            self._bias[row].index_copy_(0, on_device([*params.logit_bias], self._device), biases)
        if needs.grammar:
            self._has_grammar[row].fill_(True)
            self._allowed[row].fill_(-1)  # all tokens, until `set_masks`
        self._row_needs[row] = needs

    @torch.inference_mode()
    def set_masks(self, rows: Sequence[int], masks: Tensor) -> None:
        """Sets which tokens the grammars of these rows allow: a bit for each token, [N, words]."""
        on_device_masks = masks.to(self._device, non_blocking=True)
        self._allowed.index_copy_(0, on_device(rows, self._device), on_device_masks)

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Makes a row idle: nothing is read or sampled in it."""
        self.pending[row].fill_(-1)  # an assignment would copy a number, and wait for the copy
        if self._row_needs[row].bias:
            self._bias[row].zero_()
        if self._row_needs[row].grammar:
            self._has_grammar[row].fill_(False)
        self._row_needs[row] = Needs()

    @torch.inference_mode()
    def move_row(self, source: int, target: int) -> None:
        """Moves a request to another row; the source becomes idle."""
        self.clear_row(target)
        needs = self._row_needs[source]
        self.tokens[target] = self.tokens[source]
        self._integers[:, target] = self._integers[:, source]
        self._reals[:, target] = self._reals[:, source]
        self._ends[target] = self._ends[source]
        if needs.penalties:
            self._in_prompt[target] = self._in_prompt[source]
            self._counts[target] = self._counts[source]
        if needs.bias:
            self._bias[target] = self._bias[source]
        if needs.grammar:
            self._has_grammar[target].fill_(True)
            self._allowed[target] = self._allowed[source]
        self._row_needs[target] = needs
        self.clear_row(source)

    def first(self, rows: int) -> Self:
        """The first rows as a sampler over the same memory. Only to call: set rows in this one."""
        # Allocated now, so that both share them.
        _ = self._bias, self._in_prompt, self._counts, self._allowed
        view = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("_integers", "_reals"):
                setattr(view, name, value[:rows])
        return view

    @torch.inference_mode()
    def sample_rows(self, logits: Tensor, rows: Sequence[int]) -> Self:
        """Samples in these rows only, from logits [B, V] of all. Returns their results."""
        if list(rows) == list(range(self._shape[0])):
            self(logits[: len(rows)], self.needs)
            return self
        index = on_device(rows, self._device)
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("_integers", "_reals"):
                setattr(part, name, value.index_select(0, index))
        part._row_needs = [self._row_needs[row] for row in rows]
        part(logits.index_select(0, index), part.needs)
        for name in ("tokens", "pending", "index", "_counts"):
            if name in vars(self):
                vars(self)[name].index_copy_(0, index, vars(part)[name])
        return part

    @torch.inference_mode()
    def __call__(self, logits: Tensor, needs: Needs) -> None:
        """One token per row from logits [B, V]; `needs` includes at least what the rows need.

        A row in which every token is banned gets token 0. In a row with a grammar, the tokens that
        it allows are never all banned: if bias or `min_new_tokens` ban them all, they have no say.
        """
        scores = self._scores(logits, needs)
        if self._uses_kernels:
            token, _ = self._sample_by_kernels(scores, needs, self.tokens)
        else:
            token, sampled = self._sample(scores, needs)
            alive, continues = self._outcome(token, sampled)
            self.tokens.copy_(torch.where(alive, sampled[..., 0], -1))
            self.pending.copy_(torch.where(continues, sampled[..., 0], -1))
            self.index += alive
        if needs.penalties:
            self._counts.scatter_add_(-1, token, (self.tokens != -1)[:, None].int())
        if needs.logprobs is not None:
            logprob, top_logprobs, top_tokens = token_logprobs(logits, token, needs.logprobs)
            self.logprob.copy_(logprob)
            self.top_logprobs[:, : needs.logprobs] = top_logprobs
            self.top_tokens[:, : needs.logprobs] = top_tokens

    @torch.inference_mode()
    def sample_drafts(
        self, logits: Tensor, drafts: Tensor, needs: Needs, allowed: Tensor
    ) -> "Drawn":
        """Up to T tokens per row from logits [B, T, V]: position t comes after t drafts [B, T − 1].

        All positions are sampled at once, each as a call would do after the drafts before it: with
        its own random number, and with penalties that count these drafts. A position counts as
        long as all drafts before it equal the tokens sampled. −1 is no draft. `allowed`
        [B, T − 1, words] are the grammars' masks after the drafts, as in `set_masks`.
        """
        at = self._after(drafts, needs, allowed)
        scores = at._scores(logits, needs)
        if self._uses_kernels:
            from xlstm7b.generate.kernels import sampling

            token, sampled = at._sample_by_kernels(scores, needs)
            drawn = Drawn(*sampling.accept(self._rows(), drafts, token, sampled))
        else:
            token, sampled = at._sample(scores, needs)
            alive, continues = at._outcome(token, sampled)
            sampled = sampled[..., 0]
            accepted = (continues[:, :-1] & (drafts == sampled[:, :-1])).long().cumprod(1)
            alive[:, 1:] &= accepted.bool()
            count = accepted.sum(1)
            kept = torch.where(self.pending >= 0, 1 + count, 0)
            drawn = Drawn(kept, torch.where(alive, sampled, -1))
            following = torch.where(continues, sampled, -1)
            self.pending.copy_(following.gather(1, count[:, None])[:, 0])
            self.index += alive.sum(1)
        if needs.penalties:
            self._counts.scatter_add_(-1, token[..., 0], (drawn.tokens != -1).int())
        return drawn

    def _after(self, drafts: Tensor, needs: Needs, allowed: Tensor) -> Self:
        """This sampler with an axis of positions after that of the rows. Only to sample."""
        if needs.bias or needs.penalties or needs.grammar:  # allocated now: a copy cannot do it
            _ = self._bias, self._in_prompt, self._counts, self._allowed
        view = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("_integers", "_reals"):
                setattr(view, name, value[:, None])
        view.index = view.index + torch.arange(drafts.shape[1] + 1, device=drafts.device)
        if needs.penalties:
            shape = len(drafts), drafts.shape[1] + 1, self._shape[1]
            new = torch.zeros(shape, dtype=torch.int32, device=drafts.device)
            counted = (drafts >= 0).int()[..., None]
            new[:, 1:].scatter_(-1, drafts.clamp(min=0)[..., None], counted)
            view._counts = view._counts + new.cumsum(1, dtype=torch.int32)
        if needs.grammar:
            view._allowed = torch.cat([view._allowed, allowed], 1)
        return view

    # These take logits or scores [B, V], or [B, T, V] in a sampler with positions.

    def _sample(self, scores: Tensor, needs: Needs) -> tuple[Tensor, Tensor]:
        """The token of each row, and the same or `BAD_LOGITS`, both [..., 1]."""
        best, token = scores.max(-1, keepdim=True)  # NaN, if there is one
        if needs.sampling:
            greedy = (self._temperature == 0) | (best == -torch.inf)
            weights = self._weights(scores, best, needs)
            token = torch.where(greedy, token, draw(weights, uniform(self._key, self.index)))
        return token, torch.where(best < torch.inf, token, BAD_LOGITS)

    def _sample_by_kernels(
        self, scores: Tensor, needs: Needs, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`_sample` on a GPU. If given `tokens`, also writes them, `pending` and `index`."""
        from xlstm7b.generate.kernels import sampling

        return sampling.sample(
            scores, self._rows(), sampling=needs.sampling, filters=needs.filters, tokens=tokens
        )

    def _rows(self) -> "Rows":
        from xlstm7b.generate.kernels.sampling import Rows

        return Rows(
            pending=self.pending,
            indices=self.index,
            max_new=self._max_new,
            temperature=self._temperature,
            top_p=self._top_p,
            min_p=self._min_p,
            last_rank=self._last_rank,
            key=self._key,
            ends=self._ends,
        )

    def _scores(self, logits: Tensor, needs: Needs) -> Tensor:
        """Logits after bias, penalties and bans."""
        scores = logits
        if needs.bias:
            scores = scores + self._bias
        if needs.penalties:
            generated = self._counts > 0
            less = torch.where(scores > 0, scores / self._repetition, scores * self._repetition)
            scores = torch.where(self._in_prompt | generated, less, scores)
            scores = scores - self._presence * generated - self._frequency * self._counts
        if needs.minimum:
            too_early = (self.index < self._min_new)[..., None]
            scores = scores.masked_fill(self._ends & too_early, -torch.inf)
        if needs.grammar:
            bits = torch.arange(32, dtype=torch.int32, device=scores.device)
            allowed = (self._allowed[..., None] >> bits) & 1
            allowed = allowed.flatten(-2)[..., : self._shape[1]].bool()
            possible = scores.clamp(min=torch.finfo(scores.dtype).min)
            masked = possible.masked_fill(~allowed, -torch.inf)
            scores = torch.where(self._has_grammar, masked, scores)
        return scores

    def _weights(self, scores: Tensor, best: Tensor, needs: Needs) -> Tensor:
        """Unnormalised probabilities in vocabulary order; 0 is a token that is never drawn.

        They are whole numbers whose sums float64 holds exactly, in whatever order a device adds
        them. So a draw depends on no rounding, and on no other row. At 50304 tokens a weight is
        exact to 2^-38 of the most likely token's.
        """
        scale = 2.0 ** (53 - self._shape[1].bit_length())
        # At temperature 0 the best token is taken anyway. The clamp only avoids NaN.
        exponents = (scores.double() - best) / self._temperature.clamp(min=1e-300)
        weights = (exponents.exp() * scale).round()
        if needs.filters:
            top_p, last_rank = self._top_p, self._last_rank[..., None]
            if scores.device.type == "cpu":
                asked = (self.pending >= 0)[..., None]
                weights = _kept_by_cpu(scores, weights, top_p, last_rank, asked)
            else:
                weights = _kept(scores, weights, top_p, last_rank)
            weights = weights.where(weights >= self._min_p * scale, 0)
        return weights

    def _outcome(self, token: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows sample a token, and which go on after it."""
        alive = (self.pending >= 0) & (self.index < self._max_new)
        is_last = self._ends.take_along_dim(token, -1) | (sampled < 0)
        return alive, alive & ~is_last[..., 0]

    def _new(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def _kept(scores: Tensor, weights: Tensor, top_p: Tensor, last_rank: Tensor) -> Tensor:
    """The weights [..., V] that top_k and top_p keep; the others are 0.

    top_p and last_rank, which is top_k − 1, are [..., 1].
    """
    order = scores.argsort(stable=True, dim=-1, descending=True)
    ordered = weights.gather(-1, order)
    total = ordered.cumsum(-1)
    # top_k: after the first k tokens the sum has reached all that counts.
    enough = top_p * total.take_along_dim(last_rank, -1)
    ordered = ordered.where(total - ordered < enough, 0)
    return weights.scatter(-1, order, ordered)


def _kept_by_cpu(
    scores: Tensor, weights: Tensor, top_p: Tensor, last_rank: Tensor, asked: Tensor
) -> Tensor:
    """`_kept`, in rows that are `asked` for [..., 1].

    To sort all tokens takes a CPU longer than all other work of a draw. So it sorts the `_FEW` most
    likely ones. Mostly the tokens that are kept are among them; rows where they are not are sorted
    as a whole.
    """
    vocab_size = scores.shape[-1]
    top_p, last_rank, asked = (
        each.expand(*scores.shape[:-1], 1) for each in (top_p, last_rank, asked)
    )
    has_top_k, whole = last_rank < vocab_size - 1, weights.sum(-1, keepdim=True)
    # If few tokens had that much, the sum of squares would be larger (Cauchy and Schwarz).
    needs_more = (top_p * whole) ** 2 > _FEW * weights.square().sum(-1, keepdim=True)
    if vocab_size <= _FEW or bool((needs_more & ~has_top_k).all()):
        return _kept(scores, weights, top_p, last_rank)
    # In order of the scores; equal ones in order of the tokens.
    tokens = scores.topk(_FEW, sorted=False).indices.sort().values
    found, places = scores.gather(-1, tokens).sort(stable=True, descending=True)
    order = tokens.gather(-1, places)
    ordered = weights.gather(-1, order)
    total = ordered.cumsum(-1)
    first_k = total.take_along_dim(last_rank.clamp(max=_FEW - 1), -1)
    enough = top_p * torch.where(has_top_k, first_k, whole)
    # Tokens that are not among the few may be as likely as the last one of them.
    is_reached = ((total >= enough) & (found > found[..., -1:])).any(-1, keepdim=True)
    ordered = ordered.where(total - ordered < enough, 0)
    kept = torch.zeros_like(weights).scatter(-1, order, ordered)
    keeps_all = ~has_top_k & (top_p == 1)
    kept = torch.where(keeps_all, weights, kept)
    is_unknown = asked & ~keeps_all & ~(is_reached & (~has_top_k | (last_rank < _FEW)))
    rows = is_unknown[..., 0]
    if rows.any():
        kept[rows] = _kept(*(each[rows] for each in (scores, weights, top_p, last_rank)))
    return kept


def token_logprobs(logits: Tensor, token: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens [..., 1], then values and ids of the `top` most likely."""
    log_total = logits.logsumexp(-1, keepdim=True)
    most_likely = logits.topk(top)
    own = (logits.gather(-1, token) - log_total)[..., 0]
    return own, most_likely.values - log_total, most_likely.indices


def mask_words(vocab_size: int) -> int:
    """How many int32 hold one bit for each token."""
    return -(-vocab_size // 32)


def _mark(mask: Tensor, tokens: Sequence[int]) -> None:
    """Makes a mask over the vocabulary true at these tokens only."""
    mask.zero_().index_fill_(0, on_device(tokens, mask.device), True)


def on_device(
    values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers on a device, without waiting for the device."""
    return _on_host(values, device, dtype).to(device, non_blocking=True)


def copy_to(target: Tensor, values: Sequence[Any]) -> None:
    """Copies numbers into a tensor of the same shape, without waiting for its device."""
    target.copy_(_on_host(values, target.device, target.dtype), non_blocking=True)


def _on_host(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Numbers in memory from which a copy to the device does not wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


# Random numbers that depend on a seed and an index only: the same on any device, in any batch.


def draw(weights: Tensor, fraction: Tensor) -> Tensor:
    """The first token [..., 1] at which the summed weights [..., V] exceed `fraction` of all.

    A fraction below 1 times the total is below the total in float64 too, so a token is
    found, and its weight is not 0.
    """
    total = weights.cumsum(-1)
    token = torch.searchsorted(total, fraction * total[..., -1:], right=True)
    # Only an idle row or a row of NaN can exceed the end. It must not stop the device for all rows.
    return token.clamp(max=weights.shape[-1] - 1)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """The index-th number of each key's splitmix64 sequence: 53 bits in [0, 1), as [..., 1]."""
    bits = scramble(key + (index + 1) * _signed(0x9E3779B97F4A7C15))
    return (_shift_right(bits, 11).double() * 2**-53)[..., None]


def scramble(x: Tensor) -> Tensor:
    """splitmix64's mixing function; int64 multiplication wraps around."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """A shift that fills with zeros; int64's own fills with the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """64 bits as an int64."""
    return bits - (bits >> 63 << 64)
