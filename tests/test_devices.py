"""Devices and dtypes by name, and the defaults for loading a model."""

import pytest
import torch

from xlstm7b.devices import default_dtype, to_device, to_dtype


def test_devices_by_name() -> None:
    assert to_device("cpu") == to_device(torch.device("cpu")) == torch.device("cpu")
    assert to_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["toaster", "cuda:99", "meta"])
def test_an_unusable_device_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^the device '{name}' cannot be used here: [^\n]+$"):
        to_device(name)


def test_dtypes_by_name() -> None:
    assert to_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match=r"^unknown dtype 'float64'; choose from float32,"):
        to_dtype("float64")
    with pytest.raises(ValueError, match=r"^unknown dtype 'float16'; choose from float32$"):
        to_dtype("float16", ("float32",))


def test_the_default_dtype_is_bfloat16_on_a_gpu_and_the_stored_one_on_a_cpu() -> None:
    assert default_dtype(torch.device("cuda")) == torch.bfloat16
    assert default_dtype(torch.device("cpu")) is None
