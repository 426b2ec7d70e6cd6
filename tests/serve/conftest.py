"""A small model that writes letters, and a server that the tests of one file share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, serving, spelling_model

from xlstm7b.generate import Generator


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model that writes letters, some of two bytes."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    spelling_model("abcdefghijklmnopqrstuvwxyzäöü").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def generator(folder: Path) -> Generator:
    return Generator.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def live(generator: Generator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(generator, states=tmp_path_factory.mktemp("states")) as server:
        yield server
