# ruff: noqa: RUF009 (`option` makes a field)
"""What each benchmark measures: its options with their help, defaults and checks.

The command line is made from these classes, one option for each field. PyTorch is not imported
here, so `--help` is quick. `BENCHMARKS` lists all of them by subject.
"""

import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from xlstm7b.config import ModelConfig
from xlstm7b.devices import to_device

Numbers = tuple[int, ...]
Names = tuple[str, ...]


def option(
    help: str,  # noqa: A002
    default: Any = MISSING,
    *,
    on_cpu: Any = MISSING,
    choices: Names = (),
    least: int = 1,
    secret: str = "",
) -> Any:
    """A field with its help text, its default (`on_cpu` on a CPU) and the values it may have.

    Integers are at least `least`. Floats are above 0, or at least 0 if `least` is 0. `secret` names
    an environment variable that sets the field; a secret is never written to a file.
    """
    facts = {"help": help, "choices": choices, "least": least, "secret": secret, "on_cpu": on_cpu}
    return field(default=default, metadata=facts)


_PEAK = "By default the known one on an H200, else measured."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of one benchmark. Make one with `of`, which knows the defaults of a CPU."""

    ARGUMENT: ClassVar[str] = ""  # the field that is a positional argument of the command

    @classmethod
    def of(cls, **given: Any) -> Self:
        """A plan with defaults for everything that is missing or None. Lists become tuples."""
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        for each in fields(cls):
            if each.name == "device":
                chosen.setdefault("device", to_device(None).type)
            elif each.metadata["on_cpu"] is not MISSING and chosen["device"] == "cpu":
                chosen.setdefault(each.name, each.metadata["on_cpu"])
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        public = [each.name for each in fields(self) if not each.metadata["secret"]]
        return {name: getattr(self, name) for name in public}

    @property
    def runs_on(self) -> str:
        """cuda or cpu."""
        return str(getattr(self, "device", "cpu"))

    def check(self) -> None:
        """Raises a `ValueError` for the first option that cannot be used."""
        for each in fields(self):
            value, facts = getattr(self, each.name), each.metadata
            what = each.name.removesuffix("s")
            for one in value if isinstance(value, tuple) else (value,):
                if facts["choices"] and one not in facts["choices"]:
                    known = ", ".join(facts["choices"])
                    raise ValueError(f"unknown {what} {one!r}; choose from {known}")
                if what == "size":
                    ModelConfig.named(one)
                if isinstance(one, int) and one < facts["least"] and not isinstance(one, bool):
                    raise ValueError(f"{each.name} must be at least {facts['least']}, not {one}")
                if isinstance(one, float) and not (one > 0 or one == facts["least"]):
                    raise ValueError(f"{each.name} must be above 0, not {one:g}")


@dataclass(frozen=True, kw_only=True)
class SizedPlan(Plan):
    """A model with random weights, as any library has it."""

    device: str = option("Device to measure on.", choices=("cuda", "cpu"))
    size: str = option("Size of the model, such as 7b.", "7b", on_cpu="tiny")
    dtype: str = option(
        "Dtype of the weights.", "bfloat16", on_cpu="float32", choices=("float32", "bfloat16")
    )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)


@dataclass(frozen=True, kw_only=True)
class ModelPlan(SizedPlan):
    """A model of this package with random weights."""

    state_dtype: str = option(
        "Dtype of the recurrent state.", "float32", choices=("float32", "bfloat16")
    )
    quantize: str = option(
        "Quantise the weights: int4 has groups of 64.", "no", choices=("no", "int8", "fp8", "int4")
    )


@dataclass(frozen=True, kw_only=True)
class Kernels(Plan):
    """Check the cell's GPU kernels against float64, then time them: sequences and single steps."""

    sizes: Names = option("Model sizes whose head sizes are timed.", ("7b", "1.4b", "160m"))
    tokens: int = option("Tokens of all sequences in a timing.", 65536)
    lengths: Numbers = option(
        "Lengths of the sequences, in tokens.", (2048, 4096, 8192, 16384, 32768, 65536)
    )
    batches: Numbers = option("Batch sizes of single steps.", (1, 8, 64))
    peak_tflops: float | None = option(f"Peak FLOP/s of the GPU, in TFLOP/s. {_PEAK}", None)
    peak_tbs: float | None = option(f"Peak memory bandwidth in TB/s. {_PEAK}", None)
    peers: Names = option(
        "Other libraries to measure.",
        (),
        choices=("mlstm_kernels", "fla", "gated_deltanet", "sdpa"),
    )
    timeout: float = option("Time limit for one peer, in seconds.", 300.0)

    runs_on = "cuda"

    def check(self) -> None:
        super().check()
        for length in self.lengths:
            if self.tokens % length:
                raise ValueError(f"sequences of {length} do not divide {self.tokens} tokens")


