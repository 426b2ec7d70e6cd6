"""The folder's config.json as `transformers` and vLLM see it, and vLLM's settings for the model."""

from dataclasses import fields
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import ModelConfig as VllmModelConfig
from vllm.model_executor.models.config import MambaModelConfig

from xlstm7b.config import ModelConfig
from xlstm7b.integrations.vllm import TOKENIZER_MODE

CELL_OPERATOR = "vllm::xlstm7b_cell"
# The model has no longest text, but vLLM allocates memory for one. --max-model-len changes it.
_LONGEST_TEXT = 131_072


class XLSTMConfig(PreTrainedConfig):
    """The config of every folder that `ModelConfig` can read, checked and corrected by it.

    The class of `transformers` refuses the released config.json, because of the kernels that it
    names.
    """

    model_type = "xlstm"

    def __post_init__(self, **values: Any) -> None:
        if "num_heads" in values:  # `transformers` also makes one without values
            model = ModelConfig.from_dict({"model_type": self.model_type, **values})
            values |= {field.name: getattr(model, field.name) for field in fields(model)}
            values |= {
                "hidden_size": model.embedding_dim,
                "num_hidden_layers": model.num_blocks,
                "num_attention_heads": model.num_heads,
                "head_dim": model.d_hv,
                "max_position_embeddings": _LONGEST_TEXT,
                "tie_word_embeddings": False,
            }
        super().__post_init__(**values)

    def to_model_config(self) -> ModelConfig:
        return ModelConfig(
            **{field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        )


class ChangedXLSTMConfig(XLSTMConfig):
    """The config of a model that computes something else than the released one."""

    model_type = "xlstm7b"


class Settings(MambaModelConfig):
    """What vLLM calls before it makes the model: checks, and defaults that differ from vLLM's."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        classes = model_config.hf_config.to_model_config().other_classes()
        if classes:
            named = ", ".join(f"{name} = {value!r}" for name, value in classes.items())
            raise ValueError(
                f"vLLM cannot run this model, because it has other layers than the released one "
                f"({named}): use `xlstm7b serve`"
            )
        if getattr(model_config.hf_config, "quantization_config", None) is not None:
            raise ValueError(
                "vLLM cannot run a folder with quantised weights: give the folder that it was made "
                "from, or use `xlstm7b serve`"
            )
        if model_config.tokenizer_mode == "auto":
            model_config.tokenizer_mode = TOKENIZER_MODE

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative decoding is not supported for xLSTM in vLLM: leave out "
                "--speculative-config"
            )
        super().verify_and_update_config(vllm_config)


def correct_end_of_text() -> None:
    """Makes vLLM take the end of a text from `XLSTMConfig`, not from generation_config.json.

    The released file says 2, which is the token "!". Outputs would end there.
    """
    original = VllmModelConfig.try_get_generation_config
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def corrected(self: Any) -> dict[str, Any]:
        values: dict[str, Any] = original(self)
        if isinstance(self.hf_config, XLSTMConfig):
            values["eos_token_id"] = self.hf_config.eos_token_id
        return values

    VllmModelConfig.try_get_generation_config = corrected
