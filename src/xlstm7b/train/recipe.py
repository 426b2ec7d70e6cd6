"""Recipes: everything that determines a training run, read from TOML and checked by pydantic.

    recipe = load_recipe("7b", ["optimizer.lr=4e-4", "data.sources.dclm.path=/data/dclm"])

A name is that of a file in `xlstm7b/recipes/`; anything with a `/` or ending in `.toml` is a path.
A file may extend another (`extends = "7b"`): its tables are merged into the other's. Lists,
`[data.sources]` and `[data.validation]` replace the other's as a whole. Defaults are the paper's
(xLSTM 7B, arXiv 2503.13427, appendix B) wherever it gives a number.

Nothing is ignored or guessed: an unknown setting, a wrong type or a value out of range is a
`ValueError` of one sentence that names the setting.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from xlstm7b.accounting import LORA_TARGETS, adapted_shapes
from xlstm7b.config import ModelConfig
from xlstm7b.data import Packing
from xlstm7b.report import counted
from xlstm7b.train.schedule import BatchRamp, Decay, LearningRate, micro_batches

T = TypeVar("T")
LARGE = 2_000_000_000  # trained parameters: one process casts those of more block by block
AtLeast1 = Annotated[int, Field(strict=True, ge=1)]
AtLeast0 = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
PositiveOrInf = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Below1 = Annotated[float, Field(strict=True, ge=0, lt=1)]


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """A frozen dataclass whose instances have passed all checks, or raised a one-line error.

    The string below a field is its description in the recipe reference, `docs/recipes.md`.
    """
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    checked: Any = dataclass(frozen=True, config=config)(cls)
    init = checked.__init__

    @wraps(init)
    def one_line_errors(self: T, /, *arguments: Any, **settings: Any) -> None:
        try:
            init(self, *arguments, **settings)
        except ValidationError as error:
            raise ValueError(_sentence(error, checked)) from error

    checked.__init__ = one_line_errors
    return checked  # type: ignore[no-any-return]


@section
class Source:
    """One source of the mixture: `NAME = { path = "FOLDER", weight = 1.0 }`."""

    path: str
    """Folder that `xlstm7b prepare` wrote. A relative path starts where the command runs."""
    weight: Positive = 1.0
    """Share of the tokens, relative to the other sources. Weights need not sum to 1."""


def _check_validation(value: Any) -> Any:
    sets = value if isinstance(value, Mapping) else {"one": value or " "}
    if all(isinstance(word, str) and word for word in (*sets, *sets.values())):
        return value
    raise ValueError(
        f'data.validation must be a folder, or a table of NAME = "FOLDER", not {value!r}'
    )


@section
class Data:
    """The training data. The state is reset at every document: documents are independent."""

    context_length: AtLeast1
    """Length of a sequence, in tokens."""
    sources: dict[str, Source]
    """The mixture: a table of names, each with a path and a weight."""
    validation: Annotated[str | dict[str, str], BeforeValidator(_check_validation)] = ""
    """Prepared folder of held-out text, or a table of several: `NAME = "FOLDER"`. The loss of each
    is measured, and the first one decides which checkpoint is the best. Empty: none."""
    validation_sequences: AtLeast0 = 0
    """Sequences to read of each set of held-out text at each validation. 0: all."""
    packing: Packing = "windows"
    """How documents become sequences. `windows` joins all documents and cuts them at the context
    length. `best-fit` keeps documents whole where they fit, and pads. `documents` gives each
    document a sequence of its own, and pads; longer ones are cut, and each part is a document."""
    verify: StrictBool = False
    """Compare all data with its checksums at each start, which reads every file. Processes share
    the work."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources names no source; give at least one with a path")

    def validation_sets(self) -> dict[str, str]:
        """The folder of each set of held-out text, by name. A single one has the name ""."""
        if isinstance(self.validation, dict):
            return self.validation
        return {"": self.validation} if self.validation else {}

    def shares(self) -> dict[str, float]:
        """Each source's share of the tokens. Shares sum to 1, whatever the weights sum to."""
        total = sum(source.weight for source in self.sources.values())
        return {name: source.weight / total for name, source in self.sources.items()}


