"""serve: mistakes that are told before weights are read. What it does is in tests/serve."""

import os
import socket
from pathlib import Path

import pytest
from cli.commands import Cli, refused

from xlstm7b.cli.serve import _keys


@pytest.mark.usefixtures("no_weights")
def test_serve_mistakes(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sentence(*options: object) -> str:
        return refused(cli("serve", speller, *options))

    assert sentence("--slots", 0) == "--slots must be at least 1, not 0"
    assert sentence("--max-waiting", 0) == "--max-waiting must be at least 1, not 0"
    assert sentence("--max-new-tokens", 0) == "--max-new-tokens must be at least 1, not 0"
    assert sentence("--cache-gb", -1) == "--cache-gb must not be negative, not -1.0"
    assert sentence("--drain-seconds", "nan") == "--drain-seconds must not be negative, not nan"
    assert sentence("--states-folder", "no") == "there is no folder no"
    assert sentence("--cache-folder", "no") == "there is no folder no"
    must = "an API key must be printable ASCII without spaces, and not empty"
    assert sentence("--api-key", "a key") == f"--api-key: {must}"
    keys = tmp_path / "keys"
    keys.write_text("\n\n# nobody yet\r\n")
    assert sentence("--api-key-file", keys) == f"{keys} holds no key"
    keys.write_text("# ours\nfirst\nsecond # Alice's\n")
    assert sentence("--api-key-file", keys) == f"{keys}:3: {must}"
    keys.write_bytes(b"\xff")
    assert sentence("--api-key-file", keys) == f"{keys} is no text in UTF-8"
    assert sentence("--cors", "https://a.site/").startswith("'https://a.site/' is not an origin")
    assert "No such file" in sentence("--api-key-file", tmp_path / "none")
    with monkeypatch.context() as patched:  # whoever runs the tests may write everywhere
        patched.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
        assert sentence("--states-folder", tmp_path) == f"{tmp_path} cannot be read and written"
    assert refused(cli("serve", "7b")).startswith("there is no folder '7b'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = sentence("--port", port)
        assert told.startswith(f"127.0.0.1:{port} cannot be served at: ")
    assert sentence("--port", 99999).startswith("127.0.0.1:99999 cannot be served at: ")
    assert sentence("--host", "no.host.invalid").startswith("no.host.invalid:8000 cannot be")


@pytest.mark.usefixtures("no_weights")
def test_an_empty_key_is_no_key(cli: Cli, speller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing must not leave the door open."""
    monkeypatch.setenv("XLSTM7B_API_KEY", "")
    assert refused(cli("serve", speller)).startswith("XLSTM7B_API_KEY: an API key must be")


def test_more_slots_than_memory(cli: Cli, speller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlstm7b.serve.logs.log_to_stderr", lambda: None)  # it is for all tests
    told = refused(cli("serve", speller, "--port", 0, "--slots", 10**10))
    assert told.startswith("10,000,000,000 slots of ")


def test_a_file_of_keys(tmp_path: Path) -> None:
    """As other systems' editors write it."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n# since May\r\n  second \r\n#third\r\n")
    assert _keys(["given"], file) == ["given", "first", "second"]
