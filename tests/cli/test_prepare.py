"""`xlstm7b prepare`: what it prints and writes; every error is one sentence."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Cli, environment, refused, succeeded
from tokenizer_kinds import qwen

from xlstm7b.data.shards import open_folder
from xlstm7b.tokenizer import ByteTokenizer


@pytest.fixture
def quotes(tmp_path: Path) -> Path:
    path = tmp_path / "quotes.jsonl"
    records = [{"body": "To be"}, {"body": "or not"}]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_prepare_twice_then_verify(cli: Cli, quotes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        said = succeeded(cli("prepare", quotes, "-o", out, "--text-column", "body"))
        assert said.startswith(f"read: 1 .jsonl\n{out} is ready, after ")
        assert said.endswith(" s: 13 tokens, 2 documents, shards: 1\n")
    whole = f"{out} is intact: 13 tokens, 2 documents, shards: 1\n"
    assert succeeded(cli("prepare", "--verify", out)) == whole
    (out / "00000.ds").write_bytes(bytes(26))
    assert refused(cli("prepare", "--verify", out)) == (
        f"{out}/00000.ds is damaged: its sha256 is not the one in manifest.json"
    )


def test_qa_with_other_column_names(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "1+1?", "a": "2"}')
    out = tmp_path / "out"
    options = ["--format", "qa", "--question-column", "q", "--answer-column", "a"]
    said = succeeded(cli("prepare", tmp_path / "a.jsonl", "-o", out, *options, "--processes", 1))
    assert said.endswith(": 24 tokens, 1 document, shards: 1, loss masks\n")
    [shard] = open_folder(out).shards
    assert shard.tokens.tolist() == [*ByteTokenizer().encode("User: 1+1?\nAssistant: 2"), 0]
    assert shard.mask is not None
    assert shard.mask.tolist() == [*[0] * 21, 1, 1, 1]


def test_the_program_prepares_in_several_processes(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.py").write_text(f"print({number})\n")
    command = ["prepare", tmp_path, "--output", tmp_path / "out", "--as-text", ".py"]
    done = subprocess.run(
        [sys.executable, "-m", "xlstm7b", *map(str, command), "--processes", "2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": 50 tokens, 5 documents, shards: 1\n")


def test_adopting_a_folder_of_datatroves(cli: Cli, quotes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeeded(cli("prepare", quotes, "-o", out, "--text-column", "body", "--processes", 1))
    (out / "manifest.json").unlink()
    assert "has no manifest.json" in refused(cli("prepare", "--verify", out))
    adopted = f"{out} is adopted: 13 tokens, 2 documents, shards: 1\n"
    assert succeeded(cli("prepare", "--adopt", out, "--tokenizer", "bytes")) == adopted
    succeeded(cli("prepare", "--verify", out))
    said = refused(cli("prepare", "--adopt", out))
    assert said == f"{out} has a manifest.json already: check it with --verify"


def test_mistakes_write_nothing(cli: Cli, quotes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, message in (
        (
            ["-o", out, "--format", "text"],
            "quotes.jsonl line 1: the column 'text' is missing; the columns are body",
        ),
        (
            ["-o", out],
            "quotes.jsonl line 1: the columns are body, which no format has: name the columns to "
            "read, such as --text-column NAME",
        ),
        (
            ["-o", out, "--text-column", "foo"],
            "quotes.jsonl line 1: the column 'foo' is missing; the columns are body",
        ),
        (
            ["-o", out, "--text-column", "body", "--question-column", "q"],
            "name the columns of one format, not of several: the text column for text, the "
            "question column for qa",
        ),
        (
            ["-o", out, "--format", "chat", "--question-column", "q"],
            "the question column 'q' is for the format qa, not for chat",
        ),
        ([], "--output is missing: the folder to write the shards to"),
        (
            ["-o", out, "--format", "csv"],
            "unknown format 'csv'; choose from auto, text, chat, sharegpt, alpaca, qa, completion",
        ),
        (["-o", out, "--text-column", ""], "the name of the text column is empty"),
        (["-o", out, "--as-text", ""], "--as-text needs an ending, such as .py"),
        (["-o", out, "--processes", 0], "processes must be at least 1, not 0"),
        (["-o", out, "--tokenizer", "x"], "there is no tokenizer at x"),
        (
            ["-o", tmp_path, "--text-column", "body"],
            "holds other files: remove it, or choose another folder",
        ),
        (["-o", out, "--verify"], "--verify and --adopt write no --output"),
        (["--adopt", "--verify"], "--verify and --adopt cannot be given together"),
    ):
        assert refused(cli("prepare", quotes, *arguments)).endswith(message)
    missing = tmp_path / "none"
    assert refused(cli("prepare", missing, "-o", out)).endswith(f"file or folder {missing}")
    assert not out.exists()


def test_the_summary_lists_what_was_left_out(cli: Cli, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / ".git").mkdir(parents=True)
    for name in ("a.md", "b.html", "c.csv", "d.pdf", "e.doc"):
        (folder / name).write_text("text")
    (folder / "x.jsonl").write_text('{"text": "one"}\n{"text": "two"\n')
    arguments = ["prepare", folder, "-o", out, "--processes", 1, "--exclude", "d.*"]
    assert refused(cli(*arguments)).startswith(f"{folder.absolute()}/x.jsonl line 2: Expecting")
    lines = succeeded(cli(*arguments, "--skip-bad", 1)).splitlines()
    assert lines[:4] == [
        "read: 1 .md, 1 .jsonl",
        f"left out, of other types: 3 ({folder}/b.html, {folder}/c.csv, {folder}/e.doc)",
        f"left out, hidden: 1 ({folder}/.git/)",
        f"left out, excluded: 1 ({folder}/d.pdf)",
    ]
    assert lines[4] == f"bad records left out: 1, all listed in {out}/manifest.json"
    assert lines[5].startswith(f"  {folder}/x.jsonl line 2: Expecting ',' delimiter")
    assert lines[6].endswith(": 9 tokens, 2 documents, shards: 1")
    said = succeeded(cli("prepare", folder, "-o", tmp_path / "b", "--include", "*.md"))
    assert said.startswith("read: 1 .md\nleft out, not included: 5 (")
    assert refused(cli("prepare", folder, "-o", out, "--exclude", "*.nd")) == (
        "the pattern '*.nd' matches no file or folder of the input"
    )


def test_prepare_says_which_formats_it_found(cli: Cli, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"text": "no"}\n')
    (folder / "b.jsonl").write_text('{"instruction": "Go.", "output": "So.", "text": "x"}\n')
    (folder / "c.md").write_text("text")
    prepare = ["prepare", folder, "-o", out, "--processes", 1]
    assert refused(cli(*prepare)).startswith(
        f"{folder}/a.jsonl line 2: the column 'question' is missing; the columns are text ("
    )
    lines = succeeded(cli(*prepare, "--skip-bad", 1)).splitlines()
    assert lines[:6] == [
        "read: 2 .jsonl, 1 .md",
        f"format qa (question, answer): 1 ({folder}/a.jsonl)",
        f"format alpaca (instruction, output): 1 ({folder}/b.jsonl)",
        "  the records also have text (text): choose with --format",
        f"format text (text): 1 ({folder}/c.md)",
        "chats are written as User: and Assistant: lines",
    ]
    assert lines[6] == f"bad records left out: 1, all listed in {out}/manifest.json"
    assert lines[-1].endswith(", 3 documents, shards: 1, loss masks")


def test_preference_pairs_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    said = refused(cli("prepare", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--skip-bad", 9))
    assert said.startswith(
        f"{tmp_path}/a.jsonl: these are preference pairs (chosen, rejected), for"
    )
    assert said.endswith("--question-column prompt --answer-column chosen if they are texts")
    assert not (tmp_path / "out").exists()


def test_prepare_says_what_a_template_cannot_do(cli: Cli, tmp_path: Path) -> None:
    tokenizer = qwen(tmp_path / "tokenizer")
    talk = [{"role": ("user", "assistant")[n % 2], "content": "a|b"} for n in range(4)]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n")
    turn = "<|im_start|>{{ m.role }}\n{{ m.content.split('|')[-1] }}<|im_end|>\n"
    whole = turn.replace(".split('|')[-1]", "")
    start = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    cases = {
        f"{{% for m in messages %}}{whole}{{% endfor %}}{start}": [],
        f"{{% for m in messages %}}{{% if loop.last %}}{whole}{{% else %}}{turn}{{% endif %}}"
        f"{{% endfor %}}{start}": [
            "chats of which only the last answer counts in the loss: 1 (the chat template writes "
            "their earlier turns differently once a turn follows)"
        ],
        f"{{{{ messages | length }}}}{{% for m in messages %}}{whole}{{% endfor %}}{start}": [
            "  the chat template does not just add to a text with each turn, so a chat cannot "
            "continue from a saved state: `chat` and `serve` will write User: and Assistant: lines "
            "instead",
            "chats of which only the last answer counts in the loss: 1 (the chat template writes "
            "their earlier turns differently once a turn follows)",
        ],
    }
    for number, (template, lines) in enumerate(cases.items()):
        (tokenizer / "chat_template.jinja").write_text(template)
        out = tmp_path / f"{number}"
        said = cli("prepare", tmp_path / "a.jsonl", "-o", out, "--tokenizer", tokenizer)
        first, last = "chats are written with the tokenizer's template", f"{out} is ready"
        assert succeeded(said).split(f"{first}\n")[1].split(last)[0].splitlines() == lines


WAITING = """
import time
from xlstm7b.cli import main
from xlstm7b.data import prepare

