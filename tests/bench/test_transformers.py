"""`bench transformers`: rows of the optimized model and of its peers."""

import pytest

from xlstm7b.bench import cases
from xlstm7b.bench.plans import Transformers


def test_generate_and_training_with_and_without_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    # In this process: starting others takes longer than all the work.
    here = lambda row, function, timeout, **arguments: function(**arguments)  # noqa: E731
    monkeypatch.setattr("xlstm7b.bench.transformers.in_process", here)
    plan = Transformers.of(device="cpu", seconds=0.05, steps=1, peers=["transformers"])
    results = cases.run(plan)
    assert [(result.part, result.name) for result in results] == [
        ("generate", "ours"),
        ("generate", "transformers"),
        ("training", "ours"),
        ("training", "transformers"),
    ]
    for ours, theirs in (results[:2], results[2:]):
        assert ours.error is theirs.error is None
        assert ours.tokens_per_second > 0
        assert theirs.ratio == pytest.approx(theirs.seconds / ours.seconds)


def test_mistakes_are_one_sentence_before_any_work() -> None:
    with pytest.raises(ValueError, match="unknown peer 'vllm'; choose from transformers, xlstm"):
        cases.run(Transformers.of(device="cpu", peers=["vllm"]))
    with pytest.raises(ValueError, match="a case is SIZE:BATCHxLENGTH or"):
        cases.run(Transformers.of(device="cpu", cases=["400m"]))
    for option in ("quantize", "state_dtype"):  # transformers has neither
        with pytest.raises(TypeError, match=option):
            Transformers.of(device="cpu", **{option: "int8"})
