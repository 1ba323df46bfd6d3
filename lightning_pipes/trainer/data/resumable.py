"""Training data that continue at the position at which a checkpoint was written.

Lightning restores its counters in the middle of an epoch, but the loader begins with its first batch again. Therefore,
the training loaders of a pipeline store their position: the random state at the beginning of the pass over the data,
and the number of batches that were used for training. A resumed loader begins the pass with the same random state and
skips the same number of entries of the sampler without loading them.
"""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_pipes.engine.compute.rng import forked_rng, random_state, set_random_state
from lightning_pipes.trainer.data.shared_data import SharedLoader
from lightning_pipes.trainer.private_lightning import LoaderOfSamples

State = dict[str, Any]

_CPU = torch.device("cpu")
_MAX_LOADED_AHEAD = 2
"""The number of batches that can be loaded but not used for training.

These are the batch that Lightning prefetches, and a batch whose step failed.
"""


class ResumableLoader(LoaderOfSamples):
    """DataLoader that can save and restore its position. `make_resumable` creates it from any DataLoader."""

    _start: State | None = None
    _samples: Samples | None = None
    had_workers = False
    """Whether the resumed run had persistent workers."""

    def resume_from(self, state: State, compare: bool) -> None:
        """Make the next pass continue at the position `state`.

        Args:
            state: the position, as `LoaderPass.state` or `ResumableLoader.state` returns it.
            compare: whether to warn if the sampler returns other entries than before.
        """
        found = sorted(_generators(self))
        if found != sorted(state["generators"]):
            warnings.warn(
                f"the training loader has random generators {found}, but the loader that wrote the checkpoint had "
                f"{sorted(state['generators'])}. Samples may be repeated or skipped in this epoch. Use the same "
                "loader and sampler as the run that wrote the checkpoint",
                stacklevel=2,
            )
        self._start = {**state, "compare": compare}
        self.draw_as(state)
        self.__dict__["had_workers"] = state["workers"]

    def draw_as(self, state: State) -> None:
        """Set the random generators of this loader and its samplers to `state`."""
        _set_generators(_generators(self), state["generators"])

    def begin_anew(self) -> None:
        """Make the next pass begin with the first batch."""
        self._start = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self._start = self._start, None
        if start is not None and start["wrapped"]:  # a shorter one of several loaders, in its second pass or later
            self._start = {**start, "wrapped": False}
            return iter(())
        return LoaderPass(self, start)

    def state(self) -> State:
        """Return the position of the loader between two passes."""
        state = {"generators": _states(_generators(self)), "wrapped": False, "pass": None}
        return {**state, "workers": self.has_workers}

    def batches(self, skip: int, workers: bool) -> Iterator[Any]:
        """Return an iterator over one pass of the original loader.

        Args:
            skip: the number of entries of the sampler to skip.
            workers: whether to draw random numbers as if there were workers from an earlier pass.
        """
        samples = self.samples()
        if workers and not self.has_workers:
            generators = _states(_generators(self))
            with forked_rng(_CPU):
                samples.skip = None
                super().__iter__()
            _set_generators(_generators(self), generators)
        samples.skip = skip
        batches = super().__iter__()  # with workers, it begins two passes over the sampler and uses the second
        samples.skip = 0
        return batches

    @property
    def skips_samples(self) -> bool:
        """Whether skipping an entry of the sampler skips a batch."""
        kinds = (kind for kind in type(self).__mro__ if not issubclass(kind, ResumableLoader | SharedLoader))
        own = next(kind for kind in kinds if "__iter__" in vars(kind)) is DataLoader
        return own and not isinstance(self.dataset, IterableDataset)

    def wrap_sampler(self, sampler: Iterable[Any]) -> Samples:
        """Return the wrapper of the sampler or of the batch sampler."""
        if self._samples is None:
            in_flight = self.num_workers * (self.prefetch_factor or 0)
            self.__dict__["_samples"] = Samples(sampler, _MAX_LOADED_AHEAD + in_flight)
        assert self._samples is not None
        return self._samples


def make_resumable(loader: DataLoader[Any]) -> ResumableLoader:
    """Return a loader with the same dataset and samplers that can save its position. The original is not modified."""
    kind: type[Any] = type(loader)
    if not issubclass(kind, ResumableLoader):
        kind = type(f"Resumable{kind.__name__}", (ResumableLoader, kind), {})
    made: ResumableLoader = object.__new__(kind)
    made.__dict__.update(vars(loader))
    for name in ("_start", "_samples", "had_workers"):
        made.__dict__.pop(name, None)
    return made


