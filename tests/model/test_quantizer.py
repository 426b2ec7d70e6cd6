"""Quantised folders: written, loaded, served, damaged, resumed, and read by other libraries."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import names_in
from commands import environment
from live_server import serving
from models import spread_model
from rounding import rounded_inputs
from safetensors.torch import load_file, save_file

from xlstm7b.checkpoint import open_checkpoint, save_checkpoint, verify
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator
from xlstm7b.generate.fused import FusedModel
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.layers import QuantizedLinear
from xlstm7b.model.quantizer import LayerReport, quantize_checkpoint
from xlstm7b.quantize import cpu
from xlstm7b.quantize.config import Quantization
from xlstm7b.tokenizer import ByteTokenizer

QUANTIZATIONS = {
    "int8": Quantization.named("int8"),
    "fp8": Quantization.named("fp8"),
    "int4": Quantization.named("int4"),
    "int4-g32-head4": Quantization.named("int4", group_size=32, head="4"),
    "int4-head16": Quantization.named("int4", head="16"),
}
# Of the logits of this model, relative: products rounded to bfloat16 (fp8, and int4 on x86) or to
# int8 inputs (int4 on ARM). int8 is computed more exactly where there is VNNI.
# A cast of this model to bfloat16 changes its logits by 1.5e-2.
ROUNDING = {"int8": 3e-3 if cpu.has_vnni() else 2e-2, "fp8": 2e-2}
ARM, X86 = 5e-2, 2e-2
CALIBRATION = [[0, *range(i, i + 31)] for i in range(40, 56)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    model = spread_model(embedding_dim=128)
    torch.manual_seed(1)
    with torch.no_grad():
        for block in model.backbone.blocks:
            block.mlstm_layer.ogate_preact.weight.normal_(std=0.05)
    model.save_pretrained(folder)
    (folder / "LICENSE").write_text("terms")
    return folder


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def quantized(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tmp_path_factory.mktemp("quantized") / request.param
    quantize_checkpoint(source, target, QUANTIZATIONS[request.param])
    return target


@pytest.fixture(scope="module")
def dequantized(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dequantized") / "model"
    opened = open_checkpoint(quantized)
    save_checkpoint(target, opened.config, opened.tensors())
    return target


def rounding(folder: Path) -> float:
    kind = folder.name.partition("-")[0]
    return ROUNDING.get(kind, X86 if torch.backends.cpu.get_cpu_capability()[:3] == "AVX" else ARM)


def tokens(batch: int, length: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randint(1, 320, (batch, length), generator=random)


def test_float64_computes_what_the_dequantised_model_does(
    quantized: Path, dequantized: Path
) -> None:
    ours = XLSTM.from_pretrained(quantized, dtype=torch.float64)
    theirs = XLSTM.from_pretrained(dequantized, dtype=torch.float64)
    ids = tokens(2, 20)
    with torch.no_grad():
        want, after = theirs(ids)
        got, state = ours(ids)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        step = ids[:, :1]
        torch.testing.assert_close(
            ours(step, state)[0], theirs(step, after)[0], rtol=1e-9, atol=1e-9
        )
        # The fused model of the engine.
        fused, memory = FusedModel(ours), ModelState.zeros(ours.config, 2, dtype=torch.float64)
        read = fused.logits(fused.read(ids, memory))
        torch.testing.assert_close(read, want[:, -1], rtol=1e-9, atol=1e-9)
        # A second one shares the stacked weights.
        for first, second in zip(fused.blocks, FusedModel(ours).blocks, strict=True):
            assert first.projections.data.data_ptr() == second.projections.data.data_ptr()
            assert first.up.data.data_ptr() == second.up.data.data_ptr()
        # The model itself, whose weights are parts of the stacks now.
        torch.testing.assert_close(ours(ids)[0], want, rtol=1e-9, atol=1e-9)
        got_logprobs = ours.token_logprobs(ids, ids)[0]
        torch.testing.assert_close(got_logprobs, theirs.token_logprobs(ids, ids)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_computes_the_same_within_rounding(
    quantized: Path, dequantized: Path, dtype: torch.dtype
) -> None:
    limit = rounding(quantized) if dtype == torch.float32 else 0.1
    want = XLSTM.from_pretrained(dequantized)
    ours = XLSTM.from_pretrained(quantized, dtype=dtype)
    assert any(isinstance(module, QuantizedLinear) for module in ours.modules())
    ids = tokens(9, 40)  # more rows than the operators take, then few
    fused, state = FusedModel(ours), ModelState.zeros(ours.config, 9)

    def check(logits: torch.Tensor, wanted: torch.Tensor) -> None:
        # The median: where the cell's normaliser is near 0, a row magnifies any rounding.
        assert logits.dtype == torch.float32
        assert ((logits - wanted).norm(dim=1) / wanted.norm(dim=1)).median() <= limit

    with torch.inference_mode():
        expected, after = want(ids)
        check(fused.logits(fused.read(ids, state)), expected[:, -1])
        expected, _ = want(ids[:, :1], after, logits="last")
        check(fused.step(ids[:, 0], state), expected)


def test_a_server_answers_as_the_dequantised_model(quantized: Path, dequantized: Path) -> None:
    request: dict[str, Any] = {"prompt": "The sea", "max_tokens": 1, "logprobs": 5}
    answers = []
    for folder in (quantized, dequantized):
        with serving(Generator.from_pretrained(folder, device="cpu")) as server:
            answer = server.post("/v1/completions", temperature=0, **request)
            answers.append(answer["choices"][0]["logprobs"]["top_logprobs"][0])
    best = max(answers[1], key=answers[1].get)
    assert answers[0][best] == pytest.approx(answers[1][best], abs=30 * rounding(quantized))


def test_files(quantized: Path, source: Path) -> None:
    assert verify(quantized) == 3
    assert (quantized / "LICENSE").read_text() == "terms"
    assert names_in(quantized) >= {"config.json", "model.safetensors", "SHA256SUMS"}
    assert open_checkpoint(quantized).nbytes < 0.55 * open_checkpoint(source).nbytes
    tensors, before = (
        load_file(quantized / "model.safetensors"),
        dict(open_checkpoint(source).tensors()),
    )
    for name, tensor in before.items():
        if "norm" in name or "gate_preact.bias" in name or "embeddings" in name:
            assert torch.equal(tensors[name], tensor)
        if "igate_preact.weight" in name or "fgate_preact.weight" in name:
            assert torch.equal(tensors[name], tensor)


def test_quantising_while_loading_gives_the_same_weights(source: Path, quantized: Path) -> None:
    stored = XLSTM.from_pretrained(quantized)
    loaded = XLSTM.from_pretrained(source, quantize=QUANTIZATIONS[quantized.name])
    with torch.no_grad():
        assert torch.equal(stored(tokens(1, 9))[0], loaded(tokens(1, 9))[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype"),  # kernels without tensor cores take long to compile: float32 once
    [(1, torch.bfloat16), (9, torch.bfloat16), (20, torch.bfloat16), (9, torch.float32)],
    ids=str,
)
def test_generation_on_a_gpu(
    quantized: Path, dequantized: Path, rows: int, dtype: torch.dtype
) -> None:
    """A prompt and the tokens after it: as near to float64 as with weights that were dequantised.

    Both are rounded, each in its own way. Over 40 and 16 tokens their errors can be compared. With
    fp8, the vectors of a prompt of more than 64 tokens are rounded to fp8 too: what that alone
    costs is computed in float64.
    """
    prompt, steps = 40, 16
    ids = tokens(rows, prompt + steps).cuda()
    errors = []
    exact = XLSTM.from_pretrained(quantized, dtype=torch.float64, device="cuda")
    with torch.inference_mode():
        want = exact(ids)[0].split((prompt, steps), dim=1)
        for folder in (quantized, dequantized):
            fused = FusedModel(XLSTM.from_pretrained(folder, dtype=dtype, device="cuda"))
            assert "gpu" in fused.operations.__name__
            state = ModelState.zeros(fused.config, rows, device="cuda")
            vectors = fused.vectors(ids[:, :prompt], state)
            read = fused.logits(vectors.flatten(0, 1)).unflatten(0, (rows, prompt))
            stepped = [fused.step(one, state) for one in ids[:, prompt:].unbind(1)]
            got = read, torch.stack(stepped, 1)
            errors.append(relative_errors(got, want))
        costs = [0.0, 0.0]
        if "fp8" in quantized.name and dtype == torch.bfloat16 and rows > 1:
            layers = [each for each in exact.modules() if isinstance(each, QuantizedLinear)]
            hooks = [layer.register_forward_pre_hook(round_to_fp8) for layer in layers]
            read, after = exact(ids[:, :prompt])
            for hook in hooks:
                hook.remove()
            costs = relative_errors((read, exact(ids[:, prompt:], after)[0]), want)
    for ours, theirs, cost in zip(*errors, costs, strict=True):
        assert ours <= 1.5 * math.hypot(theirs, cost) + 1e-4


def relative_errors(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def round_to_fp8(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Each row with a scale of its own, as before an fp8 product."""
    (x,) = inputs
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


