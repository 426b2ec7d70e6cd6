"""ModelRunner: prefill in any batches and chunks, then decode, as one pass over the whole text.

Most tests run twice: as on a CPU, and with the batches and graphs of a GPU (`GraphRunner`).
"""

import copy
import random

import pytest
import torch
from engines import GraphRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import assert_state_after, spread_model, tensors
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate import SamplingParams
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.params import MAX_LOGPROBS
from xlstm7b.generate.runner import (
    _MAX_GRAPH_TOKENS,
    _ONE_ROW,
    _ROW_TOKENS,
    _ROWS,
    _SLOT_BUCKETS,
    CPU_SLOTS,
    MAX_SLOTS,
    ModelRunner,
    PrefillRow,
    _covering,
    _prefill_bucket,
    fitting_slots,
    prefill_limits,
)
from xlstm7b.generate.sampler import Needs, Sampler, token_logprobs
from xlstm7b.generate.state import state_bytes
from xlstm7b.model import XLSTM

EOS = 39


torch.manual_seed(0)
MODEL = spread_model(torch.float64, gate_std=0.5, spread=20, vocab_size=40, eos_token_id=EOS)
FUSED = FusedModel(MODEL)
FLOAT32 = copy.deepcopy(MODEL).float()
FUSED_FLOAT32 = FusedModel(FLOAT32)
both_runners = pytest.mark.parametrize("kind", [ModelRunner, GraphRunner])
kinds = st.sampled_from([ModelRunner, GraphRunner])


def exact_runner(slots: int, kind: type[ModelRunner] = ModelRunner) -> ModelRunner:
    return kind(FUSED, slots, state_dtype=torch.float64)


def draw(*lengths: int) -> list[list[int]]:
    return [torch.randint(1, EOS, (length,)).tolist() for length in lengths]


def held(runner: ModelRunner, *slots: int) -> list[Tensor]:
    """A copy of everything that the runner holds of these slots."""
    return [tensor for slot in slots for tensor in tensors(runner.saved(slot))]


def unchanged(runner: ModelRunner, before: list[Tensor], *slots: int) -> bool:
    return all(map(torch.equal, held(runner, *slots), before))


def assert_has_read(runner: ModelRunner, slot: int, tokens: list[int]) -> None:
    """The slot holds the state after these tokens."""
    assert_state_after(runner.saved(slot), MODEL, tokens)


# Prefill


@pytest.mark.parametrize(
    "lengths", [(1,), (15,), (64,), (65,), (131,), (33,) * 3, (70, 16, 1), (300, 3, 2, 1), (1, 1)]
)
@both_runners
def test_prompts_of_any_lengths(kind, lengths):
    runner, prompts = exact_runner(len(lengths) + 1, kind), draw(*lengths)
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(prompts)])
    runner.decode(len(lengths) - 1)  # no slot has started to sample: nothing changes
    for slot, tokens in enumerate(prompts):
        assert_has_read(runner, slot, [0, *tokens])
    # Without the first token, from a slot that was used before.
    for slot in range(len(prompts)):
        runner.load(slot, None)
    runner.prefill([PrefillRow(slot, tokens) for slot, tokens in enumerate(prompts)])
    for slot, tokens in enumerate(prompts):
        assert_has_read(runner, slot, tokens)


@settings(max_examples=25)
@given(
    batches=st.lists(
        st.dictionaries(st.integers(0, 4), st.integers(1, 90), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    kind=kinds,
    short=st.booleans(),
)
def test_any_prompts_in_any_batches_on_top_of_each_other(batches, kind, short):
    """Slots that are not in a batch do not change, bit for bit."""
    runner, read = exact_runner(5, kind), {}
    for batch in batches:
        rows = []
        others = [slot for slot in range(5) if slot not in batch]
        before = held(runner, *others)
        for slot, length in batch.items():
            (tokens,) = draw(1 if short else length)
            rows.append(PrefillRow(slot, tokens, fresh=slot not in read))
            read[slot] = [*read.get(slot, [0]), *tokens]
        runner.prefill(rows)
        assert unchanged(runner, before, *others)
    for slot, tokens in read.items():
        assert_has_read(runner, slot, tokens)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 16, 17, 20])
