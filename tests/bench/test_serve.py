"""`bench serve`: loads, figures, and a real server under load."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from commands import environment
from live_server import serving, spelling_model, wait_for

from xlstm7b.bench import cases
from xlstm7b.bench.plans import Serve
from xlstm7b.bench.serve import Answer, Measured, check_server, send
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "'127.0.0.1:8000' is not a server address such as http://"),
        ({"url": "ftp://a"}, "'ftp://a' is not a server address"),
        ({"url": "http://a:99999"}, "'http://a:99999' is not a server address"),
        ({"url": "http://a:b"}, "'http://a:b' is not a server address"),
        ({"prompt_tokens": (0, 5)}, "every prompt must have at least one token"),
        ({"rate": 0.0}, "rate must be above 0, not 0"),
        ({"rate": float("nan")}, "rate must be above 0, not nan"),
        ({"seconds": -1.0}, "seconds must be above 0, not -1"),
        ({"rate": 4.0, "clients": 2}, "^give either --rate or --clients, not both"),
        ({"clients": -1}, "clients must be at least 0, not -1"),
        ({"prompt_tokens": ()}, "prompt_tokens and new_tokens must each have at least one length"),
        ({"prompt_tokens": (-1,)}, "prompt_tokens must be at least 0, not -1"),
        ({"new_tokens": (0,)}, "new_tokens must be at least 1, not 0"),
        ({"shared_tokens": -1}, "shared_tokens must be at least 0, not -1"),
    ],
)
def test_an_impossible_load_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.run(Serve.of(**{"url": "http://a", **wrong}))


def test_the_default_rate_is_only_for_a_load_without_clients() -> None:
    assert [Serve.of(url="http://a", clients=n).rate for n in (0, 2)] == [4.0, None]


def test_the_figures_follow_from_the_answers() -> None:
    answers = [
        Answer(chunks=[n / 100, n / 100 + 0.5], prompt_tokens=3, new_tokens=2, ended=1.0)
        for n in range(1, 101)
    ]
    measured = Measured(50.0, [*answers, Answer(error="status 429", ended=9.0)])
    load, error, first, between, whole = measured.results()
    assert (load.figures["requests"], load.figures["requests_per_second"]) == (100, 2)
    assert (load.figures["prompt_tokens_per_second"], load.tokens_per_second) == (6, 4)
    assert len(load.figures["answers"]) == 101
    assert (error.work, error.error) == ("1 request", "status 429")
    names = [part.name for part in (first, between, whole)]
    assert names == ["first token", "between chunks", "whole answer"]
    assert first.figures == {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    assert between.figures == pytest.approx({"p50": 0.5, "p90": 0.5, "p99": 0.5})
    assert whole.figures == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    (nothing,) = Measured(1.0, []).results()
    assert nothing.error == "no request was answered"


def test_an_interrupted_load_reports_what_was_answered(tmp_path: Path) -> None:
    with serving(Generator(spelling_model("abcdefgh"), ByteTokenizer())) as live:
        command = [sys.executable, "-m", "xlstm7b", "bench", "serve", live.url, "--clients", "2"]
        lengths = ["--prompt-tokens", "5", "--new-tokens", "4", "--seconds", "600"]
        bench = subprocess.Popen(
            [*command, *lengths, "--json", tmp_path / "load.json"],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            # SIGINT is ignored where the tests run in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_for(lambda: live.metric("generation_tokens_total") > 20)
            bench.send_signal(signal.SIGINT)
            printed, _ = bench.communicate(timeout=60)
        finally:
            bench.kill()
        assert bench.returncode == 130
    assert "failed" not in printed
    load, *_ = json.loads((tmp_path / "load.json").read_text())["results"]
    (row,) = (text for text in printed.splitlines() if text.startswith("server"))
    assert row.split()[1] == str(load["requests"])
    assert load["requests"] >= 4


def test_a_server_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator(spelling_model("abcdefgh"), ByteTokenizer())
    lengths = {"prompt_tokens": (5, 9), "new_tokens": (4, 8), "api_key": "key"}
    with serving(generator, keys=("key",)) as live:
        files = {"json": tmp_path / "load.json", "plot": tmp_path / "load.png"}
        results = cases.run(Serve.of(url=live.url, rate=40.0, seconds=1.0, **lengths), **files)
        assert {result.error for result in results} == {None}
        answers = results[0].figures["answers"]
        assert 20 <= len(answers) <= 65
        for answer in answers:
            assert answer["new_tokens"] in (4, 8)
            assert answer["prompt_tokens"] in (6, 10)
            assert 1 <= len(answer["chunks"]) <= answer["new_tokens"] + 1
            assert answer["chunks"] == sorted(answer["chunks"])
        closed = send(Serve.of(url=live.url, clients=3, seconds=0.5, **lengths))
        assert closed.errors == {}
        assert len(closed.answers) >= 3
        alike = Serve.of(url=live.url, clients=1, seconds=0.5, shared_tokens=200, **lengths)
        assert {answer.prompt_tokens for answer in send(alike).answers} <= {206, 210}
        stranger = send(Serve.of(url=live.url, rate=20.0, seconds=0.3))
        assert set(stranger.errors) == {"status 401"}
        check_server(Serve.of(url=f"{live.url}/v1"))
        endless = Serve.of(
            **lengths | {"new_tokens": (9999,)}, url=live.url, clients=1, seconds=0.1, timeout=0.5
        )
        assert send(endless).errors == {"TimeoutError": 1}
        live.service.draining.set()
        with pytest.raises(ValueError, match="is not ready: its /health returns 503"):
            cases.run(Serve.of(url=live.url))
    nobody = Serve.of(url=live.url, rate=20.0, seconds=0.3)
    assert set(send(nobody).errors) == {"ConnectionRefusedError"}
    with pytest.raises(OSError, match=f"^{live.url} does not answer: "):
        cases.run(nobody)
    assert f" {len(answers)} " in capsys.readouterr().out
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["plan"]["rate"] == 40
    assert "api_key" not in written["plan"]
    first = next(row for row in written["results"] if row["name"] == "first token")
    assert first["p50"] == next(r for r in results if r.name == "first token").figures["p50"]
    assert written["results"][0]["answers"] == [asdict(Answer(**answer)) for answer in answers]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
