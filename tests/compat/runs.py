"""A row of the compatibility table, and the Trainer runs that collect its results."""

from __future__ import annotations

import csv
import io
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.compute.reducer import is_distributed
from tests.trainer.lit import Lit, data, differences, plain_values, quiet
from tests.trainers import make_trainer

Found = dict[str, Any]
"""Results of a run on one rank, by name. The key `error` exists only if the run ended with an error."""


def loaders() -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(data(), batch_size=8),
        "val_dataloaders": DataLoader(data(13), batch_size=5),
    }


@dataclass(frozen=True)
class Row:
    """A feature, and the run that demonstrates it.

    Attributes:
        area: the section of the table.
        name: the name of the feature in the table.
        module: creates the LightningModule.
        trainer: takes the run's folder and returns options of the Trainer. It is called for every run, because
            callbacks have state.
        loaders: returns the loaders for `Trainer.fit`.
        evaluate_on: returns the loader for evaluation.
        watch: takes the Trainer after the run and the run's folder, and returns another value to compare. On ranks
            other than 0, None is not compared, so that only rank 0 needs to read files.
        check: asserts more about the results of the ranks and of the plain run.
        strategy: settings of PipelineStrategy, or a registered name.
        cuts: the first layers of stages 1, 2, ..., by the number of processes; empty if they do not matter.
        evaluate: whether the run also validates, tests and predicts.
        then: takes the Trainer, the module and the folder after training, and returns another value to compare.
        resume: whether a second run resumes from the checkpoint of the first, and doubles the number of epochs.
        tolerance: the tolerance of all comparisons.
        differs: names of results that are not compared.
        raises: a part of the error message with which both runs end.
        refused: a part of the error message with which the pipeline ends on every rank.
        refused_on: the same, by the number of processes.
        warned: a part of a warning from a rank of the pipeline, which trains differently. Nothing else is compared.
        reason: a note for the table: why the feature is refused, what does not work yet, or another remark.
        not_yet: whether the row is expected to fail.
        lacks: returns the reason why the row cannot run on this machine, or an empty string.
        slow: whether the row takes long.
    """

    area: str
    name: str
    module: Callable[[], Any] = Lit
    trainer: Callable[[Path], dict[str, Any]] = lambda folder: {}
    loaders: Callable[[], dict[str, Any]] = loaders
    evaluate_on: Callable[[], DataLoader[Any]] = lambda: DataLoader(data(13), batch_size=5)
    watch: Callable[[pl.Trainer, Path], Any] = lambda trainer, folder: None
    check: Callable[[list[Found], Found], None] = lambda ranks, plain: None
    strategy: dict[str, Any] | str | None = None
    cuts: dict[int, list[int]] = field(default_factory=dict)
    evaluate: bool = False
    then: Callable[[pl.Trainer, Any, Path], Any] = lambda trainer, module, folder: None
    resume: bool = False
    tolerance: float = 1e-10
    differs: frozenset[str] = frozenset()
    raises: str = ""
    refused: str = ""
    refused_on: dict[int, str] = field(default_factory=dict)
    warned: str = ""
    reason: str = ""
    not_yet: bool = False
    lacks: Callable[[], str] = lambda: ""
    slow: bool = False


