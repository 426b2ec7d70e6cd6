"""Generation of models that are not quite `XLSTM(config)`: refused, or run by the model itself."""

import copy

import pytest
import torch
from changed_models import (
    CHANGES,
    LoraLinear,
    changed_model,
    fresh_lora,
    other_norm,
    trained_lora,
)
from engines import Driver, copy_of, gpu_like_engine, greedy, new_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import spread_model
from torch import nn

from xlstm7b import Generator, Request, SamplingParams
from xlstm7b.generate import beam_search
from xlstm7b.generate.chat import Chat
from xlstm7b.generate.fused import FusedModel, Slots
from xlstm7b.generate.unfused import UnfusedModel
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.model.layers import Embedding, SwiGLU
from xlstm7b.tokenizer import ByteTokenizer

REMEDY = (
    ", which the fused path would ignore: give Generator or Engine fused=False, which calls the "
    "model itself and is slower"
)
PROMPTS = ["A", "The sea was", "Once upon a time " * 6]
GREEDY = {"max_new_tokens": 12, "temperature": 0}
CHANGED = [pytest.param(change, id=change.__name__) for change in CHANGES]


def unfused(model: XLSTM, **options: object) -> Generator:
    return Generator(model, ByteTokenizer(), fused=False, **options)


@torch.no_grad()
def by_forward(model: XLSTM, prompt: str, tokens: int = 12) -> list[int]:
    """Greedy decoding by whole calls of the model, without a state."""
    model = copy.deepcopy(model).eval()
    ids = [0, *ByteTokenizer().encode(prompt)]
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), logits="last")[0].argmax()))
    return ids[-tokens:]


# The fused path refuses


@pytest.mark.parametrize("change", CHANGED)
def test_the_fused_path_refuses_and_names_the_layer(change):
    model = changed_model(change)
    with pytest.raises(ValueError, match="fused=False") as refusal:
        Generator(model, ByteTokenizer()).generate("A")
    assert str(refusal.value) == CHANGES[change] + REMEDY
    with pytest.raises(ValueError, match=r"fused=False"):
        new_engine(model)


def test_a_refused_model_is_left_as_it_was():
    model = changed_model(fresh_lora)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="LoraLinear"):
        FusedModel(model)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_extra_layers_blocks_and_parameters_are_differences():
    def refusal(change):
        model = spread_model()
        change(model)
        with pytest.raises(ValueError, match="fused=False") as error:
            FusedModel(model)
        return str(error.value).removesuffix(REMEDY)

    def extra_norm(model):
        model.backbone.blocks[1].norm_after = nn.Identity()

    def buffer(model):
        model.backbone.register_buffer("scale", torch.ones(1))

    def parameter(model):
        model.backbone.blocks[0].ffn.bias = nn.Parameter(torch.zeros(1))

    def fewer(model):
        model.backbone.blocks = model.backbone.blocks[:1]

    def same_name(model):
        class RMSNorm(nn.Module):
            pass

        RMSNorm.__qualname__ = "RMSNorm"
        model.backbone.out_norm = RMSNorm()

    def special_weight(model):
        class Quantised(torch.Tensor):
            pass

        layer = model.backbone.blocks[0].mlstm_layer.q
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(Quantised))

    assert refusal(extra_norm) == "backbone.blocks.1 has a norm_after"
    assert refusal(buffer) == "backbone has a scale"
    assert refusal(parameter) == "backbone.blocks.0.ffn has a bias"
    assert refusal(fewer) == "backbone.blocks holds 1 block, and the config says 2"
    assert refusal(same_name).endswith("test_unfused.RMSNorm, not a xlstm7b.model.layers.RMSNorm")
    assert refusal(special_weight).startswith("backbone.blocks.0.mlstm_layer.q.weight is a ")


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (SwiGLU, "backbone.blocks.0 does not compute what its class did"),
        (Embedding, "the embedding, the last norm, the head or the soft-cap is not XLSTM's own"),
    ],
)
def test_patched_classes_show_in_the_logits(monkeypatch, kind, named):
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x).flip(-1))
    with pytest.raises(ValueError, match="fused=False") as refusal:
        FusedModel(spread_model())
    assert str(refusal.value) == named + REMEDY


