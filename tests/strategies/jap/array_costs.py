"""The problem of an array as a plan and costs for the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.ir import Cut, InputError, Instruction, Kind, Plan
from lightning_pipes.strategies.jap.problem import ArrayProblem
from tests.free_costs import FreeCosts


@dataclass(frozen=True, eq=False)
class ArrayCosts(FreeCosts):
    """The costs of an array's blocks for the simulator (see `cost.Costs`).

    A transfer is pure latency and occupies no link, as in the paper. A backward includes its recomputation, and a STEP
    consists of the update and the switch. The switch after a forward also occupies the stage, but the message is sent
    before it.

    Attributes:
        problem: times of the blocks; every job is cut into one span.
        stays: pairs (job, stage) in which the backward of the job directly follows its forward, so that the stage does
            not switch to another job.

    Raises:
        InputError: if a backward begins before its gradient has arrived.
    """

    problem: ArrayProblem
    stays: frozenset[tuple[int, int]] = frozenset()
    overhead_ns: int = 0

    def __post_init__(self) -> None:
        if self.problem.early_recompute:
            raise InputError("a simulated backward begins when its gradient is there; leave early_recompute out")

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of a computation."""
        p, at = self.problem, (i.job, i.stage)
        if i.kind is Kind.F:
            return int(p.forward[at] + p.switch[at] * (at not in self.stays))
        if i.kind is Kind.B:
            return int(p.recompute[at] + p.backward[at])
        return int(p.update[at] + p.switch[at])

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that a message occupies the link, which are 0, and the nanoseconds until it arrives.

        The arrival of an activation is counted from the end of the switch after the forward.
        """
        p, at = self.problem, (i.job, i.stage)
        sent = p.switch[at] * (at not in self.stays)
        return 0, int(p.transfer[at] - sent) if i.kind is Kind.SF else int(p.transfer_back[at])


def plan_of(problem: ArrayProblem) -> Plan:
    """Return a plan with the jobs of the problem, in which a batch has one sample."""
    return Plan(tuple(range(problem.stages)), (Cut.even(1, 1, problem.stages),) * problem.jobs)
