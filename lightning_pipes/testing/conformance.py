"""The test suite that every schedule passes.

To use it, derive a test class from `ScheduleConformance`:

    class TestMine(ScheduleConformance):
        schedules = [Mine(), Mine(depth=3)]
        refused = [lambda: Mine(depth=0)]
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import product
from typing import Any, ClassVar

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    Cut,
    DeadlockError,
    Kind,
    Plan,
    PlanError,
    Policy,
    Program,
    Schedule,
    Span,
    adapt_plan,
    lower,
    verify,
)
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.sim import simulate
from lightning_pipes.testing.generators import random_costs

AnySchedule = Schedule | Policy


def _with_every_plan(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a schedule on the whole grid of plans, and add a note with the plan to each failure."""

    @wraps(test)
    def run(self: ScheduleConformance, schedule: AnySchedule) -> None:
        for p, m in product(self.ranks, self.microbatches):
            try:
                test(self, schedule, p, m)
            except BaseException as error:
                error.add_note(f"with {schedule}, {p} ranks and {m} micro-batches")
                raise

    del run.__dict__["__wrapped__"]  # the wrapper does not take p and m
    return run


class ScheduleConformance:
    """A base class for the tests of schedules. Set `schedules` in a subclass and run pytest.

    Attributes:
        schedules: the schedules to test.
        refused: calls that have to raise PlanError, for example with settings that are out of range.
        ranks, microbatches: the grid of plans. It includes plans with fewer micro-batches than stages.
        stages_per_rank: the number of stages per rank, for schedules that leave the placement to the plan. The stages
            s, s + p, ... of p ranks are placed on rank s. If None, the schedule places the stages.
    """

    schedules: ClassVar[Sequence[AnySchedule]] = ()
    refused: ClassVar[Sequence[Callable[[], object]]] = ()
    ranks: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    microbatches: ClassVar[Sequence[int]] = (1, 2, 3, 5, 8)
    stages_per_rank: ClassVar[int | None] = None

    def plan(self, schedule: AnySchedule, ranks: int, microbatches: int) -> Plan:
        """Return the plan to order. Override this method for a schedule that needs more than even spans."""
        if self.stages_per_rank is None:
            where = schedule.place_stages(ranks)
        else:
            where = tuple(range(ranks)) * self.stages_per_rank
        return adapt_plan(Plan.even(len(where), microbatches, ranks=where), schedule)

    def most_held(self, schedule: AnySchedule, plan: Plan, stage: int) -> int:
        """Return the maximum number of micro-batches that `stage` may hold between F and B.

        By default, it may hold all of them.
        """
        return len(plan.spans(Kind.F, stage)) * len(plan.jobs) * plan.batches

    def order(self, schedule: AnySchedule, plan: Plan) -> Program:
        """Return the order of the schedule.

        The order of a policy is simulated with the same duration for all instructions.
        """
        if isinstance(schedule, Schedule):
            return schedule.program(plan)
        return simulate(schedule, plan, CostModel.uniform(plan.n_stages, 1e-6, 1e-6)).program()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize each test with every schedule, and with every plan if the test takes one."""
        names = metafunc.fixturenames
        if "p" in names:
            cases = list(product(self.schedules, self.ranks, self.microbatches))
            metafunc.parametrize(("schedule", "p", "m"), cases, ids=[f"{s}-p{p}-m{m}" for s, p, m in cases])
        elif "schedule" in names:
            metafunc.parametrize("schedule", self.schedules, ids=str)
        elif "refusal" in names:
            metafunc.parametrize("refusal", self.refused)

    @_with_every_plan
    def test_is_complete_paired_and_free_of_deadlock(self, schedule: AnySchedule, p: int, m: int) -> None:
        plan = self.plan(schedule, p, m)
        facts = verify(self.order(schedule, plan), plan)
        for stage in range(plan.n_stages):
            assert 1 <= facts.peak_spans[stage] <= self.most_held(schedule, plan, stage)

    @_with_every_plan
    def test_every_stage_goes_through_the_samples_in_order(self, schedule: AnySchedule, p: int, m: int) -> None:
        """Check the order of samples, so that gradients are summed in the same order as without a pipeline."""
        program = _finite(self.order(schedule, self.plan(schedule, p, m)))
        last: dict[tuple[Kind, int, int, int], Span] = {}
        for i in program.iter_instructions():
            if i.kind in COMPUTE_KINDS and i.kind is not Kind.STEP:
                key = (i.kind, i.stage, i.job, i.batch)
                assert key not in last or last[key] < i.span, f"{i} after {last[key]}"
                last[key] = i.span

    @_with_every_plan
    def test_simulates(self, schedule: AnySchedule, p: int, m: int) -> None:
        """Check the bounds of the simulated time.

        A step takes at least as long as its busiest rank and as the first micro-batch, and at most as long as all
        events in sequence.
        """
        plan = self.plan(schedule, p, m)
        costs = random_costs(plan, seed=100 * p + m)
        program = _finite(self.order(schedule, plan))
        timeline = simulate(program, plan, costs)
        assert timeline.program() == program
        way = [i for i in lower(program, plan).iter_instructions() if (i.job, i.batch) == (0, 0) and i.span.start == 0]
        assert timeline.makespan >= max(timeline.busy)
        assert timeline.makespan >= sum(costs.duration_ns(i, plan) for i in way if i.kind in (Kind.F, Kind.B, Kind.I))
        assert timeline.makespan <= sum(e.end - e.start for e in timeline.events)

    @_with_every_plan
    def test_reads_back_its_text(self, schedule: AnySchedule, p: int, m: int) -> None:
        plan = self.plan(schedule, p, m)
        program = self.order(schedule, plan)
        finite = _finite(program)
        assert Program.parse(finite.to_lines(), plan) == finite

    @_with_every_plan
    def test_same_plan_same_program(self, schedule: AnySchedule, p: int, m: int) -> None:
        plan = self.plan(schedule, p, m)
        assert self.order(copy.deepcopy(schedule), copy.deepcopy(plan)) == self.order(schedule, plan)

    @_with_every_plan
    def test_gradients_equal_those_without_a_pipeline(self, schedule: AnySchedule, p: int, m: int) -> None:
        """Run the engine on real tensors, with all ranks in this process, for full and for shorter batches."""
        from lightning_pipes.testing.reference import gradients_alone, gradients_in_a_pipeline

        plan = self.plan(schedule, p, m)
        order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
        for rows in {plan.jobs[0].rows, max(1, plan.jobs[0].rows - 1)}:
            gradients_in_a_pipeline(plan, order, rows).assert_equal(gradients_alone(plan, rows))

    @_with_every_plan
    def test_recomputes_while_the_gradient_is_on_its_way(self, schedule: AnySchedule, p: int, m: int) -> None:
        """Compare recomputation before the gradient arrives with recomputation after it has arrived.

        A fixed order holds the same micro-batches, takes at most the same time, and computes the same bits. A policy
        always recomputes in its backwards.
        """
        from lightning_pipes.testing.reference import gradients_alone, gradients_in_a_pipeline

        plan = self.plan(schedule, p, m)
        late = replace(plan, recompute=(True,) * (plan.n_stages - 1) + (False,))
        early = adapt_plan(replace(late, early_recompute=True), schedule)
        assert early.early_recompute == isinstance(schedule, Schedule)
        programs = self.order(schedule, late), self.order(schedule, early)
        assert verify(programs[0], late) == verify(programs[1], early)
        costs = replace(random_costs(plan, seed=100 * p + m), activation_bytes=(7,) * plan.n_stages)
        runs = [simulate(_finite(program), each, costs) for program, each in zip(programs, (late, early), strict=True)]
        assert runs[1].makespan <= runs[0].makespan
        assert runs[1].busy == runs[0].busy
        assert runs[1].peak_bytes == runs[0].peak_bytes
        if m <= 3:
            given = [schedule if isinstance(schedule, Policy) else program for program in programs]
            found = [gradients_in_a_pipeline(each, order, m) for each, order in zip((late, early), given, strict=True)]
            found[1].assert_equal(found[0], exact=True)
            found[1].assert_equal(gradients_alone(plan, m))

    @_with_every_plan
    def test_recomputes_some_micro_batches(self, schedule: AnySchedule, p: int, m: int) -> None:
        """Compare stages that recompute every second micro-batch with stages that recompute none or all of them.

        A fixed order stays the same, and its memory and work are between those of the other two.
        """
        plan = self.plan(schedule, p, m)
        every = adapt_plan(
            replace(plan, recompute=(True,) * (plan.n_stages - 1) + (False,), early_recompute=True), schedule
        )
        some = replace(every, kept_microbatches=((1, 2),) * plan.n_stages)
        costs = replace(random_costs(plan, seed=100 * p + m), activation_bytes=(7,) * plan.n_stages, forward_bytes=())
        runs = []
        stats = []
        for each in (plan, some, every):
            order = self.order(schedule, each)
            stats.append(verify(order, each))
            runs.append(simulate(_finite(order), each, costs))
            assert runs[-1].peak_bytes == peak_bytes(_finite(order), each, costs)
        if isinstance(schedule, Policy):
            return
        assert stats[0] == stats[1] == stats[2]
        for none, between, most in zip(*(run.peak_bytes for run in runs), strict=True):
            assert none >= between >= most
        for none, between, most in zip(*(run.busy for run in runs), strict=True):
            assert none <= between <= most

    def test_is_a_value(self, schedule: AnySchedule) -> None:
        """Check that the schedule is frozen, hashable, equal to its copies, and picklable."""
        copied = pickle.loads(pickle.dumps(schedule))
        assert copied == schedule
        assert hash(copied) == hash(schedule)
        assert isinstance(schedule.name, str)
        assert schedule.name
        with pytest.raises(AttributeError):
            schedule.name = "another"  # type: ignore[misc]

    @pytest.mark.parametrize("oddity", ["neighbours", "backwards", "spans", "split", "jobs", "batches", "reversed"])
    def test_orders_odd_plans_or_refuses(self, schedule: AnySchedule, oddity: str) -> None:
        """Check that unusual plans are either ordered correctly or rejected.

        A schedule that can't order a plan raises PlanError. A policy that holds back too many instructions may cause a
        DeadlockError instead.
        """
        plan = _odd(self.plan(schedule, 2, 4), oddity)
        refusals = PlanError if isinstance(schedule, Schedule) else (PlanError, DeadlockError)
        try:
            program = self.order(schedule, plan)
        except refusals:
            return
        verify(program, plan)

    def test_refuses_nonsense(self, refusal: Callable[[], object]) -> None:
        with pytest.raises(PlanError):
            refusal()


def _finite(program: Program) -> Program:
    return program.unroll(program.head_batches + 2)


def _odd(plan: Plan, oddity: str) -> Plan:
    n, cut = plan.n_stages, plan.jobs[0]
    whole = (Span(0, cut.rows),)
    match oddity:
        case "neighbours":  # two stages in a row on each rank
            doubled = tuple(rank for rank in range(plan.n_ranks) for _ in range(2))
            even = Plan.even(len(doubled), len(cut.forward[0]), ranks=doubled)
            return replace(even, split_backward=plan.split_backward)
        case "reversed":
            return replace(plan, ranks=tuple(plan.n_ranks - 1 - rank for rank in plan.ranks))
        case "backwards":  # spans differ between forward and backward
            return replace(plan, jobs=(Cut(cut.rows, cut.forward, (whole,) * n),))
        case "spans":  # and between stages
            return replace(plan, jobs=(Cut(cut.rows, (whole, *cut.forward[1:])),))
        case "split":
            return replace(plan, split_backward=not plan.split_backward)
        case "jobs":
            return replace(plan, jobs=(cut, cut))
        case _:
            return replace(plan, batches=2)
