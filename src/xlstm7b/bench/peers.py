"""Other libraries (peers): loads their models, and runs each peer in its own process."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from xlstm7b.bench.cases import Result
from xlstm7b.bench.measure import random_module
from xlstm7b.checkpoint import read_quantization, transformers_limits
from xlstm7b.config import ModelConfig

TRITON_KERNELS = {
    "chunkwise_kernel": "chunkwise--triton_limit_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}


def load_transformers(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    folder: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """The xLSTM of transformers, from a folder or with random weights, by default native kernels.

    `options` are fields of its config.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("this needs transformers: pip install 'xlstm7b[bench]'") from error
    if limits := transformers_limits(config):
        raise ValueError("; ".join(limits))
    # Our config names the native kernels, whichever kernels the folder's own config names.
    named = config.to_dict(str(dtype).removeprefix("torch."))
    quantization = None if folder is None else read_quantization(folder)
    if quantization is not None:
        import xlstm7b.integrations.transformers  # noqa: F401 (needed for int4)

        named["quantization_config"] = quantization
    theirs = transformers.xLSTMConfig(**named | dict(options or {}))
    factory: Any = transformers.xLSTMForCausalLM
    if folder is None:
        model = random_module(lambda: factory(theirs), dtype, device)
    else:
        try:
            model = factory.from_pretrained(folder, config=theirs, dtype=dtype).to(device)
        except (RuntimeError, OSError) as error:
            # It cannot read the authors' own format, which `xlstm7b convert` turns into one that
            # it reads.
            reason = " ".join(str(error).split())
            raise ValueError(f"transformers does not load {folder}: {reason}") from error
    module: torch.nn.Module = model.eval()
    return module


def load_xlstm(
    config: ModelConfig, dtype: torch.dtype, device: str, **options: Any
) -> torch.nn.Module:
    """The model of the authors' package with random weights; `options` are fields of its config."""
    package: Any = import_module("xlstm.xlstm_large.model")
    names = ("embedding_dim", "num_heads", "num_blocks", "vocab_size", "ffn_proj_factor")
    named = config.to_dict()  # with the native kernels
    fields = {name: named[name] for name in (*names, *TRITON_KERNELS)}
    if device == "cuda":
        fields |= TRITON_KERNELS
    theirs = package.xLSTMLargeConfig(**fields, return_last_states=True, **options)
    make: Callable[[], torch.nn.Module] = partial(package.xLSTMLarge, theirs)
    return random_module(make, dtype, device)


def in_process(
    case: Result, function: Callable[..., Iterator[Result]], timeout: float, /, **arguments: Any
) -> Iterator[Result]:
    """Yields the results of `function(**arguments)`, which runs in a new Python process.

    That process starts with no memory in use. If it crashes or hangs, the last result is `case`
    with the reason as its error. If this process is killed, so is that one. `arguments` must be
    JSON.
    """
    code = "from xlstm7b.bench.peers import work_for_parent; work_for_parent()"
    command = [sys.executable, "-c", code, function.__module__, function.__name__]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        done, began = False, time.monotonic()
        timer = threading.Timer(timeout, _kill, [process])
        timer.start()
        try:
            for text in process.stdout:
                if text.startswith("result "):
                    yield Result.from_dict(json.loads(text.removeprefix("result ")))
                if done := text == "done\n":
                    break
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
            process.stdin.close()
            process.stdout.close()
        if not done:
            errors.seek(0)
            reason = _last_error(errors.read()) or f"exit code {process.returncode}"
            if time.monotonic() - began >= timeout:
                reason = f"stopped after {timeout:.0f} s"
            yield replace(case, error=reason[:300])


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kills the whole process group: a compiler's workers would keep the pipe open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_error(stderr: str) -> str:
    """The last line that names an exception, else the last line."""
    lines = stderr.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def work_for_parent() -> None:
    """The code that runs in the process of `in_process`."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    module, function, arguments = sys.argv[1:]
    for result in getattr(import_module(module), function)(**json.loads(arguments)):
        print("result " + json.dumps(result.to_dict()), flush=True)
    print("done", flush=True)


def _die_with_parent() -> None:
    """Waits until the parent is gone. Else this process would go on using the GPU."""
    os.read(sys.stdin.fileno(), 1)  # the parent writes nothing, so this is the end of its pipe
    os.killpg(os.getpgrp(), signal.SIGKILL)
