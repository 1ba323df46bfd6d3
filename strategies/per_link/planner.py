"""How much extra each link needs, from what things cost."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import ceil

from lightning_pipes.cost import Costs
from lightning_pipes.ir import B, F, I, Instruction, Kind, Plan


def extra_for(plan: Plan, costs: Costs, times: float = 1.0) -> tuple[int, ...]:
    """Return the extra of `PerLink` that hides steady links: micro-batches that a round trip over each of them costs.

    While messages are away over a link and back, the pipeline needs one more micro-batch for each pace: the time that
    its busiest stage or link works for one. What links need is added up from the last one on before it is rounded, so
    rounding costs one micro-batch at most. With equal stages and links the first stage then holds
    p + 2 (p - 1) c / (f + b), which is necessary for full speed; sometimes a few more are of use. Where backward is
    split a stage's pace is that of F and I, for W can wait until no more messages do.

    Args:
        plan: its first micro-batch stands for all: none is larger.
        times: so many times what is necessary, before it is rounded.
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
    """Return nanoseconds that a message occupies its link, and of latency."""
    edge = stage if kind is Kind.SF else stage - 1
    span = plan.spans(kind, stage)[0]
    return costs.transfer_ns(Instruction(kind, stage, span=span), plan) if plan.is_remote_edge(edge) else (0, 0)


def _works(plan: Plan, costs: Costs, stage: int) -> int:
    """Return nanoseconds that a stage works for a micro-batch until its gradient can be sent on."""
    span = plan.spans(Kind.F, stage)[0]
    back = I(stage, span) if plan.split_backward else B(stage, span)
    return costs.duration_ns(F(stage, span), plan) + costs.duration_ns(back, plan) + 2 * costs.overhead_ns