def test_padded_batches_change_no_other_slot(count):
    """Batches are padded to the shapes of graphs; what pads them must not be seen anywhere."""
    runner = GraphRunner(FUSED, 24, state_dtype=torch.float64)
    everything = draw(*range(5, 29))
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(everything[:16])])
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(everything)][16:])
    chosen = random.Random(count).sample(range(24), count)
    others = [slot for slot in range(24) if slot not in chosen]
    before = held(runner, *others)
    more = draw(*range(1, count + 1))
    runner.prefill([PrefillRow(*row) for row in zip(chosen, more, strict=True)])
    assert unchanged(runner, before, *others)
    for slot, tokens in zip(chosen, more, strict=True):
        assert_has_read(runner, slot, [0, *everything[slot], *tokens])
    runner.prefill([PrefillRow(0, [5], True)])  # the start state is as it was
    assert_has_read(runner, 0, [0, 5])


@both_runners
def test_single_tokens_are_read_in_one_step(monkeypatch, kind):
    runner, prompts = exact_runner(4, kind), draw(9, 4, 7, 3)
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(prompts)])
    runner.prefill([PrefillRow(slot, [1]) for slot in range(4)])  # graphs are recorded
    steps, step = [], FusedModel.step

    def counted(self, tokens, *arguments, **options):
        steps.append(tokens.tolist())
        return step(self, tokens, *arguments, **options)

    monkeypatch.setattr(FusedModel, "step", counted)
    before = held(runner, 1)
    runner.prefill([PrefillRow(slot, [slot + 3]) for slot in (3, 0, 2)])
    assert steps == [[3, -1, 5, 6]]
    assert unchanged(runner, before, 1)
    for slot in (0, 2, 3):
        assert_has_read(runner, slot, [0, *prompts[slot], 1, slot + 3])
    runner.prefill([PrefillRow(slot, [8], True) for slot in range(4)])
    for slot in range(4):
        assert_has_read(runner, slot, [0, 8])


@both_runners
def test_the_start_of_a_prompt(kind):
    runner, (tokens,) = exact_runner(2, kind), draw(12)
    for _ in range(2):  # the second time it was computed already
        runner.load_start(1)
        assert_has_read(runner, 1, [0])
        runner.prefill([PrefillRow(1, tokens)])
        assert_has_read(runner, 1, [0, *tokens])


def test_the_start_of_a_prompt_without_a_first_token():
    model = copy.deepcopy(MODEL)
    model.config = ModelConfig(
        64, 2, 2, vocab_size=40, eos_token_id=EOS, force_bos_token_insert=False
    )
    for kind in (ModelRunner, GraphRunner):
        runner, (tokens, other) = kind(FusedModel(model), 2, state_dtype=torch.float64), draw(12, 4)
        runner.prefill([PrefillRow(0, other), PrefillRow(1, other)])
        runner.prefill([PrefillRow(1, tokens, fresh=True)])
        assert_has_read(runner, 1, tokens)


# States


@both_runners
def test_load_save_and_move(kind):
    runner, (text, more) = exact_runner(4, kind), draw(30, 11)
    runner.prefill([PrefillRow(0, text, True), PrefillRow(1, text[:9], True)])
    first, second = runner.saved(0), runner.saved(1)
    other = exact_runner(3, kind)
    other.load(0, second)
    other.load(2, first)
    assert_has_read(other, 0, [0, *text[:9]])
    assert_has_read(other, 2, [0, *text])
    other.prefill([PrefillRow(0, more), PrefillRow(2, more[:1])])
    assert_has_read(other, 0, [0, *text[:9], *more])
    assert_has_read(other, 2, [0, *text, *more[:1]])
    # What was saved is a copy.
    assert_has_read(runner, 0, [0, *text])
    runner.load(0, None)
    runner.prefill([PrefillRow(0, more)])
    assert_has_read(runner, 0, more)
    assert all(map(torch.equal, tensors(first), held(other, 2))) is False
    runner.load(3, first)
    assert_has_read(runner, 3, [0, *text])
    # A move leaves the source as it was, but idle.
    runner.start(3, SamplingParams(temperature=0), seed=0)
    (drawn,), *_ = runner.sample([3]).lists()
    runner.move(3, 2)
    assert_has_read(runner, 2, [0, *text])
    before = held(runner, 3)
    tokens = runner.decode(3).lists()[0]
    assert tokens[3] == -1
    assert unchanged(runner, before, 3)
    assert_has_read(runner, 2, [0, *text, drawn])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_kept_in_the_given_dtype_and_its_size_is_known(dtype):
    runner = ModelRunner(FUSED_FLOAT32, 2, state_dtype=dtype)
    runner.prefill([PrefillRow(0, [5, 6, 7], True)])
    saved = runner.saved(0)
    assert saved.model_state.blocks[0].C.dtype == dtype
    assert saved.nbytes == state_bytes(FLOAT32.config, dtype)
    other = ModelRunner(FUSED_FLOAT32, 1)  # in float32: values are converted
    other.load(0, saved)
    assert torch.equal(
        other.saved(0).model_state.blocks[0].C, saved.model_state.blocks[0].C.float()
    )


