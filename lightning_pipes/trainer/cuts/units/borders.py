"""The possible borders between the stages of a recorded step, and the choice among them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric

from lightning_pipes.ir import PlanError
from lightning_pipes.trainer.cuts.piece import Piece
from lightning_pipes.trainer.cuts.units.mode import runs_as_whole
from lightning_pipes.trainer.cuts.units.recording import StepRecord
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices

_MAX_COST_DISTANCE = 0.1
"""The largest distance of a border from its ideal place, as a share of a stage's cost."""


class Borders:
    """The places between the units of a record. Border n is in front of unit n.

    Args:
        record: the recorded step.
        seconds: the duration of each unit. By default, the operations of a unit are its cost.
    """

    def __init__(self, record: StepRecord, seconds: Sequence[float] | None = None) -> None:
        self._record = record
        self._last_use: dict[int, int] = {key: len(record.units) for key in record.results}
        self._made: dict[int, int] = {}
        self._written: dict[int, int] = {}
        uses: dict[str, list[int]] = defaultdict(list)
        for number, unit in enumerate(record.units):
            for key in (*unit.reads, *unit.writes):
                self._last_use[key] = max(number, self._last_use.get(key, 0))
            for key in unit.writes:
                self._written[key] = number
            for key in (*unit.makes, *unit.writes):
                self._made.setdefault(key, number)
            for name in unit.weights:
                uses[name].append(number)
        self._uses = uses
        self._changed = {name for unit in record.units for name in unit.changes}
        self._has_seconds = bool(seconds)
        costs = seconds or [unit.operations + 1 for unit in record.units]
        costs = [0.0 if unit.pure else cost for unit, cost in zip(record.units, costs, strict=True)]
        self._before = [0.0, *accumulate(costs)]

    def live(self, border: int) -> list[int]:
        """Return the keys of the values that are made before a border and used behind it."""
        return [k for k, made in self._made.items() if made < border <= self._last_use.get(k, -1)]

    def bytes(self, border: int) -> int:
        """Return the number of bytes that cross a border."""
        return sum(self._record.bytes.get(key, 0) for key in self.live(border))

    def divided(self, border: int) -> int:
        """Return the number of weights that are used on both sides of a border, so that two stages hold them."""
        return sum(used[0] < border <= used[-1] for used in self._uses.values())

    def divides_changed(self, border: int) -> bool:
        """Return whether a weight that the step changes is used on both sides of a border."""
        return any(used[0] < border <= used[-1] for name in self._changed if (used := self._uses.get(name)))

    def is_possible(self, border: int) -> bool:
        """Return whether a step can be cut at a border.

        A border can't be within a checkpoint or a call of a metric, directly in front of a unit that all stages run, or
        between metrics. It also can't separate a value from a later change of the same memory under another name.
        """
        units = self._record.units
        held, before = units[border].held, units[border - 1].held
        if held == before if held else units[border].pure:
            return False
        if self._is_among_metrics(border):
            return False
        live = self.live(border)
        memory = [m for key in live if (m := self._record.memory.get(key)) is not None]
        shared = {m for m in memory if memory.count(m) > 1}
        shared |= self._record.weight_memory  # for example p.data, of which the other stage would have a copy
        changed = (k for k in live if self._record.memory.get(k) in shared)
        return not any(self._written.get(key, -1) >= border for key in changed)

    def _is_among_metrics(self, border: int) -> bool:
        """Return whether a border divides a call of a metric, or metrics that are called without weights between them.

        A metric with lists runs more units in later micro-batches. The step is then not like the recorded one, so that
        the stage ends in front of the next weights and also calls the metrics behind the border.
        """
        calls, units = self._record.metric_calls, self._record.units
        if any(start < border < end for start, end in calls):
            return True
        if not any(end <= border for _, end in calls):
            return False
        weights = next((n for n in range(border, len(units)) if units[n].weights), len(units))
        return any(border <= start < weights for start, _ in calls)

    def count_possible(self) -> int:
        """Return the number of borders at which a step can be cut."""
        return sum(map(self.is_possible, range(1, len(self._record.units))))

    def share(self, start: int, stop: int) -> float:
        """Return the share of the units from `start` to `stop` in the cost of a step."""
        return (self._before[stop] - self._before[start]) / (self._before[-1] or 1)

    def list_pieces(self, starts: Sequence[int]) -> tuple[Piece, ...]:
        """Return the units with their parts.

        Args:
            starts: the first unit of each part.
        """
        parts = [bisect_right(starts, n) - 1 for n in range(len(self._record.units))]
        return tuple(
            Piece(
                part,
                unit.name,
                self._before[n + 1] - self._before[n] if self._has_seconds else None,
                self.share(n, n + 1),
                self.bytes(n) if n in starts[1:] else None,
            )
            for n, (part, unit) in enumerate(zip(parts, self._record.units, strict=True))
        )

    def choose(self, stages: int, end: int | None = None, others: Sequence[float] = ()) -> tuple[int, ...]:
        """Return the first unit of each stage, such that the stages have about equal costs, other work included.

        Near each ideal place, the border is chosen that divides the uses of the fewest weights. Ties are broken by the
        number of bytes that cross the border.

        Args:
            stages: the number of stages.
            end: the last stage must begin before this unit.
            others: the cost of other work of each stage, in the unit of this step's costs. By default, there is none.

        Raises:
            PlanError: there are too few possible borders.
        """
        before, units = self._before, self._record.units
        possible = [border for border in range(1, end or len(units)) if self.is_possible(border)]
        whole = [border for border in possible if not self.divides_changed(border)]
        possible = whole if len(whole) >= stages - 1 else possible
        if len(possible) < stages - 1:
            raise PlanError(
                f"training_step has {len(units)} units (calls of modules and functions) with {len(possible)} possible "
                f"borders, too few for {stages} stages; start fewer processes (devices x nodes), or split large modules"
            )
        starts, loads = [0], [*others] or [0.0] * stages
        for stage in range(1, stages):
            left = stages - stage
            level = _even_level(loads[stage - 1 :], before[-1] - before[starts[-1]])
            goal = before[starts[-1]] + max(0.0, level - loads[stage - 1])
            options = [border for border in possible if border > starts[-1]]
            options = options[: len(options) - left + 1]
            off = {border: abs(before[border] - goal) / (before[-1] or 1) * stages for border in options}
            nearest = min(off.values())
            near = [border for border in options if off[border] <= max(_MAX_COST_DISTANCE, nearest)]
            starts.append(min(near, key=lambda b: (self.divided(b), self.bytes(b), off[b])))
        return tuple(starts)

    def at(self, places: Sequence[str]) -> tuple[int, ...]:
        """Return the first unit of each stage, if the stages after the first begin at the modules `places`.

        Args:
            places: the paths of the modules, in the order in which the step calls them.

        Raises:
            PlanError: the step does not call such a module, calls it in another order, or can't be cut there.
        """
        starts = [0]
        for place in places:
            entered = self._record.find_entry(place)
            units = range(entered, len(self._record.units))
            border = next((n for n in units if not self._record.units[n].pure or (n and self.is_possible(n))), None)
            if border is None or border <= starts[-1]:
                raise PlanError(
                    f"partition names {place!r}, where the step has nothing left to compute, or which it calls no "
                    "later than the module before; name modules in the order in which the step calls them"
                )
            if not self.is_possible(border):
                raise PlanError(
                    f"partition names {place!r}, where no stage can begin. It lies in a checkpoint, or the step "
                    "changes a tensor in place that crosses the border; name a module before or after it"
                )
            starts.append(border)
        return tuple(starts)


