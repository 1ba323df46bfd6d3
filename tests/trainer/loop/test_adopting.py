"""Tests of changing the schedule, which takes effect with the next batch."""

from __future__ import annotations

import pytest

from lightning_pipes.ir import Program, ProgramError, Schedule, Span
from lightning_pipes.planning.planner import Problem
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.trainer.plan.plans import Plans


class Wrong(Schedule):
    """A schedule that leaves out the work of the last stage."""

    name = "wrong"

    def program(self, plan):
        return Program((KFKB(1).program(plan).head[0], ()))


def test_verified_programs_are_not_verified_again():
    plans = Plans(Problem(KFKB(1), 2, 1, 4, layers=(Span(0, 1), Span(1, 2))))
    plan, _ = plans.for_rows(8)
    found = plans.for_schedule(Wrong(), 4, verified=8)
    assert found.for_rows(8) == (plan, Wrong().program(plan))
    with pytest.raises(ProgramError):
        found.for_rows(6)  # a batch of another size has another order
    with pytest.raises(ProgramError):
        plans.for_schedule(Wrong(), 4)
