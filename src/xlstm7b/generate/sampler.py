"""From logits to the next token: every row of a batch by its own settings, seed and history."""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from xlstm7b.generate.randomness import draw, scramble, signed, uniform
from xlstm7b.generate.sampling import MOST_LOGPROBS, NO_TOKEN, REALS, Needs, SamplingSettings


class Sampler:
    """A batch's settings and histories as tensors at fixed addresses.

    A call does nothing that a CUDA graph couldn't replay: it never waits for the device, and
    no shape depends on data. What it finds stays in the public tensors until the next call.
    """

    def __init__(self, batch: int, vocab_size: int, device: torch.device | str) -> None:
        self._shape, self._device = (batch, vocab_size), device
        # What was sampled, end of text included; −1 in a row that was over already, `NO_TOKEN` in
        # one whose logits are not numbers, which is over with it.
        self.tokens = self._new(batch) - 1
        # Settings in one tensor a type: a row is written by one copy. Zeros suit an idle row.
        self._integers = self._new(6, batch)
        # What the model must read next; below 0 there is nothing, and then the row is over.
        # In a row just set it is 0 until the first call, and only says that the row is not over.
        self.pending = self._integers[0].fill_(-1)
        self.index = self._integers[1]  # how many tokens the row has sampled
        self._max_new, self._min_new, self._last_rank, self._key = self._integers[2:].unbind()
        self._reals = self._new(len(REALS), batch, 1, dtype=torch.float64)
        self._temperature, self._top_p, self._min_p = self._reals[:3].unbind()
        self._repetition, self._presence, self._frequency = self._reals[3:].unbind()
        self._ends = self._new(*self._shape, dtype=torch.bool)
        # Of the logits as they came, before bias and all else. The first `Needs.logprobs` columns
        # hold the likeliest tokens; what is in a row that is over means nothing.
        self.logprob = self._new(batch, dtype=torch.float32)
        self.top_logprobs = self._new(batch, MOST_LOGPROBS, dtype=torch.float32)
        self.top_tokens = self._new(batch, MOST_LOGPROBS)
        self._row_needs = [Needs()] * batch

    @property
    def needs(self) -> Needs:
        """What the rows need together."""
        return Needs.union({*self._row_needs})

    # Allocated by the first row that needs them, then kept: graphs hold their addresses.

    @cached_property
    def _bias(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.float32)

    @cached_property
    def _in_prompt(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.bool)

    @cached_property
    def _counts(self) -> Tensor:
        return self._new(*self._shape, dtype=torch.int32)

    @torch.inference_mode()
    def set_row(
        self, row: int, settings: SamplingSettings, *, seed: int, prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Starts a text in a row, by settings that were checked; `seed` stands for theirs.

        Penalties know of the prompt, and of what was `generated` behind it before.
        """
        self.clear_row(row)
        last_rank = min(settings.top_k or self._shape[1], self._shape[1]) - 1
        key = int(scramble(torch.tensor(signed(seed))))
        limits = settings.max_new_tokens, settings.min_new_tokens, last_rank
        self._integers[:, row] = on_device([0, 0, *limits, key], self._device)
        reals = [getattr(settings, name) for name in REALS]
        self._reals[:, row, 0] = on_device(reals, self._device, torch.float64)
        _mark(self._ends[row], settings.eos_token_ids)
        needs = settings.needs
        if needs.penalties:
            _mark(self._in_prompt[row], prompt)
            counts, before = self._counts[row].zero_(), on_device(generated, self._device)
            counts.scatter_add_(0, before, torch.ones_like(before, dtype=counts.dtype))
        if needs.bias:
            biases = on_device([*settings.logit_bias.values()], self._device, torch.float32)
            self._bias[row].index_copy_(0, on_device([*settings.logit_bias], self._device), biases)
        self._row_needs[row] = needs

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Leaves a row idle: it produces nothing, and needs nothing."""
        self.stop_row(row)
        if self._row_needs[row].bias:
            self._bias[row].zero_()
        self._row_needs[row] = Needs()

    @torch.inference_mode()
    def stop_row(self, row: int) -> None:
        """Ends a row's text: nothing more of it is read or sampled."""
        self.pending[row].fill_(-1)  # assigned, a number would be copied, and waited for

    @torch.inference_mode()
    def take_row(self, row: int, other: "Sampler", source: int) -> None:
        """Goes on in a row with the text that another sampler, or this one, has in `source`."""
        self.clear_row(row)
        needs = other._row_needs[source]
        self.tokens[row] = other.tokens[source]
        self._integers[:, row] = other._integers[:, source]
        self._reals[:, row] = other._reals[:, source]
        self._ends[row] = other._ends[source]
        if needs.penalties:
            self._in_prompt[row] = other._in_prompt[source]
            self._counts[row] = other._counts[source]
        if needs.bias:
            self._bias[row] = other._bias[source]
        self._row_needs[row] = needs

    def first(self, rows: int) -> Self:
        """The first rows as a sampler to call, over the same memory; rows are set in this one."""
        _ = self._bias, self._in_prompt, self._counts  # allocated, so that both have the same
        view = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("_integers", "_reals"):  # for rows set
                setattr(view, name, value[:rows])
        return view

    @torch.inference_mode()
    def __call__(self, logits: Tensor, needs: Needs) -> None:
        """One token a row from logits [B, V], which stay; `needs` holds at least the rows' own.

        A row in which every token is banned gets token 0.
        """
        scores = self._scores(logits, needs)
        best, token = scores.max(-1, keepdim=True)  # NaN, if there is one
        if needs.sampling:
            certain = (self._temperature == 0) | (best == -torch.inf)
            weights = self._weights(scores, best, needs)
            token = torch.where(certain, token, draw(weights, uniform(self._key, self.index)))
        self._record(logits, best, token, needs)

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
            too_early = (self.index < self._min_new)[:, None]
            scores = scores.masked_fill(self._ends & too_early, -torch.inf)
        return scores

    def _weights(self, scores: Tensor, best: Tensor, needs: Needs) -> Tensor:
        """Probabilities in vocabulary order, but for a factor: 0 is a token never drawn.

        They are whole numbers whose sums float64 holds exactly, in whatever order a device adds
        them: a draw depends on no rounding, and so on no neighbour and no batch size. At 50304
        tokens a weight is right to 2^-38 of the likeliest token's.
        """
        scale = 2.0 ** (53 - self._shape[1].bit_length())
        # At temperature 0 the best token is taken anyway: this only keeps NaN out.
        exponents = (scores.double() - best) / self._temperature.clamp(min=1e-300)
        weights = (exponents.exp() * scale).round()
        if needs.filters:
            order = scores.argsort(stable=True, dim=-1, descending=True)
            ordered = weights.gather(-1, order)
            reached = ordered.cumsum(-1)
            # Before a token past the k likeliest all of their weight is reached: it goes, too.
            enough = self._top_p * reached.gather(-1, self._last_rank[:, None])
            ordered = ordered.where(reached - ordered < enough, 0)
            weights = weights.scatter(-1, order, ordered)
            weights = weights.where(weights >= self._min_p * scale, 0)
        return weights

    def _record(self, logits: Tensor, best: Tensor, token: Tensor, needs: Needs) -> None:
        alive = (self.pending >= 0) & (self.index < self._max_new)
        goes_on = alive & ~self._ends.gather(-1, token)[:, 0]
        told = torch.where(best < torch.inf, token, NO_TOKEN)[:, 0]
        self.tokens.copy_(torch.where(alive, told, -1))
        self.pending.copy_(torch.where(goes_on, told, -1))
        self.index += alive
        if needs.penalties:
            self._counts.scatter_add_(-1, token, alive[:, None].int())
        if needs.logprobs is not None:
            log_total = logits.logsumexp(-1, keepdim=True)
            likeliest = logits.topk(needs.logprobs)
            self.logprob.copy_((logits.gather(-1, token) - log_total)[:, 0])
            self.top_logprobs[:, : needs.logprobs] = likeliest.values - log_total
            self.top_tokens[:, : needs.logprobs] = likeliest.indices

    def _new(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def _mark(mask: Tensor, tokens: Sequence[int]) -> None:
    """Makes a mask over the vocabulary true at these tokens alone."""
    mask.zero_().index_fill_(0, on_device(tokens, mask.device), True)


def on_device(
    values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers on a device, without waiting for what it is busy with."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return tensor.to(device, non_blocking=True)
