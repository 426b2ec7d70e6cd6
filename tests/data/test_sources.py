"""Sources files: several inputs of different formats, and how often each is repeated."""

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xlstm7b.data.input_files import Columns
from xlstm7b.data.prepare import prepare, read_notes
from xlstm7b.data.shards import ShardFolder
from xlstm7b.data.sources import SourceFile, read_sources
from xlstm7b.tokenizer import ByteTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "sources" / "7b-stage2.toml"


def texts(folder: ShardFolder) -> list[str]:
    decode = ByteTokenizer().decode
    return [
        decode(document.tolist())
        for shard in folder.shards
        for document in np.split(shard.tokens, shard.ends)[:-1]
    ]


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of different formats, in the folder where commands run."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    records = {
        "chat": [{"messages": chat}],
        "maths": [{"query": f"{n} + 1?", "response": str(n + 1)} for n in range(4)],
        "book": [{"body": "It was."}],
    }
    for name, lines in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    (tmp_path / "sources.toml").write_text(
        """
        [chat]
        path = "chat.jsonl"
        repeat = 3
        [maths]
        path = ["maths.jsonl"]
        format = "qa"
        question_column = "query"
        answer_column = "response"
        repeat = 0.5
        [book]
        path = "."
        include = "boo*"
        text_column = "body"
        """
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shard_tokens", [30, 1000])
def test_sources_of_different_formats_in_one_folder(raw: Path, shard_tokens: int) -> None:
    options = {"shard_tokens": shard_tokens}
    folder = prepare(["sources.toml"], raw / "out", **options)
    assert texts(folder) == [
        *["User: Hi\nAssistant: Ho"] * 3,
        "User: 1 + 1?\nAssistant: 2",
        "User: 3 + 1?\nAssistant: 4",
        "It was.",
    ]
    counted = [
        "".join(map(str, mask))
        for shard in folder.shards
        for mask in np.split(shard.mask, shard.ends)
    ]
    assert [mask.count("1") for mask in counted if mask] == [4, 4, 4, 3, 3, 8]
    notes = read_notes(folder.path)
    assert {name: group["count"] for name, group in notes["formats"].items()} == {
        "chat (messages)": 1,
        "qa (query, response)": 1,
        "text (body)": 1,
    }
    assert prepare(["sources.toml"], raw / "out", **options).tokens == folder.tokens
    changed = Path("sources.toml").read_text().replace("repeat = 3", "repeat = 2")
    Path("sources.toml").write_text(changed)
    with pytest.raises(ValueError, match=r"out was prepared from other input, with another token"):
        prepare(["sources.toml"], raw / "out", **options)


@pytest.mark.parametrize("shard_tokens", [20, 1000])
def test_fractions_are_carried_over_from_file_to_file(raw: Path, shard_tokens: int) -> None:
    """And blank lines and empty documents, which are not written, do not count."""
    for number in range(10):
        blank = '\n{"text": ""}\n' if number % 2 else ""
        Path(f"many-{number}.jsonl").write_text(f'{blank}{{"text": "document {number}"}}\n')
    Path("sources.toml").write_text(
        '[half]\npath = "."\ninclude = "many-*"\nrepeat = 0.5\n'
        '[book]\npath = "book.jsonl"\ntext_column = "body"\nrepeat = 1.5\n'
    )
    folder = prepare(["sources.toml"], raw / "out", shard_tokens=shard_tokens)
    assert texts(folder) == [*(f"document {number}" for number in (1, 3, 5, 7, 9)), "It was."]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'path = "maths.jsonl"\nquestion_column = "query"\nanswer_column = "response"\n'
            "repeat = 0.2",
            "4 documents × repeat 0.2 are less than one; raise repeat or remove the source",
        ),
        ('path = "empty.jsonl"', "it holds no text"),
        (
            'path = ["bad.jsonl", "empty.jsonl"]',
            "it holds no text; 1 bad record was left out: {0}/bad.jsonl line 1: 'text' is int, "
            "not a string",
        ),
    ],
)
def test_a_source_that_gives_nothing_is_named(raw: Path, source: str, message: str) -> None:
    Path("empty.jsonl").write_text('{"text": ""}\n' * 3)
    Path("bad.jsonl").write_text('{"text": 5}\n')
    book, odd = '[book]\npath = "book.jsonl"\ntext_column = "body"\n', f"[odd]\n{source}\n"
    for content in (book + odd, odd + book):
        Path("sources.toml").write_text(content)
        with pytest.raises(ValueError, match="gives no documents") as error:
            prepare(["sources.toml"], raw / "out", skip_bad=1)
        assert str(error.value) == (
            f"sources.toml: odd: the source gives no documents: {message.format(raw)}"
        )
        # After a correction, the same command continues.
        Path("sources.toml").write_text(book)
        assert texts(prepare(["sources.toml"], raw / "out", skip_bad=1)) == ["It was."]
        shutil.rmtree(raw / "out")


