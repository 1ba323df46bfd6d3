"""1F1B with a longer warm-up over slow links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import ClassVar

from lightning_pipes.cost import Costs
from lightning_pipes.ir import (
    STEP,
    B,
    F,
    I,
    InputError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    Schedule,
    check_fields,
    check_one_batch,
    check_one_stage_a_rank,
)


@dataclass(frozen=True)
class PerLink(Schedule):
    """1F1B with more micro-batches in flight over slow links: `extra[s]` more between the stages s and s + 1.

    Stage s of p runs p - s forwards before its first backward, as in 1F1B, plus the sum of `extra` over all later
    links. It holds at most this number of micro-batches. A larger k of kFkB adds memory for every link, but `extra`
    adds memory only for the links that need it. With one slow link in the middle, the same step time requires about
    half the activations. Without `extra`, the schedule is 1F1B.

    Raises:
        PlanError: `extra` is negative or does not have one number for each link, a rank has several stages, the
            backward spans differ from the forward spans, or the plan has several jobs, several batches or a split
            backward.
    """

    extra: tuple[int, ...] = ()
    name: ClassVar[str] = "per_link"

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.extra, default=0) < 0:
            raise InputError(f"{self.name}: extra counts micro-batches from 0, got {self.extra}")

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[PerLink]:
        """Return an empty list, because a planner does not know which links are slow before it has costs.

        `extra_for` computes `extra` from costs.
        """
        return []

    def program(self, plan: Plan) -> Program:
        return warmed_up(plan, self.name, forwards_ahead(plan, self.name, self.extra))


def forwards_ahead(plan: Plan, name: str, extra: Sequence[int]) -> tuple[int, ...]:
    """Return the number of forwards that each stage runs before its first backward.

    This is the number of 1F1B, plus the sum of `extra` over all later links.

    Args:
        plan: the plan of the stages.
        name: the name of the schedule, used in the error message.
        extra: additional micro-batches for each link; empty for none.

    Raises:
        PlanError: `extra` does not have one number for each link.
    """
    n = plan.n_stages
    extra = extra or (0,) * (n - 1)
    if len(extra) != n - 1:
        raise PlanError(f"{name}: extra {tuple(extra)} is for {len(extra)} links, the plan has {n - 1}")
    return tuple(n - s + sum(extra[s:]) for s in range(n))


def warmed_up(plan: Plan, name: str, ahead: Sequence[int]) -> Program:
    """Return a program with `ahead[s]` forwards on stage s, followed by one backward and one forward in turn.

    Stage s holds at most `ahead[s]` micro-batches. `ahead` must not increase from stage to stage. Otherwise, a stage
    would wait for micro-batches that the previous stage sends only after its own first backward.

    Raises:
        PlanError: see `PerLink`.
    """
    check_one_batch(plan, name)
    check_one_stage_a_rank(plan, name)
    return Program(tuple(_order(plan, stage, ahead[stage]) for (stage,) in plan.stages))


# Drawn by `step(PerLink((1, 0)), link=1)`:
# rank 0 |0-1-2-3-..............0===..1===......2===..3===| bubble 50.0%
# rank 1 |....0-1-........0===2-1===3-....2===..3===......| bubble 50.0%
# rank 2 |........0-0===1-1===....2-2===3-3===............| bubble 50.0%
#         - forward  = backward  . idle
def _order(plan: Plan, stage: int, ahead: int) -> tuple[Instruction, ...]:
    spans = plan.spans(Kind.F, stage)
    row = [F(stage, span) for span in spans[:ahead]]
    for n, span in enumerate(spans):
        row.append(B(stage, span))
        row += [F(stage, later) for later in spans[ahead + n : ahead + n + 1]]
    return (*row, STEP(stage))


def extra_for(plan: Plan, costs: Costs, times: float = 1.0) -> tuple[int, ...]:
    """Return the `extra` of `PerLink` that hides steady links, as one number of micro-batches for each link.

    During the round trip of a message over a link, the pipeline needs additional micro-batches: the duration of the
    round trip divided by the pace. The pace is the time that the busiest stage or link needs for one micro-batch. The
    needs of the links are summed from the last link on before they are rounded up, so that rounding adds at most one
    micro-batch in total. With equal stages and links, the first stage then holds p + 2 (p - 1) c / (f + b)
    micro-batches. Full speed requires this number, and sometimes a few more are useful. If the backward is split, the
    pace of a stage is the duration of F and I, because W can be delayed until no messages are left to wait for.

    Args:
        plan: the plan of the stages. Its first micro-batch stands for all, because no other micro-batch is larger.
        costs: the costs of its stages and links.
        times: a factor for the necessary numbers, which is applied before rounding.
    """
    if plan.n_stages == 1:
        return ()
    there = [_transfer(plan, costs, Kind.SF, s) for s in range(plan.n_stages - 1)]
    back = [_transfer(plan, costs, Kind.SB, s + 1) for s in range(plan.n_stages - 1)]
    trips = [sum(a) + sum(b) for a, b in zip(there, back, strict=True)]
    pace = max(1, *(_works(plan, costs, s) for s in range(plan.n_stages)), *(busy for busy, _ in (*there, *back)))
    needed = [0, *(ceil(times * total / pace) for total in accumulate(reversed(trips)))]
    return tuple(more - less for less, more in pairwise(needed))[::-1]


def _transfer(plan: Plan, costs: Costs, kind: Kind, stage: int) -> tuple[int, int]:
    """Return the nanoseconds for which a message occupies its link, and its latency in nanoseconds."""
    edge = stage if kind is Kind.SF else stage - 1
    span = plan.spans(kind, stage)[0]
    return costs.transfer_ns(Instruction(kind, stage, span=span), plan) if plan.is_remote_edge(edge) else (0, 0)


def _works(plan: Plan, costs: Costs, stage: int) -> int:
    """Return the nanoseconds that a stage computes for a micro-batch until its gradient can be sent."""
    span = plan.spans(Kind.F, stage)[0]
    back = I(stage, span) if plan.split_backward else B(stage, span)
    return costs.duration_ns(F(stage, span), plan) + costs.duration_ns(back, plan) + 2 * costs.overhead_ns
