"""What a recipe amounts to before it runs: tokens, FLOPs, memory per GPU, days.

Memory is an estimate, per GPU, for P parameters of which this GPU holds

    P_local = (block matrices / tp + embedding, head and norms) / dp_shard

- weights, gradients and AdamW's two averages in float32: 4, 4 and 8 bytes × P_local
- gathered: what computation holds whole, in its own dtype (e bytes): weights of two blocks (one
  being prefetched), the embedding and the head, and gradients of one block and the head; nothing
  where float32 weights are not sharded
- activations: e bytes × tokens of a micro-batch × blocks × values kept per token and block; with
  d the width, q, v and F the widths of q or k, v and the FFN, and those three divided by tp:
      none       4 d + 2 q + 4 v + 3 F: inputs of every norm, projection, the cell, its norm
      selective  2 d + 2 q + 3 v + 2 F: what matrix products and the cell return; the rest again
      block      d, and once what `none` keeps: a block's input, the block again when needed
- cell: C and its gradient at each chunk's border, for one block in the backward pass
- head: the pieces of logits, and their gradient's sum for the head, in float32
"""

from dataclasses import dataclass
from typing import Any

from xlstm7b import accounting
from xlstm7b.train.recipe import Layout, Recipe

H100_FLOPS = 989e12  # dense bfloat16 of one H100, as its maker states it
PAPER_MFU = 0.374  # of that: 9.15K tokens a second on each H100 (paper, table 2)
_CHUNK = 64
_LOGITS_A_PIECE = 1 << 28  # as in model/logprobs.py
_HEAD_BUFFERS = 3  # logits, their softmax, and one on the way


@dataclass(frozen=True)
class Plan:
    """A recipe on so many GPUs, in raw numbers."""

    recipe: Recipe
    layout: Layout
    parameters: int
    tokens: int
    flops: int
    memory: dict[str, int]
    mfu: float
    peak_flops: float

    @property
    def steps(self) -> int:
        """Updates that this recipe makes: a later stage starts where its predecessor ended."""
        return self.recipe.run.steps - self.recipe.start_step

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs, at the given share of their peak."""
        return self.tokens / self.seconds

    @property
    def seconds(self) -> float:
        return self.flops / (self.mfu * self.peak_flops * self.layout.world)


def resolved(
    recipe: Recipe,
    *,
    gpus: int | None = None,
    mfu: float = PAPER_MFU,
    peak_flops: float = H100_FLOPS,
) -> Plan:
    """The plan on so many GPUs; by default as many as the recipe's layout asks for, at least."""
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
        parameters=accounting.parameter_counts(recipe.model)["total"],
        tokens=tokens,
        flops=accounting.training_flops(recipe.model, context, _CHUNK) * (tokens // context),
        memory=memory_per_gpu(recipe, layout),
        mfu=mfu,
        peak_flops=peak_flops,
    )


def memory_per_gpu(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """Bytes on each GPU at the largest micro-batch, by what holds them: the module's formula."""
    config, tp = recipe.model, layout.tp
    itemsize = 4 if recipe.run.precision == "float32" else 2
    counts = accounting.parameter_counts(config)
    blocks = counts["mlstm_projections"] + counts["gates"] + counts["ffn"]
    ends = counts["embedding"] + counts["head"]
    local = -(-(blocks // tp + ends + counts["norms"]) // layout.dp_shard)
    block = blocks // tp // config.num_blocks
    held_apart = itemsize == 2 or layout.dp_shard > 1

    micro = max(recipe.micro_batches(start, layout)[0] for start, _ in recipe.ramp.stages)
    tokens = micro * recipe.data.context_length
    d, q, v, f = config.embedding_dim, config.qk_dim // tp, config.v_dim // tp, config.ffn_dim // tp
    everything = 4 * d + 2 * q + 4 * v + 3 * f
    kept = {
        "none": config.num_blocks * everything,
        "selective": config.num_blocks * (2 * d + 2 * q + 3 * v + 2 * f),
        "block": config.num_blocks * d + everything,
    }[recipe.run.activation_checkpointing]
    state = config.num_heads // tp * config.d_qk * config.d_hv
    chunks = micro * -(-recipe.data.context_length // _CHUNK)
    pieces = min(_LOGITS_A_PIECE, tokens * config.vocab_size)
    parts = {
        "weights": 4 * local,
        "gradients": 4 * local,
        "adamw": 8 * local,
        "gathered": held_apart * itemsize * (3 * block + ends + counts["head"]),
        "activations": itemsize * tokens * kept,
        "cell": 2 * itemsize * chunks * state,
        "head": 4 * (_HEAD_BUFFERS * pieces + counts["head"]),
    }
    return {**parts, "total": sum(parts.values())}


def key_steps(recipe: Recipe) -> list[int]:
    """Where learning rate or batch change their course within the recipe, with its two ends."""
    first, last = recipe.start_step, recipe.run.steps
    corners = {*recipe.learning_rate.corners(), *(start for start, _ in recipe.ramp.stages)}
    return [first, *sorted(step for step in corners if first < step < last), last]


def describe(plan: Plan) -> dict[str, dict[str, Any]]:
    """The plan as nested sections, in raw numbers and a few words: for `--dry-run` and JSON."""
    recipe, layout = plan.recipe, plan.layout
    config, optimizer, batch = recipe.model, recipe.optimizer, recipe.batch
    micro, accumulation = recipe.micro_batches(recipe.run.steps, layout)
    start = {"from": recipe.init_from or "new weights", "at_step": recipe.start_step}
    return {
        "model": {
            "embedding_dim": config.embedding_dim,
            "num_blocks": config.num_blocks,
            "num_heads": config.num_heads,
            "vocab_size": config.vocab_size,
            "parameters": plan.parameters,
        },
        "run": {
            "start": start,
            "steps": plan.steps,
            "tokens": plan.tokens,
            "tokens_per_step": batch.sequences * recipe.data.context_length,
            "tokens_per_parameter": plan.tokens / plan.parameters,
            "context_length": recipe.data.context_length,
        },
        "flops": {
            "training": plan.flops,
            "per_token": plan.flops / plan.tokens,
            "per_step": plan.flops // (plan.tokens // recipe.data.context_length) * batch.sequences,
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
            for name, share in recipe.data.weights().items()
        },
    }
