"""The program run in this process, and small models that generate a known text."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from xlstm7b import files
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


def succeeded(outcome: Outcome) -> str:
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def refused(outcome: Outcome) -> str:
    """The sentence that a mistake prints. There must be nothing else on stdout or stderr."""
    assert (outcome.code, outcome.out) == (2, "")
    first, *others = outcome.err.splitlines()
    assert not others
    assert first.startswith("xlstm7b: ")
    return first.removeprefix("xlstm7b: ")


def loses_the_race(outcome: Callable[[], Outcome], target: Path) -> None:
    """A command that writes `target` keeps what another process writes there meanwhile."""
    sweep = files._sweep

    def meanwhile(*given: Any) -> bool:
        target.mkdir()
        (target / "config.json").write_text("theirs")
        return sweep(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_sweep", meanwhile)
        said = refused(outcome())
    assert said == f"{target} exists already: perhaps another process has just written it"
    assert {path.name: path.read_text() for path in target.iterdir()} == {"config.json": "theirs"}


def environment() -> dict[str, str]:
    """Environment variables for a subprocess that imports the same package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def write_config(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@torch.no_grad()
def greedy_text(folder: Path, prompt: str, steps: int) -> str:
    """The prompt and a greedy output, each token from a pass over everything before it."""
    model, tokenizer = XLSTM.from_pretrained(folder), ByteTokenizer()
    tokens = [0, *tokenizer.encode(prompt)]
    for _ in range(steps):
        logits, _ = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
        assert tokens[-1] != 0
    return tokenizer.decode(tokens)


@torch.no_grad()
def save_reciter(folder: Path, ids: list[int]) -> Path:
    """A model with 320 ids that generates `ids` in turn: after each id, the next one.

    After the last id it ends the text. If an id repeats an earlier one, the text repeats from
    there. The blocks add nothing to their input, but their states depend on everything read.
    """
    model = XLSTM(ModelConfig(128, 2, 2, vocab_size=320))
    for name, parameter in model.named_parameters():
        if "out_proj" in name or "proj_down" in name:
            parameter.zero_()
        elif "gate_preact" in name:
            parameter.normal_(std=0.5)
    embedding, head = model.backbone.embeddings.weight, model.lm_head.weight
    embedding[:, :64] = 0
    head.zero_()
    for position, (token, following) in enumerate(zip(ids, [*ids[1:], 0], strict=True)):
        if token in ids[:position]:
            break
        embedding[token] = torch.eye(128)[position]
        head[following] = 2 * torch.eye(128)[position]
    model.save_pretrained(folder)
    return folder


def save_greeter(folder: Path) -> Path:
    """A model that answers " Hi!" after "Assistant:", then writes the start of the next turn."""
    return save_reciter(folder, ByteTokenizer().encode(": Hi!\nUser:"))


def save_chat_model(folder: Path, *, repeats: bool = False) -> Path:
    """A model with the chat template CHATML that answers "Hi!" and the token that ends a turn.

    After that token it ends the text, or writes a line break and repeats the answer for ever.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    ids = backend.encode("\nHi!<|im_end|>").ids
    assert len(ids) == 5
    save_reciter(folder, [*ids, ids[0]] if repeats else ids)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return folder
