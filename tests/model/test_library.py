"""docs/library.md: every block of code runs. examples/forecasting.py: it learns."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/library.md").read_text(encoding="utf-8")
BLOCKS = {
    heading.splitlines()[0].strip("# "): code
    for heading in re.split(r"^(?=#+ )", TEXT, flags=re.MULTILINE)
    for code in re.findall(r"```python\n(.*?)```", heading, flags=re.DOTALL)
}


def test_no_block_is_left_out():
    assert len(BLOCKS) == TEXT.count("```python") == 9


@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize("heading", BLOCKS)
def test_code_of_the_page_runs(heading, tmp_path, monkeypatch):
    code = BLOCKS[heading]
    for library in re.findall(r"^(?:from|import) (\w+)", code, flags=re.MULTILINE):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    if "accelerate" in sys.modules:  # it keeps the settings of the process's first Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    exec(compile(code, f"docs/library.md, {heading}", "exec"), {"__name__": "page"})


def test_forecasting_learns(capsys):
    spec = importlib.util.spec_from_file_location("forecasting", ROOT / "examples/forecasting.py")
    forecasting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forecasting)
    errors = forecasting.main(["--steps", "30", "--dim", "32"])
    for found in errors.values():
        assert found["MLSTMStack"] < min(found["a day before"], found["a week before"])
        assert found["MLSTMStack"] < 1.3 * found["nn.LSTM"]
    assert "waves: MLSTMStack, " in capsys.readouterr().out
