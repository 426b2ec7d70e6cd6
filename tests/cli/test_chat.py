"""`xlstm7b chat`: through pipes and on a terminal, its commands, and Ctrl-C."""

import errno
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    Cli,
    environment,
    refused,
    save_chat_model,
    save_greeter,
    succeeded,
)

from xlstm7b.checkpoint import read_config
from xlstm7b.generate import Generator, SavedState
from xlstm7b.generate.chat import Chat

GREEDY = ("--temperature", 0)
ENDLESS = ("--min-new-tokens", 10**6, "--max-new-tokens", 10**6)


@pytest.fixture(scope="module")
def greeter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_greeter(tmp_path_factory.mktemp("greeter"))


def tokens_read(stats: str) -> list[int]:
    found = re.findall(r"tokens read +([\d,]+)", stats)
    return [int(number.replace(",", "")) for number in found]


# Through pipes


def test_chat_prints_nothing_but_answers(cli: Cli, greeter: Path) -> None:
    assert succeeded(cli("chat", greeter, *GREEDY, stdin="Hello\n\n  \nAgain")) == "Hi!\nHi!\n"
    assert succeeded(cli("chat", greeter, stdin="Hello\n/exit\nAgain\n")) == "Hi!\n"
    assert succeeded(cli("chat", greeter, stdin="")) == ""
    stopped = cli("chat", greeter, "--stop", "i", "--max-new-tokens", 9, stdin="Hello")
    assert succeeded(stopped) == "H\n"


def test_chat_is_that_of_the_library(cli: Cli, speller: Path) -> None:
    sampling = {"max_new_tokens": 9, "temperature": 2.0, "top_p": 1.0, "seed": 8}
    chat = Chat(Generator.from_pretrained(speller), system="Go.", **sampling)
    want = ["".join(output.text for output in chat.say(text)) for text in ("one", "two")]
    options = ("--system", "Go.", "--max-new-tokens", 9, "--temperature", 2, "--top-p", 1)
    out = succeeded(cli("chat", speller, *options, "--seed", 8, stdin="one\ntwo\n"))
    assert out == "".join(f"{text.lstrip()}\n" for text in want)


def test_chat_commands(cli: Cli, greeter: Path, tmp_path: Path) -> None:
    path = tmp_path / "a state"
    talk = f"a|/stats|bcd|/stats|/save {path}|/undo|/stats|/clear|/stats"
    talk += f"|/load {path}|/stats|e|/stats|/help"
    code, out, err = cli("chat", greeter, *GREEDY, stdin=talk.replace("|", "\n"))
    assert (code, out) == (0, "Hi!\n" * 3)
    # The first token, the messages and their format, " Hi!" and "\nUser:".
    one = 1 + len("User: a\nAssistant: Hi!\nUser:")
    two = one + len(" bcd\nAssistant: Hi!\nUser:")
    three = two + len(" e\nAssistant: Hi!\nUser:")
    assert tokens_read(err) == [one, two, one, 0, two, three]
    assert SavedState.load(path, read_config(greeter)).tokens_seen == [two]
    assert [int(n) for n in re.findall(r"exchanges +(\d+)", err)] == [1, 2, 1, 0, 2, 3]
    assert len(re.findall(r"^state +\d+\.\d MB$", err, re.MULTILINE)) == 6
    assert len(re.findall(r"^answering +[\d,.]+ tok/s$", err, re.MULTILINE)) == 4
    for sentence in (
        f"Saved the conversation to {path}.",
        "Undid the last exchange.",
        "Started a new conversation.",
        f"Loaded {path}.",
        "/save PATH       save the state of the conversation",
    ):
        assert sentence in err.splitlines()


