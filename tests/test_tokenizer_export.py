"""What an export writes beside the weights: `transformers` reads the same ids and text from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import CHATML
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import error
from tokenizer_kinds import gpt2

from xlstm7b.chat_format import PlainFormat, load_chat_template, marked_source, template_source
from xlstm7b.checkpoint import transformers_limits
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import (
    ByteTokenizer,
    open_tokenizer,
    tokenizer_fingerprint,
    with_first_token,
    write_tokenizer,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CONFIG = ModelConfig(64, 1, 2, vocab_size=320)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is {red}? "},
    {"role": "assistant", "content": " A colour.\n"},
    {"role": "user", "content": "Is 日本 '\"?"},
]


def exported(folder: Path, tokenizer: Path | str, config: ModelConfig) -> Path:
    """A folder with the config and tokenizer files of an export."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    source = template_source(folder if tokenizer == "bytes" else Path(tokenizer))
    write_tokenizer(folder, open_tokenizer(tokenizer), config, marked_source(source))
    return folder


@pytest.fixture(scope="module")
def byte_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("exports") / "bytes", "bytes", CONFIG)


@pytest.fixture(scope="module", params=["AutoTokenizer", "PreTrainedTokenizerFast"])
def theirs(byte_export: Path, request: pytest.FixtureRequest):
    return getattr(transformers, request.param).from_pretrained(byte_export)


@settings(deadline=None)
@given(text=st.text() | st.binary().map(lambda content: content.decode(errors="replace")))
def test_transformers_has_the_ids_of_bytes(theirs, text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert theirs(text).input_ids == with_first_token(CONFIG, ids)
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text


@settings(deadline=None)
@given(content=st.binary(), others=st.lists(st.sampled_from([0, 1, 258, 319]), max_size=3))
def test_transformers_has_the_text_of_bytes(theirs, content: bytes, others: list[int]) -> None:
    ids = [*others, *(byte + 2 for byte in content), *others]
    assert theirs.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_the_special_tokens_of_bytes(theirs) -> None:
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 0, 1)
    rows = theirs(["ab", "a"], padding=True, padding_side="left").input_ids
    assert rows == [[0, 99, 100], [1, 0, 99]]


def test_our_own_commands_read_the_file_as_bytes(byte_export: Path) -> None:
    assert isinstance(open_tokenizer(byte_export), ByteTokenizer)
    assert tokenizer_fingerprint(byte_export) == tokenizer_fingerprint("bytes") == "bytes"


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_plain_chat_format_is_a_template(theirs, byte_export, add_generation_prompt) -> None:
    text = PlainFormat().render(TALK, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt}
    assert load_chat_template(byte_export).render(TALK, **options) == text
    options["return_dict"] = False
    assert theirs.apply_chat_template(TALK, **options) == [0, *ByteTokenizer().encode(text)]


def test_a_model_without_a_first_token_exports_none(tmp_path: Path) -> None:
    config = replace(CONFIG, force_bos_token_insert=False)
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tmp_path / "e", "bytes", config))
    assert theirs("ab").input_ids == [99, 100]
    assert theirs.bos_token is None
    user = [{"role": "user", "content": "a"}]
    ids = theirs.apply_chat_template(user, return_dict=False)
    assert ids == ByteTokenizer().encode("User: a\n")


def test_a_tokenizer_file_is_exported_with_first_token_and_template(tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "gpt2")
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenizer = open_tokenizer(folder)
    last = tokenizer.vocab_size - 1
    config = ModelConfig(64, 1, 2, vocab_size=320, bos_token_id=last, eos_token_id=last)
    target = exported(tmp_path / "export", folder, config)
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    for text in ("The quick brown fox,  Grüße!", "", " 日本", 'a "word" !'):
        assert theirs(text).input_ids == [last, *tokenizer.encode(text)]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    # Id 1, the default padding, is a quotation mark here: padding is then the end of text.
    assert tokenizer.decode([config.pad_token_id]) == '"'
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (last, last, last)
    assert theirs.chat_template == template_source(target) == CHATML
    assert load_chat_template(target) is not None
    assert tokenizer_fingerprint(target) == tokenizer_fingerprint(folder)
    before, after = (json.loads((f / "tokenizer.json").read_text()) for f in (folder, target))
    assert {name for name in before if before[name] != after[name]} == {"post_processor"}


def test_a_first_token_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    config = replace(CONFIG, bos_token_id=300)
    with pytest.raises(ValueError, match=r"^bos_token_id is 300, but the tokenizer has no such"):
        write_tokenizer(tmp_path, ByteTokenizer(), config, "")


WIDTHS = {
    "as it should be": ({}, None),
    "several heads": ({"num_heads": 8}, None),
    "feed-forward widths": ({"ffn_proj_factor": 2.5, "ffn_round_up_to_multiple_of": 7}, None),
    "wide values": ({"v_dim_factor": 1.5}, None),
    "both epsilons": ({"norm_eps": 1e-3, "cell_norm_eps": 1e-3}, None),
    "narrow queries": ({"qk_dim_factor": 0.25}, "qk_dim_factor gives its queries and keys a width"),
    "odd values": (
        {"v_dim_factor": 1.25},
        "v_dim_factor gives its values a width of 160, which is",
    ),
    "rounded widths": (
        {"qk_dim_factor": 0.7, "mlstm_round_up_to_multiple_of": 64},
        "qk_dim_factor gives its queries and keys a width of 89, which is not the 128 used here",
    ),
    "another epsilon": ({"cell_norm_eps": 1e-3}, "where this model has cell_norm_eps (0.001)"),
}


@pytest.mark.parametrize("case", WIDTHS)
@torch.no_grad()
def test_models_that_transformers_cannot_run_are_named(case: str, tmp_path: Path) -> None:
    """With a limit, `transformers` fails or computes something else; without one it agrees."""
    changes, limit = WIDTHS[case]
    config = ModelConfig(**{"embedding_dim": 128, "num_blocks": 2, "num_heads": 2} | changes)
    config = replace(config, vocab_size=50)
    found = transformers_limits(config)
    assert len(found) == (limit is not None)
    assert all(limit in sentence for sentence in found)
    model = XLSTM(config)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 50, (1, 5))
    try:
        other = transformers.xLSTMForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        agrees = error(model(tokens)[0], other(tokens).logits) < 1e-4
    except (RuntimeError, ValueError):
        agrees = False
    assert agrees == (limit is None)
