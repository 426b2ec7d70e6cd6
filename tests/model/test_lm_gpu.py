"""The model on a GPU, with the Triton kernels, against float32 on the CPU."""

import copy

import pytest
import torch
from measure import error

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> XLSTM:
    torch.manual_seed(0)
    return XLSTM(ModelConfig(512, 2, 4, vocab_size=1000))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@torch.no_grad()
def test_logits_and_states_match_the_cpu(model, dtype, largest):
    tokens, lengths = torch.randint(0, 1000, (3, 300)), torch.tensor([300, 0, 77])
    want, want_state = model(tokens, lengths=lengths)
    copy = XLSTM(model.config).to("cuda", dtype)
    copy.load_state_dict(model.state_dict())
    got, state = copy(tokens.cuda(), lengths=lengths.cuda())
    inside = torch.arange(300) < lengths[:, None]
    assert error(got.cpu()[inside], want[inside]) < largest
    for block, want_block in zip(state.blocks, want_state.blocks, strict=True):
        assert block.C.dtype == torch.float32
        assert error(block.C.cpu(), want_block.C) < largest
    # One token at a time from the state: the fused step.
    for t in range(3):
        want, want_state = model(tokens[:, t : t + 1], want_state, logits="last")
        got, state = copy(tokens[:, t : t + 1].cuda(), state, logits="last")
        assert error(got.cpu(), want) < largest


def test_gradients_match_the_cpu(model):
    tokens = torch.randint(0, 1000, (2, 300))
    copy = XLSTM(model.config).cuda()
    copy.load_state_dict(model.state_dict())
    model.token_logprobs(tokens[:, :-1], tokens[:, 1:])[0].sum().backward()
    copy.token_logprobs(tokens[:, :-1].cuda(), tokens[:, 1:].cuda())[0].sum().backward()
    for (name, parameter), want in zip(copy.named_parameters(), model.parameters(), strict=True):
        assert error(parameter.grad.cpu(), want.grad) < 1e-4, name


def test_autocast_computes_what_a_bfloat16_model_computes(model):
    """Also against float32, and with compiled blocks as the trainer has them."""
    tokens, targets = torch.randint(0, 1000, (2, 2, 300), device="cuda")
    weights = torch.ones(2, 300, device="cuda")
    wide = XLSTM(model.config).cuda()
    wide.load_state_dict(model.state_dict())
    narrow = copy.deepcopy(wide).bfloat16()

    def run(model, autocast):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits, state = model(tokens)
            loss = model.loss(tokens, targets, weights)
        assert logits.dtype == loss.dtype == state.blocks[0].C.dtype == torch.float32
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        return logits.detach(), loss.detach(), flat

    exact, rounded, got = run(wide, False), run(narrow, False), run(wide, True)
    for block in wide.backbone.blocks:
        block.compile(fullgraph=True, dynamic=False)
    for ours, near in ((got, 1e-2), (run(wide, True), 6e-2)):
        for part, same, want in zip(ours, rounded, exact, strict=True):
            assert error(part, same) < near
            assert error(part, want) < 6e-2
