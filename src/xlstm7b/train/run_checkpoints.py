"""The checkpoints of a run: saved in the background, loaded on any layout, exported as weights.

A folder `step-00001000` holds a PyTorch distributed checkpoint, which any number of processes can
load on any layout, `run.json`, and `SHA256SUMS` of all files. A folder with that name is complete:
a run that dies while it saves leaves a folder `writing-…`.

The distributed checkpoint contains pickles. They are opened only after every file has passed its
checksum, so damage is never unpickled. Checksums do not stop an attacker, who can change them too:
load only checkpoints that you trust. To share weights, export them.

If a part of the model is frozen, as with LoRA and state tuning, a checkpoint holds only what is
trained. `run.json` then has a fingerprint of the frozen weights, which are read from `init_from`
again.

Every `run.json` names the step with the lowest validation loss. So the latest checkpoint knows the
best one, and the best one is deleted only after a better one is complete.
"""

import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from xlstm7b.accounting import adapted_shapes
from xlstm7b.chat_format import PlainFormat, marked_source, template_source
from xlstm7b.checkpoint import open_checkpoint, resolve, save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.files import (
    MANIFEST,
    check_format,
    check_sha256,
    check_writable,
    json_bytes,
    manifest_bytes,
    read_manifest,
    real_path,
    write_aside,
    write_hashed,
    write_manifest,
)
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import LowRank, save_adapter
from xlstm7b.model.initial_state import InitialState
from xlstm7b.model.saved_state import WEIGHTS_NOTE, SavedState
from xlstm7b.tokenizer import (
    load_tokenizer,
    open_tokenizer,
    tokenizer_file,
    tokenizer_fingerprint,
    write_chat_template,
    write_fingerprint,
    write_tokenizer,
)
from xlstm7b.train.processes import (
    all_reduce,
    any_process,
    fail_together,
    first_line,
    in_first_process,
)
from xlstm7b.train.recipe import Recipe

_FORMAT = 1  # of a folder; in `run.json`
_NAME = re.compile(r"step-(\d{8})")
_SHOW = 100.0  # seconds in which a network file system shows a new folder to all machines
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class CheckpointManager:
    """Saves the checkpoints of one run. One save may run while training continues.

    A save that fails in one process is an `OSError` in all of them.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int) -> None:
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        # The background save communicates while training does, so it needs a group of its own.
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[Any, int] | None = None

    def start_save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> None:
        """Copies the state, then writes it in the background until `finish_save`.

        Weights or averages that are not finite are a `FloatingPointError`: they are never saved, so
        they never replace a good checkpoint.
        """
        self.finish_save()
        if any_process(not _all_finite(_tensors(model, optimizer))):
            raise FloatingPointError(
                f"the weights or AdamW's averages are not finite after step {step}, and are not "
                "saved"
            )
        aside = self._aside(step)

        def prepare() -> str:
            self._remove_unfinished()
            aside.mkdir(parents=True)
            content = {"format": _FORMAT, "step": step, "has_checksums": True, **run}
            return write_hashed(aside / "run.json", [json_bytes(content)])

        with self._explain_failure(step):
            run_sum = in_first_process(prepare)
        weights, averages = get_state_dict(model, optimizer, options=_TRAINED)
        state = {"model": weights, "optimizer": averages}
        # The stager that `async_save` makes itself when it is given no writer.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        saving: Any = async_save(
            state,
            storage_writer=_HashingWriter(aside, {"run.json": run_sum or ""}),
            process_group=self._group,
            async_stager=stager,
        )
        saving.add_done_callback(lambda _: stager.close())
        self._pending = saving, step

    def finish_save(self, *, wait: bool = True) -> None:
        """Once every process has written its part, renames the folder and deletes old ones."""
        if self._pending is None:
            return
        saving, step = self._pending
        if not wait and any_process(not saving.done()):
            return
        failure = saving.exception()
        self._pending = None
        with self._explain_failure(step):
            if any_process(failure is not None):
                in_first_process(self._remove_unfinished)
                raise OSError(
                    first_line(_cause(failure)) if failure else "another process could not write"
                )
            in_first_process(self._complete, step)

    def finish_save_after_failure(self) -> None:
        """Completes or removes the save that was running when training failed.

        No collectives here: other ranks may have died. When the first process has finished a save,
        all processes have.
        """
        if self._pending is None:
            return
        saving, step = self._pending
        failure = saving.exception()
        self._pending = None
        if dist.get_rank() == 0:
            if failure is None:
                self._complete(step)
            else:
                self._remove_unfinished()

    def describe_last(self) -> str:
        """For error messages: which checkpoint is the last good one."""
        found = saved_steps(self.folder)
        if not found:
            return "no checkpoint is saved yet"
        return f"the last good checkpoint is of step {found[-1]}"

    def _complete(self, step: int) -> None:
        self._aside(step).replace(step_folder(self.folder, step))
        best = best_step(self.folder)
        for old in saved_steps(self.folder)[: -self._keep_last]:
            if old != best and (not self._keep_every or old % self._keep_every):
                shutil.rmtree(step_folder(self.folder, old))

    def _aside(self, step: int) -> Path:
        return self.folder / f"writing-{step:08}"

    def _remove_unfinished(self) -> None:
        for unfinished in self.folder.glob("writing-*"):
            shutil.rmtree(unfinished)

    @contextmanager
    def _explain_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            # PyTorch's error does not say that a disk is full.
            free = shutil.disk_usage(there).free / 2**30
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder}, "
                f"where {free:.2f} GiB are free ({error})"
            ) from error


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of a step, in the folder of a run's checkpoints."""
    return folder / f"step-{step:08}"


