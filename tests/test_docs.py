"""README and docs: their Python runs, their commands exist, and what they link to and name exists.

To see the faults of one page: pytest tests/test_docs.py -k PAGE
"""

import linecache
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from adapters import random_adapter
from live_server import serving
from models import bigram_model, random_model
from pages import PAGES, ROOT, Code, commands, python_blocks, text_of

from ablations import ABLATIONS
from recall import EXPERIMENTS
from xlstm7b import Generator, ModelConfig
from xlstm7b.chat_format import PlainFormat
from xlstm7b.cli import app
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization
from xlstm7b.registry import PLUGINS
from xlstm7b.tokenizer import ByteTokenizer, write_tokenizer
from xlstm7b.train import load_recipe, recipe_names

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

# Python

# Pages whose Python another test runs, because it tests more of it.
RUN_ELSEWHERE = {
    "docs/extending.md": "tests/test_extending.py",
    "docs/library.md": "tests/model/test_library.py",
    "docs/training.md": "tests/train/test_hooks.py",
}
SERVER = "http://127.0.0.1:8000"
FILE_NAME = re.compile(r"# (\S+\.py)\n")  # a block that begins with it is a file


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that stands for every model of the pages. Its tokens are bytes.

    The vocabulary is larger, because pages have ids of the released model. Those have no text here.
    """
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(128, 2, 2, vocab_size=4096)
    random_model(config, torch.float32).save_pretrained(folder)
    write_tokenizer(folder, ByteTokenizer(), config, PlainFormat().template)
    return folder


def prepare(model_folder: Path, code: str) -> None:
    """Puts the models and adapters that the code loads into the current folder."""
    for name in dict.fromkeys(re.findall(r'from_pretrained\(\s*"([^"]+)"', code)):
        if "int4" in name:
            quantize_checkpoint(model_folder, Path(name), Quantization.named("int4"))
        else:
            shutil.copytree(model_folder, name)
    for name in dict.fromkeys(re.findall(r'(?:adapter=|from_pretrained\(\w+, )"([^"]+)"', code)):
        random_adapter(Path(name), model_folder)


def compiled(code: str, name: str) -> Any:
    """Code whose tracebacks show its lines. On a machine without a GPU it runs on the CPU."""
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"')
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    return compile(code, name, "exec")


@pytest.mark.filterwarnings("ignore")  # those of other libraries
@every_page
def test_python_runs(page: Path, model_folder: Path, tmp_path: Path) -> None:
    blocks = python_blocks(page)
    for block in blocks:
        compiled(block.text, block.where)
    if str(page.relative_to(ROOT)) in RUN_ELSEWHERE:
        return
    run = [block for block in blocks if block.is_whole and not FILE_NAME.match(block.text)]
    for library in re.findall(r"^(?:from|import) (\w+)", "\n".join(b.text for b in run), re.M):
        pytest.importorskip(library)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with ExitStack() as stack:
            code = "\n".join(block.text for block in run)
            prepare(model_folder, code)
            names: dict[str, Any] = {"__name__": "page"}
            if SERVER in code:
                url = stack.enter_context(serving(brief_generator())).url
            for block in run:
                text = block.text.replace(SERVER, url) if SERVER in code else block.text
                exec(compiled(text, block.where), names)
    finally:
        os.chdir(before)


def brief_generator() -> Generator:
    """It ends a text at once, and a JSON text as soon as the grammar lets it."""
    followers = {":": '\0{"1', '"': '"', "1": "}", "}": "\0", "\n": "\0"}
    return Generator(bigram_model(followers), ByteTokenizer())


# Commands


@cache
def program() -> Any:
    return typer.main.get_command(app)


def check_command(command: Any, words: list[str], *, is_whole: bool = True) -> None:
    """`ValueError` unless a typer command has this subcommand, with these options and arguments."""
    while hasattr(command, "commands"):
        if "run" in command.commands and words and words[0] not in command.commands:
            words = ["run", *words]  # of `eval`, `run` may be left out
        if not words or words[0].isupper() or words[0].startswith("-"):
            return
        if words[0] not in command.commands:
            raise ValueError(f"there is no command {words[0]!r}")
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(command.name, words)
    except Exception as error:  # typer's own
        kind, message = type(error).__name__, getattr(error, "message", str(error))
        is_placeholder = re.search(r"'[A-Z…]+'", message)
        if kind != "Exit" and not is_placeholder and (is_whole or kind != "MissingParameter"):
            raise ValueError(f"{command.name}: {message or 'an argument is missing'}") from error


def check_xlstm7b(words: list[str], is_whole: bool) -> None:
    check_command(program(), words, is_whole=is_whole)
    if words[:1] != ["train"] or len(words) < 2:
        return
    recipe, settings = words[1], [word for before, word in pairwise(words) if before == "--set"]
    if recipe in recipe_names() or is_of_the_repository(recipe) or not recipe.endswith(".toml"):
        if recipe.isupper() or recipe.startswith("-"):
            return
        try:
            load_recipe(str(ROOT / recipe) if "/" in recipe else recipe, settings)
        except ValueError as error:
            if PLUGINS not in str(error):  # else it is a class that the page registers
                raise


def check_python(words: list[str], is_whole: bool) -> None:
    if words[:2] == ["-m", "xlstm7b"]:
        return check_xlstm7b(words[2:], is_whole)
    if words[0] == "-m" or words[0].startswith("-") or not is_of_the_repository(words[0]):
        return None
    file = ROOT / words[0]
    source = file.read_text(encoding="utf-8")
    if "typer.Typer(" in source:
        spec = spec_from_file_location(file.stem, file)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return check_command(typer.main.get_command(module.app), words[1:], is_whole=is_whole)
    for word in words[1:]:
        option = word.partition("=")[0]
        if word.startswith("--") and word != "--help" and f'"{option}"' not in source:
            raise ValueError(f"{words[0]} has no {word}")
    return None


def check_torchrun(words: list[str], is_whole: bool) -> None:
    if "xlstm7b" in words:
        check_xlstm7b(words[words.index("xlstm7b") + 1 :], is_whole)


def check_make(words: list[str], is_whole: bool) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for word in words:
        if re.fullmatch(r"[a-z-]+", word) and word not in targets:
            raise ValueError(f"the Makefile has no target {word}")


def check_pip(words: list[str], is_whole: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        found = re.fullmatch(r"(?:\.|xlstm7b)\[(.+)\]", word)
        for extra in found[1].split(",") if found else ():
            if extra not in project["optional-dependencies"]:
                raise ValueError(f"there is no extra {extra!r}")


def is_of_the_repository(word: str) -> bool:
    """True for a path below one of the repository's folders, by its form."""
    return (
        re.match(r"(src|tests|docs|examples|benchmarks|experiments|deploy)/[\w/-]+\.\w+$", word)
        is not None
    )