@given(repeat=st.floats(0.01, 100), records=st.integers(0, 200))
@example(repeat=1.0, records=200)
def test_repeats_are_evenly_spread(repeat: float, records: int) -> None:
    source = SourceFile(Path("a"), Columns(), repeat)
    times = Counter(source.times(position) for position in range(records))
    assert sum(n * count for n, count in times.items()) == int(records * Fraction(str(repeat)))
    assert len(times) <= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.toml lists no sources"),
        ("[a", "a.toml cannot be read: "),
        ("a = 1", "a.toml: a: it must be a table, not 1"),
        ("[a]", "a.toml: a.path: it is missing$"),
        ("[a]\npath = []", "a.toml: a.path: it names no file$"),
        (
            '[a]\npath = "x"\nwieght = 2',
            "a.toml: a.wieght: no such setting; choose from path, format, ",
        ),
        ('[a]\npath = "x"\nrepeat = 0', "a.toml: a.repeat: it must be greater than 0, not 0"),
        ('[a]\npath = "x"\nrepeat = nan', "a.toml: a.repeat: it must be "),
        ('[a]\npath = "x"\nrepeat = true', "a.repeat: it must be a valid number, not True"),
        ('[a]\npath = "x"\nrepeat = "3"', "a.repeat: it must be a valid number, not '3'"),
        ('[a]\npath = "x"\nformat = "csv"', "a.toml: a: unknown format 'csv'; choose from "),
        ('[a]\npath = "x"', "a.toml: a: there is no file or folder x"),
        (
            '[a]\npath = "book.jsonl"\n[b]\npath = "book.jsonl"',
            "book.jsonl is in two sources of a.toml: use repeat to repeat it",
        ),
    ],
)
def test_mistakes_in_a_sources_file(raw: Path, content: str, message: str) -> None:
    Path("a.toml").write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare(["a.toml"], raw / "out")
    assert not (raw / "out").exists()


def test_an_empty_input_is_not_the_current_folder(raw: Path) -> None:
    for inputs in ([""], ["book.jsonl", ""]):
        with pytest.raises(ValueError, match=r"^a file or folder is needed, and one of"):
            prepare(inputs, raw / "out")
    Path("a.toml").write_text('[a]\npath = ""')
    with pytest.raises(ValueError, match=r"^a.toml: a: a file or folder is needed"):
        prepare(["a.toml"], raw / "out")
    assert not (raw / "out").exists()


def test_a_sources_file_stands_alone(raw: Path) -> None:
    with pytest.raises(ValueError, match=r"^sources.toml lists sources: give it as the only input"):
        prepare(["sources.toml", "book.jsonl"], raw / "out")
    for options in ({"columns": Columns("qa")}, {"include": ["*"]}):
        with pytest.raises(ValueError, match=r"^sources.toml lists sources: write format, columns"):
            prepare(["sources.toml"], raw / "out", **options)
    # It is a text like any other if that is asked for.
    folder = prepare(["sources.toml"], raw / "out", text_endings=[".toml"])
    assert texts(folder) == [Path("sources.toml").read_text()]


def test_the_example_lists_the_sources_of_the_paper() -> None:
    sources = read_sources(EXAMPLE)
    assert len(sources) == 6
    assert {source.format for source in sources.values()} == {"chat", "sharegpt", "qa"}
