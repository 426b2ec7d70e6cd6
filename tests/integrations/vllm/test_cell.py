"""The cell as vLLM runs it, with batches like vLLM's made by hand. It needs no vLLM."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from models import random_model

from xlstm7b import ModelConfig
from xlstm7b.integrations.vllm import copy_bytes
from xlstm7b.integrations.vllm.cell import Batch, CellInputs, group_prefills, run_cell
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model.layers import soft_cap


def paged_cache(layer, slots, device):
    """C, n, m as views of pages of memory, as vLLM lays them out, with padding after each page."""
    heads, d_qk, d_hv = 2, layer.q.weight.shape[0] // 2, layer.v.weight.shape[0] // 2
    shapes = (heads, d_qk, d_hv), (heads, d_qk), (heads,)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pages = torch.randn(slots, -(-sum(sizes) // 64) * 64, device=device)
    parts = pages[:, : sum(sizes)].split(sizes, dim=1)
    return MLSTMState(
        *(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
    )


def check_step(lengths, are_new, decodes, config, dtype, device, largest):
    """One step of an engine: `decodes` single tokens, then prompts of these lengths."""
    model = random_model(config, torch.float32).to(device, dtype)
    layer = model.backbone.blocks[0].mlstm_layer
    requests = decodes + len(lengths)
    cache = paged_cache(layer, requests + 3, device)
    before = MLSTMState(*(part.clone() for part in cache))
    slots = torch.randperm(requests + 2, dtype=torch.int32)[:requests].to(device) + 1
    starts = [decodes]
    for length in lengths:
        starts.append(starts[-1] + length)
    is_new = torch.tensor(are_new, dtype=torch.bool, device=device)
    prefills = group_prefills(starts, slots[decodes:], is_new)
    assert len(prefills) <= 10

    rows = starts[-1] + 2  # vLLM may pad the batch
    x = torch.randn(rows, config.embedding_dim, dtype=dtype, device=device)
    with torch.no_grad():
        q, k, v = (part.flatten(0, 1) for part in layer.qkv(x[:, None], (2, -1)))
        gates = (soft_cap(gate(x), config.gate_soft_cap) for gate in
                 (layer.igate_preact, layer.fgate_preact))  # fmt: skip
        inputs = CellInputs(q, k, v, layer.ogate_preact(x), *gates)
        out = torch.full_like(inputs.gate, 7)
        norm = layer.multihead_norm
        batch = Batch(slots[:decodes] if decodes else None, prefills)
        run_cell(inputs, batch, cache, norm.weight, out, norm_eps=norm.eps, eps=config.eps)

        ends = [*range(1, decodes + 1), *starts[1:]]
        new_requests = [False] * decodes + are_new
        for number, (end, new) in enumerate(zip(ends, new_requests, strict=True)):
            start = ends[number - 1] if number else 0
            slot = int(slots[number])
            state = None if new else MLSTMState(*(part[slot, None] for part in before))
            want, want_state = layer(x[None, start:end], state)
            assert error(layer.out_proj(out[start:end]), want[0]) < largest
            for part, want_part in zip(cache, want_state, strict=True):
                assert error(part[slot], want_part[0]) < largest
    assert (out[starts[-1] :] == 7).all()
    unused = torch.ones(requests + 3, dtype=torch.bool)
    unused[slots.long().cpu()] = False
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part[unused.to(device)], old[unused.to(device)])


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=9),
    st.integers(0, 3),
)
def test_a_mixed_batch_equals_each_request_alone(prompts, decodes):
    lengths, are_new = [length for length, _ in prompts], [new for _, new in prompts]
    config = ModelConfig(32, 1, 2, vocab_size=16)
    check_step(lengths, are_new, decodes, config, torch.float32, "cpu", 2e-5)


def test_prompts_of_similar_length_are_one_batch():
    starts = [4, 9, 16, 24, 88, 152, 153]  # lengths 5, 7, 8, 64, 64, 1
    slots = torch.arange(10, 16, dtype=torch.int32)
    short, long, one = group_prefills(starts, slots, torch.tensor([True] * 6))
    assert short.tokens.shape == (3, 8)
    assert short.padded.sum() == 4
    assert short.slots.tolist() == [10, 11, 12]
    assert long.tokens.tolist() == [[*range(24, 88)], [*range(88, 152)]]
    assert long.padded is None
    assert one.tokens == slice(152, 153)
    assert one.slots.dtype == torch.long  # a slot times the size of a state exceeds 32 bits


def test_states_are_copied_by_their_addresses():
    x = torch.arange(12.0).view(3, 4)
    addresses = torch.tensor([row.data_ptr() for row in x])
    copy_bytes(addresses[:1], addresses[2:], torch.tensor([12]))
    assert x[2].tolist() == [0, 1, 2, 11]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("width", [256, 512])
def test_the_gpu_path_equals_the_layer(dtype, largest, width):
    config = ModelConfig(width, 1, 2, vocab_size=16)
    lengths, are_new = [1, 5, 70, 64, 64, 300, 90], [True, False, True, True, False, False, True]
    for decodes in (1, 3, 20):
        check_step(lengths, are_new, decodes, config, dtype, "cuda", largest)
    check_step([], [], 70, config, dtype, "cuda", largest)


@pytest.mark.gpu
def test_a_decode_step_can_be_a_cuda_graph():
    """As in vLLM: the slots change between replays, and rows without a request have slot 0."""
    config = ModelConfig(256, 1, 2, vocab_size=16)
    layer = random_model(config, torch.float32).cuda().backbone.blocks[0].mlstm_layer
    cache = paged_cache(layer, 8, "cuda")
    slots = torch.tensor([1, 2, 0, 0], dtype=torch.int32, device="cuda")
    x = torch.randn(4, 256, device="cuda")
    norm = layer.multihead_norm

    def step():
        q, k, v = (part.flatten(0, 1) for part in layer.qkv(x[:, None], (2, -1)))
        gates = layer.igate_preact(x), layer.fgate_preact(x)
        inputs = CellInputs(q, k, v, layer.ogate_preact(x), *(soft_cap(g, 15.0) for g in gates))
        out = torch.zeros_like(inputs.gate)
        run_cell(inputs, Batch(slots, []), cache, norm.weight, out, norm_eps=norm.eps, eps=1e-6)
        return layer.out_proj(out)

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        slots.copy_(torch.tensor([5, 3, 0, 0]))
        state = MLSTMState(*(part[[5, 3]].clone() for part in cache))
        graph.replay()
        want, want_state = layer(x[:2, None], state)
        assert error(got[:2], want[:, 0]) < 1e-4
        for part, want_part in zip(cache, want_state, strict=True):
            assert error(part[[5, 3]], want_part) < 1e-4
