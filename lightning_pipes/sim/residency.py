"""Which states a device holds: what is loaded early, what makes room for it, and what that costs.

A state has a key and a size: a job's weights and optimizer on a stage, a layer, a version of weights. What does not fit
into the device's budget lies on the host. Decisions are made here, and nothing is moved: a `Copier` does that, on
streams, on threads, or on a virtual clock. So engine and simulator decide alike.

    residency.expect(keys)                # the keys of the leases to come, in order, as a Program has them
    residency.lease(key, write=True)      # there, and stays there
    ...                                   # compute
    residency.release(key)                # may go; written back first if it was written
    residency.prefetch()                  # as far ahead as the budget allows
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Generic, Protocol, TypeVar

from lightning_pipes.ir import PlanError

Key = TypeVar("Key")
NEVER = 1 << 62
"""After all leases that are known."""


class Copier(Protocol):
    """Moves states between host and device. A ticket stands for one copy; copies of one direction are made in turn."""

    def load(self, key: object, size: int, after: int | None) -> int:
        """Starts to copy a state to the device, once the copy `after` has ended; returns its ticket."""

    def store(self, key: object, size: int) -> int:
        """Start to copy a state to the host."""

    def free_place(self, key: object) -> None:
        """Evict the state from the device; its place is free when the copies from and to it have ended."""

    def is_done(self, ticket: int) -> bool:
        """Return whether the copy has ended."""

    def wait(self, ticket: int) -> int:
        """Wait until the copy has ended, and return the nanoseconds that this took.

        Where a device waits and its host goes on, those of earlier calls, as they become known.
        """


class VirtualCopier:
    """A link in each direction, on a clock that the simulation advances.

    Args:
        bandwidth: bytes per second, each direction.
        latency: seconds of each copy besides.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self.now = 0
        """Nanoseconds."""
        self._rate, self._latency = bandwidth, round(latency * 1e9)
        self._free = {"in": 0, "out": 0}
        self._ends: list[int] = []

    def load(self, key: object, size: int, after: int | None) -> int:
        return self._copy("in", size, 0 if after is None else self._ends[after])

    def store(self, key: object, size: int) -> int:
        return self._copy("out", size, 0)

    def free_place(self, key: object) -> None:
        """Do nothing, for virtual copies need no memory."""

    def _copy(self, way: str, size: int, earliest: int) -> int:
        takes = 0 if math.isinf(self._rate) else round(size / self._rate * 1e9)
        self._free[way] = max(self.now, self._free[way], earliest) + takes + self._latency
        self._ends.append(self._free[way])
        return len(self._ends) - 1

    def is_done(self, ticket: int) -> bool:
        return self._ends[ticket] <= self.now

    def wait(self, ticket: int) -> int:
        waited = max(0, self._ends[ticket] - self.now)
        self.now += waited
        return waited


