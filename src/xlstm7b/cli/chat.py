"""`xlstm7b chat MODEL`: a conversation on the terminal, or through pipes."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from xlstm7b.cli import options
from xlstm7b.cli.loading import open_model
from xlstm7b.cli.options import option, sampling_options, stop_on_interrupt, to_target
from xlstm7b.generate.params import SamplingParams

if TYPE_CHECKING:
    from xlstm7b.generate.chat import Chat

_HELP = """\
/save PATH  save the state of the conversation
/load PATH  continue from a saved state, of a conversation or of `xlstm7b generate --save-state`
/undo       undo the last exchange
/clear      start a new conversation
/stats      print tokens read, size of the state, speeds of the last answer
/help       print this list
/exit       quit, as Ctrl-D does; Ctrl-C ends an answer"""


@sampling_options(
    max_new_tokens=1024,
    temperature=0.8,
    top_p=0.95,
    without=("eos_token_id", "logprobs", "structured_outputs"),
)
def chat(
    model: options.Model,
    system: Annotated[
        str | None, option("System message at the start of the conversation.")
    ] = None,
    *,
    params: SamplingParams,
    adapter: options.Adapter = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
) -> None:
    """Talk with a model. Type /help for commands.

    The state is kept from turn to turn, so a turn costs the same in a long conversation.

    Messages are formatted by the model's chat template, or as User: and Assistant: if it has none.
    """
    opened = open_model(model, tokenizer, dtype, device, state_dtype, adapter=adapter)
    chat_format = opened.chat_format(system)
    from xlstm7b.generate.chat import Chat

    conversation = Chat(opened.load(), chat_format, system=system, **vars(params))
    for line in _lines():
        if line == "/exit":
            break
        try:
            if line.startswith("/"):
                _run_command(conversation, line)
            else:
                _answer(conversation, line)
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except (ValueError, OSError) as error:
            _notify(str(error))


def _lines() -> Iterator[str]:
    """Lines from the terminal or from stdin, stripped, without empty ones, until Ctrl-C or EOF."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing keys)
        _notify("/help lists commands, Ctrl-D quits")
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            line = input("> ") if interactive else sys.stdin.readline()
            if not (interactive or line):
                return
            if line.strip():
                yield line.strip()
    if interactive:
        print()  # so that the shell's prompt starts on a line of its own


def _answer(conversation: "Chat", text: str) -> None:
    """Prints an answer while it is generated. Ctrl-C ends it, a second Ctrl-C discards it."""
    started = False
    try:
        with stop_on_interrupt() as interrupted:
            for output in conversation.say(text, should_stop=interrupted):
                shown = output.text if started else output.text.lstrip()
                started = started or shown != ""
                print(shown, end="", flush=True)
            print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        _notify("Discarded the answer and the message before it.")


def _run_command(conversation: "Chat", line: str) -> None:
    name, _, argument = line[1:].partition(" ")
    path = Path(argument.strip()).expanduser()
    if name in ("save", "load") and not argument.strip():
        raise ValueError(f"/{name} needs a path: /{name} PATH")
    match name:
        case "save":
            conversation.save(to_target(path))
            _notify(f"Saved the conversation to {path}.")
        case "load":
            conversation.load(path)
            _notify(f"Loaded {path}.")
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


def _print_stats(conversation: "Chat") -> None:
    stats = conversation.stats()
    _notify(f"exchanges    {stats.exchanges:>12,}")
    _notify(f"tokens read  {stats.tokens_read:>12,}")
    _notify(f"state        {stats.state_bytes / 1e6:>12,.1f} MB")
    if stats.last is not None:
        _notify(f"reading      {stats.last.prompt_tokens_per_second:>12,.1f} tok/s")
        _notify(f"answering    {stats.last.tokens_per_second:>12,.1f} tok/s")


def _notify(sentence: str) -> None:
    """Prints on stderr, so that stdout has nothing but the answers."""
    print(sentence, file=sys.stderr, flush=True)
