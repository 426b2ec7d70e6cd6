"""Counts of parameters, FLOPs and bytes: the appendices of xLSTM 7B (arXiv 2503.13427).

A multiply-add is 2 FLOPs; exp, log, σ, max, abs, a mask and an activation are 1 each (`Factors`).
A layer is the cell of one block with all its heads. Counts are for one sequence unless they say
otherwise.

There are two counts of the whole model, with the same cell. Ours (`forward_flops`) is what a GPU
has to compute: norms and residuals count, the embedding and soft-caps are free. The paper's
(`paper_forward_flops`) leaves norms and residuals out and counts the embedding as a product. Its
formulas are those of the authors' later code; `printed_forward_flops` has those of the appendix.
"""

import re
from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

from xlstm7b.config import ModelConfig
from xlstm7b.registry import STANDARD, find

H100_FLOPS = 989e12  # peak FLOP/s of an H100 or H200 in dense bfloat16, from NVIDIA's data sheet
# By a part of the device's name, the first that fits: from NVIDIA's data sheets and white papers,
# without sparsity, with sums in float32.
_PEAK_FLOPS = {
    "MIG": None,  # a part of a GPU
    "GB200": 2500e12,
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H[12]00 NVL": 835e12,
    "G?H200|H[18]00": H100_FLOPS,
    "A[18]00": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364.2e12,
    "RTX A6000": 154.8e12,
    "RTX 5090$": 209.5e12,  # without $ also those of laptops
    "RTX 4090$": 165.2e12,
    "RTX 3090$": 71e12,
}
PAPER_MFU = 0.374  # of the 7B's training: 9.15K tokens/s on each H100 (paper, table 2)
# The paper prints these sizes of the 7B; the released model has 50,304 and 10,944 / 4096.
PRINTED_VOCABULARY, PRINTED_FFN_FACTOR = 50_257, 2.66

_NORM = 3  # FLOPs per element of a norm: square, scale, weight
_BACKWARD = 2  # a backward pass counts as two forward passes, as usual


def peak_flops(device_name: str) -> float | None:
    """A GPU's peak FLOP/s in bfloat16, by the name that PyTorch gives it. None: not known."""
    for part, peak in _PEAK_FLOPS.items():
        if re.search(rf"\b({part})\b", device_name):
            return peak
    return None


# Parameters


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """The parameters of each part of the model, and the total."""
    counts = {
        "embedding": config.vocab_size * config.embedding_dim,
        "mlstm_projections": 0,
        "gates": 0,
        "norms": 0,
        "ffn": 0,
        "head": config.vocab_size * config.embedding_dim,
    }
    for name, shape in config.parameter_shapes().items():
        if name.startswith("backbone.blocks.0."):
            part = _part_of(name.removeprefix("backbone.blocks.0."))
            counts[part] = counts.get(part, 0) + config.num_blocks * prod(shape)
        elif name.startswith("backbone.out_norm."):
            counts["norms"] += prod(shape)
    return {**counts, "total": sum(counts.values())}


# The matrices that LoRA adapts by default: all but the gates', which have one row per head.
LORA_TARGETS = (
    *("q", "k", "v", "ogate_preact", "out_proj"),
    *("proj_up", "proj_up_gate", "proj_down"),
)


def adapted_shapes(config: ModelConfig, targets: Collection[str]) -> dict[str, tuple[int, int]]:
    """Paths and shapes (N, K) of the matrices in the blocks whose layers have these names.

    `ValueError` for a name that no matrix has.
    """
    found: dict[str, tuple[int, int]] = {}
    names = set()
    for name, shape in config.parameter_shapes().items():
        path, _, kind = name.rpartition(".")
        if path.startswith("backbone.blocks.") and kind == "weight" and len(shape) == 2:
            layer = path.rpartition(".")[2]
            names.add(layer)
            if layer in targets:
                found[path] = shape[0], shape[1]
    for target in targets:
        if target not in names:
            raise ValueError(
                f"no layer of this model is called {target!r}; "
                f"choose from {', '.join(sorted(names))}"
            )
    return found


