"""The language model XLSTM, its state, and its layers as modules over vectors."""

from xlstm7b.model.layers import MLSTMBlock, MLSTMLayer, MLSTMStack
from xlstm7b.model.lm import XLSTM
from xlstm7b.model.model_state import ModelState
from xlstm7b.model.previous import PreviousBlock

__all__ = ["XLSTM", "MLSTMBlock", "MLSTMLayer", "MLSTMStack", "ModelState", "PreviousBlock"]