@dataclass
class Statistics:
    """Counts of what leases met. `hits`: the state was there; `late`: on its way; `misses`: it was not asked for
    before.

    `refused` are prefetches for which there was no room, `wasted` those that went before anybody used them. `again` are
    hits of the next micro-batch of a batch, which had the state right before. `cleared` counts how often all states
    without a lease left for a computation that ran out of memory. `peer_bytes` are those of `bytes_in` and `bytes_out`
    that a peer's memory gave or took.
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
    peer_bytes: int = 0

    @classmethod
    def sum_devices(cls, each: Iterable[Statistics]) -> Statistics:
        """Return the sums over several devices."""
        return cls(*map(sum, zip(*map(astuple, each), strict=True)))

    @property
    def leases(self) -> int:
        """The number of all leases."""
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        """The share of leases that found their state on the device, without those `again`; 1 where there was none."""
        counted = self.leases - self.again
        return (self.hits - self.again) / counted if counted else 1.0


@dataclass
class _Held:
    """A state on the device.

    Attributes:
        ticket: of the copy that brought it; None where it was made there.
    """

    ticket: int | None
    used: int  # number of its last lease, or of its loading
    leased: int = 0
    dirty: bool = False
    fresh: bool = True  # not leased since it was loaded


class Residency(Generic[Key]):
    """The states of one device.

    With `expect_leases` the leases to come are known: then what is needed latest makes room (Belady), and never for a
    state that is needed later than itself. `predict` says the same of leases that may come otherwise. Where neither
    says anything, what was used longest ago makes room.

    Args:
        budget: bytes of the device for states.
        sizes: bytes of every state.
        copier: moves them; all lie on the host at first.
        slots: the most states that may be there at a time, if not only bytes count.

    Raises:
        PlanError: a state alone is larger than the budget.
    """

    def __init__(self, budget: int, sizes: Mapping[Key, int], copier: Copier, slots: int | None = None) -> None:
        self.statistics = Statistics()
        self._budget, self._copier = budget, copier
        self._slots = NEVER if slots is None else slots
        self._sizes: dict[Key, int] = {}
        self._held: dict[Key, _Held] = {}
        self._used = 0
        self._turn = 0
        self._coming: deque[Key] = deque()
        self._uses: dict[Key, deque[int]] = {}
        self._at = 0
        self._predicted: dict[Key, int] = {}  # in which order
        self._leaving: dict[Key, int] = {}  # tickets of what is written back
        for key, size in sizes.items():
            self.add(key, size)

    @property
    def resident(self) -> frozenset[Key]:
        """The keys that are on the device, or on its way to it."""
        return frozenset(self._held)

    def add(self, key: Key, size: int) -> None:
        """Add a state, on the host, as of a job that joins.

        Raises:
            PlanError: it is larger than the budget.
        """
        if size > self._budget:
            raise PlanError(
                f"state {key} has {size} bytes, the device's budget is {self._budget}; raise the budget, or cut the "
                "model into more stages"
            )
        self._sizes[key] = size

    def make(self, key: Key, size: int) -> int:
        """Add a state that is made on the device, not on the host, such as a version of weights; others leave for it.

        Return the nanoseconds that were waited for its place.

        Raises:
            PlanError: it is larger than the budget, or all that is there is leased.
        """
        self.add(key, size)
        if not self._make_room(size):
            del self._sizes[key]
            raise self._no_room(key, size)
        after = self._room_ends()
        waited = 0 if after is None else self._copier.wait(after)
        self.statistics.stall_ns += waited
        self._turn += 1
        self._used += size
        self._held[key] = _Held(None, self._turn, dirty=True, fresh=False)
        return waited

    def expect_leases(self, keys: Iterable[Key]) -> None:
        """Append to the expected leases."""
        for key in keys:
            self._uses.setdefault(key, deque()).append(self._at + len(self._coming))
            self._coming.append(key)

    def predict(self, keys: Iterable[Key]) -> None:
        """Set the leases that will probably come next, in order; others may come."""
        self._predicted = {key: at for at, key in enumerate(dict.fromkeys(keys))}

    def has_room(self, *keys: Key) -> bool:
        """Return whether leases of all these states would fit, if states that are not leased left."""
        wanted = {*keys, *(key for key, held in self._held.items() if held.leased)}
        return sum(self._sizes[key] for key in wanted) <= self._budget and len(wanted) <= self._slots

    def lease(self, key: Key, write: bool = False) -> int:
        """Lease a state and return the nanoseconds until it is on the device; it stays until it is released.

        Args:
            write: the state is changed meanwhile, and written back before its place is taken.

        Raises:
            PlanError: another lease was expected, or all that is there is leased.
        """
        if self._coming:
            if self._coming[0] != key:
                raise PlanError(f"state {key} is leased, expected was {self._coming[0]}")
            self._coming.popleft()
            self._uses[key].popleft()
            self._at += 1
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
            PlanError: there was none.
        """
        held = self._held.get(key)
        if held is None or not held.leased:
            raise PlanError(f"state {key} is released and was not leased")
        held.leased -= 1

    def prefetch(self) -> int:
        """Start to load the states that are needed next, in order, until there is no room, and return their number.

        So the look-ahead follows from the budget: a fixed one would load what makes the next state leave.
        """
        begun = 0
        for key in dict.fromkeys(self._coming) if self._coming else self._predicted:
            if key in self._held:
                continue
            if not self._make_room(self._sizes[key], needed=self._next_use(key)):
                self.statistics.refused += 1
                break
            self._load(key)
            self.statistics.prefetched += 1
            begun += 1
        return begun

    def evict_idle(self) -> bool:
        """Evict all states without a lease; return whether there was one."""
        idle = self._victims()
        for key in idle:
            self._evict(key)
        self.statistics.cleared += bool(idle)
        return bool(idle)

    def drop_state(self, key: Key) -> None:
        """Remove a state that is not needed any more; its bytes are free at once.

        Raises:
            PlanError: it is leased.
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
        """Start to write a changed state back, so that its later eviction does not wait."""
        held = self._held.get(key)
        if held is not None and held.dirty:
            self._leaving[key] = self._store(key)
            held.dirty = False

    def flush(self) -> None:
        """Write all changed states to the host and wait for that; they stay on the device."""
        for key, held in self._held.items():
            if held.dirty:
                self._copier.wait(self._store(key))
                held.dirty = False

    def _next_use(self, key: Key) -> int:
        if not self._coming:
            return self._predicted.get(key, NEVER)
        uses = self._uses.get(key)
        return uses[0] if uses else NEVER

    def _make_room(self, size: int, needed: int = -1) -> bool:
        """Return whether there is room for `size` bytes now; others leave for it, none that is needed before
        `needed`."""
        leaves: list[Key] = []
        free, places = self._budget - self._used, self._slots - len(self._held)
        for key in self._victims():
            if free >= size and places:
                break
            if self._next_use(key) <= needed:
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
            f"no room for state {key} of {size} bytes: {leased} are leased, of a budget of {self._budget}; release one "
            "before, or raise the budget"
        )

    def _victims(self) -> list[Key]:
        """Return the keys that may leave, the first one first."""
        free = [key for key, held in self._held.items() if not held.leased]
        return sorted(free, key=lambda key: (-self._next_use(key), self._held[key].used))

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
        self._used += self._sizes[key]
        self.statistics.bytes_in += self._sizes[key]
        held = self._held[key] = _Held(self._copier.load(key, self._sizes[key], after), self._turn)
        return held

    def _room_ends(self) -> int | None:
        """Return the copy after which all that has left is on the host; None if it is there."""
        self._leaving = {key: ticket for key, ticket in self._leaving.items() if not self._copier.is_done(ticket)}
        return max((ticket for key, ticket in self._leaving.items() if key not in self._held), default=None)
