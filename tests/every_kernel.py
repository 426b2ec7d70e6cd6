"""Launches every GPU kernel of the package once or more, on odd shapes.

    python tests/every_kernel.py    # on a GPU: run them, as make sanitize does
    python tests/every_kernel.py --compile 86    # without a GPU: compile them for sm_86
    python tests/every_kernel.py --compile 86 --verbose    # and print their shared memory
    python tests/every_kernel.py --compile 86 --products   # only products with weights

It checks that no kernel was left out, not the results: tests do that. Compiled kernels must also
fit into the shared memory of the GPU, and for Blackwell have no products as in `chained`.
"""

import argparse
import importlib
import os
import pkgutil
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import xlstm7b
from xlstm7b import XLSTM, Engine, ModelConfig, Request, SamplingParams
from xlstm7b.generate.fused import FusedModel, Slots
from xlstm7b.generate.kernels import MAX_ROWS, fp8, gpu
from xlstm7b.generate.replay import Rings
from xlstm7b.generate.sampler import Needs, Sampler, mask_words
from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
from xlstm7b.mlstm.replay import Pass
from xlstm7b.model import ModelState
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import codes_in_word, prepare, words_in_block
from xlstm7b.quantize.kernels import dequantize
from xlstm7b.quantize.weight import QuantizedWeight
from xlstm7b.tokenizer import ByteTokenizer

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# What --compile takes: compute capabilities, and the shared memory in KB that a program may have.
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
# d_qk, d_hv and dtype: heads that fill their tiles, that do not, of odd sizes, of several tiles.
HEADS = (
    (16, 16, BFLOAT16),
    (24, 40, FLOAT16),
    (33, 65, FLOAT32),
    (48, 80, FLOAT32),
    (64, 96, BFLOAT16),
    (160, 320, BFLOAT16),
)
HEADS_7B = 256, 512, BFLOAT16
INT8, FP8, INT4, INT4_128 = Scheme("int8"), Scheme("fp8"), Scheme("int4", 64), Scheme("int4", 128)
# Products to compile, each at the sizes of a 7B: dtype of x, scheme of W or None, rows, names. Each
# scheme has all three products and all numbers of rows. Each of the two kernels has all three
# products: the one for integers, which takes one row of int8 and up to 8 of int4, and the one that
# decodes. Those with 64 rows take the most shared memory, and so do the largest groups.
COMPILED: list[tuple[torch.dtype, Scheme | None, int, list[str]]] = [
    (BFLOAT16, None, 1, ["add", "swiglu", "project", "head"]),
    (BFLOAT16, None, 16, ["add", "swiglu", "project"]),
    (BFLOAT16, None, 64, ["swiglu", "head"]),
    (FLOAT32, None, 16, ["add"]),
    (FLOAT32, None, 64, ["swiglu", "project"]),
    (BFLOAT16, INT8, 1, ["add"]),
    (BFLOAT16, INT8, 12, ["project"]),
    (BFLOAT16, INT8, 64, ["swiglu"]),
    (BFLOAT16, FP8, 1, ["swiglu"]),
    (BFLOAT16, FP8, 12, ["add"]),
    (BFLOAT16, FP8, 64, ["project"]),
    (BFLOAT16, INT4, 1, ["add", "project"]),
    (BFLOAT16, INT4, 3, ["swiglu", "project"]),
    (BFLOAT16, INT4, 12, ["swiglu"]),
    (BFLOAT16, INT4, 64, ["add"]),
    (BFLOAT16, INT4_128, 64, ["project"]),
    (FLOAT32, INT4_128, 64, ["project"]),
]
# Matrices [N, K] of a 7B. "add" is that of the FFN: its width is no multiple of a block.
SIZES_7B = {
    "project": (12_288, 4096),
    "add": (4096, 10_944),
    "swiglu": (21_888, 4096),
    "head": (50_304, 4096),
}
FP8_KERNELS = {  # fp8 arithmetic exists from sm_89 on
    "round_rows_kernel",
    "rms_norm_fp8_kernel",
    "silu_and_multiply_fp8_kernel",
    "head_norm_fp8_kernel",
}
LENGTH = 259  # more than one chunk, and not a multiple of any tile
LAUNCHED = set[str]()
CHAINED = set[str]()
SHARED = dict[str, int]()  # the most bytes of shared memory that a kernel takes
parser = argparse.ArgumentParser()
parser.add_argument("--compile", type=int, choices=SHARED_MEMORY, metavar="TARGET", dest="target")
parser.add_argument("--products", action="store_true")
parser.add_argument("--verbose", action="store_true")
OPTIONS = parser.parse_args()
TARGET: int = OPTIONS.target or 0
ONLY_COMPILE = TARGET > 0
DEVICE = torch.device("cpu" if ONLY_COMPILE else "cuda")
_KNOWS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
HAS_FP8 = TARGET >= 89 if ONLY_COMPILE else _KNOWS_FP8


