"""Adapters on the command line: `merge` and `--adapter`."""

from pathlib import Path

import pytest
import torch
from adapters import random_adapter
from commands import Cli, refused, succeeded

from xlstm7b.model import XLSTM
from xlstm7b.model.adapter import load_adapter, merge_adapter


@pytest.fixture(scope="session")
def adapter(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "adapter", speller, std=0.3)


def test_merge_writes_a_checkpoint(cli: Cli, speller: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    assert succeeded(cli("merge", speller, adapter, tmp_path / "merged")).startswith("wrote ")
    want = XLSTM.from_pretrained(speller)
    merge_adapter(want, load_adapter(adapter, want.config))
    got = XLSTM.from_pretrained(tmp_path / "merged")
    assert all(map(torch.equal, got.parameters(), want.parameters()))
    succeeded(cli("verify", tmp_path / "merged"))
    again = refused(cli("merge", speller, adapter, tmp_path / "merged"))
    assert again.endswith("--overwrite replaces the checkpoint in it")
    other = refused(cli("merge", tmp_path / "merged", adapter, tmp_path / "x"))
    assert "was trained on other weights" in other
    none = refused(cli("merge", speller, speller, tmp_path / "x"))
    assert none.endswith("holds no adapter_config.json: not an adapter")
    succeeded(cli("quantize", speller, tmp_path / "int8", "--bits", 8))
    quantised = refused(cli("merge", tmp_path / "int8", adapter, tmp_path / "x"))
    assert "merge it into the float weights and quantise the result" in quantised
    assert not (tmp_path / "x").exists()
