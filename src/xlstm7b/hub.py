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

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the types differ between versions of huggingface_hub
        reason = " ".join(str(error).split())
        raise OSError(
            f"there is no folder {name!r}, and the Hugging Face hub did not provide it: {reason}"
        ) from error
