"""Uploads to the Hugging Face hub, with a model card: checkpoints, adapters and saved states.

    push_to_hub("my-model", "someone/my-model", license="apache-2.0")

What is uploaded is verified first. Only files that loading needs, a licence and a card are taken: a
folder that holds others is refused, so nothing gets published by accident.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import yaml

from xlstm7b import checkpoint, files, hub
from xlstm7b.accounting import parameter_counts
from xlstm7b.config import ModelConfig
from xlstm7b.hub import HubName
from xlstm7b.model.adapter import read_settings
from xlstm7b.model.saved_state import SavedState, describe_file
from xlstm7b.tokenizer import read_object

CARD = "README.md"
NXAI = "nxai-community-license"
_XLSTM = "[xLSTM](https://arxiv.org/abs/2503.13427)"
_VLLM = "in an environment that has `xlstm7b` too"
_NXAI_LINK = "https://huggingface.co/NX-AI/xLSTM-7b"
_LICENSE_HELP = (
    f"give an identifier of the hub, such as apache-2.0, or {NXAI} for the released weights and "
    "what was made of them"
)


class Options(TypedDict, total=False):
    """What all functions that upload take."""

    license: str | None
    """Licence of the weights: an identifier of the hub, or `NXAI`. Needed without a README.md."""
    private: bool
    """Makes a new repository private."""
    revision: str | None
    """Branch to commit to; it is made if needed."""
    subfolder: str | None
    """Folder of the repository; by default its root."""
    results: Mapping[tuple[str, str], object]
    """Evaluation results for the card, by task and metric."""
    run: str | Path | None
    """Folder of the training run, whose recipe and data the card names."""


@dataclass(frozen=True)
class Upload:
    """What an upload consists of. Nothing has been sent."""

    name: HubName
    files: Mapping[str, Path | bytes]
    private: bool
    has_weights: bool  # those in the hub folder are replaced

    @property
    def card(self) -> str:
        found = self.files[CARD]
        return (found.read_bytes() if isinstance(found, Path) else found).decode()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its path in the repository."""
        inside = f"{self.name.subfolder}/" if self.name.subfolder else ""
        return {
            inside + name: f.stat().st_size if isinstance(f, Path) else len(f)
            for name, f in self.files.items()
        }

    def send(self) -> str:
        """Makes one commit; returns its address. A checkpoint replaces an older one whole."""

        def is_replaced(file: str) -> bool:
            return self.has_weights and checkpoint.is_own_file(file)

        return hub.upload(self.name, self.files, private=self.private, replaced=is_replaced)


def push_to_hub(source: str | Path, repo: str, **options: Unpack[Options]) -> str:
    """Uploads what `prepare` takes; returns the address of the commit."""
    return prepare(source, repo, **options).send()


def push_saved(
    save: Callable[[Path], None], name: str, repo: str, **options: Unpack[Options]
) -> str:
    """Uploads what `save` writes to a path of this name in a temporary folder."""
    _name(repo, options)  # mistakes show before gigabytes are written
    _licence(options.get("license"), ())
    with TemporaryDirectory() as folder:
        save(Path(folder) / name)
        return push_to_hub(Path(folder) / name, repo, **options)


