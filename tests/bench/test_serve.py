"""`bench serve`: loads, figures, and a real server under load."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import environment
from live_server import serving, spelling_model, wait_for

from xlstm7b.bench.results import Results, read_rows
from xlstm7b.bench.serve import Answer, Load, Measured, check_server, measure_server, send
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://a:99999", "http://a:b"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"'{url}' is not a server address such as http://"):
        Load(url=url)


def test_every_prompt_has_a_token() -> None:
    with pytest.raises(ValueError, match="every prompt must have at least one token"):
        Load(url="http://a", prompt_tokens=(0, 5))
    Load(url="http://a", prompt_tokens=(0, 5), shared_tokens=1)


def test_the_figures_follow_from_the_answers() -> None:
    answers = [
        Answer(chunks=[n / 100, n / 100 + 0.5], prompt_tokens=3, new_tokens=2, ended=1.0)
        for n in range(1, 101)
    ]
    results, shape = Results("serve", "none"), {"clients": 2}
    Measured(50.0, [*answers, Answer(error="status 429", ended=9.0)]).add_to(results, shape)
    *figures, error = results.rows
    assert all(row["shape"] == shape for row in results.rows)
    assert [(row["what"], row["value"], row["unit"]) for row in figures] == [
        ("requests", 2, "req/s"),
        ("prompts", 6, "tok/s"),
        ("output", 4, "tok/s"),
        ("first token, p50", 500, "ms"),
        ("first token, p90", 900, "ms"),
        ("first token, p99", 990, "ms"),
        *((f"between chunks, p{percent}", 500, "ms") for percent in (50, 90, 99)),
        *((f"whole answer, p{percent}", 1000, "ms") for percent in (50, 90, 99)),
    ]
    assert (error["what"], error["error"]) == ("status 429", "1 request")
    nothing = Results("serve", "none")
    Measured(1.0, []).add_to(nothing, shape)
    assert [row["error"] for row in nothing.rows] == ["no request was answered"]


def test_an_interrupted_load_reports_what_was_answered(tmp_path: Path) -> None:
    with serving(Generator(spelling_model("abcdefgh"), ByteTokenizer())) as live:
        command = [sys.executable, "-m", "xlstm7b", "bench", "serve", live.url, "--clients", "2"]
        lengths = ["--prompt-tokens", "5", "--new-tokens", "4", "--seconds", "600"]
        bench = subprocess.Popen(
            [*command, *lengths, "--json", tmp_path / "load.jsonl"],
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
    rows = {row["what"]: row for row in read_rows(tmp_path / "load.jsonl")}
    assert rows["output"]["value"] == pytest.approx(4 * rows["requests"]["value"], rel=1e-3)
    assert rows["output"]["shape"] == {"clients": 2, "prompt": "5", "output": "4"}
    assert "whole answer, p99" in printed


def test_a_server_under_load(tmp_path: Path) -> None:
    generator = Generator(spelling_model("abcdefgh"), ByteTokenizer())
    with serving(generator, keys=("key",)) as live:
        load = Load(
            url=live.url, prompt_tokens=(5, 9), new_tokens=(4, 8), api_key="key", seconds=0.5
        )
        steady = send(replace(load, rate=40.0, seconds=1.0))
        assert steady.errors == {}
        assert 20 <= len(steady.answers) <= 65
        for answer in steady.answers:
            assert answer.new_tokens in (4, 8)
            assert answer.prompt_tokens in (6, 10)
            assert 1 <= len(answer.chunks) <= answer.new_tokens + 1
            assert answer.chunks == sorted(answer.chunks)
        results = Results("serve", "none", file=tmp_path / "a.jsonl", call="one")
        for _ in range(2):  # the second time it is known
            measure_server(results, replace(load, clients=3))
        assert not results.failed
        assert [row["what"] for row in results.rows].count("output") == 1
        assert "key" not in (tmp_path / "a.jsonl").read_text()
        alike = send(replace(load, clients=1, shared_tokens=200))
        assert {answer.prompt_tokens for answer in alike.answers} <= {206, 210}
        stranger = send(replace(load, rate=20.0, seconds=0.3, api_key=None))
        assert set(stranger.errors) == {"status 401"}
        check_server(replace(load, url=f"{live.url}/v1"))
        endless = replace(load, new_tokens=(9999,), clients=1, seconds=0.1, timeout=0.5)
        assert send(endless).errors == {"TimeoutError": 1}
        live.service.draining.set()
        with pytest.raises(ValueError, match="is not ready: its /health returns 503"):
            check_server(load)
    assert set(send(replace(load, rate=20.0, seconds=0.3)).errors) == {"ConnectionRefusedError"}
    with pytest.raises(OSError, match=f"^{live.url} does not answer: "):
        check_server(load)
