"""A recipe: everything that determines a training run, as frozen dataclasses read from TOML.

    recipe = load_recipe("7b", ["optimizer.lr=4e-4", "data.sources.dclm.path=/data/dclm"])

Names are those of the files in `xlstm7b/recipes/`; anything with a `/` or ending in `.toml` is a
path. A file may build on another (`extends = "7b"`): its tables are laid over the other's, lists
and the mixture `[data.sources]` replace it whole. Reading is in `train/settings.py`; defaults here
are the paper's (xLSTM 7B, arXiv 2503.13427, appendix B) wherever it gives a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self

from xlstm7b.config import ModelConfig
from xlstm7b.train.schedule import BatchRamp, Decay, LearningRate, micro_batches
from xlstm7b.train.settings import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveOrInf,
    Seed,
    Settings,
    Tally,
    build,
    overridden,
    read_tables,
)


@dataclass(frozen=True)
class Source(Settings):
    """One prepared folder of token shards in the mixture."""

    SECTION: ClassVar[str] = "data.sources"
    path: str
    weight: Positive = 1.0


@dataclass(frozen=True)
class Data(Settings):
    """What is read. Documents never see each other: the cell's state is reset at each border."""

    SECTION: ClassVar[str] = "data"
    context_length: Count
    sources: Mapping[str, Source]
    validation: str = ""  # a prepared folder of held-out text
    validation_sequences: Tally = 0  # how many windows of it to read each time; 0: all
    packing: Literal["windows", "best-fit"] = "windows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise ValueError("data.sources names no source; give at least one with a path")

    def weights(self) -> dict[str, float]:
        """Each source's share of the tokens: they sum to 1, whatever the file's weights sum to."""
        total = sum(source.weight for source in self.sources.values())
        return {name: source.weight / total for name, source in self.sources.items()}


@dataclass(frozen=True)
class Batch(Settings):
    """The global batch, in sequences of the context length; one update per batch."""

    SECTION: ClassVar[str] = "batch"
    sequences: Count
    ramp: tuple[tuple[Tally, Count], ...] = ()  # (from step, sequences), the first from step 0
    micro_batch: Count = 1  # most sequences that one process takes at once

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ramp:
            return
        starts = [start for start, _ in self.ramp]
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"batch.ramp must start at step 0 and go up in steps, not {starts}")
        if self.ramp[-1][1] != self.sequences:
            raise ValueError(
                f"batch.ramp ends at {self.ramp[-1][1]} sequences, "
                f"but batch.sequences is {self.sequences}"
            )


