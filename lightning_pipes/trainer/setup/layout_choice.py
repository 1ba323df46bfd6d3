"""The choice of the borders of stages between the units of a recorded step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.cost import ModelProfile
from lightning_pipes.cost.layer import LayerProfile, Table
from lightning_pipes.engine.compute.profiler import optimizer_state
from lightning_pipes.engine.compute.rng import RngUse
from lightning_pipes.ir import PipelineError, PlanError, Policy, Span
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.layers.pipelined import (
    find_pipelined,
    list_containers,
    work_size,
)
from lightning_pipes.trainer.cuts.piece import Piece
from lightning_pipes.trainer.cuts.steps import loss_of
from lightning_pipes.trainer.cuts.units.batch_end import BatchEnd, UnitAxes, find_layouts
from lightning_pipes.trainer.cuts.units.borders import Borders
from lightning_pipes.trainer.cuts.units.cut import WHOLE_MODULE, weights_of_stages
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.lazy_step import Crossing, LazyStep
from lightning_pipes.trainer.cuts.units.recording import StepRecord, find_atomic
from lightning_pipes.trainer.cuts.units.rows import CrossingRows
from lightning_pipes.trainer.cuts.units.timing import UnitCosts
from lightning_pipes.trainer.cuts.units.weight_groups import WeightGroups
from lightning_pipes.trainer.data.batches import copy_batch, make_cutter, rows_of
from lightning_pipes.trainer.data.token_cut import TOKENS
from lightning_pipes.trainer.loop.uses import ChoosesLayers
from lightning_pipes.trainer.plan.layer_profiler import (
    OVERHEAD_SECONDS,
)
from lightning_pipes.trainer.plan.plans import stage_layers
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import AUTO, BATCH, PARAMETERS, names_modules
from lightning_pipes.trainer.results.loss_weights import losses_differ
from lightning_pipes.trainer.setup.module_setup import SetupContext
from lightning_pipes.trainer.setup.unit_recorder import UnitRecorder
from lightning_pipes.trainer.weights.spread import SPREAD_ATTRIBUTE

_log = logging.getLogger(__name__)

MOVABLE_PARTS_PER_STAGE = 8
"""The number of parts per stage if units may move between ranks."""


class LayoutChoice:
    """Chooses the layout of a module that is cut by units. The constructor and the methods are collective.

    Args:
        context: the inputs of the setup.
        recorder: records and measures the step.
        request: the completed request of the user.
        stages: the number of stages.
        moves_parts: whether units may move between ranks during training.

    Attributes:
        layout: the layout.
        starts: the part of the layout with which each stage begins.
        end: the end of the step, which runs on whole batches. None if each micro-batch has its own loss.
        pieces: the units of each part with their costs, for reports.
        profile: the measured profile of the parts, if they may move or a planner chooses something from it.
        plans_by_profile: whether a planner chooses more than the borders of the stages from the profile.
        crossing_rows: cuts and joins the values between parts if a planner may do this; None if all stages and links
            have to cut a batch equally.

    Raises:
        PlanError: the requested borders are not possible.
        PipelineError: the step cannot be recorded, or it differs between ranks.
    """

    def __init__(
        self, context: SetupContext, recorder: UnitRecorder, request: RunRequest, stages: int, moves_parts: bool
    ) -> None:
        self._context, self._recorder, self._request, self._settings = context, recorder, request, context.settings
        self._trainer, self._module, self._ranks = context.trainer, context.module, context.ranks
        self._moves_parts = moves_parts
        self.starts: tuple[int, ...] = tuple(range(stages))
        self.end: BatchEnd | None = None
        self.pieces: tuple[Piece, ...] = ()
        self.profile: ModelProfile | None = None
        self._describe: Callable[[Sequence[int]], str] = lambda starts: ""
        self._first_units: tuple[int, ...] = ()
        self.plans_by_profile = request.plans_by_profile and not self._settings.degrees
        self._cuts_unequally = self.plans_by_profile and request.may_cut_unequally
        self.crossing_rows: CrossingRows | None = None
        self._streams = list_layers(self._module)
        """The layers that have their own random streams."""
        self.layout = self._lay_units(request, stages)

    def _lay_units(self, request: RunRequest, stages: int) -> UnitLayout:
        """Return the layout of the recorded step.

        If nothing is trained, no step is recorded and the last stage has all weights. Modules on `meta`, which may not
        fit into one process, are cut even then.
        """
        trains = self._context.is_fitting and self._trainer.limit_train_batches != 0
        is_made = self._recorder.fake is None or self._ranks.control.any(SPREAD_ATTRIBUTE in vars(self._module))[0]
        if names_layers(self._context):
            return self._lay_layers(request, stages)
        if stages == 1 or (is_made and not trains):
            return self._lay_unrecorded(stages)
        record = self._recorder.record(request, stages)
        self._recorder.check_same(record)
        if self._context.is_manual:
            return self._group_weights(record, request, stages)
        measures = request.partition == AUTO or self._moves_parts or request.needs_profile
        costs = self._recorder.measure(record, request) if measures else {}
        seconds = [each.forward + each.backward for each in costs[max(costs)].seconds] if costs else None
        borders = Borders(record, seconds)
        others = self._share_work_of_others(request, max(costs)) if costs else ()
        starts, end = self._choose_starts(record, borders, request, stages, others)
        self._describe = partial(self._describe_cut, record, borders, "time" if seconds else "operations")
        self._first_units, self.pieces = starts, borders.list_pieces(starts)
        if self._moves_parts or (self.plans_by_profile and request.measures_sizes and end is None):
            return self._lay_parts(record, borders, starts, costs)
        if end is None:
            layout = UnitLayout.from_record(*self._recorder.merge(record, starts, self._streams), self._streams)
            if self.plans_by_profile and costs:
                self.profile = self._make_profile(borders, starts, costs, layout)
            return layout
        merged, (*found, border), slices = self._recorder.merge(record, (*starts, end), self._streams)
        layout = UnitLayout.from_record(merged, tuple(found), slices, self._streams)
        self._check_end(layout, border)
        return layout

    def _choose_starts(
        self, record: StepRecord, borders: Borders, request: RunRequest, stages: int, others: Sequence[float]
    ) -> tuple[tuple[int, ...], int | None]:
        """Return the first unit of each stage, and the first unit that runs on whole batches.

        The latter is None if no unit runs on whole batches. `others` is the work of other trainings on each stage.
        """
        if not isinstance(request.partition, str):
            starts = borders.at(_checked_names(self._name_modules(request.partition), stages))
            return starts, self._find_end(record, borders, starts[-1], request)
        end = self._find_end(record, borders, stages - 1, request)
        try:
            return borders.choose(stages, end, others), end
        except PlanError:
            if end is None or self._settings.loss == BATCH:
                raise
            return borders.choose(stages, others=others), None

    def _share_work_of_others(self, request: RunRequest, rows: int) -> Sequence[float]:
        """Return the seconds that each stage works for other trainings per `rows` samples of this one.

        The result is empty if the user chose the cut, if ranks have several stages, or if no other training was
        measured. Collective.
        """
        ranks = request.schedule.place_stages(self._ranks.grid.n_planned)
        if request.partition != AUTO or len({*ranks}) < len(ranks):
            return ()
        seconds = self._context.connections.share_work_of_others()
        return [seconds[rank] * rows / self._recorder.batch_rows for rank in ranks] if seconds else ()

    def _name_modules(self, partition: list[int] | list[str]) -> list[str]:
        """Return the paths of the modules at which stages begin. Numbers count the layers of the largest container.

        Raises:
            PlanError: the module has no container, or the container does not have these layers.
        """
        if names_modules(partition):
            return partition
        owner, containers = type(self._module).__name__, list_containers(self._module)
        if not containers:
            raise PlanError(
                f"partition={list(partition)} gives numbers of layers, but {owner} has no container of layers to count "
                "in. Name the modules at which stages begin: PipelineStrategy(partition=['path.to.module'])"
            )
        path = containers[0][0]
        layers = [f"{path}.{name}" for name, _ in self._module.get_submodule(path).named_children()]
        if not all(0 < number < len(layers) for number in partition):
            raise PlanError(
                f"partition={list(partition)} must have numbers from 1 to {len(layers) - 1}: {owner} is cut by units, "
                f"each stage needs some, and {path!r}, its largest container, has {len(layers)} layers. Choose others, "
                "or name the modules at which stages begin: PipelineStrategy(partition=['path.to.module'])"
            )
        return [layers[number] for number in partition]

    def _lay_parts(
        self,
        record: StepRecord,
        borders: Borders,
        starts: tuple[int, ...],
        costs: Mapping[int, UnitCosts],
    ) -> UnitLayout:
        """Return a layout with several parts per stage, among which planners can choose.

        Args:
            record: the recorded step.
            borders: the possible borders.
            starts: the first unit of each stage until a planner has chosen other borders.
            costs: the costs of all units, by the number of samples. Empty if they could not be measured.
        """
        finer = borders.choose(min(MOVABLE_PARTS_PER_STAGE * len(starts), borders.count_possible() + 1))
        parts = tuple(sorted({*starts, *finer}))
        merged, found, slices = self._recorder.merge(record, parts, self._streams)
        layout = UnitLayout.from_record(merged, found, slices, self._streams)
        if self._cuts_unequally and costs:
            kept = self._choose_crossings(layout, [parts.index(start) for start in starts])
            parts, found = tuple(parts[n] for n in kept), tuple(found[n] for n in kept)
            layout = UnitLayout.from_record(merged, found, slices, self._streams)
        self.starts = tuple(parts.index(start) for start in starts)
        self._first_units, self.pieces = parts, borders.list_pieces(parts)
        if costs:
            self.profile = self._make_profile(borders, parts, costs, layout)
        elif self._request.chooses:
            rank_zero_info(
                f"schedule='auto' selected {self._request.schedule.name!r}, because the times of units of "
                f"{type(self._module).__name__} are unknown"
            )
        elif self._moves_parts:
            rank_zero_info(
                f"Units of {type(self._module).__name__} stay on their stages, because their times are unknown"
            )
        return layout

    def _choose_crossings(self, layout: UnitLayout, starts: Sequence[int]) -> Sequence[int]:
        """Return the numbers of the parts in front of which a stage may begin.

        If stages may begin at `starts` with other micro-batches than the stages before them, parts are left out in
        front of which a value cannot be cut, such as a loss. Otherwise, all stages and links have to cut a batch
        equally, and no part is left out.

        Args:
            layout: the layout with all parts.
            starts: the part with which each stage begins until a planner has chosen other borders.
        """
        every, name = range(layout.n_parts), AUTO if self._request.chooses else self._request.schedule.name
        try:
            rows, refused = self._trace_crossings(layout, name)
        except PlanError as error:
            _log.debug("setup: all stages and links cut a batch equally: %s", error)
            return every
        for start in starts:
            if start - 1 in refused:
                _log.debug("setup: all stages and links cut a batch equally: %s", refused[start - 1])
                return every
        self.crossing_rows = rows
        return [number for number in every if number - 1 not in refused]

    def _lay_layers(self, request: RunRequest, stages: int) -> UnitLayout:
        """Return a layout with the layers that batches name as its parts, and determine the borders of the stages.

        Raises:
            PlanError: `partition` names a module that is not one of the layers.
        """
        container = find_named_container(self._module)
        layout, partition = UnitLayout.from_layers(self._module, container), request.partition
        if not isinstance(partition, str) and names_modules(partition):
            unknown = [path for path in partition if path not in layout.layers]
            if unknown:
                raise PlanError(
                    f"partition names {unknown[0]!r}, but layers_of_batch of {type(self._module).__name__} names "
                    f"layers of {container!r}, so stages begin at these. Choose from {', '.join(layout.layers[1:])}"
                )
            partition = [layout.layers.index(path) for path in partition]
        layers = self._module.get_submodule(container).children()
        cut = stage_layers(
            PARAMETERS if isinstance(partition, str) else [int(n) for n in partition],
            [sum(p.numel() for p in layer.parameters()) + 1 for layer in layers],
            stages,
            self._settings.degrees,
        )
        self.starts = tuple(span.start for span in cut)
        return layout

    def sum_seconds(self, parts: Sequence[Span]) -> tuple[float, ...]:
        """Return the measured seconds of one batch on each stage. Empty if units were not measured.

        Args:
            parts: the parts of each stage.
        """
        if not self.pieces or any(piece.seconds is None for piece in self.pieces):
            return ()
        batches = self._recorder.batch_rows / self._recorder.recorded_rows
        of_parts = np.bincount([each.layer for each in self.pieces], [each.seconds or 0.0 for each in self.pieces])
        return tuple(batches * float(of_parts[span.start : span.stop].sum()) for span in parts)

    def describe_cut(self, parts: Sequence[Span]) -> str:
        """Return a description of the borders of the stages for the log. Empty if no step was recorded.

        Args:
            parts: the parts of each stage.
        """
        return self._describe([self._first_units[span.start] for span in parts]) if self._first_units else ""

    def _describe_cut(self, record: StepRecord, borders: Borders, measure: str, starts: Sequence[int]) -> str:
        """Return a text with the borders of the stages, their shares of the work, and the stages without weights."""
        spans = list(itertools.pairwise((*starts, len(record.units))))
        listed = ", ".join(describe_unit(record, start) for start in starts[1:])
        shares = ", ".join(f"{borders.share(a, b):.0%}" for a, b in spans)
        bare = [stage for stage, (a, b) in enumerate(spans) if not any(unit.weights for unit in record.units[a:b])]
        hint = f". Stages without weights: {', '.join(map(str, bare))}; fewer processes may do" if bare else ""
        return (
            f"{type(self._module).__name__}.{self._recorder.step} has {len(record.units)} units, calls of modules and "
            f"functions. Stages after the first begin at {listed}. The stages have {shares} of the {measure}{hint}"
        )

    def _group_weights(self, record: StepRecord, request: RunRequest, stages: int) -> UnitLayout:
        """Return the layout of a step that all stages run together."""
        groups = WeightGroups(self._module, record)
        if not isinstance(request.partition, str):
            starts = groups.find_borders(_checked_names(self._name_modules(request.partition), stages))
        else:
            starts = groups.choose_borders(stages)
        shares = [groups.share(a, b) for a, b in zip(starts, (*starts[1:], None), strict=True)]
        rank_zero_info(
            f"{type(self._module).__name__} optimizes manually, so each batch is one micro-batch and the stages take "
            f"turns. They have {', '.join(f'{share:.0%}' for share in shares)} of the weights"
        )
        self.pieces = groups.list_pieces(starts)
        merged, *_ = self._recorder.merge(record, groups.list_turns(starts))
        return groups.make_layout(merged, starts)

    def _find_end(self, record: StepRecord, borders: Borders, after: int, request: RunRequest) -> int | None:
        """Return the first unit that runs on the whole batch, or None if the step has no such unit.

        Args:
            record: the recorded step.
            borders: the possible borders.
            after: the unit after which the result must be.
            request: the request of the user.

        Raises:
            PlanError: the user requests a loss of whole batches, which is not possible.
        """
        asked = self._settings.loss == BATCH
        unexplained = self._ranks.control.any(bool(self._recorder.loss_warning))[0] and self._settings.loss == AUTO
        if request.microbatches == 1 or not (asked or unexplained) or not self._context.is_fitting:
            return None
        found: int | None = None
        why = find_whole_loss_obstacle(self._context)
        if not why and self._recorder.fake is not None:
            why = "weights are on meta, and losses can't be compared before the module is cut"
        if not why:
            layouts = find_layouts(self._recorder.trace_samples(record.atomic))
            possible = range(after + 1, min(len(layouts) + 1, len(record.units)))
            found = max((n for n in possible if borders.is_possible(n)), default=None)
        ends = self._ranks.control.all_gather(found)
        if None not in ends:
            return int(min(ends))
        if asked:
            raise PlanError(
                f"loss='batch' does not work for {type(self._module).__name__}: "
                f"{why or 'its samples meet before the last stage, or the data do not provide a sample'}. Set "
                "PipelineStrategy(microbatches=1), or combine samples only at the end of training_step"
            )
        return None

    def _check_end(self, layout: UnitLayout, border: int) -> None:
        """Make the step end with whole batches if its loss is then equal to the loss of the batch.

        Raises:
            PlanError: the loss is different, and the user requests a loss of whole batches.
        """
        module, device = self._module, self._ranks.device
        layouts = find_layouts(self._recorder.trace_samples(layout.atomic, layout.slices))[:border]
        end, differs = BatchEnd(border, layouts), ""
        whole = replace(end.layout(layout), starts=(0, border))
        step, arguments = named_step(module, "training_step"), self._recorder.step_arguments()
        batch = self._recorder.compared_batch
        draws = RngUse(device)

        def watch(work: Callable[[], Any]) -> Any:
            def run() -> Any:
                draws.start()
                out = work()
                draws.stop()
                return out

            return self._recorder.run_without_trace(False, run)

        def run(number: int, part: Any, received: Crossing | None = None) -> Any:
            lazy = LazyStep(module, whole, number, device)
            return watch(partial(lazy.run, step, copy_batch(part), arguments, received))

        try:
            if len(layouts) < border:
                raise PipelineError("its samples meet before the loss")
            rows = rows_of(batch)
            parts = map(make_cutter(batch, rows), (Span(0, rows // 2), Span(rows // 2, rows)))
            joined = loss_of(run(1, batch, end.join([run(0, part) for part in parts])))[0].item()
            loss = loss_of(watch(lambda: step(copy_batch(batch), *arguments)))[0]
            kinds = {t.dtype for t in (*module.parameters(), loss) if t.is_floating_point()}
            same = draws.was_used or not losses_differ(loss.item(), joined, [joined], loss.dtype, kinds)
            if not same:
                differs = f"its loss is {loss.item():.6g} for {rows} samples, and {joined:.6g} so"
        except PipelineError as error:
            differs = str(error)
        found = [each for each in self._ranks.control.all_gather(differs) if each]
        if not found:
            self.end = end
        elif self._settings.loss == BATCH:
            raise PlanError(
                f"loss='batch' does not work for {type(module).__name__}: {found[0]}. Set "
                "PipelineStrategy(microbatches=1)"
            )

    def _make_profile(
        self, borders: Borders, parts: Sequence[int], costs: Mapping[int, UnitCosts], layout: UnitLayout
    ) -> ModelProfile:
        """Return the profile of the parts. `parts` contains the first unit of each part.

        The weight gradients of a part take the time of its backward that its input gradients do not take. The values
        that a stage receives count as saved, because it keeps them until its backward. Temporary memory is not counted.
        """
        optimizers, rows = self._context.host.optimizers, self._recorder.recorded_rows
        weights, layers = weights_of_stages(self._module, layout), []
        n_units = len(costs[max(costs)].seconds)
        is_split = all(unit.inputs is not None for each in costs.values() for unit in each.seconds)
        for number, (start, stop) in enumerate(zip(parts, (*parts[1:], n_units), strict=True)):
            part = weights[number]
            trained = [p for p in part.parameters() if p.requires_grad]
            crossing = borders.bytes(stop) if stop < n_units else 0
            seconds = {n: each.seconds[start:stop] for n, each in costs.items()}
            backward = {n: sum(unit.backward for unit in units) for n, units in seconds.items()}
            inputs = {n: min(backward[n], sum(unit.inputs or 0.0 for unit in units)) for n, units in seconds.items()}
            layers.append(
                LayerProfile(
                    layout.names[layout.starts[number]],
                    _table({n: sum(unit.forward for unit in units) for n, units in seconds.items()}),
                    _table(backward),
                    _table(inputs) if is_split else (),
                    _table({n: backward[n] - inputs[n] for n in seconds}) if is_split else (),
                    weight_bytes=sum(t.nbytes for t in (*part.parameters(), *part.buffers())),
                    gradient_bytes=sum(p.nbytes for p in trained),
                    optimizer_bytes=sum(t.nbytes for t in optimizer_state(part, optimizers[0] if optimizers else None)),
                    saved=_table({n: float(sum(each.saved[start:stop])) for n, each in costs.items()}),
                    keeps_input=number > 0,
                    output=((0, 0.0), (rows, float(crossing))),
                )
            )
        return ModelProfile(tuple(layers), overhead=OVERHEAD_SECONDS)

    def _lay_unrecorded(self, stages: int) -> UnitLayout:
        """Return a layout in which the last stage has all weights, or the layout that an earlier run has left."""
        atomic = tuple(find_atomic(self._module))
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        of_atomic = {id(t) for path in atomic for t in self._module.get_submodule(path).buffers()}
        last = {name: (stages - 1,) for name, t in named if isinstance(t, nn.Parameter) or id(t) in of_atomic}
        _, _, placed, starts, parts = vars(self._module).get(
            SPREAD_ATTRIBUTE, (WHOLE_MODULE, (), last, self.starts, stages)
        )
        if len(starts) != stages:  # `cut` rejects this case
            placed, starts, parts = last, self.starts, stages
        self.starts = starts
        drawing = frozenset(atomic)  # any of them may draw random numbers
        return UnitLayout((0,) * parts, (), atomic, drawing, placed, clones=True, streams=self._streams)

    def find_crossing_rows(self, schedule: str) -> CrossingRows:
        """Return an object that cuts and joins the values between parts. This method is collective.

        Args:
            schedule: the name of the schedule, for the error message.

        Raises:
            PlanError: the places of samples in these values are unknown.
            PipelineError: a value between parts depends on samples and has no axis for them.
        """
        rows, refused = self._trace_crossings(self.layout, schedule)
        for error in refused.values():
            raise error
        return rows

    def _trace_crossings(self, layout: UnitLayout, schedule: str) -> tuple[CrossingRows, dict[int, PipelineError]]:
        """Return an object that cuts and joins the values between parts, and the errors about values that it can't cut.

        The errors have the numbers of the parts that send these values. This method is collective.

        Raises:
            PlanError: the places of samples in the values are unknown.
        """
        why = "weights are on meta, so no values can be compared" if self._recorder.fake is not None else ""
        if not why and self._recorder.compared_batch is None:
            why = "the data provide no samples to compare before training"
        units = [] if why else self._recorder.trace_samples(layout.atomic, layout.slices)
        found: list[list[UnitAxes]] = self._ranks.control.all_gather(units)
        if not all(found):
            raise PlanError(
                f"Schedule {schedule!r} cuts a batch differently on different stages, ranks or links, but the axes of "
                f"samples in the values between the stages of {type(self._module).__name__}, which is cut by units, "
                f"are unknown: {why or 'training_step fails with parts of a batch'}. Use the same number of "
                "micro-batches everywhere, as with schedule '1f1b', or put the layers into one nn.Sequential"
            )
        rows = CrossingRows(found[0])
        of_ranks = self._ranks.control.all_gather(self._refuse_crossings(layout, rows))
        return rows, {number: error for refused in of_ranks for number, error in refused.items()}

    def _refuse_crossings(self, layout: UnitLayout, rows: CrossingRows) -> dict[int, PipelineError]:
        """Return the errors about values between parts that cannot be cut, by the number of the part that sends them.

        The step runs part by part, so that it holds the same values at each border as on stages.
        """
        module, batch, crossing, refused = self._module, self._recorder.compared_batch, None, dict[int, PipelineError]()
        step, arguments = named_step(module, "training_step"), self._recorder.step_arguments()
        for number in range(layout.n_parts - 1):
            lazy = LazyStep(module, layout, number, self._ranks.device)
            run = partial(lazy.run, step, copy_batch(batch), arguments, crossing, rows=rows_of(batch))
            try:
                crossing = self._recorder.run_without_trace(True, run)
                rows.leave(crossing, number)
            except PipelineError as error:
                refused[number] = error
        return refused


def _table(values: Mapping[int, float]) -> Table:
    """Return a table by the number of samples. A single value is considered proportional to this number."""
    points = sorted(values.items())
    return ((0, 0.0), *points) if len(points) == 1 else tuple(points)


def _checked_names(partition: Any, stages: int) -> Any:
    """Return the modules at which stages begin, after checking that there is one for each border.

    Raises:
        PlanError: the number of modules is different.
    """
    if len(partition) != stages - 1:
        raise PlanError(
            f"partition={list(partition)} makes {len(partition) + 1} stages, and the run has {stages}. Name "
            f"{stages - 1} module{'s' * (stages > 2)}, at which stages after the first begin, or start "
            f"{len(partition) + 1} processes (devices x nodes)"
        )
    return partition


def describe_unit(record: StepRecord, number: int) -> str:
    """Return the name of a unit. For a function, the name of the last module that was called before is added."""
    name = record.units[number].name
    before = (unit.name for unit in reversed(record.units[:number]) if unit.name in record.entered)
    after = None if name in record.entered else next(before, None)
    return repr(name) if after is None else f"{name!r} after {after!r}"


def names_layers(context: SetupContext) -> bool:
    """Return whether the module specifies the layers that each batch uses, and the schedule considers them."""
    schedule = context.request.schedule
    overlaps = isinstance(schedule, Policy) and not schedule.flushes and not context.request.chooses
    return overlaps and context.is_fitting and isinstance(context.module, ChoosesLayers)


def list_layers(module: pl.LightningModule) -> tuple[str, ...]:
    """Return the paths of the layers of the container that would be cut if the module was not cut by units."""
    try:
        container = find_pipelined(module, None)
    except PipelineError:  # no container is clearly the largest, or its layers can't be cut
        return ()
    return tuple(f"{container}.{name}" for name, _ in module.get_submodule(container).named_children())


def find_named_container(module: nn.Module) -> str:
    """Return the path of the container of the layers in `layers_of_batch`, or an empty path if there is none.

    It is the largest of the outermost containers with several layers.
    """
    found = [path for path, part in module.named_modules() if path and _has_layers(part)]
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    return max(outermost, key=lambda path: work_size(module.get_submodule(path)), default="")


def _has_layers(part: nn.Module) -> bool:
    return isinstance(part, nn.Sequential | nn.ModuleList) and len(part) > 1


def find_whole_loss_obstacle(context: SetupContext) -> str:
    """Return the reason why a step cannot end with a loss of whole batches, or an empty text if it can.

    The result is the same on all ranks.
    """
    schedule, grid = context.request.schedule, context.ranks.grid
    if grid.replicas > 1 or grid.degrees:
        return "data_parallel is more than 1"
    if context.settings.microbatches_by == TOKENS:
        return "microbatches_by='tokens' pads each micro-batch to its own length"
    if len(schedule.place_stages(grid.length)) > grid.length or not schedule.flushes:
        return f"schedule {schedule.name!r} has several stages on a rank, or does not flush"
    return "replan moves units" if context.request.replanner is not None else ""