class FullDisk(io.StringIO):
    """It has room for one line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


@pytest.mark.parametrize("second", ["b", "/retry"])
def test_an_answer_that_cannot_be_written_ends_the_chat(
    cli: Cli, greeter: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    code, _, err = cli("chat", greeter, *GREEDY, stdin=f"a\n{second}\nc\n")
    assert (code, err) == (2, "xlstm7b: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/undo", "there is nothing to undo (at most 8 exchanges are kept)"),
        ("/save", "/save needs a path: /save PATH"),
        ("/load ", "/load needs a path: /load PATH"),
        ("/save x", "there is nothing to save: the conversation is empty"),
        ("/save no/x", "cannot write {here}/no/x: there is no folder {here}/no"),
        ("/save text", "{here}/text exists and is no saved state: choose another file"),
        ("/load no", "there is no file no"),
        ('/load "no way"', "there is no file no way"),
        ("/load 'no way'", "there is no file no way"),
        ("/load no way", "there is no file no way"),
        ('/load "', 'there is no file "'),
        ("/load text", "text is not a safetensors file"),
        ("/retry", "there is no answer to generate again"),
        ("/set temperature", "write /set NAME VALUE, where NAME is one of: max_new_tokens, "),
        ("/set colour 3", "write /set NAME VALUE, where NAME is one of: max_new_tokens, "),
        ("/set temperature hot", "temperature must be a number, not 'hot'"),
        ("/set top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("/set top_p 2", "top_p must be above 0 and at most 1, not 2.0"),
        ("/set temperature none", "temperature must be a number, not None"),
        ("/Save x", "unknown command /Save; /help lists the commands"),
        ("/etc/passwd is a file", "unknown command /etc/passwd; /help lists the commands"),
        ("/", "unknown command /; /help lists the commands"),
    ],
)
def test_a_mistake_prints_one_sentence_and_the_chat_continues(
    cli: Cli,
    greeter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("hello")
    code, out, err = cli("chat", greeter, stdin=f"{line}\nHello\n")
    assert (code, out, len(err.splitlines())) == (0, "Hi!\n", 1)
    assert err.startswith(sentence.format(here=tmp_path))


@pytest.mark.usefixtures("no_weights")
def test_options_are_checked_before_weights_are_loaded(cli: Cli, greeter: Path) -> None:
    def sentence(*options: object) -> str:
        return refused(cli("chat", greeter, *options, stdin=""))

    assert sentence("--top-p", 2) == "top_p must be above 0 and at most 1, not 2.0"
    assert sentence("--stop", "") == "a stop string must not be empty"
    assert sentence("--dtype", "x").startswith("unknown dtype 'x'")
    assert sentence("--state-dtype", "float16").startswith("unknown dtype 'float16'")
    assert sentence("--device", "toaster").startswith("the device 'toaster' cannot be used here")
    assert refused(cli("chat", "7b")).startswith("'7b' is neither a folder nor")


def test_messages_of_several_lines(cli: Cli, greeter: Path) -> None:
    message = "one\n\n  two\n/three"
    for written in (f'"""{message}"""', f'"""\n{message}\n"""', f'  """{message} """ '):
        talk = f'{written}\n/stats\n""""""\n"""/stats"""\n'
        code, out, err = cli("chat", greeter, *GREEDY, stdin=talk)
        assert (code, out) == (0, "Hi!\n" * 2)
        assert tokens_read(err) == [1 + len(f"User: {message}\nAssistant: Hi!\nUser:")]
    sentence = refused(cli("chat", greeter, stdin='"""one\ntwo'))
    assert sentence == 'the input ends within a message: its closing """ is missing'


def test_input_that_is_not_utf8(cli: Cli, greeter: Path) -> None:
    sentence = refused(cli("chat", greeter, stdin=b"hello\n\xff\n"))
    assert sentence.startswith("stdin is not UTF-8 text: ")


def test_retry_set_and_system(cli: Cli, speller: Path) -> None:
    """As the library does it: the answer is replaced, and others follow from the new one."""
    chat = Chat(Generator.from_pretrained(speller), temperature=2.0, seed=8, max_new_tokens=9)

    def text(outputs: object) -> str:
        return "".join(output.text for output in outputs).lstrip()

    want = [text(chat.say("one")), text(chat.retry()), text(chat.retry())]
    assert len(set(want)) == 3
    chat.set_sampling(max_new_tokens=5, temperature=0.0)
    want += [text(chat.say("two")), text(chat.retry())]
    assert want[3] == want[4]
    assert chat.stats().exchanges == 2
    chat.start("Go.")
    want += [text(chat.say("one"))]
    talk = "one|/retry|/retry|/set max-new-tokens 5|/set temperature 0|two|/retry|/stats"
    talk += "|/system Go.|one|/stats|/set|/system|/retry"
    options = ("--temperature", 2, "--seed", 8, "--top-p", 1, "--max-new-tokens", 9)
    code, out, err = cli("chat", speller, *options, stdin=talk.replace("|", "\n"))
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in want))
    lines = err.splitlines()
    assert "max_new_tokens is 5 from the next answer on." in lines
    assert "temperature          0.0" in lines
    assert [int(n) for n in re.findall(r"exchanges +(\d+)", err)] == [2, 1]
    assert tokens_read(err)[1] == 1 + len("Go.\n\nUser: one\nAssistant:") + 5
    assert lines[-1] == "there is no answer to generate again"


# Templates


