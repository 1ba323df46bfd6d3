"""1F1B with a longer warm-up that tapers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import InputError, Plan, Program, Schedule, check_fields
from lightning_pipes.strategies.per_link import warmed_up


@dataclass(frozen=True)
class Deep(Schedule):
    """1F1B with `slack` additional micro-batches on the first stage, fewer on every later stage, and none on the last.

    Stage s of p holds p - s micro-batches, plus slack (p - 1 - s) / (p - 1), rounded up. The additional micro-batches
    hide slower links, as a larger k of kFkB does. However, kFkB adds p micro-batches at a time, and it also adds them
    on the last stage, where they hide nothing.

    On equal links whose messages take c, full speed requires a slack of 2 (p - 1) c / (f + b), sometimes up to three
    more, and at least one micro-batch for each link, however fast the links are. A step then takes (m + p - 1) (f + b)
    + 2 (p - 1) c, and no order is faster. With `slack` = p - 1, the schedule is also known as eager 1F1B.

    Raises:
        PlanError: slack is negative, a rank has several stages, the backward spans differ from the forward spans, or
            the plan has several jobs, several batches or a split backward.
    """

    slack: int = 2
    name: ClassVar[str] = "deep"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slack < 0:
            raise InputError(f"{self.name}: slack counts micro-batches from 0, got {self.slack}; 0 is 1F1B")

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[Deep]:
        """Return the variants that a planner tries: one and two additional micro-batches for each link."""
        return [cls(times * (n_ranks - 1)) for times in (1, 2) if 1 < n_ranks < microbatches]

    # Drawn by `step(Deep(2), link=1)`:
    # rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
    # rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
    # rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        return warmed_up(plan, self.name, taper_slack(plan.n_stages, self.slack))


def taper_slack(stages: int, slack: int) -> tuple[int, ...]:
    """Return the number of micro-batches that each stage may hold.

    These are the micro-batches of 1F1B, plus `slack` on the first stage and none on the last. Between them, the
    additional number decreases in even steps and is rounded up.
    """
    later = [stages - 1 - s for s in range(stages)]
    return tuple(n + 1 + -(-slack * n // max(1, stages - 1)) for n in later)
