"""Keeps tensors on the device while they are needed, and on the host otherwise: siblings, layers, weight versions.

`sim.residency` decides on loads and evictions; this module moves the tensors. Each state has a slab on the host, or on
a peer device that is nearer and has room, and states share slabs on the device. A slab on the device is overwritten
only after three operations: the copy that filled it, the computation with it, and the copy of its changes to the host.
The next load of the same state waits for that copy, too. Users keep their objects, and find them on the device while
they are leased.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from lightning_pipes.engine.residency.copier import SlabCopier, Way
from lightning_pipes.engine.residency.slab import DeviceSlab, SlabLayout, host_slab
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.sim.residency import Residency, Statistics

Key = TypeVar("Key")
Tensors = dict[str, torch.Tensor]


class MovableTensors(Protocol):
    """An owner of tensors that can move between host and device; a `Binding` is one."""

    def check(self) -> None:
        """Check that each tensor can be moved separately.

        Raises:
            PlanError: they can't.
        """

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""

    def bind_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use `tensors`, which have the current values.

        Raises:
            PipelineError: a graph refers to one that it uses.
        """


@dataclass
class _State:
    """A state, its owner and its places.

    Attributes:
        bound: the owner of its tensors.
        here: whether the owner's tensors are those on the device.
        leased: whether they must stay there.
        made: whether it was created on the device.
        host: its slab on the host, or on the peer device where it is `with_peer`.
        on_host: its tensors in this slab.
        written: tickets of the copy that filled this slab.
        on_device: its tensors in each slab on the device that it has used; views take longer to make than to bind.
    """

    bound: MovableTensors
    layout: SlabLayout
    host: torch.Tensor
    on_host: Tensors
    with_peer: bool = False
    here: bool = False
    leased: bool = False
    made: bool = False
    slot: DeviceSlab | None = None
    written: list[int] = field(default_factory=list)
    on_device: WeakKeyDictionary[DeviceSlab, Tensors] = field(default_factory=WeakKeyDictionary)

    def bind_to_device(self) -> None:
        """Make the owner use the tensors on the device."""
        self.bound.bind_tensors(self.tensors_on_device())
        self.here = True

    def bind_to_host(self) -> None:
        """Make the owner use the tensors on the host."""
        self.bound.bind_tensors(self.on_host)
        self.here = False

    def tensors_on_device(self) -> Tensors:
        """Return the tensors of a resident state."""
        assert self.slot is not None, "it is on the host only"
        views = self.on_device.get(self.slot)
        if views is None:
            views = self.on_device[self.slot] = self.layout.view_tensors(self.slot.slab)
        return views


