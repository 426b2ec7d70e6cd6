"""Trainer, SFTTrainer, DPOTrainer and PEFT on an optimized model, through the examples."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import CHATML

from xlstm7b import XLSTM, ModelConfig
from xlstm7b.chat_format import PlainFormat, marked_source
from xlstm7b.data.prepare import prepare
from xlstm7b.tokenizer import ByteTokenizer, write_tokenizer

for library in ("transformers", "trl", "peft", "datasets"):
    # To import them takes long, so a process that runs none of these tests does not.
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)

from datasets import load_dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from xlstm7b.integrations.transformers import optimize  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A byte-level model with its tokenizer. Other libraries must not ask the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    config = ModelConfig(128, 2, 2, vocab_size=320, igate_bias_init_range=-2.0)
    path = tmp_path / "model"
    XLSTM(config).save_pretrained(path)
    write_tokenizer(path, ByteTokenizer(), config, marked_source(PlainFormat.template))
    return path


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_pipeline_continues_prompts_of_different_lengths(folder):
    model = optimize(AutoModelForCausalLM.from_pretrained(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    write_on = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    prompts = ["The sea", "A much longer prompt than", "So"]
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    together = write_on(prompts, batch_size=3, **options)
    alone = [write_on(prompt, **options) for prompt in prompts]
    assert together == alone


TEXTS = ["The sea was calm.", "so much depends upon a red wheel barrow", "Yes.", "ab" * 30]


@pytest.mark.parametrize("rank", [0, 4])
def test_trainer(folder, tmp_path, rank):
    data = write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    options = ["--steps", "20", "--learning-rate", "3e-3", "--rank", str(rank)]
    trainer = example("transformers_trainer")([str(folder), data, str(tmp_path / "out"), *options])
    assert trainer.train_dataset[2]["input_ids"] == [0, *ByteTokenizer().encode("Yes."), 0]
    first, last = losses(trainer)
    assert last < first
    if rank:
        assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    else:
        XLSTM.from_pretrained(tmp_path / "out")
    # Evaluation gathers logits, and no cache.
    result = trainer.predict(trainer.train_dataset)
    assert result.predictions.shape[::2] == (4, 320)


@pytest.mark.parametrize("padding", ["<|endoftext|>", None])
def test_trainer_learns_the_end_of_text_if_there_is_no_other_padding(folder, tmp_path, padding):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"pad_token": padding}
    path.write_text(json.dumps(settings))
    data = write(tmp_path / "texts.jsonl", [{"text": text} for text in ("Yes.", "ab")])
    trainer = example("transformers_trainer")(
        [str(folder), data, str(tmp_path / "out"), "--steps", "1"]
    )
    ids = [[0, *ByteTokenizer().encode(text), 0] for text in ("Yes.", "ab")]
    batch = trainer.data_collator([trainer.train_dataset[row] for row in (0, 1)])
    assert batch["labels"].tolist() == [ids[0], [*ids[1], -100, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]


ANSWERS = [
    {"prompt": "Is the sea calm?", "completion": " Yes."},
    {"prompt": "Count.", "completion": " 1 2 3 4 5 6 7"},
    {"prompt": "What depends upon a red wheel barrow?", "completion": " So much."},
]


def logprob(folder: Path, prompt: str, completion: str) -> tuple[float, int]:
    """log p of a completion and of the end of text by our model, and their number of tokens."""
    model, tokenizer = XLSTM.from_pretrained(folder), ByteTokenizer()
    before = [0, *tokenizer.encode(prompt)]
    ids = torch.tensor([[*before, *tokenizer.encode(completion), 0]])
    logprobs = F.log_softmax(model(ids[:, :-1])[0], dim=-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[0, len(before) - 1 :, 0]
    return chosen.sum().item(), len(chosen)


def test_packed_sft_has_the_loss_of_each_example_alone(folder, tmp_path):
    data = write(tmp_path / "answers.jsonl", ANSWERS)
    with torch.no_grad():  # logits so large that the soft-cap matters
        model = XLSTM.from_pretrained(folder)
        model.lm_head.weight.mul_(60)
        model.save_pretrained(folder)
    options = ["--steps", "1", "--learning-rate", "0", "--max-length", "128"]
    trainer = example("trl_sft")([str(folder), data, str(tmp_path / "out"), *options])
    assert trainer.train_dataset.num_rows == 1  # three examples in one row
    sums = [logprob(folder, *row.values()) for row in ANSWERS]
    want = -sum(total for total, _ in sums) / sum(count for _, count in sums)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_sft_learns_answers(folder, tmp_path, rank):
    data = write(tmp_path / "answers.jsonl", ANSWERS)
    options = ["--steps", "20", "--learning-rate", "3e-3", "--max-length", "64"]
    options += ["--rank", str(rank)]
    trainer = example("trl_sft")([str(folder), data, str(tmp_path / "out"), *options])
    first, last = losses(trainer)
    assert last < first
    if rank:
        adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        # PEFT's AutoPeftModelForCausalLM refuses an adapter without a task type.
        assert adapter["task_type"] == "CAUSAL_LM"
        assert len(adapter["target_modules"]) == 8
    else:
        XLSTM.from_pretrained(tmp_path / "out")


CHATS = [
    [("user", "Is the sea calm?"), ("assistant", "Yes.\n")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", " Hé!"), ("user", ""),
     ("assistant", "  1 2  3"), ("user", "User:"), ("assistant", "")],
    [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")],
]  # fmt: skip


def write_chats(path: Path) -> str:
    chats = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    return write(path, [{"messages": chat} for chat in chats])


def prepared(path: str, tokenizer: Path | str, output: Path) -> list[tuple[list[int], list[int]]]:
    """The ids and the labels of every document, as `train` takes them from `prepare`'s shards."""
    data = prepare([path], output, tokenizer)
    [shard] = data.shards
    rows, start = [], 0
    for end in shard.ends:
        ids, counts = shard.tokens[start:end].tolist(), shard.mask[start:end]
        labels = [token if one else -100 for token, one in zip(ids, counts, strict=True)]
        rows.append(([data.bos_token_id, *ids], [-100, *labels]))
        start = end
    return rows


