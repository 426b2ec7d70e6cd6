"""`make quickstart`: trains a small model on text that every machine has, and generates from it.

Prepares the sources of the Python standard library, trains a byte-level model on them, plots the
run, exports the weights and completes two prompts. A large model takes the same commands.
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
HELD_OUT = 10  # every tenth file is for validation


def run(*arguments: object) -> None:
    """Prints a command of the package, then runs it."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ xlstm7b {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "xlstm7b", *words], check=True)


def collect() -> None:
    """Copies the modules of the standard library into two folders of text."""
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
        run("prepare", DATA / "text" / part, "--output", DATA / part, "--tokenizer", "bytes")
    run("train", "quickstart", "--run", RUN)
    run("plot", RUN, "--output", RUN / "curves.png")
    run("export", RUN, MODEL)
    for prompt in ("    def __init__(self", "import "):
        run("generate", MODEL, prompt, "--max-new-tokens", 120, "--temperature", 0.9, "--seed", 2)
    print("\nNext: source .venv/bin/activate")
    for command, purpose in (
        (f"chat {MODEL}", "chat with it (it has only read a little code)"),
        ("train 160m --dry-run", "the plan of a larger run"),
        ("info 7b", "parameters and FLOPs of the released model"),
        ("generate NX-AI/xLSTM-7b 'The sea'", "27 GB of weights, with their own licence"),
    ):
        print(f"      xlstm7b {command:36}# {purpose}")


if __name__ == "__main__":
    main()