@section
class Batch:
    """The global batch, in sequences of the context length. There is one update per batch."""

    sequences: AtLeast1
    """Sequences in a step, over all processes."""
    ramp: tuple[tuple[AtLeast0, AtLeast1], ...] = ()
    """Smaller batches at first, as [first step, sequences] pairs: `[[0, 128], [2000, 256]]`. The
    first pair starts at step 0, the last one has `batch.sequences`. Empty: no ramp."""
    micro_batch: AtLeast1 = 1
    """Largest number of sequences that one process computes at once. More need more memory."""

    def __post_init__(self) -> None:
        if not self.ramp:
            return
        starts = [start for start, _ in self.ramp]
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"the steps in batch.ramp must start at 0 and increase, not {starts}")
        if self.ramp[-1][1] != self.sequences:
            raise ValueError(
                f"batch.ramp ends at {counted(self.ramp[-1][1], 'sequence')}, "
                f"but batch.sequences is {self.sequences}"
            )


@section
class Optimizer:
    """AdamW. The authors' released code has lr 4e-4 and β1 0.9 instead."""

    lr: Positive = 5e-4
    """Learning rate at the peak of the schedule."""
    betas: tuple[Below1, Below1] = (0.99, 0.95)
    """AdamW's β1 and β2: how much of their averages of the gradient and its square is kept in a
    step."""
    eps: Positive = 1e-8
    """AdamW's ε, added to the root of the average square."""
    weight_decay: NonNegative = 0.1
    """AdamW's weight decay, for all matrices except the embedding. It is multiplied by the
    learning rate."""
    clip: PositiveOrInf = 0.5
    """Largest global gradient norm; a larger gradient is scaled down to it. inf: no clipping."""


@section
class Schedule:
    """The learning rate by step; `train/schedule.py` has the formulas."""

    kind: Decay = "cosine"
    """Form of the decay."""
    warmup: AtLeast0 = 3000
    """Steps of linear warm-up from 0 to `optimizer.lr`."""
    decay: AtLeast0 = 0
    """Steps of the decay. 0: all steps between warm-up and cool-down."""
    cooldown: AtLeast0 = 0
    """Steps of linear cool-down to 0, after the decay."""
    factor: Positive = 0.1
    """Learning rate at the end of the decay, relative to the peak."""
    reference: AtLeast0 = 0
    """For the exponential decay only: `factor` is reached after this many steps of the decay. 0:
    at its end."""

    def __post_init__(self) -> None:
        if self.reference and self.kind != "exponential":
            raise ValueError(
                f"schedule.reference needs the kind exponential, but schedule.kind is {self.kind}"
            )


TRACKERS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}  # with their extras


def _check_hook(name: str) -> str:
    if _names_a_class(name):
        return name
    raise ValueError(
        f'run.hooks has "file.py:Class" or "package.module:Class" in its list, not {name!r}'
    )


def _check_tracker(name: str) -> str:
    if name in TRACKERS or _names_a_class(name):
        return name
    known = ", ".join(f'"{tracker}"' for tracker in TRACKERS)
    raise ValueError(
        f'run.trackers has {known}, "file.py:Class" or "package.module:Class" in its list, '
        f"not {name!r}"
    )


def _names_a_class(name: str) -> bool:
    module, _, attribute = name.rpartition(":")
    is_module = module.endswith(".py") or not re.search(r"^\.|/", module)
    return bool(module) and attribute.isidentifier() and is_module


