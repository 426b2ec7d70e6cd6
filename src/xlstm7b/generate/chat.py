"""A conversation: every turn is read on top of the state, and nothing is ever read again."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from xlstm7b.files import opened_safetensors
from xlstm7b.generate.generator import Generator, Piece
from xlstm7b.generate.states import TextState
from xlstm7b.generate.texts import Completion
from xlstm7b.tokenizer import ChatTemplate

MOST_UNDONE = 8  # each keeps a state: 0.14 GB with 7B


class Turns(Protocol):
    """How what the user says is put to the model."""

    ending: str
    """What follows an answer, less white space: the model writes it when it is done."""

    def first(self, system: str | None, text: str) -> str: ...

    def later(self, text: str) -> str:
        """What is read after the end of an answer, the rest of its turn included."""

    def whole(self, messages: Sequence[Mapping[str, str]], *, to_answer: bool = True) -> str:
        """A conversation from its start; `to_answer`: and the start of an answer to it."""


class PlainTurns:
    """For a model that was taught no chat format: a dialogue as it is written in plays."""

    ending = "\nUser:"

    def first(self, system: str | None, text: str) -> str:
        opening = "" if system is None else f"{system}\n\n"
        return f"{opening}User: {text}\nAssistant:"

    def later(self, text: str) -> str:
        return f"\nUser: {text}\nAssistant:"

    def whole(self, messages: Sequence[Mapping[str, str]], *, to_answer: bool = True) -> str:
        forms = {
            "system": "{}\n\n".format,
            "user": "User: {}\n".format,
            "assistant": lambda answer: f"Assistant: {answer.strip()}\n",
        }
        turns = "".join(forms[message["role"]](message["content"]) for message in messages)
        return f"{turns}Assistant:" if to_answer else turns


class TemplateTurns:
    """By a chat template, of which only what a turn adds is read.

    That asks of the template that a turn adds to the text, and the same wherever it stands;
    `ValueError` if not.
    """

    _ANSWER = "\N{WHITE SQUARE}an answer\N{WHITE SQUARE}"  # stands for one, to be found again

    def __init__(self, template: ChatTemplate, system: str | None = None) -> None:
        self._template = template
        start, user, answer = self.first(system, "Hello"), _user("Hello"), _assistant(self._ANSWER)
        opening = [] if system is None else [_system(system)]
        twice = template.render(
            [*opening, user, _assistant("Hi"), user, answer, user], add_generation_prompt=True
        )
        once = template.render([*opening, user, answer, user], add_generation_prompt=True)
        if not once.startswith(start + self._ANSWER) or not twice.endswith(
            self._ANSWER + self.later("Hello")
        ):
            raise ValueError("the chat template does not just add to a text, turn by turn")
        closed = template.render([*opening, user, answer])
        self.ending = closed.rpartition(self._ANSWER)[2].strip()

    def first(self, system: str | None, text: str) -> str:
        opening = [] if system is None else [_system(system)]
        return self._template.render([*opening, _user(text)], add_generation_prompt=True)

    def later(self, text: str) -> str:
        whole = self._template.render(
            [_user("Hello"), _assistant(self._ANSWER), _user(text)], add_generation_prompt=True
        )
        # From the left: the user may say the same words.
        return whole.partition(self._ANSWER)[2]

    def whole(self, messages: Sequence[Mapping[str, str]], *, to_answer: bool = True) -> str:
        return self._template.render(messages, add_generation_prompt=to_answer)


def ends_of_answers(
    turns: Turns, generator: Generator
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """What ends an answer: stop strings, and ids if it is more than the model's end of text."""
    ids = generator.tokenizer.encode(turns.ending)
    # One id is a special token: it has no text to look for.
    special = (generator.config.eos_token_id, *ids) if len(ids) == 1 else None
    return (turns.ending,) if turns.ending else (), special


