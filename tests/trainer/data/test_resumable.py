"""Tests that a run that resumes from a checkpoint is bitwise equal to the uninterrupted run."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpointing import to_native, to_portable
from lightning_pipes.trainer.data.resumable import ResumableLoader, make_resumable
from tests.cases import selected_values
from tests.trainer.lit import WIDTH, Lit, data, differences, plain_values, quiet
from tests.trainers import make_trainer

EPOCHS = 3


class Augmented(Dataset[Any]):
    """A dataset that adds noise from all three random generators and counts its loaded samples."""

    loads = 0

    def __init__(self, rows: int = 22, noise: bool = True) -> None:
        self.base = data(rows)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        Augmented.loads += 1
        x, y = self.base[index]
        if self.noise:
            x = x + 0.1 * torch.randn(WIDTH, dtype=x.dtype) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, y


class Stream(IterableDataset[Any]):
    """An iterable dataset of unknown length with noise."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in data(22):
            yield x + 0.1 * torch.randn(WIDTH, dtype=x.dtype), y


class NumpySampler(Sampler[int]):
    """A sampler that shuffles with random generators that torch does not know."""

    def __init__(self, rows: int) -> None:
        self.rows, self.rng, self.other = rows, np.random.default_rng(7), random.Random(8)

    def __iter__(self) -> Iterator[int]:
        order = self.rng.permutation(self.rows).tolist()
        self.other.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.rows