_PARTS = ("memory", "decode", "context", "first", "prefill")
_MORE_PARTS = ("replay", "drift", "speculation")  # measured if they are asked for
_PEERS = (
    *("transformers", "xlstm", "llama2", "llama3"),
    *("falcon-mamba", "codestral-mamba", "rwkv7"),
)


@dataclass(frozen=True, kw_only=True)
class Generation(ModelPlan):
    """Time generation: memory, decoding, first tokens, prefill, replay, speculation."""

    size: str = option("Size of the model, such as 7b.", "7b", on_cpu="160m")
    parts: Names = option("Parts to measure.", _PARTS, choices=(*_PARTS, *_MORE_PARTS))
    batches: Numbers = option("Batch sizes to decode.", (1, 8, 32, 64, 128, 256), on_cpu=(1, 4))
    contexts: Numbers = option(
        "Tokens read before decoding, or before memory is measured.",
        (0, 2048, 8192, 16384, 32768, 131072),
        on_cpu=(0, 128, 512),
        least=0,
    )
    prompts: Numbers = option(
        "Prompt lengths for the time to the first tokens.",
        (1, 128, 512, 1024, 2048, 4096, 8192, 16384),
        on_cpu=(128, 512),
    )
    first: int = option("Also measure the time to this many tokens.", 100, on_cpu=20)
    generated: int = option("Tokens generated before memory is measured.", 1000, on_cpu=100)
    tokens: int = option("Tokens of all prompts in a prefill.", 65536, on_cpu=1024)
    lengths: Numbers = option(
        "Prompt lengths in a prefill.", (65536, 16384, 8192, 2048), on_cpu=(1024,)
    )
    folder: str | None = option(
        "Checkpoint folder: also measure the time from loading it to the first token. The parts "
        "drift and speculation then measure its model.",
        None,
    )
    draft: str | None = option(
        "Checkpoint folder of a draft model for the folder's model, in the part speculation.", None
    )
    text: str | None = option(
        "Text file that the folder's model decodes in the part drift, and from which the part "
        "speculation makes prompts.",
        None,
    )
    text_tokens: int = option(
        "Tokens generated after each prompt in the part speculation, with --folder.",
        128,
        on_cpu=64,
        least=2,
    )
    drift_tokens: int = option("Tokens decoded in the part drift.", 8192, on_cpu=256)
    seconds: float = option("Length of one timing of decoding, in seconds, about.", 0.3)
    peak_tflops: float | None = option(f"Peak FLOP/s of the processor, in TFLOP/s. {_PEAK}", None)
    peak_tbs: float | None = option(f"Peak memory bandwidth in TB/s. {_PEAK}", None)
    peers: Names = option("Other libraries' models to measure.", (), choices=_PEERS)
    only_peers: bool = option("Measure only the peers, not this package.", False)
    timeout: float = option("Time limit for one peer, in seconds.", 300.0)
    compile_seconds: float = option("Time limit for compiling a peer, in seconds.", 150.0)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Default lengths are those that divide the tokens."""
        plan = super().of(**given)
        if given.get("lengths") is not None or plan.tokens < 1:
            return plan
        whole = [length for length in plan.lengths if plan.tokens % length == 0]
        return super().of(**given | {"lengths": whole or [plan.tokens]})

    def check(self) -> None:
        super().check()
        for length in self.lengths:
            if self.tokens % length:
                raise ValueError(f"prompts of {length} do not divide {self.tokens} tokens")
        for folder in (self.folder, self.draft):
            if folder == "":
                raise ValueError("the path of a saved model is empty")
            if folder is not None and not (Path(folder) / "config.json").is_file():
                raise ValueError(f"there is no saved model in {folder}: it has no config.json")
        if "drift" in self.parts and (self.folder is None or self.text is None):
            raise ValueError("the part drift needs --folder and --text")
        if self.draft is not None and (self.folder is None or "speculation" not in self.parts):
            raise ValueError("--draft needs --folder and the part speculation")
        if self.text is not None and self.folder is None:
            raise ValueError("--text needs --folder: its model reads the text")
        if "speculation" in self.parts and self.quantize != "no":
            raise ValueError("the part speculation needs weights that are not quantised")
        if self.text is not None and not Path(self.text).is_file():
            raise ValueError(f"there is no file {self.text}")
        # Read here too: else a mistake in these files would show after other parts.
        if "drift" in self.parts:
            from xlstm7b.bench.drift import read_tokens

            read_tokens(self)
        if "speculation" in self.parts and self.folder is not None:
            from xlstm7b.bench.texts import read_inputs

            read_inputs(self)


SPEED_PARTS = ("context", "first", "generated", "prefill", "full")


@dataclass(frozen=True, kw_only=True)
class Speed(Generation):
    """What `xlstm7b experiment speed` measures of each model: the figures of the paper."""

    size: str = option("Size of the model, such as 7b.", "7b", on_cpu="tiny")
    parts: Names = option("Figures to measure.", SPEED_PARTS, choices=SPEED_PARTS)
    contexts: Numbers = option(
        "Tokens read before decoding.",
        (0, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
        on_cpu=(0, 40, 80),
        least=0,
    )
    prompts: Numbers = option(
        "Lengths of the prompts, in tokens.",
        (1, 128, 512, 2048, 8192, 16384, 32768, 65536),
        on_cpu=(1, 20),
    )
    first: int = option("Tokens generated after a prompt.", 100, on_cpu=3)
    generated_counts: Numbers = option(
        "Numbers of tokens generated without a prompt.",
        (256, 512, 1024, 2048, 4096),
        on_cpu=(4, 20),
    )
    tokens: int = option("Tokens of all prompts in a prefill.", 65536, on_cpu=64)
    lengths: Numbers = option(
        "Prompt lengths in a prefill.", (65536, 32768, 16384, 8192, 4096, 2048), on_cpu=(64, 32)
    )
    full_contexts: Numbers = option(
        "Contexts of a full GPU.", (2048, 8192, 16384, 32768, 65536, 131072), on_cpu=(20, 40)
    )
    most_rows: int = option("Largest batch of a full GPU.", 2048, on_cpu=2)
    seconds: float = option("Length of one timing of decoding.", 0.3, on_cpu=0.001)
    timeout: float = option("Time limit for one model, in seconds.", 480.0)

    # Results are continued whatever these are: options of `Generation` that are not used here, and
    # time limits.
    FREE: ClassVar[Names] = (
        *("parts", "batches", "generated", "folder", "draft", "text", "text_tokens"),
        *("drift_tokens", "peers", "only_peers", "timeout", "compile_seconds"),
    )


@dataclass(frozen=True, kw_only=True)
class Engine(ModelPlan):
    """Time continuous batching without HTTP, and the first token after a shared prefix."""

    parts: Names = option(
        "Parts to measure. grammar: every output follows a JSON schema.",
        ("streams", "prefix"),
        choices=("streams", "grammar", "prefix"),
    )
    streams: int = option("Number of requests at the same time.", 64)
    requests: int = option("Number of requests in all.", 192)
    prompt_tokens: int = option("Tokens of each prompt.", 512)
    new_tokens: str = option("Tokens of each output: a number, or a range such as 128-384.", "256")
    adapters: int = option(
        "Random LoRA adapters of rank 16, which the requests have in turn. The limit is without.",
        0,
        least=0,
    )
    prefill_tokens: Numbers = option(
        "Prompt tokens per engine step. Each number is one row of the table.", (512,)
    )
    prefix_tokens: int = option("Tokens of the shared prefix.", 30_000)
    cache_gb: float = option("Device memory of the prefix cache, in GB.", 4.0, least=0)
    tokenizer: str | None = option(
        "Path of a tokenizer.json. By default a byte-level tokenizer.", None
    )

    def new_tokens_range(self) -> tuple[int, int]:
        low, _, high = self.new_tokens.partition("-")
        if not (
            low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)
        ):
            raise ValueError(f"new_tokens must look like 256 or 128-384, not {self.new_tokens!r}")
        return int(low), int(high or low)

    def check(self) -> None:
        super().check()
        self.new_tokens_range()


@dataclass(frozen=True, kw_only=True)
class Serve(Plan):
    """Put a running server under load: time to first token, between chunks, throughput, errors.

    Ctrl-C ends the load and prints the results so far.
    """

    url: str = option("Address of the server, such as http://127.0.0.1:8000.")
    rate: float | None = option(
        "Requests per second, sent at random times. By default 4, without --clients.", None
    )
    clients: int = option(
        "Clients that each send a request once the last one is answered, in place of --rate.",
        0,
        least=0,
    )
    seconds: float = option("How long to send requests, in seconds.", 30.0)
    prompt_tokens: Numbers = option("Prompt lengths to draw from.", (32, 128, 512), least=0)
    new_tokens: Numbers = option("Output lengths to draw from.", (16, 64, 128))
    shared_tokens: int = option("Length of a prefix that all prompts share, in tokens.", 0, least=0)
    seed: int = option("Seed of the lengths, times and prompts.", 0, least=0)
    timeout: float = option("Time limit for one response, in seconds.", 120.0)
    api_key: str | None = option("API key of the server.", None, secret="XLSTM7B_API_KEY")

    ARGUMENT = "url"

    @classmethod
    def of(cls, **given: Any) -> Self:
        if given.get("rate") is None and not given.get("clients"):
            given["rate"] = 4.0
        return super().of(**given)

    @property
    def path(self) -> str:
        """The path of the URL, without /v1, in which the base URLs of OpenAI clients end."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    def check(self) -> None:
        super().check()
        if not _is_address(self.url):
            raise ValueError(f"{self.url!r} is not a server address such as http://127.0.0.1:8000")
        if self.clients and self.rate is not None:
            raise ValueError("give either --rate or --clients, not both: clients have no rate")
        if not self.prompt_tokens or not self.new_tokens:
            raise ValueError("prompt_tokens and new_tokens must each have at least one length")
        if self.shared_tokens + min(self.prompt_tokens) < 1:
            raise ValueError("every prompt must have at least one token")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False


