"""Operations of generation where some kernels are wrong: the others go on as kernels."""

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, assert_close, draw, weights

from xlstm7b import kernel_verdicts
from xlstm7b.config import ModelConfig
from xlstm7b.generate.fused import FusedModel, Slots
from xlstm7b.generate.kernels import choice, plain
from xlstm7b.generate.kernels.choice import operations_for, without
from xlstm7b.generate.replay import Rings
from xlstm7b.mlstm.replay import Pass
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.quantize.config import Scheme
from xlstm7b.quantize.gpu import prepare
from xlstm7b.quantize.weight import QuantizedWeight

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.generate.kernels import gpu

CONFIG = ModelConfig(64, 1, 2, vocab_size=97)


def test_a_cpu_has_the_plain_ones() -> None:
    assert operations_for(torch.device("cpu")) is plain


def test_a_gpu_has_kernels_unless_a_verdict_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_kernels", lambda device: True)
    operations_for.cache_clear()
    for wrong, name, form in (
        ({"loss"}, "replay_cell", gpu.replay_cell),
        ({"replay"}, "replay_cell", plain.replay_cell),
        ({"replay"}, "step_cell", gpu.step_cell),
        ({"slots"}, "gather_states", plain.gather_states),
        ({"pointwise"}, "project", plain.project),
        ({"pointwise"}, "multiply", gpu.multiply),
    ):
        monkeypatch.setattr(kernel_verdicts, "wrong_families", lambda device, wrong=wrong: wrong)
        found = getattr(operations_for(torch.device("cuda", 0)), name)
        assert getattr(found, "__wrapped__", found) is form
        operations_for.cache_clear()


def test_every_operation_belongs_to_a_family() -> None:
    used = {name for names in choice._USES.values() for name in names}
    assert used | {*choice._PRODUCTS} == {*gpu.__all__}
    assert {*choice._USES, "products", *choice._SCHEMES} < kernel_verdicts.FAMILIES.keys()


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "scheme", [None, Scheme("int8"), Scheme("fp8"), Scheme("int4", 32)], ids=str
)
def test_only_products_of_the_wrong_family_are_plain(scheme, rows, monkeypatch):
    family = "products" if scheme is None else scheme.name
    operations = without(gpu, {family})
    x, W = draw(rows, 128, dtype=torch.float32), weights(24, 128, torch.float32)
    want = x.double() @ W.double().mT
    if scheme is not None:
        stored = QuantizedWeight.quantize(W, scheme)
        W, want = prepare(stored), x.double() @ stored.dequantize(torch.float64).mT
    launched = []
    monkeypatch.setattr(gpu, "_multiply", lambda *_, **__: launched.append(1) or (x, x))
    monkeypatch.setattr(gpu, "_product", lambda *_: launched.append(1) or want.float())
    assert_close(operations.multiply(x, W), want, 1e-5)
    total = torch.zeros(rows, 24, device=DEVICE)
    operations.add_product(total, x, W)
    assert_close(total, want, 1e-5)
    assert not launched
    other = QuantizedWeight.quantize(weights(24, 128, torch.float32), Scheme("int8"))
    other = weights(24, 128, torch.float32) if family == "int8" else prepare(other)
    operations.multiply(x, other)
    assert launched


def test_nothing_is_rounded_for_an_fp8_product_that_is_wrong() -> None:
    def norm(x, W, reader=None):
        return reader

    kernels = SimpleNamespace(**dict.fromkeys(gpu.__all__, norm), __all__=gpu.__all__)
    W = prepare(QuantizedWeight.quantize(torch.randn(16, 128), Scheme("fp8")))
    for wrong, reader in (({"steps"}, W), ({"fp8"}, None)):
        chosen = without(kernels, wrong)
        assert chosen.head_norm(0, torch.ones(1), W) is reader
        assert chosen.swiglu(0, torch.ones(1), W) is reader


@pytest.mark.parametrize(
    "wrong", [("steps", "slots"), ("replay", "passes"), ("pointwise",), ("products",)], ids=str
)
@torch.inference_mode()
def test_a_model_with_both_forms_computes_the_same(wrong):
    """Prompts, single tokens, replay and passes over drafts. A CPU has no kernel for sequences."""
    with DEVICE:
        model = XLSTM(CONFIG)

    def logits(operations) -> list[torch.Tensor]:
        fused = FusedModel(model)
        fused.operations = operations
        assert fused.uses_kernels == (operations is not plain and "replay" not in wrong)
        state = ModelState.zeros(CONFIG, 3, device=DEVICE)
        order = torch.tensor([2, 0], device=DEVICE)
        prompt, lengths = torch.arange(8, device=DEVICE).view(2, 4), torch.tensor([4, 3])
        slots = Slots(order, order.flip(0))
        found = [fused.logits(fused.read(prompt, state, lengths.to(DEVICE), slots))]
        state.tokens_seen.fill_(4)
        tokens = torch.tensor([5, 6, 7], device=DEVICE)
        found.append(fused.step(tokens, state))
        rings = Rings.zeros(CONFIG, 3, dtype=torch.float32, device=DEVICE, interval=2, size=8)
        rings.folded.copy_(state.tokens_seen)
        found += [fused.step(tokens + number, state, rings=rings) for number in range(2)]
        drafts = torch.tensor([[1, 2], [3, -1], [-1, -1]], device=DEVICE)
        read, counts = fused.operations.pass_tokens(tokens, drafts)
        one = Pass(rings.folded, state.tokens_seen, counts, rings.interval)
        verified = fused.read_drafts(read, state, one, rings)
        live = torch.arange(3, device=DEVICE) < counts[:, None]
        fused.advance(one, counts)
        found.append(verified[live])
        found.append(fused.step(tokens, state, rings=rings, way="fold"))
        return found

    for got, want in zip(logits(without(gpu, {"sequences", *wrong})), logits(plain), strict=True):
        assert_close(got, want.double(), 1e-4)
