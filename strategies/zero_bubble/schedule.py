"""1F1B whose weight gradients wait until a rank would idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    F,
    I,
    Instruction,
    Kind,
    Plan,
    Program,
    Schedule,
    W,
    check_one_batch,
    check_one_stage_a_rank,
)


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241, S2.3): 1F1B with backward in two parts. The input gradients (I) go back
    at once; on stage s the weight gradients (W) stay s micro-batches behind and end in the time in which 1F1B idles.

    Every stage holds at most p micro-batches between F and W, as many as the first stage of 1F1B. On equal stages, free
    links and m >= p micro-batches the bubble is (p - 1) max(f + b_I - w, f, b_I) for a forward of f, input gradients of
    b_I and weight gradients of w. No order with that memory is faster: the last stage idles for (p - 1) f until its
    first F, the first one for (p - 1) b_I after its p-th, and from the last stage's last I on, with p of its W left,
    b_I has to pass p - 1 stages and w to follow. The paper has the case of w at most f and b_I.

    Raises:
        PlanError: the plan does not split its backward, a rank has several stages, backward spans differ from forward
            spans, or there is more than one batch of one job to order.
    """

    name: ClassVar[str] = "zero_bubble"
    splits_backward: ClassVar[bool] = True

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name, split_backward=True)
        check_one_stage_a_rank(plan, self.name)
        return Program(tuple(self._order(plan, stage) for (stage,) in plan.stages))

    # Drawn by `step(ZeroBubble())`:
    # rank 0 |0-1-2-....0+0~3-1+1~2+2~3+3~| bubble 14.3%
    # rank 1 |..0-1-..0+2-1+0~3-2+1~3+2~3~| bubble 14.3%
    # rank 2 |....0-0+1-1+2-2+0~3-3+1~2~3~| bubble 14.3%
    #         - forward  + input gradients  ~ weight gradients  . idle
    def _order(self, plan: Plan, stage: int) -> tuple[Instruction, ...]:
        spans = plan.spans(Kind.F, stage)
        ahead = plan.n_stages - stage  # forwards before the first I
        row = [F(stage, span) for span in spans[:ahead]]
        for n, span in enumerate(spans):
            row.append(I(stage, span))
            if n >= stage:
                row.append(W(stage, spans[n - stage]))
            row += [F(stage, next_span) for next_span in spans[n + ahead : n + ahead + 1]]
        row += [W(stage, span) for span in spans[max(0, len(spans) - stage) :]]
        return (*row, STEP(stage))
