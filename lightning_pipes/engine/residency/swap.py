"""Keeps the tensors of siblings, layers and weight versions on the device only while they are needed.

`sim.residency` decides on loads and evictions, and this module moves the tensors. Each state has a slab on the host.
States share the slabs on the device. A slab on the device is overwritten only after three operations have ended: the
copy that filled it, the computation that used it, and the copy of its changes to the host. The next load of the same
state also waits for the copy to the host. Users keep their objects, which have their tensors on the device during a
lease.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from lightning_pipes.engine.residency.copier import SlabCopier
from lightning_pipes.engine.residency.slab import DeviceSlab, SlabLayout, host_slab
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.sim.residency import Residency, Statistics

Key = TypeVar("Key")
Tensors = dict[str, torch.Tensor]


class MovableTensors(Protocol):
    """An owner of tensors that can be moved between host and device; `Binding` is an implementation."""

    def check(self) -> None:
        """Check that each tensor can be moved separately.

        Raises:
            PlanError: a tensor can't be moved separately.
        """

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""

    def bind_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use other tensors, which already have the current values.

        Raises:
            PipelineError: an autograd graph refers to a tensor that is replaced.
        """


@dataclass
class _State:
    """A state, its owner, and its places on the host and on the device.

    Attributes:
        bound: the owner of the tensors.
        layout: the places of the tensors in a slab.
        host: the slab of the state on the host.
        on_host: the tensors in this slab.
        here: whether the owner uses the tensors on the device.
        leased: whether the state is leased, so that it must stay on the device.
        made: whether the state was created on the device.
        slot: the slab of the state on the device; None if the state is not there.
        written: tickets of the copy that filled the slab on the host.
        on_device: the tensors in each slab on the device that the state has used. They are kept because making views
            takes longer than binding them.
    """

    bound: MovableTensors
    layout: SlabLayout
    host: torch.Tensor
    on_host: Tensors
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
        """Return the tensors on the device of a resident state."""
        assert self.slot is not None, "it is on the host only"
        views = self.on_device.get(self.slot)
        if views is None:
            views = self.on_device[self.slot] = self.layout.view_tensors(self.slot.slab)
        return views


