"""Recipes: the shipped ones have the paper's numbers; errors name the setting and the value."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from errors import refused

from xlstm7b.config import ModelConfig
from xlstm7b.hub import CONFIG_FILES, HubName
from xlstm7b.train.recipe import (
    Batch,
    Data,
    Layout,
    Lora,
    Optimizer,
    Parallel,
    Recipe,
    Run,
    Schedule,
    Source,
    StateTuning,
    load_recipe,
    parse_overrides,
    recipe_names,
    section_name,
)
from xlstm7b.train.reference import recipe_reference

SMALL = """
[model]
size = "tiny"
[data]
context_length = 64
sources.books = { path = "books" }
[batch]
sequences = 8
[schedule]
warmup = 10
[run]
steps = 100
"""
# For each shipped recipe: model, steps, start, sequences, context, lr, warm-up, decay, cool-down.
SHIPPED: dict[str, tuple[Any, ...]] = {
    "quickstart": ("", 220, 0, 32, 128, 5e-3, 20, 180, 20),
    "160m": ("160m", 95_000, 0, 128, 4096, 1e-3, 750, 92_250, 2000),
    "400m": ("400m", 62_000, 0, 128, 8192, 8e-4, 750, 59_250, 2000),
    "1.4b": ("1.4b", 31_000, 0, 256, 8192, 7e-4, 750, 28_250, 2000),
    "7b": ("7b", 500_000, 0, 512, 8192, 5e-4, 3000, 540_000, 7000),
    "7b-stage2": ("7b", 550_000, 500_000, 512, 8192, 5e-4, 3000, 540_000, 7000),
    "7b-longctx": ("7b", 550_000, 500_000, 128, 32_768, 5e-4, 3000, 540_000, 7000),
    "7b-ablation": ("7b", 76_000, 0, 256, 8192, 5e-4, 3000, 72_000, 1000),
    "160m-previous": ("160m-previous", 95_000, 0, 128, 4096, 1e-3, 750, 92_250, 2000),
    "400m-previous": ("400m-previous", 62_000, 0, 128, 8192, 8e-4, 750, 59_250, 2000),
    "1.4b-previous": ("1.4b-previous", 31_000, 0, 256, 8192, 7e-4, 750, 28_250, 2000),
    "7b-previous": ("7b-previous", 500_000, 0, 512, 8192, 5e-4, 3000, 540_000, 7000),
}


def small(tmp_path: Path, *overrides: str, text: str = SMALL) -> Recipe:
    file = tmp_path / "small.toml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(str(file), overrides)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_hold_the_papers_numbers(name: str) -> None:
    recipe = load_recipe(name)
    size, steps, start, sequences, context, lr, warmup, decay, cooldown = SHIPPED[name]
    rate = recipe.learning_rate
    assert recipe.name == name
    small = ModelConfig(128, 2, 2, vocab_size=320)
    assert recipe.model == (ModelConfig.named(size) if size else small)
    assert (recipe.run.steps, recipe.start_step) == (steps, start)
    assert (recipe.batch.sequences, recipe.data.context_length) == (sequences, context)
    assert (rate.peak, rate.warmup, rate.decay, rate.cooldown) == (lr, warmup, decay, cooldown)
    assert rate.factor == 0.1
    if name != "quickstart":
        adamw = recipe.optimizer
        assert (adamw.betas, adamw.eps, adamw.weight_decay, adamw.clip) == (
            (0.99, 0.95),
            1e-8,
            0.1,
            0.5,
        )
        assert recipe.run.log_every == 50
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_every_shipped_recipe_is_in_the_table() -> None:
    assert recipe_names() == sorted(SHIPPED)


def test_the_7b_has_the_papers_ramp_schedule_and_gpus() -> None:
    recipe = load_recipe("7b")
    assert recipe.ramp.stages == ((0, 128), (2000, 256), (4000, 512))
    assert (recipe.schedule.kind, recipe.schedule.reference) == ("exponential", 500_000)
    assert recipe.layout().world == 128
    assert load_recipe("7b-stage2").ramp == recipe.ramp
    assert load_recipe("7b-ablation").schedule.kind == "cosine"


def test_tokens_of_the_whole_7b_run() -> None:
    first, second = load_recipe("7b"), load_recipe("7b-stage2")
    one = first.tokens_between(0, 500_000)
    assert one == (2000 * 128 + 2000 * 256 + 496_000 * 512) * 8192 == 2_086_666_240_000
    two = second.tokens_between(500_000, 550_000)
    assert two == 50_000 * 512 * 8192 == 209_715_200_000
    assert one + two == second.tokens_between(0, 550_000) == 2_296_381_440_000
    # "Keeping the number of tokens per step and the number of steps fixed."
    assert load_recipe("7b-longctx").tokens_between(500_000, 550_000) == two
    assert load_recipe("7b-ablation").tokens_between(0, 76_000) == 159_383_552_000  # "160B"


def test_mixtures_have_the_papers_shares() -> None:
    assert load_recipe("7b").data.shares() == {"dclm": 1.0}
    assert load_recipe("7b-stage2").data.shares() == {
        "dclm": 0.4,
        "fineweb-edu": 0.15,
        "cosmopedia": 0.1,
        "proofpile-2": 0.15,
        "the-stack": 0.15,
        "sft": 0.05,
    }
    shares = load_recipe("7b-longctx").data.shares()
    assert {name: round(99 * share, 9) for name, share in shares.items()} == {
        "dclm": 20,
        "fineweb-edu": 15,
        "cosmopedia": 10,
        "proofpile-2": 15,
        "the-stack": 15,
        "sft": 5,
        "long-data-collections": 15,
        "longalign-10k": 1,
        "antihaystack": 1,
        "longalpaca-12k": 2,
    }
    assert sum(shares.values()) == pytest.approx(1, abs=1e-15)


def test_stages_share_one_learning_rate() -> None:
    first, second = load_recipe("7b").learning_rate, load_recipe("7b-stage2").learning_rate
    assert first == second == load_recipe("7b-longctx").learning_rate


def test_overrides_replace_single_settings(tmp_path: Path) -> None:
    recipe = small(
        tmp_path,
        "optimizer.lr=1e-3",
        "optimizer.clip=inf",
        "optimizer.betas=[0.9, 0.999]",
        "data.sources.books.path=/data/my books",
        "data.sources.more.path=x",
        "batch.ramp=[[0, 4], [50, 8]]",
        "run.compile=false",
        "run.steps=50",
        "run.steps=60",
        "model.num_heads=8",
        "init_from=NX-AI/xLSTM-7b",
    )
    assert (recipe.optimizer.lr, recipe.optimizer.clip) == (1e-3, float("inf"))
    assert recipe.optimizer.betas == (0.9, 0.999)
    assert recipe.data.sources == {"books": Source("/data/my books"), "more": Source("x")}
    assert recipe.batch.ramp == ((0, 4), (50, 8))
    assert (recipe.run.compile, recipe.run.steps, recipe.model.num_heads) == (False, 60, 8)
    assert recipe.model == replace(ModelConfig.named("tiny"), num_heads=8)
    assert recipe.init_from == "NX-AI/xLSTM-7b"
    other = small(tmp_path, 'data.sources={web={path="w", weight=2}}', "data.sources.x.path=y")
    assert other.data.sources == {"web": Source("w", 2.0), "x": Source("y")}


def test_override_values_are_toml_or_else_strings() -> None:
    settings = ["a.b=1", "a = two", 'a."d"="3"', "e=2024-01-01", "f=", "g=x = 1", "h=1 # no"]
    assert [value for _, value in parse_overrides(settings)] == [
        1,
        "two",
        "3",
        "2024-01-01",
        "",
        "x = 1",
        1,
    ]
    assert parse_overrides([" a . b = [1, 2] "]) == [(["a", "b"], [1, 2])]


def test_a_file_may_extend_another_and_replaces_its_mixture(tmp_path: Path) -> None:
    small(tmp_path)
    child = tmp_path / "child.toml"
    child.write_text('extends = "small.toml"\n[data.sources]\nweb = {path = "w"}\n[run]\nseed = 3')
    recipe = load_recipe(str(child))
    assert list(recipe.data.sources) == ["web"]
    assert (recipe.name, recipe.run.seed, recipe.run.steps) == ("child", 3, 100)
    named = tmp_path / "mine.toml"
    named.write_text('extends = "160m"\n[run]\nsteps = 5000')
    assert load_recipe(str(named)).run.steps == 5000
    named.write_text('extends = "../' + tmp_path.name + '/mine.toml"')
    with pytest.raises(ValueError, match="recipes extend each other"):
        load_recipe(str(named))


def write_blocks(folder: Path) -> None:
    """Writes the ```toml blocks of the page on training. Each begins with the name of its file."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```toml\n# (\S+)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")


