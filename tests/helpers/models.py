"""Small models for the tests."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from measure import error
from torch import Tensor, nn

from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.saved_state import SavedState
from xlstm7b.tokenizer import ByteTokenizer

SMALL = ModelConfig(64, 2, 2, vocab_size=97)
Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def open_gates(module: Module, std: float = 0.5) -> Module:
    """Gates depend on their input.

    The training initialisation sets the gates' weights to 0. With it, a test would not notice an
    error in how the gates depend on the input.
    """
    for name, parameter in module.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=std)
    return module


@torch.no_grad()
def random_model(
    config: ModelConfig = SMALL, dtype: torch.dtype = torch.float64, *, gate_std: float = 0.5
) -> XLSTM:
    """A model with the training initialisation, but with random gates and norms."""
    model = XLSTM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter.normal_(std=gate_std)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def spread_model(
    dtype: torch.dtype = torch.float32,
    *,
    gate_std: float = 0.1,
    spread: float = 15,
    **changes: object,
) -> XLSTM:
    """A model whose logits are far apart, for engines: no near ties between tokens.

    The end of text is possible, not likely. It is the same model each time.
    """
    torch.manual_seed(0)
    fields = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}
    model = open_gates(XLSTM(ModelConfig(**{**fields, **changes})).to(dtype), gate_std)
    model.lm_head.weight *= spread
    model.lm_head.weight[model.config.eos_token_id] = 0
    return model


@torch.no_grad()
def spelling_model(letters: str) -> XLSTM:
    """A byte-level model that writes these letters; every other token has the logit 0."""
    torch.manual_seed(0)
    model = open_gates(XLSTM(ModelConfig(128, 2, 2, vocab_size=320)))
    ids = torch.tensor(ByteTokenizer().encode(letters))
    rows = 20 * model.lm_head.weight[ids]
    model.lm_head.weight.zero_()
    model.lm_head.weight[ids] = rows
    return model


@torch.no_grad()
def bigram_model(followers: Mapping[str, str]) -> XLSTM:
    """A byte-level model that writes, after a letter, the first follower that it may write.

    The follower "\\0" is the end of text. After other letters, every token is as likely.
    """
    model = XLSTM(ModelConfig(128, 1, 2, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "out_proj" in name or "proj_down" in name or "lm_head" in name or "embeddings" in name:
            parameter.zero_()  # so that only the last letter counts
    embeddings, head = model.backbone.embeddings.weight, model.lm_head.weight
    embeddings[:, -1] = 1
    for number, (letter, after) in enumerate(followers.items()):
        (token,) = ByteTokenizer().encode(letter)
        embeddings[token] = torch.eye(128)[number]
        for follower, logit in zip(after, (50, 20, 10, 5), strict=False):
            target = 0 if follower == "\0" else ByteTokenizer().encode(follower)[0]
            head[target, number] += logit / 128**0.5
    return model


def random_tokens(batch: int, length: int, config: ModelConfig = SMALL) -> Tensor:
    """Token ids [batch, length]."""
    return torch.randint(0, config.vocab_size, (batch, length))


State = MLSTMState | ModelState | SavedState


def tensors(state: State) -> list[Tensor]:
    """Everything that a state holds: of a layer, of a model, or with logits."""
    if isinstance(state, SavedState):
        return [*tensors(state.model_state), state.logits]
    if isinstance(state, ModelState):
        return [*(part for block in state.blocks for part in block), state.tokens_seen]
    return list(state)


def assert_states_match(got: State, want: State, tolerance: float) -> None:
    """Each tensor is within `tolerance` of the wanted one, relative to its norm; 0 means equal."""
    if isinstance(want, SavedState) and not tolerance:
        assert got.config == want.config
    for part, want_part in zip(tensors(got), tensors(want), strict=True):
        if tolerance and want_part.is_floating_point():
            assert error(part, want_part) <= tolerance
        else:
            assert (part.dtype, part.device) == (want_part.dtype, want_part.device)
            assert torch.equal(part, want_part)


@torch.no_grad()
def assert_state_after(
    saved: SavedState, model: XLSTM, tokens: Sequence[int], tolerance: float = 1e-11
) -> None:
    """Tokens seen, logits and state are those of one pass over all tokens."""
    logits, state = model(torch.tensor([[*tokens]]), logits="last")
    assert_states_match(saved, SavedState(model.config, state, logits), tolerance)