def test_rounding_that_adds_up_over_many_blocks_is_no_other_model(monkeypatch):
    """A 7B in bfloat16 with 4-bit weights: each block is off by 1%, the logits by more than 10%."""
    model = spread_model(num_blocks=48)

    def add_product(x, y, W):
        added = y @ W.mT
        noise = torch.randn_like(added)
        x += added + 8e-3 * noise * (added.norm() / noise.norm())

    monkeypatch.setattr("xlstm7b.generate.kernels.plain.add_product", add_product)
    torch.manual_seed(0)
    fused = FusedModel(model)
    tokens = torch.arange(4)[None]
    with torch.inference_mode():
        got = fused.logits(fused.read(tokens, ModelState.zeros(model.config, 1)))
        want = model(tokens, logits="last")[0]
    assert error(got, want) > 0.01  # what one comparison at the end would allow


def test_notes_compiled_calls_shared_weights_and_training_mode_are_no_differences():
    model = spread_model()
    model.backbone.blocks[0].note = "mine"
    model.lm_head.weight = model.backbone.embeddings.weight
    model.compile()
    model.eval()
    model.backbone.blocks[1].train()
    FusedModel(model)
    assert [module.training for module in model.backbone.blocks] == [False, True]


def test_adapters_added_after_the_first_call_are_noticed():
    model = spread_model()
    generator = Generator(model, ByteTokenizer())
    generator.generate("A", max_new_tokens=2)
    trained_lora(model)
    with pytest.raises(ValueError, match="LoraLinear"):
        generator.generate("A", max_new_tokens=2)


# The path that calls the model


@pytest.mark.parametrize("change", [*CHANGED, pytest.param(lambda model: None, id="unchanged")])
def test_equals_the_model_alone_batched_and_streamed(change):
    model = changed_model(change)
    want = [by_forward(model, prompt) for prompt in PROMPTS]
    generator = unfused(model, batch_size=2)
    assert [generator.generate(p, **GREEDY)[0].token_ids for p in PROMPTS] == want
    assert [done.token_ids for done in generator.generate(PROMPTS, **GREEDY)] == want
    for prompt, tokens in zip(PROMPTS, want, strict=True):
        streamed = [output.token_ids for output in generator.stream(prompt, **GREEDY)]
        assert [token for ids in streamed for token in ids] == tokens


def test_equals_the_fused_path():
    model = spread_model()
    fused, plain = Generator(model, ByteTokenizer()), unfused(copy.deepcopy(model))
    params = SamplingParams(max_new_tokens=12, seed=3, top_p=0.9, logprobs=2)
    done = (generator.run([Request(p, params) for p in PROMPTS]) for generator in (fused, plain))
    for one, two in zip(*done, strict=True):
        assert one.token_ids == two.token_ids
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


@pytest.mark.parametrize("make", [new_engine, gpu_like_engine])
def test_equals_the_model_with_a_prefix_cache(make):
    """Also in batches of padded rows that start from one slot, as on a GPU."""
    model = changed_model(trained_lora)
    engine = make(
        model, slots=3, cache_bytes=1 << 24, cache_interval=8, prefill_tokens=8, fused=False
    )
    driver, prompts = Driver(engine), ["Once upon a time", "Once upon a hill", "Once upon a time x"]
    for _ in range(2):
        requests = driver.add_all(greedy(prompt) for prompt in prompts)
        driver.finish()
        for request, prompt in zip(requests, prompts, strict=True):
            assert driver.completion(request).token_ids == by_forward(model, prompt)
    assert engine.stats().cached_tokens > 40


MODEL = spread_model()
FUSED, PLAIN = FusedModel(copy.deepcopy(MODEL)), UnfusedModel(MODEL)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.permutations(range(6)),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
@torch.no_grad()
def test_any_rows_lengths_and_slots_as_on_the_fused_path(lengths, sources, targets, live):
    """Padded rows start from any slots and are written to others; then single tokens."""
    draw, count, live = torch.Generator().manual_seed(0), len(lengths), torch.tensor(live)
    start, token = (torch.randint(2, 258, shape, generator=draw) for shape in ((6, 20), (6,)))
    tokens = torch.randint(2, 258, (count, 9), generator=draw)
    slots = Slots(torch.tensor(sources[:count]), torch.tensor(targets[:count]))
    states, logits = [], []
    for path in (FUSED, PLAIN):
        state = ModelState.zeros(MODEL.config, 6)
        path.read(start, state)
        read = path.logits(path.read(tokens, state, torch.tensor(lengths), slots))
        stepped = path.step(token.where(live, -1), state)
        logits.append([*read[torch.tensor(lengths) > 0], *stepped[live]])
        states.append(state)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert states[0].tokens_seen.tolist() == states[1].tokens_seen.tolist()
    for parts in zip(*(state.blocks for state in states), strict=True):
        for part, want in zip(*parts, strict=True):
            torch.testing.assert_close(part, want, atol=1e-4, rtol=1e-4)


