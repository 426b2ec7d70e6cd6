"""xLSTM 7B: a recurrent large language model with constant memory and constant cost per token.

    from xlstm7b import Generator
    print(Generator.from_pretrained("NX-AI/xLSTM-7b").generate("The sea was")[0].text)

Names are imported when they are first used, so `import xlstm7b` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlstm7b.config import ModelConfig
    from xlstm7b.generate import Engine, Generator, Request, SamplingParams, SavedState
    from xlstm7b.mlstm import MLSTMState, mlstm_sequence, mlstm_step
    from xlstm7b.model import XLSTM, MLSTMBlock, MLSTMLayer, MLSTMStack, ModelState
    from xlstm7b.tokenizer import load_tokenizer
    from xlstm7b.train import Trainer

__version__ = "0.1.0"
__all__ = [
    "XLSTM",
    "Engine",
    "Generator",
    "MLSTMBlock",
    "MLSTMLayer",
    "MLSTMStack",
    "MLSTMState",
    "ModelConfig",
    "ModelState",
    "Request",
    "SamplingParams",
    "SavedState",
    "Trainer",
    "load_tokenizer",
    "mlstm_sequence",
    "mlstm_step",
]

_HOMES = {
    "XLSTM": "model",
    "ModelState": "model",
    "MLSTMLayer": "model",
    "MLSTMBlock": "model",
    "MLSTMStack": "model",
    "ModelConfig": "config",
    "MLSTMState": "mlstm",
    "mlstm_sequence": "mlstm",
    "mlstm_step": "mlstm",
    "load_tokenizer": "tokenizer",
    "Engine": "generate",
    "Generator": "generate",
    "Request": "generate",
    "SamplingParams": "generate",
    "SavedState": "generate",
    "Trainer": "train",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xlstm7b' has no attribute {name!r}")
    return getattr(import_module(f"xlstm7b.{_HOMES[name]}"), name)