def rows(trainer) -> list[tuple[list[int], list[int]]]:
    """The ids and the labels of every example of a packed dataset, in the dataset's order."""
    found = []
    for row in trainer.train_dataset:
        start = 0
        for length in row["seq_lengths"]:
            end = start + length
            labels = [-100, *row["labels"][start + 1 : end]]  # the collator leaves the first out
            found.append((row["input_ids"][start:end], labels))
            start = end
    return found


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_sft_of_chats_has_the_labels_of_prepare(folder, tmp_path, template):
    if template == "chatml":  # without marks, as the templates of most models
        (folder / "chat_template.jinja").write_text(CHATML)
    data = write_chats(tmp_path / "chats.jsonl")
    options = ["--steps", "1", "--learning-rate", "0", "--max-length", "256"]
    trainer = example("trl_sft")([str(folder), data, str(tmp_path / "out"), *options])
    want = prepared(data, folder, tmp_path / "data")
    assert sorted(rows(trainer)) == sorted(want)
    assert all(labels[-1] == 0 for _, labels in want)  # the end of text


def test_assistant_only_loss_of_an_export_has_the_labels_of_prepare(folder, tmp_path):
    data = write_chats(tmp_path / "chats.jsonl")
    trainer = SFTTrainer(
        optimize(AutoModelForCausalLM.from_pretrained(folder)),
        SFTConfig(str(tmp_path / "out"), assistant_only_loss=True, use_cpu=True, bf16=False),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    found = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert found == prepared(data, folder, tmp_path / "data")


def test_dpo_prefers_the_chosen_answers(folder, tmp_path):
    pairs = [
        {"prompt": "Is the sea calm?", "chosen": " Yes.", "rejected": " I cannot know that."},
        {"prompt": "Count.", "chosen": " 1 2 3 4 5 6 7", "rejected": " No."},
    ]
    data = write(tmp_path / "pairs.jsonl", pairs)
    options = ["--steps", "20", "--learning-rate", "3e-3", "--batch-size", "2"]
    train = example("trl_dpo")
    start = train([str(folder), data, str(tmp_path / "start"), *options[2:], "--steps", "1"])
    log = start.state.log_history[-1]
    assert log["train_loss"] == pytest.approx(0.693147, abs=1e-5)  # model and reference are equal
    trainer = train([str(folder), data, str(tmp_path / "out"), *options])
    [*_, log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["loss"] < 0.6
    assert log["rewards/accuracies"] == 1

    # The adapters, merged into the weights, are a checkpoint of this package.
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder)
    PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload().save_pretrained(
        tmp_path / "tuned"
    )
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "tuned")
    for pair in pairs:
        chosen, rejected = (
            logprob(tmp_path / "tuned", pair["prompt"], pair[key])[0]
            - logprob(folder, pair["prompt"], pair[key])[0]
            for key in ("chosen", "rejected")
        )
        assert chosen > rejected
