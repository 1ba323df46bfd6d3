"""The base classes of schedules: they order a plan, in advance (Schedule) or while running (Policy)."""

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
    """The properties of a schedule or a policy besides its order; each has a default that a class may override.

    Attributes:
        name: the name by which users choose it.
        flushes: whether all stages end a batch before the next one begins; where they do not its window is endless.
    """

    name: ClassVar[str]
    flushes: ClassVar[bool] = True

    @property
    def tunes_online(self) -> bool:
        """Whether a run changes to other candidates of its planner while it trains."""
        return False

    @property
    def splits_backward(self) -> bool:
        """Whether backward runs as I and W."""
        return False

    @property
    def predicts_weights(self) -> bool:
        """Whether forwards read weights that are extrapolated by momentum to the update of their batch."""
        return False

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage; by default one stage a rank, in order."""
        return tuple(range(n_ranks))

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of weight versions that may live on each stage; by default one."""
        return (1,) * plan.n_stages

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> Sequence[Schedule | Policy]:
        """Return the variants that a search over schedules tries.

        By default this is the schedule with its default settings. A schedule that does not flush has none, for it gives
        another result than one process.
        """
        return [cls()] if cls.flushes else []  # type: ignore[list-item]  # a subclass is a Schedule or a Policy

    def make_planner(self) -> object:
        """Return the `planning.Planner` that cuts batches for this schedule; None for the default one, which cuts
        evenly.

        Typed as an object, for this layer knows nothing of costs; `planning.planner_of` checks it.
        """
        return None


class Schedule(ScheduleTraits, ABC):
    """A fixed order: it turns a plan into a program. A subclass is frozen, and its fields are its settings."""

    @abstractmethod
    def program(self, plan: Plan) -> Program:
        """Return every compute instruction of the plan's window, one row a rank; `lower` adds transfers.

        Raises:
            PlanError: the schedule can't order such a plan.
        """


@dataclass(frozen=True)
class RankView:
    """The state of one rank when a policy has to choose.

    Attributes:
        rank: the rank.
        last: its last instruction, None at the start.
        in_flight: samples between F and B, by stage; stages of other ranks are absent.
        uses: in an endless window the layers that the batches in flight use, by batch.
        versions: in an endless window the versions of this rank's layers, by name; absent until first stepped.
    """

    rank: int
    last: Instruction | None
    in_flight: dict[int, int]
    uses: Mapping[int, LayerUse] = field(default_factory=dict)
    versions: Mapping[str, LayerVersion] = field(default_factory=dict)


class Policy(ScheduleTraits, ABC):
    """An order that is not fixed in advance: a policy picks the next instruction of a rank.

    Frozen and without memory of its own, so that simulator and executor ask the same question and get the same
    answer.

    Where it does not flush, batches come without end. Each has a `LayerUse`, or else uses all layers.
    A forward is ready when the layers that its batch uses on the stage have the versions that earlier batches leave. So
    the weights are those of one batch after another, in whatever order instructions are picked.
    """

    @property
    def depth(self) -> int:
        """The most batches in flight on a rank, from the oldest to the newest; used where the policy does not flush."""
        return 1

    @property
    def is_endless(self) -> bool:
        """Whether batches can be added without end."""
        return not self.flushes

    @property
    def moves_layers_by_batch(self) -> bool:
        """Whether `cut` is called: batches that do not flush may then have other stages than the plan's."""
        return False

    def cut(self, use: LayerUse, cost: Callable[[str], float], plan: Plan) -> tuple[Span, ...] | None:
        """Return the layers of each stage for a batch, as spans of layer numbers; None for those of the plan.

        A layer then moves to the rank that runs it, with its optimizer state, see `Ledger.batch_transfers`. Every rank
        calls it and must get the same result: it may not depend on anything that happens while batches run.

        Args:
            use: the layers of the batch, by the stages of the plan.
            cost: returns the seconds of a layer of `use` by its name, in any unit.
        """
        return None

    @abstractmethod
    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        """Return one of `ready`, or None to wait for more.

        `ready` holds the compute instructions of this rank whose needs are met, sorted by `ready_key`: B, I, W and
        STEP before F, then by batch, job, stage and span; it is never empty. Returning None although nothing is on
        its way is a deadlock, and reported.
        """


def ready_key(i: Instruction) -> tuple[bool, int, int, int, tuple[int, int], str]:
    """Return the sorting key of `i` among the instructions that a policy may pick."""
    return i.kind is Kind.F, i.batch, i.job, i.stage, i.span, i.kind


