"""Text to shards: the same files for any number of processes, however often they are killed."""

import gzip
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import qwen
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from xlstm7b.chat_format import PlainFormat
from xlstm7b.data.input_files import Columns
from xlstm7b.data.prepare import adopt, prepare, read_notes
from xlstm7b.data.shards import ShardFolder, open_folder
from xlstm7b.tokenizer import ByteTokenizer, FileTokenizer, tokenizer_fingerprint

BYTES = ByteTokenizer()
EARLIER_PLAN = "6d4192d582db73710c4896865157efdbec204199b0d0da9a854e940c2a3b02bd"


def documents(folder: ShardFolder) -> list[list[int]]:
    return [
        piece.tolist()
        for shard in folder.shards
        for piece in np.split(shard.tokens, shard.ends)[:-1]
    ]


def masks(folder: ShardFolder) -> list[list[int]]:
    return [
        piece.tolist() for shard in folder.shards for piece in np.split(shard.mask, shard.ends)[:-1]
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_jsonl(path: Path, records) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def texts(tmp_path) -> Path:
    """Three files of 24 documents, and an empty one."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "c.txt").write_text("The end.")
    write_jsonl(folder / "a.jsonl", [{"text": "ä" * (number % 7)} for number in range(20)])
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n\n" for n in range(6))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "d.jsonl").touch()
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE of 300 ids; 0 is <|endoftext|>."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the line of the text, line by line, number by number"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


EXPECTED = [
    *["ä" * (number % 7) for number in range(20) if number % 7],
    *[f"line {n}" for n in range(6)],
    "The end.",
]


def test_documents_in_order_without_the_empty_ones(texts, tmp_path):
    seen = []
    folder = prepare(
        [texts], tmp_path / "out", shard_tokens=60, progress=lambda *part: seen.append(part)
    )
    assert documents(folder) == [[*BYTES.encode(text), 0] for text in EXPECTED]
    assert (folder.documents, folder.vocab_size, folder.has_mask) == (24, 320, False)
    assert folder.tokens == sum(len(text.encode()) + 1 for text in EXPECTED) == 182
    # No shard is longer than asked, and none could have taken the next document.
    lengths = [len(shard.tokens) for shard in folder.shards]
    firsts = [int(shard.ends[0]) for shard in folder.shards]
    assert lengths == [56, 55, 55, 16]
    assert all(a + b > 60 for a, b in zip(lengths, firsts[1:], strict=False))
    assert sum(count for _, count in seen) == sum(f.stat().st_size for f in texts.iterdir())
    names = {"00000.ds", "00000.ds.index", "manifest.json"}
    assert names <= content(tmp_path / "out").keys()
    assert len(content(tmp_path / "out")) == 9


def test_a_document_longer_than_a_shard_stands_alone(texts, tmp_path):
    folder = prepare([texts], tmp_path / "out", shard_tokens=1)
    assert [len(shard.ends) for shard in folder.shards] == [1] * 24


@pytest.mark.parametrize("shard_tokens", [25, 10_000])
def test_processes_change_nothing(texts, tokenizer, tmp_path, shard_tokens, monkeypatch):
    monkeypatch.setattr("xlstm7b.data.input_files.BATCH_BYTES", 20)
    for processes in (1, 3):
        options = {"processes": processes, "shard_tokens": shard_tokens}
        prepare([texts], tmp_path / f"{processes}", tokenizer, **options)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    encode = FileTokenizer(tokenizer).encode
    opened = open_folder(tmp_path / "3", tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    assert documents(opened) == [[*encode(text), 0] for text in EXPECTED]


def test_torch_is_not_loaded(texts, tmp_path):
    code = "import sys; from xlstm7b.data.prepare import prepare; prepare(sys.argv[1:2], 'out')"
    command = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)", str(texts)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, cwd=tmp_path).returncode == 0
    assert open_folder(tmp_path / "out").documents == 24


@settings(max_examples=25)
@given(data=st.lists(st.text(max_size=30), min_size=1, max_size=8), limit=st.integers(1, 40))
def test_any_texts_can_be_decoded_again(tmp_path_factory, tokenizer, data, limit):
    folder = tmp_path_factory.mktemp("any")
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in ["x", *data]])
    opened = prepare([folder], folder / "out", tokenizer, shard_tokens=limit)
    decode = FileTokenizer(tokenizer).decode
    wanted = ["x", *filter(None, data)]
    assert [decode(document) for document in documents(opened)] == wanted
    assert all(document.index(0) == len(document) - 1 for document in documents(opened))


def test_encoding_in_batches_is_encoding(tokenizer):
    quotes = ["the line", "", "naïve 🐿\n\n  \t", "<|endoftext|>", "é", "x" * 999]
    for each in (BYTES, FileTokenizer(tokenizer)):
        assert each.encode_batch(quotes) == [each.encode(text) for text in quotes]


def test_masks_of_questions_and_chats(tokenizer, tmp_path):
    write_jsonl(tmp_path / "qa.jsonl", [{"question": "1+1?", "answer": "2"}])
    turns = [("user", "Hi"), ("assistant", "Ho"), ("user", "the line?"), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}])
    asked = prepare([tmp_path / "qa.jsonl"], tmp_path / "a", columns=Columns("qa"))
    assert documents(asked) == [[*BYTES.encode("User: 1+1?\nAssistant: 2"), 0]]
    assert masks(asked) == [[*[0] * 21, 1, 1, 1]]  # " ", "2", the end
    chat = prepare([tmp_path / "chat.jsonl"], tmp_path / "b", tokenizer, columns=Columns("chat"))
    encoder = FileTokenizer(tokenizer)
    # An answer ends with the start of the user's next message, which counts in the loss too.
    parts = ["User: Hi\nAssistant:", " Ho\nUser:", " the line?\nAssistant:", " No."]
    encoded = [encoder.encode(part) for part in parts]
    assert documents(chat) == [[*encoded[0], *encoded[1], *encoded[2], *encoded[3], 0]]
    zeros_and_ones = [[index % 2] * len(ids) for index, ids in enumerate(encoded)]
    assert masks(chat) == [[*sum(zeros_and_ones, start=[]), 1]]  # noqa: RUF017 (four lists)
    assert open_folder(tmp_path / "b", verify=True).has_mask


def test_special_tokens_of_a_template_are_ids_and_those_of_a_text_are_not(tmp_path):
    tokenizer = qwen(tmp_path / "tokenizer")
    [start, end] = FileTokenizer(tokenizer / "tokenizer.json").encode("<|im_start|><|im_end|>")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "a<|im_end|>"}])
    for processes in (1, 2):
        out = tmp_path / f"{processes}"
        inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        chat, text = documents(prepare(inputs, out, tokenizer, processes=processes))
        assert [token for token in chat if token in (start, end)] == [start, end, start, end]
        assert end not in text
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_folders_of_earlier_versions_have_plain_chats(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    out = prepare([tmp_path / "a.jsonl"], tmp_path / "out").path
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["chat_template"]
    for form, template in (("text", None), ("qa", PlainFormat.template)):
        (out / "manifest.json").write_text(json.dumps({**manifest, "documents_as": form}))
        assert open_folder(out).chat_template == template


def test_text_of_an_earlier_version_is_not_prepared_again(texts, tmp_path):
    out = prepare([texts], tmp_path / "out").path
    manifest = json.loads((out / "manifest.json").read_text())
    # The plan of the version before formats were found by columns.
    assert manifest["plan"] == EARLIER_PLAN
    for name in ("chat_template", "formats", "last_answer_only"):
        del manifest[name]
    for file in manifest["files"]:
        del file["read_as"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    before = content(out)
    assert prepare([texts], out).documents == 24
    assert content(out) == before
    assert read_notes(out)["formats"] == {}


# Killed runs


def dies_at(step: int, *arguments, **options) -> bool:
    """Prepares in a process that is killed before its n-th change to a file; True if it was."""
    child = os.fork()
    if child == 0:
        left = step

        def kill(event: str, details: tuple) -> None:
            nonlocal left
            writes = event == "open" and isinstance(details[1], str) and "w" in details[1]
            if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            prepare(*arguments, **options)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.long
def test_a_run_killed_before_any_change_to_a_file_continues(texts, tmp_path):
    """Each kill is followed by a second in the resumed run, and by a third run that ends."""
    options = {"shard_tokens": 60}
    whole = prepare([texts], tmp_path / "whole", **options).path
    out, step, opened = tmp_path / "out", 0, 0
    while True:
        step += 1
        died = dies_at(step, [texts], out, **options)
        if not died:
            break
        dies_at(1 + step * 7 % 11, [texts], out, **options)
        if (
            out.exists()
            and "manifest.json" in content(out)
            and "unfinished.json" not in content(out)
        ):
            opened += 1
            assert content(out) == content(whole)
        else:
            for token_bytes in (None, 2):
                with pytest.raises(
                    ValueError, match=r"no folder|not finished|has no manifest|no documents"
                ):
                    open_folder(out, token_bytes=token_bytes)
        prepare([texts], out, **options)
        assert content(out) == content(whole)
        shutil.rmtree(out)
    assert step > 20
    assert opened < step / 2


def test_a_killed_run_continues_with_repeats_templates_and_masks(tmp_path):
    """No document is written more or less often than in a run that was not killed."""
    tokenizer = qwen(tmp_path / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('|')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chats = [
        [
            {"role": ("user", "assistant")[n % 2], "content": f"{number}|x" if n % 2 else "a"}
            for n in range(2 + number % 3 * 2)
        ]
        for number in range(9)
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": chat} for chat in chats])
    (tmp_path / "b").mkdir()
    for number in range(18):
        write_jsonl(tmp_path / "b" / f"{number:02d}.jsonl", [{"text": f"line {number}"}])
    (tmp_path / "sources.toml").write_text(
        f'[a]\npath = "{tmp_path}/a.jsonl"\nrepeat = 1.6\n'
        f'[b]\npath = "{tmp_path}/b"\nrepeat = 0.5\n'
    )
    arguments, options = [[tmp_path / "sources.toml"]], {"shard_tokens": 60}
    whole = prepare(*arguments, tmp_path / "whole", tokenizer, **options)
    assert whole.documents == int(9 * 1.6) + 9
    # Only the chats of two and three answers have an earlier answer, which is then cut.
    assert read_notes(whole.path)["last_answer_only"] == 6
    for step in range(8, 50, 6):
        assert dies_at(step, *arguments, tmp_path / "out", tokenizer, **options)
        prepare(*arguments, tmp_path / "out", tokenizer, **options)
        assert content(tmp_path / "out") == content(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


SCRIPT = """
import sys
from xlstm7b.data.prepare import prepare
if __name__ == "__main__":
    prepare(sys.argv[1:2], sys.argv[2], processes=int(sys.argv[3]), shard_tokens=20_000)
"""


@pytest.mark.long
def test_kill_9_at_random_moments(tmp_path):
    rng = random.Random(0)
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"text": "x" * rng.randrange(4000)} for _ in range(1500)]
    )
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out, whole = tmp_path / "out", tmp_path / "whole"

    def start(folder: Path) -> subprocess.Popen:
        command = [sys.executable, str(script), str(source), str(folder), "2"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    assert start(whole).wait() == 0
    written = 0
    for _ in range(3):
        process, target = start(out), written + rng.randrange(5, 25)
        while process.poll() is None and len([*out.glob("*.ds")]) < target:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.communicate(timeout=20)  # its workers hold the pipe, so they have ended too
        written = len([*out.glob("*.ds")])
        assert target <= written < 100
        with pytest.raises(ValueError, match=r"out is not finished"):
            open_folder(out, token_bytes=2)
    assert start(out).wait() == 0
    assert content(out) == content(whole)
    assert len(open_folder(out, verify=True).shards) > 100


def test_finished_shards_are_not_written_again(texts, tmp_path):
    out = tmp_path / "out"
    assert dies_at(14, [texts], out, shard_tokens=60)
    kept = out / "00000.ds"
    before = kept.stat()
    assert (out / "00000.ds.json").exists()
    (out / ".00005.ds.0123abcd").write_bytes(b"half written")
    prepare([texts], out, shard_tokens=60)
    after = kept.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    # A finished folder is not written to at all.
    listed = (out / "manifest.json").stat()
    assert prepare([texts], out, shard_tokens=60, processes=5).documents == 24
    assert (out / "manifest.json").stat().st_ino == listed.st_ino


# Mistakes


def refused(message: str, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(*arguments, **options)


def test_other_input_or_settings_do_not_continue_a_folder(texts, tokenizer, tmp_path):
    message = (
        "out was prepared from other input, with another tokenizer or with other settings: remove"
    )
    for finished in (False, True):
        out, same = tmp_path / "out", {"shard_tokens": 60}
        if finished:
            prepare([texts], out, **same)
        else:
            assert dies_at(14, [texts], out, **same)
            assert (out / "00000.ds.json").exists()
        before = content(out)
        refused(message, [texts], out, tokenizer, **same)
        refused(message, [texts], out, shard_tokens=7)
        refused(message, [texts], out, text_endings=[".txt"], **same)
        refused(message, [texts / "c.txt", texts / "a.jsonl"], out, **same)
        if finished:
            refused(message, [texts / "a.jsonl"], out, **same)
        assert content(out) == before
        shutil.rmtree(out)


def test_a_touched_file_is_the_same_file(texts, tmp_path):
    out, options = tmp_path / "out", {"shard_tokens": 60}
    assert dies_at(14, [texts], out, **options)
    kept = (out / "00000.ds").stat().st_ino
    for time_ in range(3):  # the first time unfinished, then finished
        for file in texts.iterdir():
            os.utime(file, (time_, time_))
        lines = gzip.decompress((texts / "b.jsonl.gz").read_bytes())
        (texts / "b.jsonl.gz").write_bytes(gzip.compress(lines, compresslevel=time_))
        assert prepare([texts], out, **options).documents == 24
        assert (out / "00000.ds").stat().st_ino == kept
        if time_ == 1:
            written = content(out)
    assert content(out) == written


def test_a_file_that_changed_where_it_was_read_is_refused(texts, tmp_path):
    out, options = tmp_path / "out", {"shard_tokens": 60}
    assert dies_at(14, [texts], out, **options)
    file, before = texts / "a.jsonl", content(out)
    good = file.read_text()
    file.write_text(good.replace("\\u00e4", "b", 1))
    message = "a.jsonl has changed in its first 10 records since its tokens were written: remove"
    refused(message, [texts], out, **options)
    assert content(out) == before
    file.write_text(good)
    prepare([texts], out, **options)
    for name, new in (("c.txt", b"The end!"), ("d.jsonl", b" \n"), ("a.jsonl", b"")):
        old = (texts / name).read_bytes()
        (texts / name).write_bytes(new)
        refused(rf"{name} has changed since its tokens were written", [texts], out, **options)
        (texts / name).write_bytes(old)


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_shards_are_kept_when_a_bad_line_is_corrected(texts, tmp_path, processes):
    out, options = tmp_path / "out", {"shard_tokens": 60, "processes": processes}
    file = write_jsonl(texts / "b2.jsonl", [{"text": "a"}, {"txt": "b"}, {"text": "c"}])
    refused(
        r"b2.jsonl line 2: .*correct it and run the same command again", [texts], out, **options
    )
    kept = {path.name: path.stat().st_ino for path in out.glob("*.ds")}
    assert len(kept) == 3
    write_jsonl(file, [{"text": "a"}, {"text": "b"}, {"text": "c"}, {"text": "d"}])
    prepare([texts], tmp_path / "whole", **options)
    assert prepare([texts], out, **options).documents == 28
    assert kept.items() <= {path.name: path.stat().st_ino for path in out.glob("*.ds")}.items()
    assert content(out) == content(tmp_path / "whole")


def test_a_bad_file_can_be_left_out_later(texts, tmp_path):
    out, options = tmp_path / "out", {"shard_tokens": 60}
    (texts / "b2.jsonl").write_text('{"text": "a"}\n{')
    refused("b2.jsonl line 2: ", [texts], out, **options)
    kept = (out / "00001.ds").stat().st_ino
    assert prepare([texts], out, exclude=["b2*"], **options).documents == 24
    assert (out / "00001.ds").stat().st_ino == kept


@settings(max_examples=40)
@given(
    lines=st.lists(st.sampled_from(["good", "", "{", "empty"]), min_size=1, max_size=12),
    files=st.integers(1, 3),
    limit=st.integers(1, 12),
)
def test_correcting_lines_one_by_one_ends_as_if_all_had_been_good(
    tmp_path_factory, lines, files, limit
):
    outside = tmp_path_factory.mktemp("any")
    folder = outside / "in"
    folder.mkdir()
    written = {"good": '{"text": "abc"}', "": "", "{": "{", "empty": '{"text": ""}'}
    parts = [["good", *lines[number::files]] for number in range(files)]

    def write() -> None:
        for number, part in enumerate(parts):
            (folder / f"{number}.jsonl").write_text("\n".join(written[line] for line in part))

    for number, part in enumerate(parts):
        while "{" in part:
            write()
            where = rf"{number}.jsonl line {part.index('{') + 1}:"
            refused(where, [folder], outside / "out", shard_tokens=limit)
            part[part.index("{")] = "good"
    write()
    whole = prepare([folder], outside / "whole", shard_tokens=limit)
    assert documents(whole) == [[*BYTES.encode("abc"), 0]] * sum(p.count("good") for p in parts)
    prepare([folder], outside / "out", shard_tokens=limit)
    assert content(outside / "out") == content(outside / "whole")


# Bad records


def test_bad_records_are_skipped_counted_and_named(texts, tmp_path):
    bad = ["true", "[]", '{"text": 5}', '{"a": ""}']
    (texts / "b2.jsonl").write_text("\n".join([bad[0], '{"text": "good"}', *bad[1:], ""]))
    (texts / "b3.txt").write_bytes(b"\xff")
    (texts / "b4.json").write_text('[{"text": "good"}, {"body": "a"}]')
    expected = [
        f"{texts}/b2.jsonl line 1: this is not a JSON object",
        f"{texts}/b2.jsonl line 3: this is not a JSON object",
        f"{texts}/b2.jsonl line 4: 'text' is int, not a string",
        f"{texts}/b2.jsonl line 5: the column 'text' is missing; the columns are a",
        f"{texts}/b3.txt: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        f"{texts}/b4.json item 2: the column 'text' is missing; the columns are body",
    ]
    for processes in (1, 2):
        out = tmp_path / f"{processes}"
        options = {"shard_tokens": 60, "processes": processes}
        with pytest.raises(ValueError, match="more bad records than --skip-bad 5 allows") as error:
            prepare([texts], out, skip_bad=5, **options)
        assert str(error.value).partition(" allows: ")[2] == f"{'; '.join(expected[:5])}; …"
        assert (out / "00001.ds.json").exists()
        opened = prepare([texts], out, skip_bad=6, **options)
        assert opened.documents == 26
        assert read_notes(out)["bad"] == expected
        refused("more bad records than --skip-bad 5 allows", [texts], out, skip_bad=5, **options)
        refused(r"b2.jsonl line 1", [texts], out, **options)
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_bad_records_are_counted_over_kills(texts, tmp_path):
    for number in range(4):
        (texts / f"a{number}.jsonl").write_text('{"text": "good, and long"}\n{\n' * 2)
    options = {"shard_tokens": 60, "skip_bad": 8}
    whole = content(prepare([texts], tmp_path / "whole", **options).path)
    out = tmp_path / "out"
    for step in range(5, 80, 7):
        if dies_at(step, [texts], out, **options) and len(list(out.glob("*.ds.json"))) > 2:
            refused(
                "more bad records than --skip-bad 1 allows",
                [texts],
                out,
                **{**options, "skip_bad": 1},
            )
    prepare([texts], out, **options)
    assert content(out) == whole
    assert len(read_notes(out)["bad"]) == 8


# What is read


def test_the_manifest_lists_what_was_read_and_left_out(texts, tmp_path):
    (texts / "page.html").touch()
    (texts / ".git").mkdir()
    prepare([texts], texts / "out", exclude=["d*"])
    prepare([texts], texts / "out", exclude=["d*"])  # its own output is not read
    manifest = json.loads((texts / "out" / "manifest.json").read_text())
    assert manifest["read"] == {
        ".jsonl": {"count": 1, "first": [f"{texts}/a.jsonl"]},
        ".jsonl.gz": {"count": 1, "first": [f"{texts}/b.jsonl.gz"]},
        ".txt": {"count": 1, "first": [f"{texts}/c.txt"]},
    }
    assert manifest["left_out"] == {
        "hidden": {"count": 1, "first": [f"{texts}/.git/"]},
        "excluded": {"count": 1, "first": [f"{texts}/d.jsonl"]},
        "of other types": {"count": 1, "first": [f"{texts}/page.html"]},
    }
    assert [(file["path"], file["records"]) for file in manifest["files"]] == [
        (f"{texts}/a.jsonl", 20),
        (f"{texts}/b.jsonl.gz", 12),
        (f"{texts}/c.txt", 1),
    ]


def test_special_tokens_in_a_text_are_text_unless_asked(tokenizer, tmp_path):
    quote = "one<|endoftext|>two"
    write_jsonl(tmp_path / "a.jsonl", [{"text": quote}])
    for processes in (1, 2):
        options = {"processes": processes}
        plain = prepare([tmp_path / "a.jsonl"], tmp_path / f"a{processes}", tokenizer, **options)
        [document] = documents(plain)
        assert document.count(0) == 1
        assert FileTokenizer(tokenizer).decode(document) == quote
        out = tmp_path / f"b{processes}"
        asked = prepare([tmp_path / "a.jsonl"], out, tokenizer, special_tokens=True, **options)
        assert documents(asked) == [[*FileTokenizer(tokenizer).encode(quote), 0]]
        assert documents(asked)[0].count(0) == 2
        refused("other settings", [tmp_path / "a.jsonl"], out, tokenizer, **options)


def test_special_tokens_are_refused_for_bytes_which_have_none(texts, tmp_path):
    message = "^the tokenizer bytes has no special tokens: leave --special-tokens out$"
    refused(message, [texts], tmp_path / "out", "bytes", special_tokens=True)
    assert not (tmp_path / "out").exists()


# Long documents


def test_a_long_text_is_tokenized_in_pieces_with_the_same_ids(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("xlstm7b.data.prepare._PIECE", 8)
    quotes = ["the line of the text, ä 🐿\n by  line " * 20, "", "short", "number\t" * 30]
    write_jsonl(tmp_path / "a.jsonl", [{"text": quote} for quote in quotes])
    folder = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer)
    encode = FileTokenizer(tokenizer).encode
    assert documents(folder) == [[*encode(quote), 0] for quote in quotes if quote]
    write_jsonl(tmp_path / "b.jsonl", [{"text": "ä" * 99}])  # no word to cut after
    [document] = documents(prepare([tmp_path / "b.jsonl"], tmp_path / "other", tokenizer))
    assert FileTokenizer(tokenizer).decode(document) == "ä" * 99


SCRIPT_MEMORY = """
import resource, sys
from xlstm7b.data.prepare import prepare
peaks = []
for name in ("short", "long"):
    prepare([sys.argv[1] + f"/{name}.jsonl"], sys.argv[1] + f"/{name}", sys.argv[2])
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_memory_for_a_long_line_is_a_small_multiple_of_its_length(kind, tokenizer, tmp_path):
    """The tokenizers library takes 160 bytes for each byte of a text that it gets at once."""
    for name, size in (("short", 1_000_000), ("long", 7_000_000)):
        words = "the line of words, " * (size // 19)
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": words}])
    given = "bytes" if kind == "bytes" else str(tokenizer)
    command = [sys.executable, "-c", SCRIPT_MEMORY, str(tmp_path), given]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 12 * 6_000_000


def test_a_corrected_line_is_prepared(texts, tmp_path):
    """Without a finished shard, the folder may be prepared from other input."""
    out, file = tmp_path / "out", texts / "d.jsonl"
    file.write_text(json.dumps({"text": "ok"}) + "\n{\n")
    refused(r"d.jsonl line 2", [texts], out)
    assert content(out).keys() == {"unfinished.json"}
    (out / ".00000.ds.0123abcd").write_bytes(b"left by a kill")
    file.write_text(json.dumps({"text": "ok"}) + "\n")
    prepare([texts], tmp_path / "whole")
    assert prepare([texts], out).documents == 25
    assert content(out) == content(tmp_path / "whole")


def test_an_output_with_other_files_is_refused(texts, tmp_path):
    refused(r"texts holds other files: remove it, or choose another folder$", [texts], texts)
    refused(r"c.txt exists already and is not a folder$", [texts], texts / "c.txt")
    (tmp_path / "out").mkdir()
    assert prepare([texts], tmp_path / "out").documents == 24


def test_mistakes_before_anything_is_written(texts, tokenizer, tmp_path):
    out = tmp_path / "out"
    refused("^processes must be at least 1, not 0$", [texts], out, processes=0)
    refused("^shard_tokens must be at least 1, not -5$", [texts], out, shard_tokens=-5)
    refused(r"^there is no tokenizer at nowhere$", [texts], out, "nowhere")
    refused(r"a.jsonl is not a readable tokenizer.json", [texts], out, texts / "a.jsonl")
    refused(
        r"a.jsonl line 1: the column 'body' is missing", [texts], out, columns=Columns(text="body")
    )
    (texts / "e.jsonl.gz").write_bytes(b"nothing")
    refused(r"e.jsonl.gz is damaged: Not a gzipped file", [texts], out)
    spec = json.loads(tokenizer.read_text())
    spec["added_tokens"] = []
    letters = {piece: index for index, piece in enumerate(spec["model"]["vocab"]) if index}
    spec["model"] |= {"vocab": {p: index - 1 for p, index in letters.items()}, "merges": []}
    (tmp_path / "other.json").write_text(json.dumps(spec))
    refused(
        r"other.json names no end of text, which separates documents: put a tokenizer_config.json",
        [texts],
        out,
        tmp_path / "other.json",
    )
    assert not out.exists()


def test_a_mistake_midway_leaves_no_half_written_file(texts, tmp_path):
    out = tmp_path / "out"
    write_jsonl(texts / "b2.jsonl", [{"text": "a"}, {"txt": "b"}])
    for processes in (1, 2):
        options = {"processes": processes, "shard_tokens": 60}
        refused(r"b2.jsonl line 2: the column 'text' is missing", [texts], out, **options)
        with pytest.raises(ValueError, match="not finished"):
            open_folder(out)
        assert not list(out.glob(".*"))


def test_input_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    refused(r"^the input holds no text$", [tmp_path / "a.txt"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_skipped_is_said_when_nothing_is_left(tmp_path):
    path = tmp_path / "a.jsonl"
    messages = [f"{path} line {line}: 'text' is int, not a string" for line in range(1, 7)]
    for count in (1, 6):
        path.write_text('{"text": 5}\n' * count + '{"text": ""}\n')
        with pytest.raises(ValueError, match="holds no text") as error:
            prepare([path], tmp_path / "out", skip_bad=7)
        were = "1 bad record was" if count == 1 else "6 bad records were"
        more = "; …" if count > 5 else ""
        listed = "; ".join(messages[: min(count, 5)])
        assert str(error.value) == (f"the input holds no text; {were} left out: {listed}{more}")
        assert not (tmp_path / "out").exists()


def test_only_one_process_prepares_a_folder(texts, tmp_path):
    out, errors = tmp_path / "out", []

    def again(*_) -> None:
        try:
            prepare([texts], out)
        except ValueError as error:
            errors.append(str(error))

    prepare([texts], out, progress=again)
    assert set(errors) == {f"another process is preparing {out} right now"}


def test_a_folder_and_its_tokenizer_have_one_fingerprint(tokenizer):
    assert tokenizer_fingerprint("bytes") == "bytes"
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(tokenizer.parent)
    assert len(tokenizer_fingerprint(tokenizer)) == 64


def test_the_same_tokenizer_written_in_another_way_has_the_same_fingerprint(tokenizer, tmp_path):
    content, file = json.loads(tokenizer.read_text()), tmp_path / "tokenizer.json"

    def fingerprint():
        file.write_text(json.dumps(content, indent=7))
        return tokenizer_fingerprint(file)

    content["truncation"] = {
        "max_length": 5,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["pre_tokenizer"]["use_regex"]  # older versions had no such field
    assert fingerprint() == tokenizer_fingerprint(tokenizer)
    content["model"]["merges"][:2] = reversed(content["model"]["merges"][:2])
    assert fingerprint() != tokenizer_fingerprint(tokenizer)


# datatrove


def test_the_example_with_datatrove_writes_the_same_documents(tokenizer, tmp_path, capfd):
    path = Path(__file__).parents[2] / "examples" / "prepare_with_datatrove.py"
    spec = importlib.util.spec_from_file_location("prepare_with_datatrove", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    inputs, out = tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    for name in "ab":
        write_jsonl(
            inputs / f"{name}.jsonl", [{"text": f"{name} line {n}, naïve 🐿\n\n "} for n in range(9)]
        )
    for _ in range(2):  # the second time nothing is left to do
        example.main([str(inputs), str(out), "--tokenizer", str(tokenizer), "--tasks", "3"])
        assert capfd.readouterr().out.endswith("tokens, 18 documents\n")
    theirs = open_folder(out, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), verify=True)
    ours = prepare([inputs], tmp_path / "ours", tokenizer)
    assert documents(theirs) == documents(ours)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        adopt(out, "bytes")
