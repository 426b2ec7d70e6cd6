"""`optimize(model)` on a GPU: Triton kernels, the CUDA graph of a decoding step, compiling."""

import copy

import pytest
import torch
from measure import error

from xlstm7b import XLSTM, Generator, ModelConfig
from xlstm7b.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from xlstm7b.integrations import decode_graph  # noqa: E402
from xlstm7b.integrations.transformers import optimize  # noqa: E402

pytestmark = pytest.mark.gpu
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.fixture
def folder(tmp_path):
    model = XLSTM(ModelConfig(256, 2, 2, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_preact.weight"):
                parameter.normal_(std=0.1)
            elif name.endswith("igate_preact.bias"):
                parameter.uniform_(-4, 0)
            elif parameter.dim() == 2:
                parameter.mul_(2)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder, dtype=torch.float32):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return optimize(load(folder, dtype=dtype)).cuda().eval()


def random_ids(batch, length):
    return torch.randint(2, 320, (batch, length), device="cuda")


def test_generate_is_that_of_our_generator(folder):
    model = load(folder)
    generator = Generator(XLSTM.from_pretrained(folder, device="cuda"), ByteTokenizer())
    ids = random_ids(3, 40)
    first = torch.zeros_like(ids[:, :1])  # our generator puts it before every prompt
    got = model.generate(torch.cat([first, ids], dim=1), **OPTIONS)[:, 41:]
    outputs = generator.generate(ids.tolist(), max_new_tokens=24, temperature=0, eos_token_id=[])
    assert got.tolist() == [list(output.token_ids) for output in outputs]
    assert model in decode_graph._graphs


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
@torch.no_grad()
def test_the_graph_of_a_step_computes_what_the_modules_compute(folder, dtype, largest):
    model = load(folder, dtype)
    ids, follows = random_ids(2, 40), random_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    cache = model(ids, attention_mask=mask).past_key_values
    whole = torch.cat([mask, torch.ones_like(follows)], dim=1)
    want = model(torch.cat([ids, follows], dim=1), attention_mask=whole).logits[:, 40:]
    for t in range(5):
        token = follows[:, t, None]
        seen = whole[:, : 41 + t]
        got = model(token, attention_mask=seen, past_key_values=cache).logits[:, 0]
        assert error(got, want[:, t]) < largest
    assert cache.states is decode_graph._graphs[model].states
    assert cache.states[0].C.dtype == torch.float32


def test_left_padded_prompts_are_continued_as_each_alone(folder):
    model, ids = load(folder), random_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    for beams in (1, 3):
        got = model.generate(ids, attention_mask=mask, num_beams=beams, **OPTIONS)[0, 13:]
        assert torch.equal(got, model.generate(ids[:1, 13:], num_beams=beams, **OPTIONS)[0])


def test_the_graph_follows_the_weights(folder):
    model, ids = load(folder), random_ids(2, 40)
    before = model.generate(ids, **OPTIONS)
    graph = decode_graph._graphs[model]
    model.train()(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # in place: the same graph
    model.eval()
    changed = model.generate(ids, **OPTIONS)
    assert decode_graph._graphs[model] is graph
    assert torch.equal(changed, copy.deepcopy(model).generate(ids, **OPTIONS))
    assert not torch.equal(changed, before)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # other memory: another graph
    assert torch.equal(model.generate(ids, **OPTIONS), changed)
    assert decode_graph._graphs[model] is not graph


def test_a_compiled_training_step(folder):
    torch.compiler.reset()
    model, ids = load(folder).train(), random_ids(2, 300)
    mask = torch.ones_like(ids)
    mask[0, 200:] = 0
    model(ids, labels=ids, attention_mask=mask).loss.backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True)(ids, labels=ids, attention_mask=mask).loss.backward()
    for parameter, expected in zip(model.parameters(), want, strict=True):
        assert error(parameter.grad, expected) < 1e-3
