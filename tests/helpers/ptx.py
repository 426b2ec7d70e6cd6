"""Runs a kernel's inline assembly with NumPy: Triton's interpreter cannot.

It knows the instructions that the kernels use, and computes each as NVIDIA's PTX manual says.
"""

import re
from typing import Any

import numpy as np
import triton.language as tl

_BITS = {tl.int8: np.uint8, tl.bfloat16: np.uint16}


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[np.ndarray], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """As `tl.inline_asm_elementwise`, for arrays of as many elements as 32-bit registers hold.

    Returns the bits of the results, as unsigned integers.
    """
    results = dtype if isinstance(dtype, tuple) else (dtype,)
    names = [f"${n}" for n in range(len(results) + len(args))]
    assert constraints == ",".join(["=r"] * len(results) + ["r"] * len(args))
    assert all(part.itemsize * pack == 4 for part in args)
    registers = dict(
        zip(names[len(results) :], (part.view(np.uint32) for part in args), strict=True)
    )
    for line in re.split(r"[;{}]", asm):
        if line.strip() and not line.strip().startswith(".reg"):
            operation, operands = line.split(maxsplit=1)
            target, *sources = (name.strip() for name in operands.split(","))
            registers[target] = _compute(operation, [_value(name, registers) for name in sources])
    out = tuple(
        np.broadcast_to(registers[name], args[0].view(np.uint32).shape).copy().view(_BITS[kind])
        for name, kind in zip(names, results, strict=False)
    )
    return out if isinstance(dtype, tuple) else out[0]


def floats(bits: np.ndarray) -> np.ndarray:
    """The numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _value(name: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    if name in registers:
        return registers[name]
    # 0f… are the bits of a float, 0x… those of an integer.
    return np.uint32([int(name.replace("0f", "0x"), 0)])


def _compute(operation: str, sources: list[np.ndarray]) -> np.ndarray:
    match operation, sources:
        case (("mov.b32" | "mov.f32"), [a]):
            return a
        case "shl.b32", [a, by]:
            return a << by
        case "shr.u32", [a, by]:
            return a >> by
        case "and.b32", [a, b]:
            return a & b
        case "xor.b32", [a, b]:
            return a ^ b
        case "lop3.b32", [a, b, c, table]:  # bit 4 a + 2 b + c of the table, for each bit
            place = [(part >> np.arange(32, dtype=np.uint32)[:, None]) & 1 for part in (a, b, c)]
            found = (table >> (4 * place[0] + 2 * place[1] + place[2])) & 1
            return (found << np.arange(32, dtype=np.uint32)[:, None]).sum(0, dtype=np.uint32)
        case "prmt.b32", [a, b, selector]:  # each digit of the selector is a byte of b and a
            both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
            result = np.zeros(both.shape, np.uint64)
            for n in range(4):
                digit = (selector.astype(np.uint64) >> np.uint64(4 * n)) & np.uint64(15)
                result |= ((both >> (8 * digit)) & np.uint64(255)) << np.uint64(8 * n)
            return result.astype(np.uint32)
        case "sub.rn.f32", [a, b]:
            return (a.view(np.float32) - b.view(np.float32)).view(np.uint32)
        case "cvt.rn.bf16x2.f32", [high, low]:
            low, high = (_round(part.view(np.float32).astype(np.float64)) for part in (low, high))
            return low | (high << 16)
        case "sub.rn.bf16x2", [a, b]:
            return _on_pairs(lambda x, y: x - y, a, b)
        case "fma.rn.bf16x2", [a, b, c]:
            return _on_pairs(lambda x, y, z: x * y + z, a, b, c)
    raise NotImplementedError(operation)


def _on_pairs(function: Any, *sources: np.ndarray) -> np.ndarray:
    """On both bfloat16 numbers of each register. In float64 the result is exact until rounded."""
    low, high = (
        _round(function(*(floats((part >> shift) & 0xFFFF).astype(np.float64) for part in sources)))
        for shift in (np.uint32(0), np.uint32(16))
    )
    return low | (high << 16)


def _round(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, of two the even one. x must be exact in float32."""
    assert (x.astype(np.float32) == x).all()
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
