"""`make quickstart`: build a tiny byte-level model, save it, look at it, let it continue a text.

Its weights are random, so the text is noise; every step is the one a trained checkpoint takes.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import torch

from xlstm7b import XLSTM, ModelConfig

FOLDER = Path("runs/quickstart")


def show(*arguments: str) -> None:
    """Runs one command of the package, after printing it."""
    print(f"\n$ xlstm7b {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "xlstm7b", *arguments], check=True)


def main() -> None:
    torch.manual_seed(0)
    XLSTM(ModelConfig.named("tiny")).save_pretrained(FOLDER)
    print(f"saved a tiny model with random weights to {FOLDER}")
    folder = str(FOLDER)
    show("info", folder)
    show("verify", folder)
    show("generate", folder, "Once upon a time", "--max-new-tokens", "64", "--seed", "0")
    print("\nNext: source .venv/bin/activate")
    for command, purpose in (
        (f"compare {folder}", "our numbers beside transformers'"),
        ("info 7b", "the released model's sizes and FLOPs"),
        ("generate NX-AI/xLSTM-7b 'The sea'", "27 GB of weights, under a licence of their own"),
    ):
        print(f"      xlstm7b {command:36}# {purpose}")


if __name__ == "__main__":
    main()
