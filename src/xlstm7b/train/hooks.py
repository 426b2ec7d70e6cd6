"""Hooks: code of your own in a training run, called after steps and validations or for the loss.

A recipe names them (`run.hooks`), or Python gives them (`Trainer(recipe, hooks=[…])`).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from xlstm7b.files import file_sha256
from xlstm7b.model import XLSTM
from xlstm7b.registry import load_file
from xlstm7b.train.processes import fail_together

if TYPE_CHECKING:
    from xlstm7b.train.trainer import Trainer

Metrics = Mapping[str, Any]
T = TypeVar("T")


class LossBatch(NamedTuple):
    """What a loss is computed from: one micro-batch of one process, as rows [B, T]."""

    tokens: Tensor  # int64
    targets: Tensor  # int64: the token after each position
    weights: Tensor  # float32: how much each target counts in the mean over the global batch, or 0
    resets: Tensor  # bool: True at the first token of each document


class Hook:
    """The base of all hooks. A subclass overrides what it needs.

    Every process calls every hook, so a hook may communicate. What a hook keeps in its attributes
    is not saved with the run.
    """

    def on_step(self, trainer: "Trainer", metrics: Metrics) -> Metrics | None:
        """Called after every step, before a checkpoint of it is saved.

        `metrics` is the step's line of `metrics.jsonl`. Numbers, and lists of them, that are
        returned by name are added to it; those of the first process count.
        """

    def on_validation(self, trainer: "Trainer", metrics: Metrics) -> Metrics | None:
        """Called after every validation, before `on_step`. The same rules hold."""

    def loss(self, model: XLSTM, batch: LossBatch) -> Tensor:
        """The loss of a micro-batch: a sum over its targets, each times its weight.

        Weights make it add up over micro-batches and processes to a mean over the global batch. A
        run has at most one hook that overrides this. It may call the model and its methods
        `token_logprobs` and `loss`, but not use parameters, which are DTensors.
        """
        return model.loss(batch.tokens, batch.targets, batch.weights, resets=batch.resets)


class HookError(RuntimeError):
    """A hook failed. The message names it; `__cause__` is its own error."""


class Hooks:
    """The hooks of one run. `record` has their names and code, for the run's checkpoints."""

    def __init__(self, names: Sequence[str], hooks: Sequence[Hook]) -> None:
        self._hooks = [*load_named("hook", names, Hook), *check_given("hooks", hooks, Hook)]
        self._losses = [(name, hook) for name, hook in self._hooks if _overrides(hook, "loss")]
        if len(self._losses) > 1:
            given = " and ".join(name for name, _ in self._losses)
            raise ValueError(f"a run can have one custom loss, but {given} each have one")
        # Now, not when a checkpoint is saved: by then the file may have been edited.
        self.record = [
            {"name": name, "loss": _overrides(hook, "loss"), "sha256": _fingerprint(hook)}
            for name, hook in self._hooks
        ]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, event: str, trainer: "Trainer", metrics: Metrics) -> dict[str, Any]:
        """Calls `on_step` or `on_validation` of all hooks. Returns the numbers that they add.

        If a hook fails in one process, all processes raise a `HookError`.
        """
        added: dict[str, Any] = {}
        for name, hook in self._hooks:
            if not _overrides(hook, event):
                continue
            so_far = MappingProxyType({**metrics, **added})
            with fail_together(_error(name, event, trainer.step, None)):
                try:
                    returned = getattr(hook, event)(trainer, so_far) or {}
                    _check_numbers(returned, so_far)
                except (Exception, SystemExit) as error:
                    raise _error(name, event, trainer.step, error) from error
            added |= returned
        return added

    def loss(self, model: XLSTM, batch: LossBatch, step: int) -> Tensor:
        """The custom loss, or the model's own if no hook has one."""
        if not self._losses:
            return Hook().loss(model, batch)
        [(name, hook)] = self._losses
        try:
            loss = hook.loss(model, batch)
            _check_loss(loss)
        except (Exception, SystemExit) as error:
            raise _error(name, "loss", step, error) from error
        return loss

    def changed_loss(self, before: Sequence[Mapping[str, Any]]) -> str | None:
        """What to say if the record of an earlier part of the run has another custom loss."""
        old, new = (
            next((hook for hook in record if hook["loss"]), {"name": ""})
            for record in (before, self.record)
        )
        if old == new:
            return None
        if old["name"] == new["name"]:
            return f"the file of hook {new['name']}, which computes the loss, has changed"
        was, now = (
            f"that of hook {hook['name']}" if hook["name"] else "the model's own"
            for hook in (old, new)
        )
        return f"the loss was {was}, and is now {now}"


