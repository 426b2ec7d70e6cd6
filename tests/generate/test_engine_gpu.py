"""The engine on a GPU: graphs for a few numbers of rows, prompts in padded pieces, kept states.

Products of other shapes round differently there, so that a text that goes through the engine is
held against one that was read and stepped token by token: log-probabilities, not the choice
between near ties.
"""

import random

import pytest
import torch
from engines import Listener, idle, running

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, Request, SamplingSettings
from xlstm7b.generate.slots import Slots
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

pytestmark = pytest.mark.gpu
DRAW = random.Random(0)
LONG = DRAW.choices(range(2, 258), k=3000)


def models() -> tuple[Generator, XLSTM]:
    """In bfloat16 behind a generator, and the same weights in float32 on the CPU."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(256, 2, 4, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter += 0.02 * torch.randn_like(parameter)
        model.lm_head.weight *= 2
    model.bfloat16().float()
    copy = XLSTM(model.config)
    copy.load_state_dict(model.state_dict())
    return Generator(copy.to("cuda", torch.bfloat16), ByteTokenizer()), model


@pytest.mark.parametrize("options", [
    {"slots": 40}, {"slots": 6, "piece_tokens": 100},
    {"slots": 24, "cache_bytes": 1 << 26, "cache_interval": 700},
])  # fmt: skip
def test_texts_in_a_crowd(options):
    generator, model = models()
    kinds = (
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
    )
    requests = []
    for place in range(60):
        start = LONG[: DRAW.choice((1, 5, 64, 300, 1500, 3000))]
        prompt = [*start, *DRAW.choices(range(2, 258), k=DRAW.randrange(1, 70))]
        chosen = SamplingSettings(
            max_new_tokens=DRAW.randrange(1, 60), seed=place, eos_token_id=(), **kinds[place % 4]
        )
        requests.append(Request(prompt, chosen))
    with running(generator, **options) as engine:
        told = [Listener() for _ in requests]
        for one, request in zip(told, requests, strict=True):
            engine.submit(request, one)
        done = [one.completion() for one in told]
        stats = engine.stats()
    assert idle(engine)
    if "cache_bytes" in options:
        assert stats.cached_tokens > 10_000
    assert stats.generated_tokens == sum(len(one.token_ids) for one in done)
    for request, completion in zip(requests, done, strict=True):
        wanted = request.settings.max_new_tokens
        assert len(completion.token_ids) == wanted
        if request.settings.logprobs is None or request.settings.repetition_penalty != 1:
            continue
        ids = torch.tensor([[0, *request.prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids[:, :-1])[0][0, -wanted:].double()
        if request.settings.temperature == 0:
            best = logits.max(-1).values
            own = logits.gather(-1, ids[0, -wanted:, None])[:, 0]
            assert float((best - own).max()) < 0.15  # a near tie, at most
        want = logits.log_softmax(-1).gather(-1, ids[0, -wanted:, None])[:, 0]
        difference = (torch.tensor(completion.logprobs) - want).abs()
        assert float(difference.max()) < 0.15
        assert float(difference.mean()) < 0.03


def test_a_stored_state_gives_the_same_text():
    generator, _ = models()
    request = Request(LONG, SamplingSettings(max_new_tokens=30, temperature=0, logprobs=0))
    with running(generator, slots=4, cache_bytes=1 << 26) as engine:
        found = []
        for _ in range(2):
            told = Listener()
            engine.submit(request, told)
            found.append((told.completion().token_ids, told.completion().logprobs))
        assert told.pieces[0].cached_tokens == len(LONG) + 1
    assert found[0] == found[1]


def test_the_host_never_waits_for_the_device():
    """But for results: else a GPU has nothing to do while the host prepares the next step."""
    generator, _ = models()
    slots = Slots(generator, 6)
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.5, "logprobs": 4, "min_new_tokens": 2},
        {"frequency_penalty": 1.0, "logit_bias": {70: 5.0}},
    )
    with torch.inference_mode():
        slots.warm_up(64)
        for debugged in (False, True):  # a first time for what is compiled and allocated
            torch.cuda.set_sync_debug_mode("error" if debugged else "default")
            try:
                for row, kind in enumerate(kinds):
                    slots.load(None)
                    slots.read(LONG[:40])
                    slots.park(5)
                    slots.load(5)
                    slots.read(LONG[40:60])
                    slots.free.discard(row + 1)
                    slots.begin(row + 1, SamplingSettings(**kind), 7, LONG[:60])
                    slots.decode([*range(1, row + 2)])
                slots.read_scored(LONG[:10], LONG[1:11], 3)
                slots.free.add(0)
                assert slots.lower_row([1, 2, 3]) is None  # four rows are no more than three
                for row in (1, 2):
                    slots.release(row)
                assert slots.lower_row([3]) == (3, 0)
                slots.decode([0])
                slots.release(0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
