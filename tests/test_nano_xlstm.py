"""`examples/nano_xlstm.py` computes what the package computes, and stays short."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import SMALL, random_model, random_tokens
from torch import Tensor

from xlstm7b import XLSTM, Generator, ModelConfig
from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.mlstm import MLSTMState, mlstm_sequence
from xlstm7b.tokenizer import ByteTokenizer

FILE = Path(__file__).parents[1] / "examples" / "nano_xlstm.py"
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def import_nano():
    spec = importlib.util.spec_from_file_location("nano_xlstm", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    return module


nano = import_nano()


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def twin_of(model: XLSTM):
    """The same model in nano_xlstm, with copies of the weights."""
    sizes = {field.name: getattr(model.config, field.name) for field in nano.fields(nano.Config)}
    twin = nano.XLSTM(nano.Config(**sizes))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin.load_state_dict(weights, assign=True)
    return twin


def test_it_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 400


def test_it_needs_no_package_but_these():
    imported = set(re.findall(r"^(?:import|from) (\w+)", FILE.read_text(encoding="utf-8"), re.M))
    assert imported - {"argparse", "json", "math", "dataclasses", "pathlib", "typing"} == {
        *("torch", "safetensors", "tokenizers")
    }


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize("length", [1, 50, 131])
def test_logits_and_gradients_are_those_of_the_package(dtype, tolerance, length):
    model = random_model(dtype=dtype)
    twin = twin_of(model)
    tokens = random_tokens(3, length + 1)
    logits, state = model(tokens[:, :-1])
    twin_logits, twin_states = twin(tokens[:, :-1])
    assert_close(twin_logits, logits, tolerance)
    for got, want in zip(twin_states, state.blocks, strict=True):
        for got_part, want_part in zip(got, want, strict=True):
            assert_close(got_part, want_part, tolerance)

    weights = torch.full((3, length), 1 / (3 * length), dtype=dtype)
    model.loss(tokens[:, :-1], tokens[:, 1:], weights).backward()
    F.cross_entropy(twin_logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert_close(parameter.grad, parameters[name].grad, tolerance)


def test_a_text_in_parts_has_the_same_logits_and_gradients():
    model = random_model()
    twin = twin_of(model)
    tokens = random_tokens(2, 90)
    whole, _ = model(tokens)
    first, states = twin(tokens[:, :70])
    second, states = twin(tokens[:, 70:89], states)
    last, _ = twin(tokens[:, 89:], states)
    logits = torch.cat([first, second, last], dim=1)
    assert_close(logits, whole, 1e-10)
    weights = torch.randn_like(whole)
    (whole * weights).sum().backward()
    (logits * weights).sum().backward()
    parameters = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert_close(parameter.grad, parameters[name].grad, 1e-10)


@given(
    length=st.integers(1, 40),
    size=st.integers(1, 45),
    scale=st.sampled_from([1.0, 15.0]),
    seed=st.integers(0, 99),
)
def test_chunks_compute_what_steps_compute(length, size, scale, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v = draw(2, 3, length, 4), draw(2, 3, length, 4), draw(2, 3, length, 6)
    i, f = scale * draw(2, 3, length), scale * draw(2, 3, length)
    start = nano.State(draw(2, 3, 4, 6), draw(2, 3, 4), draw(2, 3))
    h, after = nano.mlstm_cell(q, k, v, i, f, start, size)
    state, steps = start, []
    for t in range(length):
        step, state = nano.recurrent_step(*(x[:, :, t] for x in (q, k, v, i, f)), state)
        steps.append(step)
    assert_close(h, torch.stack(steps, dim=2), 1e-10)
    inputs = (x.transpose(1, 2) for x in (q, k, v, i, f))
    reference, last = mlstm_sequence(*inputs, state=MLSTMState(*start), backend="recurrent")
    assert_close(h, reference.transpose(1, 2), 1e-10)
    for got, step, want in zip(after, state, last, strict=True):
        assert_close(got, want, 1e-10)
        assert_close(step, want, 1e-10)


def test_first_weights_are_those_of_the_package():
    """From the same random numbers: both draw them in the order of the parameters."""
    torch.manual_seed(1)
    model = XLSTM(SMALL)
    twin = twin_of(model)
    for parameter in twin.parameters():
        if parameter.dim() == 2:
            torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(1)
    twin.init_weights()
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name]), name


@pytest.mark.parametrize("size", ["160m", "400m", "1.4b", "2.7b", "7b"])
def test_sizes_of_the_paper(size):
    config = ModelConfig.named(size)
    with torch.device("meta"):
        model = nano.XLSTM(nano.Config(config.embedding_dim, config.num_blocks, config.num_heads))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == config.parameter_shapes()


BYTES = ModelConfig(64, 2, 2, vocab_size=320)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("first_token", [True, False])
def test_greedy_tokens_are_those_of_the_package(tmp_path, shard_bytes, first_token):
    config = ModelConfig(64, 2, 2, vocab_size=320, force_bos_token_insert=first_token)
    model = random_model(config, dtype=torch.float32)
    model.lm_head.weight.data *= 20  # clear favourites
    save_checkpoint(tmp_path, config, model.named_parameters(), max_shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard_bytes > 1e9 else 13)
    twin = nano.load(tmp_path)
    generator = Generator(model, ByteTokenizer())
    for prompt in ("A", "The sea was calm, and " * 60):
        ids = nano.encode(prompt, None)
        [completion] = generator.generate(prompt, max_new_tokens=40, temperature=0)
        found = nano.generate(twin, ids, 40, temperature=0)
        assert found == [token for token in completion.token_ids if token != config.eos_token_id]
        assert nano.decode(found, None) == completion.text


def test_the_end_of_text_ends_generation(tmp_path):
    model = random_model(BYTES, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all ids are equally likely, and 0 is the first of them
    assert nano.generate(twin_of(model), [5, 6], 10, temperature=0) == []
    assert len(nano.generate(twin_of(model), [5, 6], 10)) <= 10


def test_training_lowers_the_loss_and_the_package_loads_the_result(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nano, "train", partial(nano.train, batch=4, length=32))
    text, folder = tmp_path / "text.txt", tmp_path / "new" / "model"
    text.write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    nano.main(["train", str(text), "--output", str(folder), "--steps", "30"])
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] / 2 < 3
    generator = Generator.from_pretrained(folder, device="cpu", dtype="float32")
    [completion] = generator.generate("the c", max_new_tokens=20, temperature=0)
    nano.main(["generate", str(folder), "the c", "--max-tokens", "20", "--temperature", "0"])
    assert capsys.readouterr().out == f"the c{completion.text}\n"
