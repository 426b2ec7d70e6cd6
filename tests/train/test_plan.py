"""Plans: tokens, FLOPs, memory and days, compared with numbers computed by hand."""

import json

import pytest

from xlstm7b import accounting
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import KERNEL_CHUNK_SIZE
from xlstm7b.train.plan import (
    KERNEL_CHUNK,
    describe,
    key_steps,
    make_plan,
    memory_per_gpu,
    peak_tokens_per_second,
)
from xlstm7b.train.recipe import Layout, load_recipe, recipe_names


def memory(*overrides: str, name: str = "7b") -> dict[str, int]:
    recipe = load_recipe(name, overrides)
    return memory_per_gpu(recipe, recipe.layout())


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_have_plans_that_are_json(name: str) -> None:
    sections = describe(make_plan(load_recipe(name)))
    assert json.loads(json.dumps(sections)) == sections
    leaves = [
        leaf
        for section in sections.values()
        for value in section.values()
        for leaf in (value.values() if isinstance(value, dict) else [value])
    ]
    assert all(isinstance(leaf, int | float | str) for leaf in leaves)
    shares = [source["share"] for source in sections["mixture"].values()]
    assert sum(shares) == pytest.approx(1)


def test_the_previous_block_states_what_it_keeps() -> None:
    d, tokens, blocks = 2048, 4 * 8192, 48
    settings = ["batch.micro_batch=4", "run.activation_checkpointing="]
    for mode, values in (
        ("none", blocks * 18 * d),
        ("selective", blocks * 8 * d),
        ("block", (blocks + 18) * d),
    ):
        parts = memory(settings[0], settings[1] + mode, name="1.4b-previous")
        assert parts["activations"] == 2 * tokens * values
        states = 4 * 33 * 4 * 1024**2 * 2
        assert parts["cell"] == states * (2 if mode == "block" else blocks + 1)


def test_the_7b_takes_the_papers_time() -> None:
    first, second = make_plan(load_recipe("7b")), make_plan(load_recipe("7b-stage2"))
    assert first.layout == Layout(dp_replicate=16, dp_shard=8, tp=1)
    assert first.parameters == 6_865_424_896
    assert (first.steps, second.steps) == (500_000, 50_000)
    assert first.tokens + second.tokens == 2_296_381_440_000
    sequence = accounting.training_flops(ModelConfig.named("7b"), 8192)
    assert first.flops + second.flops == sequence * 280_320_000
    # At the paper's own 9.15K tokens a second on each of 128 GPUs: 22.7 days.
    assert first.tokens_per_second / 128 == pytest.approx(9150, rel=0.002)
    days = (first.seconds + second.seconds) / 86400
    assert days == pytest.approx(2_296_381_440_000 / (128 * 9150) / 86400, rel=0.002)
    assert make_plan(load_recipe("7b"), mfu=0.187).seconds == pytest.approx(2 * first.seconds)
    assert make_plan(load_recipe("7b"), peak_flops=1978e12).seconds == pytest.approx(
        first.seconds / 2
    )


def test_key_steps_are_the_corners_within_the_stage() -> None:
    assert key_steps(load_recipe("7b")) == [0, 2000, 3000, 4000, 500_000]
    assert key_steps(load_recipe("7b-stage2")) == [500_000, 503_000, 543_000, 550_000]
    steps = describe(make_plan(load_recipe("7b-stage2")))["steps"]
    assert steps["step_503000"]["learning_rate"] == pytest.approx(5e-5)
    assert steps["step_550000"] == {
        "learning_rate": 0.0,
        "sequences": 512,
        "tokens_so_far": 209_715_200_000,
    }


def test_a_described_plan_has_start_mixture_and_layout() -> None:
    sections = describe(make_plan(load_recipe("7b-longctx"), gpus=128))
    assert sections["run"]["start"] == {"from": "runs/7b", "at_step": 500_000}
    assert sections["run"]["tokens_per_step"] == 128 * 32_768 == 4_194_304
    assert sections["layout"]["gpus"] == 128
    mixture = sections["mixture"]
    assert mixture["antihaystack"]["share"] == pytest.approx(1 / 99)
    assert mixture["dclm"]["tokens"] == round(209_715_200_000 * 20 / 99)


def test_states_are_16_bytes_a_parameter_sharded() -> None:
    one = memory("parallel.dp_shard=1", "parallel.dp_replicate=128")
    assert one["weights"] == one["gradients"] == 4 * 6_865_424_896
    assert one["adamw"] == 8 * 6_865_424_896
    eight = memory()
    assert 8 * eight["adamw"] == one["adamw"]
    # Tensor parallelism splits the blocks' matrices; embedding, head and norms stay whole.
    counts = accounting.parameter_counts(ModelConfig.named("7b"))
    whole = counts["embedding"] + counts["head"] + counts["norms"]
    local = (counts["total"] - whole) // 2 + whole
    split = memory("parallel.dp_shard=1", "parallel.dp_replicate=64", "parallel.tp=2")
    assert split["weights"] == 4 * local


