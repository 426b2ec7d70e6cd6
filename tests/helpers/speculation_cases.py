"""Requests whose outputs must be the same with and without drafts."""

import pytest

from xlstm7b.generate import Request, SamplingParams


def many_requests() -> list[Request]:
    """Greedy and sampled, with all that looks at earlier tokens. Each has another prompt."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0, "logit_bias": {5: 4.0}},
        {"temperature": 1.0, "min_new_tokens": 1, "eos_token_id": [*range(100)]},
        {"temperature": 1.0, "eos_token_id": [*range(8)]},
    ]
    requests = []
    for number, kind in enumerate(kinds):
        for tokens in (1, 2, 30):
            params = SamplingParams(max_new_tokens=tokens, seed=number, **kind)
            prompt = [2 + number, tokens, *range(40, 40 + 3 * number)]
            requests.append(Request(prompt, params, keep_state=tokens != 2))
    return requests


def grammar_requests() -> list[Request]:
    """Requests with grammars, and some without."""
    pytest.importorskip("llguidance")
    forms = [
        {"regex": "[a-f]{3,9}"},
        {"regex": "(ab|cd|e[f-h]+i){4}[0-9]*"},
        {"choice": ["the sea", "the sea was", "a ship"]},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        None,
    ]
    requests = []
    for number in range(15):
        params = SamplingParams(
            max_new_tokens=20,
            seed=number,
            temperature=number % 2,
            structured_outputs=forms[number % 5],
            eos_token_id=() if number % 3 == 0 else None,
            frequency_penalty=0.5 if number % 4 == 1 else 0,
        )
        requests.append(Request([7, number], params, keep_state=number % 7 < 4))
    return requests
