"""`optimize(model)`: what fails or is wrong in `transformers` as it is, works with it."""

import copy
import importlib.util
import pickle
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error

from xlstm7b import XLSTM, Generator
from xlstm7b.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from xlstm7b.integrations import decode_graph  # noqa: E402
from xlstm7b.integrations import transformers as integration  # noqa: E402
from xlstm7b.integrations.transformers import (  # noqa: E402
    LORA_TARGETS,
    TESTED_VERSIONS,
    XLSTMCache,
    optimize,
)

VOCABULARY = 320
ROUNDING, EXACT = 2e-5, 1e-10  # of float32 and of float64, relative to the norm


@torch.no_grad()
def stock(dtype: torch.dtype = torch.float32, **options):
    """A small xLSTM of transformers, at a scale where gates, norms and soft-caps have an effect."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2}
    config = transformers.xLSTMConfig(vocab_size=VOCABULARY, eos_token_id=0, **sizes | options)
    model = transformers.xLSTMForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("fgate_preact.bias"):
            parameter.uniform_(1, 5)
        elif name.endswith("igate_preact.bias"):
            parameter.uniform_(-6, 1)
        else:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model.to(dtype)


@pytest.fixture
def ours():
    return optimize(stock())


@cache
def exact():
    """One optimized model in float64 for all examples of a property."""
    return optimize(stock(torch.float64))


def random_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of rows of different lengths and its mask. The padding is a token of text."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), 7)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


def gradients(model) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.fixture
def graphs(monkeypatch):
    """Decodes as on a GPU. Counts the graphs that are made."""
    made = []

    class Counted(decode_graph.DecodeGraph):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    def find_graph(model, cache, tokens):
        if tokens is None or tokens.shape[1] != 1 or cache.states is None or cache.is_recording:
            return None
        return (
            None if torch.is_grad_enabled() else decode_graph.graph_for(model, cache, len(tokens))
        )

    monkeypatch.setattr(decode_graph, "DecodeGraph", Counted)
    monkeypatch.setattr(integration, "find_graph", find_graph)
    return made


OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


# What does not work in transformers as it is.


def train_with_the_default_cache(model) -> None:
    ids = random_ids(2, 64)
    model.train()(ids, labels=ids).loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model))


def train_with_an_odd_length(model) -> None:
    ids = random_ids(2, 50)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()


def pad_on_the_left(model) -> None:
    rows = [random_ids(1, 9)[0], random_ids(1, 30)[0]]
    ids, mask = padded(rows, "left")
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits[0, -9:]
        assert error(got, model(rows[0][None]).logits[0]) < ROUNDING


def pack_documents(model) -> None:
    first, second = random_ids(1, 20), random_ids(1, 33)
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    with torch.no_grad():
        got = model(torch.cat([first, second], 1), position_ids=positions).logits[:, 20:]
        assert error(got, model(second).logits) < ROUNDING


def keep_some_logits(model) -> None:
    with torch.no_grad():
        assert model(random_ids(1, 12), logits_to_keep=3).logits.shape == (1, 3, VOCABULARY)


def search_with_beams(model) -> None:
    ids = random_ids(2, 10)
    with_cache, without = (
        model.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False, use_cache=uses)
        for uses in (True, False)
    )
    assert torch.equal(with_cache, without)


def look_up_candidates(model) -> None:
    ids = random_ids(1, 6).repeat(1, 4)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **options), want)


def keep_the_state_in_float32(model) -> None:
    model.to(torch.bfloat16)
    with torch.no_grad():
        out = model(random_ids(1, 10), use_cache=True)
        out = model(random_ids(1, 1), cache_params=out.cache_params, use_cache=True)
    states = getattr(out.cache_params, "states", None) or out.cache_params.rnn_state.values()
    assert {part.dtype for state in states for part in state} == {torch.float32}


# Each with how it fails.
FAILING = {
    train_with_the_default_cache: (RuntimeError, "modified by an inplace operation"),
    train_with_an_odd_length: ((ValueError, AssertionError), "is not divisible by chunk size"),
    pad_on_the_left: (AssertionError, None),
    pack_documents: (AssertionError, None),
    keep_some_logits: (AssertionError, None),
    search_with_beams: (ValueError, "cannot use beam search with a cache"),
    look_up_candidates: (ValueError, "assisted generation is not supported"),
    keep_the_state_in_float32: (AssertionError, "bfloat16"),
}


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_what_fails_in_transformers_works_after_optimize(case):
    # Odd lengths fail where the config asks for the training kernels.
    options = {"mode": "train"} if case is train_with_an_odd_length else {}
    kind, message = FAILING[case]
    with pytest.raises(kind, match=message):
        case(stock(**options))
    case(optimize(stock(**options)))


def test_lora_has_default_targets(monkeypatch):
    peft = pytest.importorskip("peft")
    mapping = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.delitem(mapping, "xlstm", raising=False)
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(stock(), peft.LoraConfig(r=2))
    adapted = peft.get_peft_model(optimize(stock()), peft.LoraConfig(r=2))
    layers = [
        name.rpartition(".")[2] for name, m in adapted.named_modules() if hasattr(m, "lora_A")
    ]
    assert sorted(layers) == sorted([*LORA_TARGETS] * 2)


# The same numbers


def test_logits_and_hidden_states_are_those_of_transformers(ours):
    ids = random_ids(2, 100)
    with torch.no_grad():
        want = stock()(ids, output_hidden_states=True)
        got = ours(ids, output_hidden_states=True)
        assert error(got.logits, want.logits) < ROUNDING
        assert len(got.hidden_states) == len(want.hidden_states) == 3
        for got_part, want_part in zip(got.hidden_states, want.hidden_states, strict=True):
            assert error(got_part, want_part) < ROUNDING
        embedded = ours(inputs_embeds=ours.get_input_embeddings()(ids), return_dict=False)
        assert torch.equal(embedded[0], got.logits)
        assert ours(ids, use_cache=False).past_key_values is None
        assert ours.backbone(ids).last_hidden_state.shape == (2, 100, 128)


@pytest.mark.parametrize("layers", [[0], (1,), {0, 1}, [], [2], [-1], [-4, 0, 3], 0, 1, True])
@pytest.mark.parametrize("in_config", [False, True])
def test_single_hidden_states_are_those_of_transformers(layers, in_config):
    ids, theirs, ours = random_ids(2, 30), stock(), optimize(stock())
    options = {} if in_config else {"output_hidden_states": layers}
    for model in (theirs, ours) if in_config else ():
        model.config.output_hidden_states = layers
    with torch.no_grad():
        for wanted, got in (
            (theirs(ids, **options), ours(ids, **options)),
            (theirs.backbone(ids, **options), ours.backbone(ids, **options)),
        ):
            if not layers:
                assert got.hidden_states is wanted.hidden_states is None
                continue
            for one, other in zip(got.hidden_states, wanted.hidden_states, strict=True):
                assert (one is None) == (other is None)
                assert one is None or error(one, other) < ROUNDING


def test_hidden_states_that_the_config_asks_for_are_returned_for_single_tokens(graphs):
    model, ids = optimize(stock()), random_ids(1, 8)
    model.config.output_hidden_states = True
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert len(model(ids[:, :1], past_key_values=cache).hidden_states) == 3


def test_outputs_and_caches_are_accepted_as_those_of_transformers(ours):
    ids, theirs = random_ids(2, 30), stock()
    with torch.no_grad():
        for one, other in ((ours, theirs), (ours.backbone, theirs.backbone)):
            got, want = one(ids, use_cache=True), other(ids, use_cache=True)
            assert got.keys() == want.keys()
            assert [*map(type, one(ids, use_cache=True, return_dict=False))] == [
                XLSTMCache if part is want.cache_params else type(part) for part in want.to_tuple()
            ]
            mine, cache = got.cache_params, want.cache_params
            assert mine is got.past_key_values
            assert isinstance(mine, type(cache))
            assert mine.dtype == torch.float32
            assert torch.equal(mine.seqlen_offset, cache.seqlen_offset)
            assert mine.rnn_state.keys() == cache.rnn_state.keys()
            for layer, parts in cache.rnn_state.items():
                for part, expected in zip(mine.rnn_state[layer], parts, strict=True):
                    assert part.shape == expected.shape
                # The scale exp(m) of the parts may differ.
                C, n, m = mine.rnn_state[layer]
                assert error(C * m[..., None].exp(), parts[0] * parts[2][..., None].exp()) < 1e-4
                assert error(n * m.exp(), parts[1] * parts[2].exp()) < 1e-4
    assert XLSTMCache().rnn_state == {}


def test_gradients_are_those_of_transformers(ours):
    ids, theirs = random_ids(2, 64), stock().train()
    theirs(ids, labels=ids, use_cache=False).loss.backward()
    ours.train()(ids, labels=ids).loss.backward()
    for got, want in zip(gradients(ours), gradients(theirs), strict=True):
        assert error(got, want) < 1e-4


def test_bfloat16_is_at_least_as_close_to_float32_as_transformers():
    ids = random_ids(2, 100)
    with torch.no_grad():
        want = stock()(ids).logits
        ours, theirs = (
            model(ids).logits for model in (optimize(stock(torch.bfloat16)), stock(torch.bfloat16))
        )
    assert ours.dtype == torch.float32
    assert error(ours, want) <= error(theirs, want)


def test_generate_is_that_of_transformers_and_of_our_generator(ours, tmp_path):
    ids = random_ids(1, 20)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    got = ours.generate(ids, **options)
    assert torch.equal(got, stock().generate(ids, **options))
    ours.save_pretrained(tmp_path)
    generator = Generator(XLSTM.from_pretrained(tmp_path), ByteTokenizer())
    prompt = ids[0].tolist()
    # Our generator puts the model's first token before a prompt.
    first = torch.cat([torch.zeros_like(ids[:, :1]), ids], dim=1)
    want = generator.generate([prompt], max_new_tokens=24, temperature=0, eos_token_id=[])[0]
    assert ours.generate(first, **options)[0, 21:].tolist() == list(want.token_ids)


def test_gates_of_another_layer_are_widened():
    """As those of a quantised layer, which returns the dtype of its input."""
    ids, plain = random_ids(1, 20), optimize(stock(torch.bfloat16))
    want = plain(ids).logits
    for block in plain.backbone.blocks:
        for name in ("igate_preact", "fgate_preact"):
            gate = getattr(block.mlstm_layer, name)
            setattr(block.mlstm_layer, name, torch.nn.Sequential(gate, Narrow()))
    assert error(plain(ids).logits, want) < 0.1


class Narrow(torch.nn.Module):
    def forward(self, x):
        return x.bfloat16()


# Padding and documents


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(max_examples=40)
@given(lengths=lengths, side=st.sampled_from(["left", "right"]))
def test_each_row_of_a_padded_batch_equals_the_row_alone(lengths, side):
    model = exact()
    rows = [random_ids(1, length)[0] for length in lengths]
    ids, mask = padded(rows, side)
    continued = random_ids(len(rows), 1)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        after = model(continued, past_key_values=out.past_key_values).logits
        for index, row in enumerate(rows):
            alone = model(row[None], use_cache=True)
            assert error(out.logits[index][mask[index] == 1], alone.logits[0]) < EXACT
            want = model(continued[index, None], past_key_values=alone.past_key_values).logits
            assert error(after[index], want[0]) < EXACT


@settings(max_examples=40)
@given(lengths=lengths, cut=st.integers(1, 40))
def test_each_packed_document_equals_the_document_alone(lengths, cut):
    model = exact()
    documents = [random_ids(1, length) for length in lengths]
    ids = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        got = model(ids, position_ids=positions).logits.split(lengths, dim=1)
        for part, document in zip(got, documents, strict=True):
            assert error(part, model(document).logits) < EXACT
        # In two parts: a document that the cut divides is continued from the cache.
        cut = min(cut, ids.shape[1] - 1)
        if cut and positions[0, cut] > 0:
            before = model(ids[:, :cut], position_ids=positions[:, :cut], use_cache=True)
            after = model(
                ids[:, cut:],
                position_ids=positions[:, cut:],
                past_key_values=before.past_key_values,
            )
            assert error(after.logits, torch.cat(got, dim=1)[:, cut:]) < EXACT


@pytest.mark.parametrize("way", ["left", "right", "packed"])
def test_the_gradient_of_a_batch_is_that_of_its_rows(way):
    ours = exact()
    rows = [random_ids(1, length)[0] for length in (9, 25, 40)]
    ours.train()
    for row in rows:
        ours(row[None], labels=row[None], num_items_in_batch=71).loss.backward()
    want = gradients(ours)
    if way == "packed":
        ids = torch.cat(rows)[None]
        labels = torch.cat([row.index_fill(0, torch.tensor([0]), -100) for row in rows])[None]
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        options = {"position_ids": positions}
    else:
        ids, mask = padded(rows, way)
        labels = ids.masked_fill(mask == 0, -100)
        starts = mask.argmax(dim=1)
        labels[torch.arange(3), starts] = -100
        options = {"attention_mask": mask}
    ours(ids, labels=labels, num_items_in_batch=71, **options).loss.backward()
    for got, expected in zip(gradients(ours), want, strict=True):
        assert error(got, expected) < ROUNDING  # the loss is in float32


def test_padding_may_hold_anything(ours):
    ids, mask = padded([random_ids(1, 9)[0], random_ids(1, 30)[0]], "left")
    vectors = ours.get_input_embeddings()(ids).detach()
    want = ours(inputs_embeds=vectors, attention_mask=mask).logits[mask == 1]
    vectors[mask == 0] = torch.nan
    got = ours(inputs_embeds=vectors, attention_mask=mask).logits
    assert torch.equal(got[mask == 1], want)
    got.sum().backward()
    assert all(grad is None or grad.isfinite().all() for grad in gradients(ours))


@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_prompts_are_continued_as_each_alone(ours, beams):
    rows = [random_ids(1, length)[0] for length in (5, 17, 12)]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    got = ours.generate(ids, attention_mask=mask, **options)
    for index, row in enumerate(rows):
        want = ours.generate(row[None], **options)
        assert torch.equal(got[index, 17:], want[0, len(row) :])


def test_a_long_prompt_is_read_in_parts():
    ids, mask = padded([random_ids(1, 90)[0], random_ids(1, 70)[0]], "left")
    model = optimize(stock(max_inference_chunksize=32))
    with torch.no_grad():
        got = model(ids, attention_mask=mask)
        want = optimize(stock())(ids, attention_mask=mask)
    assert error(got.logits, want.logits) < ROUNDING


# The cache


@settings(max_examples=40)
@given(calls=st.lists(st.integers(1, 12), min_size=1, max_size=5), removed=st.integers(0, 30))
def test_tokens_can_be_taken_back_from_a_recording_cache(calls, removed):
    model, memory = exact(), XLSTMCache()
    before, ids = random_ids(2, 7), random_ids(2, sum(calls))
    removed = min(removed, sum(calls))
    kept = torch.cat([before, ids[:, : sum(calls) - removed]], dim=1)
    follows = random_ids(2, 1)
    with torch.no_grad():
        model(before, past_key_values=memory)
        memory.activate_past_recording()
        for part in ids.split(calls, dim=1):
            model(part, past_key_values=memory)
        memory.crop(-removed)
        assert memory.get_seq_length() == kept.shape[1]
        got = model(follows, past_key_values=memory).logits
        want = model(torch.cat([kept, follows], dim=1)).logits[:, -1:]
    assert error(got, want) < EXACT


@pytest.mark.parametrize("steps", [0, 3])
def test_a_copied_cache_continues_by_itself(graphs, steps):
    """As for many questions about one text, which is read once."""
    model, ids, follows = optimize(stock()), random_ids(1, 9), random_ids(1, 3 + steps)
    with torch.no_grad():
        text = model(ids, use_cache=True).past_key_values
        for t in range(steps):
            model(follows[:, t, None], past_key_values=text)
        first, second = copy.deepcopy(text), copy.deepcopy(text)
        for token in follows[:, steps:].split(1, dim=1):
            got = model(token, past_key_values=first).logits
            model(random_ids(1, 1), past_key_values=second)
        want = model(torch.cat([ids, follows], dim=1)).logits[:, -1:]
    assert error(got, want) < ROUNDING
    assert text.get_seq_length() == 9 + steps


def test_what_is_not_recorded_cannot_be_taken_back(ours):
    cache = XLSTMCache()
    with torch.no_grad():
        ours(random_ids(1, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="last 2 tokens cannot be taken back: 0 are recorded"):
        cache.crop(-2)
    cache.crop(0)
    cache.crop(5)
    assert cache.get_seq_length() == 5
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.states is None


def test_rows_of_a_cache_can_be_copied_and_reordered(ours):
    ids, follows = random_ids(2, 9), random_ids(2, 1)
    with torch.no_grad():
        cache = ours(ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0]))
        got = ours(follows, past_key_values=cache).logits
        want = ours(torch.cat([ids[[1, 0]], follows], dim=1)).logits[:, -1:]
    assert error(got, want) < ROUNDING


@pytest.mark.parametrize("name", ["past_key_values", "cache_params"])
def test_generate_continues_from_a_cache(ours, name):
    ids = random_ids(2, 20)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    want = ours.generate(ids, **options)
    for start in (0, 15):  # the whole text, or only the tokens that the cache has not read
        with torch.no_grad():
            cache = ours(ids[:, :15], use_cache=True).past_key_values
        given_cache = {name: cache}
        if name == "cache_params" and not start:
            continue  # generate looks up the tokens read under the other name
        mask = torch.ones_like(ids)
        got = ours.generate(ids[:, start:], attention_mask=mask, **given_cache, **options)
        assert torch.equal(got[:, -10:], want[:, -10:])


def test_another_model_can_propose_tokens(ours):
    helper = optimize(stock())
    with torch.no_grad():
        for parameter in helper.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = random_ids(1, 20)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    want = ours.generate(ids, **options)
    assert torch.equal(ours.generate(ids, assistant_model=helper, **options), want)
    assert torch.equal(ours.generate(ids, prefill_chunk_size=7, **options), want)


# Decoding as one graph. On a CPU the same code runs without CUDA's graph.


@pytest.mark.parametrize("beams", [1, 3])
def test_the_graph_generates_the_same_tokens(graphs, beams):
    model, ids = optimize(stock()), random_ids(2, 10)
    got = model.generate(ids, num_beams=beams, **OPTIONS)
    assert torch.equal(got, model.generate(ids, num_beams=beams, use_cache=False, **OPTIONS))
    assert len(graphs) == 1


def test_tokens_that_may_be_taken_back_are_not_decoded_as_a_graph(graphs):
    model, ids = optimize(stock()), random_ids(1, 10)
    got = model.generate(ids, prompt_lookup_num_tokens=3, **OPTIONS)
    assert not graphs
    assert torch.equal(got, model.generate(ids, **OPTIONS))


def test_the_graph_leaves_padding_out(graphs):
    model = optimize(stock())
    ids, mask = padded([random_ids(1, 5)[0], random_ids(1, 9)[0]], "left")
    got = model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(got[0, 4:], model.generate(ids[:1, 4:], **OPTIONS)[0])
    with torch.no_grad():  # a row whose new token is padding keeps its state
        cache = model(ids, attention_mask=mask).past_key_values
        token = random_ids(2, 1)
        step = torch.tensor([[1], [0]])
        model(token, attention_mask=torch.cat([mask, step], dim=1), past_key_values=cache)
        before = model(ids, attention_mask=mask).past_key_values
    assert torch.equal(cache.states[0].C[1], before.states[0].C[1])
    assert not torch.equal(cache.states[0].C[0], before.states[0].C[0])


def test_the_graph_serves_several_caches_in_turn(graphs):
    model, ids, follows = optimize(stock()), random_ids(2, 9), random_ids(2, 6)
    with torch.no_grad():
        caches = [model(row[None], use_cache=True).past_key_values for row in ids]
        steps = [
            [
                model(follows[row, t, None, None], past_key_values=caches[row]).logits[0, 0]
                for row in (0, 1)
            ]
            for t in range(6)
        ]
        want = model(torch.cat([ids, follows], dim=1)).logits[:, 9:]
    got = torch.stack([torch.stack(step) for step in steps], dim=1)
    assert error(got, want) < ROUNDING
    assert len(graphs) == 1


def test_a_recording_does_not_depend_on_the_memory_of_the_graph(graphs):
    model, ids = optimize(stock()), random_ids(2, 9)
    with torch.no_grad():
        caches = [model(row[None], use_cache=True).past_key_values for row in ids]
        model(ids[:1, :1], past_key_values=caches[0])  # its states are the graph's now
        caches[0].activate_past_recording()
        model(ids[1:], past_key_values=caches[0])
        model(ids[:1, :1], past_key_values=caches[1])  # and now those of the other cache
        caches[0].crop(-9)
        got = model(ids[:1, 5:], past_key_values=caches[0]).logits
        want = model(torch.cat([ids[:1], ids[:1, :1], ids[:1, 5:]], dim=1)).logits[:, 10:]
    assert error(got, want) < ROUNDING


def test_a_cache_can_be_continued_by_another_model(graphs):
    model, other, ids = optimize(stock()), optimize(stock()), random_ids(1, 9)
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
        cache = model(ids[:, :7], use_cache=True).past_key_values
        model(ids[:, 7, None], past_key_values=cache)
        got = other(ids[:, 8, None], past_key_values=cache).logits
        assert error(got, other(ids).logits[:, -1:]) < ROUNDING
    assert len(graphs) == 2


def test_the_graph_follows_the_weights(graphs, tmp_path):
    model, ids = optimize(stock()), random_ids(2, 9)

    def agrees() -> bool:
        fresh = optimize(copy.deepcopy(model))
        return torch.equal(
            model.generate(ids, **OPTIONS), fresh.generate(ids, use_cache=False, **OPTIONS)
        )

    assert agrees()
    made = len(graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()(ids, labels=ids).loss.backward()
    optimizer.step()  # in place: the same graph reads the new weights
    model.eval()
    assert agrees()
    assert len(graphs) == made
    model.save_pretrained(tmp_path)  # parameters that share memory are saved one by one
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9  # other memory: a new graph
    assert agrees()
    assert len(graphs) == made + 1
    model.load_state_dict(stock().state_dict())
    assert agrees()


def test_models_that_compute_something_else_are_not_decoded_as_a_graph(graphs):
    peft = pytest.importorskip("peft")
    model, ids = optimize(stock()), random_ids(1, 9)
    plain = model.generate(ids, **OPTIONS)
    assert len(graphs) == 1
    seen = []
    hook = model.backbone.blocks[1].ffn.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert len(seen) == 12
    hook.remove()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False))
    changed = adapted.generate(input_ids=ids, **OPTIONS)
    assert not torch.equal(changed, plain)
    assert torch.equal(changed, adapted.generate(input_ids=ids, use_cache=False, **OPTIONS))
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(input_ids=ids, **OPTIONS), plain)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.generate(ids, **OPTIONS), changed)
    assert len(graphs) == 2


def test_parameters_in_one_buffer_stay_there(graphs):
    """As DeepSpeed has them: its optimizer writes to the buffer."""
    model, ids = optimize(stock()), random_ids(1, 9)
    buffer = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(buffer, model.parameters())
    model.generate(ids, **OPTIONS)
    assert not graphs
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert storages == {buffer.untyped_storage().data_ptr()}


# Training, compiling, saving


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(ours, reentrant):
    ids = random_ids(2, 50)
    ours.train()(ids, labels=ids).loss.backward()
    want = gradients(ours)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours(ids, labels=ids).loss.backward()
    for got, expected in zip(gradients(ours), want, strict=True):
        assert torch.equal(got, expected)


def test_a_compiled_training_step_is_one_graph():
    torch.compiler.reset()
    ours = optimize(stock(num_hidden_layers=1))
    ids, mask = padded([random_ids(1, 50)[0], random_ids(1, 33)[0]], "right")
    options = {"labels": ids, "attention_mask": mask, "position_ids": torch.arange(50)[None]}
    ours.train()(ids, **options).loss.backward()
    want = gradients(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    compiled(ids, **options).loss.backward()
    for got, expected in zip(gradients(ours), want, strict=True):
        assert error(got, expected) < ROUNDING


def test_a_compiled_model_generates_the_same_tokens():
    torch.compiler.reset()
    model, ids = optimize(stock(num_hidden_layers=1)), random_ids(2, 10)
    want = model.generate(ids, **OPTIONS)
    model.compile(backend="eager")
    assert torch.equal(model.generate(ids, **OPTIONS), want)


def test_autocast_computes_what_our_model_computes(ours, tmp_path):
    ids = random_ids(2, 50)
    ours.save_pretrained(tmp_path)
    model = XLSTM.from_pretrained(tmp_path)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got, (want, _) = ours(ids).logits, model(ids)
    assert error(got, want) < 1e-2
    assert got.dtype == torch.float32


def test_weights_class_and_files_stay(tmp_path):
    model = stock()
    parameters, kind = dict(model.named_parameters()), type(model)
    model.save_pretrained(tmp_path / "stock")
    assert optimize(model) is model
    assert optimize(model) is model  # again: nothing changes
    assert isinstance(model, kind)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    model.save_pretrained(tmp_path / "ours")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")) is kind
    ids = random_ids(1, 10)
    want = model(ids).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(ids).logits, want)
        assert not any(copied.get_parameter(name) is p for name, p in parameters.items())


def test_weights_can_be_offloaded(ours):
    accelerate = pytest.importorskip("accelerate")
    ids = random_ids(1, 10)
    want = ours.generate(ids, **OPTIONS)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    assert next(ours.parameters()).is_meta
    assert torch.equal(ours.generate(ids, **OPTIONS), want)


def test_a_peft_model_can_be_optimized_later():
    peft = pytest.importorskip("peft")
    targets = [*LORA_TARGETS, "igate_preact", "fgate_preact"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    late = optimize(peft.get_peft_model(stock(), config))
    torch.manual_seed(1)
    early = peft.get_peft_model(optimize(stock()), config)
    ids = random_ids(2, 20)
    with torch.no_grad():
        torch.manual_seed(2)
        for adapted in (late, early):
            torch.manual_seed(2)
            for name, parameter in adapted.named_parameters():
                if "lora" in name:
                    parameter.normal_(std=0.05)
        got = late(input_ids=ids).logits
        assert torch.equal(got, early(input_ids=ids).logits)
        assert error(late.merge_and_unload()(ids).logits, got) < ROUNDING


# Versions and mistakes


@pytest.fixture
def unchecked():
    """The check of `transformers` runs again, as in a new process."""
    integration._check_library.cache_clear()
    yield
    integration._check_library.cache_clear()


@pytest.mark.parametrize("version", ["5.16.3", "5.99.0.dev0", "6.0rc1"])
def test_a_version_that_no_test_ran_with_is_one_warning(version, monkeypatch, unchecked):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.warns(UserWarning, match=f"no test of xlstm7b ran with transformers {version}"):
        optimize(stock())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(stock())


def test_the_installed_version_has_no_warning(unchecked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(stock())


def other_logits(monkeypatch) -> str:
    norm = integration._theirs.xLSTMRMSNorm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 1.01 * forward(self, x))
    return r"a small model has other numbers \(loss, relative error "


def another_name_of_a_layer(monkeypatch) -> str:
    create = integration._theirs.xLSTMBlock.__init__

    def renamed(self, config):
        create(self, config)
        self.norm_before = self.norm_mlstm
        del self.norm_mlstm

    monkeypatch.setattr(integration._theirs.xLSTMBlock, "__init__", renamed)
    return "'xLSTMBlock' object has no attribute 'norm_mlstm'"


def another_signature(monkeypatch) -> str:
    kind = integration._theirs.xLSTMForCausalLM
    monkeypatch.setattr(kind, "_prepare_cache_for_generation", lambda self, model_kwargs: None)
    return "takes .*'self', 'model_kwargs'.*, not .*'self', 'generation_config', 'model_kwargs'"


@pytest.mark.parametrize("change", [other_logits, another_name_of_a_layer, another_signature])
def test_a_version_that_fails_is_refused(change, monkeypatch, unchecked):
    model = stock()
    sentence = change(monkeypatch)
    version = transformers.__version__
    with pytest.raises(ValueError, match=f"not work with transformers {version}: .*{sentence}"):
        optimize(model)


def test_a_version_without_a_class_that_is_used_is_refused(monkeypatch):
    monkeypatch.delattr(integration._theirs, "xLSTMBlock")
    spec = importlib.util.spec_from_file_location("again", integration.__file__)
    version = transformers.__version__
    with pytest.raises(
        ImportError, match=f"^the xLSTM of transformers {version} has no xLSTMBlock"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_check_leaves_the_process_as_it_was(unchecked, monkeypatch):
    model = stock()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            before = torch.get_rng_state()
            optimize(model)
            assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_docs_name_the_tested_versions():
    text = (Path(__file__).parents[2] / "docs/library.md").read_text(encoding="utf-8")
    first, last = (".".join(map(str, version)) for version in TESTED_VERSIONS)
    assert f"tests ran with `transformers` {first} to {last}" in " ".join(text.split())


def test_mistakes_are_one_sentence(ours):
    with pytest.raises(ValueError, match="takes an xLSTMForCausalLM, not a Linear"):
        optimize(torch.nn.Linear(2, 2))
    fused = stock()
    fused.config.weight_mode = "fused"
    with pytest.raises(ValueError, match="weight_mode = 'single', and this model has 'fused'"):
        optimize(fused)
    ids = random_ids(2, 8)
    with pytest.raises(ValueError, match="XLSTMCache, not DynamicCache"):
        ours(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="XLSTMCache, not tuple"):
        ours.generate(ids, past_key_values=((1, 2),), max_new_tokens=1)
    cache = XLSTMCache()
    cache.states = ours(ids).past_key_values.states * 2
    with pytest.raises(ValueError, match="filled by another model"):
        ours(ids, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"attention_mask must be \[2, 8\] or longer, not \[2, 7\]"
    ):
        ours(ids, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"position_ids must be \[2, 8\], not \[3, 2, 8\]"):
        ours(ids, position_ids=torch.ones(3, 2, 8))
    for rows in (0, 3):  # of another batch
        with pytest.raises(ValueError, match=rf"attention_mask must be .*, not \[{rows}, 8\]"):
            ours(ids, attention_mask=torch.ones(rows, 8))
        with pytest.raises(ValueError, match=rf"position_ids must be .*, not \[{rows}, 8\]"):
            ours(ids, position_ids=torch.ones(rows, 8))
    with pytest.raises(ValueError, match=r"position_ids must be \[2, 8\], not \[\]"):
        ours(ids, position_ids=torch.tensor(1))
    with pytest.raises(ValueError, match="no tokens to read"):
        ours(ids[:, :0])
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        ours()


def test_the_package_does_not_import_transformers():
    code = "import sys, xlstm7b; assert not {'transformers', 'peft'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
