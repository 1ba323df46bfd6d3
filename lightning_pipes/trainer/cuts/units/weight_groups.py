"""The placement of weights on stages if all stages run a step together. Each weight is on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from lightning_pipes.ir import PlanError
from lightning_pipes.trainer.cuts.piece import Piece
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.recording import StepRecord

_MAX_WEIGHT_DISTANCE = 0.1
"""The largest distance of a border from its ideal place, as a share of a stage's weights."""


class WeightGroups:
    """The weights of a recorded step in groups that stay together, in the order in which the step uses them.

    Weights stay together if one unit uses them, or one checkpoint, which runs again as a whole.

    Args:
        module: the user's module.
        record: the recorded step.
    """

    def __init__(self, module: nn.Module, record: StepRecord) -> None:
        self._module = module
        self._record = record
        parent: dict[str, str] = {}

        def find(name: str) -> str:
            while parent.setdefault(name, name) != name:
                name = parent[name]
            return name

        held: dict[int, str] = {}
        for unit in record.units:
            names = sorted(unit.weights) + ([held[unit.held]] if unit.held in held else [])
            for one, other in pairwise(names):
                parent[find(other)] = find(one)
            if unit.held and names:
                held[unit.held] = names[0]
        firsts = list(dict.fromkeys(find(name) for unit in record.units for name in sorted(unit.weights)))
        self._number = {name: firsts.index(find(name)) for name in parent}
        sizes = {name: p.numel() for name, p in (*module.named_parameters(), *module.named_buffers())}
        self._sizes = [0] * len(firsts)
        for name, number in self._number.items():
            self._sizes[number] += sizes.get(name, 0)
        self._uses = [self._number[min(unit.weights)] for unit in record.units if unit.weights]

    def choose_borders(self, stages: int) -> tuple[int, ...]:
        """Return the first group of each stage, such that stages have about the same number of weights.

        Near each ideal place, the border is chosen that the step crosses least often.

        Raises:
            PlanError: there are too few groups.
        """
        if len(self._sizes) < stages:
            raise PlanError(
                f"training_step uses {len(self._sizes)} groups of weights that can be on different stages, too few "
                f"for {stages} stages; start fewer processes (devices x nodes), or split modules with many weights"
            )
        before, starts = [0, *accumulate(self._sizes)], [0]
        for stage in range(1, stages):
            left = stages - stage
            goal = before[starts[-1]] + (before[-1] - before[starts[-1]]) / (left + 1)
            options = range(starts[-1] + 1, len(self._sizes) - left + 1)
            off = {border: abs(before[border] - goal) / (before[-1] or 1) * stages for border in options}
            near = [border for border in options if off[border] <= max(_MAX_WEIGHT_DISTANCE, min(off.values()))]
            starts.append(min(near, key=lambda border: (self._crossings(border), off[border])))
        return tuple(starts)

    def find_borders(self, places: Sequence[str]) -> tuple[int, ...]:
        """Return the first group of each stage, if the stages after the first begin at the modules `places`.

        Args:
            places: the paths of the modules, in the order in which the step first calls them.

        Raises:
            PlanError: the step does not call such a module, or calls it in another order.
        """
        starts = [0]
        for place in places:
            entered = self._record.find_entry(place)
            used = (unit.weights for unit in self._record.units[entered:] if unit.weights)
            first = next((self._number[min(weights)] for weights in used), None)
            if first is None or first <= starts[-1]:
                raise PlanError(
                    f"partition names {place!r}, but the step uses the weights of this module no later than the "
                    "weights of the stage before it. Name modules in the order in which the step first calls them"
                )
            starts.append(first)
        return tuple(starts)

    def share(self, start: int, stop: int | None) -> float:
        """Return the share of the groups from `start` to `stop` in all weights."""
        return sum(self._sizes[start:stop]) / (sum(self._sizes) or 1)

    def list_pieces(self, starts: Sequence[int]) -> tuple[Piece, ...]:
        """Return the groups with their stages, which are parts, and their shares of all weights.

        Args:
            starts: the first group of each stage.
        """
        modules: list[dict[str, None]] = [{} for _ in self._sizes]
        for name, number in self._number.items():
            modules[number][name.rpartition(".")[0]] = None
        return tuple(
            Piece(_stage_at(starts, number), ", ".join(names), share=self.share(number, number + 1))
            for number, names in enumerate(modules)
        )

    def list_turns(self, starts: Sequence[int]) -> tuple[int, ...]:
        """Return the units at which another stage begins to compute.

        Args:
            starts: the first group of each stage.
        """
        found, now = [0], 0
        for number, unit in enumerate(self._record.units):
            stage = _stage_at(starts, self._number[min(unit.weights)]) if unit.weights else now
            if stage != now:
                found.append(number)
            now = stage
        return tuple(found)

    def make_layout(self, record: StepRecord, starts: Sequence[int]) -> UnitLayout:
        """Return the layout of the stages.

        Weights that the step did not use are placed with other weights of their module, or otherwise on the last stage.

        Args:
            record: the record of the same step, perhaps with fewer units.
            starts: the first group of each stage.
        """
        last = len(starts) - 1
        placed = {name: _stage_at(starts, number) for name, number in self._number.items()}
        named = {id(t): name for name, t in (*self._module.named_parameters(), *self._module.named_buffers())}
        for path in record.atomic:
            part = self._module.get_submodule(path)
            names = [named[id(t)] for t in (*part.parameters(), *part.buffers())]
            stage = next((placed[name] for name in names if name in placed), last)
            for name in names:
                placed.setdefault(name, stage)
        for name, _ in self._module.named_parameters():
            placed.setdefault(name, last)
        return UnitLayout(
            (0,) * len(starts),
            (),
            record.atomic,
            record.drawing | ({*record.atomic} - {unit.name for unit in record.units}),
            {name: (stage,) for name, stage in placed.items()},
            clones=True,
        )

    def _crossings(self, border: int) -> int:
        return sum((a < border) != (b < border) for a, b in pairwise(self._uses))


def _stage_at(starts: Sequence[int], group: int) -> int:
    return max(stage for stage, start in enumerate(starts) if start <= group)
