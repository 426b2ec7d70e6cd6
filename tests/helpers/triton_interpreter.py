"""Makes Triton's interpreter about three times as fast. Kernels compute the same numbers.

Without a GPU, kernels are tested with Triton's interpreter: NumPy runs each operation of a kernel,
and most of the time goes into what surrounds it. No public way of Triton changes that, so this file
replaces parts of its internals, and nothing else in the tests touches them. It was written for
Triton `VERSION`. With another one the interpreter stays as it is: the tests of kernels are then
slower, and just as right.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

VERSION = "3.9"


def speed_up() -> None:
    """Call it before a kernel is imported. Does nothing without Triton, or with another version."""
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:  # no Triton on this system: the tests of kernels are skipped
        return
    if not triton.__version__.startswith(f"{VERSION}."):
        return
    patch_modules_once(interpreter)
    ignore_overflow(interpreter)
    keep_numpy_types(interpreter)
    make_blocks_once()
    convert_operands_once()
    compare_types_by_identity()
    call_directly(interpreter)


def patch_modules_once(interpreter: Any) -> None:
    """The functions of `triton.language` are replaced by the interpreter's once per module.

    It does so before every kernel and every call of a `triton.jit` function inside a kernel, and
    restores some of them.
    """
    patch, patched = interpreter._patch_lang, set()
    scope = SimpleNamespace(restore=lambda: None)

    def patch_once(function: Callable[..., Any]) -> SimpleNamespace:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return scope

    interpreter._patch_lang = patch_once


def ignore_overflow(interpreter: Any) -> None:
    """It computes for each sum and product of integers whether it overflows.

    It ignores the answer, because its option `debug` is off.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def keep_numpy_types(interpreter: Any) -> None:
    """It makes a table of NumPy's types each time that it needs one of them."""
    from triton.language.core import uint64

    find = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: find(
        uint64 if dtype.scalar.is_ptr() else dtype.scalar
    )


def make_blocks_once() -> None:
    """A block's shape is checked once, not for each tensor that has it.

    Nor is a name written for each type of a block, which is read in messages only, and a type that
    exists is not made again.
    """
    from triton.language.core import block_type, int32, tensor

    init_block_type, init_tensor, to_ir = block_type.__init__, tensor.__init__, block_type.to_ir

    @cache
    def checked(shape: tuple[Any, ...]) -> tuple[Any, int, tuple[Any, Any]]:
        """A block type's `shape` and `numel`, and those of its tensors."""
        block, example = object.__new__(block_type), object.__new__(tensor)
        init_block_type(block, int32, list(shape))
        block.of_tensor = None
        init_tensor(example, None, block)
        return block.shape, block.numel, (example.shape, example.numel)

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor = checked(tuple(shape))

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        other = object.__new__(block_type)
        other.element_ty = scalar_ty
        other.shape, other.numel, other.of_tensor = self.shape, self.numel, self.of_tensor
        return other

    scalar = tensor(None, int32)

    def new_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = getattr(type, "of_tensor", (scalar.shape, scalar.numel))

    block_type.__init__, tensor.__init__ = new_block_type, new_tensor
    block_type.with_element_ty = with_element_ty
    block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None
    )
    block_type.to_ir = lambda self, builder: (
        to_ir(self, builder) if self.element_ty.is_ptr() else self
    )


def convert_operands_once() -> None:
    """Operands of the same type and shape are used as they are.

    It looks for their common type and shape each time, and makes a tensor of each number that is an
    operand. Here it does so once for each number, type and shape.
    """
    from triton.language.core import tensor
    from triton.language.semantic import TritonSemantic

    convert, operands = TritonSemantic.binary_op_type_checking_impl, dict[Any, Any]()

    def convert_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is not tensor:
            return convert(self, lhs, rhs, *options)
        if type(rhs) is tensor:
            same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            if same and not div_or_mod and not lhs.dtype.is_ptr():
                return lhs, rhs
        elif type(rhs) is int or (type(rhs) is float and rhs):  # −0.0 would be the same key as 0.0
            key = type(rhs), rhs, lhs.dtype.name, id(lhs.shape), options
            if key in operands:
                return lhs, operands[key]
            left, right = convert(self, lhs, rhs, *options)
            if left is lhs:
                right.handle.data.flags.writeable = False
                operands[key] = right
            return left, right
        return convert(self, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = convert_once


def compare_types_by_identity() -> None:
    """Types and shapes that are the same object are not compared by their content."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast, dtype_equals = TritonSemantic.broadcast_impl_value, core.dtype.__eq__
    tuple_equals, unwrap = core.tuple.__eq__, core._unwrap_if_constexpr
    TritonSemantic.broadcast_impl_value = lambda self, lhs, rhs: (
        (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
    )
    core.dtype.__eq__ = lambda self, other: self is other or dtype_equals(self, other)
    core.tuple.__eq__ = lambda self, other: (
        core.constexpr(self.values == other)
        if type(other) is list and other and type(other[0]) is int
        else tuple_equals(self, other)
    )
    plain = {core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type}
    core._unwrap_if_constexpr = lambda value: (
        value
        if type(value) in plain
        else value.value
        if type(value) is core.constexpr
        else unwrap(value)
    )


def call_directly(interpreter: Any) -> None:
    """It checks again in each function of `triton.language` that the call came from a kernel."""
    from triton.language import core

    checks = core.builtin(lambda: None).__code__

    def patch_function(place: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
        if getattr(function, "__code__", None) is checks:
            function = function.__wrapped__

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_function
