"""Management of the states on a device: prefetching, eviction, and their costs.

A state has a key and a size. Examples are the weights and optimizer states of a job on a stage, a layer, or a version
of weights. States that do not fit into the budget of the device are on the host. This module makes only the decisions.
A `Copier` moves the data on streams, on threads, or on a virtual clock, so that the engine and the simulator make the
same decisions.

    residency.predict(keys)               # the keys of probable next leases, in order
    residency.lease(key, write=True)      # the state is on the device and stays there
    ...                                   # compute
    residency.release(key)                # the state may be evicted, and is written back first if it has changed
    residency.prefetch()                  # loads as many future states as the budget allows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Generic, Protocol, TypeVar

from lightning_pipes.ir import PlanError

Key = TypeVar("Key")
LAST_POSITION = 1 << 62
"""A position after all known leases."""


class Copier(Protocol):
    """Moves states between host and device.

    A ticket identifies one copy. The copies of one direction are made one after another.
    """

    def load(self, key: object, size: int, after: int | None) -> int:
        """Start to copy a state to the device after the copy `after` has ended, and return the ticket."""

    def store(self, key: object, size: int) -> int:
        """Start to copy a state to the host, and return the ticket of the copy."""

    def free_place(self, key: object) -> None:
        """Evict the state from the device. Its memory is free when the copies from and to it have ended."""

    def is_done(self, ticket: int) -> bool:
        """Return whether the copy has ended."""

    def wait(self, ticket: int) -> int:
        """Wait until the copy has ended, and return the duration of the wait in nanoseconds.

        If only the device waits and the host continues, the method returns the waits of earlier calls as soon as they
        are known.
        """


@dataclass
class Statistics:
    """Counters of leases and copies.

    Attributes:
        hits: leases whose state was on the device.
        late: leases whose state was on its way to the device.
        misses: leases whose state had to be loaded.
        stall_ns: nanoseconds of waiting.
        bytes_in: bytes copied to the device.
        bytes_out: bytes copied to the host.
        prefetched: states that were prefetched.
        refused: prefetches for which there was no room.
        wasted: states that were loaded and evicted without being leased.
        again: hits of the next micro-batch of a batch, which used the same state just before.
        cleared: the number of times that all states without a lease were evicted because a computation ran out of
            memory.
        peak_bytes: the largest number of bytes of states on the device at the same time.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    stall_ns: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    prefetched: int = 0
    refused: int = 0
    wasted: int = 0
    again: int = 0
    cleared: int = 0
    peak_bytes: int = 0

    @classmethod
    def sum_devices(cls, each: Iterable[Statistics]) -> Statistics:
        """Return the sums over several devices."""
        return cls(*map(sum, zip(*map(astuple, each), strict=True)))

    @property
    def leases(self) -> int:
        """The number of leases."""
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        """The hits divided by all leases, without the leases in `again`; 1 without any leases."""
        counted = self.leases - self.again
        return (self.hits - self.again) / counted if counted else 1.0


@dataclass
class _Held:
    """A state on the device.

    Attributes:
        ticket: the ticket of the copy that loaded the state; None if the state was created on the device.
    """

    ticket: int | None
    used: int  # the turn of its last lease or, without a lease, of its loading
    leased: int = 0
    dirty: bool = False
    fresh: bool = True  # True if it has not been leased since it was loaded


