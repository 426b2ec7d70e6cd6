"""`--peer`: models of transformers, measured by `eval ruler` and `eval ppl`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Cli, refused, succeeded
from models import random_model
from ruler_cases import ESSAY

from xlstm7b.config import ModelConfig
from xlstm7b.evaluate.peer import Peer

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

RULER = ("--lengths", 4096, "--samples", 2, "--tasks", "vt,fwe", "--device", "cpu")


def save_peer(folder: Path, kind: str = "llama", first: bool = True) -> Path:
    """A tiny model with random weights, and a tokenizer of bytes with or without a first token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: number for number, name in enumerate(["<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(names, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    torch.manual_seed(0)
    common = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    common |= {"bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    if kind == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=64, num_attention_heads=2, max_position_embeddings=8192, **common
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.MambaForCausalLM(transformers.MambaConfig(state_size=4, **common))
    model.generation_config.update(do_sample=True, temperature=0.7, repetition_penalty=1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_progress() -> None:
    transformers.utils.logging.disable_progress_bar()  # it is on stderr, also in a pipe


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_peer(tmp_path_factory.mktemp("peers") / "tiny-llama")


@torch.no_grad()
def naive_answer(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """The most likely token at each step, from the whole text each time."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer(prompt).input_ids
    length = len(text)
    while len(text) < length + max_new_tokens and text[-1] != 1:
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return str(tokenizer.decode(text[length:], skip_special_tokens=True))


@pytest.mark.parametrize(("kind", "first"), [("llama", True), ("llama", False), ("mamba", False)])
def test_answers_and_logprobs_are_the_models_own(tmp_path: Path, kind: str, first: bool) -> None:
    """Greedy, although the checkpoint asks for sampling with a penalty."""
    folder = save_peer(tmp_path / "peer", kind, first)
    peer = Peer(folder, None, "cpu").load()
    prompts = ["so much depends upon", "a"]
    assert peer.answer(prompts, 12) == [naive_answer(folder, text, 12) for text in prompts]
    texts = [peer.encode(text) for text in ("a red wheel barrow", "x", "")]
    assert [len(text) for text in texts] == [18, 1, 0]
    counted: list[int] = []
    scored = peer.logprobs(texts, counted.append)
    without = 0 if first else 1
    assert [len(logprobs) for logprobs in scored] == [18 - without, 1 - without, 0]
    assert sum(counted) == sum(map(len, scored))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole = [0, *texts[0]] if first else texts[0]
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    wanted = logits[range(len(whole) - 1), whole[1:]]
    torch.testing.assert_close(scored[0], wanted, rtol=1e-5, atol=1e-5)


def test_ruler_measures_a_peer(
    cli: Cli, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = tmp_path / "run"
    table = succeeded(cli("eval", "ruler", "--peer", llama, *RULER, "--output", folder))
    assert [line.split()[0] for line in table.splitlines()] == ["4096", "vt", "fwe", "average"]
    (line, _) = map(json.loads, (folder / "4096" / "vt.jsonl").open())
    assert line["pred"] == naive_answer(llama, line["input"], 30)
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["model"] == str(llama)
    assert scores["xlstm7b"]["model"]["model_type"] == "llama"
    assert (scores["state_dtype"], scores["dtype"]) == (None, "as stored")
    drawn = tmp_path / "both.png"
    succeeded(cli("eval", "ruler-plot", folder / "scores.json", "--output", drawn))
    assert drawn.read_bytes().startswith(b"\x89PNG")
    # All samples have an answer: the weights are not read again.
    monkeypatch.setattr(Peer, "load", None)
    assert succeeded(cli("eval", "ruler", "--peer", llama, *RULER, "--output", folder)) == table
    other = save_peer(tmp_path / "other", "mamba")
    message = refused(cli("eval", "ruler", "--peer", other, *RULER, "--output", folder))
    assert message.startswith(f"{folder} holds a run with model fingerprint ")


def test_perplexity_of_a_peer(cli: Cli, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(ESSAY[:1000])
    called = ("eval", "ppl", "--peer", llama, tmp_path / "a.txt", "--device", "cpu")
    out = succeeded(cli(*called, "--output", tmp_path / "out.json"))
    assert out.startswith("1 document, 1,000 tokens, 1,000 bytes\n")
    read = json.loads((tmp_path / "out.json").read_text())
    peer = Peer(llama, None, "cpu").load()
    (logprobs,) = peer.logprobs([peer.encode(ESSAY[:1000])])
    assert read["perplexity"]["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    assert read["xlstm7b"]["model"]["model_type"] == "llama"


def test_a_peer_with_our_tokenizer_is_comparable(cli: Cli, llama: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    random_model(ModelConfig(64, 2, 2, vocab_size=320), torch.float32).save_pretrained(ours)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, ours / name)
    (tmp_path / "a.txt").write_text(ESSAY[:500])
    files = [tmp_path / "ours.json", tmp_path / "peer.json"]
    measured = (tmp_path / "a.txt", "--device", "cpu", "--output")
    succeeded(cli("eval", "ppl", ours, *measured, files[0]))
    succeeded(cli("eval", "ppl", "--peer", llama, *measured, files[1]))
    assert "not comparable" not in succeeded(cli("eval", "compare", *files))


def test_bytes_without_a_first_token(cli: Cli, tmp_path: Path) -> None:
    """The first token has no loss, so its bytes do not count, as for our own models."""
    folder = save_peer(tmp_path / "peer", "mamba", first=False)
    (tmp_path / "a.txt").write_text("water " * 20)
    out = succeeded(cli("eval", "ppl", "--peer", folder, tmp_path / "a.txt", "--device", "cpu"))
    assert out.startswith("1 document, 119 tokens, 119 bytes\n")
    peer = Peer(folder, None, "cpu")
    assert [peer.first_bytes(text) for text in ("a b", " b")] == [1, 1]


def test_wrong_peers_are_refused(cli: Cli, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    random_model(dtype=torch.float32).save_pretrained(tmp_path / "silent")
    ruler = ("eval", "ruler", "--output", tmp_path / "run")
    ppl = ("eval", "ppl", tmp_path / "a.txt")
    tokenizer = ("--tokenizer", tmp_path / "a.txt")
    for arguments, message in (
        (ruler, "give either a model or --peer FOLDER"),
        ((*ruler, "model", "--peer", llama), "give either a model or --peer FOLDER"),
        ((*ruler, "--peer", tmp_path / "none"), "--peer must be a folder with a model, not "),
        ((*ruler, "--peer", tmp_path / "empty"), "transformers does not load "),
        ((*ruler, "--peer", llama, *tokenizer), "--tokenizer is for our model; a peer has its "),
        (("eval", "ppl", "--peer", llama), "give a model, or --peer FOLDER, and the texts to "),
        (ppl, "no text is given; name files or folders after the model"),
        ((*ppl, "--peer", tmp_path / "empty"), "transformers does not load "),
        ((*ppl, "--peer", tmp_path / "silent"), f"{tmp_path / 'silent'} has no tokenizer; save "),
        ((*ppl, "--peer", llama, *tokenizer), "--tokenizer is for our model; a peer has its "),
    ):
        assert refused(cli(*arguments)).startswith(message), arguments
    assert not (tmp_path / "run").exists()


def test_weights_are_never_unpickled(llama: Path, tmp_path: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(llama)
    for path in llama.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="transformers does not load "):
        Peer(tmp_path, None, "cpu").load()
