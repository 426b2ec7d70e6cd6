"""Models of other libraries: their cached decoding is right, and a wrong one is found."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
import peers
from peers import CHECKED, GRAPH, PEERS, CodestralMamba, Decoder, Llama, check
from xlstm7b.config import SIZES

MODELS = ("transformers", "llama2", "llama3", "falcon-mamba", "codestral-mamba")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    """On a CPU, products of 16-bit numbers are computed in float32 and rounded once. PyTorch gives
    the same, but takes 100 times as long if the CPU has no instructions for them.
    """
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"] | {"num_blocks": 2})
    product = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if x.is_cuda:
            return product(x, weight, bias)
        wide = bias if bias is None else bias.float()
        return product(x.float(), weight.float(), wide).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_agrees_with_the_whole_pass(name, dtype, monkeypatch):
    """With a prompt of 248 the steps cross the border between two pieces."""
    monkeypatch.setattr(peers, "_STEPS", 10)
    if dtype == "bfloat16":  # slow on many CPUs, so the long prompt is for float32
        monkeypatch.setattr(peers, "_PROMPT", 24)
    peer = PEERS[name]("tiny", "cpu", dtype)
    check(Decoder(peer, peer.new_cache(1, CHECKED)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_cached_decoding_in_a_cuda_graph(name):
    peer = PEERS[name]("tiny", "cuda")
    check(Decoder(peer, peer.new_cache(1, CHECKED), way=GRAPH))


class Forgetful(CodestralMamba):
    """Starts each step from the same state."""

    def step(self, tokens, cache):
        before = [each.clone() for each in self.tensors(cache)]
        logits = super().step(tokens, cache)
        for each, old in zip(self.tensors(cache), before, strict=True):
            each.copy_(old)
        return logits


class Unstable(CodestralMamba):
    """Its bfloat16 logits are far from those of float32."""

    def logits(self, tokens):
        logits = super().logits(tokens)
        return logits if self.dtype == torch.float32 else logits.roll(1, -1)


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        (Forgetful, "float32", "cached decoding is wrong: its logits differ"),
        (Unstable, "bfloat16", "the random model is too unstable to check"),
    ],
)
def test_a_wrong_model_is_not_timed(kind, dtype, said, monkeypatch):
    monkeypatch.setattr(peers, "_PROMPT", 24)
    peer = kind("tiny", "cpu", dtype)
    with pytest.raises(ValueError, match=said):
        check(Decoder(peer, peer.new_cache(1, CHECKED)))


@settings(deadline=None, max_examples=15)
@given(
    position=st.integers(0, 1023),
    key_heads=st.sampled_from([1, 2, 4]),
    room=st.sampled_from([1024, 1536]),
    seed=st.integers(0, 9),
)
def test_a_step_attends_to_what_came_before(position, key_heads, room, seed):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, 1, 16, generator=draw)
    k, v = (torch.randn(2, key_heads, room, 16, generator=draw) for _ in "kv")
    seen = [x[:, :, : position + 1].repeat_interleave(4 // key_heads, 1) for x in (k, v)]
    weights = (q @ seen[0].transpose(2, 3) * 0.3).softmax(-1)
    want = (weights @ seen[1]).transpose(1, 2)
    object.__new__(peers.Llama3).attend_to(peers.rounded_up(position + 1))
    got = peers._attend(q, k, v, torch.tensor(position), 0.3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_published_shapes():
    counts = {"llama2": 6.74e9, "llama3": 8.03e9, "falcon-mamba": 7.27e9, "codestral-mamba": 7.29e9}
    for name, count in counts.items():
        with torch.device("meta"):
            model = PEERS[name]("7b", "meta").model
        found = sum(each.numel() for each in model.parameters())
        assert found == pytest.approx(count, rel=0.005), (name, found)


@pytest.mark.parametrize("is_new_implementation", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_kernels_of_another_package(is_new_implementation, wrapped, monkeypatch):
    """Also if the package `kernels` is installed, which wraps transformers' functions."""
    mamba = PEERS["falcon-mamba"]("tiny", "cpu")

    def func() -> bool:
        return is_new_implementation

    class Func(torch.nn.Module):
        def forward(self) -> bool:
            return func()

    module = import_module("transformers.models.falcon_mamba.modeling_falcon_mamba")
    scans = ("mamba_selective_scan", "mamba_selective_state_update")
    for name in (*scans, "causal_conv1d_fn", "causal_conv1d_update"):
        monkeypatch.setattr(module, name, Func() if wrapped else func)
    fast = "mamba_ssm, causal_conv1d"
    assert mamba.engine == (fast if is_new_implementation else "slow path")


