"""The model: layers, block, XLSTM, its state and initialisation."""

from xlstm7b.model.lm import XLSTM
from xlstm7b.model.state import ModelState

__all__ = ["XLSTM", "ModelState"]
