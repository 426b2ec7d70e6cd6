"""The language model XLSTM and its state."""

from xlstm7b.model.lm import XLSTM
from xlstm7b.model.model_state import ModelState

__all__ = ["XLSTM", "ModelState"]
