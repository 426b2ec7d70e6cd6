"""ModelConfig: named sizes, every published `config.json`, and errors that name the field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import xLSTMConfig

from xlstm7b.config import SIZES, ModelConfig

SEVEN = ModelConfig.named("7b")

# The fields of the released 7B, as first published.
ORIGINAL: dict[str, Any] = {
    "architectures": ["xLSTMForCausalLM"],
    "model_type": "xlstm",
    "embedding_dim": 4096,
    "num_blocks": 32,
    "num_heads": 8,
    "head_dim": 512,
    "vocab_size": 50304,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64,
    "mlstm_round_up_to_multiple_of": 64,
    "norm_eps": 1e-06,
    "norm_reduction_force_float32": True,
    "gate_soft_cap": 15.0,
    "output_logit_soft_cap": 30.0,
    "igate_bias_init_range": [-10.0, -10.0],
    "add_forward_backend_padding": False,
    "add_post_blocks_norm": True,
    "add_post_norm": False,
    "add_qk_norm": False,
    "add_out_norm": True,
    "use_bias": False,
    "tie_word_embeddings": False,
    "weight_mode": "fused",
    "forward_backend_name": "chunkwise--triton_limit_chunk",
    "step_backend_name": "triton",
    "cell_norm_eps": 1e-06,
    "force_bos_token_insert": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}
# The same model with the field names of today's `transformers`.
CURRENT: dict[str, Any] = {
    "architectures": ["xLSTMForCausalLM"],
    "model_type": "xlstm",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_heads": 8,
    "vocab_size": 50304,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
    "mode": "inference",
    "chunk_size": 64,
    "eps": 1e-06,
    "norm_eps": 1e-06,
    "gate_soft_cap": 15.0,
    "output_logit_soft_cap": 30.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "max_inference_chunksize": 16384,
    "dtype": "float32",
}
SMALL: dict[str, Any] = {"embedding_dim": 64, "num_blocks": 2, "num_heads": 2, "vocab_size": 320}


@pytest.mark.parametrize(
    ("size", "d", "blocks", "heads", "d_qk", "d_hv", "ffn", "vocabulary"),
    [
        ("tiny", 256, 4, 4, 32, 64, 704, 320),
        ("160m", 768, 12, 4, 96, 192, 2048, 50304),
        ("400m", 1024, 24, 4, 128, 256, 2752, 50304),
        ("1.4b", 2048, 24, 4, 256, 512, 5504, 50304),
        ("2.7b", 2560, 32, 5, 256, 512, 6848, 50304),
        ("7b", 4096, 32, 8, 256, 512, 10944, 50304),
    ],
)
def test_named_sizes(
    size: str, d: int, blocks: int, heads: int, d_qk: int, d_hv: int, ffn: int, vocabulary: int
) -> None:
    config = ModelConfig.named(size.upper())
    assert (config.embedding_dim, config.num_blocks, config.num_heads) == (d, blocks, heads)
    assert (config.d_qk, config.d_hv, config.ffn_dim) == (d_qk, d_hv, ffn)
    assert (config.qk_dim, config.v_dim, config.vocab_size) == (d // 2, d, vocabulary)


def test_the_error_for_an_unknown_size_lists_the_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"unknown model size '8b'; choose from tiny, 160m, .*, 7b"
    ):
        ModelConfig.named("8b")


def test_parameter_shapes_are_the_released_keys() -> None:
    shapes = SEVEN.parameter_shapes()
    assert len(shapes) == 483
    assert shapes["backbone.embeddings.weight"] == shapes["lm_head.weight"] == (50304, 4096)
    assert shapes["backbone.blocks.31.mlstm_layer.k.weight"] == (2048, 4096)
    assert shapes["backbone.blocks.0.mlstm_layer.fgate_preact.bias"] == (8,)
    assert shapes["backbone.blocks.5.ffn.proj_down.weight"] == (4096, 10944)


@pytest.mark.parametrize("published", [ORIGINAL, CURRENT])
def test_published_configs_are_the_7b(published: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(published) == SEVEN


def test_unknown_fields_of_a_file_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.json"
    for known in (
        *({**ORIGINAL, "add_embedding_dropout": False}, {**CURRENT, "_name_or_path": "x"}),
        *(xLSTMConfig().to_dict(), SEVEN.to_dict(), replace(SEVEN, gate_soft_cap=None).to_dict()),
    ):
        path.write_text(json.dumps(known))
        ModelConfig.from_file(path)
        assert caplog.messages == []
    path.write_text(json.dumps({**CURRENT, "rope_theta": 1e4, "conv_kernel": 4}))
    assert ModelConfig.from_file(path) == ModelConfig.from_file(path) == SEVEN
    (message,) = caplog.messages
    assert message.startswith(f"{path}: unknown fields are ignored: conv_kernel, rope_theta. If")


def test_fields_in_the_file_win_over_defaults() -> None:
    changed = {
        "qk_dim_factor": 1.0,
        "norm_eps": 1e-5,
        "eps": 1e-4,
        "gate_soft_cap": 20,
        "igate_bias_init_range": -3.0,
        "force_bos_token_insert": False,
    }
    config = ModelConfig.from_dict({**SMALL, **changed})
    assert {name: getattr(config, name) for name in changed} == changed
    assert config.d_qk == config.d_hv == 32
    assert config.cell_norm_eps == 1e-5  # norm_eps is its default


def test_a_config_without_a_first_token_or_padding() -> None:
    """Qwen has no bos_token_id, GPT-2 and Llama 3 have no pad_token_id."""
    qwen = ModelConfig.from_dict({**SMALL, "bos_token_id": None, "eos_token_id": 7})
    assert (qwen.force_bos_token_insert, qwen.bos_token_id, qwen.eos_token_id) == (False, 7, 7)
    assert qwen.to_dict()["bos_token_id"] is None
    assert ModelConfig.from_dict(qwen.to_dict()) == qwen
    gpt2 = {**SMALL, "bos_token_id": 7, "eos_token_id": 7, "pad_token_id": None}
    assert ModelConfig.from_dict(gpt2).pad_token_id == 7
    with pytest.raises(ValueError, match=r"^force_bos_token_insert is true, but bos_token_id is n"):
        ModelConfig.from_dict({**SMALL, "bos_token_id": None, "force_bos_token_insert": True})


def test_eos_2_becomes_0_for_the_gpt_neox_vocabulary_only() -> None:
    assert ModelConfig.from_dict(ORIGINAL).eos_token_id == 0
    assert ModelConfig.from_dict({**ORIGINAL, "eos_token_id": 3}).eos_token_id == 3
    assert ModelConfig.from_dict({**ORIGINAL, "eos_token_id": [5]}).eos_token_id == 5
    assert ModelConfig.from_dict({**SMALL, "eos_token_id": 2}).eos_token_id == 2


@pytest.mark.parametrize("size", SIZES)
def test_a_config_is_read_as_it_was_written(size: str, tmp_path: Path) -> None:
    config = ModelConfig.named(size)
    assert ModelConfig.from_dict(config.to_dict()) == config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict("bfloat16")), encoding="utf-8")
    assert ModelConfig.from_file(file) == config


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(**SMALL, qk_dim_factor=1.0, norm_eps=1e-5, gate_soft_cap=12.0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict("bfloat16")))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is transformers.xLSTMConfig
    assert (theirs.hidden_size, theirs.num_hidden_layers, theirs.num_heads) == (64, 2, 2)
    assert (theirs.qk_dim, theirs.v_dim, theirs.qk_head_dim, theirs.v_head_dim) == (64, 64, 32, 32)
    for name in (
        "vocab_size",
        "norm_eps",
        "eps",
        "gate_soft_cap",
        "output_logit_soft_cap",
        "ffn_proj_factor",
        "ffn_round_up_to_multiple_of",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert getattr(theirs, name) == getattr(config, name), name
    kernels = (theirs.chunkwise_kernel, theirs.sequence_kernel, theirs.step_kernel)
    assert all("native" in kernel for kernel in kernels)
    assert (theirs.use_bias, theirs.tie_word_embeddings, theirs.mode) == (False, False, "inference")
    assert str(theirs.dtype).removeprefix("torch.") == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Models that this package does not support.
        ({"add_qk_norm": True}, "add_qk_norm = True is not supported, only add_qk_norm = False"),
        ({"add_post_norm": True}, "add_post_norm = True is not supported"),
        ({"add_post_blocks_norm": False}, "add_post_blocks_norm = False is not supported"),
        ({"add_out_norm": False}, "add_out_norm = False is not supported"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"quantization_config": {}}, "quantization_config is not supported"),
        ({"model_type": "llama"}, "model_type is 'llama', not 'xlstm'"),
        # Fields that contradict each other.
        ({"hidden_size": 128}, "embedding_dim and hidden_size disagree: 64 and 128"),
        ({"num_hidden_layers": 3}, "num_blocks and num_hidden_layers disagree: 2 and 3"),
        ({"embedding_dim": None}, "neither embedding_dim nor hidden_size is given"),
        ({"num_blocks": None}, "neither num_blocks nor num_hidden_layers is given"),
        ({"head_dim": 64}, "head_dim is 64, but the other fields give 32"),
        ({"num_heads": 3}, r"num_heads \(3\) does not divide the qk width \(32\)"),
        ({"igate_bias_init_range": [-10, -5]}, "igate_bias_init_range must be of type float"),
        # Wrong types.
        ({"vocab_size": "320"}, "vocab_size must be of type int, not '320'"),
        ({"num_heads": 2.0}, "num_heads must be of type int, not 2.0"),
        ({"num_heads": True}, "num_heads must be of type int, not True"),
        ({"norm_eps": None}, "norm_eps must be of type float, not None"),
        ({"force_bos_token_insert": 1}, "force_bos_token_insert must be of type bool, not 1"),
        # Values out of range.
        ({"num_heads": 0}, "num_heads must be between 1 and 16777216, not 0"),
        ({"embedding_dim": 1 << 40}, "embedding_dim must be between 1 and"),
        ({"vocab_size": -1}, "vocab_size must be between 1 and"),
        ({"ffn_proj_factor": 0.0}, "ffn_proj_factor must be a positive number, not 0"),
        ({"gate_soft_cap": float("nan")}, "gate_soft_cap must be a positive number, not nan"),
        ({"eps": -1e-6}, "eps must be between 0 and 1, not -1e-06"),
        ({"igate_bias_init_range": float("inf")}, "igate_bias_init_range must be finite"),
        ({"eos_token_id": 320}, "eos_token_id must be an id in the vocabulary, 0 to 319, not 320"),
    ],
)
def test_an_error_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**SMALL, **change})


def test_the_number_of_heads_must_be_given() -> None:
    with pytest.raises(ValueError, match="num_heads is not given"):
        ModelConfig.from_dict({"embedding_dim": 64, "num_blocks": 2})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not a JSON file"),
        (b"\xff", "is not a JSON file"),
        (b"[]", "holds a JSON list, not an object"),
        (b'{"num_blocks": 1, "embedding_dim": [1]}', "config.json: "),
        (b'{"num_blocks": 1, "embedding_dim": 64, "num_heads": 7}', r"num_heads \(7\) does not"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_file(file)
    assert str(file) in str(error.value)


def test_a_rounding_that_changes_a_width_is_kept() -> None:
    fields = {"embedding_dim": 96, "num_blocks": 1, "num_heads": 2}
    plain = ModelConfig.from_dict(fields)
    rounded = ModelConfig.from_dict({**fields, "mlstm_round_up_to_multiple_of": 64})
    assert (plain.qk_dim, plain.v_dim) == (48, 96)
    assert (rounded.qk_dim, rounded.v_dim) == (64, 128)
    assert ModelConfig.from_dict(rounded.to_dict()) == rounded
