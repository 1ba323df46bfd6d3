"""Saving of checkpoints, synchronously or in the background."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import PipelineError
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer.checkpoint.checksums import is_sharded
from lightning_pipes.trainer.checkpoint.files import local_path, remove
from lightning_pipes.trainer.ranks.control import Control


class Saver:
    """Write the checkpoints of one pipeline, one after another.

    In the background, `save` and `save_parts` copy the data and return, and a thread writes the copy. The next
    checkpoint waits until the thread has finished. A checkpoint is removed after the checkpoints that were saved before
    the removal, and only if they were written. So an older checkpoint is never removed before a newer one is complete.

    Args:
        control: the communication between the ranks that hold the model together.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._store = cache(HashStore if control.size == 1 else control.watch.sub_store_factory())
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._number = 0
        self._warned = False
        self._error: PipelineError | None = None

    def save(self, checkpoint: dict[str, Any], path: str | Path, write: Callable[..., None], background: bool) -> None:
        """Write a whole checkpoint on the first rank.

        Args:
            checkpoint: the checkpoint.
            path: the file or folder to write.
            write: the function that writes it, called as `write(checkpoint, path)`.
            background: whether to return before the checkpoint is written.

        Raises:
            PipelineError: this checkpoint or an earlier one could not be written.
        """
        if self._control.position == 0:
            self._make_way(path)
            whole = snapshot_state(checkpoint) if background else checkpoint
            self._do(path, partial(write, whole, path), background)

    def save_parts(self, checkpoint: dict[str, Any], order: Sequence[str], path: str | Path, background: bool) -> None:
        """Write a folder to which every rank adds its part. All ranks have to call this method.

        Args:
            checkpoint: the part of this rank, as `plan_part` takes it.
            order: the keys of the whole state dict.
            path: the folder to write.
            background: whether to return before the checkpoint is written.

        Raises:
            PipelineError: the path is not on a file system, or this checkpoint or an earlier one could not be written.
        """
        from lightning_pipes.trainer.checkpoint.sharded import plan_part, write_part  # a slow import

        local = local_path(path)
        if local is None:
            raise PipelineError(f"checkpoint='sharded' writes folders of a file system, which {path} is not")
        self._make_way(path)
        self._number += 1
        own = snapshot_state(checkpoint) if background else checkpoint
        with self._remember_error(path):
            part = plan_part(own, order, local, self._number, self._control)
        self._do(path, partial(write_part, part, self._control, self._store()), background)

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Remove a checkpoint on the first rank, after the checkpoints that are being written."""
        if self._control.position == 0:
            self._do(path, partial(_remove, path, io), background=bool(self._jobs))

    def check(self) -> None:
        """Raise PipelineError if a checkpoint could not be written."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            PipelineError: a checkpoint could not be written.
        """
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        self.check()

    def close(self) -> None:
        """Wait until all checkpoints are written, and stop the thread. An error is reported as a warning."""
        try:
            self.wait()
        except PipelineError as error:
            warnings.warn(str(error), stacklevel=2)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _make_way(self, path: str | Path) -> None:
        began = read_seconds()
        busy = any(not job.done() for job in self._jobs)
        self.wait()
        if busy and not self._warned:
            self._warned = True
            warnings.warn(
                f"{path} had to wait {read_seconds() - began:.1f} s because the checkpoint before was still being "
                "written; save less often, or to a faster disk",
                stacklevel=2,
            )

    def _do(self, path: str | Path, job: Callable[[], None], background: bool) -> None:
        if not background:
            self._run(path, job)
            self.check()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_pipes checkpoints")
        self._jobs.append(self._thread.submit(self._run, path, job))

    def _run(self, path: str | Path, job: Callable[[], None]) -> None:
        if self._error is None:
            with suppress(PipelineError), self._remember_error(path):  # `check` raises it
                job()

    @contextmanager
    def _remember_error(self, path: str | Path) -> Iterator[None]:
        """Convert an error in the block into a PipelineError with the rank and the path, and store it for `check`."""
        try:
            yield
        except PeerFailure:
            raise
        except PipelineError as error:
            self._error = PipelineError(f"the checkpoint {path} could not be written: {error}")
            raise self._error from error
        except Exception as error:
            rank = self._control.ranks[self._control.position]
            text = f"rank {rank} could not write the checkpoint {path}: {type(error).__name__}: {error}"
            self._error = PipelineError(text)
            raise self._error from error


def _remove(path: str | Path, io: CheckpointIO) -> None:
    local = local_path(path)
    if local is not None and is_sharded(local):
        remove(local)
    else:
        io.remove_checkpoint(path)


def snapshot_state(tree: Any) -> Any:
    """Return a copy that does not change when the tensors and objects are modified, with all tensors on the CPU."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"]
    return copy.deepcopy(tree, {id(leaf): leaf.detach().cpu() for leaf in leaves})
