"""`plain.py` on a GPU: one row and few rows by kernels of our own, many by the stock product."""

import torch
from torch import Tensor

from xlstm7b.generate.triton import pointwise
from xlstm7b.generate.triton.launch import overlap
from xlstm7b.generate.triton.pointwise import head_norm
from xlstm7b.generate.triton.row import multiply_row
from xlstm7b.generate.triton.rows import MOST_ROWS, multiply_rows
from xlstm7b.mlstm import MLSTMState
from xlstm7b.mlstm.triton.launch import step_tile
from xlstm7b.mlstm.triton.step import launch_step
from xlstm7b.model.layers import product_float32

__all__ = ["add_product", "head", "head_norm", "project", "step_cell", "swiglu"]


def project(
    x: Tensor, norm: Tensor, eps: float, W: Tensor, W_gates: Tensor, bias: Tensor, cap: float,
    live: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gates = W_gates, bias
    if len(x) == 1:
        return multiply_row(x, W, norm=norm, eps=eps, gates=gates, live=live, cap=cap)
    x = pointwise.rms_norm(x, norm, eps)
    if len(x) <= MOST_ROWS:
        return multiply_rows(x, W, gates=gates, live=live, cap=cap)
    products = product_float32(x, W_gates)
    pointwise.cap_gates(products, bias, cap, live)
    return x @ W.mT, products


def step_cell(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, gate: Tensor,
    norm: Tensor, norm_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    # The launch in front is the projection: the state was written before it.
    tile = step_tile(q.shape[0] * q.shape[1], q.shape[-1], v.shape[-1])
    overlaps = overlap(q.device)["OVERLAP"]
    return launch_step(q, k, v, i, f, *state, gate, norm, norm_eps, eps, tile, overlaps)


def add_product(x: Tensor, y: Tensor, W: Tensor) -> None:
    if len(x) == 1:
        multiply_row(y, W, residual=x)
    elif len(x) <= 16:  # from there on the stock product is the faster one
        multiply_rows(y, W, residual=x)
    else:
        x.addmm_(y, W.mT)


def swiglu(x: Tensor, norm: Tensor, eps: float, W: Tensor) -> Tensor:
    if len(x) == 1:
        return multiply_row(x, W, norm=norm, eps=eps, swiglu=True)[0]
    if len(x) <= MOST_ROWS:
        return multiply_rows(pointwise.rms_norm(x, norm, eps), W, swiglu=True)[0]
    # Nothing but the wide product is held while it is halved: this is where prefill's memory peaks.
    return pointwise.swiglu(pointwise.rms_norm(x, norm, eps) @ W.mT)


def head(x: Tensor, norm: Tensor, eps: float, W: Tensor, cap: float) -> Tensor:
    wide = torch.float32
    if len(x) == 1:
        return multiply_row(x, W, norm=norm, eps=eps, cap=cap, out_dtype=wide)[0]
    x = pointwise.rms_norm(x, norm, eps)
    if len(x) <= MOST_ROWS:
        return multiply_rows(x, W, cap=cap, out_dtype=wide)[0]
    return product_float32(x, W).div_(cap).tanh_().mul_(cap)