class Keeper(Callback):
    """A callback that records the outputs, learning rates and metrics that callbacks of users receive."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.rates: list[list[float]] = []
        self.metrics: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(plain_values(outputs))
        self.rates.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append(plain_values(dict(trainer.callback_metrics)))


def train(row: Row, strategy: Callable[[], Any], ranks: int, folder: Path) -> Found:
    """Run a row with `strategy()` and return its results.

    If the row resumes, a second run starts from the checkpoint of the first.
    """
    quiet()
    found: Found = {}
    trainer: pl.Trainer | None = None
    keeper = Keeper()
    written = io.StringIO()
    warned: list[warnings.WarningMessage] = []
    try:
        with redirect_stdout(written), redirect_stderr(written), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for epochs in (2, 4) if row.resume else (2,):
                keeper = Keeper()
                module, trainer = made(row, keeper, strategy(), ranks, folder, epochs)
                checkpoint = {"ckpt_path": folder / "first.ckpt", "weights_only": False} if epochs > 2 else {}
                trainer.fit(module, **row.loaders(), **checkpoint)
                if row.resume and epochs == 2:
                    trainer.save_checkpoint(folder / "first.ckpt")
            if row.evaluate:
                loader = row.evaluate_on
                found["validated"] = trainer.validate(module, loader(), verbose=False)
                found["tested"] = trainer.test(module, loader(), verbose=False)
                found["predicted"] = plain_values(trainer.predict(module, loader()))
            found["then"] = plain_values(row.then(trainer, module, folder))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    if torch.are_deterministic_algorithms_enabled():  # this call imports a compiler, which takes a third of a second
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    found["written"] = written.getvalue()
    found["warnings"] = [str(each.message) for each in warned]
    if trainer is None:
        return found
    if "error" in found:
        with suppress(Exception):  # the run may have ended before it wrote a file
            found["watched"] = row.watch(trainer, folder)
        return found
    found.update(
        watched=row.watch(trainer, folder),
        outputs=keeper.outputs,
        rates=keeper.rates,
        validations=keeper.metrics,
        weights=plain_values({key: value for key, value in module.state_dict().items() if not _is_partial(value)}),
        metrics=plain_values(dict(trainer.callback_metrics)),
        logged=plain_values(dict(trainer.logged_metrics)),
        steps=trainer.global_step,
        epochs=trainer.current_epoch,
    )
    if trainer.is_global_zero:
        found["rows"] = rows_of_csv(folder / "version_0" / "metrics.csv")
    return found


def _is_partial(value: Any) -> bool:
    """Return whether some or all values of a tensor are on other ranks."""
    return isinstance(value, torch.Tensor) and (value.is_meta or is_distributed(value))


def made(row: Row, keeper: Keeper, strategy: Any, ranks: int, folder: Path, epochs: int) -> tuple[Any, pl.Trainer]:
    """Return the module and the Trainer of a row."""
    pl.seed_everything(3, verbose=False)
    options: dict[str, Any] = {
        "max_epochs": epochs,
        "default_root_dir": folder,
        "num_sanity_val_steps": 1,
        "precision": "64-true",
        "log_every_n_steps": 1,
        "logger": CSVLogger(str(folder), name="", version=0),
        **row.trainer(folder),
    }
    options["callbacks"] = [keeper, *options.get("callbacks", [])]
    module = row.module()
    if options["precision"] == "64-true":
        module.double()  # Lightning restores weights before its plugin makes them double
    return module, make_trainer(devices=ranks, strategy=strategy, **options)


def rows_of_csv(path: Path) -> list[dict[str, float]]:
    """Return the logged rows, with measurements of the machine replaced by 0."""
    if not path.exists():
        return []
    with open(path) as file:
        return [
            {k: 0.0 if k.startswith("DeviceStats") else float(v) for k, v in row.items() if v}
            for row in csv.DictReader(file)
        ]


def pipeline(row: Row, settings: dict[str, Any], ranks: int) -> Any:
    """Return the strategy of a row.

    Args:
        row: the row. Its own settings take precedence over the given ones, except for `module`.
        settings: the settings of the strategy.
        ranks: the number of processes.
    """
    if isinstance(row.strategy, str):
        return row.strategy
    cut = {"partition": row.cuts[ranks]} if row.cuts else {}
    forced = {"module": settings["module"]} if "module" in settings else {}
    return PipelineStrategy(**{"microbatches": 4, **settings, **cut, **(row.strategy or {}), **forced})


def on_a_rank(rank: int, names: list[str], settings: dict[str, Any], ranks: int, folder: str) -> list[Found]:
    """Run rows one after another in this process, up to the first one that ends with an error."""
    from tests.compat.rows import ROWS

    results: list[Found] = []
    for name in names:
        row = ROWS[name]
        results.append(
            train(row, partial(pipeline, row, settings, ranks), ranks, Path(folder) / str(names.index(name)))
        )
        if "error" in results[-1]:
            break
    return results


def on_one_process(row: Row) -> Found:
    """Run a row without a pipeline and return its results. The caller's random state is restored afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    folder = Path(tempfile.mkdtemp())
    try:
        return train(row, lambda: "auto", 1, folder)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        shutil.rmtree(folder)


def compare(row: Row, ranks: Iterable[Found], plain: Found) -> list[str]:
    """Return the differences between the results of the ranks and of the plain run."""
    wrong: list[str] = []
    for rank, found in enumerate(ranks):
        if "error" in found:
            return [*wrong, f"rank {rank}: {found['error']}"]
        for what in sorted(plain.keys() - {"written", "warnings"} - row.differs):
            if rank > 0 and (what not in found or (what == "watched" and found[what] is None)):
                continue  # written on global rank zero only
            wrong += [f"rank {rank}, {d}" for d in differences(found.get(what), plain[what], row.tolerance, what)]
    return wrong
