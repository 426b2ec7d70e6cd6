"""The Hugging Face hub: names such as user/repo@revision/subfolder, downloads and uploads.

Tokens, the cache, progress bars and resumed downloads are those of `huggingface_hub`.
"""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Files of a repository that are downloaded: those that loading reads, and the manifest.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*")
COMPANION_FILES = (*TOKENIZER_FILES, "LICENSE*")
CONFIG_FILES = ("config.json", "config.yaml")
WEIGHTS_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model*.safetensors", WEIGHTS_INDEX, "SHA256SUMS")
MODEL_FILES = (*CONFIG_FILES, *_WEIGHTS, *COMPANION_FILES)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *COMPANION_FILES)
STATE_FILE = "state.safetensors"

_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.+-]+))?((?:/(?!\.{1,2}(?:/|$))[\w.,=+-]+)*)", re.ASCII
)


@dataclass(frozen=True)
class HubName:
    """A folder of a hub repository at one revision."""

    repo: str
    revision: str | None = None  # a branch, a tag or a commit; None: the default branch
    subfolder: str = ""  # empty: the root

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f"/{self.subfolder}" if self.subfolder else "")


def parse(name: str, revision: str | None = None, subfolder: str | None = None) -> HubName | None:
    """Reads user/repo, user/repo@revision, user/repo/subfolder or user/repo@revision/subfolder.

    None if the name is none of them. In a name, a revision ends at the first "/". The arguments
    `revision` and `subfolder` may hold any; `ValueError` if the name has another one.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    inside = {"revision": found[2] or "", "subfolder": found[3].removeprefix("/")}
    given = {"revision": revision or "", "subfolder": (subfolder or "").strip("/")}
    for what, value in given.items():
        if value and inside[what] and value != inside[what]:
            raise ValueError(
                f"{name!r} has the {what} {inside[what]!r}, and {what}={value!r} is given too: "
                "give one of them"
            )
    if given["subfolder"] and {"", ".", ".."} & {*given["subfolder"].split("/")}:
        raise ValueError(f"{subfolder!r} is not the path of a folder inside a repository")
    return HubName(
        found[1],
        given["revision"] or inside["revision"] or None,
        given["subfolder"] or inside["subfolder"],
    )


def locate(
    name: str | Path,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Path:
    """A local path if it exists, with the subfolder; else the local copy of a hub folder.

    Of a hub folder, the files that match `patterns` are downloaded if needed.
    """
    path = Path(name)
    if path.exists():
        if revision:
            raise ValueError(f"{name} is a local path, which has no revision {revision!r}")
        return path / subfolder if subfolder else path
    found = parse(str(name), revision, subfolder)
    if found is None:
        raise ValueError(f"{str(name)!r} is neither a folder nor the id of a hub repository")
    if found.subfolder and found.revision is None and Path(found.repo).exists():
        raise ValueError(f"there is no {str(name)!r} in the local folder {found.repo!r}")
    return download(found, patterns)


def download(name: HubName, patterns: Sequence[str]) -> Path:
    """The local copy of a hub folder's files that match `patterns`; downloaded if needed.

    A subfolder without a tokenizer gets links to the one at the root, so that whatever reads the
    local folder finds it there. The same holds for the licence.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    inside = glob.escape(f"{name.subfolder}/") if name.subfolder else ""
    shared = [pattern for pattern in patterns if inside and pattern in COMPANION_FILES]
    missing = f"there is no folder {str(name)!r}, and the Hugging Face hub"
    try:
        root = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=[*(inside + pattern for pattern in patterns), *shared],
                ignore_patterns=[f"{inside}*/*"],  # * matches / too
            )
        )
    except LocalEntryNotFoundError as error:  # no connection, and no copy from an earlier one
        if constants.HF_HUB_OFFLINE:
            raise OSError(
                f"{missing} is not asked, because HF_HUB_OFFLINE is set: run `xlstm7b download "
                f"{name}` without it first"
            ) from error
        raise OSError(
            f"{missing} cannot be reached: give the path of a local folder, or connect to the hub "
            f"({_one_line(error.__cause__ or error)})"
        ) from error
    except Exception as error:  # the types differ between versions of huggingface_hub
        raise OSError(f"{missing} did not provide it: {_one_line(error)}") from error
    folder = root / name.subfolder
    if not folder.is_dir() and {*patterns} == {*shared}:
        return root  # only a tokenizer is wanted, and the subfolder has none
    if not folder.is_dir():
        raise OSError(f"{name} holds none of the files that are needed ({', '.join(patterns)})")
    if (folder / "tokenizer.json").exists():
        shared = [pattern for pattern in shared if pattern not in TOKENIZER_FILES]
    found = [file for pattern in shared for file in root.glob(pattern) if file.is_file()]
    for file in sorted(found, key=lambda file: file.name == "tokenizer.json"):  # that one last
        with suppress(FileExistsError):
            (folder / file.name).symlink_to(os.path.relpath(file, folder))
    return folder


def upload(
    name: HubName,
    files: Mapping[str, Path | bytes],
    *,
    private: bool = False,
    replaced: Callable[[str], bool],
) -> str:
    """Commits files to a hub folder at once; returns the address of the commit.

    The repository and the branch are made if needed. Files of the hub folder whose name is
    `replaced` are removed if they are not in `files`.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise ValueError(
            "the hub takes no upload without a token: run `hf auth login`, or set HF_TOKEN"
        )
    api, inside = HfApi(), f"{name.subfolder}/" if name.subfolder else ""
    try:
        api.create_repo(name.repo, private=private, exist_ok=True)
        if private and not api.repo_info(name.repo).private:
            raise ValueError(
                f"the repository {name.repo} exists and is public: make it private on the hub "
                "first, or leave --private out"
            )
        if name.revision is not None:
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        there = api.list_repo_files(name.repo, revision=name.revision)
        own = [path.removeprefix(inside) for path in there if path.startswith(inside)]
        stale = [file for file in own if replaced(file) and file not in files]
        commit = api.create_commit(
            name.repo,
            [
                *(
                    CommitOperationAdd(inside + file, str(f) if isinstance(f, Path) else f)
                    for file, f in files.items()
                ),
                *(CommitOperationDelete(inside + file) for file in stale),
            ],
            commit_message=f"Upload {name} with xlstm7b",
            revision=name.revision,
        )
    except ValueError as error:
        raise ValueError(_one_line(error)) from error
    except Exception as error:  # the types differ between versions of huggingface_hub
        cause = f" ({_one_line(error.__cause__)})" if error.__cause__ else ""
        raise OSError(
            f"the Hugging Face hub did not take {name}: {_one_line(error)}{cause}"
        ) from error
    return commit.commit_url


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
