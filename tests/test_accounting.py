"""Counts against the paper's table, the authors' published figures and the parameter shapes."""

import dataclasses
import json
import sys
from math import prod
from subprocess import run
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import ROOT, text_of

from xlstm7b import accounting, registry
from xlstm7b.accounting import Factors
from xlstm7b.config import SIZES, ModelConfig
from xlstm7b.generate.runner import MAX_SLOTS
from xlstm7b.quantize.config import Scheme

SEVEN = ModelConfig.named("7b")
STANDARD_SIZES = [size for size in SIZES if ModelConfig.named(size).is_standard]


def with_heads(num_heads: int) -> ModelConfig:
    return ModelConfig(embedding_dim=4096, num_blocks=32, num_heads=num_heads)


def paper_cell(num_heads: int) -> int:
    """The paper's setting: width 4096, T = 8192, chunks of 64."""
    return accounting.cell_flops(8192, 64, num_heads, 2048 // num_heads, 4096 // num_heads)["total"]


# The paper's table on head dimensions. It prints 7.6e11 for 4 heads, too large by a factor of 10.
@pytest.mark.parametrize(
    ("num_heads", "megabytes", "tokens", "flops"),
    [
        (4, "268.4", 256, "7.6e+10"),
        (8, "134.2", 128, "4.1e+10"),
        (16, "67.1", 64, "2.4e+10"),
        (32, "33.6", 32, "1.5e+10"),
    ],
)
def test_head_dimension_table(num_heads: int, megabytes: str, tokens: int, flops: str) -> None:
    config = with_heads(num_heads)
    assert f"{accounting.state_bytes(config)['C'] / 1e6:.1f}" == megabytes
    assert accounting.kv_cache_equivalent_tokens(config) == tokens
    assert f"{paper_cell(num_heads):.1e}" == flops
    forward = accounting.forward_flops(config, 8192, 64)
    assert forward["cell"] == 32 * paper_cell(num_heads)


def test_cell_agrees_with_the_authors_published_totals() -> None:
    """Forward + backward FLOPs of the four models at T = 8192, from the authors' repository.

    Between head counts only the cell and the two gates' matrices differ.
    """
    published = {
        4: 334172332864438.25,
        8: 330901836100534.25,
        16: 329347299603382.25,
        32: 328731455124406.25,
    }
    ours = {
        heads: 3 * 32 * (paper_cell(heads) + 2 * 8192 * 4096 * 2 * heads) for heads in published
    }
    for heads in (8, 16, 32):
        assert published[4] - published[heads] == ours[4] - ours[heads]


def test_the_papers_count_of_the_7b() -> None:
    """T = 8192, chunks of 64: the released sizes, those that the paper prints, the Transformer."""
    assert f"{accounting.paper_forward_flops(SEVEN, 8192, 64)['total']:.4e}" == "1.1380e+14"
    printed = accounting.paper_forward_flops(SEVEN, 8192, 64, vocab_size=50257, ffn_factor=2.66)
    assert f"{printed['total']:.4e}" == "1.1348e+14"
    transformer = accounting.paper_transformer_flops(SEVEN, 8192, head_dim=128)
    assert f"{transformer['total']:.3e}" == "1.478e+14"
    assert transformer["attention"] == 32 * 8192**2 * (4 * 4096 + 3 * 32)


def test_the_papers_count_agrees_with_the_authors_published_totals() -> None:
    """Forward + backward FLOPs of four models at T = 8192, from the authors' later repository.

    There the embedding is free, and the SwiGLU's product counts beside its activation.
    """
    published = {
        4: 334172332864438.25,
        8: 330901836100534.25,
        16: 329347299603382.25,
        32: 328731455124406.25,
    }
    for heads, total in published.items():
        counts = accounting.paper_forward_flops(
            with_heads(heads), 8192, 64, ffn_factor=2.667, factors=Factors(swish=2)
        )
        assert 3 * (counts["total"] - counts["embedding"]) == pytest.approx(total, abs=3)


def test_the_appendix_prints_two_terms_differently() -> None:
    """(1 + 4 L) d_qk for each chunk's denominator, and 2 T d F_swish for each SwiGLU."""
    T, L, d = 8192, 64, SEVEN.embedding_dim
    published = accounting.paper_forward_flops(SEVEN, T, L)
    terms = accounting.cell_flops(T, L, SEVEN.num_heads, SEVEN.d_qk, SEVEN.d_hv)
    printed = SEVEN.num_heads * T // L * (1 + 4 * L) * SEVEN.d_qk
    cell = terms["total"] - terms["inter_chunk_denominator"] + printed
    ffn = T * 6 * SEVEN.ffn_dim * d + 2 * T * d
    others = published["total"] - published["cell"] - published["ffn"]
    want = others + SEVEN.num_blocks * (cell + ffn)
    assert accounting.printed_forward_flops(SEVEN, T, L) == want
    assert f"{want:.5e}" == f"{published['total']:.5e}" == "1.13802e+14"
    sizes = {"vocab_size": 50257, "ffn_factor": 2.66}
    assert f"{accounting.printed_forward_flops(SEVEN, T, L, **sizes):.5e}" == "1.13482e+14"


def test_the_papers_count_is_two_per_weight_and_token_with_the_cell_and_two_activations() -> None:
    for size in SIZES:
        config, length = ModelConfig.named(size), 128
        if config.other_classes():
            continue
        counts = accounting.paper_forward_flops(config, length)
        weights = sum(prod(s) for s in config.parameter_shapes().values() if len(s) == 2)
        cell = accounting.cell_flops(length, 64, config.num_heads, config.d_qk, config.d_hv)
        activations = length * (config.v_dim + config.ffn_dim)
        rest = config.num_blocks * (cell["total"] + activations)
        assert counts["total"] == 2 * length * weights + rest


@given(
    T=st.integers(1, 300),
    L=st.integers(1, 80),
    NH=st.integers(1, 8),
    d_qk=st.integers(1, 64),
    d_hv=st.integers(1, 64),
    f=st.builds(Factors, *[st.integers(0, 20)] * 8),
)
def test_cell_factors_are_those_of_the_equations(
    T: int, L: int, NH: int, d_qk: int, d_hv: int, f: Factors
) -> None:
    """What each F_X is multiplied with, counted in the equations of one chunk."""
    none = Factors(*[0] * 8)

    def total(factors: Factors) -> int:
        return accounting.cell_flops(T, L, NH, d_qk, d_hv, factors=factors)["total"]

    lengths = [min(L, T - start) for start in range(0, T, L)]
    # exp: 2 gates of a token, 1 of the state; L² of D; exp(−m) of a token.
    exp = sum(2 * n + 1 + n * n + n for n in lengths)
    # max: of the state; of D's entries and rows; of a token's two maxima and of its denominator.
    maximum = sum(1 + n * n + n + 2 * n for n in lengths)
    mask, absolute = sum(n * n for n in lengths), T
    added = f.exp * exp + f.max * maximum + f.mask * mask + f.abs * absolute
    assert total(f) == total(none) + NH * added
    step = accounting.cell_step_flops(NH, d_qk, d_hv, f)
    gates = 2 * f.exp + f.log + f.sigmoid + 2 * f.max + f.abs
    assert step == accounting.cell_step_flops(NH, d_qk, d_hv, none) + NH * gates


def test_the_papers_count_is_refused_for_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._classes, ("gate", "other"), object)
    config = dataclasses.replace(SEVEN, gate="other")
    with pytest.raises(ValueError, match="of its own model only, not those of gate 'other'"):
        accounting.paper_forward_flops(config, 8192)


