"""Which devices run the kernels. GPUs are pretended: nothing is allocated on them."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xlstm7b import gpus

pytest.importorskip("triton", reason="Triton is not installed")
from xlstm7b.mlstm.triton import launch_params


@pytest.fixture
def pretend(monkeypatch):
    """Makes every CUDA device one of this compute capability."""

    def pretend(capability: tuple[int, int], hip: str | None = None) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU of a test")
        monkeypatch.setattr(torch.version, "hip", hip)
        return torch.device("cuda", 0)

    gpus._runs_kernels.cache_clear()
    yield pretend
    gpus._runs_kernels.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_gpus_from_ampere_on_run_the_kernels(capability, pretend, caplog):
    assert gpus.has_kernels(pretend(capability))
    assert not caplog.records


@pytest.mark.parametrize(("capability", "hip"), [((7, 5), None), ((9, 4), "7.0")])
def test_other_gpus_take_plain_pytorch_with_one_line(capability, hip, pretend, caplog):
    device = pretend(capability, hip)
    with caplog.at_level(logging.WARNING):
        assert not any(gpus.has_kernels(device) for _ in range(3))
    (record,) = caplog.records
    assert "GPU of a test" in record.message
    assert "plain PyTorch" in record.message


def test_whether_a_gpu_runs_them_is_a_constant_for_the_compiler(pretend):
    device = pretend((7, 5))
    add = torch.compile(lambda x: x + gpus.has_kernels(device), fullgraph=True, backend="eager")
    assert add(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_devices_without_triton_have_no_kernels(device):
    assert not gpus.has_kernels(torch.device(device))


@given(st.integers(1, 6), st.integers(1, 1 << 18), st.sampled_from([99, 163, 227]))
def test_as_many_stages_as_fit(stages, stage_bytes, kilobytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_params, "shared_memory", lambda device: 1024 * kilobytes)
        got = launch_params.fitting_stages(stages, stage_bytes, torch.device("cpu"))
    memory = 1024 * (kilobytes - 8)
    assert 1 <= got <= stages
    assert (got - 1) * stage_bytes <= memory
    assert got == stages or got * stage_bytes > memory
