"""Documents from files: every kind of file, every format, and errors that name file and line."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm7b.chat_format import ChatTemplate, PlainFormat
from xlstm7b.data import input_files
from xlstm7b.data.input_files import (
    FORMATS,
    Columns,
    check_input_file,
    detect_columns,
    find_input_files,
    read_batches,
)
from xlstm7b.data.sources import find_sources

TEXT = Columns()
PLAIN = ChatTemplate(PlainFormat.template, {})
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
    return [(at, found.segments) for batch in batches for at, found in batch.documents(PLAIN)]


def segments_of(columns, record):
    return columns.document(record, PLAIN).segments


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
    assert segments_of(Columns("chat"), record) == [
        (turns.first_prompt("Be kind.", "Hi"), False),
        (" Ho\nUser:", True),
        (turns.next_prompt("So?").removeprefix("\nUser:"), False),
        (" Yes.", True),
    ]
    without = {"messages": record["messages"][1:3]}
    first = (turns.first_prompt(None, "Hi"), False)
    assert segments_of(Columns("chat"), without) == [first, (" Ho", True)]
    asked = {"q": "Hi", "a": "Ho"}
    assert segments_of(Columns("qa", question="q", answer="a"), asked) == [
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
            segments_of(Columns("chat"), record)
        return
    segments = segments_of(Columns("chat"), record)
    kept = [
        (role, content.strip() if role == "assistant" else content)
        for role, content in turns[: answers[-1] + 1]
    ]
    whole = "\n".join(f"{role.capitalize()}: {content}" for role, content in kept)
    assert "".join(text for text, _ in segments) == whole
    # Each answer counts, and so does its end: the start of the user's next message.
    ends = ["\nUser:" if kept[a + 1 : a + 2] and kept[a + 1][0] == "user" else "" for a in answers]
    counted = [f" {kept[a][1]}{end}" for a, end in zip(answers, ends, strict=True)]
    assert [text for text, counts in segments if counts] == counted


@given(turns=st.lists(st.tuples(st.text(" \n\ta", max_size=5), st.text(" \n\ta", max_size=5))))
def test_training_and_generation_write_the_same_text(turns):
    """The prompt for the next answer starts with the text that was trained on."""
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    question, plain = {"role": "user", "content": "a"}, PlainFormat()
    for number in range(2, len(messages) + 1, 2):
        segments = segments_of(Columns("chat"), {"messages": messages[:number]})
        trained = "".join(text for text, _ in segments)
        read = plain.render([*messages[:number], question])
        assert read == trained + plain.next_prompt("a")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "txt.gz"])
def test_utf16_is_read_if_it_begins_with_a_byte_order_mark(ending, encoding, tmp_path):
    texts = ["naïve 🐿\n\t\r\n" * 50_000] if "txt" in ending else QUOTES * 100
    records = [{"text": text} for text in texts]
    content = texts[0]
    if ending == "json":
        content = json.dumps(records, ensure_ascii=False)
    elif ending == "jsonl":
        content = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in records)
    path, encoded = tmp_path / f"a.{ending}", f"\ufeff{content}".encode(encoding)
    pack = gzip.compress if ending.endswith("gz") else bytes
    path.write_bytes(pack(encoded))
    found = [
        document.segments for batch in read_batches(path, TEXT) for _, document in batch.documents()
    ]
    assert found == [[(text, True)] for text in texts]
    path.write_bytes(pack(encoded[:-3] + b"\x00\xd8\xd8\x00\x00"))
    with pytest.raises(ValueError, match=rf"^{path}.*(is damaged: 'utf-16|codec can't decode)"):
        list(read_batches(path, TEXT))


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_is_left_as_it_is(text):
    assert segments_of(Columns(), {"text": text}) == [(text, True)]


HALF = "a\ud83dz"


@pytest.mark.parametrize(
    ("form", "record", "name"),
    [
        ("text", {"text": HALF}, "text"),
        ("completion", {"prompt": "a", "completion": HALF}, "completion"),
        ("alpaca", {"instruction": "a", "input": HALF, "output": "b"}, "input"),
        ("qa", {"question": "a", "answer": HALF}, "answer"),
        ("chat", {"messages": [{"role": "user", "content": HALF}]}, "content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            "text",
        ),
        ("sharegpt", {"conversations": [{"from": "human", "value": HALF}]}, "value"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_half_a_surrogate_pair_is_a_bad_record(tmp_path, form, record, name, ending):
    path = tmp_path / f"a.{ending}"
    path.write_text(json.dumps(record if ending == "jsonl" else [record]))
    where = "line" if ending == "jsonl" else "item"
    message = rf"a.{ending} {where} 1: '{name}' is not valid Unicode: '.ud83d' at character 1$"
    with pytest.raises(ValueError, match=message):
        read(path, Columns(form))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}')
    assert texts(path) == ["😀"]


def test_a_row_that_is_not_utf8_is_a_bad_record(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    values = pyarrow.array([b"a", b"\xed\xa0\xbd", b"c"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, values.buffers())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    [batch] = read_batches(tmp_path / "a.parquet", TEXT)
    (_, first), (_, bad), (_, last) = batch.parse()
    assert (first.segments, last.segments) == ([("a", True)], [("c", True)])
    assert "a.parquet row 2: 'utf-8' codec can't decode" in str(bad)


def test_a_pipe_is_refused(tmp_path):
    for name in ("a.txt", "a.toml"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"/{name} is not a regular file$"):
            find_sources([tmp_path / name], Columns("auto"))
    (tmp_path / "text").write_text("a")
    (tmp_path / "link.txt").symlink_to("text")
    assert find_input_files([tmp_path / "link.txt"]).files == [tmp_path / "link.txt"]


@pytest.mark.parametrize(
    ("line", "form", "message"),
    [
        ("{", "text", "Expecting property name enclosed in double quotes"),
        ('{"text": "open', "text", "Unterminated string starting at"),
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
    with pytest.raises(ValueError, match=r"^unknown format 'csv'; choose from auto, text, chat"):
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
        files = find_input_files([tmp_path / name for name in inputs], endings).files
        return [str(file.relative_to(tmp_path)) for file in files]

    everything = ["a/c.PARQUET", "a/link.txt", "a/z.jsonl", "b/1.jsonl.gz", "b/2.txt"]
    assert found("") == everything
    assert found("b/2.txt", "a") == ["b/2.txt", *everything[:3]]
    assert found("a", endings=(".py",)) == ["a/c.PARQUET", "a/link.txt", "a/x.py", "a/z.jsonl"]
    with pytest.raises(ValueError, match=r"b/2.txt is given twice$"):
        found("b", "b/2.txt")
    with pytest.raises(ValueError, match=r"^there is no file or folder .*/c$"):
        found("c")
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(ValueError, match=r"^the path '.*/\\udcff.txt' is not UTF-8: "):
        found("bytes")
    with pytest.raises(
        ValueError, match=r"a/x.py is not .c, .txt, .md, .jsonl, .ndjson, .json \(also"
    ):
        found("a/x.py", endings=(".c",))
    (tmp_path / "a" / "y.F90.gz").touch()
    assert found("a", endings=(".F90", ".Py"))[2:4] == ["a/x.py", "a/y.F90.gz"]
    for inputs, endings in ((("a",), (".py", ".c")), (("b",), (".py",))):
        message = rf"^no file of the input ends in '{endings[-1]}', which --as-text names$"
        with pytest.raises(ValueError, match=message):
            found(*inputs, endings=endings)
    (tmp_path / "c").mkdir()
    with pytest.raises(
        ValueError,
        match=r"/c holds no .txt, .md, .jsonl, .ndjson, .json \(also .gz, .zst\) or .parquet$",
    ):
        found("c")
    with pytest.raises(ValueError, match=r"^no input is given$"):
        find_input_files([])


def test_what_a_folder_holds_is_read_or_listed(tmp_path):
    folder = tmp_path / "in"
    names = (
        "a.json b.JSON.GZ c.md c.ndjson.zst d.html e.csv .hidden.txt .git/x.txt "
        "sub/.y/x.txt sub/f.txt out/manifest.json"
    )
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "g.txt").touch()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "again").symlink_to(tmp_path / "elsewhere")
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "nowhere.txt").symlink_to(tmp_path / "nothing")
    (folder / os.fsdecode(b"\xff.csv")).touch()

    found = find_input_files([folder], output=folder / "out")
    assert [str(file.relative_to(folder)) for file in found.files] == [
        "a.json", "again/g.txt", "b.JSON.GZ", "c.md", "c.ndjson.zst", "sub/f.txt"
    ]  # fmt: skip
    listed = {
        reason: [path.removeprefix(f"{folder}/") for path in paths]
        for reason, paths in found.left_out.items()
    }
    assert listed == {
        "hidden": [".git/", ".hidden.txt", "sub/.y/"],
        "the output folder": ["out/"],
        "of other types": ["d.html", "e.csv", r"\udcff.csv"],
        "broken links, or not files": ["nowhere.txt"],
        "links to a folder that is read already": ["linked/", "sub/loop/"],
    }
    assert str(found).splitlines() == [
        "read: 2 .txt, 1 .json, 1 .JSON.GZ, 1 .md, 1 .ndjson.zst",
        f"left out, hidden: 3 ({folder}/.git/, {folder}/.hidden.txt, {folder}/sub/.y/)",
        f"left out, of other types: 3 ({folder}/d.html, {folder}/e.csv, {folder}/\\udcff.csv)",
        "left out, links to a folder that is read already: "
        f"2 ({folder}/linked/, {folder}/sub/loop/)",
        f"left out, the output folder: 1 ({folder}/out/)",
        f"left out, broken links, or not files: 1 ({folder}/nowhere.txt)",
    ]
    chats = find_input_files([folder], columns=Columns("chat"), output=folder / "out")
    assert [file.name for file in chats.files] == ["a.json", "b.JSON.GZ", "c.ndjson.zst"]
    assert len(chats.left_out["text, which has no columns for the format chat"]) == 3


def test_patterns_choose_files_and_folders(tmp_path, monkeypatch):
    for name in ("train/a.jsonl", "train/b.txt", "test/a.jsonl", "deep/test/c.jsonl", "d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def found(*inputs, **patterns):
        files = find_input_files(inputs, **patterns).files
        return [str(file.relative_to(tmp_path)) for file in files]

    assert found(".", include=["*.jsonl"]) == ["deep/test/c.jsonl", "test/a.jsonl", "train/a.jsonl"]
    assert found(".", include=["train"]) == ["train/a.jsonl", "train/b.txt"]
    assert found(".", include=["deep/test"]) == ["deep/test/c.jsonl"]
    assert found(".", exclude=["test/"]) == ["d.txt", "train/a.jsonl", "train/b.txt"]
    assert found(".", exclude=["*/test"]) == ["d.txt", "test/a.jsonl", *found("train")]
    assert found("train", exclude=["train/b.txt"]) == ["train/a.jsonl"]
    assert found("d.txt", "train", exclude=["d.*", "b.*"]) == ["train/a.jsonl"]
    assert found(".", include=["a.*", "b.*"], exclude=["test"]) == ["train/a.jsonl", "train/b.txt"]
    left_out = find_input_files(["."], include=["*.txt"], exclude=["test/*"]).left_out
    assert left_out == {
        "not included": ["deep/test/c.jsonl", "train/a.jsonl"],
        "excluded": ["test/a.jsonl"],
    }
    for patterns, message in (
        ({"exclude": ["tset"]}, r"^the pattern 'tset' matches no file or folder of the input$"),
        ({"include": ["d*", "x"]}, r"^the pattern 'x' matches no file"),
        ({"exclude": ["*"]}, r"^\. holds no .txt.* or .parquet that the patterns choose$"),
    ):
        with pytest.raises(ValueError, match=message):
            found(".", **patterns)
    with pytest.raises(ValueError, match=r"^all input is left out$"):
        found("d.txt", exclude=["d.txt"])


@pytest.mark.parametrize("ending", ["json", "json.gz", "json.zst"])
def test_json_files_hold_lines_or_an_array(tmp_path, ending):
    records = [{"text": quote, "id": 5} for quote in QUOTES]
    lines = write_jsonl(tmp_path / f"a.{ending}", records)
    assert texts(lines) == QUOTES
    path = tmp_path / "array.json"
    for form in ({}, {"indent": 2}, {"separators": (",", ":")}):
        path.write_text(f"\ufeff \n{json.dumps(records, **form)}\n ")
        assert texts(path) == QUOTES
        assert texts(path, start=5) == QUOTES[5:]
    packed = tmp_path / "array.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert texts(packed) == QUOTES
    assert sum(b.bytes_read for b in read_batches(packed, TEXT)) == packed.stat().st_size
    for empty in ("[]", " [ \n] ", "", "\n"):
        path.write_text(empty)
        assert texts(path) == []


@settings(max_examples=40)
@given(
    records=st.lists(
        st.dictionaries(st.just("text"), st.text(max_size=20)) | st.integers() | st.booleans(),
        max_size=8,
    ),
    indent=st.sampled_from([None, 0, 3]),
    chunk=st.integers(1, 60),
    escaped=st.booleans(),
)
def test_any_array_is_read_item_by_item_and_never_cut_short(
    tmp_path_factory, records, indent, chunk, escaped
):
    path = tmp_path_factory.mktemp("array") / "a.json"
    content = json.dumps(records, indent=indent, ensure_ascii=escaped).encode(errors="replace")
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_files, "BATCH_BYTES", chunk)
        batches = list(read_batches(path, TEXT))
        assert [item for batch in batches for item in batch.records] == json.loads(content)
        for end in range(content.index(b"[") + 1, len(content)):
            path.write_bytes(content[:end])
            with pytest.raises(ValueError, match=rf"^{path} item \d+: "):
                list(read_batches(path, TEXT))


def test_broken_arrays_are_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    good = '{"text": "a"}'
    for content, message in (
        (f"[{good}, {{]", "item 2: Expecting property name .*character 2 of the item"),
        (f"[{good}, {{'", "item 2: Expecting property name .*character 2 of the item"),
        (f'[{good}, {{"text": "a\nb"}}]', "item 2: Invalid control character .character 12 of the"),
        (f'[{good}, {{"text": "a', "item 2: the file ends before its JSON array does$"),
        (f'[{good}, {{"text": \n', "item 2: the file ends before its JSON array does$"),
        (f"[{good}, ", "item 2: the file ends before its JSON array does$"),
        (f"[{good}", "item 1: the file ends before its JSON array does$"),
        (f"[{good} {good}]", r"item 1: Expecting ',' or '\]'"),
        (f"[{good},]", "item 2: Expecting value"),
        (f"[{good}][{good}]", "item 2: there is something after the array"),
        (f"[{good}, [1]]", "item 2: this is not a JSON object"),
        ("[" * 100_000, "item 1: maximum recursion depth exceeded"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"^{path} {message}"):
            read(path)
    path.write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(ValueError, match=rf"^{path} item 1: 'utf-8' codec can't decode byte 0xff"):
        read(path)
    path.write_text("{\n" + '"text": "a"}')
    with pytest.raises(ValueError, match=rf"^{path} line 1: Expecting property name"):
        read(path)
    # A broken item in a long file is found before the file is read to its end.
    monkeypatch.setattr(input_files, "BATCH_BYTES", 100)
    path.write_text(f"[{good}, {{text: 'a'}}, {', '.join([good] * 1000)}]")
    with path.open("rb") as file, pytest.raises(ValueError, match="item 2: Expecting property"):
        list(input_files._items(path, file))


@pytest.mark.parametrize("first", ["", '"id": 5,', '"id": ', '"id"', '"id": 5'])
def test_an_object_on_several_lines_is_named_with_the_two_forms_that_are_read(tmp_path, first):
    path = tmp_path / "a.json"
    path.write_text(f"{{{first}\n")
    message = (
        rf"^{path} line 1: Expecting .*; the line ends before its JSON object: write each object "
        r"on one line, or all objects as one JSON array in a \.json file$"
    )
    with pytest.raises(ValueError, match=message):
        read(path)
    path.write_text('{"text": "a"} {"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"^{path} line 1: Extra data: [^;]*$"):
        read(path)


def test_records_that_are_too_long_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(input_files, "BATCH_BYTES", 10)
    long = '{"text": "' + "a" * 60 + '"}'
    for name, content, where in (
        ("a.jsonl", f'{{"text": "a"}}\n{long}', " line 2"),
        ("a.json", f'[{{"text": "a"}}, {long}]', " item 2"),
        ("a.txt", long, ""),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}{where}: more than .* bytes are too many"):
            read(tmp_path / name)


# Formats

ASKED = [("User: a\nAssistant:", False), (" b", True)]
RECORDS = {
    "text (text)": ({"text": "a"}, [("a", True)]),
    "chat (messages)": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ASKED,
    ),
    "sharegpt (conversations)": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        ASKED,
    ),
    "alpaca (instruction, output)": ({"instruction": "a", "input": "", "output": "b"}, ASKED),
    "qa (question, answer)": ({"question": "a", "answer": "b"}, ASKED),
    "qa (query, response)": ({"query": "a", "response": "b"}, ASKED),
    "completion (prompt, completion)": (
        {"prompt": "a", "completion": "b"},
        [("a", False), ("b", True)],
    ),
}
AUTO = Columns("auto")


@pytest.mark.parametrize("form", RECORDS)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "parquet"])
def test_the_format_of_a_file_is_found_by_its_columns(tmp_path, form, ending):
    record, segments = RECORDS[form]
    record = {"id": 7, **record, "source": None}
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([record] * 2), path)
    elif ending == "json":
        path.write_text(json.dumps([record] * 2))
    else:
        write_jsonl(path, [record] * 2)
    found, others = detect_columns(path, AUTO)
    assert (str(found), others) == (form, [])
    assert found.format in FORMATS
    assert read(path, found) == [(0, segments), (1, segments)]


def test_the_first_record_that_has_a_format_decides(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ["", "{", "[1]", '{"id": 1}', '{"question": "a", "answer": "b"}', '{"text": "c"}']
    path.write_text("\n".join(lines))
    found, _ = detect_columns(path, AUTO)
    assert str(found) == "qa (question, answer)"
    # A record that does not fit is a bad line.
    *_, last = (error for batch in read_batches(path, found) for _, error in batch.parse(PLAIN))
    assert str(last) == (f"{path} line 6: the column 'question' is missing; the columns are text")
    for content in ("", "{", '{"id": 1, "body": ""}'):
        path.write_text(content)
        assert detect_columns(path, AUTO) == (AUTO, [])
    with pytest.raises(
        ValueError, match=r"a.jsonl line 1: the columns are id, body, which no form"
    ):
        check_input_file(path, AUTO, template=PLAIN)
    (tmp_path / "a.txt").touch()
    assert detect_columns(tmp_path / "a.txt", AUTO) == (Columns("text"), [])
    assert detect_columns(path, Columns("qa")) == (Columns("qa"), [])


def test_a_record_with_columns_of_several_formats(tmp_path):
    """As in the original Alpaca data, which has the text of its prompts too."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "", "output": "", "text": ""}])
    found, others = detect_columns(path, AUTO)
    assert found.format == "alpaca"
    assert others == [Columns("text")]
    # A renamed column says which format is meant.
    assert detect_columns(path, Columns("auto", text="output")) == (Columns(text="output"), [])
    renamed = Columns("chat", messages="talk")
    assert detect_columns(path, Columns("auto", messages="talk")) == (renamed, [])
    with pytest.raises(ValueError, match=r"line 1: the column 'talk' is missing; the columns are "):
        check_input_file(path, renamed, template=PLAIN)
    # It does not say so of a text file.
    (tmp_path / "a.txt").touch()
    assert detect_columns(tmp_path / "a.txt", Columns("auto", question="q")) == (Columns(), [])


