from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, DeadlockError, F, Plan, Program, verify
from lightning_pipes.sim import simulate
from lightning_pipes.testing.generators import tiny_plan

COSTS = CostModel.uniform(2, forward=1.0, backward=2.0)


@pytest.mark.parametrize("finds", [verify, lambda program, plan: simulate(program, plan, COSTS)])
def test_a_deadlock_is_drawn(finds: Callable[[Program, Plan], object]) -> None:
    plan = tiny_plan(stages=2, microbatches=2)
    a, b = plan.jobs[0].forward[0]
    wrong = Program(((F(0, a), B(0, a), F(0, b), B(0, b), STEP(0)), (F(1, a), F(1, b), B(1, a), B(1, b), STEP(1))))
    with pytest.raises(DeadlockError) as error:
        finds(wrong, plan)
    head, *rows = str(error.value).splitlines()
    assert head.startswith("the ranks wait for each other: rank 0 waits at ")
    assert rows == ["rank 0 | F0[0:1]", "rank 1 |         F1[0:1]"]


def test_a_long_one_shows_the_end() -> None:
    plan = tiny_plan(stages=2, microbatches=20)
    spans = plan.jobs[0].forward[0]
    first = (*(F(0, s) for s in spans), *(B(0, s) for s in spans), STEP(0))
    second = (*(F(1, s) for s in spans), B(1, spans[0]), STEP(1), *(B(1, s) for s in spans[1:]))
    with pytest.raises(DeadlockError, match=r"(?s)rank 1 waits at STEP1 .*\nrank 1 \| \.\.\. .*B1\[0:1\]$"):
        verify(Program((first, second)), plan)