def test_bytes_of_a_cache_and_of_a_step():
    llama = PEERS["llama3"]("tiny", "cpu", "float32")
    tensors = llama.tensors(llama.new_cache(1, 300))
    assert llama.cache_bytes(300) == sum(each.nbytes for each in tensors)
    assert llama.step_bytes(2, 0) == llama.read_weight_bytes()
    assert llama.step_bytes(2, 512) - llama.step_bytes(2, 0) == 2 * llama.cache_bytes(512)
    mamba = PEERS["falcon-mamba"]("tiny", "cpu", "float32")
    assert mamba.cache_bytes(10) == mamba.cache_bytes(1000)
    embedding = mamba.model.get_input_embeddings().weight.nbytes
    weights = sum(each.nbytes for each in mamba.model.parameters()) - embedding
    assert mamba.step_bytes(3, 10) == weights + 3 * 2 * mamba.cache_bytes(10)


def test_how_steps_are_compiled(monkeypatch):
    """One sequence with products tuned; a batch of any size only where the cache grows."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda step, **named: asked.append(named) or step)
    for kind in (peers.Llama3, peers.AuthorsXLSTM):
        peer = object.__new__(kind)
        peer._compiled = {}
        for is_batch in (False, True, True):
            peer.compiled_step(is_batch)
    tuned = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
    assert asked == [
        tuned,
        {"mode": None, "dynamic": True},
        tuned,
        {"mode": None, "dynamic": False},
    ]


def test_prompts_are_compiled_for_all_lengths(monkeypatch):
    compiled = []
    peer = PEERS["llama3"]("tiny", "cpu", "float32")
    monkeypatch.setattr(torch, "compile", lambda call, **named: compiled.append(named) or call)
    peer.compile_prompts()
    assert not compiled  # not on a CPU
    monkeypatch.setattr(Llama, "new_cache", lambda *_: None)
    monkeypatch.setattr(Llama, "tokens", lambda *_: None)
    monkeypatch.setattr(Llama, "prompt_logits", lambda *_: None)
    peer.device, peer.reader = "cuda", peer.prompt_logits
    peer.compile_prompts()
    assert compiled == [{"dynamic": True}]


def test_fewer_configurations_are_tuned(monkeypatch):
    triton = pytest.importorskip("triton")

    def kernel(warps, stages):
        pairs = [(w, s) for w in warps for s in stages]
        tried = [triton.Config({}, num_warps=w, num_stages=s) for w, s in pairs]
        tuned = triton.autotune(tried, key=[])(triton.jit(lambda: None))
        return triton.heuristics({})(tuned)

    def tried(kernel):
        return [(each.num_warps, each.num_stages) for each in kernel.fn.configs]

    ours, other = ModuleType("peer.kernels"), ModuleType("another.kernels")
    ours.many = kernel([2, 4, 8, 16], [2, 3, 4])
    ours.few = kernel([1, 2], [1])
    other.many = kernel([2, 4], [2])
    for module in (ours, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    peers._tune_less("peer.")
    assert tried(ours.many) == [(4, 2), (4, 3), (8, 2), (8, 3)]
    assert tried(ours.few) == [(1, 1), (2, 1)]  # none would be left
    assert tried(other.many) == [(2, 2), (4, 2)]