# Loading, of trackers too


def load_named(kind: str, names: Sequence[str], base: type[T]) -> list[tuple[str, T]]:
    """Makes what a recipe names as "file.py:Class" or "package.module:Class".

    A `ValueError` says what is wrong with "hook NAME", if that is the kind.
    """
    modules: dict[str, ModuleType] = {}
    made = []
    for name in names:
        module, _, attribute = name.rpartition(":")
        with _naming(kind, name):
            if module not in modules:
                is_file = module.endswith(".py")
                modules[module] = _load_file(module) if is_file else import_module(module)
            make = getattr(modules[module], attribute, None)
        if not callable(make):
            raise ValueError(
                f"{kind} {name} cannot be loaded: {module} has no class or function {attribute}"
            )
        with _naming(kind, name):
            one = make()
        _check_base(f"{kind} {name}", one, base)
        made.append((name, one))
    return made


def check_given(argument: str, given: Sequence[T], base: type[T]) -> list[tuple[str, T]]:
    """What Python gives in this argument, with names. A `ValueError` for one of another class."""
    for position, one in enumerate(given):
        _check_base(f"{argument}[{position}]", one, base)
    return [(f"{type(one).__module__}:{type(one).__qualname__}", one) for one in given]


@contextmanager
def _naming(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # `sys.exit` would end the command without a word
        raise ValueError(f"{kind} {name} cannot be loaded: {describe_error(error)}") from error


def _load_file(file: str) -> ModuleType:
    """Runs a Python file as a module. Its name is its path, which is no other module's name."""
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return load_file(path, str(path))


def _overrides(hook: Hook, method: str) -> bool:
    return getattr(getattr(hook, method), "__func__", None) is not getattr(Hook, method)


def _fingerprint(hook: Hook) -> str | None:
    """The sha256 of the file that defines the hook; None if there is none, as in a notebook."""
    try:
        return file_sha256(Path(inspect.getfile(type(hook))))
    except (TypeError, OSError):
        return None


# Checks


def _check_base(name: str, one: Any, base: type) -> None:
    if isinstance(one, base):
        return
    found = f"of type {type(one).__qualname__}"
    if isinstance(one, type):
        found = f"the class {one.__qualname__}"
    raise ValueError(
        f"{name} is {found}, not an instance of a subclass of xlstm7b.train.{base.__name__}"
    )


def _check_numbers(returned: Any, metrics: Metrics) -> None:
    if not isinstance(returned, Mapping):
        raise TypeError(f"it must return a dict of numbers or None, not {returned!r}")
    for name, value in returned.items():
        if not isinstance(name, str) or name in metrics:
            raise ValueError(f"it returned {name!r}, which is not a new name")
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, int | float) for part in parts):
            raise TypeError(f"it returned {name} = {value!r}, not a number or a list of numbers")


def _check_loss(loss: Any) -> None:
    if isinstance(loss, DTensor):
        raise TypeError(
            "it returned a DTensor, because it used the model's parameters, which are DTensors; "
            "call the model or its methods instead"
        )
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.is_floating_point():
        shown = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"it must return one number as a float tensor of shape [], not {shown}")
    if not loss.requires_grad:
        raise ValueError("it returned a number without a gradient")


def _error(name: str, method: str, step: int, failure: BaseException | None) -> HookError:
    reason = describe_error(failure) if failure else "in another process, whose message says why"
    return HookError(f"hook {name} failed in {method} at step {step}: {reason}")


def describe_error(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
