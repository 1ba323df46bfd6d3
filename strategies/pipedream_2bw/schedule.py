"""The schedule "pipedream_2bw": 1F1B that never flushes, with two versions of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Kind, Plan, PlanError, Program, Schedule
from lightning_pipes.strategies.pipedream import endless_1f1b


@dataclass(frozen=True)
class PipeDream2BW(Schedule):
    """PipeDream with double-buffered weights (Narayanan et al. 2021, arXiv:2006.09503, S3.1).

    The gradients of the m micro-batches of a batch are summed before one update. On all stages, every batch reads the
    weights that lack the update of the previous batch: W(t + 1) = W(t) - lr dL(W(t - 1)). Every stage therefore keeps
    two versions and misses one update, if m is at least p - 1 (the paper requires p). The last stage would not miss an
    update, so its update is delayed until the first forward of the next batch.

    Raises:
        PlanError: the plan has fewer than p - 1 micro-batches, a rank has several stages, spans differ between stages
            or directions, the backward is split, or the plan has several jobs.
    """

    name: ClassVar[str] = "pipedream_2bw"
    flushes: ClassVar[bool] = False

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of weight versions that each stage keeps, which is two."""
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
                f"{self.name} needs at least {least} micro-batches for {plan.n_stages} stages, because two weight "
                f"versions are not enough with fewer; the plan has {m}. Use more micro-batches, or schedule "
                "'pipedream'"
            )
        return endless_1f1b(plan, self.name, late_steps=True)
