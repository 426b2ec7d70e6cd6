"""The examples, run with a tiny model, and their error messages."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xlstm7b import XLSTM, ModelConfig
from xlstm7b.model.quantizer import quantize_checkpoint
from xlstm7b.quantize.config import Quantization
from xlstm7b.train import load_recipe, make_plan
from xlstm7b.train.sharded_model import first_weights

FILE = Path(__file__).parents[1] / "examples" / "gsm8k.py"
QUESTIONS = [
    ("Tom has 3 pens and buys 2. How many has he?", "3 + 2 = <<3+2=5>>5\n#### 5"),
    ("A farm has 1,500 hens and 75 leave. How many stay?", "1500 - 75 = 1425\n#### 1,425"),
    ("It is 4 degrees and falls by 7. How cold is it?", "4 - 7 = -3\n#### -3"),
]


@pytest.fixture(scope="module")
def gsm8k():
    spec = importlib.util.spec_from_file_location("gsm8k", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A byte-level model, small enough for an example's prompts on a CPU."""
    folder = tmp_path_factory.mktemp("model")
    XLSTM(ModelConfig(64, 2, 2, vocab_size=320)).save_pretrained(folder)
    return str(folder)


def write(path: Path, questions=QUESTIONS) -> str:
    lines = [json.dumps({"question": q, "answer": a}) for q, a in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 2 = 5\n#### 5", "5"),
        ("#### $1,234.50 each", "1234.5"),
        ("#### -$12", "-12"),
        ("#### $-12.0", "-12"),
        ("####42\n\nQuestion: 7 and 8?", "42"),
        ("#### 1,450,000", "1450000"),
        ("#### 12,34", "12"),
        ("#### −3", "-3"),
        ("#### .50", "0.5"),
        ("#### 007", "7"),
        ("#### -0.0", "0"),
        ("#### 100.", "100"),
        ("so it is 9-4", "4"),
        ("the total is 3, 4 and 1,000.", "1000"),
        ("it costs $7.25 or less", "7.25"),
        ("he is left with -6 apples", "-6"),
        ("it is $9-$4", "4"),
        ("the sum is 8\n#### unknown", "8"),
        ("#### 1e400", "1"),
        ("9" * 60, "9" * 60),
        ("nothing to see", None),
        ("####", None),
        ("", None),
    ],
)
def test_gsm8k_finds_answers(gsm8k, text, answer):
    assert gsm8k.find_answer(text) == answer


def test_gsm8k_demonstrations_are_right(gsm8k):
    shown = gsm8k.demonstrations(None, 4)
    assert shown.count("Question: ") == shown.count("\nAnswer: ") == shown.count("\n#### ") == 4
    sums = re.findall(r"([\d*/+ -]+) = \$?(\d+)", shown)
    assert len(sums) == 11
    for left, right in sums:
        assert eval(left) == int(right), left
    # The last sum of each is its answer.
    for _, solution in gsm8k.DEMONSTRATIONS:
        assert find_last(solution.partition("####")[0]) == gsm8k.find_answer(solution)


def find_last(text: str) -> str:
    return re.findall(r"= \$?(\d+)", text)[-1]


def test_gsm8k_prompts(gsm8k, tmp_path):
    path = tmp_path / "train.jsonl"
    write(path)
    [first, second, third] = gsm8k.read_questions(path, None)
    assert [q.answer for q in (first, second, third)] == ["5", "1425", "-3"]
    assert gsm8k.read_questions(path, 2) == [first, second]
    assert gsm8k.demonstrations(path, 2) == (
        "Question: Tom has 3 pens and buys 2. How many has he?\nAnswer: 3 + 2 = 5\n#### 5\n\n"
        "Question: A farm has 1,500 hens and 75 leave. How many stay?\n"
        "Answer: 1500 - 75 = 1425\n#### 1,425"
    )
    assert gsm8k.to_prompt(third) == (
        "\n\nQuestion: It is 4 degrees and falls by 7. How cold is it?\nAnswer:"
    )
    assert not gsm8k.is_done("3 + 2 = 5\n#### 5")
    assert gsm8k.is_done("3 + 2 = 5\n#### 5\n")
    assert gsm8k.is_done("well\n\n")


