"""quantize_checkpoint: a checkpoint folder to one with quantised weights, one tensor at a time.

Each quantised matrix is first written to a hidden folder beside the target, so that a killed
process can go on where it stopped. At the end all are written as one checkpoint. Weights that
cannot be quantised remove the hidden folder.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xlstm7b import files
from xlstm7b.checkpoint import Checkpoint, check_target, open_checkpoint, save_checkpoint
from xlstm7b.model.layers import Linear
from xlstm7b.model.lm import schemes_of
from xlstm7b.quantize.config import Quantization, Scheme
from xlstm7b.quantize.gptq import gptq, row_errors
from xlstm7b.quantize.weight import QuantizedWeight, codes, nearest_scale, stored_scale
from xlstm7b.registry import find
from xlstm7b.report import counted

METHODS = ("rtn", "gptq")
_LEAST_TOKENS = 512  # of the calibration text
_BATCH_TOKENS = 4096  # calibration tokens that go through a block at a time


class LayerReport(NamedTuple):
    """What quantising did to one matrix W: ‖X(W − Ŵ)ᵀ‖ / ‖XWᵀ‖.

    X are the layer's inputs on the calibration text. Without a text, X is taken as white noise.
    """

    name: str
    scheme: Scheme
    error: float


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    quantization: Quantization,
    *,
    method: str = "rtn",
    calibration: Sequence[Sequence[int]] = (),
    act_order: bool = False,
    device: torch.device | str = "cpu",
    done: Callable[[LayerReport], None] | None = None,
    overwrite: bool = True,
) -> list[LayerReport]:
    """Writes `target`, and returns a report for each quantised matrix.

    `calibration` are token ids, sequences of one length; "gptq" needs them. `done` is called after
    each matrix, also for those that an earlier, killed call has finished. `overwrite` is that of
    `save_checkpoint`.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if method == "gptq" and not calibration:
        raise ValueError("gptq needs a calibration text")
    given_tokens = sum(map(len, calibration))
    if calibration and given_tokens < _LEAST_TOKENS:
        raise ValueError(
            f"the calibration text has only {counted(given_tokens, 'token')}: give a text of at "
            f"least {_LEAST_TOKENS} tokens"
        )
    checkpoint = open_checkpoint(source)
    if checkpoint.schemes:
        raise ValueError(f"the weights in {checkpoint.folder} are quantised already")
    schemes = schemes_of(checkpoint.config, quantization)
    given, target = target, check_target(target)
    if target == checkpoint.folder.resolve():
        raise ValueError(f"{target} is the source; choose another folder for the quantised weights")
    job = {
        "source": _describe(checkpoint),
        "quantization": asdict(quantization),
        "method": [method, act_order],
        "calibration": hashlib.sha256(json.dumps([*map(list, calibration)]).encode()).hexdigest(),
    }
    work = work_folder(target)
    with files.naming_target(work, target):
        work.mkdir(parents=True, exist_ok=True)
    lock = files.lock_folder(work, "quantising to", name=given)
    with files.naming_target(work, target), lock:
        try:
            pieces = _Pieces(work, job, schemes, done)
            if calibration:
                tokens = torch.tensor([*map(list, calibration)])
                _with_calibration(
                    checkpoint, pieces, tokens, method, act_order, torch.device(device)
                )
            else:
                for name, tensor in checkpoint.tensors():
                    if name in schemes and not pieces.has(name):
                        pieces.quantize(name, tensor.to(device), None, "rtn")
            save_checkpoint(
                target,
                checkpoint.config,
                _finished(checkpoint, pieces),
                companions=checkpoint.companions(),
                quantization=quantization,
                overwrite=overwrite,
            )
        except ValueError:  # bad weights; after Ctrl-C or on a full disk the same call goes on
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)
    return [pieces.reports[name] for name in schemes]


def work_folder(target: Path) -> Path:
    """The hidden folder beside a target. A killed process leaves it."""
    return target.with_name(f".{target.name}.quantizing")


def _describe(checkpoint: Checkpoint) -> list[Any]:
    """The source's weight files: one that is written again is another source."""
    stats = [(path, path.stat()) for path in sorted(checkpoint.folder.glob("model*.safetensors"))]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _finished(
    checkpoint: Checkpoint, pieces: "_Pieces"
) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
    for name, tensor in checkpoint.tensors():
        yield name, pieces.read(name) if name in pieces.schemes else tensor


