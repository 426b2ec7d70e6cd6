"""The recipe reference, `docs/recipes.md`, made from the descriptions in `recipe.py`.

xlstm7b train --reference > docs/recipes.md
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from inspect import cleandoc
from textwrap import fill
from typing import Any

from pydantic import TypeAdapter

from xlstm7b.config import SIZES, ModelConfig
from xlstm7b.train.recipe import (
    Batch,
    Data,
    Lora,
    Optimizer,
    Parallel,
    Recipe,
    Run,
    Schedule,
    Source,
    StateTuning,
    recipe_names,
    section_name,
)


def _listed(names: Iterable[str]) -> str:
    return fill(", ".join(f"`{name}`" for name in names) + ".", 100, break_on_hyphens=False)


_INTRODUCTION = f"""# Recipe reference

Every setting of a training recipe, with its default and its meaning.
[training.md](training.md#write-a-recipe) shows how to write a recipe and train with it.

    xlstm7b train --reference      # prints this page
    xlstm7b train 160m --set optimizer.lr=2e-3 --set run.steps=5000

A recipe is a TOML file. `[optimizer]` and below it `lr = 2e-3` is what this page calls
`optimizer.lr`. Settings without a default must be given. An unknown setting, a wrong type or a
value out of range is an error that names the setting. Recipes that come with the package:
{_listed(recipe_names())}
"""

_TOP = """
## Top of the file

These come before the first `[section]`, because TOML counts every later line to its section.
"""

_EXTENDS = (
    "extends",
    "string",
    '`""`',
    "Recipe that this one changes: a name, or a path that starts at this file's folder. Tables are "
    "merged; lists, `data.sources` and `data.validation` are replaced.",
)

_MODEL = f"""
## `[model]`

The model: a `size`, or the fields of a `config.json`, or both. With both, the fields that are given
replace those of the size. Sizes:
{_listed(SIZES)}

With `init_from`, leave `[model]` out: the model is that of `init_from`. Fields that are given, such
as `eos_token_id`, replace its own.
"""

# `ModelConfig` has no descriptions of its own: its names are those of published config.json files.
_MODEL_FIELDS = {
    "embedding_dim": "Width of the residual stream.",
    "num_blocks": "Number of blocks.",
    "num_heads": "Heads of each mLSTM layer. They must divide the widths of q, k and v.",
    "vocab_size": "Number of token ids. The tokenizer's may be smaller.",
    "qk_dim_factor": "Width of q and k over all heads, relative to `embedding_dim`.",
    "v_dim_factor": "Width of v over all heads, relative to `embedding_dim`.",
    "mlstm_round_up_to_multiple_of": "The widths of q, k and v are rounded up to a multiple of it.",
    "ffn_proj_factor": "Width of the feed-forward layer, relative to `embedding_dim`.",
    "ffn_round_up_to_multiple_of": "The feed-forward width is rounded up to a multiple of it.",
    "norm_eps": "ε of the RMSNorms.",
    "cell_norm_eps": "ε of the norm of each head's output.",
    "eps": "ε of the cell's division by its normaliser.",
    "gate_soft_cap": "Soft-cap a of the input and forget gates' pre-activations: a·tanh(x/a). "
    '`"none"`: no soft-cap.',
    "output_logit_soft_cap": 'Soft-cap of the logits. `"none"`: no soft-cap.',
    "igate_bias_init_range": "First value of the input gates' biases. If `input_gate` is "
    '`"fixed"`, their only value.',
    "bos_token_id": "Id that a text starts with.",
    "eos_token_id": "Id that ends a text in generation.",
    "pad_token_id": "Id of padding.",
    "block": "Name of the block's class ([extending.md](extending.md)).",
    "layer": "Name of the mLSTM layer's class.",
    "norm": "Name of the class of the norms of the residual stream: `rms_norm`, `layer_norm`.",
    "head_norm": "Name of the class of the norm of each head's output: `layer_norm`, `rms_norm`.",
    "gate": "Name of the class of the gates' pre-activations.",
    "input_gate": "Name of the class of the input gate's pre-activations: `fixed` is not trained. "
    "Empty: that of `gate`.",
    "force_bos_token_insert": "Put `bos_token_id` before every prompt, if it is not there.",
}


def recipe_reference() -> str:
    """The page as Markdown."""
    page = [_INTRODUCTION, _TOP, _table([_EXTENDS, *_rows(Recipe, "")])]
    page += [_MODEL, _table(_model_rows())]
    for cls in (Data, Batch, Optimizer, Schedule, Run, Parallel, Lora, StateTuning):
        name = section_name(cls)
        rows = _rows(cls, f"{name}.")
        if cls is Data:
            at = 1 + next(at for at, row in enumerate(rows) if row[0] == "data.sources")
            rows[at:at] = _rows(Source, "data.sources.NAME.")
        page += [f"\n## `[{name}]`\n\n{cleandoc(str(cls.__doc__))}\n", _table(rows)]
    return "".join(page)


Row = tuple[str, str, str, str]  # setting, values, default, meaning


def _table(rows: list[Row]) -> str:
    lines = [f"| `{name}` | {' | '.join(others)} |" for name, *others in rows]
    header = ["\n| setting | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*header, *lines, ""])


def _rows(cls: Any, prefix: str) -> list[Row]:
    """The fields of a section, from the JSON schema that pydantic makes of it."""
    return [
        (
            prefix + name,
            _values(schema),
            f"`{json.dumps(schema['default'])}`" if "default" in schema else "required",
            " ".join(schema["description"].split()),
        )
        for name, schema in TypeAdapter(cls).json_schema()["properties"].items()
        if "description" in schema
    ]


def _values(schema: dict[str, Any]) -> str:
    """The values that a setting may have, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_values, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    name = {"boolean": "true or false", "array": "list", "object": "table"}
    words = [name.get(schema["type"], schema["type"])]
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    words += [f"{sign} {schema[limit]}" for limit, sign in limits.items() if limit in schema]
    return " ".join(words).replace(str(2**64), "2^64")


def _model_rows() -> list[Row]:
    names: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "string"}
    names[float | None] = 'number or `"none"`'
    size = "Named size, which gives `embedding_dim`, `num_blocks` and `num_heads`."
    rows = [("model.size", "string", "none", size)]
    for field in fields(ModelConfig):
        values = names[field.type]
        default = "required" if field.default is MISSING else f"`{json.dumps(field.default)}`"
        rows.append((f"model.{field.name}", values, default, _MODEL_FIELDS[field.name]))
    return rows