def less_start(text: str, read: str) -> str:
    """The text without as much of its start as `read` begins with."""
    same = 0
    for mine, other in zip(text, read, strict=False):
        if mine != other:
            break
        same += 1
    return text[same:]


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class ChatStats(NamedTuple):
    """How far a conversation is, and the speeds of its last answer."""

    exchanges: int
    tokens_read: int
    state_bytes: int
    last: Completion | None


@dataclass(frozen=True)
class _Place:
    """Where the conversation stands."""

    state: TextState | None = None
    begun: bool = False  # if not, the state may have read a text, but no turn
    overread: str = ""  # what the model read past the end of its answer: a stop string
    exchanges: int = 0
    last: Completion | None = None


class Chat:
    """A conversation with a model, under sampling settings that hold for every answer.

    A seed makes the whole conversation reproducible: its n-th answer is drawn by seed + n − 1.
    """

    def __init__(
        self,
        generator: Generator,
        turns: Turns | None = None,
        *,
        system: str | None = None,
        stop_strings: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self._generator, self._turns, self._system = generator, turns or PlainTurns(), system
        self._settings = settings
        endings, special = ends_of_answers(self._turns, generator)
        self._stops = (*stop_strings, *endings)
        if settings.get("eos_token_id") is None:
            settings["eos_token_id"] = special
        self._place, self._past = _Place(), deque[_Place](maxlen=MOST_UNDONE)

    def say(self, text: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """The answer, piece by piece. The conversation moves on with the last piece, not before."""
        place, turns, settings = self._place, self._turns, dict(self._settings)
        if place.begun:
            prompt = less_start(turns.later(text), place.overread)
        else:
            apart = "" if place.state is None else "\n"  # from the text before
            prompt = apart + turns.first(self._system, text)
        if settings.get("seed") is not None:
            settings["seed"] = (settings["seed"] + place.exchanges) % (1 << 64)
        pieces = self._generator.stream(
            prompt,
            state=place.state,
            stop_strings=self._stops,
            keep_state=True,
            should_stop=should_stop,
            **settings,
        )
        return self._follow(pieces)

    def undo(self) -> None:
        """Goes back to before the last exchange."""
        if not self._past:
            raise ValueError(f"there is nothing to undo (the last {MOST_UNDONE} exchanges can be)")
        self._place = self._past.pop()

    def clear(self) -> None:
        """Starts anew."""
        self._place = _Place()
        self._past.clear()

    def save(self, path: str | Path) -> None:
        """Writes the conversation's state, which is all there is of it."""
        place = self._place
        if place.state is None:
            raise ValueError("nothing has been said that could be saved")
        notes = {"note": place.overread, "exchanges": str(place.exchanges)} if place.begun else {}
        place.state.save(path, **notes)

    def load(self, path: str | Path) -> None:
        """Goes on from a saved state: a conversation's, or any text's, which one then begins after.

        A file with a note is a conversation's; a server's has one, too.
        """
        state = TextState.load(path, self._generator.config, device=self._generator.model.device)
        if len(state) != 1:
            raise ValueError(f"{path} holds {len(state)} texts; a conversation is one")
        with opened_safetensors(Path(path)) as file:
            notes = file.metadata()
        exchanges = int(notes.get("exchanges", 0))
        self.clear()
        self._place = _Place(state, "note" in notes, notes.get("note", ""), exchanges)

    def stats(self) -> ChatStats:
        place = self._place
        if place.state is None:
            return ChatStats(0, 0, 0, None)
        state = place.state
        return ChatStats(place.exchanges, state.tokens_seen[0], state.nbytes, place.last)

    def _follow(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.completion is not None:
                answer = piece.completion
                written = self._generator.tokenizer.decode(answer.token_ids)
                self._past.append(self._place)
                self._place = _Place(
                    answer.state,
                    True,
                    written.removeprefix(answer.text),
                    self._place.exchanges + 1,
                    answer,
                )
            yield piece
