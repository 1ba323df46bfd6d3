"""Layers that batches choose share a device: each is there while a computation uses it.

             runs F of batch 7        keeps                    loads meanwhile
layers 0.3 1.1          on the device          0.2 1.4 (8 next)         0.0 1.1 (of 9)      others on the host

Versions of weights share a device: each is there while it is read, and the next ones are loaded meanwhile.

B5 reads                  loads meanwhile       goes to the host      on the host, in the order of their reads
weights 3 of stage 0      weights 4             weights 7             weights 5, weights 6
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
"""Layers, or parts of them, by the names that batches use."""


class _LayerOptimizer:
    """One optimizer restricted to one layer: a `Binding` reads nothing else of it."""

    def __init__(self, optimizer: Optimizer, layer: nn.Module) -> None:
        self._optimizer, self._parameters = optimizer, list(layer.parameters())
        self.param_groups: list[dict[str, Any]] = []

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The optimizer's state of the layer's parameters."""
        return {p: self._optimizer.state[p] for p in self._parameters if p in self._optimizer.state}


@runtime_checkable
class StateMemory(Protocol):
    """Memory in which states of any key share devices; `MemorySwap` is one.

    Attributes:
        device_bytes: of each device.
        predictor: the name of what predicts the next layers.
    """

    device_bytes: int
    prefetch: bool
    predictor: str

    def states(self, device: torch.device) -> Swap[Hashable]:
        """Return the states on `device`."""

    @property
    def usage_text(self) -> str:
        """A sentence on the hits of tasks; empty where no layers took turns."""


class LayerMemory:
    """The layers of one rank, with weights, buffers and optimizer states that are loaded and offloaded.

    A layer counts once its first batch is known; before that it stays in place. Layers that several batches use at
    once, such as layers that no batch steps, stay on the device.

    Args:
        memory: the memory that the layers share.
        device: the device of this rank.
        optimizers: returns the optimizers of the training, once they are known.

    Attributes:
        upcoming: returns the layers of the probable next tasks, by name, the first one first.
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
        """Register layers for use; they count from now on."""
        for name, part in parts.items():
            if name not in self._parts:
                self.add_layer(name, part, self._owns(part))

    def add_layer(self, name: str, part: nn.Module, owns: Sequence[OptimizerLike]) -> None:
        """Register one layer, with its states in `owns`."""
        known = any(own.state for own in owns)  # of which some lies on the host for good
        if known:
            self._bring(part, owns)
        where = next((t.device for t in (*part.parameters(), *part.buffers())), self._device)
        self._swap.add(_key(name), Binding(part, owns, self._device if known else where))
        self._parts[name] = part, owns

    def remove_layer(self, name: str, needed: bool = True) -> bool:
        """Take a layer out, which has tensors of its own on the host then; without values where they are not `needed`.
        Return whether it was registered."""
        if name not in self._parts:
            return False
        (self._swap.remove if needed else self._swap.discard_state)(_key(name))
        del self._parts[name]
        return True

    @contextmanager
    def read_layer(self, name: str) -> Iterator[None]:
        """Let a layer be read in the block, wherever it is."""
        if name not in self._parts:
            yield
            return
        with self._swap.read_state(_key(name)):
            yield

    def has_room(self, names: Iterable[str]) -> bool:
        """Return whether these layers fit on the device beside pinned and leased ones."""
        return self._swap.has_room(*(_key(name) for name in names if name in self._parts))

    def acquire(self, parts: Parts, write: bool = False, again: bool = False) -> None:
        """Load the layers and keep them until `release`, and start to load the next ones.

        Args:
            write: they are changed meanwhile; buffers always are.
            again: the task before used them, too, for the same batch in the same direction.

        Raises:
            PlanError: there is no room.
        """
        hits = self._swap.statistics.hits
        missing = [_key(name) for name in parts if not self._leases[name]]
        if not self._swap.has_room(*map(_key, parts)):
            names = ", ".join(sorted(parts)[:6])
            raise PlanError(
                f"no room on the device for layers {names}, which are used at once, beside those that stay there; give "
                "MemorySwap more device_bytes, or cut the model into more stages"
            )
        for name in parts:
            self._leases[name] += 1
        for key in sorted(missing, key=lambda key: key not in self._swap.resident_keys):  # none leaves for another one
            bound = self._swap.bound_tensors(key)
            self._swap.acquire(key, write=isinstance(bound, Binding) and bound.has_buffers)
        if again:
            self._swap.statistics.again += self._swap.statistics.hits - hits
        for name in parts if write else ():
            self._swap.mark_changed(_key(name))
        self.look_ahead()

    def look_ahead(self) -> None:
        """Start to load the probable next layers, as far as there is room."""
        self._swap.predict(map(_key, self.upcoming()))
        if self._prefetch:
            self._swap.prefetch_states()

    def release(self, parts: Parts) -> None:
        """Allow the layers to leave."""
        for name in parts:
            self._leases[name] -= 1
            if not self._leases[name]:
                self._swap.release(_key(name))
                self._swap.write_back(_key(name))  # at once, so that no load waits for it when its place is taken

    def update_layers(self, parts: Parts, stepped: bool) -> None:
        """Update acquired layers after a task. An optimizer step may have added states, and a forward may have put
        other tensors in place of buffers."""
        for name in parts:
            (module, owns), bound = self._parts[name], self._swap.bound_tensors(_key(name))
            if not stepped and isinstance(bound, Binding) and not bound.has_buffers:
                continue
            if not still_bound(self._swap, _key(name), module, owns, self._device):
                self._renew(name)

    def evict_idle(self) -> bool:
        """Move all layers that no computation uses to the host; return whether there was one."""
        return self._swap.evict_idle()

    def pin_layers(self, parts: Parts) -> None:
        """Keep layers that several batches use at once on the device."""
        for name, part in parts.items():
            if name not in self._pinned:
                self._pinned.add(name)
                self._bring(part, self._owns(part))

    def flush(self) -> None:
        """Wait until the host is up to date."""
        self._swap.flush()

    def close(self) -> None:
        """Give all layers tensors of their own again, on the host where they were swapped."""
        for name in self._parts:
            self._swap.remove(_key(name))
        self._parts.clear()
        self._leases.clear()

    def _owns(self, part: nn.Module) -> list[_LayerOptimizer]:
        return [_LayerOptimizer(optimizer, part) for optimizer in self._optimizers()]

    def _renew(self, name: str) -> None:
        """Re-register a layer that has more tensors than before. It leaves the device, where its size was counted
        smaller, until its next use."""
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
