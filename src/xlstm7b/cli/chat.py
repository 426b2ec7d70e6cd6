"""`xlstm7b chat MODEL`: a conversation on the terminal, or through pipes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from xlstm7b.cli import options
from xlstm7b.cli.compiling import after_compiling
from xlstm7b.cli.loading import OpenedModel, name_of, open_model
from xlstm7b.cli.options import option, sampling_options, stop_on_interrupt, to_state_target
from xlstm7b.generate.params import SamplingParams

if TYPE_CHECKING:
    import torch

    from xlstm7b.generate import RequestOutput
    from xlstm7b.generate.chat import Chat

_QUOTE = '"""'
_HELP = """\
/save PATH       save the state of the conversation
/load PATH       continue from a saved state, of a chat or of `xlstm7b generate --save-state`
/retry           generate the last answer again
/undo            undo the last exchange
/clear           start a new conversation
/system TEXT     start a new conversation with this system message; without TEXT, with none
/set NAME VALUE  change a sampling parameter, as /set temperature 0.7; /set alone prints all
/stats           print tokens read, size of the state, speeds of the last answer
/help            print this list
/exit            quit, as Ctrl-D does; Ctrl-C ends an answer, or drops what is being typed
\"\"\"              starts a message of several lines, up to the next \"\"\""""


@sampling_options(
    max_new_tokens=1024,
    temperature=0.8,
    top_p=0.95,
    without=("eos_token_id", "logprobs", "structured_outputs"),
)
def chat(
    model: options.Model,
    system: Annotated[
        str | None, option("System message at the start of the conversation.", default="none")
    ] = None,
    *,
    params: SamplingParams,
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
    speculate: options.Speculate = "off",
) -> None:
    """Talk with a model. Type /help for commands.

    Ctrl-C ends an answer, Ctrl-D quits. A message of several lines stands between two \"\"\".

    The state is kept from turn to turn, so a turn costs the same in a long conversation.

    Messages are formatted by the model's chat template, or as User: and Assistant: if it has none.
    """
    opened = open_model(
        model, tokenizer, dtype, device, state_dtype, adapter=adapter, speculate=speculate
    )
    chat_format = opened.chat_format(system)
    from xlstm7b.chat_format import answer_ends, load_chat_template
    from xlstm7b.generate.chat import Chat

    _, ends = answer_ends(chat_format, opened.tokenizer, opened.config.eos_token_id)
    params = replace(params, eos_token_id=opened.end_ids(ends))
    conversation = Chat(opened.load(), chat_format, system=system, **vars(params))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with_adapter = f" with the adapter {name_of(adapter[0])}" if adapter else ""
        _notify(f"This is {name_of(model)}{with_adapter}, on {opened.device}.")
        with suppress(ValueError):  # `chat_format` has said what is wrong with the template
            if load_chat_template(opened.template_folder) is None:
                _notify("It has no chat template: turns are written as User: and Assistant:.")
        _notify("/help lists commands, Ctrl-D quits")
    for text, is_command in _inputs(interactive):
        if is_command and text == "/exit":
            break
        try:
            if is_command:
                _run_command(conversation, text, opened)
            else:
                _answer(partial(conversation.say, text), opened.device)
        except (ValueError, OSError) as error:
            has_path = is_command and text.startswith(("/save", "/load"))
            if isinstance(error, OSError) and not has_path:  # no answer can be printed any more
                raise
            _notify(str(error))


def _inputs(interactive: bool) -> Iterator[tuple[str, bool]]:
    """Messages and commands from the terminal or from stdin, until Ctrl-D or the end of the file.

    They are stripped, and empty ones are left out. On a terminal, Ctrl-C drops what is being typed.
    """
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing keys)
    block: list[str] | None = None  # lines of a message that started with a quote
    while True:
        try:
            line = _read_line("> " if block is None else ". ", interactive)
        except KeyboardInterrupt:
            if not interactive:
                return
            print()
            block = None
            continue
        if line is None:
            break
        if block is None and not line.lstrip().startswith(_QUOTE):
            if line.strip():
                yield line.strip(), line.lstrip().startswith("/")
            continue
        if block is None:
            block, line = [], line.lstrip().removeprefix(_QUOTE)
        is_end = line.rstrip().endswith(_QUOTE)
        block.append(line.rstrip().removesuffix(_QUOTE) if is_end else line)
        if is_end:
            if text := "\n".join(block).strip():
                yield text, False
            block = None
    if interactive:
        print()  # so that the shell's prompt starts on a line of its own
    elif block is not None:
        raise ValueError(f"the input ends within a message: its closing {_QUOTE} is missing")