def _even_level(loads: Sequence[float], work: float) -> float:
    """Return the smallest possible load of the heaviest of the less loaded stages, among which work is divided."""
    ordered, level = sorted(loads), 0.0
    for count, following in enumerate((*ordered[1:], math.inf), start=1):
        level = (work + sum(ordered[:count])) / count
        if level <= following:
            break
    return level


def merge_units(
    module: nn.Module,
    record: StepRecord,
    starts: Sequence[int],
    hidden: Collection[str],
    layers: Collection[str] = (),
) -> dict[str, nn.Module]:
    """Return the modules, by path, that can be units if a record is cut in front of the units `starts`.

    These are the largest modules that no border divides, whose attributes the step does not change, and that log
    nothing. Modules that have to run as a whole are not merged with others.

    Args:
        module: the user's module.
        record: the recorded step.
        starts: the first unit of each stage.
        hidden: paths of modules that can't be units.
        layers: paths of modules that are units if they can be, and are not merged with others.
    """
    kept = {path for path, m in module.named_modules() if isinstance(m, (Metric, pl.LightningModule))}
    kept |= record.stateful | {*hidden}
    around = kept | {*layers} | {path for path in record.atomic if runs_as_whole(module.get_submodule(path))}
    opened = {"", *kept} | {path[:n] for path in around for n, letter in enumerate(path) if letter == "."}
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        calls = record.calls.get(path, ())
        whole = calls and path not in opened and all(a < b for a, b in calls)
        whole = whole and (path in layers or any(b - a > 1 for a, b in calls))
        if whole and any(a < start < b for a, b in calls for start in starts):
            whole = False
        inside = any(path.startswith(f"{other}.") for other in found)
        if not inside and (whole or (path in record.atomic and path not in hidden)):
            found[path] = part
    return found


