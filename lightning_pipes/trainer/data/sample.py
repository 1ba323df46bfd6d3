"""Samples of the training data, which are taken without changing the state of the data."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lightning_pipes.engine.compute.rng import seed_all

_LOADING_TIMEOUT = 60.0
"""The seconds within which a few samples must be loaded."""


_MAX_LOADED_BATCHES = 8
"""The number of batches that are loaded if the first ones are None, which Lightning skips."""


class NoSampleError(Exception):
    """The reason why no example of a batch is available."""


def batch_rows(loader: Any, streams: bool = False) -> int:
    """Return the number of samples of a batch from the loader.

    Args:
        loader: the data of the run.
        streams: whether to accept an `IterableDataset`. If a copy of it takes samples from a queue or a pipe, they are
            lost.

    Raises:
        NoSampleError: the loader does not specify the number, or single samples cannot be taken from it.
    """
    joined = _joined_loaders(loader)
    if joined:
        return batch_rows(joined[0], streams)  # its samples are counted when the batch is cut
    if not isinstance(loader, DataLoader):
        raise NoSampleError(f"the training data come from a {type(loader).__name__}, not from DataLoaders")
    is_stream = isinstance(loader.dataset, IterableDataset)
    if is_stream and not streams:
        raise NoSampleError(
            f"{type(loader.dataset).__name__} is an IterableDataset, so samples taken for measuring could be missing "
            "in training"
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        size = _first_batch_size(loader.batch_sampler)
    rows = size if is_stream else min(size, len(loader.dataset))  # type: ignore[arg-type]
    if rows < 1:
        raise NoSampleError("the dataset is empty")
    return rows


def _first_batch_size(batch_sampler: Any) -> int:
    """Return the number of samples in the first batch from a copy of a batch sampler without a batch_size.

    Raises:
        NoSampleError: there is no such sampler, or its batches have no length.
    """
    try:
        return len(next(iter(copy.deepcopy(batch_sampler))))
    except Exception as error:  # an error of the user's code
        raise NoSampleError(
            f"the DataLoader has no batch_size, and its batch_sampler gives no first batch ({type(error).__name__}: "
            f"{error})"
        ) from error


def _joined_loaders(data: Any) -> list[DataLoader[Any]]:
    """Return the loaders of a collection, or an empty list for other data.

    Lightning combines a batch of each of these loaders into a training batch.
    """
    if isinstance(data, CombinedLoader):
        data = data.iterables
    loaders = [] if isinstance(data, DataLoader) else pytree.tree_leaves(data)
    return loaders if all(isinstance(each, DataLoader) for each in loaders) else []


class _Batches(IterableDataset[Any]):
    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _keep(batch: Any) -> Any:
    return batch


def loader_of_batches(data: Any) -> Any:
    """Return a DataLoader for samples from an iterable of batches, and any other data unchanged."""
    if isinstance(data, DataLoader | CombinedLoader | Mapping | Sequence) or not isinstance(data, Iterable):
        return data
    return DataLoader(_Batches(data), batch_size=None, collate_fn=_keep)


def expected_batches(trainer: pl.Trainer, loader: Any) -> float:
    """Return the number of training batches of a run, or infinity if its settings do not limit it."""
    limit, epochs, steps = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
    try:
        each = float(max(map(len, _joined_loaders(loader) or [loader])))
    except TypeError:  # the loader has no length
        each = inf
    if limit is not None:
        each = min(each, limit) if isinstance(limit, int) else each * limit
    by_epochs = inf if epochs is None or epochs < 0 else each * epochs
    return min(by_epochs, inf if steps < 0 else float(steps * trainer.accumulate_grad_batches))


def example_batch(loader: Any, rows: int) -> Any:
    """Return the first `rows` samples as a batch, without using a sampler.

    If there are several loaders, each provides a batch. Loaders with the batch size of the first loader provide `rows`
    samples. The other loaders provide a batch of their full size, because their tensors are not cut into micro-batches.

    The samples are loaded and collated in a separate process, so that counters, caches and random generators of this
    process do not change. Rows of plain tensors are copied in this process, because this changes nothing.
    """
    joined = _joined_loaders(loader)
    if joined:
        most = batch_rows(loader, streams=True)
        sizes = [batch_rows(each, streams=True) for each in joined]
        batches = [example_batch(each, rows if n == most else n) for each, n in zip(joined, sizes, strict=True)]
        iterables = loader.iterables if isinstance(loader, CombinedLoader) else loader
        return pytree.tree_unflatten(batches, pytree.tree_structure(iterables))
    if _is_of_tensors(loader.dataset) and loader.collate_fn is default_collate and loader.worker_init_fn is None:
        return default_collate([loader.dataset[n] for n in range(rows)])
    return _load(loader, rows)


def _is_of_tensors(data: Any) -> bool:
    if type(data) is Subset:
        return type(data.indices) in (list, range) and _is_of_tensors(data.dataset)
    return type(data) is TensorDataset and all(type(t) is torch.Tensor and not t.requires_grad for t in data.tensors)


def first_item(loader: Any, streams: bool = False) -> Any:
    """Return the first item of a dataset of batches (`batch_size=None`), which is loaded as in `example_batch`.

    Args:
        loader: the data of the run.
        streams: see `batch_rows`.

    Raises:
        NoSampleError: the items of the dataset are not batches.
    """
    is_stream = is_of_batches(loader) and isinstance(loader.dataset, IterableDataset)
    if not is_of_batches(loader) or (not streams if is_stream else not len(loader.dataset)):
        batch_rows(loader)  # this raises an error with the reason
        raise NoSampleError("the items of the dataset are not batches")
    return _load(loader, None)


def load_batch(loader: Any, most: int, streams: bool = False) -> Any:
    """Return a batch of at most `most` samples, or the first item if the items of the dataset are batches.

    Args:
        loader: the data of the run.
        most: the largest number of samples.
        streams: see `batch_rows`.

    Raises:
        NoSampleError: no batch is available.
    """
    if is_of_batches(loader):
        return first_item(loader, streams)
    return example_batch(loader, min(most, batch_rows(loader, streams)))


def first_batch(loader: Any, device: torch.device) -> Any:
    """Return a batch that a copy of the sampler composes, or the batch of `load_batch` if this is not possible.

    The random numbers of the sampler are drawn after fixed seeds, so that every run gets the same batch from the same
    data. Call this function in `forked_rng`.

    Args:
        loader: the data of the run.
        device: the device whose generator is seeded, too.

    Raises:
        NoSampleError: no batch is available.
    """
    data = loader_of_batches(loader)
    if (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    ):
        seed_all(0, device, everything=True)
        with suppress(Exception):  # the user's sampler can't be copied, or has no batch
            sampler = copy.deepcopy(data.batch_sampler, {id(data.dataset): data.dataset})
            numbers = [*next(iter(sampler))]
            return _load(data, len(numbers), numbers)
    return load_batch(data, sys.maxsize, streams=True)


def is_of_batches(loader: Any) -> bool:
    """Return whether the items of a loader's dataset are whole batches."""
    return isinstance(loader, DataLoader) and loader.batch_size is None and loader.batch_sampler is None


