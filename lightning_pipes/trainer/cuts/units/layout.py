"""The division of a step into the parts of stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_pipes.trainer.cuts.units.recording import StepRecord, find_atomic
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices


@dataclass(frozen=True)
class UnitLayout:
    """The division of a recorded step into parts.

    A stage has one part or, if weights may move, several consecutive parts.

    Attributes:
        starts: the first unit of each part.
        names: the names of all units of the record, in order.
        atomic: paths of the modules whose calls are units.
        drawing: the names of the units that draw random numbers, or that the recorded step did not call.
        parts_of: the parts that use a weight or buffer, by its name. Unused weights have no entry.
        clones: whether values are copied when they arrive, because units change some of them in place.
        layers: the paths of the layers of a container that are the parts. Empty if parts consist of recorded units.
        drew: the names of the units that drew random numbers in the recorded step.
        streams: the paths of the layers that have their own random streams.
        slices: the layers that run together as units. None if there are none.
    """

    starts: tuple[int, ...]
    names: tuple[str, ...]
    atomic: tuple[str, ...]
    drawing: frozenset[str]
    parts_of: Mapping[str, tuple[int, ...]]
    clones: bool
    layers: tuple[str, ...] = ()
    drew: frozenset[str] = frozenset()
    streams: tuple[str, ...] = ()
    slices: SequentialSlices | None = None

    @classmethod
    def from_layers(cls, module: nn.Module, container: str) -> UnitLayout:
        """Return the layout in which each layer of a container is one part, so that no step has to be recorded.

        A stage ends in front of the first unit whose weights it does not have. Weights outside of the layers are in
        all parts.

        Args:
            module: the user's module.
            container: the path of the container.
        """
        layers = tuple(f"{container}.{name}" for name, _ in module.get_submodule(container).named_children())
        every = tuple(range(len(layers)))
        within = {f"{path}.": (number,) for number, path in enumerate(layers)}
        names = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
        parts_of = {name: next((n for path, n in within.items() if name.startswith(path)), every) for name in names}
        atomic = tuple(find_atomic(module))
        return cls(every, (), atomic, frozenset(atomic), parts_of, clones=True, layers=layers, streams=layers)

    @classmethod
    def from_record(
        cls,
        record: StepRecord,
        starts: tuple[int, ...],
        slices: SequentialSlices | None = None,
        streams: tuple[str, ...] = (),
    ) -> UnitLayout:
        """Return the layout of a record that is cut in front of the units `starts`.

        Args:
            record: the recorded step.
            starts: the first unit of each part.
            slices: the layers that run together as units; None if there are none.
            streams: the paths of the layers that have their own random streams.
        """
        stages: dict[str, set[int]] = defaultdict(set)
        for number, unit in enumerate(record.units):
            stage = max(s for s, start in enumerate(starts) if start <= number)
            for name in unit.weights:
                stages[name].add(stage)
        return cls(
            starts,
            tuple(unit.name for unit in record.units),
            record.atomic,
            record.drawing | ({*record.atomic} - {unit.name for unit in record.units}),
            {name: tuple(sorted(found)) for name, found in stages.items()},
            record.changes_values,
            drew=record.drawing,
            streams=streams,
            slices=slices,
        )

    @property
    def n_parts(self) -> int:
        """The number of parts."""
        return len(self.starts)

    def border_of(self, stage: int) -> int:
        """Return the unit at which a part ends, in a step like the recorded one."""
        return self.starts[stage + 1] if stage + 1 < len(self.starts) else len(self.names)

    def modules(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are called as units, by path."""
        return {path: root.get_submodule(path) for path in self.atomic}
