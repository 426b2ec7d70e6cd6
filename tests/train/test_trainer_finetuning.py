"""From chats to a fine-tuned model: only answers count; packed documents are independent."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import CHATML
from tokenizer_kinds import gpt2, qwen
from torch import Tensor
from train_processes import run
from train_runs import recipe

from xlstm7b.chat_format import PlainFormat, marked_source, template_source
from xlstm7b.config import ModelConfig
from xlstm7b.data.input_files import Columns
from xlstm7b.data.loader import Loader
from xlstm7b.data.pack import best_fit_decreasing
from xlstm7b.data.prepare import prepare
from xlstm7b.data.shards import ShardFolder
from xlstm7b.model import XLSTM
from xlstm7b.train.metrics_log import read_metrics
from xlstm7b.train.run_checkpoints import export_run

LENGTH = 224
TALKS = [("What is a wheel barrow?", "It is red."), ("And rain?", "Water, glazed."), ("So?", "So.")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ShardFolder:
    folder = tmp_path_factory.mktemp("chats")
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(9):
            messages = [
                {"role": role, "content": content * (1 + number % 2)}
                for talk in TALKS[: 1 + number % 3]
                for role, content in zip(("user", "assistant"), talk, strict=True)
            ]
            print(json.dumps({"messages": messages}), file=file)
    return prepare([folder / "chats.jsonl"], folder / "tokens", "bytes", Columns("chat"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose gates depend on the input and whose logits differ a lot."""
    torch.manual_seed(1)
    model = XLSTM(ModelConfig(64, 2, 2, vocab_size=320))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("preact.weight"):
                parameter.normal_(std=0.3)
            elif name.endswith("igate_preact.bias"):
                parameter.zero_()
        model.lm_head.weight *= 10
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    model.save_pretrained(folder)
    return folder


def windows(folder: ShardFolder) -> int:
    """The windows of one epoch."""
    (shard,) = folder.shards
    lengths = np.diff(shard.ends, prepend=0)
    assert lengths.max() < LENGTH
    return int(best_fit_decreasing(lengths, LENGTH).max()) + 1


def loss_of_each_alone(model: XLSTM, folder: ShardFolder) -> tuple[Tensor, int]:
    """The loss summed over targets that count, document by document, and their number."""
    (shard,) = folder.shards
    assert shard.mask is not None
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True):
        targets = torch.from_numpy(shard.tokens[start:end].astype(np.int64))[None]
        mask = torch.from_numpy(shard.mask[start:end].astype(np.bool_))[None]
        tokens = torch.cat([targets.new_zeros(1, 1), targets[:, :-1]], dim=1)
        logprobs, _ = model.token_logprobs(tokens, targets)
        total = total - logprobs[mask].double().sum()
        counted += int(mask.sum())
    return total, counted


def test_packed_documents_have_the_loss_and_gradients_of_each_alone(chats, pretrained):
    model = XLSTM.from_pretrained(pretrained, dtype=torch.float64)
    want, counted = loss_of_each_alone(model, chats)
    exact = torch.autograd.grad(want, list(model.parameters()))
    rows = windows(chats)
    loader = Loader(
        {"chats": (chats, 1.0)}, context_length=LENGTH, global_batch=rows, packing="best-fit"
    )
    batch = next(loader)
    loader.close()
    assert batch.resets.sum() > rows  # several documents share a window
    assert int(batch.mask.sum()) == counted < chats.tokens < rows * LENGTH
    logprobs, _ = model.token_logprobs(batch.tokens, batch.targets, resets=batch.resets)
    got = -(logprobs * batch.mask).sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    gradients = torch.autograd.grad(got, list(model.parameters()))
    for gradient, alone in zip(gradients, exact, strict=True):
        assert float((gradient - alone).norm() / alone.norm()) < 1e-10


