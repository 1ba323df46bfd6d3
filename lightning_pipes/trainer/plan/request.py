"""The run that the user requests, and its conversion into a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import InputError, PlanError, Policy, Schedule, Span, check_type
from lightning_pipes.planning.auto import AutoPlanner
from lightning_pipes.planning.balance import BalancedPlanner
from lightning_pipes.planning.formatting import schedule_settings
from lightning_pipes.planning.planner import UNDECIDED, Planner, Recompute, check_recompute, planner_of
from lightning_pipes.planning.stage_recompute import RecomputePlanner
from lightning_pipes.planning.staleness import Iterations
from lightning_pipes.trainer.data.token_cut import SAMPLES, TOKENS, MicrobatchesBy
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.plans import stage_layers
from lightning_pipes.trainer.plan.settings import (
    AUTO,
    PARAMETERS,
    Settings,
    check_microbatches,
    check_partition,
    find_replanner,
    find_schedule,
    names_modules,
)
from lightning_pipes.trainer.ranks.control import Control


@dataclass(frozen=True)
class Placement:
    """The assignment of layers to stages, and of stages to ranks.

    Attributes:
        layers: the layers of each stage.
        ranks: the rank of each stage.
        partition: the argument `partition` of the run with this placement.
    """

    layers: tuple[Span, ...]
    ranks: tuple[int, ...]
    partition: str | Sequence[int]

    def data(self) -> dict[str, Any]:
        """Return the placement as plain lists, which may be part of a checkpoint that is read with `weights_only`."""
        partition = self.partition if isinstance(self.partition, str) else [*self.partition]
        return {"layers": [[*span] for span in self.layers], "ranks": [*self.ranks], "partition": partition}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the placement from the result of `data`."""
        return cls(tuple(Span(a, b) for a, b in data["layers"]), tuple(data["ranks"]), data["partition"])

    @property
    def cuts(self) -> list[int]:
        """The numbers of the layers at which stages 1, 2, ... begin."""
        return [span.start for span in self.layers[1:]]


