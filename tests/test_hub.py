"""Names of the hub, and downloads from a stand-in for it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import run
from hub_stand_in import TOKEN, HubStandIn, Repository, standing_in
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b import hub
from xlstm7b.hub import HubName, locate, parse

# Names

words = st.text("aZ9._-", max_size=5).map("x{}".format)
paths = st.lists(st.text("aZ9._=,+-", max_size=5).map("x{}".format), max_size=3)
names = st.builds(
    HubName, st.builds("{}/{}".format, words, words), st.none() | words, paths.map("/".join)
)


@given(names)
def test_a_name_is_read_as_it_is_shown(name: HubName) -> None:
    assert parse(str(name)) == name
    assert parse(name.repo, name.revision, name.subfolder) == name
    assert parse(str(name), name.revision, name.subfolder) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "repo", "/user/repo", "./user/repo", "../user/repo", "user/repo/", "user//repo"),
        *("user/repo@", "user/repo@/sub", "user@v1/repo", "user/repo/../other", "user/repo/./sub"),
        *("user/repo/sub@v1", "user/repo name", "user/repo\n", "usér/repo"),
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert parse(name) is None


def test_a_revision_with_a_slash_is_an_argument() -> None:
    assert parse("user/repo@refs/pr/1") == HubName("user/repo", "refs", "pr/1")
    assert parse("user/repo", "refs/pr/1") == HubName("user/repo", "refs/pr/1")


@pytest.mark.parametrize(
    ("given_name", "revision", "subfolder", "message"),
    [
        ("a/b@v1", "v2", None, "'a/b@v1' has the revision 'v1', and revision='v2' is given too"),
        ("a/b/c", None, "d", "'a/b/c' has the subfolder 'c', and subfolder='d' is given too"),
        ("a/b", None, "../c", "'../c' is not the path of a folder inside a repository"),
        ("a/b", None, "c//d", "'c//d' is not the path of a folder inside a repository"),
    ],
)
def test_what_does_not_fit_is_named(
    given_name: str, revision: str | None, subfolder: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse(given_name, revision, subfolder)


def test_a_local_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Path:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(hub, "download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "repo" / "sub").mkdir(parents=True)
    for name in ("user/repo", "user/repo/sub"):
        assert locate(name, ()) == Path(name)
    assert locate("user/repo", (), subfolder="sub") == Path("user/repo/sub")
    with pytest.raises(ValueError, match=r"^user/repo is a local path, which has no revision 'v1'"):
        locate("user/repo", (), revision="v1")
    with pytest.raises(ValueError, match=r"^there is no 'user/repo/other' in the local folder"):
        locate("user/repo/other", ())
    for name, revision in (("user/repo@v1", None), ("user/repo/other", "v1")):
        with pytest.raises(AssertionError, match="the hub is asked"):
            locate(name, (), revision=revision)


# Downloads

NAMES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE.md"),
    *("README.md", "optimizer.pt", "model-1/model.safetensors"),
    *("own/config.json", "own/model.safetensors", "own/tokenizer.json"),
    *("bare/config.json", "bare/model.safetensors", "bare/deeper/config.json"),
)
FILES = {name: name.encode() for name in NAMES}  # each contains its path
# Prints what the local folder of each name holds, or the error.
SCRIPT = """if True:
    import json
    import sys
    from pathlib import Path
    from xlstm7b import hub

    for name, patterns in json.loads(sys.argv[1]):
        try:
            folder = hub.download(hub.parse(name), getattr(hub, patterns))
            files = (path for path in folder.iterdir() if path.is_file())
            print(json.dumps({path.name: path.read_text() for path in files}))
        except OSError as error:
            print(json.dumps(str(error)))
"""
Download = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[HubStandIn]:
    with standing_in() as server:
        yield server


@pytest.fixture
def download(server: HubStandIn, tmp_path: Path) -> Download:
    """Downloads names in a new process. The server's log begins with it."""

    def download(*names: str, patterns: str = "MODEL_FILES", token: str = "", **more: str) -> Any:
        server.requests.clear()
        asked = [name.split() if " " in name else (name, patterns) for name in names]
        environment = server.environment(tmp_path / "home", token) | more
        return [
            json.loads(line) for line in run(SCRIPT, json.dumps(asked), **environment).splitlines()
        ]

    return download


def fetched(server: HubStandIn) -> set[str]:
    """The files that were downloaded, without the repository and the revision."""
    got = [request.path for request in server.requests if request.method == "GET"]
    return {path.split("/", 5)[5] for path in got if "/resolve/" in path}


