"""1F1B that never flushes, on two versions of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Kind, Plan, PlanError, Program, Schedule
from lightning_pipes.strategies.pipedream import endless_1f1b


@dataclass(frozen=True)
class PipeDream2BW(Schedule):
    """PipeDream with double-buffered weights (Narayanan et al. 2021, arXiv:2006.09503, S3.1): the gradients of the m
    micro-batches of a batch are summed before one update, and every batch reads, on all stages, the weights without the
    update of the batch before it: W(t + 1) = W(t) - lr dL(W(t - 1)).

    So every stage keeps two versions and misses one update, for m of at least p - 1 (the paper asks for p). On the last
    stage, which would be up to date, the update waits for the next batch's first forward.

    Raises:
        PlanError: fewer than p - 1 micro-batches, a rank has several stages, spans differ between stages or directions,
            backward is split, or there are several jobs.
    """

    name: ClassVar[str] = "pipedream_2bw"
    flushes: ClassVar[bool] = False

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        """Return the weight versions that live on each stage."""
        return (2,) * plan.n_stages

    # Drawn by `step(PipeDream2BW(), microbatches=2, batches=3, scale=3)`:
    # rank 0 |0.00.11.0............0.0===1.10.1===2.01.0===2.11.1===...2.0===...2.1===| bubble 25.0%
    # rank 1 |...0.00.1......0.0===1.00.1===1.11.0===2.01.1===2.12.0===...2.1===......| bubble 25.0%
    # rank 2 |......0.00.0===0.10.1===1.01.0===1.11.1===2.02.0===2.12.1===............| bubble 25.0%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        m, least = len(plan.spans(Kind.F, 0)), plan.n_stages - 1
        if m < least:
            raise PlanError(
                f"{self.name} needs at least {least} micro-batches for {plan.n_stages} stages, or two versions of the "
                f"weights do not do; the plan has {m}. Use more micro-batches, or schedule 'pipedream'"
            )
        return endless_1f1b(plan, self.name, late_steps=True)
