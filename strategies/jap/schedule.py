"""The schedule "jap": batches of several jobs without rounds, in the order of `stream_jobs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Plan, PlanError, Program, Schedule, check_one_stage_a_rank
from lightning_pipes.strategies.jap.stream import Job, stream_jobs


@dataclass(frozen=True)
class JAP(Schedule):
    """Jobs that share a pipeline without rounds (ArrayPipe, without its barrier).

    The order is the order of `stream_jobs` if all jobs are resident. The batches of a job run one after another. The
    schedule assumes that times are proportional to the number of samples, and that a backward takes twice as long as a
    forward. For measured times, call `stream_jobs`. For one job with equal micro-batches, the order is 1F1B without a
    limit on the number of micro-batches that a stage holds.

    Raises:
        PlanError: a rank has several stages, spans differ between stages or directions, or the backward is split.
    """

    name: ClassVar[str] = "jap"

    # Drawn by `jobs(JAP(), rows=(1, 1, 1))`:
    # rank 0 |a0b0c0..........a0==a1b0==b1c0==c1......a1==b1==..c1==| bubble 33.3%
    # rank 1 |..a0b0c0....a0==..b0==c0==a1b1....c1a1==b1==..c1==....| bubble 33.3%
    # rank 2 |....a0b0a0==c0b0==c0==......a1b1a1==b1==c1c1==........| bubble 33.3%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        check_one_stage_a_rank(plan, self.name)
        if plan.split_backward:
            raise PlanError(f"{self.name} orders full backwards (B); the plan has split_backward=True")
        costs = CostModel.uniform(plan.n_stages, 1e-3, 2e-3, rows=1)
        rows = stream_jobs([Job(cut, plan.batches) for cut in plan.jobs], costs).program.head
        return Program(tuple(rows[stage] for (stage,) in plan.stages))
