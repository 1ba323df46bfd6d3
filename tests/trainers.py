"""The Trainer that most tests use."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Default arguments: two processes on the CPU, without logger, progress bar and model summary."""


def make_trainer(**options: Any) -> pl.Trainer:
    """Return a Trainer with two CPU processes and without output, unless `options` change this.

    Checkpoints are enabled only if one of the callbacks saves checkpoints.
    """
    saves = any(isinstance(callback, Checkpoint) for callback in options.get("callbacks") or ())
    return pl.Trainer(**{**QUIET, "enable_checkpointing": saves, **options})
