"""A place in a text: copied, cut, saved and loaded without a bit changed, or refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, names_in, save_small

from xlstm7b import files
from xlstm7b.config import ModelConfig
from xlstm7b.generate import Generator, TextState
from xlstm7b.model import XLSTM, ModelState
from xlstm7b.tokenizer import ByteTokenizer

SMALL = ModelConfig(embedding_dim=32, num_blocks=3, num_heads=2, vocab_size=320)
DTYPES = [torch.float32, torch.bfloat16]


def random_state(rows: int, dtype=torch.float32, config: ModelConfig = SMALL) -> TextState:
    memory = ModelState.zeros(config, rows, dtype=dtype)
    for block in memory.blocks:
        for part in block:
            part.copy_(torch.randn(part.shape) * 10 ** torch.empty(part.shape).uniform_(-30, 30))
    memory.tokens_seen.copy_(torch.randint(0, 2**40, (rows,)))
    return TextState(config, memory, torch.randn(rows, config.vocab_size))


def tensors(state: TextState) -> list[torch.Tensor]:
    return [*state.memory._tensors(), state.logits]


def assert_same(got: TextState, want: TextState) -> None:
    assert got.config == want.config
    for part, want_part in zip(tensors(got), tensors(want), strict=True):
        assert part.dtype == want_part.dtype
        assert part.device == want_part.device
        assert torch.equal(part, want_part)


def ones(state: TextState) -> None:
    for tensor in tensors(state):
        tensor.fill_(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_size(dtype):
    """3 blocks of 2 heads of 8 × 16 + 8 + 1 numbers, 320 logits, one counter: for any text."""
    state = random_state(4, dtype)
    assert len(state) == 4
    assert state.nbytes == 4 * (3 * 2 * (8 * 16 + 8 + 1) * dtype.itemsize + 320 * 4 + 8)
    assert state.tokens_seen == state.memory.tokens_seen.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clone_fork_select_join(dtype):
    state = random_state(3, dtype)
    before = state.clone()
    assert_same(before, state)

    forks = state.fork(2)
    assert len(forks) == 6
    assert forks.tokens_seen == [seen for seen in state.tokens_seen for _ in range(2)]
    for row in range(3):
        assert_same(forks.select([2 * row]), state.select([row]))
        assert_same(forks.select([2 * row + 1]), state.select([row]))
    chosen = state.select([2, 0, 2])
    assert_same(chosen, TextState.join([state.select([row]) for row in (2, 0, 2)]))
    assert_same(state.select(torch.tensor([1])), state.select([1]))
    assert_same(TextState.join([state.select([0, 1]), state.select([2])]), state)
    assert_same(TextState.join([state]), state)
    for other in (state.clone(), forks, chosen, TextState.join([state, state]), state.fork(1)):
        ones(other)
    assert_same(state, before)
    with pytest.raises(ValueError, match=r"^rows must lie between 0 and 2, not \[0, 3\]$"):
        state.select([0, 3])
    with pytest.raises(ValueError, match=r"^a state forks into at least 1 copy, not 0$"):
        state.fork(0)
    other = replace(state, config=replace(SMALL, num_blocks=2))
    with pytest.raises(ValueError, match=r"^states of different models cannot be joined$"):
        TextState.join([state, other])


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_loaded_bit_by_bit(tmp_path, dtype):
    state = random_state(3, dtype)
    state.logits[1, 5] = -torch.inf
    state.save(tmp_path / "state")
    assert names_in(tmp_path) == {"state"}
    loaded = TextState.load(tmp_path / "state", SMALL)
    assert_same(loaded, state)
    other = random_state(1, dtype)
    other.save(str(tmp_path / "state"))  # another takes its place; what was loaded stays
    assert_same(loaded, state)
    assert_same(TextState.load(str(tmp_path / "state"), SMALL, device="cpu"), other)
    assert names_in(tmp_path) == {"state"}
    # States that are views, as a decoder's, are saved by what they hold.
    state.select([2]).save(tmp_path / "row")
    rows = TextState(SMALL, state.memory.rows(2, 3), state.logits[2:3])
    rows.save(tmp_path / "view")
    assert (tmp_path / "row").read_bytes() == (tmp_path / "view").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_generation_goes_on_from_a_file(tmp_path, dtype):
    model = XLSTM(SMALL)
    with torch.no_grad():
        model.lm_head.weight *= 20
    generator = Generator(model, ByteTokenizer(), state_dtype=dtype)
    state = generator.read(["some text", "and another"])
    assert state.memory.blocks[0].C.dtype == dtype
    state.save(tmp_path / "state")
    settings = {"max_new_tokens": 12, "seed": 4, "logprobs": 0, "keep_state": True}
    want = generator.generate(["", " more"], state=state, **settings)
    loaded = TextState.load(tmp_path / "state", model.config)
    got = generator.generate(["", " more"], state=loaded, **settings)
    for completion, same in zip(got, want, strict=True):
        assert completion.token_ids == same.token_ids
        assert completion.logprobs == same.logprobs
        assert_same(completion.state, same.state)


# What cannot be loaded


def refusal(path: Path, config: ModelConfig = SMALL) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        TextState.load(path, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_states(tmp_path):
    path = tmp_path / "file"
    assert refusal(path) == f"{path} is missing"
    assert refusal(tmp_path) == f"{tmp_path} is not a file"
    for content in (b"", b"\0", b"\0" * 100, b"xlstm" * 100, bytes(range(256)) * 9, b"\xff" * 64):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path} is damaged: ")
    checkpoint, _ = save_small(tmp_path)
    weights = checkpoint / "model.safetensors"
    assert refusal(weights, CONFIG) == f"{weights} holds no saved state"


def test_a_truncated_file(tmp_path):
    path = tmp_path / "state"
    random_state(2).save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (1, 7, 8, 100, header - 1, header, header + 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(path).startswith(f"{path} is damaged")
    assert "it ends within 'logits'" in refusal(path)


def rewritten(path: Path, metadata: dict[str, str | None], **replaced: torch.Tensor | None) -> None:
    """A state's file with some of its metadata and tensors replaced, or left out if None."""
    state = random_state(2)
    C, n, m = (torch.stack(parts, dim=1) for parts in zip(*state.memory.blocks, strict=True))
    described = {
        "format": "xlstm7b-state-1",
        "config": json.dumps(SMALL.to_dict()),
        "tokens_seen": "[5, 6]",
        **metadata,
    }
    parts = {"C": C, "n": n, "m": m, "logits": state.logits, **replaced}
    files.write_safetensors(
        path,
        {name: part for name, part in parts.items() if part is not None},
        {name: text for name, text in described.items() if text is not None},
    )