class Swap(Generic[Key]):
    """States of any kind by key, and their owners.

        swap.add(key, Binding(module, optimizers, device))
        swap.expect(keys)                       # or predict(keys)
        with swap.lease(key, write=True):
            ...                                 # the module computes on the device
        swap.prefetch()
        swap.remove(key)

    Between two leases a module must not compute: its parameters may lie on the host, or anywhere. A forward that is
    still to be differentiated refers to weights, so its lease has to last until then, or it has to run again.

    Args:
        budget: bytes of the device for states.
        copier: moves them; it is closed by `close`.
        device: where.
        slots: the most states on the device, if not only bytes count.
        host_budget: bytes of the host, if they are to be bounded.
        peer: a device near this one on which states wait in place of the host, if there is one.
        peer_budget: bytes there; states that find no room wait on the host.
        poison: fill what a state leaves on the device with NaN; for tests.
    """

    def __init__(
        self,
        budget: int,
        copier: SlabCopier,
        device: torch.device,
        *,
        slots: int | None = None,
        host_budget: int | None = None,
        peer: torch.device | None = None,
        peer_budget: int = 0,
        poison: bool = False,
    ) -> None:
        self._peer, self._peer_budget = peer, peer_budget
        self._budget, self._host_budget, self._slots = budget, host_budget, slots
        self._copier, self._device, self._poison = copier, device, poison
        self._states: dict[Key, _State] = {}
        self._free: dict[int, deque[DeviceSlab]] = defaultdict(deque)
        self._slab_bytes = 0
        self._spare: torch.Tensor | None = None  # of a state that was made; the next one is as large
        self._residency: Residency[Key] = Residency(budget, {}, _Mover(self), slots)

    @property
    def statistics(self) -> Statistics:
        """Counts of hits and loads of leases."""
        return self._residency.statistics

    @property
    def host_bytes(self) -> int:
        """Bytes of all states that wait on the host."""
        return sum(state.layout.nbytes for state in self._states.values() if not state.with_peer)

    @property
    def _peer_bytes(self) -> int:
        """Bytes of all states that wait on the peer."""
        return sum(state.layout.nbytes for state in self._states.values() if state.with_peer)

    @property
    def resident_keys(self) -> frozenset[Key]:
        """Keys that are on the device, or in flight to it."""
        return self._residency.resident

    def __contains__(self, key: Key) -> bool:
        return key in self._states

    def is_leased(self, key: Key) -> bool:
        """Return whether the state is leased."""
        state = self._states.get(key)
        return state is not None and state.leased

    def bound_tensors(self, key: Key) -> MovableTensors | None:
        """Return the owner of the key's tensors."""
        state = self._states.get(key)
        return None if state is None else state.bound

    def add(self, key: Key, bound: MovableTensors, fits: Callable[[int], object] = lambda size: None) -> int:
        """Add a state and move it to the host. Return its bytes.

        Args:
            fits: called with the bytes first; if it raises, nothing has changed.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, or can't be moved.
        """
        bound.check()
        tensors = bound.named_tensors()
        layout, with_peer = self._layout(key, tensors)
        self._residency.add(key, layout.nbytes)
        host = self._waiting_slab(layout.nbytes, with_peer)
        state = self._states[key] = _State(bound, layout, host, layout.view_tensors(host), with_peer)
        with torch.no_grad():
            for name, view in state.on_host.items():
                view.copy_(tensors[name])
        try:
            fits(layout.nbytes)
        except Exception:
            self._drop(key)
            raise
        state.bind_to_host()
        return layout.nbytes

    def make(self, key: Key, bound: MovableTensors) -> None:
        """Add a copy on the device of the tensors of `bound`, and make it use the copy. The host gets it when its place
        is taken, or after `write_back`.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, can't be moved, or all that is there is
                leased.
        """
        bound.check()
        tensors = bound.named_tensors()
        layout, with_peer = self._layout(key, tensors)
        self._residency.make(key, layout.nbytes)
        host, self._spare = self._spare, None
        if host is None or host.numel() != layout.nbytes or (host.device == self._peer) != with_peer:
            host = self._waiting_slab(layout.nbytes, with_peer)
        slot = self._take_slab(layout.nbytes)
        for ticket in slot.pending_tickets:
            self.statistics.stall_ns += self._copier.order_after(ticket)
        state = self._states[key] = _State(
            bound, layout, host, layout.view_tensors(host), with_peer, made=True, slot=slot
        )
        with torch.no_grad():
            for name, view in state.tensors_on_device().items():
                view.copy_(tensors[name])
        slot.copies, slot.used = [], self._copier.mark_computation()
        state.bind_to_device()

    def _layout(self, key: Key, tensors: Mapping[str, torch.Tensor]) -> tuple[SlabLayout, bool]:
        """Return the layout of a state's slab, and whether the slab is to be on the peer."""
        layout = SlabLayout.from_tensors(tensors)
        if self._peer is not None and self._peer_bytes + layout.nbytes <= self._peer_budget:
            return layout, True
        if self._host_budget is not None and self.host_bytes + layout.nbytes > self._host_budget:
            raise PlanError(
                f"state {key} has {layout.nbytes} bytes; {len(self._states)} states have {self.host_bytes} of the "
                f"host's budget of {self._host_budget}. Raise it, or keep fewer states"
            )
        return layout, False

    def _waiting_slab(self, nbytes: int, with_peer: bool) -> torch.Tensor:
        """Return memory in which a state waits."""
        if with_peer:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._peer)
        return host_slab(nbytes, self._device.type == "cuda")

    def rebind(self, key: Key, bound: MovableTensors) -> None:
        """Replace the owner of a state by `bound`, which has the same tensors in the same places."""
        self._states[key].bound = bound

    def on_device(self, key: Key) -> Tensors | None:
        """Return the state's tensors on the device, if its owner uses them."""
        state = self._states[key]
        return state.tensors_on_device() if state.here else None

    def remove(self, key: Key) -> None:
        """Give the owner of a key tensors of its own again, on the host."""
        state = self._states.get(key)
        if state is None:
            return
        self.release(key)
        if not state.here:
            self._wait_for_host(state)
        with torch.inference_mode(False):
            own = {name: tensor.to("cpu", copy=True) for name, tensor in state.bound.named_tensors().items()}
        try:
            state.bound.bind_tensors(own)
        except PipelineError:  # it fails, and its exception refers to a graph: no other state gets the memory
            if state.slot is not None:
                state.slot.is_lost = True
        self._drop(key)

    def discard_state(self, key: Key) -> None:
        """Drop a state that is not needed any more: its tensors have no values afterwards.

        Raises:
            PlanError: it is leased.
        """
        self._drop(key)

    def _drop(self, key: Key) -> None:
        state = self._states[key]
        state.here = False  # its owner does not follow
        copies = [*state.written, *(state.slot.copies if state.slot is not None else ())]
        self._residency.drop_state(key)
        for ticket in copies:  # they use the host's slab
            self._copier.wait(ticket)
        del self._states[key]
        if state.made:
            self._spare = state.host

    def expect_leases(self, keys: Iterable[Key]) -> None:
        """Announce leases that follow the announced ones; no others may occur."""
        self._residency.expect_leases(keys)

    def predict(self, keys: Iterable[Key]) -> None:
        """Announce probable next leases, the first one first; unknown keys are skipped."""
        self._residency.predict(key for key in keys if key in self._states)

    def prefetch_states(self) -> int:
        """Start to load the next states, as far as there is room; return their number."""
        return self._residency.prefetch()

    def has_room(self, *keys: Key) -> bool:
        """Return whether leases of all these keys would find room."""
        return self._residency.has_room(*keys)

    @contextmanager
    def lease_state(self, key: Key, write: bool = False) -> Iterator[None]:
        """Make the owner of a key compute on the device, for as long as the block runs.

        Args:
            write: the block changes the state.

        Raises:
            PlanError: there is no room, or another lease was expected.
        """
        self.acquire(key, write)
        try:
            yield
        finally:
            self.release(key)

    def acquire(self, key: Key, write: bool = False) -> None:
        """Acquire a lease that lasts until `release`."""
        state = self._states[key]
        self._residency.lease(key, write)
        state.leased = True
        if not state.here:
            state.bind_to_device()

    def mark_changed(self, key: Key) -> None:
        """Mark a leased state as changed."""
        self._residency.mark_changed(key)

    def release(self, key: Key) -> None:
        """Release a lease, if there is one; computation with the state may still be in flight."""
        state = self._states.get(key)
        if state is None or not state.leased:
            return
        self._residency.release(key)
        self._mark_read(state)
        state.leased = False

    def _mark_read(self, state: _State) -> None:
        """Mark computation with a resident state, which may still be in flight."""
        assert state.slot is not None
        state.slot.used = self._copier.mark_computation()

    @contextmanager
    def read_state(self, key: Key) -> Iterator[None]:
        """Let a state be read in the block where it is, on the device or on the host."""
        state = self._states[key]
        here = state.here
        if not here:
            self._wait_for_host(state)
        yield
        if here:
            self._mark_read(state)

    def write_back(self, key: Key) -> None:
        """Start to write back the changes of leases, where states exceed the device."""
        too_many = self._slots is not None and len(self._states) > self._slots
        if too_many or self.host_bytes + self._peer_bytes > self._budget:
            self._residency.start_write_back(key)

    def evict_idle(self) -> bool:
        """Evict all states without a lease, and free their memory on the device; return whether there was one."""
        found = self._residency.evict_idle()
        for slabs in self._free.values():
            while slabs:
                self._free_slab(slabs.popleft())
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def flush(self) -> None:
        """Wait until the host has all changes of leases."""
        self._residency.flush()
        for state in self._states.values():
            self._wait_for_host(state)

    def close(self) -> None:
        """Finish the copies in flight. Remaining states stay in place."""
        self.statistics.stall_ns += self._copier.close()
        self._states.clear()

    def _wait_for_host(self, state: _State) -> None:
        """Wait until a state's write-back has reached the host."""
        for ticket in state.written:
            self._copier.wait(ticket)

    def _take_slab(self, nbytes: int) -> DeviceSlab:
        """Return a slab of an evicted state, or a new one; slabs of other sizes are freed where the budget requires
        it."""
        if self._free[nbytes]:
            return self._free[nbytes].popleft()
        for others in self._free.values():
            while others and self._slab_bytes + nbytes > self._budget:
                self._free_slab(others.popleft())
        self._slab_bytes += nbytes
        return DeviceSlab(torch.empty(nbytes, dtype=torch.uint8, device=self._device), self._copier.mark_computation())

    def _free_slab(self, old: DeviceSlab) -> None:
        for ticket in old.pending_tickets:
            self._copier.wait(ticket)
        self._slab_bytes -= old.slab.numel()


