"""/metrics counts what the server did."""

import copy
import types
from typing import Any

import httpx
from live_server import GREEDY, serving, wait_for

from xlstm7b.generate import Generator, Request, SamplingParams
from xlstm7b.serve.handlers import _Answer

PATH = "/v1/completions"


def test_the_metrics_have_the_engines_numbers(generator: Generator) -> None:
    with serving(generator, slots=3) as live:
        live.post(PATH, prompt="abcdefg", max_tokens=5, ignore_eos=True, **GREEDY)
        live.post(PATH, prompt="abcdefg", max_tokens=5, ignore_eos=True, **GREEDY)
        live.stream(PATH, prompt="b", max_tokens=4, stop="z", logit_bias={"124": 100}, **GREEDY)
        live.refused(PATH, 400, prompt="a", top_p=0)
        want = {
            "num_slots": 3,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "slot_usage_perc": 0,
            # With the first token of each prompt; the second prompt is cached.
            "computed_prompt_tokens_total": 8 + 2,
            "prompt_tokens_total": 8 + 8 + 2,  # as in the usage of the responses
            "prefix_cache_hit_tokens_total": 8,
            'prefix_cache_hits_total{level="device",model_name="tiny"}': 1,
            "generation_tokens_total": 11,
            "request_queue_time_seconds_count": 3,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 8,
            "e2e_request_latency_seconds_count": 3,
            'request_success_total{finished_reason="length",model_name="tiny"}': 2,
            'request_success_total{finished_reason="stop",model_name="tiny"}': 1,
            "request_aborts_total": 0,
            'http_requests_total{model_name="tiny",route="/v1/completions",status="200"}': 3,
            'http_requests_total{model_name="tiny",route="/v1/completions",status="400"}': 1,
        }
        label = '{model_name="tiny"}'
        want = {name if "{" in name else name + label: value for name, value in want.items()}
        text = live.client.get("/metrics").text
        got = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert {name: float(got[f"xlstm7b:{name}"]) for name in want} == want
        parts = ("model", "step")
        seconds = [float(got[f"xlstm7b:engine_{part}_seconds_total{label}"]) for part in parts]
        assert 0 < seconds[0] < seconds[1]
        own = [name for name in got if name.startswith("xlstm7b:")]
        assert all('model_name="tiny"' in name for name in own)


def test_requests_are_counted_by_route(generator: Generator) -> None:
    with serving(generator, keys=("secret",)) as live:
        for path in ("/v1/states/state-1", "/v1/states/state-2", "/v1/nothing", "/a", "/app.js"):
            live.client.get(path)
        live.client.delete("/v1/states/state-1")
        live.client.put("/v1/completions")
        live.client.get("/v1/models/tiny", headers={"authorization": "Bearer wrong"})
        live.client.get("/", headers={"authorization": "Bearer wrong"})
        for route, status, count in (
            ("/v1/states/{state_id}", 404, 3),
            ("none", 404, 2),
            ("/app.js", 200, 1),
            ("/v1/completions", 405, 1),
            ("/v1/models/{name:path}", 401, 1),
            ("/", 401, 1),
        ):
            name = f'http_requests_total{{route="{route}",status="{status}"}}'
            wait_for(lambda name=name, count=count: live.metric(name) == count)


def test_the_process_has_metrics(generator: Generator) -> None:
    with serving(generator) as live:
        text = live.client.get("/metrics").text
        got = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        for name in ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds"):
            assert float(got[f"process_{name}"]) > 0