def test_missing_tensors_and_wrong_shapes(tmp_path):
    path = tmp_path / "state"
    rewritten(path, {})
    assert TextState.load(path, SMALL).tokens_seen == [5, 6]
    for name in ("C", "n", "m", "logits"):
        rewritten(path, {}, **{name: None})
        assert refusal(path) == f"{path} is damaged: it has no {name!r}"
        rewritten(path, {}, **{name: torch.zeros(2, 3)})
        assert refusal(path) == f"{path} is damaged: its {name!r} is float32 [2, 3]"
    rewritten(path, {"tokens_seen": "[5, 6, 7]"})
    assert refusal(path) == f"{path} is damaged: its 'C' is float32 [2, 3, 2, 8, 16]"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"format": None}, "holds no saved state"),
        ({"format": "xlstm7b-state-2"}, "holds no saved state"),
        ({"config": None}, "is damaged: it does not say which model it is of"),
        ({"config": "{"}, "is damaged: it does not say which model it is of"),
        ({"config": "[]"}, "is damaged: it does not say which model it is of"),
        ({"config": '{"num_heads": 2}'}, "is damaged: it does not say which model it is of"),
        ({"config": json.dumps({**SMALL.to_dict(), "num_heads": 0})}, "is damaged: it does not say "
         "which model it is of"),
        ({"config": "[" * 100_000}, "is damaged: it does not say which model it is of"),
        ({"tokens_seen": "[" * 100_000}, "is damaged: it does not say how much it has read"),
        ({"tokens_seen": None}, "is damaged: it does not say how much it has read"),
        ({"tokens_seen": "[5,"}, "is damaged: it does not say how much it has read"),
        ({"tokens_seen": "7"}, "is damaged: it has read 7 tokens"),
        ({"tokens_seen": "[5, -1]"}, "is damaged: it has read [5, -1] tokens"),
        ({"tokens_seen": '[5, "6"]'}, "is damaged: it has read [5, '6'] tokens"),
        ({"tokens_seen": f"[5, {2**63}]"}, f"is damaged: it has read [5, {2**63}] tokens"),
    ],
)  # fmt: skip
def test_garbled_metadata(tmp_path, metadata, sentence):
    path = tmp_path / "state"
    rewritten(path, metadata)
    assert refusal(path) == f"{path} {sentence}"