class Swap(Generic[Key]):
    """States of any kind by key, which share the memory of a device.

        swap.add(key, Binding(module, optimizers, device))
        swap.predict(keys)
        with swap.lease_state(key, write=True):
            ...                                 # the module computes on the device
        swap.prefetch_states()
        swap.remove(key)

    Between two leases a module must not compute, because its parameters may be on the host. If a forward will be
    differentiated, its autograd graph refers to the weights. In this case, either its lease must last until the
    backward, or the forward must run again.

    Args:
        budget: the bytes for states on the device.
        copier: copies slabs between host and device. It is closed by `close`.
        device: the device that the states share.
        slots: the maximum number of states on the device, in addition to the limit on bytes.
        host_budget: the maximum bytes of states on the host, if they are limited.
        poison: whether memory on the device is filled with NaN when a state leaves it; used in tests.
    """

    def __init__(
        self,
        budget: int,
        copier: SlabCopier,
        device: torch.device,
        *,
        slots: int | None = None,
        host_budget: int | None = None,
        poison: bool = False,
    ) -> None:
        self._budget, self._host_budget, self._slots = budget, host_budget, slots
        self._copier, self._device, self._poison = copier, device, poison
        self._states: dict[Key, _State] = {}
        self._free: dict[int, deque[DeviceSlab]] = defaultdict(deque)
        self._slab_bytes = 0
        self._spare: torch.Tensor | None = None  # slab of a dropped state, for the next state that is made
        self._residency: Residency[Key] = Residency(budget, {}, _Mover(self), slots)

    @property
    def statistics(self) -> Statistics:
        """Counts of the hits and loads of leases."""
        return self._residency.statistics

    @property
    def host_bytes(self) -> int:
        """The bytes of the slabs of all states on the host."""
        return sum(state.layout.nbytes for state in self._states.values())

    @property
    def resident_keys(self) -> frozenset[Key]:
        """The keys of states that are on the device or in flight to it."""
        return self._residency.resident

    def __contains__(self, key: Key) -> bool:
        return key in self._states

    def is_leased(self, key: Key) -> bool:
        """Return whether the state is leased."""
        state = self._states.get(key)
        return state is not None and state.leased

    def bound_tensors(self, key: Key) -> MovableTensors | None:
        """Return the owner of the tensors of a key, or None if the key is unknown."""
        state = self._states.get(key)
        return None if state is None else state.bound

    def add(self, key: Key, bound: MovableTensors, fits: Callable[[int], object] = lambda size: None) -> int:
        """Add a state, and move it to the host.

        Args:
            key: the key of the state.
            bound: the owner of its tensors.
            fits: called with the bytes of the state before its owner changes. If it raises an error, the state is not
                added.

        Returns:
            The bytes of the state.

        Raises:
            PlanError: the state exceeds the budget of the device or of the host, or can't be moved.
        """
        bound.check()
        tensors = bound.named_tensors()
        layout = self._layout(key, tensors)
        self._residency.add(key, layout.nbytes)
        host = self._host_slab(layout.nbytes)
        state = self._states[key] = _State(bound, layout, host, layout.view_tensors(host))
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
        """Add a state on the device as a copy of the tensors of `bound`, which uses the copy afterwards.

        The copy is written to the host when its place on the device is needed, or after `write_back`.

        Raises:
            PlanError: the state exceeds the budget of the device or of the host, can't be moved, or all states on the
                device are leased.
        """
        bound.check()
        tensors = bound.named_tensors()
        layout = self._layout(key, tensors)
        self._residency.make(key, layout.nbytes)
        host, self._spare = self._spare, None
        if host is None or host.numel() != layout.nbytes:
            host = self._host_slab(layout.nbytes)
        slot = self._take_slab(layout.nbytes)
        for ticket in slot.pending_tickets:
            self.statistics.stall_ns += self._copier.order_after(ticket)
        state = self._states[key] = _State(bound, layout, host, layout.view_tensors(host), made=True, slot=slot)
        with torch.no_grad():
            for name, view in state.tensors_on_device().items():
                view.copy_(tensors[name])
        slot.copies, slot.used = [], self._copier.mark_computation()
        state.bind_to_device()

    def _layout(self, key: Key, tensors: Mapping[str, torch.Tensor]) -> SlabLayout:
        """Return the layout of a state's slab, for which the host has room."""
        layout = SlabLayout.from_tensors(tensors)
        if self._host_budget is not None and self.host_bytes + layout.nbytes > self._host_budget:
            raise PlanError(
                f"state {key} has {layout.nbytes} bytes; {len(self._states)} states have {self.host_bytes} of the "
                f"host's budget of {self._host_budget}. Raise it, or keep fewer states"
            )
        return layout

    def _host_slab(self, nbytes: int) -> torch.Tensor:
        return host_slab(nbytes, self._device.type == "cuda")

    def rebind(self, key: Key, bound: MovableTensors) -> None:
        """Replace the owner of a state by `bound`, which has the same tensors in the same places."""
        self._states[key].bound = bound

    def on_device(self, key: Key) -> Tensors | None:
        """Return the tensors of a state on the device, or None if its owner does not use them."""
        state = self._states[key]
        return state.tensors_on_device() if state.here else None

    def remove(self, key: Key) -> None:
        """Remove a state, if it exists, and give its owner separate tensors on the host."""
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
        except PipelineError:  # a graph refers to a tensor, so no other state may use the memory
            if state.slot is not None:
                state.slot.is_lost = True
        self._drop(key)

    def discard_state(self, key: Key) -> None:
        """Remove a state that is no longer needed. Its tensors have no values afterwards.

        Raises:
            PlanError: the state is leased.
        """
        self._drop(key)

    def _drop(self, key: Key) -> None:
        state = self._states[key]
        state.here = False  # its owner is not bound to the host
        copies = [*state.written, *(state.slot.copies if state.slot is not None else ())]
        self._residency.drop_state(key)
        for ticket in copies:  # these copies use the slab on the host
            self._copier.wait(ticket)
        del self._states[key]
        if state.made:
            self._spare = state.host

    def predict(self, keys: Iterable[Key]) -> None:
        """Announce the keys of probable next leases in order. Unknown keys are skipped."""
        self._residency.predict(key for key in keys if key in self._states)

    def prefetch_states(self) -> int:
        """Start to load the next states if there is room, and return their number."""
        return self._residency.prefetch()

    def has_room(self, *keys: Key) -> bool:
        """Return whether there is room for leases of all these keys at the same time."""
        return self._residency.has_room(*keys)

    @contextmanager
    def lease_state(self, key: Key, write: bool = False) -> Iterator[None]:
        """Make the owner of a key compute on the device inside the block.

        Args:
            key: the key of the state.
            write: whether the block changes the state.

        Raises:
            PlanError: there is no room.
        """
        self.acquire(key, write)
        try:
            yield
        finally:
            self.release(key)

    def acquire(self, key: Key, write: bool = False) -> None:
        """Acquire a lease that lasts until `release`. The arguments and errors are the same as for `lease_state`."""
        state = self._states[key]
        self._residency.lease(key, write)
        state.leased = True
        if not state.here:
            state.bind_to_device()

    def mark_changed(self, key: Key) -> None:
        """Mark a leased state as changed."""
        self._residency.mark_changed(key)

    def release(self, key: Key) -> None:
        """Release the lease of a state, if there is one. Computation with the state may still be in flight."""
        state = self._states.get(key)
        if state is None or not state.leased:
            return
        self._residency.release(key)
        self._mark_read(state)
        state.leased = False

    def _mark_read(self, state: _State) -> None:
        """Record that computation with a resident state may still be in flight."""
        assert state.slot is not None
        state.slot.used = self._copier.mark_computation()

    @contextmanager
    def read_state(self, key: Key) -> Iterator[None]:
        """Allow reads of a state inside the block, whether it is on the device or on the host."""
        state = self._states[key]
        here = state.here
        if not here:
            self._wait_for_host(state)
        yield
        if here:
            self._mark_read(state)

    def write_back(self, key: Key) -> None:
        """Start to write the changes of a state to the host, if the states don't all fit on the device."""
        too_many = self._slots is not None and len(self._states) > self._slots
        if too_many or self.host_bytes > self._budget:
            self._residency.start_write_back(key)

    def evict_idle(self) -> bool:
        """Evict all states without a lease, and free their memory on the device.

        Returns:
            Whether there was such a state.
        """
        found = self._residency.evict_idle()
        for slabs in self._free.values():
            while slabs:
                self._free_slab(slabs.popleft())
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def flush(self) -> None:
        """Wait until all changes of leased states are on the host."""
        self._residency.flush()
        for state in self._states.values():
            self._wait_for_host(state)

    def close(self) -> None:
        """Finish the copies in flight. The tensors of the remaining states stay where they are."""
        self.statistics.stall_ns += self._copier.close()
        self._states.clear()

    def _wait_for_host(self, state: _State) -> None:
        """Wait until the slab of a state on the host is up to date."""
        for ticket in state.written:
            self._copier.wait(ticket)

    def _take_slab(self, nbytes: int) -> DeviceSlab:
        """Return the slab of an evicted state, or a new slab.

        Before a new slab is allocated, free slabs of other sizes are released if the budget requires it.
        """
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
    """Carries out the decisions of the residency of a swap."""

    def __init__(self, swap: Swap[Any]) -> None:
        self._swap = swap

    def load(self, key: object, size: int, after: int | None) -> int:
        swap = self._swap
        state, slot = swap._states[key], swap._take_slab(size)
        ticket = swap._copier.copy("in", slot.slab, state.host, [*slot.pending_tickets, *state.written])
        state.slot, slot.copies = slot, [ticket]
        return ticket

    def store(self, key: object, size: int) -> int:
        state = self._swap._states[key]
        assert state.slot is not None
        ticket = self._swap._copier.copy("out", state.host, state.slot.slab, state.slot.pending_tickets)
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
