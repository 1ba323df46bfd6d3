"""Files and folders that are complete or do not exist, at whatever time the process is killed.

They are written under a temporary name in the same folder, flushed to disk, and renamed.
"""

from __future__ import annotations

import copy
import ctypes
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checkpoint.checksums import CHECKPOINT_WAY_OUT, SealedZip, Sum, check

_AT_CWD, _EXCHANGE = -100, 2  # of Linux


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written so that neither a kill nor a full disk leaves an incomplete file.

    Lightning itself writes to TMPDIR and moves the file. If TMPDIR is on another file system, this is a copy, which can
    be interrupted. Paths that are not on a local file system are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write the file. If this fails, raise the error and keep the previous file."""
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            with replace_path(local) as temporary:
                save(checkpoint, temporary)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Return the content of the file, by default on the CPU, as torch.load reads it.

        Raises:
            PipelineError: the file has changed since it was written, or it is not a checkpoint.
        """
        local = local_path(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only)
        return load(local, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or a folder."""
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove(local)


def local_path(path: str | Path) -> Path | None:
    """Return the path if it is on a file system, which may be mounted, or None for URLs such as s3://."""
    protocol, separator, rest = str(path).partition("://")
    return Path(path) if not separator else Path(rest) if protocol == "file" else None


def save(thing: Any, path: Path) -> Sum:
    """Write a file for torch.load, flush it to disk, and return its size and checksum.

    Raises:
        FileExistsError: the name exists. This includes symbolic links, which are not followed.
        OSError: the file could not be written.
    """
    fault_point("checkpoint.write")
    with (
        raise_os_error(),
        open(path, "xb") as file,
    ):  # with a path, torch.save blocks all other threads
        sealed = SealedZip(file)
        torch.save(thing, sealed)
        sealed.seal()
        file.flush()
        os.fsync(file.fileno())
        return sealed.sum


def load(path: Path, **options: Any) -> Any:
    """Check the file, and return its content by torch.load with these options.

    Raises:
        FileNotFoundError: the file does not exist.
        PipelineError: the file has changed since it was written, or it is not a checkpoint.
    """
    if path.is_dir():
        raise PipelineError(
            f"{path} is a folder, and no complete checkpoint that checkpoint='sharded' has written: those have an "
            f"index, .metadata. {CHECKPOINT_WAY_OUT}"
        )
    check(path)
    try:
        return torch.load(path, **options)
    except Exception as error:
        if isinstance(error, OSError) or zipfile.is_zipfile(path):  # the file is complete: keep the error of torch
            raise
        raise PipelineError(
            f"{path} is damaged, or no checkpoint. {CHECKPOINT_WAY_OUT}. torch.load says: {error}"
        ) from error


@contextmanager
def raise_os_error() -> Iterator[None]:
    """Raise the error of the operating system instead of torch.save's error about a position in the file."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextmanager
def replace_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` at the end of the block."""
    temporary = temporary_for(path)
    try:
        yield temporary
        put(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise


def temporary_for(path: Path) -> Path:
    """Return a new path in the folder of `path`.

    The folder is created if necessary, and temporary files of processes that have ended are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(path.parent):
        owner = _owner(entry.name)
        if owner is not None and owner.has_ended():
            with suppress(OSError):  # another process may be removing it
                _remove_now(Path(entry.path))
    return path.with_name(_temporary_name(path.name))


def _temporary_name(name: str) -> str:
    """Return an unpredictable name that contains the identity of this process."""
    return f".{name[:100]}.{Process.current()}.{secrets.token_hex(8)}.saving"


def _owner(name: str) -> Process | None:
    """Return the process in the result of `_temporary_name`, or None for any other name."""
    match = re.fullmatch(r"\..+\.([0-9a-f-]+)\.[0-9a-f]+\.saving", name)
    return None if match is None else Process.parse(match[1])


def put(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder in one step. An existing file or folder with this name is removed.

    If a folder is involved and the system can't exchange two names, as over NFS, this takes two steps. If the process
    is killed between them, `find_existing` finds the earlier checkpoint.
    """
    fault_point("checkpoint.put")
    if not os.path.lexists(path) or not (_is_folder(path) or _is_folder(temporary)):
        os.replace(temporary, path)
        sync_folder(path.parent)
        return
    if not _exchange(temporary, path):
        aside = _aside(path)
        _remove_now(aside)
        os.rename(path, aside)
        os.rename(temporary, path)
        temporary = aside
    sync_folder(path.parent)
    _remove_now(temporary)


def find_existing(path: Path) -> Path:
    """Return the path, or the path of its earlier content if a process was killed while it replaced the path."""
    return _aside(path) if not os.path.lexists(path) and _aside(path).exists() else path


def remove(path: Path) -> None:
    """Remove a file or folder if it exists. A folder is renamed before its files are removed."""
    if _is_folder(path):
        hidden = temporary_for(path)
        os.rename(path, hidden)
        path = hidden
    _remove_now(path)


def _remove_now(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step, and return False if the system or the file system can't do this."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_AT_CWD, os.fsencode(a), _AT_CWD, os.fsencode(b), _EXCHANGE) == 0


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    with suppress(OSError):  # not every file system can flush folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_mapped(reader: CheckpointIO, path: str | Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Load a checkpoint, but read its weights on first use; return None if this is not possible.

    Args:
        reader: the plugin that reads the checkpoint.
        path: the file of the checkpoint.
        weights_only: as in torch.load.
    """
    if type(reader) not in (TorchCheckpointIO, AtomicCheckpointIO) or not os.path.isfile(path):
        return None
    whole: Mapping[str, Any] = load(Path(path), map_location="cpu", mmap=True, weights_only=weights_only)
    # Other entries outlive the loading, so they are copied: the file may be overwritten.
    return {k: v if k in ("state_dict", "optimizer_states") else copy.deepcopy(v) for k, v in whole.items()}


class CheckpointWriter:
    """Settings for writing the checkpoints of a strategy.

    Attributes:
        background: whether checkpoints are written while training continues.
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self._io: CheckpointIO | None = None

    @property
    def io(self) -> CheckpointIO:
        """The plugin that writes and reads the files of `checkpoint="full"`."""
        if self._io is None:
            self._io = AtomicCheckpointIO()
        elif isinstance(self._io, private.WrappingCheckpointIO):
            self._io.checkpoint_io = AtomicCheckpointIO()  # only used if it has none
        return self._io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        if type(io) is AsyncCheckpointIO:  # it would remove the previous checkpoint before the next one is written
            self.background = True
            io = io.checkpoint_io
        self._io = io

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Write checkpoints synchronously inside the block."""
        before, self.background = self.background, False
        try:
            yield
        finally:
            self.background = before
