"""Keeps the harness off the network, with its caches in a temporary folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_tasks import machine_info


@pytest.fixture(scope="session", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", machine_info)
        yield


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from naive_scoring import save_byte_model

    return save_byte_model(tmp_path_factory.mktemp("bytes") / "model")