def test_activations_by_checkpointing_mode() -> None:
    # Width 4096, q and k 2048, v 4096, FFN 10944; micro-batches of 4 × 8192 tokens, 2 bytes.
    tokens, none, selective = 32_768, 69_696, 46_464
    mode = "run.activation_checkpointing"
    assert memory(f"{mode}=none")["activations"] == 2 * tokens * 32 * none
    assert memory(f"{mode}=selective")["activations"] == 2 * tokens * 32 * selective
    products = selective - 4096  # without the cell's output
    assert memory(f"{mode}=products")["activations"] == 2 * tokens * 32 * products
    assert memory(f"{mode}=block")["activations"] == 2 * tokens * (32 * 4096 + none)
    halved = memory(f"{mode}=none", "parallel.tp=2")["activations"]
    assert halved == 2 * tokens * 32 * (none - (none - 4 * 4096) // 2)
    assert memory(f"{mode}=none", "batch.micro_batch=1")["activations"] == 2 * 8192 * 32 * none


def test_the_cell_keeps_its_states_at_the_kernels_chunk_boundaries() -> None:
    """The kernels save C at every boundary for the backward pass, and compute dC at each."""
    state, boundaries = 8 * 256 * 512, 4 * (8192 // 256 + 1)  # 4 sequences of 32 chunks
    mode = "run.activation_checkpointing"
    assert memory(f"{mode}=none")["cell"] == 2 * (32 + 1) * boundaries * state
    assert memory(f"{mode}=selective")["cell"] == 2 * (32 + 1) * boundaries * state
    assert memory(f"{mode}=products")["cell"] == 2 * (1 + 1) * boundaries * state
    assert memory(f"{mode}=block")["cell"] == 2 * (1 + 1) * boundaries * state
    assert memory(f"{mode}=block", "parallel.tp=2")["cell"] == 2 * boundaries * state


def test_the_kernels_chunk_is_the_one_of_the_plan() -> None:
    assert KERNEL_CHUNK == KERNEL_CHUNK_SIZE


def test_unsharded_float32_weights_are_not_held_twice() -> None:
    assert memory("run.precision=float32", name="quickstart")["gathered"] == 0
    assert memory("run.precision=bfloat16", name="quickstart")["gathered"] > 0
    parts = memory(name="quickstart")
    assert parts["total"] == sum(size for part, size in parts.items() if part != "total")


def test_one_process_keeps_all_weights_in_the_dtype_of_the_computation() -> None:
    counts = accounting.parameter_counts(ModelConfig.named("1.4b"))
    blocks = counts["total"] - counts["embedding"] - counts["head"] - counts["norms"]
    alone = "parallel.dp_shard=1", "parallel.dp_replicate=1"
    none, selective = (
        memory(*alone, f"run.activation_checkpointing={mode}", name="1.4b")["gathered"]
        for mode in ("none", "selective")
    )
    assert none - selective == 2 * (blocks - 2 * (blocks // 24))
    # At the end of the backward pass there are the gradients of all copies.
    short = "run.activation_checkpointing=none", "data.context_length=64", "batch.micro_batch=1"
    assert memory(*alone, *short, name="1.4b")["activations"] == 2 * (blocks + counts["embedding"])
    assert memory("parallel.dp_shard=2", *short, name="1.4b")["activations"] < 1e9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": 96}, "processes is 96, but dp_replicate 16 × dp_shard 8 × tp 1 needs 128"),
        ({"gpus": 0}, "the number of GPUs must be at least 1, not 0"),
        ({"mfu": 0.0}, "the MFU must be above 0 and at most 1, not 0.0"),
        ({"mfu": 40.0}, "the MFU must be above 0 and at most 1, not 40.0"),
        ({"peak_flops": 0.0}, "the peak must be a positive number of FLOP/s, not 0.0"),
    ],
)
def test_impossible_plans_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_plan(load_recipe("7b"), **options)  # type: ignore[arg-type]


def test_mfu_is_1_if_a_gpu_does_nothing_but_the_models_flops():
    """The paper's speed on an H100 has about its MFU: the paper counts other FLOPs."""
    recipe = load_recipe("7b")
    peak = peak_tokens_per_second(recipe, "NVIDIA H100 80GB HBM3", 1)
    assert peak == pytest.approx(989e12 * 8192 / accounting.training_flops(recipe.model, 8192))
    assert 9150 / peak == pytest.approx(accounting.PAPER_MFU, abs=0.03)
    assert peak_tokens_per_second(recipe, "NVIDIA H100 80GB HBM3", 8) == pytest.approx(8 * peak)
    assert peak_tokens_per_second(recipe, "a GPU of tomorrow", 1) is None
    wide = load_recipe("7b", ["run.precision=float32"])
    assert peak_tokens_per_second(wide, "NVIDIA H100 80GB HBM3", 1) is None
