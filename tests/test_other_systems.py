"""A small model is saved, described and generated from. CI runs this on macOS and Windows too.

Here it also runs without the modules and functions that Windows lacks.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment

# Takes away what Python has on Linux, but not on Windows.
WITHOUT_POSIX = """
import ctypes, os, select, signal, sys

class NoMain(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("argument must be str, not None")
        super().__init__(name, *args, **kwargs)

def open_file(path, flags, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return opened(path, flags, *args, **kwargs)

# Other packages ask for these names too. They are imported first.
import asyncio, concurrent.futures, multiprocessing, subprocess, tempfile
import huggingface_hub, torch, torch._dynamo, typer
ctypes.CDLL, opened, os.open = NoMain, os.open, open_file
for name in ("fcntl", "grp", "pwd", "resource", "termios", "triton"):
    sys.modules[name] = None
del os.sysconf, os.sched_getaffinity, select.poll, signal.SIGHUP
"""
SMOKE = """
import sys
from pathlib import Path
import torch
from xlstm7b import XLSTM, Generator, ModelConfig, SavedState
from xlstm7b.__main__ import main
from xlstm7b.chat_format import PlainFormat
from xlstm7b.tokenizer import ByteTokenizer, write_tokenizer

torch.manual_seed(0)
config = ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=320)
XLSTM(config).save_pretrained("model")
write_tokenizer(Path("model"), ByteTokenizer(), config, PlainFormat().template)
generator = Generator.from_pretrained("model")
generator.read("The sea").save("sea.safetensors")
SavedState.load("sea.safetensors", config)

for command in (
    "--version",
    "--help",
    "info 7b",
    "verify model",
    "generate model The --max-new-tokens 4 --seed 1",
    "generate model was --load-state sea.safetensors --max-new-tokens 4 --seed 1",
    "prepare text.txt --output tokens --tokenizer bytes",
):
    sys.argv[1:] = command.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
"""


@pytest.mark.parametrize("system", ["this one", "without POSIX"])
def test_a_small_model_generates(system: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the sea was " * 1000, encoding="utf-8")
    script = SMOKE if system == "this one" else WITHOUT_POSIX + SMOKE
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "6,865,424,896" in done.stdout
    assert (tmp_path / "tokens" / "manifest.json").is_file()
