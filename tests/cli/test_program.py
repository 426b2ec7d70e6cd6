"""The program as a whole: exit codes, stdout and stderr, imports, and options."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoint_files import names_in, run
from commands import Cli, Outcome, environment, refused, succeeded

import xlstm7b
from xlstm7b.cli import app
from xlstm7b.generate.params import HELP, SamplingParams
from xlstm7b.model import XLSTM


def test_module_exit_codes_and_streams() -> None:
    def call(*arguments: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "xlstm7b", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    sentence = "'8b' is neither a checkpoint folder nor a size; sizes: tiny, 160m, 400m, 1.4b, "
    sentence += "2.7b, 7b, 160m-previous, 400m-previous, 1.4b-previous, 7b-previous"
    assert refused(call("info", "8b")) == sentence
    assert "6,865,424,896" in succeeded(call("info", "7b"))


def test_neither_the_package_nor_help_nor_info_loads_torch() -> None:
    script = """if True:
        import sys
        import xlstm7b
        heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors"}
        assert not heavy & set(sys.modules)
        assert xlstm7b.ModelConfig.named("7b").d_qk == 256
        from xlstm7b.cli import main
        for command in ([], ["generate"], ["chat"], ["bench"], ["bench", "kernels"], ["convert"]):
            sys.argv = ["xlstm7b", *command, "--help"]
            try:
                main()
            except SystemExit as ended:
                assert not ended.code
        print("JSON")
        sys.argv = ["xlstm7b", "info", "7b", "--json"]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    helps, _, info = run(script).partition("JSON\n")
    for part in (
        "--max-new-tokens",
        "Talk with a model.",
        "(a GPU if there is one)",
        "--batches",
    ):
        assert part in helps
    assert json.loads(info)["parameters"]["total"] == 6_865_424_896


def test_version_help_and_completion(cli: Cli) -> None:
    assert succeeded(cli("--version")) == f"xlstm7b {xlstm7b.__version__}\n"
    for command in ([], ["serve"], ["bench", "serve"], ["eval"], ["eval", "ppl"]):
        short = succeeded(cli(*command, "-h"))
        assert short == succeeded(cli(*command, "--help"))
        assert "Usage: " in short
    assert "--install-completion" in succeeded(cli("-h"))


