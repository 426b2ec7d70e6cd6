"""The runner on a GPU: CUDA graphs decode and prefill as eager calls do, and take no memory."""

import copy
import gc

import pytest
import torch
from measure import error
from models import assert_states_match, tensors

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, SamplingParams, SavedState
from xlstm7b.generate.fused import FusedModel
from xlstm7b.generate.runner import ModelRunner, PrefillRow, Results
from xlstm7b.generate.sampler import Sampler
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def models() -> tuple[XLSTM, XLSTM]:
    """float32 on the CPU, and the same weights in bfloat16 on the GPU."""
    torch.manual_seed(0)
    model = XLSTM(ModelConfig(256, 2, 4, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter += 0.02 * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16())
    rounded = copy.deepcopy(model).to("cuda", torch.bfloat16)
    FusedModel(rounded)  # stacks the weights now, so that they do not move later
    return model, rounded


def assert_same_state(got: ModelState, want: ModelState) -> None:
    assert_states_match(got.to("cpu"), want.to("cpu"), 3e-2)


def saved(runner: ModelRunner) -> SavedState:
    """The states and logits of all slots."""
    return SavedState.cat([runner.saved(slot) for slot in range(runner.slots)])


def started(fused: FusedModel, batch: int, params: SamplingParams) -> tuple[ModelRunner, Results]:
    """A runner whose slot s has read 39 − s tokens, and the first tokens drawn."""
    runner = ModelRunner(fused, batch)
    runner.prefill([PrefillRow(slot, [*range(1, 40 - slot)]) for slot in range(batch)])
    for slot in range(batch):
        runner.start(slot, params, seed=slot)
    return runner, runner.sample(range(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_graphs_decode_as_eager_calls_do(models, batch, temperature):
    fused = FusedModel(models[1])
    params = SamplingParams(temperature=temperature, max_new_tokens=1000)
    runner, results = started(fused, batch, params)
    eager = saved(runner).clone()
    state, logits, sampler = eager.model_state, eager.logits, Sampler(batch, 320, fused.device)
    for row in range(batch):
        sampler.set_row(row, params, seed=row)
    sampler(logits, sampler.needs)
    for _ in range(20):
        assert torch.equal(saved(runner).logits, logits)
        assert results.lists() == [sampler.tokens.tolist()]
        results = runner.decode(batch - 1)
        logits = fused.step(sampler.pending, state)
        sampler(logits, sampler.needs)
    after = saved(runner)
    assert after.tokens_seen == [59 - row for row in range(batch)]
    assert all(map(torch.equal, tensors(after.model_state), tensors(state)))


@pytest.mark.gpu
@torch.inference_mode()
def test_prefill_through_padded_graphs(models):
    """In one runner, so that graphs and the memory they share are used again."""
    runner = ModelRunner(FusedModel(models[1]), 1)
    for length in (1, 63, 64, 65, 700, 4096, 5000, 64, 700):
        prompt = torch.randint(0, 320, (1, length))
        runner.load(0, None)
        runner.prefill([PrefillRow(0, prompt[0].tolist())])
        want, state = models[0](prompt, logits="last")
        after = runner.saved(0)
        assert error(after.logits.cpu(), want) < 3e-2, length
        assert_same_state(after.model_state, state)


@pytest.mark.gpu
@torch.inference_mode()
def test_prefill_of_several_slots_through_padded_graphs(models):
    """Prompts on top of each other, in slots in any order; the other slots do not change."""
    runner = ModelRunner(FusedModel(models[1]), 7)
    texts: list[list[int]] = [[] for _ in range(7)]
    for lengths in ({3: 70, 0: 5, 5: 64}, {5: 1, 2: 1}, {6: 500, 5: 2}, {2: 900, 3: 1500, 0: 3}):
        before, rows = saved(runner), []
        for slot, length in lengths.items():
            tokens = torch.randint(0, 320, (length,)).tolist()
            rows.append(PrefillRow(slot, tokens))
            texts[slot] = texts[slot] + tokens
        runner.prefill(rows)
        after = saved(runner)
        for slot, text in enumerate(texts):
            if slot not in lengths:
                same = after.select([slot]), before.select([slot])
                assert torch.equal(*(one.logits for one in same))
                assert all(map(torch.equal, *(tensors(one.model_state) for one in same)))
                continue
            want, state = models[0](torch.tensor([text]), logits="last")
            assert error(after.logits[slot].cpu(), want[0]) < 3e-2
            assert_same_state(after.model_state.select([slot]), state)


@pytest.mark.gpu
def test_ragged_prompts_alone_and_in_a_batch(models):
    """A prompt's state does not depend on the other prompts, up to bfloat16's rounding."""
    generator = Generator(models[1], ByteTokenizer())
    prompts = [torch.randint(2, 258, (length,)).tolist() for length in (5, 900, 64, 1, 300, 2000)]
    together = generator.read(prompts)
    for index, prompt in enumerate(prompts):
        alone, in_batch = generator.read([prompt]), together.select([index])
        assert error(in_batch.logits, alone.logits) < 3e-2
        assert_same_state(in_batch.model_state, alone.model_state)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_takes_no_memory(models, batch):
    gc.collect()
    params = SamplingParams(max_new_tokens=1000)
    (runner, _), in_use = started(FusedModel(models[1]), batch, params), []
    for steps in (3, 200):
        for _ in range(steps):
            runner.decode(batch - 1)
        torch.cuda.synchronize()
        in_use.append(torch.cuda.memory_allocated())
    assert in_use[0] == in_use[1]
    assert saved(runner).tokens_seen == [39 - row + 203 for row in range(batch)]
