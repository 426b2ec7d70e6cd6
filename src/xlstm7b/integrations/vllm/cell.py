"""The mLSTM cell for one batch of vLLM's: prompts and single tokens of many requests, in one row.

vLLM hands over the tokens of all requests one after another: first the requests that get one token
each (decodes), then parts of prompts (prefills). The state of a request is in one slot of the
cache, C, n and m in one page of memory.

This file does not import vLLM, so that its GPU path can be tested without it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xlstm7b.generate.kernels.choice import operations_for
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step


class CellInputs(NamedTuple):
    """What the projections of one layer give for the tokens of a batch."""

    q: Tensor  # [tokens, NH, d_qk]
    k: Tensor
    v: Tensor  # [tokens, NH, d_hv]
    gate: Tensor  # õ, [tokens, NH · d_hv]
    i: Tensor  # ĩ and f̃ [tokens, NH], float32, soft-capped
    f: Tensor


class Prefill(NamedTuple):
    """Prompt parts of similar length that are computed as one padded batch [B, T].

    A batch without padding has None for `padded` and `places`.
    """

    tokens: Tensor | slice  # rows of the inputs: [B, T], or a slice if B is 1
    padded: Tensor | None  # bool [B, T]
    rows: Tensor | slice  # rows of the output, one for each token that is not padding
    places: Tensor | None  # where these tokens are in the flat [B · T]
    slots: Tensor  # [B]
    is_new: Tensor  # bool [B]: the request has no state yet


class Batch(NamedTuple):
    """One step of the engine. It is the same for all layers."""

    decode_slots: Tensor | None  # [D]: the first D tokens are decodes
    prefills: list[Prefill]


def group_prefills(starts: list[int], slots: Tensor, is_new: Tensor) -> list[Prefill]:
    """Batches of the prompt parts starts[r] … starts[r + 1] − 1, with their slots and `is_new` [R].

    Lengths between two powers of two make one batch. So at most half of a batch is padding, and
    the number of batches does not grow with the number of requests.
    """
    device = slots.device
    groups: dict[int, list[int]] = {}
    for request in range(len(starts) - 1):
        length = starts[request + 1] - starts[request]
        groups.setdefault((length - 1).bit_length(), []).append(request)
    prefills = []
    for requests in groups.values():
        chosen = _to(torch.tensor(requests), device)
        states = slots.index_select(0, chosen).long(), is_new.index_select(0, chosen)
        if len(requests) == 1:
            part = slice(starts[requests[0]], starts[requests[0] + 1])
            prefills.append(Prefill(part, None, part, None, *states))
            continue
        first = torch.tensor([starts[request] for request in requests])
        lengths = torch.tensor([starts[request + 1] for request in requests]) - first
        position = torch.arange(int(lengths.max()))
        padded = position >= lengths[:, None]
        tokens = first[:, None] + position.where(~padded, 0)
        is_token = ~padded.flatten()
        if is_token.all():
            tokens = _to(tokens, device)
            prefills.append(Prefill(tokens, None, tokens.flatten(), None, *states))
            continue
        rows, places = tokens.flatten()[is_token], is_token.nonzero().squeeze(1)
        tokens, padded, rows, places = (_to(x, device) for x in (tokens, padded, rows, places))
        prefills.append(Prefill(tokens, padded, rows, places, *states))
    return prefills


def run_cell(
    inputs: CellInputs,
    batch: Batch,
    states: MLSTMState,
    norm_weight: Tensor,
    out: Tensor,
    *,
    norm_eps: float,
    eps: float,
) -> None:
    """Writes σ(õ) ⊙ Norm(h̃) of each token to `out` [tokens, NH · d_hv]; updates the slots' states.

    Rows of `out` that no request has are left as they are.
    """
    decodes = 0
    if batch.decode_slots is not None:
        decodes = len(batch.decode_slots)
        q, k, v, gate, i, f = (part[:decodes] for part in inputs)
        h, _ = mlstm_step(
            q, k, v, i, f, states, gate=gate.unflatten(-1, v.shape[1:]), norm_weight=norm_weight,
            norm_eps=norm_eps, eps=eps, inplace=True, slots=batch.decode_slots,
        )  # fmt: skip
        out[:decodes] = h.flatten(1)
    operations = operations_for(inputs.v.device)
    for prefill in batch.prefills:
        before = operations.gather_states(states, prefill.slots)
        for part in before:
            part.masked_fill_(prefill.is_new.view(-1, *[1] * (part.dim() - 1)), 0)
        normed, after = run_prefill(
            inputs, prefill, before, norm_weight, norm_eps=norm_eps, eps=eps
        )
        operations.scatter_states(after, states, prefill.slots)
        if prefill.places is not None:
            normed = normed.index_select(0, prefill.places)
        out[prefill.rows] = normed


def run_prefill(
    inputs: CellInputs,
    prefill: Prefill,
    before: MLSTMState | None,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    eps: float,
) -> tuple[Tensor, MLSTMState]:
    """σ(õ) ⊙ Norm(h̃) of all positions of the batch, [B · T, NH · d_hv], and the states after it."""
    q, k, v, gate, i, f = (part[prefill.tokens] for part in inputs)
    if isinstance(prefill.tokens, slice):
        q, k, v, i, f = (part[None] for part in (q, k, v, i, f))
    if prefill.padded is not None:
        i = i.masked_fill(prefill.padded[..., None], -torch.inf)
        f = f.masked_fill(prefill.padded[..., None], torch.inf)
    h, after = mlstm_sequence(q, k, v, i, f, state=before, eps=eps)
    h = h.contiguous().flatten(0, 1)
    normed: Tensor = operations_for(v.device).head_norm(
        h, norm_weight, norm_eps, gate.reshape(len(h), -1)
    )
    return normed, after


def whole_batch(tokens: int, device: torch.device) -> Prefill:
    """All tokens as one new prompt: what vLLM's memory profile runs, before there is a cache."""
    everything = slice(0, tokens)
    none = torch.zeros(1, dtype=torch.long, device=device)
    return Prefill(everything, None, everything, None, none, none == 0)


def _to(x: Tensor, device: torch.device) -> Tensor:
    """A copy to the device that the host does not wait for."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
