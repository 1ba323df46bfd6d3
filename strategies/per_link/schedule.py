"""1F1B with a longer warm-up where links are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    B,
    F,
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
    """One backward, one forward in turn after `ahead[s]` forwards on stage s, which holds that many at most.

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
