"""xLSTM 7B: a recurrent large language model with constant memory and constant cost per token.

    from xlstm7b import Generator
    print(Generator.from_pretrained("NX-AI/xLSTM-7b").generate("The sea was")[0].text)

Names are looked up when used: `import xlstm7b` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate import Generator, Request, SamplingSettings, TextState
    from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
    from xlstm7b.model import XLSTM, ModelState
    from xlstm7b.tokenizer import load_tokenizer

__version__ = "0.1.0"
__all__ = [
    "XLSTM",
    "Generator",
    "MLSTMState",
    "ModelConfig",
    "ModelState",
    "Request",
    "SamplingSettings",
    "TextState",
    "load_tokenizer",
    "mlstm_sequence",
    "mlstm_step",
]

_HOMES = {
    "XLSTM": "model",
    "ModelState": "model",
    "ModelConfig": "config",
    "MLSTMState": "mlstm",
    "mlstm_sequence": "mlstm",
    "mlstm_step": "mlstm",
    "load_tokenizer": "tokenizer",
    "Generator": "generate",
    "Request": "generate",
    "SamplingSettings": "generate",
    "TextState": "generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xlstm7b' has no attribute {name!r}")
    return getattr(import_module(f"xlstm7b.{_HOMES[name]}"), name)
