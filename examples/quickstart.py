"""`make quickstart`: from text that is on every machine to a model that continues it.

Prepares the Python standard library's sources, trains a small byte-level model on them, draws its
curves, writes its weights as a checkpoint folder and lets it complete two prompts. Every step is
the command that a large model takes.
"""

import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

RUN = Path("runs/quickstart")
DATA = Path("runs/quickstart-data")
MODEL = Path("runs/quickstart-model")
HELD_OUT = 10  # every tenth source is kept for validation


def show(*arguments: object) -> None:
    """Runs one command of the package, after printing it."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ xlstm7b {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "xlstm7b", *words], check=True)


def collect() -> None:
    """Copies the standard library's modules into two folders of text."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for index, source in enumerate(sources):
        part = DATA / "text" / ("valid" if index % HELD_OUT == 0 else "train")
        part.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8", errors="replace")
        (part / f"{source.stem}.txt").write_text(text, encoding="utf-8")


def main() -> None:
    for folder in (RUN, DATA, MODEL):
        shutil.rmtree(folder, ignore_errors=True)
    collect()
    for part in ("train", "valid"):
        show("prepare", DATA / "text" / part, "--output", DATA / part, "--tokenizer", "bytes")
    show("train", "quickstart", "--run", RUN)
    show("plot", RUN, "--output", RUN / "curves.png")
    show("export", RUN, MODEL)
    for prompt in ("    def __init__(self", "import "):
        show("generate", MODEL, prompt, "--max-new-tokens", 120, "--temperature", 0.9, "--seed", 2)
    print("\nNext: source .venv/bin/activate")
    for command, purpose in (
        (f"chat {MODEL}", "talk to it: it has read code, and not much of it"),
        ("train 160m --dry-run", "what a larger run takes"),
        ("info 7b", "the released model's sizes and FLOPs"),
        ("generate NX-AI/xLSTM-7b 'The sea'", "27 GB of weights, under a licence of their own"),
    ):
        print(f"      xlstm7b {command:36}# {purpose}")


if __name__ == "__main__":
    main()
