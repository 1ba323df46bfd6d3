"""The registry of rows. The module `rows` imports every module that adds rows to it."""

from __future__ import annotations

from typing import Any

from tests.compat.runs import Row, loaders

ROWS: dict[str, Row] = {}


def row(area: str, name: str, trainer: Any = None, **settings: Any) -> None:
    """Add a row to the registry.

    Args:
        area: the section of the table.
        name: the name of the row, which must be unique.
        trainer: options of the Trainer, or a function that takes the run's folder and returns them.
        settings: other attributes of the `Row`.
    """
    if isinstance(trainer, dict):
        options = trainer
        settings["trainer"] = lambda folder: dict(options)
    elif trainer is not None:
        settings["trainer"] = trainer
    assert name not in ROWS, name
    ROWS[name] = Row(area, name, **settings)


def batches(train: Any = None, val: Any = None) -> dict[str, Any]:
    """Return the usual loaders, with other ones for training or validation if they are given."""
    given = {"train_dataloaders": train, "val_dataloaders": val}
    return {**loaders(), **{k: v for k, v in given.items() if v is not None}}
