"""`bench serve`: loads, figures, and a real server under one."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.commands import environment
from serve.live import serving, speller, wait_for

from xlstm7b.bench import serve
from xlstm7b.bench.serve import Answer, Load, Report
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "127.0.0.1:8000"},
        {"url": "ftp://a"},
        {"url": "http://a:99999"},
        {"url": "http://a:b"},
        {"prompt_tokens": (0, 5)},
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


def test_an_interrupted_load_tells_what_was(tmp_path: Path) -> None:
    with serving(Generator(speller("abcdefgh"), ByteTokenizer())) as live:
        command = [sys.executable, "-m", "xlstm7b", "bench", "serve", live.url, "--clients", "2"]
        lengths = ["--prompt-tokens", "5", "--new-tokens", "4", "--seconds", "600"]
        bench = subprocess.Popen(
            [*command, *lengths, "--json", tmp_path / "load.json"],
            env=environment(), stdout=subprocess.PIPE, text=True,
            # Whoever runs the tests in the background has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            wait_for(lambda: live.figure("generation_tokens_total") > 20)
            bench.send_signal(signal.SIGINT)
            told, _ = bench.communicate(timeout=60)
        finally:
            bench.kill()
        assert bench.returncode == 130
    assert "errors                    none" in told
    summary = json.loads((tmp_path / "load.json").read_text())["summary"]
    assert f"requests                  {summary['requests']}\n" in told
    assert summary["requests"] >= 4


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
        serve.check_server(Load(f"{live.url}/v1"))
        endless = Load(live.url, clients=1, seconds=0.1, new_tokens=(9999,), timeout=0.5)
        slow = serve.run(endless, "key")
        assert slow.summary()["errors"] == {"TimeoutError": 1}
        live.service.draining.set()
        with pytest.raises(ValueError, match="is not ready: its /health says 503"):
            serve.check_server(Load(live.url))
    nobody = Load(live.url, rate=20, seconds=0.3)
    assert set(serve.run(nobody).summary()["errors"]) == {"ConnectionRefusedError"}
    with pytest.raises(OSError, match=f"^{live.url} does not answer: "):
        serve.check_server(nobody)
    serve.show(report)
    assert f"requests                  {len(report.answers)}\n" in capsys.readouterr().out
    serve.write(report, tmp_path / "load.json", tmp_path / "load.png")
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["load"]["rate"] == 40
    assert written["summary"]["first_token_seconds"] == report.summary()["first_token_seconds"]
    assert len(written["answers"]) == len(report.answers)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
