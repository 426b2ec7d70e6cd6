"""Options of `serve` from variables and from the file of --config."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import Cli, refused, succeeded
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.cli import app
from xlstm7b.cli.serve import read_keys
from xlstm7b.cli.settings import variable_of

SERVE: Any = typer.main.get_command(app).commands["serve"]
# Those that can be given in each way. `--config` names the file.
OPTIONS = [param for param in SERVE.params if param.name != "config"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for param in SERVE.params:
        monkeypatch.delenv(variable_of(param.name), raising=False)


def two_values(param: Any) -> list[Any]:
    """Different values of an option, as TOML has them. That of a flag is True."""
    descriptor = param.type_descriptor
    if descriptor.choices:
        return [descriptor.choices[0], descriptor.choices[-1]]
    numbers: dict[type, list[Any]] = {bool: [True, False], int: [3, 4], float: [0.5, 2]}
    words = [["a", "b"], ["c"]] if param.multiple else ["a b", "c"]
    return numbers.get(descriptor.annotation, words)


def parsed(args: list[str], variables: dict[str, str], file: Path, settings: str) -> dict[str, Any]:
    """What the command gets."""
    file.write_text(settings)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables.items():
            patch.setenv(name, text)
        return SERVE.make_context("serve", ["--config", str(file), *args]).params


def as_given(param: Any, value: Any) -> Any:
    """What the command gets for a value of TOML."""
    return Path(value) if param.type_descriptor.is_path else value


@pytest.mark.parametrize("param", OPTIONS, ids=lambda param: param.name)
def test_flag_over_variable_over_file_over_default(param: Any, tmp_path: Path) -> None:
    first, second = two_values(param)
    is_model = param.name == "model"
    file = tmp_path / "serve.toml"

    def got(**values: Any) -> Any:
        args, variables, settings = [] if is_model else ["FOLDER"], {}, ""
        if "flag" in values:
            name, value = param.opts[0], values["flag"]
            if is_model:
                args = [value]
            elif param.is_flag:
                args.append(name)
            else:
                args += [f"{name}={each}" for each in (value if param.multiple else [value])]
        if "variable" in values:
            value = values["variable"]
            text = " ".join(value) if param.multiple else str(value)
            variables[variable_of(param.name)] = text
        if "file" in values:
            settings = f"{param.name} = {json.dumps(values['file'])}"
        return parsed(args, variables, file, settings)[param.name]

    want, other = as_given(param, first), as_given(param, second)
    assert got(flag=first, variable=second, file=second) == want
    assert got(flag=first, file=second) == want
    for value, wanted in ((first, want), (second, other)):
        unlike = second if value == first else first
        assert got(variable=value, file=unlike) == wanted
        assert got(file=value) == wanted
    if not is_model:  # it has no default
        default = parsed(["FOLDER"], {}, file, "")[param.name]
        assert default != want
        assert default == param.default or not (default or param.default)


@given(
    names=st.sets(st.sampled_from([param.name for param in OPTIONS])),
    hyphens=st.booleans(),
)
def test_names_in_a_file_may_have_hyphens(
    names: set[str], hyphens: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    params = {param.name: param for param in OPTIONS if param.name in names | {"model"}}
    values = {name: two_values(param)[0] for name, param in params.items()}
    lines = [
        f"{name.replace('_', '-') if hyphens else name} = {json.dumps(value)}"
        for name, value in values.items()
    ]
    file = tmp_path_factory.getbasetemp() / "hyphens.toml"
    got = parsed([], {}, file, "\n".join(lines))
    for name, param in params.items():
        assert got[name] == as_given(param, values[name])


@pytest.mark.usefixtures("no_weights")
def test_mistakes_in_a_file_are_one_sentence(cli: Cli, tmp_path: Path, speller: Path) -> None:
    file = tmp_path / "serve.toml"

    def error(content: str | bytes) -> str:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        said = refused(cli("serve", speller, "--config", file))
        assert said.startswith((f"{file}: ", f"--config: {file} "))
        return said.partition(f"{file}")[2].removeprefix(": ").strip()

    assert error("max_waitng = 4") == "there is no option 'max_waitng'; did you mean max_waiting?"
    assert error("max-waitng = 4").endswith("did you mean max_waiting?")
    assert error("[server]\nport = 1").startswith("there is no option 'server'; ")
    assert error("zzzzzzzz = 1") == "there is no option 'zzzzzzzz'; --help lists the options"
    assert error("config = 'b.toml'").startswith("there is no option 'config'")
    assert error("help = true").startswith("there is no option 'help'")
    assert error("port = '80'") == "port must be a valid integer, not '80'"
    assert error("port = 80.5") == "port must be a valid integer, not 80.5"
    assert error("port = true") == "port must be a valid integer, not True"
    assert error("drain-seconds = true") == "drain-seconds must be a valid number, not True"
    assert error("host = 1") == "host must be a valid string, not 1"
    wrong = error("states_folder = 1979-05-27")
    assert wrong.startswith("states_folder must be a valid string, not ")
    assert error("states_folder = ''") == "states_folder must be a path, not ''"
    assert error("share_prefix_cache = 1") == "share_prefix_cache must be a valid boolean, not 1"
    assert error("adapter = 'a'") == "adapter must be a list of strings, not 'a'"
    assert error("log_level = 'loud'").startswith("log_level must be 'debug', 'info', ")
    assert error("max-waiting = 1\nmax_waiting = 2") == (
        "max_waiting is given twice, with - and with _"
    )
    assert error("port = ").startswith("is not a TOML file: ")
    assert error(b"\xff").startswith("is not UTF-8 text: ")
    missing = tmp_path / "none.toml"
    assert refused(cli("serve", speller, "--config", missing)) == (
        f"--config: there is no file {missing}"
    )
    assert refused(cli("serve", speller, "--config", tmp_path)).startswith(
        f"--config: {tmp_path} is a folder"
    )


@pytest.mark.usefixtures("no_weights")
def test_an_error_says_what_has_set_the_option(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"max_waiting = 0\nmodel = '{speller}'")
    must = "--max-waiting must be at least 1, not 0"
    assert refused(cli("serve", "--config", file)) == f"{must} (--max-waiting is set by {file})"
    monkeypatch.setenv("XLSTM7B_CONFIG", str(file))
    assert refused(cli("serve")) == f"{must} (--max-waiting is set by {file})"
    monkeypatch.setenv("XLSTM7B_MAX_WAITING", "0")
    assert refused(cli("serve")) == f"{must} (--max-waiting is set by XLSTM7B_MAX_WAITING)"
    assert refused(cli("serve", "--max-waiting", 0)) == must
    monkeypatch.setenv("XLSTM7B_MAX_WAITING", "many")
    assert refused(cli("serve")).startswith("XLSTM7B_MAX_WAITING: ")
    monkeypatch.setenv("XLSTM7B_MAX_WAITING", "1")
    monkeypatch.setenv("XLSTM7B_LOG_LEVEL", "loud")
    assert refused(cli("serve")).startswith("XLSTM7B_LOG_LEVEL: 'loud' is not one of 'debug', ")


def test_an_empty_variable_is_not_set(tmp_path: Path) -> None:
    variables = {variable_of(param.name): "" for param in SERVE.params}
    file = tmp_path / "serve.toml"
    params = parsed(["FOLDER"], variables, file, "model = 'other'\nslots = 3")
    assert (params["model"], params["slots"], params["port"]) == ("FOLDER", 3, 8000)
    assert params["states_folder"] is None


def test_help_needs_no_readable_file_and_shows_no_values(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLSTM7B_CONFIG", str(tmp_path / "none.toml"))
    for name in ("API_KEY", "NAME", "MODEL"):
        monkeypatch.setenv(f"XLSTM7B_{name}", "sesame")
    for options in (["--help"], ["-h"], ["--config", "none.toml", "--help"]):
        shown = succeeded(cli("serve", *options))
        assert "XLSTM7B_MAX_WAITING" in shown
        assert "sesame" not in shown


@pytest.mark.parametrize(
    "settings", ["api_key = 'sesame'", "api_key = ['sesame', 5]", "api_key = {a = 'sesame'}"]
)
def test_a_wrong_key_in_a_file_is_not_shown(cli: Cli, tmp_path: Path, settings: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(settings)
    assert refused(cli("serve", "model", "--config", file)) == (
        f"{file}: api_key must be a list of strings"
    )


@pytest.mark.usefixtures("no_weights")
def test_a_misspelt_variable_gets_a_warning(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of other parts of the package, of the tests and of Kubernetes get none."""
    others = ["CACHE", "PLUGINS", "RELEASED", "RULER_SAMPLES", "SERVICE_HOST", "PORT_8000_TCP_PORT"]
    for name in others:
        monkeypatch.setenv(f"XLSTM7B_{name}", "1")
    assert refused(cli("serve", tmp_path / "none"))
    monkeypatch.setenv("XLSTM7B_API_KEYS", "sesame")
    monkeypatch.setenv("XLSTM7B_MAX_WAITNG", "1")
    outcome = cli("serve", tmp_path / "none")
    assert outcome.code == 2
    assert outcome.err.splitlines()[:-1] == [
        "xlstm7b: warning: no option has the variable XLSTM7B_API_KEYS; "
        "did you mean XLSTM7B_API_KEY?",
        "xlstm7b: warning: no option has the variable XLSTM7B_MAX_WAITNG; "
        "did you mean XLSTM7B_MAX_WAITING?",
    ]


def test_words_are_completed_although_the_file_has_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("no such thing")
    SERVE.make_context("serve", ["--config", str(file)], resilient_parsing=True)


def test_keys_of_the_variable_count_besides_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLSTM7B_API_KEY", " second\nthird ")
    want = {"first": "--api-key 1", "second": "XLSTM7B_API_KEY", "third": "XLSTM7B_API_KEY"}
    assert read_keys(["first"], None) == want
    for empty in ("", " "):
        monkeypatch.setenv("XLSTM7B_API_KEY", empty)
        with pytest.raises(ValueError, match=r"^XLSTM7B_API_KEY: an API key must be"):
            read_keys(["first"], None)
    monkeypatch.delenv("XLSTM7B_API_KEY")
    monkeypatch.setenv("XLSTM7B_API_KEY_FILE", "")
    with pytest.raises(ValueError, match=r"^XLSTM7B_API_KEY_FILE is empty"):
        read_keys(["first"], None)