@dataclass(frozen=True, kw_only=True)
class Training(Plan):
    """Time training with random text: tokens per second, MFU, memory."""

    device: str = option("Device to measure on.", choices=("cuda", "cpu"))
    cases: Names = option(
        "Cases, separated by commas: SIZE:BATCHxLENGTH or SIZE:BATCHxLENGTHxMICRO_BATCHES, "
        "optionally with :block, :selective or :products, and :lora or :state, "
        "for quantised weights with -int8 or -int4.",
        (
            *("160m:16x4096", "400m:16x4096", "1.4b:4x8192"),
            *("7b:4x8192x2:block", "7b:1x8192x8:selective"),
        ),
        on_cpu=("tiny:4x512",),
    )
    steps: int = option("Number of steps to time; their median is shown.", 10)
    peers: Names = option(
        "Other libraries' models to measure.", (), choices=("xlstm", "transformers")
    )
    timeout: float = option("Time limit for one case, in seconds.", 300.0)

    def check(self) -> None:
        super().check()
        for case in self.cases:
            TrainingCase.parse(case)


@dataclass(frozen=True)
class TrainingCase:
    """A model size, the batches of a step, which activations are recomputed, what is trained."""

    size: str
    batch: int
    length: int
    micro_batches: int = 1
    activations: str = "none"
    # "lora" with rank 16 or "state" on frozen bfloat16 weights, with "-int8" or "-int4" on others.
    trained: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        pattern = r"([^:]+):([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?"
        pattern += r"(?::(none|block|selective|products))?(?::((?:lora|state)(?:-int8|-int4)?))?"
        match = re.fullmatch(pattern, text)
        if match is None:
            raise ValueError(
                "a case is SIZE:BATCHxLENGTH or SIZE:BATCHxLENGTHxMICRO_BATCHES, optionally "
                "followed by :block, :selective or :products, and by :lora or :state, for "
                f"quantised weights with -int8 or -int4, not {text!r}"
            )
        size, batch, length, micro_batches, activations, trained = match.groups()
        ModelConfig.named(size)
        numbers = int(batch), int(length), int(micro_batches or 1)
        return cls(size, *numbers, activations or "none", trained or "")

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.micro_batches