def test_transformer_parameters_are_those_of_llama() -> None:
    """Llama-2-7B has 6,738,415,616 parameters."""
    llama = dataclasses.replace(
        SEVEN, vocab_size=32000, ffn_proj_factor=2.6875, ffn_round_up_to_multiple_of=256
    )
    assert llama.ffn_dim == 11008
    assert accounting.transformer_parameter_counts(llama)["total"] == 6_738_415_616
    counts = accounting.transformer_parameter_counts(SEVEN)
    flops = accounting.paper_transformer_flops(SEVEN, 1)
    for part in ("embedding", "attention_projections", "head"):
        assert flops[part] == 2 * counts[part]


@pytest.mark.parametrize(("size", "total"), [("7b", 6_865_424_896), ("160m", 162_303_840)])
def test_parameter_totals(size: str, total: int) -> None:
    config = ModelConfig.named(size)
    assert accounting.parameter_counts(config)["total"] == total
    assert accounting.weight_bytes(config, 4) == 4 * total


@pytest.mark.parametrize("size", STANDARD_SIZES)
def test_parameter_parts_add_up_to_the_shapes(size: str) -> None:
    config = ModelConfig.named(size)
    counts = accounting.parameter_counts(config)
    shapes = config.parameter_shapes()
    assert counts["total"] == sum(map(prod, shapes.values()))
    assert counts["norms"] == sum(prod(shape) for name, shape in shapes.items() if "norm" in name)
    assert counts["gates"] == config.num_blocks * 2 * config.num_heads * (config.embedding_dim + 1)
    assert counts["ffn"] == config.num_blocks * 3 * config.embedding_dim * config.ffn_dim
    assert counts["embedding"] == counts["head"] == config.vocab_size * config.embedding_dim


