"""A whole step in one process that draws random numbers from the streams of its units, as stages do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.mode import Function
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.trace import tensors_of_call
from lightning_pipes.trainer.cuts.units.traced_step import TracedStep


class StreamUnits(NamedTuple):
    """The units of a step, as far as its random streams depend on them. It can be pickled.

    Attributes:
        atomic: paths of the modules whose calls are units.
        drawing: the names of the units that may draw random numbers.
        modules: paths of the modules among them that have weights, in the order in which the step calls them.
        starts: the first unit of each stage if stages have different micro-batches; otherwise, only of the first stage.
        end: the unit from which the step runs on whole batches; None if it never does.
        streams: the paths of the layers that have their own random streams.
        slices: the layers that run together as units; None if there are none.
    """

    atomic: tuple[str, ...]
    drawing: frozenset[str]
    modules: tuple[str, ...]
    starts: tuple[int, ...] = (0,)
    end: int | None = None
    streams: tuple[str, ...] = ()
    slices: SequentialSlices | None = None

    @classmethod
    def from_layout(cls, layout: UnitLayout, starts: tuple[int, ...], end: int | None) -> StreamUnits:
        """Return the units of a layout.

        Args:
            layout: the layout.
            starts: the first unit of each stage if stages have different micro-batches; otherwise, only of the first
                stage.
            end: the unit from which the step runs on whole batches; None if it never does.
        """
        owners = {name.rpartition(".")[0] for name in layout.parts_of}
        weighed = (path for path in layout.atomic if any(f"{each}.".startswith(f"{path}.") for each in owners))
        places = {name: number for number, name in reversed([*enumerate(layout.names)])}
        if layout.slices is not None:
            layers, of_units = layout.slices.layers, layout.slices.units.items()
            places |= {layers[n]: places[name] for name, numbers in of_units for n in numbers}
        modules = sorted(weighed, key=lambda path: places.get(path, len(places)))
        return cls(layout.atomic, layout.drawing, tuple(modules), starts, end, layout.streams, layout.slices)

    def number_modules(self, module: nn.Module) -> dict[int, nn.Module]:
        """Return the modules with weights, numbered in the order in which the step calls them."""
        return {number: module.get_submodule(path) for number, path in enumerate(self.modules)}


class WholeStep(TracedStep):
    """Runs all units of a step in one process.

    Args:
        module: the whole module of the user.
        units: the units that stages run.
        device: the device of the module.
    """

    def __init__(self, module: nn.Module, units: StreamUnits, device: torch.device) -> None:
        atomic = {path: module.get_submodule(path) for path in units.atomic}
        super().__init__(module, atomic, units.drawing, device, streams=units.streams, slices=units.slices)
        self._starts, self._end = units.starts, units.end
        self._count = 0
        self._seed_end: Callable[[int], None] | None = None

    @property
    def stage(self) -> int:
        """The stage of the next unit."""
        return bisect_right(self._starts, self._count) - 1

    def run(
        self, step: Callable[[], Any], batch: Any, seed: Callable[[int], None], seed_end: Callable[[int], None]
    ) -> Any:
        """Return the result of `step`.

        Args:
            step: runs the user's step.
            batch: the batch.
            seed: called with the number of a layer, or `AFTER_LAYERS`, to draw from its random stream, as on a stage.
            seed_end: called instead of `seed` in units that run on whole batches.
        """
        self.begin(batch, seed)
        self._count, self._seed_end = 0, seed_end
        try:
            with self:
                self._start_stream(BEFORE_LAYERS)
                return step()
        finally:
            self.end()

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        ran = self.run_here(name, path, function, args, kwargs, tensors_of_call(args, kwargs))
        self.values.prune()
        self._count += 1
        if self._count == self._end:
            self._seed = self._seed_end
        if self._count == self._end or self._count in self._starts:  # the stage does not continue with earlier states
            self._start_stream(AFTER_LAYERS - self._count)
        return ran.out