def test_an_abort_is_no_success_and_waiting_is_measured(generator: Generator) -> None:
    endless = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True, "stream": True}
    with serving(generator, slots=1) as live, httpx.Client(base_url=live.url) as client:
        with client.stream("POST", PATH, json=endless) as answer:
            next(answer.iter_lines())
            with client.stream("POST", PATH, json={**endless, "max_tokens": 3}) as waiting:
                answer.close()
                waiting.read()
        wait_for(live.is_idle)
        assert live.metric("request_aborts_total") == 1
        assert live.metric('request_success_total{finished_reason="abort"}') == 0
        assert live.metric('request_success_total{finished_reason="length"}') == 1
        assert live.metric("request_queue_time_seconds_count") == 1
        assert live.metric("prompt_tokens_total") == 4  # the aborted prompt was read, too
        queued = live.metric("request_queue_time_seconds_sum")
        assert 0 < queued < live.metric("time_to_first_token_seconds_sum")


def test_choices_that_do_not_fit_into_the_queue_are_no_aborts(generator: Generator) -> None:
    params = SamplingParams(max_new_tokens=10**9, eos_token_id=())
    with serving(generator, slots=1, max_waiting=2) as live:
        thread = live.service.engine
        running = thread.submit(Request("a", params), lambda _: None)
        wait_for(lambda: live.metric("num_requests_running") == 1)
        waiting = thread.submit(Request("a", params), lambda _: None)
        live.refused(PATH, 429, prompt="a", n=2)
        assert live.metric("num_requests_waiting") == 1
        assert live.metric("request_aborts_total") == 0
        thread.abort(waiting)
        thread.abort(running)
        wait_for(live.is_idle)


def test_speculation_is_counted(generator: Generator) -> None:
    """In the metrics and in the usage. A request may do without."""
    body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, **GREEDY}
    repeating = {**body, "logit_bias": {"100": 100}}
    with serving(generator, speculate="lookup") as live, serving(generator) as plain:
        answer = live.post(PATH, **repeating)
        details = answer["usage"]["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        drafted = accepted + details["rejected_prediction_tokens"]
        assert 20 < accepted <= drafted
        assert live.metric("spec_decode_num_draft_tokens_total") == drafted
        assert live.metric("spec_decode_num_accepted_tokens_total") == accepted
        want = plain.post(PATH, **repeating)
        assert answer["choices"] == want["choices"]
        assert "completion_tokens_details" not in want["usage"]
        without = live.post(PATH, **repeating, speculate=False)
        assert (without["choices"], without["usage"]) == (
            want["choices"],
            want["usage"] | {"prompt_tokens_details": without["usage"]["prompt_tokens_details"]},
        )
        assert live.metric("spec_decode_num_draft_tokens_total") == drafted
        chunks = live.stream(PATH, **repeating, stream_options={"include_usage": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
        assert text == want["choices"][0]["text"]
        assert chunks[-1]["usage"]["completion_tokens"] == 40
        assert len(chunks) < 40
        live.refused(PATH, 400, prompt="a", speculate="lookup")


def test_usage_while_the_engine_counts_more_drafts() -> None:
    """Usage is read in another thread than the engine's. No count of it is negative."""

    class Running:
        prompt_token_ids, cached_tokens, reads = (1, 2), 0, 0

        @property
        def drafted_tokens(self) -> int:
            self.reads += 1  # all drafts are accepted, and each read of a count finds more
            return 7 * self.reads

        accepted_tokens = drafted_tokens

    body = types.SimpleNamespace(candidates=1)
    answer: Any = types.SimpleNamespace(requests=[Running()], body=body, _output_tokens=30)
    details = _Answer.usage(answer)["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 7}


def test_drafts_of_a_model_are_counted(generator: Generator) -> None:
    """The model drafts for itself. The second time, the prompt comes from the prefix cache."""
    body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "n": 2, **GREEDY}
    with serving(generator, speculate=copy.deepcopy(generator.model)) as live:
        want = generator.generate("abc", max_new_tokens=40, temperature=0, eos_token_id=())[0]
        for times in (1, 2):
            answer = live.post(PATH, **body)
            assert [choice["text"] for choice in answer["choices"]] == [want.text] * 2
            accepted = live.metric("spec_decode_num_accepted_tokens_total")
            assert accepted == live.metric("spec_decode_num_draft_tokens_total") > 50 * times