def test_each_folder_of_a_repository_is_a_model(server: HubStandIn, download: Download) -> None:
    server.repositories["user/repo"] = repository = Repository()
    first = repository.commit({"config.json": b"first"})
    repository.commit(FILES)
    repository.commit({"config.json": b"branch"}, "v1")
    tokenizer, root, own, bare, deeper, branch, commit = download(
        "user/repo/bare TOKENIZER_FILES",
        *("user/repo", "user/repo/own CONFIG_FILES", "user/repo/bare", "user/repo/bare/deeper"),
        *("user/repo@v1", f"user/repo@{first}"),
    )
    assert tokenizer == {name: name for name in ("tokenizer.json", "tokenizer_config.json")}
    shared = (*tokenizer, "LICENSE.md")
    assert root == {name: name for name in ("config.json", "model.safetensors", *shared)}
    assert own == {"config.json": "own/config.json"}
    # The tokenizer and the licence of the root are linked into folders that have none.
    weights = {name: f"bare/{name}" for name in ("config.json", "model.safetensors")}
    assert bare == {**weights, **{name: name for name in shared}}
    assert deeper == {"config.json": "bare/deeper/config.json", **{name: name for name in shared}}
    assert branch == {"config.json": "branch"}
    assert commit == {"config.json": "first"}
    inside = {"config.json", "own/config.json", "bare/deeper/config.json", *weights.values()}
    assert fetched(server) == {*root, *inside}

    (own,) = download("user/repo/own")
    parts = ("config.json", "model.safetensors", "tokenizer.json")
    assert own == {**{name: f"own/{name}" for name in parts}, "LICENSE.md": "LICENSE.md"}
    assert fetched(server) == {"own/model.safetensors", "own/tokenizer.json"}

    # Everything is in the cache now.
    offline = {"HF_HUB_OFFLINE": "1"}
    assert download("user/repo", "user/repo/own", "user/repo/bare", **offline) == [root, own, bare]
    (missing,) = download("user/repo@v2/own", **offline)
    assert missing == (
        "there is no folder 'user/repo@v2/own', and the Hugging Face hub is not asked, because "
        "HF_HUB_OFFLINE is set: run `xlstm7b download user/repo@v2/own` without it first"
    )
    assert server.requests == []


def test_what_is_missing_is_named(server: HubStandIn, download: Download, tmp_path: Path) -> None:
    server.repositories["user/repo"] = repository = Repository()
    repository.commit(FILES)
    revision, folder, nothing = download("user/repo@v9", "user/repo/none", "user/other")
    assert "Revision Not Found" in revision
    assert "\n" not in revision
    assert folder.startswith("user/repo/none holds none of the files that are needed (config.json,")
    assert nothing.startswith("there is no folder 'user/other', and the Hugging Face hub did not")
    (unreachable,) = download("user/repo", HF_ENDPOINT="http://127.0.0.1:1", HF_HOME=str(tmp_path))
    assert "the Hugging Face hub cannot be reached: give the path of a local folder" in unreachable


def test_a_private_repository_needs_the_token(server: HubStandIn, download: Download) -> None:
    server.repositories["user/secret"] = repository = Repository(private=True)
    repository.commit(FILES)
    (refused,) = download("user/secret", token="hf_of_someone_else")
    assert "did not provide it" in refused
    (found,) = download("user/secret", token=TOKEN)
    assert found["model.safetensors"] == "model.safetensors"
    about_it = [request for request in server.requests if "user/secret" in request.path]
    assert {request.token for request in about_it} == {TOKEN}


def test_a_broken_download_is_resumed(server: HubStandIn, tmp_path: Path) -> None:
    server.repositories["user/long"] = repository = Repository()
    repository.commit({"model.safetensors": bytes(range(256)) * 100})
    server.cut_after = 10_000
    server.requests.clear()
    script = """if True:
        from huggingface_hub import constants
        constants.DOWNLOAD_CHUNK_SIZE = 1000  # of several megabytes
        from xlstm7b import hub
        folder = hub.download(hub.parse("user/long"), hub.MODEL_FILES)
        assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 100
    """
    run(script, **server.environment(tmp_path))
    got = [r.range for r in server.requests if r.method == "GET" and "/resolve/" in r.path]
    assert got == ["", "bytes=10000-"]


# Uploads

# Uploads small files to each name, with the given token, and prints the address or the error.
UPLOAD = """if True:
    import json
    import os
    import sys
    from xlstm7b import hub

    for name, token, private in json.loads(sys.argv[1]):
        os.environ["HF_TOKEN"] = token
        files = {"model.safetensors": b"weights", "README.md": b"a card"}
        is_replaced = lambda name: name.startswith("model")
        try:
            print(hub.upload(hub.parse(name), files, private=private, replaced=is_replaced))
        except (OSError, ValueError) as error:
            print(error)
"""


def test_an_upload_replaces_older_weights_and_nothing_else(
    server: HubStandIn, tmp_path: Path
) -> None:
    server.repositories["some/public"] = public = Repository()
    older = {"model-1-of-2.safetensors": b"older", "notes.txt": b"kept"}
    older |= {f"sub/{name}": data for name, data in older.items()}
    first = public.commit(older)
    server.requests.clear()
    asked = [
        ["some/public", "", False],
        ["some/public", "hf_of_someone_else", False],
        ["some/public", TOKEN, True],
        ["some/public@branch/sub", TOKEN, False],
        ["some/new", TOKEN, True],
    ]
    out = run(UPLOAD, json.dumps(asked), **server.environment(tmp_path)).splitlines()
    assert out[0] == "the hub takes no upload without a token: run `hf auth login`, or set HF_TOKEN"
    assert out[1].startswith("the Hugging Face hub did not take some/public: ")
    assert out[2] == (
        "the repository some/public exists and is public: make it private on the hub first, or "
        "leave --private out"
    )
    assert public.commits[public.branches["main"]] == public.commits[first]
    commit = public.branches["branch"]
    assert out[3:] == [
        f"{server.url}/some/public/commit/{commit}",
        f"{server.url}/some/new/commit/{server.repositories['some/new'].branches['main']}",
    ]
    assert public.commits[commit] == {
        "model-1-of-2.safetensors": b"older",
        "notes.txt": b"kept",
        "sub/notes.txt": b"kept",
        "sub/model.safetensors": b"weights",
        "sub/README.md": b"a card",
    }
    assert server.repositories["some/new"].private