@section
class Run:
    """Length, precision, checkpoints and logs."""

    steps: AtLeast1
    """Step at which the run ends. With `start_step`, the steps before it count too."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**64)] = 0
    """Seed of the first weights and of the order of the data."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation; weights and averages are float32. auto: bfloat16 on GPUs, float32
    on CPUs."""
    activation_checkpointing: Literal["none", "block", "selective", "products"] = "none"
    """What the forward pass keeps for the backward pass: everything (`none`), the outputs of
    matrix products and of the cell (`selective`), the outputs of matrix products alone
    (`products`), or each block's input (`block`). Less memory
    takes more time."""
    compile: StrictBool = True
    """Compile each block with `torch.compile`, on GPUs."""
    nan_policy: Literal["skip", "stop"] = "skip"
    """If loss or gradient are not finite: skip the step, or stop the run. 20 skipped steps in a
    row, or all steps of a shorter run, also stop it."""
    save_every: AtLeast0 = 1000
    """Steps between checkpoints. 0: only at the end."""
    keep_last: AtLeast1 = 2
    """Number of latest checkpoints to keep."""
    keep_every: AtLeast0 = 0
    """Also keep the checkpoints of steps that this number divides. 0: none."""
    validate_every: AtLeast0 = 0
    """Steps between validations. 0: never."""
    keep_best: StrictBool = True
    """Also keep the checkpoint with the lowest validation loss."""
    log_every: AtLeast1 = 50
    """Steps between lines of the log, which have mean and max over these steps, and between gate
    statistics."""
    time_limit: NonNegative = 0.0
    """Hours after which to save and stop. 0: no limit."""
    trackers: tuple[Annotated[str, AfterValidator(_check_tracker)], ...] = ()
    """Where the metrics go besides `metrics.jsonl`: `"tensorboard"`, `"wandb"`, `"mlflow"`, or a
    class of your own, as in `hooks`."""
    hooks: tuple[Annotated[str, AfterValidator(_check_hook)], ...] = ()
    """Code of your own to call, as `"file.py:Class"` or `"package.module:Class"`. Files are found
    from where the command runs."""


@section
class Lora:
    """LoRA: the weights of `init_from` are frozen, and low-rank additions to them are trained."""

    rank: AtLeast1 = 16
    """Rank of the additions B A. They have rank × (rows + columns) numbers for each matrix."""
    alpha: Positive = 32.0
    """The addition is B A × `alpha` / `rank`."""
    dropout: Below1 = 0.0
    """Dropout of the input of A."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Names of the layers that get an addition, in every block."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("lora.targets is empty; name at least one layer")


@section
class StateTuning:
    """State tuning: the weights of `init_from` are frozen, and the state that every text starts
    from is trained."""

    layers: tuple[AtLeast0, ...] = ()
    """Numbers of the blocks whose C and n are trained, from 0. The others start from zeros. Empty:
    all."""
    rank: AtLeast0 = 0
    """Rank of each head's C, as a product of two matrices. 0: all numbers of C."""
    init_state: str = ""
    """State file to start from, such as one of `generate --save-state`. Empty: zeros."""