def saved_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def last_saved_step(folder: Path) -> int | None:
    """The step of the last complete checkpoint, if there is one, as the first process sees it.

    A collective: all processes continue from the same step, whatever they see themselves. One that
    does not see that checkpoint waits for its file system; if it never does, all raise.
    """
    found = saved_steps(folder) if dist.get_rank() == 0 else []
    answer = torch.tensor(found[-1] + 1 if found else 0)
    all_reduce(answer)
    if not answer:
        return None
    step = int(answer) - 1
    words = f"does not see {step_folder(folder, step)}: all processes need the same file system"
    with fail_together(ValueError(f"another process {words}")):
        deadline = time.monotonic() + _SHOW
        while step not in saved_steps(folder):
            if time.monotonic() > deadline:
                raise ValueError(f"process {dist.get_rank()} {words}")
            time.sleep(_SHOW / 100)
    return step


def best_step(folder: Path) -> int | None:
    """The step with the lowest validation loss, if the run keeps it."""
    best = read_run(step_folder(folder, saved_steps(folder)[-1])).get("best")
    return best["step"] if best else None


def verify_checkpoint(checkpoint: Path, part: slice = slice(None)) -> dict[str, Any]:
    """Checks the files of a checkpoint, or a part of them, and returns its `run.json`.

    Damage is a `ValueError`. Earlier versions wrote no checksums: then stderr says so.
    """
    run = read_run(checkpoint)
    with _name_damage(checkpoint):
        sums = _read_sums(checkpoint)
        for name in sorted(sums)[part]:
            check_sha256(checkpoint / name, sums[name])
    if not sums and part.start in (None, 0):
        print(
            f"{checkpoint} was saved by an earlier version, without checksums: it is not verified",
            file=sys.stderr,
        )
    return run


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The `run.json` of a checkpoint, checked against its checksum."""
    with _name_damage(checkpoint):
        sums = _read_sums(checkpoint)
        if sums:
            check_sha256(checkpoint / "run.json", sums["run.json"])
        run: dict[str, Any] = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
        if not sums and "has_checksums" in run:
            raise ValueError(f"{MANIFEST} is missing")
    check_format(checkpoint / "run.json", run.get("format"), _FORMAT)
    return run


def _read_sums(checkpoint: Path) -> dict[str, str]:
    """The sha256 of every file. Empty if there is no manifest, as in earlier versions."""
    if not (checkpoint / MANIFEST).exists():
        return {}
    parts = [path.name for path in checkpoint.glob("*.distcp")]
    sums = read_manifest(checkpoint, ["run.json", ".metadata", *parts])
    if (checkpoint / MANIFEST).read_bytes() != manifest_bytes(sums):
        raise ValueError(f"{MANIFEST} is not as it was written")
    return sums


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Checks a checkpoint, loads it into model and optimizer, and returns its `run.json`."""
    # Every process checks some of the files. None loads before all have been checked.
    with fail_together(ValueError(f"{checkpoint} is damaged; another process says why")):
        run = verify_checkpoint(checkpoint, slice(dist.get_rank(), None, dist.get_world_size()))
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    weights, averages = get_state_dict(model, optimizer, options=_TRAINED)
    with _name_damage(checkpoint):
        load({"model": weights, "optimizer": averages}, checkpoint_id=checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=averages, options=_TRAINED
    )
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)  # the recipe's settings, not those of the checkpoint
    if any_process(not _all_finite(_tensors(model, optimizer))):
        raise ValueError(_not_finite(checkpoint))
    return run


def read_model(checkpoint: Path, config: ModelConfig) -> XLSTM:
    """The weights of a checkpoint as a model on the CPU, in this process alone."""
    model = XLSTM.empty(config, dtype=torch.float32, device="cpu")
    _read_weights(checkpoint, model.state_dict())
    return model