def lora_parameters(config: ModelConfig, targets: Collection[str], rank: int) -> int:
    """The numbers in A [rank, K] and B [N, rank] of all matrices with these names."""
    return rank * sum(map(sum, adapted_shapes(config, targets).values()))


def state_tuning_parameters(
    config: ModelConfig, layers: Collection[int] | None = None, rank: int = 0
) -> int:
    """The numbers in C and n of these blocks; with a rank, in A [d_qk, rank] and B [rank, d_hv]."""
    d_qk, d_hv = config.d_qk, config.d_hv
    head = (rank * (d_qk + d_hv) if rank else d_qk * d_hv) + d_qk
    blocks = config.num_blocks if layers is None else len(layers)
    return blocks * config.num_heads * head


def transformer_parameter_counts(config: ModelConfig) -> dict[str, int]:
    """The parameters of the Transformer of `transformer_forward_flops`, by part, and the total."""
    d, blocks = config.embedding_dim, config.num_blocks
    counts = {
        "embedding": config.vocab_size * d,
        "attention_projections": blocks * 4 * d * d,
        "ffn": blocks * 3 * d * config.ffn_dim,
        "norms": (2 * blocks + 1) * d,
        "head": config.vocab_size * d,
    }
    return {**counts, "total": sum(counts.values())}


def _part_of(name: str) -> str:
    """The part that a block's parameter belongs to. The output gate counts as a projection."""
    if "norm" in name:
        return "norms"
    if name.startswith("ffn."):
        return "ffn"
    if not name.startswith("mlstm_layer."):
        return "other"
    return "gates" if "igate" in name or "fgate" in name else "mlstm_projections"


# FLOPs


class Factors(NamedTuple):
    """FLOPs of one operation other than a sum or product: the paper's F_X."""

    exp: float = 1
    log: float = 1
    sigmoid: float = 1
    max: float = 1
    abs: float = 1
    mask: float = 1
    swish: float = 1
    softmax: float = 3  # per attention logit


_FACTORS = Factors()


def cell_flops(
    context_length: int,
    chunk_size: int,
    num_heads: int,
    d_qk: int,
    d_hv: int,
    *,
    causal: float = 1.0,
    factors: Factors = _FACTORS,
) -> dict[str, int]:
    """Forward FLOPs of one layer's chunkwise mLSTM (xLSTM 7B, appendix on FLOP counting).

    The parts are rows of the paper's table. `causal` is the fraction of each chunk's L × L matrix
    that is computed (TFLA, arXiv 2503.14376): 1 for a kernel with one tile per chunk, near 1/2 for
    one that skips tiles above the diagonal. A shorter last chunk is counted with its own length.
    """
    _check_positive(context_length=context_length, chunk_size=chunk_size)
    chunks, rest = divmod(context_length, chunk_size)
    exp, maximum = factors.exp, factors.max
    counts: dict[str, int] = {}
    for L, copies in ((chunk_size, chunks), (rest, int(rest > 0))):
        cumulative = L * (L + 1) // 2  # the cumulative log-forget gates
        square = causal * L * L
        per_head = {
            # The gates of every token and of the chunk's state, with its maximum.
            "gates": cumulative + 2 * L + 3 + maximum + exp + L * (3 + 2 * exp),
            # C: decay and update of the chunk (2), k vᵀ and q C of each token (4 L); n alike.
            "inter_chunk_numerator": (2 + 4 * L) * d_qk * d_hv + 3 * L * d_qk,
            # As the authors' later code. The appendix prints 1 + 4 L: see `printed_forward_flops`.
            "inter_chunk_denominator": (2 + 4 * L) * d_qk,
            "gate_matrix": cumulative
            + square * (3 + factors.mask + maximum + exp)
            + L * (1 + maximum),
            # S = q kᵀ ⊙ D, then S v and the row sums of S.
            "intra_chunk_numerator": square * (2 * d_qk + 2 + 2 * d_hv),
            "intra_chunk_denominator": square * 2,
            # The two parts with a common maximum, their sum, and the division.
            "combination": L * (2 * d_hv + 3 + 2 * maximum + factors.abs + exp),
        }
        for part, flops in per_head.items():
            counts[part] = counts.get(part, 0) + copies * num_heads * round(flops)
    return {**counts, "total": sum(counts.values())}