def prepare(source: str | Path, repo: str, **options: Unpack[Options]) -> Upload:
    """Verifies a checkpoint folder, an adapter's folder or a state file, and writes its card.

    `repo` is user/repo, user/repo@branch or either with /subfolder. A README.md in the folder is
    taken as it is; a card is written for a folder without one.
    """
    source, name = Path(source), _name(repo, options)
    if not source.exists():
        raise ValueError(f"there is no folder {str(source)!r}")
    if source.is_file():
        content = _state(source, name)
    elif (source / hub.ADAPTER_CONFIG).is_file():
        content = _adapter(source, name)
    else:
        content = _checkpoint(source, name)
    found: dict[str, Path | bytes] = dict(content.files)
    licence = options.get("license")
    if CARD not in found:
        recipe = _recipe(options.get("run"), content.config)
        values = {**_licence(licence, found), **content.front_matter}
        if (start := _start(recipe)) and "base_model" not in values:
            values |= {"base_model": start, "base_model_relation": "finetune"}
        parts = [
            f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---",
            f"# {name.subfolder.rpartition('/')[2] or name.repo.partition('/')[2]}",
            content.summary,
            _table(("", ""), content.facts),
            *_training(recipe),
            *_results(options.get("results") or {}),
            "## Use it",
            *content.usage,
            *_licence_text(values),
        ]
        found[CARD] = ("\n\n".join(parts) + "\n").encode()
    elif licence or options.get("run") or options.get("results"):
        raise ValueError(
            f"{source / CARD} is taken as the card: write licence, run and results into it, or "
            "remove it to get a generated one"
        )
    has_weights = "config.json" in found
    return Upload(name, found, options.get("private", False), has_weights)


def _name(repo: str, options: Options) -> HubName:
    name = hub.parse(repo, options.get("revision"), options.get("subfolder"))
    if name is None or hub.parse(str(name)) != name:  # a branch with a slash
        shown = repo if name is None else str(name)
        raise ValueError(f"{shown!r} is not user/repo, user/repo@branch or either with /subfolder")
    return name


# What can be uploaded


@dataclass(frozen=True)
class _Content:
    """Verified files, and what a card says of them."""

    files: Mapping[str, Path]
    summary: str
    front_matter: Mapping[str, Any]
    facts: Sequence[tuple[str, object]]
    usage: Sequence[str]
    config: ModelConfig | None = None


def _checkpoint(folder: Path, name: HubName) -> _Content:
    opened = checkpoint.open_checkpoint(folder)
    if not (folder / files.MANIFEST).is_file():
        raise ValueError(
            f"{folder} has no {files.MANIFEST} to verify it with: give the folder that "
            f"`xlstm7b convert {folder} TARGET` writes"
        )
    found = _files(folder, checkpoint.is_own_file)
    checkpoint.verify(folder)
    schemes = sorted({str(scheme) for scheme in opened.schemes.values()})
    limits = checkpoint.transformers_limits(opened.config)
    arguments = _arguments(name)
    usage = [
        "With the Python package `xlstm7b`:",
        _code(
            "python",
            "from xlstm7b import Generator",
            f"generator = Generator.from_pretrained({arguments})",
            'print(generator.generate("The sea was", max_new_tokens=64)[0].text)',
        ),
        _code("shell", f"xlstm7b serve {name}"),
    ]
    if limits:
        usage += [f"{limit}." for limit in limits]
    else:
        classes, lines = "AutoModelForCausalLM", []
        if any(scheme.startswith("int4") for scheme in schemes):
            lines.append("import xlstm7b.integrations.transformers  # it reads 4 bits")
        lines.append(f"model = AutoModelForCausalLM.from_pretrained({arguments})")
        if "tokenizer.json" in found:
            classes += ", AutoTokenizer"
            lines.append(f"tokenizer = AutoTokenizer.from_pretrained({arguments})")
        packages = "`transformers` and `compressed-tensors`" if schemes else "`transformers`"
        code = _code("python", f"from transformers import {classes}", *lines)
        usage += [f"With {packages}:", code]
        if schemes:
            usage.append("vLLM, with the plug-in of `xlstm7b`, loads no quantised weights.")
        else:
            served = f'"$(xlstm7b download {name})"' if name.subfolder else name.repo
            if name.revision and not name.subfolder:
                served += f" --revision {name.revision}"
            usage += [f"With vLLM, {_VLLM}:", _code("shell", f"vllm serve {served}")]
    stored = str(opened.dtype).removeprefix("torch.")
    return _Content(
        found,
        f"An {_XLSTM}: a recurrent language model whose memory and cost per token do not depend on "
        f"the context{', with quantised weights' if schemes else ''}.",
        _front_matter("xlstm7b" if limits else "transformers", "quantized" if schemes else None),
        [*_shape(opened.config), ("weights", ", ".join([*schemes, stored]))],
        usage,
        opened.config,
    )


