"""The fused model computes what `XLSTM` does, from the same memory, and lets it train on."""

import copy

import pytest
import torch
from measure import error
from torch import Tensor

from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel, fuse
from xlstm7b.model import XLSTM, ModelState

CONFIG = ModelConfig(embedding_dim=64, num_blocks=2, num_heads=2, vocab_size=40)
# The same sums, but the matrices are others, and so may be the order of the terms.
LARGEST = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}
DTYPES = [*LARGEST]


def random_model(dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> XLSTM:
    """Gates that listen to their input, norms and biases that are not one number."""
    model = XLSTM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


def fresh(rows: int, dtype: torch.dtype) -> ModelState:
    wide = torch.promote_types(dtype, torch.float32)
    return ModelState.zeros(CONFIG, rows, dtype=wide)


def assert_close(got: ModelState, want: ModelState, largest: float) -> None:
    assert torch.equal(got.tokens_seen, want.tokens_seen)
    for block, want_block in zip(got.blocks, want.blocks, strict=True):
        for part, want_part in zip(block, want_block, strict=True):
            assert part.dtype == want_part.dtype
            assert error(part, want_part) < largest


def assert_row_unmoved(got: ModelState, before: ModelState, row: int) -> None:
    for part, old in zip(got._tensors(), before._tensors(), strict=True):
        assert torch.equal(part[row], old[row])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_equals_the_model(dtype):
    """Whole rows, then ragged ones on top, then single tokens of some of the rows."""
    model, largest = random_model(dtype), LARGEST[dtype]
    plain = XLSTM(CONFIG).to(dtype)
    plain.load_state_dict(model.state_dict())
    fused, state = FusedModel(model), fresh(3, dtype)

    tokens = torch.randint(0, 40, (3, 70))
    logits = fused.logits(fused.read(tokens, state))
    want, want_state = plain(tokens, logits="last")
    assert logits.dtype == want.dtype == torch.promote_types(dtype, torch.float32)
    assert error(logits, want) < largest
    assert_close(state, want_state, largest)

    before = state.clone()
    tokens, lengths = torch.randint(0, 40, (3, 17)), torch.tensor([17, 0, 5])
    logits = fused.logits(fused.read(tokens, state, lengths))
    want, want_state = plain(tokens, want_state, lengths=lengths, logits="last")
    assert error(logits[[0, 2]], want[[0, 2]]) < largest
    assert_close(state, want_state, largest)
    assert_row_unmoved(state, before, 1)

    for live in ([True, False, True], [True] * 3, [False, False, True], [False] * 3):
        before = state.clone()
        token, mask = torch.randint(0, 40, (3,)), torch.tensor(live)
        logits = fused.step(token, state, mask)
        want, want_state = plain(token[:, None], want_state, lengths=mask.long(), logits="last")
        assert error(logits[mask], want[mask]) < largest
        assert_close(state, want_state, largest)
        for row in range(3):
            if not live[row]:
                assert_row_unmoved(state, before, row)


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_reads_in_any_pieces(batch):
    model = random_model()
    fused, state = FusedModel(model), fresh(batch, torch.float32)
    whole = torch.randint(0, 40, (batch, 200))
    for piece in whole.split([1, 63, 64, 65, 7], dim=1):
        hidden = fused.read(piece, state)
    want, want_state = model(whole, logits="last")
    assert error(fused.logits(hidden), want) < 1e-6
    assert_close(state, want_state, 2e-6)


@torch.no_grad()
def test_a_state_kept_in_bfloat16():
    """It is rounded after every read; a row that is not live does not move even then."""
    model = random_model()
    fused, tokens = FusedModel(model), torch.randint(0, 40, (2, 50))
    state = ModelState.zeros(CONFIG, 2, dtype=torch.bfloat16)
    fused.read(tokens, state)
    before = state.clone()
    logits = fused.step(torch.tensor([3, 4]), state, torch.tensor([True, False]))
    assert_row_unmoved(state, before, 1)
    assert state.blocks[0].C.dtype == torch.bfloat16
    want, _ = model(torch.cat([tokens, torch.tensor([[3], [4]])], 1)[:1], logits="last")
    assert 1e-6 < error(logits[:1], want) < 1e-2


def tensors(fused: FusedModel) -> list[Tensor]:
    blocks = [tensor for block in fused.blocks for tensor in block]
    return [fused.embedding, fused.out_norm, fused.head, *blocks]


def storage_bytes(*tensors: Tensor) -> int:
    """What the tensors hold together, each memory counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_become_views_and_there_is_no_second_copy(dtype):
    model = random_model(dtype)
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
    model = random_model(dtype)
    FusedModel(model)
    model.save_pretrained(tmp_path / "model")
    loaded = XLSTM.from_pretrained(tmp_path / "model", device="cpu")
    for (name, parameter), want in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, want), name

    # Loading laid the large matrices side by side: only the gates' little ones are moved.
    places = {name: parameter.data_ptr() for name, parameter in loaded.named_parameters()}
    held = storage_bytes(*loaded.parameters())
    fused = FusedModel(loaded)
    moved = {name for name, p in loaded.named_parameters() if p.data_ptr() != places[name]}
    assert all("igate_preact" in name or "fgate_preact" in name for name in moved)
    gates = sum(block.gates.nbytes + block.gate_bias.nbytes for block in fused.blocks)
    assert storage_bytes(*loaded.parameters(), *tensors(fused)) <= held + gates
    state, tokens = fresh(2, dtype), torch.randint(0, 40, (2, 30))
    logits = fused.logits(fused.read(tokens, state))
    assert error(logits, model(tokens, logits="last")[0]) < LARGEST[dtype]


def test_fusing_twice_moves_nothing():
    model = random_model()
    first = FusedModel(model)
    second = FusedModel(model)
    for one, two in zip(tensors(first), tensors(second), strict=True):
        assert one.data_ptr() == two.data_ptr()
        assert one.shape == two.shape


def test_fuse_copies_only_what_does_not_lie_side_by_side():
    memory = torch.randn(12, 5)
    side_by_side = [torch.nn.Parameter(part) for part in memory.split([3, 4, 5])]
    whole = fuse(side_by_side)
    assert whole.data_ptr() == memory.data_ptr()
    assert torch.equal(whole, memory)
    later = fuse(side_by_side[1:])
    assert later.data_ptr() == memory[3:].data_ptr()
    assert torch.equal(later, memory[3:])

    q, k, v = side_by_side
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
def test_a_fused_model_trains_and_generates_what_it_learnt(optimizer):
    model = random_model()
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
    assert error(before, want) > 1e-3
    assert error(read(), want) < 1e-6


@pytest.mark.parametrize(("batch", "reads"), [(1, 0), (3, 1), (1, 1)])
@torch.no_grad()
def test_float32_through_the_kernels(batch, reads):
    """On a CPU in Triton's interpreter: the operations of `triton/` in the place of `plain`'s."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from xlstm7b.generate.triton import operations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(64, 1, 2, vocab_size=40, ffn_proj_factor=1.0)  # interpreting is slow
    model = random_model(config=config)
    fused = FusedModel(copy.deepcopy(model).to(device))
    fused.operations = operations
    tokens, live = torch.randint(0, 40, (batch, 9)), torch.arange(batch) % 3 != 1
    state, want_state = ModelState.zeros(config, batch, device=device), None
    for _ in range(reads):
        want, want_state = model(tokens, want_state, logits="last")
        hidden = fused.read(tokens.to(device), state)
        assert error(fused.logits(hidden).cpu(), want) < 1e-5
    for token in tokens.mT[:2]:
        got = fused.step(token.to(device), state, live.to(device)).cpu()
        want, want_state = model(token[:, None], want_state, lengths=live.long(), logits="last")
        assert error(got[live], want[live]) < 1e-5
    assert_close(state._map(Tensor.cpu), want_state, 1e-5)


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
    hidden = fused.read(tokens.cuda(), state, lengths.cuda())
    assert error(fused.logits(hidden).cpu(), want) < 3e-2
    assert_close(state._map(Tensor.cpu), want_state, 3e-2)

    before, live = state.clone(), torch.arange(batch) % 3 != 1
    for token in tokens.mT[:3]:
        got = fused.step(token.cuda(), state, live.cuda()).cpu()
        want, want_state = model(token[:, None], want_state, lengths=live.long(), logits="last")
        assert error(got[live], want[live]) < 3e-2
    assert_close(state._map(Tensor.cpu), want_state, 3e-2)
    for row in range(batch):
        if not live[row]:
            assert_row_unmoved(state, before, row)
