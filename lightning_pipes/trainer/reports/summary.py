"""ModelSummary and loggers show the whole model, not what is left of it on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipes.trainer import private_lightning as private


def show_module(trainer: pl.Trainer, module: pl.LightningModule) -> list[Callable[[], None]]:
    """Has the module shown while it is whole; returns what undoes that it is not shown later."""
    undo = [log_graphs(trainer, module)]
    if trainer.state.fn == TrainerFn.FITTING:
        undo.append(show_summaries(private.callbacks(trainer), trainer, module))
    return undo


def show_summaries(
    callbacks: Iterable[pl.Callback], trainer: pl.Trainer, module: pl.LightningModule
) -> Callable[[], None]:
    """Has every ModelSummary print the module as it is now, and not later; returns what undoes the latter."""
    shown = [c for c in callbacks if isinstance(c, ModelSummary)]
    for callback in shown:
        callback.on_fit_start(trainer, module)
        vars(callback)["on_fit_start"] = lambda *args: None

    def undo() -> None:
        for callback in shown:
            vars(callback).pop("on_fit_start", None)

    return undo


def log_graphs(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[], None]:
    """Has every logger log the graph of the module as it is now, and not later; returns what undoes the latter."""
    loggers = trainer.loggers if trainer.enable_autolog_hparams else []
    for logger in loggers:
        logger.log_graph(module)
        vars(logger)["log_graph"] = lambda *args: None

    def undo() -> None:
        for logger in loggers:
            vars(logger).pop("log_graph", None)

    return undo
