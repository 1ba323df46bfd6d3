"""1F1B with a longer warm-up that tapers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import InputError, Plan, Program, Schedule, check_fields
from lightning_pipes.strategies.per_link import warmed_up


@dataclass(frozen=True)
class Deep(Schedule):
    """Order 1F1B with `slack` extra micro-batches on the first stage, and fewer on every later one, down to none.

    Stage s of p holds p - s micro-batches and slack (p - 1 - s) / (p - 1) more, rounded up. More of them hide slower
    links, as a larger k of kFkB does, which buys them p at a time and keeps as many more on the last stage, where they
    hide nothing. Equal links whose messages take c need slack 2 (p - 1) c / (f + b) for full speed, sometimes up to
    three more, and one for each link however fast; a step then takes (m + p - 1) (f + b) + 2 (p - 1) c, the least that
    any order does. `slack` = p - 1 is also known as eager 1F1B.

    Raises:
        InputError: slack is negative, a rank has several stages, backward spans differ from forward spans, or there is
            more than one batch of one job to order.
    """

    slack: int = 2
    name: ClassVar[str] = "deep"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slack < 0:
            raise InputError(f"{self.name}: slack counts micro-batches from 0, got {self.slack}; 0 is 1F1B")

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[Deep]:
        """Return the variants that a planner tries: one micro-batch more for each link, and two."""
        return [cls(times * (n_ranks - 1)) for times in (1, 2) if 1 < n_ranks < microbatches]

    # Drawn by `step(Deep(2), link=1)`:
    # rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
    # rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
    # rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        return warmed_up(plan, self.name, taper_slack(plan.n_stages, self.slack))


def taper_slack(stages: int, slack: int) -> tuple[int, ...]:
    """Return the micro-batches that each stage may hold: 1F1B's, and `slack` more on the first one, none on the last
    one, in even steps between, rounded up."""
    later = [stages - 1 - s for s in range(stages)]
    return tuple(n + 1 + -(-slack * n // max(1, stages - 1)) for n in later)