def read_adapter(checkpoint: Path, recipe: Recipe) -> dict[str, LowRank]:
    """A and B of a checkpoint of a LoRA run, by the paths of their layers."""
    lora = recipe.lora
    assert lora is not None
    layers = {
        path: LowRank(
            torch.empty(lora.rank, columns), torch.empty(rows, lora.rank), lora.alpha / lora.rank
        )
        for path, (rows, columns) in adapted_shapes(recipe.model, lora.targets).items()
    }
    weights = {f"{path}.lora_A": layer.A for path, layer in layers.items()}
    weights |= {f"{path}.lora_B": layer.B for path, layer in layers.items()}
    _read_weights(checkpoint, weights)
    return layers


def read_initial_state(checkpoint: Path, recipe: Recipe) -> InitialState:
    """The initial state of a checkpoint of a state tuning run, on the CPU."""
    tuning = recipe.state_tuning
    assert tuning is not None
    initial = InitialState(recipe.model, tuning.layers or None, rank=tuning.rank)
    values = {name: parameter.detach() for name, parameter in initial.named_parameters()}
    _read_weights(checkpoint, {f"backbone.initial_state.{name}": x for name, x in values.items()})
    initial.m = read_run(checkpoint)["state_m"]
    return initial


def _read_weights(checkpoint: Path, weights: dict[str, Any]) -> None:
    """Reads the weights of these names, in this process alone. They must be finite."""
    with warnings.catch_warnings(), _name_damage(checkpoint):
        warnings.simplefilter("ignore", UserWarning)  # PyTorch warns of a single process
        load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    if not _all_finite(weights.values()):
        raise ValueError(_not_finite(checkpoint))


def export_run(
    run: Path,
    target: Path,
    *,
    step: int | Literal["best"] | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    overwrite: bool = True,
) -> int:
    """Writes a checkpoint, by default the last, as a Hugging Face folder. Returns its step.

    That of a LoRA run becomes an adapter in PEFT's format, that of a state tuning run a state file.
    "best" is the step with the lowest validation loss. `tokenizer` is a tokenizer.json, its folder,
    a hub id or "bytes"; by default that of `init_from` or of the data. The folder gets the
    tokenizer with the model's first token, a chat template, and the tokenizer's fingerprint.
    `overwrite` is that of `save_checkpoint`; a state file is never replaced.
    """
    folder = run / "checkpoints"
    found = saved_steps(folder)
    if not found:
        raise ValueError(f"{run} holds no checkpoint to export")
    if step == "best":
        step = best_step(folder)
        if step is None:
            raise ValueError(f"{run} has no best checkpoint: it kept none by validation loss")
    step = found[-1] if step is None else step
    if step not in found:
        raise ValueError(
            f"{run} has no checkpoint of step {step}; its checkpoints are of the steps {found}"
        )
    checkpoint = step_folder(folder, step)
    saved = read_run(checkpoint)
    recipe = Recipe.from_dict(saved["recipe"])
    if recipe.state_tuning is not None:
        _export_state(checkpoint, recipe, saved["frozen"], target, dtype)
        return step
    fingerprint = saved.get("tokenizer")  # earlier versions did not save it
    found_tokenizer = _find_tokenizer(recipe, tokenizer, fingerprint)
    verify_checkpoint(checkpoint)
    template = saved.get("chat_template")  # that of the chats in the data
    if saved.get("has_plain_chats"):  # of earlier versions, which had no other chats
        template = PlainFormat.template
    with TemporaryDirectory() as aside:
        if found_tokenizer is not None:
            file = tokenizer_file(found_tokenizer)
            template = template or template_source(Path(aside) if file is None else file.parent)
            opened = open_tokenizer(found_tokenizer)
            template = marked_source(template)
            companions = write_tokenizer(Path(aside), opened, recipe.model, template)
        else:
            companions = [write_fingerprint(Path(aside), fingerprint)] if fingerprint else []
            if template:
                companions.append(write_chat_template(Path(aside), marked_source(template)))
        if recipe.lora is None:
            parameters = read_model(checkpoint, recipe.model).named_parameters()
            save_checkpoint(
                target,
                recipe.model,
                parameters,
                dtype=dtype,
                companions=companions,
                overwrite=overwrite,
            )
        else:
            layers = read_adapter(checkpoint, recipe).items()
            save_adapter(
                target,
                {path: layer.to(dtype) for path, layer in layers},
                **asdict(recipe.lora),
                base=saved["frozen"],
                base_name=recipe.init_from,
                companion_files=companions,
                overwrite=overwrite,
            )
    return step