def _load(loader: DataLoader[Any], rows: int | None, numbers: Sequence[int] = ()) -> Any:
    """Return the first batch of `rows` samples that is not None, or the first item if `rows` is None.

    Args:
        loader: loads and collates the samples.
        rows: the number of samples.
        numbers: the numbers of the samples in the dataset; by default, the first ones.
    """
    forks = "fork" in multiprocessing.get_all_start_methods()
    for tried in (1, _MAX_LOADED_BATCHES):
        data: Any = loader.dataset
        if not isinstance(data, IterableDataset):
            data = Subset(data, numbers or range(min(tried * (rows or 1), len(data))))
        once = DataLoader(
            data,
            batch_size=rows,
            collate_fn=loader.collate_fn,
            num_workers=1,
            timeout=_LOADING_TIMEOUT,
            worker_init_fn=loader.worker_init_fn if loader.num_workers else None,
            multiprocessing_context=loader.multiprocessing_context or ("fork" if forks else None),
        )
        with _same_offsets():
            passing = iter(once)
            batch = next((batch for batch in islice(passing, tried) if batch is not None), None)
            del passing  # this ends the process
        if batch is not None:
            return batch
    raise NoSampleError("the data begin with None, or are empty")


@contextmanager
def _same_offsets() -> Iterator[None]:
    """Restore the positions of open files at the end of the block, because a forked process shares them."""
    before = {}
    for file in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the file has no position
            before[int(file.name)] = os.lseek(int(file.name), 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, offset in before.items():
            with suppress(OSError):
                if os.lseek(number, 0, os.SEEK_CUR) != offset:
                    os.lseek(number, offset, os.SEEK_SET)
