"""A small model that spells letters, and a server of it that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.live import Live, serving, speller

from xlstm7b.generate import Generator


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model that spells letters, some of two bytes."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    speller("abcdefghijklmnopqrstuvwxyzäöü").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def generator(folder: Path) -> Generator:
    return Generator.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def live(generator: Generator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(generator, states=tmp_path_factory.mktemp("states")) as server:
        yield server
