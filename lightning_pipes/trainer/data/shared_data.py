"""Loading of data on one rank of a pipeline for all its ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from lightning_pipes.engine.compute.rng import random_state, same_random_state, set_random_state
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.data.batches import checksum_batch
from lightning_pipes.trainer.ranks.control import Control

Data = Literal["auto", "each", "one"]
"""The ranks of a pipeline that load batches: each rank, one rank for all ranks, or automatically one rank if the ranks
would load different batches.
"""

_CPU = torch.device("cpu")
_END_MARK = "the pass has ended"


class SharedLoader(DataLoader[Any]):
    """A DataLoader that returns the batches that one rank of a pipeline loads. `share_loader` creates it."""

    _sharing: BatchSharing

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return SharedPass(super().__iter__(), self._sharing)


class BatchSharing:
    """Exchange of batches between the ranks of a pipeline, if one of them loads for all.

    Args:
        control: the control channel of the ranks of the pipeline.
        source: the global rank that loads the batches.
        decided: whether this rank loads for all ranks in any case. Otherwise, the first batch decides.

    Attributes:
        is_shared: whether one rank loads for all ranks; None as long as this is not decided.
        loads: whether this rank is the rank that loads.
    """

    def __init__(self, control: Control, source: int, decided: bool) -> None:
        self.control, self._source = control, source
        self.is_shared: bool | None = True if decided else None
        self.loads = control.ranks[control.position] == source

    def __deepcopy__(self, _: dict[int, Any]) -> BatchSharing:
        return self  # a copied Trainer creates its own loaders when it runs

    def load(self, batches: Iterator[Any], is_first: bool) -> Any:
        """Return the next batch of a pass over the data.

        If the batch is shared, the random state of the CPU is set to the state of the rank that loads. Collective,
        unless each rank loads its own batches.

        Args:
            batches: the iterator of this rank.
            is_first: whether this is the first batch of the pass.

        Raises:
            StopIteration: the pass has ended.
            PipelineError: another rank loads the batches and has raised an error.
        """
        if self.is_shared is None:
            return self._compare(batches)
        return self._exchange(batches, is_first) if self.is_shared else next(batches)

    def _exchange(self, batches: Iterator[Any], is_first: bool) -> Any:
        message: Any = None
        if self.loads:
            before = random_state(_CPU)
            try:
                batch = next(batches)
            except StopIteration:
                message = (_END_MARK, None, None)
            except Exception as error:
                self.control.broadcast((f"{type(error).__name__}: {error}", None, None), self._source)
                raise
            else:
                state = random_state(_CPU)
                message = ("", batch, state if is_first or not same_random_state(before, state) else None)
        failed, batch, state = self.control.broadcast(message, self._source)
        if failed == _END_MARK:
            raise StopIteration
        if failed:
            raise PipelineError(f"rank {self._source} loads the data of all ranks, and failed: {failed}")
        if state is not None and not self.loads:
            set_random_state(state, _CPU)
        return batch

    def _compare(self, batches: Iterator[Any]) -> Any:
        """Return the first batch, and decide whether one rank loads for all by comparing the batches of all ranks."""
        batch = next(batches, _END_MARK)
        found = self.control.all_gather(_END_MARK if batch is _END_MARK else checksum_batch(batch))
        self.is_shared = len(set(found)) > 1 and _END_MARK not in found
        if self.is_shared and self.loads:
            warnings.warn(
                f"the ranks of one pipeline load different batches, so from now on rank {self._source} loads the "
                "batches of all of them, as with PipelineStrategy(data='one'). To let each rank load the batches, "
                "call lightning.seed_everything(...) before the data are created. If your code gives each rank a part "
                "of the data, remove that code, because all stages train on the same batches",
                stacklevel=2,
            )
        if self.is_shared:
            batch, state = self.control.broadcast((batch, random_state(_CPU)), self._source)
            set_random_state(state, _CPU)
        if batch is _END_MARK:
            raise StopIteration
        return batch


class SharedPass(Iterator[Any]):
    """One pass over the data of a SharedLoader."""

    def __init__(self, batches: Iterator[Any], sharing: BatchSharing) -> None:
        self._batches, self._sharing = batches, sharing
        self._is_first = True

    def __next__(self) -> Any:
        first, self._is_first = self._is_first, False
        return self._sharing.load(self._batches, first)


def share_loader(loader: object, data: Data, control: Control, source: int, replicas: int) -> object:
    """Return a loader that returns the same batches on all ranks of a pipeline. Collective.

    An object that is not a DataLoader is returned unchanged.

    Args:
        loader: the loader of this rank.
        data: "each" returns the loader unchanged, and with "one", the rank `source` loads for all ranks. With "auto",
            the first batch decides, but if the loaders of the ranks have different lengths or split the data, each rank
            is assumed to load its own part, and the loader is returned unchanged.
        control: the control channel of the ranks of the pipeline.
        source: the global rank that loads.
        replicas: the number of pipelines, each of which has its own part of the data.

    Raises:
        PipelineError: a sampler selects another part of the data on each rank of the pipeline.
    """
    if control.size == 1 or not isinstance(loader, DataLoader):
        return loader
    sampler = _distributed_sampler(loader, replicas)
    found = control.all_gather((_length(loader), None if sampler is None else getattr(sampler, "rank", None)))
    if sampler is not None and len({rank for _, rank in found}) > 1:
        raise PipelineError(
            f"the {type(sampler).__name__} of a DataLoader gives each of {sampler.num_replicas} processes another part "
            f"of the data, but the stages of a pipeline train on the same batches, and the run has {replicas} "
            f"pipeline{'s' * (replicas > 1)}. Leave the sampler out, and give the DataLoader shuffle=True: the Trainer "
            "shares out the data among pipelines"
        )
    is_split = len({length for length, _ in found}) > 1 or sampler is not None
    if data == "each" or (data == "auto" and is_split):
        return loader
    sharing = BatchSharing(control, source, data == "one")
    kind: type[Any] = type(loader)
    if not issubclass(kind, SharedLoader):
        kind = type(f"Shared{kind.__name__}", (SharedLoader, kind), {})
    made: SharedLoader = object.__new__(kind)
    made.__dict__.update(vars(loader), _sharing=sharing)
    if data == "one" and not sharing.loads:  # its passes are started for their random numbers only
        made.__dict__.update(num_workers=0, prefetch_factor=None, persistent_workers=False, _iterator=None)
    return made


def _distributed_sampler(loader: DataLoader[Any], replicas: int) -> Any:
    """Return the sampler that splits the data into more parts than there are replicas, or None."""
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    return next((each for each in samplers if getattr(each, "num_replicas", 1) > replicas), None)


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset has no length
        return None
