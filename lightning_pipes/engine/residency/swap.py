"""Keeps whatever computes on the device while it is needed there, on the host else: siblings, layers, weight versions.

A `StateCache` moves tensors; here is what they belong to. Whoever uses these goes on with the objects that he knows,
and finds them on the device while they are leased.
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
    """Something whose tensors can be elsewhere from one moment to the next; a `Binding` is one."""

    def check(self) -> None:
        """Whether all can be moved, each for itself.

        Raises:
            PlanError: they can't.
        """

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Them by name."""

    def bind_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Uses `tensors` from now on, which have the values.

        Raises:
            PipelineError: a graph refers to one that it uses.
        """


@dataclass
class _SwapEntry:
    """The tensors that belong to a key.

    Attributes:
        here: its tensors are those on the device.
        leased: they stay there.
    """

    bound: MovableTensors
    here: bool = False
    leased: bool = False


class Swap(Generic[Key]):
    """States of any kind by key, and what they belong to.

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
        """Counts of what leases met."""
        return self._cache.statistics

    @property
    def host_bytes(self) -> int:
        """Of all states on the host."""
        return self._cache.host_bytes

    @property
    def resident_keys(self) -> frozenset[Key]:
        """The keys that are on the device, or on their way to it."""
        return self._cache.resident_keys

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def is_leased(self, key: Key) -> bool:
        """Whether the state is leased."""
        each = self._held.get(key)
        return each is not None and each.leased

    def bound_tensors(self, key: Key) -> MovableTensors | None:
        """The tensors that belong to the key."""
        each = self._held.get(key)
        return None if each is None else each.bound

    def add(self, key: Key, bound: MovableTensors, fits: Callable[[int], object] = lambda size: None) -> int:
        """One more state, which is on the host from now on. Returns its bytes.

        Args:
            fits: gets the bytes first; if it raises, nothing has changed.

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
        """One more state, a copy on the device of what `bound` uses there, which uses the copy from now on.

        Raises:
            PlanError: it does not fit into the device's or the host's budget, or can't be moved.
        """
        bound.check()
        self._cache.make(key, bound.named_tensors())
        self._held[key] = _SwapEntry(bound, here=True)
        bound.bind_tensors(self._cache.on_device(key))

    def rebind(self, key: Key, bound: MovableTensors) -> None:
        """The state belongs to `bound` from now on, which has the same tensors in the same places."""
        self._held[key].bound = bound

    def on_device(self, key: Key) -> dict[str, torch.Tensor] | None:
        """The state's tensors there, if what it belongs to uses them."""
        return self._cache.on_device(key) if self._held[key].here else None

    def remove(self, key: Key) -> None:
        """Gives what belongs to the key tensors of its own again, on the host."""
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
        """Nobody uses what belongs to the key any more: its tensors have no values from now on."""
        del self._held[key]
        self._cache.drop_state(key)

    def expect_leases(self, keys: Iterable[Key]) -> None:
        """These leases follow those that were expected before; no others may come."""
        self._cache.expect_leases(keys)

    def predict(self, keys: Iterable[Key]) -> None:
        """These will probably be leased next, the first one first; others that are not here are passed over."""
        self._cache.predict(key for key in keys if key in self._held)

    def prefetch_states(self) -> int:
        """Starts to load what is needed next, as far as there is room; returns how many."""
        return self._cache.prefetch_states()

    def has_room(self, *keys: Key) -> bool:
        """Whether leases of all these would find places."""
        return self._cache.has_room(*keys)

    @contextmanager
    def lease_state(self, key: Key, write: bool = False) -> Iterator[None]:
        """Has what belongs to the key compute on the device, for as long as the block runs.

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
        """A lease that lasts until `release`."""
        each = self._held[key]
        self._cache.acquire(key, write)
        each.leased = True
        if not each.here:
            each.bound.bind_tensors(self._cache.on_device(key))
            each.here = True

    def mark_changed(self, key: Key) -> None:
        """The state, which is leased, is changed after all."""
        self._cache.mark_changed(key)

    def release(self, key: Key) -> None:
        """The lease is over, if there is one; what is being computed may still be under way."""
        each = self._held.get(key)
        if each is not None and each.leased:
            self._cache.release(key)
            each.leased = False

    def write_back(self, key: Key) -> None:
        """Starts to write back what leases have changed, where states have to take turns."""
        if self._cache.is_over_budget:
            self._cache.start_write_back(key)

    def flush(self) -> None:
        """Returns when the host has all that leases have changed."""
        self._cache.flush()

    def close(self) -> None:
        """Ends the copies that are under way. What is left here stays where it is."""
        self._cache.close()
        self._held.clear()

    def _to_host(self, key: Key) -> None:
        """Another state takes its place on the device."""
        each = self._held.get(key)
        if each is not None and each.here:
            each.bound.bind_tensors(self._cache.on_host(key))
            each.here = False
