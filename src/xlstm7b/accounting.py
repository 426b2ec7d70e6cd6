"""Parameters, FLOPs and bytes: the appendices of xLSTM 7B (arXiv 2503.13427) as functions.

Conventions of the paper: a multiply-add is 2 FLOPs; exp, log, σ, max, abs, a mask and an activation
are 1 each; soft-caps and the embedding's look-up are free. "Per layer" is one block's cell with all
its heads, and every count is for one sequence unless it says otherwise.
"""

from math import prod
from typing import Any

from xlstm7b.config import ModelConfig

_NORM = 3  # FLOPs per element of a norm: square, scale, weight
_SOFTMAX = 3  # FLOPs per attention logit
_BACKWARD = 2  # a backward pass costs two forward passes, the convention of training budgets

# Parameters


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters of each part of the model, and their total."""
    counts = {
        "embedding": config.vocab_size * config.embedding_dim,
        "mlstm_projections": 0,
        "gates": 0,
        "norms": config.embedding_dim,
        "ffn": 0,
        "head": config.vocab_size * config.embedding_dim,
    }
    for name, shape in config.block_parameter_shapes().items():
        counts[_part_of(name)] += config.num_blocks * prod(shape)
    return {**counts, "total": sum(counts.values())}


def _part_of(name: str) -> str:
    """The part a block's parameter belongs to. The output gate, as wide as v, is a projection."""
    if "norm" in name:
        return "norms"
    if name.startswith("ffn."):
        return "ffn"
    return "gates" if "igate" in name or "fgate" in name else "mlstm_projections"


# FLOPs


def cell_flops(
    context_length: int,
    chunk_size: int,
    num_heads: int,
    d_qk: int,
    d_hv: int,
    *,
    causal: float = 1.0,
) -> dict[str, int]:
    """Forward FLOPs of one layer's chunkwise mLSTM (xLSTM 7B, appendix on FLOP counting).

    `causal` is the share of each chunk's L × L matrix that is computed (TFLA, arXiv 2503.14376): 1
    for a kernel that takes a chunk as one tile, towards 1/2 for one that skips tiles above the
    diagonal. A last, shorter chunk is counted as what it is.
    """
    _check_positive(context_length=context_length, chunk_size=chunk_size)
    chunks, rest = divmod(context_length, chunk_size)
    counts = dict.fromkeys(("gates", "inter_chunk", "intra_chunk", "combination"), 0)
    for L, copies in ((chunk_size, chunks), (rest, int(rest > 0))):
        cumulative = L * (L + 1) // 2  # the cumulative log-forget gates
        per_head = {
            # Gates of every step and of the chunk's state, with its maximum.
            "gates": cumulative + 7 * L + 5,
            # C and n: decayed and added to once a chunk (2), each step's k in and q out (4 L).
            "inter_chunk": (2 + 4 * L) * d_qk * (d_hv + 1) + 3 * L * d_qk,
            # The gate matrix, S = q kᵀ ⊙ D, then S v and the row sums of S.
            "intra_chunk": cumulative + 2 * L + round(causal * L * L * (10 + 2 * (d_qk + d_hv))),
            # The two parts on a common maximum, added, and divided by the normaliser.
            "combination": L * (2 * d_hv + 7),
        }
        for part, flops in per_head.items():
            counts[part] += copies * num_heads * flops
    return {**counts, "total": sum(counts.values())}


def cell_step_flops(num_heads: int, d_qk: int, d_hv: int) -> int:
    """FLOPs of one layer's recurrent mLSTM for one token (the equations of `mlstm/recurrent.py`).

    Gates 9, C's update 4 d_qk d_hv, its read-out 2 d_qk d_hv, the normaliser and scalings the rest.
    """
    return num_heads * (6 * d_qk * d_hv + 7 * d_qk + d_hv + 12)


def forward_flops(
    config: ModelConfig, context_length: int, chunk_size: int = 64, *, causal: float = 1.0
) -> dict[str, int]:
    """Forward FLOPs of the whole model on one sequence, by part, with the logits of every token."""
    cell = cell_flops(
        context_length, chunk_size, config.num_heads, config.d_qk, config.d_hv, causal=causal
    )["total"]
    return _model_flops(config, context_length, cell)


