"""Several adapters in one engine: every request gets the tokens of its own adapter."""

from pathlib import Path

import pytest
import torch
from adapters import random_adapter
from engines import Driver, greedy, is_idle, new_engine, run_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from models import spread_model

from xlstm7b.generate import Request, SamplingParams
from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import Adapter, load_adapter, merge_adapter

PROMPTS = ["The sea was", "The sea was calm, and ", "", "Once", "The sea was" * 12]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    spread_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Adapter | None]:
    """No adapter, and two."""
    config = XLSTM.from_pretrained(base).config
    kinds = [{"rank": 2}, {"rank": 3, "targets": ["v", "proj_up"]}]
    folders = [
        random_adapter(base.with_name(f"adapter-{seed}"), base, seed=seed, std=0.5, **kind)
        for seed, kind in enumerate(kinds)
    ]
    return [None, *(load_adapter(folder, config) for folder in folders)]


def request(prompt: str, adapter: Adapter | None, tokens: int = 12) -> Request:
    params = SamplingParams(max_new_tokens=tokens, temperature=0)
    return Request(prompt, params, adapter=adapter)


@pytest.fixture(scope="module")
def expected(base: Path, adapters: list[Adapter | None]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each prompt from a model that one adapter is merged into."""
    found = {}
    for number, adapter in enumerate(adapters):
        model = XLSTM.from_pretrained(base)
        if adapter is not None:
            merge_adapter(model, adapter)
        for prompt in PROMPTS:
            found[prompt, number] = run_alone(model, greedy(prompt)).token_ids
    assert len(set(map(tuple, found.values()))) > 2 * len(PROMPTS)
    return found


@settings(max_examples=12, deadline=None)
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.integers(0, 2), st.integers(0, 5)), max_size=9
    ),
    cached=st.booleans(),
    slots=st.integers(1, 4),
)
def test_requests_with_different_adapters_share_a_batch(
    chosen, cached, slots, base, adapters, expected
):
    options = {"cache_bytes": 1 << 24, "cache_interval": 64} if cached else {}
    model = XLSTM.from_pretrained(base)
    engine = new_engine(model, slots=slots, adapters=adapters[1:], **options)
    driver, added = Driver(engine), []
    for prompt, number, steps in chosen:
        added.append((driver.add(request(prompt, adapters[number])), prompt, number))
        driver.step(steps)
    driver.finish()
    for one, prompt, number in added:
        assert driver.completion(one).token_ids == expected[prompt, number]
    assert is_idle(engine)


def test_the_cache_on_disk_keeps_adapters_apart(base, adapters, expected, tmp_path):
    prompt = PROMPTS[4]
    for _ in range(2):  # the second engine finds the files of the first
        engine = new_engine(
            XLSTM.from_pretrained(base),
            slots=2,
            adapters=adapters[1:],
            cache_bytes=1,
            cache_folder=tmp_path,
        )
        driver = Driver(engine)
        for number, adapter in enumerate(adapters):
            one = driver.add(request(prompt, adapter))
            driver.finish()
            assert driver.completion(one).token_ids == expected[prompt, number]
        engine.close()
    assert engine.stats().cache_hits["disk"]


def test_the_cache_on_disk_keeps_salts_apart(base, adapters, tmp_path):
    """With and without an adapter. The files hold hashes of salts."""
    params, salts = SamplingParams(max_new_tokens=1, temperature=0), (b"", b"secret", b"another")
    for is_restarted in (False, True):
        options = {"cache_bytes": 1, "cache_folder": tmp_path}
        model = XLSTM.from_pretrained(base)
        engine = new_engine(model, slots=1, adapters=adapters[1:2], **options)
        driver = Driver(engine)
        for adapter in adapters[:2]:
            for salt in salts:
                for _ in range(2):
                    one = driver.add(Request(PROMPTS[4], params, adapter=adapter, cache_salt=salt))
                driver.finish()
                assert one.cached_tokens
                first = [*driver.outputs][-2]
                assert is_restarted or not first.cached_tokens, (adapter, salt)
        engine.close()
    assert engine.stats().cache_hits["disk"]  # of those that had left the memory
    assert not any(b"secret".hex().encode() in path.read_bytes() for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="cache_salt must be bytes, not str"):
        engine.add_request(Request("a", cache_salt="secret"))


def test_the_cache_keeps_outputs_of_empty_prompts_apart(base, adapters):
    """An empty prompt is the first token alone: nothing before the output is hashed."""
    model = XLSTM.from_pretrained(base)
    driver = Driver(new_engine(model, slots=1, adapters=adapters[1:], cache_bytes=1 << 24))
    first = driver.add(request("", adapters[1]))
    driver.finish()
    longer = [model.config.bos_token_id, *driver.completion(first).token_ids, 65, 66, 67]
    same, other = (
        driver.add(Request(longer, SamplingParams(max_new_tokens=8, temperature=0), adapter=one))
        for one in (adapters[1], None)
    )
    driver.finish()
    assert driver.completion(other).token_ids == run_alone(model, greedy(longer, 8)).token_ids
    assert driver.completion(other).cached_tokens == 0
    assert driver.completion(same).cached_tokens == len(longer) - 3


def test_scores_of_a_prompt_have_the_adapter(base, adapters):
    model = XLSTM.from_pretrained(base)
    engine = new_engine(model, slots=2, adapters=adapters[1:])
    for adapter in adapters:
        merged = XLSTM.from_pretrained(base)
        if adapter is not None:
            merge_adapter(merged, adapter)
        scored = Request("some text", prompt_logprobs=1, prefill_only=True, adapter=adapter)
        driver = Driver(engine)
        driver.add(scored)
        driver.finish()
        (output,) = (one for one in driver.outputs[scored] if one.prompt_logprobs)
        tokens = torch.tensor([scored.prompt_token_ids])
        with torch.no_grad():
            want, _ = merged.token_logprobs(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(torch.tensor([output.prompt_logprobs]), want, atol=1e-3, rtol=0)


def test_what_is_refused(base, adapters, tmp_path):
    model = XLSTM.from_pretrained(base)
    gates = random_adapter(tmp_path / "gates", base, targets=["fgate_preact"])
    message = r"gates changes .*blocks\.0\..*fgate_preact, which no adapter of an engine or server"
    with pytest.raises(ValueError, match=message):
        new_engine(model, adapters=[load_adapter(gates, model.config)])
    with pytest.raises(ValueError, match="several adapters need the fused path"):
        new_engine(model, adapters=adapters[1:], fused=False)
    engine = new_engine(model, slots=1, adapters=adapters[1:2])
    with pytest.raises(ValueError, match=r"does not have the adapter .*adapter-1"):
        engine.add_request(request("x", adapters[2]))
    # An engine without adapters has no memory for them.
    plain = new_engine(model, slots=1)._runner
    assert plain._adapter_of is None
    assert len(plain._slot_states) == 2


@pytest.mark.gpu
def test_requests_with_different_adapters_share_a_batch_on_a_gpu(base, adapters):
    """In CUDA graphs: slots get other adapters without a new capture."""
    engine = new_engine(XLSTM.from_pretrained(base, device="cuda"), slots=3, adapters=adapters[1:])
    driver = Driver(engine)
    added = []
    for round_ in range(3):
        for number, adapter in enumerate(adapters):
            prompt = PROMPTS[(round_ + number) % len(PROMPTS)]
            added.append((driver.add(request(prompt, adapter)), prompt, number))
        driver.step(4)
    driver.finish()
    for one, prompt, number in added:
        merged = XLSTM.from_pretrained(base, device="cuda")
        if number:
            merge_adapter(merged, adapters[number])
        assert driver.completion(one).token_ids == run_alone(merged, greedy(prompt)).token_ids


def test_drafts_are_verified_with_the_adapter_of_the_request(adapters, expected):
    """`previous_prompt` holds the output that all of them are to draft: that of adapter 1."""
    model, prompt = spread_model(), PROMPTS[0]
    driver = Driver(new_engine(model, slots=3, adapters=adapters[1:], speculate="lookup"))
    made = [request(prompt, adapter, 12) for adapter in adapters]
    for one in made:
        ids = one.prepare(driver.engine.config, driver.engine.tokenizer).prompt_token_ids
        one.previous_prompt = (*ids, *expected[prompt, 1])
        driver.add(one)
    driver.finish()
    for number, one in enumerate(made):
        assert driver.completion(one).token_ids == expected[prompt, number]
        assert (one.accepted_tokens > 5) == (number == 1)
