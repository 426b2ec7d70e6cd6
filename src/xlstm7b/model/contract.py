"""check_model: what a model of registered classes must do for training and generation to be right.

Run it after you have written a block, a layer, a norm or a gate (docs/extending.md).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.model.lm import XLSTM
from xlstm7b.model.model_state import ModelState
from xlstm7b.registry import find

_LENGTH = 12  # tokens of the sequences that are compared
_ROUNDING = 1e-5  # relative; float64, but a layer may compute in float32


def check_model(config: ModelConfig) -> None:
    """Builds a model on the CPU and raises a `ValueError` that names the first rule it breaks.

    Use small sizes. The names of the classes are what is checked.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = XLSTM(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # at first, gates do not depend on the input
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        tokens = torch.randint(0, config.vocab_size, (2, _LENGTH))
    for rule, holds in _rules(model, tokens):
        if not holds:
            chosen = ", ".join(
                f"{name} = {value!r}" for name, value in config.differences().items()
            )
            raise ValueError(f"a model with {chosen} breaks a rule: {rule}")


def _rules(model: XLSTM, tokens: Tensor) -> Iterator[tuple[str, bool]]:
    """Rules in words, and whether each holds. A rule relies on those before it."""
    config, cut = model.config, _LENGTH // 3
    block = find("block", config.block)
    for batch in (2, 3):
        yield (
            "zero_state returns a NamedTuple of floating-point tensors with the batch first",
            _is_block_state(block.zero_state(config, batch, dtype=torch.float64), batch),
        )
    fields = block.zero_state(config, 1, dtype=torch.float64)._fields
    yield "no part of a state is called logits", "logits" not in fields
    with torch.no_grad():
        want, last = model(tokens)
        zeros = ModelState.zeros(config, 2, dtype=torch.float64)
        shapes = [[part.shape for part in block] for block in zeros.blocks]
        yield (
            "the state that forward returns has the shapes of zero_state",
            [[part.shape for part in block] for block in last.blocks] == shapes,
        )
        yield "no state and zero_state give the same", _same(model(tokens, zeros), (want, last))
        first, state = model(tokens[:, :cut])
        kept = state.clone()
        rest, after = model(tokens[:, cut:], state)
        joined = torch.cat([first, rest], 1), after
        yield "reading in two parts gives the same as at once", _same(joined, (want, last))
        yield "forward does not change the state that it is given", _same((state,), (kept,), 0)
        for t in range(cut, _LENGTH):
            logits, state = model(tokens[:, t : t + 1], state)
            yield "single tokens give the same as a sequence", _same((logits,), (want[:, t, None],))
        yield "single tokens give the same state as a sequence", _same((state,), (last,))
        lengths = torch.tensor([cut, 0])
        logits, padded = model(tokens, kept, lengths=lengths)
        alone, short = model(tokens[:1, :cut], kept.rows(0, 1))
        yield "padding changes no logits before it", _same((logits[:1, :cut],), (alone,))
        yield "padding does not change the state", _same((padded.rows(0, 1),), (short,))
        idle = padded.rows(1, 2), kept.rows(1, 2)
        yield "a row of length 0 keeps its state", _same(idle[:1], idle[1:], 0)
        resets = torch.zeros_like(tokens, dtype=torch.bool)
        resets[:, cut] = True
        fresh = model(tokens[:, cut:])
        logits, after = model(tokens, kept, resets=resets)
        after = after._replace(tokens_seen=fresh[1].tokens_seen)
        yield "a reset gives the same as a new text", _same((logits[:, cut:], after), fresh)
        yield "a row does not depend on the others", _same((model(tokens[1:])[0],), (want[1:],))
    model.loss(tokens, tokens, torch.ones(tokens.shape, dtype=torch.float64)).backward()
    for name, parameter in model.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.isfinite().all())
        yield f"{name} has a finite gradient", has_gradient
    accounting.forward_flops(config, _LENGTH)  # raises an error of its own


def _is_block_state(state: Any, batch: int) -> bool:
    return hasattr(state, "_fields") and all(
        isinstance(part, Tensor) and part.is_floating_point() and part.shape[:1] == (batch,)
        for part in state
    )


def _same(
    got: tuple[Tensor | ModelState, ...],
    want: tuple[Tensor | ModelState, ...],
    tolerance: float = _ROUNDING,
) -> bool:
    pairs = zip(_tensors(got), _tensors(want), strict=True)
    return all(
        bool((one.double() - two).norm() <= tolerance * two.double().norm()) for one, two in pairs
    )


def _tensors(values: tuple[Tensor | ModelState, ...]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, ModelState):
            found += [part for block in value.blocks for part in block]
            found.append(value.tokens_seen)
        else:
            found.append(value)
    return found