class Layout(NamedTuple):
    """The device mesh, one process per GPU: replicas of shards of tensor-parallel groups."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.data_parallel * self.tp


@section
class Parallel:
    """The device mesh, one process per GPU. One of the two data-parallel sizes may be -1."""

    dp_shard: StrictInt = -1
    """FSDP shards of weights and optimizer. -1: all processes that the others leave."""
    dp_replicate: StrictInt = 1
    """Copies of the shards; with `dp_shard` this is HSDP. -1: all processes that the others
    leave."""
    tp: AtLeast1 = 1
    """Tensor-parallel processes, which share heads and feed-forward width. It must divide both."""

    def __post_init__(self) -> None:
        for name, size in (("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)):
            if size < 1 and size != -1:
                raise ValueError(
                    f"parallel.{name} must be at least 1, or -1 for all processes, not {size}"
                )
        if self.dp_shard == self.dp_replicate == -1:
            raise ValueError("parallel.dp_shard and parallel.dp_replicate cannot both be -1")

    def layout(self, world: int | None = None) -> Layout:
        """The mesh for `world` processes, by default the fewest possible."""
        given = self.tp * abs(self.dp_shard) * abs(self.dp_replicate)
        world = given if world is None else world
        is_open = -1 in (self.dp_shard, self.dp_replicate)
        if world < 1 or (world % given if is_open else world != given):
            needed = f"a multiple of {given}" if is_open else str(given)
            raise ValueError(
                f"the number of processes is {world}, but dp_replicate {self.dp_replicate} × "
                f"dp_shard {self.dp_shard} × tp {self.tp} needs {needed}"
            )
        rest = world // given
        replicate = rest if self.dp_replicate == -1 else self.dp_replicate
        return Layout(replicate, rest if self.dp_shard == -1 else self.dp_shard, self.tp)


_NEEDED = ("embedding_dim", "num_blocks", "num_heads")  # of a model without a size


def _read_model(table: Any) -> ModelConfig:
    """`size = "7b"`, the fields of a `ModelConfig`, or a size with some fields changed."""
    if isinstance(table, ModelConfig):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(f"model must be a table, not {table!r}")
    types: dict[str, Any] = {field.name: field.type for field in fields(ModelConfig)}
    for key in table:
        if key not in ("size", *types):
            raise ValueError(_unknown(f"model.{key}", str(key), ["size", *types]))
    values = dict(table)
    for key, value in table.items():
        if value == "none" and types.get(key) == float | None:
            values[key] = None  # TOML has no null
    size = values.pop("size", None)
    try:
        if isinstance(size, str):
            return ModelConfig(**asdict(ModelConfig.named(size)) | values)
        if size is not None:
            raise ValueError(f"size must be a string, not {size!r}")
        for needed in _NEEDED:
            if needed not in values:
                raise ValueError(f"{needed} is missing; give it, or a size, or init_from")
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error


@section
class Recipe:
    """A whole run. Every instance is consistent: a contradiction is a `ValueError`.

    `init_from` alone takes the weights of a folder or hub id and starts at step 0: fine-tuning.
    With `start_step` it is the folder of a run; training continues from that run's checkpoint at
    this step, optimizer included, with this recipe's data and schedule: the paper's second stage.
    """

    name: str
    model: Annotated[ModelConfig, PlainValidator(_read_model)]
    data: Data
    batch: Batch
    run: Run
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    lora: Lora | None = None
    state_tuning: StateTuning | None = None
    init_from: str = ""
    """Where the first weights come from: a checkpoint folder or a hub id. With `start_step`, the
    folder of a run. `[model]` may then be left out. Empty: new weights."""
    start_step: AtLeast0 = 0
    """Step at which this recipe continues the run in `init_from`, optimizer included. 0: start at
    step 0, with the weights alone."""

    def __post_init__(self) -> None:
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
            raise ValueError("start_step needs init_from: the folder of the run to continue")
        if self.run.validate_every and not self.data.validation:
            raise ValueError("run.validate_every needs data.validation: a folder of held-out text")
        for what, size in (
            ("number of heads", self.model.num_heads),
            ("feed-forward width", self.model.ffn_dim),
        ):
            if size % self.parallel.tp:
                raise ValueError(
                    f"parallel.tp ({self.parallel.tp}) does not divide the {what} ({size})"
                )
        if self.lora is not None and self.state_tuning is not None:
            raise ValueError("[lora] and [state_tuning] cannot be combined: leave one of them out")
        if self.is_frozen:
            self._check_frozen("[state_tuning]" if self.lora is None else "[lora]")
        if self.lora is not None:
            self._check_lora(self.lora)
        if self.state_tuning is not None:
            self._check_state_tuning(self.state_tuning)
        if -1 not in (self.parallel.dp_shard, self.parallel.dp_replicate):
            self.layout()

    def _check_frozen(self, name: str) -> None:
        if not self.init_from:
            raise ValueError(f"{name} needs init_from: the folder of the weights to adapt")
        if self.start_step:
            raise ValueError(f"{name} starts at step 0: leave start_step out")
        if self.parallel.tp > 1:
            raise ValueError(
                f"{name} cannot be split over tensor-parallel processes: set parallel.tp = 1, "
                f"not {self.parallel.tp}"
            )

    def _check_lora(self, lora: Lora) -> None:
        try:
            adapted_shapes(self.model, lora.targets)
        except ValueError as error:
            raise ValueError(f"lora.targets: {error}") from error

    def _check_state_tuning(self, tuning: StateTuning) -> None:
        if self.data.packing != "documents":
            raise ValueError(
                "[state_tuning] needs one document in each sequence, because the state is reset "
                f'between documents: set data.packing = "documents", not "{self.data.packing}"'
            )
        if self.model.state_parts().keys() != {"C", "n", "m"}:
            raise ValueError(f"[state_tuning] does not know the state of block {self.model.block}")
        layers, blocks = tuning.layers, self.model.num_blocks
        if len(set(layers)) < len(layers) or max(layers, default=0) >= blocks:
            raise ValueError(
                f"state_tuning.layers must be different numbers from 0 to {blocks - 1}, "
                f"not {list(layers)}"
            )
        if tuning.init_state and layers:
            raise ValueError("state_tuning.init_state needs all layers: leave layers out")
        most = min(self.model.d_qk, self.model.d_hv)
        if tuning.rank > most:
            raise ValueError(f"state_tuning.rank must be at most {most}, not {tuning.rank}")

    @property
    def is_frozen(self) -> bool:
        """True if the weights are those of `init_from` and stay as they are."""
        return self.lora is not None or self.state_tuning is not None

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
        """The mesh for `world` processes. Every batch of the run must divide evenly among them."""
        layout = self.parallel.layout(world)
        for start, sequences in self.ramp.stages:
            if sequences % layout.data_parallel:
                raise ValueError(
                    f"the batch of {counted(sequences, 'sequence')} from step {start} does not "
                    f"divide among {layout.data_parallel} data-parallel processes"
                )
        return layout

    def micro_batches(self, step: int, layout: Layout) -> tuple[int, int]:
        """Size and number of each process's micro-batches at this step."""
        per_process = self.ramp.sequences(step) // layout.data_parallel
        return micro_batches(per_process, self.batch.micro_batch)

    def tokens_between(self, start: int, end: int) -> int:
        """Tokens of the steps start … end − 1."""
        sequences = self.ramp.sequences_before(end) - self.ramp.sequences_before(start)
        return sequences * self.data.context_length

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def section_name(cls: type) -> str:
    """The name of a section's table in a recipe."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


# Error messages


def _sentence(error: ValidationError, cls: Any) -> str:
    """One sentence for the first of pydantic's errors. Unknown settings come before all others."""
    first = min(error.errors(), key=lambda found: found["type"] != "unexpected_keyword_argument")
    location = first["loc"]
    match location:
        case int(position), *inside if position < len(fields(cls)):  # a positional argument
            location = fields(cls)[position].name, *inside
    name = "" if cls is Recipe else f".{section_name(cls)}"
    name += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    name = name.removeprefix(".")
    match first["type"]:
        case "missing":
            return f"{name} is missing" + ("; give it, or init_from" if name == "model" else "")
        case "value_error":
            return str(first["ctx"]["error"])
        case "unexpected_keyword_argument":
            for part in location[:-1]:
                hints = get_type_hints(cls) if is_dataclass(cls) else {}
                cls = hints.get(str(part)) or get_args(cls)[1]  # a section, or a dict of them
                cls = get_args(cls)[0] if isinstance(cls, UnionType) else cls  # or None
            return _unknown(name, str(location[-1]), [field.name for field in fields(cls)])
        case "dataclass_type" | "dict_type":
            return f"{name} must be a table, not {first['input']!r}"
        case "too_long":
            return f"{name} must have {first['ctx']['max_length']} values, not {first['input']!r}"
    wanted = first["msg"].removeprefix("Input should be ").replace("valid tuple", "list")
    return f"{name} must be {wanted}, not {first['input']!r}"