def check_one_batch(plan: Plan, name: str, split_backward: bool = False) -> None:
    """Refuse a plan for a schedule that orders one batch of one job between two flushes.

    Raises:
        PlanError: the plan has several jobs, several batches, or a backward that is split where it should not be.
    """
    if len(plan.jobs) > 1 or plan.batches > 1 or plan.split_backward != split_backward:
        backwards = "backwards in two parts (I and W)" if split_backward else "full backwards (B)"
        raise PlanError(
            f"{name} orders one batch of one job with {backwards}; the plan has {len(plan.jobs)} jobs, "
            f"{plan.batches} batches and split_backward={plan.split_backward}"
        )


def check_placement(plan: Plan, schedule: Schedule) -> None:
    """Refuse a plan that does not have its stages where the schedule places them.

    Raises:
        PlanError: the plan has other ranks.
    """
    wanted = schedule.place_stages(plan.n_ranks)
    if plan.ranks != wanted:
        raise PlanError(f"{schedule.name} places stages on ranks {wanted}, the plan on {plan.ranks}")


def check_one_stage_a_rank(plan: Plan, name: str) -> None:
    """Refuse a plan for a schedule that runs one stage a rank, with the same spans forward and backward.

    Raises:
        PlanError: a rank has several stages, or a stage's backward is cut otherwise than its forward.
    """
    if plan.n_ranks != plan.n_stages:
        raise PlanError(
            f"{name} runs one stage a rank, the plan has {plan.n_stages} stages on {plan.n_ranks} ranks; "
            "for several stages a rank choose schedule 'interleaved'"
        )
    for stage in range(plan.n_stages):
        if plan.spans(Kind.B, stage) != plan.spans(Kind.F, stage):
            raise PlanError(f"{name} needs the same spans forward and backward; stage {stage} has others")


def check_stream(policy: Policy, plan: Plan) -> None:
    """Refuse a plan for an endless window of a policy.

    Raises:
        PlanError: it has several jobs, weight versions, an order of its own, or less room than batches under way may
            take.
    """
    check_count(f"depth of {policy.name}", policy.depth)
    needed = policy.depth * plan.jobs[0].rows
    for what, wrong, way_out in (
        ("one job", len(plan.jobs) > 1, f"it has {len(plan.jobs)}; give each a window of its own"),
        ("one version of the weights", max(plan.versions) > 1, f"versions are {plan.versions}; leave them out"),
        ("no order of its own in `after`", bool(plan.after), "batches say which layers they use; leave it out"),
        (
            f"limits of at least {needed} samples, for {policy.depth} batches of {plan.jobs[0].rows}",
            min(plan.limits, default=needed) < needed,
            f"a batch could wait for one that it keeps out: limits are {plan.limits}; raise them, or lower depth",
        ),
    ):
        if wrong:
            raise PlanError(f"{policy.name} runs batches without end and needs a plan with {what}: {way_out}")


def adapt_plan(plan: Plan, schedule: Schedule | Policy) -> Plan:
    """Return `plan` with the backward and the weight versions that the schedule needs."""
    if plan.split_backward != schedule.splits_backward:
        plan = replace(plan, split_backward=schedule.splits_backward)
    return plan if schedule.flushes else replace(plan, versions=tuple(schedule.weight_versions(plan)))


@dataclass(frozen=True)
class Rule:
    """A rule that picks the ready instruction with the least `ready_key`; forwards only while their stage has room.

    Attributes:
        limits: most samples that each stage may hold between F and B, besides the plan's own limits; empty means none.
        alternate: where a forward and something else are both ready, take the sort that did not run last, a forward at
            the start; otherwise forwards come last.
        weights_last: whether weight gradients (W) wait until there is nothing else to run.
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
    """A policy that a `Rule` describes."""

    @abstractmethod
    def rule(self, plan: Plan) -> Rule:
        """Return the rule that orders `plan`.

        Raises:
            PlanError: it can't order such a plan.
        """

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return self.rule(plan).pick(ready, view, plan)


def eligible_instructions(ready: Iterable[Instruction], fits: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
    """Return the instructions of `ready`, sorted by `ready_key`, that a policy may pick.

    An instruction that does not fit holds back the later ones of its kind on its stage, so that gradients are summed in
    the order of samples.
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
    """Return whether the stage of `forward` may hold its samples too."""
    return in_flight[forward.stage] + forward.span.rows <= limits[forward.stage]
