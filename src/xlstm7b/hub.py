"""Downloads from the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path


def is_hub_id(name: str) -> bool:
    """True if the name can be that of a hub repository, such as NX-AI/xLSTM-7b."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) is not None


def download(name: str, patterns: Sequence[str]) -> Path:
    """The local copy of the files of a hub repository; it is downloaded if needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    missing = f"there is no folder {name!r}, and the Hugging Face hub"
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:  # no connection, and no copy from an earlier one
        raise OSError(
            f"{missing} cannot be reached: give the path of a local folder, or connect to the hub "
            f"({_one_line(error.__cause__ or error)})"
        ) from error
    except Exception as error:  # the types differ between versions of huggingface_hub
        raise OSError(f"{missing} did not provide it: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
