"""The places of weights and buffers of a model that is cut by units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_pipes.trainer.units.recording import StepRecord


@dataclass(frozen=True)
class UnitLayout:
    """The stages of a recorded step.

    Attributes:
        starts: the first unit of each stage.
        names: of all units of the record, in order.
        atomic: paths of the modules whose calls are units.
        drawing: names of the units that draw random numbers, or that the recorded step did not call.
        stages_of: the stages that use a weight or buffer, by its name; none of the others.
        clones: whether values are copied when they arrive, for units change some in place.
    """

    starts: tuple[int, ...]
    names: tuple[str, ...]
    atomic: tuple[str, ...]
    drawing: frozenset[str]
    stages_of: Mapping[str, tuple[int, ...]]
    clones: bool

    @classmethod
    def from_record(cls, record: StepRecord, starts: tuple[int, ...]) -> UnitLayout:
        """Return the layout of a record that is cut in front of the units `starts`."""
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
        )

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def border_of(self, stage: int) -> int:
        """Return the unit at which a stage ends in a step like the recorded one."""
        return self.starts[stage + 1] if stage + 1 < len(self.starts) else len(self.names)

    def modules(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the modules whose calls are units, by path."""
        return {path: root.get_submodule(path) for path in self.atomic}
