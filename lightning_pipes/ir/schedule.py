"""Base classes of schedules, which order a plan in advance (Schedule) or at run time (Policy)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from lightning_pipes.ir.checks import PlanError, check_count
from lightning_pipes.ir.instruction import Instruction, Kind, Span
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program
from lightning_pipes.ir.stream import LayerUse, LayerVersion


class ScheduleTraits:
    """Properties that schedules and policies have besides their order. Each has a default that a class may override.

    Attributes:
        name: the name by which users choose the schedule.
        flushes: whether all stages finish a batch before the next batch starts. If not, the window is endless.
    """

    name: ClassVar[str]
    flushes: ClassVar[bool] = True

    @property
    def tunes_online(self) -> bool:
        """Whether a run may switch to other candidates of its planner during training."""
        return False

    @property
    def splits_backward(self) -> bool:
        """Whether the backward runs as I and W."""
        return False

    @property
    def predicts_weights(self) -> bool:
        """Whether forwards use predicted weights, extrapolated with the momentum to the update of their batch."""
        return False

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage. By default, each rank has one stage, in order."""
        return tuple(range(n_ranks))

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of weight versions that may exist on each stage at the same time. The default is one."""
        return (1,) * plan.n_stages

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> Sequence[Schedule | Policy]:
        """Return the variants of this schedule that a search over schedules tries.

        By default, the only variant is the schedule with its default settings. A schedule that does not flush has no
        variants by default, because its results differ from training in a single process.
        """
        return [cls()] if cls.flushes else []  # type: ignore[list-item]  # a subclass is a Schedule or a Policy

    def is_slow_to_order(self, plan: Plan) -> bool:
        """Return whether making the order of a plan takes too long for a search over schedules, which names it then."""
        return False

    def make_planner(self) -> object:
        """Return the `planning.Planner` that cuts batches for this schedule, or None for the default planner.

        The default planner cuts batches evenly. The return type is `object` because this layer does not depend on
        costs; `planning.planner_of` checks the type.
        """
        return None


class Schedule(ScheduleTraits, ABC):
    """A schedule with a fixed order, which turns a plan into a program.

    Subclasses are frozen dataclasses, and their fields are the settings of the schedule.
    """

    @abstractmethod
    def program(self, plan: Plan) -> Program:
        """Return all compute instructions of the plan's window, with one row per rank.

        The result contains no transfers; `lower` adds them.

        Raises:
            PlanError: if the schedule can't order this plan.
        """


@dataclass(frozen=True)
class RankView:
    """The state of one rank when a policy picks an instruction.

    Attributes:
        rank: the rank.
        last: the last instruction of the rank, or None at the start.
        in_flight: for each stage of this rank, the number of samples between F and B.
        uses: in an endless window, the layers that each batch in flight uses.
        versions: in an endless window, the versions of this rank's layers by name. Layers that have not been stepped
            are absent.
    """

    rank: int
    last: Instruction | None
    in_flight: dict[int, int]
    uses: Mapping[int, LayerUse] = field(default_factory=dict)
    versions: Mapping[str, LayerVersion] = field(default_factory=dict)


class Policy(ScheduleTraits, ABC):
    """A schedule without a fixed order, which picks the next instruction of each rank at run time.

    Policies are frozen and hold no state, so that the simulator and the executor get the same result for the same
    arguments.

    If a policy does not flush, its window is endless. Each batch then either has a `LayerUse` or uses all layers. A
    forward is ready when the layers that its batch uses on the stage have the versions that earlier batches leave.
    Therefore, the weights are the same as if the batches ran one after another. They do not depend on the order in
    which the policy picks instructions.
    """

    @property
    def depth(self) -> int:
        """The maximum number of batches in flight on a rank, counted from the oldest to the newest.

        It is used only if the policy does not flush.
        """
        return 1

    @property
    def is_endless(self) -> bool:
        """Whether the window accepts any number of batches."""
        return not self.flushes

    @property
    def moves_layers_by_batch(self) -> bool:
        """Whether a batch of an endless window may have other stages than the plan.

        If so, `cut` is called for each batch.
        """
        return False

    def cut(self, use: LayerUse, cost: Callable[[str], float], plan: Plan) -> tuple[Span, ...] | None:
        """Return the layers of each stage for one batch, or None to use the stages of the plan.

        A layer moves with its optimizer state to the rank that runs it, see `Ledger.batch_transfers`. Every rank calls
        this method and must get the same result. The result must therefore not depend on anything that happens while
        batches run.

        Args:
            use: the layers of the batch, assigned to the stages of the plan.
            cost: a function that returns the duration of a layer of `use` by its name, in any unit.
            plan: the plan of the window.

        Returns:
            The layers of each stage, as spans of layer numbers.
        """
        return None

    @abstractmethod
    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        """Return one of the instructions in `ready`, or None to wait for more.

        Args:
            ready: the compute instructions of this rank whose needs are met; never empty. They are sorted by
                `ready_key`: B, I, W and STEP before F, then by batch, job, stage and span.
            view: the state of the rank.
            plan: the plan of the window.

        Returns:
            The instruction that the rank runs next. Returning None while nothing is in flight is a deadlock and raises
            an error.
        """


def ready_key(i: Instruction) -> tuple[bool, int, int, int, tuple[int, int], str]:
    """Return the key by which instructions are sorted before a policy picks one of them."""
    return i.kind is Kind.F, i.batch, i.job, i.stage, i.span, i.kind


def check_one_batch(plan: Plan, name: str, split_backward: bool = False) -> None:
    """Check that a plan has one batch of one job between two flushes.

    Args:
        plan: the plan to check.
        name: the name of the schedule in the error message.
        split_backward: whether the schedule runs the backward as I and W.

    Raises:
        PlanError: if the plan has several jobs or several batches, or if its `split_backward` has another value.
    """
    if len(plan.jobs) > 1 or plan.batches > 1 or plan.split_backward != split_backward:
        backwards = "backwards in two parts (I and W)" if split_backward else "full backwards (B)"
        raise PlanError(
            f"{name} orders one batch of one job with {backwards}, but the plan has {len(plan.jobs)} jobs, "
            f"{plan.batches} batches and split_backward={plan.split_backward}"
        )


def check_placement(plan: Plan, schedule: Schedule) -> None:
    """Check that the stages of a plan are on the ranks on which the schedule places them.

    Raises:
        PlanError: if the ranks differ.
    """
    wanted = schedule.place_stages(plan.n_ranks)
    if plan.ranks != wanted:
        raise PlanError(f"{schedule.name} places stages on ranks {wanted}, but the plan has them on {plan.ranks}")


def check_one_stage_a_rank(plan: Plan, name: str) -> None:
    """Check that each rank of a plan has one stage, and that each stage has the same spans in forward and backward.

    Raises:
        PlanError: if a rank has several stages, or if the backward of a stage is cut differently from its forward.
    """
    if plan.n_ranks != plan.n_stages:
        raise PlanError(
            f"{name} runs one stage a rank, but the plan has {plan.n_stages} stages on {plan.n_ranks} ranks; for "
            "several stages a rank, choose schedule 'interleaved'"
        )
    for stage in range(plan.n_stages):
        if plan.spans(Kind.B, stage) != plan.spans(Kind.F, stage):
            raise PlanError(f"{name} needs the same spans forward and backward, but the spans of stage {stage} differ")


def check_policy(policy: Policy, plan: Plan) -> None:
    """Check that a plan suits a policy, which picks whole backwards.

    Raises:
        PlanError: if recomputations of the plan are instructions of their own.
    """
    if plan.early_recompute:
        raise PlanError(
            f"{policy.name} decides its order while it runs, and recomputes in the backward, but the plan has "
            "early_recompute, which makes each recomputation an instruction of its own. Use adapt_plan(plan, policy), "
            "or leave early_recompute out of the plan"
        )


def check_stream(policy: Policy, plan: Plan) -> None:
    """Check that a plan suits the endless window of a policy.

    Raises:
        PlanError: if the plan has several jobs, several weight versions, an order of its own in `after`, or limits that
            are too low for the batches in flight.
    """
    check_count(f"depth of {policy.name}", policy.depth)
    needed = policy.depth * plan.jobs[0].rows
    for what, wrong, way_out in (
        ("one job", len(plan.jobs) > 1, f"it has {len(plan.jobs)}; give each job a separate window"),
        ("one version of the weights", max(plan.versions) > 1, f"versions are {plan.versions}; do not set them"),
        (
            "no order in `after`",
            bool(plan.after),
            "the order follows from the layers that each batch uses; do not set it",
        ),
        (
            f"limits of at least {needed} samples, for {policy.depth} batches of {plan.jobs[0].rows}",
            min(plan.limits, default=needed) < needed,
            f"a batch could wait for a batch that it keeps out: limits are {plan.limits}; raise them, or lower depth",
        ),
    ):
        if wrong:
            raise PlanError(f"{policy.name} runs batches without end and needs a plan with {what}: {way_out}")


def adapt_plan(plan: Plan, schedule: Schedule | Policy) -> Plan:
    """Return the plan with the `split_backward` and the weight versions that the schedule needs.

    A policy picks whole backwards, so the recomputations of its plan are parts of the backwards.
    """
    if isinstance(schedule, Policy) and plan.early_recompute:
        plan = replace(plan, early_recompute=False)
    if plan.split_backward != schedule.splits_backward:
        plan = replace(plan, split_backward=schedule.splits_backward)
    return plan if schedule.flushes else replace(plan, versions=tuple(schedule.weight_versions(plan)))


@dataclass(frozen=True)
class Rule:
    """A rule that picks the ready instruction with the smallest `ready_key`.

    Forwards are picked only if their stage has room.

    Attributes:
        limits: for each stage, the maximum number of samples between F and B, in addition to the limits of the plan. If
            empty, there is no further limit.
        alternate: whether forwards alternate with other instructions. If a forward and another instruction are both
            ready, the forward is picked unless the last instruction was a forward. If False, forwards are picked last.
        weights_last: whether weight gradients (W) wait until nothing else is ready.
    """

    limits: tuple[int, ...] = ()
    alternate: bool = True
    weights_last: bool = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        """Return the instruction that a policy with this rule picks; see `Policy.pick`."""
        limits = self.limits
        if limits:
            ready = eligible_instructions(ready, lambda i: i.kind is not Kind.F or has_room(i, view.in_flight, limits))
        forward = next((i for i in ready if i.kind is Kind.F), None)
        late = (Kind.F, Kind.W) if self.weights_last else (Kind.F,)
        other = next((i for i in ready if i.kind not in late), None)
        if forward is None or other is None:
            return forward or other or next((i for i in ready if i.kind is Kind.W), None)
        after_forward = view.last is not None and view.last.kind is Kind.F
        return forward if self.alternate and not after_forward else other


class RulePolicy(Policy):
    """A policy that is defined by a `Rule`."""

    @abstractmethod
    def rule(self, plan: Plan) -> Rule:
        """Return the rule that orders `plan`.

        Raises:
            PlanError: if the policy can't order this plan.
        """

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return self.rule(plan).pick(ready, view, plan)


def eligible_instructions(ready: Iterable[Instruction], fits: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
    """Return the ready instructions that a policy may pick.

    An instruction that does not fit also holds back the later instructions of its kind on its stage, so that gradients
    are summed in the order of samples.

    Args:
        ready: instructions, sorted by `ready_key`.
        fits: returns whether an instruction may run now.
    """
    out: list[Instruction] = []
    held_back: set[tuple[Kind, int]] = set()
    for i in ready:
        if (i.kind, i.stage) not in held_back:
            if fits(i):
                out.append(i)
            else:
                held_back.add((i.kind, i.stage))
    return tuple(out)


def has_room(forward: Instruction, in_flight: dict[int, int], limits: Sequence[int]) -> bool:
    """Return whether the stage of `forward` can hold its samples in addition to the samples in flight."""
    return in_flight[forward.stage] + forward.span.rows <= limits[forward.stage]
