"""For all tests: fixed random seeds, hypothesis settings, and no GPU tests without a GPU."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the processes would have more threads than there are cores

# All tests are imported first. Hardly anything of that is garbage.
gc.disable()

if not torch.cuda.is_available():
    # Must be set before a kernel is imported: Triton's interpreter then runs it on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"


def speed_up_interpreter() -> None:
    """Makes Triton's interpreter about three times as fast. Kernels compute the same numbers.

    - It replaces the functions of `triton.language` by its own before every kernel and every call
      of a `triton.jit` function inside a kernel, and restores some of them. Here it does so once
      for each module.
    - It computes for each sum and product of integers whether it overflows, and ignores the answer,
      because its option `debug` is off. Here it computes no answer.
    - It makes a table of NumPy's types each time that it needs one of them, and checks a shape for
      each tensor that has it. Here it does so once for each type and shape.
    - It writes a name for each type of a block, which is read in messages only, makes such a type
      again where it has one, and compares shapes as if they could have any content.
    - It finds the common type and shape of two operands each time, also if they have the same, and
      makes a tensor of each number that is an operand. Here it does so once for each number, type
      and shape.
    - It checks again in each function of `triton.language` that the call came from a kernel.
    """
    try:
        from triton.language import core
        from triton.language.core import block_type, constexpr, int32, tensor, uint64
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:  # no Triton on this system: the tests of kernels are skipped
        return
    patch, patched = interpreter._patch_lang, set()
    scope = SimpleNamespace(restore=lambda: None)

    def patch_once(function: Callable[..., Any]) -> SimpleNamespace:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return scope

    interpreter._patch_lang = patch_once

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    find_np_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: find_np_dtype(
        uint64 if dtype.scalar.is_ptr() else dtype.scalar
    )

    init_block_type, init_tensor = block_type.__init__, tensor.__init__
    to_ir, equals = block_type.to_ir, core.tuple.__eq__

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
    core.tuple.__eq__ = lambda self, other: (
        core.constexpr(self.values == other)
        if type(other) is list and other and type(other[0]) is int
        else equals(self, other)
    )

    to_common_type, operands = TritonSemantic.binary_op_type_checking_impl, dict[Any, Any]()

    def to_common_type_once(
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
            return to_common_type(self, lhs, rhs, *options)
        if type(rhs) is tensor:
            same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            if same and not div_or_mod and not lhs.dtype.is_ptr():
                return lhs, rhs
        elif type(rhs) is int or (type(rhs) is float and rhs):  # −0.0 would be the same key as 0.0
            key = type(rhs), rhs, lhs.dtype.name, id(lhs.shape), options
            if key in operands:
                return lhs, operands[key]
            left, right = to_common_type(self, lhs, rhs, *options)
            if left is lhs:
                right.handle.data.flags.writeable = False
                operands[key] = right
            return left, right
        return to_common_type(self, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = to_common_type_once

    broadcast, dtype_equals = TritonSemantic.broadcast_impl_value, core.dtype.__eq__
    TritonSemantic.broadcast_impl_value = lambda self, lhs, rhs: (
        (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
    )
    core.dtype.__eq__ = lambda self, other: self is other or dtype_equals(self, other)

    unwrap = core._unwrap_if_constexpr
    plain = {tensor, int, float, bool, str, type(None), core.dtype, block_type}
    core._unwrap_if_constexpr = lambda value: (
        value
        if type(value) in plain
        else value.value
        if type(value) is constexpr
        else unwrap(value)
    )

    checks = core.builtin(lambda: None).__code__

    def patch_function(place: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
        if getattr(function, "__code__", None) is checks:
            function = function.__wrapped__

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_function


if not torch.cuda.is_available():
    speed_up_interpreter()

settings.register_profile(
    "repo",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repo")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_stays() -> Iterator[None]:
    """The garbage collector does not visit what earlier files left, such as imported modules."""
    yield
    _freeze()


@pytest.fixture(autouse=True)
def _freeze_imports() -> Iterator[None]:
    """Nor what a test imports late."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long tests start first. If one started last, the other processes would wait for it.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    # Most objects are those of imported modules. The garbage collector need not visit them.
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
