"""The Trainer that most tests train with."""

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


def make_trainer(**options: Any) -> pl.Trainer:
    """Return a Trainer of two processes on the CPU that draws and logs nothing, unless `options` say so.

    It saves checkpoints where a callback does.
    """
    saves = any(isinstance(callback, Checkpoint) for callback in options.get("callbacks") or ())
    return pl.Trainer(**{**QUIET, "enable_checkpointing": saves, **options})