def test_scores_states_search_and_chat():
    model = changed_model(trained_lora)
    generator = unfused(model)
    [score] = generator.run(
        [Request("The sea", prompt_logprobs=0, keep_state=True, prefill_only=True)]
    )
    assert score.state is not None
    assert generator.generate(state=score.state, **GREEDY)[0].token_ids == by_forward(
        model, "The sea"
    )
    assert beam_search(generator, "The sea", num_beams=2, max_new_tokens=4)
    assert [*Chat(generator, max_new_tokens=4).say("Hello")]


def test_dropout_is_off_and_the_mode_is_restored():
    model = changed_model(trained_lora).train()
    model.backbone.blocks[1].eval()
    before = [module.training for module in model.modules()]
    generator = unfused(model)
    assert len({tuple(generator.generate("A", **GREEDY)[0].token_ids) for _ in range(3)}) == 1
    assert [module.training for module in model.modules()] == before


def test_an_adapter_that_learns_between_two_calls():
    model = changed_model(fresh_lora)
    generator = unfused(model)
    generator.generate("A", **GREEDY)
    adapters = [m for m in model.modules() if isinstance(m, LoraLinear)]
    with torch.no_grad():
        for module in adapters:
            module.b.normal_()
    assert generator.generate("A", **GREEDY)[0].token_ids == by_forward(model, "A")


def test_cached_states_on_disk_are_not_those_of_another_model(tmp_path):
    """Two models with the same weights: the second has another norm."""
    for model in (spread_model(), changed_model(other_norm)):
        engine = new_engine(model, slots=1, cache_folder=tmp_path, cache_interval=8, fused=False)
        driver = Driver(engine)
        request = driver.add(greedy("Once upon a time"))
        driver.finish()
        engine.close()
        assert engine.stats().cached_tokens == 0
        assert driver.completion(request).token_ids == by_forward(model, "Once upon a time")


def test_peft_adapters():
    peft = pytest.importorskip("peft")
    model = spread_model()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q", "k", "v"], init_lora_weights=False)
    )
    with pytest.raises(ValueError, match=r"backbone\.blocks\.0\.mlstm_layer\.q is a .*lora"):
        Generator(model, ByteTokenizer()).generate("A")
    want = by_forward(model, "The sea")
    assert want != by_forward(spread_model(), "The sea")
    for either in (model, adapted):
        assert unfused(either).generate("The sea", **GREEDY)[0].token_ids == want


# Requests that also keep the state of a scored prompt


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("prompt", ["", "A", "The sea was"])
def test_the_state_of_a_prompt_that_is_only_scored(state, prompt):
    generator = Generator(spread_model(), ByteTokenizer())
    before = generator.read("So ") if state else None
    request = Request(prompt, state=before, prompt_logprobs=1, prefill_only=True, keep_state=True)
    without = copy_of(request, keep_state=False)
    outputs = {}
    for asked in (request, without):
        driver = Driver(new_engine(generator.model, slots=1))
        driver.add(asked)
        driver.finish()
        outputs[asked] = driver
    kept = outputs[request].completion(request).state
    assert outputs[without].completion(without).state is None
    want = generator.read([prompt], state=before)
    assert kept.tokens_seen == want.tokens_seen
    torch.testing.assert_close(kept.logits, want.logits, atol=1e-4, rtol=1e-4)
    scores = [
        [value for output in outputs[asked].outputs[asked] for value in output.prompt_logprobs]
        for asked in (request, without)
    ]
    # Products of 10 and of 11 rows round differently, by some 2e-6 of a logit near the cap of 30.
    assert scores[0] == pytest.approx(scores[1], abs=5e-5)


@pytest.mark.gpu
def test_calls_of_the_model_on_a_gpu():
    model = spread_model()
    trained_lora(model)
    want = [by_forward(model, prompt) for prompt in PROMPTS]
    assert [done.token_ids for done in unfused(model.cuda()).generate(PROMPTS, **GREEDY)] == want