@pytest.mark.parametrize(
    ("form", "names", "message"),
    [
        ("chat", {"question": "q"}, "the question column 'q' is for the format qa, not for chat"),
        ("qa", {"text": "body"}, "the text column 'body' is for the format text, not for qa"),
        ("alpaca", {"answer": "a"}, "the answer column 'a' is for the format qa, not for alpaca"),
        (
            "auto",
            {"text": "body", "question": "q"},
            "name the columns of one format, not of several: the text column for text, the "
            "question column for qa",
        ),
    ],
)
def test_columns_of_another_format_are_refused(form, names, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Columns(form, **names)


def test_preference_pairs_are_refused(tmp_path):
    pair = {"prompt": "a", "chosen": RECORDS["chat (messages)"][0]["messages"], "rejected": []}
    path = write_jsonl(tmp_path / "a.jsonl", [pair])
    with pytest.raises(
        ValueError, match=r"a.jsonl: these are preference pairs .* TRL's DPOTrainer"
    ):
        detect_columns(path, AUTO)
    # Their chosen answers can be read as chats, if that is asked for.
    found, _ = detect_columns(path, Columns("auto", messages="chosen"))
    assert read(path, found) == [(0, ASKED)]


def test_alpaca_puts_the_input_after_the_instruction():
    columns, record = Columns("alpaca"), {"instruction": "Add.", "input": "1, 2", "output": " 3 "}
    asked = [("User: Add.\n\n1, 2\nAssistant:", False), (" 3", True)]
    assert segments_of(columns, record) == asked
    for empty in ({}, {"input": ""}, {"input": None}):
        first = segments_of(columns, {"instruction": "Add.", "output": "3", **empty})[0][0]
        assert first == "User: Add.\nAssistant:"
    with pytest.raises(ValueError, match=r"^'input' is int, not a string$"):
        segments_of(columns, {**record, "input": 3})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"from": "human"}], r'^message 1 has no "role" and "content"$'),
        ([{"from": "tool", "value": "a"}], r"^message 1 has the role 'tool'; allowed are"),
        ([{"from": ["gpt"], "value": "a"}], r"^message 1 has the role \['gpt'\]; allowed are"),
        ([{"from": "gpt", "value": None}], r"^'value' is NoneType, not a string$"),
        ([{"from": "system", "value": "a"}], r"^no message has the role 'assistant'$"),
        ([{"from": "gpt", "value": "a"}, {"role": "x", "content": ""}], r"^message 2 has the rol"),
        ({}, r"^the messages are dict, not a list$"),
        ([{"role": "user", "content": ["a"]}], r"^message 1 has a part of the type None, not text"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"^message 1 has a part of the type 'image', not text$",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"^'text' is NoneType, not a string$"),
    ],
)
def test_mistakes_in_sharegpt_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        segments_of(Columns("sharegpt"), {"conversations": messages})


def test_other_ways_to_write_a_message():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    said = [{"role": "developer", "content": parts}, {"from": "gpt", "value": "b"}]
    assert segments_of(Columns("chat"), {"messages": said}) == [
        ("Be kind.\n\nAssistant:", False), (" b", True)
    ]  # fmt: skip