class Doubling(DataLoader[Any]):
    """A loader that overrides the iteration."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y in super().__iter__():
            yield x * 2, y


class Own(DataLoader[Any]):
    """A loader that saves and loads its own state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = self.skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self.skip = self.skip, 0
        return self.after(skip, super().__iter__())

    def after(self, skip: int, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number >= skip:
                self.taken = number + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["taken"]


def weighted() -> Sampler[int]:
    return WeightedRandomSampler(torch.arange(1.0, 23), 22)


LOADERS: dict[str, Callable[[], Any]] = {
    "global": lambda: DataLoader(Augmented(), 8, shuffle=True),
    "own generator": lambda: DataLoader(Augmented(), 8, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "workers": lambda: DataLoader(
        Augmented(noise=False), 4, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "lasting workers": lambda: DataLoader(
        Augmented(noise=False), 4, shuffle=True, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    ),
    "batch sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(range(22), replacement=True), 5, False)
    ),
    "distributed": lambda: DataLoader(Augmented(), 4, sampler=DistributedSampler(range(22), 1, 0, seed=3)),
    "weighted": lambda: DataLoader(Augmented(), 8, sampler=weighted()),
    "numpy": lambda: DataLoader(Augmented(), 8, sampler=NumpySampler(22)),
    "no batching": lambda: DataLoader(
        [(x[None], y[None]) for x, y in data(5)], batch_size=None, sampler=RandomSampler(range(5))
    ),
    "stream": lambda: DataLoader(Stream(), 8),
    "own iteration": lambda: Doubling(Augmented(noise=False), 8, shuffle=True),
    "own state": lambda: Own(Augmented(noise=False), 8),
    "several": lambda: {
        "a": DataLoader(Augmented(), 4, shuffle=True),
        "b": DataLoader(Augmented(10), 4, shuffle=True, generator=torch.Generator().manual_seed(9)),
    },
    "several streams": lambda: {"a": DataLoader(Stream(), 4), "b": DataLoader(Augmented(10), 4, shuffle=True)},
}


class LitSeveral(Lit):
    """Accepts batches of one loader or of a dict of two, and shrinks its weights after every epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            rows = min(len(batch["a"][0]), len(batch["b"][0]))
            batch = (batch["a"][0][:rows] + batch["b"][0][:rows], batch["a"][1][:rows])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.9)


class Trace(Callback):
    """Records the events of a run, and stores the number of previous events in each checkpoint."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append(("batch", trainer.current_epoch, batch_idx, rate, plain_values(outputs["loss"])))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch starts", trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch ends", trainer.current_epoch))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.events.append(("validated", plain_values(trainer.callback_metrics["val_loss"])))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["events"] = len(self.events)


def fit(folder: Path, loader: Any, resume: Path | None = None, ranks: int = 2, **options: Any) -> dict[str, Any]:
    """Train once and return the events and the final weights."""
    quiet()
    pl.seed_everything(3, verbose=False)
    strategy = options.pop("strategy", {"schedule": "1f1b", "microbatches": 2})
    saving = options.pop("saving", {"every_n_train_steps": 1})
    module = LitSeveral(dropout=0.2).double()
    trace = Trace()
    trainer = make_trainer(
        devices=ranks,
        strategy=PipelineStrategy(**strategy),
        precision="64-true",
        callbacks=[trace, ModelCheckpoint(folder, save_top_k=-1, **saving)],
        **{"max_epochs": EPOCHS, **options},
    )
    trainer.fit(module, loader, DataLoader(data(13), batch_size=5), ckpt_path=resume, weights_only=False)
    return {"events": trace.events, "weights": plain_values(dict(module.state_dict()))}


def resumed(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """For several checkpoints of a run, return the differences between resuming there and the uninterrupted run.

    These are the first checkpoint, the first one that is followed by the end of an epoch or by a validation, and the
    next one.
    """
    make = LOADERS[name]
    whole = fit(folder, make(), **options)
    after = {path: torch.load(path, weights_only=False)["events"] for path in folder.glob("*.ckpt")}
    paths = sorted(after, key=after.__getitem__)
    left = {path: whole["events"][after[path] :] for path in paths}
    between = next(n for n, path in enumerate(paths) if left[path][0][0] != "batch")
    found = {}
    for path in {paths[0], *paths[between : between + 2]}:
        if any(event == "batch" for event, *_ in left[path]):
            part = fit(folder / "again", make(), path, **options)
            found[path.name] = differences(part, {**whole, "events": left[path]}, tolerance=0.0)
    return found


def all_resumed(rank: int, folder: str, numbers: list[int]) -> list[Any]:
    """Return the result of `resumed` for each of the given cases."""
    return [resumed(CASES[number][0], Path(folder) / str(number), CASES[number][1]) for number in numbers]


CASES: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in LOADERS],
    ("global", {"val_check_interval": 1}),
    ("global", {"check_val_every_n_epoch": 2}),
    ("global", {"limit_val_batches": 0}),
    ("global", {"accumulate_grad_batches": 2}),
    ("global", {"max_steps": 8, "max_epochs": -1}),
    ("global", {"max_steps": 8, "max_epochs": -1, "saving": {"every_n_epochs": 1}}),
    ("global", {"saving": {"every_n_epochs": 1}}),
    ("global", {"val_check_interval": 1, "saving": {"every_n_epochs": 1}}),
    ("stream", {"val_check_interval": 2}),
    ("stream", {"limit_val_batches": 0}),
    ("stream", {"saving": {"every_n_epochs": 1}}),
]


RARE = {
    "own generator",
    "lasting workers",
    "batch sampler",
    "distributed",
    "weighted",
    "no batching",
    "own iteration",
    "several",
}
"""Loaders that differ little from another loader. Their cases run only as slow tests."""


def is_slow(number: int) -> bool:
    """Return whether a case is a slow test.

    These are the rare loaders, and three of four of the cases with other settings.
    """
    name, options = CASES[number]
    return number % 4 != 1 if options else name in RARE


@cache
def all_found() -> dict[int, Any]:
    """Return for each case the results of all ranks. All cases run in the same processes."""
    numbers = selected_values(test_it_is_the_run_that_was_not_interrupted, "number")
    with TemporaryDirectory() as folder:
        by_rank = run_ranks(all_resumed, 2, folder, numbers, timeout=400)
    return dict(zip(numbers, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{name}, {options}", marks=[pytest.mark.slow] if is_slow(number) else [])
        for number, (name, options) in enumerate(CASES)
    ],
)
def test_it_is_the_run_that_was_not_interrupted(number):
    for found in all_found()[number]:
        assert len(found) > 1
        assert {path: wrong for path, wrong in found.items() if wrong} == {}


def on_ranks(rank: int, ranks: int, folder: str, resume: Path | None) -> dict[str, Any]:
    return fit(Path(folder), LOADERS["global"](), resume, ranks, val_check_interval=2)


def test_resumed_in_the_middle_of_an_epoch_on_other_numbers_of_stages(tmp_path):
    """Check a run that resumes on 4 stages in the first epoch and on 1 stage in the second.

    It is compared with an uninterrupted run on 2 stages.
    """
    whole = run_ranks(on_ranks, 2, 2, str(tmp_path / "2"), None, timeout=60)[0]
    past = 0
    for before, step, ranks in [(2, 2, 4), (4, 4, 1)]:
        path = tmp_path / str(before) / f"epoch={step // 3}-step={step}.ckpt"
        past += torch.load(path, weights_only=False)["events"]
        part = run_ranks(on_ranks, ranks, ranks, str(tmp_path / str(ranks)), path, timeout=60)[0]
        assert differences(part, {**whole, "events": whole["events"][past:]}) == []


def passed(loader: ResumableLoader, batches: int) -> tuple[list[Any], Any]:
    """Return the first batches of a pass and the state after them, saved and loaded with `weights_only=True`."""
    passing = iter(loader)
    taken = [plain_values(next(passing)) for _ in range(batches)]
    file = io.BytesIO()
    torch.save(to_portable(passing.state(0, batches)), file)
    file.seek(0)
    return taken, to_native(torch.load(file, weights_only=True))


def test_skipped_samples_are_not_loaded():
    loader = make_resumable(LOADERS["numpy"]())
    _, state = passed(loader, 2)
    again = make_resumable(LOADERS["numpy"]())
    again.resume_from(state, compare=True)
    Augmented.loads = 0
    assert len(next(iter(again))[0]) == 6
    assert Augmented.loads == 6


@pytest.mark.parametrize("change", ["nothing", "batch size", "sampler", "generators"])
def test_sampler_that_returns_other_indices_is_noticed(change):
    size = 5 if change == "batch size" else 4
    sampler = RandomSampler(range(20)) if change in ("sampler", "generators") else NumpySampler(20)
    if change == "sampler":
        sampler.rng, sampler.other = np.random.default_rng(7), random.Random(8)
    _, state = passed(make_resumable(DataLoader(data(20), 4, sampler=NumpySampler(20))), 3)
    loader = make_resumable(DataLoader(data(20), size, sampler=sampler))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.resume_from(state, compare=True)
        next(iter(loader))
    said = {"nothing": [], "generators": ["has random generators", "returned different entries"]}
    assert len(caught) == len(said.get(change, ["returned different entries"]))
    for warning, part in zip(caught, said.get(change, ["returned different entries"]), strict=True):
        assert part in str(warning.message)


def test_the_loader_itself_is_left_alone():
    loader = Doubling(Augmented(), 8, shuffle=True)
    made = make_resumable(loader)
    assert isinstance(made, Doubling)
    assert (made.dataset, made.sampler, made.batch_sampler) == (loader.dataset, loader.sampler, loader.batch_sampler)
    assert len(made) == len(loader) == 3
    assert type(make_resumable(made)) is type(made)
    iter(made)
    assert type(loader) is Doubling
    assert "_start" not in vars(loader)
