"""Registered classes: the examples of docs/extending.md, plugins, config.json, rules and errors."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from commands import environment
from engines import Driver, greedy
from torch import Tensor, nn
from train_processes import run
from train_runs import losses, recipe, weights

from xlstm7b import (
    XLSTM,
    Engine,
    Generator,
    MLSTMStack,
    ModelConfig,
    ModelState,
    SavedState,
    accounting,
)
from xlstm7b.checkpoint import open_checkpoint, read_config
from xlstm7b.data.shards import ShardWriter, write_manifest
from xlstm7b.generate.state import state_bytes
from xlstm7b.model.contract import check_model
from xlstm7b.model.layers import MLSTMBlock, NormWeight, RMSNorm, padding
from xlstm7b.registry import PLUGINS, STANDARD, find, register
from xlstm7b.tokenizer import ByteTokenizer
from xlstm7b.train import make_plan
from xlstm7b.train.run_checkpoints import export_run
from xlstm7b.train.sharded_model import parallelize

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SMALL = ModelConfig(64, 2, 2, vocab_size=320)


def code_blocks() -> list[str]:
    """The Python code of the page: the two classes and their use. Its files are run elsewhere."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1:]
    return [block for block in blocks if not re.match(r"# \S+\.py\n", block)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Runs the page once, in a folder of its own. The folder holds my_layers.py and my_model."""
    folder = tmp_path_factory.mktemp("page")
    *classes, use = code_blocks()
    (folder / "my_layers.py").write_text("\n\n".join(classes), encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        names: dict[str, object] = {"__name__": "my_layers"}
        exec("\n\n".join([*classes, use]), names)
    finally:
        os.chdir(before)
    return folder, names


# A norm, a gate and a block with a state of another kind


@register("norm", "own_norm")
class LayerNorm(NormWeight):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, eps=self.eps)

    @staticmethod
    def flops(config: ModelConfig, tokens: int) -> int:
        return tokens * 5 * config.embedding_dim


@register("gate", "own_gate")
class FixedGate(nn.Module):
    """A gate that does not depend on the input."""

    def __init__(self, width: int, heads: int, *, biases: tuple[float, float]) -> None:
        super().__init__()
        self.biases, self.bias = biases, nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.bias.copy_(torch.linspace(*self.biases, len(self.bias), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.bias.to(wide).expand(*x.shape[:-1], -1)

    @staticmethod
    def flops(config: ModelConfig, tokens: int) -> int:
        return 0


class Averages(NamedTuple):
    """A larger state: two sums, and a counter in float32 of every dtype."""

    sums: Tensor  # [B, d]
    squares: Tensor  # [B, d]
    count: Tensor  # [B]


@register("block", "averages")
class AveragesBlock(nn.Module):
    """Adds a function of the means of all inputs so far. It has no cell and no mLSTM layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = find("norm", config.norm)(config.embedding_dim, config.norm_eps)

    @classmethod
    def from_config(cls, config: ModelConfig) -> "AveragesBlock":
        return cls(config)

    def forward(
        self,
        x: Tensor,
        state: Averages | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Averages]:
        padded = None if lengths is None else padding(lengths, *x.shape[:2])
        if state is None:
            zeros = torch.zeros_like(x[:, 0])
            state = Averages(zeros, zeros, zeros[:, 0])
        rows = []
        for t in range(x.shape[1]):
            read = torch.ones_like(x[:, t, 0]) if padded is None else (~padded[:, t]).to(x.dtype)
            kept = 1.0 if resets is None else (~resets[:, t]).to(x.dtype)[:, None]
            state = Averages(
                state.sums * kept + x[:, t] * read[:, None],
                state.squares * kept + x[:, t].square() * read[:, None],
                state.count * (kept if resets is None else kept[:, 0]) + read,
            )
            mean = (state.sums + state.squares) / state.count.clamp(min=1)[:, None]
            rows.append(x[:, t] + self.norm(mean))
        return torch.stack(rows, 1), state

    @staticmethod
    def zero_state(config, batch, *, dtype=torch.float32, device=None):
        shape = batch, config.embedding_dim
        parts = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        return Averages(*parts, torch.zeros(batch, device=device))

    @staticmethod
    def flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
        return {"averages": tokens * 6 * config.embedding_dim}


class Last(NamedTuple):
    """A state of one part: the last input."""

    x: Tensor  # [B, d]


@register("block", "shift")
class ShiftBlock(nn.Module):
    """Adds a function of the input before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = find("norm", config.norm)(config.embedding_dim, config.norm_eps)

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ShiftBlock":
        return cls(config)

    def forward(
        self,
        x: Tensor,
        state: Last | None = None,
        *,
        resets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Last]:
        last = torch.zeros_like(x[:, 0]) if state is None else state.x
        inputs = torch.cat([last[:, None].to(x.dtype), x], 1)
        before = inputs[:, :-1]
        if resets is not None:
            before = before.masked_fill(resets[..., None], 0)
        rows = torch.arange(len(x), device=x.device)
        ends = torch.full_like(rows, x.shape[1]) if lengths is None else lengths
        return x + self.norm(before), Last(inputs[rows, ends])

    @staticmethod
    def zero_state(config, batch, *, dtype=torch.float32, device=None):
        return Last(torch.zeros(batch, config.embedding_dim, dtype=dtype, device=device))

    @staticmethod
    def flops(config: ModelConfig, tokens: int, cell: int) -> dict[str, int]:
        return {"shift": tokens * 4 * config.embedding_dim}


CHOICES = [
    {},
    {"norm": "own_norm"},
    {"gate": "own_gate"},
    {"block": "averages", "norm": "own_norm"},
    {"block": "shift"},
    {"block": "previous", "qk_dim_factor": 2.0, "v_dim_factor": 2.0, "norm": "layer_norm"},
    {"layer": "qk_norm"},
    {"block": "no_ffn", "gate": "own_gate"},
]


@pytest.mark.usefixtures("page")
def test_the_previous_block_refuses_a_layer_that_it_would_not_use():
    factors = {"block": "previous", "qk_dim_factor": 2.0, "v_dim_factor": 2.0}
    with pytest.raises(ValueError, match=r"has a layer of its own: leave out layer = 'qk_norm'$"):
        XLSTM(ModelConfig(64, 1, 2, vocab_size=320, layer="qk_norm", **factors))


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
class TestEveryRegisteredClass:
    def test_keeps_the_rules(self, choice):
        check_model(replace(SMALL, embedding_dim=32, **choice))

    def test_is_saved_loaded_counted_and_generates(self, choice, tmp_path, caplog):
        config = replace(SMALL, **choice)
        torch.manual_seed(0)
        model = XLSTM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        # Shapes and counts come from the classes.
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert config.parameter_shapes() == shapes
        total = sum(p.numel() for p in model.parameters())
        assert accounting.parameter_counts(config)["total"] == total
        summary = accounting.summary(config)
        assert sum(summary["flops"]["forward_by_part"].values()) > 0
        state = ModelState.zeros(config, 3)
        row = accounting.state_bytes(config)["total"]
        assert state.nbytes == 3 * (row + 8)
        assert state_bytes(config) == row + 8 + 4 * 320
        # A folder.
        model.save_pretrained(tmp_path / "model")
        loaded = XLSTM.from_pretrained(tmp_path / "model")
        assert loaded.config == config
        for (name, one), two in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(one, two), name
        # Generation, alone and in a batch with a prefix cache, and a state in a file.
        with caplog.at_level(logging.WARNING, logger="xlstm7b"):
            engine = Engine(loaded, ByteTokenizer(), slots=2, cache_bytes=1 << 22, cache_interval=4)
            driver = Driver(engine)
            requests = driver.add_all([greedy("So much de", 6), greedy("So much", 6)])
            driver.finish()
        told = [message for message in caplog.messages if "fused path does not know" in message]
        assert len(told) == bool(choice)
        for request in requests:
            ids = [0, *ByteTokenizer().encode(request.prompt)]
            for _ in range(6):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids]), logits="last")[0].argmax()))
            assert driver.completion(request).token_ids == ids[-6:]
        generator = Generator(loaded, ByteTokenizer())
        generator.read("So much").save(tmp_path / "state")
        saved = SavedState.load(tmp_path / "state", config)
        assert type(saved.model_state.blocks[0]) is type(state.blocks[0])
        done = generator.generate(state=saved, max_new_tokens=6, temperature=0)[0]
        assert done.token_ids == driver.completion(requests[1]).token_ids


def test_the_page(page):
    folder, names = page
    loss = names["loss"]
    assert isinstance(loss, Tensor)
    assert loss.isfinite()
    assert names["generator"].config.block == "no_ffn"
    config = json.loads((folder / "my_model" / "config.json").read_text())
    assert config["model_type"] == "xlstm7b"
    assert (config["block"], config["layer"]) == ("no_ffn", "qk_norm")
    assert not any("ffn" in name for name in names["model"].state_dict())


def test_commands_find_a_plugin(page):
    folder, _ = page
    command = [sys.executable, "-m", "xlstm7b", "info", "my_model"]
    variables = environment() | {PLUGINS: "my_layers.py"}
    done = subprocess.run(
        [*command, "--json"], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["shape"]["block"], summary["shape"]["layer"]) == ("no_ffn", "qk_norm")
    assert "ffn" not in summary["flops"]["forward_by_part"]
    variables.pop(PLUGINS)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (
        "there is no block 'no_ffn', only mlstm, previous: set XLSTM7B_PLUGINS to the"
        in done.stderr
    )


def test_plugins_are_files_or_modules_and_run_once(tmp_path, monkeypatch):
    line = "from xlstm7b.model.layers import RMSNorm\nfrom xlstm7b.registry import register\n"
    line += "@register('norm', __name__)\nclass Plugged(RMSNorm):\n    pass\n"
    (tmp_path / "as_module.py").write_text(line)
    (tmp_path / "as_file.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, f"as_module, {tmp_path / 'as_file.py'},")
    norm = find("norm", "as_module")
    assert find("norm", "xlstm7b_plugin_as_file").__name__ == "Plugged"
    with pytest.raises(ValueError, match=r"^there is no norm 'other', only as_module, "):
        find("norm", "other")
    assert find("norm", "as_module") is norm


def test_a_plugin_may_define_dataclasses(tmp_path, monkeypatch):
    lines = [
        "from __future__ import annotations",
        "import dataclasses",
        "from xlstm7b.model.layers import RMSNorm",
        "from xlstm7b.registry import register",
        "@dataclasses.dataclass",
        "class Options:",
        "    width: int",
        "@register('norm', 'of_dataclasses')",
        "class Plugged(RMSNorm): pass",
    ]
    (tmp_path / "with_options.py").write_text("\n".join(lines))
    monkeypatch.setenv(PLUGINS, str(tmp_path / "with_options.py"))
    assert find("norm", "of_dataclasses").__name__ == "Plugged"


def test_two_plugins_cannot_register_one_name(tmp_path, monkeypatch):
    line = "from xlstm7b.model.layers import RMSNorm\nfrom xlstm7b.registry import register\n"
    line += "@register('norm', 'twice')\nclass Plugged(RMSNorm):\n    pass\n"
    files = [tmp_path / "first_file.py", tmp_path / "second_file.py"]
    for file in files:
        file.write_text(line)
    monkeypatch.setenv(PLUGINS, ",".join(map(str, files)))
    with pytest.raises(ValueError, match=r"second_file.py cannot be .*first_file\.Plugged already"):
        find("norm", "twice")


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("none.py", "FileNotFoundError"),
        ("no_such_module", "ModuleNotFoundError"),
        ("broken.py", "ZeroDivisionError: division by zero$"),
        ("exits.py", "loaded: SystemExit$"),
        ("exits_with_3.py", "loaded: SystemExit: 3$"),
        ("bad.py", r"loaded: /.*/bad\.py line 2: invalid syntax$"),
    ],
)
def test_a_plugin_that_cannot_be_loaded(tmp_path, monkeypatch, plugin, reason):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("import sys; sys.exit()")
    (tmp_path / "exits_with_3.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "bad.py").write_text("a = 1\nb = = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PLUGINS, plugin)
    message = rf"^XLSTM7B_PLUGINS: {plugin} cannot be .*{reason}"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            replace(SMALL, norm="never")
    config = SMALL.to_dict() | {"norm": "never"}
    del config["architectures"]  # a list, which the authors' config.yaml does not have
    for name in ("config.json", "config.yaml"):  # neither is to blame
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        write = json.dumps if name == "config.json" else yaml.safe_dump
        (folder / name).write_text(write(config))
        with pytest.raises(ValueError, match=message):
            read_config(folder)


@pytest.mark.usefixtures("page")
def test_a_run_is_planned_trained_resumed_and_exported(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with ShardWriter(data / "00000.ds", vocab_size=320) as writer:
        for _ in range(40):
            writer.add(np.arange(100) % 7 + 100)
    write_manifest(data, [writer.entry], vocab_size=320, tokenizer_fingerprint="bytes")
    model = (
        "model={embedding_dim=64,num_blocks=2,num_heads=2,vocab_size=320,"
        'block="no_ffn",layer="qk_norm",norm="own_norm",gate="own_gate"}'
    )
    chosen = recipe(data, model, "run.activation_checkpointing=block")
    assert make_plan(chosen).parameters == sum(p.numel() for p in XLSTM(chosen.model).parameters())
    run(0, recipe(data, model, "run.time_limit=1e-9"), tmp_path / "run")  # stops after one step
    run(0, chosen, tmp_path / "run")
    seen = losses(tmp_path / "run")
    assert seen[-1] < seen[0]
    export_run(tmp_path / "run", tmp_path / "model")
    loaded = XLSTM.from_pretrained(tmp_path / "model")
    assert loaded.config == chosen.model
    exact = weights(tmp_path / "run", chosen)
    assert all(torch.equal(tensor, exact[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.usefixtures("page")
def test_a_stack_takes_the_names_too():
    stack = MLSTMStack(32, 2, 2, block="no_ffn", layer="qk_norm")
    assert hasattr(stack.blocks[1].mlstm_layer, "q_norm")
    assert not hasattr(stack.blocks[1], "ffn")
    y, state = stack(torch.randn(2, 5, 32))
    assert y.shape == (2, 5, 32)
    assert state.tokens_seen.tolist() == [5, 5]
    with pytest.raises(TypeError, match="dropout"):
        MLSTMStack(32, 2, 2, block="no_ffn", dropout=0.1)


@pytest.mark.usefixtures("page")
def test_tensor_parallelism_is_refused():
    class Mesh(dict):
        size = staticmethod(lambda: 2)

    with torch.device("meta"):
        model = XLSTM(replace(SMALL, layer="qk_norm"))
    with pytest.raises(ValueError, match=r"set parallel\.tp = 1$"):
        parallelize(model, {"tp": Mesh()}, torch.float32)


# config.json


@pytest.mark.usefixtures("page")
def test_only_other_classes_change_the_file():
    assert SMALL.is_standard
    assert not STANDARD.keys() & SMALL.to_dict().keys()
    assert SMALL.to_dict()["model_type"] == "xlstm"
    other = replace(SMALL, layer="qk_norm")
    values = other.to_dict()
    assert (values["model_type"], values["architectures"]) == ("xlstm7b", ["XLSTM"])
    assert ModelConfig.from_dict(values) == other
    assert ModelConfig.from_dict({**SMALL.to_dict(), "model_type": "xlstm7b"}) == SMALL
    with pytest.raises(ValueError, match=r"^model_type is 'llama', not 'xlstm'$"):
        ModelConfig.from_dict({**values, "model_type": "llama"})


@pytest.mark.usefixtures("page")
def test_transformers_refuses_a_folder_with_other_classes(tmp_path):
    transformers = pytest.importorskip("transformers")
    XLSTM(replace(SMALL, layer="qk_norm")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="xlstm7b"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.usefixtures("page")
def test_weights_of_another_class_are_refused(tmp_path):
    XLSTM(SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"layer": "qk_norm", "model_type": "xlstm7b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"k_norm\.weight is missing"):
        open_checkpoint(tmp_path)


# Errors


def test_names_that_are_taken_or_unknown():
    with pytest.raises(ValueError, match=r"^there is no kind 'head'; choose from block, layer,"):
        register("head", "mine")
    with pytest.raises(ValueError, match=r"^norm 'own_norm' is .*LayerNorm already: give "):

        @register("norm", "own_norm")
        class Other(RMSNorm):
            pass

    with pytest.raises(ValueError, match=r"^norm 'rms_norm' is xlstm7b\.model\.layers\.RMSNorm"):
        register("norm", "rms_norm")(type("RMSNorm", (RMSNorm,), {}))
    with pytest.raises(ValueError, match=r"^norm 'mine' must be a class, not 5$"):
        register("norm", "mine")(5)
    with pytest.raises(ValueError, match=r"^there is no norm 'mine', only .*own_norm, "):
        replace(SMALL, norm="mine")
    with pytest.raises(ValueError, match=r"^norm must be of type str, not 3$"):
        replace(SMALL, norm=3)
    again = type("LayerNorm", (LayerNorm,), {"__qualname__": "LayerNorm"})
    assert register("norm", "own_norm")(again) is find("norm", "own_norm")
    register("norm", "own_norm")(LayerNorm)


def test_a_class_that_does_not_say_its_flops():
    @register("norm", "silent")
    class Silent(LayerNorm):
        """The parent says its own FLOPs, not this class's."""

    config = replace(SMALL, norm="silent")
    with pytest.raises(ValueError, match=r"^the FLOPs of norm 'silent' are not known: give"):
        accounting.summary(config)
    assert accounting.parameter_counts(config) == accounting.parameter_counts(SMALL)


def test_a_buffer_is_refused():
    @register("norm", "with_buffer")
    class WithBuffer(nn.Module):
        def __init__(self, width: int, eps: float) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(width), persistent=False)

    with pytest.raises(TypeError, match=r"^backbone\.blocks\.0\.norm_mlstm\.scale is a buffer"):
        XLSTM(replace(SMALL, norm="with_buffer"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("tuple", "zero_state returns a NamedTuple of floating-point tensors with the batch first"),
        ("int", "zero_state returns a NamedTuple of floating-point tensors with the batch first"),
        ("batch", "zero_state returns a NamedTuple of floating-point tensors with the batch first"),
        ("logits", "no part of a state is called logits"),
        ("padding", "padding does not change the state"),
        ("reset", "a reset gives the same as a new text"),
        ("state", "reading in two parts gives the same as at once"),
        ("shape", "the state that forward returns has the shapes of zero_state"),
    ],
)
def test_rules_that_a_class_may_break(fault, words):
    @register("block", f"no {fault}")
    class Broken(MLSTMBlock):
        def forward(self, x, state=None, *, resets=None, lengths=None):
            if fault == "padding":
                lengths = None
            if fault == "reset":
                resets = None
            state = None if fault == "state" else state
            y, new = super().forward(x, state, resets=resets, lengths=lengths)
            return y, (new._replace(m=new.m[:, :1]) if fault == "shape" else new)

        @staticmethod
        def zero_state(config, batch, *, dtype=torch.float32, device=None):
            state = MLSTMBlock.zero_state(config, batch, dtype=dtype, device=device)
            if fault == "logits":
                return namedtuple("State", ["C", "n", "logits"])(*state)
            broken = {
                "tuple": lambda: tuple(state),
                "int": lambda: state._replace(m=state.m.long()),
                "batch": lambda: state._replace(m=state.m.mT),
            }
            return broken.get(fault, lambda: state)()

        flops = staticmethod(lambda config, tokens, cell: {})

    with pytest.raises(ValueError, match=f"breaks a rule: {words}$"):
        check_model(replace(SMALL, block=f"no {fault}"))
