"""The initialisation of the released model's training."""

import math

import torch
from torch import Tensor, nn

from xlstm7b.config import ModelConfig


def init_parameters(model: nn.Module, config: ModelConfig) -> None:
    """Fills every parameter, drawing from PyTorch's global random generator.

    Inputs of sums get N(0, √(2/(5d))); what is added to the residual stream, N(0, 2/(NB·√d)). The
    gates start independent of the input, the input gate nearly closed (paper, "Negative Input Gate
    Bias Initialization"), the forget gates open over a range of time scales.
    """
    for name, parameter in model.named_parameters():
        init_parameter(name, parameter, config)


@torch.no_grad()
def init_parameter(name: str, parameter: Tensor, config: ModelConfig) -> None:
    """Fills one of them, by its name."""
    small = math.sqrt(2 / (5 * config.embedding_dim))
    residual = 2 / (config.num_blocks * math.sqrt(config.embedding_dim))
    match name.split(".")[-2:]:
        case ["igate_preact", "bias"]:
            parameter.fill_(config.igate_bias_init_range)
        case ["fgate_preact", "bias"]:
            parameter.copy_(torch.linspace(3.0, 6.0, len(parameter)))
        case ["igate_preact" | "fgate_preact" | "ogate_preact", "weight"]:
            parameter.zero_()
        case ["out_proj" | "proj_down", "weight"]:
            parameter.normal_(std=residual)
        case ["norm_mlstm" | "norm_ffn" | "multihead_norm" | "out_norm", "weight"]:
            parameter.fill_(1.0)
        case _:
            parameter.normal_(std=small)