@dataclass(frozen=True, kw_only=True)
class Evaluation(ModelPlan):
    """Time evaluation with random weights: shared prefixes, and prompts of many lengths."""

    questions: int = option("Questions with four answers each.", 100)
    batch_size: int | None = option(
        "Rows in a batch of questions. By default as many as free memory allows.", None
    )
    lengths: Numbers = option(
        "Lengths of the prompts, in tokens.", (4096, 8192, 16384, 32768, 65536, 131072)
    )
    rows: int = option("Number of prompts that are continued at once.", 1)


@dataclass(frozen=True, kw_only=True)
class Cpu(Plan):
    """Compare this package with transformers on the CPU: prefill, decoding, training."""

    size: str = option("Size of the model that generates.", "160m")
    length: int = option("Length of the prompt, in tokens.", 1024)
    cases: Names = option("Training cases, written as in `bench training`.", ("tiny:4x512",))
    steps: int = option("Number of training steps to time; their median is shown.", 3)
    timeout: float = option("Time limit for transformers, in seconds.", 600.0)


@dataclass(frozen=True, kw_only=True)
class Transformers(SizedPlan):
    """Time the xLSTM of transformers with `optimize`: generate, and training steps."""

    batches: Numbers = option("Batch sizes to generate.", (1, 8), on_cpu=(1,))
    seconds: float = option("Length of one timing of decoding, in seconds, about.", 1.0)
    cases: Names = option(
        "Training cases, written as in `bench training`.", ("400m:16x4096",), on_cpu=("tiny:2x64",)
    )
    steps: int = option("Number of training steps to time; their median is shown.", 10, on_cpu=2)
    peers: Names = option(
        "Others to measure: transformers as it is, the authors' package.",
        ("transformers", "xlstm"),
        choices=("transformers", "xlstm"),
    )
    timeout: float = option("Time limit for one case, in seconds.", 300.0)

    def check(self) -> None:
        super().check()
        for case in self.cases:
            TrainingCase.parse(case)


