"""`xlstm7b serve`: mistakes are reported before weights are read. tests/serve tests the server."""

import os
import re
import socket
from pathlib import Path

import pytest
from commands import Cli, refused

from xlstm7b.cli.serve import read_keys


@pytest.mark.usefixtures("no_weights")
def test_serve_mistakes(
    cli: Cli, speller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*options: object) -> str:
        return refused(cli("serve", speller, *options))

    assert error("--slots", 0) == "--slots must be at least 1, not 0"
    assert error("--max-waiting", 0) == "--max-waiting must be at least 1, not 0"
    assert error("--max-new-tokens", 0) == "--max-new-tokens must be at least 1, not 0"
    assert error("--cache-gb", -1) == "--cache-gb must be at least 0, not -1.0"
    assert error("--drain-seconds", "nan") == "--drain-seconds must be at least 0, not nan"
    assert error("--max-body-mb", 0) == "--max-body-mb must be above 0 and at most 1024, not 0.0"
    assert error("--max-messages", 0) == "--max-messages must be at least 1, not 0"
    assert error("--max-messages", 10**6) == "--max-messages must be at most 65536, not 1000000"
    assert error("--states-gb", 5) == "--states-gb needs --states-folder, which is not given"
    wrong = error("--cache-folder-gb", 20)
    assert wrong == "--cache-folder-gb needs --cache-folder, which is not given"
    wrong = error("--states-folder", tmp_path / "states", "--states-gb", -1)
    assert wrong == "--states-gb must be at least 0, not -1.0"
    assert error("--max-per-client", 0) == "--max-per-client must be at least 1, not 0"
    wrong = error("--states-memory-gb", 20)
    assert wrong == "--states-memory-gb needs --states-folder, which is not given"
    wrong = error("--states-folder", tmp_path / "states", "--states-memory-gb", 1e-9)
    assert re.fullmatch(r"--states-memory-gb must be at least \S+, not 1e-09", wrong)
    assert not (tmp_path / "states").exists()
    for name in ("", " ", "a\nb"):
        wrong = error("--name", name)
        assert wrong == f"--name must be printable and not empty, not {name!r}"
    wrong = error("--mute-paths", "/metrics,health")
    assert wrong == "--mute-paths: a path starts with /, as /health does, not 'health'"
    file = tmp_path / "file"
    file.write_text("")
    for option in ("--states-folder", "--cache-folder"):
        wrong = error("--port", 0, option, file)
        assert wrong == f"{option}: {file} is a file, not a folder"
        wrong = error("--port", 0, option, file / "sub")
        assert wrong == f"{option}: cannot create {file / 'sub'}: Not a directory"
    outcome = cli("serve", speller, "--log-level", "loud")
    assert (outcome.code, "'loud'" in outcome.err, "'debug'" in outcome.err) == (2, True, True)
    must = "an API key must be printable ASCII without spaces, and not empty"
    assert error("--api-key", "a key") == f"--api-key: {must}"
    keys = tmp_path / "keys"
    keys.write_text("\n\n# nobody yet\r\n")
    assert error("--api-key-file", keys) == f"{keys} contains no API key"
    keys.write_text("# ours\nfirst\nsecond key # Alice's\n")
    assert error("--api-key-file", keys) == f"{keys}:3: {must}"
    keys.write_bytes(b"\xff")
    assert error("--api-key-file", keys) == f"{keys} is not UTF-8 text"
    assert error("--cors", "https://a.site/").startswith("'https://a.site/' is not an origin")
    missing = tmp_path / "none"
    message = f"--api-key-file: cannot read {missing}: No such file or directory"
    assert error("--api-key-file", missing) == message
    with monkeypatch.context() as patched:  # root may write everywhere
        patched.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
        message = f"--states-folder: {tmp_path} is not readable and writable"
        assert error("--port", 0, "--states-folder", tmp_path) == message
    assert refused(cli("serve", "7b")).startswith("'7b' is neither a folder nor")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"port {port} is already in use; choose another with --port"
        assert error("--port", port) == message
    assert error("--port", 99999).startswith("cannot listen on 127.0.0.1, port 99999: ")
    assert error("--host", "").startswith("--host must not be empty")  # it would mean 0.0.0.0
    assert error("--host", "no.host.invalid").startswith(
        "cannot listen on no.host.invalid, port 8000: "
    )


@pytest.mark.usefixtures("no_weights")
def test_an_empty_key_is_an_error(cli: Cli, speller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose key variable is set but empty must not run without keys."""
    monkeypatch.setenv("XLSTM7B_API_KEY", "")
    assert refused(cli("serve", speller)).startswith("XLSTM7B_API_KEY: an API key must be")


def test_more_slots_than_memory(cli: Cli, speller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlstm7b.serve.server.log_to_stderr", lambda _: None)  # it would last
    message = refused(cli("serve", speller, "--port", 0, "--slots", 10**10))
    assert message.startswith("10,000,000,000 slots of ")


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    """With a byte order mark, CRLF line ends, comments and spaces."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n# since May\r\n  second#2  # Ada L. \r\n#third\r\n")
    want = {"given": "--api-key 1", "first": "keys:1", "second#2": "Ada L."}
    assert read_keys(["given"], file) == want
    file.write_text("my key # Ada")
    with pytest.raises(ValueError, match="keys:1: an API key must be printable ASCII without"):
        read_keys(None, file)
