"""The harness's answers from our model, against every text read anew for every token."""

import json
import math
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import naive_score
from tasks import add_answered, add_choices, add_last_words, add_whole

from xlstm7b.evaluate import prefixes
from xlstm7b.evaluate.presets import PRESETS, with_shots
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

import lm_eval.tasks
from lm_eval.api.instance import Instance

from xlstm7b.evaluate import harness
from xlstm7b.evaluate.harness import XLSTM7B, load_tasks, run_tasks


@pytest.fixture(scope="module")
def lm(byte_model: Path) -> XLSTM7B:
    return XLSTM7B(str(byte_model), device="cpu", batch_size=8)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def naive(lm: XLSTM7B, context: str, continuation: str) -> tuple[float, bool]:
    encode = ByteTokenizer().encode
    return naive_score(lm.scorer.model, encode(context), encode(continuation))


def test_choices_equal_the_plain_way(lm: XLSTM7B, tmp_path: Path) -> None:
    add_choices(tmp_path, "choices", questions=4, shots=2, words=3)
    (task,) = load_tasks([], tmp_path)
    task.build_all_requests()
    pairs = [request.args for request in task.instances]
    assert len(pairs) == 16
    found = lm.loglikelihood(task.instances, disable_tqdm=True)
    wanted = [naive(lm, *pair) for pair in pairs]
    assert [logprob for logprob, _ in found] == pytest.approx([x for x, _ in wanted], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    results = run_tasks(lm, load_tasks(["choices"], tmp_path))
    best = [max(range(4), key=lambda n, q=q: wanted[4 * q + n][0]) for q in range(4)]
    assert results["results"]["choices"]["acc,none"] == best.count(1) / 4
    assert results["n-shot"] == {"choices": 2}


def test_grouping_reads_ten_times_less(
    lm: XLSTM7B, byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five shots, the same for every question, and four options."""
    add_choices(tmp_path, "shots", questions=12, shots=5, words=20)
    plain = XLSTM7B(str(byte_model), device="cpu", batch_size=1, grouping=False)
    scores, counts = [], []
    for model in (lm, plain):
        (task,) = load_tasks(["shots"], tmp_path)
        task.build_all_requests()
        before = model.scorer.tokens_processed
        scores.append(model.loglikelihood(task.instances, disable_tqdm=True))
        counts.append(model.scorer.tokens_processed - before)
    with capsys.disabled():
        print(f"\n  tokens read: {counts[0]:,} grouped, {counts[1]:,} not, "
              f"{counts[1] / counts[0]:.1f} times as many")  # fmt: skip
    assert counts[1] > 10 * counts[0]
    grouped, alone = ([logprob for logprob, _ in each] for each in scores)
    assert grouped == pytest.approx(alone, abs=1e-4)
    assert [greedy for _, greedy in scores[0]] == [greedy for _, greedy in scores[1]]


def last_words(lm: XLSTM7B, folder: Path, texts: list[str]) -> None:
    add_last_words(folder, "words", texts)
    results = run_tasks(lm, load_tasks(["words"], folder))["results"]["words"]
    wanted = [naive(lm, head, f" {tail}") for head, _, tail in (t.rpartition(" ") for t in texts)]
    mean = sum(logprob for logprob, _ in wanted) / len(texts)
    assert results["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert results["acc,none"] == sum(greedy for _, greedy in wanted) / len(texts)


def test_last_words(lm: XLSTM7B, tmp_path: Path) -> None:
    last_words(lm, tmp_path, ["the sea was very calm", "a ship came by", "nobody saw it go"])


@pytest.mark.skipif("XLSTM7B_LAMBADA" not in os.environ, reason="XLSTM7B_LAMBADA is not set")
def test_lambada(lm: XLSTM7B, tmp_path: Path) -> None:
    lines = (Path(os.environ["XLSTM7B_LAMBADA"]) / "test.jsonl").read_text().splitlines()
    last_words(lm, tmp_path, [json.loads(line)["text"] for line in lines[:8]])


def test_trailing_spaces_and_no_context(lm: XLSTM7B) -> None:
    found = lm.loglikelihood(asked("loglikelihood", ("ab  ", "cd"), ("", "cd")), disable_tqdm=True)
    assert found[0][0] == pytest.approx(naive(lm, "ab", "  cd")[0], abs=1e-4)
    assert found[1][0] == pytest.approx(naive(lm, "", "cd")[0], abs=1e-4)


def test_rolling_has_no_window(lm: XLSTM7B, tmp_path: Path) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh", k=k)) for k in (3000, 40, 1)]
    add_whole(tmp_path, "whole", texts)
    results = run_tasks(lm, load_tasks([], tmp_path))["results"]["whole"]
    total = 0.0
    for text in texts:
        ids = torch.tensor([[0, *ByteTokenizer().encode(text)]])
        with torch.no_grad():
            logprobs, _ = lm.scorer.model.token_logprobs(ids[:, :-1], ids[:, 1:])
        total += float(logprobs.double().sum())
    size = sum(map(len, texts))
    assert results["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)


@torch.no_grad()
def continued(model: XLSTM, prompt: str, most: int, stop: str) -> str:
    tokenizer, ids = ByteTokenizer(), [0, *ByteTokenizer().encode(prompt)]
    text = ""
    for _ in range(most):
        logits, _ = model(torch.tensor([ids]), logits="last")
        ids.append(int(logits[0].argmax()))
        text = tokenizer.decode(ids)[len(prompt) :]
        if ids[-1] == 0 or stop in text:
            break
    return text.partition(stop)[0]


def test_texts_until_a_stop(lm: XLSTM7B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 64)
    shots = "one two three four five six seven eight nine ten "
    prompts = [shots, shots + "x", shots + "yz", "alone", "lonely", "alone"]
    model = lm.scorer.model
    first = continued(model, "alone", 8, "\0")
    assert len(first) > 2
    stop = first[2]
    greedy = {"until": [stop, ""], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    found = lm.generate_until(
        asked("generate_until", *((prompt, greedy) for prompt in prompts)), disable_tqdm=True
    )
    assert found == [continued(model, prompt, 8, stop) for prompt in prompts]
    sampled = {"until": "\0", "max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    both = [
        lm.generate_until(asked("generate_until", *[("alone", sampled)] * 3), disable_tqdm=True)
        for _ in range(2)
    ]
    assert both[0] == both[1]
    assert len(set(both[0])) == 3
    with pytest.raises(ValueError, match="there is no generation setting 'beams'"):
        lm.generate_until(asked("generate_until", ("a", {"beams": 4})))


def test_an_answer_is_matched(lm: XLSTM7B, tmp_path: Path) -> None:
    right = continued(lm.scorer.model, "alone", 6, "\n")
    add_answered(tmp_path, "answered", {"alone": right, "lonely": "no"})
    results = run_tasks(lm, load_tasks([], tmp_path))
    assert results["results"]["answered"]["exact_match,none"] == 0.5


def test_chats(lm: XLSTM7B, byte_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no chat template to apply"):
        lm.apply_chat_template([{"role": "user", "content": "Hi"}])
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in byte_model.iterdir():
        (folder / file.name).symlink_to(file)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    chat = XLSTM7B(str(folder), device="cpu")
    asking = [{"role": "user", "content": "Hi"}]
    assert chat.apply_chat_template(asking) == "<user>Hi<assistant>"
    assert chat.apply_chat_template(asking, add_generation_prompt=False) == "<user>Hi"


def test_arguments(byte_model: Path, tmp_path: Path) -> None:
    small = XLSTM7B(str(byte_model), device="cpu", dtype="bfloat16", max_batch_size=3)
    assert (small.scorer.batch_size, small.generator.batch_size) == (3, 3)
    assert small.scorer.model.lm_head.weight.dtype == torch.bfloat16
    for wrong, sentence in (
        ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16, not 'int8'"),
        ({"batch_size": 0}, "batch_size must be at least 1 or auto, not 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            XLSTM7B(str(byte_model), **wrong)
    if not torch.cuda.is_available():
        fallen = XLSTM7B(str(byte_model), device="cuda:0", batch_size=2)  # the harness's default
        assert fallen.device == torch.device("cpu")
        assert fallen.scorer.model.lm_head.weight.dtype == torch.float32
    with pytest.raises(ValueError, match=r"there is no folder .* of tasks"):
        load_tasks([], tmp_path / "nowhere")


def test_tasks_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task that can be read"):
        load_tasks([], tmp_path)
    add_choices(tmp_path, "choices", questions=2, shots=6, words=1)
    with pytest.raises(ValueError, match="choices has 5 examples, not the 6 asked for"):
        load_tasks(["choices"], tmp_path)
    (task,) = load_tasks(["choices"], tmp_path, num_fewshot=5)
    assert task.config.num_fewshot == 5
    (tmp_path / "choices_dev.json").write_text("{")
    with pytest.raises(ValueError, match="the data of choices cannot be read"):
        load_tasks(["choices"], tmp_path, num_fewshot=1)


def test_examples_that_are_the_questions(tmp_path: Path) -> None:
    add_choices(tmp_path, "same", questions=3, shots=2, words=1)
    file = tmp_path / "same.yaml"
    file.write_text(file.read_text().replace("fewshot_split: dev", "fewshot_split: test"))
    (task,) = load_tasks(["same"], tmp_path)
    task.build_all_requests()
    with pytest.raises(ValueError, match="same has 2 examples, not the 3 asked for"):
        load_tasks(["same"], tmp_path, num_fewshot=3)


def test_a_search_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    add_answered(tmp_path, "answered", {"a": "b"})
    file = tmp_path / "answered.yaml"
    text = file.read_text()
    file.write_text(text.replace("do_sample: false", "num_beams: 1"))
    assert len(load_tasks(["answered"], tmp_path)) == 1
    file.write_text(text.replace("do_sample: false", "num_beams: 4"))
    with pytest.raises(ValueError, match="there is no generation setting 'num_beams'"):
        load_tasks(["answered"], tmp_path)


def test_an_unknown_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_choices(tmp_path, "choices", questions=1, shots=0, words=1)
    few = partial(harness.TaskManager, include_defaults=False)  # the others take long to list
    monkeypatch.setattr(harness, "TaskManager", few)
    with pytest.raises(ValueError, match="the harness has no task 'chioces'"):
        load_tasks(["choices", "chioces"], tmp_path)


def test_presets() -> None:
    assert with_shots(["leaderboard-v1"]) == PRESETS["leaderboard-v1"]
    assert with_shots(["leaderboard-v2", "piqa"]) == {"leaderboard": None, "piqa": None}
    with pytest.raises(ValueError, match="'piqa' is asked for twice"):
        with_shots(["leaderboard-v1", "piqa"])


def test_the_harness_has_the_presets_tasks() -> None:
    folders = ["arc", "hellaswag", "truthfulqa", "mmlu", "winogrande", "openbookqa", "piqa"]
    root = Path(lm_eval.tasks.__path__[0])  # all of it takes long to list
    paths = [str(root / folder) for folder in [*folders, "leaderboard"]]
    manager = harness.TaskManager(include_path=paths, include_defaults=False)
    names = [name for preset in PRESETS.values() for name in preset]
    assert [name for name in names if name not in manager.task_index] == []


def test_the_harness_own_command_line(lm: XLSTM7B, byte_model: Path, tmp_path: Path) -> None:
    add_choices(tmp_path, "choices", questions=3, shots=1, words=3)
    arguments = [
        "--model",
        "xlstm7b",
        "--model_args",
        f"pretrained={byte_model}",
        "--device",
        "cpu",
    ]
    arguments += ["--include_path", tmp_path, "--tasks", "choices", "--batch_size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "xlstm7b.evaluate.harness", *map(str, arguments),
         "--output_path", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(file.read_text())
    ours = run_tasks(lm, load_tasks(["choices"], tmp_path))
    assert theirs["results"]["choices"]["acc,none"] == ours["results"]["choices"]["acc,none"]
    assert theirs["config"]["model"] == "xlstm7b"