def cell_step_flops(num_heads: int, d_qk: int, d_hv: int, factors: Factors = _FACTORS) -> int:
    """FLOPs of one layer's recurrent mLSTM for one token, by the equations in `mlstm/recurrent.py`.

    The update of C is 4 d_qk d_hv, the product q C 2 d_qk d_hv; the rest is n and scaling.
    """
    f = factors
    gates = 4 + 2 * f.exp + f.log + f.sigmoid + f.max
    denominator = 6 * d_qk + d_hv + 1 + f.abs + f.max
    return round(num_heads * (gates + 6 * d_qk * d_hv + d_qk + denominator))


def forward_flops(
    config: ModelConfig, context_length: int, chunk_size: int = 64, *, causal: float = 1.0
) -> dict[str, int]:
    """Forward FLOPs of the whole model on one sequence, by part, with logits for every token."""
    cell = cell_flops(
        context_length, chunk_size, config.num_heads, config.d_qk, config.d_hv, causal=causal
    )["total"]
    return _model_flops(config, context_length, cell)


def step_flops(config: ModelConfig) -> dict[str, int]:
    """FLOPs of the whole model for one decoded token, by part."""
    return _model_flops(config, 1, cell_step_flops(config.num_heads, config.d_qk, config.d_hv))


def training_flops(
    config: ModelConfig, context_length: int, chunk_size: int = 64, *, causal: float = 1.0
) -> int:
    """FLOPs of a forward and a backward pass on one sequence, without recomputation."""
    forward = forward_flops(config, context_length, chunk_size, causal=causal)["total"]
    return (1 + _BACKWARD) * forward


def lora_training_flops(
    config: ModelConfig,
    context_length: int,
    targets: Collection[str],
    rank: int,
    chunk_size: int = 64,
) -> int:
    """FLOPs of LoRA training on one sequence, without recomputation.

    The backward pass of the frozen model is that of the activations alone: one forward pass, not
    two. The products with A and B count three times.
    """
    forward = forward_flops(config, context_length, chunk_size)["total"]
    added = 2 * context_length * lora_parameters(config, targets, rank)
    return 2 * forward + (1 + _BACKWARD) * added


def state_tuning_flops(config: ModelConfig, context_length: int, chunk_size: int = 64) -> int:
    """FLOPs of state tuning on one sequence, without recomputation.

    The backward pass is that of the activations alone, as with LoRA.
    """
    return 2 * forward_flops(config, context_length, chunk_size)["total"]


def transformer_forward_flops(
    config: ModelConfig, context_length: int, *, head_dim: int = 128, causal: float = 0.5
) -> dict[str, int]:
    """Forward FLOPs of a Llama-style Transformer of the same width, depth, SwiGLU and vocabulary.

    It has as many key heads as query heads. `causal` is the fraction of the T × T attention matrix
    that is counted: 1/2 is the triangle, 1 is the convention of the Chinchilla paper.
    """
    _check_positive(context_length=context_length, head_dim=head_dim)
    d, per_block = config.embedding_dim, context_length * config.num_blocks
    logits = causal * context_length * (4 * d + _FACTORS.softmax * d / head_dim)
    counts = {
        "attention_projections": per_block * 8 * d * d,
        "attention": round(per_block * logits),
        "ffn": per_block * _ffn_flops(config),
        "norms_and_residuals": per_block * 2 * (_NORM + 1) * d + context_length * _NORM * d,
        "head": context_length * 2 * d * config.vocab_size,
    }
    return {**counts, "total": sum(counts.values())}


# FLOPs as the paper's appendix counts them: every matrix, also the embedding, as a product; the
# cell; σ(õ) and the activation of the SwiGLU. Not: norms, residuals, biases, soft-caps, and the
# products of a gate with what it gates. The authors' code does count the SwiGLU's product
# (`Factors(swish=2)`): leaving it out is our reading, which fits the totals in the tests.