def _unknown(name: str, key: str, known: list[str]) -> str:
    if name == "run.tensorboard":
        return 'run.tensorboard is now run.trackers = ["tensorboard"]'
    near = [
        f"{table}.{key}"
        for table, section in get_type_hints(Recipe).items()
        for each in (get_args(section) or [section])
        if is_dataclass(each) and key in {field.name for field in fields(each)}
    ]
    near = near or get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown setting {name}; {hint}"


# Files and overrides


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a named recipe or a TOML file, then applies `a.b=c` overrides."""
    name, tables = _read_tables(name_or_path)
    for (*outer, last), value in parse_overrides(overrides):
        table = tables
        for key in outer:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, Mapping) else {}
            table = table[key]
        table[last] = value
    try:
        return Recipe.from_dict({"name": name, **tables, **_model_of_init_from(tables)})
    except ValueError as error:
        raise ValueError(f"recipe {name_or_path}: {error}") from error


def _model_of_init_from(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`[model]`, completed from the model that `init_from` names if its shape is not given."""
    model, init_from = tables.get("model", {}), tables.get("init_from")
    if not (isinstance(model, Mapping) and isinstance(init_from, str) and init_from):
        return {}
    if "size" in model or all(name in model for name in _NEEDED):
        return {}
    return {"model": asdict(model_of(init_from, tables.get("start_step", 0))) | dict(model)}


