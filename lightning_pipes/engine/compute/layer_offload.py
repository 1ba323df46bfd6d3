"""Keeps the layers that the tasks of a stage need on the device while these tasks run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.layer_parameters import LayerParameters
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.ir import Kind, LayerUse, PipelineError


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
        self._memory.enter(self._parts.modules(own))
        self._memory.pin_layers(self._parts.modules(use.layers[self._stage] - own))

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
                f"{'batch' if item.training else 'a batch of an evaluation, number'} {item.number} does not say which "
                "layers it uses, and MemorySwap keeps only used layers on the device: return them from layers_of_batch "
                "of the LightningModule, also in validation, or leave MemorySwap out"
            )
        memory, parts = self._memory, self._parts.modules(self._own_layers(item.use))
        if item.training and not self._recompute and item.number not in self._kept:
            memory.acquire(parts)
            self._kept[item.number] = parts
        steps, task = kind is Kind.STEP, (kind is Kind.F, item.number)
        memory.acquire(parts, write=steps, again=task == self._task)
        self._task = task
        yield
        if steps:
            memory.after_step(parts)
            memory.release(self._kept.pop(item.number, {}))
        memory.release(parts)

    def _own_layers(self, use: LayerUse) -> frozenset[str]:
        """Return the layers that a batch has for itself, from its forward to its step."""
        return use.stepped_layers(self._stage) - {name for name, _ in use.delays}
