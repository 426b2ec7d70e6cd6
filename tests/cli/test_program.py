"""The program as a whole: exit codes, streams, and what it loads."""

import json
import subprocess
import sys

import pytest
from checkpoints import run
from cli.commands import Cli, Outcome, environment, refused, succeeded

import xlstm7b
from xlstm7b.model import XLSTM


def test_module_exit_codes_and_streams() -> None:
    def call(*arguments: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "xlstm7b", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    sentence = "'8b' is neither a checkpoint folder nor a size; sizes: tiny, 160m, 400m, 1.4b, "
    assert refused(call("info", "8b")) == sentence + "2.7b, 7b"
    assert "6,865,424,896" in succeeded(call("info", "7b"))


def test_neither_the_package_nor_help_nor_info_loads_torch() -> None:
    script = """if True:
        import sys
        import xlstm7b
        heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors"}
        assert not heavy & set(sys.modules)
        assert xlstm7b.ModelConfig.named("7b").d_qk == 256
        from xlstm7b.cli import main
        for command in ([], ["generate"], ["chat"], ["bench"], ["bench", "kernels"], ["convert"]):
            sys.argv = ["xlstm7b", *command, "--help"]
            try:
                main()
            except SystemExit as ended:
                assert not ended.code
        print("JSON")
        sys.argv = ["xlstm7b", "info", "7b", "--json"]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    helps, _, info = run(script).partition("JSON\n")
    for part in (
        "--max-new-tokens",
        "Talk with a model",
        "(a GPU if there is one)",
        "--peak-tflops",
    ):
        assert part in helps
    assert json.loads(info)["parameters"]["total"] == 6_865_424_896


def test_public_names() -> None:
    assert xlstm7b.XLSTM is XLSTM
    assert all(getattr(xlstm7b, name).__name__ == name for name in xlstm7b.__all__)
    with pytest.raises(AttributeError, match=r"^module 'xlstm7b' has no attribute 'LSTM'$"):
        _ = xlstm7b.LSTM


def test_misspelt_options_exit_with_2_as_well(cli: Cli) -> None:
    for arguments in (["infos"], ["info"], ["info", "7b", "--yaml"], ["generate", "x", "y", "--k"]):
        outcome = cli(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert "Usage: " in outcome.err
