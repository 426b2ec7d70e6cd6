"""Ray Data: files in parts, two workers, one of which is killed, and runs that are continued."""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from models import random_model

from xlstm7b import Generator, ModelConfig
from xlstm7b.integrations.ray import Work, Worker, _plan, _read, process_files
from xlstm7b.tokenizer import ByteTokenizer

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-vllm has it"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_with_ray.py"
GREEDY = {"max_new_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    random_model(ModelConfig(64, 2, 2, vocab_size=320), torch.float32).save_pretrained(folder)
    return str(folder)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def two_files(folder):
    first = [{"id": n, "prompt": "ab" * n, "prefix": "Shared. " * (n % 2)} for n in range(1, 14)]
    second = [{"id": n, "prompt": f"Line {n}"} for n in range(14, 31)]
    return [write(folder / "a.jsonl", first), write(folder / "b.jsonl", second)], first + second


def read_all(paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_parts_are_all_lines_once_and_in_order(tmp_path):
    files, lines = two_files(tmp_path)
    for size in (1, 4, 13, 17, 100):
        parts, _ = _plan(files, size)
        assert [line for part in parts for line in _read(part)] == lines
        names = [part.name for part in parts]
        assert names == sorted(set(names))
        assert max(part.lines for part in parts) <= size


def test_a_worker_generates_what_a_generator_does_and_reads_a_prefix_once(tmp_path, model):
    _, lines = two_files(tmp_path)
    worker = Worker(Work(model, sampling=GREEDY, device="cpu"), str(tmp_path))
    read, reads = worker.generator.read, []
    worker.generator.read = lambda prompts: reads.append(prompts) or read(prompts)
    results = worker.generate(lines)
    assert reads == [["Shared. "]]
    prompts = [line.get("prefix", "") + line["prompt"] for line in lines]
    generator = Generator.from_pretrained(model, device="cpu")
    want = [completion.text for completion in generator.generate(prompts, **GREEDY)]
    assert [result["text"] for result in results] == want


def test_scores_are_the_models_log_probabilities(tmp_path, model):
    _, lines = two_files(tmp_path)
    lines.append({"prompt": "", "prefix": "Shared. "})
    worker = Worker(Work(model, score=True, batch_size=4, device="cpu"), str(tmp_path))
    for line, result in zip(lines, worker.score(lines), strict=True):
        before = [0, *ByteTokenizer().encode(line.get("prefix", ""))]
        text = ByteTokenizer().encode(line["prompt"])
        tokens = torch.tensor([[*before, *text]])
        with torch.no_grad():
            logits, _ = worker.generator.model(tokens)
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        want = float(logprobs[len(before) - 1 :].sum())
        assert result == {"logprob": pytest.approx(want, abs=1e-4), "prompt_tokens": len(text)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', r"line 2 must be a JSON object such as"),
        ("[1]\n", "line 1 must be a JSON object"),
        ("{\n", "line 1 is not JSON"),
        ('{"prompt": "\\ud800"}\n', "line 1 is not JSON: .* surrogates not allowed"),
        ('{"prompt": "a", "text": "b"}\n', "'text' is a field of the result"),
        ('{"prompt": "a", "prefix": 1}\n', "the prefix must be a string, not 1"),
        ("", "the files hold no lines"),
    ],
)
def test_a_bad_file_is_named_before_anything_is_done(tmp_path, content, message):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        _plan([path], 2)


class OneProcess:
    """As much of `ray.data` as `process_files` calls. Its worker runs in another folder."""

    ActorPoolStrategy = dict

    def __init__(self, folder):
        self.folder = folder

    def from_items(self, items, **_):
        self.items = items
        return self

    def map(self, worker, *, fn_constructor_args, **_):
        self.make_worker = lambda: worker(*fn_constructor_args)
        return self

    def iter_rows(self):
        with contextlib.chdir(self.folder):
            return [*map(self.make_worker(), self.items)]


def test_paths_may_be_relative(tmp_path, model, monkeypatch):
    files, lines = two_files(tmp_path)
    ray = types.ModuleType("ray")
    ray.data = OneProcess(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    monkeypatch.chdir(Path(model).parent)
    work = Work(Path(model).name, sampling=GREEDY, device="cpu")
    written = process_files(files, "out", work, lines_per_part=7)
    assert [line["id"] for line in read_all(written)] == [line["id"] for line in lines]


def workers_of_this_process():
    """Ids of the processes that run `Worker` for a Ray that this process has started."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")")[1].split()[1])
            if b"MapWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue

    def is_ours(process):
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    return [process for process in found if is_ours(process)]


@needs_ray
def test_output_is_complete_and_single_when_a_worker_is_killed(tmp_path, model):
    import ray

    files, lines = two_files(tmp_path)
    output = tmp_path / "out"
    killed = []

    def kill_one():
        while not killed:
            time.sleep(0.02)
            if len([*output.glob("*.jsonl")]) >= 2 and len(workers_of_this_process()) == 2:
                killed.append(workers_of_this_process()[0])
                os.kill(killed[0], signal.SIGKILL)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        threading.Thread(target=kill_one, daemon=True).start()
        work = Work(model, sampling=GREEDY | {"max_new_tokens": 200}, device="cpu")
        written = process_files(files, output, work, workers=2, lines_per_part=1)
        assert killed
        got = read_all(written)
        assert [line["id"] for line in got] == [line["id"] for line in lines]
        assert sorted(output.glob("*")) == sorted([*written, output / "run.json"])
        # A second run has only the missing parts to do, and gives the same results.
        kept = written[0].stat().st_mtime_ns
        written[3].unlink()
        assert read_all(process_files(files, output, work, lines_per_part=1)) == got
        assert written[0].stat().st_mtime_ns == kept
        with pytest.raises(ValueError, match="results of another input, model or options"):
            process_files(files[:1], output, work, lines_per_part=1)
    finally:
        ray.shutdown()


def test_the_example_names_a_bad_line(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("generate_with_ray", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    path = write(tmp_path / "in.jsonl", [{"question": "?"}])
    with pytest.raises(SystemExit, match="2"):
        example.main(["model", str(tmp_path / "out"), str(path)])
    assert "line 1 must be a JSON object" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
