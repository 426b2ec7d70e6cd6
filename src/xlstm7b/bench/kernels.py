"""`xlstm7b bench kernels`: checks the cell's Triton kernels against float64, then times them.

A constant number of tokens goes through the cell as many short or few long sequences, forward and
forward + backward, in bf16. Single steps run over rotating states in a CUDA graph. The limit is the
least time that any chunkwise kernel needs (`accounting.cell_floor`) at the GPU's measured peaks.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton  # noqa: F401 (fails here, not in the middle of the work)
from torch import Tensor

from xlstm7b.accounting import cell_floor, state_bytes
from xlstm7b.bench import checks
from xlstm7b.bench.measure import attempt, capture, measure
from xlstm7b.bench.results import Results, Shape
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.triton.launch_params import plan

STATES_IN_TURN = 32  # more than the L2 cache holds, as in a model of 32 blocks
LARGEST_ERROR = 2e-2
DIRECTIONS = ("forward", "forward + backward")
_GPU = checks.Place(torch.device("cuda"), "triton")
_GPU_MILLISECONDS = 200  # of one timing


def measure_kernels(
    results: Results,
    size: str,
    *,
    peaks: tuple[float, float],
    tokens: int,
    lengths: Sequence[int],
    batches: Sequence[int],
) -> None:
    """Times the kernels of this model's heads, if they give right results on this GPU."""
    config = ModelConfig.named(size)
    errors = check_kernels(config)
    print(f"\n{size}: relative errors", *(f"{name} {error:.1e}" for name, error in errors.items()))
    if not all(error < LARGEST_ERROR for error in errors.values()):  # nan is wrong, too
        results.fail("check", {"model": size}, f"the kernels give wrong results: {errors}")
        return

    def sequence(batch: int, length: int, direction: str, shape: Shape) -> None:
        seconds = time_sequence(batch, length, direction, config)
        limit = 1e3 * sequence_limit(batch * length, direction, config, peaks)
        results.add(direction, shape, 1e3 * seconds, "ms", limit=limit)

    def step(batch: int, shape: Shape) -> None:
        seconds = time_steps(our_step(batch, config))
        limit = 1e6 * step_limit(batch, config, peaks)
        results.add("step", shape, 1e6 * seconds, "µs", limit=limit)

    shape: Shape
    for length in lengths:
        batch = tokens // length
        shape = {"model": size, "batch": batch, "length": length}
        for direction in DIRECTIONS:
            work = partial(sequence, batch, length, direction, shape)
            attempt(results, direction, shape, work)
    for batch in batches:
        shape = {"model": size, "batch": batch}
        attempt(results, "step", shape, partial(step, batch, shape))


def sequence_limit(
    tokens: int, direction: str, config: ModelConfig, peaks: tuple[float, float]
) -> float:
    """The least seconds for this number of tokens: by FLOPs or bytes, whichever takes longer."""
    chunk = plan(config.d_qk, config.d_hv, torch.bfloat16).chunk
    heads = config.num_heads, config.d_qk, config.d_hv
    floors = cell_floor(tokens, chunk, *heads, causal=0.5)
    works = [floors[part] for part in direction.split(" + ")]
    return sum(max(work["flops"] / peaks[0], work["bytes"] / peaks[1]) for work in works)


def step_limit(batch: int, config: ModelConfig, peaks: tuple[float, float]) -> float:
    """The least seconds to read and write the states of one block."""
    return 2 * batch * state_bytes(config)["total"] / config.num_blocks / peaks[1]


def check_kernels(config: ModelConfig, batch: int = 1, length: int = 1000) -> dict[str, float]:
    """Relative errors of h, C and each gradient against float64, on random inputs."""
    case = checks.sequence(
        _GPU,
        batch=batch,
        length=length,
        heads=config.num_heads,
        d_qk=config.d_qk,
        d_hv=config.d_hv,
        dtype=torch.bfloat16,
        tolerance=LARGEST_ERROR,
    )
    got = case.got()
    return {name: checks.error(got[name], want) for name, want in case.want().items()}


def random_inputs(batch: int, length: int, config: ModelConfig) -> list[Tensor]:
    """bf16 q, k, v and float32 gates like those of a trained model."""
    shape = batch, length, config.num_heads
    vectors = _GPU.vectors(*shape, config.d_qk, config.d_hv, dtype=torch.bfloat16)
    return [x.requires_grad_() for x in (*vectors, *_GPU.gates(*shape))]


def time_sequence(batch: int, length: int, direction: str, config: ModelConfig) -> float:
    """Seconds of forward as inference runs it, or forward + backward as training does."""
    parts = random_inputs(batch, length, config)

    def forward() -> Tensor:
        return mlstm_sequence(*parts)[0]

    if direction == "forward":
        with torch.no_grad():
            return measure(forward, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)
    gradient = torch.randn_like(forward())

    def both() -> object:
        return torch.autograd.grad(forward(), parts, gradient)

    return measure(both, "cuda", gpu_milliseconds=_GPU_MILLISECONDS)


def time_steps(step: Callable[[int], object]) -> float:
    """Seconds of `step(index)` in a CUDA graph of `STATES_IN_TURN` steps, each on its own state."""
    replay = capture(lambda: [step(index) for index in range(STATES_IN_TURN)])
    return measure(replay, "cuda", gpu_milliseconds=_GPU_MILLISECONDS) / STATES_IN_TURN


def our_step(batch: int, config: ModelConfig) -> Callable[[int], object]:
    """A step with headwise norm and output gate that updates a float32 state in place."""
    q, k, v, i, f = (part.detach()[:, 0] for part in random_inputs(batch, 1, config))
    gate, norm_weight = torch.randn_like(v), torch.ones(config.v_dim, device=v.device).bfloat16()
    shape = batch, config.num_heads, config.d_qk, config.d_hv
    states = [MLSTMState.zeros(*shape, device=v.device) for _ in range(STATES_IN_TURN)]
    return lambda index: mlstm_step(
        q, k, v, i, f, states[index], gate=gate, norm_weight=norm_weight, inplace=True
    )
