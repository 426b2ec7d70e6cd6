"""Saving and loading XLSTM: the same bits, and no more memory than the model takes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import CONFIG, INDEX, names_in, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from xlstm7b.checkpoint import save_checkpoint
from xlstm7b.config import ModelConfig
from xlstm7b.mlstm import MLSTMState
from xlstm7b.model import XLSTM, ModelState

DTYPES = [torch.float32, torch.bfloat16]


@torch.no_grad()
def filled_model(dtype: torch.dtype = torch.float32) -> XLSTM:
    model = XLSTM(CONFIG).to(dtype)
    for parameter in model.parameters():
        parameter.normal_()
    return model


def assert_holds(model: XLSTM, want: dict[str, Tensor], dtype: torch.dtype) -> None:
    got = dict(model.named_parameters())
    assert got.keys() == want.keys()
    for name, parameter in got.items():
        assert parameter.dtype == dtype, name
        assert torch.equal(parameter, want[name].to(dtype)), name
        assert parameter.requires_grad
        assert parameter.is_contiguous()
        assert parameter.data_ptr() % 64 == 0  # aligned as PyTorch does it


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_in_the_stored_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = filled_model(dtype), torch.randint(0, 7, (2, 9))
    model.save_pretrained(tmp_path / "model")
    assert names_in(tmp_path / "model") == {"model.safetensors", "config.json", "SHA256SUMS"}
    again = XLSTM.from_pretrained(tmp_path / "model")
    assert again.config == CONFIG
    assert_holds(again, model.state_dict(), dtype)
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    again.save_pretrained(str(tmp_path / "again"))
    for name in names_in(tmp_path / "model"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", [*DTYPES, torch.float16, torch.float64])
def test_weights_are_cast_while_loading(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    model = filled_model(stored)
    model.save_pretrained(tmp_path)
    loaded = XLSTM.from_pretrained(str(tmp_path), dtype=wanted, device="cpu")
    assert_holds(loaded, model.state_dict(), wanted)


def test_a_model_is_loaded_from_shards(tmp_path: Path) -> None:
    model = filled_model()
    save_checkpoint(tmp_path, CONFIG, model.named_parameters(), max_shard_bytes=40_000)
    assert len(set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())) > 5
    assert_holds(XLSTM.from_pretrained(tmp_path), model.state_dict(), torch.float32)
    assert_holds(
        XLSTM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.state_dict(), torch.bfloat16
    )


def test_a_loaded_model_owns_its_weights(tmp_path: Path) -> None:
    model = filled_model()
    model.save_pretrained(tmp_path)
    loaded = XLSTM.from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:  # in place: a mapped tensor would change
        opened.write(bytes(file.stat().st_size))
    assert_holds(loaded, model.state_dict(), torch.float32)
    with torch.no_grad():  # and parameters do not overlap
        for number, parameter in enumerate(loaded.parameters()):
            parameter.fill_(number)
    assert all((p == number).all() for number, p in enumerate(loaded.parameters()))


def test_parameters_train_after_loading(tmp_path: Path) -> None:
    filled_model().save_pretrained(tmp_path)
    loaded = XLSTM.from_pretrained(tmp_path)
    loaded.token_logprobs(torch.tensor([[0, 3, 5]]), torch.tensor([[3, 5, 0]]))[0].sum().backward()
    assert all(p.grad is not None and p.is_leaf for p in loaded.parameters())


# Errors


@pytest.mark.parametrize("device", ["toaster", "cuda:99", "meta", torch.device("cuda:99")])
def test_an_unusable_device_is_refused_before_anything_is_read(device: str | torch.device) -> None:
    words = f"^the device '{device}' cannot be used here: [^\n]+$"
    with pytest.raises(ValueError, match=words):
        XLSTM.from_pretrained("/no/such/folder", device=device)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^'/no/such/folder' is neither a folder nor the id of a hub"
    ):
        XLSTM.from_pretrained("/no/such/folder")
    with pytest.raises(ValueError, match=r"holds neither config\.json nor config\.yaml: not a ch"):
        XLSTM.from_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is a file, not a folder$"):
        XLSTM.from_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match=r"file is a file; a checkpoint is a folder$"):
        filled_model().save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match=r"holds other files and no config\.json: save to a new"):
        filled_model().save_pretrained(tmp_path)
    assert names_in(tmp_path) == {"file"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"model\.safetensors: lm_head\.weight is missing$"),
        ("extra", r"model\.safetensors: \'lm_head\.bias\' is not in a model of this config$"),
        ("misshapen", r"lm_head\.weight has the shape \(64, 7\), the config says \(7, 64\)$"),
        ("type", r"model\.safetensors: 'lm_head\.weight' is stored as I32, not as one of F64, "),
    ],
)
def test_wrong_tensors_are_refused(fault: str, message: str, tmp_path: Path) -> None:
    filled_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    match fault:
        case "missing":
            del tensors["lm_head.weight"]
        case "extra":
            tensors["lm_head.bias"] = torch.zeros(7)
        case "misshapen":
            tensors["lm_head.weight"] = head.T.contiguous()
        case _:
            tensors["lm_head.weight"] = head.int()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        XLSTM.from_pretrained(tmp_path)


# Memory

LOAD = """if True:
    import sys, threading, time
    import torch
    from xlstm7b.model import XLSTM

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if "RssAnon" in line) * 1024

    def watch():
        while not done:
            samples.append(anonymous())
            time.sleep(0.001)

    large, small, name = sys.argv[1:]
    dtype, done, samples = getattr(torch, name), False, []
    XLSTM.from_pretrained(small, dtype=dtype)  # so that imports are not measured
    thread = threading.Thread(target=watch)
    thread.start()
    before = anonymous()
    model = XLSTM.from_pretrained(large, dtype=dtype)
    done = True
    thread.join()
    peak = max(*samples, anonymous()) - before
    print(peak / sum(p.nbytes for p in model.parameters()), len(samples))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory):
    """440 MB in tensors of 0.5 to 66 MB, many of them a little more than a power of two."""
    folder = tmp_path_factory.mktemp("large")
    config = ModelConfig(embedding_dim=512, num_blocks=24, num_heads=4, vocab_size=32_000)
    numbers = torch.randn(config.vocab_size * config.embedding_dim)
    sizes = {name: torch.Size(shape) for name, shape in config.parameter_shapes().items()}
    save_checkpoint(
        folder, config, ((name, numbers[: s.numel()].view(s)) for name, s in sizes.items())
    )
    assert (folder / "model.safetensors").stat().st_size > 400_000_000
    yield folder
    shutil.rmtree(folder)  # pytest keeps the folders of its last runs


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_no_more_memory_than_the_model(
    dtype: str, large_folder: Path, tmp_path: Path
) -> None:
    filled_model().save_pretrained(tmp_path)
    ratio, samples = map(float, run(LOAD, large_folder, tmp_path, dtype).split())
    assert samples > 20
    assert 0.95 < ratio < 1.15


def test_a_dtype_by_name(tmp_path):
    filled_model().save_pretrained(tmp_path)
    model = XLSTM.from_pretrained(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert XLSTM.empty(model.config, dtype="float64").lm_head.weight.dtype == torch.float64
    for state in (
        ModelState.zeros(model.config, 1, dtype="bfloat16").blocks[0],
        MLSTMState.zeros(1, 2, 4, 4, dtype="bfloat16"),
    ):
        assert (state.C.dtype, state.n.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", ["float33", "Tensor", "int8", torch.int8])
def test_a_dtype_that_weights_cannot_have(tmp_path, dtype):
    filled_model().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r'^dtype must be a dtype for weights, as "bfloat16", not '
    ):
        XLSTM.from_pretrained(tmp_path, dtype=dtype)
