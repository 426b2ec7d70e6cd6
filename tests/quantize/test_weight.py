"""Rounding, packing and products of quantised matrices, against float64 and compressed-tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xlstm7b.model.layers import linear, linear_float32
from xlstm7b.quantize import cpu, gpu
from xlstm7b.quantize.config import GROUP_SIZES, Quantization, Scheme, check_supported
from xlstm7b.quantize.weight import QuantizedWeight, stack

SCHEMES = [Scheme("int8"), Scheme("fp8"), *(Scheme("int4", size) for size in GROUP_SIZES)]
schemes = st.sampled_from(SCHEMES)


def draw(rows: int, columns: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random) * torch.rand(rows, 1, generator=random)


@st.composite
def matrices(
    draws: st.DrawFn, scheme: st.SearchStrategy[Scheme] = schemes
) -> tuple[Tensor, Scheme]:
    chosen = draws(scheme)
    groups = draws(st.integers(1, 3))
    columns = groups * chosen.group_size if chosen.group_size else draws(st.integers(1, 130))
    return draw(draws(st.integers(1, 70)), columns, draws(st.integers(0, 99))), chosen


@given(matrices())
@settings(deadline=None, max_examples=60)
def test_values_are_rounded_to_the_nearest_code(case: tuple[Tensor, Scheme]) -> None:
    weight, scheme = case
    quantized = QuantizedWeight.quantize(weight, scheme)
    got = quantized.dequantize()
    assert got.shape == weight.shape == quantized.shape
    scale = quantized.scale.repeat_interleave(weight.shape[1] // quantized.scale.shape[1], dim=1)
    steps = (got - weight).abs() / scale
    if scheme.name == "fp8":
        assert (steps <= 2**-10 + (weight / scale).abs() / 16 + 2).all()
        inside = weight.abs() < 440 * scale
        assert (steps <= 2**-10 + (weight / scale).abs() / 16)[inside].all()
    else:
        inside = weight.abs() < (7 if scheme.name == "int4" else 127) * scale
        assert (steps[inside] <= 0.5001).all()
        # What is clipped is at most a quarter larger than the largest code.
        assert (steps <= (3 if scheme.name == "int4" else 1)).all()
    # A second time changes nothing that is not clipped again.
    again = QuantizedWeight.quantize(got, scheme)
    assert (again.dequantize() - got).norm() <= 0.15 * got.norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-20, 3e38])
def test_zeros_and_extreme_values_stay_finite(scheme: Scheme, value: float) -> None:
    weight = torch.full((3, 128), value)
    got = QuantizedWeight.quantize(weight, scheme).dequantize(torch.float64)
    assert got.isfinite().all()
    if value != 1e-42:  # smaller than the smallest scale: rounded to 0
        assert (got - weight).norm() <= 0.08 * weight.double().norm()


@given(matrices(), st.integers(1, 3), st.sampled_from(["float64", "float32", "bfloat16"]))
@settings(deadline=None, max_examples=40)
def test_products_are_those_of_the_dequantised_matrix(
    case: tuple[Tensor, Scheme], rows: int, dtype: str
) -> None:
    quantized = QuantizedWeight.quantize(*case)
    x = draw(rows, quantized.shape[1], 5).to(getattr(torch, dtype))[None]
    want = x.double() @ quantized.dequantize(torch.float64).mT
    rounding = {"float64": 1e-14, "float32": 2e-4, "bfloat16": 8e-3}[dtype]
    for got in (linear(x, quantized), linear_float32(x, quantized)):
        assert got.shape == want.shape
        assert (got - want).norm() <= rounding * (x.double().norm() * quantized.dequantize().norm())
    assert linear(x, quantized).dtype == x.dtype


@pytest.fixture(params=["this CPU", "without VNNI", "without AVX2"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operators of this CPU, and what is used where some are missing."""
    if request.param != "this CPU":
        monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    if request.param == "without AVX2":
        monkeypatch.setattr(cpu, "has_avx2", lambda: False)
    return request.param


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(64, 128, 192), (16, 48), (5, 2, 9)], ids=str)
def test_cpu_operators(
    scheme: Scheme, dtype: torch.dtype, sizes: tuple[int, ...], machine: str
) -> None:
    """Alone and stacked, for few and for many rows. bfloat16 rounds x, and the operators round y.

    ARM's operator rounds x to int8.
    """
    parts = [QuantizedWeight.quantize(draw(n, 256, n), scheme) for n in sizes]
    want_weight = torch.cat([part.dequantize(torch.float64) for part in parts])
    packed = cpu.packed_schemes(parts)
    prepared = [cpu.prepare(part, packed) for part in parts]
    assert len({part.layout for part in prepared}) == 1
    stacked = stack(prepared, torch.cat([part.data for part in prepared]))
    rounding = {"arm": 2e-2, "x86": 4e-3, "bfloat16": 4e-3}.get(stacked.layout, 1e-4)
    for rows in (1, 3, cpu.MAX_ROWS, cpu.MAX_ROWS + 6):
        few = rows <= (3 if cpu.has_vnni() else cpu.MAX_ROWS)
        exact = cpu.is_arm() and dtype == torch.float32
        if dtype == torch.bfloat16 or (scheme.name == "int8" and few and not exact):
            limit = max(rounding, 4e-3)
        else:
            limit = rounding
        x = draw(rows, 256, rows).to(dtype)
        want = x.double() @ want_weight.mT
        got = linear(x, stacked)
        assert (got - want).norm() <= limit * want.norm()
        assert got.dtype == dtype