def test_sizes_that_the_operators_do_not_take(tmp_path: Path) -> None:
    spread_model().save_pretrained(tmp_path / "narrow")  # queries of 32 rows, values of 64
    scheme = Quantization.named("int4", group_size=32)
    model = XLSTM.from_pretrained(tmp_path / "narrow", quantize=scheme)
    exact = XLSTM.from_pretrained(tmp_path / "narrow", quantize=scheme, dtype=torch.float64)
    fused, state = FusedModel(model), ModelState.zeros(model.config, 1)
    with torch.inference_mode(), rounded_inputs(exact):
        want = exact(tokens(1, 9))[0][:, -1]
        got = fused.logits(fused.read(tokens(1, 9), state))
    assert (got - want).norm() <= 2e-2 * want.norm()


def test_what_a_quantised_model_refuses(source: Path, tmp_path: Path) -> None:
    model = XLSTM.from_pretrained(source, quantize="int8")
    ids = tokens(1, 4)
    with pytest.raises(ValueError, match="cannot be trained"):
        model.loss(ids, ids, torch.ones(1, 4))
    with pytest.raises(ValueError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "x")
    with pytest.raises(ValueError, match="unknown scheme 'int3'"):
        XLSTM.from_pretrained(source, quantize="int3")
    before = model(ids)[0]
    assert torch.equal(model.double().float()(ids)[0], before)  # a cast leaves codes and scales


