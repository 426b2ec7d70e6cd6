"""`download` and `push`, and commands that take names of the hub."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from adapters import random_adapter
from checkpoint_files import contents, save_small
from commands import Cli, environment, refused, save_chat_model, succeeded
from hub_stand_in import TOKEN, HubStandIn, Repository, standing_in

from xlstm7b import hub

# Runs commands one after the other; what they print is on one line each, as JSON.
SCRIPT = """if True:
    import contextlib
    import io
    import json
    import sys
    from xlstm7b.cli import main

    for words in json.loads(sys.argv[1]):
        sys.argv, out = ["xlstm7b", *words], io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                main()
        except SystemExit as end:
            assert not end.code, words
        print(json.dumps(out.getvalue()))
"""


def run(server: HubStandIn, home: Path, *commands: list[object], **more: str) -> list[str]:
    """Runs the commands in one new process."""
    server.requests.clear()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([[*map(str, words)] for words in commands])],
        env=environment() | server.environment(home, TOKEN) | more,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_names_of_the_hub_are_taken_offline_after_a_download(cli: Cli, tmp_path: Path) -> None:
    chat = save_chat_model(tmp_path / "chat")
    adapter = random_adapter(tmp_path / "adapter", chat, std=0.5)
    bare = tmp_path / "bare"
    shutil.copytree(chat, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    options = ["\n", "--max-new-tokens", 3, "--temperature", 0]
    plain = succeeded(cli("generate", chat, *options))
    adapted = succeeded(cli("generate", chat, *options, "--adapter", adapter))
    assert "Hi!" in plain
    assert plain != adapted
    with standing_in() as server:
        server.repositories["some/chat"] = repository = Repository()
        tokenizer = contents(chat).keys() - contents(bare).keys()
        shared = {name: contents(chat)[name] for name in tokenizer}
        files = {f"step-9/{name}": data for name, data in contents(bare).items()}
        files |= {f"lora/{name}": data for name, data in contents(adapter).items()}
        repository.commit(shared | files, "v1")
        names = ["some/chat@v1/step-9", "some/chat@v1/lora"]
        printed = run(server, tmp_path / "home", *(["download", name] for name in names))
        folders = [Path(line.strip()) for line in printed]
        assert contents(folders[0]).items() >= (contents(bare) | shared).items()
        assert contents(folders[1]).items() >= contents(adapter).items()
        model, lora = names
        out = run(
            *(server, tmp_path / "home"),
            ["generate", model, *options],
            ["generate", bare, *options, "--tokenizer", model],
            ["generate", model, *options, "--adapter", lora],
            ["generate", folders[0], *options],
            HF_HUB_OFFLINE="1",
        )
        assert server.requests == []
    assert out == [plain, plain, adapted, plain]


def test_push_sends_what_the_dry_run_shows(tmp_path: Path) -> None:
    folder, _ = save_small(tmp_path)
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"results": {"lambada": {"acc,none": 0.5}}}))
    push = ["push", folder, "some/model@v1/sub", "--license", "mit", "--results", results]
    with standing_in() as server:
        (shown,) = run(server, tmp_path / "home", [*push, "--dry-run"])
        assert server.requests == []
        (address,) = run(server, tmp_path / "home", [*push, "--private"])
        repository = server.repositories["some/model"]
    assert repository.private
    pushed = repository.commits[address.strip().rpartition("/")[2]]
    card = pushed.pop("sub/README.md").decode()
    assert "| lambada | acc | 0.5000 |" in card
    assert shown.endswith(f"\n{card}")
    del pushed[".gitattributes"]
    assert pushed == {f"sub/{name}": data for name, data in contents(folder).items()}
    for name, data in pushed.items():
        assert any(line.startswith(f"{name} ") for line in shown.splitlines()), name
        assert len(data) > 0


def test_mistakes(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> str:
        raise AssertionError("something is sent")

    monkeypatch.setattr(hub, "upload", refuse)
    folder, _ = save_small(tmp_path)
    message = refused(cli("push", folder, "some/model"))
    assert message.startswith("which licence do the weights have? --license: ")
    assert "is not user/repo" in refused(cli("push", folder, "model", "--license", "mit"))
    nothing = refused(cli("push", tmp_path / "none", "some/model", "--license", "mit"))
    assert nothing == f"there is no folder '{tmp_path / 'none'}'"
    assert "revision='v2'" in refused(cli("push", folder, "a/b@v1", "--revision", "v2"))
    assert refused(cli("download", "7b")).startswith("'7b' is not user/repo, user/repo@revision")