@dataclass(frozen=True, kw_only=True)
class Loader(Plan):
    """Time how fast training batches come from prepared shards."""

    folders: tuple[Path, ...] = option(
        "Folders that `xlstm7b prepare` wrote. They are mixed evenly."
    )
    lengths: Numbers = option("Lengths of the sequences, in tokens.", (2048, 8192))
    batches: Numbers = option("Sequences in a batch.", (8, 64))
    seconds: float = option("Length of each timing, in seconds.", 3.0)

    ARGUMENT = "folders"


CELL_KERNELS = ("states", "state_gradients", "h", "dv", "dq", "dk")
_KERNELS = (*CELL_KERNELS, "step", "replay", "pass", "products")


@dataclass(frozen=True, kw_only=True)
class Tune(Plan):
    """Search for the fastest launch parameters of the Triton kernels on this GPU."""

    size: str = option("Model size whose shapes are measured.", "7b")
    kernels: Names = option("Kernels to tune.", _KERNELS, choices=_KERNELS)
    batch: int = option("Sequences in a batch, for the chunkwise cell.", 8)
    length: int = option("Length of the sequences, for the chunkwise cell.", 8192)
    chunks: Numbers = option("Chunk sizes of the chunkwise cell.", (64, 128, 256))
    batches: Numbers = option("Batch sizes of steps, passes and products.", (1, 8, 64))
    state_dtype: str = option(
        "Dtype of the states in steps and passes by replay.",
        "float32",
        choices=("float32", "bfloat16"),
    )
    quantize: str = option(
        "Quantise the weights of the products.", "no", choices=("no", "int8", "fp8", "int4")
    )
    peak_tbs: float | None = option(f"Peak memory bandwidth in TB/s. {_PEAK}", None)
    processes: int = option("Number of processes that compile kernels.", 14)
    show: int = option("Number of fastest candidates to print.", 4)

    runs_on = "cuda"


BENCHMARKS: dict[str, type[Plan]] = {
    "kernels": Kernels,
    "generation": Generation,
    "engine": Engine,
    "serve": Serve,
    "training": Training,
    "evaluation": Evaluation,
    "transformers": Transformers,
    "cpu": Cpu,
    "loader": Loader,
    "tune": Tune,
}
