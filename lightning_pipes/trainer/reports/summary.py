"""Summaries and graphs of the whole model, not of what one rank keeps of it."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.patches import Patches


def show_module(trainer: pl.Trainer, module: pl.LightningModule, patches: Patches) -> None:
    """Print and log the module while it is whole, and not again until `patches` are closed."""
    for logger in trainer.loggers if trainer.enable_autolog_hparams else []:
        logger.log_graph(module)
        _silence(logger, "log_graph", patches)
    if trainer.state.fn == TrainerFn.FITTING:
        for callback in private.callbacks(trainer):
            if isinstance(callback, ModelSummary):
                callback.on_fit_start(trainer, module)
                _silence(callback, "on_fit_start", patches)


def _silence(owner: object, name: str, patches: Patches) -> None:
    """Have a method do nothing; it may be shared with other runs, so that what closes first restores it for all."""
    vars(owner)[name] = lambda *args: None
    patches.callback(vars(owner).pop, name, None)