@pytest.mark.parametrize("size", STANDARD_SIZES)
def test_linear_flops_are_two_per_weight_and_token(size: str) -> None:
    config, length = ModelConfig.named(size), 100
    forward = accounting.forward_flops(config, length)
    linear = sum(forward[part] for part in ("mlstm_projections", "gates", "ffn", "head"))
    weights = sum(
        prod(shape)
        for name, shape in config.parameter_shapes().items()
        if len(shape) == 2 and "embeddings" not in name
    )
    elementwise = config.num_blocks * 2 * (config.v_dim + config.num_heads + config.ffn_dim)
    assert linear == length * (2 * weights + elementwise)
    assert forward["total"] == sum(n for part, n in forward.items() if part != "total")
    assert accounting.training_flops(config, length) == 3 * forward["total"]


def test_matrix_products_are_98_percent_of_the_cell() -> None:
    floor = accounting.cell_floor(8192, 64, 8, 256, 512)["forward"]["flops"]
    assert floor == 8192 * 8 * (4 * 256 * 512 + 2 * 64 * (256 + 512))
    assert floor < paper_cell(8) < 1.02 * floor


def test_a_shorter_last_chunk_is_counted_with_its_length() -> None:
    shape = (4, 96, 192)
    whole, rest = accounting.cell_flops(64, 64, *shape), accounting.cell_flops(36, 36, *shape)
    assert accounting.cell_flops(100, 64, *shape) == {key: whole[key] + rest[key] for key in whole}
    assert accounting.cell_flops(36, 64, *shape) == rest


def test_the_causal_factor_changes_only_the_intra_chunk_part() -> None:
    full, half = (accounting.cell_flops(8192, 256, 8, 256, 512, causal=c) for c in (1.0, 0.5))
    for part in ("gates", "inter_chunk_numerator", "inter_chunk_denominator", "combination"):
        assert half.pop(part) == full.pop(part)
    for part in ("gate_matrix", "intra_chunk_numerator", "intra_chunk_denominator"):
        assert half[part] == pytest.approx(full[part] / 2, rel=0.1 if part == "gate_matrix" else 0)


def test_a_decoded_token_costs_as_much_as_a_prefilled_one_within_1_percent() -> None:
    step = accounting.step_flops(SEVEN)
    assert step["cell"] == 32 * accounting.cell_step_flops(8, 256, 512)
    assert step["total"] == pytest.approx(
        accounting.forward_flops(SEVEN, 8192)["total"] / 8192, rel=0.01
    )


