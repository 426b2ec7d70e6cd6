"""/metrics counts what the server did."""

from live_server import GREEDY, serving

from xlstm7b.generate import Generator

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
            # The first token of all prompts is read at the start, the second prompt is cached.
            "prompt_tokens_total": 7 + 1,
            "prefix_cache_hit_tokens_total": 8,
            'prefix_cache_hits_total{level="device"}': 1,
            "generation_tokens_total": 11,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 8,
            "e2e_request_latency_seconds_count": 3,
            'request_success_total{finished_reason="length"}': 2,
            'request_success_total{finished_reason="stop"}': 1,
            'http_requests_total{status="200"}': 3,
            'http_requests_total{status="400"}': 1,
        }
        text = live.client.get("/metrics").text
        got = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert {name: float(got[f"xlstm7b:{name}"]) for name in want} == want
        seconds = [float(got[f"xlstm7b:engine_{part}_seconds_total"]) for part in ("model", "step")]
        assert 0 < seconds[0] < seconds[1]
