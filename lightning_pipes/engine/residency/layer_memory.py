"""Layers and weight versions that share the memory of a device.

Each layer that batches choose is on the device while a computation uses it:

    in use by F of batch 7    kept for batch 8    loaded for batch 9                     on the host
    layers 0.3, 1.1           layers 0.2, 1.4     layer 0.0 (1.1 is already there)       all other layers

Each version of the weights is on the device while it is read, and the next versions are loaded meanwhile:

    B5 reads                loaded meanwhile    moved to the host    on the host, in the order of their reads
    weights 3 of stage 0    weights 4           weights 7            weights 5, weights 6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.residency.binding import Binding, OptimizerLike, still_bound
from lightning_pipes.engine.residency.swap import MovableTensors, Swap
from lightning_pipes.ir import PlanError

Parts = Mapping[str, nn.Module]
"""Layers, or parts of layers, by the names that batches use."""


class _LayerOptimizer:
    """One optimizer restricted to the parameters of one layer, with the attributes that a `Binding` reads."""

    def __init__(self, optimizer: Optimizer, layer: nn.Module) -> None:
        self._optimizer, self._parameters = optimizer, list(layer.parameters())
        self.param_groups: list[dict[str, Any]] = []

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The optimizer's state for the parameters of the layer."""
        return {p: self._optimizer.state[p] for p in self._parameters if p in self._optimizer.state}


@runtime_checkable
class StateMemory(Protocol):
    """Memory in which states with any kind of key share devices; `MemorySwap` is an implementation.

    Attributes:
        device_bytes: the bytes for states on each device.
        prefetch: whether states are loaded before they are needed.
        predictor: the name of the predictor of the next layers.
    """

    device_bytes: int
    prefetch: bool
    predictor: str

    def states(self, device: torch.device) -> Swap[Hashable]:
        """Return the states on `device`."""

    @property
    def usage_text(self) -> str:
        """A sentence that reports how often tasks found their layers on the device; empty without offloaded layers."""