def test_the_operators_order_is_undone() -> None:
    if not cpu.has_avx2():
        pytest.skip("x86 only")
    for scheme in SCHEMES[2:]:
        quantized = QuantizedWeight.quantize(draw(192, 256, 1), scheme)
        prepared = cpu.prepare(quantized, cpu.packed_schemes([quantized]))
        assert prepared.layout == "x86"
        assert torch.equal(torch.cat([*cpu.tiles(prepared, torch.float32)]), quantized.dequantize())
        with pytest.raises(ValueError, match="load the model on the other device"):
            prepared.to("meta")


def test_arm_operator() -> None:
    if not cpu.has_arm_int4():
        pytest.skip("no ARM operator for 4 bits on this machine")
    quantized = QuantizedWeight.quantize(draw(64, 128, 1), SCHEMES[2])
    assert cpu.prepare(quantized, cpu.packed_schemes([quantized])).layout == "arm"


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_stacked_weights_with_one_group_in_each_row(columns: int) -> None:
    scheme = Scheme("int4", columns)
    parts = [QuantizedWeight.quantize(draw(n, columns, n), scheme) for n in (64, 128)]
    want_weight = torch.cat([part.dequantize(torch.float64) for part in parts])
    prepared = [cpu.prepare(part, cpu.packed_schemes(parts)) for part in parts]
    stacked = stack(prepared, torch.cat([part.data for part in prepared]))
    x = draw(5, columns, 5)
    want = x.double() @ want_weight.mT
    assert (linear(x, stacked) - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("sizes", [(64, 128), (16, 48, 4128)], ids=str)
def test_int8_beside_int4_on_arm(sizes: tuple[int, ...]) -> None:
    """It goes to the operator for int4, as pairs of codes; every code is exact."""
    if not cpu.has_arm_int4():
        pytest.skip("no ARM operator for 4 bits on this machine")
    other = QuantizedWeight.quantize(draw(64, 128, 1), SCHEMES[2])
    parts = [QuantizedWeight.quantize(draw(n, 256, n), SCHEMES[0]) for n in sizes]
    parts[0].data[:, 0], parts[0].data[:, 1] = 127, -127
    want_weight = torch.cat([part.dequantize(torch.float64) for part in parts])
    packed = cpu.packed_schemes([other, *parts])
    prepared = [cpu.prepare(part, packed) for part in parts]
    stacked = stack(prepared, torch.cat([part.data for part in prepared]))
    assert stacked.layout == "arm"
    ones = torch.eye(256)  # the operator rounds x to int8: 0 and 1 are exact
    assert torch.allclose(linear(ones, stacked).double(), want_weight.mT, rtol=1e-5, atol=1e-5)
    for rows in (1, 5, 70):
        x = draw(rows, 256, rows)
        want = x.double() @ want_weight.mT
        assert (linear(x, stacked) - want).norm() <= 2e-2 * want.norm()
    odd = QuantizedWeight.quantize(draw(5, 256, 1), SCHEMES[0])
    assert cpu.packed_schemes([other, *parts, odd]) == {"int4"}
    assert cpu.packed_schemes(parts) == set()


def test_scales_that_operators_would_round_are_not_given_to_them() -> None:
    quantized = QuantizedWeight.quantize(draw(64, 128, 1), SCHEMES[2])
    foreign = QuantizedWeight(
        quantized.scheme, quantized.shape, quantized.data, quantized.scale * 1.001
    )
    assert cpu.packed_schemes([quantized, foreign]) == set()
    assert cpu.prepare(quantized, set()).layout == "stored"


@given(matrices(st.sampled_from([SCHEMES[0], *SCHEMES[2:]])))
@settings(deadline=None, max_examples=30)
def test_the_packed_layout_is_that_of_compressed_tensors(case: tuple[Tensor, Scheme]) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantized = QuantizedWeight.quantize(*case)
    if quantized.scheme.name == "int8":
        from xlstm7b.quantize.weight import unpack_int8

        packed = helpers.pack_to_int32(quantized.data, 8)
        assert torch.equal(unpack_int8(packed, quantized.shape[1]), quantized.data)
        return
    codes = helpers.unpack_from_int32(quantized.data, 4, torch.Size(quantized.shape))
    assert torch.equal(helpers.pack_to_int32(codes, 4), quantized.data)
    groups = codes.double().unflatten(1, (quantized.scale.shape[1], -1))
    want = (groups * quantized.scale[..., None]).flatten(1)
    assert torch.equal(quantized.dequantize(torch.float64), want)


@pytest.mark.parametrize("bits", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("head", ["4", "8", "16"])
def test_our_own_configs_are_supported(bits: str, head: str) -> None:
    values = Quantization.named(bits, head=head).to_dict()
    check_supported(values)
    config = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    assert config.model_validate(values).format == values["format"]


WEIGHTS = Scheme("int4", 64).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "not supported with the quant_method 'gptq'"),
        ({"config_groups": {}}, "has no config_groups"),
        ({"format": "marlin-24"}, "the format 'marlin-24' is not supported"),
        ({"quantization_status": "frozen"}, "the status 'frozen' is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        ({"num_bits": 3}, "group_0: weights with num_bits 3, .*are not supported, only symmetric"),
        ({"group_size": 16}, "group_size 16 are not supported"),
        ({"group_size": [64]}, "group_0: "),
        ({"symmetric": False}, "symmetric False"),
        ({"strategy": "tensor"}, "strategy tensor"),
        ({"type": "float"}, "type float"),
        ({"actorder": "group"}, "actorder group"),
    ],
)
def test_unsupported_schemes_are_named(change: dict[str, object], message: str) -> None:
    values = Quantization.named("int4").to_dict()
    if change.keys() & {*WEIGHTS, "actorder"}:
        values["config_groups"]["group_0"]["weights"].update(change)
    else:
        values.update(change)
    with pytest.raises(ValueError, match=message):
        check_supported(values)
    for broken in ([], 3, {"quant_method": "compressed-tensors", "config_groups": {"a": 1}}):
        with pytest.raises(ValueError, match="quantization_config"):
            check_supported(broken)


@given(matrices(), st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_the_order_of_the_gpu_kernels_loses_nothing(case: tuple[Tensor, Scheme], rows: int) -> None:
    weight, scheme = case
    parts = [QuantizedWeight.quantize(part, scheme) for part in (weight, weight[-rows:])]
    prepared = [gpu.prepare(part) for part in parts]
    wanted = [part.dequantize() for part in parts]
    stacked = stack(prepared, torch.cat([part.data for part in prepared]))
    for got, want in zip((*prepared, stacked), (*wanted, torch.cat(wanted)), strict=True):
        assert torch.equal(got.dequantize(), want)
        assert torch.equal(linear(torch.eye(weight.shape[1]), got), want.mT)
