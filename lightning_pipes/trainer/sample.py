"""A few samples of the training data, taken without anybody noticing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MOST = 1_000
"""Objects of a dataset that are searched for random generators."""


class NoSampleError(Exception):
    """Why there is no example of a batch."""


def batch_rows(loader: Any) -> int:
    """How many samples a batch of the loader has.

    Raises:
        NoSampleError: nobody knows, or samples can't be taken from it one by one.
    """
    if not isinstance(loader, DataLoader):
        raise NoSampleError(f"the training data come from a {type(loader).__name__}, no single DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise NoSampleError(
            f"{type(loader.dataset).__name__} is an IterableDataset: what is taken from it does not come again"
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise NoSampleError("the DataLoader has no batch_size")
    rows = min(size, len(loader.dataset))  # type: ignore[arg-type]
    if rows < 1:
        raise NoSampleError("the dataset is empty")
    return rows


def example_batch(loader: DataLoader[Any], rows: int) -> Any:
    """The first `rows` samples as a batch; no sampler is asked, and random generators that the dataset has are put
    back. Where the loader has workers one is started for it, so that files are opened there and not here."""
    indices = range(min(rows, len(loader.dataset)))  # type: ignore[arg-type]
    if loader.num_workers:
        once = DataLoader(
            Subset(loader.dataset, indices),
            batch_size=len(indices),
            collate_fn=loader.collate_fn,
            num_workers=1,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
        return next(iter(once))
    with _same_generators(loader.dataset):
        together = getattr(loader.dataset, "__getitems__", None)
        samples = together(list(indices)) if together else [loader.dataset[i] for i in indices]
        return loader.collate_fn(samples)


@contextmanager
def _same_generators(dataset: object) -> Iterator[None]:
    """Random generators of the dataset's own are afterwards as they were."""
    found = list(_generators(dataset))
    before = [state_of(generator) for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, before, strict=True):
            set_state(generator, state)


def _generators(dataset: object) -> Iterator[Any]:
    queue: deque[Any] = deque([dataset])
    seen: set[int] = set()
    while queue and len(seen) < _MOST:
        thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, (torch.Tensor, np.ndarray, type)):
            continue
        seen.add(id(thing))
        if isinstance(thing, GENERATORS):
            yield thing
        elif isinstance(thing, (list, tuple)):
            queue.extend(thing[:_MOST])
        elif isinstance(thing, dict):
            queue.extend(list(thing.values())[:_MOST])
        else:
            queue.extend(getattr(thing, "__dict__", {}).values())


def state_of(generator: Any) -> Any:
    """The state of a random generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """The other direction of `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
