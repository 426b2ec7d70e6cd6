"""`xlstm7b serve MODEL`: an OpenAI-compatible server."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from xlstm7b.cli import options
from xlstm7b.cli.loading import open_model
from xlstm7b.cli.options import listed

_KEY_VARIABLE = "XLSTM7B_API_KEY"


def _server(explained: str, default: bool | str = True) -> Any:
    return typer.Option(help=explained, rich_help_panel="Server", show_default=default)


def _engine(explained: str, default: bool | str = True) -> Any:
    return typer.Option(help=explained, rich_help_panel="Engine", show_default=default)


def serve(
    model: options.Model,
    host: Annotated[str, _server("Address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, _server("Port; 0: any that is free.")] = 8000,
    name: Annotated[
        str | None, _server("What clients call the model.", "the folder's name, or the hub id")
    ] = None,
    api_key: Annotated[
        list[str] | None, _server(f"A key that lets clients in; repeatable. Or {_KEY_VARIABLE}.")
    ] = None,
    api_key_file: Annotated[
        Path | None, _server("A file of keys, one a line; lines that begin with # are not.")
    ] = None,
    cors: Annotated[str, _server("Origins whose pages may ask, with commas; *: all.")] = "",
    drain_seconds: Annotated[float, _server("After SIGTERM, for what runs to finish.")] = 30.0,
    states_folder: Annotated[
        Path | None, _server("Where /v1/states keeps saved states.", "no states are saved")
    ] = None,
    states_gb: Annotated[float, _server("The most that they may take.")] = 20.0,
    max_prompt_tokens: Annotated[int, _server("Of a request.")] = 1 << 20,
    max_new_tokens: Annotated[int, _server("Of each of its texts.")] = 1 << 16,
    slots: Annotated[
        int | None, _engine("Texts generated at once.", "as many as fit, 8 on a CPU")
    ] = None,
    max_waiting: Annotated[int, _engine("Texts that may wait for a slot.")] = 256,
    cache_gb: Annotated[float, _engine("Of states of prompts' beginnings, beside the model.")] = 4,
    host_cache_gb: Annotated[float, _engine("Of more of them, in the host's memory.")] = 0,
    cache_folder: Annotated[Path | None, _engine("Where yet more of them go.", "nowhere")] = None,
    cache_folder_gb: Annotated[float, _engine("The most that they may take there.")] = 20,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
) -> None:
    """Serve a model to OpenAI's clients, and a page to talk with it.

    SIGTERM or Ctrl-C ends it when what runs has finished; a second one at once.
    """
    from xlstm7b.serve.lifecycle import bind, is_loopback
    from xlstm7b.serve.lifecycle import serve as run
    from xlstm7b.serve.limits import Limits, check_origins

    keys = _keys(api_key, api_key_file)
    origins = check_origins(listed(cors))
    _check_positive(
        max_waiting=max_waiting, max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens, slots=1 if slots is None else slots,
    )  # fmt: skip
    _check_not_negative(
        states_gb=states_gb,
        cache_gb=cache_gb,
        host_cache_gb=host_cache_gb,
        cache_folder_gb=cache_folder_gb,
        drain_seconds=drain_seconds,
    )
    for folder in (states_folder, cache_folder):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        if folder is not None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(f"{folder} cannot be read and written")
    opened = open_model(
        model, tokenizer=tokenizer, dtype=dtype, device=device, state_dtype=state_dtype
    )
    turns = opened.turns()
    bound = bind(host, port)
    from xlstm7b.generate.engine import Engine
    from xlstm7b.serve.app import create_app
    from xlstm7b.serve.logs import LOGGER, log_to_stderr
    from xlstm7b.serve.metrics import Metrics
    from xlstm7b.serve.states import StateStore
    from xlstm7b.serve.work import Service

    log_to_stderr()
    is_local = is_loopback(bound)
    if not keys and not is_local:
        LOGGER.warning(
            f"{host} is open to others, and there is no API key: whoever connects may ask"
        )
    generator = opened.load()
    engine = Engine(
        generator,
        slots=slots,
        most_waiting=max_waiting,
        cache_bytes=int(cache_gb * 1e9),
        host_cache_bytes=int(host_cache_gb * 1e9),
        cache_folder=cache_folder,
        cache_folder_bytes=int(cache_folder_gb * 1e9),
    )
    service = Service(
        engine,
        generator,
        turns,
        name or _name(model),
        int(time.time()),
        Limits(
            requests=engine.stats().slots + max_waiting + 64,  # some that need no slot
            prompt_tokens=max_prompt_tokens,
            new_tokens=max_new_tokens,
            choices=min(128, max_waiting),
        ),
        Metrics(engine),
        None
        if states_folder is None
        else StateStore(states_folder, opened.config, int(states_gb * 1e9)),
    )
    app = create_app(service, keys=keys, cors=origins, is_local=is_local)
    run(app, service, bound, drain_seconds)


def _keys(given: list[str] | None, file: Path | None) -> list[str]:
    from xlstm7b.serve.limits import check_key

    found = [("--api-key", key) for key in given or ()]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")  # editors put a byte order mark in front
        except UnicodeDecodeError:
            raise ValueError(f"{file} is no text in UTF-8") from None
        lines = [(f"{file}:{n}", line.strip()) for n, line in enumerate(text.splitlines(), 1)]
        kept = [(place, line) for place, line in lines if line and not line.startswith("#")]
        if not kept:
            raise ValueError(f"{file} holds no key")
        found += kept
    if _KEY_VARIABLE in os.environ:
        found.append((_KEY_VARIABLE, os.environ[_KEY_VARIABLE]))
    return [check_key(key, place) for place, key in found]


def _name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {number}")


def _check_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must not be negative, not {number}")
