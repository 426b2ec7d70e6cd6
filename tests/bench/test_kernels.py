"""The parts of the kernels' benchmarks that need no GPU: cases, limits, candidates."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch

from xlstm7b.accounting import cell_floor, parameter_counts, state_bytes
from xlstm7b.bench import kernels, tune
from xlstm7b.bench.cases import Result
from xlstm7b.bench.plans import CELL_KERNELS, Kernels
from xlstm7b.bench.replay_cells import ReplayCell
from xlstm7b.config import ModelConfig
from xlstm7b.generate.kernels.integers import IntegersTile
from xlstm7b.generate.kernels.quantized import CodesTile
from xlstm7b.mlstm.triton import launch_params, sequence
from xlstm7b.quantize.config import Scheme

SEVEN = ModelConfig.named("7b")
PEAKS = 768e12, 4.27e12


def test_cases() -> None:
    plan = Kernels.of(tokens=64, lengths=[16, 64], batches=[1, 8])
    rows = [(case.part, case.work, case.batch, case.length) for case in kernels.cases(plan, "7b")]
    assert rows == [
        ("sequence", "forward", 4, 16),
        ("sequence", "forward + backward", 4, 16),
        ("sequence", "forward", 1, 64),
        ("sequence", "forward + backward", 1, 64),
        ("step", "", 1, 1),
        ("step", "", 8, 1),
    ]


def test_limits() -> None:
    step = kernels.with_limit(Result("step", size="7b", batch=64, length=1), 137e-6, PEAKS)
    moved = 2 * 64 * state_bytes(SEVEN)["total"] / 32
    assert step.limit == pytest.approx(moved / 4.27e12)
    assert step.bytes_per_second == pytest.approx(moved / 137e-6)
    assert step.flops_per_second is None
    assert step.percent_of_limit == pytest.approx(100 * step.limit / 137e-6)

    case = Result("sequence", work="forward + backward", size="7b", batch=8, length=8192)
    both = kernels.with_limit(case, 8e-3, PEAKS)
    forward = kernels.with_limit(Result("sequence", "ours", "forward", "7b", 8, 8192), 2e-3, PEAKS)
    chunk = launch_params.plan(256, 512, torch.bfloat16).chunk
    floors = cell_floor(65536, chunk, 8, 256, 512, causal=0.5)
    for result, directions in ((forward, ["forward"]), (both, ["forward", "backward"])):
        assert result.limit == pytest.approx(
            sum(
                max(floors[d]["flops"] / PEAKS[0], floors[d]["bytes"] / PEAKS[1])
                for d in directions
            )
        )
        assert result.seconds is not None
        assert result.flops_per_second == pytest.approx(
            sum(floors[d]["flops"] for d in directions) / result.seconds
        )


# Tuning


@pytest.mark.parametrize("kernel", CELL_KERNELS)
@pytest.mark.parametrize("size", ["160m", "7b"])
def test_tiles_fit_their_heads_and_replace_one_kernels_own(kernel: str, size: str) -> None:
    config = ModelConfig.named(size)
    tiles = list(tune.cell_tiles(config, kernel, 64))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    inner, outer = config.d_qk, config.d_hv
    if kernel in ("dq", "dk"):
        inner, outer = outer, inner
    usual = sequence.plan(config.d_qk, config.d_hv, torch.bfloat16)
    for tile in tiles:
        assert tile.t <= 64
        assert tile == tile.within(inner, outer)
    with tune.CellJob(size, kernel, 64, tiles[0]).applied():
        changed = sequence.plan(config.d_qk, config.d_hv, torch.bfloat16)
        assert getattr(changed, kernel) == tiles[0]
        assert changed.chunk == 64
        others = [name for name in CELL_KERNELS if name != kernel]
        assert all(getattr(changed, name) == getattr(usual, name) for name in others)
    assert sequence.plan(config.d_qk, config.d_hv, torch.bfloat16) == usual


def test_products_hold_all_large_weights() -> None:
    *block, head = tune.products(SEVEN)
    counts = parameter_counts(SEVEN)
    assert head.rows * head.columns == counts["head"]
    per_block = sum(each.rows * each.columns for each in block)
    assert 32 * per_block == counts["mlstm_projections"] + counts["ffn"]
    for batch in (1, 8, 64):
        assert list(tune.product_tiles(batch))
        assert list(tune.codes_tiles(batch))
    for each in block:
        for batch in (1, 2, 4, 8):
            kinds = {type(tile) for tile in tune.tiles_of(each, batch, Scheme("int4", 64))}
            # For 2 to 8 rows both kernels are timed, to see which is faster.
            assert kinds == ({IntegersTile} if batch == 1 else {IntegersTile, CodesTile})
        for batch, kind in ((1, IntegersTile), (8, CodesTile)):
            assert {type(tile) for tile in tune.tiles_of(each, batch, Scheme("int8"))} == {kind}


@pytest.mark.parametrize("size", ["160m", "7b"])
def test_tiles_of_replay_fit_their_heads(size: str) -> None:
    config = ModelConfig.named(size)
    tiles = list(tune.replay_tiles(config, (1, 2)))
    assert len(set(tiles)) == len(tiles)
    assert {tile.registers for tile in tiles} > {None, 128}
    assert all(tile == tile.within(config.d_qk, config.d_hv) for tile in tiles)
    assert [tune.pass_positions(batch) for batch in (1, 8, 32, 64)] == [16, 8, 2, 1]


@pytest.mark.parametrize("positions", [0, 3])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_the_tuner_finds_wrong_kernels(positions: int, state_dtype: torch.dtype) -> None:
    """In Triton's interpreter, if there is no GPU."""
    config = ModelConfig(embedding_dim=32, num_heads=2, num_blocks=1, vocab_size=16)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make() -> ReplayCell:
        dtypes = {"dtype": torch.float16, "state_dtype": state_dtype}
        return ReplayCell(16, config, positions=positions, device=device, **dtypes)

    cell, broken = make(), make()
    due = cell.cursor.is_due()
    assert due.any()
    assert not due.all()
    tile = launch_params.Tile(1, 16, 16, 1, 1)
    assert cell.error(tile) < 5e-3
    broken.run = lambda layer, tile: 0 * cell.run(layer, tile)  # type: ignore[method-assign]
    assert broken.error(tile) > 0.1