def main() -> None:
    # It calls the model in bfloat16: see new_model.
    mock.patch("xlstm7b.generate.fused.FusedModel._compare_logits").start()
    if ONLY_COMPILE:
        pretend_to_have_a_gpu()
    else:
        triton.knobs.runtime.launch_enter_hook.add(
            lambda launch: LAUNCHED.add(launch.get()["name"].split(".")[-1])
        )
    torch.manual_seed(0)
    if ONLY_COMPILE:
        compile_products()
        if not OPTIONS.products:
            compile_others()
        check_compiled()
    else:
        launch_all()
        torch.cuda.synchronize()
    missing = kernels() - LAUNCHED
    if missing and not OPTIONS.products:
        raise SystemExit(f"these kernels were not launched: {', '.join(sorted(missing))}")
    print(f"{'compiled' if ONLY_COMPILE else 'launched'} {len(LAUNCHED)} kernels")


def pretend_to_have_a_gpu() -> None:
    """Kernels are compiled as on a GPU of compute capability TARGET, and not launched."""
    triton.runtime.driver.set_active(NoGPU(TARGET))
    triton.knobs.compilation.listener = look_at
    mock.patch("xlstm7b.mlstm._pick", return_value="triton").start()
    mock.patch("xlstm7b.model.head.has_kernels", return_value=True).start()
    for module in ("generate.kernels.quantized", "generate.kernels.integers", "quantize.kernels"):
        mock.patch(f"xlstm7b.{module}.has_asm", lambda x: x.dtype == BFLOAT16).start()
    memory = 1024 * SHARED_MEMORY[TARGET]
    for module in ("mlstm.triton.launch_params", "generate.kernels.quantized"):
        mock.patch(f"xlstm7b.{module}.shared_memory", return_value=memory).start()
    for module in ("overlap", "gpu"):
        path = f"xlstm7b.generate.kernels.{module}.can_overlap"
        mock.patch(path, return_value=TARGET >= 90).start()


def launch_all() -> None:
    for d_qk, d_hv, dtype in HEADS:
        run_sequences(dtype, d_qk, d_hv)
        run_step(dtype, d_qk, d_hv)
    run_sequences(FLOAT32, 48, 80, has_resets=True)
    # Enough rows for one pass over the chunks, aligned as above: nothing is compiled twice.
    run_sequences(BFLOAT16, 64, 96, batch=17)
    run_head()
    for rows in (1, 3, 20):
        run_steps(BFLOAT16, rows)
    run_steps(FLOAT32, 40)
    for scheme in (INT8, FP8, INT4, Scheme("int4", 32)):
        run_quantized(scheme)
    run_prompts(FLOAT32, rows=3)
    run_sampler()
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ:  # graphs need PyTorch's allocator
        run_engine()


def compile_products() -> None:
    """Products at the sizes of a 7B: kernels with assembly, and those with the largest tiles."""
    for dtype, scheme, rows, names in COMPILED:
        for name in names:
            compile_product(name, dtype, scheme, rows)
    for scheme in (INT8, FP8, INT4):
        dequantize(blank_weight("add", scheme), BFLOAT16)
    if HAS_FP8:
        run_fp8(blank_weight("project", FP8), heads=8)


