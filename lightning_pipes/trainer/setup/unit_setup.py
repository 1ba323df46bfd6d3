"""The setup of a module that is cut by units because it has no suitable container of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_pipes.cost import ModelProfile
from lightning_pipes.engine.private_torch import backward_hooks, unsaved_buffers
from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checks import warn_about_module
from lightning_pipes.trainer.cuts.layers.pipelined import (
    MIN_STATISTICS_SAMPLES,
    batch_statistics,
    work_size,
)
from lightning_pipes.trainer.cuts.units.cut import WHOLE_MODULE, UnitCut, weights_of_stages
from lightning_pipes.trainer.cuts.units.joint_step import JointStep
from lightning_pipes.trainer.cuts.units.lazy_step import BACKWARD_HOOKS_REASON
from lightning_pipes.trainer.cuts.units.mode import runs_as_whole
from lightning_pipes.trainer.cuts.units.rows import CrossingRows
from lightning_pipes.trainer.cuts.units.steps import UnitSteps, stage_modules
from lightning_pipes.trainer.loop.layer_copies import Cuts
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.profile_planner import ProfilePlanner
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import AUTO, BATCH, PARAMETERS, find_schedule
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.setup.layout_choice import (
    LayoutChoice,
    find_named_container,
    names_layers,
)
from lightning_pipes.trainer.setup.module_setup import ModuleSetup, SetupContext
from lightning_pipes.trainer.setup.unit_recorder import UnitRecorder
from lightning_pipes.trainer.weights import private_transformers
from lightning_pipes.trainer.weights.deferred import DeferredWeights, check_same_cut, group_owners

CHECKED_ROWS = 4096
"""The number of samples of a batch with which it is checked that all stages cut a batch in the same way."""
MAX_UNIT_SHARE = 0.75
"""The largest share of the weights that may be in a module which has to run as a whole on one stage."""


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

    path = WHOLE_MODULE
    whole_loss_refusal = "the module is cut by units, and no stage can run a whole batch"

    def __init__(self, context: SetupContext) -> None:
        super().__init__(context)
        module = self.body = self._module
        self._recorder = UnitRecorder(context)
        self._request = self._complete_request()
        n_stages = len(self._request.schedule.place_stages(self._ranks.grid.n_planned))
        self._check_module(n_stages)
        private_transformers.install_output_hooks(module)
        self._moves_parts = not self._settings.degrees and (
            self._request.replanner is not None or (self._request.may_replan and not self._request.schedule.flushes)
        )
        """Whether units may move between ranks during training."""
        self._crossing_rows: CrossingRows | None = None
        """Cuts and joins the values between stages. None if all stages and links cut a batch alike."""
        self._choice = LayoutChoice(context, self._recorder, self._request, n_stages, self._moves_parts)
        self.end = self._choice.end
        self.ruled_out_weights = self._recorder.ruled_out_weights
        self._weights = weights_of_stages(module, self._choice.layout)
        warn_about_module(module, None)

    def _check_module(self, n_stages: int) -> None:
        """Reject a module of which a part that one stage must run as a whole is too large.

        Raises:
            PipelineError: there is such a part.
        """
        module, owner = self._module, type(self._module).__name__
        size = work_size(module)
        for path, part in module.named_modules():
            is_large = not path or (n_stages > 1 and work_size(part) > MAX_UNIT_SHARE * size)
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
                f"{type(self._module).__name__} is cut by units, because its layers are not in one container that is "
                "called in order, or because the settings of PipelineStrategy or manual optimization ask for units. "
                f"{' and '.join(refused)} does not work for such modules. Leave it out, or put the layers into one "
                "nn.Sequential: PipelineStrategy(module='path.to.it')"
            )
        return context.connections.complete_request(request, self._ranks.grid.n_planned)

    @property
    def ends_whole(self) -> bool:
        return self.end is not None

    def decide(self) -> Decision:
        """Return the decision, in which each part is one layer."""
        parts, ranks, request = self._choice.layout.n_parts, self._ranks.grid.n_planned, self._request
        degrees = self._settings.degrees
        if self.end is not None:
            rank_zero_info(
                f"The loss of {type(self._module).__name__}.training_step is computed once for all samples of a batch, "
                f"from {self._choice.layout.names[self.end.border]!r} on. All forwards come before the backwards, as "
                "with schedule 'gpipe'"
            )
        elif self._recorder.loss_warning:
            rank_zero_warn(self._recorder.loss_warning)
        if self.end is not None:
            request = replace(request, schedule=find_schedule("gpipe", {}))
        elif self._settings.loss == BATCH:
            request = replace(request, microbatches=1)
        least = MIN_STATISTICS_SAMPLES if batch_statistics(self._module) else 1
        partition = PARAMETERS if len(self._choice.starts) == 1 else list(self._choice.starts[1:])
        decision = replace(request, partition=partition).unmeasured([1] * parts, ranks, least, degrees)
        profile = self._choice.profile
        if self._choice.plans_by_profile and self.end is None and profile is not None:
            decision = self._plan_by_profile(request, decision, profile)
        else:
            why = self._recorder.unmeasured_reason
            if self.end is not None:
                why = "the end of the step runs on whole batches, whose bytes are not known for each micro-batch"
            decision = replace(decision, profile=profile, why=why)
            (cut,) = decision.plans(degrees=degrees).for_rows(CHECKED_ROWS)[0].jobs
            if len(cut.distinct_spans) > 1 and self._choice.layout.names:
                self._crossing_rows = self._choice.find_crossing_rows(request.schedule.name)
        stage_seconds = self._choice.sum_seconds(decision.layers)
        decision = replace(decision, pieces=self._choice.pieces, stage_seconds=stage_seconds)
        if description := self._choice.describe_cut(decision.layers):
            rank_zero_info(description)
        return self._context.connections.agree_on_decision(self._module, decision, lambda: decision)

    def _plan_by_profile(self, request: RunRequest, plain: Decision, profile: ModelProfile) -> Decision:
        """Choose everything from a profile that the user and the schedule leave open.

        Stages and links may cut a batch differently if the values between parts have an axis of samples. If all of them
        cut a batch equally, and the schedule is given, the stages begin where the times of units have placed them.

        Args:
            request: the completed request of the user.
            plain: the decision without measurements, which cuts a batch equally.
            profile: the profile of the parts.

        Raises:
            PlanError: a schedule is to be chosen, and none fits into memory; or no plan fits into the memory limit of
                the user.
        """
        rows = self._choice.crossing_rows
        if not request.measures_sizes:
            request = replace(request, partition=list(self._choice.starts[1:]))
        elif rows is None and not request.chooses:
            return replace(plain, why="stages and links have to cut a batch equally")
        request = replace(request, equal_cuts=request.equal_cuts or rows is None)
        planner = ProfilePlanner(self._ranks, self._settings.transport)
        deployment = planner.make_deployment(plain, [1.0] * self._ranks.control.size)
        try:
            made = planner.plan(request, plain, profile, self._recorder.batch_rows, deployment)
        except PlanError as error:
            if request.chooses:
                raise PlanError(f"schedule='auto': {error}") from None
            if request.planner.has_memory_limit:
                raise
            rank_zero_info(f"Schedule {request.schedule.name!r} runs without a plan from the times of units: {error}")
            return plain
        estimated = ""
        if made.schedule.splits_backward:
            estimated = (
                "The times of weight gradients are estimated: they take the part of a unit's backward that its input "
                "gradients do not take"
            )
        rank_zero_info("\n".join(filter(None, [made.table, made.why, made.cut_reason, estimated])))
        self._crossing_rows = rows if planner_of(made.schedule).may_cut_unequally else None
        return made

    def index_parameters(self, holdings: Holdings) -> None:
        """Register the stages that use each parameter in `holdings`."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        holdings.index_weights(self._module, lambda _, p: self._choice.layout.parts_of.get(names[id(p)], ()))

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
        stages = ((t, self._choice.layout.parts_of.get(name)) for name, t in named)
        foreign = {id(t) for t, used in stages if used and not local & {*used}} - unsaved
        deferred.make_tensors(lambda tensor: id(tensor) not in foreign, self._settings.seed, ranks)

    def make_hidden_state(self, holdings: Holdings) -> None:
        """Return None, because stages send everything that their units share."""
        return

    def cut(self, local: Sequence[int]) -> UnitCut:
        """Return the module with only the weights of the `local` stages."""
        module, layout = self._module, self._choice.layout
        spread = WHOLE_MODULE, tuple(sorted(local)), layout.parts_of, self._choice.starts, layout.n_parts
        check_same_cut(module, spread, self._ranks.control)
        return UnitCut(module, layout, self._weights, local, self._ranks.device, spread, self._moves_parts)

    def make_steps(self, local_layers: LocalLayers, plan: Plan, seed: int) -> UnitSteps:
        """Return the object that runs the user's steps on the stages of this rank."""
        module, device, cut, layout = self._module, self._ranks.device, local_layers.cut, self._choice.layout
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


def explain_whole(part: nn.Module) -> str:
    """Return the reason why a module must run as a whole on one stage, to follow its name."""
    if private.is_compiled(part):
        return (
            "is compiled as a whole, but every rank holds only some of its modules; compile each layer separately "
            "instead: for layer in layers: layer.compile()"
        )
    if backward_hooks(part):
        return BACKWARD_HOOKS_REASON
    return (
        "has a checkpoint of torch.distributed, which runs it again as a whole, so that it must be on one stage; apply "
        "the checkpoint to each layer separately, or use torch.utils.checkpoint"
    )


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
        f"recompute={context.request.recompute}": bool(context.request.recompute),
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
