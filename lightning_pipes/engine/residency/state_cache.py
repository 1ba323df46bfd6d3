"""States that exceed a device's memory: the device holds those in use, and those needed next.

`sim.residency` decides on loads and evictions; this module moves the tensors. Each state has a slab on the host, and
states share slabs on the device. A slab on the device is overwritten only after three operations: the copy that filled
it, the computation with it, and the copy of its changes to the host. The next load of the same state waits for that
copy, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from lightning_pipes.engine.residency.copier import SlabCopier
from lightning_pipes.engine.residency.slab import SlabLayout, host_slab
from lightning_pipes.ir import PlanError
from lightning_pipes.sim.residency import Residency, Statistics

Key = TypeVar("Key")
Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class _DeviceSlab:
    """A slab on the device.

    Attributes:
        copies: tickets of the last copies from it and to it.
        used: the ticket of the last computation with it, or with its memory before.
        is_lost: whether other states must not use it.
    """

    slab: torch.Tensor
    used: int | None
    copies: list[int] = field(default_factory=list)
    is_lost: bool = False

    @property
    def pending_tickets(self) -> list[int]:
        """Tickets of operations that must end before the slab is overwritten."""
        return self.copies if self.used is None else [*self.copies, self.used]


@dataclass
class _State:
    """The places of a state.

    Attributes:
        made: whether it was created on the device.
        on_host: its tensors in the host's slab.
        written: tickets of the copy that filled the host's slab.
        on_device: its tensors in each slab on the device that it has used; views take longer to make than to bind.
    """

    layout: SlabLayout
    host: torch.Tensor
    on_host: Tensors
    made: bool = False
    slot: _DeviceSlab | None = None
    written: list[int] = field(default_factory=list)
    on_device: WeakKeyDictionary[_DeviceSlab, Tensors] = field(default_factory=WeakKeyDictionary)


class StateCache(Generic[Key]):
    """States by key, on the host and, within a budget, on a device.

        cache.add(key, tensors)                   # copied to the host
        cache.expect(keys)                        # or predict(keys)
        with cache.lease(key, write=True) as state:
            ...                                   # state[name] is on the device
        cache.prefetch()

    Args:
        budget: bytes of the device for states.
        copier: moves them.
        device: where.
        slots: the most states on the device at a time, if not only bytes count.
        host_budget: bytes of the host for states, if they are to be bounded.
        leaves: called with the key of a state before its slab goes to another.
        poison: fill slabs with NaN when a state leaves; for tests.
    """

    def __init__(
        self,
        budget: int,
        copier: SlabCopier,
        device: torch.device | None = None,
        *,
        slots: int | None = None,
        host_budget: int | None = None,
        leaves: Callable[[Key], None] | None = None,
        poison: bool = False,
    ) -> None:
        self._budget, self._host_budget, self._slots = budget, host_budget, slots
        self._copier = copier
        self._device = device or torch.device("cpu")
        self._leaves = leaves
        self._poison = poison
        self._states: dict[Key, _State] = {}
        self._free: dict[int, deque[_DeviceSlab]] = defaultdict(deque)
        self._slab_bytes = 0
        self._spare: torch.Tensor | None = None  # of a state that was made; the next one is as large
        self._residency: Residency[Key] = Residency(budget, {}, _Mover(self), slots)

    @property
    def statistics(self) -> Statistics:
        """Counts of hits and loads of leases."""
        return self._residency.statistics

    @property
    def resident_keys(self) -> frozenset[Key]:
        """Keys that are on the device, or in flight to it."""
        return self._residency.resident

    @property
    def host_bytes(self) -> int:
        """Bytes of all states on the host."""
        return sum(state.layout.nbytes for state in self._states.values())

    def add(self, key: Key, tensors: Mapping[str, torch.Tensor]) -> int:
        """Add a state by copying its tensors to the host. Return its bytes.

        Raises:
            PlanError: it does not fit into the device's or the host's budget.
        """
        layout = self._layout(key, tensors)
        self._residency.add(key, layout.nbytes)
        host = host_slab(layout.nbytes, self._device.type == "cuda")
        state = self._states[key] = _State(layout, host, layout.view_tensors(host))
        with torch.no_grad():
            for name, view in state.on_host.items():
                view.copy_(tensors[name])
        return layout.nbytes

    def make(self, key: Key, tensors: Mapping[str, torch.Tensor]) -> int:
        """Add a state on the device by copying `tensors` there. The host gets it when its place is taken, or after
        `start_write_back`. Return its bytes.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, or all that is there is leased.
        """
        layout = self._layout(key, tensors)
        self._residency.make(key, layout.nbytes)
        host, self._spare = self._spare, None
        if host is None or host.numel() != layout.nbytes:
            host = host_slab(layout.nbytes, self._device.type == "cuda")
        slot = self._take_slab(layout.nbytes)
        for ticket in slot.pending_tickets:
            self.statistics.stall_ns += self._copier.order_after(ticket)
        self._states[key] = _State(layout, host, layout.view_tensors(host), made=True, slot=slot)
        with torch.no_grad():
            for name, view in self.on_device(key).items():
                view.copy_(tensors[name])
        slot.copies, slot.used = [], self._copier.mark_computation()
        return layout.nbytes

    def _layout(self, key: Key, tensors: Mapping[str, torch.Tensor]) -> SlabLayout:
        layout = SlabLayout.from_tensors(tensors)
        if self._host_budget is not None and self.host_bytes + layout.nbytes > self._host_budget:
            raise PlanError(
                f"state {key} has {layout.nbytes} bytes; {len(self._states)} states have {self.host_bytes} of the "
                f"host's budget of {self._host_budget}. Raise it, or keep fewer states"
            )
        return layout

    def drop_state(self, key: Key, in_use: bool = False) -> None:
        """Remove a state.

        Args:
            in_use: whether other code may still refer to its slab on the device, which no other state gets then.

        Raises:
            PlanError: it is leased.
        """
        state = self._states[key]
        if in_use and state.slot is not None:
            state.slot.is_lost = True
        copies = [*state.written, *(state.slot.copies if state.slot is not None else ())]
        self._residency.drop_state(key)
        for ticket in copies:  # they use the host's slab
            self._copier.wait(ticket)
        del self._states[key]
        if state.made:
            self._spare = state.host

    @property
    def is_over_budget(self) -> bool:
        """Whether the states exceed the device's budget."""
        return self.host_bytes > self._budget or (self._slots is not None and len(self._states) > self._slots)

    def expect_leases(self, keys: Iterable[Key]) -> None:
        """Announce leases that follow the announced ones; no others may occur."""
        self._residency.expect_leases(keys)

    def predict(self, keys: Iterable[Key]) -> None:
        """Announce probable next leases, the first one first."""
        self._residency.predict(keys)

    def prefetch_states(self) -> int:
        """Start to load the next states, as far as there is room; return their number."""
        return self._residency.prefetch()

    def has_room(self, *keys: Key) -> bool:
        """Return whether leases of all these keys would find room."""
        return self._residency.has_room(*keys)

    @contextmanager
    def lease_state(self, key: Key, write: bool = False) -> Iterator[Tensors]:
        """Yield the state's tensors on the device, for as long as the block runs.

        Args:
            write: the block changes them.

        Raises:
            PlanError: there is no room, or another lease was expected.
        """
        self.acquire(key, write)
        try:
            yield self.on_device(key)
        finally:
            self.release(key)

    def acquire(self, key: Key, write: bool = False) -> None:
        """Acquire a lease that lasts until `release`."""
        self._residency.lease(key, write)

    def mark_changed(self, key: Key) -> None:
        """Mark a leased state as changed."""
        self._residency.mark_changed(key)

    def release(self, key: Key) -> None:
        """Release a lease; computation with the state may still be in flight."""
        self._residency.release(key)
        self.mark_read(key)

    def mark_read(self, key: Key) -> None:
        """Mark computation with a resident state, which may still be in flight."""
        slot = self._states[key].slot
        assert slot is not None
        slot.used = self._copier.mark_computation()

    def on_device(self, key: Key) -> Tensors:
        """Return the tensors of a resident state."""
        state = self._states[key]
        assert state.slot is not None, f"state {key} is on the host only"
        views = state.on_device.get(state.slot)
        if views is None:
            views = state.on_device[state.slot] = state.layout.view_tensors(state.slot.slab)
        return views

    def on_host(self, key: Key) -> Tensors:
        """Return the tensors of a state on the host; they include changes by leases after `wait_for_host`."""
        return self._states[key].on_host

    def wait_for_host(self, key: Key) -> None:
        """Wait until a state's write-back has reached the host."""
        for ticket in self._states[key].written:
            self._copier.wait(ticket)

    def start_write_back(self, key: Key) -> None:
        """Start to write back the changes of leases."""
        self._residency.start_write_back(key)

    def flush(self) -> None:
        """Wait until the host has all changes of leases."""
        self._residency.flush()
        for key in self._states:
            self.wait_for_host(key)

    def close(self) -> None:
        """Finish the copies in flight."""
        self.statistics.stall_ns += self._copier.close()

    # ---- where states lie

    def _take_slab(self, nbytes: int) -> _DeviceSlab:
        """Return a slab of an evicted state, or a new one; slabs of other sizes are freed where the budget requires
        it."""
        if self._free[nbytes]:
            return self._free[nbytes].popleft()
        for others in self._free.values():
            while others and self._slab_bytes + nbytes > self._budget:
                old = others.popleft()
                for ticket in old.pending_tickets:
                    self._copier.wait(ticket)
                self._slab_bytes -= old.slab.numel()
        self._slab_bytes += nbytes
        return _DeviceSlab(torch.empty(nbytes, dtype=torch.uint8, device=self._device), self._copier.mark_computation())