class Samples(Iterable[Any]):
    """Sampler that can begin a pass after the first entries.

    Args:
        sampler: the sampler of indices, or of lists of indices.
        kept: the number of the last entries whose checksums are kept.
    """

    def __init__(self, sampler: Iterable[Any], kept: int) -> None:
        self._sampler = sampler
        self._kept = kept
        self.skip: int | None = 0  # None: skip all entries
        self.latest: SamplePass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which does not include a running pass."""
        return {**self.__dict__, "latest": None}

    def __len__(self) -> int:
        return len(cast(Any, self._sampler))

    def __iter__(self) -> SamplePass:
        entries = iter(()) if self.skip is None else iter(self._sampler)
        self.latest = SamplePass(entries, self.skip or 0, self._kept)
        return self.latest


class SamplePass(Iterator[Any]):
    """Iterator over the entries of a sampler after the first `skip` entries."""

    def __init__(self, entries: Iterator[Any], skip: int, kept: int) -> None:
        self._entries = entries
        self._skip = skip
        self._given = 0
        self._checksums: deque[int] = deque(maxlen=kept + 1)

    def __next__(self) -> Any:
        self.advance()
        return self._next()

    def advance(self) -> None:
        """Skip the first entries, unless this was done before."""
        while self._skip:
            self._skip -= 1
            self._next()

    def checksum(self, number: int) -> int | None:
        """Return the checksum of entry `number`, counted from 1, or None if it is no longer available."""
        back = self._given - number
        return self._checksums[-1 - back] if 0 <= back < len(self._checksums) else None

    def _next(self) -> Any:
        entry = next(self._entries)
        self._given += 1
        self._checksums.append(zlib.crc32(repr(entry).encode()))
        return entry


class LoaderPass(Iterator[Any]):
    """One pass over a loader.

    With `start`, the pass begins at that position, when its first batch is requested.
    """

    def __init__(self, loader: ResumableLoader, start: State | None) -> None:
        self._loader = loader
        self._start = start
        self._batches: Iterator[Any] | None = None
        self._samples: SamplePass | None = None
        self._delivered = 0
        self._exhausted = False
        self._began: State | None = None  # the start of the sampler with workers
        self._first: State | None = None  # the start of the sampler without workers
        self._before: deque[State] = deque(maxlen=_MAX_LOADED_AHEAD)
        self._workers: bool = loader.has_workers or loader.had_workers
        if start is None:
            self._begin()

    def __next__(self) -> Any:
        if self._batches is None:
            self._resume()
        assert self._batches is not None
        if self._first is None:
            self._first = _moment(self._loader)
        self._before.append(random_state(_CPU))
        try:
            batch = next(self._batches)
        except StopIteration:
            self._exhausted = True
            raise
        self._delivered += 1
        return batch

    def state(self, ahead: int, batches: int) -> State:
        """Return the position of the pass.

        Args:
            ahead: the number of batches that were loaded and have to be loaded again.
            batches: the number of batches of this epoch that were used for training.
        """
        generators = _states(_generators(self._loader))
        if self._batches is None:
            assert self._start is not None
            return {**self._start, "generators": generators}
        taken = self._delivered if self._exhausted else max(0, self._delivered - ahead)
        again = bool(ahead) and not self._exhausted and ahead <= len(self._before)
        return {
            "generators": generators,
            "wrapped": not self._exhausted and taken < batches,
            "workers": self._loader.has_workers or self._loader.had_workers,
            "pass": {
                "workers": self._workers,
                "began": self._began,
                "first": self._first,
                "taken": taken,
                "before": self._before[-ahead] if again else None,
                "checksum": self._samples.checksum(taken) if self._samples is not None else None,
            },
        }

    def _begin(self, skip: int = 0) -> None:
        if self._began is None:
            self._began = _moment(self._loader)
        self._batches = self._loader.batches(skip, self._workers)
        self._samples = self._loader.samples().latest if self._loader.skips_samples else None

    def _resume(self) -> None:
        assert self._start is not None
        earlier = self._start["pass"]
        if earlier is None:  # the checkpoint was written between two passes
            self._begin()
            return
        here = random_state(_CPU)
        taken, self._workers = earlier["taken"], earlier["workers"]
        self._began, self._first = earlier["began"], earlier["first"]
        _set_moment(self._loader, earlier["began"])
        self._begin(taken if self._loader.skips_samples else 0)
        assert self._batches is not None
        if self._first is not None:
            _set_moment(self._loader, self._first)
        try:
            if self._samples is not None:
                self._samples.advance()
            else:
                for _ in range(taken):
                    next(self._batches)
        except StopIteration:
            self._exhausted = True
        self._delivered = taken
        self._compare(earlier)
        set_random_state(earlier["before"] or here, _CPU)

    def _compare(self, earlier: State) -> None:
        found = self._samples.checksum(earlier["taken"]) if self._samples is not None else None
        if not self._exhausted and found == earlier["checksum"]:
            return
        if self._start is not None and self._start["compare"] and earlier["taken"]:
            warnings.warn(
                f"the sampler of the training data returned different entries for the first {earlier['taken']} "
                "batches of the epoch than in the run that wrote the checkpoint. Samples are repeated or skipped in "
                "this epoch. Check whether the dataset or the batch size has changed, or whether other code uses the "
                "random numbers of the sampler. Give the sampler its own torch.Generator",
                stacklevel=2,
            )


def _moment(loader: DataLoader[Any]) -> State:
    return {"random": random_state(_CPU), "generators": _states(_generators(loader))}


def _set_moment(loader: DataLoader[Any], moment: State) -> None:
    set_random_state(moment["random"], _CPU)
    _set_generators(_generators(loader), moment["generators"])


def _generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the random generators of a loader and its samplers, by the paths of their attributes."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def look(owner: object, path: str) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            at = f"{path}{name}"
            if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, Random)):
                if id(value) not in seen:
                    found[at] = value
                seen.add(id(value))
            elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                look(value, f"{at}.")

    look(loader, "")
    return found


def _states(generators: dict[str, Any]) -> State:
    return {path: _generator_state(g) for path, g in generators.items()}


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, Random) else generator.get_state()


def _set_generators(generators: dict[str, Any], states: State) -> None:
    for path, generator in generators.items():
        if path not in states:
            continue
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = states[path]
        elif isinstance(generator, Random):
            generator.setstate(states[path])
        else:
            generator.set_state(states[path])
