"""1F1B with weight gradients that are delayed until a rank would idle."""

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
    """1F1B with a backward in two parts, and weight gradients when 1F1B would idle (ZB-H1, Qi et al. 2023,
    arXiv:2401.10241, S2.3).

    The input gradients (I) are computed and sent back immediately. On stage s, the weight gradients (W) follow s
    micro-batches later, so the last of them run in the time in which 1F1B idles. Every stage holds at most p
    micro-batches between F and W, as many as the first stage of 1F1B.

    Let a forward take f, the input gradients b_I and the weight gradients w. On equal stages, with free links and m >=
    p micro-batches, the bubble is (p - 1) max(f + b_I - w, f, b_I). No order with the same memory is faster, for three
    reasons. The last stage idles for (p - 1) f before its first F. The first stage idles for (p - 1) b_I after its p-th
    F. Finally, when the last stage ends its last I, at most p of its W can be left, while the gradient needs b_I on
    each of p - 1 stages before the last W can run. The paper treats the case in which w is at most f and at most b_I.

    With `extra[s]`, this number of additional micro-batches is in flight between the stages s and s + 1. Stage s then
    runs p - s forwards before its first I, as in 1F1B, plus the sum of `extra` over all later links. Every stage holds
    as many micro-batches as the first stage runs ahead. A later stage, which runs fewer forwards ahead, reaches this
    number by delaying its W. One additional micro-batch for each link is ZB-H2 of the paper, which holds 2 p - 1
    micro-batches. Additional micro-batches over slow links hide these links, as in `PerLink`. Only W is left when the
    last gradient returns, and W does not wait for any message.

    If a stage has room for a smaller or a larger number of micro-batches, `limits[s]` sets the number of samples that
    stage s may hold between F and W. A lower limit reduces the number of forwards ahead, and a higher limit delays W
    further.

    Raises:
        PlanError: `extra` is negative or does not have one number for each link; `limits` does not have one number for
            each stage, or a limit is too small for one micro-batch; the plan does not split the backward; a rank has
            several stages; the backward spans differ from the forward spans; or the plan has several jobs or several
            batches.
    """

    extra: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    name: ClassVar[str] = "zero_bubble"

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.extra, default=0) < 0:
            raise InputError(f"{self.name}: extra counts micro-batches from 0, got {self.extra}")
        if min(self.limits, default=1) < 1:
            raise InputError(f"{self.name}: every number in limits must be at least 1, got {self.limits}")

    @property
    def splits_backward(self) -> bool:
        return True

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[ZeroBubble]:
        """Return the variants that a planner tries: ZB-H1, and ZB-H2 if there are more micro-batches than ranks."""
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
            # A stage that runs more forwards ahead than an earlier stage would wait for a micro-batch that the earlier
            # stage sends only after its own first I.
            ahead = tuple(accumulate(map(min, ahead, held), min))
        return Program(tuple(_order(plan, stage, ahead[stage], held[stage]) for (stage,) in plan.stages))


# Drawn by `step(ZeroBubble())`:
# rank 0 |0-1-2-....0+0~3-1+1~2+2~3+3~| bubble 14.3%
# rank 1 |..0-1-..0+2-1+0~3-2+1~3+2~3~| bubble 14.3%
# rank 2 |....0-0+1-1+2-2+0~3-3+1~2~3~| bubble 14.3%
#         - forward  + input gradients  ~ weight gradients  . idle
def _order(plan: Plan, stage: int, ahead: int, held: int) -> tuple[Instruction, ...]:
    """Return the row of a stage: `ahead` forwards before the first I, and W as late as `held` micro-batches allow."""
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
