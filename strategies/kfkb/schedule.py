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
DEFAULT_MAX_K = 8
"""The largest k that is tried by default.

From this k on, no further gain was observed, because the last groups add more time than they hide.
"""


@dataclass(frozen=True)
class KFKB(Schedule):
    """k forwards, then k backwards, on every rank (Wang et al. 2023, arXiv:2303.01675, S4.1).

    k = 1 is 1F1B, and k >= m, the number of micro-batches, is GPipe. A larger k hides slower links and holds more
    activations: stage s of p holds at most min(k * (p - s), m) micro-batches. The last group may be incomplete.

    With k = "auto", a run begins as 1F1B. During training, it switches to the fastest of its planner's candidates,
    according to a simulation with the measured times. The candidates are other values of k, and other schedules that
    have the same effect with less memory.

    Attributes:
        k: the number of forwards in a row, or "auto".
        prune: which candidates are kept. "per_k" keeps one candidate for each k. "pareto" drops a k if a larger k also
            fits with micro-batches that are at least as large (S5.1).
        largest_k: the largest k among the candidates. None means `DEFAULT_MAX_K`, which is 8.

    Raises:
        PlanError: k is neither "auto" nor an integer of at least 1, a rank has several stages, the backward spans
            differ from the forward spans, or the plan has several jobs, several batches or a split backward.
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
        """Whether a run switches to the fastest candidate during training."""
        return isinstance(self.k, str) and self.k == AUTO

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[KFKB]:
        """Return the variants that a planner tries: powers of two from k = 2 on. k = 1 is 1F1B, and k = m is GPipe."""
        return [cls(2**power) for power in range(1, (microbatches - 1).bit_length())]

    def make_planner(self) -> object:
        from lightning_pipes.strategies.kfkb.planner import KFKBPlanner  # the planner imports this module

        return KFKBPlanner(self.prune, self.largest_k or DEFAULT_MAX_K)

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
        warmup = min(plan.n_stages - 1 - stage, len(groups))  # groups that are sent before the first B returns

        rows = forwards[:warmup]
        for f, b in zip(forwards[warmup:], backwards, strict=False):
            rows += [f, b]
        rows += backwards[len(groups) - warmup :]
        return (*chain.from_iterable(rows), STEP(stage))
