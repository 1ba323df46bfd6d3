"""The parameters and buffers of a stage, by the layer names that batches use."""

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
    """Parameters by name: "5" are those of layer number 5, "5.2" those of its child "2".

    Args:
        stage: its number.
        layers: its layers, by their number in the whole model.
        mirrors: the copies of other ranks' layers that batches run here, if any.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module], mirrors: Mirrors | None = None) -> None:
        self._stage = stage
        self._mirrors = mirrors
        self._layers = dict(layers)
        self._modules: dict[str, nn.Module] = {}
        self._found: dict[str, tuple[nn.Parameter, ...]] = {}

    def check(self, use: LayerUse) -> None:
        """Refuse names of layers that are not on this stage.

        Raises:
            PlanError: there is one.
        """
        for name in use.layers[self._stage] if len(use.layers) > self._stage else ():
            self._module(name)

    def modules(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Return the modules under these names."""
        return {name: self._module(name) for name in sorted(names)}

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters under these names on this rank, each once."""
        return list({id(p): p for name in sorted(names) for p in self._parameters_of(name)}.values())

    def named_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers under this name on this rank, by their name within it."""
        mirrors = self._mirrors_of(name)
        own = self._module(name).named_parameters() if mirrors is None else mirrors.copies[name].parameters.items()
        return {**dict(own), **dict(self._buffers(name))}

    def read_only_ids(self, use: LayerUse | None) -> frozenset[int]:
        """Return the ids of trainable parameters that a batch uses and does not step."""
        if use is None or use.steps is None:
            return frozenset()
        stepped = {id(p) for p in self.parameters(use.stepped_layers(self._stage))}
        read = self.parameters(use.layers[self._stage])
        return frozenset(id(p) for p in read if p.requires_grad and id(p) not in stepped)

    def read_only_buffers(self, use: LayerUse | None) -> dict[str, torch.Tensor]:
        """Return the buffers of layers that a batch only reads, or reads late, so that it must not change them."""
        if use is None or (use.steps is None and not use.delays):
            return {}
        here, late = use.layers[self._stage], {name for name, _ in use.delays}
        names = sorted((here - use.stepped_layers(self._stage)) | (here & late))
        return {f"{name}.{at}": buffer for name in names for at, buffer in self._buffers(name)}

    def _buffers(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        mirrors = self._mirrors_of(name)
        return self._module(name).named_buffers() if mirrors is None else mirrors.copies[name].buffers.items()

    def buffer_places(self, name: str) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        """Return the buffers under this name on this rank: dictionaries, and keys in them."""
        mirrors = self._mirrors_of(name)
        if mirrors is None:
            tables = [module._buffers for module in self._module(name).modules()]
        else:
            tables = [mirrors.copies[name].buffers]  # type: ignore[list-item]  # none is missing
        return [(table, key) for table in tables for key in table]

    def is_remote(self, name: str) -> bool:
        """Return whether another rank owns the layer."""
        return self._mirrors_of(name) is not None

    def _mirrors_of(self, name: str) -> Mirrors | None:
        """Return the mirrors of a layer that another rank owns; None for other layers."""
        return self._mirrors if self._mirrors is not None and self._mirrors.is_remote(name) else None

    def _parameters_of(self, name: str) -> tuple[nn.Parameter, ...]:
        mirrors = self._mirrors_of(name)
        if mirrors is not None:  # a batch under way may use what is not here yet
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
    """One stage's access to the memory of its rank.

    A stage that recomputes needs its layers only while a task runs. Any other stage, such as the last, keeps those of a
    batch from its first forward to its step, because autograd refers to them meanwhile.

    Args:
        recompute: whether the stage recomputes.
    """

    def __init__(self, memory: LayerMemory, stage: int, parts: LayerParameters, recompute: bool) -> None:
        self._memory, self._stage, self._parts, self._recompute = memory, stage, parts, recompute
        self._task: tuple[bool, int] | None = None  # direction and batch of the last one
        self._kept: dict[int, Mapping[str, nn.Module]] = {}  # of batches under way, by number

    def enter(self, use: LayerUse) -> None:
        """Register a batch that uses these layers."""
        own = self._own_layers(use)
        self._memory.enter(self._parts.modules(name for name in own if not self._parts.is_remote(name)))
        self._memory.pin_layers(self._parts.modules(use.layers[self._stage] - own))

    def run_with_memory(self, compute: Callable[[], T], undo: Callable[[], bool]) -> T:
        """Return the result of a computation. Where the device has no memory for it, layers that no computation uses
        leave, and it runs again (NASPipe, S4.2).

        Args:
            undo: called after a failure; returns whether everything is as it was before.

        Raises:
            torch.OutOfMemoryError: none can leave, or something has changed.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)  # which keeps the tensors of the attempt
            if not undo() or not self._memory.evict_idle():
                raise failure

    def keep_buffers(self, use: LayerUse | None, number: int) -> Callable[[], None]:
        """Return a function that restores the buffers of a layer as they are now."""
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
        """Return whether a forward may begin. Where no later event would make room it may begin, and fails with an
        error."""
        return not self._kept or self._memory.has_room(self._own_layers(use))

    @contextmanager
    def task_context(self, kind: Kind, item: Item) -> Iterator[None]:
        """Keep the layers of a task on the device inside the block.

        Raises:
            PipelineError: the batch does not say which layers it uses.
            PlanError: no room.
        """
        if item.use is None:
            raise PipelineError(
                f"{'batch' if item.training else 'a batch of an evaluation, number'} {item.number} does not name "
                "the layers that it uses, and MemorySwap keeps only these on the device. Return them from "
                "layers_of_batch of the LightningModule, also in validation, or leave MemorySwap out"
            )
        memory, parts = self._memory, self._parts.modules(self._own_layers(item.use))
        if item.training and not self._recompute and item.number not in self._kept:
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
        """Return the layers that a batch has for itself, from its forward to its step, and copies that it reads."""
        copies = {name for name in use.layers[self._stage] if self._parts.is_remote(name)}
        return (use.stepped_layers(self._stage) - {name for name, _ in use.delays}) | copies