def step_flops(config: ModelConfig) -> dict[str, int]:
    """FLOPs of the whole model for one decoded token, by part: the same whatever came before it."""
    return _model_flops(config, 1, cell_step_flops(config.num_heads, config.d_qk, config.d_hv))


def training_flops(
    config: ModelConfig, context_length: int, chunk_size: int = 64, *, causal: float = 1.0
) -> int:
    """FLOPs of a forward and a backward pass on one sequence; recomputation is not counted."""
    forward = forward_flops(config, context_length, chunk_size, causal=causal)["total"]
    return (1 + _BACKWARD) * forward


def transformer_forward_flops(
    config: ModelConfig, context_length: int, *, head_dim: int = 128, causal: float = 0.5
) -> dict[str, int]:
    """Forward FLOPs of a Llama-style Transformer of the same width, depth, SwiGLU and vocabulary.

    Self-attention with as many key as query heads. `causal` is the share of the T × T logits that
    is computed: 1/2 is the triangle alone, 1 is how the Chinchilla paper counts.
    """
    _check_positive(context_length=context_length, head_dim=head_dim)
    d, per_block = config.embedding_dim, context_length * config.num_blocks
    logits = causal * context_length * (4 * d + _SOFTMAX * d / head_dim)
    counts = {
        "attention_projections": per_block * 8 * d * d,
        "attention": round(per_block * logits),
        "ffn": per_block * _ffn_flops(config),
        "norms_and_residuals": per_block * 2 * (_NORM + 1) * d + context_length * _NORM * d,
        "head": context_length * 2 * d * config.vocab_size,
    }
    return {**counts, "total": sum(counts.values())}


def _model_flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
    """The model around its cells, which cost `cell` FLOPs a layer, on this many tokens."""
    d, heads, per_block = config.embedding_dim, config.num_heads, tokens * config.num_blocks
    norms = 2 * (_NORM + 1) * d + _NORM * config.v_dim  # pre-norms with residuals; headwise norm
    counts = {
        # q, k, v, õ and out; then σ(õ) ⊙ h.
        "mlstm_projections": per_block
        * (4 * d * config.qk_dim + 6 * d * config.v_dim + 2 * config.v_dim),
        "gates": per_block * (4 * d * heads + 2 * heads),
        "cell": config.num_blocks * cell,
        "ffn": per_block * _ffn_flops(config),
        "norms_and_residuals": per_block * norms + tokens * _NORM * d,
        "head": tokens * 2 * d * config.vocab_size,
    }
    return {**counts, "total": sum(counts.values())}


def _ffn_flops(config: ModelConfig) -> int:
    """One token through a SwiGLU: three matrices, the activation, the product."""
    return 6 * config.embedding_dim * config.ffn_dim + 2 * config.ffn_dim


# Bytes


def state_bytes(config: ModelConfig, itemsize: int = 4) -> dict[str, int]:
    """Bytes of one sequence's recurrent state over all blocks: C, n, m, and their total.

    The paper's "total memory state" is C alone (its table on head dimensions).
    """
    heads = config.num_blocks * config.num_heads * itemsize
    parts = {"C": heads * config.d_qk * config.d_hv, "n": heads * config.d_qk, "m": heads}
    return {**parts, "total": sum(parts.values())}