def test_the_examples_of_extends_in_the_docs(tmp_path: Path) -> None:
    write_blocks(tmp_path)
    base, books = load_recipe("160m"), load_recipe(str(tmp_path / "books.toml"))
    assert books == replace(
        base,
        name="books",
        data=replace(
            base.data,
            context_length=2048,
            validation="data/books/valid",
            sources={
                "books": Source("data/books/train", 3.0),
                "letters": Source("data/letters/train"),
            },
        ),
        run=replace(base.run, steps=5000),
    )
    high = load_recipe(str(tmp_path / "books-high-lr.toml"), ["run.seed=7"])
    assert high == replace(
        books,
        name="books-high-lr",
        optimizer=replace(books.optimizer, lr=2e-3),
        run=replace(books.run, seed=7),
    )


def test_validation_is_a_folder_or_several_with_names(tmp_path: Path) -> None:
    assert small(tmp_path).data.validation_sets() == {}
    assert small(tmp_path, "data.validation=v").data.validation_sets() == {"": "v"}
    write_blocks(tmp_path)
    recipe = load_recipe(str(tmp_path / "two-sets.toml"))
    sets = {"books": "data/books/valid", "letters": "data/letters/valid"}
    assert recipe.data.validation_sets() == recipe.data.validation == sets
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    # Like a mixture, the sets are replaced by a file that extends, and changed by --set.
    (tmp_path / "one.toml").write_text('extends = "two-sets.toml"\n[data.validation]\nweb = "w"')
    more = load_recipe(str(tmp_path / "one.toml"), ["data.validation.code=c"])
    assert more.data.validation_sets() == {"web": "w", "code": "c"}
    hooked = load_recipe(str(tmp_path / "hooked.toml"))
    assert hooked.run.hooks == ("my_hooks.py:ZLoss", "my_hooks.py:StopEarly")
    with pytest.raises(ValueError, match=r"run\.validate_every needs data\.validation"):
        small(tmp_path, "data.validation={}", "run.validate_every=10")