# Scores


@pytest.mark.parametrize(("length", "top"), [(1, 0), (1, 3), (2, 3), (64, 2), (130, 40), (1100, 5)])
@pytest.mark.parametrize("targets_less", [0, 1])
@both_runners
@torch.no_grad()
def test_scores_of_a_prompt(kind, length, top, targets_less):
    """All logits are computed in parts of 512; the last target may be unknown."""
    runner, (tokens,) = exact_runner(3, kind), draw(length + 1)
    runner.prefill([PrefillRow(slot, [4 + slot] * 3, True) for slot in range(3)])
    others = held(runner, 0, 2)
    results = runner.score(1, tokens[:-1], tokens[1 : len(tokens) - targets_less], top)
    logprobs, top_logprobs, top_tokens = results.lists()
    logits, _ = MODEL(torch.tensor([[0, 5, 5, 5, *tokens[:-1]]]))
    want = logits[0, 4:].log_softmax(-1)[: length - targets_less]
    picked = want.gather(1, torch.tensor(tokens[1:])[: len(want), None])[:, 0]
    assert error(torch.tensor(logprobs, dtype=torch.float64), picked) < 1e-11
    assert top_tokens == want.topk(top).indices.tolist()
    values = torch.tensor(top_logprobs, dtype=torch.float64).view(len(want), top)
    assert error(values, want.topk(top).values) < 1e-11
    assert_has_read(runner, 1, [0, 5, 5, 5, *tokens[:-1]])
    assert unchanged(runner, others, 0, 2)


# Decode


@torch.no_grad()
def recomputed(prompt: list[int], params: SamplingParams, steps: int, seed: int) -> list[int]:
    """Each token from the whole text before it, with no state."""
    sampler, text = Sampler(1, 40, "cpu"), list(prompt)
    sampler.set_row(0, params, seed=seed, prompt=prompt)
    for _ in range(steps):
        logits, _ = FLOAT32(torch.tensor([text]), logits="last")
        sampler(logits, sampler.needs)
        text.append(int(sampler.tokens))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"temperature": 2.0, "top_k": 9},
        {"temperature": 3.0, "top_p": 0.9},
        {"repetition_penalty": 3.0, "min_new_tokens": 9},
    ],
)
@both_runners
def test_decoding_equals_recomputation(kind, params):
    params, prompts = SamplingParams(eos_token_id=EOS, **params), draw(70, 31, 1)
    runner = kind(FUSED_FLOAT32, 3)
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(prompts)])
    for slot, prompt in enumerate(prompts):
        runner.start(slot, params, seed=3 + slot, prompt=[0, *prompt])
    # The first tokens are drawn in another order, and not all at once.
    first = {2: 0, 0: 0, 1: 0}
    first[2], first[0] = runner.sample([2, 0]).lists()[0]
    (first[1],) = runner.sample([1]).lists()[0]
    tokens = [[first[slot] for slot in range(3)]]
    tokens += [runner.decode(2).lists()[0] for _ in range(15)]
    for slot, (prompt, *got) in enumerate(zip(prompts, *tokens, strict=True)):
        if EOS in got:
            end = got.index(EOS) + 1
            assert got[end:] == [-1] * (16 - end)
            got = got[:end]
        assert got == recomputed([0, *prompt], params, len(got), seed=3 + slot)
        assert len(set(got)) > 2