@dataclass(frozen=True)
class Optimizer(Settings):
    """AdamW; the defaults are the paper's. The authors' released code has lr 4e-4 and β1 0.9."""

    SECTION: ClassVar[str] = "optimizer"
    lr: Positive = 5e-4
    betas: tuple[Fraction, Fraction] = (0.99, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1  # on matrices, but not the embedding's
    clip: PositiveOrInf = 0.5  # of the gradient's global norm; inf: not at all


@dataclass(frozen=True)
class Schedule(Settings):
    """The learning rate over the steps: see `train/schedule.py` for the formulas."""

    SECTION: ClassVar[str] = "schedule"
    kind: Decay = "cosine"
    warmup: Tally = 3000
    decay: Tally = 0  # steps; 0: all that warm-up and cool-down leave of the run
    cooldown: Tally = 0
    factor: Positive = 0.1  # what the decay ends at, relative to the peak …
    reference: Tally = 0  # … or, exponential only, what it reaches after so many of its steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference and self.kind != "exponential":
            raise ValueError(
                f"schedule.reference is for an exponential decay, but schedule.kind is {self.kind}"
            )


@dataclass(frozen=True)
class Run(Settings):
    """How long, how exactly, and what is written on the way. Intervals are in steps; 0: never."""

    SECTION: ClassVar[str] = "run"
    steps: Count
    seed: Seed = 0
    precision: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on GPUs only
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    compile: bool = True
    nan_policy: Literal["skip", "stop"] = "skip"
    save_every: Tally = 1000
    keep_last: Count = 2
    keep_every: Tally = 0
    validate_every: Tally = 0
    keep_best: bool = True  # the checkpoint with the lowest held-out loss, beside the last ones
    log_every: Count = 50  # mean and max over 50 steps, as in the paper's figure 2
    time_limit: NonNegative = 0.0  # hours after which to save and stop; 0: none
    tensorboard: bool = False


class Layout(NamedTuple):
    """One process per GPU: replicas of shards of tensor-parallel groups."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.data_parallel * self.tp


@dataclass(frozen=True)
class Parallel(Settings):
    """The device mesh. FSDP: dp_shard; DDP: dp_replicate; HSDP: both; tp splits heads and FFN.

    One of the two data-parallel sizes may be −1: as many as the processes allow.
    """

    SECTION: ClassVar[str] = "parallel"
    dp_shard: int = -1
    dp_replicate: int = 1
    tp: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)):
            if size < 1 and size != -1:
                raise ValueError(f"parallel.{name} must be at least 1, or -1 for the rest: {size}")
        if self.dp_shard == self.dp_replicate == -1:
            raise ValueError("of parallel.dp_shard and parallel.dp_replicate only one can be -1")

    def layout(self, world: int | None = None) -> Layout:
        """The mesh for so many processes; without a number, the fewest that this allows."""
        given = self.tp * abs(self.dp_shard) * abs(self.dp_replicate)
        world = given if world is None else world
        free = -1 in (self.dp_shard, self.dp_replicate)
        if world < 1 or (world % given if free else world != given):
            raise ValueError(
                f"{world} processes cannot form dp_replicate {self.dp_replicate} × "
                f"dp_shard {self.dp_shard} × tp {self.tp}; "
                + (f"their number must be a multiple of {given}" if free else f"it takes {given}")
            )
        rest = world // given
        replicate = rest if self.dp_replicate == -1 else self.dp_replicate
        return Layout(replicate, rest if self.dp_shard == -1 else self.dp_shard, self.tp)


@dataclass(frozen=True)
class Recipe(Settings):
    """A whole run. Every instance is consistent: a contradiction is a `ValueError` that says which.

    `init_from` with `start_step` 0 takes weights only, from a folder or a hub id, and starts anew:
    fine-tuning. With `start_step` it is a run's folder, whose checkpoint at that step goes on with
    its optimizer, under this recipe's data and schedule: the paper's second stage.
    """

    name: str
    model: ModelConfig
    data: Data
    batch: Batch
    run: Run
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = field(default_factory=Parallel)
    init_from: str = ""
    start_step: Tally = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, warmup, cooldown = self.run.steps, self.schedule.warmup, self.schedule.cooldown
        if steps < warmup:
            raise ValueError(f"run.steps ({steps}) is less than schedule.warmup ({warmup})")
        if not self.schedule.decay and steps < warmup + cooldown:
            raise ValueError(
                f"run.steps ({steps}) is less than schedule.warmup ({warmup}) and "
                f"schedule.cooldown ({cooldown}) together"
            )
        if self.start_step >= steps:
            raise ValueError(f"start_step ({self.start_step}) is not before run.steps ({steps})")
        if self.start_step and not self.init_from:
            raise ValueError("start_step needs init_from: the run whose checkpoint it goes on from")
        if self.run.validate_every and not self.data.validation:
            raise ValueError("run.validate_every needs data.validation: a folder of held-out text")
        for what, size in (("heads", self.model.num_heads), ("FFN's width", self.model.ffn_dim)):
            if size % self.parallel.tp:
                raise ValueError(
                    f"parallel.tp ({self.parallel.tp}) does not divide the {what} ({size})"
                )
        if -1 not in (self.parallel.dp_shard, self.parallel.dp_replicate):
            self.layout()

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate as a function of the step."""
        s = self.schedule
        decay = s.decay or self.run.steps - s.warmup - s.cooldown
        peak = self.optimizer.lr
        return LearningRate(peak, s.kind, s.warmup, decay, s.cooldown, s.factor, s.reference)

    @property
    def ramp(self) -> BatchRamp:
        """The batch size as a function of the step."""
        return BatchRamp(self.batch.ramp or ((0, self.batch.sequences),))

    def layout(self, world: int | None = None) -> Layout:
        """The mesh for so many processes, among which every batch of the run divides evenly."""
        layout = self.parallel.layout(world)
        for start, sequences in self.ramp.stages:
            if sequences % layout.data_parallel:
                raise ValueError(
                    f"the batch of {sequences} sequences from step {start} does not divide among "
                    f"{layout.data_parallel} data-parallel processes"
                )
        return layout

    def micro_batches(self, step: int, layout: Layout) -> tuple[int, int]:
        """Size and number of the micro-batches that each process takes at this step."""
        per_process = self.ramp.sequences(step) // layout.data_parallel
        return micro_batches(per_process, self.batch.micro_batch)

    def tokens_between(self, start: int, end: int) -> int:
        """Tokens that the steps from `start` up to `end` train on."""
        sequences = self.ramp.sequences_before(end) - self.ramp.sequences_before(start)
        return sequences * self.data.context_length

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return build(cls, values, "")


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a named recipe or a TOML file, with `a.b=c` settings laid over it."""
    name, tables = read_tables(name_or_path)
    try:
        return Recipe.from_dict({"name": name, **overridden(tables, overrides)})
    except ValueError as error:
        raise ValueError(f"recipe {name_or_path}: {error}") from error
