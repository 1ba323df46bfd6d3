"""Versions of weights share a device: each is there while it is read, and the next ones are loaded meanwhile.

B5 reads                  loads meanwhile       goes to the host      on the host, in the order of their reads
weights 3 of stage 0      weights 4             weights 7             weights 5, weights 6
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.engine.residency.swap import MovableTensors


class VersionMemory:
    """The weight versions of one rank's stages.

    A version is read-only, so it goes to the host once, right after its creation, and is loaded from there.

    Args:
        memory: the memory that the versions share.
        device: the device of this rank.

    Attributes:
        upcoming: returns the keys of the versions that are read next, the first one first.
    """

    def __init__(self, memory: StateMemory, device: torch.device) -> None:
        self._swap, self._prefetch = memory.states(device), memory.prefetch
        self.upcoming: Callable[[], Iterable[Hashable]] = tuple
        self._kept: set[Hashable] = set()

    def add_version(self, key: Hashable, bound: MovableTensors) -> None:
        """Add a version, a copy of the tensors of `bound`, which uses the copy from now on.

        Raises:
            PlanError: no room for it.
        """
        self._swap.make(key, bound)
        self._kept.add(key)
        self._swap.write_back(key)

    @contextmanager
    def lease_version(self, key: Hashable) -> Iterator[None]:
        """Keep a version on the device for as long as the block runs.

        Raises:
            PlanError: no room for it.
        """
        with self._swap.lease_state(key):
            self.look_ahead()
            yield

    def drop_version(self, key: Hashable) -> None:
        """Drop a version that is not read any more."""
        self._swap.discard_state(key)
        self._kept.discard(key)

    def look_ahead(self) -> None:
        """Load the versions that are read next, as far as there is room."""
        if self._kept:
            self._swap.predict(self._next())
            if self._prefetch:
                self._swap.prefetch_states()

    def _next(self) -> Iterator[Hashable]:
        """Yield the kept versions in the order of their next reads."""
        missing = set(self._kept)
        for key in self.upcoming():
            if key in missing:
                missing.remove(key)
                yield key
                if not missing:
                    return
