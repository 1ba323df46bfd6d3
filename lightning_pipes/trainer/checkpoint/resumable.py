"""Training data that go on where a checkpoint was written.

Lightning restores its counters in the middle of an epoch, but the loader starts again with its first batch. So the
training loaders of a pipeline remember where they are: with which random numbers the pass over the data began, and how
many batches were trained on. A resumed loader begins the pass with the same random numbers and drops that many entries
of the sampler, without loading them.
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
from lightning_pipes.trainer.module.shared_data import SharedLoader
from lightning_pipes.trainer.private_lightning import LoaderOfSamples

State = dict[str, Any]

_CPU = torch.device("cpu")
_AHEAD = 2
"""Batches that can be loaded and not trained on: Lightning's look-ahead, and one in whose step something failed."""


class ResumableLoader(LoaderOfSamples):
    """A DataLoader that knows where its passes are; made by `make_resumable` from any other."""

    _start: State | None = None
    _samples: Samples | None = None
    had_workers = False
    """Whether the run that goes on here had workers that stay from pass to pass."""

    def resume_from(self, state: State, compare: bool) -> None:
        """Let the next pass go on where `state` was taken.

        Args:
            compare: warn when the sampler does not give what it gave then.
        """
        found = sorted(_generators(self))
        if found != sorted(state["generators"]):
            warnings.warn(
                f"the training loader has random generators {found}, that of the checkpoint had "
                f"{sorted(state['generators'])}; samples may come twice or not at all in this epoch",
                stacklevel=2,
            )
        self._start = {**state, "compare": compare}
        self.draw_as(state)
        self.__dict__["had_workers"] = state["workers"]

    def draw_as(self, state: State) -> None:
        """Set the random generators of this loader and its samplers to `state`."""
        _set_generators(_generators(self), state["generators"])

    def begin_anew(self) -> None:
        """Let the next pass begin with the first batch."""
        self._start = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self._start = self._start, None
        if start is not None and start["wrapped"]:  # a shorter loader of several, in its second pass or later
            self._start = {**start, "wrapped": False}
            return iter(())
        return LoaderPass(self, start)

    def state(self) -> State:
        """Return where the loader is between two passes."""
        state = {"generators": _states(_generators(self)), "wrapped": False, "pass": None}
        return {**state, "workers": self.has_workers}

    def batches(self, skip: int, workers: bool) -> Iterator[Any]:
        """A pass of the loader that this one was made from.

        Args:
            skip: leaves out so many entries of the sampler.
            workers: draws random numbers as if workers were there from an earlier pass.
        """
        samples = self.samples()
        if workers and not self.has_workers:
            generators = _states(_generators(self))
            with forked_rng(_CPU):
                samples.skip = None
                super().__iter__()
            _set_generators(_generators(self), generators)
        samples.skip = skip
        batches = super().__iter__()  # with workers it makes two passes over the sampler, and uses the second
        samples.skip = 0
        return batches

    @property
    def skips_samples(self) -> bool:
        """Whether leaving out an entry of the sampler leaves out a batch."""
        kinds = (kind for kind in type(self).__mro__ if not issubclass(kind, ResumableLoader | SharedLoader))
        own = next(kind for kind in kinds if "__iter__" in vars(kind)) is DataLoader
        return own and not isinstance(self.dataset, IterableDataset)

    def wrap_sampler(self, sampler: Iterable[Any]) -> Samples:
        """Return the stand-in for the sampler, or for the batch sampler."""
        if self._samples is None:
            in_flight = self.num_workers * (self.prefetch_factor or 0)
            self.__dict__["_samples"] = Samples(sampler, _AHEAD + in_flight)
        assert self._samples is not None
        return self._samples


def make_resumable(loader: DataLoader[Any]) -> ResumableLoader:
    """Return the same loader, with the same dataset and samplers, that can say where it is; the original is left
    alone."""
    kind: type[Any] = type(loader)
    if not issubclass(kind, ResumableLoader):
        kind = type(f"Resumable{kind.__name__}", (ResumableLoader, kind), {})
    made: ResumableLoader = object.__new__(kind)
    made.__dict__.update(vars(loader))
    for name in ("_start", "_samples", "had_workers"):
        made.__dict__.pop(name, None)
    return made


class Samples(Iterable[Any]):
    """A sampler with passes that can begin after the first entry.

    Args:
        sampler: gives indices, or lists of them.
        kept: how many entries at the end of what was given can be distinguished later.
    """

    def __init__(self, sampler: Iterable[Any], kept: int) -> None:
        self._sampler = sampler
        self._kept = kept
        self.skip: int | None = 0  # None: all of them
        self.latest: SamplePass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy; a pass under way is not copied."""
        return {**self.__dict__, "latest": None}

    def __len__(self) -> int:
        return len(cast(Any, self._sampler))

    def __iter__(self) -> SamplePass:
        entries = iter(()) if self.skip is None else iter(self._sampler)
        self.latest = SamplePass(entries, self.skip or 0, self._kept)
        return self.latest


class SamplePass(Iterator[Any]):
    """Gives the entries of a sampler after the first `skip`."""

    def __init__(self, entries: Iterator[Any], skip: int, kept: int) -> None:
        self._entries = entries
        self._skip = skip
        self._given = 0
        self._checksums: deque[int] = deque(maxlen=kept + 1)

    def __next__(self) -> Any:
        self.advance()
        return self._next()

    def advance(self) -> None:
        """Drop the entries to be left out, if that has not been done."""
        while self._skip:
            self._skip -= 1
            self._next()

    def checksum(self, number: int) -> int | None:
        """Return the checksum of entry `number`, counted from 1; None if it is too old."""
        back = self._given - number
        return self._checksums[-1 - back] if 0 <= back < len(self._checksums) else None

    def _next(self) -> Any:
        entry = next(self._entries)
        self._given += 1
        self._checksums.append(zlib.crc32(repr(entry).encode()))
        return entry


class LoaderPass(Iterator[Any]):
    """One pass over a loader; with `start` it begins when its first batch is asked for, and where that says."""

    def __init__(self, loader: ResumableLoader, start: State | None) -> None:
        self._loader = loader
        self._start = start
        self._batches: Iterator[Any] | None = None
        self._samples: SamplePass | None = None
        self._delivered = 0
        self._exhausted = False
        self._began: State | None = None  # where the sampler begins if there are workers
        self._first: State | None = None  # where it begins if there are none
        self._before: deque[State] = deque(maxlen=_AHEAD)
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
        """Return where the pass is.

        Args:
            ahead: so many batches were loaded and are to be loaded again.
            batches: were trained on in this epoch.
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
                f"after {earlier['taken']} batches of the epoch the sampler of the training data is not where it was "
                "when the checkpoint was written. Samples come twice or not at all. Has the dataset or the batch "
                "size changed, or does the sampler share its random numbers? Give it a torch.Generator of its own",
                stacklevel=2,
            )


def _moment(loader: DataLoader[Any]) -> State:
    return {"random": random_state(_CPU), "generators": _states(_generators(loader))}


def _set_moment(loader: DataLoader[Any], moment: State) -> None:
    set_random_state(moment["random"], _CPU)
    _set_generators(_generators(loader), moment["generators"])


def _generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the random generators that belong to a loader and its samplers, by the path of their attribute."""
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
