"""The model as the harness calls it, compared with a naive computation token by token."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import random_adapter
from commands import save_chat_model
from harness_tasks import add_answered, add_choices, add_last_words, add_whole
from naive_scoring import naive_score

from xlstm7b.evaluate import prefix_tree
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

import lm_eval.tasks
from lm_eval.api.instance import Instance

from xlstm7b.evaluate import harness
from xlstm7b.evaluate.harness import (
    PRESETS,
    XLSTM7B,
    KeptResponses,
    expand_presets,
    load_tasks,
    run_tasks,
    sampling_options,
    write_samples,
)


@pytest.fixture(scope="module")
def lm(byte_model: Path) -> XLSTM7B:
    return XLSTM7B(str(byte_model), device="cpu", batch_size=8)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def naive(lm: XLSTM7B, context: str, continuation: str) -> tuple[float, bool]:
    encode = ByteTokenizer().encode
    return naive_score(lm.scorer.model, encode(context), encode(continuation))


def test_the_end_of_text_of_an_adapter(tmp_path: Path) -> None:
    base = save_chat_model(tmp_path / "base", repeats=True)
    adapter = random_adapter(tmp_path / "adapter", base, std=0.0)
    for expected in ("Hi!\nHi!\n", "Hi!"):
        lm = XLSTM7B(str(base), device="cpu", batch_size=1, adapter=str(adapter))
        request = instances("generate_until", ("\n", {"until": [], "max_gen_toks": 10}))
        assert lm.generate_until(request, disable_tqdm=True) == [expected]
        (adapter / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')


def test_choices_score_as_computed_naively(lm: XLSTM7B, tmp_path: Path) -> None:
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
    """Five examples, the same for every question, and four answers."""
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
        ratio = counts[1] / counts[0]
        print(f"\n  tokens read: {counts[0]:,} grouped, {counts[1]:,} not, {ratio:.1f} times more")
    assert counts[1] > 10 * counts[0]
    grouped, alone = ([logprob for logprob, _ in each] for each in scores)
    assert grouped == pytest.approx(alone, abs=1e-4)
    assert [greedy for _, greedy in scores[0]] == [greedy for _, greedy in scores[1]]


def check_last_words(lm: XLSTM7B, folder: Path, texts: list[str]) -> None:
    add_last_words(folder, "words", texts)
    results = run_tasks(lm, load_tasks(["words"], folder))["results"]["words"]
    wanted = [naive(lm, head, f" {tail}") for head, _, tail in (t.rpartition(" ") for t in texts)]
    mean = sum(logprob for logprob, _ in wanted) / len(texts)
    assert results["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert results["acc,none"] == sum(greedy for _, greedy in wanted) / len(texts)


def test_last_words_score_as_computed_naively(lm: XLSTM7B, tmp_path: Path) -> None:
    check_last_words(lm, tmp_path, ["the sea was very calm", "a ship came by", "nobody saw it go"])


@pytest.mark.skipif("XLSTM7B_LAMBADA" not in os.environ, reason="XLSTM7B_LAMBADA names no folder")
def test_lambada_scores_as_computed_naively(lm: XLSTM7B, tmp_path: Path) -> None:
    lines = (Path(os.environ["XLSTM7B_LAMBADA"]) / "test.jsonl").read_text().splitlines()
    check_last_words(lm, tmp_path, [json.loads(line)["text"] for line in lines[:8]])


def test_a_model_without_a_first_token_is_given_the_first_one(
    lm: XLSTM7B, byte_model: Path, tmp_path: Path
) -> None:
    without = tmp_path / "without"
    shutil.copytree(byte_model, without)
    config = json.loads((without / "config.json").read_text())
    changed = {**config, "bos_token_id": None, "force_bos_token_insert": False, "eos_token_id": 5}
    (without / "config.json").write_text(json.dumps(changed))
    other = XLSTM7B(str(without), device="cpu", batch_size=8)
    ids = torch.tensor([ByteTokenizer().encode("the sea")])
    with torch.no_grad():
        logprobs, _ = lm.scorer.model.token_logprobs(ids[:, :-1], ids[:, 1:])
    rolling = instances("loglikelihood_rolling", ("the sea",))
    (found,) = other.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert found == pytest.approx(logprobs.sum().item(), abs=1e-4)
    assert (other.prefix_token_id, other.eot_token_id) == (5, 5)


def test_trailing_spaces_belong_to_the_continuation(lm: XLSTM7B) -> None:
    found = lm.loglikelihood(
        instances("loglikelihood", ("ab  ", "cd"), ("", "cd")), disable_tqdm=True
    )
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
def generate_naively(model: XLSTM, prompt: str, max_new_tokens: int, stop: str) -> str:
    tokenizer, ids = ByteTokenizer(), [0, *ByteTokenizer().encode(prompt)]
    text = ""
    for _ in range(max_new_tokens):
        logits, _ = model(torch.tensor([ids]), logits="last")
        ids.append(int(logits[0].argmax()))
        text = tokenizer.decode(ids)[len(prompt) :]
        if ids[-1] == 0 or stop in text:
            break
    return text.partition(stop)[0]


def test_generation_stops_at_a_stop_string(lm: XLSTM7B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MIN_SAVED_TOKENS", 64)
    shots = "one two three four five six seven eight nine ten "
    prompts = [shots, shots + "x", shots + "yz", "alone", "lonely", "alone"]
    model = lm.scorer.model
    first = generate_naively(model, "alone", 8, "\0")
    assert len(first) > 2
    stop = first[2]
    greedy = {"until": [stop, ""], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    found = lm.generate_until(
        instances("generate_until", *((prompt, greedy) for prompt in prompts)), disable_tqdm=True
    )
    assert found == [generate_naively(model, prompt, 8, stop) for prompt in prompts]
    sampled = {"until": "\0", "max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    both = [
        lm.generate_until(instances("generate_until", *[("alone", sampled)] * 3), disable_tqdm=True)
        for _ in range(2)
    ]
    assert both[0] == both[1]
    assert len(set(both[0])) == 3


def test_generation_kwargs_become_sampling_options() -> None:
    greedy = {"temperature": 0.0, "seed": 3, "stop_strings": ()}
    assert sampling_options({}, 3) == greedy
    assert sampling_options({"do_sample": False, "temperature": 0.7, "num_beams": 1}, 3) == greedy
    assert sampling_options({"do_sample": True}, 3) == {**greedy, "temperature": 1.0}
    given = {"until": ["\n", ""], "max_gen_toks": 6, "max_tokens": 7, "top_p": 0.9}
    wanted = {**greedy, "stop_strings": ("\n",), "max_new_tokens": 6, "top_p": 0.9}
    assert sampling_options(given, 3) == wanted


def test_generated_answers_are_matched(lm: XLSTM7B, tmp_path: Path) -> None:
    right = generate_naively(lm.scorer.model, "alone", 6, "\n")
    add_answered(tmp_path, "answered", {"alone": right, "lonely": "no"})
    results = run_tasks(lm, load_tasks([], tmp_path))
    assert results["results"]["answered"]["exact_match,none"] == 0.5


def test_the_chat_template_is_applied(byte_model: Path, tmp_path: Path) -> None:
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


def test_constructor_arguments(byte_model: Path) -> None:
    small = XLSTM7B(str(byte_model), device="cpu", dtype="bfloat16", max_batch_size=3)
    assert (small.scorer.batch_size, small.generator.batch_size) == (3, 3)
    assert small.scorer.model.lm_head.weight.dtype == torch.bfloat16
    if not torch.cuda.is_available():
        fallen = XLSTM7B(str(byte_model), device="cuda:0", batch_size=2)  # the harness's default
        assert fallen.device == torch.device("cpu")
        assert fallen.scorer.model.lm_head.weight.dtype == torch.float32


def test_a_question_is_not_an_example_for_itself(tmp_path: Path) -> None:
    add_choices(tmp_path, "same", questions=3, shots=5, words=1)
    (task,) = load_tasks(["same"], tmp_path, num_fewshot=4)
    assert task.config.num_fewshot == 4
    file = tmp_path / "same.yaml"
    file.write_text(file.read_text().replace("fewshot_split: dev", "fewshot_split: test"))
    (task,) = load_tasks(["same"], tmp_path, num_fewshot=2)
    task.build_all_requests()
    with pytest.raises(ValueError, match="num_fewshot is 3, but the task 'same' has 2 examples"):
        load_tasks(["same"], tmp_path, num_fewshot=3)


def test_plain_sampling_may_be_called_a_beam_search(tmp_path: Path) -> None:
    add_answered(tmp_path, "answered", {"a": "b"})
    file = tmp_path / "answered.yaml"
    file.write_text(file.read_text().replace("do_sample: false", "num_beams: 1"))
    assert len(load_tasks(["answered"], tmp_path)) == 1


def test_presets_become_tasks() -> None:
    assert expand_presets(["leaderboard-v1"]) == PRESETS["leaderboard-v1"]
    assert expand_presets(["leaderboard-v2", "piqa"]) == {"leaderboard": None, "piqa": None}


def test_the_harness_has_the_presets_tasks() -> None:
    folders = ["arc", "hellaswag", "truthfulqa", "mmlu", "winogrande", "openbookqa", "piqa"]
    root = Path(lm_eval.tasks.__path__[0])  # listing everything takes long
    paths = [str(root / folder) for folder in [*folders, "leaderboard"]]
    manager = harness.TaskManager(include_path=paths, include_defaults=False)
    names = [name for preset in PRESETS.values() for name in preset]
    assert [name for name in names if name not in manager.task_index] == []


# `python -m xlstm7b.evaluate.harness`, without listing all tasks of the harness: that takes long.
_HARNESS = """
import functools, runpy, lm_eval.tasks
few = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
lm_eval.tasks.TaskManager = few
runpy.run_module("xlstm7b.evaluate.harness", run_name="__main__", alter_sys=True)
"""


def test_the_harness_command_line_gives_the_same_results(
    lm: XLSTM7B, byte_model: Path, tmp_path: Path
) -> None:
    add_choices(tmp_path, "choices", questions=3, shots=1, words=3)
    options = {
        "model": "xlstm7b",
        "model_args": f"pretrained={byte_model}",
        "device": "cpu",
        "include_path": tmp_path,
        "tasks": "choices",
        "batch_size": 2,
        "output_path": tmp_path / "out",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-c", _HARNESS, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(file.read_text())
    ours = run_tasks(lm, load_tasks(["choices"], tmp_path))
    assert theirs["results"]["choices"]["acc,none"] == ours["results"]["choices"]["acc,none"]
    assert theirs["config"]["model"] == "xlstm7b"


_GROUP = "group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc}]\n"


def test_finished_tasks_of_a_group_are_not_run_again(lm: XLSTM7B, tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_choices(tmp_path, name, questions=3, shots=1, words=3)
    add_whole(tmp_path, "whole", ["a text", "another"])
    (tmp_path / "both.yaml").write_text(_GROUP)
    expected = run_tasks(lm, load_tasks(["both", "whole"], tmp_path))
    path = tmp_path / "kept"
    found = run_tasks(lm, load_tasks(["both", "whole"], tmp_path), kept=KeptResponses(path, {}))
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for end in range(len(lines) + 1):
        path.write_bytes(b"".join(lines[:end]) + b'["half')
        before = lm.scorer.tokens_processed
        kept = KeptResponses(path, {})
        again = run_tasks(lm, load_tasks(["both", "whole"], tmp_path), kept=kept)
        for each in (found, again):
            assert each["results"] == expected["results"]
            assert each["groups"] == expected["groups"]
        assert (lm.scorer.tokens_processed == before) == (end == len(lines))
        assert path.read_bytes() == b"".join(lines)
    kept.remove()
    assert not path.exists()


def test_other_settings_and_questions_do_not_use_responses(lm: XLSTM7B, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    add_choices(tmp_path, "one", questions=2, shots=1, words=3)

    def lines_after(model: str, shots: int = 1, limit: int | None = None) -> int:
        kept = KeptResponses(path, {"model": model})
        run_tasks(lm, load_tasks(["one"], tmp_path, shots), limit=limit, kept=kept)
        return len(path.read_bytes().splitlines())

    assert lines_after("a") == lines_after("a") == 1
    assert lines_after("b") == 2
    assert lines_after("a", shots=2) == 3
    assert lines_after("a", limit=1) == 4
    assert lines_after("a") == 4
    kept = KeptResponses(path, {"model": "a"})
    run_tasks(lm, load_tasks(["one"], tmp_path, 1), kept=kept)
    kept.remove()
    assert path.exists()  # it has more than this run needs


def test_samples_are_written_as_lm_eval_writes_them(lm: XLSTM7B, tmp_path: Path) -> None:
    from lm_eval.loggers import EvaluationTracker

    add_choices(tmp_path, "choices", questions=2, shots=1, words=3)
    add_answered(tmp_path, "answered", {"alone": "nö", "lonely": "no"})
    found = run_tasks(lm, load_tasks(["choices", "answered"], tmp_path), log_samples=True)
    write_samples(tmp_path / "mine.json", found["samples"])
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs" / "out.json"))
    tracker.date_id = "mine"
    for task, samples in found["samples"].items():
        tracker.save_results_samples(task, samples)
        name = f"samples_{task}_mine.jsonl"
        theirs = (tmp_path / "theirs" / name).read_text().splitlines()
        ours = (tmp_path / name).read_text().splitlines()
        assert list(map(json.loads, ours)) == list(map(json.loads, theirs))
        assert len(ours) == 2
