"""Which of Lightning's barriers a sibling of a job array has to wait at.

They keep what a hook does on one rank, such as writing a file, before what comes next on the others. A sibling that
waits keeps the turns of all, so it passes those before which nothing of the user's has run.
"""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.step.hook_table import HOOKS

_AFTER = {"run-stage": (), **{row.barrier: (row.name,) for row in HOOKS if row.barrier is not None}}
"""By the name of a barrier the hooks that run between it and the one before, or the exchange of starting weights."""
_OWN = ("lightning.", "lightning_pipes.")


def has_purpose(name: str | None, trainer: pl.Trainer) -> bool:
    """Whether code of the user's may count on the barrier of that name."""
    if name not in _AFTER:
        return True
    if name == "_CheckpointConnector.resume_end" and trainer.ckpt_path is not None:
        return True  # nobody may write it anew before all have read it
    parts = (trainer.lightning_module, getattr(trainer, "datamodule", None), *private.callbacks(trainer))
    return any(_is_users(hook, part) for part in parts for hook in _AFTER[name])


def _is_users(hook: str, part: object) -> bool:
    owner = next((cls for cls in type(part).__mro__ if hook in vars(cls)), None)
    return hook in getattr(part, "__dict__", ()) or (owner is not None and not owner.__module__.startswith(_OWN))