def _adapter(folder: Path, name: HubName) -> _Content:
    settings = read_settings(folder)
    own = (hub.ADAPTER_CONFIG, hub.ADAPTER_WEIGHTS)
    found = _files(folder, lambda file: file in own)
    stored = files.read_headers([folder / hub.ADAPTER_WEIGHTS])
    given = str(settings.get("base_model_name_or_path") or "")
    base = None if Path(given).exists() else hub.parse(given)  # a local path is not published
    shown = "BASE" if base is None else str(base)
    base_arguments = _arguments(base or HubName(shown))
    targets = settings.get("target_modules") or ()
    values = _front_matter("peft", "lora")
    if base is not None:
        values |= {"base_model": base.repo, "base_model_relation": "adapter"}
    return _Content(
        found,
        f"A LoRA adapter of an {_XLSTM}, in PEFT's format.",
        values,
        [
            ("base", "not named" if base is None else f"`{base}`"),
            ("parameters", f"{sum(math.prod(part.shape) for part in stored):,}"),
            ("rank", settings.get("r")),
            ("alpha", settings.get("lora_alpha")),
            ("matrices", targets if isinstance(targets, str) else ", ".join(sorted(targets))),
        ],
        [
            "With the Python package `xlstm7b`:",
            _code(
                "python",
                "from xlstm7b import Generator",
                f'generator = Generator.from_pretrained("{shown}", adapter="{name}")',
                'print(generator.generate("The sea was", max_new_tokens=64)[0].text)',
            ),
            _code("shell", f"xlstm7b serve {shown} --adapter {name}"),
            "With `transformers` and `peft`:",
            _code(
                "python",
                "from peft import PeftModel",
                "from transformers import AutoModelForCausalLM",
                f"base = AutoModelForCausalLM.from_pretrained({base_arguments})",
                f"model = PeftModel.from_pretrained(base, {_arguments(name)})",
            ),
            f"vLLM takes a merged model, {_VLLM}:",
            _code("shell", f"xlstm7b merge {shown} {name} merged", "vllm serve merged"),
        ],
    )


def _state(file: Path, name: HubName) -> _Content:
    described = describe_file(file)
    config = ModelConfig.from_dict(json.loads(described.config))
    SavedState.load(file, config, device="cpu")  # compares the checksum
    arguments = f"{_arguments(name)}, config=generator.config, device=generator.device"
    return _Content(
        {hub.STATE_FILE: file},
        f"A saved state of an {_XLSTM}: what the model remembers of a text that it has read, or a "
        "state that was trained. Texts continue from it.",
        _front_matter("xlstm7b", "state"),
        [("tokens read", ", ".join(f"{n:,}" for n in described.tokens_seen)), *_shape(config)],
        [
            "With the Python package `xlstm7b` and the weights that the state belongs to:",
            _code(
                "python",
                "from xlstm7b import Generator, SavedState",
                'generator = Generator.from_pretrained("BASE")',
                f"state = SavedState.from_pretrained({arguments})",
                'print(generator.generate("The sea was", state=state)[0].text)',
            ),
            "`transformers` and vLLM cannot load it.",
        ],
        config,
    )


