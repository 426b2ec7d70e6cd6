"""`lm_eval --model local-completions` through the server gives the model's own numbers."""

from pathlib import Path

import pytest
from commands import save_chat_model
from live_server import serving

from xlstm7b.generate import Generator

PAIRS = [("Hello", " world"), ("Hello", " wörld"), ("", "Hi!"), ("A b\nH", "i!"), ("A b\nH", "ix")]


def test_loglikelihoods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lm_eval", "tenacity"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import PreTrainedTokenizerFast

    folder = save_chat_model(tmp_path / "model")
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    ).save_pretrained(tmp_path / "tokenizer")
    generator = Generator.from_pretrained(folder, device="cpu")
    with serving(generator) as live:
        lm = LocalCompletionsAPI(
            model="tiny",
            base_url=f"{live.url}/v1/completions",
            tokenizer=str(tmp_path / "tokenizer"),
            num_concurrent=1,
            batch_size=2,
        )
        instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
        got = lm.loglikelihood(instances)
        until = Instance("generate_until", {}, ("\n", {"until": ["!"], "max_gen_toks": 9}), 0)
        assert lm.generate_until([until]) == ["Hi"]
    for (context, continuation), (logprob, _) in zip(PAIRS, got, strict=True):
        before = [0, *generator.tokenizer.encode(context)]
        ids = generator.tokenizer.encode(continuation)
        want = 0.0
        for position, token in enumerate(ids):
            table = generator.read([[*before, *ids[:position]]]).logits[0].log_softmax(-1)
            want += float(table[token])
        assert logprob == pytest.approx(want, abs=1e-3)
    # The model writes "\nHi!"; after other texts all tokens are equally likely.
    assert [is_greedy for _, is_greedy in got[3:]] == [True, False]
