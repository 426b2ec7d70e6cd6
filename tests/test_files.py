"""Files and folders are replaced completely or not at all; the manifest finds any damage."""

import errno
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    INDEX,
    assert_same_tensors,
    contents,
    draw,
    names_in,
    run,
    save_small,
)
from torch import Tensor
from train_processes import full_disk

from xlstm7b import files
from xlstm7b.checkpoint import open_checkpoint, save_checkpoint, verify
from xlstm7b.cli.options import to_target

# Saving over a folder


@pytest.mark.parametrize("exchange", [True, False])
def test_other_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    folder, tensors, more = tmp_path / "model", draw(), tmp_path / "tokenizer.json"
    save_checkpoint(folder, CONFIG, draw().items(), max_shard_bytes=100_000)
    (folder / "README.md").write_text("kept")
    (folder / "tokenizer.json").write_text("old")
    (folder / "logs").mkdir()
    (folder / "logs" / "config.json").write_text("also kept")
    (folder / "link").symlink_to("README.md")
    folder.chmod(0o750)
    more.write_text("new")
    log = (folder / "logs" / "config.json").open("a")
    save_checkpoint(folder, CONFIG, tensors.items(), companions=[more])
    log.write(", and still written to")
    log.close()
    assert names_in(folder) == {
        "model.safetensors",
        "config.json",
        "SHA256SUMS",
        "README.md",
        "tokenizer.json",
        "logs",
        "link",
    }
    assert (folder / "README.md").read_text() == "kept"
    assert (folder / "tokenizer.json").read_text() == "new"
    assert (folder / "logs" / "config.json").read_text() == "also kept, and still written to"
    assert (folder / "link").readlink() == Path("README.md")
    assert folder.stat().st_mode & 0o777 == 0o750
    assert_same_tensors(dict(open_checkpoint(folder).tensors()), tensors)
    assert verify(folder) == 3
    assert names_in(tmp_path) == {"model", "tokenizer.json"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux swaps folders in one step")
def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert files._exchange(tmp_path / "a", tmp_path / "b")
    assert (names_in(tmp_path / "a"), names_in(tmp_path / "b")) == ({"b"}, {"a"})
    assert not files._exchange(tmp_path / "a", tmp_path / "none")


def test_a_checkpoint_can_be_saved_onto_itself(tmp_path: Path) -> None:
    folder, tensors = save_small(tmp_path)
    (tmp_path / "latest").symlink_to("model")
    mapped = dict(open_checkpoint(folder).tensors())
    reading = open_checkpoint(folder)
    save_checkpoint(
        tmp_path / "latest",
        reading.config,
        reading.tensors(),
        dtype=torch.float16,
        max_shard_bytes=100_000,
    )
    assert (tmp_path / "latest").is_symlink()
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    assert_same_tensors(dict(open_checkpoint(folder).tensors()), halves)
    assert_same_tensors(mapped, tensors)  # tensors mapped before are unchanged
    assert names_in(tmp_path) == {"model", "latest"}


def test_wrong_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "circle").symlink_to("back")
    (tmp_path / "back").symlink_to("circle")
    for name, problem in {
        "": "no config.json",
        "notes.txt": "is a file",
        "notes.txt/x": "notes.txt is not a folder",
        "circle": "links lead in a circle",
        "circle/x/y": "circle is not a folder",
        "\udcff": r"the path '.*\\udcff' is not UTF-8: give it another name",
    }.items():
        with pytest.raises(ValueError, match=problem):
            save_checkpoint(tmp_path / name, CONFIG, draw().items())
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        for name in ("x", "x/y/z"):
            with pytest.raises(ValueError, match=f"x.*: no write permission in {tmp_path}$"):
                save_checkpoint(tmp_path / name, CONFIG, draw().items())
    for write in (to_target, lambda path: files.locked_folder(path, "writing").__enter__()):
        for name, problem in ("circle", "in a circle"), ("notes.txt/x", "is not a folder"):
            with pytest.raises(ValueError, match=problem):
                write(tmp_path / name)
    for name in ("config.json", "SHA256SUMS", "model-1.safetensors", INDEX, "a\nb"):
        with pytest.raises(
            ValueError,
            match="cannot be copied: its name is that of a checkpoint",
        ):
            save_checkpoint(tmp_path / "x", CONFIG, draw().items(), companions=[Path(name)])
    with pytest.raises(ValueError, match="at least 1"):
        save_checkpoint(tmp_path / "x", CONFIG, draw().items(), max_shard_bytes=0)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def interrupted(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[:9]
    raise KeyboardInterrupt


BAD: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "lm_head.weight is missing": lambda t: t.pop("lm_head.weight"),
    "more is not a parameter": lambda t: t.update(more=torch.ones(1)),
    "lm_head.weight has the shape (3,), the config says (7, 64)": lambda t: t.update(
        {"lm_head.weight": torch.ones(3)}
    ),
    "lm_head.weight cannot be stored as torch.int64": lambda t: t.update(
        {"lm_head.weight": torch.ones(7, 64, dtype=torch.int64)}
    ),
}


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tensors = save_small(tmp_path)
    before = contents(folder)

    def attempt(error: type[BaseException], given: object) -> str:
        with pytest.raises(error) as caught:
            save_checkpoint(folder, CONFIG, given, max_shard_bytes=50_000)  # type: ignore[arg-type]
        assert contents(folder) == before
        assert names_in(tmp_path) == {"model"}
        return str(caught.value)

    for message, change in BAD.items():
        changed = dict(tensors)
        change(changed)
        assert message in attempt(ValueError, changed.items())
    assert "given twice" in attempt(ValueError, [*tensors.items(), *tensors.items()])
    attempt(KeyboardInterrupt, interrupted(tensors))

    def fails(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        said = attempt(OSError, tensors.items())
        assert re.match(rf"{tmp_path}/model could not be written \(.*No space left on", said)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_exchange", lambda first, second: False)
        ordinary = Path.rename

        def rename(self: Path, to: Path) -> Path:
            is_last = self.name.startswith(".model.saving-") and not to.exists()
            return fails() if is_last else ordinary(self, to)

        patch.setattr(Path, "rename", rename)
        assert "No space left" in attempt(OSError, tensors.items())


@pytest.mark.parametrize("function", ["mkdir", "open"])
def test_an_error_names_the_folder_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    ordinary = getattr(os, function)

    def fails(path: str | Path, *arguments: object, **options: object) -> object:
        if ".model.saving-" not in str(path) or (function, Path(path).parent) == ("open", tmp_path):
            return ordinary(path, *arguments, **options)
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, function, fails)
    with pytest.raises(OSError, match=rf"Read-only file system: '{tmp_path}/model'$"):
        save_checkpoint(tmp_path / "model", CONFIG, draw().items())
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("function", "result", "problem"),
    [
        ("mkdir", OSError(errno.EROFS, "Read-only file system", "out"), "Read-only file system"),
        ("access", [False], "no write permission in it"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, function: str, result: OSError | list[bool], problem: str
) -> None:
    out = tmp_path / "out"
    with (
        mock.patch(f"os.{function}", side_effect=result),
        pytest.raises(ValueError, match=rf"^cannot write {out}: {problem}$"),
        files.locked_folder(out, "preparing"),
    ):
        pass


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with full_disk(room=4), pytest.raises(OSError, match=rf"^{path} could not be written \("):
        files.write_json(path, {"a": 1})
    assert names_in(tmp_path) == set()


def test_temporary_folders_of_killed_saves_are_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".model.saving-dead", tmp_path / ".model.saving-alive"
    other = tmp_path / ".mode.saving-x"
    for path in (dead, alive, other):
        path.mkdir()
        (path / "1.part").write_text("half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    save_small(tmp_path)
    assert names_in(tmp_path) == {"model", alive.name, other.name}
    os.close(lock)
    save_small(tmp_path)
    assert names_in(tmp_path) == {"model", other.name}


# Two processes with one target


def save_new(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    save_checkpoint(folder, CONFIG, tensors, overwrite=False)


def test_a_folder_that_another_process_has_written_is_kept(tmp_path: Path) -> None:
    target, tensors = tmp_path / "model", draw()

    def meanwhile() -> Iterator[tuple[str, Tensor]]:
        yield from draw().items()
        save_checkpoint(target, CONFIG, tensors.items())

    target.mkdir()  # as empty as a missing one
    for given in (meanwhile(), draw().items()):
        with pytest.raises(FileExistsError, match=rf"^{target} exists already: perhaps another"):
            save_new(target, given)
        assert_same_tensors(dict(open_checkpoint(target).tensors()), tensors)
        assert names_in(tmp_path) == {"model"}


def test_a_folder_that_another_process_is_writing_is_refused(tmp_path: Path) -> None:
    target, tensors = tmp_path / "model", draw()

    def first() -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()
        with pytest.raises(FileExistsError, match=rf"^another process is writing {target} right"):
            save_new(target, draw().items())

    save_new(target, first())
    assert_same_tensors(dict(open_checkpoint(target).tensors()), tensors)
    assert names_in(tmp_path) == {"model"}


def test_a_folder_that_appears_meanwhile_is_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    tensors = draw()

    def meanwhile() -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()
        save_small(tmp_path)

    save_checkpoint(tmp_path / "model", CONFIG, meanwhile())
    assert_same_tensors(dict(open_checkpoint(tmp_path / "model").tensors()), tensors)
    assert names_in(tmp_path) == {"model"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_another_process_has_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def no_links(*_: object) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "state"
    with files.write_aside(path, overwrite=False) as aside:
        aside.write_text("first")
    with pytest.raises(FileExistsError, match=rf"^{path} exists already: perhaps another"):
        with files.write_aside(path, overwrite=False) as aside:
            aside.write_text("second")
    assert contents(tmp_path) == {"state": b"first"}


def test_a_killed_save_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    """Kills the process at every flush to the disk, one after the other, then at random times."""
    script = """if True:
        import os, pathlib, random, signal, sys, time
        import torch
        from checkpoint_files import CONFIG
        from xlstm7b.checkpoint import open_checkpoint, save_checkpoint, verify
        torch.set_num_threads(1)  # a fork would lose the other threads
        target = pathlib.Path(sys.argv[1]) / "model"
        shapes = CONFIG.parameter_shapes()

        def save(value):
            tensors = ((name, torch.full(shape, value)) for name, shape in shapes.items())
            save_checkpoint(target, CONFIG, tensors, max_shard_bytes=100_000)

        def stands():
            verify(target)
            assert (target / "README.md").read_text() == "mine"
            values = {float(v) for _, t in open_checkpoint(target).tensors() for v in t.unique()}
            (value,) = values
            return value

        def child(value, flushes=None):
            process = os.fork()
            if process:
                return process
            flush = os.fsync
            def counted(descriptor):
                nonlocal flushes
                flushes -= 1
                if flushes < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                flush(descriptor)
            if flushes is not None:
                os.fsync = counted
            save(value)
            os._exit(0)

        save(0.0)
        (target / "README.md").write_text("mine")
        old, outcomes, finished = 0.0, [], False
        while not finished:
            _, status = os.waitpid(child(old + 1, len(outcomes)), 0)
            finished = status == 0
            outcomes.append(stands() - old)
            old += outcomes[-1]
        print(*outcomes)
        began = time.perf_counter()
        save(old)
        took, kept = time.perf_counter() - began, 0
        for _ in range(15):
            process = child(old + 1)
            time.sleep(random.random() * 1.3 * took)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            now = stands()
            assert now in (old, old + 1)
            kept += now == old
            old = now
        print(kept)
        save(7.0)
        assert os.listdir(target.parent) == ["model"] and stands() == 7.0
    """
    at_flushes, kept = run(script, tmp_path).splitlines()
    outcomes = at_flushes.split()
    assert len(outcomes) > 10
    # The last flush, of the parent folder, comes after the swap. The last run is not killed.
    assert outcomes == ["0.0"] * (len(outcomes) - 2) + ["1.0", "1.0"]
    assert int(kept) > 0


# The manifest


def test_verify_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    folder, _ = save_small(tmp_path)
    seen: list[tuple[str, int]] = []
    assert verify(folder, progress=lambda *step: seen.append(step)) == 2
    assert seen == [
        (name, (folder / name).stat().st_size) for name in ("config.json", "model.safetensors")
    ]
    manifest, good = folder / "SHA256SUMS", (folder / "SHA256SUMS").read_text()
    config_line, model_line = good.splitlines()

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            verify(folder)

    for text, message in {
        "": "lists no file",
        "nonsense": "'nonsense' is not the sha256 of a file in this folder",
        config_line: r"model\.safetensors is not listed",
        model_line: r"config\.json is not listed",
        good.replace("config.json", "../config.json"): "is not the sha256",
        "\udcff": "not a text",
        good.replace("config.json", "/etc/passwd"): "is not the sha256",
        good + "0" * 64 + "  gone.json\n": r"gone\.json is missing",
        good.replace(config_line[:64], "0" * 64): r"config\.json is damaged",
        good.upper(): "is not the sha256",
    }.items():
        manifest.write_text(text, errors="surrogateescape")
        refused(message)
    manifest.write_text(good.replace("  ", " *"))  # as `sha256sum --binary` writes it
    assert verify(folder) == 2
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        refused(r"model\.safetensors is damaged")
    file.unlink()
    refused(r"model\.safetensors is missing")
    manifest.unlink()
    refused("has no SHA256SUMS")
    with pytest.raises(ValueError, match="there is no folder"):
        verify(tmp_path / "none")


# Single files


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupt(aside: Path) -> None:
        aside.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), files.write_aside(path) as aside:
        interrupt(aside)
    assert contents(tmp_path) == {"file": b"old"}
    with files.write_aside(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert contents(tmp_path) == {"file": b"new"}


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.json"
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{path}'"):
        files.write_json(path, 1)


def test_json_files_hold_numbers_and_unicode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"mean": torch.tensor(0.5), "path": tmp_path, "text": "ü"})
    assert json.loads(path.read_text()) == {"mean": 0.5, "path": str(tmp_path), "text": "ü"}
    assert "ü" in path.read_text()
    assert names_in(tmp_path) == {"a.json"}


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthr")
    assert [*files.complete_lines(path)] == [b"one\n", b"two\n"]
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_locked_folder_is_refused(tmp_path: Path) -> None:
    with files.lock_folder(tmp_path, "training in"):
        message = f"^another process is training in {tmp_path} right now$"
        with pytest.raises(ValueError, match=message), files.lock_folder(tmp_path, "training in"):
            pass
        message = "^another process is writing model right now$"
        named = files.lock_folder(tmp_path, "writing", name="model")
        with pytest.raises(ValueError, match=message), named:
            pass
    with files.lock_folder(tmp_path, "training in"):
        pass


def test_a_folder_in_which_nothing_is_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with files.locked_folder(folder, "training in"), pytest.raises(ValueError, match="right now"):
        files.lock_folder(folder, "training in").__enter__()
    assert names_in(tmp_path) == set()
    with files.locked_folder(folder, "training in"):
        (folder / "log").touch()
    with files.locked_folder(folder, "training in"):
        (folder / "log").unlink()
    assert names_in(tmp_path) == {"runs"}  # it was there before


def test_safetensors_keep_metadata_and_bits(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7, 3).T, "c": torch.randn(0, 2)}
    given = dict(tensors)
    files.write_safetensors(tmp_path / "file", given, {"model": "small"})
    assert given == {}
    with files.opened_safetensors(tmp_path / "file") as handle:
        assert handle.metadata() == {"model": "small"}
        assert_same_tensors({key: handle.get_tensor(key) for key in tensors}, tensors)