def compile_others() -> None:
    """The rest, with heads of 64/96 and of a 7B."""
    for d_qk, d_hv, dtype in (HEADS[4], HEADS_7B):
        run_sequences(dtype, d_qk, d_hv)
        run_step(dtype, d_qk, d_hv)
    run_sequences(BFLOAT16, 256, 512, batch=17)
    run_head()
    for rows in (1, 33):
        run_steps(BFLOAT16, rows)
    run_prompts(BFLOAT16, rows=3)
    run_sampler()


def check_compiled() -> None:
    if OPTIONS.verbose:
        for name, size in sorted(SHARED.items(), key=lambda item: item[1]):
            print(f"{size:8,} {name}")
    limit = 1024 * SHARED_MEMORY[TARGET]
    too_large = [f"{name} ({size:,})" for name, size in sorted(SHARED.items()) if size > limit]
    if too_large:
        raise SystemExit(f"more than {limit:,} bytes of shared memory: {', '.join(too_large)}")
    if TARGET >= 100 and CHAINED:
        raise SystemExit(f"sums are not apart (see sums_apart): {', '.join(sorted(CHAINED))}")


class NoGPU:
    """What Triton asks of a GPU's driver. Kernels are compiled to machine code, and not run."""

    def __init__(self, target: int) -> None:
        self.utils, self.target = self, target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # `check_compiled` names all kernels that take too much

    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        LAUNCHED.add(name)
        return 0, 0, 0, 0, 1024  # module, function, registers, spills, most threads in a block

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_, **__: None


def look_at(*, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
    """Notes shared memory and chained products. Triton calls it for each compiled kernel."""
    name = metadata["name"]
    SHARED[name] = max(metadata["shared"], SHARED.get(name, 0))
    if chained(Path(metadata_group[f"{name}.ttir"]).read_text()):
        CHAINED.add(name)


def chained(ttir: str) -> bool:
    """Whether a product adds to the result of another one directly: see `sums_apart`."""
    products = set[str]()  # the names that are results of products; a name is used in several loops
    for line in ttir.splitlines():
        product = re.search(r"(%\S+) = tt\.dot %\S+, %\S+, (%[^\s,]+)", line)
        if product and product[2] in products:
            return True
        products -= set(re.findall(r"(%[^\s:,()]+)(?::\d+)? = ", line))
        if product:
            products.add(product[1])
    return False


def kernels() -> set[str]:
    """The names of all kernels for this GPU. Functions that kernels call are not among them."""
    names = set[str]()
    for module in pkgutil.walk_packages(xlstm7b.__path__, "xlstm7b."):
        if "kernels" in module.name or "triton" in module.name:
            members = vars(importlib.import_module(module.name)).items()
            jitted = (name for name, member in members if isinstance(member, triton.JITFunction))
            names.update(name for name in jitted if name.endswith("_kernel"))
    return names if HAS_FP8 else names - FP8_KERNELS


def draw(*shape: int, dtype: torch.dtype = FLOAT32, shift: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + shift).to(dtype)


def run_sequences(
    dtype: torch.dtype, d_qk: int, d_hv: int, batch: int = 1, *, has_resets: bool = False
) -> None:
    """Forward and backward, from a state."""
    shape = batch, LENGTH, 2
    inputs = [draw(*shape, d, dtype=dtype) for d in (d_qk, d_qk, d_hv)]
    inputs += [draw(*shape), draw(*shape, shift=4)]
    inputs = [x.requires_grad_() for x in inputs]
    resets = torch.rand(batch, LENGTH, device=DEVICE) < 0.02 if has_resets else None
    state = MLSTMState(draw(batch, 2, d_qk, d_hv), draw(batch, 2, d_qk), draw(batch, 2))
    h, after = mlstm_sequence(*inputs, state=state, resets=resets)
    (h.float().sum() + after.C.sum() + after.n.sum()).backward()


def run_step(dtype: torch.dtype, d_qk: int, d_hv: int) -> None:
    state = MLSTMState(draw(3, 2, d_qk, d_hv), draw(3, 2, d_qk), draw(3, 2))
    q, k, v = (draw(3, 2, d, dtype=dtype) for d in (d_qk, d_qk, d_hv))
    mlstm_step(q, k, v, draw(3, 2), draw(3, 2, shift=4), state)
    larger = MLSTMState(*(torch.cat([part, part]) for part in state))
    slots = torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE)
    mlstm_step(q, k, v, draw(3, 2), draw(3, 2, shift=4), larger, inplace=True, slots=slots)


