"""What the generation benchmark measures on a CPU, and its limits; never a speed."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import write_config
from naive_scoring import save_byte_model

from xlstm7b import accounting
from xlstm7b.bench import cases, generation, speculation, texts
from xlstm7b.bench.cases import Result
from xlstm7b.bench.generation import START_TOKENS, with_limit
from xlstm7b.bench.measure import Timing, plan_model
from xlstm7b.bench.plans import Generation
from xlstm7b.config import ModelConfig
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

SEVEN = ModelConfig.named("7b")
SMALL = Generation.of(
    device="cpu",
    size="tiny",
    batches=[1, 3],
    contexts=[0, 20],
    prompts=[1, 70],
    tokens=64,
    lengths=[64, 32],
    first=3,
    generated=4,
    seconds=0.001,
    peak_tflops=1.0,
    peak_tbs=0.1,
)


def test_every_part_is_complete() -> None:
    results = cases.run(SMALL)
    assert [(r.part, r.work, r.batch, r.length) for r in results] == [
        ("memory", "loaded", 1, 0),
        ("memory", "prompt read", 1, 20),
        ("memory", "4 tokens generated", 1, 20),
        ("decode", "greedy", 1, START_TOKENS),
        ("decode", "temperature 0.8, top_p 0.95", 1, START_TOKENS),
        ("decode", "greedy", 3, START_TOKENS),
        ("context", "greedy", 1, 0),
        ("context", "greedy", 1, 20),
        ("first", "1 token", 1, 1),
        ("first", "3 tokens", 1, 1),
        ("first", "1 token", 1, 70),
        ("first", "3 tokens", 1, 70),
        ("prefill", "", 1, 64),
        ("prefill", "", 2, 32),
    ]
    for result in results:
        assert result.error is None
        assert result.limit is not None
        assert result.percent_of_limit is not None
        if result.part == "memory":
            assert result.memory is not None
            assert result.percent_of_limit == pytest.approx(100 * result.limit / result.memory)
            continue
        assert result.seconds is not None
        assert result.seconds > 0
        if result.part == "first":
            assert result.percent_of_limit == pytest.approx(100 * result.limit / result.seconds)
            continue
        tokens = result.batch * (result.length if result.part == "prefill" else 1)
        assert result.tokens_per_second == pytest.approx(tokens / result.seconds)
        share = 100 * result.tokens_per_second / result.limit
        assert result.percent_of_limit == pytest.approx(share)
    first, second = (r.figures["of_shortest"] for r in results if r.part == "context")
    assert first == 1
    assert second > 0


@pytest.mark.parametrize(("scheme", "gigabytes"), [("int8", 6.66), ("int4", 3.64)])
def test_quantised_weights(scheme: str, gigabytes: float) -> None:
    """Their decoding is measured, and its limit counts the bytes of their codes and scales."""
    results = cases.run(replace(SMALL, quantize=scheme, parts=("decode",)))
    assert not any(result.error for result in results)
    sizes = generation.itemsizes(Generation.of(device="cuda", size="7b", quantize=scheme))
    assert accounting.decode_bytes(SEVEN, 1, **sizes | {"state_itemsize": 0}) == pytest.approx(
        gigabytes * 1e9, rel=0.01
    )


def test_limits_of_the_7b_on_an_h200() -> None:
    peaks = 768e12, 4.27e12
    plan = Generation.of(device="cuda", peak_tflops=768.0, peak_tbs=4.27)
    step = with_limit(Result("decode", batch=1, length=16), plan, 1 / 250)
    assert step.tokens_per_second == 250
    assert step.limit == pytest.approx(4.27e12 / accounting.decode_bytes(SEVEN))
    assert step.limit == pytest.approx(314, rel=0.01)
    assert step.percent_of_limit == pytest.approx(100 * 250 / step.limit)
    moved = accounting.decode_bytes(SEVEN)
    assert step.bytes_per_second == pytest.approx(250 * moved)
    half = replace(plan, state_dtype="bfloat16")
    many = with_limit(Result("decode", batch=256, length=16), half, 1)
    narrow = accounting.decode_bytes(SEVEN, 256, state_itemsize=2)
    assert many.limit == pytest.approx(256 * 4.27e12 / narrow)
    peer = with_limit(Result("decode", "transformers", batch=256, length=16), plan, 1)
    assert peer.limit == many.limit  # its state is in bfloat16, as its weights are
    quantised = replace(plan, quantize="int8")
    assert with_limit(Result("decode", batch=1), quantised, 1).limit > 1.5 * step.limit
    for name in ("transformers", "xlstm"):  # their weights are not quantised
        peer = Result("decode", name, batch=1, length=16)
        assert with_limit(peer, quantised, 1).limit == with_limit(peer, plan, 1).limit

    read = with_limit(Result("prefill", batch=8, length=8192), plan, 1.5)
    least = accounting.least_prefill_seconds(SEVEN, *peaks, 8192, 8)
    assert read.tokens_per_second == pytest.approx(65536 / 1.5)
    assert read.limit == pytest.approx(65536 / least)
    assert read.limit == pytest.approx(59_000, rel=0.02)  # 768 TFLOP/s over 13 GFLOPs a token
    hundred = with_limit(Result("first", batch=1, length=2048), plan, 0.5, decoded=99)
    both = accounting.least_prefill_seconds(SEVEN, *peaks, 2048) + 99 * moved / 4.27e12
    assert hundred.limit == pytest.approx(both)
    assert hundred.tokens_per_second is None

    llama = Result("context", "llama2", "eager", batch=1)
    llama = with_limit(llama, plan, 1 / 100)
    assert (llama.tokens_per_second, llama.limit, llama.percent_of_limit) == (100, None, None)


def test_decoding_with_and_without_replay() -> None:
    results = cases.run(replace(SMALL, parts=("replay",)))
    works = [(r.batch, r.work) for r in results]
    assert works == [(n, f"replay {kind}") for n in (1, 3) for kind in ("off", "on")]
    assert not any(result.error for result in results)
    plan = Generation.of(device="cuda", peak_tflops=768.0, peak_tbs=4.27)
    small = replace(plan, size="160m")
    assert [generation.replay_interval(small, batch) for batch in (64, 128)] == [None, 16]
    interval = generation.replay_interval(plan, 64)
    many = with_limit(Result("replay", batch=64), plan, 1, replay_interval=interval)
    assert many.limit == pytest.approx(12_100, rel=0.01)


def test_speculation_with_forced_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(run: Callable[[int], object], *_: object, **__: object) -> Timing:
        run(60)
        return Timing(0.001, 0.01)

    monkeypatch.setattr(speculation, "measure_steps", run_once)
    plan = replace(SMALL, parts=("speculation",), batches=(2,))
    results = cases.run(plan)
    assert not any(result.error for result in results)
    shares = {r.work: r.figures.get("accepted") for r in results}
    assert [*shares] == [
        "no speculation",
        "p = 0, lengths adapt",
        *(f"p = {share}, up to 15 drafts" for share in ("0", "0.5", "0.8", "1")),
    ]
    assert shares["no speculation"] is None
    assert shares["p = 0, lengths adapt"] == shares["p = 0, up to 15 drafts"] == 0
    assert shares["p = 1, up to 15 drafts"] == 100
    assert 0 < shares["p = 0.5, up to 15 drafts"] < shares["p = 0.8, up to 15 drafts"] < 100
    assert all(r.tokens_per_second == pytest.approx(2000) for r in results)
    with pytest.raises(ValueError, match="speculation needs weights that are not quantised"):
        replace(plan, quantize="int8").check()


def test_speculation_on_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trained model in a folder; here it drafts for itself."""

    def seconds(call: partial[object], *_: object, **__: object) -> float:
        """1 ms for each step of a batch of two."""
        batches = len(call.args[0]) / 2
        assert batches == 2
        return 0.001 * call.keywords["max_new_tokens"] * batches

    monkeypatch.setattr(texts, "measure", seconds)
    monkeypatch.setattr(texts, "_PROMPTS", 3)
    folder = str(save_byte_model(tmp_path / "model"))
    plan = replace(SMALL, parts=("speculation",), batches=(2,), text_tokens=8)
    plan = replace(plan, folder=folder, draft=folder)
    results = [r for r in cases.run(plan) if r.part == "speculation"]
    assert [r.work for r in results] == [
        f"{kind}, {way}"
        for way in ("no speculation", "lookup", "draft model")
        for kind in ("copy", "code", "question", "prose")
    ]
    for result in results:
        assert result.error is None
        assert result.tokens_per_second == pytest.approx(2000)
        assert result.length > 50
        speculates = "no speculation" not in result.work
        assert (result.get("same"), result.get("of_plain")) == (
            (100, pytest.approx(1)) if speculates else (None, None)
        )
        if "draft model" in result.work and "prose" not in result.work:
            assert result.figures["accepted"] == 100
    values = ModelConfig.from_file(Path(folder) / "config.json").to_dict()
    wide, other = (
        str(write_config(tmp_path / name, ModelConfig.from_dict({**values, **changed})))
        for name, changed in (("wide", {"vocab_size": 384}), ("other", {"block": "previous"}))
    )
    short = tmp_path / "short"
    short.write_text("One. Two.")
    for changed, message in (
        ({"folder": None}, "--draft needs --folder and the part speculation"),
        ({"parts": ("decode",)}, "--draft needs --folder and the part speculation"),
        (
            {"folder": None, "draft": None, "text": str(short)},
            "--text needs --folder: its model reads the text",
        ),
        ({"draft": ""}, "the path of a saved model is empty"),
        ({"draft": str(tmp_path)}, "there is no saved model in .*: it has no config.json"),
        ({"draft": wide}, "wide cannot be the draft model: .* a vocabulary of 384 tokens"),
        ({"draft": other}, "other has block = 'previous', which speculation does not support"),
        ({"folder": other, "draft": None}, "other has block = 'previous', which speculation"),
        ({"text": str(short)}, "short has 2 sentences: the texts need 12"),
        ({"text_tokens": 1}, "text_tokens must be at least 2, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(plan, **changed).check()


def test_prompts_of_texts(tmp_path: Path) -> None:
    """Each row of a batch has its own; a file gives other sentences."""
    file = tmp_path / "book.txt"
    file.write_text("".join(f"This is the sentence of the number {n}.\n" for n in range(40)))
    for path in (None, file):
        sentences = texts.read_sentences(path)
        prompts = texts.make_prompts(sentences, 4)
        for kind, rows in prompts.items():
            assert len(set(rows)) == 4
            assert all(row == row.rstrip(" ") for row in rows)
            assert (path is None) or (kind == "code") or ("number 20." in rows[0])
        copied, question = prompts["copy"][0], prompts["question"][0]
        passage, edited, start = copied.split("\n\n")
        assert passage != edited
        assert edited.startswith(start)
        assert question.count("Question: ") == question.count("Answer: ") > 2
        assert question.endswith(f'after "{sentences[0]}"?\nAnswer: "')
        assert prompts["prose"][0] == " ".join(sentences[:2])
    file.write_text("One. Two.")
    with pytest.raises(ValueError, match="has 2 sentences: the texts need 12"):
        texts.read_sentences(file)


def test_drift_of_states(tmp_path: Path) -> None:
    """The loss is that of a pass over the text; in bfloat16 it is near it."""
    folder = save_byte_model(tmp_path / "model")
    model = XLSTM.from_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("The sea was calm. " * 8)
    plan = replace(SMALL, parts=("drift",), folder=str(folder), text=str(text))
    results = [r for r in cases.run(replace(plan, drift_tokens=40)) if r.part == "drift"]
    assert [r.work for r in results] == [
        f"C in {dtype}, replay {kind}"
        for dtype in ("float32", "bfloat16")
        for kind in ("off", "on")
    ]
    assert {(r.batch, r.length) for r in results} == {(3, 40)}
    ids = torch.tensor(ByteTokenizer().encode(text.read_text())[: 3 * 41]).view(3, 41)
    with torch.no_grad():
        want = float(F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten()))
    for result, largest in zip(results, (1e-5, 1e-5, 1e-2, 1e-2), strict=True):
        assert result.figures["loss"] == pytest.approx(want, rel=largest)
    with pytest.raises(ValueError, match="needs --folder and --text"):
        replace(plan, text=None).check()
    with pytest.raises(ValueError, match=r"has 144 tokens: give a longer text or fewer"):
        replace(plan, drift_tokens=144).check()
    replace(plan, drift_tokens=143).check()
    text.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8 text: "):
        plan.check()


def test_a_saved_model_starts(tmp_path: Path) -> None:
    XLSTM(ModelConfig.named("tiny")).save_pretrained(tmp_path)
    results = cases.run(replace(SMALL, parts=(), folder=str(tmp_path)))
    assert [(result.part, result.error) for result in results] == [("start", None)]


def test_a_quantised_model_keeps_no_memory_of_its_first_weights() -> None:
    model = plan_model(replace(SMALL, quantize="int4"))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    padding = 256 * len(list(model.parameters()))
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(storage.nbytes() for storage in storages.values()) <= parameters + padding


def test_weights_are_random_in_their_dtype_and_the_default_stays() -> None:
    model = plan_model(replace(SMALL, dtype="bfloat16"))
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    gates = [p for name, p in model.named_parameters() if name.endswith("gate_preact.weight")]
    assert len(gates) == 3 * SMALL.config.num_blocks
    assert all(gate.abs().sum() > 0 for gate in gates)
    again = plan_model(replace(SMALL, dtype="bfloat16"))
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


# Peers. Theirs is not asked to be fast, only to be called as it wants to be.


def test_an_installed_xlstm_runs_on_a_cpu() -> None:
    """The other peers are tested with the speed experiment."""
    pytest.importorskip("xlstm.xlstm_large.model")
    results = list(generation.run_peer("xlstm", SMALL.to_dict()))
    assert [result for result in results if result.error] == []
    assert all(r.limit is not None for r in results if r.part in ("context", "first", "prefill"))


FAKE = """
import torch

class xLSTMLargeConfig:
    def __init__(self, **fields):
        self.__dict__ |= fields

class xLSTMLarge(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, tokens, state=None):
        if self.config.num_blocks == 4 and tokens.shape[1] == 70:
            raise RuntimeError("too long\\nfor this")
        total = tokens.cumsum(1) + (0 if state is None else state[0])
        if state is None:
            state = {0: total[:, -1:].clone()}
        else:
            state[0].copy_(total[:, -1:])
        return (total[..., None] % 97 * torch.arange(self.config.vocab_size)).cos(), state
"""


def peers_from(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Makes `xlstm` come from this folder."""
    package = folder / "xlstm" / "xlstm_large"
    package.mkdir(parents=True)
    (folder / "xlstm" / "__init__.py").write_text("")
    if text is not None:
        (package / "model.py").write_text(text)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


PEER = replace(SMALL, peers=("xlstm",), only_peers=True)


def test_a_peer_reports_from_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers_from(tmp_path, monkeypatch, FAKE)
    too_long = "RuntimeError: too long for this"
    assert [(r.part, r.length, r.error) for r in cases.run(PEER)] == [
        ("ways", START_TOKENS, None),
        ("check", 0, None),
        ("decode", START_TOKENS, None),
        ("context", 0, None),
        ("context", 20, None),
        ("first", 1, None),
        ("first", 1, None),
        ("first", 70, too_long),
        ("first", 70, too_long),
        ("prefill", 64, None),
        ("prefill", 32, None),
    ]


def test_a_missing_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers_from(tmp_path, monkeypatch, None)
    (result,) = cases.run(PEER)
    reason = "ModuleNotFoundError: No module named 'xlstm.xlstm_large.model'"
    assert result == Result("peer", "xlstm", error=reason)
    assert capsys.readouterr().out.splitlines()[-1].split() == f"xlstm failed: {reason}".split()
