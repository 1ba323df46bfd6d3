"""k forwards, then k backwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    B,
    F,
    InputError,
    Instruction,
    Kind,
    Plan,
    Program,
    Schedule,
    check_count,
    check_one_batch,
    check_one_stage_a_rank,
    short_repr,
)

AUTO = "auto"
PRUNE_MODES = ("per_k", "pareto")
LARGEST_K = 8
"""k from which on no gain was ever seen: the last groups take longer than what they hide."""


@dataclass(frozen=True)
class KFKB(Schedule):
    """k forwards, then k backwards, on every rank (Wang et al. 2023, arXiv:2303.01675, S4.1).

    k = 1 is 1F1B; k >= m, the number of micro-batches, is GPipe. A larger k hides slower links and holds more
    activations: stage s of p keeps at most min(k * (p - s), m) micro-batches. The last group may be incomplete.

    With k = "auto" a run begins as 1F1B, and changes while it goes on to whatever is fastest by simulation on what it
    measures, of its planner's candidates: other k, and other schedules that do the same with less memory.

    Attributes:
        prune: candidates that stay: "per_k" keeps one for each k, "pareto" drops a k beside which a larger one with
            micro-batches at least as large fits (S5.1).
        largest_k: of the candidates; None is 8, from which on no gain was seen.

    Raises:
        PlanError: k is no whole number from 1 on, a rank has several stages, backward spans differ from forward spans,
            or there is more than one batch of one job to order.
    """

    k: int | str = 1
    prune: str = field(default="per_k", repr=False)
    largest_k: int | None = field(default=None, repr=False)
    name: ClassVar[str] = "kfkb"

    def __post_init__(self) -> None:
        if not self.tunes_online:
            check_count(f"{self.name}: k", self.k, "; k=1 is 1F1B, and k='auto' chooses while training")
        if self.prune not in PRUNE_MODES:
            raise InputError(f"{self.name}: prune must be 'per_k' or 'pareto', got {short_repr(self.prune)}")
        if self.largest_k is not None:
            check_count(f"{self.name}: largest_k", self.largest_k)

    @property
    def tunes_online(self) -> bool:
        """Whether a run switches to the fastest candidate."""
        return isinstance(self.k, str) and self.k == AUTO

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[KFKB]:
        """Return the variants that a planner tries: k from 2, doubling; k = 1 is 1F1B and k = m is GPipe."""
        return [cls(2**power) for power in range(1, (microbatches - 1).bit_length())]

    def make_planner(self) -> object:
        from lightning_pipes.strategies.kfkb.planner import KFKBPlanner  # which knows schedules that know this one

        return KFKBPlanner(self.prune, self.largest_k or LARGEST_K)

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        check_one_stage_a_rank(plan, self.name)
        return Program(tuple(self._order(plan, stage) for (stage,) in plan.stages))

    # Drawn by `step(KFKB(2), link=1)`:
    # rank 0 |0-1-2-3-................0===1===....2===3===| bubble 45.5%
    # rank 1 |....0-1-2-3-......0===1===....2===3===......| bubble 45.5%
    # rank 2 |........0-1-0===1===2-3-2===3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def _order(self, plan: Plan, stage: int) -> tuple[Instruction, ...]:
        spans = plan.spans(Kind.F, stage)  # which samples each micro-batch holds
        k = 1 if isinstance(self.k, str) else self.k
        groups = [spans[i : i + k] for i in range(0, len(spans), k)]
        forwards = [[F(stage, span) for span in group] for group in groups]
        backwards = [[B(stage, span) for span in group] for group in groups]
        warmup = min(plan.n_stages - 1 - stage, len(groups))  # groups sent on before the first B returns

        rows = forwards[:warmup]
        for f, b in zip(forwards[warmup:], backwards, strict=False):
            rows += [f, b]
        rows += backwards[len(groups) - warmup :]
        return (*chain.from_iterable(rows), STEP(stage))