def kv_cache_equivalent_tokens(config: ModelConfig) -> float:
    """How many tokens of a same-sized Transformer's keys and values C is as large as.

    Both in the same dtype, with as many key as query heads: the paper's table on head dimensions.
    """
    return state_bytes(config, 1)["C"] / (2 * config.num_blocks * config.embedding_dim)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of every parameter in one dtype."""
    return itemsize * parameter_counts(config)["total"]


def decode_bytes(
    config: ModelConfig, batch_size: int = 1, *, weight_itemsize: int = 2, state_itemsize: int = 4
) -> int:
    """Bytes that one decoding step must move: weights once, every sequence's state in and out.

    Of the embedding's table only one row a sequence is read.
    """
    _check_positive(batch_size=batch_size)
    counts = parameter_counts(config)
    weights = counts["total"] - counts["embedding"] + batch_size * config.embedding_dim
    state = 2 * batch_size * state_bytes(config, state_itemsize)["total"]
    return weight_itemsize * weights + state


def decode_limit(
    config: ModelConfig,
    bytes_per_second: float,
    batch_size: int = 1,
    *,
    weight_itemsize: int = 2,
    state_itemsize: int = 4,
) -> float:
    """The most tokens per second, over the whole batch, that this memory bandwidth allows."""
    moved = decode_bytes(
        config, batch_size, weight_itemsize=weight_itemsize, state_itemsize=state_itemsize
    )
    return batch_size * bytes_per_second / moved


def least_decode_seconds(
    config: ModelConfig, flops_per_second: float, bytes_per_second: float, batch_size: int = 1,
    *, weight_itemsize: int = 2, state_itemsize: int = 4,
) -> float:  # fmt: skip
    """No step is faster: all its bytes at this bandwidth, or all its FLOPs, whichever is longer."""
    moved = decode_bytes(
        config, batch_size, weight_itemsize=weight_itemsize, state_itemsize=state_itemsize
    )
    flops = batch_size * step_flops(config)["total"]
    return max(moved / bytes_per_second, flops / flops_per_second)


def least_prefill_seconds(
    config: ModelConfig, flops_per_second: float, bytes_per_second: float, context_length: int,
    batch_size: int = 1, *, weight_itemsize: int = 2, state_itemsize: int = 4,
) -> float:  # fmt: skip
    """The same for prompts read from nothing, each for its state and its last token's logits.

    Cells in chunks of 64, of each the triangle; weights are read and states are written once.
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
    """The matrix-multiply FLOPs and the bytes no chunkwise kernel does without, both directions.

    Divide by a machine's FLOP/s and bytes/s: the larger quotient bounds the cell's time. The
    backward pass recomputes C and S (TFLA, arXiv 2503.14376): 2.5 times the forward's FLOPs where
    d_qk = d_hv. With `state_itemsize`, the states at chunk borders also leave the chip and come
    back, as in two-kernel designs; 0 is a kernel that keeps them. Gates are float32.
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


# The whole, for `xlstm7b info`


def summary(
    config: ModelConfig, context_length: int = 8192, chunk_size: int = 64
) -> dict[str, Any]:
    """Everything above for one model, by section, in raw numbers: FLOPs, bytes, parameters."""
    forward = forward_flops(config, context_length, chunk_size)
    transformer = transformer_forward_flops(config, context_length)
    state = state_bytes(config)
    return {
        "shape": {
            "embedding_dim": config.embedding_dim,
            "num_blocks": config.num_blocks,
            "num_heads": config.num_heads,
            "d_qk_per_head": config.d_qk,
            "d_hv_per_head": config.d_hv,
            "ffn_dim": config.ffn_dim,
            "vocab_size": config.vocab_size,
        },
        "parameters": parameter_counts(config),
        "state": {
            "C_bytes_float32": state["C"],
            "total_bytes_float32": state["total"],
            "kv_cache_equivalent_tokens": kv_cache_equivalent_tokens(config),
        },
        "flops": {
            "context_length": context_length,
            "chunk_size": chunk_size,
            "cell_forward_per_layer": forward["cell"] // config.num_blocks,
            "forward_by_part": {part: n for part, n in forward.items() if part != "total"},
            "forward_per_sequence": forward["total"],
            "forward_per_token": forward["total"] / context_length,
            "training_per_token": training_flops(config, context_length, chunk_size)
            / context_length,
            "decode_per_token": step_flops(config)["total"],
            "transformer_forward_per_sequence": transformer["total"],
            "transformer_forward_per_token": transformer["total"] / context_length,
        },
        "memory": {
            "weight_bytes_float32": weight_bytes(config, 4),
            "weight_bytes_bfloat16": weight_bytes(config, 2),
            "decode_bytes_per_token_bfloat16": decode_bytes(config),
        },
    }
