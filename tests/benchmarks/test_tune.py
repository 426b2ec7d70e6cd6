"""The tuner's candidates, and that it finds wrong kernels."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch
from typer.testing import CliRunner

import tune
from replay_cells import ReplayCell
from xlstm7b.accounting import parameter_counts
from xlstm7b.config import ModelConfig
from xlstm7b.generate.kernels.integers import IntegersTile
from xlstm7b.generate.kernels.quantized import CodesTile
from xlstm7b.mlstm.triton import launch_params, sequence
from xlstm7b.quantize.config import Scheme

SEVEN = ModelConfig.named("7b")


@pytest.mark.parametrize("kernel", tune.CELL_KERNELS)
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
        others = [name for name in tune.CELL_KERNELS if name != kernel]
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
def test_wrong_kernels_are_found(positions: int, state_dtype: torch.dtype) -> None:
    """In Triton's interpreter, if there is no GPU."""
    config = ModelConfig(embedding_dim=32, num_heads=2, num_blocks=1, vocab_size=16)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make() -> ReplayCell:
        return ReplayCell(
            16,
            config,
            positions=positions,
            device=device,
            dtype=torch.float16,
            state_dtype=state_dtype,
        )

    cell, broken = make(), make()
    due = cell.cursor.is_due()
    assert due.any()
    assert not due.all()
    tile = launch_params.Tile(1, 16, 16, 1, 1)
    assert cell.error(tile) < 5e-3
    broken.run = lambda layer, tile: 0 * cell.run(layer, tile)  # type: ignore[method-assign]
    assert broken.error(tile) > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernels", "dz"], "there is no kernel 'dz'"),
        (["--batches", "1,0"], "--batches takes numbers of at least 1"),
        (["--show", "0"], "--show must be at least 1"),
        (["--state-dtype", "int8"], "unknown dtype 'int8'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    assert message in str(CliRunner().invoke(tune.app, arguments).exception)


@pytest.mark.gpu
def test_the_fastest_tiles_are_printed() -> None:
    arguments = ["--kernels", "states,step,replay", "--size", "160m", "--processes", "8"]
    arguments += ["--chunks", "64", "--batches", "1", "--show", "1", "--length", "1024"]
    result = CliRunner().invoke(tune.app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("Tile(") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_gpu_is_needed() -> None:
    assert "needs a CUDA GPU" in str(CliRunner().invoke(tune.app).exception)
