"""Keeps tensors on the device while they are needed, and on the host otherwise: siblings, layers, weight versions.

A `StateCache` moves tensors; this module binds them to their owners. Users keep their objects, and find them on the
device while they are leased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from lightning_pipes.engine.residency.copier import SlabCopier
from lightning_pipes.engine.residency.state_cache import StateCache
from lightning_pipes.ir import PipelineError
from lightning_pipes.sim.residency import Statistics

Key = TypeVar("Key")


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
class _SwapEntry:
    """The owner of a key's tensors.

    Attributes:
        here: whether its tensors are those on the device.
        leased: whether they must stay there.
    """

    bound: MovableTensors
    here: bool = False
    leased: bool = False


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
        poison: bool = False,
    ) -> None:
        self._held: dict[Key, _SwapEntry] = {}
        self._cache: StateCache[Key] = StateCache(
            budget, copier, device, slots=slots, host_budget=host_budget, leaves=self._to_host, poison=poison
        )

    @property
    def statistics(self) -> Statistics:
        """Counts of hits and loads of leases."""
        return self._cache.statistics

    @property
    def host_bytes(self) -> int:
        """Bytes of all states on the host."""
        return self._cache.host_bytes

    @property
    def resident_keys(self) -> frozenset[Key]:
        """Keys that are on the device, or in flight to it."""
        return self._cache.resident_keys

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def is_leased(self, key: Key) -> bool:
        """Return whether the state is leased."""
        each = self._held.get(key)
        return each is not None and each.leased

    def bound_tensors(self, key: Key) -> MovableTensors | None:
        """Return the owner of the key's tensors."""
        each = self._held.get(key)
        return None if each is None else each.bound

    def add(self, key: Key, bound: MovableTensors, fits: Callable[[int], object] = lambda size: None) -> int:
        """Add a state and move it to the host. Return its bytes.

        Args:
            fits: called with the bytes first; if it raises, nothing has changed.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, or can't be moved.
        """
        bound.check()
        size = self._cache.add(key, bound.named_tensors())
        try:
            fits(size)
        except Exception:
            self._cache.drop_state(key)
            raise
        self._held[key] = _SwapEntry(bound)
        bound.bind_tensors(self._cache.on_host(key))
        return size

    def make(self, key: Key, bound: MovableTensors) -> None:
        """Add a copy on the device of the tensors of `bound`, and make it use the copy.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, or can't be moved.
        """
        bound.check()
        self._cache.make(key, bound.named_tensors())
        self._held[key] = _SwapEntry(bound, here=True)
        bound.bind_tensors(self._cache.on_device(key))

    def rebind(self, key: Key, bound: MovableTensors) -> None:
        """Replace the owner of a state by `bound`, which has the same tensors in the same places."""
        self._held[key].bound = bound

    def on_device(self, key: Key) -> dict[str, torch.Tensor] | None:
        """Return the state's tensors on the device, if its owner uses them."""
        return self._cache.on_device(key) if self._held[key].here else None

    def remove(self, key: Key) -> None:
        """Give the owner of a key tensors of its own again, on the host."""
        each = self._held.get(key)
        if each is None:
            return
        self.release(key)
        del self._held[key]
        if not each.here:
            self._cache.wait_for_host(key)
        with torch.inference_mode(False):
            own = {name: tensor.to("cpu", copy=True) for name, tensor in each.bound.named_tensors().items()}
        in_use = False
        try:
            each.bound.bind_tensors(own)
        except PipelineError:  # it fails, and its exception refers to a graph: it may keep the memory
            in_use = True
        self._cache.drop_state(key, in_use)

    def discard_state(self, key: Key) -> None:
        """Drop a state that is not needed any more: its tensors have no values afterwards."""
        del self._held[key]
        self._cache.drop_state(key)

    def expect_leases(self, keys: Iterable[Key]) -> None:
        """Announce leases that follow the announced ones; no others may occur."""
        self._cache.expect_leases(keys)

    def predict(self, keys: Iterable[Key]) -> None:
        """Announce probable next leases, the first one first; unknown keys are skipped."""
        self._cache.predict(key for key in keys if key in self._held)

    def prefetch_states(self) -> int:
        """Start to load the next states, as far as there is room; return their number."""
        return self._cache.prefetch_states()

    def has_room(self, *keys: Key) -> bool:
        """Return whether leases of all these keys would find room."""
        return self._cache.has_room(*keys)

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
        each = self._held[key]
        self._cache.acquire(key, write)
        each.leased = True
        if not each.here:
            each.bound.bind_tensors(self._cache.on_device(key))
            each.here = True

    def mark_changed(self, key: Key) -> None:
        """Mark a leased state as changed."""
        self._cache.mark_changed(key)

    def release(self, key: Key) -> None:
        """Release a lease, if there is one; computation may still be in flight."""
        each = self._held.get(key)
        if each is not None and each.leased:
            self._cache.release(key)
            each.leased = False

    @contextmanager
    def read_state(self, key: Key) -> Iterator[None]:
        """Let a state be read in the block where it is, on the device or on the host."""
        here = self._held[key].here
        if not here:
            self._cache.wait_for_host(key)
        yield
        if here:
            self._cache.mark_read(key)

    def write_back(self, key: Key) -> None:
        """Start to write back the changes of leases, where states exceed the device."""
        if self._cache.is_over_budget:
            self._cache.start_write_back(key)

    def flush(self) -> None:
        """Wait until the host has all changes of leases."""
        self._cache.flush()

    def close(self) -> None:
        """Finish the copies in flight. Remaining states stay in place."""
        self._cache.close()
        self._held.clear()

    def _to_host(self, key: Key) -> None:
        """Bind an owner to the host's tensors when another state takes its place on the device."""
        each = self._held.get(key)
        if each is not None and each.here:
            each.bound.bind_tensors(self._cache.on_host(key))
            each.here = False
