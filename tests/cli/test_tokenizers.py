"""Every kind of tokenizer, from text to a served model."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from commands import Cli, refused, succeeded
from live_server import GREEDY, serving
from tokenizer_kinds import KINDS, LINES

from xlstm7b.config import ModelConfig
from xlstm7b.data.shards import open_folder
from xlstm7b.generate import Generator
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import FileTokenizer, open_tokenizer, with_first_token

TEXTS = [f"{line} {line.lower()}" for line in LINES * 4]
PROMPT = "The quick brown fox"


class Trained(NamedTuple):
    data: Path
    model: Path
    tokenizer: FileTokenizer
    config: ModelConfig


@pytest.fixture(params=KINDS)
def trained(cli: Cli, request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    """A model that was prepared, trained and exported with a tokenizer of this kind."""
    folder = KINDS[request.param](tmp_path / request.param)
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in TEXTS)
    (tmp_path / "text.jsonl").write_text(lines)
    data, run, model = (tmp_path / name for name in ("data", "run", "model"))
    prepare = ["prepare", tmp_path / "text.jsonl", "--output", data, "--tokenizer", folder]
    said = cli(*prepare, "--processes", 1)  # starting others takes longer than their work
    assert said.code == 0
    *_, advice = said.out.splitlines()
    settings = [
        "model={embedding_dim=64,num_blocks=1,num_heads=2,qk_dim_factor=1.0,vocab_size=448}",
        f'data.sources={{text={{path="{data}"}}}}',
        "data.validation=",
        "data.context_length=32",
        "batch.sequences=2",
        "run.steps=2",
        "run.validate_every=0",
        "schedule.warmup=1",
        "schedule.cooldown=1",
        "optimizer.lr=1e-3",
    ]
    given = [word for setting in settings for word in ("--set", setting)]
    tokenizer = open_tokenizer(folder)
    assert isinstance(tokenizer, FileTokenizer)
    train = ["train", "quickstart", "--run", run, "--device", "cpu", *given]
    refusal = refused(cli(*train))
    assert refusal.endswith(f"model.eos_token_id is 0: set it to {tokenizer.special.eos}")
    # `prepare` has printed the settings that are needed.
    train += advice.removeprefix("train on it with ").split()
    assert cli(*train).code == 0
    succeeded(cli("export", run, model))
    return Trained(data, model, tokenizer, ModelConfig.from_file(model / "config.json"))


def test_from_text_to_a_served_model(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    data, model, tokenizer, config = trained
    # 1. Shards: the tokens of each document, then the end of text.
    shards = open_folder(data).shards
    (tokens, ends) = shards[0].tokens, shards[0].ends
    documents = [part.tolist() for part in np.split(tokens, ends)[:-1]]
    assert documents == [[*tokenizer.encode(text), tokenizer.special.eos] for text in TEXTS]
    # 2. The export has the ids, and transformers adds the same first token.
    bos, eos, _ = tokenizer.special
    first = [] if bos is None else [bos]
    assert (config.eos_token_id, config.force_bos_token_insert) == (eos, bos is not None)
    ids = with_first_token(config, tokenizer.encode(PROMPT))
    assert ids == [*first, *tokenizer.encode(PROMPT)]
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    assert theirs(PROMPT).input_ids == ids
    assert theirs.decode(ids, skip_special_tokens=True) == PROMPT
    # 3. Generation continues the prompt with its most likely tokens.
    network = XLSTM.from_pretrained(model)
    written = list(ids)
    with torch.no_grad():
        for _ in range(8):
            written.append(int(network(torch.tensor([written]))[0][0, -1].argmax()))
    want = tokenizer.decode(written)
    assert want.startswith(PROMPT)
    options = ["--max-new-tokens", 8, "--temperature", 0, "--ignore-eos"]
    assert succeeded(cli("generate", model, PROMPT, *options)).rstrip("\n") == want.rstrip("\n")
    # 4. Perplexity: every token but a first token that is given.
    (tmp_path / "one.txt").write_text(TEXTS[0])
    out = cli("eval", "ppl", model, tmp_path / "one.txt", "--output", tmp_path / "ppl.json").out
    whole = torch.tensor([with_first_token(config, tokenizer.encode(TEXTS[0]))])
    with torch.no_grad():
        logprobs, _ = network.token_logprobs(whole[:, :-1], whole[:, 1:])
    measured = json.loads((tmp_path / "ppl.json").read_text())["perplexity"]
    assert measured["tokens"] == whole.shape[1] - 1
    assert measured["loss"] == pytest.approx(-logprobs.mean().item(), rel=1e-5)
    scored = TEXTS[0].encode()
    if bos is None:
        scored = scored.removeprefix(tokenizer.token_bytes(int(whole[0, 0])))
    bits = -logprobs.sum().item() / math.log(2)
    assert measured["bits_per_byte"] == pytest.approx(bits / len(scored), rel=1e-5)
    assert "perplexity" in out
    # 5. The server gives the same text, also after a saved state.
    with serving(Generator.from_pretrained(model, device="cpu"), states=tmp_path) as live:
        body = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, **GREEDY}
        answer = live.post("/v1/completions", prompt=PROMPT, **body, echo=True)
        assert answer["choices"][0]["text"] == want
        assert live.post("/tokenize", prompt=PROMPT)["tokens"] == ids
        assert live.post("/detokenize", tokens=ids)["prompt"] == PROMPT


def test_a_model_refuses_another_tokenizer(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    model, mine = trained.model, trained.tokenizer.fingerprint[:12]
    make = KINDS["gpt2" if trained.tokenizer.path.parent.name != "gpt2" else "llama3"]
    folder = make(tmp_path / "another")
    both = f"was trained with the tokenizer {mine}, but {{}} holds the tokenizer "
    both += open_tokenizer(folder).fingerprint[:12]
    said = refused(cli("generate", model, PROMPT, "--tokenizer", folder))
    assert said == f"{model} {both.format(folder)}"
    # A file that was replaced, and ids that were changed.
    (model / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert refused(cli("generate", model, PROMPT)) == f"{model} {both.format(model)}"
    (model / "tokenizer.json").write_bytes(trained.tokenizer.path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    eos = trained.tokenizer.special.eos
    said = refused(cli("generate", model, PROMPT))
    assert said.endswith(f"whose id is {eos}, but the model's config.json says eos_token_id = 5")