@pytest.mark.parametrize("method", ["greedy", "best", "vote", "tree"])
def test_gsm8k_runs_through(gsm8k, model, tmp_path, capsys, method):
    path = write(tmp_path / "questions.jsonl")
    options = ["--method", method, "--n", "4", "--max-new-tokens", "8", "--shots", "2"]
    options += ["--depth", "2", "--demonstrations", path, "--device", "cpu", "--batch-size", "2"]
    gsm8k.main([model, path, *options])
    out, err = capsys.readouterr()
    accuracy, generated, prompts = out.splitlines()
    assert accuracy == "accuracy       0.0% (0 of 3)"
    assert "3/3 questions, 0 right" in err
    tokens, samples = re.search(
        r"([\d,]+) tokens in (\d+) samples, [\d,.]+ tok/s", generated
    ).groups()
    read, saved = re.search(r"([\d,]+) tokens read; reuse saved ([\d,]+)$", prompts).groups()
    read, saved = (int(number.replace(",", "")) for number in (read, saved))
    few_shot = 1 + len(gsm8k.demonstrations(Path(path), 2))  # bytes, and the first token
    lengths = [len(gsm8k.to_prompt(q)) for q in gsm8k.read_questions(Path(path), None)]
    assert read == few_shot + sum(lengths)
    if method != "tree":
        each = 1 if method == "greedy" else 4
        assert int(samples) == 3 * each
        assert saved == each * sum(few_shot + length for length in lengths) - read
        assert 0 < int(tokens) <= 8 * 3 * each
    else:
        assert 3 * 2 < int(samples) <= 3 * (2 + 4)
        assert saved > 0


def check_refused(example, arguments: list[str], sentence: str, capsys) -> None:
    """The last line on stderr starts with this pattern. The exit code is that of the commands."""
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main(arguments)
    assert re.match(sentence, capsys.readouterr().err.splitlines()[-1])


def test_gsm8k_counts_right_answers(gsm8k, model, tmp_path, capsys, monkeypatch):
    """With an answer of 5 for everything, every method is right once."""
    path = Path(write(tmp_path / "questions.jsonl"))
    questions = gsm8k.read_questions(path, 2)
    monkeypatch.setattr(gsm8k, "read_questions", lambda *_: questions)
    monkeypatch.setattr(gsm8k, "find_answer", lambda text: "5")
    for method in ("greedy", "best", "vote", "tree"):
        options = ["--method", method, "--n", "2", "--max-new-tokens", "2", "--shots", "1"]
        gsm8k.main([model, str(path), "--device", "cpu", *options])
        assert capsys.readouterr().out.startswith("accuracy       50.0% (1 of 2)")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "No such file"),
        ("", [], "questions.jsonl contains no questions"),
        ("{}\n", [], 'line 1: this is not an object with a "question" and an "answer"'),
        ('\n["a"]\n', [], 'line 2: this is not an object with a "question" and an "answer"'),
        ('{"question": 5, "answer": "#### 5"}', [],
         'line 1: this is not an object with a "question" and an "answer"'),
        ('{"question": "a", "answer": "5 ####"}', [],
         'line 1: the answer has no number after "####"'),
        ("what?\n", [], 'line 1: this is not an object with a "question" and an "answer"'),
        ('{"question": "a", "answer": "5"}', [], 'line 1: the answer has no number after "####"'),
        ('{"question": "a", "answer": "#### 5"}', ["--shots", "9"],
         "the built-in list has 4 demonstrations, not 9"),
        ('{"question": "a", "answer": "#### 5"}', ["--temperature", "-1"],
         "temperature must be 0 or a positive number, not -1.0"),
    ],
)  # fmt: skip
def test_gsm8k_names_mistakes(gsm8k, model, tmp_path, capsys, content, options, message):
    path = tmp_path / "questions.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    arguments = [model, str(path), "--device", "cpu", "--shots", "1", *options]
    check_refused(gsm8k, arguments, f"gsm8k: .*{re.escape(message)}", capsys)


