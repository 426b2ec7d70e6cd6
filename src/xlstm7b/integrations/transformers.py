"""`import xlstm7b.integrations.transformers`: lets `transformers` load xLSTM folders with int4.

Its `xLSTMPreTrainedModel._init_weights` reads the `weight` of every linear layer. A layer with
packed weights has none before its first forward pass, so loading fails. After this import, such
layers are left out: the checkpoint fills them.
"""

from typing import Any

from torch import nn
from transformers.models.xlstm import modeling_xlstm

_base: Any = modeling_xlstm.xLSTMPreTrainedModel
_init_weights = _base._init_weights


def _init_loaded_weights(self: Any, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear) or hasattr(module, "weight"):
        _init_weights(self, module)


_base._init_weights = _init_loaded_weights
