"""The order in which GPU kernels read quantised weights (layout "gpu").

Codes are in 16-bit words, four (int4) or two (int8, fp8) in each. A row is cut into blocks of
`words` words. Code j of word c is column j · words + c of the block, the lowest bits first: so the
codes at one position of all words are neighbouring columns, and the kernels multiply them by
neighbouring parts of the input. For int4, `words` is the group size: each position is one group.
The last block is filled up with zeros.

Scales are [groups, N], so that those of neighbouring rows are neighbours in memory.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.gpus import has_kernels
from xlstm7b.kernel_verdicts import is_wrong
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import TILE, QuantizedWeight

_WORDS = 64  # in a block of int8 or fp8


class Fp8Rows(NamedTuple):
    """Rows that were rounded to fp8 for the product with one matrix."""

    codes: Tensor  # [R, K] in the order of the matrix's columns, filled up with zeros
    scale: Tensor  # [R, 1]

    @classmethod
    def empty(cls, rows: int, W: QuantizedWeight) -> Self:
        codes = torch.empty(rows, 2 * W.data.shape[1], dtype=torch.float8_e4m3fn, device=W.device)
        return cls(codes, torch.empty(rows, 1, dtype=torch.float32, device=W.device))


def words_in_block(scheme: Scheme) -> int:
    return scheme.group_size or _WORDS


def codes_in_word(scheme: Scheme) -> int:
    return 4 if scheme.name == "int4" else 2


def prepare(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight in the order of the GPU kernels."""
    assert weight.layout == "stored"
    codes, words = codes_in_word(weight.scheme), words_in_block(weight.scheme)
    columns = weight.shape[1]
    padding = -columns % (codes * words)
    blocks = (columns + padding) // (codes * words)
    # Some rows at a time: the codes of an int4 matrix take twice its memory, one in each byte.
    data = torch.empty(len(weight), blocks * words, dtype=torch.int16, device=weight.device)
    rows = max(1, TILE // columns)
    for part, target in zip(weight.data.split(rows), data.split(rows), strict=True):
        if weight.scheme.name == "int4":
            pairs = part.contiguous().view(torch.uint8)
            single = F.pad(
                torch.stack((pairs & 15, pairs >> 4), -1).flatten(1), (0, padding), value=8
            )
            single = single.unflatten(1, (blocks, 2, 2, words))
            halves = single[:, :, :, 0] | (single[:, :, :, 1] << 4)  # codes 0 and 1, codes 2 and 3
        else:
            single = F.pad(part.contiguous().view(torch.uint8), (0, padding))
            halves = single.unflatten(1, (blocks, 2, words))
        target.copy_(halves.mT.contiguous().view(torch.int16).flatten(1))
    groups = blocks * codes if weight.scheme.name == "int4" else 1
    scale = F.pad(weight.scale.mT, (0, 0, 0, groups - weight.scale.shape[1])).contiguous()
    if weight.scheme.name == "fp8":
        scale = scale.float()  # as PyTorch's fp8 products want it
    return replace(weight, data=data, scale=scale, layout="gpu")


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix as floats."""
    scheme, device = weight.scheme.name, weight.device
    if weight.is_cuda and has_kernels(device) and not is_wrong(scheme, device):
        from xlstm7b.quantize import kernels

        return kernels.dequantize(weight, dtype)
    assert weight.layout == "gpu"
    wide = torch.promote_types(dtype, torch.float32)
    halves = weight.data.view(torch.uint8).unflatten(1, (-1, words_in_block(weight.scheme), 2)).mT
    if weight.scheme.name == "int4":
        values = torch.stack((halves & 15, halves >> 4), -2).flatten(1).to(wide) - 8
    else:
        kind = torch.int8 if weight.scheme.name == "int8" else torch.float8_e4m3fn
        values = halves.contiguous().view(kind).flatten(1).to(wide)
    groups = values.unflatten(1, (len(weight.scale), -1)) * weight.scale.mT.to(wide)[..., None]
    floats: Tensor = groups.flatten(1)[:, : weight.shape[1]].to(dtype)
    return floats