def test_chat_by_a_template(cli: Cli, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    talk = ("chat", folder, "--system", "Be brief.")
    code, out, err = cli(*talk, stdin="Hello\n/stats\nAgain\n/stats\n")
    assert (code, out) == (0, "Hi!\nHi!\n")
    # The first token; each marker is one token.
    once = 1 + len("_system\nBe brief._\n_user\nHello_\n_assistant\nHi!")
    assert tokens_read(err) == [once, once + len("_\n_user\nAgain_\n_assistant\nHi!")]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1].content }}", "the chat template does not just add to a text"),
        ("{{ raise_exception('no') }}", "the chat template fails: no"),
        ("{% if %}", "{folder}/chat_template.jinja: the chat template cannot be read: "),
    ],
)
def test_chat_without_a_usable_template(
    cli: Cli, tmp_path: Path, template: str, reason: str
) -> None:
    folder = save_greeter(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    code, out, err = cli("chat", folder, stdin="Hello\n")
    assert (code, out, len(err.splitlines())) == (0, "Hi!\n", 1)
    assert err.startswith(reason.format(folder=folder))
    assert err.endswith("; turns are written as User: and Assistant: instead\n")


# Ctrl-C


def test_ctrl_c_ends_the_answer_and_not_the_program(speller: Path) -> None:
    arguments = [sys.executable, "-m", "xlstm7b", "chat", speller, *ENDLESS]
    with subprocess.Popen(
        list(map(str, arguments)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as program:
        try:
            program.stdin.write(b"Hello\n")
            program.stdin.flush()
            assert program.stdout.read(20)  # the answer has started
            program.send_signal(signal.SIGINT)
            program.stdout.readline()
            out, err = program.communicate(b"/stats\n/exit\n", timeout=30)
        finally:
            program.kill()
    assert (program.returncode, out) == (0, b"")
    assert 1 + len("User: Hello\nAssistant:") < tokens_read(err.decode())[0] < 10**5


def test_a_second_ctrl_c_discards_the_answer(
    cli: Cli, greeter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Generator.stream

    def interrupted(*arguments: object, **options: object) -> object:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return stream(*arguments, **options)

    monkeypatch.setattr(Generator, "stream", interrupted)
    code, out, err = cli("chat", greeter, stdin="Hello\n/stats\n")
    assert (code, out) == (0, "\n")
    assert err.splitlines()[0] == "Discarded the answer: the conversation is as it was before."
    assert tokens_read(err) == [0]


# On a terminal


class Screen:
    """The program in a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self._terminal, theirs = pty.openpty()

        def settle() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # pytest may run with it ignored
            os.login_tty(theirs)  # so that Ctrl-C is a signal

        self.program = subprocess.Popen(
            list(map(str, (sys.executable, "-m", "xlstm7b", *arguments))),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment() | {"TERM": "dumb"},
            preexec_fn=settle,
        )
        os.close(theirs)

    def until(self, pattern: str) -> str:
        """Waits until the pattern appears; returns what was printed."""
        shown, end = "", time.monotonic() + 30
        while not re.search(pattern, shown):
            assert time.monotonic() < end, shown
            if select.select([self._terminal], [], [], 1)[0]:
                shown += os.read(self._terminal, 1000).decode(errors="replace")
        return shown

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self._terminal)


def test_chat_on_a_terminal(speller: Path) -> None:
    screen = Screen("chat", speller, *ENDLESS)
    try:
        greeting = screen.until("> ")
        for sentence in (
            f"This is {speller.name}, on cpu.",
            "It has no chat template: turns are written as User: and Assistant:.",
            "/help lists commands, Ctrl-D quits",
        ):
            assert sentence in greeting
        screen.type("Hello\n")
        screen.until(r"Hello\s+\w+")  # the answer has started
        screen.type("\x03")
        screen.until("> ")
        screen.type("/stats\n")
        read = tokens_read(screen.until(r"answering.*\s+> "))
        assert read[0] > 1 + len("User: Hello\nAssistant:")
        # Ctrl-C drops what is typed, also a message of several lines, and nothing else.
        time.sleep(0.5)  # Python's readline can miss a Ctrl-C that comes before it waits for input
        for typed in ("/clear", '"""a message\n/clear'):
            screen.type(typed)
            time.sleep(0.5)
            screen.type("\x03")
            screen.until(r"/clear\s+> ")
        time.sleep(0.5)
        screen.type("/stats\n")
        assert tokens_read(screen.until(r"answering.*\s+> ")) == read
        screen.type("\x04")
        assert screen.program.wait(timeout=20) == 0
    finally:
        screen.close()


def test_ctrl_d_quits(cli: Cli, greeter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = cli("chat", greeter)
    assert (code, out, err.splitlines()[-1]) == (0, "> \n", "/help lists commands, Ctrl-D quits")


def test_a_terminal_shows_the_model_and_whether_it_has_a_template(
    cli: Cli, greeter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, _, err = cli("chat", save_chat_model(tmp_path / "chatty"), "--device", "cpu")
    assert err.splitlines()[:-1] == ["This is chatty, on cpu."]
    _, _, err = cli("chat", greeter)
    assert err.splitlines()[1].startswith("It has no chat template: ")