def test_the_speed_counts_all_tokens_that_are_read(chats, tmp_path, monkeypatch):
    """Not only those that count in the loss, and no padding."""
    rows = windows(chats)
    clock = iter(range(100))
    monkeypatch.setattr("xlstm7b.train.trainer.time.perf_counter", lambda: float(next(clock)))
    chosen = recipe(
        chats.path,
        "data.packing=best-fit",
        f"data.context_length={LENGTH}",
        f"batch.sequences={rows}",
        "batch.micro_batch=1",
        "run.validate_every=0",
    )
    run(0, chosen, tmp_path)
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        assert line["tokens_per_second"] == chats.tokens
        assert line["tokens"] < chats.tokens < rows * LENGTH


@pytest.mark.parametrize("form", ["chat", "text"])
@pytest.mark.parametrize("tokenizer", [qwen, gpt2])
def test_an_export_has_the_chat_format_of_its_data(form, tokenizer, tmp_path):
    """That of the tokenizer; the plain format if it has none. It is in both files."""
    folder = tokenizer(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So." * 50}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk, "text": "So " * 50}))
    data = prepare([tmp_path / "a.jsonl"], tmp_path / "data", str(folder), Columns(form))
    template = CHATML if tokenizer is qwen else PlainFormat.template
    assert data.chat_template == (template if form == "chat" else None)
    # The tokenizer loses its template after the data was prepared.
    for file in (folder, data.path):
        described = json.loads((file / "tokenizer_config.json").read_text())
        described.pop("chat_template", None)
        (file / "tokenizer_config.json").write_text(json.dumps(described))
    chosen = recipe(
        data.path,
        f"model.eos_token_id={data.eos_token_id}",
        "model.force_bos_token_insert=false",
        "run.steps=4",
        "run.validate_every=0",
    )
    run(0, chosen, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "export")
    template = template if form == "chat" else PlainFormat.template
    assert template_source(tmp_path / "export") == template
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == marked_source(template)
    config = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == marked_source(template)
    if form == "chat":  # also if the tokenizer is not found
        (data.path / "tokenizer.json").unlink()
        export_run(tmp_path / "run", tmp_path / "export")
        assert template_source(tmp_path / "export") == template


def test_sources_with_different_chat_templates_are_refused(tmp_path):
    talk = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So." * 99}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    tokenizer = qwen(tmp_path / "tokenizer")
    prepare([tmp_path / "a.jsonl"], tmp_path / "a", tokenizer)
    (tokenizer / "chat_template.jinja").write_text(f"{CHATML} ")
    data = prepare([tmp_path / "a.jsonl"], tmp_path / "b", tokenizer)
    chosen = recipe(
        data.path,
        f'data.sources={{a={{path="{tmp_path}/a"}},b={{path="{tmp_path}/b"}}}}',
        f"model.eos_token_id={data.eos_token_id}",
        "model.force_bos_token_insert=false",
    )
    with pytest.raises(ValueError, match=r"^the chats of sources 'a' and 'b' were prepared with d"):
        run(0, chosen, tmp_path / "run")


def test_fine_tuning_counts_only_answers(chats, pretrained, tmp_path):
    rows = windows(chats)
    chosen = recipe(
        chats.path,
        "data.packing=best-fit",
        f"data.context_length={LENGTH}",
        f"batch.sequences={rows}",
        "batch.micro_batch=1",
        f"init_from={pretrained}",
        "schedule.warmup=0",
        "optimizer.lr=1e-3",
    )
    run(0, chosen, tmp_path / "run")
    model = XLSTM.from_pretrained(pretrained)
    total, counted = loss_of_each_alone(model, chats)
    (total / counted).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["tokens"] for line in lines] == [counted] * 8  # an epoch a step
    assert lines[0]["loss"] == pytest.approx(total.item() / counted, rel=1e-5)
    assert lines[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)

    export_run(tmp_path / "run", tmp_path / "tuned")
    with torch.no_grad():
        tuned, _ = loss_of_each_alone(XLSTM.from_pretrained(tmp_path / "tuned"), chats)
    assert float(tuned) < 0.9 * total.item()
