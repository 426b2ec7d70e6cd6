"""The plan of a recipe, for `train --dry-run`: tokens, FLOPs, memory per GPU, days.

Memory per GPU is an estimate. Of the P parameters a GPU holds

    P_local = (block matrices / tp + embedding, head and norms) / dp_shard

- weights, gradients, adamw: float32 weights, gradients and AdamW's two averages, 4, 4 and 8 bytes
  × P_local
- gathered: weights in the computation's dtype (e bytes): two blocks (one is prefetched), the
  embedding and the head, and the gradients of one block and the head. One process that recomputes
  nothing keeps all blocks. Nothing if float32 weights are not sharded.
- activations: e bytes × tokens of a micro-batch × blocks × values kept per token and block. With d
  the width, q, v and F the widths of q or k, v and the feed-forward, those three divided by tp:
      none       4 d + 2 q + 4 v + 3 F: the inputs of every norm and projection, the cell, its norm
      selective  2 d + 2 q + 3 v + 2 F: the outputs of matrix products and of the cell
      products   2 d + 2 q + 2 v + 2 F: the outputs of matrix products
      block      d, and once the values of `none`: a block's input, and the block computed again
  Other blocks state those of `none` and `selective` by a static method `kept_values(config)`.
  One process that recomputes nothing has all gradients of a model of up to 2 billion parameters at
  the end of the backward pass, in e bytes: these count instead if they are more.
- cell: the kernels keep C at every chunk boundary for the backward pass, in each block (`block` and
  `products`: in the one that is computed again), and the gradient of C for one block
- head: pieces of the logits, and the gradient of the head's weight, in float32

With `[lora]` the model is frozen, and only the adapter's numbers are trained:

- frozen: e bytes × P / dp_shard; if the folder of `init_from` is quantised, its 8 or 4 bits and
  scales for the matrices, on every GPU
- weights, gradients, adamw, gathered: those of the adapter
- gathered: also two blocks, the embedding and the head if there are several shards; for quantised
  weights, the largest matrix as floats with its temporaries
- activations: also `rank` values for each matrix, and its dropped-out input if there is dropout
- head: without a gradient; a quantised one is dequantised

With `[state_tuning]` the model is frozen in the same way, and only the initial state is trained:

- weights, gradients, adamw: those of the state; gathered: also a copy of it in float32
- cell: also the initial state and its gradient for each row of a micro-batch, in float32
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from xlstm7b.accounting import (
    H100_FLOPS,
    PAPER_MFU,
    adapted_shapes,
    lora_parameters,
    lora_training_flops,
    parameter_counts,
    peak_flops,
    state_tuning_flops,
    state_tuning_parameters,
    training_flops,
)
from xlstm7b.config import ModelConfig
from xlstm7b.quantize.config import Scheme, named_schemes
from xlstm7b.registry import STANDARD, find
from xlstm7b.train.recipe import LARGE, Layout, Recipe

KERNEL_CHUNK = 256  # the Triton kernels' chunk; to import it from mlstm would load torch
_LOGITS_PER_PIECE, _LOGITS_PER_FROZEN_PIECE = 1 << 28, 1 << 26  # of the head's loss on a GPU
_HEAD_BUFFERS = 3  # logits, their softmax, and a temporary


@dataclass(frozen=True)
class Plan:
    """A recipe on a number of GPUs, in raw numbers."""

    recipe: Recipe
    layout: Layout
    parameters: int
    trained: int  # parameters that are not frozen
    tokens: int
    flops: int
    memory: dict[str, int]
    mfu: float
    peak_flops: float

    @property
    def steps(self) -> int:
        """Updates of this recipe. A later stage starts at the last step of the one before."""
        return self.recipe.run.steps - self.recipe.start_step

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        return self.tokens / self.seconds

    @property
    def seconds(self) -> float:
        return self.flops / (self.mfu * self.peak_flops * self.layout.world)


def make_plan(
    recipe: Recipe,
    *,
    gpus: int | None = None,
    mfu: float = PAPER_MFU,
    peak_flops: float = H100_FLOPS,
) -> Plan:
    """The plan for a number of GPUs, by default the smallest that the recipe's layout allows."""
    if gpus is not None and gpus < 1:
        raise ValueError(f"the number of GPUs must be at least 1, not {gpus}")
    if not 0 < mfu <= 1:
        raise ValueError(f"the MFU must be above 0 and at most 1, not {mfu}")
    if not 0 < peak_flops < float("inf"):
        raise ValueError(f"the peak must be a positive number of FLOP/s, not {peak_flops}")
    layout = recipe.layout(gpus)
    tokens = recipe.tokens_between(recipe.start_step, recipe.run.steps)
    context = recipe.data.context_length
    return Plan(
        recipe=recipe,
        layout=layout,
        parameters=parameter_counts(recipe.model)["total"],
        trained=trained_parameters(recipe),
        tokens=tokens,
        flops=sequence_flops(recipe) * (tokens // context),
        memory=memory_per_gpu(recipe, layout),
        mfu=mfu,
        peak_flops=peak_flops,
    )


def trained_parameters(recipe: Recipe) -> int:
    """The parameters that are not frozen."""
    if recipe.lora is not None:
        return lora_parameters(recipe.model, recipe.lora.targets, recipe.lora.rank)
    if recipe.state_tuning is not None:
        tuning = recipe.state_tuning
        return state_tuning_parameters(recipe.model, tuning.layers or None, tuning.rank)
    return parameter_counts(recipe.model)["total"]


def sequence_flops(recipe: Recipe) -> int:
    """FLOPs of a forward and a backward pass on one sequence, without recomputation."""
    length, lora = recipe.data.context_length, recipe.lora
    if lora is not None:
        return lora_training_flops(recipe.model, length, lora.targets, lora.rank)
    if recipe.state_tuning is not None:
        return state_tuning_flops(recipe.model, length)
    return training_flops(recipe.model, length)


def peak_tokens_per_second(recipe: Recipe, device_name: str, gpus: int) -> float | None:
    """The speed of an MFU of 1. None in float32, or if FLOPs or the GPU's peak are not known."""
    peak = peak_flops(device_name)
    if peak is None or recipe.run.precision == "float32":
        return None
    try:
        return peak * gpus * recipe.data.context_length / sequence_flops(recipe)
    except ValueError:  # a class of one's own that does not state its FLOPs
        return None


def memory_per_gpu(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """Bytes on each GPU at the largest micro-batch, by the formulas at the top of this file."""
    config, tp, mode = recipe.model, layout.tp, recipe.run.activation_checkpointing
    itemsize = 4 if recipe.run.precision == "float32" else 2
    counts = parameter_counts(config)
    ends = counts["embedding"] + counts["head"]
    blocks = counts["total"] - ends - counts["norms"]
    local = -(-(blocks // tp + ends + counts["norms"]) // layout.dp_shard)
    block = blocks // tp // config.num_blocks
    is_gathered = itemsize == 2 or layout.dp_shard > 1

    micro = max(recipe.micro_batches(start, layout)[0] for start, _ in recipe.ramp.stages)
    tokens = micro * recipe.data.context_length
    everything, selective, products = _kept_values(config, tp)
    kept = {
        "none": config.num_blocks * everything,
        "selective": config.num_blocks * selective,
        "products": config.num_blocks * products,
        "block": config.num_blocks * config.embedding_dim + everything,
    }[mode]
    state = config.num_heads // tp * config.d_qk * config.d_hv
    boundaries = micro * (-(-recipe.data.context_length // KERNEL_CHUNK) + 1)
    states = boundaries * (1 + (1 if mode in ("block", "products") else config.num_blocks))
    pieces = min(_LOGITS_PER_PIECE, tokens * config.vocab_size)
    keeps_all = layout.world == 1 and mode == "none"
    of_blocks = block + (blocks if keeps_all else 2 * block)
    gathered = is_gathered * itemsize * (of_blocks + ends + counts["head"])
    head = 4 * (_HEAD_BUFFERS * pieces + counts["head"])
    cell = itemsize * states * state
    frozen = late = 0
    if keeps_all and is_gathered and counts["total"] <= LARGE:
        late = itemsize * (blocks + counts["embedding"])
    if recipe.is_frozen:
        late = 0
        kept += _kept_by_lora(recipe)
        frozen, gathered, head = _frozen_memory(recipe, layout, itemsize)
        head += 4 * _HEAD_BUFFERS * min(_LOGITS_PER_FROZEN_PIECE, pieces)
        local = -(-trained_parameters(recipe) // layout.dp_shard)
        gathered += (4 if recipe.lora is None else itemsize) * trained_parameters(recipe)
    if recipe.state_tuning is not None:
        cell += 2 * 4 * micro * config.num_blocks * state
    parts = {
        **({"frozen": frozen} if recipe.is_frozen else {}),
        "weights": 4 * local,
        "gradients": 4 * local,
        "adamw": 8 * local,
        "gathered": gathered,
        "activations": max(itemsize * tokens * kept, late),
        "cell": cell,
        "head": head,
    }
    return {**parts, "total": sum(parts.values())}


def _kept_by_lora(recipe: Recipe) -> int:
    """Values that all blocks keep for each token because of LoRA; with `block`, one block."""
    if recipe.lora is None:
        return 0
    shapes = adapted_shapes(recipe.model, recipe.lora.targets).values()
    kept = sum(recipe.lora.rank + bool(recipe.lora.dropout) * columns for _, columns in shapes)
    once = recipe.run.activation_checkpointing == "block"
    return kept // recipe.model.num_blocks if once else kept


def _frozen_memory(recipe: Recipe, layout: Layout, itemsize: int) -> tuple[int, int, int]:
    """Bytes of the frozen weights, of what is gathered or dequantised of them, and of the head."""
    config, counts = recipe.model, parameter_counts(recipe.model)
    quantized = _quantization(recipe.init_from)
    if quantized is None:
        block = (counts["total"] - counts["embedding"] - counts["head"]) // config.num_blocks
        whole = 2 * block + counts["embedding"] + counts["head"]
        gathered = itemsize * whole if layout.dp_shard > 1 else 0
        return itemsize * -(-counts["total"] // layout.dp_shard), gathered, 0
    matrices = counts["total"] - counts["embedding"] - counts["gates"] - counts["norms"]
    blocks, head = matrices - counts["head"], counts["head"]
    floats = counts["total"] - matrices
    of_blocks, of_head = quantized
    frozen = itemsize * -(-floats // layout.dp_shard)
    frozen += _quantized_bytes(of_blocks, blocks, itemsize)
    frozen += _quantized_bytes(of_head, head, itemsize)
    largest = max(prod(shape) for shape in config.block_parameter_shapes().values())
    # The codes as int8, as float32, and the result.
    return frozen, (5 + itemsize) * largest, itemsize * head if of_head else 0


def _quantized_bytes(scheme: Scheme | None, count: int, itemsize: int) -> int:
    if scheme is None:
        return itemsize * count
    # A scale of int8 and fp8 is for a whole row: next to nothing.
    return count // 2 + 2 * count // scheme.group_size if scheme.group_size else count


def _quantization(init_from: str) -> tuple[Scheme | None, Scheme | None] | None:
    """The schemes of blocks and head in a local folder; None if it is not quantised.

    The weights of a hub id count as floats: nothing is downloaded for a plan.
    """
    path = Path(init_from) / "config.json"
    if not path.is_file():
        return None
    ModelConfig.from_file(path)  # checks it, with the quantisation
    values = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    if values is None:
        return None
    blocks, head = named_schemes(values, ["backbone.blocks.0.mlstm_layer.q", "lm_head"])
    return blocks, head


def _kept_values(config: ModelConfig, tp: int) -> tuple[int, int, int]:
    """Values that a block keeps for each token, with `none`, `selective` and `products`."""
    if config.block != STANDARD["block"]:
        block = find("block", config.block)
        if hasattr(block, "kept_values"):
            none, selective = block.kept_values(config)
            return none, selective, selective
    d, q, v, f = config.embedding_dim, config.qk_dim // tp, config.v_dim // tp, config.ffn_dim // tp
    products = 2 * d + 2 * q + 2 * v + 2 * f
    return 4 * d + 2 * q + 4 * v + 3 * f, products + v, products


def key_steps(recipe: Recipe) -> list[int]:
    """The first and last step, and those at which a phase of schedule or batch ramp ends."""
    first, last = recipe.start_step, recipe.run.steps
    corners = {*recipe.learning_rate.corners(), *(start for start, _ in recipe.ramp.stages)}
    return [first, *sorted(step for step in corners if first < step < last), last]


def _describe_frozen(recipe: Recipe, trained: int) -> dict[str, Any]:
    """What is frozen and what is trained, if that is not everything."""
    if not recipe.is_frozen:
        return {}
    quantized = _quantization(recipe.init_from)
    weights = "float32" if recipe.run.precision == "float32" else "bfloat16"
    if quantized is not None:
        blocks, head = (str(scheme or weights) for scheme in quantized)
        weights = f"{blocks}, head {head}"
    elif not (Path(recipe.init_from) / "config.json").is_file():
        weights += f" (unless {recipe.init_from}, which is not here, is quantised)"
    return {"frozen_weights": weights, "trained_parameters": trained}


def describe(plan: Plan) -> dict[str, dict[str, Any]]:
    """The plan in nested sections of numbers and strings, to print or to write as JSON."""
    recipe, layout, config = plan.recipe, plan.layout, plan.recipe.model
    context = recipe.data.context_length
    micro, accumulation = recipe.micro_batches(recipe.run.steps, layout)
    optimizer = recipe.optimizer
    return {
        "model": {
            "embedding_dim": config.embedding_dim,
            "num_blocks": config.num_blocks,
            "num_heads": config.num_heads,
            "vocab_size": config.vocab_size,
            **config.differences(),
            "parameters": plan.parameters,
            **_describe_frozen(recipe, plan.trained),
        },
        "run": {
            "start": {"from": recipe.init_from or "new weights", "at_step": recipe.start_step},
            "steps": plan.steps,
            "tokens": plan.tokens,
            "tokens_per_step": recipe.batch.sequences * context,
            "tokens_per_parameter": plan.tokens / plan.parameters,
            "context_length": context,
        },
        "flops": {
            "training": plan.flops,
            "per_token": plan.flops / plan.tokens,
            "per_step": plan.flops // (plan.tokens // context) * recipe.batch.sequences,
        },
        "layout": {
            **layout._asdict(),
            "gpus": layout.world,
            "micro_batch": micro,
            "accumulation": accumulation,
            "activation_checkpointing": recipe.run.activation_checkpointing,
        },
        "memory_per_gpu": {f"{part}_bytes": size for part, size in plan.memory.items()},
        "time": {
            "mfu": plan.mfu,
            "peak_teraflops_per_gpu": plan.peak_flops / 1e12,
            "tokens_per_second": plan.tokens_per_second,
            "tokens_per_second_per_gpu": plan.tokens_per_second / layout.world,
            "days": plan.seconds / 86400,
        },
        "optimizer": {
            "lr": optimizer.lr,
            "beta1": optimizer.betas[0],
            "beta2": optimizer.betas[1],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "clip": optimizer.clip,
            "schedule": recipe.schedule.kind,
        },
        "steps": {
            f"step_{step}": {
                "learning_rate": recipe.learning_rate(step),
                "sequences": recipe.ramp.sequences(step),
                "tokens_so_far": recipe.tokens_between(recipe.start_step, step),
            }
            for step in key_steps(recipe)
        },
        "mixture": {
            name: {
                "share": share,
                "tokens": round(share * plan.tokens),
                "path": recipe.data.sources[name].path,
            }
            for name, share in recipe.data.shares().items()
        },
    }