@both_runners
def test_log_probabilities_come_with_the_tokens(kind):
    runner, (prompt,) = kind(FUSED_FLOAT32, 2), draw(9)
    runner.prefill([PrefillRow(slot, prompt, True) for slot in range(2)])
    runner.start(0, SamplingParams(temperature=0), seed=0)
    runner.start(1, SamplingParams(temperature=0, logprobs=3), seed=0)
    tokens, logprobs, top_logprobs, top_tokens = runner.sample([0, 1]).lists()
    assert tokens[0] == tokens[1] == top_tokens[1][0]
    assert logprobs[1] == top_logprobs[1][0]
    assert len(top_tokens[1]) == 3
    assert len(runner.sample([0]).lists()) == 1  # none is wanted in this slot
    results = runner.decode(1)
    tokens, logprobs, top_logprobs, top_tokens = results.lists()
    assert results.scored == {1: 0}  # only this slot is scored
    assert tokens[0] == tokens[1] == top_tokens[0][0]
    assert logprobs == [top_logprobs[0][0]]
    assert [len(top) for top in top_tokens] == [3]


@both_runners
def test_a_slot_that_has_ended_stays_as_it_was(kind):
    greedy, prompts = SamplingParams(temperature=0), draw(12, 9, 5)
    first, second, _ = (recomputed([0, *prompt], greedy, 6, seed=0) for prompt in prompts)
    end = first[2]
    assert end not in (*first[:2], *second)
    runner = kind(FUSED_FLOAT32, 3)
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(prompts)])
    for slot in (0, 1):  # the third never starts
        runner.start(slot, SamplingParams(temperature=0, eos_token_id=end), seed=0)
    runner.sample([0, 1])
    steps = [[first[0], second[0], -1]]
    for _ in range(5):
        before = held(runner, 0, 2)
        steps.append(runner.decode(2).lists()[0])
    assert [*map(list, zip(*steps, strict=True))] == [[*first[:3], -1, -1, -1], second, [-1] * 6]
    assert [runner.saved(slot).tokens_seen for slot in range(3)] == [[15], [15], [6]]
    assert unchanged(runner, before, 0, 2)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@both_runners
def test_a_slot_that_is_stopped_stays_as_it_was(kind):
    runner, prompts = exact_runner(2, kind), draw(8, 8)
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(prompts)])
    for slot in range(2):
        runner.start(slot, SamplingParams(temperature=0, eos_token_id=()), seed=0)
    runner.sample([0, 1])
    runner.decode(1)
    runner.stop(0)
    before = held(runner, 0)
    tokens = [runner.decode(1).lists()[0] for _ in range(3)]
    assert [row[0] for row in tokens] == [-1] * 3
    assert min(row[1] for row in tokens) >= 0
    assert unchanged(runner, before, 0)


def test_one_token_per_step_in_the_same_memory(monkeypatch):
    """No token is read again, and no tensor that the runner holds moves."""
    runner, steps, step = ModelRunner(FUSED_FLOAT32, 2), [], FusedModel.step

    def addresses() -> list[int]:
        parts = [part for block in runner._state.blocks for part in block]
        fixed = (*parts, runner._state.tokens_seen, runner._logits, runner._sampler.pending)
        return [tensor.data_ptr() for tensor in fixed]

    before = addresses()
    runner.prefill([PrefillRow(slot, tokens, True) for slot, tokens in enumerate(draw(9, 4))])
    for slot in range(2):
        runner.start(slot, SamplingParams(eos_token_id=()), seed=slot)
    runner.sample([0, 1])

    def counted(self, tokens, *arguments, **options):
        steps.append(tokens.shape)
        return step(self, tokens, *arguments, **options)

    monkeypatch.setattr(FusedModel, "step", counted)
    for _ in range(20):
        runner.decode(1)
    assert steps == [(2,)] * 20
    assert [runner.saved(slot).tokens_seen for slot in range(2)] == [[30], [25]]
    assert addresses() == before


