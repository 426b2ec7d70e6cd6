"""vLLM's V1 engine with this package's model: `vllm serve FOLDER` works once both are installed.

vLLM calls `register` in each of its processes (the entry point `vllm.general_plugins`). The parts:

    config.py    the folder's config.json, and vLLM's settings for it
    model.py     the model from vLLM's parallel layers; the states are vLLM's Mamba cache
    cell.py      the mLSTM cell for one batch of vLLM's; it does not import vLLM
    renderer.py  puts the model's first token before every prompt
"""

import ctypes
from typing import Any

ARCHITECTURES = ("xLSTMForCausalLM", "XLSTM")  # of the released model, and of models without a cap
MODEL_TYPES = ("xlstm", "xlstm7b")
TOKENIZER_MODE = "xlstm7b"


def register() -> None:
    """Makes the model known to vLLM. It may be called more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    from xlstm7b.integrations.vllm import config

    for model_type, config_class in zip(
        MODEL_TYPES, (config.XLSTMConfig, config.ChangedXLSTMConfig), strict=True
    ):
        AutoConfig.register(model_type, config_class, exist_ok=True)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}.model:XLSTMForCausalLM")
        MODELS_CONFIG_MAP[architecture] = config.Settings
    if TOKENIZER_MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
        RENDERER_REGISTRY.register(TOKENIZER_MODE, f"{__name__}.renderer", "XLSTMRenderer")
    # CUDA graphs of parts of the model are cut at these operators.
    if config.CELL_OPERATOR not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(config.CELL_OPERATOR)
    config.correct_end_of_text()
    _copy_states_without_triton()


def _copy_states_without_triton() -> None:
    """Lets prefix caching copy states on CPUs, where vLLM has only a Triton kernel for it."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = copy_bytes


def copy_bytes(sources: Any, targets: Any, sizes: Any) -> None:
    """Copies sizes[r] bytes from the address sources[r] to targets[r], for each r."""
    rows = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
    for source, target, size in rows:
        ctypes.memmove(target, source, size)
