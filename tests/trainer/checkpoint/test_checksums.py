"""Tests that damaged checkpoints are refused by name, and that no code in an index is executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_pipes import consolidate
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import watch_ranks
from lightning_pipes.trainer.checkpoint import files
from lightning_pipes.trainer.checkpoint.checksums import INDEX_FILE
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO
from lightning_pipes.trainer.checkpoint.saving import Saver
from tests.trainer.checkpoint.runs import OneRank, fit

WAY_OUT = "Use an earlier checkpoint, or another copy of this one"


def checkpoint(value: float = 1.0) -> dict[str, Any]:
    return {"state_dict": {"a": torch.full((5, 3), value), "b": torch.arange(7) * value}, "epoch": int(value)}


def write_file(path: Path, value: float = 1.0) -> None:
    AtomicCheckpointIO().save_checkpoint(checkpoint(value), path)


def read_file(path: Path) -> Any:
    return AtomicCheckpointIO().load_checkpoint(path)


def write_folder(path: Path, value: float = 1.0) -> None:
    saver = Saver(OneRank())  # type: ignore[arg-type]
    saver.save_parts(checkpoint(value), ["a", "b"], path, background=False)


def read_folder(path: Path) -> Any:
    whole = path.with_name("consolidated")
    consolidate(path, whole)
    return torch.load(whole)


def same(found: Any, value: float = 1.0) -> bool:
    """Return whether a loaded checkpoint equals the one that was written."""
    wanted = checkpoint(value)
    return found["epoch"] == wanted["epoch"] and all(
        torch.equal(found["state_dict"][key], tensor) for key, tensor in wanted["state_dict"].items()
    )


def refused(path: Path, read: Callable[[Path], Any]) -> str:
    """Check that reading the checkpoint is refused, and return the message."""
    with pytest.raises(PipelineError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert WAY_OUT in str(error.value)
    return str(error.value)


def flipped(content: bytes, stride: int) -> Iterator[bytes]:
    """Yield copies of the content with one flipped bit, in every `stride`-th byte."""
    choice = random.Random(0)
    for position in range(choice.randrange(stride), len(content), stride):
        changed = bytearray(content)
        changed[position] ^= 1 << choice.randrange(8)
        yield bytes(changed)


def test_no_bit_of_a_file_can_change(tmp_path):
    path = tmp_path / "last.ckpt"
    write_file(path)
    assert same(read_file(path))
    content = path.read_bytes()
    for changed in flipped(content, 1):
        path.write_bytes(changed)
        refused(path, read_file)


def test_no_bit_of_a_folder_can_change(tmp_path):
    folder = tmp_path / "last.ckpt"
    write_folder(folder)
    assert same(read_folder(folder))
    names = sorted(os.listdir(folder))
    assert names == [INDEX_FILE, "__0_0.distcp", "checkpoint.pt"]
    for name in names:
        content = (folder / name).read_bytes()
        for changed in flipped(content, 1 if name == INDEX_FILE else 17):
            (folder / name).write_bytes(changed)
            refused(folder, read_folder)
        (folder / name).write_bytes(content)
    assert same(read_folder(folder))


def test_files_that_end_too_early_or_late(tmp_path):
    path, folder = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    write_file(path)
    write_folder(folder)
    cases = [(path, path, read_file), *((folder / name, folder, read_folder) for name in os.listdir(folder))]
    for file, whole, read in cases:
        content = file.read_bytes()
        for length in (0, 1, 30, len(content) // 2, len(content) - 31, len(content) - 1):
            file.write_bytes(content[:length])
            said = refused(whole, read)
            assert length or "is empty" in said or "has 0 bytes" in said
        file.write_bytes(content + b"\0")
        refused(whole, read)
        file.write_bytes(content)


def test_missing_parts_and_parts_of_another_save(tmp_path):
    folder, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    write_folder(folder, 1.0)
    write_folder(other, 2.0)
    for name in os.listdir(folder):
        shutil.copy(folder / name, tmp_path / "kept")
        (folder / name).unlink()
        assert f"{name} is missing" in refused(folder, read_folder) or name == INDEX_FILE
        shutil.copy(other / name, folder / name)
        refused(folder, read_folder)
        shutil.copy(tmp_path / "kept", folder / name)
    assert same(read_folder(folder))
    (folder / INDEX_FILE).unlink()
    assert "no complete checkpoint" in refused(folder, read_file)


def test_other_readers_read_our_files(tmp_path):
    write_file(tmp_path / "a.ckpt")
    for mmap in (False, True):
        assert same(torch.load(tmp_path / "a.ckpt", mmap=mmap))
    write_folder(tmp_path / "b.ckpt")
    dcp_to_torch_save(tmp_path / "b.ckpt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert {key: value.tolist() for key, value in found.items()} == {
        f"state_dict/{key}": value.tolist() for key, value in checkpoint()["state_dict"].items()
    }


def without_sums(folder: Path) -> None:
    """Remove the checksums from a folder, which older versions wrote without them."""
    metadata = pickle.loads((folder / INDEX_FILE).read_bytes())
    metadata.planner_data = None
    (folder / INDEX_FILE).write_bytes(pickle.dumps(metadata))
    torch.save(torch.load(folder / "checkpoint.pt"), folder / "checkpoint.pt")


def test_files_of_older_versions_load(tmp_path):
    torch.save(checkpoint(), tmp_path / "a.ckpt")
    assert same(read_file(tmp_path / "a.ckpt"))
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content.replace(torch.full((5,), 1.0).numpy().tobytes(), bytes(20)))
    refused(tmp_path / "a.ckpt", read_file)  # torch's own checksums notice the change

    torch.save(checkpoint(), tmp_path / "b.ckpt", _use_new_zipfile_serialization=False)
    assert same(read_file(tmp_path / "b.ckpt"))
    torch.serialization.set_crc32_options(False)
    torch.save(checkpoint(), tmp_path / "c.ckpt")
    torch.serialization.set_crc32_options(True)
    assert same(read_file(tmp_path / "c.ckpt"))

    write_folder(tmp_path / "d.ckpt")
    without_sums(tmp_path / "d.ckpt")
    assert same(read_folder(tmp_path / "d.ckpt"))
    data = tmp_path / "d.ckpt" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    refused(tmp_path / "d.ckpt", read_folder)


def test_file_that_is_not_a_checkpoint(tmp_path):
    (tmp_path / "a.ckpt").write_text("hello")
    with pytest.raises(PipelineError, match=r"a.ckpt is damaged, or no checkpoint. "):
        read_file(tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError, match=r"b.ckpt"):
        read_file(tmp_path / "b.ckpt")


class Evil:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_nothing_in_an_index_is_run(tmp_path):
    folder, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    write_folder(folder)
    metadata = pickle.loads((folder / INDEX_FILE).read_bytes())
    metadata.planner_data = {"evil": Evil(marker)}
    for data in (pickle.dumps(Evil(marker)), pickle.dumps(metadata)):
        (folder / INDEX_FILE).write_bytes(data)
        for weights_only in (None, True, False):
            with suppress(PipelineError):
                consolidate(folder, tmp_path / "whole", weights_only)
            assert not marker.exists()


def test_objects_take_a_word_of_the_user(tmp_path):
    """Check that a folder with arbitrary objects can be consolidated only with `weights_only=False`."""
    folder, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    evil = {**checkpoint(), "hyper_parameters": Evil(marker)}
    Saver(OneRank()).save_parts(evil, ["a", "b"], folder, background=False)  # type: ignore[arg-type]
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            consolidate(folder, tmp_path / "whole", weights_only)
    assert not marker.exists()
    consolidate(folder, tmp_path / "whole", weights_only=False)
    assert marker.exists()


def test_temporary_names_can_t_be_known_and_links_are_not_followed(tmp_path, monkeypatch):
    names = {files.temporary_for(tmp_path / "a.ckpt").name for _ in range(100)}
    assert len(names) == 100
    (tmp_path / "target").write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "00" * n)
    files.temporary_for(tmp_path / "a.ckpt").symlink_to("target")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a.ckpt")
    files.temporary_for(tmp_path / "b.ckpt").symlink_to(".")
    with pytest.raises(PipelineError, match="FileExistsError"):
        write_folder(tmp_path / "b.ckpt")
    assert (tmp_path / "target").read_text() == "precious"


def trained(rank: int, folder: str, strategy: dict[str, Any], resume: Path | None) -> None:
    fit(Path(folder), strategy, [], resume)


@pytest.mark.parametrize("strategy", [{}, {"checkpoint": "sharded"}])
def test_no_rank_resumes_from_a_damaged_checkpoint(strategy, tmp_path):
    first = watch_ranks(trained, 2, str(tmp_path), strategy, None, timeout=120)
    assert not [outcome.error for outcome in first if outcome.error]
    (path,) = tmp_path.glob("*.ckpt")
    file = path if path.is_file() else path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    outcomes = watch_ranks(trained, 2, str(tmp_path / "again"), strategy, path, timeout=120)
    assert all(outcome.error for outcome in outcomes)
    assert any(
        f"the checkpoint {file} is damaged" in outcome.error and WAY_OUT in outcome.error for outcome in outcomes
    )