def test_transformer_of_the_same_width() -> None:
    short, long = (accounting.transformer_forward_flops(SEVEN, T) for T in (8192, 16384))
    assert long["attention"] == 4 * short["attention"]
    assert long["ffn"] == 2 * short["ffn"] == accounting.forward_flops(SEVEN, 16384)["ffn"]
    whole = accounting.transformer_forward_flops(SEVEN, 8192, causal=1.0)["attention"]
    assert whole == 2 * short["attention"] == 32 * 8192**2 * (4 * 4096 + 3 * 32)
    assert short["attention_projections"] == 8192 * 32 * 8 * 4096**2


def test_state_bytes() -> None:
    state = accounting.state_bytes(SEVEN)
    assert state["C"] == 134_217_728
    assert state["total"] == 134_217_728 + 4 * 32 * 8 * (256 + 1)
    narrow = accounting.state_bytes(SEVEN, 2)
    assert narrow["C"] * 2 == state["C"]
    assert (narrow["n"], narrow["m"]) == (state["n"], state["m"])  # always float32


def test_decoding_on_one_h200_moves_the_weights_and_all_states() -> None:
    assert 4.27e12 / accounting.decode_bytes(SEVEN) == pytest.approx(314, rel=0.01)
    without_table = 6_865_424_896 - 50304 * 4096
    moved = 2 * (without_table + 4096) + 2 * accounting.state_bytes(SEVEN)["total"]
    assert accounting.decode_bytes(SEVEN) == moved
    # Only the weights are shared in a batch.
    row = 2 * 4096 + 2 * accounting.state_bytes(SEVEN)["total"]
    assert accounting.decode_bytes(SEVEN, 64) == moved + 63 * row
    least = accounting.least_decode_seconds(SEVEN, 768e12, 4.27e12, 64)
    assert least == (moved + 63 * row) / 4.27e12


def test_the_least_decode_time_is_that_of_bytes_or_flops() -> None:
    moved, flops = accounting.decode_bytes(SEVEN, 64), accounting.step_flops(SEVEN)["total"]
    assert accounting.least_decode_seconds(SEVEN, 768e12, 4.27e12, 64) == moved / 4.27e12
    assert accounting.least_decode_seconds(SEVEN, 1e12, 4.27e12, 64) == 64 * flops / 1e12
    both = {"weight_itemsize": 4, "state_itemsize": 2}
    wide = accounting.decode_bytes(SEVEN, **both)
    assert accounting.least_decode_seconds(SEVEN, 768e12, 1e12, **both) == wide / 1e12


def test_prefill_counts_the_head_once_and_one_state_for_each_prompt() -> None:
    forward = accounting.forward_flops(SEVEN, 8192, 64, causal=0.5)
    head = 2 * 4096 * 50304
    flops = 8 * (forward["total"] - 8192 * head + head)
    assert accounting.least_prefill_seconds(SEVEN, 768e12, 4.27e12, 8192, 8) == flops / 768e12
    # A short prompt takes as long as reading the weights.
    weights = 6_865_424_896 - 50304 * 4096 + 4096
    moved = 2 * weights + accounting.state_bytes(SEVEN)["total"]
    assert accounting.least_prefill_seconds(SEVEN, 768e12, 4.27e12, 1) == moved / 4.27e12


def test_cell_floor_counts_every_tensor_once() -> None:
    rows = 65536 * 8
    floor = accounting.cell_floor(65536, 64, 8, 256, 512)
    assert floor["forward"]["bytes"] == rows * (2 * (256 + 256 + 512 + 512) + 8)
    assert floor["backward"]["bytes"] == rows * (2 * (2 * 1024 + 512) + 16)
    square = accounting.cell_floor(65536, 64, 8, 256, 256)
    assert square["backward"]["flops"] == 2.5 * square["forward"]["flops"]
    spilled = accounting.cell_floor(65536, 64, 8, 256, 512, state_itemsize=2)
    states = 1024 * 8 * 256 * 512 * 2
    assert spilled["forward"]["bytes"] - floor["forward"]["bytes"] == 2 * states
    assert spilled["backward"]["bytes"] - floor["backward"]["bytes"] == 4 * states


