"""`python -m xlstm7b.bench.kernel_peers PEER WORK SIZE BATCH LENGTH`: times another library.

Prints milliseconds. Run by `bench/kernels.py` in a process of its own, since a peer may take the
compiler down. What is compared: `mlstm_kernels` does the same work; FLA's simple_gla is the same
recurrence without input gate, normaliser and stabiliser; SDPA is causal attention, equally wide.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from xlstm7b.bench.kernels import STATES_IN_TURN, inputs, median_milliseconds, step_milliseconds
from xlstm7b.config import ModelConfig

SDPA_HEAD = 128


def peer_call(peer: str, batch: int, length: int, config: ModelConfig) -> tuple[Any, list[Any]]:
    """The peer's forward call and its differentiable inputs."""
    q, k, v, i, f = inputs(batch, length, config)
    if peer == "mlstm_kernels":
        from mlstm_kernels.torch.chunkwise import mlstm_chunkwise__limit_chunk

        parts = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v, i, f)]
        return (
            lambda: mlstm_chunkwise__limit_chunk(
                *parts, chunk_size=64, autocast_kernel_dtype=torch.bfloat16
            )
        ), parts
    if peer == "fla":
        from fla.ops.simple_gla import chunk_simple_gla

        decay = F.logsigmoid(f).detach().requires_grad_()
        return (lambda: chunk_simple_gla(q, k, v, decay)[0]), [q, k, v, decay]
    shape = batch, config.v_dim // SDPA_HEAD, length, SDPA_HEAD
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    return (lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)), [q, k, v]


def peer_step(batch: int, config: ModelConfig) -> Callable[[int], object]:
    """The step of mlstm_kernels, without norm and output gate, which it does not have."""
    from mlstm_kernels.torch.recurrent.triton_step import mlstm_recurrent_step__triton_fw

    q, k, v, i, f = (part.detach()[:, 0] for part in inputs(batch, 1, config))
    shape = batch, config.num_heads, config.d_qk, config.d_hv
    states = [
        (
            torch.zeros(shape, device="cuda"),
            torch.zeros(shape[:3], device="cuda"),
            torch.zeros(*shape[:2], 1, device="cuda"),
        )
        for _ in range(STATES_IN_TURN)
    ]

    def step(index: int) -> object:
        C, n, m = states[index]
        return mlstm_recurrent_step__triton_fw(
            C, n, m, q, k, v, i[..., None], f[..., None], C, n, m
        )

    return step


def main() -> None:
    peer, work, size, batch, length = sys.argv[1:]
    config = ModelConfig.named(size)
    if work == "step":
        if peer != "mlstm_kernels":
            sys.exit(f"{peer} has no single step to compare")
        print(step_milliseconds(peer_step(int(batch), config)))
        return
    call, leaves = peer_call(peer, int(batch), int(length), config)
    if work == "forward":
        with torch.no_grad():
            print(median_milliseconds(call))
        return
    gradient = torch.randn_like(call())

    def both() -> object:
        return torch.autograd.grad(call(), leaves, gradient)

    print(median_milliseconds(both))


if __name__ == "__main__":
    main()