WITHOUT_MODEL = SMALL.replace('[model]\nsize = "tiny"\n', "")


def save_config(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return folder


def test_the_model_of_init_from_is_used_if_the_recipe_has_none(tmp_path: Path) -> None:
    config = ModelConfig(96, 3, 2, vocab_size=400, gate_soft_cap=12.0)
    init_from = f"init_from={save_config(tmp_path / 'base', config)}"
    assert small(tmp_path, init_from, text=WITHOUT_MODEL).model == config
    changed = small(tmp_path, init_from, "model.eos_token_id=7", text=WITHOUT_MODEL)
    assert changed.model == replace(config, eos_token_id=7)
    assert small(tmp_path, init_from).model == ModelConfig.named("tiny")  # the recipe's own
    whole = "model={embedding_dim=64, num_blocks=1, num_heads=2}"
    assert small(tmp_path, init_from, whole, text=WITHOUT_MODEL).model == ModelConfig(64, 1, 2)
    # A later stage takes it from the checkpoint of the earlier one.
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000050"
    checkpoint.mkdir(parents=True)
    earlier = replace(small(tmp_path), model=config)
    (checkpoint / "run.json").write_text(json.dumps({"recipe": earlier.to_dict()}))
    stage = [f"init_from={tmp_path / 'run'}", "start_step=50"]
    assert small(tmp_path, *stage, text=WITHOUT_MODEL).model == config
    stage[1] = "start_step=51"
    with pytest.raises(ValueError, match=r"small.toml: .*checkpoints has no checkpoint of step 51"):
        small(tmp_path, *stage, text=WITHOUT_MODEL)


def test_of_a_hub_id_only_the_config_is_downloaded(tmp_path: Path, monkeypatch) -> None:
    config, asked = ModelConfig(96, 3, 2), []

    def download(name: HubName, patterns: Sequence[str]) -> Path:
        asked.append((str(name), patterns))
        return save_config(tmp_path / "snapshot", config)

    monkeypatch.setattr("xlstm7b.hub.download", download)
    assert small(tmp_path, "init_from=some/model@v1/sub", text=WITHOUT_MODEL).model == config
    assert asked == [("some/model@v1/sub", CONFIG_FILES)]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"small\.toml: model is missing; give it, or init_from$"):
        small(tmp_path, text=WITHOUT_MODEL)
    with pytest.raises(ValueError, match=r"'nowhere' is neither a folder nor the id of a hub"):
        small(tmp_path, "init_from=nowhere", text=WITHOUT_MODEL)