@pytest.mark.parametrize("size", SIZES)
def test_the_summary_has_its_sections_and_is_json(size: str) -> None:
    config = ModelConfig.named(size)
    summary = accounting.summary(config, context_length=1000)
    assert json.loads(json.dumps(summary)) == summary
    paper = [] if config.other_classes() else ["paper_count"]
    assert list(summary) == ["shape", "parameters", "state", "flops", *paper, "memory"]
    flops = summary["flops"]
    assert flops["forward_per_sequence"] == sum(flops["forward_by_part"].values())
    assert flops["training_per_token"] == pytest.approx(3 * flops["forward_per_token"])
    # A Transformer with as many blocks is of the model's size for the standard block only.
    assert ("transformer_forward_per_token" in flops) == bool(paper)
    assert ("kv_cache_equivalent_tokens" in summary["state"]) == bool(paper)
    # The paper prints a vocabulary of 50,257 for one of 50,304, and none for another.
    printed = "forward_with_printed_sizes" in summary.get("paper_count", {})
    assert printed == (bool(paper) and size != "tiny")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: accounting.cell_flops(0, 64, 1, 1, 1), "context_length"),
        (lambda: accounting.cell_flops(1, 0, 1, 1, 1), "chunk_size"),
        (lambda: accounting.cell_floor(0, 64, 1, 1, 1), "tokens"),
        (lambda: accounting.summary(SEVEN, context_length=-1), "context_length"),
        (lambda: accounting.transformer_forward_flops(SEVEN, 1, head_dim=0), "head_dim"),
        (lambda: accounting.paper_transformer_flops(SEVEN, 1, head_dim=0), "head_dim"),
        (lambda: accounting.paper_forward_flops(SEVEN, 0), "context_length"),
        (lambda: accounting.decode_bytes(SEVEN, 0), "batch_size"),
        (lambda: accounting.least_decode_seconds(SEVEN, 1, 1, 0), "batch_size"),
        (lambda: accounting.least_prefill_seconds(SEVEN, 1, 1, 0), "context_length"),
        (lambda: accounting.least_prefill_seconds(SEVEN, 1, 1, 1, 0), "batch_size"),
    ],
)
def test_counts_below_one_are_refused(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        call()


def test_accounting_and_tokenizer_do_not_import_torch() -> None:
    code = "import sys, xlstm7b.accounting, xlstm7b.tokenizer as t; t.load_tokenizer(None, 320)"
    check = "; assert not {'torch', 'tokenizers', 'numpy'} & set(sys.modules)"
    assert run([sys.executable, "-c", code + check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),  # not an A10
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H20", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, peak):
    assert accounting.peak_flops(name) == peak


def test_the_hardware_page_says_how_many_sequences_fit() -> None:
    """The numbers of docs/hardware.md, as `fitting_slots` computes them."""
    counts = accounting.parameter_counts(SEVEN)
    products = counts["mlstm_projections"] + counts["ffn"]
    rest = counts["total"] - products - counts["head"]
    weights = {
        "bfloat16": accounting.weight_bytes(SEVEN),
        "int8 or fp8": products + counts["head"] + 2 * rest,
        "int4": products * Scheme("int4", 64).bytes_per_weight + counts["head"] + 2 * rest,
    }
    slot = accounting.state_bytes(SEVEN)["total"] + 16 * SEVEN.vocab_size
    names = " | ".join(f"{name}, {size / 1e9:.1f} GB" for name, size in weights.items())
    rows = [f"| GPU memory | {names} |", "|---|---|---|---|"]
    for gigabytes in (8, 12, 16, 24, 48, 80):
        fitting = [int(0.7 * (1e9 * gigabytes - size) / slot) - 1 for size in weights.values()]
        cells = [str(min(MAX_SLOTS, n)) if n > 0 else "–" for n in fitting]
        rows.append(f"| {gigabytes} GB | {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert f"<!-- fits -->\n{table}\n<!-- /fits -->" in text_of(ROOT / "docs" / "hardware.md")