CHECKS: dict[str, Callable[[list[str], bool], None]] = {
    "xlstm7b": check_xlstm7b,
    "python": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
}


def check(code: Code) -> None:
    """`ValueError` for what does not exist. Commands of other programs are not looked at."""
    try:
        words = shlex.split(code.text, comments=True)
    except ValueError:
        if code.text.partition(" ")[0] in CHECKS:
            raise
        return
    for separator, group in groupby(words, key=lambda word: word in ("&&", "|", ";")):
        if not separator:
            check_program(list(group), code.is_whole)


def check_program(words: list[str], is_whole: bool) -> None:
    variables: dict[str, str] = {}
    while words and (found := re.match(r"([A-Z0-9_]+)=(.*)", words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    words = [b for a, b in pairwise(["", *words]) if b not in ("…", "[…]") or a.startswith("-")]
    if not words or (program := words[0].removeprefix(".venv/bin/")) not in CHECKS:
        return
    writes = {"--output", "-o", "--json", "--run", "--plot"}
    for before, word in pairwise(words):
        is_read = is_of_the_repository(word) and before not in writes
        if is_read and not (ROOT / word).exists():
            raise ValueError(f"there is no {word}")
    if len(words) > 1:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            CHECKS[program](words[1:], is_whole)


@every_page
def test_commands_exist(page: Path) -> None:
    found = []
    for code in commands(page):
        try:
            check(code)
        except (ValueError, OSError) as error:
            found.append(f"{code.where}: {code.text}: {error}")
    assert not found, "\n" + "\n".join(found)


def test_every_experiment_is_in_the_paper() -> None:
    paper = text_of(ROOT / "docs" / "paper.md")
    shown = set(re.findall(r"python experiments/(\w+)\.py ([\w-]+)", paper))
    named = {"ablations": ABLATIONS, "recall": EXPERIMENTS}
    assert shown == {(script, name) for script, names in named.items() for name in names}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("xlstm7b inform 7b", "there is no command 'inform'"),
        ("xlstm7b info 7b --colour", "info: No such option: --colour"),
        ("xlstm7b info", "info: "),
        ("xlstm7b eval FOLDER --shots 5", "run: No such option: --shots"),
        ("xlstm7b train 7c", "7c"),
        ("xlstm7b train 7b --set optimizer.rate=1", "rate"),
        ("xlstm7b train examples/nothing.toml", "there is no examples/nothing.toml"),
        ("torchrun --nproc-per-node 8 -m -- xlstm7b train 7b --runs x", "No such option: --runs"),
        ("python examples/nothing.py", "there is no examples/nothing.py"),
        ("python examples/nano_xlstm.py train TEXT --rate 1", "nano_xlstm.py has no --rate"),
        ("CUDA_VISIBLE_DEVICES=0 make tests", "the Makefile has no target tests"),
        ("XLSTM7B_MODEL=FOLDER XLSTM7B_PORT=http xlstm7b serve", "XLSTM7B_PORT: "),
        ("pip install '.[server]'", "there is no extra 'server'"),
    ],
)
def test_a_wrong_command_is_found(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Code("page:1", command))


def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {re.split(r"[\[=<>]", package)[0] for package in packages}
        for extra, packages in project["optional-dependencies"].items()
    }
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| (.*) \|$", text_of(ROOT / "docs/installation.md"), re.M
    )
    named = {extra: {*re.findall(r"`([^`]+)`", packages)} for extra, packages in rows}
    assert named == extras | {"dev": named["dev"]}


# Links and names


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository, and to their headings."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page)):
        name, _, anchor = "".join(link).partition("#")
        target = page.parent / name if name else page
        if re.match(r"https?:", name):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: the link {''.join(link)} leads nowhere")
    assert not found, "\n" + "\n".join(found)


@cache
def python_files() -> list[str]:
    folders = ("src", "tests", "docs", "examples", "benchmarks", "experiments")
    return [
        f"/{path.relative_to(ROOT)}" for name in folders for path in ROOT.glob(f"{name}/**/*.py")
    ]


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`mlstm/recurrent.py` is one of ours. `my_layers.py` is the reader's."""
    text = text_of(page)
    own = set(FILE_NAME.findall(text)) | set(re.findall(r"\bmy_\w+\.py", text))
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - own
    missing = [
        name for name in named if not any(file.endswith(f"/{name}") for file in python_files())
    ]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(sorted(missing))}"
