"""The training loop: batches, updates, metrics and checkpoints, on one process or many.

Every process runs this. There is always a process group, of one process if `torchrun` started none,
so there is one code path. Weights are float32 and computation is in bfloat16, by FSDP2, or by
`one_device.py` in one process.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xlstm7b import hub
from xlstm7b.checkpoint import open_checkpoint, resolve
from xlstm7b.data.loader import Batch, Loader, check_tokenizers
from xlstm7b.data.shards import chat_template, open_folder
from xlstm7b.files import write_json
from xlstm7b.model import ModelState
from xlstm7b.model.initial_state import values_of
from xlstm7b.model.saved_state import SavedState, check_state_weights
from xlstm7b.tokenizer import tokenizer_fingerprint
from xlstm7b.train.hooks import Hook, HookError, Hooks, LossBatch
from xlstm7b.train.metrics_log import MetricsLog, read_metrics
from xlstm7b.train.monitor import gate_statistics, validation_loss
from xlstm7b.train.optimizer import build_optimizer, clipped_step, gradient_norm, set_learning_rate
from xlstm7b.train.plan import peak_tokens_per_second
from xlstm7b.train.processes import (
    all_reduce,
    fail_together,
    in_first_process,
    process_group,
    run_folder,
)
from xlstm7b.train.profiler import StepProfiler, steps_to_profile
from xlstm7b.train.recipe import Recipe, model_of
from xlstm7b.train.run_checkpoints import (
    CheckpointManager,
    last_saved_step,
    load_checkpoint,
    read_run,
    saved_steps,
    step_folder,
)
from xlstm7b.train.run_settings import (
    changed_settings,
    check_continues,
    may_differ,
    raised_rate,
)
from xlstm7b.train.sharded_model import (
    build_model,
    check_same_model,
    expect_backward,
    fill_initial_state,
    open_base,
    reshard,
)
from xlstm7b.train.trackers import Tracker, Trackers

_MAX_SKIPPED = 20  # consecutive non-finite steps before the run aborts
Report = Callable[[dict[str, Any]], None]


class Update(NamedTuple):
    """The result of one step."""

    loss: float
    gradient_norm: float
    tokens: int  # targets that count in the loss
    positions: int  # tokens read, without padding
    applied: bool  # False if loss or gradient were not finite; then no weight was changed
    stop: bool  # True if any process received a signal to stop


class Trainer:
    """One run in its folder: `checkpoints/`, `metrics.jsonl`, `recipe.json`.

        Trainer(load_recipe("160m"), "runs/mine", hooks=[MyHook()]).train()

    The folder is by default that of the recipe's name in `runs/`, the device a GPU if there is one.
    If there is no process group, the trainer makes one, as `torchrun` describes it or of this
    process alone, and ends it after `train`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: str | Path | None = None,
        device: str | None = None,
        *,
        hooks: Sequence[Hook] = (),
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.recipe, self.folder = recipe, Path(folder or Path("runs") / recipe.name)
        self.hooks = Hooks(recipe.run.hooks, hooks)
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f"the device must be cuda or cpu, not {device!r}")
        device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(device_type)
        with ExitStack() as stack:
            if not dist.is_initialized():
                stack.enter_context(process_group(device_type))
            self._trackers = in_first_process(Trackers, recipe.run.trackers, trackers)
            self._build()
            self._process_group = stack.pop_all()

    def _build(self) -> None:
        recipe = self.recipe
        self.layout = recipe.layout(dist.get_world_size())
        # 1. The data. All folders must have one tokenizer.
        if recipe.data.verify:
            _note("checking the data against its checksums")
        with fail_together(ValueError("the data cannot be used; another process says why")):
            # Every process checks the files of some of the shards.
            part = slice(dist.get_rank(), None, dist.get_world_size())
            opened = partial(open_folder, verify=recipe.data.verify, part=part)
            sources = {
                name: (opened(source.path), source.weight)
                for name, source in recipe.data.sources.items()
            }
            self._validation = {
                name: opened(path) for name, path in recipe.data.validation_sets().items()
            }
        folders = {name: folder for name, (folder, _) in sources.items()}
        for name, held_out in self._validation.items():
            folders[f"data.validation.{name}" if name else "data.validation"] = held_out
        check_tokenizers(folders, recipe.model)
        self._tokenizer = next(iter(folders.values())).tokenizer_fingerprint
        self._chat_template = chat_template({name: data for name, (data, _) in sources.items()})
        self.loader = Loader(
            sources,
            context_length=recipe.data.context_length,
            global_batch=recipe.ramp.sequences(recipe.start_step),
            rank=dist.get_rank() // self.layout.tp,  # a tensor-parallel group reads the same data
            world_size=self.layout.data_parallel,
            seed=recipe.run.seed,
            stage=recipe.start_step,
            packing=recipe.data.packing,
            model=recipe.model,
            pin_memory=self.device.type == "cuda",
        )
        # The same sample during the whole run, so that gate statistics can be compared.
        self._gate_sample = self.loader.first_sample()
        # 2. The model. `init_from` is not read if a checkpoint of a run will be loaded.
        is_new = self._is_new = last_saved_step(self.folder / "checkpoints") is None
        # Frozen weights are always read.
        is_read = recipe.is_frozen or (is_new and not recipe.start_step)
        init_from = recipe.init_from if is_read else ""
        if init_from and is_new:
            _check_tokenizer(init_from, self._tokenizer)
        self._frozen = open_checkpoint(init_from).fingerprint() if recipe.is_frozen else None
        first_state = _first_state(recipe) if is_new else None
        if is_new and recipe.start_step:
            earlier = model_of(recipe.init_from, recipe.start_step)
            check_same_model(recipe.init_from, earlier, recipe.model)
        self.model = build_model(recipe, self.layout, self.device, init_from=init_from)
        if recipe.state_tuning is not None and is_new:
            self._start_state(first_state)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._peak_speed = None
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name()
            self._peak_speed = peak_tokens_per_second(recipe, name, self.layout.world)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        # 3. The state of the run.
        self.checkpoints = CheckpointManager(
            self.folder / "checkpoints",
            keep_last=recipe.run.keep_last,
            keep_every=recipe.run.keep_every,
        )
        self.step = recipe.start_step
        self.best: dict[str, Any] | None = None  # step and validation loss of the best checkpoint
        # What a resume changes: settings, with both values, and a learning rate that rises again.
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.raised_rate: tuple[float, float] | None = None
        self._changes: list[dict[str, Any]] = []  # the settings changed so far, with their steps
        self._is_resumed = self._stop_requested = False
        self.skipped = self._skipped_in_a_row = 0  # non-finite steps

    def _start_state(self, first: ModelState | None) -> None:
        """Fixes m_0 of each block, and sets C_0 and n_0 if there is a state to start from.

        m_0 is the mean of the block's input gates on the run's first sample. A typical token then
        adds about k vᵀ to C, so one learning rate fits all models and blocks.
        """
        initial: Any = self.model.backbone.initial_state
        gates = gate_statistics(self.model, self._gate_sample, self.device)["input_gate_mean"]
        reshard(self.model)
        initial.m = [[gates[layer]] * self.recipe.model.num_heads for layer in initial.layers]
        if first is not None:
            fill_initial_state(self.model, values_of(first, initial.m, initial.rank))

    def resume(self) -> bool:
        """Loads the last checkpoint of this run, or the one that a later stage starts from.

        Returns True if this run had a checkpoint.
        """
        self._is_resumed = True
        found = last_saved_step(self.checkpoints.folder)
        if found is not None:
            if found > self.recipe.run.steps:
                raise ValueError(
                    f"the run in {self.folder} is already at step {found}, after run.steps "
                    f"({self.recipe.run.steps})"
                )
            last = step_folder(self.checkpoints.folder, found)
            run = read_run(last)
            before = Recipe.from_dict(run["recipe"])
            check_continues(self.folder, before, self.recipe)
            if run.get("frozen") != self._frozen:
                raise ValueError(
                    f"the run in {self.folder} adapts the weights that were in {before.init_from}, "
                    f"and {self.recipe.init_from} holds others: give the same weights in init_from"
                )
            load_checkpoint(last, self.model, self.optimizer)
            if self.recipe.state_tuning is not None:
                initial: Any = self.model.backbone.initial_state
                initial.m = run["state_m"]
            self.loader.load_state_dict(run["loader"])
            self.step, self.best = run["step"], run["best"] if self.recipe.run.keep_best else None
            self._forget_best_of_another_set(before)
            if changed := self.hooks.changed_loss(run.get("hooks", [])):
                _note(f"{self.folder}, from step {self.step} on: {changed}")
            self.changed = changed_settings(before, self.recipe)
            self.raised_rate = raised_rate(before, self.recipe, self.step)
            self._changes = run.get("changes", [])  # earlier versions did not save them
            if self.changed:
                self._changes.append({"step": self.step, "settings": self.changed})
        elif self.recipe.start_step:
            earlier = Path(self.recipe.init_from) / "checkpoints"
            checkpoint = step_folder(earlier, self.recipe.start_step)
            run = load_checkpoint(checkpoint, self.model, self.optimizer)
            if run.get("tokenizer", self._tokenizer) != self._tokenizer:
                raise ValueError(
                    f"the run in {self.recipe.init_from} was trained with another tokenizer than "
                    "that of this data"
                )
        return found is not None

    def _forget_best_of_another_set(self, before: Recipe) -> None:
        """Losses on another text cannot be compared. A new name or path alone is no change."""
        (old_name, old), (name, new) = (
            next(iter(recipe.data.validation_sets().items()), ("", ""))
            for recipe in (before, self.recipe)
        )
        if not self.best or not new:
            return
        tokens = self.best.get("validation_tokens")  # earlier versions did not save it
        is_other = old_name != name and old != new
        if tokens is not None:
            is_other = tokens != self._validation[name].tokens
        if is_other:
            _note(
                f"the best checkpoint, of step {self.best['step']}, was chosen on other text than "
                f"that of {new}, which decides from now on; that checkpoint is kept no longer"
            )
            self.best = None

    def train(self, report: Report = lambda line: None, *, profile: bool | range = False) -> None:
        """Trains or continues the run, to its last step, the time limit, SIGTERM or Ctrl-C.

        Saves at the end. In the first process, `report` is called with the metrics of each step.
        With `profile` that process records these steps, or three steps, into the folder `profile`.
        """
        if not dist.is_initialized():
            raise ValueError("this trainer has ended: make a new one to continue the run")
        with self._process_group, run_folder(self.folder):
            if not self._is_resumed:
                self.resume()
                self.print_remarks()
                if self.step == self.recipe.run.steps:
                    _note(f"{self.folder}: already finished, nothing trained (step {self.step})")
            if self.step < self.recipe.run.steps:
                self._train(report, profile)
            else:
                self.loader.close()

    def print_remarks(self) -> None:
        """Says on stderr what may not be meant, such as a setting that a resume changes."""
        recipe, step = self.recipe, self.step
        is_finished = step == recipe.run.steps
        for name, (before, now) in self.changed.items():
            if not may_differ(name):
                _note(f"{self.folder} was trained with {name} {before!r}; this recipe has {now!r}")
        if self.raised_rate and not is_finished:
            last, following = self.raised_rate
            _note(
                f"the learning rate rises again: {last:.3g} at step {step - 1}, {following:.3g} at "
                f"step {step}; schedule.decay sets the length of the decay"
            )
        if recipe.data.validation and not recipe.run.validate_every and not is_finished:
            _note("data.validation is never read: run.validate_every is 0")

    def stop(self) -> None:
        """Asks for the end of the run, for example from a hook: after the next step it saves."""
        self._stop_requested = True

    def _train(self, report: Report, profile: bool | range) -> None:
        run = self.recipe.run
        steps = steps_to_profile(profile, self.step, run.steps)
        on_gpu = self.device.type == "cuda"
        profiler = StepProfiler(self.folder / "profile", steps, self.step, on_gpu=on_gpu)
        if self._is_new:  # the record of how the run was started, after all checks
            in_first_process(write_json, self.folder / "recipe.json", self.recipe.to_dict())
        deadline = time.monotonic() + 3600 * run.time_limit if run.time_limit else math.inf
        metrics = in_first_process(self._open_metrics)
        failed = True
        try:
            with self._stop_on_signals():
                stops = False
                while self.step < run.steps and not stops:
                    with profiler.step(self.step):
                        stops = self._take_step(deadline, metrics, report)
                self.checkpoints.finish_save()
            failed = False
        except BaseException as error:
            self.checkpoints.finish_save_after_failure()
            if isinstance(error, OSError | FloatingPointError | HookError):
                cause = error.__cause__ if isinstance(error, HookError) else error
                raise type(error)(f"{error}; {self.checkpoints.describe_last()}") from cause
            raise
        finally:
            profiler.end()
            self.loader.close()
            if metrics is not None:
                metrics.close()
            if self._trackers is not None:
                self._trackers.finish(failed=failed)

    def _open_metrics(self) -> MetricsLog:
        path, is_new = self.folder / "metrics.jsonl", self._is_new
        found = read_metrics(path) if self._trackers else []  # before later steps are dropped
        metrics = MetricsLog(path, start=self.step, interval=self.recipe.run.log_every)
        if self._trackers:
            self._trackers.start(self.folder, self.recipe, self.step, is_new=is_new, lines=found)
        return metrics

    def _take_step(self, deadline: float, metrics: MetricsLog | None, report: Report) -> bool:
        """One update, then metrics and checkpoints. Returns True if the run should stop."""
        run = self.recipe.run
        # 1. The update.
        self._stop_requested |= time.monotonic() > deadline
        update, line = self.measured_update()
        if update.applied:
            self._skipped_in_a_row = 0
        else:
            self._count_skip(update)
        # 2. Validation, gate statistics, hooks.
        if run.validate_every and self.step % run.validate_every == 0:
            line |= self.validate()
            line |= self._call_hooks("on_validation", line)
        if self.step % run.log_every == 0:
            self.model.eval()
            line |= gate_statistics(self.model, self._gate_sample, self.device)
            self.model.train()
            reshard(self.model)
        line |= self._call_hooks("on_step", line)
        in_first_process(self._log, line, metrics, report)
        # 3. Checkpoints. After a skipped step none is due: it would replace a good one.
        self.checkpoints.finish_save(wait=False)
        at_end = update.stop or self.step == run.steps
        is_best = self.best is not None and self.best["step"] == self.step
        is_due = update.applied and run.save_every and self.step % run.save_every == 0
        if at_end or is_best or is_due:
            state = {
                "loader": self.loader.state_dict(),
                "recipe": self.recipe.to_dict(),
                "best": self.best,
                "changes": self._changes,
                "tokenizer": self._tokenizer,
                "chat_template": self._chat_template,
                "hooks": self.hooks.record,
                "frozen": self._frozen,
            }
            if self.recipe.state_tuning is not None:
                initial: Any = self.model.backbone.initial_state
                state["state_m"] = initial.m
            self.checkpoints.start_save(self.step, self.model, self.optimizer, state)
        return update.stop

    def _call_hooks(self, event: str, line: dict[str, Any]) -> dict[str, Any]:
        if not self.hooks:
            return {}
        added = self.hooks.call(event, self, line)
        # A hook may have run the model: nothing of that may stay.
        self.optimizer.zero_grad(set_to_none=True)
        reshard(self.model)
        return added

    def _count_skip(self, update: Update) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        run = self.recipe.run
        if run.nan_policy == "skip" and self._skipped_in_a_row < min(_MAX_SKIPPED, run.steps):
            return
        self.checkpoints.finish_save()
        row = f", the last of {n} such steps in a row" if (n := self._skipped_in_a_row) > 1 else ""
        raise FloatingPointError(
            f"loss {update.loss} and gradient norm {update.gradient_norm} at step "
            f"{self.step - 1}{row}"
        )

    def measured_update(self) -> tuple[Update, dict[str, Any]]:
        """One step, and its metrics."""
        began = time.perf_counter()
        update = self.update()
        seconds = time.perf_counter() - began
        line = {
            "step": self.step - 1,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            "learning_rate": self.recipe.learning_rate(self.step - 1),
            "tokens": update.tokens,
            "tokens_per_second": update.positions / seconds,
            "seconds": seconds,
            "applied": update.applied,
        }
        if self._peak_speed is not None:
            line["mfu"] = line["tokens_per_second"] / self._peak_speed
        if self.device.type == "cuda":
            line["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        return update, line

    def update(self) -> Update:
        """One step. Every target of the global batch has the same weight in the loss."""
        recipe, step = self.recipe, self.step
        # 1. The batch. All processes add up their targets, positions and requests to stop.
        sequences = recipe.ramp.sequences(step)
        if sequences != self.loader.global_batch:
            self.loader.set_global_batch(sequences)
        batch = next(self.loader)
        size, count = recipe.micro_batches(step, self.layout)
        stop = float(self._stop_requested)
        counted = float(batch.mask.sum()), float(_unpadded(batch)), stop
        counts = torch.tensor(counted, dtype=torch.float64)
        all_reduce(counts)
        targets, positions = (counts[:2] / self.layout.tp).tolist()
        if recipe.lora is not None and recipe.lora.dropout:
            # Dropout depends on the step and the process alone, so that a resume is exact.
            torch.manual_seed(hash((recipe.run.seed, step, dist.get_rank())))
        # 2. Forward and backward. FSDP averages over data-parallel processes; this scale makes
        # the result the mean over targets. Replicas are summed with the last micro-batch.
        scale = self.layout.data_parallel / max(targets, 1.0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(count):
            expect_backward(self.model, recipe, self.layout, is_last=index == count - 1)
            loss = self._loss(batch, slice(index * size, (index + 1) * size), scale)
            loss.backward()
            total += loss.detach()
        all_reduce(total)
        loss = total / self.layout.world
        # 3. The optimizer's step, without effect if a number is not finite.
        norm = gradient_norm(self._trained).to(self.device)
        is_bad = ~(loss.isfinite() & norm.isfinite())
        set_learning_rate(self.optimizer, recipe.learning_rate(step))
        clipped_step(self.optimizer, recipe.optimizer.clip, norm, is_bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        # 4. The only wait for the device in a step, after everything has been launched.
        mean_loss, whole_norm, skipped = torch.stack([loss, norm, is_bad]).tolist()
        return Update(
            mean_loss,
            whole_norm,
            round(targets),
            round(positions),
            applied=not skipped,
            stop=counts[2].item() > 0,
        )

    def _loss(self, batch: Batch, rows: slice, scale: float) -> Tensor:
        tokens, targets, resets, mask = (
            part[rows].to(self.device, non_blocking=True) for part in batch
        )
        part = LossBatch(tokens, targets, mask * scale, resets)
        return self.hooks.loss(self.model, part, self.step + 1)

    def validate(self) -> dict[str, Any]:
        """The loss on each set of held-out text.

        If that of the first set is the lowest so far, this step becomes the best.
        """
        found: dict[str, Any] = {}
        self.model.eval()
        for name, folder in self._validation.items():
            measured = validation_loss(self.model, folder, self.recipe, self.layout, self.device)
            found.setdefault("validation_loss", measured["validation_loss"])
            found |= {f"{key}/{name}" if name else key: loss for key, loss in measured.items()}
        self.model.train()
        reshard(self.model)
        loss = found["validation_loss"]
        if self.recipe.run.keep_best and loss < (self.best or {}).get("validation_loss", math.inf):
            first = next(iter(self._validation.values()))
            self.best = {
                "step": self.step,
                "validation_loss": loss,
                "validation_tokens": first.tokens,
            }
        return found

    def _log(self, line: dict[str, Any], metrics: MetricsLog | None, report: Report) -> None:
        assert metrics is not None, "the first process has them"
        metrics.write(**line)
        if self._trackers is not None:
            self._trackers.log(line)
        if self.step % self.recipe.run.log_every == 0:
            line = line | metrics.over_interval()
        report(line)

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        def request_stop(number: int, frame: FrameType | None) -> None:
            self._stop_requested = True
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if dist.get_rank() == 0:  # not with print, which the signal may have interrupted
                    os.write(2, b"\nsaving after this step; Ctrl-C again to stop at once\n")

        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, request_stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _note(text: str) -> None:
    """Prints a line to stderr, once for all processes."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)


def _unpadded(batch: Batch) -> int:
    """The positions of a batch without the padding at the ends of rows.

    Padding begins with a reset, its tokens are their own targets, and none of them counts. A text
    may contain the padding's token too.
    """
    last = Batch(*(part[:, -1] for part in batch))
    if not ((last.tokens == last.targets) & ~last.mask).any():
        return batch.tokens.numel()  # the usual case, without work for every position
    tail = batch.resets.flip(1).cumsum(1).eq(0).sum(1) + 1  # from the last reset to the end
    is_same = (batch.tokens == batch.targets) & ~batch.mask
    same = is_same.flip(1).cumprod(1).sum(1)  # the row's last positions that look like padding
    return batch.tokens.numel() - int(tail[same >= tail].sum())


def _check_tokenizer(init_from: str, fingerprint: str | None) -> None:
    """Raises a `ValueError` if the weights come with another tokenizer than that of the data."""
    folder = resolve(init_from)
    if not (folder / "tokenizer.json").is_file():
        return
    theirs = tokenizer_fingerprint(folder)
    if theirs != fingerprint:
        raise ValueError(
            f"the data was prepared with the tokenizer {str(fingerprint)[:12]}, but {init_from} "
            f"holds the tokenizer {theirs[:12]}: prepare it with --tokenizer {folder}"
        )


def check_init_from(recipe: Recipe, folder: Path) -> None:
    """A `ValueError` for what a start in `folder` would find wrong with the model in `init_from`.

    For a plan: what is not on this machine is not looked at, but a local folder of frozen weights
    must be there, because the plan's memory depends on how they are quantised. A run that has a
    checkpoint does not need the weights any more.
    """
    if saved_steps(folder / "checkpoints"):
        return
    if recipe.start_step:
        if recipe.start_step in saved_steps(Path(recipe.init_from) / "checkpoints"):
            earlier = model_of(recipe.init_from, recipe.start_step)
            check_same_model(recipe.init_from, earlier, recipe.model)
    elif recipe.init_from and Path(recipe.init_from).exists():
        open_base(recipe, recipe.init_from)
        _first_state(recipe)
    elif recipe.is_frozen and hub.parse(recipe.init_from) is None:
        raise ValueError(
            f"there is no folder {recipe.init_from}, and the plan depends on whether its weights "
            "are quantised: make it first, for weights of 4 bits with `xlstm7b quantize MODEL "
            f"{recipe.init_from} --bits 4`"
        )


def _first_state(recipe: Recipe) -> ModelState | None:
    """The state that state tuning starts from, if the recipe names one."""
    tuning = recipe.state_tuning
    if tuning is None or not tuning.init_state:
        return None
    base = open_checkpoint(recipe.init_from)
    check_state_weights(tuning.init_state, base)
    saved = SavedState.load(tuning.init_state, base.config, device="cpu")
    if len(saved) != 1:
        raise ValueError(
            f"{tuning.init_state} holds the states of {len(saved)} texts; one is needed"
        )
    return saved.model_state
