"""Streams of tokens: those of a full recomputation, from one token a step, up to end of text."""

import pytest
import torch

from xlstm7b.config import ModelConfig
from xlstm7b.generate import sample, stream_tokens, with_first_token
from xlstm7b.model import XLSTM


def config(**changes) -> ModelConfig:
    fields = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 40}
    return ModelConfig(**{**fields, **changes})


def random_model() -> XLSTM:
    """float64, with gates that listen to their input: near ties are out of the question."""
    model = XLSTM(config(eos_token_id=39)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter.normal_(std=0.5)
        model.lm_head.weight *= 20
        model.lm_head.weight[39] = 0  # end of text: possible, not likely
    return model


def chain(following: dict[int, int], **changes) -> XLSTM:
    """A model whose next token is surely `following[token]`: embeddings straight to the head."""
    model = XLSTM(config(**changes))
    with torch.no_grad():
        for block in model.backbone.blocks:
            block.mlstm_layer.out_proj.weight.zero_()
            block.ffn.proj_down.weight.zero_()
        model.backbone.embeddings.weight.copy_(torch.eye(64)[:40])
        model.lm_head.weight.zero_()
        for token, successor in following.items():
            model.lm_head.weight[successor, token] = 100
    return model


@torch.no_grad()
def recomputed(model: XLSTM, prompt: list[int], steps: int, seed: int, **settings) -> list[int]:
    """Every token from the whole text before it, with no state."""
    generator = torch.Generator().manual_seed(seed)
    text = [0, *prompt]
    for _ in range(steps):
        logits, _ = model(torch.tensor([text]))
        token = int(sample(logits[:, -1], generator=generator, **settings))
        if token == model.config.eos_token_id:
            break
        text.append(token)
    return text[1 + len(prompt) :]


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 9},
                 {"temperature": 3.0, "top_p": 0.9}]
)  # fmt: skip
def test_stream_equals_recomputation(settings):
    model, prompt = random_model(), torch.randint(1, 39, (70,)).tolist()
    want = recomputed(model, prompt, 20, seed=3, **settings)
    assert len(set(want)) > 5
    assert [*stream_tokens(model, prompt, max_new_tokens=20, seed=3, **settings)] == want


def test_seeds():
    model = random_model()

    def text(seed: int | None) -> list[int]:
        return [*stream_tokens(model, [5], max_new_tokens=12, temperature=3.0, seed=seed)]

    assert text(7) == text(7) != text(8)
    assert text(2**64 - 1) == text(2**64 - 1)
    assert text(None) != text(None)


def test_stops_before_end_of_text():
    model = chain({5: 6, 6: 7, 7: 0})
    assert [*stream_tokens(model, [5], max_new_tokens=9, temperature=0)] == [6, 7]
    assert [*stream_tokens(model, [5], max_new_tokens=2, temperature=0)] == [6, 7]
    assert [*stream_tokens(model, [5], max_new_tokens=1, seed=0)] == [6]
    assert [*stream_tokens(model, [3, 7], max_new_tokens=9, seed=0)] == []


def test_end_of_text_is_the_configs_own():
    model = chain({5: 0, 0: 6, 6: 3}, eos_token_id=3)
    assert [*stream_tokens(model, [5], max_new_tokens=9, temperature=0)] == [0, 6]


def test_max_new_tokens_and_one_token_a_step():
    model = chain({5: 6, 6: 5})
    read = []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].tolist()))
    assert [*stream_tokens(model, [9, 6], max_new_tokens=5, seed=0)] == [5, 6, 5, 6, 5]
    assert read == [[[0, 9, 6]], [[5]], [[6]], [[5]], [[6]]]


def test_tokens_come_as_they_are_made_and_gradients_stay_on():
    model = chain({5: 6, 6: 5})
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(torch.is_inference_mode_enabled()))
    stream = stream_tokens(model, [5], max_new_tokens=100, seed=0)
    assert calls == []
    for count in (1, 2, 3):
        next(stream)
        assert calls == [True] * count
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_empty_prompt():
    model = chain({0: 8, 8: 9, 9: 0})
    assert [*stream_tokens(model, [], max_new_tokens=9, temperature=0)] == [8, 9]
    without = chain({0: 8}, force_bos_token_insert=False)
    with pytest.raises(ValueError, match=r"^the prompt is empty, and this model has no"):
        stream_tokens(without, [], max_new_tokens=9)


def test_first_token():
    assert with_first_token(config(), [5, 0]) == [0, 5, 0]
    assert with_first_token(config(), [0, 5]) == [0, 5]
    assert with_first_token(config(), (0,)) == [0]
    assert with_first_token(config(), []) == [0]
    assert with_first_token(config(bos_token_id=2), [0, 5]) == [2, 0, 5]
    bare = config(force_bos_token_insert=False)
    assert with_first_token(bare, [5, 0]) == [5, 0]
    assert with_first_token(bare, [0]) == [0]
    prompt = [5]
    assert with_first_token(bare, prompt) is not prompt


@pytest.mark.parametrize("token", [-1, 40, 50_000])
def test_ids_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"^token {token} is outside the vocabulary of 40$"):
        stream_tokens(chain({}), [5, token], max_new_tokens=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -0.1}, r"temperature must be 0 or a positive number, not -0\.1"),
        ({"top_k": -2}, r"top_k must be 0 \(all tokens\) or a positive number, not -2"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, not 0\.0"),
        ({"seed": -1}, r"seed must be between 0 and 2\^64 - 1, not -1"),
        ({"seed": 2**64}, rf"seed must be between 0 and 2\^64 - 1, not {2**64}"),
    ],
)
def test_bad_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        stream_tokens(chain({}), [5], **{"max_new_tokens": 1, **settings})
