"""QuantizedWeight: a matrix as codes and scales. Rounding to nearest, packing, dequantising."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from xlstm7b.quantize.config import Scheme

_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}  # positive code
TILE = 1 << 18  # values that are dequantised at a time: they stay in a CPU's cache
_QUANTIZED = 1 << 23  # values that are quantised at a time: there are several float32 copies
# int4 tries these parts of the largest value of a group: a smaller scale clips it, but has finer
# steps for all others.
_CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K] of codes with scales.

    `data` is int8 [N, K], float8 [N, K], or int32 [N, K/8]: eight 4-bit codes in each number, the
    lowest bits first, plus 8. `scale` is [N, 1], for int4 [N, K/group]. Both are as in the files,
    unless `layout` says that they are in the order of a CPU operator (`cpu.py`) or of the GPU
    kernels (`gpu.py`).
    """

    scheme: Scheme
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor
    layout: str = "stored"

    @classmethod
    def quantize(cls, weight: Tensor, scheme: Scheme) -> Self:
        """Rounds each value to the nearest code, some rows at a time."""
        parts = []
        for rows in weight.detach().split(max(1, _QUANTIZED // max(1, weight.shape[1]))):
            wide = rows.float()
            scale = nearest_scale(wide, scheme)
            parts.append(cls.from_codes(codes(wide, scale, scheme), scale, scheme))
        data = torch.cat([part.data for part in parts])
        scale = stored_scale(torch.cat([part.scale for part in parts]), weight)
        return cls(scheme, (weight.shape[0], weight.shape[1]), data, scale)

    @classmethod
    def from_codes(cls, values: Tensor, scale: Tensor, scheme: Scheme) -> Self:
        """From codes as floats [N, K]."""
        rows, columns = values.shape
        if scheme.name == "fp8":
            data = values.to(torch.float8_e4m3fn)
        elif scheme.name == "int8":
            data = values.to(torch.int8)
        else:
            data = pack_int4(values.to(torch.int8))
        return cls(scheme, (rows, columns), data, scale)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str | None) -> Self:
        """A copy on that device, or the weight itself if it is there."""
        if self.layout != "stored" and torch.device(device or "cpu").type != self.device.type:
            raise ValueError(
                f"the quantised weights are laid out for the {self.device.type.upper()}: load the "
                "model on the other device instead of moving it there"
            )
        return replace(self, data=self.data.to(device), scale=self.scale.to(device))

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file for the parameter `name`, which ends in ".weight"."""
        assert self.layout == "stored"
        if self.scheme.name != "int4":
            return {name: self.data, f"{name}_scale": self.scale}
        shape = torch.tensor(self.shape, dtype=torch.int64)
        return {
            f"{name}_packed": self.data,
            f"{name}_scale": self.scale,
            f"{name}_shape": shape,
        }

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix as floats."""
        if self.layout == "gpu":
            from xlstm7b.quantize import gpu  # it imports this file

            return gpu.dequantize(self, dtype)
        assert self.layout == "stored"
        return self._floats(self.data, self.scale, dtype)

    def tiles(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Some rows of the matrix as floats at a time."""
        assert self.layout == "stored"
        rows = max(1, TILE // max(1, self.shape[1]))
        for data, scale in zip(self.data.split(rows), self.scale.split(rows), strict=True):
            yield self._floats(data, scale, dtype)

    def _floats(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        if dtype == scale.dtype == torch.bfloat16:
            wide = dtype  # it holds the codes, and a product is rounded once
        values = _unpack(data) if self.scheme.name == "int4" else data
        groups = values.to(wide).unflatten(1, (scale.shape[1], -1))
        floats: Tensor = groups.mul_(scale.to(wide)[..., None]).flatten(1).to(dtype)
        return floats


def stack(weights: Sequence[QuantizedWeight], data: Tensor) -> QuantizedWeight:
    """Matrices of one scheme, stacked along the rows. `data` is theirs, in one tensor.

    Groups lie in one row, so they stay whole.
    """
    first = weights[0]
    rows = sum(map(len, weights))
    scale = torch.cat(
        [weight.scale for weight in weights], dim=1 if first.layout in ("x86", "gpu") else 0
    )
    return replace(first, shape=(rows, first.shape[1]), data=data, scale=scale)


def nearest_scale(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """The scales [N, K/group] of a float32 matrix [N, K]; [N, 1] for int8 and fp8.

    Those of int4 have the least squared error of a few candidates, with each column weighted by
    `importance` [K] if it is given. All are bfloat16 numbers, which every operator takes as they
    are; the codes are made for the rounded scale.
    """
    groups = weight.unflatten(1, (-1, scheme.group_size or weight.shape[1]))
    largest = groups.abs().amax(2)
    if scheme.name != "int4":
        return _rounded_scale(largest / _LARGEST[scheme.name])
    factor = torch.ones(1, device=weight.device) if importance is None else importance
    factor = factor.expand(weight.shape[1]).unflatten(0, (-1, scheme.group_size))
    best = _rounded_scale(largest / 7.5)
    least = torch.full_like(best, torch.inf)
    for part in _CLIPPED:
        scale = _rounded_scale(largest * (part / 7.5))
        rounded = codes(weight, scale, scheme).unflatten(1, groups.shape[1:]) * scale[..., None]
        error = ((rounded - groups).square() * factor).sum(2)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def codes(weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """The nearest codes of a matrix [N, K], as floats."""
    groups = weight.unflatten(1, (scale.shape[1], -1)) / scale[..., None]
    return round_codes(groups.flatten(1), scheme)


def round_codes(values: Tensor, scheme: Scheme) -> Tensor:
    """The nearest codes of weights that are divided by their scales, as floats."""
    largest = _LARGEST[scheme.name]
    if scheme.name == "fp8":
        return values.clamp(-largest, largest).to(torch.float8_e4m3fn).to(values.dtype)
    return values.round().clamp(-largest - 1 if scheme.name == "int4" else -largest, largest)


def stored_scale(scale: Tensor, weight: Tensor) -> Tensor:
    """The scales in the dtype in which they are stored beside weights of that dtype."""
    return scale.to(torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32)


def _rounded_scale(scale: Tensor) -> Tensor:
    """As a bfloat16 number that is not 0, so that a row of zeros can be divided by it."""
    smallest = torch.finfo(torch.bfloat16).tiny
    return scale.clamp(min=smallest).to(torch.bfloat16).to(scale.dtype)


def unpack_int8(data: Tensor, columns: int) -> Tensor:
    """int8 codes [N, K] from int32 [N, K/4]: four codes in each number, plus 128."""
    return (data.view(torch.uint8)[:, :columns] ^ 128).contiguous().view(torch.int8)


def pack_int4(values: Tensor) -> Tensor:
    """4-bit codes, int8 [N, K], as int32 [N, K/8]."""
    pairs = (values + 8).view(torch.uint8).unflatten(1, (-1, 2))
    packed: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed.view(torch.int32)


def _unpack(data: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    pairs = data.contiguous().view(torch.uint8)
    values = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).view(torch.int8)
    return values - 8
