"""Whether this machine computes right numbers: each path of the package against float64.

A check draws inputs, runs what the package would run on this device, and compares it with the same
in float64. On a GPU that is a kernel; on a CPU it is plain PyTorch in float32 and the operators for
quantised weights. The inputs of the reference are rounded in the same way, so an error is that of
the path.

`xlstm7b doctor` runs all checks, `xlstm7b bench kernels` those of the cell before it times them.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlstm7b.accounting import cell_floor
from xlstm7b.bench.measure import measure, reason
from xlstm7b.config import ModelConfig
from xlstm7b.generate import SamplingParams
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.kernels import plain
from xlstm7b.generate.replay import INTERVAL
from xlstm7b.generate.sampler import Needs, Sampler, mask_words
from xlstm7b.mlstm import KERNEL_CHUNK_SIZE, MLSTMState, mlstm_sequence
from xlstm7b.mlstm.replay import Cursor, Pass, Ring
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.head import head_loss
from xlstm7b.model.layers import linear, soft_cap
from xlstm7b.quantize import cpu, gpu
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.weight import QuantizedWeight

REPEATS = 20  # runs that must give equal bits
_EPS, _CAP = 1e-6, 15.0
_GPU_MILLISECONDS = 20  # of one timing
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a check runs, and which form it checks: by default that of a CPU."""

    device: torch.device
    backend: str = "auto"  # of the cell over sequences
    operations: Any = plain  # of generation

    def draw(self, *shape: int, dtype: torch.dtype = FLOAT32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def vectors(self, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v for [..., NH, d_qk, d_hv]."""
        *rows, d_qk, d_hv = shape
        return [self.draw(*rows, width, dtype=dtype) for width in (d_qk, d_qk, d_hv)]

    def matrix(self, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return self.draw(n, k, dtype=dtype, scale=k**-0.5)

    def norm(self, width: int, dtype: torch.dtype) -> Tensor:
        """The weight of a norm."""
        return (1 + self.draw(width, scale=0.3)).to(dtype)

    def gates(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Input and forget gates as in a trained model."""
        return self.draw(*shape) - 6, self.draw(*shape) + 4

    def state(self, *shape: int, dtype: torch.dtype = FLOAT32) -> MLSTMState:
        """For [B, NH, d_qk, d_hv]."""
        C = self.draw(*shape, dtype=dtype)
        return MLSTMState(C, self.draw(*shape[:3]), self.draw(*shape[:2]))


class Work(NamedTuple):
    """What is timed, and what it has to compute and to move at least."""

    call: Callable[[], object]
    flops: float
    bytes: float


@dataclass
class Case:
    """Inputs of a check. `got` may be called any number of times."""

    got: Callable[[], Numbers]
    want: Callable[[], Numbers]
    tolerance: float
    work: Work | None = None


@dataclass(frozen=True)
class Check:
    """One line of the report. `family` is one of `kernel_verdicts.FAMILIES`, or "model"."""

    family: str
    name: str
    make: Callable[[Place], Case]


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    family: str
    name: str
    tolerance: float
    errors: dict[str, float] = field(default_factory=dict)  # by what was computed
    seconds: float | None = None
    share_of_limit: float | None = None
    problem: str | None = None  # why it is wrong

    @property
    def error(self) -> float:
        """The largest; NaN if there is one."""
        errors = [*self.errors.values()] or [0.0]
        return float(torch.tensor(errors, dtype=torch.float64).max())


def run_check(
    check: Check,
    place: Place,
    peaks: tuple[float, float] | None = None,
    *,
    repeats: int = REPEATS,
) -> Outcome:
    """Runs a check. With `peaks`, FLOP/s and bytes/s, it is also timed."""
    torch.manual_seed(0)
    try:
        case = check.make(place)
        first = {name: x.clone() for name, x in case.got().items()}
        differs = any(not same_bits(first, case.got()) for _ in range(repeats - 1))
        errors = {name: error(first[name], want) for name, want in case.want().items()}
        outcome = Outcome(check.family, check.name, case.tolerance, errors)
        if differs:
            return replace(outcome, problem="another run gave other bits")
        if not outcome.error <= case.tolerance:  # NaN is wrong, too
            wrong = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
            return replace(outcome, problem=f"{wrong} is wrong")
        if peaks is None or case.work is None:
            return outcome
        milliseconds = _GPU_MILLISECONDS if place.device.type == "cuda" else 0
        seconds = measure(case.work.call, place.device, gpu_milliseconds=milliseconds)
        least = max(case.work.flops / peaks[0], case.work.bytes / peaks[1])
        return replace(outcome, seconds=seconds, share_of_limit=least / seconds)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # such as a kernel that does not compile
        return Outcome(check.family, check.name, 0.0, problem=reason(failure)[:300])


def same_bits(first: Numbers, second: Numbers) -> bool:
    """True if all numbers are equal; NaN equals NaN."""
    return all(
        torch.equal(first[name].nan_to_num(nan=12345.0), x.nan_to_num(nan=12345.0))
        for name, x in second.items()
    )


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, where both are finite; infinite if other numbers are infinite."""
    got, want = got.detach().double(), want.detach().double()
    infinite = want.isinf()
    if got.shape != want.shape or not torch.equal(got[infinite], want[infinite]):
        return float("inf")
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    return float((got - want).norm() / want.norm().clamp(min=1e-300))


# What is checked


def sequence(
    place: Place,
    *,
    batch: int,
    length: int,
    heads: int,
    d_qk: int,
    d_hv: int,
    dtype: torch.dtype,
    tolerance: float,
    continued: bool = False,
) -> Case:
    """The cell over sequences, forward and backward; if `continued`, from a state, with resets."""
    shape = batch, length, heads
    parts = [*place.vectors(*shape, d_qk, d_hv, dtype=dtype), *place.gates(*shape)]
    weight = torch.randn_like(parts[2])
    state = resets = None
    if continued:
        state = place.state(batch, heads, d_qk, d_hv)
        resets = torch.rand(batch, length, device=place.device) < 0.01

    def run(backend: str, inputs: list[Tensor]) -> Numbers:
        leaves = [x.detach().requires_grad_() for x in inputs]
        start = state and MLSTMState(*(x.to(leaves[3].dtype) for x in state))
        h, after = mlstm_sequence(*leaves, state=start, resets=resets, backend=backend)
        memory = (after.C * after.m.exp()[..., None, None]).detach()
        gradients = torch.autograd.grad((h * weight).sum(), leaves)
        named = zip(("dq", "dk", "dv", "di", "df"), gradients, strict=True)
        return {"h": h.detach(), "C": memory, **dict(named)}

    def forward() -> object:
        return mlstm_sequence(*parts, state=state, resets=resets, backend=place.backend)

    floor = cell_floor(batch * length, KERNEL_CHUNK_SIZE, heads, d_qk, d_hv, causal=0.5)["forward"]
    return Case(
        partial(run, place.backend, parts),
        partial(run, "chunkwise", [x.double() for x in parts]),
        tolerance,
        Work(forward, floor["flops"], floor["bytes"]),
    )


def step(
    place: Place,
    *,
    rows: int,
    heads: int,
    d_qk: int,
    d_hv: int,
    dtype: torch.dtype,
    tolerance: float,
) -> Case:
    """One token of every row through cell, norm and gate."""
    parts = [*place.vectors(rows, heads, d_qk, d_hv, dtype=dtype), *place.gates(rows, heads)]
    gate, norm = place.draw(rows, heads, d_hv, dtype=dtype), place.norm(heads * d_hv, dtype)
    state = place.state(rows, heads, d_qk, d_hv)

    def run(operations: Any, wide: bool) -> Numbers:
        own = MLSTMState(*(_as(x, wide).clone() for x in state))
        inputs, ends = ([_as(x, wide) for x in group] for group in (parts, (gate, norm)))
        h = operations.step_cell(*inputs, own, *ends, _EPS, _EPS)
        return {"h": h, **own._asdict()}

    def timed() -> object:
        return place.operations.step_cell(*parts, state, gate, norm, _EPS, _EPS)

    work = Work(timed, 0, 2 * state.C.nbytes)
    return Case(partial(run, place.operations, False), partial(run, plain, True), tolerance, work)


def replay(
    place: Place,
    *,
    rows: int,
    heads: int,
    d_qk: int,
    d_hv: int,
    dtype: torch.dtype,
    tolerance: float,
    state_dtype: torch.dtype = FLOAT32,
    interval: int = INTERVAL,
) -> Case:
    """Steps by replay, until every row was folded. Some rows read no token in some steps."""
    steps = interval + 2
    live = torch.rand(steps, rows, device=place.device) < 0.9
    live[:, 0] = True
    tokens = [
        _token(place, (rows, heads, d_qk, d_hv), dtype, live[number]) for number in range(steps)
    ]
    norm = place.norm(heads * d_hv, dtype)
    state = place.state(rows, heads, d_qk, d_hv, dtype=state_dtype)

    def run(operations: Any, wide: bool) -> Numbers:
        own = MLSTMState(*(_as(x, wide).clone() for x in state))
        kind = torch.float64 if wide else dtype
        ring = Ring.zeros(rows, heads, interval, d_qk, d_hv, dtype=kind, device=place.device)
        seen = torch.arange(rows, device=place.device)
        folded, outputs = seen.clone(), []
        for (*inputs, gate), reads in zip(tokens, live, strict=True):
            cursor = operations.ordered(Cursor(folded, seen, reads, interval))
            wide_inputs = [_as(x, wide) for x in inputs]
            h = operations.replay_cell(
                *wide_inputs, own, ring, cursor, _as(gate, wide), _as(norm, wide), _EPS, _EPS
            )
            operations.advance(cursor)
            outputs.append(h.masked_fill(~reads[:, None, None], 0))
        return {"h": torch.stack(outputs), **own._asdict(), "folded": folded}

    return Case(partial(run, place.operations, False), partial(run, plain, True), tolerance)


def draft_pass(
    place: Place,
    *,
    rows: int,
    tokens: int,
    heads: int,
    d_qk: int,
    d_hv: int,
    dtype: torch.dtype,
    tolerance: float,
    interval: int = INTERVAL,
) -> Case:
    """Passes of several tokens, of which some are dropped, until rows are folded."""
    passes = 2 + 2 * interval // tokens
    lengths = torch.randint(1, tokens + 1, (passes, rows), device=place.device)
    read = torch.arange(tokens, device=place.device) < lengths[..., None]
    shape = rows, tokens, heads, d_qk, d_hv
    inputs = [_token(place, shape, dtype, read[number]) for number in range(passes)]
    norm = place.norm(heads * d_hv, dtype)
    state = place.state(rows, heads, d_qk, d_hv)

    def run(operations: Any, wide: bool) -> Numbers:
        own = MLSTMState(*(_as(x, wide).clone() for x in state))
        kind, size = torch.float64 if wide else dtype, interval + 2 * tokens
        ring = Ring.zeros(rows, heads, size, d_qk, d_hv, dtype=kind, device=place.device)
        seen = torch.arange(rows, device=place.device)
        folded, outputs = seen.clone(), []
        for (*parts, gate), count, live in zip(inputs, lengths, read, strict=True):
            one = Pass(folded, seen, count, interval)
            h = operations.pass_cell(
                *(_as(x, wide) for x in parts),
                *(own, ring, one, _as(gate, wide), _as(norm, wide), _EPS, _EPS),
            )
            operations.advance_pass(one, (count + 1) // 2)
            outputs.append(h.masked_fill(~live[..., None, None], 0))
        return {"h": torch.stack(outputs), **own._asdict(), "folded": folded}

    return Case(partial(run, place.operations, False), partial(run, plain, True), tolerance)


def loss(
    place: Place,
    *,
    rows: int,
    vocab: int,
    width: int,
    dtype: torch.dtype,
    tolerance: float,
    cap: float | None = 30.0,
) -> Case:
    """The loss from vectors, and its gradients."""
    x, W = place.draw(rows, width, dtype=dtype), place.matrix(vocab, width, dtype)
    targets = torch.randint(vocab, (rows,), device=place.device)
    weights = place.draw(rows).abs()

    def run(wide: bool) -> Numbers:
        vectors, head = (_as(part, wide).detach().requires_grad_() for part in (x, W))
        if wide:
            logits = soft_cap(linear(vectors, head), cap)
            chosen = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
            value = -(chosen * weights).sum()
        else:
            value = head_loss(vectors, head, targets, weights, cap)
        gradients = torch.autograd.grad(value, (vectors, head))
        return {"loss": value.detach(), "dx": gradients[0], "dW": gradients[1]}

    return Case(partial(run, False), partial(run, True), tolerance)


def products(
    place: Place,
    *,
    rows: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    tolerance: float,
    scheme: Scheme | None = None,
) -> Case:
    """All products of generation with one matrix, and what is computed around them."""
    W = narrow = place.matrix(n, k, dtype)
    wide_W = W.double()
    x, norm, residual = place.draw(rows, k, dtype=dtype), place.norm(k, dtype), place.draw(rows, n)
    residual = residual.to(dtype)
    gates = place.matrix(16, k, dtype), place.draw(16, dtype=dtype)
    live = torch.arange(rows, device=place.device) % 3 != 1
    matrix: Any = W
    if scheme is not None:
        stored = QuantizedWeight.quantize(narrow, scheme)
        wide_W = stored.dequantize(torch.float64)
        on_cpu = place.operations is plain and place.device.type == "cpu"
        matrix = (
            cpu.prepare(stored, cpu.packed_schemes([stored])) if on_cpu else gpu.prepare(stored)
        )

    def run(operations: Any, W: Any, wide: bool) -> Numbers:
        rows_x, weight, total = _as(x, wide), _as(norm, wide), _as(residual, wide).clone()
        around = rows_x, weight, _EPS, W
        projected, gated = operations.project(*around, *(_as(g, wide) for g in gates), _CAP, live)
        operations.add_product(total, rows_x, W)
        found = {"projection": projected, "gates": gated, "sum": total}
        found |= {"swiglu": operations.swiglu(*around), "logits": operations.head(*around, 30.0)}
        found["product"] = operations.multiply(rows_x, W)
        if scheme is not None and matrix.layout == "gpu":
            found["weights"] = W if wide else W.dequantize(dtype)
        return found

    def timed() -> object:
        return place.operations.project(x, norm, _EPS, matrix, *gates, _CAP, live)

    work = Work(timed, 2 * rows * k * n, matrix.nbytes)
    got, want = partial(run, place.operations, matrix, False), partial(run, plain, wide_W, True)
    return Case(got, want, tolerance, work)


def pointwise(
    place: Place, *, rows: int, heads: int, d_hv: int, dtype: torch.dtype, tolerance: float
) -> Case:
    """Norms, activations, embeddings and copies of logits."""
    width, vocab = heads * d_hv, 331
    x, gate = place.draw(rows, width, dtype=dtype), place.draw(rows, width, dtype=dtype)
    both, norm = place.draw(rows, 2 * width, dtype=dtype), place.norm(width, dtype)
    table, tokens = place.matrix(vocab, width, dtype), torch.arange(-1, rows - 1)
    logits, last = place.draw(rows, 4, vocab), place.draw(rows, vocab)
    kept = (torch.arange(rows) % 5).to(place.device)
    drafts = torch.randint(-1, vocab, (rows, 3), device=place.device)
    tokens = (tokens % (vocab + 1) - 1).to(place.device)

    def run(operations: Any, wide: bool) -> Numbers:
        seen = torch.zeros(rows, dtype=torch.int64, device=place.device)
        embedded, live = operations.embed_live(tokens, _as(table, wide), seen)
        chosen, every = _as(last, wide).clone(), torch.zeros_like(_as(logits, wide))
        operations.keep_logits(_as(logits, wide), kept, chosen, every)
        read, lengths = operations.pass_tokens(tokens, drafts)
        h = _as(x, wide).view(rows, heads, d_hv)
        return {
            "rms_norm": operations.rms_norm(_as(x, wide), _as(norm, wide), _EPS),
            "head_norm": operations.head_norm(h, _as(norm, wide), _EPS, _as(gate, wide)),
            "silu": operations.silu_and_multiply(_as(both, wide)),
            "embed": operations.embed(tokens, _as(table, wide)),
            "embed_live": embedded.masked_fill(~live[:, None], 0),
            "logits": chosen,
            **{"every": every, "read": read, "lengths": lengths, "live": live, "seen": seen},
        }

    return Case(partial(run, place.operations, False), partial(run, plain, True), tolerance)


def slots(place: Place, *, rows: int, heads: int, d_qk: int, d_hv: int, dtype: torch.dtype) -> Case:
    """States from slots to a batch, and back to other slots."""
    states = place.state(2 * rows, heads, d_qk, d_hv, dtype=dtype)
    source, target = torch.randperm(2 * rows, device=place.device).split(rows)

    def run(operations: Any) -> Numbers:
        own = MLSTMState(*(x.clone() for x in states))
        batch = operations.gather_states(own, source)
        operations.scatter_states(batch, own, target)
        named = {f"batch {name}": x for name, x in batch._asdict().items()}
        return {**named, **own._asdict()}

    return Case(partial(run, place.operations), partial(run, plain), 0.0)


def sampling(place: Place, *, rows: int, vocab: int) -> Case:
    """Tokens, greedy and drawn, without and with drafts. Every token must be the same."""
    scores, several = place.draw(rows, vocab, scale=3), place.draw(rows, 3, vocab, scale=3)
    drafts = torch.randint(vocab, (rows, 2), device=place.device)
    masks = torch.zeros(rows, 2, mask_words(vocab), dtype=torch.int32, device=place.device)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"min_p": 0.1}, {"top_k": 7}, {"top_p": 0.9}, {}
    ]  # fmt: skip
    filters = Needs(sampling=True, filters=True)

    def run(uses_kernels: bool) -> Numbers:
        found = {}
        for name, needs in (("greedy", Needs()), ("drawn", filters), ("drafts", filters)):
            sampler = Sampler(rows, vocab, place.device, uses_kernels=uses_kernels)
            for row in range(rows):
                own = kinds[row % len(kinds) if needs.sampling else 0]
                sampler.set_row(row, SamplingParams(max_new_tokens=99, **own), seed=row)
            sampler(scores, needs)
            found[name] = sampler.tokens.clone()
            if name == "drafts":
                found[name] = sampler.sample_drafts(several, drafts, needs, masks).tokens
        return found

    return Case(partial(run, place.operations is not plain), partial(run, False), 0.0)


def generation(place: Place, *, config: ModelConfig, dtype: torch.dtype, tolerance: float) -> Case:
    """The fused path, a prompt and single tokens, against the model's own forward pass."""
    model = _model(place, config, dtype)
    reference = deepcopy(model).double()
    fused = FusedModel(model)
    tokens = torch.randint(config.vocab_size, (2, 73), device=place.device)

    @torch.inference_mode()
    def got() -> Numbers:
        state = ModelState.zeros(config, 2, device=place.device)
        found = {"prompt": fused.logits(fused.read(tokens[:, :70], state))}
        for at in range(70, 73):
            found[f"token {at}"] = fused.step(tokens[:, at], state)
        return found

    @torch.inference_mode()
    def want() -> Numbers:
        logits = reference(tokens)[0]
        return {"prompt": logits[:, 69], **{f"token {at}": logits[:, at] for at in range(70, 73)}}

    return Case(got, want, tolerance)


def training(place: Place, *, config: ModelConfig, dtype: torch.dtype, tolerance: float) -> Case:
    """The loss of a small model, and the gradients of all of its parameters."""
    model = _model(place, config, dtype)
    reference = deepcopy(model).double()
    tokens = torch.randint(config.vocab_size, (2, 65), device=place.device)
    weights = torch.full((2, 64), 1 / 128, device=place.device)

    def run(model: XLSTM) -> Numbers:
        value = model.loss(tokens[:, :-1], tokens[:, 1:], weights)
        gradients = torch.autograd.grad(value, [*model.parameters()])
        whole = torch.cat([gradient.flatten().double() for gradient in gradients])
        return {"loss": value.detach(), "gradients": whole}

    return Case(partial(run, model), partial(run, reference), tolerance)


def _model(place: Place, config: ModelConfig, dtype: torch.dtype) -> XLSTM:
    """With gates that depend on their input."""
    with place.device:
        model = XLSTM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate_preact.weight"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


def _token(place: Place, shape: tuple[int, ...], dtype: torch.dtype, live: Tensor) -> list[Tensor]:
    """q, k, v, the gates and the output gate; the gates of rows that are not live are shut."""
    *rows, d_qk, d_hv = shape
    i, f = place.gates(*rows)
    i, f = i.masked_fill(~live[..., None], -torch.inf), f.masked_fill(~live[..., None], torch.inf)
    vectors = place.vectors(*rows, d_qk, d_hv, dtype=dtype)
    return [*vectors, i, f, place.draw(*rows, d_hv, dtype=dtype)]


def _as(x: Tensor, wide: bool) -> Tensor:
    return x.double() if wide else x


# The lists. Compilers for Blackwell had faults in products with tiles of 64 rows and more, and in
# chunked recurrences with four warps: such shapes are among them.

_HEADS_7B = {"heads": 8, "d_qk": 256, "d_hv": 512}
_ODD_HEADS = {"heads": 2, "d_qk": 33, "d_hv": 65}
_SCHEMES = Scheme("int8"), Scheme("fp8"), Scheme("int4", 64)
_ROUNDED_ROWS = 0.06  # of rows that are rounded to fp8 for a product in fp8


def gpu_checks() -> list[Check]:
    """Checks of all kernels, with the sizes of a 7B and odd ones."""
    found = [*_cell_checks(BFLOAT16, 1e-2, _HEADS_7B, rows=(1, 5, 64)), *cell_checks_7b()]
    for dtype, tolerance, heads in (
        (FLOAT32, 1e-4, _ODD_HEADS),
        (FLOAT16, 1e-2, {"heads": 3, "d_qk": 48, "d_hv": 80}),
        (BFLOAT16, 2e-2, {"heads": 3, "d_qk": 64, "d_hv": 96}),
    ):
        found += [_sequence(3, 259, dtype, tolerance, heads, continued=True)]
        found += _cell_checks(dtype, tolerance, heads, rows=(3,))
    wide = _replay(20, BFLOAT16, 2e-2, _HEADS_7B, state_dtype=BFLOAT16)
    found += [wide, _loss(300, 50_304, 512, BFLOAT16, 1e-2), _loss(37, 331, 64, FLOAT32, 1e-4)]
    for scheme in (None, *_SCHEMES):
        for rows in (1, 5, 33, 64, 200):
            is_rounded = scheme is not None and scheme.name == "fp8" and rows > 64
            tolerance = _ROUNDED_ROWS if is_rounded else 1e-2
            found.append(_products(scheme, rows, 4096, 12_288, BFLOAT16, tolerance))
        found += [_products(scheme, rows, 320, 70, BFLOAT16, 1e-2) for rows in (3, 64)]
    found.append(_products(Scheme("int4", 32), 3, 320, 70, BFLOAT16, 1e-2))
    found += [_pointwise(rows, 8, 512, BFLOAT16, 1e-2) for rows in (1, 70)]
    found.append(_pointwise(5, 3, 33, FLOAT32, 1e-5))
    found += [_slots(5, FLOAT32, _HEADS_7B), _slots(5, BFLOAT16, _ODD_HEADS)]
    found += [_sampling(rows, vocab) for rows, vocab in ((3, 50_304), (16, 5003))]
    return found + _model_checks(BFLOAT16, 5e-2, ModelConfig(1024, 2, 2, vocab_size=1000))


def cell_checks_7b() -> list[Check]:
    """The cell over sequences with the 7B's heads: chunks by chunks, and in one pass."""
    few = _sequence(1, 1000, BFLOAT16, 2e-2, _HEADS_7B)
    return [few, _sequence(6, 700, BFLOAT16, 2e-2, _HEADS_7B, continued=True)]


def cpu_checks() -> list[Check]:
    """Checks of the paths of a CPU."""
    heads = {"heads": 2, "d_qk": 64, "d_hv": 128}
    found = [_sequence(2, 150, FLOAT32, 1e-4, heads, continued=True)]
    found += [_form(form, _ODD_HEADS) for form in ("recurrent", "parallel")]
    found += [_step(rows, FLOAT32, 1e-4, heads) for rows in (1, 3)]
    found += [_replay(3, FLOAT32, 1e-4, heads, interval=4)]
    found += [_draft_pass(2, 3, FLOAT32, 1e-4, heads, interval=4)]
    found += [_loss(37, 331, 64, FLOAT32, 1e-4), _products(None, 5, 320, 96, FLOAT32, 1e-5)]
    for scheme in _SCHEMES:
        found += [_products(scheme, rows, 256, 96, FLOAT32, 2e-2) for rows in (1, 5, 70)]
    found += [_pointwise(5, 3, 33, FLOAT32, 1e-5), _slots(3, FLOAT32, heads)]
    return found + _model_checks(FLOAT32, 1e-3, ModelConfig(128, 2, 2, vocab_size=331))


def small_checks() -> list[Check]:
    """Checks of all kernels that take Triton's interpreter little time. It has no bfloat16."""
    heads = {"heads": 2, "d_qk": 16, "d_hv": 24}
    found = [_sequence(1, 40, FLOAT32, 1e-4, heads, continued=True)]
    found += [_step(3, FLOAT32, 1e-4, heads)]
    found += [_replay(17, FLOAT32, 1e-4, heads, interval=2)]
    found += [_draft_pass(2, 3, FLOAT32, 1e-4, heads, interval=3)]
    found += [_loss(5, 331, 64, FLOAT32, 1e-4), _products(None, 1, 64, 34, FLOAT32, 1e-5)]
    found += [_products(None, rows, 64, 34, FLOAT32, 1e-5) for rows in (3, 65)]
    for scheme in (Scheme("int8"), Scheme("fp8"), Scheme("int4", 32)):
        found += [_products(scheme, rows, 128, 34, FLOAT16, 1e-2) for rows in (1, 3)]
    found += [_pointwise(5, 3, 33, FLOAT32, 1e-5), _slots(2, FLOAT32, heads), _sampling(5, 37)]
    return found


def _cell_checks(
    dtype: torch.dtype, tolerance: float, heads: dict[str, int], rows: tuple[int, ...]
) -> list[Check]:
    found = [_step(count, dtype, tolerance, heads) for count in rows]
    found += [_replay(count, dtype, 2 * tolerance, heads) for count in (rows[0], 20)]
    passes = ((rows[0], 2), (5, 9))
    return [*found, *(_draft_pass(*shape, dtype, 2 * tolerance, heads) for shape in passes)]


def _model_checks(dtype: torch.dtype, tolerance: float, config: ModelConfig) -> list[Check]:
    """Training is checked in float32: in bfloat16 the gradients of random weights are mostly noise.

    The cell's and the loss's gradients in bfloat16 are checked alone.
    """
    generate = _with(generation, config=config, dtype=dtype, tolerance=tolerance)
    train = _with(training, config=config, dtype=FLOAT32, tolerance=1e-3)
    return [
        Check(
            "model", f"the fused path and the model's own forward pass, {_named(dtype)}", generate
        ),
        Check("model", "loss and gradients of a training step, float32", train),
    ]


def _with(make: Callable[..., Case], **given: Any) -> Callable[[Place], Case]:
    return partial(make, **given)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(heads: dict[str, int]) -> str:
    return f"heads of {heads['d_qk']}/{heads['d_hv']}"


def _sequence(
    batch: int,
    length: int,
    dtype: torch.dtype,
    tolerance: float,
    heads: dict[str, int],
    **more: Any,
) -> Check:
    name = f"{batch} × {length} tokens, {_shown(heads)}, {_named(dtype)}"
    given = {"batch": batch, "length": length, "dtype": dtype, "tolerance": tolerance}
    return Check("sequences", name, _with(sequence, **given, **heads, **more))


def _form(form: str, heads: dict[str, int]) -> Check:
    """Another form of the cell than the one that a CPU uses by default."""
    make = _with(sequence, batch=2, length=33, dtype=FLOAT32, tolerance=1e-4, **heads)
    name = f"2 × 33 tokens, {_shown(heads)}, {form}"
    return Check("sequences", name, lambda place: make(replace(place, backend=form)))


def _step(rows: int, dtype: torch.dtype, tolerance: float, heads: dict[str, int]) -> Check:
    name = f"{rows} rows, {_shown(heads)}, {_named(dtype)}"
    return Check("steps", name, _with(step, rows=rows, dtype=dtype, tolerance=tolerance, **heads))


def _replay(
    rows: int, dtype: torch.dtype, tolerance: float, heads: dict[str, int], **more: Any
) -> Check:
    states = _named(more.get("state_dtype", FLOAT32))
    name = f"{rows} rows, {_shown(heads)}, {_named(dtype)}, {states} states"
    make = _with(replay, rows=rows, dtype=dtype, tolerance=tolerance, **heads, **more)
    return Check("replay", name, make)


def _draft_pass(
    rows: int, tokens: int, dtype: torch.dtype, tolerance: float, heads: dict[str, int], **more: Any
) -> Check:
    name = f"{rows} rows × {tokens} tokens, {_shown(heads)}, {_named(dtype)}"
    given = {"rows": rows, "tokens": tokens, "dtype": dtype, "tolerance": tolerance}
    return Check("passes", name, _with(draft_pass, **given, **heads, **more))


def _loss(rows: int, vocab: int, width: int, dtype: torch.dtype, tolerance: float) -> Check:
    name = f"{rows} tokens of {vocab:,}, {_named(dtype)}"
    given = {"rows": rows, "vocab": vocab, "width": width, "tolerance": tolerance}
    return Check("loss", name, _with(loss, dtype=dtype, **given))


def _products(
    scheme: Scheme | None, rows: int, k: int, n: int, dtype: torch.dtype, tolerance: float
) -> Check:
    kind = "" if scheme is None else f" of {scheme}"
    name = f"{rows} × {k:,} × {n:,}, {_named(dtype)}{kind}"
    given = {"rows": rows, "k": k, "n": n, "dtype": dtype, "tolerance": tolerance}
    family = "products" if scheme is None else scheme.name
    return Check(family, name, _with(products, scheme=scheme, **given))


def _pointwise(rows: int, heads: int, d_hv: int, dtype: torch.dtype, tolerance: float) -> Check:
    given = {"rows": rows, "heads": heads, "d_hv": d_hv, "dtype": dtype, "tolerance": tolerance}
    return Check(
        "pointwise", f"{rows} × {heads * d_hv:,}, {_named(dtype)}", _with(pointwise, **given)
    )


def _slots(rows: int, dtype: torch.dtype, heads: dict[str, int]) -> Check:
    name = f"{rows} of {2 * rows} states, {_shown(heads)}, {_named(dtype)}"
    return Check("slots", name, _with(slots, rows=rows, dtype=dtype, **heads))


def _sampling(rows: int, vocab: int) -> Check:
    return Check("sampling", f"{rows} rows of {vocab:,}", _with(sampling, rows=rows, vocab=vocab))