@pytest.mark.parametrize(
    "change",
    [{"num_blocks": 4}, {"num_heads": 4}, {"vocab_size": 384}, {"eos_token_id": 5}, {"eps": 1e-5},
     {"gate_soft_cap": 14.0}],
)  # fmt: skip
def test_a_state_of_another_model(tmp_path, change):
    path = tmp_path / "state"
    random_state(2).save(path)
    (name, value), other = *change.items(), replace(SMALL, **change)
    sentence = refusal(path, other)
    assert sentence.startswith(f"{path} was saved from another model: it has ")
    assert f"{name} {getattr(SMALL, name)}, not {value}" in sentence


@pytest.mark.parametrize(
    "change", [{"mlstm_round_up_to_multiple_of": 16}, {"vocab_size": 50304, "eos_token_id": 2}]
)
def test_a_config_that_its_json_spells_otherwise(tmp_path, change):
    config = replace(SMALL, **change)
    random_state(1, config=config).save(tmp_path / "state")
    TextState.load(tmp_path / "state", config)


# Writing


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path, old = tmp_path / "state", random_state(2)
    old.save(path)
    pieces = files.safetensors_pieces

    def broken(tensors, *arguments, **options):
        for index, piece in enumerate(pieces(tensors, *arguments, **options)):
            if index == 2:
                raise OSError(28, "No space left on device")
            yield piece

    monkeypatch.setattr(files, "safetensors_pieces", broken)
    for place in (path, tmp_path / "new"):
        with pytest.raises(OSError, match=r"could not be written \(.*No space left"):
            random_state(1).save(place)
        assert names_in(tmp_path) == {"state"}
    monkeypatch.undo()
    assert_same(TextState.load(path, SMALL), old)


def test_a_save_interrupted_before_the_rename(tmp_path, monkeypatch):
    path, old, new = tmp_path / "state", random_state(2), random_state(1)
    old.save(path)

    def interrupted(aside, target):
        # The new file is whole by now, beside the old one.
        assert_same(TextState.load(aside, SMALL), new)
        assert_same(TextState.load(target, SMALL), old)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new.save(path)
    assert names_in(tmp_path) == {"state"}
    assert_same(TextState.load(path, SMALL), old)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        random_state(1).save(tmp_path / "missing" / "state")
    assert names_in(tmp_path) == set()


def test_a_state_made_by_hand_from_the_models_own(tmp_path):
    """What `XLSTM` returns is saved as well as what a decoder holds."""
    model = XLSTM(SMALL)
    with torch.no_grad():
        logits, memory = model(torch.randint(0, 320, (2, 9)), logits="last")
    state = TextState(SMALL, memory, logits)
    state.save(tmp_path / "state")
    assert_same(TextState.load(tmp_path / "state", SMALL), state)
