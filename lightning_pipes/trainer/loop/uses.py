"""The layers that a batch uses, if the module specifies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_pipes.ir import Delayed, Kind, LayerUse, PipelineError, Plan, Policy, Schedule
from lightning_pipes.trainer.cuts.layers.proxy import Layers

T = TypeVar("T")


@runtime_checkable
class ChoosesLayers(Protocol):
    """A LightningModule with batches that use only some of the layers, such as a supernet."""

    def layers_of_batch(self, batch: Any) -> Iterable[str] | Mapping[str, bool | Delayed]:
        """Return the names of the layers that a training batch passes through.

        Names are relative to the pipelined module: "5", or "5.2" for a part of a layer. A mapping specifies for each
        layer whether the batch steps it. Without a mapping, the batch steps all of these layers. With `Delayed`, the
        batch steps the layer, and reads the weights that an earlier batch has left.

        This method is called on every rank and must return the same result on all of them.
        """


def use_of(module: pl.LightningModule, full: Layers, batch: Any, plan: Plan) -> LayerUse | None:
    """Return the layers that `batch` uses on each stage of `plan`, or None if the module does not specify them.

    Raises:
        PlanError: a layer does not exist.
    """
    if not isinstance(module, ChoosesLayers):
        return None
    named_layers = module.layers_of_batch(batch)
    names = {name: inner for inner, name in number_layers(full, {name: name for name in named_layers}).items()}
    if not isinstance(named_layers, Mapping):
        return LayerUse.from_names(names.values(), plan.layers)
    steps = [names[name] for name, stepped in named_layers.items() if stepped]
    delays = {names[name]: how for name, how in named_layers.items() if isinstance(how, Delayed)}
    return LayerUse.from_names(names.values(), plan.layers, None if len(steps) == len(named_layers) else steps, delays)


def number_layers(full: Layers, named_layers: Mapping[str, T]) -> dict[str, T]:
    """Convert a mapping by the names of layers into a mapping by their numbers."""
    numbers = {name: str(number) for number, name in enumerate(full._modules)}
    return {
        ".".join((numbers.get(head, head), *rest)): what
        for name, what in named_layers.items()
        for head, *rest in [name.split(".")]
    }


class Overlap:
    """Detects a layer that every batch steps, which prevents batches from overlapping, and warns about it once."""

    def __init__(self) -> None:
        self._always: frozenset[str] | None = None
        self._batches = 0

    def count_batch(self, use: LayerUse | None, plan: Plan) -> None:
        """Count a batch that uses these layers, and warn after `MIN_STEPPED_BATCHES` batches if necessary."""
        if use is None or self._batches >= MIN_STEPPED_BATCHES:
            return
        self._batches += 1
        late = {name for name, _ in use.delays}
        stepped = frozenset(name for stage in range(plan.n_stages) for name in use.stepped_layers(stage)) - late
        self._always = stepped if self._always is None else self._always & stepped
        if self._batches < MIN_STEPPED_BATCHES or not self._always:
            return
        stage, name = min((s, name) for s, names in enumerate(use.layers) for name in names & self._always)
        speed = speed_behind(plan, stage)
        if speed < 1:
            rank_zero_warn(
                f"every batch steps layer {name!r} on stage {stage}, so each batch waits there for the previous "
                f"batch. Training is about {speed:.0%} as fast as with batches that overlap freely. Use more "
                "micro-batches, or a Supernet with shared='frozen', 'per_choice' or 'delayed', which "
                "changes the results"
            )


MIN_STEPPED_BATCHES = 20
"""The number of batches that must all step a layer before it is considered a layer that every batch steps."""


def speed_behind(plan: Plan, stage: int) -> float:
    """Return the speed, relative to a full pipeline, if every batch steps a layer of `stage`.

    All stages are assumed to take equally long. From the first forward on this stage to the last backward on it, m
    micro-batches pass through this stage and all later stages.
    """
    m = len(plan.spans(Kind.F, stage))
    return m / (m + plan.n_stages - 1 - stage)


def warn_without_uses(module: pl.LightningModule, schedule: Schedule | Policy, ranks: int) -> None:
    """Warn about a module that does not specify the layers of its batches if the schedule needs this information."""
    if ranks > 1 and isinstance(schedule, Policy) and not isinstance(module, ChoosesLayers):
        owner = type(module).__name__
        rank_zero_warn(
            f"schedule {schedule.name!r} overlaps batches that use different layers, and {owner} has no "
            "layers_of_batch to name them, so one batch is trained after another. Give it layers_of_batch, as a "
            "Supernet's module has it, or use a schedule for batches that use all layers, such as '1f1b'"
        )


def check_layers(module: pl.LightningModule, full: Layers) -> None:
    """Reject parameters that no batch could name as used.

    Raises:
        PipelineError: the module names the layers of its batches, and trains parameters that are outside of these
            layers or in several of them.
    """
    if not isinstance(module, ChoosesLayers):
        return
    within = Counter(id(p) for layer in full for p in {id(p): p for p in layer.parameters()}.values())
    wrong = [name for name, p in module.named_parameters() if p.requires_grad and within[id(p)] != 1]
    if wrong:
        raise PipelineError(
            f"{', '.join(wrong[:5])}: these parameters are outside of the pipelined layers, or in several of them, but "
            "layers_of_batch selects the layers that a batch steps. Put each parameter into one layer, or freeze it "
            "with requires_grad_(False)"
        )


class PartialSteps:
    """The positions of parameters in some optimizers.

    Args:
        optimizers: the optimizers, whose parameters must not change while this object is used.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._places = [
            {id(p): (number, at) for number, group in enumerate(o.param_groups) for at, p in enumerate(group["params"])}
            for o in optimizers
        ]

    @contextmanager
    def restrict_optimizer(
        self, number: int, optimizer: Optimizer, parameters: Collection[torch.Tensor]
    ) -> Iterator[None]:
        """Restrict the optimizer with this number to these parameters within the block."""
        places = self._places[number]
        found = sorted(places[id(p)] for p in parameters if id(p) in places)
        whole = [group["params"] for group in optimizer.param_groups]
        for group, (n, all_of_it) in zip(optimizer.param_groups, enumerate(whole), strict=True):
            group["params"] = [all_of_it[at] for of_group, at in found if of_group == n]
        try:
            yield
        finally:
            for group, all_of_it in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = all_of_it
