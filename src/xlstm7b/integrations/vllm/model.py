"""XLSTM from vLLM's parallel layers. Its states are vLLM's Mamba cache: float32 C, n and m.

Tensor parallelism divides the heads: each process has some heads of every layer, with their rows of
the projections and their states, and a part of the feed-forward and of the vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.compilation.decorators import support_torch_compile
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import (
    default_weight_loader,
    sharded_weight_loader,
)
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
)
from vllm.model_executor.models.utils import maybe_prefix
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from xlstm7b.config import ModelConfig
from xlstm7b.integrations.vllm.cell import (
    Batch,
    CellInputs,
    Prefill,
    group_prefills,
    run_cell,
    run_prefill,
    whole_batch,
)
from xlstm7b.integrations.vllm.config import CELL_OPERATOR
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model.layers import RMSNorm, linear_float32, soft_cap

_STATE_DTYPES = (torch.float32,) * 3
# Each slot of the cache starts at a multiple of it, so that kernels can load 16 bytes at a time.
_PAGE_ALIGNMENT = 256

# Parameters of the checkpoint that are rows of one parameter here, with the number of their part.
_STACKED = {
    "mlstm_layer.q.": ("mlstm_layer.projections.", 0),
    "mlstm_layer.k.": ("mlstm_layer.projections.", 1),
    "mlstm_layer.v.": ("mlstm_layer.projections.", 2),
    "mlstm_layer.ogate_preact.": ("mlstm_layer.projections.", 3),
    "mlstm_layer.igate_preact.": ("mlstm_layer.gates.", 0),
    "mlstm_layer.fgate_preact.": ("mlstm_layer.gates.", 1),
    "ffn.proj_up_gate.": ("ffn.up.", 0),
    "ffn.proj_up.": ("ffn.up.", 1),
}


class XLSTMForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    packed_modules_mapping = {  # noqa: RUF012
        "projections": ["q", "k", "v", "ogate_preact"],
        "up": ["proj_up_gate", "proj_up"],
    }

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config: ModelConfig = vllm_config.model_config.hf_config.to_model_config()
        self.backbone = Backbone(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "backbone"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.embedding_dim,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = Float32Logits(
            self.config.vocab_size, soft_cap=self.config.output_logit_soft_cap
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        y: Tensor = self.backbone(input_ids, positions, inputs_embeds)
        return y

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            part: tuple[int, ...] = ()
            for stored, (stacked, number) in _STACKED.items():
                if stored in name:
                    name, part = name.replace(stored, stacked), (number,)
                    break
            if name not in parameters:
                raise ValueError(
                    f"{name} is no parameter of xLSTM; `xlstm7b convert` writes a folder in the "
                    "released format"
                )
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, weight, *part)
            loaded.add(name)
        return loaded

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return _STATE_DTYPES

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        config = vllm_config.model_config.hf_config.to_model_config()
        return _state_shapes(config, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,) * 3


class Float32Logits(LogitsProcessor):
    """The product with the head is summed, returned and soft-capped in float32."""

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Any) -> Tensor:
        return linear_float32(hidden_states, lm_head.weight)


@support_torch_compile
class Backbone(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config.to_model_config()
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.embedding_dim)
        self.blocks = nn.ModuleList(
            Block(config, vllm_config, f"{prefix}.blocks.{number}")
            for number in range(config.num_blocks)
        )
        self.out_norm = RMSNorm(config.embedding_dim, config.norm_eps)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embeddings(input_ids)
        return x

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        if inputs_embeds is not None:
            x = inputs_embeds
        else:
            assert input_ids is not None
            x = self.embed_input_ids(input_ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out_norm(x)
        return y


class Block(nn.Module):
    def __init__(self, config: ModelConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.norm_mlstm = RMSNorm(config.embedding_dim, config.norm_eps)
        self.mlstm_layer = MLSTMLayer(config, vllm_config, f"{prefix}.mlstm_layer")
        self.norm_ffn = RMSNorm(config.embedding_dim, config.norm_eps)
        self.ffn = SwiGLU(config, vllm_config.quant_config, f"{prefix}.ffn")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlstm_layer(self.norm_mlstm(x))
        y: Tensor = x + self.ffn(self.norm_ffn(x))
        return y


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        options = {"bias": False, "quant_config": quant_config}
        self.up = MergedColumnParallelLinear(
            config.embedding_dim, [config.ffn_dim] * 2, prefix=f"{prefix}.up", **options
        )
        self.proj_down = RowParallelLinear(
            config.ffn_dim, config.embedding_dim, prefix=f"{prefix}.proj_down", **options
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x)[0].chunk(2, -1)
        y: Tensor = self.proj_down(F.silu(gate) * up)[0]
        return y


class MLSTMLayer(nn.Module, MambaBase):
    """Projections and gates around the cell, for this process's heads."""

    kv_cache: tuple[Tensor, Tensor, Tensor]  # C, n, m of all slots

    def __init__(self, config: ModelConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.config, self.prefix = config, prefix
        self.heads = config.num_heads // get_tensor_model_parallel_world_size()
        options = {"bias": False, "quant_config": vllm_config.quant_config}
        self.projections = MergedColumnParallelLinear(
            config.embedding_dim,
            [config.qk_dim, config.qk_dim, config.v_dim, config.v_dim],
            prefix=f"{prefix}.projections",
            **options,
        )
        self.gates = GateLinear(config.embedding_dim, self.heads)
        self.multihead_norm = HeadNormWeight(self.heads * config.d_hv)
        self.out_proj = RowParallelLinear(
            config.v_dim, config.embedding_dim, prefix=f"{prefix}.out_proj", **options
        )
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers are called {prefix}")
        layers[prefix] = self

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projections(x)[0]
        gates = soft_cap(self.gates(x), self.config.gate_soft_cap)
        h = x.new_empty(len(x), self.heads * self.config.d_hv)
        torch.ops.vllm.xlstm7b_cell(projected, gates, h, self.prefix)
        y: Tensor = self.out_proj(h)[0]
        return y

    def run_cell(self, projected: Tensor, gates: Tensor, out: Tensor) -> None:
        """The cell over the batch of the current step."""
        config, heads = self.config, self.heads
        widths = [heads * d for d in (config.d_qk, config.d_qk, config.d_hv, config.d_hv)]
        q, k, v, gate = projected.split(widths, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
        inputs = CellInputs(q, k, v, gate, *gates.unflatten(-1, (2, heads)).unbind(1))
        weight = self.multihead_norm.weight
        eps = {"norm_eps": config.cell_norm_eps, "eps": config.eps}
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # the memory profile
            whole = whole_batch(len(out), out.device)
            out.copy_(run_prefill(inputs, whole, None, weight, **eps)[0])
            return
        batch: Batch = metadata[self.prefix].batch
        C, n, m = self.kv_cache
        run_cell(inputs, batch, MLSTMState(C, n, m), weight, out, **eps)

    # What vLLM asks about the cache.

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return _state_shapes(self.config, self.config.num_heads // self.heads)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return _STATE_DTYPES

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        padded = -(-spec.page_size_bytes // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT
        return replace(spec, page_size_padded=padded)

    @property
    def mamba_type(self) -> Any:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        return MLSTMBackend


class GateLinear(nn.Module):
    """ĩ and f̃ of this process's heads, stacked, in float32."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * heads, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(2 * heads), requires_grad=False)
        for parameter in (self.weight, self.bias):
            parameter.weight_loader = self._load  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return linear_float32(x, self.weight, self.bias)

    def _load(self, parameter: Tensor, weight: Tensor, part: int) -> None:
        target = parameter.data.chunk(2)[part]
        target.copy_(weight.narrow(0, get_tensor_model_parallel_rank() * len(target), len(target)))


class HeadNormWeight(nn.Module):
    """The weight of the headwise norm; the cell applies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.weight.weight_loader = sharded_weight_loader(0)  # type: ignore[attr-defined]


def _state_shapes(config: ModelConfig, processes: int) -> tuple[tuple[int, ...], ...]:
    """C, n and m of one request and layer, for the heads of one process."""
    heads = config.num_heads // processes
    return (heads, config.d_qk, config.d_hv), (heads, config.d_qk), (heads,)


# The cell as one operator. torch.compile does not look into it, and CUDA graphs of prefills are cut
# there. It finds the layer and the batch in vLLM's forward context.


@eager_break_during_capture
def xlstm7b_cell(projected: Tensor, gates: Tensor, out: Tensor, layer_name: str) -> None:
    layer = get_forward_context().no_compile_layers[layer_name]
    layer.run_cell(projected, gates, out)


def _fake_cell(projected: Tensor, gates: Tensor, out: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op(
    op_name=CELL_OPERATOR.split("::")[1],
    op_func=xlstm7b_cell,
    mutates_args=["out"],
    fake_impl=_fake_cell,
)


# What vLLM prepares for each step.


@dataclass
class MLSTMMetadata(BaseMambaAttentionMetadata):
    prefills: list[Prefill] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        slots = self.state_indices_tensor_d
        decodes = slots is not None and len(slots) > 0
        return Batch(slots[:, 0] if decodes else None, self.prefills)


class MLSTMMetadataBuilder(BaseMambaAttentionMetadataBuilder[MLSTMMetadata]):
    metadata_cls = MLSTMMetadata
    needs_causal_conv1d_metadata = False
    supports_update_block_table = False  # the slots of the prefills would have to change too

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **_: Any
    ) -> MLSTMMetadata:
        metadata: MLSTMMetadata = self._compute_common_metadata(common_attn_metadata)
        if metadata.num_prefills:
            ends = common_attn_metadata.query_start_loc_cpu[-metadata.num_prefills - 1 :]
            assert metadata.has_initial_states_p is not None
            metadata.prefills = group_prefills(
                ends.tolist(), metadata.state_indices_tensor_p, ~metadata.has_initial_states_p
            )
        return metadata


class MLSTMBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "XLSTM7B_MLSTM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the layer runs the cell itself")

    @staticmethod
    def get_builder_cls() -> type[MLSTMMetadataBuilder]:
        return MLSTMMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
