"""Products with quantised weights by PyTorch's own CPU operators.

Which operator is used is a table, not a measurement, so that a machine always computes the same:

| weights | CPU | operator | rows of x |
|---|---|---|---|
| int8 | x86 with AVX2 | `_weight_int8pack_mm`, x and y in bfloat16 | up to 4, without VNNI 64 |
| int8 | x86 with VNNI | `_int_mm`, x as two int8 numbers: 16 bits | all others |
| int4 | x86 with AVX2 | `_weight_int4pack_mm_for_cpu`, x and y in bfloat16 | up to 64 |
| int4 | ARM | `_dyn_quant_matmul_4bit`, x as int8 | all |
| int8 beside int4 | ARM | the same operator, with an int8 code as two int4 codes | all |
| int8 | ARM | `_weight_int8pack_mm` in float32 | up to 8 |
| int8 | ARM | the product of float32 codes, then the scales | all others |
| fp8 | all | the product of bfloat16 codes, then the scales; x and y in bfloat16 | all |

In all other cases the weights are dequantised, some rows at a time, and multiplied as floats.
"""

import platform
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import TILE, QuantizedWeight, pack_int4

MAX_ROWS = 64  # above, dequantising is faster than operators that do not use a matrix unit
_FEW_ROWS = 4  # above, `_int_mm` is faster than `_weight_int8pack_mm`
_FEW_ROWS_ARM = 8  # above, products of floats are faster
_PACKED = 4096  # rows of an int8 matrix that are packed at a time
_STEPS = 254  # the low part of x counts in 1/254 of a step of the high part


def packed_schemes(weights: Iterable[QuantizedWeight]) -> set[str]:
    """The schemes of a model whose weights `prepare` puts in the order of a CPU operator.

    All weights of a scheme or none: those with one layout can be stacked.
    """
    weights = list(weights)
    schemes = {weight.scheme.name for weight in weights}
    packed = {
        name
        for name in schemes
        if all(_fits(weight) for weight in weights if weight.scheme.name == name)
    }
    return packed if "int4" in packed else packed - {"int8"}


def _fits(weight: QuantizedWeight) -> bool:
    """Whether the weight can be packed. int8 can on ARM, where `packed_schemes` has int4 too."""
    if weight.scheme.name == "fp8":
        return True
    if not torch.equal(weight.scale.bfloat16().to(weight.scale.dtype), weight.scale):
        return False  # written by another program; the operators would round the scales
    rows, columns = weight.shape
    if weight.scheme.name == "int4" and has_avx2():
        return rows % _x86_block() == 0
    # One group for all columns is another format to the operator, whose parts cannot be stacked.
    one_group = weight.scheme.group_size == columns
    return has_arm_int4() and rows % 16 == 0 and columns % 32 == 0 and not one_group


def prepare(weight: QuantizedWeight, schemes: Collection[str]) -> QuantizedWeight:
    """The weight in the order of this CPU's operator if its scheme is one of `schemes`."""
    scheme = weight.scheme.name
    if weight.device.type != "cpu" or weight.layout != "stored" or scheme not in schemes:
        return weight
    if scheme == "fp8":  # PyTorch reads fp8 slowly on CPUs; bfloat16 holds the codes
        return replace(weight, data=weight.data.bfloat16(), layout="bfloat16")
    if scheme == "int8":
        return _prepare_int8_arm(weight)
    rows, columns = weight.shape
    if has_avx2():
        pairs = weight.data.view(torch.uint8)
        wide = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).int()
        data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1)
        scale = weight.scale.bfloat16().mT
        with_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1)
        return replace(weight, data=data, scale=with_zeros, layout="x86")
    data = _pack_arm(weight.data, weight.scale, weight.scheme.group_size, rows, columns)
    none = weight.scale.new_empty(0, weight.scale.shape[1])  # they are in the packed data
    return replace(weight, data=data, scale=none, layout="arm")


def _prepare_int8_arm(weight: QuantizedWeight) -> QuantizedWeight:
    """int8 codes as two groups of int4 codes: code − 8 = 16 · high + low, both from −8 to 7.

    A row [W] becomes [high, low] with the scales [16 s, s], so that multiplying it by [x, x] gives
    s (W − 8) x. `product` adds 8 s Σx.
    """
    columns, parts = weight.shape[1], []
    for codes, scale in zip(weight.data.split(_PACKED), weight.scale.split(_PACKED), strict=True):
        both = torch.cat((codes >> 4, (codes & 15) - 8), dim=1)
        scales = torch.cat((16 * scale, scale), dim=1)
        parts.append(_pack_arm(pack_int4(both), scales, columns, len(codes), 2 * columns))
    return replace(weight, data=torch.cat(parts), scale=8 * weight.scale.float(), layout="arm")


