"""`make test-wheel`: builds the package, installs the wheel in an empty environment, and uses it.

    python tests/install_wheel.py

1. Builds the source distribution, and the wheel from it. Their files are those of the repository.
2. Installs the wheel without extras in a new environment, with the versions of constraints.txt.
3. In a folder elsewhere: runs `doctor`, prepares text, trains three steps, exports and generates.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
# The wheel must be found in its environment alone.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """The output of a command, which must succeed."""
    print("$", *command, flush=True)
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def build(target: Path) -> tuple[Path, Path]:
    """The paths of a source distribution and of the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target)
    (source,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    """Both hold the files that git tracks, of all and of the package, and what setuptools adds."""
    # In CI the checkout may belong to another user, which git would refuse.
    tracked = {*run("git", "-c", "safe.directory=*", "ls-files").splitlines()}
    with tarfile.open(source) as archive:
        paths = [
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        ]
    added = ("PKG-INFO", "setup.cfg", "src/xlstm7b.egg-info/")
    check_equal(source, {path for path in paths if not path.startswith(added)}, tracked)
    with ZipFile(wheel) as archive:
        paths = archive.namelist()
    described = f"xlstm7b-{wheel.name.split('-')[1]}.dist-info/"
    check_equal(
        wheel,
        {path for path in paths if not path.startswith(described)},
        {path.removeprefix("src/") for path in tracked if path.startswith("src/")},
    )


def check_equal(archive: Path, found: set[str], expected: set[str]) -> None:
    assert not found - expected, (
        f"{archive.name} holds {found - expected}, which git does not track"
    )
    assert not expected - found, f"{archive.name} lacks {expected - found}: see MANIFEST.in"


def install(wheel: Path, target: Path) -> Path:
    """Makes an environment with the wheel, and returns the folder of its programs."""
    run(sys.executable, "-m", "venv", target)
    programs = target / ("Scripts" if os.name == "nt" else "bin")
    constraints = ROOT / "constraints.txt"
    run(programs / "pip", "install", "--quiet", "--no-compile", "-c", constraints, wheel)
    return programs


def use(programs: Path, folder: Path, version: str) -> None:
    """Runs commands, in a folder where they find nothing but the installed package."""
    xlstm7b = programs / "xlstm7b"
    where = run(programs / "python", "-c", "import xlstm7b; print(xlstm7b.__file__)", folder=folder)
    assert Path(where).is_relative_to(programs.parent), where
    assert run(xlstm7b, "--version", folder=folder) == f"xlstm7b {version}\n"
    assert "6,865,424,896" in run(xlstm7b, "info", "7b", folder=folder)
    assert "ok: " in run(xlstm7b, "doctor", "--device", "cpu", folder=folder)
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{number} is a number.\n" for number in range(5_000)), encoding="utf-8"
    )
    for part in ("train", "valid"):
        shards = f"runs/quickstart-data/{part}"
        run(xlstm7b, "prepare", text, "--output", shards, "--tokenizer", "bytes", folder=folder)
    short = ("run.steps=3", "schedule.warmup=1", "schedule.cooldown=1")
    settings = [word for setting in short for word in ("--set", setting)]
    run(xlstm7b, "train", "quickstart", "--run", "runs/three-steps", *settings, folder=folder)
    run(xlstm7b, "export", "runs/three-steps", "model", folder=folder)
    answer = run(xlstm7b, "generate", "model", "1 is", "--max-new-tokens", "8", folder=folder)
    assert answer.startswith("1 is"), answer


def main() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        source, wheel = build(folder / "built")
        if (ROOT / ".git").exists():
            check_contents(source, wheel)
        programs = install(wheel, folder / "venv")
        (folder / "elsewhere").mkdir()
        use(programs, folder / "elsewhere", wheel.name.split("-")[1])


if __name__ == "__main__":
    main()