class Residency(Generic[Key]):
    """The states of one device.

    The state whose predicted lease is furthest in the future is evicted first, which is the best order if predictions
    are right (Belady). A state is never evicted for another one that is needed later. Without predictions, the least
    recently used state is evicted.

    Args:
        budget: the bytes of the device that states may use.
        sizes: the bytes of every state. All states are on the host at first.
        copier: moves the states.
        slots: the largest number of states on the device; None for no limit in addition to the budget.

    Raises:
        PlanError: a single state is larger than the budget.
    """

    def __init__(self, budget: int, sizes: Mapping[Key, int], copier: Copier, slots: int | None = None) -> None:
        self.statistics = Statistics()
        self._budget, self._copier = budget, copier
        self._slots = LAST_POSITION if slots is None else slots
        self._sizes: dict[Key, int] = {}
        self._held: dict[Key, _Held] = {}
        self._used = 0
        self._turn = 0
        self._predicted: dict[Key, int] = {}  # position by key
        self._leaving: dict[Key, int] = {}  # tickets of states that are being written back
        for key, size in sizes.items():
            self.add(key, size)

    @property
    def resident(self) -> frozenset[Key]:
        """The keys of the states that are on the device or on their way to it."""
        return frozenset(self._held)

    def add(self, key: Key, size: int) -> None:
        """Add a state on the host, for example for a job that joins.

        Raises:
            PlanError: the state is larger than the budget.
        """
        if size > self._budget:
            raise PlanError(
                f"state {key} has {size} bytes, the device's budget is {self._budget}; raise the budget, or cut the "
                "model into more stages"
            )
        self._sizes[key] = size

    def make(self, key: Key, size: int) -> int:
        """Add a state that is created on the device, such as a version of weights.

        Other states are evicted to make room for it.

        Returns:
            The nanoseconds of waiting for its memory.

        Raises:
            PlanError: the state is larger than the budget, or all states on the device are leased.
        """
        self.add(key, size)
        if not self._make_room(size):
            del self._sizes[key]
            raise self._no_room(key, size)
        after = self._room_ends()
        waited = 0 if after is None else self._copier.wait(after)
        self.statistics.stall_ns += waited
        self._turn += 1
        self._occupy(size)
        self._held[key] = _Held(None, self._turn, dirty=True, fresh=False)
        return waited

    def predict(self, keys: Iterable[Key]) -> None:
        """Set the leases that will probably come next, in order. Other leases may come instead."""
        self._predicted = {key: at for at, key in enumerate(dict.fromkeys(keys))}

    def has_room(self, *keys: Key) -> bool:
        """Return whether all these states can be leased at the same time if all states without a lease are evicted."""
        wanted = {*keys, *(key for key, held in self._held.items() if held.leased)}
        return sum(self._sizes[key] for key in wanted) <= self._budget and len(wanted) <= self._slots

    def lease(self, key: Key, write: bool = False) -> int:
        """Lease a state. It stays on the device until it is released.

        Args:
            key: the state.
            write: whether the state is changed during the lease, so that it must be written back before its eviction.

        Returns:
            The nanoseconds of waiting until the state is on the device.

        Raises:
            PlanError: all states on the device are leased.
        """
        held = self._held.get(key)
        if held is None:
            self.statistics.misses += 1
            if not self._make_room(self._sizes[key]):
                raise self._no_room(key, self._sizes[key])
            held = self._load(key)
        elif held.ticket is None or self._copier.is_done(held.ticket):
            self.statistics.hits += 1
        else:
            self.statistics.late += 1
        waited = 0 if held.ticket is None else self._copier.wait(held.ticket)
        self.statistics.stall_ns += waited
        self._turn += 1
        held.used, held.fresh = self._turn, False
        held.leased += 1
        held.dirty |= write
        return waited

    def mark_changed(self, key: Key) -> None:
        """Mark a leased state as changed."""
        self._held[key].dirty = True

    def release(self, key: Key) -> None:
        """End a lease.

        Raises:
            PlanError: the state is not leased.
        """
        held = self._held.get(key)
        if held is None or not held.leased:
            raise PlanError(f"state {key} is released, but it was not leased")
        held.leased -= 1

    def prefetch(self) -> int:
        """Start to load the states that are needed next, in order, until there is no more room.

        Return the number of loaded states.

        The look-ahead therefore follows from the budget. A fixed look-ahead could evict states that are needed earlier
        than the loaded ones.
        """
        begun = 0
        for key in self._predicted:
            if key in self._held:
                continue
            if not self._make_room(self._sizes[key], needed=self._predicted.get(key, LAST_POSITION)):
                self.statistics.refused += 1
                break
            self._load(key)
            self.statistics.prefetched += 1
            begun += 1
        return begun

    def evict_idle(self) -> bool:
        """Evict all states without a lease. Return whether there was such a state."""
        idle = self._list_victims()
        for key in idle:
            self._evict(key)
        self.statistics.cleared += bool(idle)
        return bool(idle)

    def drop_state(self, key: Key) -> None:
        """Remove a state that is no longer needed. Its bytes are free immediately.

        Raises:
            PlanError: the state is leased.
        """
        held = self._held.get(key)
        if held is not None:
            if held.leased:
                raise PlanError(f"state {key} is leased and can't be dropped")
            del self._held[key]
            self._used -= self._sizes[key]
            self._copier.free_place(key)
        del self._sizes[key]
        self._predicted.pop(key, None)

    def start_write_back(self, key: Key) -> None:
        """Start to write a changed state to the host, so that its later eviction does not have to wait."""
        held = self._held.get(key)
        if held is not None and held.dirty:
            self._leaving[key] = self._store(key)
            held.dirty = False

    def flush(self) -> None:
        """Write all changed states to the host and wait until this is done. The states stay on the device."""
        for key, held in self._held.items():
            if held.dirty:
                self._copier.wait(self._store(key))
                held.dirty = False

    def _make_room(self, size: int, needed: int = -1) -> bool:
        """Evict states until there is room for `size` bytes, and return whether this is possible.

        States that are needed before `needed` are not evicted. If there is not enough room, no state is evicted.
        """
        leaves: list[Key] = []
        free, places = self._budget - self._used, self._slots - len(self._held)
        for key in self._list_victims():
            if free >= size and places:
                break
            if self._predicted.get(key, LAST_POSITION) <= needed:
                return False
            leaves.append(key)
            free += self._sizes[key]
            places += 1
        if free < size or not places:
            return False
        for key in leaves:
            self._evict(key)
        return True

    def _no_room(self, key: Key, size: int) -> PlanError:
        leased = [each for each, held in self._held.items() if held.leased]
        return PlanError(
            f"no room for state {key} of {size} bytes: {leased} are leased, of a budget of {self._budget}; release a "
            "state first, or raise the budget"
        )

    def _list_victims(self) -> list[Key]:
        """Return the keys of the states that may be evicted, in the order of eviction."""
        free = [key for key, held in self._held.items() if not held.leased]
        return sorted(free, key=lambda key: (-self._predicted.get(key, LAST_POSITION), self._held[key].used))

    def _evict(self, key: Key) -> None:
        held = self._held.pop(key)
        self.statistics.wasted += held.fresh
        self._used -= self._sizes[key]
        if held.dirty:
            self._leaving[key] = self._store(key)
        self._copier.free_place(key)

    def _store(self, key: Key) -> int:
        self.statistics.bytes_out += self._sizes[key]
        return self._copier.store(key, self._sizes[key])

    def _load(self, key: Key) -> _Held:
        after = self._room_ends()
        self._turn += 1
        self._occupy(self._sizes[key])
        self.statistics.bytes_in += self._sizes[key]
        held = self._held[key] = _Held(self._copier.load(key, self._sizes[key], after), self._turn)
        return held

    def _occupy(self, size: int) -> None:
        self._used += size
        self.statistics.peak_bytes = max(self.statistics.peak_bytes, self._used)

    def _room_ends(self) -> int | None:
        """Return the last copy of evicted states to the host that is still running; None if there is no such copy."""
        self._leaving = {key: ticket for key, ticket in self._leaving.items() if not self._copier.is_done(ticket)}
        return max((ticket for key, ticket in self._leaving.items() if key not in self._held), default=None)