def paper_forward_flops(
    config: ModelConfig,
    context_length: int,
    chunk_size: int = 64,
    *,
    vocab_size: int | None = None,
    ffn_factor: float | None = None,
    factors: Factors = _FACTORS,
) -> dict[str, int]:
    """Forward FLOPs of the whole model on one sequence as the paper counts them, by part.

    `vocab_size` and `ffn_factor` replace the config's: the feed-forward width is then `ffn_factor`
    times the model's, not rounded. `ValueError` if the block is not that of the paper.
    """
    if others := config.other_classes():
        names = ", ".join(f"{kind} {name!r}" for kind, name in others.items())
        raise ValueError(f"the paper counts the FLOPs of its own model only, not those of {names}")
    d, v, heads = config.embedding_dim, config.v_dim, config.num_heads
    per_block = context_length * config.num_blocks
    cell = cell_flops(context_length, chunk_size, heads, config.d_qk, config.d_hv, factors=factors)
    # q, k, v, õ and out; then σ(õ).
    projections = 4 * d * config.qk_dim + 6 * d * v + factors.sigmoid * v
    return _with_paper_ends(
        config,
        context_length,
        {
            "mlstm_projections": round(per_block * projections),
            "gates": per_block * 4 * d * heads,
            "cell": config.num_blocks * cell["total"],
        },
        vocab_size,
        ffn_factor,
        factors,
    )