def product(x: Tensor, weight: QuantizedWeight) -> Tensor | None:
    """x Wᵀ for x [R, K], in float32 or bfloat16; None if there is no operator for it."""
    y: Tensor
    size = weight.scheme.group_size
    if weight.layout == "gpu":
        return None
    if weight.layout == "arm":
        rows, columns = weight.shape
        x = x.float()
        if weight.scheme.name == "int4":
            y = torch.ops.aten._dyn_quant_matmul_4bit(x, weight.data, size, columns, rows)
            return y
        twice = x.repeat(1, 2)
        y = torch.ops.aten._dyn_quant_matmul_4bit(twice, weight.data, columns, 2 * columns, rows)
        return y.addcmul_(x.sum(1, keepdim=True), weight.scale.mT)
    if x.dtype == torch.float64 or weight.device.type != "cpu":
        return None
    if weight.scheme.name == "int8" and is_arm():
        return _int8_product_arm(x.float(), weight)
    if weight.scheme.name == "int8" and has_vnni():
        few = len(x) <= _FEW_ROWS and _fits_int8pack(weight)
        if not few and weight.shape[1] > 1:  # `_int_mm` is wrong for one column
            return _int8_product(x.float(), weight)
    if len(x) > MAX_ROWS:
        return None
    if weight.layout == "x86":
        narrow = x.bfloat16()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, weight.data, size, weight.scale)
    elif weight.scheme.name == "int8" and _fits_int8pack(weight):
        # The scales come after the operator, which would round them to bfloat16.
        y = torch._weight_int8pack_mm(x.bfloat16(), weight.data, _ones(len(weight)))
        y = y * weight.scale.float().mT
    else:
        return None
    return y


@cache
@torch.inference_mode(False)
def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _fits_int8pack(weight: QuantizedWeight) -> bool:
    """Whether there is such an operator, which reads past the end of other sizes."""
    return has_avx2() and not any(size % 32 for size in weight.shape)


def tiles(weight: QuantizedWeight, dtype: torch.dtype) -> Iterator[Tensor]:
    """`QuantizedWeight.tiles` for the layouts whose operators do not take all rows."""
    if weight.layout == "stored":
        yield from weight.tiles(dtype)
        return
    assert weight.layout == "x86"
    # The operator keeps blocks of rows as [K, block], with the rows in an order of its own.
    block, columns = _x86_block(), weight.shape[1]
    order = [*_x86_order()[::2], *_x86_order()[1::2]]
    inverse = None if order == sorted(order) else torch.tensor(order).argsort()
    wide = dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)
    rows = max(1, TILE // (block * columns)) * block
    for data, scale in zip(weight.data.split(rows), weight.scale.split(rows, dim=1), strict=True):
        pairs = data.view(-1, columns, block // 2)
        codes = torch.cat((pairs & 15, pairs >> 4), dim=2)
        codes = codes if inverse is None else codes.index_select(2, inverse)
        values = codes.mT.reshape(len(data), len(scale), -1).to(wide).sub_(8)
        yield values.mul_(scale[..., 0].mT.to(wide)[..., None]).flatten(1).to(dtype)


def _int8_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x as high + low / 254 steps, both int8; the sums are exact."""
    step = x.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    x = x / step
    high = x.round()
    low = ((x - high) * _STEPS).round_()
    sums = torch._int_mm(torch.cat((high, low)).to(torch.int8), weight.data.mT).float()
    y = torch.add(sums[: len(x)], sums[len(x) :], alpha=1 / _STEPS)
    return y.mul_(step).mul_(weight.scale.float().mT)


def _int8_product_arm(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Without rounding x. For many rows, some rows of the codes are floats at a time."""
    if len(x) <= _FEW_ROWS_ARM and not any(size % 32 for size in weight.shape):
        return torch._weight_int8pack_mm(x, weight.data, weight.scale.float().flatten())
    rows = max(1, TILE // weight.shape[1])
    parts = [F.linear(x, codes.float()) for codes in weight.data.split(rows)]
    return torch.cat(parts, dim=1).mul_(weight.scale.float().mT)


@cache
def is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@cache
def has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())


@cache
def has_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@cache
def has_arm_int4() -> bool:
    """Whether ARM's operator is there, and stacked matrices are their packed parts in a row."""
    if not torch.backends.kleidiai.is_available():
        return False
    scheme, random = Scheme("int4", 32), torch.Generator().manual_seed(0)
    weight = QuantizedWeight.quantize(torch.randn(32, 64, generator=random), scheme)
    whole = _pack_arm(weight.data, weight.scale, 32, 32, 64)
    halves = [
        _pack_arm(data, scale, 32, 16, 64)
        for data, scale in zip(weight.data.split(16), weight.scale.split(16), strict=True)
    ]
    return torch.equal(whole, torch.cat(halves))


def _pack_arm(data: Tensor, scale: Tensor, group_size: int, rows: int, columns: int) -> Tensor:
    packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
        data.view(torch.uint8), scale.bfloat16(), None, group_size, columns, rows
    )
    return packed


@cache
def _x86_order() -> tuple[int, ...]:
    """The rows of a block in the order of their 4-bit codes, low before high.

    It depends on the CPU, so it is found by packing the numbers of the rows.
    """
    rows = torch.arange(128, dtype=torch.int32)[:, None].repeat(1, 2)
    low, high = (
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1).flatten()
        for part in (rows % 16, rows // 16)
    )
    numbers = [low & 15 | (high & 15) << 4, low >> 4 | high >> 4 << 4]
    order: list[int] = torch.stack(numbers, dim=-1).flatten().tolist()
    return tuple(order[: order.index(order[0], 1)])


def _x86_block() -> int:
    return len(_x86_order())