class _Pieces:
    """The quantised matrices in the hidden folder, one file each."""

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        schemes: Mapping[str, Scheme],
        done: Callable[[LayerReport], None] | None,
    ) -> None:
        self.folder, self.schemes = folder, schemes
        self.reports: dict[str, LayerReport] = {}
        self._done = done
        # Pieces of another source or other settings are of no use.
        plan = folder / "job.json"
        text = files.json_bytes(job)
        if not plan.is_file() or plan.read_bytes() != text:
            for path in folder.iterdir():
                path.unlink()
            files.write_json(plan, job)
        for name in schemes:
            path = self._path(name)
            if path.is_file():
                try:
                    with files.opened_safetensors(path) as handle:
                        error = float(handle.metadata()["error"])
                except ValueError:  # damaged, perhaps when the machine crashed: it is made again
                    path.unlink()
                else:
                    self._report(name, error)

    def has(self, name: str) -> bool:
        return name in self.reports

    def read(self, name: str) -> QuantizedWeight:
        with files.opened_safetensors(self._path(name)) as handle:
            data, scale = handle.get_tensor("data"), handle.get_tensor("scale")
        packed = 8 if self.schemes[name].name == "int4" else 1
        shape = (data.shape[0], data.shape[1] * packed)
        return QuantizedWeight(self.schemes[name], shape, data, scale)

    def quantize(
        self,
        name: str,
        tensor: Tensor,
        hessian: Tensor | None,
        method: str,
        act_order: bool = False,
    ) -> None:
        """Quantises a matrix, writes it and reports its error."""
        scheme, weight = self.schemes[name], tensor.float()
        if not weight.isfinite().all():
            raise ValueError(f"{name} has values that are not finite, which cannot be quantised")
        if hessian is not None and not hessian.isfinite().all():
            raise ValueError(
                f"the inputs of {name} on the calibration text are not finite: a weight before it "
                "is damaged, or too large"
            )
        if method == "gptq" and hessian is not None:
            values, scale = gptq(weight, hessian, scheme, act_order=act_order)
        else:
            scale = nearest_scale(weight, scheme)
            values = codes(weight, scale, scheme)
        error = row_errors(weight, values, scale, hessian).sum()
        nothing = torch.zeros_like(weight), torch.ones_like(scale)
        size = row_errors(weight, *nothing, hessian).sum()
        relative = math.sqrt(max(0.0, float(error / size))) if size > 0 else 0.0
        quantized = QuantizedWeight.from_codes(values, stored_scale(scale, tensor), scheme).to(
            "cpu"
        )
        parts = {"data": quantized.data, "scale": quantized.scale}
        files.write_safetensors(self._path(name), parts, {"error": repr(relative)})
        self._report(name, relative)

    def _report(self, name: str, error: float) -> None:
        self.reports[name] = LayerReport(name, self.schemes[name], error)
        if self._done is not None:
            self._done(self.reports[name])

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


@torch.inference_mode()
def _with_calibration(
    checkpoint: Checkpoint,
    pieces: _Pieces,
    tokens: Tensor,
    method: str,
    act_order: bool,
    device: torch.device,
) -> None:
    """Block after block: each reads what the quantised blocks before it make of the text."""
    config = checkpoint.config
    rows = max(1, _BATCH_TOKENS // tokens.shape[1])
    embedding = dict(checkpoint.tensors("backbone.embeddings."))["backbone.embeddings.weight"]
    x = [nn.functional.embedding(part, embedding).float() for part in tokens.split(rows)]
    del embedding
    for number in range(config.num_blocks):
        prefix = f"backbone.blocks.{number}."
        block = _loaded(
            lambda: find("block", config.block).from_config(config), checkpoint, prefix, device
        )
        matrices = {
            path: layer for path, layer in block.named_modules() if isinstance(layer, Linear)
        }
        if not all(pieces.has(f"{prefix}{path}.weight") for path in matrices):
            hessians = _Hessians(matrices)
            for part in x:
                block(part.to(device))
            for path, hessian in hessians.finish().items():
                name = f"{prefix}{path}.weight"
                if not pieces.has(name):
                    weight = _stored_tensor(checkpoint, name).to(device)
                    pieces.quantize(name, weight, hessian, method, act_order)
        for path, layer in matrices.items():
            layer.weight.copy_(pieces.read(f"{prefix}{path}.weight").dequantize())
        x = [block(part.to(device))[0].cpu() for part in x]
        del block
    head = "lm_head.weight"
    if head in pieces.schemes and not pieces.has(head):
        norm = _loaded(
            lambda: find("norm", config.norm)(config.embedding_dim, config.norm_eps),
            checkpoint,
            "backbone.out_norm.",
            device,
        )
        hessian = torch.zeros(config.embedding_dim, config.embedding_dim, device=device)
        for part in x:
            vectors = norm(part.to(device)).flatten(0, 1)
            hessian.addmm_(vectors.mT, vectors)
        weight = _stored_tensor(checkpoint, head).to(device)
        pieces.quantize(head, weight, hessian, method, act_order)


def _loaded(
    build: Callable[[], Any], checkpoint: Checkpoint, prefix: str, device: torch.device
) -> Any:
    """A part of the model in float32, with the checkpoint's weights."""
    with torch.device("meta"):
        module = build()
    module = module.to_empty(device=device).float().eval()
    parameters = dict(module.named_parameters())
    for name, tensor in checkpoint.tensors(prefix):
        parameters[name.removeprefix(prefix)].copy_(tensor)
    return module


def _stored_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    return dict(checkpoint.tensors(name))[name]


class _Hessians:
    """Sums XᵀX of the inputs of layers while a block runs. Layers with one input share the sum."""

    def __init__(self, layers: Mapping[str, Linear]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._latest: tuple[Tensor, Tensor] | None = None
        self._hooks = [
            layer.register_forward_pre_hook(self._hook(name)) for name, layer in layers.items()
        ]

    def finish(self) -> dict[str, Tensor]:
        for hook in self._hooks:
            hook.remove()
        return self._sums

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def add(module: nn.Module, inputs: Any) -> None:
            x = inputs[0]
            if self._latest is not None and self._latest[0] is x:
                self._sums[name] = self._latest[1]
                return
            if name not in self._sums:
                self._sums[name] = x.new_zeros(x.shape[-1], x.shape[-1])
            rows = x.flatten(0, -2)
            self._sums[name].addmm_(rows.mT, rows)
            self._latest = x, self._sums[name]

        return add
