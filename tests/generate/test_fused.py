"""The fused model computes what `XLSTM` does, from the same memory, and lets it be trained."""

import copy

import pytest
import torch
from measure import error
from models import random_model
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel, Slots, fuse
from xlstm7b.model import XLSTM, ModelState

CONFIG = ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=40)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# What a few operations may add, where the plain model's error happens to be small.
ROUNDING = {torch.float32: 8 * 2.0**-23, torch.bfloat16: 2.0**-7}


def fresh(rows: int, dtype: torch.dtype) -> ModelState:
    wide = torch.promote_types(dtype, torch.float32)
    return ModelState.zeros(CONFIG, rows, dtype=wide)


def parts_of(state: ModelState) -> list[Tensor]:
    return [part for block in state.blocks for part in block]


def assert_as_accurate(got: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """The fused model's result is about as close to float64's as the plain model's.

    The two add up the same products in another order. How far that takes them apart depends on the
    machine and the numbers, but neither is more exact than the other. In float64, `plain` is
    `exact`.
    """
    assert got.dtype == plain.dtype == torch.promote_types(dtype, torch.float32)
    if dtype == torch.float64:
        assert error(got, plain) < 1e-14
    else:
        assert error(got, exact) <= 2 * error(plain, exact) + ROUNDING[dtype]
        assert error(got, plain) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def assert_states_as_accurate(
    got: ModelState, plain: ModelState, exact: ModelState, dtype: torch.dtype
) -> None:
    assert torch.equal(got.tokens_seen, plain.tokens_seen)
    for parts in zip(parts_of(got), parts_of(plain), parts_of(exact), strict=True):
        assert_as_accurate(*parts, dtype)


def assert_states_close(got: ModelState, want: ModelState, largest: float) -> None:
    assert torch.equal(got.tokens_seen, want.tokens_seen)
    for part, want_part in zip(parts_of(got), parts_of(want), strict=True):
        assert part.dtype == want_part.dtype
        assert error(part, want_part) < largest


def assert_row_unchanged(got: ModelState, before: ModelState, row: int) -> None:
    assert got.tokens_seen[row] == before.tokens_seen[row]
    for part, old in zip(parts_of(got), parts_of(before), strict=True):
        assert torch.equal(part[row], old[row])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_equals_the_model(dtype):
    """Whole rows, then rows of different lengths on top, then single tokens of some of the rows."""
    model = random_model(CONFIG, dtype)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused, state = FusedModel(model), fresh(3, dtype)

    tokens = torch.randint(0, 40, (3, 70))
    logits = fused.logits(fused.read(tokens, state))
    want, want_state = plain(tokens, logits="last")
    exact_logits, exact_state = exact(tokens, logits="last")
    assert_as_accurate(logits, want, exact_logits, dtype)
    assert_states_as_accurate(state, want_state, exact_state, dtype)

    before = state.clone()
    tokens, lengths = torch.randint(0, 40, (3, 17)), torch.tensor([17, 0, 5])
    logits = fused.logits(fused.read(tokens, state, lengths))
    want, want_state = plain(tokens, want_state, lengths=lengths, logits="last")
    exact_logits, exact_state = exact(tokens, exact_state, lengths=lengths, logits="last")
    assert_as_accurate(logits[[0, 2]], want[[0, 2]], exact_logits[[0, 2]], dtype)
    assert_states_as_accurate(state, want_state, exact_state, dtype)
    assert_row_unchanged(state, before, 1)

    for live in ([True, False, True], [True] * 3, [False, False, True], [False] * 3):
        before = state.clone()
        token, mask = torch.randint(0, 40, (3,)), torch.tensor(live)
        counts = mask.long()
        logits = fused.step(token.where(mask, -1), state)
        want, want_state = plain(token[:, None], want_state, lengths=counts, logits="last")
        exact_logits, exact_state = exact(
            token[:, None], exact_state, lengths=counts, logits="last"
        )
        if any(live):
            assert_as_accurate(logits[mask], want[mask], exact_logits[mask], dtype)
        assert_states_as_accurate(state, want_state, exact_state, dtype)
        for row in range(3):
            if not live[row]:
                assert_row_unchanged(state, before, row)


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_reads_in_any_chunks(batch):
    model = random_model(CONFIG, torch.float32)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused, state = FusedModel(model), fresh(batch, torch.float32)
    whole, plain_state = torch.randint(0, 40, (batch, 200)), None
    for chunk in whole.split([1, 63, 64, 65, 7], dim=1):
        vectors = fused.read(chunk, state)
        want, plain_state = plain(chunk, plain_state, logits="last")
    exact_logits, exact_state = exact(whole, logits="last")
    assert_as_accurate(fused.logits(vectors), want, exact_logits, torch.float32)
    assert_states_as_accurate(state, plain_state, exact_state, torch.float32)


@torch.no_grad()
def test_the_feed_forward_in_slices(monkeypatch):
    """A long prompt's wide vectors are computed a few rows at a time."""
    model = random_model(CONFIG, torch.float32)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    monkeypatch.setattr("xlstm7b.generate.fused._FFN_ROWS", 7)
    fused, state, tokens = FusedModel(model), fresh(2, torch.float32), torch.randint(0, 40, (2, 31))
    logits = fused.logits(fused.read(tokens, state))
    (want, want_state), (best, best_state) = (x(tokens, logits="last") for x in (plain, exact))
    assert_as_accurate(logits, want, best, torch.float32)
    assert_states_as_accurate(state, want_state, best_state, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_vectors_at_all_tokens(dtype):
    model = random_model(CONFIG, dtype)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused, state = FusedModel(model), fresh(2, dtype)
    tokens, lengths = torch.randint(0, 40, (2, 33)), torch.tensor([33, 20])
    vectors = fused.vectors(tokens, state, lengths)
    assert vectors.shape == (2, 33, 64)
    want, exact_logits = plain(tokens, lengths=lengths)[0], exact(tokens, lengths=lengths)[0]
    for row, length in enumerate((33, 20)):
        logits = fused.logits(vectors[row, :length])
        assert_as_accurate(logits, want[row, :length], exact_logits[row, :length], dtype)
    assert state.tokens_seen.tolist() == [33, 20]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_rows_that_start_from_one_slot_and_are_written_to_another(dtype):
    """Slots that are no target stay as they are, bit for bit; two rows may start from one slot."""
    model = random_model(CONFIG, dtype)
    fused, state = FusedModel(model), fresh(6, dtype)
    fused.read(torch.randint(0, 40, (6, 20)), state)
    state.tokens_seen.add_(torch.arange(6))
    before = state.clone()
    tokens, lengths = torch.randint(0, 40, (4, 9)), torch.tensor([9, 4, 0, 7])
    source, target = torch.tensor([5, 5, 4, 1]), torch.tensor([0, 2, 4, 1])
    vectors = fused.read(tokens, state, lengths, Slots(source, target))
    for slot in (3, 4, 5):  # 4 reads nothing
        assert_row_unchanged(state, before, slot)
    # As if the rows were a batch of their own, with the same padding.
    alone = before.select(source)
    want = fused.read(tokens, alone, lengths)
    assert torch.equal(vectors[[0, 1, 3]], want[[0, 1, 3]])
    for row, slot in enumerate(target.tolist()):
        assert state.tokens_seen[slot] == alone.tokens_seen[row]
        for part, want_part in zip(parts_of(state), parts_of(alone), strict=True):
            assert torch.equal(part[slot], want_part[row])


@torch.no_grad()
def test_a_state_kept_in_bfloat16():
    """It is rounded after every read; a row that is not live does not change even then."""
    model = random_model(CONFIG, torch.float32)
    fused, tokens = FusedModel(model), torch.randint(0, 40, (2, 50))
    state = ModelState.zeros(CONFIG, 2, dtype=torch.bfloat16)
    fused.read(tokens, state)
    before = state.clone()
    logits = fused.step(torch.tensor([3, -1]), state)
    assert_row_unchanged(state, before, 1)
    assert state.blocks[0].C.dtype == torch.bfloat16
    want, _ = model(torch.cat([tokens, torch.tensor([[3], [4]])], 1)[:1], logits="last")
    assert 1e-6 < error(logits[:1], want) < 1e-2


def tensors(fused: FusedModel) -> list[Tensor]:
    blocks = [tensor for block in fused.blocks for tensor in block]
    return [fused.embedding, fused.out_norm, fused.head, *blocks]


def storage_bytes(*tensors: Tensor) -> int:
    """Bytes of all memory that the tensors use, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_become_views_and_there_is_no_second_copy(dtype):
    model = random_model(CONFIG, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    size = sum(parameter.nbytes for parameter in model.parameters())
    fused = FusedModel(model)
    assert storage_bytes(*model.parameters(), *tensors(fused)) == size
    assert sum(tensor.nbytes for tensor in tensors(fused)) == size

    after = model.state_dict()
    assert [*after] == [*before]
    for name, value in before.items():
        assert after[name].dtype == dtype
        assert after[name].is_contiguous()
        assert torch.equal(after[name], value), name

    for block, module in zip(fused.blocks, model.backbone.blocks, strict=True):
        layer, ffn = module.mlstm_layer, module.ffn
        i, f = layer.igate_preact, layer.fgate_preact
        parts = {
            block.projections: [layer.q, layer.k, layer.v, layer.ogate_preact],
            block.gates: [i, f],
            block.up: [ffn.proj_up_gate, ffn.proj_up],
        }
        views = [(whole, [part.weight for part in of]) for whole, of in parts.items()]
        for whole, of in [*views, (block.gate_bias, [i.bias, f.bias])]:
            start = 0
            for parameter in of:
                assert isinstance(parameter, torch.nn.Parameter)
                assert parameter.data_ptr() == whole[start].data_ptr()
                start += len(parameter)
            assert start == len(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_saving_a_fused_model_and_fusing_a_loaded_one(tmp_path, dtype):
    model = random_model(CONFIG, dtype)
    FusedModel(model)
    model.save_pretrained(tmp_path / "model")
    loaded = XLSTM.from_pretrained(tmp_path / "model", device="cpu")
    for (name, parameter), want in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, want), name

    # Loading puts the large matrices next to each other: only the gates' small ones are moved.
    addresses = {name: parameter.data_ptr() for name, parameter in loaded.named_parameters()}
    held = storage_bytes(*loaded.parameters())
    fused = FusedModel(loaded)
    moved = {name for name, p in loaded.named_parameters() if p.data_ptr() != addresses[name]}
    assert all("igate_preact" in name or "fgate_preact" in name for name in moved)
    gates = sum(block.gates.nbytes + block.gate_bias.nbytes for block in fused.blocks)
    assert storage_bytes(*loaded.parameters(), *tensors(fused)) <= held + gates
    state, tokens = fresh(2, dtype), torch.randint(0, 40, (2, 30))
    logits = fused.logits(fused.read(tokens, state))
    exact = copy.deepcopy(model).double()(tokens, logits="last")[0]
    assert_as_accurate(logits, model(tokens, logits="last")[0], exact, dtype)


def test_fusing_twice_moves_nothing():
    model = random_model(CONFIG, torch.float32)
    first = FusedModel(model)
    second = FusedModel(model)
    for one, two in zip(tensors(first), tensors(second), strict=True):
        assert one.data_ptr() == two.data_ptr()
        assert one.shape == two.shape


def test_fuse_copies_only_what_is_not_adjacent():
    memory = torch.randn(12, 5)
    adjacent = [torch.nn.Parameter(part) for part in memory.split([3, 4, 5])]
    whole = fuse(adjacent)
    assert whole.data_ptr() == memory.data_ptr()
    assert torch.equal(whole, memory)
    later = fuse(adjacent[1:])
    assert later.data_ptr() == memory[3:].data_ptr()
    assert torch.equal(later, memory[3:])

    q, k, v = adjacent
    columns = torch.nn.Parameter(torch.randn(5, 4).mT)
    for parts in ([k, q], [q, v], [q, q], [columns, q], [q.clone(), k]):
        parameters = [torch.nn.Parameter(part.data) for part in parts]
        want = torch.cat([part.data for part in parts])
        whole = fuse(parameters)
        assert torch.equal(whole, want)
        assert whole.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
        assert parameters[0].data_ptr() == whole.data_ptr()
        assert parameters[1].data_ptr() == whole[len(parts[0])].data_ptr()
        whole.zero_()
        assert not parameters[1].any()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_model_can_be_trained_and_uses_what_it_learned(optimizer):
    model = random_model(CONFIG, torch.float32)
    fused, tokens = FusedModel(model), torch.randint(0, 40, (2, 30))

    def read() -> Tensor:
        return fused.logits(fused.read(tokens, fresh(2, torch.float32)))

    before, steps = read(), optimizer(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = -model.token_logprobs(tokens[:, :-1], tokens[:, 1:])[0].mean()
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        steps.step()
    assert losses[2] < losses[0]
    with torch.no_grad():
        want, _ = model(tokens, logits="last")
        exact, _ = copy.deepcopy(model).double()(tokens, logits="last")
    assert error(before, want) > 1e-3
    assert_as_accurate(read(), want, exact, torch.float32)


@pytest.mark.parametrize(("batch", "reads"), [(1, 0), (3, 1), (1, 1)])
@torch.no_grad()
def test_float32_through_the_kernels(batch, reads):
    """The operations of `kernels/gpu.py` instead of `plain`'s; on a CPU in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.generate.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(64, 1, 2, vocab_size=40, ffn_proj_factor=1.0)  # interpreting is slow
    model = random_model(config, torch.float32)
    fused = FusedModel(copy.deepcopy(model).to(device))
    fused.operations = gpu
    tokens, live = torch.randint(0, 40, (batch, 9)), torch.arange(batch) % 3 != 1
    state, want_state = ModelState.zeros(config, batch, device=device), None
    for _ in range(reads):
        want, want_state = model(tokens, want_state, logits="last")
        vectors = fused.read(tokens.to(device), state)
        assert error(fused.logits(vectors).cpu(), want) < 1e-5
    for token in tokens.mT[:2]:
        got = fused.step(token.where(live, -1).to(device), state).cpu()
        want, want_state = model(token[:, None], want_state, lengths=live.long(), logits="last")
        assert error(got[live], want[live]) < 1e-5
    assert_states_close(state.to("cpu"), want_state, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 7, 16, 17, 40, 64, 65])
@torch.no_grad()
def test_bfloat16_on_a_gpu(batch):
    """Through generation's kernels, against float32 on the CPU with the same rounded weights."""
    model = XLSTM(ModelConfig(256, 2, 4, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "gate_preact" in name:
            parameter += 0.02 * torch.randn_like(parameter)
    model.bfloat16().float()
    fused = FusedModel(copy.deepcopy(model).to("cuda", torch.bfloat16))
    tokens, lengths = torch.randint(0, 320, (batch, 70)), torch.randint(1, 71, (batch,))
    state = ModelState.zeros(model.config, batch, device=fused.device)

    want, want_state = model(tokens, logits="last")
    assert error(fused.logits(fused.read(tokens.cuda(), state)).cpu(), want) < 3e-2
    want, want_state = model(tokens, want_state, lengths=lengths, logits="last")
    vectors = fused.read(tokens.cuda(), state, lengths.cuda())
    assert error(fused.logits(vectors).cpu(), want) < 3e-2
    assert_states_close(state.to("cpu"), want_state, 3e-2)

    before, live = state.clone(), torch.arange(batch) % 3 != 1
    for token in tokens.mT[:3]:
        got = fused.step(token.where(live, -1).cuda(), state).cpu()
        want, want_state = model(token[:, None], want_state, lengths=live.long(), logits="last")
        assert error(got[live], want[live]) < 3e-2
    assert_states_close(state.to("cpu"), want_state, 3e-2)
    for row in range(batch):
        if not live[row]:
            assert_row_unchanged(state, before, row)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_made_in_inference_mode_is_fused(inside):
    with torch.inference_mode():
        model = random_model(CONFIG, torch.float32)
    with torch.inference_mode(inside):
        fused = FusedModel(model)
        tokens = torch.randint(0, CONFIG.vocab_size, (1, 5))
        got = fused.logits(fused.read(tokens, fresh(1, torch.float32)))
    with torch.inference_mode():
        assert error(got, model(tokens, logits="last")[0]) < ROUNDING[torch.float32]