# Under initcheck, kernels that read bfloat16 products of cuBLAS were reported, others were not. The
# values are right, and tests compare them: the tool does not see all that cuBLAS stores. So where a
# kernel reads what cuBLAS wrote, the model is float32.


def new_model(dtype: torch.dtype) -> XLSTM:
    # The second block's tensors are aligned differently, which Triton compiles once more. To be
    # compiled, heads have the size of those of a 7B.
    size = (1024, 1, 2) if ONLY_COMPILE else (96, 2, 2)
    with DEVICE:
        return XLSTM(ModelConfig(*size, vocab_size=331)).to(dtype)


def fused_model(dtype: torch.dtype) -> FusedModel:
    fused = FusedModel(new_model(dtype))
    fused.operations = gpu
    return fused


def run_head() -> None:
    model = new_model(FLOAT32)
    tokens = torch.randint(331, (2, 37), device=DEVICE)
    model.loss(tokens, tokens, draw(2, 37)).backward()
    model.token_logprobs(tokens, tokens)[0].sum().backward()


@torch.inference_mode()
def run_steps(dtype: torch.dtype, rows: int) -> None:
    """Single tokens; some rows keep their state. Then by replay, until all others are folded.

    Then several tokens at once, of which some are kept. The last steps fold all rows, and write.
    """
    fused = fused_model(dtype)
    state = ModelState.zeros(fused.config, rows, device=DEVICE)
    live = torch.rand(rows, device=DEVICE) < 0.5
    tokens = torch.randint(331, (rows,), device=DEVICE).where(live, -1)
    fused.step(tokens, state, out=torch.zeros(rows, 331, device=DEVICE))
    rings = Rings.zeros(fused.config, rows, dtype=dtype, device=DEVICE, interval=3, size=20)
    rings.folded.copy_(state.tokens_seen)
    for _ in range(1 if ONLY_COMPILE else 5):
        fused.step(tokens, state, rings=rings)
    for count in (9,) if ONLY_COMPILE else (2, 4, 8, 9):
        if dtype == BFLOAT16 and rows * count > MAX_ROWS and not ONLY_COMPILE:
            break  # initcheck does not see what cuBLAS stores in bfloat16
        drafts = torch.randint(-1, 331, (rows, count - 1), device=DEVICE)
        read, lengths = gpu.pass_tokens(tokens, drafts)
        one_pass = Pass(rings.folded, state.tokens_seen, lengths, rings.interval)
        logits = fused.read_drafts(read, state, one_pass, rings)
        gpu.keep_logits(logits, lengths, logits[:, 0].contiguous(), torch.empty_like(logits))
        fused.advance(one_pass, (lengths + 1) // 2)
    for way in ("fold", "write"):
        fused.step(tokens, state, rings=rings, way=way)


def run_quantized(scheme: Scheme) -> None:
    """Products with quantised weights, whose width is no multiple of the kernels' blocks."""
    weight = prepare(QuantizedWeight.quantize(draw(70, 320, dtype=BFLOAT16), scheme))
    norm, gates = draw(320, dtype=BFLOAT16), (draw(6, 320, dtype=BFLOAT16), draw(6))
    for rows in (1, 3, 8, 12, 20):
        x, y = draw(rows, 320, dtype=BFLOAT16), draw(rows, 70, dtype=BFLOAT16)
        gpu.add_product(y, x, weight)
        gpu.swiglu(x, norm, 1e-6, weight)
        gpu.project(x, norm, 1e-6, weight, *gates, 15.0, None)
    dequantize(weight, BFLOAT16)
    if scheme.name == "fp8" and HAS_FP8:
        run_fp8(weight, heads=5)


def run_fp8(weight: QuantizedWeight, heads: int) -> None:
    """Rows rounded to fp8, for products with these weights."""
    width = weight.shape[1]
    x, norm = draw(3, width, dtype=BFLOAT16), draw(width, dtype=BFLOAT16)
    fp8.round_rows(x, weight)
    fp8.rms_norm_fp8(x, norm, 1e-6, weight, torch.empty_like(x))
    fp8.silu_and_multiply_fp8(draw(3, 2 * width, dtype=BFLOAT16), weight)
    fp8.head_norm_fp8(x.view(3, heads, -1), norm, 1e-6, x, weight)


def compile_product(name: str, dtype: torch.dtype, scheme: Scheme | None, rows: int) -> None:
    """A product of a 7B. Its weights may be any numbers: nothing reads them."""
    N, K = SIZES_7B[name]
    W = torch.empty(N, K, dtype=dtype) if scheme is None else blank_weight(name, scheme)
    x, norm = draw(rows, K, dtype=dtype), draw(K, dtype=dtype)
    if name == "add":
        gpu.add_product(draw(rows, N, dtype=dtype), x, W)
    elif name == "swiglu":
        gpu.swiglu(x, norm, 1e-6, W)
    elif name == "project":
        gpu.project(x, norm, 1e-6, W, draw(16, K, dtype=dtype), draw(16), 15.0, None)
    else:
        gpu.head(x, norm, 1e-6, W, 30.0)


def blank_weight(name: str, scheme: Scheme) -> QuantizedWeight:
    """Memory for a quantised matrix of a 7B, as `prepare` lays it out."""
    rows, columns = SIZES_7B[name]
    words, codes = words_in_block(scheme), codes_in_word(scheme)
    blocks = triton.cdiv(columns, words * codes)
    data = torch.empty(rows, blocks * words, dtype=torch.int16)
    groups = blocks * codes if scheme.name == "int4" else 1
    scale = torch.empty(groups, rows, dtype=FLOAT32 if scheme.name == "fp8" else BFLOAT16)
    return QuantizedWeight(scheme, (rows, columns), data, scale, "gpu")


@torch.inference_mode()
def run_prompts(dtype: torch.dtype, rows: int) -> None:
    """Prompts of different lengths, with states that are read and written by slot."""
    fused = fused_model(dtype)
    state = ModelState.zeros(fused.config, rows + 1, device=DEVICE)
    order = torch.randperm(rows, device=DEVICE)
    tokens = torch.randint(331, (rows, 70), device=DEVICE)
    lengths = torch.randint(71, (rows,), device=DEVICE)
    fused.logits(fused.read(tokens, state, lengths, Slots(order, order.flip(0))))
    fused.logits(draw(MAX_ROWS + 1, fused.config.embedding_dim, dtype=dtype))


def run_sampler() -> None:
    """Tokens of three rows and of several positions, greedy and drawn."""
    sampler = Sampler(3, 5003, DEVICE)
    sampler._uses_kernels = True
    for row, params in enumerate([{"temperature": 0}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9}]):
        sampler.set_row(row, SamplingParams(max_new_tokens=99, **params), seed=row)
    filters = Needs(sampling=True, filters=True)
    dtypes = (FLOAT32,) if ONLY_COMPILE else (FLOAT32, BFLOAT16, torch.float64)
    for dtype in dtypes:
        sampler(draw(3, 5003, dtype=dtype), Needs())
        sampler(draw(3, 5003, dtype=dtype), Needs(sampling=True))
        if not ONLY_COMPILE:  # the same kernels as for several positions
            sampler(draw(3, 5003, dtype=dtype), filters)
    drafts = torch.randint(5003, (3, 2), device=DEVICE)
    masks = torch.zeros(3, 2, mask_words(5003), dtype=torch.int32, device=DEVICE)
    sampler.sample_drafts(draw(3, 3, 5003), drafts, filters, masks)


def run_engine() -> None:
    """Requests through the engine, as users send them."""
    engine = Engine(new_model(FLOAT32), ByteTokenizer(), slots=3)
    for length in (1, 5, 70, 130):
        params = SamplingParams(max_new_tokens=4, seed=0, eos_token_id=(), logprobs=2)
        engine.add_request(Request([2] * length, params))
    while engine.has_requests:
        engine.step()
    engine.close()


if __name__ == "__main__":
    main()