def _read_line(prompt: str, interactive: bool) -> str | None:
    """A line without its line break; None at the end."""
    if interactive:
        with suppress(EOFError):
            return input(prompt)
        return None
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: {error}") from error
    return line.removesuffix("\n") if line else None


def _answer(stream: "Callable[..., Iterator[RequestOutput]]", device: "torch.device") -> None:
    """Prints an answer while it is generated. Ctrl-C ends it, a second Ctrl-C discards it."""
    started = False
    try:
        with stop_on_interrupt() as interrupted:
            for output in after_compiling(stream(should_stop=interrupted), device):
                shown = output.text if started else output.text.lstrip()
                started = started or shown != ""
                print(shown, end="", flush=True)
            print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        _notify("Discarded the answer: the conversation is as it was before.")


def _without_quotes(path: str) -> str:
    """A path with spaces may be in quotes, as in a shell, and need not be."""
    is_quoted = len(path) > 2 and path[0] == path[-1] and path[0] in "\"'"
    return path[1:-1] if is_quoted else path


def _run_command(conversation: "Chat", line: str, opened: OpenedModel) -> None:
    name, _, argument = line[1:].partition(" ")
    path = Path(_without_quotes(argument.strip())).expanduser()
    if name in ("save", "load") and not argument.strip():
        raise ValueError(f"/{name} needs a path: /{name} PATH")
    match name:
        case "save":
            conversation.save(to_state_target(path), **opened.state_notes())
            _notify(f"Saved the conversation to {path}.")
        case "load":
            opened.check_state(path)
            conversation.load(path)
            _notify(f"Loaded {path}.")
        case "retry":
            _answer(conversation.retry, opened.device)
        case "system":
            conversation.start(argument.strip() or None)
            _notify("Started a new conversation.")
        case "set":
            _set(conversation, argument)
        case "undo":
            conversation.undo()
            _notify("Undid the last exchange.")
        case "clear":
            conversation.clear()
            _notify("Started a new conversation.")
        case "stats":
            _print_stats(conversation)
        case "help":
            _notify(_HELP)
        case _:
            raise ValueError(f"unknown command /{name}; /help lists the commands")


def _set(conversation: "Chat", argument: str) -> None:
    """`/set temperature 0.7`: any sampling parameter that is a number. none is for no seed."""
    kinds = {
        param.name: param.metadata["kind"]
        for param in fields(SamplingParams)
        if param.metadata["kind"] is not None and param.name != "logprobs"
    }
    if not argument.strip():
        for name in kinds:
            _notify(f"{name:<20} {getattr(conversation.params, name)}")
        return
    name, _, value = argument.strip().partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name not in kinds or not value:
        raise ValueError(f"write /set NAME VALUE, where NAME is one of: {', '.join(kinds)}")
    number: float | None = None
    if value != "none":
        is_whole = kinds[name] is Integral
        try:
            number = int(value) if is_whole else float(value)
        except ValueError:
            wanted = "a whole number" if is_whole else "a number"
            raise ValueError(f"{name} must be {wanted}, not {value!r}") from None
    conversation.set_sampling(**{name: number})
    _notify(f"{name} is {number} from the next answer on.")


def _print_stats(conversation: "Chat") -> None:
    stats = conversation.stats()
    _notify(f"exchanges    {stats.exchanges:>12,}")
    _notify(f"tokens read  {stats.tokens_read:>12,}")
    _notify(f"state        {stats.state_bytes / 1e6:>12,.1f} MB")
    if stats.last is not None:
        _notify(f"reading      {stats.last.prompt_tokens_per_second:>12,.1f} tok/s")
        _notify(f"answering    {stats.last.tokens_per_second:>12,.1f} tok/s")
        if stats.last.drafted_tokens:
            _notify(f"drafted      {stats.last.drafted_tokens:>12,} tok")
            _notify(f"accepted     {stats.last.accepted_tokens:>12,} tok")


def _notify(sentence: str) -> None:
    """Prints on stderr, so that stdout has nothing but the answers."""
    print(sentence, file=sys.stderr, flush=True)
