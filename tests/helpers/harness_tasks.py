"""Small tasks for the harness: a YAML file, and its questions in a JSON file beside it."""

import json
import random
from functools import cache
from pathlib import Path

from torch.utils.collect_env import get_pretty_env_info

# lm_eval adds it to the results of each call. It starts pip and other programs, so once is enough.
machine_info = cache(get_pretty_env_info)

_CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.json, dev: {folder}/{name}_dev.json}}}}
test_split: test
fewshot_split: dev
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
_LAST_WORD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1] | join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""
_ANSWERED = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
_WHOLE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def add_choices(folder: Path, name: str, *, questions: int, shots: int, words: int) -> None:
    """Questions of random words, with four answers and the same few-shot examples (at most 5)."""
    draw = random.Random(name)

    def drawn(count: int) -> str:
        return " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(count))

    def question() -> dict[str, object]:
        return {"question": drawn(words), "choices": [drawn(2) for _ in range(4)], "answer": 1}

    (folder / f"{name}.json").write_text(json.dumps([question() for _ in range(questions)]))
    (folder / f"{name}_dev.json").write_text(json.dumps([question() for _ in range(5)]))
    _write(folder, name, _CHOICE, shots=shots)


def add_last_words(folder: Path, name: str, texts: list[str]) -> None:
    """A task like LAMBADA: the last word of each text."""
    _add_lines(folder, name, [{"text": text} for text in texts])
    _write(folder, name, _LAST_WORD)


def add_answered(folder: Path, name: str, answers: dict[str, str]) -> None:
    """A generation task: prompts and their right answers."""
    _add_lines(folder, name, [{"text": text, "answer": answer} for text, answer in answers.items()])
    _write(folder, name, _ANSWERED)


def add_whole(folder: Path, name: str, texts: list[str]) -> None:
    """A task that scores whole texts."""
    _add_lines(folder, name, [{"text": text} for text in texts])
    _write(folder, name, _WHOLE)


def _add_lines(folder: Path, name: str, records: list[dict[str, str]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines)


def _write(folder: Path, name: str, form: str, **values: object) -> None:
    (folder / f"{name}.yaml").write_text(form.format(name=name, folder=folder, **values))
