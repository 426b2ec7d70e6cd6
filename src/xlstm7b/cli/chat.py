"""`xlstm7b chat MODEL`: a conversation on the terminal, or through pipes."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xlstm7b.cli import options
from xlstm7b.cli.loading import open_model, stopping_on_interrupt
from xlstm7b.cli.options import check_stops, checked_settings, to_target

if TYPE_CHECKING:
    from xlstm7b.generate.chat import Chat

_HELP = """\
/save PATH  save the conversation's state
/load PATH  go on from a saved state, of a conversation or of `xlstm7b generate --save-state`
/undo       go back to before the last exchange
/clear      start anew
/stats      tokens read, size of the state, speeds of the last answer
/help       this list
/exit       leave, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(
    model: options.Model,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    min_new_tokens: options.MinNewTokens = 0,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.DType = None,
    device: options.Device = None,
    state_dtype: options.StateDType = "float32",
) -> None:
    """Talk with a model, turn by turn; /help lists what else there is to type.

    The model's state is carried from turn to turn: a long conversation costs no more per word.

    Turns are written by the model's chat template if it has one, else as User: and Assistant:.
    """
    settings = checked_settings(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    stops = check_stops(stop)
    opened = open_model(
        model, tokenizer=tokenizer, dtype=dtype, device=device, state_dtype=state_dtype
    )
    turns = opened.turns(system)
    from xlstm7b.generate.chat import Chat

    conversation = Chat(opened.load(), turns, system=system, stop_strings=stops, **settings)
    for line in _lines():
        if line == "/exit":
            break
        try:
            if line.startswith("/"):
                _obey(conversation, line)
            else:
                _answer(conversation, line)
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except (ValueError, OSError) as error:
            _tell(str(error))


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-C or Ctrl-D, or what is piped in; no empty lines."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing keys)
        _tell("/help lists commands, Ctrl-D leaves")
    with suppress(KeyboardInterrupt, EOFError):
        while True:
            line = input("> ") if interactive else sys.stdin.readline()
            if not (interactive or line):
                return
            if line.strip():
                yield line.strip()
    if interactive:
        print()  # the shell's prompt goes on a line of its own


def _answer(conversation: "Chat", text: str) -> None:
    """Prints an answer as it grows. Ctrl-C ends it; a second one drops it."""
    begun = False
    try:
        with stopping_on_interrupt() as pressed:
            for piece in conversation.say(text, should_stop=pressed):
                shown = piece.text if begun else piece.text.lstrip()
                begun = begun or shown != ""
                print(shown, end="", flush=True)
            print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        _tell("the answer is dropped, and what it was to")


def _obey(conversation: "Chat", line: str) -> None:
    name, _, argument = line[1:].partition(" ")
    path = Path(argument.strip()).expanduser()
    if name in ("save", "load") and not argument.strip():
        raise ValueError(f"/{name} needs a path: /{name} PATH")
    match name:
        case "save":
            conversation.save(to_target(path))
            _tell(f"saved {path}")
        case "load":
            conversation.load(path)
            _tell(f"the conversation goes on from {path}")
        case "undo":
            conversation.undo()
            _tell("the last exchange never was")
        case "clear":
            conversation.clear()
            _tell("the conversation starts anew")
        case "stats":
            _print_stats(conversation)
        case "help":
            _tell(_HELP)
        case _:
            raise ValueError(f"there is no command /{name}; /help lists those there are")


def _print_stats(conversation: "Chat") -> None:
    stats = conversation.stats()
    _tell(f"exchanges    {stats.exchanges:>12,}")
    _tell(f"tokens read  {stats.tokens_read:>12,}")
    _tell(f"state        {stats.state_bytes / 1e6:>12,.1f} MB")
    if stats.last is not None:
        _tell(f"reading      {stats.last.prompt_tokens_per_second:>12,.1f} tok/s")
        _tell(f"answering    {stats.last.tokens_per_second:>12,.1f} tok/s")


def _tell(sentence: str) -> None:
    """On stderr: what is piped on from stdout is the answers alone."""
    print(sentence, file=sys.stderr, flush=True)
