"""Parameter groups by name, and the gradient's norm against brute force, on 1 and 2 processes."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from train_processes import in_processes, norm_is_that_of_whole_gradients

from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.train.optimizer import (
    LocalAdamW,
    build_optimizer,
    clipped_step,
    gradient_norm,
    is_decayed,
    parameter_groups,
    set_learning_rate,
)
from xlstm7b.train.processes import process_group
from xlstm7b.train.recipe import Optimizer

TINY = ModelConfig(embedding_dim=16, num_blocks=2, num_heads=2, vocab_size=40)


def test_parameter_groups_of_the_160m() -> None:
    with torch.device("meta"):
        model = XLSTM(ModelConfig.named("160m"))
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    # A block: 10 matrices; 3 norms and 2 biases. Around the blocks: the head; embedding and norm.
    assert (len(decayed["params"]), len(rest["params"])) == (12 * 10 + 1, 12 * 5 + 2)
    # A block's matrices: q, k 384 × 768, v, õ, out 768 × 768, ĩ, f̃ 4 × 768, three of 2048 × 768.
    matrices = 2 * 384 * 768 + 3 * 768 * 768 + 2 * 4 * 768 + 3 * 2048 * 768
    assert sum(p.numel() for p in decayed["params"]) == 12 * matrices + 50304 * 768 == 123_641_856
    vectors = 3 * 768 + 2 * 4
    assert sum(p.numel() for p in rest["params"]) == 12 * vectors + 768 + 50304 * 768 == 38_661_984
    assert 123_641_856 + 38_661_984 == 162_303_840
    names = {
        re.sub(r"backbone\.blocks\.\d+\.", "", n)
        for n, p in model.named_parameters()
        if is_decayed(n, p)
    }
    assert names == {
        "lm_head.weight",
        *(f"mlstm_layer.{part}.weight" for part in ("q", "k", "v", "out_proj")),
        *(f"mlstm_layer.{gate}gate_preact.weight" for gate in "ifo"),
        *(f"ffn.{part}.weight" for part in ("proj_up_gate", "proj_up", "proj_down")),
    }


def test_frozen_parameters_are_left_out_and_wrapped_names_are_known() -> None:
    model = XLSTM(TINY)
    model.lm_head.weight.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == 2 * 15 + 2
    wrapped = "_orig_mod.backbone.embeddings.weight"
    assert not is_decayed(wrapped, model.backbone.embeddings.weight)


def test_build_optimizer_is_fused_adamw_with_float32_states() -> None:
    model = XLSTM(TINY)
    optimizer = build_optimizer(model, Optimizer())
    assert optimizer.defaults["fused"] is True
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (5e-4, (0.99, 0.95), 1e-8)
        assert group["weight_decay"] == decay
    logprobs, _ = model.token_logprobs(torch.arange(8)[None], torch.arange(8)[None])
    logprobs.sum().backward()
    set_learning_rate(optimizer, 0.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert all(state.dtype == torch.float32 for state in states)
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()
    assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


def test_what_does_not_decay_stays_where_its_gradient_is_zero() -> None:
    model = XLSTM(TINY)
    optimizer = build_optimizer(model, Optimizer(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        scale = 1 - 0.5 * 0.1 if is_decayed(name, parameter) else 1.0
        torch.testing.assert_close(parameter, before[name] * scale)


def test_on_the_meta_device_it_is_built_unfused() -> None:
    with torch.device("meta"):
        model = XLSTM(TINY)
    assert build_optimizer(model, Optimizer()).defaults["fused"] is False


def gradients(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    return parameters


def test_norm_and_clipping_are_the_brute_force_ones() -> None:
    parameters = gradients((3, 5), (7,), (2, 2, 2))
    parameters.append(nn.Parameter(torch.zeros(3)))  # no gradient
    whole = torch.cat([p.grad.flatten() for p in parameters[:3] if p.grad is not None])
    norm = gradient_norm(parameters)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, whole.norm())
    torch.testing.assert_close(
        norm, torch.nn.utils.get_total_norm([p.grad for p in parameters[:3]])
    )


@pytest.mark.parametrize("clip", [100.0, float("inf"), 0.5])
def test_a_clipped_step_is_adamw_on_clipped_gradients(clip: float) -> None:
    parameters, others = gradients((3, 5), (7,)), gradients((3, 5), (7,))
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    plain = torch.optim.AdamW(others, lr=0.1)
    for is_bad in (False, True, False):
        for parameter, other in zip(parameters, others, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            other.grad = parameter.grad.clone()
        norm = gradient_norm(parameters)
        if is_bad:
            parameters[0].grad[1] = torch.nan
        else:
            torch.nn.utils.clip_grad_norm_(others, clip)
            plain.step()
        clipped_step(optimizer, clip, norm, torch.tensor(is_bad))
        for parameter, other in zip(parameters, others, strict=True):
            torch.testing.assert_close(parameter, other)


def test_local_adamw_is_adamw_over_dtensors_bit_for_bit() -> None:
    """With clipping, a step without effect, and a parameter whose first gradient comes late."""
    with process_group("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        whole = [torch.randn(4, 3), torch.randn(5), torch.randn(2, 2)]
        options = {"lr": 0.1, "weight_decay": 0.1, "fused": True}
        optimizers = []
        for cls in (LocalAdamW, torch.optim.AdamW):
            parts = [nn.Parameter(distribute_tensor(x.clone(), mesh, [Shard(0)])) for x in whole]
            optimizers.append(
                (parts, cls([{"params": parts[:2]}, {"params": parts[2:]}], **options))
            )
        for step in range(5):
            gradients = [torch.randn(x.shape) for x in whole]
            for parameters, optimizer in optimizers:
                used = zip(parameters, gradients, strict=True)
                for parameter, gradient in list(used)[: 2 if step < 2 else 3]:
                    parameter.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
                clipped_step(optimizer, 0.5, gradient_norm(parameters), torch.tensor(step == 3))
                optimizer.zero_grad()
            (ours, local), (theirs, plain) = optimizers
            for got, want in zip(ours, theirs, strict=True):
                assert torch.equal(got.to_local(), want.to_local())
                state, exact = local.state.get(got, {}), plain.state.get(want, {})
                assert state.keys() == exact.keys()
                for name, value in exact.items():
                    assert type(state[name]) is type(value)
                    assert torch.equal(state[name], value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_number_shows_in_the_norm(bad: float) -> None:
    parameters = gradients((3, 5), (7,))
    assert parameters[1].grad is not None
    parameters[1].grad[3] = bad
    assert not gradient_norm(parameters).isfinite()


def test_bfloat16_gradients_are_summed_in_float32_and_none_at_all_are_zero() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    expected = parameter.grad.float().norm()
    torch.testing.assert_close(gradient_norm([parameter]), expected)
    assert gradient_norm([nn.Parameter(torch.zeros(2))]) == 0


def test_norm_over_two_processes() -> None:
    """Sharded evenly and not, by rows and columns, replicated, partial, plain, on two meshes."""
    in_processes(2, norm_is_that_of_whole_gradients)
