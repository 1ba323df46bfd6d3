"""k forwards, then k backwards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    B,
    F,
    Instruction,
    Kind,
    Plan,
    Program,
    check_count,
    check_one_batch,
    check_one_stage_a_rank,
)


@dataclass(frozen=True)
class KFKB:
    """k forwards, then k backwards, on every rank (Wang et al. 2023, arXiv:2303.01675, S4.1).

    k = 1 is 1F1B; k >= m, the number of micro-batches, is GPipe. A larger k hides slower links and holds more
    activations: stage s of p keeps at most min(k * (p - s), m) micro-batches. The last group may be incomplete.

    Raises:
        PlanError: k is no whole number from 1 on, a rank has several stages, backward spans differ from forward spans,
            or there is more than one batch of one job to order.
    """

    k: int = 1
    name: ClassVar[str] = "kfkb"

    def __post_init__(self) -> None:
        check_count(f"{self.name}: k", self.k, "; k=1 is 1F1B")

    @classmethod
    def variants(cls, n_ranks: int, microbatches: int) -> list[KFKB]:
        """What a planner tries: k from 2, doubling; k = 1 is 1F1B and k = m is GPipe."""
        return [cls(2**power) for power in range(1, (microbatches - 1).bit_length())]

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        check_one_stage_a_rank(plan, self.name)
        return Program(tuple(self._order(plan, stage) for (stage,) in plan.stages))

    def _order(self, plan: Plan, stage: int) -> tuple[Instruction, ...]:
        spans = plan.spans(Kind.F, stage)  # which samples each micro-batch holds
        groups = [spans[i : i + self.k] for i in range(0, len(spans), self.k)]
        forwards = [[F(stage, span) for span in group] for group in groups]
        backwards = [[B(stage, span) for span in group] for group in groups]
        warmup = min(plan.n_stages - 1 - stage, len(groups))  # groups sent on before the first B returns

        rows = forwards[:warmup]
        for f, b in zip(forwards[warmup:], backwards, strict=False):
            rows += [f, b]
        rows += backwards[len(groups) - warmup :]
        return (*chain.from_iterable(rows), STEP(stage))
