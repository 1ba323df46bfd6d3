"""Order 1F1B with weight gradients delayed until a rank would idle."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    F,
    I,
    InputError,
    Instruction,
    Kind,
    Plan,
    Program,
    Schedule,
    W,
    check_fields,
    check_one_batch,
    check_one_stage_a_rank,
)
from lightning_pipes.strategies.per_link import forwards_ahead
from lightning_pipes.strategies.ready import check_limits, largest_rows


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241, S2.3): 1F1B with backward in two parts. The input gradients (I) go back
    at once; on stage s the weight gradients (W) stay s micro-batches behind and end in the time in which 1F1B idles.

    Every stage holds at most p micro-batches between F and W, as many as the first stage of 1F1B. On equal stages, free
    links and m >= p micro-batches the bubble is (p - 1) max(f + b_I - w, f, b_I) for a forward of f, input gradients of
    b_I and weight gradients of w. No order with that memory is faster: the last stage idles for (p - 1) f until its
    first F, the first one for (p - 1) b_I after its p-th, and from the last stage's last I on, with p of its W left,
    b_I has to pass p - 1 stages and w to follow. The paper has the case of w at most f and b_I.

    `extra[s]` more micro-batches are under way between the stages s and s + 1: stage s runs p - s forwards before its
    first I, as 1F1B does, and as many more as all links after it have extra. Every stage then holds as many as the
    first one has ahead; a later stage, with fewer ahead, reaches that by delaying its W. One more for each link is the
    paper's ZB-H2, which holds 2 p - 1. More over slow links hides them, as in `PerLink`. What is still to be done when
    the last gradient goes back are W, which wait for no message.

    Where there is not that much room, or more, `limits[s]` are the samples that stage s may hold between F and W: fewer
    forwards ahead where they are too many, and W that stay further behind where more fit.

    Raises:
        PlanError: extra is negative, or not one number for each link; limits are not one for each stage, or too small
            for one micro-batch; the plan does not split its backward, a rank has several stages, backward spans differ
            from forward spans, or there is more than one batch of one job to order.
    """

    extra: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    name: ClassVar[str] = "zero_bubble"

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.extra, default=0) < 0:
            raise InputError(f"{self.name}: extra counts micro-batches from 0, got {self.extra}")
        if min(self.limits, default=1) < 1:
            raise InputError(f"{self.name}: limits count samples from 1, got {self.limits}")

    @property
    def splits_backward(self) -> bool:
        return True

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[ZeroBubble]:
        """Return the variants that a planner tries: ZB-H1 and ZB-H2."""
        return [cls(), *([cls((1,) * (n_ranks - 1))] if 1 < n_ranks < microbatches else [])]

    # Drawn by `step(ZeroBubble((1, 1)), link=1)`:
    # rank 0 |0-1-2-3-..........0+0~1+1~2+2~3+3~| bubble 29.4%
    # rank 1 |....0-1-2-....0+3-1+..2+0~3+1~2~3~| bubble 29.4%
    # rank 2 |........0-0+1-1+2-2+3-3+0~1~2~3~..| bubble 29.4%
    #         - forward  + input gradients  ~ weight gradients  . idle
    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name, split_backward=True)
        check_one_stage_a_rank(plan, self.name)
        ahead = forwards_ahead(plan, self.name, self.extra)
        held = (ahead[0],) * plan.n_stages
        if self.limits:
            check_limits(plan, self.name, self.limits)
            held = tuple(limit // rows for limit, rows in zip(self.limits, largest_rows(plan), strict=True))
            # A stage with more ahead than one before it would wait for what that one sends after its first I.
            ahead = tuple(accumulate(map(min, ahead, held), min))
        return Program(tuple(_order(plan, stage, ahead[stage], held[stage]) for (stage,) in plan.stages))


# Drawn by `step(ZeroBubble())`:
# rank 0 |0-1-2-....0+0~3-1+1~2+2~3+3~| bubble 14.3%
# rank 1 |..0-1-..0+2-1+0~3-2+1~3+2~3~| bubble 14.3%
# rank 2 |....0-0+1-1+2-2+0~3-3+1~2~3~| bubble 14.3%
#         - forward  + input gradients  ~ weight gradients  . idle
def _order(plan: Plan, stage: int, ahead: int, held: int) -> tuple[Instruction, ...]:
    """Return the number of forwards before the first I; W as far behind as `held` micro-batches allow."""
    spans = plan.spans(Kind.F, stage)
    behind = held - ahead
    row = [F(stage, span) for span in spans[:ahead]]
    for n, span in enumerate(spans):
        row.append(I(stage, span))
        if n >= behind:
            row.append(W(stage, spans[n - behind]))
        row += [F(stage, later) for later in spans[ahead + n : ahead + n + 1]]
    row += [W(stage, span) for span in spans[max(0, len(spans) - behind) :]]
    return (*row, STEP(stage))
