"""The prefix cache keeps clients apart: by API key, and by the salt of a request."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import error_of, serving

from xlstm7b.generate import Generator
from xlstm7b.serve.middleware import ApiKeys

TEXT = "A long story, please. " * 10
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/states": {"prompt": TEXT},
}


def asking(live: Any, path: str) -> Callable[..., bool]:
    """A function that sends the same body again, and says whether some of it was cached."""

    def is_cached(key: str = "", **more: Any) -> bool:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = live.client.post(path, json=BODIES[path] | more, headers=headers)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return bool(details["cached_tokens"])

    return is_cached


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_each_key_has_its_own_prefixes(
    generator: Generator, tmp_path: Path, path: str, is_shared: bool
) -> None:
    options = {"keys": ("one-key", "another-key"), "share_prefix_cache": is_shared}
    with serving(generator, states=tmp_path, **options) as live:
        is_cached = asking(live, path)
        assert not is_cached("one-key")
        assert is_cached("one-key")
        assert is_cached("another-key") == is_shared
        assert is_cached("another-key")


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/states"])
@pytest.mark.parametrize("keys", [(), ("one-key", "another-key")])
def test_a_request_may_have_a_salt(generator: Generator, path: str, keys: tuple[str, ...]) -> None:
    with serving(generator, keys=keys) as live:
        is_cached = asking(live, path)
        for salt in ({}, {"cache_salt": "é"}, {"cache_salt": "another"}):
            assert not is_cached(**salt)
            assert is_cached(**salt)
        assert is_cached(cache_salt=None)
        if keys:
            assert not is_cached("another-key", cache_salt="another")
        for wrong in ("", "\ud800", 5):
            content = json.dumps(BODIES[path] | {"cache_salt": wrong})
            headers = {"content-type": "application/json"}
            answer = live.client.post(path, content=content, headers=headers)
            assert (answer.status_code, error_of(answer)["param"]) == (400, "cache_salt")


def test_salts_of_keys() -> None:
    names = {"one-key": "A", "another-key": "B"}
    keys = ApiKeys(names)
    salts = [keys.cache_salt(key) for key in names]
    assert len({*salts}) == 2
    assert all(len(salt) == 32 for salt in salts)  # a hash: the key cannot be read from it
    assert [ApiKeys(names).cache_salt(key) for key in names] == salts  # after a restart, too
    assert ApiKeys(names, share_prefix_cache=True).cache_salt("one-key") == b""
    assert ApiKeys({"one-key": "A"}).cache_salt("one-key") == ApiKeys().cache_salt("") == b""
    keys.replace({"one-key": "A"})
    assert keys.cache_salt("one-key") == b""