class _Mover:
    """Carries out the decisions of a swap's residency."""

    def __init__(self, swap: Swap[Any]) -> None:
        self._swap = swap

    def load(self, key: object, size: int, after: int | None) -> int:
        swap = self._swap
        state, slot = swap._states[key], swap._take_slab(size)
        way: Way = "from peer" if state.with_peer else "in"
        ticket = swap._copier.copy(way, slot.slab, state.host, [*slot.pending_tickets, *state.written])
        swap.statistics.peer_bytes += size * state.with_peer
        state.slot, slot.copies = slot, [ticket]
        return ticket

    def store(self, key: object, size: int) -> int:
        state = self._swap._states[key]
        assert state.slot is not None
        way: Way = "to peer" if state.with_peer else "out"
        ticket = self._swap._copier.copy(way, state.host, state.slot.slab, state.slot.pending_tickets)
        self._swap.statistics.peer_bytes += size * state.with_peer
        state.slot.copies = [ticket]
        state.written = [ticket]
        return ticket

    def free_place(self, key: object) -> None:
        swap = self._swap
        state = swap._states[key]
        slot, state.slot = state.slot, None
        assert slot is not None
        if slot.is_lost:
            swap._slab_bytes -= slot.slab.numel()
            return
        if state.here:
            state.bind_to_host()
        if swap._poison:
            nan = torch.full_like(slot.slab, 255)
            swap._copier.wait(swap._copier.copy("out", slot.slab, nan, slot.pending_tickets))
        swap._free[slot.slab.numel()].append(slot)

    def is_done(self, ticket: int) -> bool:
        return self._swap._copier.is_done(ticket)

    def wait(self, ticket: int) -> int:
        return self._swap._copier.order_after(ticket)
