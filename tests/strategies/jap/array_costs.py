"""An array's problem as a plan and costs, for the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.ir import Cut, InputError, Instruction, Kind, Plan
from lightning_pipes.strategies.jap.problem import ArrayProblem
from tests.free_costs import FreeCosts


@dataclass(frozen=True, eq=False)
class ArrayCosts(FreeCosts):
    """The costs of an array's blocks for the simulator, `cost.Costs`.

    A transfer is latency: it occupies no link, as in the paper. A backward contains its recomputation, a STEP is update
    and switch. After a forward the switch takes the stage too, while the message is on its way already.

    Attributes:
        problem: the times; jobs are cut into one span each.
        stays: (job, stage) where the job's backward follows its forward, so that no other one is switched to.

    Raises:
        InputError: backwards begin before their gradients are there.
    """

    problem: ArrayProblem
    stays: frozenset[tuple[int, int]] = frozenset()
    overhead_ns: int = 0

    def __post_init__(self) -> None:
        if self.problem.early_recompute:
            raise InputError("a simulated backward begins when its gradient is there; leave early_recompute out")

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Nanoseconds of a computation."""
        p, at = self.problem, (i.job, i.stage)
        if i.kind is Kind.F:
            return int(p.forward[at] + p.switch[at] * (at not in self.stays))
        if i.kind is Kind.B:
            return int(p.recompute[at] + p.backward[at])
        return int(p.update[at] + p.switch[at])

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Nothing, and nanoseconds until a message is there; counted from the end of the switch after a forward."""
        p, at = self.problem, (i.job, i.stage)
        sent = p.switch[at] * (at not in self.stays)
        return 0, int(p.transfer[at] - sent) if i.kind is Kind.SF else int(p.transfer_back[at])


def plan_of(problem: ArrayProblem) -> Plan:
    """The problem's jobs, a sample each."""
    return Plan(tuple(range(problem.stages)), (Cut.even(1, 1, problem.stages),) * problem.jobs)
