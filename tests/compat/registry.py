"""The registry of the rows; each module that adds some is imported by `rows`."""

from __future__ import annotations

from typing import Any

from tests.compat.runs import Row, loaders

ROWS: dict[str, Row] = {}


def row(area: str, name: str, trainer: Any = None, **settings: Any) -> None:
    """Adds a row; `trainer` is a dict of options, or a function of the run's folder that makes one."""
    if isinstance(trainer, dict):
        options = trainer
        settings["trainer"] = lambda folder: dict(options)
    elif trainer is not None:
        settings["trainer"] = trainer
    assert name not in ROWS, name
    ROWS[name] = Row(area, name, **settings)


def batches(train: Any = None, val: Any = None) -> dict[str, Any]:
    given = {"train_dataloaders": train, "val_dataloaders": val}
    return {**loaders(), **{k: v for k, v in given.items() if v is not None}}