def printed_forward_flops(
    config: ModelConfig,
    context_length: int,
    chunk_size: int = 64,
    *,
    vocab_size: int | None = None,
    ffn_factor: float | None = None,
) -> int:
    """The total of `paper_forward_flops` with two terms as the paper's appendix prints them.

    The denominator of a chunk's state is (1 + 4 L) d_qk, and the activation of a SwiGLU 2 T d.
    """
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "ffn_factor": ffn_factor}
    published = paper_forward_flops(config, context_length, chunk_size, **sizes)["total"]
    chunks = -(-context_length // chunk_size)
    ffn_dim = config.ffn_dim if ffn_factor is None else ffn_factor * config.embedding_dim
    activations = context_length * (ffn_dim - 2 * config.embedding_dim)
    denominators = chunks * config.num_heads * config.d_qk
    return published - round(config.num_blocks * (activations + denominators))


def paper_transformer_flops(
    config: ModelConfig,
    context_length: int,
    *,
    head_dim: int = 128,
    vocab_size: int | None = None,
    ffn_factor: float | None = None,
    factors: Factors = _FACTORS,
) -> dict[str, int]:
    """Forward FLOPs of the Transformer of `transformer_forward_flops` as the paper counts them.

    All T × T attention logits count, also those above the diagonal.
    """
    _check_positive(context_length=context_length, head_dim=head_dim)
    d, per_block = config.embedding_dim, context_length * config.num_blocks
    attention = context_length * (4 * d + factors.softmax * d / head_dim)
    return _with_paper_ends(
        config,
        context_length,
        {
            "attention_projections": per_block * 8 * d * d,
            "attention": round(per_block * attention),
        },
        vocab_size,
        ffn_factor,
        factors,
    )


def _with_paper_ends(
    config: ModelConfig,
    tokens: int,
    mixing: dict[str, int],
    vocab_size: int | None,
    ffn_factor: float | None,
    factors: Factors,
) -> dict[str, int]:
    """The parts that mix tokens, with the embedding before and SwiGLU and head after them."""
    d = config.embedding_dim
    ffn_dim = config.ffn_dim if ffn_factor is None else ffn_factor * d
    table = 2 * tokens * d * (config.vocab_size if vocab_size is None else vocab_size)
    ffn = tokens * config.num_blocks * ffn_dim * (6 * d + factors.swish)
    counts = {"embedding": table, **mixing, "ffn": round(ffn), "head": table}
    return {**counts, "total": sum(counts.values())}


def _model_flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
    """FLOPs of the model on `tokens` tokens, for which the cell of one layer costs `cell`."""
    counts = {
        part: config.num_blocks * flops for part, flops in block_flops(config, tokens, cell).items()
    }
    counts["norms_and_residuals"] += norm_flops(config, tokens)
    counts["head"] = tokens * 2 * config.embedding_dim * config.vocab_size
    return {**counts, "total": sum(counts.values())}


# FLOPs of the classes that a config chooses. A class that is not the standard one says its own, by
# a static method `flops` with the same arguments.


def block_flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
    """FLOPs of one block on `tokens` tokens, for which the cell costs `cell`, by part."""
    if config.block != STANDARD["block"]:
        return {"norms_and_residuals": 0, **_stated("block", config.block)(config, tokens, cell)}
    layer = layer_flops(config, tokens, cell)
    residuals = 2 * tokens * config.embedding_dim
    norms = layer.pop("norms_and_residuals", 0) + 2 * norm_flops(config, tokens) + residuals
    return {**layer, "ffn": tokens * _ffn_flops(config), "norms_and_residuals": norms}


def layer_flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
    """FLOPs of one mLSTM layer, by part."""
    if config.layer != STANDARD["layer"]:
        stated: dict[str, int] = _stated("layer", config.layer)(config, tokens, cell)
        return dict(stated)
    return standard_layer_flops(config, tokens, cell)


def standard_layer_flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
    """FLOPs of the layer of the released model, by part."""
    d, v = config.embedding_dim, config.v_dim
    return {
        # q, k, v, õ and out; then σ(õ) ⊙ h.
        "mlstm_projections": tokens * (4 * d * config.qk_dim + 6 * d * v + 2 * v),
        "gates": gate_flops(config, tokens, config.input_gate) + gate_flops(config, tokens),
        "cell": cell,
        "norms_and_residuals": tokens * _NORM * v,
    }


def gate_flops(config: ModelConfig, tokens: int, name: str = "") -> int:
    """FLOPs of the pre-activations of one gate of all heads: of class `name`, or of `gate`."""
    name = name or config.gate
    if name != STANDARD["gate"]:
        return int(_stated("gate", name)(config, tokens))
    return tokens * (2 * config.embedding_dim + 1) * config.num_heads


def norm_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of one norm of the residual stream."""
    if config.norm != STANDARD["norm"]:
        return int(_stated("norm", config.norm)(config, tokens))
    return tokens * _NORM * config.embedding_dim


def _stated(kind: str, name: str) -> Any:
    """The `flops` of a registered class: its own, because a parent's counts another class."""
    cls = find(kind, name)
    if "flops" not in vars(cls):
        raise ValueError(
            f"the FLOPs of {kind} {name!r} are not known: give the class {cls.__qualname__} a "
            f"static method flops() with the arguments of accounting.{kind}_flops"
        )
    return cls.flops


def _ffn_flops(config: ModelConfig) -> int:
    """The SwiGLU for one token: three matrices, the activation, the product."""
    return 6 * config.embedding_dim * config.ffn_dim + 2 * config.ffn_dim


# Bytes


def state_bytes(config: ModelConfig, itemsize: int = 4) -> dict[str, int]:
    """Bytes of one sequence's state in all blocks: C, n, m, and the total.

    `itemsize` is that of a number in C; n and m are at least float32. The paper's "total memory
    state" (table on head dimensions) is C alone.
    """
    parts = {
        name: config.num_blocks * prod(shape) * (itemsize if narrow else max(itemsize, 4))
        for name, (shape, narrow) in config.state_parts().items()
    }
    return {**parts, "total": sum(parts.values())}


def ring_bytes(config: ModelConfig, tokens: int, itemsize: int = 2) -> int:
    """Bytes of one sequence's rings in all blocks, which hold this many tokens.

    `itemsize` is that of k and v; the gates are at least float32.
    """
    token = (config.d_qk + config.d_hv) * itemsize + 2 * max(itemsize, 4)
    return config.num_blocks * config.num_heads * tokens * token


def kv_cache_equivalent_tokens(config: ModelConfig) -> float:
    """The number of tokens whose KV cache, in a Transformer of the same size, is as large as C.

    Both in the same dtype, with as many key heads as query heads (table on head dimensions).
    """
    state = state_bytes(config, 1)
    return state.get("C", state["total"]) / (2 * config.num_blocks * config.embedding_dim)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of all parameters."""
    return itemsize * parameter_counts(config)["total"]


def decode_bytes(
    config: ModelConfig,
    batch_size: int = 1,
    *,
    weight_itemsize: float = 2,
    state_itemsize: int = 4,
    replay_interval: int | None = None,
    ring_itemsize: int = 2,
) -> int:
    """Bytes that one decoding step reads and writes: the weights once, each state in and out.

    Only one row of the embedding is read for each sequence. With quantised weights,
    `weight_itemsize` is the mean over all weights. In replay decoding a state is written once in
    `replay_interval` steps, the tokens since then are read, on average, and one is written.
    """
    _check_positive(batch_size=batch_size)
    counts = parameter_counts(config)
    weights = counts["total"] - counts["embedding"] + batch_size * config.embedding_dim
    state: float = 2 * state_bytes(config, state_itemsize)["total"]
    if replay_interval is not None:
        state *= (1 + 1 / replay_interval) / 2
        state += ring_bytes(config, 1, ring_itemsize) * ((replay_interval - 1) / 2 + 1)
    return round(weight_itemsize * weights) + round(batch_size * state)


def least_decode_seconds(
    config: ModelConfig,
    flops_per_second: float,
    bytes_per_second: float,
    batch_size: int = 1,
    **itemsizes: Any,
) -> float:
    """A lower bound for one decoding step: the time for its bytes or its FLOPs, the longer one.

    `itemsizes` are those of `decode_bytes`.
    """
    moved = decode_bytes(config, batch_size, **itemsizes)
    flops = batch_size * step_flops(config)["total"]
    return max(moved / bytes_per_second, flops / flops_per_second)


def least_prefill_seconds(
    config: ModelConfig,
    flops_per_second: float,
    bytes_per_second: float,
    context_length: int,
    batch_size: int = 1,
    *,
    weight_itemsize: float = 2,
    state_itemsize: int = 4,
) -> float:
    """A lower bound for the prefill of prompts, up to the state and the last token's logits.

    It counts the cell in chunks of 64 with the triangle of each chunk. Weights are read once and
    states are written once.
    """
    _check_positive(batch_size=batch_size)
    forward, counts = forward_flops(config, context_length, causal=0.5), parameter_counts(config)
    flops = forward["total"] - forward["head"] + forward["head"] // context_length
    vectors = batch_size * context_length * config.embedding_dim
    weights = counts["total"] - counts["embedding"] + vectors
    moved = weight_itemsize * weights + batch_size * state_bytes(config, state_itemsize)["total"]
    return max(moved / bytes_per_second, batch_size * flops / flops_per_second)


def cell_floor(
    tokens: int,
    chunk_size: int,
    num_heads: int,
    d_qk: int,
    d_hv: int,
    *,
    causal: float = 1.0,
    itemsize: int = 2,
    state_itemsize: int = 0,
) -> dict[str, dict[str, int]]:
    """The least matrix FLOPs and bytes of a chunkwise cell kernel, forward and backward.

    Divide them by a machine's FLOP/s and bytes/s: the longer time is a lower bound. The backward
    pass computes C and S again (TFLA, arXiv 2503.14376): 2.5 times the FLOPs of the forward pass if
    d_qk = d_hv. With `state_itemsize` the states at chunk boundaries are written to memory and read
    again, as in designs with two kernels; with 0 they stay on the chip. Gates are float32.
    """
    _check_positive(tokens=tokens, chunk_size=chunk_size)
    rows = tokens * num_heads
    inter = 2 * rows * d_qk * d_hv  # one product with C, or one update of it
    intra = round(causal * 2 * rows * chunk_size)  # one L × L product, per unit of width
    qkv, h, gates = rows * (2 * d_qk + d_hv) * itemsize, rows * d_hv * itemsize, rows * 8
    states = 2 * -(-tokens // chunk_size) * num_heads * d_qk * d_hv * state_itemsize
    return {
        "forward": {
            "flops": 2 * inter + intra * (d_qk + d_hv),  # k vᵀ into C, q C; q kᵀ, S v
            "bytes": qkv + gates + h + states,
        },
        "backward": {
            # C again, dC; dq, dk and dv from them; S again, dS, and dq, dk and dv from those.
            "flops": 5 * inter + intra * (3 * d_qk + 2 * d_hv),
            "bytes": 2 * (qkv + gates) + h + 2 * states,
        },
    }


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


# All of it, for `xlstm7b info`


def summary(
    config: ModelConfig, context_length: int = 8192, chunk_size: int = 64
) -> dict[str, Any]:
    """The counts above for one model, by section, as plain numbers.

    The Transformer is there for the standard block: with as many blocks of another class it would
    not be of the model's size. The paper's own count is there for the paper's own model.
    """
    forward = forward_flops(config, context_length, chunk_size)
    state, parameters = state_bytes(config), parameter_counts(config)
    equivalent, transformer = {}, {}
    if config.block == STANDARD["block"]:
        equivalent = {"kv_cache_equivalent_tokens": kv_cache_equivalent_tokens(config)}
        total = transformer_forward_flops(config, context_length)["total"]
        transformer = {
            "transformer_forward_per_sequence": total,
            "transformer_forward_per_token": total / context_length,
        }
    return {
        "shape": {
            "embedding_dim": config.embedding_dim,
            "num_blocks": config.num_blocks,
            "num_heads": config.num_heads,
            "d_qk_per_head": config.d_qk,
            "d_hv_per_head": config.d_hv,
            "ffn_dim": config.ffn_dim if parameters["ffn"] else 0,
            "vocab_size": config.vocab_size,
            **config.differences(),
        },
        "parameters": parameters,
        "state": {
            "C_bytes_float32": state.get("C", 0),
            "total_bytes_float32": state["total"],
            **equivalent,
        },
        "flops": {
            "context_length": context_length,
            "chunk_size": chunk_size,
            "cell_forward_per_layer": forward.get("cell", 0) // config.num_blocks,
            "forward_by_part": {part: n for part, n in forward.items() if part != "total"},
            "forward_per_sequence": forward["total"],
            "forward_per_token": forward["total"] / context_length,
            "training_per_token": training_flops(config, context_length, chunk_size)
            / context_length,
            "decode_per_token": step_flops(config)["total"],
            **transformer,
        },
        **_paper_count(config, context_length, chunk_size),
        "memory": {
            "weight_bytes_float32": weight_bytes(config, 4),
            "weight_bytes_bfloat16": weight_bytes(config, 2),
            "decode_bytes_per_token_bfloat16": decode_bytes(config),
        },
    }


def _paper_count(
    config: ModelConfig, context_length: int, chunk_size: int
) -> dict[str, dict[str, Any]]:
    if config.other_classes():
        return {}
    forward = paper_forward_flops(config, context_length, chunk_size)
    printed = {}
    released = ModelConfig.vocab_size, ModelConfig.ffn_proj_factor
    if (config.vocab_size, config.ffn_proj_factor) == released:
        total = paper_forward_flops(
            config,
            context_length,
            chunk_size,
            vocab_size=PRINTED_VOCABULARY,
            ffn_factor=PRINTED_FFN_FACTOR,
        )["total"]
        printed = {"forward_with_printed_sizes": total}
    by_printed = printed_forward_flops(config, context_length, chunk_size)
    transformer = paper_transformer_flops(config, context_length)
    return {
        "paper_count": {
            "forward_by_part": {part: n for part, n in forward.items() if part != "total"},
            "forward_per_sequence": forward["total"],
            "forward_by_the_printed_formulas": by_printed,
            **printed,
            "transformer_forward_per_sequence": transformer["total"],
            "transformer_parameters": transformer_parameter_counts(config)["total"],
        }
    }
