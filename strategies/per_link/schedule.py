"""1F1B with a longer warm-up where links are slow."""

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
    """1F1B that has more micro-batches under way over slow links: `extra[s]` more between the stages s and s + 1.

    Stage s of p runs p - s forwards before its first backward, as 1F1B does, and as many more as all links after it
    have extra; so many micro-batches it holds at most. A larger k of kFkB pays for every link alike, extra only for
    those that need it: with one slow link in the middle the same step time takes about half the activations. Without
    extra it is 1F1B.

    Raises:
        PlanError: extra is negative, or not one number for each link of the plan; a rank has several stages, backward
            spans differ from forward spans, or there is more than one batch of one job to order.
    """

    extra: tuple[int, ...] = ()
    name: ClassVar[str] = "per_link"

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.extra, default=0) < 0:
            raise InputError(f"{self.name}: extra counts micro-batches from 0, got {self.extra}")

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[PerLink]:
        """None: which links are slow is not known from numbers of ranks; see `extra_for`."""
        return []

    def program(self, plan: Plan) -> Program:
        return warmed_up(plan, self.name, forwards_ahead(plan, self.name, self.extra))


def forwards_ahead(plan: Plan, name: str, extra: Sequence[int]) -> tuple[int, ...]:
    """Return the forwards of each stage before its first backward: 1F1B's, and the `extra` of all links after it.

    Raises:
        PlanError: extra is not one number for each link; says so of the schedule of that name.
    """
    n = plan.n_stages
    extra = extra or (0,) * (n - 1)
    if len(extra) != n - 1:
        raise PlanError(f"{name}: extra {tuple(extra)} is for {len(extra)} links, the plan has {n - 1}")
    return tuple(n - s + sum(extra[s:]) for s in range(n))


def warmed_up(plan: Plan, name: str, ahead: Sequence[int]) -> Program:
    """Return a program of one backward, one forward in turn after `ahead[s]` forwards on stage s, which holds that many
    at most.

    A stage that has more ahead than the one before it would wait for what is not sent before its own backward: `ahead`
    must not rise from stage to stage.

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
