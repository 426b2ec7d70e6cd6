"""Documents from files: every kind of file, every format, and errors that name file and line."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b.chat_format import PlainFormat
from xlstm7b.data import input_files
from xlstm7b.data.input_files import Columns, check_input_file, find_input_files, read_batches

TEXT = Columns()
QUOTES = [f"text {number}, naïve 🐿\n\t" for number in range(7)]


def write_jsonl(path: Path, records) -> Path:
    content = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
        half = content.index(b"\n") + 5  # two frames, cut inside a line
        packer = zstandard.ZstdCompressor(write_checksum=True)
        packed = [packer.compress(part) for part in (content[:half], content[half:])]
        content = b"".join(packed)
    path.write_bytes(content)
    return path


def read(path, columns=TEXT, start=0, **options):
    batches = read_batches(Path(path), columns, start, **options)
    return [found for batch in batches for found in batch.documents(columns)]


def texts(path, **options) -> list[str]:
    return ["".join(text for text, _ in segments) for _, segments in read(path, **options)]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_lines_are_read_from_any_position(tmp_path, ending, monkeypatch):
    path = write_jsonl(tmp_path / f"a.{ending}", [{"text": quote} for quote in QUOTES])
    assert texts(path) == QUOTES
    monkeypatch.setattr(input_files, "BATCH_BYTES", 50)
    for start in range(9):
        assert read(path, start=start) == [
            (position, [(QUOTES[position], True)]) for position in range(start, 7)
        ]
    batches = list(read_batches(path, TEXT))
    assert [len(batch.records) for batch in batches] == [2, 2, 2, 1]
    assert sum(batch.bytes_read for batch in batches) == path.stat().st_size
    assert [batch.first for batch in batches] == [0, 2, 4, 6]


def test_blank_lines_are_no_documents_but_count_as_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n  \n\n{"text": "b"}')
    assert read(path) == [(1, [("a", True)]), (4, [("b", True)])]
    path.write_text("")
    assert read(path) == []


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\n\ntwo ä\r\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfthree"))
    (tmp_path / "c.py").write_text("pass\n")
    assert texts(tmp_path / "a.txt") == ["one\n\ntwo ä\r\n"]
    assert texts(tmp_path / "b.txt.gz") == ["three"]
    assert texts(tmp_path / "a.txt", start=1) == []
    assert texts(tmp_path / "c.py", text_endings=(".py",)) == ["pass\n"]


def test_parquet_rows_are_read_from_any_position(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": [*range(7)], "text": QUOTES})
    parquet.write_table(table, path, row_group_size=3)
    for start in range(8):
        assert read(path, start=start) == [
            (position, [(QUOTES[position], True)]) for position in range(start, 7)
        ]
    assert sum(batch.bytes_read for batch in read_batches(path, TEXT)) == path.stat().st_size
    with pytest.raises(
        ValueError, match=r"a.parquet: the column 'body' is missing; the columns are id, te"
    ):
        read(path, Columns(text="body"))
    with pytest.raises(ValueError, match=r"a.parquet row 1: 'id' is int, not a string$"):
        read(path, Columns(text="id"))
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    parquet.write_table(pyarrow.table({"messages": messages}), path)
    assert read(path, Columns("chat")) == [(0, [("User: a\nAssistant:", False), (" b", True)])]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a.parquet is not a readable parquet file: "):
        read(path)


def test_chats_are_written_as_the_chat_command_writes_them():
    turns = PlainFormat()
    messages = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Ho"), ("user", "So?")]
    messages += [("assistant", "Yes."), ("user", "left out")]
    record = {"messages": [{"role": role, "content": content} for role, content in messages]}
    assert Columns("chat").segments(record) == [
        (turns.first_prompt("Be kind.", "Hi"), False),
        (" Ho", True),
        (turns.next_prompt("So?"), False),
        (" Yes.", True),
    ]
    without = {"messages": record["messages"][1:3]}
    first = (turns.first_prompt(None, "Hi"), False)
    assert Columns("chat").segments(without) == [first, (" Ho", True)]
    asked = {"q": "Hi", "a": "Ho"}
    assert Columns("qa", question="q", answer="a").segments(asked) == [
        (turns.first_prompt(None, "Hi"), False),
        (" Ho", True),
    ]


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=5)), max_size=6
    )
)
def test_any_order_of_turns_reads_as_one_dialogue(turns):
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    answers = [position for position, (role, _) in enumerate(turns) if role == "assistant"]
    if not answers:
        with pytest.raises(ValueError, match=r"^no message has the role 'assistant'$"):
            Columns("chat").segments(record)
        return
    segments = Columns("chat").segments(record)
    kept = turns[: answers[-1] + 1]
    whole = "\n".join(f"{role.capitalize()}: {content}" for role, content in kept)
    assert "".join(text for text, _ in segments) == whole
    assert [text for text, counts in segments if counts] == [f" {turns[a][1]}" for a in answers]


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_is_left_as_it_is(text):
    assert Columns().segments({"text": text}) == [(text, True)]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83dz \\ud83d\\ude00"}')
    assert texts(path) == ["a\ufffdz 😀"]


@pytest.mark.parametrize(
    ("line", "form", "message"),
    [
        ("{", "text", "Expecting property name enclosed in double quotes"),
        ("[1]", "text", "this is not a JSON object"),
        ("[" * 100_000, "text", "recursion"),
        ('{"txt": "", "id": 5}', "text", "the column 'text' is missing; the columns are txt, id$"),
        ('{"text": null}', "text", "'text' is NoneType, not a string$"),
        ('{"question": "a"}', "qa", "the column 'answer' is missing; the columns are question$"),
        ('{"question": "a", "answer": 5}', "qa", "'answer' is int, not a string$"),
        ('{"messages": "a"}', "chat", "the messages are str, not a list$"),
        ('{"messages": []}', "chat", "no message has the role 'assistant'$"),
        ('{"messages": ["a"]}', "chat", 'message 1 has no "role" and "content"$'),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "a"}]}',
            "chat",
            "message 2 has the role 'tool'; allowed are user, assistant, and system for "
            "the first message$",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}',
            "chat",
            "message 2 has the role 'system'; allowed are user, assistant, and system for "
            "the first message$",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', "chat", "'content' is NoneType"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line, form, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=rf"^{path} line 2: .*{message}"):
        read(path, Columns(form))


def test_mistakes_in_whole_files_name_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=rf"^{path}: 'utf-8' codec can't decode byte 0xff"):
        read(path)
    with pytest.raises(ValueError, match=rf"^{path} has no columns, which the format 'qa' needs$"):
        read(path, Columns("qa"))
    with pytest.raises(ValueError, match=r"^unknown format 'csv'; choose from text, chat, qa$"):
        Columns("csv")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}, {"body": "b"}])
    check_input_file(tmp_path / "b.jsonl", TEXT)  # it reads the first record only
    with pytest.raises(ValueError, match=r"b.jsonl line 1: the column 'body' is missing"):
        check_input_file(tmp_path / "b.jsonl", Columns(text="body"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damaged_archives_are_named(tmp_path, ending):
    records = [{"text": f"{number**9}"} for number in range(999)]
    path = write_jsonl(tmp_path / f"a.jsonl.{ending}", records)
    content = path.read_bytes()
    noisy = bytearray(content)
    noisy[len(content) // 2] ^= 255
    for damaged in (content[:-1], content[: len(content) // 2], b"no archive", noisy):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^{path}( line \d+: | is damaged: ).+"):
            read(path)


def test_files_are_found_in_order(tmp_path):
    for name in ("b/2.txt", "b/1.jsonl.gz", "a/z.jsonl", "a/c.PARQUET", "a/.hidden.txt", "a/x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "blob").touch()
    (tmp_path / "a" / "link.txt").symlink_to(tmp_path / "blob")

    def found(*inputs, endings=()):
        files = find_input_files([tmp_path / name for name in inputs], endings)
        return [str(file.relative_to(tmp_path)) for file in files]

    everything = ["a/c.PARQUET", "a/link.txt", "a/z.jsonl", "b/1.jsonl.gz", "b/2.txt"]
    assert found("") == everything
    assert found("b/2.txt", "a") == ["b/2.txt", *everything[:3]]
    assert found("a", endings=(".py",)) == ["a/c.PARQUET", "a/link.txt", "a/x.py", "a/z.jsonl"]
    with pytest.raises(ValueError, match=r"b/2.txt is given twice$"):
        found("b", "b/2.txt")
    with pytest.raises(ValueError, match=r"^there is no file or folder .*/c$"):
        found("c")
    with pytest.raises(
        ValueError, match=r"a/x.py is not .c, .txt, .jsonl \(also .gz, .zst\) or .parquet$"
    ):
        found("a/x.py", endings=(".c",))
    (tmp_path / "c").mkdir()
    with pytest.raises(
        ValueError, match=r"/c holds no .txt, .jsonl \(also .gz, .zst\) or .parquet$"
    ):
        found("c")
    with pytest.raises(ValueError, match=r"^no input is given$"):
        find_input_files([])
