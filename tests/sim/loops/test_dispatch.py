"""Check policies in virtual time."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, DeadlockError, F, Instruction, Kind, Policy, ProgramError, Span, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan, uniform
from tests.cases import for_each
from tests.sim.links import sending
from tests.sim.policies import Scripted


@dataclass(frozen=True)
class BackwardFirst(Policy):
    """A policy that picks the first entry of `ready` within a limit of samples in flight.

    The first stage may have `limit` samples in flight, and each later stage one less than the stage before it.
    """

    limit: int = 100
    name: ClassVar[str] = "backward_first"

    def pick(self, ready, view, plan):
        return next(
            (i for i in ready if i.kind is not Kind.F or view.in_flight[i.stage] < max(1, self.limit - i.stage)), None
        )


@dataclass(frozen=True)
class Latest(Policy):
    """A policy that picks the last entry of `ready`, so that forwards come first and out of order."""

    name: ClassVar[str] = "latest"

    def pick(self, ready, view, plan):
        return ready[-1]


class TestBackwardFirst(ScheduleConformance):
    """Runs the suite of schedules with a policy."""

    schedules = [BackwardFirst(), BackwardFirst(3)]


def test_they_are_policies():
    assert all(isinstance(policy, Policy) for policy in (BackwardFirst(), Scripted(()), Latest()))


@for_each("blocking", [False, True])
@for_each("policy", [BackwardFirst(), BackwardFirst(2), Latest()])
@for_each("seed", range(12))
def test_replaying_what_it_ran_takes_the_same_time(seed, policy, blocking):
    plan = random_plan(seed, unequal=policy != BackwardFirst(2))
    costs = replace(random_costs(plan, seed), overhead=seed % 2 * 1e-9)
    timeline = simulate(policy, plan, sending(costs, blocking))
    program = timeline.program()
    verify(program, plan)
    replayed = simulate(program, plan, sending(costs, blocking))
    assert replayed.makespan == timeline.makespan
    assert set(replayed.events) == set(timeline.events)


@for_each("blocking", [False, True])
@for_each("seed", range(8))
def test_a_program_as_a_policy_takes_the_programs_time(seed, blocking):
    plan = random_plan(seed, unequal=False)
    costs = random_costs(plan, seed)
    program = OneFOneB().program(plan)
    asked = simulate(Scripted(program.head), plan, sending(costs, blocking))
    assert set(asked.events) == set(simulate(program, plan, sending(costs, blocking)).events)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 3)])
def test_backward_first_within_1f1bs_limits_is_1f1b(p, m):
    plan, costs = uniform(p, m, f=1, b=2)
    timeline = simulate(BackwardFirst(limit=p), plan, costs)
    assert timeline.makespan == (m + p - 1) * 3
    assert timeline.program().to_lines() == OneFOneB().program(plan).to_lines()
    assert timeline.name == "backward_first"


def test_it_is_asked_when_all_of_an_instant_has_happened():
    """Check a gradient that arrives in the nanosecond in which rank 0 becomes free.

    At time 3, its backward must be among the ready instructions.
    """
    seen = []

    @dataclass(frozen=True)
    class Spy(BackwardFirst):
        def pick(self, ready, view, plan):
            seen.append((view.rank, view.last, ready))
            return super().pick(ready, view, plan)

    plan, costs = uniform(2, 4, f=1, b=1)
    simulate(Spy(), plan, costs)
    first, second, third, fourth = (Span(n, n + 1) for n in range(4))
    assert seen[0] == (0, None, (F(0, first), F(0, second), F(0, third), F(0, fourth)))
    assert (0, F(0, third), (B(0, first), F(0, fourth))) in seen


def test_what_it_sees():
    seen = []

    @dataclass(frozen=True)
    class Spy(BackwardFirst):
        def pick(self, ready, view, plan):
            i = super().pick(ready, view, plan)
            seen.append((str(i), dict(view.in_flight)))
            return i

    plan, costs = uniform(2, 2, f=1, b=1, ranks=(0, 0))
    simulate(Spy(), plan, costs)
    assert seen == [
        ("F0[0:1]", {0: 0, 1: 0}),
        ("F0[1:2]", {0: 1, 1: 0}),
        ("F1[0:1]", {0: 2, 1: 0}),
        ("B1[0:1]", {0: 2, 1: 1}),
        ("B0[0:1]", {0: 2, 1: 0}),
        ("F1[1:2]", {0: 1, 1: 0}),
        ("B1[1:2]", {0: 1, 1: 1}),
        ("B0[1:2]", {0: 1, 1: 0}),
        ("STEP0", {0: 0, 1: 0}),
        ("STEP1", {0: 0, 1: 0}),
    ]


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_batches(batches):
    """Check one weight version: the forward of a batch waits for the update of the previous batch."""
    plan, costs = uniform(3, 4, f=1, b=2, step=1)
    timeline = simulate(BackwardFirst(), plan, costs, batches=batches)
    assert timeline.makespan <= batches * ((4 + 3 - 1) * 3 + 1)
    verify(timeline.program(), replace(plan, batches=batches))
    for earlier, later in zip(range(batches), range(1, batches), strict=False):
        ends = {e.instruction: e for e in timeline.computations}
        assert ends[F(0, Span(0, 1), batch=later)].start >= ends[STEP(0, batch=earlier)].end


def test_more_versions_let_batches_overlap():
    plan, costs = uniform(4, 1, f=1, b=2)
    asynchronous = replace(plan, versions=(4, 3, 2, 1))
    one = simulate(BackwardFirst(), plan, costs, batches=20)
    many = simulate(BackwardFirst(), asynchronous, costs, batches=20)
    assert one.makespan == 20 * 4 * 3
    assert many.makespan == 3 * 3 + 20 * 3  # the pipeline stays full
    assert verify(many.program(), asynchronous).versions == (4, 3, 2, 1)


def test_memory_holds_forwards_back():
    plan, costs = uniform(3, 9, f=1, b=2, activation_bytes=10)
    eager = simulate(BackwardFirst(), plan, costs)
    assert eager.peak_bytes[0] > 30
    careful = simulate(BackwardFirst(), plan, costs, memory_limit=(30, 20, 10))
    assert careful.peak_bytes == (30, 20, 10)
    assert careful.makespan == (9 + 3 - 1) * 3  # 1F1B also needs only this memory
    assert simulate(careful.program(), plan, costs).makespan == careful.makespan


def test_memory_that_never_suffices():
    plan, costs = uniform(2, 2, f=1, b=2, activation_bytes=10)
    with pytest.raises(DeadlockError, match=r"rank 1 waits at F1\[0:1\] for 10 bytes: it holds 0 and may hold 9"):
        simulate(BackwardFirst(), plan, costs, memory_limit=(20, 9))


def test_a_policy_that_refuses():
    plan, costs = uniform(2, 4, f=1, b=2)
    with pytest.raises(DeadlockError, match=r"rank 0 may run F0\[0:1\], .* but scripted picks nothing.*rank 1 waits"):
        simulate(Scripted(((STEP(0),), (STEP(1),))), plan, costs)


def test_deadlock_message_draws_finished_operations():
    plan, costs = uniform(2, 2, f=1, b=2)
    a, b = plan.spans(Kind.F, 0)
    second = (F(1, a), B(1, a), STEP(1))  # the update comes before the other micro-batch
    with pytest.raises(DeadlockError, match="operations so far") as error:
        simulate(Scripted(((F(0, a), F(0, b), B(0, a)), second)), plan, costs)
    assert str(error.value).splitlines()[1:] == [
        "rank 0 | F0[0:1] F0[1:2]         B0[0:1]",
        "rank 1 |         F1[0:1] B1[0:1]",
    ]


def test_a_policy_that_picks_what_is_not_ready():
    @dataclass(frozen=True)
    class Wrong(BackwardFirst):
        def pick(self, ready, view, plan):
            return Instruction(Kind.B, 0)

    plan, costs = uniform(2, 2, f=1, b=2)
    with pytest.raises(ProgramError, match=r"backward_first picked B0\[0:0\] on rank 0"):
        simulate(Wrong(), plan, costs)


def test_several_jobs_in_flight():
    plan = replace(tiny_plan(2, 1), jobs=tiny_plan(2, 1).jobs * 6)
    costs = CostModel.uniform(2, 1e-9, 2e-9)
    timeline = simulate(BackwardFirst(limit=2), plan, costs)
    assert timeline.makespan == (6 + 2 - 1) * 3
    verify(timeline.program(), plan)


def test_work_is_conserved():
    """Check that backward first without limits is not slower than GPipe.

    It never idles while an instruction is ready.
    """
    plan, costs = uniform(4, 6, f=3, b=1, link=2)
    assert simulate(BackwardFirst(), plan, costs).makespan <= simulate(GPipe().program(plan), plan, costs).makespan
