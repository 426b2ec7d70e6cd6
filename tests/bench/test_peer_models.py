"""Models of other libraries: their cached decoding is right, and a wrong one is found."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")
from xlstm7b.bench import peer_models
from xlstm7b.bench.peer_models import EAGER, GRAPH, PEERS, Decoder, Peer, check
from xlstm7b.bench.plans import ModelPlan

MODELS = ("transformers", "llama2", "llama3", "falcon-mamba", "codestral-mamba")
PLAN = ModelPlan.of(device="cpu", size="tiny")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ten tokens are compared: with a prompt of 248 they cross the border between two pieces.

    On a CPU, products of 16-bit numbers are computed in float32 and rounded once. PyTorch gives the
    same, but takes 100 times as long if the CPU has no instructions for them.
    """
    monkeypatch.setattr(peer_models, "_CHECKED", 10)
    product = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda:
            return product(x, weight, bias)
        wide = bias if bias is None else bias.float()
        return product(x.float(), weight.float(), wide).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with torch.no_grad():
        yield


def make(name: str, **changes: Any) -> Peer:
    return PEERS[name](replace(PLAN, **changes), 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_agrees_with_the_whole_pass(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16":  # slow on many CPUs, so the long prompt is for float32
        monkeypatch.setattr(peer_models, "_PROMPT", 24)
    peer = make(name, dtype=dtype)
    for attention in peer.attentions:
        decoder = Decoder(peer, EAGER, peer.new_cache(1, 300), attention=attention)
        found = check(partial(_of_two_layers, name), peer, decoder)
        assert found["equal_tokens"] == 10
        assert found["cached_error"] < (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_cached_decoding_in_a_cuda_graph(name: str) -> None:
    peer = make(name, dtype="bfloat16", device="cuda")
    for attention in peer.attentions:
        decoder = Decoder(peer, GRAPH, peer.new_cache(1, 300), attention=attention)
        assert check(partial(_of_two_layers, name), peer, decoder)["cached_error"] < 0.1


def _of_two_layers(name: str, plan: ModelPlan, layers: int | None) -> Peer:
    """In the place of four: half the time."""
    return PEERS[name](plan, 2)


class Forgetful(peer_models.Mamba):
    """Starts each step from the same state."""

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        before = [each.clone() for each in self.tensors(cache)]
        logits = super().step(tokens, cache)
        for each, old in zip(self.tensors(cache), before, strict=True):
            each.copy_(old)
        return logits


def test_a_wrong_cache_is_found() -> None:
    broken = partial(Forgetful, "codestral-mamba")
    peer = broken(PLAN, 2)
    with pytest.raises(ValueError, match="cached decoding is wrong: its logits differ"):
        check(broken, peer, Decoder(peer, EAGER, peer.new_cache(1, 300)))


class Unstable(peer_models.Mamba):
    """Its bfloat16 logits are far from those of float32."""

    def logits(self, tokens: Tensor) -> Tensor:
        logits = super().logits(tokens)
        return logits if self.dtype == torch.float32 else logits.roll(1, -1)


def test_a_model_that_cannot_be_checked_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_models, "_PROMPT", 24)
    unstable = partial(Unstable, "codestral-mamba")
    peer = unstable(replace(PLAN, dtype="bfloat16"), 2)
    with pytest.raises(ValueError, match="the random model is too unstable to check"):
        check(unstable, peer, Decoder(peer, EAGER, peer.new_cache(1, 300)))


@settings(deadline=None, max_examples=15)
@given(
    position=st.integers(0, 1023),
    key_heads=st.sampled_from([1, 2, 4]),
    room=st.sampled_from([1024, 1536]),
    seed=st.integers(0, 9),
)
def test_both_ways_to_attend_equal_plain_attention(
    position: int, key_heads: int, room: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, 1, 16, generator=draw)
    k, v = (torch.randn(2, key_heads, room, 16, generator=draw) for _ in "kv")
    seen = [x[:, :, : position + 1].repeat_interleave(4 // key_heads, 1) for x in (k, v)]
    weights = (q @ seen[0].transpose(2, 3) * 0.3).softmax(-1)
    want = (weights @ seen[1]).transpose(1, 2)
    keys = -(-(position + 1) // 256) * 256
    llama = object.__new__(peer_models.Llama)
    for way in peer_models.Llama.attentions:
        with llama.attending(way, keys):
            got = peer_models._attend(q, k, v, torch.tensor(position), 0.3)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_published_shapes() -> None:
    seven = replace(PLAN, size="7b")
    two, three = (peer_models.llama_shape(name, seven) for name in ("llama2", "llama3"))
    assert (two["intermediate_size"], two["num_key_value_heads"]) == (11008, 32)
    assert (three["intermediate_size"], three["num_key_value_heads"]) == (14336, 8)
    counts = {"llama2": 6.74e9, "llama3": 8.03e9, "falcon-mamba": 7.27e9, "codestral-mamba": 7.29e9}
    for name, count in counts.items():
        with torch.device("meta"):
            model = PEERS[name](replace(seven, device="meta")).model
        found = sum(each.numel() for each in model.parameters())
        assert found == pytest.approx(count, rel=0.005), (name, found)


@pytest.mark.parametrize("is_new_implementation", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_kernels_of_another_package(
    is_new_implementation: bool, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the package `kernels` is installed, which wraps transformers' functions."""
    mamba = make("falcon-mamba")
    monkeypatch.setattr(peer_models, "_named", lambda package: package)

    def func() -> bool:
        return is_new_implementation

    class Func(torch.nn.Module):
        def forward(self) -> bool:
            return func()

    module = import_module("transformers.models.falcon_mamba.modeling_falcon_mamba")
    scans = ("mamba_selective_scan", "mamba_selective_state_update")
    for name in (*scans, "causal_conv1d_fn", "causal_conv1d_update"):
        monkeypatch.setattr(module, name, Func() if wrapped else func)
    fast = "transformers, mamba_ssm, causal_conv1d"
    assert mamba.engine == (fast if is_new_implementation else "transformers, slow path")


def test_bytes_of_a_cache() -> None:
    llama = make("llama3")
    assert llama.cache_bytes(300) == sum(
        each.nbytes for each in llama.tensors(llama.new_cache(1, 300))
    )
    mamba = make("falcon-mamba")
    assert mamba.cache_bytes(10) == mamba.cache_bytes(1000)


def test_fewer_configurations_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")

    def kernel(**configs: list[int]) -> Any:
        pairs = [(w, s) for w in configs["warps"] for s in configs["stages"]]
        tried = [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in pairs]
        tuned = triton.autotune(tried, key=[])(triton.jit(lambda: None))
        return triton.heuristics({})(tuned)

    def tried(kernel: Any) -> list[tuple[int, int]]:
        return [(each.num_warps, each.num_stages) for each in kernel.fn.configs]

    ours, other = ModuleType("peer.kernels"), ModuleType("another.kernels")
    ours.many = kernel(warps=[2, 4, 8, 16], stages=[2, 3, 4])
    ours.few = kernel(warps=[1, 2], stages=[1])
    other.many = kernel(warps=[2, 4], stages=[2])
    for module in (ours, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    peer_models._tune_less("peer.")
    assert tried(ours.many) == [(4, 2), (4, 3), (8, 2), (8, 3)]
    assert tried(ours.few) == [(1, 1), (2, 1)]  # none would be left
    assert tried(other.many) == [(2, 2), (4, 2)]