@dataclass(frozen=True)
class RunRequest:
    """The run that the user requests.

    Attributes:
        schedule: the named schedule, or a placeholder if `chooses`.
        microbatches: the user's number of micro-batches. None for the default, or for the best number if `chooses`.
        recompute: the stages that recompute their forwards, as in `Problem.recompute`. `UNDECIDED` is replaced as soon
            as the choice is made.
        late_recompute: whether stages recompute only when the gradient has arrived.
        partition: "auto", "parameters", or the numbers of layers or paths of modules at which stages begin.
        chooses: whether the schedule, the micro-batches and recomputation are chosen.
        replanner: the planner that moves layers during training. None leaves this to the schedule.
        iterations: the batches until the target with stale gradients if a schedule with stale gradients may be chosen,
            and None otherwise.
        equal_cuts: whether the chosen plan must cut a batch into the same micro-batches on all stages and links.
    """

    schedule: Schedule | Policy
    microbatches: int | None
    recompute: Recompute
    partition: str | list[int] | list[str]
    chooses: bool = False
    replanner: Planner | None = None
    iterations: Iterations | None = None
    equal_cuts: bool = False
    late_recompute: bool = False

    @classmethod
    def from_arguments(
        cls,
        schedule: str | Schedule | Policy,
        schedule_args: Mapping[str, Any] | None,
        microbatches: int | None,
        recompute: bool | str | Sequence[int],
        partition: str | list[int] | list[str],
        replan: bool | Mapping[str, Any],
        stale_gradients: bool | Mapping[int, float] = False,
        microbatches_by: MicrobatchesBy = SAMPLES,
    ) -> RunRequest:
        """Return the run that these arguments of `PipelineStrategy` request.

        Raises:
            InputError: an argument is invalid.
        """
        known = find_schedule(schedule, {} if schedule_args is None else schedule_args)
        iterations = Iterations.from_setting("stale_gradients", stale_gradients)
        if iterations is not None and schedule != AUTO:
            raise InputError(
                f"stale_gradients={stale_gradients} lets schedule='auto' choose a schedule that does not flush, and "
                f"schedule {known.name!r} is named; leave one of them out"
            )
        again, late = check_recompute(recompute)
        made = cls(
            known,
            check_microbatches(microbatches),
            again,
            check_partition(partition, schedule),
            chooses=schedule == AUTO,
            replanner=find_replanner(replan, known),
            iterations=iterations,
            late_recompute=late,
            equal_cuts=check_type("microbatches_by", microbatches_by, MicrobatchesBy) == TOKENS,
        )
        if made.equal_cuts and made.sorting_obstacle:
            raise InputError(
                f"{made.sorting_obstacle}, and microbatches_by='tokens' pads each micro-batch to its own length, so "
                "that micro-batches can't be joined or divided between stages. Use another schedule, or set "
                "microbatches_by='auto'"
            )
        return made

    @property
    def sorting_obstacle(self) -> str:
        """The reason why sequences can't be sorted into micro-batches by length, or an empty text."""
        planner = planner_of(self.schedule)
        if not self.chooses and (planner.may_cut_unequally or planner.user_chose_microbatches):
            return f"schedule {self.schedule.name!r} may cut a batch differently on each stage"
        return ""

    def unmeasured(self, sizes: Sequence[int], ranks: int, least: int = 1, degrees: tuple[int, ...] = ()) -> Decision:
        """Return the decision without measurements.

        Args:
            sizes: the number of parameters of each layer.
            ranks: the number of ranks. The ranks of one stage count once.
            least: the smallest number of samples of a micro-batch.
            degrees: the number of ranks of each stage, if stages have several.

        Raises:
            PlanError: the layers cannot be cut in this way, or the schedule cannot order the plan.
        """
        where = self.schedule.place_stages(ranks)
        if degrees:
            self._check_degrees(where, degrees)
        partition = self.partition
        if isinstance(partition, str) or names_modules(partition):
            partition = PARAMETERS
        layers = stage_layers(partition, sizes, len(where), degrees)
        found = Decision(
            self.schedule,
            self.microbatches,
            self.recompute,
            where,
            layers,
            least=least,
            late_recompute=self.late_recompute,
        )
        plans = found.plans()
        plans.for_rows(plans.trial_rows)
        return found

    def _check_degrees(self, where: Sequence[int], degrees: tuple[int, ...]) -> None:
        """Reject requests that stages with several ranks do not support.

        Raises:
            PlanError: the run has such a request.
        """
        asked = f"data_parallel={list(degrees)} gives each stage a number of ranks"
        if self.chooses:
            raise PlanError(f"schedule='auto' chooses the number of stages, and {asked}; name a schedule, or leave it")
        if tuple(where) != tuple(range(len(degrees))):
            raise PlanError(
                f"{asked}, which needs one stage a rank, in order; schedule {self.schedule.name!r} has stages on ranks "
                f"{tuple(where)}. Take a schedule with one stage a rank, such as '1f1b', 'kfkb' or 'dynpipe'"
            )
        if (self.replanner or planner_of(self.schedule)).every and min(degrees) == 1:
            rank_zero_warn(
                f"{asked}, and then layers do not move: slow ranks of a stage pass samples to other ranks of the "
                "stage, but the only rank of a stage keeps all of its samples. Set data_parallel to a number to move "
                "layers"
            )

    def resume_cut(self, placement: Placement, layers: int, ranks: int) -> RunRequest:
        """Return the request with the partition of a checkpoint if this matters, and otherwise this request.

        The partition matters if layers may move or batches overlap. It is used if the numbers of stages and layers are
        the same, unless the user requests another cut or lets the schedule be chosen.
        """
        free = isinstance(self.partition, str) or self.partition == placement.partition
        matters = self.may_replan or not self.schedule.flushes
        alike = placement.ranks == self.schedule.place_stages(ranks) and placement.layers[-1].stop == layers
        return replace(self, partition=placement.cuts) if free and matters and alike and not self.chooses else self

    @property
    def planner(self) -> Planner:
        """The planner of the settings that the user has not specified."""
        if self.chooses:
            return AutoPlanner(self.iterations, self.equal_cuts)
        own = planner_of(self.schedule)
        cutting = BalancedPlanner(own) if self.partition == AUTO else own
        return RecomputePlanner(cutting) if self.recompute == UNDECIDED else cutting

    @property
    def balances_stages(self) -> bool:
        """Whether the layers are cut by their times.

        If batches overlap, the even cut is kept unless layers may move later or stages may cut a batch differently.
        """
        has_step = self.schedule.flushes or self.may_replan or self.planner.may_cut_unequally
        return self.chooses or (self.partition == AUTO and has_step)

    @property
    def needs_times(self) -> bool:
        """Whether the decision depends on the times of layers, and not only on their bytes."""
        return self.balances_stages or self.may_replan or planner_of(self.schedule).wants_profile

    @property
    def needs_profile(self) -> bool:
        """Whether the layers must be measured."""
        return self.planner.wants_profile or self.planner.has_memory_limit or self.may_replan

    @property
    def plans_by_profile(self) -> bool:
        """Whether more than the layers of the stages is chosen from the times of the layers."""
        return self.needs_profile and self.planner.uses_profile

    @property
    def may_replan(self) -> bool:
        """Whether layers may move during training, according to their times."""
        return (self.replanner or planner_of(self.schedule)).wants_profile

    @property
    def may_cut_unequally(self) -> bool:
        """Whether stages and links may cut a batch differently, according to the times of the layers."""
        return self.needs_profile and self.planner.may_cut_unequally

    @property
    def measures_sizes(self) -> bool:
        """Whether units must be measured with several numbers of samples, because micro-batches may have any of them.

        The stages can then also begin at other units than the ones with which the measurement began.
        """
        return self.chooses or self.may_cut_unequally

    @property
    def splits_backward(self) -> bool:
        """Whether the two parts of backwards must also be measured."""
        return self.chooses or self.schedule.splits_backward or self.schedule.tunes_online

    def microbatch_rows(self, rows: int, ranks: int) -> tuple[int, ...]:
        """Return the numbers of samples to measure for batches of `rows` samples, in ascending order."""
        return self.planner.profile_sizes(rows, len(self.schedule.place_stages(ranks)), self.microbatches)

    def sample_rows(self, rows: int, ranks: int) -> int:
        """Return the number of samples, of a batch of `rows`, that the largest possible micro-batch needs."""
        return self.planner.most_rows(rows, len(self.schedule.place_stages(ranks)), self.microbatches)

    def measured(self, plain: Decision, profile: ModelProfile, rows: int, deployment: Deployment) -> Decision:
        """Return the decision from the profile of the layers, for batches of `rows` samples on these devices.

        Args:
            plain: the decision without a profile.
            profile: the profile of the layers.
            rows: the number of samples of a batch.
            deployment: the devices and links.

        Raises:
            PlanError: a schedule is to be chosen, and none fits into the memory of the devices.
        """
        problem = replace(plain, profile=profile, deployment=deployment).problem(rows)
        if self.partition == AUTO and self.balances_stages:
            problem = replace(problem, layers=(), fallback=plain.layers)
        solution = self.planner.solve(problem)
        schedule = solution.problem.schedule
        stays = not schedule.flushes or bool((self.replanner or planner_of(schedule)).every)
        made = Decision.from_solution(solution, movable=self.partition == AUTO and not stays)
        timed = profile.has_split or not schedule.splits_backward
        return made.predicted(profile) if schedule.flushes and timed else made