@both_runners
def test_a_float64_model_decodes(kind):
    runner, (prompt,) = exact_runner(1, kind), draw(9)
    runner.prefill([PrefillRow(0, prompt, True)])
    runner.start(0, SamplingParams(temperature=0), seed=0)
    ((token,),) = runner.sample([0]).lists()
    runner.decode(0)
    assert_has_read(runner, 0, [0, *prompt, token])


# Results


def test_results_are_a_copy():
    """Later steps do not change them: on a GPU they are looked at one step later."""
    runner, (prompt,) = ModelRunner(FUSED_FLOAT32, 1), draw(9)
    runner.prefill([PrefillRow(0, prompt, True)])
    runner.start(0, SamplingParams(temperature=0, eos_token_id=(), logprobs=2), seed=0)
    results = [runner.sample([0]), *(runner.decode(0) for _ in range(3))]
    tokens = [result.lists()[0][0] for result in results]
    assert tokens == recomputed([0, *prompt], SamplingParams(temperature=0), 4, seed=0)


# Shapes of graphs

needs = st.builds(
    Needs, *[st.booleans()] * 6, logprobs=st.one_of(st.none(), st.integers(0, MAX_LOGPROBS))
)


@given(needs)
def test_a_few_kinds_of_sampling_cover_all(wanted):
    wanted = wanted._replace(logprobs=None)
    kind = _covering(wanted)
    assert Needs.union([wanted, kind]) == kind
    assert _covering(kind) == kind
    in_pass = _covering(wanted, in_pass=True)
    assert Needs.union([wanted, in_pass]) == in_pass


def test_a_kind_of_sampling_that_does_more_changes_no_token():
    """On a GPU each slot is sampled with the work that any slot needs, or more."""
    for wanted in ({}, {"top_k": 5}, {"presence_penalty": 1.0}, {"logprobs": 2}):
        params = SamplingParams(temperature=2.0, eos_token_id=(), **wanted)
        drawn = []
        for kind in (ModelRunner, GraphRunner):
            runner = exact_runner(3, kind)
            runner.prefill([PrefillRow(0, [5, 6], True)])
            runner.start(0, params, seed=3, prompt=[0, 5, 6])
            runner.sample([0])
            drawn.append([runner.decode(0).lists()[0][0] for _ in range(8)])
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("slots", [1, 2, 5, 24, 100, MAX_SLOTS])
def test_a_decode_step_computes_few_more_slots_than_are_in_use(slots):
    runner = GraphRunner(FUSED_FLOAT32, slots)
    for used in range(1, slots + 1):
        computed = runner.bucket(used)
        assert used <= computed <= slots
        assert computed in (*_SLOT_BUCKETS, slots)
        assert computed <= max(2 * used, 8)
    assert ModelRunner(FUSED_FLOAT32, slots).bucket(1) == slots  # a CPU computes all of them


@given(rows=st.integers(1, 64), tokens=st.integers(1, 9000))
def test_shapes_of_prefill_batches(rows, tokens):
    count, size, has_graph = _prefill_bucket(rows, tokens)
    assert count >= rows
    assert size >= tokens
    assert size % 64 == 0
    if has_graph:
        assert (count, size) in {
            *((1, size) for size in _ONE_ROW),
            *((count, size) for count in _ROWS for size in _ROW_TOKENS),
        }
        assert count * size <= _MAX_GRAPH_TOKENS
        assert count <= _ROWS[-1]  # the graphs' input buffer has room for as many
        assert count < 2 * rows or rows == 1
    else:
        assert count == rows
        assert size < tokens + 64
        assert rows > _ROWS[-1] or rows * tokens > _MAX_GRAPH_TOKENS / 2 or tokens > 512


