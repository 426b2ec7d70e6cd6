"""`xlstm7b serve MODEL`: an OpenAI-compatible server.

The command is one long function: it declares every option and builds the server from them.
"""

import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from xlstm7b.cli import options
from xlstm7b.cli.loading import OpenedModel, open_adapter, open_model

if TYPE_CHECKING:
    from xlstm7b.chat_format import ChatFormat
    from xlstm7b.model.adapter import Adapter

_KEY_VARIABLE = "XLSTM7B_API_KEY"
_server = functools.partial(options.option, panel="Server")
_engine = functools.partial(options.option, panel="Engine")


def serve(
    model: options.Model,
    host: Annotated[
        str, _server("Address to listen on. 0.0.0.0 means all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, _server("Port to listen on. 0 means any free port.")] = 8000,
    name: Annotated[
        str | None, _server("Model name for clients.", default="the folder's name, or the hub id")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _server(f"API key that clients must send. Repeatable. {_KEY_VARIABLE} adds another."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _server("File with API keys, one per line. Lines starting with # are comments."),
    ] = None,
    cors: Annotated[
        str, _server("Origins whose web pages may call the server, separated by commas. * for all.")
    ] = "",
    drain_seconds: Annotated[
        float, _server("Seconds that running requests may take to finish after SIGTERM.")
    ] = 30.0,
    states_folder: Annotated[
        Path | None,
        _server("Folder for the saved states of /v1/states.", default="no saved states"),
    ] = None,
    states_gb: Annotated[float, _server("Disk limit for saved states, in GB.")] = 20.0,
    max_prompt_tokens: Annotated[int, _server("Maximum prompt tokens of a request.")] = 1_048_576,
    max_new_tokens: Annotated[int, _server("Maximum output tokens of a choice.")] = 65_536,
    slots: Annotated[
        int | None,
        _engine(
            "Number of requests that run at the same time.", default="as many as fit, 8 on a CPU"
        ),
    ] = None,
    max_waiting: Annotated[int, _engine("Maximum number of requests that wait for a slot.")] = 256,
    cache_gb: Annotated[
        float, _engine("Device memory for the prefix cache, in GB. 0 turns it off.")
    ] = 4,
    host_cache_gb: Annotated[
        float, _engine("Host memory for the prefix cache, in GB. 0 turns it off.")
    ] = 0,
    cache_folder: Annotated[
        Path | None, _engine("Folder for the on-disk prefix cache.", default="no on-disk cache")
    ] = None,
    cache_folder_gb: Annotated[
        float, _engine("Disk limit for the on-disk prefix cache, in GB.")
    ] = 20,
    adapter: Annotated[
        list[str] | None,
        options.option(
            "LoRA adapter that a request may name: a folder in PEFT's format, or a hub id. "
            "NAME=FOLDER gives it another name than the folder's. Repeatable.",
            panel="Model",
            default="none",
        ),
    ] = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
) -> None:
    """Serve a model to OpenAI clients, with a chat page.

    SIGTERM or Ctrl-C finishes running requests, then stops. A second signal stops at once.
    """
    from xlstm7b.serve.middleware import check_origins
    from xlstm7b.serve.server import bind, is_loopback, log_to_stderr
    from xlstm7b.serve.server import serve as run

    # 1. Everything that can be checked before the weights are read.
    keys = read_keys(api_key, api_key_file)
    origins = check_origins(options.listed(cors))
    _check_at_least(
        1,
        max_waiting=max_waiting,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        slots=1 if slots is None else slots,
    )
    _check_at_least(
        0,
        states_gb=states_gb,
        cache_gb=cache_gb,
        host_cache_gb=host_cache_gb,
        cache_folder_gb=cache_folder_gb,
        drain_seconds=drain_seconds,
    )
    _check_folder("--states-folder", states_folder)
    _check_folder("--cache-folder", cache_folder)
    opened = open_model(
        model, tokenizer=tokenizer, dtype=dtype, device=device, state_dtype=state_dtype
    )
    chat_format = opened.chat_format()
    adapters = read_adapters(adapter or (), opened)
    bound = bind(host, port)
    # 2. The engine and the server.
    from xlstm7b.generate import Engine, StateStore
    from xlstm7b.serve.app import create_app
    from xlstm7b.serve.engine_thread import EngineThread
    from xlstm7b.serve.handlers import Service
    from xlstm7b.serve.prometheus import Metrics
    from xlstm7b.serve.protocol import Limits
    from xlstm7b.serve.saved_states import SavedStates

    log_to_stderr()
    if not keys and not is_loopback(bound):
        logging.getLogger("xlstm7b.serve").warning(
            f"{host} can be reached by others and no API key is set: everyone can use this server"
        )
    engine = Engine(
        opened.load_model(),
        opened.tokenizer,
        slots=slots,
        state_dtype=opened.state_dtype,
        cache_bytes=int(cache_gb * 1e9),
        host_cache_bytes=int(host_cache_gb * 1e9),
        cache_folder=cache_folder,
        cache_folder_bytes=int(cache_folder_gb * 1e9),
        adapters=[one for one, _ in adapters.values()],
    )
    thread = EngineThread(engine, max_waiting)
    limits = Limits(
        requests=engine.slots + max_waiting + 64,  # some requests need no slot
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        choices=min(128, max_waiting),
    )
    states = None
    if states_folder is not None:
        store = StateStore(states_folder, opened.config, int(states_gb * 1e9), evict=False)
        states = SavedStates(store)
    service = Service(
        thread, chat_format, name or _default_name(model), limits, Metrics(thread), states, adapters
    )
    app = create_app(service, keys=keys, cors=origins, is_local=is_loopback(bound))
    run(app, service, bound, drain_seconds)


def read_keys(given: list[str] | None, file: Path | None) -> list[str]:
    """API keys from options, a file and the environment. A bad one raises a `ValueError`."""
    from xlstm7b.serve.middleware import check_key

    found = [("--api-key", key) for key in given or ()]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")  # some editors add a byte order mark
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--api-key-file: cannot read {file}: {error.strerror}") from error
        lines = [(f"{file}:{n}", line.strip()) for n, line in enumerate(text.splitlines(), 1)]
        keys = [(source, line) for source, line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{file} contains no API key")
        found += keys
    if _KEY_VARIABLE in os.environ:
        found.append((_KEY_VARIABLE, os.environ[_KEY_VARIABLE]))
    return [check_key(key, source) for source, key in found]


def read_adapters(
    given: Iterable[str], base: OpenedModel
) -> "dict[str, tuple[Adapter, ChatFormat]]":
    """The adapters of FOLDER or NAME=FOLDER, by name, with their chat formats."""
    found: dict[str, tuple[Adapter, ChatFormat]] = {}
    folders: dict[str, str] = {}
    for text in given:
        name, _, folder = text.rpartition("=") if not Path(text).is_dir() else ("", "", text)
        loaded = open_adapter(folder, base.folder)
        name = name or _default_name(folder).rpartition("/")[2]
        if ":" in name or not name.isprintable():
            raise ValueError(
                f"--adapter: {name!r} cannot be the name of an adapter, because it has a colon or "
                "a character that is not printable: use NAME=FOLDER"
            )
        if name in found:
            raise ValueError(f"--adapter: two adapters are called {name!r}: use NAME=FOLDER")
        if loaded.fingerprint in folders:
            raise ValueError(f"--adapter: {folder} is the same as {folders[loaded.fingerprint]}")
        folders[loaded.fingerprint] = folder
        found[name] = loaded, replace(base, adapter=loaded).chat_format()
    return found


def _default_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model


def _check_at_least(minimum: int, **numbers: float) -> None:
    for name, number in numbers.items():
        if not minimum <= number < float("inf"):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be at least {minimum}, not {number}")


def _check_folder(option: str, folder: Path | None) -> None:
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{option}: there is no folder {folder}; create it first")
    if folder is not None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder} is not readable and writable")