def _export_state(
    checkpoint: Path,
    recipe: Recipe,
    frozen: Mapping[str, str],
    target: Path,
    dtype: torch.dtype | None,
) -> None:
    """Writes the state after the token that comes before a text, with the logits after it.

    In training a text is read as [first token, tokens…] from the initial state. Generation adds no
    first token to a text that continues a saved state. So the first token is read here. (For a
    model without one it is an end of text, as in training.)
    """
    if dtype not in (None, torch.float32):
        named = str(dtype).removeprefix("torch.")
        raise ValueError(f"a trained state is written in float32, not {named}: leave --dtype out")
    if target.exists():
        raise ValueError(f"{target} exists already: choose another file")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {target}: there is no folder {target.parent}")
    target = real_path(target)
    check_writable(target)
    verify_checkpoint(checkpoint)
    base = open_checkpoint(recipe.init_from)
    if base.fingerprint() != frozen:
        raise ValueError(
            f"{checkpoint} was trained with the weights of {recipe.init_from}; those there are "
            "others now"
        )
    initial = read_initial_state(checkpoint, recipe)
    config = recipe.model
    model = XLSTM.from_pretrained(recipe.init_from, device="cpu")
    with torch.inference_mode():
        first = torch.tensor([[config.bos_token_id]])  # the end of text, without a first token
        logits, state = model(first, initial(1), logits="last")
    if not config.force_bos_token_insert:
        state = state._replace(tokens_seen=torch.zeros_like(state.tokens_seen))
    saved = SavedState(base.config, state, logits)
    with write_aside(target, overwrite=False) as aside:
        saved.save(aside, **{WEIGHTS_NOTE: json.dumps(frozen)})


def _find_tokenizer(
    recipe: Recipe, chosen: str | Path | None, fingerprint: str | None
) -> str | Path | None:
    """The chosen tokenizer, if it is the run's; otherwise that of `init_from` or of the data."""
    if chosen is not None:
        opened = open_tokenizer(chosen)
        if fingerprint not in (None, opened.fingerprint):
            raise ValueError(
                f"the run was trained with the tokenizer {str(fingerprint)[:12]}, but {chosen} is "
                f"the tokenizer {opened.fingerprint[:12]}"
            )
        load_tokenizer(chosen, recipe.model.vocab_size)
        return chosen
    # The folders may not exist any more, or hold another tokenizer.
    folders = [Path(source.path) for source in recipe.data.sources.values()]
    if recipe.init_from and not recipe.start_step:
        with suppress(ValueError, OSError):
            folders.insert(0, resolve(recipe.init_from))
    for found in folders:
        if (found / "tokenizer.json").is_file():
            with suppress(ValueError, OSError):
                if fingerprint in (None, tokenizer_fingerprint(found)):
                    return found
    return "bytes" if fingerprint == "bytes" else None


# Weights that are not finite


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The weights that are trained, and AdamW's averages."""
    yield from (parameter for parameter in model.parameters() if parameter.requires_grad)
    for averages in optimizer.state.values():
        yield from averages.values()


@torch.no_grad()
def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if this process's parts of the tensors hold no NaN and no infinity."""
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # `aminmax` passes NaN on and, unlike `isfinite`, needs no memory.
        if local.numel() and not torch.stack(local.aminmax()).isfinite().all():
            return False
    return True


def _not_finite(checkpoint: Path) -> str:
    return (
        f"{checkpoint} holds weights that are not finite: remove it to continue from an earlier one"
    )


# Checksums


class _HashingWriter(FileSystemWriter):
    """Writes a distributed checkpoint and, as its last file, the checksums of all files.

    Every process hashes the bytes that it writes. The first process receives the sums together with
    the results of the save, so no file is read again.
    """

    def __init__(self, path: Path, sums: Mapping[str, str]) -> None:
        """`sums` are those of files that the folder holds already."""
        super().__init__(path)
        self.fs: _HashingFiles = _HashingFiles()
        self._folder, self._sums = path, dict(sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        results.append(WriteResult(MetadataIndex(MANIFEST), 0, dict(self.fs.sums)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for of_process in results:
            self._sums |= of_process.pop().storage_data
        super().finish(metadata, results)
        write_manifest(self._folder, self._sums | self.fs.sums)


class _HashingFiles(FileSystem):
    """The file system, with the sha256 of each file that was written, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _HashingFile(path) as file:
            yield file
        self.sums[Path(path).name] = file.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _HashingFile(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return super().write(data)


# Error messages


@contextmanager
def _name_damage(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, ValueError) as error:
        cause = _cause(error)
        if isinstance(cause, KeyboardInterrupt | MemoryError | torch.OutOfMemoryError):
            raise cause from error
        raise ValueError(
            f"{checkpoint} is damaged ({first_line(cause)}): remove it to continue from an "
            "earlier one"
        ) from error


def _cause(failure: BaseException) -> BaseException:
    """The first error in any process."""
    if isinstance(failure, CheckpointException):
        return next(error for error, _ in failure.failures.values())
    return failure