def test_adapters_and_hooks_on_quantised_layers_are_not_ignored(source: Path) -> None:
    model = XLSTM.from_pretrained(source, quantize="int8")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="lm_head has hooks"):
        Generator(model, ByteTokenizer()).generate("a", max_new_tokens=1)


# Damage


DAMAGE = {
    "no scale": "is quantised, but backbone.blocks.0.ffn.proj_down.weight_scale is missing",
    "scale shape": "weight_scale has the shape",
    "scale dtype": "is stored as torch.int8, not as floats",
    "scale nan": "holds a scale that is not finite",
    "cut rows": "has the shape",
    "extra scale": "belongs to no quantised weight",
    "gone": "backbone.blocks.0.ffn.proj_down.weight is missing",
    "no config": "is stored as I",
    "other config": "but config.json says",
    "half a file": "is damaged, it ends within",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_damaged_folders_are_named(damage: str, bits: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantize_checkpoint(source, folder, QUANTIZATIONS[bits])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "backbone.blocks.0.ffn.proj_down.weight"
    data = name if bits == "int8" else f"{name}_packed"
    scale = f"{name}_scale"
    match damage:
        case "no scale":
            del tensors[scale]
        case "scale shape":
            tensors[scale] = tensors[scale].repeat(1, 3)
        case "scale dtype":
            tensors[scale] = tensors[scale].to(torch.int8)
        case "scale nan":
            tensors[scale][1, 0] = torch.nan
        case "cut rows":
            tensors[data] = tensors[data][:-1].clone()
        case "extra scale":
            tensors["backbone.out_norm.weight_scale"] = torch.ones(1)
        case "gone":
            for key in [key for key in tensors if key.startswith(name)]:
                del tensors[key]
        case "no config":
            values = json.loads((folder / "config.json").read_text())
            del values["quantization_config"]
            (folder / "config.json").write_text(json.dumps(values))
        case "other config":
            values = json.loads((folder / "config.json").read_text())
            other = QUANTIZATIONS["fp8"] if bits == "int8" else QUANTIZATIONS["int4-g32-head4"]
            values["quantization_config"] = other.to_dict()
            (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, file)
    if damage == "half a file":
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match="model") as error:
        XLSTM.from_pretrained(folder)
    assert DAMAGE[damage] in str(error.value)
    assert str(folder) in str(error.value)
    with pytest.raises(ValueError, match="model"):
        verify(folder)


# Writing


def quantize(source: Path, target: Path, **options: Any) -> list[LayerReport]:
    return quantize_checkpoint(source, target, QUANTIZATIONS["int4"], **options)


def test_gptq_is_better_on_its_text(source: Path, tmp_path: Path) -> None:
    nearest = quantize(source, tmp_path / "rtn", calibration=CALIBRATION)
    with pytest.raises(
        ValueError, match=r"^the calibration text has only 2 tokens: give a text of"
    ):
        quantize(source, tmp_path / "gptq", calibration=[[5, 6]], method="gptq")
    better = quantize(source, tmp_path / "gptq", calibration=CALIBRATION, method="gptq")
    ordered = quantize(
        source, tmp_path / "order", calibration=CALIBRATION, method="gptq", act_order=True
    )
    assert [report.name for report in nearest] == [report.name for report in better]
    assert len(nearest) == 2 * 8 + 1
    first = "backbone.blocks.0.mlstm_layer.q.weight"
    errors = [{r.name: r.error for r in reports}[first] for reports in (nearest, better, ordered)]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.9 * errors[0]


class StoppedError(KeyboardInterrupt):
    """Ctrl-C, which keeps what is finished. An error does not."""


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_interrupted_call_goes_on(method: str, source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": method}
    if method == "gptq":
        options["calibration"] = CALIBRATION
    quantize(source, tmp_path / "whole", **options)
    target = tmp_path / "resumed"
    with pytest.raises(StoppedError):
        quantize(source, target, done=_fail_after(10), **options)
    assert not target.exists()
    hidden = tmp_path / ".resumed.quantizing"
    kept = {path.name: path.stat().st_mtime_ns for path in hidden.iterdir()}
    assert len(kept) == 11
    with pytest.raises(StoppedError):  # one more, then stop again
        quantize(source, target, done=_fail_after(11), **options)
    now = {path.name: path.stat().st_mtime_ns for path in hidden.iterdir()}
    assert {name: now[name] for name in kept} == kept
    assert len(now) == 12
    os.truncate(max(hidden.glob("*.safetensors")), 100)  # a damaged one is made again
    quantize(source, target, **options)
    assert not hidden.exists()
    for name in ("model.safetensors", "config.json"):
        assert (target / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _fail_after(count: int) -> Any:
    reports: list[LayerReport] = []

    def stop(report: LayerReport) -> None:
        reports.append(report)
        if len(reports) == count:
            raise StoppedError

    return stop


def test_pieces_of_other_settings_are_not_used(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(StoppedError):
        quantize(source, target, done=_fail_after(5))
    other = QUANTIZATIONS["int4-g32-head4"]
    quantize_checkpoint(source, target, other)
    quantize_checkpoint(source, tmp_path / "whole", other)
    file = "model.safetensors"
    assert (target / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_killed_process_goes_on(source: Path, tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize import cpu
from xlstm7b.quantize.config import Quantization
count = 0
def done(report):
    global count
    count += 1
    if count == 7:
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint(sys.argv[1], sys.argv[2], Quantization.named("int8"), done=done)
"""
    arguments = [sys.executable, "-c", script, source, tmp_path / "model"]
    killed = subprocess.run(arguments, env=environment(), timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert names_in(tmp_path) == {".model.quantizing"}
    assert len(names_in(tmp_path / ".model.quantizing")) == 8
    quantize_checkpoint(source, tmp_path / "model", QUANTIZATIONS["int8"])
    assert names_in(tmp_path) == {"model"}
    verify(tmp_path / "model")


def test_mistakes_are_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = tmp_path / "done"
    quantize(source, done)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    before = names_in(tmp_path)
    for place, made, options, message in [
        (source, target, {"method": "awq"}, "unknown method 'awq'"),
        (source, target, {"method": "gptq"}, "needs a calibration text"),
        (done, target, {}, "are quantised already"),
        (source, source, {}, "is the source"),
        (source, tmp_path / "other", {}, "holds other files and no config.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize(place, made, **options)
        assert names_in(tmp_path) == before
    narrow = tmp_path / "narrow"
    XLSTM(ModelConfig(96, 1, 2, vocab_size=64, ffn_round_up_to_multiple_of=32)).save_pretrained(
        narrow
    )
    with pytest.raises(
        ValueError, match=r"96 columns, not a multiple .* 64: use a group size of 32"
    ):
        quantize(narrow, target)
    with torch.no_grad():
        model = XLSTM.from_pretrained(source)
        model.lm_head.weight[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "infinite")
    before = names_in(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight has values that are not finite"):
        quantize(tmp_path / "infinite", target)
    assert names_in(tmp_path) == before
    # What an interrupted call left is of no use either.
    with pytest.raises(StoppedError):
        quantize(tmp_path / "infinite", target, done=_fail_after(3))
    assert names_in(tmp_path) == before | {".target.quantizing"}
    with pytest.raises(ValueError, match=r"lm_head\.weight has values that are not finite"):
        quantize(tmp_path / "infinite", target)
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_activations_that_are_not_finite(tmp_path: Path, source: Path, method: str) -> None:
    model = XLSTM.from_pretrained(source)
    with torch.no_grad():  # gates are not quantised: only the text finds it
        model.backbone.blocks[0].mlstm_layer.igate_preact.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "damaged")
    with pytest.raises(ValueError, match=r"inputs of .*blocks\.0\..*out_proj\.weight on"):
        quantize(tmp_path / "damaged", tmp_path / "new", method=method, calibration=CALIBRATION)
    assert names_in(tmp_path) == {"damaged"}


# Other libraries


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("compressed_tensors")
    return pytest.importorskip("transformers")


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch, transformers: Any) -> None:
    """transformers as it is, without our import."""
    import xlstm7b.integrations.transformers as ours

    monkeypatch.setattr(ours._base, "_init_weights", ours._init_weights)


def same_logits(
    transformers: Any,
    quantized: Path,
    dequantized: Path,
    change: Callable[[Any], Any] = lambda model: model,
) -> None:
    model = change(transformers.AutoModelForCausalLM.from_pretrained(quantized))
    ids = tokens(2, 64)
    with torch.no_grad():
        want = XLSTM.from_pretrained(dequantized)(ids)[0]
        got = model(ids).logits
    assert (got - want).norm() <= 1e-4 * want.norm()


def test_stock_transformers_reads_8_bits(
    quantized: Path, dequantized: Path, transformers: Any, stock: None
) -> None:
    if quantized.name.startswith("int4"):
        with pytest.raises(AttributeError, match="weight"):
            transformers.AutoModelForCausalLM.from_pretrained(quantized)
    else:
        same_logits(transformers, quantized, dequantized)


def test_transformers_reads_all_schemes_after_our_import(
    quantized: Path, dequantized: Path, transformers: Any
) -> None:
    from xlstm7b.integrations.transformers import optimize

    same_logits(transformers, quantized, dequantized)
    same_logits(transformers, quantized, dequantized, optimize)


LIBRARY = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "pack-quantized 8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "naive-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


@pytest.mark.parametrize("kind", LIBRARY)
def test_folders_that_the_library_wrote(
    kind: str, source: Path, tmp_path: Path, transformers: Any
) -> None:
    """Written with its own API from a model in transformers; read by both."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    import xlstm7b.integrations.transformers  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    args = LIBRARY[kind]
    scheme: dict[str, Any] = {"weights": QuantizationArgs(symmetric=True, **args)}
    if kind in ("int-quantized", "float-quantized"):
        scheme["input_activations"] = QuantizationArgs(
            num_bits=8, type=args["type"], strategy="token", dynamic=True, symmetric=True
        )
    group = QuantizationScheme(targets=["Linear"], **scheme)
    ignored = ["re:.*[if]gate_preact", "lm_head"]
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": group}, ignore=ignored)
    )
    largest = 448 if args["type"] == "float" else 2 ** (args["num_bits"] - 1) - 0.5
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.unflatten(1, (module.weight_scale.shape[1], -1))
            module.weight_scale.data.copy_(groups.abs().amax(2) / largest)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert written["quantization_config"]["format"] == kind.partition(" ")[0]

    read = dict(open_checkpoint(tmp_path / "theirs").tensors())
    compressor.decompress_model(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".weight"):
            torch.testing.assert_close(read[name], parameter.data, rtol=1e-6, atol=1e-8)
    ids = tokens(1, 12)
    with torch.no_grad():
        got = XLSTM.from_pretrained(tmp_path / "theirs", dtype=torch.float64)(ids)[0]
        weights = {name: tensor.double() for name, tensor in read.items()}
        want_model = XLSTM(open_checkpoint(source).config).double()
        want_model.load_state_dict(weights)
        # Codes times scales are rounded to float32 in `read`.
        torch.testing.assert_close(got, want_model(ids)[0], rtol=1e-4, atol=1e-4)