def find_slices(
    module: nn.Module, record: StepRecord, starts: Sequence[int], layers: Sequence[str]
) -> tuple[SequentialSlices | None, dict[str, tuple[int, int]]]:
    """Return the slices of an nn.Sequential that runs on several stages, and the recorded units of each slice.

    The slices are None if the step does not call the nn.Sequential once and as a whole, a border divides a layer, or a
    layer can't be a unit, because it logs or leaves a trace in its attributes.

    Args:
        module: the user's module.
        record: the recorded step.
        starts: the first unit of each stage.
        layers: the paths of the layers.
    """
    container = layers[0].rpartition(".")[0] if layers else ""
    whole = record.calls.get(container, ())
    if not container or len(whole) != 1 or type(module.get_submodule(container)).forward is not nn.Sequential.forward:
        return None, {}
    spans = _list_spans(record, layers)
    ((first, last),), inside = whole, f"{container}."
    begins = [start for start, _ in spans]
    cuts = [start for start in starts if first < start < last]
    if not spans or not cuts or not {*cuts} <= {*begins} or (spans[0][0], spans[-1][1]) != (first, last):
        return None, {}
    if any(a[1] != b[0] for a, b in pairwise(spans)) or any(path.startswith(inside) for path in record.stateful):
        return None, {}
    logs = (Metric, pl.LightningModule)
    if any(isinstance(part, logs) for path, part in module.named_modules() if path.startswith(inside)):
        return None, {}
    slices = SequentialSlices(container, tuple(layers), (0, *map(begins.index, cuts)))
    return slices, {name: (spans[n[0]][0], spans[n[-1]][1]) for name, n in slices.units.items()}


def _list_spans(record: StepRecord, paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return the units of each layer, or an empty list if a layer is not called once."""
    found: list[tuple[int, int]] = []
    for path in paths:
        alone = [(n, n + 1) for n, unit in enumerate(record.units) if unit.name == path and path in record.atomic]
        calls = record.calls.get(path, alone)
        if len(calls) != 1 or calls[0][0] == calls[0][1]:
            return []
        found += calls
    return found


def match_starts(
    record: StepRecord,
    merged: StepRecord,
    starts: Sequence[int],
    slices: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[int, ...] | None:
    """Return the first unit of each stage in a record with merged units; None if the step took another path.

    Args:
        record: the record before units were merged.
        merged: the record with merged units.
        starts: the first unit of each stage in `record`.
        slices: the first unit in `record` of each unit that consists of several layers, and the unit behind it.
    """
    at, place, seen = 0, {}, Counter[str]()
    for number, unit in enumerate(merged.units):
        place[at] = number
        calls = record.calls.get(unit.name, ()) if unit.name in merged.atomic else ()
        if slices is not None and unit.name in slices:
            calls = [slices[unit.name]]
        if calls:
            start, stop = calls[min(seen[unit.name], len(calls) - 1)]
            seen[unit.name] += 1
            if start != at:
                return None
            at = stop
        elif at < len(record.units) and record.units[at].name == unit.name:
            at += 1
        else:
            return None
    return tuple(place[start] for start in starts) if at == len(record.units) and place.keys() >= {*starts} else None