class _Mover:
    """Carries out the decisions of a cache's residency."""

    def __init__(self, cache: StateCache[Any]) -> None:
        self._cache = cache

    def load(self, key: object, size: int, after: int | None) -> int:
        cache = self._cache
        state, slot = cache._states[key], cache._take_slab(size)
        ticket = cache._copier.copy("in", slot.slab, state.host, [*slot.pending_tickets, *state.written])
        state.slot, slot.copies = slot, [ticket]
        return ticket

    def store(self, key: object, size: int) -> int:
        state = self._cache._states[key]
        assert state.slot is not None
        ticket = self._cache._copier.copy("out", state.host, state.slot.slab, state.slot.pending_tickets)
        state.slot.copies = [ticket]
        state.written = [ticket]
        return ticket

    def free_place(self, key: object) -> None:
        cache = self._cache
        state = cache._states[key]
        slot, state.slot = state.slot, None
        assert slot is not None
        if slot.is_lost:
            cache._slab_bytes -= slot.slab.numel()
            return
        if cache._leaves is not None:
            cache._leaves(key)
        if cache._poison:
            nan = torch.full_like(slot.slab, 255)
            cache._copier.wait(cache._copier.copy("out", slot.slab, nan, slot.pending_tickets))
        cache._free[slot.slab.numel()].append(slot)

    def is_done(self, ticket: int) -> bool:
        return self._cache._copier.is_done(ticket)

    def wait(self, ticket: int) -> int:
        return self._cache._copier.order_after(ticket)