def wait(output, documents, *_):
    next(documents)
    print("waiting", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    prepare._write = wait
    main()
"""


def start(*command: object) -> "subprocess.Popen[str]":
    """In a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest may ignore it
    )


@pytest.mark.parametrize("presses", [1, 3])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_a_warning(
    sent: signal.Signals, presses: int, cli: Cli, quotes: Path, tmp_path: Path
) -> None:
    """Also a Ctrl-C that is pressed again while it ends."""
    (tmp_path / "waiting.py").write_text(WAITING)
    command = ["prepare", quotes, "-o", tmp_path / "out", "--text-column", "body"]
    with start(tmp_path / "waiting.py", *command, "--processes", 2) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(sent)
        for _ in range(1, presses):
            time.sleep(0.01)
            program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
    assert (program.returncode, said.strip()) == (128 + sent, "")
    assert "13 tokens" in succeeded(cli(*command))


STARTING = """
import multiprocessing.popen_spawn_posix as spawn
import os
import signal
import time
from xlstm7b.cli import main

def launch(self, process):
    ordinary(self, process)
    time.sleep(0.1)  # the worker imports its modules
    os.killpg(0, signal.SIGINT)
    if PRESSES == 2:
        os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    ordinary, spawn.Popen._launch = spawn.Popen._launch, launch
    main()
"""


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_a_worker_starts(presses: int, quotes: Path, tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(f"PRESSES = {presses}\n{STARTING}")
    command = ["prepare", quotes, "-o", tmp_path / "out", "--text-column", "body"]
    with start(tmp_path / "starting.py", *command, "--processes", 2) as program:
        said = program.communicate(timeout=20)  # its workers hold the pipes, so they have ended too
    assert (program.returncode, said) == (130, ("", ""))


def test_a_dead_worker_is_named(quotes: Path, tmp_path: Path) -> None:
    script = STARTING.replace("os.killpg(0, signal.SIGINT)", "os.kill(self.pid, signal.SIGKILL)")
    (tmp_path / "starting.py").write_text(f"PRESSES = 1\n{script}")
    command = ["prepare", quotes, "-o", tmp_path / "out", "--text-column", "body"]
    with start(tmp_path / "starting.py", *command, "--processes", 2) as program:
        _, said = program.communicate(timeout=20)
    message = "xlstm7b: a worker process died, perhaps because memory ran out\n"
    assert (program.returncode, said) == (2, message)