def _files(folder: Path, is_own: Callable[[str], bool]) -> dict[str, Path]:
    """The files to upload. `ValueError` for others. Hidden ones, such as .git, are left out."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        belongs = is_own(path.name) or path.name == CARD
        belongs = belongs or any(fnmatchcase(path.name, one) for one in hub.COMPANION_FILES)
        if not (belongs and path.is_file()):
            raise ValueError(
                f"{path} does not belong to what is uploaded (weights, config, tokenizer, chat "
                f"template, LICENSE, {CARD}): move it to another folder"
            )
        found[path.name] = path
    return found


# The card


def _front_matter(library: str, tag: str | None) -> dict[str, Any]:
    return {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["xlstm", "xlstm7b", *([tag] if tag else [])],
    }


def _licence(chosen: str | None, there: Iterable[str]) -> dict[str, str]:
    """The licence in the front matter. Licences without an identifier have a name and a link."""
    if not chosen:
        raise ValueError(f"which licence do the weights have? --license: {_LICENSE_HELP}")
    file = next((name for name in sorted(there) if name.startswith("LICENSE")), None)
    if chosen == NXAI:
        return {"license": "other", "license_name": NXAI, "license_link": file or _NXAI_LINK}
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", chosen) or chosen == "other":
        raise ValueError(f"{chosen!r} is not a licence: {_LICENSE_HELP}")
    return {"license": chosen}


def _licence_text(values: Mapping[str, Any]) -> list[str]:
    if values.get("license_name") != NXAI:
        return []
    return [
        "## Licence",
        "The weights are under the NXAI Community License, because they are, or were made of, the "
        f"released weights of [xLSTM 7B]({_NXAI_LINK}). It has terms on use and attribution, and "
        "holds for what is made of these weights too.",
    ]


def _shape(config: ModelConfig) -> list[tuple[str, object]]:
    return [
        ("parameters", f"{parameter_counts(config)['total']:,}"),
        ("blocks", config.num_blocks),
        ("embedding", config.embedding_dim),
        ("heads", config.num_heads),
        ("head width (keys, values)", f"{config.d_qk}, {config.d_hv}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        *((kind, value) for kind, value in config.differences().items()),
    ]


def _recipe(run: str | Path | None, config: ModelConfig | None) -> dict[str, Any]:
    """The recipe of a run; empty without a run."""
    if run is None:
        return {}
    recipe = read_object(Path(run) / "recipe.json")
    if not {"model", "data", "batch", "run", "optimizer", "schedule"} <= recipe.keys():
        raise ValueError(f"{run} is not the folder of a run: it has no recipe.json of one")
    trained = ModelConfig.from_dict(recipe["model"])
    if config is not None and trained.parameter_shapes() != config.parameter_shapes():
        raise ValueError(f"the run in {run} trained a model of another shape than this one")
    return recipe


def _start(recipe: Mapping[str, Any]) -> str | None:
    """The hub repository whose weights a run started from. A local path is not published."""
    init_from = recipe.get("init_from", "")
    found = None if Path(init_from).exists() else hub.parse(init_from)
    return None if found is None else found.repo


def _training(recipe: Mapping[str, Any]) -> list[str]:
    if not recipe:
        return []
    data, batch = recipe["data"], recipe["batch"]
    sources = [f"{name} ({source['weight']:g})" for name, source in data["sources"].items()]
    rows = [
        ("recipe", recipe["name"]),
        *([("started from", start)] if (start := _start(recipe)) else []),
        ("data (weight)", ", ".join(sources)),
        ("steps", f"{recipe['run']['steps']:,}"),
        ("sequences per step", batch["sequences"]),
        ("context length", f"{data['context_length']:,}"),
        ("learning rate", f"{recipe['optimizer']['lr']:g}, {recipe['schedule']['kind']}"),
    ]
    return ["## Training", _table(("setting", "value"), rows)]


def _results(results: Mapping[tuple[str, str], object]) -> list[str]:
    if not results:
        return []
    rows = [(*key, value) for key, value in results.items()]
    return ["## Results", _table(("task", "metric", "value"), rows)]


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells)


def _cell(value: object) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(shown.split()).replace("|", "\\|")


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _arguments(name: HubName) -> str:
    """A hub name as arguments of `from_pretrained`, here and in other libraries."""
    given = [("revision", name.revision), ("subfolder", name.subfolder)]
    return ", ".join([f'"{name.repo}"', *(f'{key}="{value}"' for key, value in given if value)])