def test_every_shape_of_a_graph_is_recorded_at_the_start(monkeypatch):
    """Later, in the middle of requests, recording would take long."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    runner = GraphRunner(FUSED_FLOAT32, 20)
    runner.prefill([PrefillRow(3, [5, 6, 7], True)])
    before = held(runner, *range(20))
    runner.warm_up(512)
    assert unchanged(runner, before, *range(20))
    recorded = {*runner._graphs}
    for rows in range(1, 17):
        for tokens in (1, 63, 64, 65, 200, 300, 500, 700, 1000, 2000):
            shape = _prefill_bucket(rows, tokens)
            assert not shape[2] or ("prefill", *shape[:2]) in recorded
    params = (
        {},
        {"temperature": 0},
        {"top_p": 0.9},
        {"logprobs": 5, "presence_penalty": 1.0},
        {"logit_bias": {5: 1.0}, "min_new_tokens": 3},
    )
    regex = {"structured_outputs": {"regex": "a+"}}
    params = (*params, regex, {**regex, "top_k": 5}, {**regex, "logprobs": 2, "temperature": 0})
    for slot, wanted in enumerate(params):
        runner.prefill([PrefillRow(slot, [5, 6], True)])
        runner.prefill([PrefillRow(other, [5]) for other in range(slot + 1)])
        runner.start(slot, SamplingParams(**wanted), seed=0)
        runner.sample([slot])
        for highest in range(slot, 20, 3):
            if "structured_outputs" in wanted:
                runner.forward(highest)
                runner.draw(highest)
            else:
                runner.decode(highest)
    for slot in range(len(params)):  # the last request with a grammar ends before the draw
        runner.stop(slot)
    runner.forward(19)
    runner.draw(19)
    assert {*runner._graphs} == recorded


def test_a_request_with_log_probabilities_changes_no_work_of_others(monkeypatch):
    """The batch is sampled by the same graph. Only the rows that want them are scored."""
    scored = []
    monkeypatch.setattr(
        "xlstm7b.generate.runner.token_logprobs",
        lambda logits, *rest: (scored.append(len(logits)), token_logprobs(logits, *rest))[1],
    )
    runner = GraphRunner(FUSED_FLOAT32, 20)
    for slot in range(20):
        wanted = {"logprobs": 20} if slot == 7 else {}
        runner.prefill([PrefillRow(slot, [5, 6], True)])
        runner.start(slot, SamplingParams(**wanted), seed=0)
    runner.sample(range(20))
    results = runner.decode(19)
    graphs = [key for key in runner._graphs if key[0] == "decode"]
    assert [key[2] for key in graphs] == [Needs(sampling=True)]
    assert results.scored == {7: 0}
    assert [len(part) for part in results.lists()] == [20, 1, 1, 1]
    assert set(scored) == {1}


@both_runners
def test_warm_up_changes_nothing(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    runner, (prompt,) = exact_runner(2, kind), draw(9)
    runner.warm_up(16)
    runner.prefill([PrefillRow(1, prompt, True)])
    assert_has_read(runner, 1, [0, *prompt])


# Limits


def test_memory_is_known_beforehand():
    config, device = FLOAT32.config, torch.device("cpu")
    saved = ModelRunner(FUSED_FLOAT32, 1).saved(0)
    assert state_bytes(config, torch.float32) == saved.nbytes
    assert fitting_slots(config, device, torch.float32, None, 0) == CPU_SLOTS
    assert fitting_slots(config, device, torch.float32, 300, 1 << 60) == 300
    words = r"^1,000,000,000 slots of [0-9.]+ kB do not fit into [0-9,.]+ GB; at most ([0-9,]+) do$"
    with pytest.raises(ValueError, match=words) as raised:
        fitting_slots(config, device, torch.float32, 10**9, 0)
    most = int(str(raised.value).rpartition("at most ")[2].removesuffix(" do").replace(",", ""))
    assert fitting_slots(config, device, torch.float32, most, 0) == most
    with pytest.raises(ValueError, match="do not fit"):
        fitting_slots(config, device, torch.float32, most + 1, 0)


def test_a_cpu_reads_one_prompt_at_a_time():
    on_cpu = prefill_limits(torch.device("cpu"), 100)
    assert (on_cpu.chunk_tokens, on_cpu.idle_chunk_tokens, on_cpu.idle_tokens) == (100,) * 3
    assert on_cpu.max_rows == 1
    for chunk in (1, 512, 10_000):
        on_gpu = prefill_limits(torch.device("cuda"), chunk, 0.5)
        assert on_gpu.chunk_tokens == chunk <= on_gpu.idle_chunk_tokens <= on_gpu.idle_tokens
        assert (on_gpu.max_rows, on_gpu.long_gaps) == (_ROWS[-1], 0.5)


# On a GPU


def gpu_model() -> XLSTM:
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(256, 2, 4, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter += 0.02 * torch.randn_like(parameter)
    return model.bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("replay", [False, True])
@torch.inference_mode()
def test_the_host_never_waits_for_the_device(replay):
    """But for results: else a GPU has nothing to do while the host prepares the next step."""
    long = random.Random(0).choices(range(2, 258), k=3000)
    runner = ModelRunner(FusedModel(gpu_model().cuda()), 6, replay=replay)
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.5, "logprobs": 4, "min_new_tokens": 2},
        {"frequency_penalty": 1.0, "logit_bias": {70: 5.0}},
    )
    runner.warm_up(64)
    for debugged in (False, True):  # a first time for what is compiled and allocated
        torch.cuda.set_sync_debug_mode("error" if debugged else "default")
        try:
            saved = None
            for slot, kind in enumerate(kinds):
                runner.load(5, None)
                runner.prefill([PrefillRow(5, long[:40])])
                saved = runner.saved(5)
                runner.load(slot, saved)
                runner.prefill([PrefillRow(slot, long[40:60]), PrefillRow(4, long[:70], True)])
                runner.prefill([PrefillRow(slot, [7]), PrefillRow(4, [7])])
                runner.start(slot, SamplingParams(**kind), seed=7, prompt=long[:60])
                runner.sample([slot])
                runner.decode(slot)
            runner.prefill([PrefillRow(4, long, True)])  # larger than any graph
            runner.score(5, long[:10], long[1:11], 3)
            runner.stop(0)
            runner.move(2, 0)
            runner.decode(0)
            runner.load_start(3)
            host = saved.to("cpu", non_blocking=True)
            runner.load(5, host.to("cuda", non_blocking=True))
            for slot in range(3):
                runner.stop(slot)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 5, 7, 16])
@torch.inference_mode()
def test_batches_on_a_gpu_change_no_other_slot(count):
    model = gpu_model()
    exact = copy.deepcopy(model).float()
    chance = random.Random(count)
    for size in (3, 64, 100, 500, 1500):
        runner = ModelRunner(FusedModel(copy.deepcopy(model).cuda()), 24)
        starts = [chance.choices(range(2, 258), k=chance.randrange(1, 90)) for _ in range(24)]
        for slot, tokens in enumerate(starts):
            runner.prefill([PrefillRow(slot, tokens, True)])
        chosen = chance.sample(range(24), count)
        others = [slot for slot in range(24) if slot not in chosen]
        before = held(runner, *others)
        more = [chance.choices(range(2, 258), k=chance.randrange(1, size + 1)) for _ in chosen]
        runner.prefill([PrefillRow(*row) for row in zip(chosen, more, strict=True)])
        torch.cuda.synchronize()
        assert unchanged(runner, before, *others)
        for slot, tokens in zip(chosen, more, strict=True):
            whole = [0, *starts[slot], *tokens]
            saved = runner.saved(slot).to("cpu")
            assert saved.tokens_seen == [len(whole)]
            want, state = exact(torch.tensor([whole]), logits="last")
            assert error(saved.logits, want) < 5e-2
            for block, want_block in zip(saved.model_state.blocks, state.blocks, strict=True):
                assert error(block.C, want_block.C) < 5e-2


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_recorded_in_the_middle_of_requests_changes_no_slot():
    runner = ModelRunner(FusedModel(gpu_model().cuda()), 6)
    for slot in range(3):
        runner.prefill([PrefillRow(slot, [5 + slot] * 40, True)])
        runner.start(slot, SamplingParams(temperature=0, eos_token_id=()), seed=0)
    runner.sample([0, 1, 2])
    runner.decode(2)
    before = held(runner, 0, 1, 2)
    for length in (70, 200, 2000):
        runner.prefill([PrefillRow(4, [9] * length, True), PrefillRow(5, [8] * length, True)])
        runner.prefill([PrefillRow(4, [9] * length)])
    runner.prefill([PrefillRow(4, [3])])
    assert unchanged(runner, before, 0, 1, 2)