class LayerMemory:
    """The layers of one rank, which load and offload their weights, buffers and optimizer states.

    A layer stays in place until the first batch that uses it is registered. Layers that several batches use at the same
    time, such as layers that no batch steps, remain on the device.

    Args:
        memory: the memory that the layers share.
        device: the device of this rank.
        optimizers: returns the optimizers of the training run, once they exist.

    Attributes:
        upcoming: returns the names of the layers of the next tasks, in the order in which they will probably be needed.
    """

    def __init__(
        self, memory: StateMemory, device: torch.device, optimizers: Callable[[], Sequence[Optimizer]]
    ) -> None:
        self._swap, self._prefetch = memory.states(device), memory.prefetch
        self._device, self._optimizers = device, optimizers
        self._parts: dict[str, tuple[nn.Module, Sequence[OptimizerLike]]] = {}
        self._leases: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self.upcoming: Callable[[], Iterable[str]] = tuple

    def enter(self, parts: Parts) -> None:
        """Register layers, which are loaded and offloaded from now on."""
        for name, part in parts.items():
            if name not in self._parts:
                self.add_layer(name, part, self._owns(part))

    def add_layer(self, name: str, part: nn.Module, owns: Sequence[OptimizerLike]) -> None:
        """Register one layer with its optimizer states in `owns`."""
        known = any(own.state for own in owns)  # some of these states remain on the host
        if known:
            self._bring(part, owns)
        where = next((t.device for t in (*part.parameters(), *part.buffers())), self._device)
        self._swap.add(_key(name), Binding(part, owns, self._device if known else where))
        self._parts[name] = part, owns

    def remove_layer(self, name: str, needed: bool = True) -> bool:
        """Unregister a layer, and give it tensors of its own on the host.

        Args:
            name: the name of the layer.
            needed: whether the values of the tensors are needed. If not, the tensors have no values afterwards.

        Returns:
            Whether the layer was registered.
        """
        if name not in self._parts:
            return False
        (self._swap.remove if needed else self._swap.discard_state)(_key(name))
        del self._parts[name]
        return True

    @contextmanager
    def read_layer(self, name: str) -> Iterator[None]:
        """Allow reads of a layer inside the block, whether it is on the device or on the host."""
        if name not in self._parts:
            yield
            return
        with self._swap.read_state(_key(name)):
            yield

    def has_room(self, names: Iterable[str]) -> bool:
        """Return whether these layers fit on the device in addition to the layers that are in use."""
        return self._swap.has_room(*(_key(name) for name in names if name in self._parts))

    def acquire(self, parts: Parts, write: bool = False, again: bool = False) -> None:
        """Load the layers, keep them on the device until `release`, and start to load the next layers.

        Args:
            parts: the layers by name.
            write: whether the layers are changed meanwhile. Buffers are always treated as changed.
            again: whether the previous task used the same layers for the same batch in the same direction.

        Raises:
            PlanError: the layers don't fit on the device.
        """
        hits = self._swap.statistics.hits
        missing = [_key(name) for name in parts if not self._leases[name]]
        if not self._swap.has_room(*map(_key, parts)):
            names = ", ".join(sorted(parts)[:6])
            raise PlanError(
                f"no room on the device for layers {names}, which are used at the same time, in addition to the layers "
                "that always stay there. Give MemorySwap more device_bytes, or cut the model into more stages"
            )
        for name in parts:
            self._leases[name] += 1
        # Resident layers come first, so that none of them is evicted to make room for another one.
        for key in sorted(missing, key=lambda key: key not in self._swap.resident_keys):
            bound = self._swap.bound_tensors(key)
            self._swap.acquire(key, write=isinstance(bound, Binding) and bound.has_buffers)
        if again:
            self._swap.statistics.again += self._swap.statistics.hits - hits
        for name in parts if write else ():
            self._swap.mark_changed(_key(name))
        self.look_ahead()

    def look_ahead(self) -> None:
        """Start to load the layers that will probably be needed next, if there is room."""
        self._swap.predict(map(_key, self.upcoming()))
        if self._prefetch:
            self._swap.prefetch_states()

    def release(self, parts: Parts) -> None:
        """Allow the layers to be evicted."""
        for name in parts:
            self._leases[name] -= 1
            if not self._leases[name]:
                self._swap.release(_key(name))
                self._swap.write_back(_key(name))  # now, so that no load has to wait for it later

    def update_layers(self, parts: Parts, stepped: bool) -> None:
        """Update acquired layers after a task.

        An optimizer step may have added states, and a forward may have replaced buffers by other tensors.

        Args:
            parts: the layers by name.
            stepped: whether the task was an optimizer step.
        """
        for name in parts:
            (module, owns), bound = self._parts[name], self._swap.bound_tensors(_key(name))
            if not stepped and isinstance(bound, Binding) and not bound.has_buffers:
                continue
            if not still_bound(self._swap, _key(name), module, owns, self._device):
                self._renew(name)

    def evict_idle(self) -> bool:
        """Move all layers that no computation uses to the host, and return whether there were any."""
        return self._swap.evict_idle()

    def pin_layers(self, parts: Parts) -> None:
        """Keep layers that several batches use at the same time on the device."""
        for name, part in parts.items():
            if name not in self._pinned:
                self._pinned.add(name)
                self._bring(part, self._owns(part))

    def flush(self) -> None:
        """Wait until the host has the current values of all layers."""
        self._swap.flush()

    def close(self) -> None:
        """Give all layers tensors of their own again. Tensors that were swapped are on the host afterwards."""
        for name in self._parts:
            self._swap.remove(_key(name))
        self._parts.clear()
        self._leases.clear()

    def _owns(self, part: nn.Module) -> list[_LayerOptimizer]:
        return [_LayerOptimizer(optimizer, part) for optimizer in self._optimizers()]

    def _renew(self, name: str) -> None:
        """Register a layer again, because it has more tensors than before.

        The layer is moved to the host until its next use, because its place on the device is too small.
        """
        module, owns = self._parts[name]
        self._swap.remove(_key(name))
        self._bring(module, owns)
        self._swap.add(_key(name), Binding(module, owns, self._device))

    def _bring(self, part: nn.Module, owns: Sequence[OptimizerLike]) -> None:
        """Move tensors from the host to the device, except tensors that optimizers keep on the host."""
        part.to(self._device)
        for p, state in ((p, state) for own in owns for p, state in own.state.items()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape:
                    state[key] = value.to(self._device)


def _key(name: str) -> tuple[str, str]:
    return "layer", name


class VersionMemory:
    """The weight versions of the stages of one rank.

    A version is never changed, so it is copied to the host only once, directly after its creation, and is loaded from
    there.

    Args:
        memory: the memory that the versions share.
        device: the device of this rank.

    Attributes:
        upcoming: returns the keys of the versions that will be read next, in order.
    """

    def __init__(self, memory: StateMemory, device: torch.device) -> None:
        self._swap, self._prefetch = memory.states(device), memory.prefetch
        self.upcoming: Callable[[], Iterable[Hashable]] = tuple
        self._kept: set[Hashable] = set()

    def add_version(self, key: Hashable, bound: MovableTensors) -> None:
        """Add a version as a copy of the tensors of `bound`, which uses the copy from now on.

        Raises:
            PlanError: the version does not fit.
        """
        self._swap.make(key, bound)
        self._kept.add(key)
        self._swap.write_back(key)

    @contextmanager
    def lease_version(self, key: Hashable) -> Iterator[None]:
        """Keep a version on the device inside the block.

        Raises:
            PlanError: the version does not fit on the device.
        """
        with self._swap.lease_state(key):
            self.look_ahead()
            yield

    def drop_version(self, key: Hashable) -> None:
        """Drop a version that will not be read again."""
        self._swap.discard_state(key)
        self._kept.discard(key)

    def look_ahead(self) -> None:
        """Start to load the versions that will be read next, if there is room."""
        if self._kept:
            self._swap.predict(self._next())
            if self._prefetch:
                self._swap.prefetch_states()

    def _next(self) -> Iterator[Hashable]:
        """Yield the keys of the versions in the order in which they will be read."""
        missing = set(self._kept)
        for key in self.upcoming():
            if key in missing:
                missing.remove(key)
                yield key
                if not missing:
                    return
