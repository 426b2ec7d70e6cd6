"""`bench serve`: loads, figures, and a real server under one."""

import json
from pathlib import Path

import pytest
from serve.live import serving, speller

from xlstm7b.bench import serve
from xlstm7b.bench.serve import Answer, Load, Report
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "127.0.0.1:8000"},
        {"url": "ftp://a"},
        {"rate": 0},
        {"rate": float("nan")},
        {"seconds": -1},
        {"clients": -1},
        {"prompt_tokens": ()},
        {"prompt_tokens": (-1,)},
        {"new_tokens": (0,)},
        {"shared_tokens": -1},
    ],
)
def test_what_is_no_load(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Load(**{"url": "http://a", **wrong})


def test_figures() -> None:
    answers = [
        Answer(chunks=[n / 100, n / 100 + 0.5], prompt_tokens=3, new_tokens=2, ended=1.0)
        for n in range(1, 101)
    ]
    report = Report(Load("http://a"), 50.0, [*answers, Answer(error="status 429", ended=9.0)])
    figures = report.summary()
    assert figures["requests"] == 101
    assert figures["errors"] == {"status 429": 1}
    assert figures["requests_per_second"] == 2
    assert (figures["prompt_tokens_per_second"], figures["new_tokens_per_second"]) == (6, 4)
    assert figures["first_token_seconds"] == {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    assert figures["between_tokens_seconds"] == pytest.approx({"p50": 0.5, "p90": 0.5, "p99": 0.5})
    assert figures["whole_seconds"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert Report(Load("http://a"), 1.0, []).summary()["first_token_seconds"] == {}


def test_a_server_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator(speller("abcdefgh"), ByteTokenizer())
    with serving(generator, keys=("key",)) as live:
        lengths = {"prompt_tokens": (5, 9), "new_tokens": (4, 8)}
        load = Load(live.url, rate=40, seconds=1.0, **lengths)
        report = serve.run(load, "key")
        assert {answer.error for answer in report.answers} == {None}
        assert 20 <= len(report.answers) <= 65
        for answer in report.answers:
            assert answer.new_tokens in (4, 8)
            assert answer.prompt_tokens in (6, 10)
            assert 1 <= len(answer.chunks) <= answer.new_tokens + 1
            assert answer.chunks == sorted(answer.chunks)
        closed = serve.run(Load(live.url, clients=3, seconds=0.5, **lengths), "key")
        assert {answer.error for answer in closed.answers} == {None}
        assert len(closed.answers) >= 3
        alike = serve.run(
            Load(live.url, clients=1, seconds=0.5, shared_tokens=200, **lengths), "key"
        )
        assert {answer.prompt_tokens for answer in alike.answers} <= {206, 210}
        stranger = serve.run(Load(live.url, rate=20, seconds=0.3), None)
        assert set(stranger.summary()["errors"]) == {"status 401"}
    nobody = serve.run(Load(live.url, rate=20, seconds=0.3), None)
    assert set(nobody.summary()["errors"]) == {"ConnectionRefusedError"}
    serve.show(report)
    assert f"requests                  {len(report.answers)}\n" in capsys.readouterr().out
    serve.write(report, tmp_path / "load.json", tmp_path / "load.png")
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["load"]["rate"] == 40
    assert written["summary"]["first_token_seconds"] == report.summary()["first_token_seconds"]
    assert len(written["answers"]) == len(report.answers)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
