"""The setup of a module that is cut by units because it has no suitable container of layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_pipes.cost import ModelProfile
from lightning_pipes.cost.layer import LayerProfile, Table
from lightning_pipes.engine.compute.profiler import optimizer_state
from lightning_pipes.engine.compute.rng import RngUse, forked_rng, seed_all
from lightning_pipes.engine.private_torch import backward_hooks, unsaved_buffers
from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy, Span
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer import private_transformers
from lightning_pipes.trainer.loop.layer_copies import Cuts
from lightning_pipes.trainer.loop.manual import idle_optimizers
from lightning_pipes.trainer.module.batches import copy_batch, make_cutter, rows_of
from lightning_pipes.trainer.module.capture import named_step
from lightning_pipes.trainer.module.checks import warn_about_module
from lightning_pipes.trainer.module.deferred import DeferredWeights, check_same_cut, group_owners, has_meta
from lightning_pipes.trainer.module.piece import Piece
from lightning_pipes.trainer.module.pipelined import (
    LEAST_FOR_STATISTICS,
    batch_statistics,
    list_containers,
    work_size,
)
from lightning_pipes.trainer.module.spread import SPREAD
from lightning_pipes.trainer.module.unchanged import keep_unchanged
from lightning_pipes.trainer.module_setup import ModuleSetup, SetupContext
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.layer_profiler import (
    OVERHEAD,
    CollectiveCall,
    NotMeasuredError,
    UnsuitableContainerError,
    without_loggers,
)
from lightning_pipes.trainer.plan.plans import stage_layers
from lightning_pipes.trainer.plan.profile_planner import ProfilePlanner
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.sample import (
    NoSampleError,
    batch_rows,
    example_batch,
    first_item,
    is_of_batches,
    load_batch,
    loader_of_batches,
)
from lightning_pipes.trainer.plan.settings import AUTO, BATCH, PARAMETERS, find_schedule, names_modules
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.state.generators import ModuleGenerators
from lightning_pipes.trainer.state.module_state import ModuleState
from lightning_pipes.trainer.step.logs import recorded
from lightning_pipes.trainer.step.loss_weights import compare_losses, losses_differ
from lightning_pipes.trainer.step.steps import loss_of
from lightning_pipes.trainer.step.uses import ChoosesLayers
from lightning_pipes.trainer.units.batch_end import BatchEnd, SampleTrace, UnitAxes, find_axes, find_layouts
from lightning_pipes.trainer.units.borders import Borders, match_starts, merge_units
from lightning_pipes.trainer.units.cut import WHOLE, UnitCut, weights_of_stages
from lightning_pipes.trainer.units.fake_run import FakeRun
from lightning_pipes.trainer.units.joint_step import JointStep
from lightning_pipes.trainer.units.lazy_step import BACKWARD_HOOKS, Crossing, LazyStep
from lightning_pipes.trainer.units.mode import runs_as_whole
from lightning_pipes.trainer.units.recording import StepRecord, UnitLayout, find_atomic, record_step
from lightning_pipes.trainer.units.rows import CrossingRows
from lightning_pipes.trainer.units.steps import UnitSteps, stage_modules
from lightning_pipes.trainer.units.timing import SavedByUnits, UnitCosts, measure_units, shortest
from lightning_pipes.trainer.units.weight_groups import WeightGroups

T = TypeVar("T")

PARTS = 8
"""The number of parts per stage if units may move between ranks."""
MANY_ROWS = 4096
"""The number of samples of a batch with which it is checked that all stages cut a batch in the same way."""

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
MAX_UNIT = 0.75
"""The largest share of the weights that may be in a module which has to run as a whole on one stage."""
MAX_COMPARED_ROWS = 32
"""The largest number of samples of a batch whose loss is compared with the losses of its parts."""


class UnitSetup(ModuleSetup):
    """The setup of a module that is cut by units. Its methods are collective.

    The constructor records a training step, measures its units and determines the borders of the stages. `decide` then
    makes a decision from these results.

    A part is a sequence of units that planners treat as one layer. A part is a whole stage or, if units may move
    between ranks, one of several parts of a stage.

    Attributes:
        end: the end of the step, which runs on whole batches. None if each micro-batch has its own loss.

    Raises:
        PlanError: the run uses a feature that only works with a container of layers.
        PipelineError: the step cannot be recorded, or it differs between ranks.
    """

    _recorded_rows: int
    """The number of samples of the batch whose step was recorded."""
    _recorded_step: tuple[Callable[..., Any], Callable[[], Any], tuple[Any, ...]]
    """The recorded step, a function that copies its batch, and the remaining arguments of the step."""
    path = WHOLE
    whole_loss_refusal = "the module is cut by units, and no stage can run a whole batch"

    def __init__(self, context: SetupContext) -> None:
        super().__init__(context)
        module = self.body = self._module
        self._step = _STEPS[context.trainer.state.fn or TrainerFn.FITTING]
        """The name of the step to record."""
        is_on_meta = self._ranks.control.any(has_meta(module))[0]
        self._fake = FakeRun(self._ranks.device) if is_on_meta else None
        """Runs steps without values if weights are on `meta`."""
        self._request = self._complete_request()
        self._n_stages = len(self._request.schedule.place_stages(self._ranks.grid.n_planned))
        self._check_module()
        private_transformers.install_output_hooks(module)
        self._moves_parts = not self._settings.degrees and (
            self._request.replanner is not None or (self._request.may_replan and not self._request.schedule.flushes)
        )
        """Whether units may move between ranks during training."""
        self._run_data: Any = None
        """The data of the run."""
        self._batch_rows = 0
        """The number of samples of a batch of the run, if the schedule is chosen."""
        self.end: BatchEnd | None = None
        self._starts: tuple[int, ...] = tuple(range(self._n_stages))
        """The part of the layout with which each stage begins."""
        self._pieces: tuple[Piece, ...] = ()
        """The units of each stage with their costs, for reports."""
        self._profile: ModelProfile | None = None
        """The measured profile of the parts, if they may move or the schedule is chosen."""
        self._compared_batch: Any = None
        """A batch whose loss is compared with the losses of its parts, or None if nothing is compared."""
        self._loss_warning = ""
        """The reason why training with micro-batches differs from training with one process, or an empty text."""
        self._crossing_rows: CrossingRows | None = None
        """Cuts and joins the values between stages. None if all stages and links cut a batch alike."""
        self._cut_description = ""
        """A description of the borders of the stages. Empty if no step was recorded."""
        self._layout = self._lay_units(self._request, self._n_stages)
        self._weights = weights_of_stages(module, self._layout)
        warn_about_module(module, None)

    def _check_module(self) -> None:
        """Reject a module of which a part that one stage must run as a whole is too large.

        Raises:
            PipelineError: there is such a part.
        """
        module, owner = self._module, type(self._module).__name__
        size = work_size(module)
        for path, part in module.named_modules():
            is_large = not path or (self._n_stages > 1 and work_size(part) > MAX_UNIT * size)
            if is_large and runs_as_whole(part):
                raise PipelineError(f"{owner}.{path}".rstrip(".") + f" {explain_whole(part)}")

    def _complete_request(self) -> RunRequest:
        """Return the completed request of the user, or reject settings that need a container of layers."""
        context, request = self._context, self._request
        refused = find_refused(context)
        if context.is_manual:
            check_manual(context, refused)
            request = replace(request, microbatches=1, schedule=find_schedule("gpipe", {}))
        if refused:
            raise PlanError(
                f"{type(self._module).__name__} has no one container of layers that is called in order, so it is cut "
                f"by units, and {' and '.join(refused)} does not work with these. Leave it out, or put the layers into "
                "one nn.Sequential: PipelineStrategy(module='path.to.it')"
            )
        return context.connections.complete_request(request, self._ranks.grid.n_planned)

    def decide(self) -> Decision:
        """Return the decision, in which each part is one layer."""
        parts, ranks, request = self._layout.n_parts, self._ranks.grid.n_planned, self._request
        degrees = self._settings.degrees
        if self._cut_description:
            rank_zero_info(self._cut_description)
        if self.end is not None:
            rank_zero_info(
                f"The loss of {type(self._module).__name__}.training_step is computed once for all samples of a batch, "
                f"from {self._layout.names[self.end.border]!r} on. All forwards come before the backwards, as with "
                "schedule 'gpipe'"
            )
        elif self._loss_warning:
            rank_zero_warn(self._loss_warning)
        if self.end is not None:
            request = replace(request, schedule=find_schedule("gpipe", {}))
        elif self._settings.loss == BATCH:
            request = replace(request, microbatches=1)
        least = LEAST_FOR_STATISTICS if batch_statistics(self._module) else 1
        partition = PARAMETERS if len(self._starts) == 1 else list(self._starts[1:])
        decision = replace(request, partition=partition).unmeasured([1] * parts, ranks, least, degrees)
        decision = replace(decision, profile=self._profile)
        if request.chooses and self.end is None and self._profile is not None:
            decision = self._choose_schedule(request, decision, self._profile)
            request = replace(request, schedule=decision.schedule)
        (cut,) = decision.plans(degrees=degrees).for_rows(MANY_ROWS)[0].jobs
        if len(cut.distinct_spans) > 1 and self._layout.names:
            self._crossing_rows = self._find_crossing_rows(request.schedule.name)
        if planner_of(request.schedule).wants_profile and not self._moves_parts:
            rank_zero_info(
                f"schedule {request.schedule.name!r} cuts a batch alike for all stages, because "
                f"{type(self._module).__name__} is cut by units"
            )
        decision = replace(decision, pieces=self._pieces)
        return self._context.connections.agree_on_decision(self._module, decision, lambda: decision)

    def _choose_schedule(self, request: RunRequest, plain: Decision, profile: ModelProfile) -> Decision:
        """Choose the schedule, the micro-batches, recomputation and the cut from the profile of the parts.

        Raises:
            PlanError: no schedule fits into memory.
        """
        planner = ProfilePlanner(self._ranks, self._settings.transport)
        deployment = planner.make_deployment(plain, [1.0] * self._ranks.control.size)
        request = replace(request, partition=AUTO, equal_cuts=True)
        try:
            made = planner.plan(request, plain, profile, self._batch_rows, deployment)
        except PlanError as error:
            raise PlanError(f"schedule='auto': {error}") from None
        rank_zero_info("\n".join(filter(None, [made.table, made.why, made.cut_reason])))
        return made

    def index_parameters(self, holdings: Holdings) -> None:
        """Register the stages that use each parameter in `holdings`."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        holdings.index_weights(self._module, lambda _, p: self._layout.parts_of.get(names[id(p)], ()))

    def group_parts(self) -> Mapping[int, Iterable[nn.Module]]:
        """Return each submodule as its own group, because units of a submodule may be on several stages."""
        return group_owners(self._module)

    def make_weights(self, deferred: DeferredWeights, holdings: Holdings) -> None:
        """Initialize the weights of the local stages, weights that no stage uses, and buffers without a key.

        Buffers without a key are not part of the state dict.
        """
        local, ranks = {*holdings.local}, self._ranks
        unsaved = {id(p._buffers[name]) for p in self._module.modules() for name in unsaved_buffers(p)}
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        stages = ((t, self._layout.parts_of.get(name)) for name, t in named)
        foreign = {id(t) for t, used in stages if used and not local & {*used}} - unsaved
        deferred.make_tensors(lambda tensor: id(tensor) not in foreign, self._settings.seed, ranks)

    def make_hidden_state(self, holdings: Holdings) -> None:
        """Return None, because stages send everything that their units share."""
        return

    def cut(self, local: Sequence[int]) -> UnitCut:
        """Return the module with only the weights of the `local` stages."""
        module, layout = self._module, self._layout
        spread = WHOLE, tuple(sorted(local)), layout.parts_of, self._starts, layout.n_parts
        check_same_cut(module, spread, self._ranks.control)
        return UnitCut(module, layout, self._weights, local, self._ranks.device, spread, self._moves_parts)

    def make_steps(self, local_layers: LocalLayers, plan: Plan, seed: int) -> UnitSteps:
        """Return the object that runs the user's steps on the stages of this rank."""
        module, device, cut, layout = self._module, self._ranks.device, local_layers.cut, self._layout
        assert isinstance(cut, UnitCut)
        generators = ModuleGenerators(module)
        state = ModuleState(module, stage_modules(module, layout), frozenset(), device, generators)
        precision, rank = self._context.host.precision_plugin, local_layers.holdings.rank
        holdings = local_layers.holdings

        def make_joint() -> JointStep:
            if holdings.grid.degrees:
                raise PipelineError(
                    f"A step of {type(module).__name__} returns to modules of earlier stages, so all stages run it "
                    f"together, but data_parallel={list(holdings.grid.degrees)} gives stages several ranks. Set "
                    "data_parallel to a number, or evaluate in a run of its own"
                )
            ranks = [*dict.fromkeys(holdings.ranks)]
            stages = [ranks.index(holdings.ranks[stage]) for stage in holdings.stage_of_layer]
            of_stages, control = [holdings.global_ranks[each] for each in ranks], self._ranks.pipeline
            return JointStep(module, layout, ranks.index(rank), stages, device, control, of_stages, generators)

        steps = UnitSteps(
            module,
            precision,
            plan,
            rank,
            seed,
            device,
            state,
            cut,
            layout,
            self.end,
            self._crossing_rows,
            make_joint,
            holdings,
        )
        if self._context.is_manual:
            steps.joint = make_joint()
        return steps

    def _lay_units(self, request: RunRequest, stages: int) -> UnitLayout:
        """Return the layout of the recorded step.

        If nothing is trained, no step is recorded and the last stage has all weights. Modules on `meta`, which may not
        fit into one process, are cut even then.
        """
        trains = self._context.is_fitting and self._trainer.limit_train_batches != 0
        is_made = self._fake is None or self._ranks.control.any(SPREAD in vars(self._module))[0]
        if names_layers(self._context):
            return self._lay_layers(request, stages)
        if stages == 1 or (is_made and not trains):
            return self._lay_unrecorded(stages)
        record = self._record(request, stages)
        self._check_same(record)
        if self._context.is_manual:
            return self._group_weights(record, request, stages)
        measures = request.partition == AUTO or self._moves_parts or request.chooses
        costs = self._measure(record, request) if measures else {}
        seconds = [forward + backward for forward, backward in costs[max(costs)].seconds] if costs else None
        borders = Borders(record, seconds)
        starts, end = self._choose_starts(record, borders, request, stages)
        self._pieces = borders.list_pieces(starts)
        self._cut_description = self._describe_cut(record, borders, starts, "time" if seconds else "operations")
        if self._moves_parts or (request.chooses and end is None):
            return self._lay_parts(record, borders, starts, costs)
        if end is None:
            return UnitLayout.from_record(*self._merge(record, starts))
        merged, (*found, border) = self._merge(record, (*starts, end))
        layout = UnitLayout.from_record(merged, tuple(found))
        self._check_end(layout, border)
        return layout

    def _choose_starts(
        self, record: StepRecord, borders: Borders, request: RunRequest, stages: int
    ) -> tuple[tuple[int, ...], int | None]:
        """Return the first unit of each stage, and the first unit that runs on whole batches.

        The latter is None if no unit runs on whole batches.
        """
        if not isinstance(request.partition, str):
            starts = borders.at(_checked_names(self._name_modules(request.partition), stages))
            return starts, self._find_end(record, borders, starts[-1], request)
        end = self._find_end(record, borders, stages - 1, request)
        try:
            return borders.choose(stages, end), end
        except PlanError:
            if end is None or self._settings.loss == BATCH:
                raise
            return borders.choose(stages), None

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
        finer = borders.choose(min(PARTS * len(starts), borders.count_possible() + 1))
        parts = tuple(sorted({*starts, *finer}))
        self._starts = tuple(parts.index(start) for start in starts)
        layout = UnitLayout.from_record(*self._merge(record, parts))
        if costs:
            self._profile = self._make_profile(borders, parts, costs, layout)
        elif self._request.chooses:
            rank_zero_info(
                f"schedule='auto' takes {self._request.schedule.name!r}, because the times of units of "
                f"{type(self._module).__name__} are unknown"
            )
        else:
            rank_zero_info(
                f"Units of {type(self._module).__name__} stay on their stages, because their times are unknown"
            )
        return layout

    def _check_same(self, record: StepRecord) -> None:
        """Compare the records of all ranks.

        Raises:
            PipelineError: the records differ.
        """
        ranks = self._ranks.control.ranks
        names = self._ranks.control.all_gather([unit.name for unit in record.units])
        for rank, other in zip(ranks, names, strict=True):
            if other != names[0]:
                at = next((n for n, pair in enumerate(zip(names[0], other, strict=False)) if pair[0] != pair[1]), -1)
                raise PipelineError(
                    f"{self._step} takes a different path on rank {rank} than on rank {ranks[0]}, starting with unit "
                    f"{at}, although the samples are the same. Control flow may depend only on the batch, the weights, "
                    "and torch's random numbers"
                )

    def _describe_cut(self, record: StepRecord, borders: Borders, starts: Sequence[int], measure: str) -> str:
        """Return a text with the borders of the stages, their shares of the work, and the stages without weights."""
        spans = list(itertools.pairwise((*starts, len(record.units))))
        listed = ", ".join(describe_unit(record, start) for start in starts[1:])
        shares = ", ".join(f"{borders.share(a, b):.0%}" for a, b in spans)
        bare = [stage for stage, (a, b) in enumerate(spans) if not any(unit.weights for unit in record.units[a:b])]
        hint = f". Stages without weights: {', '.join(map(str, bare))}; fewer processes may do" if bare else ""
        return (
            f"{type(self._module).__name__}.{self._step} has {len(record.units)} units, calls of modules and "
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
            f"{type(self._module).__name__} optimizes manually: each batch is one micro-batch, stages take turns, and "
            f"have {', '.join(f'{share:.0%}' for share in shares)} of the weights"
        )
        self._pieces = groups.list_pieces(starts)
        merged, _ = self._merge(record, groups.list_turns(starts))
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
        unexplained = self._ranks.control.any(bool(self._loss_warning))[0] and self._settings.loss == AUTO
        if request.microbatches == 1 or not (asked or unexplained) or not self._context.is_fitting:
            return None
        found: int | None = None
        why = find_whole_loss_obstacle(self._context)
        if not why and self._fake is not None:
            why = "weights are on meta, and losses can't be compared before the module is cut"
        if not why:
            layouts = find_layouts(self._trace_samples(record.atomic))
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

    def _trace_samples(self, atomic: tuple[str, ...]) -> list[UnitAxes]:
        """Return the places of samples in the tensors that units make.

        The list is empty if the step cannot run with parts of a batch, and the reason is logged.
        """
        module, device = self._module, self._ranks.device
        step, batch, arguments = named_step(module, "training_step"), self._compared_batch, self._step_arguments()
        try:
            rows = rows_of(batch)
            part = make_cutter(batch, rows)(Span(0, rows // 2))
            traces = [
                self._run_without_trace(
                    True,
                    partial(SampleTrace(module, _named(module, atomic), device).run, step, copy_batch(each), arguments),
                )
                for each in (part, batch)
            ]
        except Exception as error:  # the user's code may fail with other numbers of samples
            rank_zero_info(f"{type(module).__name__}.training_step was not traced with parts of a batch: {error}")
            return []
        return find_axes(traces[0], rows // 2, traces[1], rows)

    def _find_crossing_rows(self, schedule: str) -> CrossingRows:
        """Return an object that cuts and joins the values between stages. This method is collective.

        Args:
            schedule: the name of the schedule, for the error message.

        Raises:
            PlanError: the places of samples in these values are unknown.
        """
        why = "weights are on meta, so no values can be compared" if self._fake is not None else ""
        if not why and self._compared_batch is None:
            why = "the data provide no samples to compare before training"
        units = [] if why else self._trace_samples(self._layout.atomic)
        found: list[list[UnitAxes]] = self._ranks.control.all_gather(units)
        if all(found):
            return CrossingRows(found[0])
        raise PlanError(
            f"Schedule {schedule!r} cuts a batch differently on different stages, ranks or links, but the axes of "
            f"samples in the values between the stages of {type(self._module).__name__}, which is cut by units, are "
            f"unknown: {why or 'training_step fails with parts of a batch'}. Use the same number of micro-batches "
            "everywhere, as with schedule '1f1b', or put the layers into one nn.Sequential"
        )

    def _check_end(self, layout: UnitLayout, border: int) -> None:
        """Make the step end with whole batches if its loss is then equal to the loss of the batch.

        Raises:
            PlanError: the loss is different, and the user requests a loss of whole batches.
        """
        module, device = self._module, self._ranks.device
        layouts = find_layouts(self._trace_samples(layout.atomic))[:border]
        end, differs = BatchEnd(border, layouts), ""
        whole = replace(end.layout(layout), starts=(0, border))
        step, batch, arguments = named_step(module, "training_step"), self._compared_batch, self._step_arguments()
        draws = RngUse(device)

        def watch(work: Callable[[], Any]) -> Any:
            def run() -> Any:
                draws.start()
                out = work()
                draws.stop()
                return out

            return self._run_without_trace(False, run)

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
        """Return the profile of the parts. `parts` contains the first unit of each part."""
        optimizers, rows = self._context.host.optimizers, self._recorded_rows
        weights, layers = weights_of_stages(self._module, layout), []
        n_units = len(costs[max(costs)].seconds)
        for number, (start, stop) in enumerate(zip(parts, (*parts[1:], n_units), strict=True)):
            part = weights[number]
            trained = [p for p in part.parameters() if p.requires_grad]
            crossing = borders.bytes(stop) if stop < n_units else 0
            layers.append(
                LayerProfile(
                    layout.names[layout.starts[number]],
                    _table({n: sum(forward for forward, _ in each.seconds[start:stop]) for n, each in costs.items()}),
                    _table({n: sum(backward for _, backward in each.seconds[start:stop]) for n, each in costs.items()}),
                    weight_bytes=sum(t.nbytes for t in (*part.parameters(), *part.buffers())),
                    gradient_bytes=sum(p.nbytes for p in trained),
                    optimizer_bytes=sum(t.nbytes for t in optimizer_state(part, optimizers[0] if optimizers else None)),
                    saved=_table({n: float(sum(each.saved[start:stop])) for n, each in costs.items()}),
                    output=((0, 0.0), (rows, float(crossing))),
                )
            )
        return ModelProfile(tuple(layers), overhead=OVERHEAD)

    def _measure(self, record: StepRecord, request: RunRequest) -> dict[int, UnitCosts]:
        """Return the costs of all units by the number of samples, or an empty dict if the step cannot be measured.

        To choose a schedule, the step is measured with several numbers of samples, because times are not proportional
        to them.
        """
        rows, sizes = self._recorded_rows, {self._recorded_rows}
        if self._fake is not None:  # the cost of a unit is estimated from its operations
            return {}
        if request.chooses:
            wanted = request.microbatch_rows(self._batch_rows, self._ranks.grid.n_planned)
            sizes |= {size for size in wanted if size < rows}
        found: dict[int, UnitCosts] = {}
        for size in sorted(sizes, reverse=True):
            try:
                of_ranks = CollectiveCall(self._ranks.control)(partial(self._measure_size, record, size))
            except NotMeasuredError as why:
                rank_zero_info(f"Units of {type(self._module).__name__} were not measured with {size} samples: {why}")
                continue
            known = [each for each in of_ranks if each is not None]
            if len(known) == len(of_ranks):
                found[size] = UnitCosts(shortest(*(each.seconds for each in known)), known[0].saved)
            elif size == rows:
                return {}
        return found if rows in found else {}

    def _measure_size(self, record: StepRecord, size: int) -> UnitCosts | None:
        """Return the costs of the units for this number of samples, or None if the step then has other units."""
        module, device, rows = self._module, self._ranks.device, self._recorded_rows
        step, make_batch, arguments = self._recorded_step
        if size < rows:
            make_batch = partial(copy_batch, make_cutter(make_batch(), rows)(Span(0, size)))
        run = partial(self._run_without_trace, True)
        seconds = measure_units(module, record, run, step, make_batch, arguments, device, _measured_loss)
        if seconds is None:
            return None
        counter = SavedByUnits(_named(module, record.atomic))
        return UnitCosts(seconds, run(partial(counter.measure, module, step, make_batch, arguments)))

    def _merge(self, record: StepRecord, starts: tuple[int, ...]) -> tuple[StepRecord, tuple[int, ...]]:
        """Return a record in which each module that is not divided by a border is one unit.

        The borders in this record are also returned.
        """
        module, device = self._module, self._ranks.device
        run = partial(self._run_without_trace, self._context.is_fitting)
        choose = partial(merge_units, module, record, starts)

        def record_merged() -> StepRecord:
            return record_step(module, run, *self._recorded_step, device, choose, self._context.is_manual, self._fake)

        try:
            merged: StepRecord = CollectiveCall(self._ranks.control)(record_merged)[self._ranks.control.position]
        except NotMeasuredError:  # the user's code runs differently now, so units stay as they are
            return record, starts
        found = match_starts(record, merged, starts)
        of_ranks = self._ranks.control.all_gather((found, [unit.name for unit in merged.units]))
        return (merged, found) if found and all(other == of_ranks[0] for other in of_ranks) else (record, starts)

    def _lay_layers(self, request: RunRequest, stages: int) -> UnitLayout:
        """Return a layout whose parts are the layers that batches name, and determine the borders of the stages.

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
        self._starts = tuple(span.start for span in cut)
        return layout

    def _lay_unrecorded(self, stages: int) -> UnitLayout:
        """Return a layout in which the last stage has all weights, or the layout that an earlier run has left."""
        atomic = tuple(find_atomic(self._module))
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        of_atomic = {id(t) for path in atomic for t in self._module.get_submodule(path).buffers()}
        last = {name: (stages - 1,) for name, t in named if isinstance(t, nn.Parameter) or id(t) in of_atomic}
        _, _, placed, starts, parts = vars(self._module).get(SPREAD, (WHOLE, (), last, self._starts, stages))
        if len(starts) != stages:  # `cut` rejects this case
            placed, starts, parts = last, self._starts, stages
        self._starts = starts
        drawing = frozenset(atomic)  # any of them may draw random numbers
        return UnitLayout((0,) * parts, (), atomic, drawing, placed, clones=True)

    def _record(self, request: RunRequest, stages: int) -> StepRecord:
        """Return the record of a step with a batch of the size of one micro-batch."""
        trainer = self._trainer
        data = self._run_data = private.run_data(trainer)  # on all ranks: it may draw random numbers
        if isinstance(data, list) and data and not self._context.is_fitting:  # each loader of the list has its own pass
            data = data[0]
        data = loader_of_batches(data)
        if private.has_delayed_training_data(trainer):
            private.forget_run_data(trainer)

        def run() -> tuple[StepRecord, frozenset[str] | None]:
            try:
                with forked_rng(self._ranks.device):
                    batch = self._example(data, request, stages)
                    cuts = request.microbatches != 1
                    looks = cuts or self._settings.loss == BATCH or self._settings.degrees
                    larger = load_batch(data, MAX_COMPARED_ROWS, streams=True) if looks else None
            except NoSampleError as why:
                raise NotMeasuredError(str(why)) from None
            if larger is not None and rows_of(larger) > MAX_COMPARED_ROWS:  # the items of the dataset are batches
                larger = make_cutter(larger, rows_of(larger))(Span(0, MAX_COMPARED_ROWS))
            with forked_rng(self._ranks.device):  # hooks may draw random numbers for a batch
                self._compared_batch = private.on_device(trainer, larger)
            weighs = larger is not None and cuts and self._settings.check_loss and self._settings.loss != BATCH
            weighs = weighs and self._fake is None  # a comparison needs the values of losses
            return self._record_with(batch), self._rule_out_weights(self._compared_batch) if weighs else None

        try:
            records, ruled_out = zip(*CollectiveCall(self._ranks.control)(run), strict=True)
            if None not in ruled_out:
                self.ruled_out_weights = frozenset().union(*ruled_out)
            record: StepRecord = records[self._ranks.control.position]
            return record
        except NotMeasuredError as why:
            way_out = (
                ". If one plain process trains it, give the Trainer a DataLoader with a batch_size, or put the layers "
                "into one nn.Sequential"
            )
            raise PipelineError(
                f"{type(self._module).__name__} has no one container of layers that is called in order, and its "
                f"{self._step} can't be recorded to cut it by units: {why}"
                f"{'' if isinstance(why, UnsuitableContainerError) else way_out}"  # it already contains a solution
            ) from why

    def _example(self, data: Any, request: RunRequest, stages: int) -> Any:
        """Return a batch of the size of one micro-batch, or of the largest micro-batch that may be chosen.

        Raises:
            NoSampleError: the data do not specify the batches.
        """
        if is_of_batches(data):
            batch = first_item(data, streams=True)
            self._batch_rows = rows_of(batch, request.microbatches != 1)
            return batch
        rows = self._batch_rows = batch_rows(data, streams=True)
        if request.chooses:
            return example_batch(data, request.sample_rows(rows, self._ranks.grid.n_planned))
        return example_batch(data, max(-(-rows // min(rows, request.microbatches or 2 * stages)), 1))

    def _record_with(self, batch: Any) -> StepRecord:
        module, device = self._module, self._ranks.device
        if device.type != "cpu" and self._fake is None:
            module.to(device)
        with forked_rng(device):  # hooks may draw random numbers for a batch
            batch = private.on_device(self._trainer, batch)
        run = partial(self._run_without_trace, self._context.is_fitting)
        self._recorded_rows = rows_of(batch, cut=False)
        self._recorded_step = named_step(module, self._step), partial(copy_batch, batch), self._step_arguments()
        return record_step(
            module, run, *self._recorded_step, device, differentiates=self._context.is_manual, fake=self._fake
        )

    def _step_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the step after the batch."""
        step = named_step(self._module, self._step)
        of_loader = (0,) if is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else ()
        return (0, *of_loader) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else of_loader

    def _run_without_trace(self, training: bool, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs the step of the whole module, and restore the state of the module.

        Args:
            training: the mode in which the module runs.
            work: the function to run.
        """
        module, device = self._module, self._ranks.device
        with ExitStack() as stack:
            stack.enter_context(forked_rng(device))
            for context in (keep_unchanged(module), recorded(module), without_loggers()):
                stack.enter_context(context)
            if self._context.is_fitting:
                stack.enter_context(private.show_training_data(self._trainer, self._run_data))
            if self._context.is_manual:
                stack.enter_context(idle_optimizers(self._trainer, module))
            stack.enter_context(self._trainer.precision_plugin.train_step_context())
            stack.enter_context(torch.enable_grad())
            seed_all(self._settings.seed, device, everything=True)
            modes = {part: part.training for part in module.modules()}
            module.train(training)
            try:
                return work()
            finally:
                for part, mode in modes.items():
                    part.training = mode

    def _rule_out_weights(self, batch: Any) -> frozenset[str] | None:
        """Return the candidates for weights with which the losses of parts do not reproduce the loss of a batch.

        The result is None if the losses cannot be compared, because the step draws random numbers or fails with these
        batches. The reason is logged.
        """
        module, device = self._module, self._ranks.device
        step, draws = named_step(module, "training_step"), RngUse(device)
        arguments = self._step_arguments()

        def compute_loss(part: Any) -> torch.Tensor:
            draws.start()
            with torch.no_grad():
                loss, _ = loss_of(step(copy_batch(part), *arguments))
            draws.stop()
            return loss.detach()

        try:
            rows = rows_of(batch)
            if rows < 2:
                return None
            found = compare_losses(
                module,
                batch,
                rows,
                lambda parts: [self._run_without_trace(False, partial(compute_loss, part)) for part in parts],
            )
        except Exception as error:  # the user's code may fail with other numbers of samples
            rank_zero_info(f"The loss of {type(module).__name__}.training_step was not compared: {error}")
            return None
        if draws.was_used:
            rank_zero_info(f"The loss of {type(module).__name__}.training_step was not compared: it is drawn at random")
            return None
        if found.unexplained:
            self._loss_warning = (
                f"The loss of {type(module).__name__}.training_step is {found.unexplained}. A batch is trained by the "
                "losses of its micro-batches, so training differs from one process. Set "
                "PipelineStrategy(microbatches=1), or give the module microbatch_weight(batch), which returns the "
                "weight of a micro-batch. PipelineStrategy(check_loss=False) leaves this comparison out"
            )
        return found.wrong


def _table(values: Mapping[int, float]) -> Table:
    """Return a table by the number of samples. A single value is considered proportional to this number."""
    points = sorted(values.items())
    return ((0, 0.0), *points) if len(points) == 1 else tuple(points)


def _named(module: nn.Module, paths: Collection[str]) -> dict[str, nn.Module]:
    return {path: module.get_submodule(path) for path in paths}


def _measured_loss(out: Any) -> torch.Tensor:
    if out is None:
        raise NotMeasuredError("training_step returns None for the first samples")
    return loss_of(out)[0]


def explain_whole(part: nn.Module) -> str:
    """Return the reason why a module must run as a whole on one stage, to follow its name."""
    if private.is_compiled(part):
        return (
            "is compiled as a whole, but every rank holds only some of its modules; compile each layer separately "
            "instead: for layer in layers: layer.compile()"
        )
    if backward_hooks(part):
        return BACKWARD_HOOKS
    return (
        "has a checkpoint of torch.distributed, which runs it again as a whole, so that it must be on one stage; apply "
        "the checkpoint to each layer separately, or use torch.utils.checkpoint"
    )


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


def check_manual(context: SetupContext, refused: Sequence[str]) -> None:
    """Reject settings that do not work with manual optimization. The result is the same on all ranks.

    Args:
        context: the inputs of the setup.
        refused: the settings that do not work with any module that is cut by units.

    Raises:
        PlanError: the run uses such a setting.
    """
    settings, schedule, microbatches = context.settings, context.request.schedule, context.request.microbatches
    asked = {
        f"schedule {schedule.name!r}": not schedule.flushes,
        "a job array on shared ranks": context.shares_ranks,
        "replan": context.request.replanner is not None,
        f"microbatches={microbatches}": (microbatches or 1) > 1,
        "loss='batch'": settings.loss == BATCH,
        f"data_parallel={settings.data_parallel}": settings.data_parallel != 1,
        f"verify={settings.verify}": settings.verify.batches > 0,
        "recompute=True": context.request.recompute,
        f"schedule {AUTO!r}": context.request.chooses,
        f"module={settings.module!r}": bool(settings.module),
    }
    found = [*refused, *(each for each, is_asked in asked.items() if is_asked)]
    if found:
        raise PlanError(
            f"{type(context.module).__name__} optimizes manually: its step calls backward for whole batches, on stages "
            f"that take turns. {' and '.join(found)} does not work with that. Leave it out, or set "
            "automatic_optimization = True and return the loss"
        )


def find_whole_loss_obstacle(context: SetupContext) -> str:
    """Return the reason why a step cannot end with a loss of whole batches, or an empty text if it can.

    The result is the same on all ranks.
    """
    schedule, grid = context.request.schedule, context.ranks.grid
    if grid.replicas > 1 or grid.degrees:
        return "data_parallel is more than 1"
    if len(schedule.place_stages(grid.length)) > grid.length or not schedule.flushes:
        return f"schedule {schedule.name!r} has several stages on a rank, or does not flush"
    return "replan moves units" if context.request.replanner is not None else ""


def names_layers(context: SetupContext) -> bool:
    """Return whether the module specifies the layers that each batch uses, and the schedule considers them."""
    schedule = context.request.schedule
    overlaps = isinstance(schedule, Policy) and not schedule.flushes and not context.request.chooses
    return overlaps and context.is_fitting and isinstance(context.module, ChoosesLayers)


def find_named_container(module: nn.Module) -> str:
    """Return the path of the container whose layers `layers_of_batch` names; empty if the module has none.

    It is the largest of the outermost containers with several layers.
    """
    found = [path for path, part in module.named_modules() if path and _has_layers(part)]
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    return max(outermost, key=lambda path: work_size(module.get_submodule(path)), default="")


def _has_layers(part: nn.Module) -> bool:
    return isinstance(part, nn.Sequential | nn.ModuleList) and len(part) > 1


def find_refused(context: SetupContext) -> list[str]:
    """Return the settings of a run that need a container of layers. The result is the same on all ranks."""
    request = context.request
    schedule, refused = request.schedule, []
    if names_layers(context):
        if Cuts.are_needed(context.module, schedule):
            refused.append(f"a cut of each batch with schedule {schedule.name!r}, which sends layers between ranks")
        if context.host.memory is not None:
            refused.append(
                f"MemorySwap with schedule {schedule.name!r}, which repeats single layers if memory is short"
            )
        if not find_named_container(context.module):
            refused.append("layers_of_batch without any nn.Sequential or nn.ModuleList, whose layers it names,")
    if context.settings.verify.batches and isinstance(schedule, Policy) and not schedule.flushes:
        refused.append(
            f"verify with schedule {schedule.name!r} (with a schedule that flushes, such as '1f1b', it does)"
        )
    return refused
