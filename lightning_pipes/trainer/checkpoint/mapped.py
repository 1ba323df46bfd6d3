"""Checkpoints with weights that are read from their file on first use."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO, load


def load_mapped(reader: CheckpointIO, path: str | Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Load a checkpoint with weights that are read on first use; None where that is not possible.

    Args:
        reader: of such files.
    """
    if type(reader) not in (TorchCheckpointIO, AtomicCheckpointIO) or not os.path.isfile(path):
        return None
    whole: Mapping[str, Any] = load(Path(path), map_location="cpu", mmap=True, weights_only=weights_only)
    # What outlives the loading must not: the file may be overwritten.
    return {k: v if k in ("state_dict", "optimizer_states") else copy.deepcopy(v) for k, v in whole.items()}