def test_gsm8k_names_the_file_and_the_device(gsm8k, model, tmp_path, capsys):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\xff")
    check_refused(gsm8k, [model, str(path)], rf"gsm8k: {path} is not UTF-8 text: ", capsys)
    device = [model, write(path), "--device", "cuda:99"]
    check_refused(gsm8k, device, "gsm8k: the device 'cuda:99' cannot be used here: ", capsys)


def test_gsm8k_command_line(gsm8k, tmp_path, capsys):
    path = write(tmp_path / "questions.jsonl")
    check_refused(gsm8k, ["nowhere", path], r"gsm8k: 'nowhere' is neither a folder nor", capsys)
    with pytest.raises(SystemExit, match=r"^2$"):
        gsm8k.main(["nowhere", path, "--n", "0"])
    assert "must be at least 1, not 0" in capsys.readouterr().err


def test_adapt_compares_all_ways(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("adapt", FILE.with_name("adapt.py"))
    adapt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapt)
    output = tmp_path / "adapt"
    adapt.main(["--smoke", "--output", str(output)])
    header, *rows = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert header == list(adapt.HEADER)
    assert [row[0] for row in rows] == [
        "base",
        "prompt",
        "state",
        "state, prompt",
        "LoRA, rank 1",
        "full",
    ]
    losses = {row[0]: float(row[1]) for row in rows}
    assert losses["state"] < losses["base"] - 0.05
    assert losses["state, prompt"] < losses["prompt"] - 0.05
    results = json.loads((output / "results.json").read_text())["results"]
    assert [result["parameters"] for result in results][2:4] == [2112, 2112]
    XLSTM(ModelConfig(64, 2, 2, vocab_size=320)).save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "int8", Quantization.named("int8"))
    (tmp_path / "text.txt").write_text("one\n" * 20)
    given = [str(tmp_path / "model"), str(tmp_path / "text.txt")]
    for arguments, sentence in (
        (["--smoke", "--output", str(output)], ".*adapt exists already: choose another"),
        ([*given, "--held-out-documents", "0"], "the held-out text has no token that counts"),
        ([*given, "--steps", "0"], r"run\.steps must be greater than or equal to 1"),
        ([], "give a model and a text, or --smoke"),
        ([given[0], "nowhere"], ".*No such file or directory: 'nowhere'"),
        ([str(tmp_path / "int8"), given[1]], ".*int8 has quantised weights, and the last row"),
    ):
        check_refused(adapt, arguments, f"adapt: {sentence}", capsys)


@pytest.mark.parametrize("path", sorted(FILE.parent.glob("*.toml")), ids=lambda path: path.name)
def test_recipes_of_the_examples_fit_on_their_gpus(path):
    recipe = load_recipe(str(path))
    assert recipe.name == path.stem
    plan = make_plan(recipe, gpus=8 if recipe.init_from else 1)
    assert plan.memory["total"] < 80e9


def test_fine_tuning_accepts_other_special_tokens_but_no_other_constants(tmp_path):
    """The released model's config has eos_token_id 2; its weights can still be used."""
    config = ModelConfig(64, 2, 2, vocab_size=320, eos_token_id=2, bos_token_id=0)
    XLSTM(config).save_pretrained(tmp_path)
    settings = [
        f"init_from={tmp_path}",
        "model={embedding_dim=64,num_blocks=2,num_heads=2,vocab_size=320}",
    ]
    recipe = load_recipe(str(FILE.parent / "finetune-7b.toml"), settings)
    names = [name for name, _ in first_weights(recipe, str(tmp_path), torch.device("cpu"))]
    assert sorted(names) == sorted(config.parameter_shapes())
    other = replace(recipe, model=replace(recipe.model, gate_soft_cap=10.0))
    with pytest.raises(ValueError, match=r"has gate_soft_cap 15\.0, the recipe 10\.0"):
        next(first_weights(other, str(tmp_path), torch.device("cpu")))