def test_help_breaks_lines_where_the_terminal_ends(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = [line.strip() for line in succeeded(cli("export", "--help")).splitlines()]
    assert any(
        line.startswith("A LoRA run becomes") and line.endswith(" of a server.") for line in lines
    )
    for _, command in every_command():
        assert not any("\n" in part for part in str(command.help).split("\n\n"))


def shell(command: str, **variables: str) -> Outcome:
    """What `xlstm7b COMMAND` does in a shell."""
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m xlstm7b {command}"],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("closed", ["<&-", "2>&-"])
def test_closed_stdin_and_stderr_are_no_error(closed: str) -> None:
    assert "6,865,424,896" in succeeded(shell(f"info 7b {closed}"))


@pytest.mark.parametrize("command", ["info 7b", "generate 7b hi", "serve 7b", "--version"])
def test_a_closed_stdout_is_refused_before_anything_is_lost(command: str) -> None:
    sentence = "stdout is closed, so the output would be lost: use >/dev/null to discard it"
    assert refused(shell(f"{command} >&-")) == sentence
    assert shell(f"{command} <&- >&- 2>&-").code == 2


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_terminal_of_unknown_width_gets_the_whole_output(columns: str) -> None:
    assert "6,865,424,896" in succeeded(shell("info 7b", COLUMNS=columns))
    assert "Usage" in succeeded(shell("info --help", COLUMNS=columns))


@pytest.mark.parametrize("name", ["--install-completion", "--show-completion"])
def test_completion_is_for_the_current_shell(name: str, tmp_path: Path) -> None:
    sentence = f"{name} is for the shell that runs it and takes no argument, not 'nosuchshell'"
    assert refused(shell(f"{name} nosuchshell", HOME=str(tmp_path))) == sentence
    assert not [*tmp_path.iterdir()]


def test_an_interrupt_at_any_time_prints_no_traceback() -> None:
    """Also while the command line is imported, and while Python exits."""
    script = """if True:
        import atexit, os, signal, sys
        from importlib.abc import MetaPathFinder
        when = sys.argv[1]
        # The tests may run in the background, where a shell lets commands ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
        class Interrupts(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if (when, name) == ("import", "xlstm7b.cli"):
                    interrupt()
        sys.meta_path.insert(0, Interrupts())
        from xlstm7b.__main__ import main
        if when == "exit":
            atexit.register(interrupt)
        sys.argv[1:] = ["--version"]
        main()
    """
    for when in ("import", "exit"):
        command = [sys.executable, "-c", script, when]
        done = subprocess.run(command, env=environment(), capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_words_are_completed() -> None:
    words = {"COMP_WORDS": "xlstm7b serve --log-", "COMP_CWORD": "2"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['xlstm7b']; from xlstm7b.__main__ import main; main()",
        ],
        env=environment() | words | {"_XLSTM7B_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["--log-level"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["info 7b", "info 7b --json", "train --reference", "-h", "info -h"]
)
def test_a_closed_pipe_is_no_error(command: str, unbuffered: str) -> None:
    piped = f"{sys.executable} -m xlstm7b {command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", piped],
        env=environment() | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def every_command() -> list[tuple[str, Any]]:
    """All commands, with the words of each."""
    found: list[tuple[str, Any]] = [("xlstm7b", typer.main.get_command(app))]
    for path, command in found:
        found += [(f"{path} {name}", one) for name, one in getattr(command, "commands", {}).items()]
    return found


def every_option() -> Iterator[tuple[str, Any]]:
    """Options and arguments of all commands, with the words of the command."""
    for path, command in every_command():
        yield from ((path, one) for one in command.params)


def test_help_texts_are_sentences_that_stand_alone() -> None:
    for path, option in every_option():
        text = option.help
        assert text, (path, option.name)
        assert text[0].isupper(), (path, option.name, text)
        assert text.rstrip()[-1] in ".…", (path, option.name, text)
        assert len(text.split()) > 2, (path, option.name, text)
        assert "likewise" not in text.lower()


def test_options_of_generate_chat_and_serve_say_what_their_default_does() -> None:
    for path, option in every_option():
        is_option = option.param_type_name == "option" and option.name != "help"
        if path.split()[-1] in ("generate", "chat", "serve") and path.count(" ") == 1 and is_option:
            assert option.default is not None or isinstance(option.show_default, str), (
                path,
                option.name,
            )


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["prepare", "a.txt", "", "--output", "out"], "INPUT"),
        (["prepare", "--verify", ""], "INPUT"),
        (["prepare", "a.txt", "--output="], "--output"),
        (["generate", "model", "", "--load-state", ""], "--load-state"),
        (["generate", "model", "x", "--json-schema", ""], "--json-schema"),
        (["generate", "model", "--jsonl", ""], "--jsonl"),
        (["generate", "model", "--jsonl", "a.txt", "--output", ""], "--output"),
        (["chat", "model", "--tokenizer", ""], "--tokenizer"),
        (["serve", "model", "--states-folder", ""], "--states-folder"),
        (["quantize", "model", "out", "--bits", "4", "--calibration", ""], "--calibration"),
        (["convert", "model", ""], "TARGET"),
        (["merge", "model", "adapter", ""], "TARGET"),
        (["verify", ""], "FOLDER"),
        (["train", "quickstart", "--run", "", "--dry-run"], "--run"),
        (["export", "", "out"], "RUN"),
        (["plot", ""], "RUNS"),
        (["eval", "ppl", "model", ""], "TEXTS"),
        (["eval", "model", "--tasks", "x", "--output", ""], "--output"),
        (["bench", "generation", "--json", ""], "--json"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    assert refused(cli(*command)) == f"{name} is empty: give a path"
    assert names_in(tmp_path) == {"a.txt"}


def test_a_command_of_eval_that_does_not_exist_is_named(cli: Cli) -> None:
    said = refused(cli("eval", "perplexity", "model", "texts.jsonl"))
    assert said == (
        "there is no command 'eval perplexity'; there are run, ppl, compare, ruler, ruler-plot, "
        "and `eval MODEL --tasks TASKS`, which is `eval run`"
    )


def test_public_names() -> None:
    assert xlstm7b.XLSTM is XLSTM
    assert all(getattr(xlstm7b, name).__name__ == name for name in xlstm7b.__all__)
    listed = "import xlstm7b; assert {'__version__', *xlstm7b.__all__} <= {*dir(xlstm7b)}"
    subprocess.run([sys.executable, "-c", listed], env=environment(), check=True, timeout=60)
    with pytest.raises(AttributeError, match=r"^module 'xlstm7b' has no attribute 'LSTM'$"):
        _ = xlstm7b.LSTM


def test_misspelt_options_exit_with_code_2(cli: Cli) -> None:
    for arguments in (["infos"], ["info"], ["info", "7b", "--yaml"], ["generate", "x", "y", "--k"]):
        outcome = cli(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert "Usage: " in outcome.err


@pytest.mark.parametrize(
    ("command", "defaults", "absent"),
    [
        ("generate", {"temperature": 0.8, "top_p": 0.95}, {"logit_bias"}),
        (
            "chat",
            {"max_new_tokens": 1024, "temperature": 0.8, "top_p": 0.95},
            {"logit_bias", "eos_token_id", "logprobs", "structured_outputs"},
        ),
    ],
)
def test_sampling_options_are_the_fields_of_sampling_params(
    command: str, defaults: dict[str, float], absent: set[str]
) -> None:
    parameters = typer.main.get_command(app).commands[command].params
    options = {p.name: p for p in parameters if getattr(p, "rich_help_panel", "") == "Sampling"}
    described = {field.name: field for field in fields(SamplingParams)}
    assert list(options) == [name for name in described if name not in absent]
    assert options.pop("stop_strings").opts == ["--stop"]
    if "eos_token_id" in options:
        assert options.pop("eos_token_id").opts == ["--ignore-eos"]
    if "structured_outputs" in options:
        assert options.pop("structured_outputs").opts == ["--json-schema"]
    for name, option in options.items():
        assert option.opts == [f"--{name.replace('_', '-')}"]
        assert option.help == HELP[name]
        assert option.default == defaults.get(name, described[name].default)


def test_the_docs_list_the_fields_of_sampling_params() -> None:
    page = Path(__file__).parents[2] / "docs" / "generation.md"
    table = page.read_text(encoding="utf-8").partition("| parameter | default | meaning |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    params = SamplingParams()
    assert rows == [f"| `{name}` | {getattr(params, name)} | {HELP[name]} |" for name in HELP]


def test_help_loses_no_words_in_brackets() -> None:
    """Typer's help takes [word] for markup and prints nothing for it."""

    def texts(command: Any) -> Iterator[str]:
        yield command.help or ""
        for parameter in command.params:
            yield getattr(parameter, "help", None) or ""
        for part in getattr(command, "commands", {}).values():
            yield from texts(part)

    lost = re.compile(r"(?<!\\)\[/?[a-z][a-z ]*\]")
    assert not [text for text in texts(typer.main.get_command(app)) if lost.search(text)]
