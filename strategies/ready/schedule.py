"""A policy that runs what is ready, under a limit of samples held by each stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lightning_pipes.ir import InputError, Kind, Plan, PlanError, Rule, RulePolicy, check_fields
from lightning_pipes.strategies.deep import tapered


@dataclass(frozen=True)
class Ready(RulePolicy):
    """No fixed order: a rank runs whatever is ready. Where forward and backward both are, it takes the sort that it did
    not run last, or with `alternate` off the backward.

    A stage may hold `limits[s]` samples between F and B. By default these are 1F1B's, p - s micro-batches on stage s of
    p, and up to `slack` more: all of it on stage 0, none on the last one, in even steps between. More slack hides
    slower and less steady links.

    Forwards of a stage run in the order of micro-batches, and so do backwards: messages of a link arrive in the order
    in which they were sent, and of what has arrived the earliest goes first. So numbers do not depend on what was ready
    when. It can't get stuck, for a backward is never held back.

    Raises:
        PlanError: negative slack; limits that are not one for each stage, or too small for one micro-batch.
    """

    slack: int = 2
    limits: tuple[int, ...] = ()
    alternate: bool = True
    name: ClassVar[str] = "ready"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slack < 0:
            raise InputError(f"{self.name}: slack counts micro-batches from 0, got {self.slack}")
        if min(self.limits, default=1) < 1:
            raise InputError(f"{self.name}: limits count samples from 1, got {self.limits}")

    # Drawn by `step(Ready(), link=1)`:
    # rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
    # rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
    # rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def rule(self, plan: Plan) -> Rule:
        """The limits in samples for this plan, and whether to alternate."""
        return Rule(_limits(plan, self.slack, self.limits), self.alternate)


@lru_cache(maxsize=64)
def _limits(plan: Plan, slack: int, given: tuple[int, ...]) -> tuple[int, ...]:
    stages = range(plan.n_stages)
    largest = [max(x.rows for cut in plan.jobs for x in cut.spans(Kind.F, s)) for s in stages]
    if not given:
        return tuple(rows * most for rows, most in zip(largest, tapered(plan.n_stages, slack), strict=True))
    if len(given) != plan.n_stages:
        raise PlanError(f"ready: limits {given} are for {len(given)} stages, the plan has {plan.n_stages}")
    for s in stages:
        if given[s] < largest[s]:
            raise PlanError(
                f"ready: stage {s} may hold {given[s]} samples and has a micro-batch of {largest[s]}; raise its limit "
                "or use more micro-batches"
            )
    return given
