"""Parameters and buffers of a stage, by the layer names that batches use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.ir import Kind, LayerUse, PipelineError, PlanError

T = TypeVar("T")


class LayerParameters:
    """Finds the parameters and buffers of layers by name.

    The name "5" stands for layer number 5, and the name "5.2" stands for the child "2" of this layer.

    Args:
        stage: the number of the stage.
        layers: the layers of the stage, by their number in the whole model.
        mirrors: the copies of other ranks' layers that batches use on this rank, if any.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module], mirrors: Mirrors | None = None) -> None:
        self._stage = stage
        self._mirrors = mirrors
        self._layers = dict(layers)
        self._modules: dict[str, nn.Module] = {}
        self._found: dict[str, tuple[nn.Parameter, ...]] = {}

    def check(self, use: LayerUse) -> None:
        """Check that this stage has all layers that a batch uses on it.

        Raises:
            PlanError: the stage has no layer of such a name.
        """
        for name in use.layers[self._stage] if len(use.layers) > self._stage else ():
            self._module(name)

    def modules(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Return the modules with these names."""
        return {name: self._module(name) for name in sorted(names)}

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters of the layers with these names on this rank, without duplicates."""
        return list({id(p): p for name in sorted(names) for p in self._parameters_of(name)}.values())

    def named_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the layer with this name on this rank, by their names within it."""
        mirrors = self._mirrors_of(name)
        own = self._module(name).named_parameters() if mirrors is None else mirrors.copies[name].parameters.items()
        return {**dict(own), **dict(self._buffers(name))}

    def read_only_ids(self, use: LayerUse | None) -> frozenset[int]:
        """Return the ids of the trainable parameters that a batch uses but does not step."""
        if use is None or use.steps is None:
            return frozenset()
        stepped = {id(p) for p in self.parameters(use.stepped_layers(self._stage))}
        read = self.parameters(use.layers[self._stage])
        return frozenset(id(p) for p in read if p.requires_grad and id(p) not in stepped)

    def read_only_buffers(self, use: LayerUse | None) -> dict[str, torch.Tensor]:
        """Return the buffers that a batch must not change, because it does not step their layers or reads them late."""
        if use is None or (use.steps is None and not use.delays):
            return {}
        here, late = use.layers[self._stage], {name for name, _ in use.delays}
        names = sorted((here - use.stepped_layers(self._stage)) | (here & late))
        return {f"{name}.{at}": buffer for name in names for at, buffer in self._buffers(name)}

    def _buffers(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        mirrors = self._mirrors_of(name)
        return self._module(name).named_buffers() if mirrors is None else mirrors.copies[name].buffers.items()

    def buffer_places(self, name: str) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        """Return the places of the buffers of a layer on this rank, as dictionaries with a key of each."""
        mirrors = self._mirrors_of(name)
        if mirrors is None:
            tables = [module._buffers for module in self._module(name).modules()]
        else:
            tables = [mirrors.copies[name].buffers]  # type: ignore[list-item]  # no buffer of a copy is None
        return [(table, key) for table in tables for key in table]

    def is_remote(self, name: str) -> bool:
        """Return whether the layer belongs to another rank."""
        return self._mirrors_of(name) is not None

    def _mirrors_of(self, name: str) -> Mirrors | None:
        """Return the mirrors if the layer belongs to another rank, and None otherwise."""
        return self._mirrors if self._mirrors is not None and self._mirrors.is_remote(name) else None

    def _parameters_of(self, name: str) -> tuple[nn.Parameter, ...]:
        mirrors = self._mirrors_of(name)
        if mirrors is not None:  # a batch in flight may use a layer that has not arrived yet
            return tuple(mirrors.copies[name].parameters.values()) if name in mirrors.copies else ()
        if name not in self._found:
            self._found[name] = tuple(self._module(name).parameters())
        return self._found[name]

    def _module(self, name: str) -> nn.Module:
        if name not in self._modules:
            number, _, part = name.partition(".")
            try:
                self._modules[name] = self._layers[int(number)].get_submodule(part)
            except (KeyError, ValueError, AttributeError):
                raise PlanError(
                    f"a batch uses layer {name!r} on stage {self._stage}, which has no such layer, or no such part of "
                    f"one: its layers are {', '.join(map(str, self._layers)) or 'none'}"
                ) from None
        return self._modules[name]


class LayerOffload:
    """Loads and offloads the layers of one stage.

    A stage that recomputes all micro-batches needs its layers only while a task runs. Any other stage, such as the last
    one, keeps the layers of a batch on the device from the first forward to the step of the batch, because the autograd
    graph refers to them.

    Args:
        memory: the layers of this rank.
        stage: the number of the stage.
        parts: finds the layers that batches use.
        recompute: whether the stage recomputes all micro-batches.
    """

    def __init__(self, memory: LayerMemory, stage: int, parts: LayerParameters, recompute: bool = False) -> None:
        self._memory, self._stage, self._parts, self.recompute = memory, stage, parts, recompute
        self._task: tuple[bool, int] | None = None  # whether the last task was a forward, and its batch
        self._kept: dict[int, Mapping[str, nn.Module]] = {}  # layers of batches in flight, by batch number

    def enter(self, use: LayerUse) -> None:
        """Register a batch and the layers that it uses."""
        own = self._own_layers(use)
        self._memory.enter(self._parts.modules(name for name in own if not self._parts.is_remote(name)))
        self._memory.pin_layers(self._parts.modules(use.layers[self._stage] - own))

    def run_with_memory(self, compute: Callable[[], T], undo: Callable[[], bool]) -> T:
        """Run a computation, and run it again with fewer layers on the device if it runs out of memory.

        After each failure, the layers that no computation uses are evicted from the device (NASPipe, S4.2).

        Args:
            compute: the computation.
            undo: called after a failure; returns whether the state before the computation was restored.

        Returns:
            The result of the computation.

        Raises:
            torch.OutOfMemoryError: no layer can be evicted, or the state before the computation could not be restored.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # the traceback keeps the tensors of the failed run alive
            if not undo() or not self._memory.evict_idle():
                raise failure

    def keep_buffers(self, use: LayerUse | None, number: int) -> Callable[[], None]:
        """Return a function that restores the current buffers of a layer.

        Args:
            use: the layers that the batch uses.
            number: the number of the layer.
        """
        names = (
            () if use is None else (name for name in use.layers[self._stage] if name.partition(".")[0] == str(number))
        )
        found = [(table, key, table[key]) for name in names for table, key in self._parts.buffer_places(name)]
        kept = [(table, key, tensor, tensor.clone()) for table, key, tensor in found if tensor is not None]

        def restore() -> None:
            with torch.no_grad():
                for table, key, tensor, values in kept:
                    table[key] = tensor.copy_(values)

        return restore

    def has_room(self, use: LayerUse) -> bool:
        """Return whether a forward may begin because the device has room for its layers.

        If no batch in flight keeps layers on the device, a forward may always begin, because waiting would not make
        room. If its layers don't fit then, it fails with an error.
        """
        return not self._kept or self._memory.has_room(self._own_layers(use))

    @contextmanager
    def task_context(self, kind: Kind, item: Item) -> Iterator[None]:
        """Keep the layers of a task on the device inside the block.

        Raises:
            PipelineError: the batch does not specify the layers that it uses.
            PlanError: the layers don't fit on the device.
        """
        if item.use is None:
            raise PipelineError(
                f"{'batch' if item.training else 'a batch of an evaluation, number'} {item.number} does not name "
                "the layers that it uses, and MemorySwap keeps only these on the device. Return them from "
                "layers_of_batch of the LightningModule, also in validation, or leave MemorySwap out"
            )
        memory, parts = self._memory, self._parts.modules(self._own_layers(item.use))
        if item.training and not self.recompute and item.number not in self._kept:
            memory.acquire(parts)
            self._kept[item.number] = parts
        steps, task = kind is Kind.STEP, (kind is Kind.F, item.number)
        memory.acquire(parts, write=steps, again=task == self._task)
        self._task = task
        yield
        if kind in (Kind.F, Kind.STEP):
            memory.update_layers(parts, stepped=steps)
        if steps:
            memory.release(self._kept.pop(item.number, {}))
        memory.release(parts)

    def _own_layers(self, use: LayerUse) -> frozenset[str]:
        """Return the layers that only this batch uses until its step, and the copies that it reads."""
        copies = {name for name in use.layers[self._stage] if self._parts.is_remote(name)}
        return (use.stepped_layers(self._stage) - {name for name, _ in use.delays}) | copies