def model_of(init_from: str, start_step: int) -> ModelConfig:
    """The config of the model that `init_from` names. Of a hub id, only that file is downloaded."""
    if start_step:
        from xlstm7b.checkpoint import run_advice
        from xlstm7b.train.run_checkpoints import read_run, saved_steps, step_folder

        folder = Path(init_from) / "checkpoints"
        if start_step not in saved_steps(folder):
            raise ValueError(f"{folder} has no checkpoint of step {start_step}")
        recipe = read_run(step_folder(folder, start_step))["recipe"]
        if recipe.get("lora") or recipe.get("state_tuning"):
            raise ValueError(
                f"start_step continues a run that trained the whole model; leave it out, because "
                f"{init_from} is the folder of a {run_advice(Path(init_from))}"
            )
        return ModelConfig(**recipe["model"])
    return ModelConfig.from_pretrained(init_from)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    names = (file.name for file in (files("xlstm7b") / "recipes").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def parse_overrides(settings: Iterable[str]) -> list[tuple[list[str], Any]]:
    """`["optimizer.lr=4e-4", "data.validation=books/valid"]` as keys and values.

    Values are TOML. A value that is not TOML is a string, so paths need no quotes.
    """
    parsed = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise ValueError(f"a setting is written a.b=c, not {setting!r}")
        try:
            read = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            read = {}
        value = read.get("value")
        is_plain = len(read) == 1 and isinstance(value, bool | int | float | str | list | dict)
        parsed.append((keys, value if is_plain else text.strip()))
    return parsed


def _read_tables(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """A recipe's name, and its tables merged into those of the recipes that it extends."""
    tables: dict[str, Any] = {}
    wanted, folder = str(name_or_path), None
    seen: list[str] = []
    while wanted or not seen:
        label, folder, base = _read_toml(wanted, folder)
        if label in seen:
            raise ValueError(f"recipes extend each other: {' → '.join([*seen, label])}")
        seen.append(label)
        wanted = base.pop("extends", "")
        if not isinstance(wanted, str):
            raise ValueError(f"recipe {label}: extends must be a string, not {wanted!r}")
        data, base_data = tables.get("data"), base.get("data")
        if isinstance(data, dict) and isinstance(base_data, dict):
            for name in {"sources", "validation"} & data.keys():
                base_data.pop(name, None)  # a mixture is replaced, not merged
        tables = _merge(base, tables)
    return Path(seen[0]).name.removesuffix(".toml"), tables


def _read_toml(wanted: str, folder: Path | None = None) -> tuple[str, Path | None, dict[str, Any]]:
    """Name or path, folder that relative paths start from, and tables of a recipe.

    `wanted` is the name of one in the package, or a path that starts at `folder`.
    """
    if "/" in wanted or wanted.endswith(".toml"):
        path = (folder or Path()) / wanted
        if not path.is_file():
            raise ValueError(f"there is no recipe file {path}")
        label, folder = str(path.resolve()), path.resolve().parent
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"recipe {path} is not a text file: {error}") from error
    else:
        names = recipe_names()
        if wanted not in names:
            raise ValueError(
                f"unknown recipe {wanted!r}; choose from {', '.join(names)}, "
                "or give the path of a .toml file"
            )
        label, folder = wanted, None
        text = (files("xlstm7b") / "recipes" / f"{wanted}.toml").read_text(encoding="utf-8")
    try:
        return label, folder, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {label} is not a TOML file: {error}") from error


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merges tables recursively; any other value of `top` replaces that of `base`."""
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(under, value) if both else value  # type: ignore[arg-type]
    return merged
