"""`xlstm7b serve MODEL`: an OpenAI-compatible server.

The command is one long function: it declares every option and builds the server from them.
"""

import functools
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from xlstm7b.cli import options
from xlstm7b.cli.loading import OpenedModel, name_of, open_adapter, open_model
from xlstm7b.cli.settings import variable_of

if TYPE_CHECKING:
    from xlstm7b.chat_format import ChatFormat
    from xlstm7b.model.adapter import Adapter

_KEY_VARIABLE = variable_of("api_key")
_FILE_VARIABLE = variable_of("api_key_file")
_FOLDER_GB = 20.0  # of --states-gb and --cache-folder-gb
_server = functools.partial(options.option, panel="Server")
_engine = functools.partial(options.option, panel="Engine")


def serve(
    model: options.Model,
    config: Annotated[
        Path | None,
        _server(
            'TOML file with options, such as max_waiting = 64. The model is model = "FOLDER".',
            default="none",
        ),
    ] = None,
    host: Annotated[
        str, _server("Address to listen on. 0.0.0.0 means all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, _server("Port to listen on. 0 means any free port.")] = 8000,
    name: Annotated[
        str | None, _server("Model name for clients.", default="the folder's name, or the hub id")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _server(
            f"API key that clients must send. Repeatable. Those of {_KEY_VARIABLE} count, too.",
            default="none: everyone who can connect may use the server",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _server(
            "File with API keys, one per line. What follows # is the key's name in the log, or a "
            "comment on a line of its own. SIGHUP makes the server read it again.",
            default="none",
        ),
    ] = None,
    share_prefix_cache: Annotated[
        bool,
        _server(
            "Share the prefix cache between all API keys. By default each key has its own prefixes "
            "if there is more than one, because hits tell what others have sent.",
            "--share-prefix-cache",
        ),
    ] = False,
    cors: Annotated[
        str,
        _server(
            "Origins whose web pages may call the server, separated by commas. * for all.",
            default="none",
        ),
    ] = "",
    drain_seconds: Annotated[
        float, _server("Seconds that running requests may take to finish after SIGTERM.")
    ] = 30.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _server(
            "Least severe log lines to write. warning leaves out the lines of requests that "
            "succeed, debug adds those of libraries."
        ),
    ] = "info",
    mute_paths: Annotated[
        str,
        _server(
            "Paths without log lines unless a request is refused, separated by commas: "
            "/health,/metrics.",
            default="none",
        ),
    ] = "",
    states_folder: Annotated[
        Path | None,
        _server(
            "Folder for the saved states of /v1/states. It is created if it is missing.",
            default="no saved states",
        ),
    ] = None,
    states_gb: Annotated[
        float | None,
        _server("Disk limit for saved states, in GB. Needs --states-folder.", default="20"),
    ] = None,
    states_memory_gb: Annotated[
        float | None,
        _server(
            "Host memory for the saved states of running requests, in GB: each that continues from "
            "a state holds one, and each that will save one, too. Needs --states-folder.",
            default="a quarter of this machine's memory",
        ),
    ] = None,
    max_prompt_tokens: Annotated[int, _server("Maximum prompt tokens of a request.")] = 1_048_576,
    max_new_tokens: Annotated[
        int,
        _server(
            "Maximum output tokens of a choice. A chat without max_tokens goes on to the end of "
            "text, or to this limit."
        ),
    ] = 65_536,
    max_per_client: Annotated[
        int | None,
        _server(
            "Maximum number of requests of one client at the same time, and of the choices in "
            "them. A client is an API key, or an address if there are no keys.",
            default="three quarters of --slots and --max-waiting; no limit if there is one key, or "
            "none and only this machine can connect",
        ),
    ] = None,
    max_body_mb: Annotated[
        float, _server("Maximum size of a request body, in MiB (1,048,576 bytes).")
    ] = 4,
    max_messages: Annotated[
        int, _server("Maximum number of messages in a request, at most 65,536.")
    ] = 4096,
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
        Path | None,
        _engine(
            "Folder for the on-disk prefix cache. It is created if it is missing.",
            default="no on-disk cache",
        ),
    ] = None,
    cache_folder_gb: Annotated[
        float | None,
        _engine(
            "Disk limit for the on-disk prefix cache, in GB. Needs --cache-folder.", default="20"
        ),
    ] = None,
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
    speculate: options.Speculate = "off",
) -> None:
    """Serve a model to OpenAI clients, with a chat page.

    SIGTERM or Ctrl-C finishes running requests, then stops. A second signal stops at once. SIGHUP
    reads the file of --api-key-file again.

    Everything below can also be set by environment variables and in the file of --config. The
    variable of --max-waiting is XLSTM7B_MAX_WAITING, that of the model is XLSTM7B_MODEL, and so on;
    several values are separated by spaces. In the file it is max_waiting = 64. A flag wins over a
    variable, and a variable over the file.
    """
    from xlstm7b.generate.state import state_bytes
    from xlstm7b.serve.middleware import check_origins
    from xlstm7b.serve.protocol import MAX_CHOICES, MAX_MESSAGES, Limits
    from xlstm7b.serve.server import bind, is_loopback, log_to_stderr, reload_on_hangup
    from xlstm7b.serve.server import serve as run

    # 1. Everything that can be checked before the weights are read.
    keys = read_keys(api_key, api_key_file)
    origins = check_origins(options.listed(cors))
    muted = options.listed(mute_paths)
    for path in muted:
        if not path.startswith("/"):
            raise ValueError(f"--mute-paths: a path starts with /, as /health does, not {path!r}")
    _check_at_least(
        1,
        max_waiting=max_waiting,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_messages=max_messages,
        slots=1 if slots is None else slots,
        max_per_client=1 if max_per_client is None else max_per_client,
    )
    if states_gb is not None and states_folder is None:
        raise ValueError("--states-gb needs --states-folder, which is not given")
    if states_memory_gb is not None and states_folder is None:
        raise ValueError("--states-memory-gb needs --states-folder, which is not given")
    if cache_folder_gb is not None and cache_folder is None:
        raise ValueError("--cache-folder-gb needs --cache-folder, which is not given")
    states_gb = _FOLDER_GB if states_gb is None else states_gb
    cache_folder_gb = _FOLDER_GB if cache_folder_gb is None else cache_folder_gb
    _check_at_least(
        0,
        states_gb=states_gb,
        cache_gb=cache_gb,
        host_cache_gb=host_cache_gb,
        cache_folder_gb=cache_folder_gb,
        drain_seconds=drain_seconds,
    )
    if name is not None and (not name.strip() or not name.isprintable()):
        raise ValueError(f"--name must be printable and not empty, not {name!r}")
    if not 0 < max_body_mb <= 1024:
        raise ValueError(f"--max-body-mb must be above 0 and at most 1024, not {max_body_mb}")
    if max_messages > MAX_MESSAGES:
        raise ValueError(f"--max-messages must be at most {MAX_MESSAGES}, not {max_messages}")
    opened = open_model(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        state_dtype=state_dtype,
        speculate=speculate,
    )
    least = 2 * state_bytes(opened.config, opened.state_dtype)
    if states_memory_gb is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        states_memory_gb = max(memory / 4, least) / 1e9
    _check_at_least(least / 1e9, states_memory_gb=states_memory_gb)
    chat_format = opened.chat_format()
    shown = name_of(model) if name is None else name
    adapters = read_adapters(adapter or (), opened)
    if shown in adapters:
        raise ValueError(
            f"--adapter: {shown!r} is the name of the model too: use NAME=FOLDER, or --name"
        )
    bound = bind(host, port)
    _create_folder("--states-folder", states_folder)
    _create_folder("--cache-folder", cache_folder)
    # 2. The engine and the server.
    from xlstm7b.chat_format import PlainFormat
    from xlstm7b.checkpoint import open_checkpoint
    from xlstm7b.generate import Engine, StateStore
    from xlstm7b.serve.app import create_app
    from xlstm7b.serve.engine_thread import EngineThread
    from xlstm7b.serve.handlers import Service
    from xlstm7b.serve.middleware import ApiKeys
    from xlstm7b.serve.prometheus import Metrics
    from xlstm7b.serve.saved_states import SavedStates

    log_to_stderr(log_level)
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
        speculate=opened.load_speculation(),
        adapters=[one for one, _ in adapters.values()],
    )
    thread = EngineThread(engine, max_waiting)
    if max_per_client is None and len(keys) != 1 and (keys or not is_loopback(bound)):
        max_per_client = max(1, (engine.slots + max_waiting) * 3 // 4)
    limits = Limits(
        body_bytes=int(max_body_mb * (1 << 20)),
        messages=max_messages,
        requests=engine.slots + max_waiting + 64,  # some requests need no slot
        client_requests=max_per_client,
        states_bytes=math.ceil(states_memory_gb * 1e9),
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        choices=min(MAX_CHOICES, max_waiting),
    )
    states = None
    if states_folder is not None:
        store = StateStore(states_folder, opened.config, int(states_gb * 1e9), evict=False)
        states = SavedStates(store, open_checkpoint(opened.folder).fingerprint())
    service = Service(thread, chat_format, shown, limits, Metrics(thread, shown), states, adapters)
    accepted = ApiKeys(keys, share_prefix_cache=share_prefix_cache)
    if api_key_file is not None:
        reload_on_hangup(accepted, functools.partial(read_keys, api_key, api_key_file))
    app = create_app(
        service,
        keys=accepted,
        cors=origins,
        muted=muted,
        is_local=is_loopback(bound),
    )
    summary = {
        "config": None if config is None else str(config),
        "speculate": speculate,
        "cache_gb": cache_gb,
        "host_cache_gb": host_cache_gb,
        "cache_folder": None if cache_folder is None else str(cache_folder),
        "states_folder": None if states_folder is None else str(states_folder),
        "api_keys": len(accepted),
        "chat_template": not isinstance(chat_format, PlainFormat),
    }
    run(app, service, bound, drain_seconds, summary)


def read_keys(given: list[str] | None, file: Path | None) -> dict[str, str]:
    """API keys from options, a file and the environment, each with its name for the log.

    A bad one raises a `ValueError`, and so does an empty variable: without keys, everyone could use
    the server.
    """
    from xlstm7b.serve.middleware import check_key

    found = [(f"--api-key {n}", "--api-key", key) for n, key in enumerate(given or (), 1)]
    if file is None and os.environ.get(_FILE_VARIABLE) == "":
        raise ValueError(f"{_FILE_VARIABLE} is empty: give a path, or unset it")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")  # some editors add a byte order mark
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--api-key-file: cannot read {file}: {error.strerror}") from error
        keys = []
        for number, line in enumerate(text.splitlines(), 1):
            key, _, name = (part.strip() for part in f" {line}".partition(" #"))
            if key:
                keys.append((name or f"{file.name}:{number}", f"{file}:{number}", key))
        if not keys:
            raise ValueError(f"{file} contains no API key")
        found += keys
    if _KEY_VARIABLE in os.environ:
        several = os.environ[_KEY_VARIABLE].split() or [""]
        found += [(_KEY_VARIABLE, _KEY_VARIABLE, key) for key in several]
    return {check_key(key, source): name for name, source, key in found}


def read_adapters(
    given: Iterable[str], base: OpenedModel
) -> "dict[str, tuple[Adapter, ChatFormat]]":
    """The adapters of FOLDER or NAME=FOLDER, by name, with their chat formats."""
    found: dict[str, tuple[Adapter, ChatFormat]] = {}
    folders: dict[str, str] = {}
    for text in given:
        name, is_named, folder = text.partition("=")
        if not is_named or Path(text).is_dir():  # a folder may be called lr=0.001
            folder = text
            name = name_of(folder).rpartition("/")[2]
        elif not name.strip() or not folder:
            raise ValueError(f"--adapter: {text!r} has no name or no folder: use NAME=FOLDER")
        loaded = open_adapter(folder, base.folder, base.tokenizer)
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


def _check_at_least(minimum: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if not minimum <= number < float("inf"):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be at least {minimum:g}, not {number}")


def _create_folder(option: str, folder: Path | None) -> None:
    if folder is None:
        return
    if folder.is_file():
        raise ValueError(f"{option}: {folder} is a file, not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: cannot create {folder}: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder} is not readable and writable")
