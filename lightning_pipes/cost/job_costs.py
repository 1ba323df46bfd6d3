"""Costs of jobs that share a pipeline, each of which has its own layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_pipes.cost.links import Link
from lightning_pipes.cost.model import CostModel
from lightning_pipes.ir import InputError, Instruction, Plan


@dataclass(frozen=True)
class JobCosts:
    """The costs of unlike jobs, which have the same stages on the same ranks, and nothing else in common.

    Each job is priced by its own plan and its own costs, as if it were alone.

    Attributes:
        plans: the plan of each job, which contains one job.
        models: the seconds and bytes of the stages of each job. The links are the links of the first job.

    Raises:
        InputError: there are no plans, their number differs from the number of models, a plan has several jobs, or the
            plans have different ranks.
    """

    plans: tuple[Plan, ...]
    models: tuple[CostModel, ...]

    def __post_init__(self) -> None:
        ranks = {plan.ranks for plan in self.plans}
        if len(ranks) != 1 or len(self.models) != len(self.plans) or any(len(plan.jobs) > 1 for plan in self.plans):
            raise InputError(
                f"the costs of jobs need one plan and one cost model for each job, with equal ranks; got "
                f"{len(self.plans)} plans of {[len(plan.jobs) for plan in self.plans]} jobs on the ranks "
                f"{sorted(ranks)}, and {len(self.models)} cost models"
            )

    @cached_property
    def plan(self) -> Plan:
        """The plan of all jobs together. It has no layers, because each job has its own."""
        return Plan(self.plans[0].ranks, tuple(plan.jobs[0] for plan in self.plans))

    @cached_property
    def overhead_ns(self) -> int:
        """The smallest overhead of any job in nanoseconds. The durations of other jobs include the difference."""
        return min(model.overhead_ns for model in self.models)

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i` according to the plan and the costs of its job."""
        model = self.models[i.job]
        return model.duration_ns(i._replace(job=0), self.plans[i.job]) + model.overhead_ns - self.overhead_ns

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and its latency."""
        return self.models[i.job].transfer_ns(i._replace(job=0), self.plans[i.job])

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`."""
        return self.models[0].link_between(source, target)

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the bytes that the computation `i` allocates when it starts and frees when it ends."""
        return self.models[i.job].memory_change(i._replace(job=0), self.plans[i.job])

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds all the time for all jobs."""
        return sum(model.resident_bytes(rank, own) for own, model in zip(self.plans, self.models, strict=True))