# The error names the setting and the value.
REFUSED = [
    "run.steps=1.5",
    "run.steps=many",
    "run.steps=0",
    "run.compile=1",
    "run.seed=-1",
    f"run.seed={2**64}",
    "run.precision=fp8",
    "run=5",
    'run.hooks="a.py:B"',
    "data.sources=5",
    "data.validation=1",
    "data.validation=[1]",
    "data.sources.books.weight=0",
    "model=5",
    "optimizer.lr=0",
    "optimizer.lr=nan",
    "optimizer.lr=inf",
    "optimizer.weight_decay=inf",
    "optimizer.weight_decay=-1",
    "optimizer.clip=0",
    "optimizer.clip=nan",
    "optimizer.betas=0.9",
    "optimizer.betas=[0.9, 0.9, 0.9]",
    "batch.ramp=8",
    "parallel.dp_shard=0",
]
# The error names this.
REFUSED_WITH = {
    # Unknown names, with their neighbours.
    "optimiser.lr=1": ["unknown setting optimiser", "did you mean optimizer?"],
    "lr=1": ["unknown setting lr", "did you mean optimizer.lr?"],
    "lora={lr=1}": ["unknown setting lora.lr", "did you mean optimizer.lr?"],
    "kind=cosine": ["unknown setting kind", "did you mean schedule.kind?"],
    "context_length=8": ["unknown setting context_length", "did you mean data.context_length?"],
    "num_heads=8": ["unknown setting num_heads", "did you mean model.num_heads?"],
    "optimizer.beta=1": ["unknown setting optimizer.beta", "did you mean betas?"],
    "run.zzz=1": ["unknown setting run.zzz", "known: steps, seed, precision,"],
    "data.sources.books.wieght=2": ["data.sources.books.wieght", "did you mean weight"],
    "model.heads=2": ["unknown setting model.heads", "did you mean num_heads?"],
    # A part of the value.
    "run.steps=true": ["run.steps", "not True"],
    "run.tensorboard=true": ['run.tensorboard is now run.trackers = ["tensorboard"]'],
    'run.trackers=["tensorbord"]': ["run.trackers", '"wandb", "mlflow"', "'tensorbord'"],
    "run.trackers=wandb": ["run.trackers", "'wandb'"],
    'run.hooks=["a.py"]': ["run.hooks", "'a.py'"],
    'run.hooks=["a.py:B-C"]': ["run.hooks", "'a.py:B-C'"],
    'run.hooks=[":B"]': ["run.hooks", "':B'"],
    'run.hooks=["./a:B"]': ["run.hooks", "'./a:B'"],
    'run.hooks=["a/b:C"]': ["run.hooks", "'a/b:C'"],
    "run.hooks=[1]": ["run.hooks[0]", "not 1"],
    "data.validation.a=1": ["data.validation", "{'a': 1}"],
    "data.validation.a=": ["data.validation", "{'a': ''}"],
    'data.validation={"" = "b"}': ["data.validation", "{'': 'b'}"],
    "data.sources={}": ["data.sources"],
    "model.size=5": ["model: size", "not 5"],
    "model.size=8b": ["model", "size '8b'"],
    "model.num_heads=a": ["model: num_heads", "not 'a'"],
    "optimizer.betas=[0.9]": ["optimizer.betas[1]"],
    "optimizer.betas=[1, 0.9]": ["optimizer.betas[0]", "not 1"],
    "batch.ramp=[[0, 0], [5, 8]]": ["batch.ramp[0][1]", "not 0"],
    "batch.ramp=[[1, 8]]": ["batch.ramp", "[1]"],
    "batch.ramp=[[0, 4], [0, 8]]": ["batch.ramp", "[0, 0]"],
    "run.steps": ["a.b=c", "'run.steps'"],
    "run..steps=1": ["a.b=c", "'run..steps=1'"],
    # Settings that contradict each other: both are named.
    "run.steps=9": ["run.steps (9)", "schedule.warmup (10)"],
    "schedule.cooldown=91": ["schedule.warmup (10)", "schedule.cooldown (91)"],
    "schedule.reference=5": ["schedule.reference", "schedule.kind"],
    "batch.ramp=[[0, 4]]": ["batch.ramp", "4 sequences", "batch.sequences is 8"],
    "start_step=100": ["start_step (100)", "run.steps (100)"],
    "start_step=50": ["start_step", "init_from"],
    "run.validate_every=10": ["run.validate_every", "data.validation"],
    "parallel.tp=3": ["parallel.tp (3)", "heads (4)"],
    "parallel.dp_replicate=-1": ["parallel.dp_shard", "parallel.dp_replicate", "-1"],
    "parallel.dp_shard=3": ["8 sequences", "step 0", "3 data-parallel"],
}
BOOKS = 'sources.books = { path = "books" }'
BAD_FILES = [
    (SMALL.replace("steps = 100", ""), ["run.steps"]),
    (SMALL.replace("[batch]\nsequences = 8", ""), ["batch"]),
    (SMALL.replace(BOOKS, ""), ["data.sources"]),
    (SMALL.replace('{ path = "books" }', "{}"), ["data.sources.books.path"]),
    (SMALL.replace(BOOKS, "sources = {}"), ["data.sources"]),
    (SMALL.replace('size = "tiny"', "num_heads = 2"), ["model", "embedding_dim"]),
    (SMALL + "[run", ["TOML"]),
    ("extends = 3", ["extends", "not 3"]),
    ('extends = "other.toml"', ["other.toml"]),
    ('extends = "9b"', ["'9b'", "1.4b, 1.4b-previous, 160m, 160m-previous, 400m, 400m-previous"]),
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_that_is_refused_is_named(tmp_path: Path, override: str) -> None:
    setting, value = override.split("=", 1)
    with refused(setting, "not ", value.strip('"')):
        small(tmp_path, override)


@pytest.mark.parametrize("override", REFUSED_WITH)
def test_what_is_refused_is_named(tmp_path: Path, override: str) -> None:
    with refused(*REFUSED_WITH[override]):
        small(tmp_path, override)


@pytest.mark.parametrize(("text", "named"), BAD_FILES)
def test_bad_files_are_named(tmp_path: Path, text: str, named: list[str]) -> None:
    with refused(*named):
        small(tmp_path, text=text)


def test_a_layout_divides_the_processes_and_the_batch(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    assert recipe.layout() == Layout(1, 1, 1)
    assert recipe.layout(4) == Layout(1, 4, 1)
    with refused("8 sequences", "step 0", "among 3"):
        recipe.layout(3)
    hybrid = small(tmp_path, "parallel.dp_shard=2", "parallel.dp_replicate=-1", "parallel.tp=2")
    assert (hybrid.layout(), hybrid.layout(8)) == (Layout(1, 2, 2), Layout(2, 2, 2))
    assert (hybrid.layout(8).data_parallel, hybrid.layout(8).world) == (4, 8)
    with refused("number of processes is 6", "multiple of 4"):
        hybrid.layout(6)
    with refused("number of processes is 1", "dp_replicate 16 × dp_shard 8"):
        load_recipe("7b").layout(1)
    ramped = small(tmp_path, "batch.ramp=[[0, 2], [50, 8]]")
    with refused("2 sequences", "step 0", "among 4"):
        ramped.layout(4)


def test_micro_batches_fit_the_ramp() -> None:
    recipe = load_recipe("7b")
    layout = recipe.layout()
    at = {step: recipe.micro_batches(step, layout) for step in (0, 2000, 4000)}
    assert at == {0: (1, 1), 2000: (2, 1), 4000: (4, 1)}
    few = load_recipe("7b", ["parallel.dp_replicate=1"])
    assert few.micro_batches(4000, few.layout()) == (4, 16)


def test_instances_check_themselves(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    with refused("run.steps", "not 0"):
        replace(recipe.run, steps=0)
    with refused("run.steps", "not 0"):
        Run(0)
    with refused("optimizer.betas[1]", "not 2.0"):
        Optimizer(1e-3, (0.9, 2.0))
    with refused("start_step (200)"):
        replace(recipe, start_step=200)
    with refused("run", "not 5"):
        replace(recipe, run=5)  # type: ignore[arg-type]
    with refused("run.stepz", "did you mean steps?"):
        Run(steps=1, stepz=2)  # type: ignore[call-arg]


def test_the_reference_page_is_what_the_code_generates() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == recipe_reference(), "run: xlstm7b train --reference > docs/recipes.md"


def test_the_reference_has_every_setting_with_its_default_and_a_meaning() -> None:
    rows = re.findall(
        r"^\| `(.+?)` \| (.+?) \| (.+?) \| (.+?) \|$", recipe_reference(), re.MULTILINE
    )
    defaults = {name: default for name, _, default, _ in rows}
    assert len(defaults) == len(rows)
    assert all(meaning.endswith(".") for *_, meaning in rows)
    sections = {"data.sources.NAME.": Source, "model.": ModelConfig}
    for section in (Data, Batch, Optimizer, Schedule, Run, Parallel, Lora, StateTuning):
        sections[f"{section_name(section)}."] = section
    top = {"extends", "init_from", "start_step", "model.size"}
    names = {f"{prefix}{field.name}" for prefix, cls in sections.items() for field in fields(cls)}
    assert set(defaults) == names | top
    for prefix, cls in sections.items():
        for field in fields(cls):
            is_required = field.default is MISSING
            default = "required" if is_required else f"`{json.dumps(field.default)}`"
            assert defaults[prefix + field.name] == default


def test_reading_and_planning_a_recipe_load_no_torch() -> None:
    code = "import sys; from xlstm7b.train import describe, load_recipe, make_plan; "
    code += "describe(make_plan(load_recipe('7b')))"
    check = "; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert run([sys.executable, "-c", code + check], check=False).returncode == 0