_SAME_SETTINGS = (
    "module",
    "microbatches_by",
    "seed",
    "transport",
    "checkpoint",
    "gather",
    "check_loss",
    "loss",
    "verify",
    "relocation",
    "shard_optimizer",
    "tensor_parallel",
)


def describe_arguments(request: RunRequest, settings: Settings) -> dict[str, str]:
    """Return the arguments that must be the same on all ranks, as text by name."""
    args = schedule_settings(request.schedule)
    return {
        "schedule": "auto" if request.chooses else request.schedule.name,
        "schedule_args": repr({name: args[name] for name in sorted(args)}),
        **{name: repr(getattr(request, name)) for name in ("microbatches", "recompute", "late_recompute", "partition")},
        "replan": repr(request.replanner),
        "stale_gradients": repr(request.iterations),
        **{name: repr(getattr(settings, name)) for name in _SAME_SETTINGS},
    }


def check_same_arguments(arguments: Mapping[str, str], control: Control) -> None:
    """Compare the arguments of all ranks. This function is collective.

    Raises:
        InputError: the arguments of a rank differ from the arguments of rank 0, so that ranks would wait for different
            events.
    """
    found = control.all_gather(dict(arguments))
    for rank, other in zip(control.ranks, found, strict=True):
        different = [
            f"{name}={other[name]}, rank {control.ranks[0]} {value}"
            for name, value in found[0].items()
            if other[name] != value
        ]
        if different:
            raise InputError(
                f"PipelineStrategy has different arguments on rank {rank}: {'; '.join(different)}. Every process must "
                "create it with the same arguments. Look for settings from environment variables or files, and give a "
                "job array its jobs in the same order in every process"
            )
