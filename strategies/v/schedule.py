"""The schedule "v": stages on a V, in an order that holds at most k half-stages on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import (
    MAX_STAGES,
    STEP,
    B,
    F,
    I,
    InputError,
    Kind,
    Plan,
    PlanError,
    Program,
    Schedule,
    W,
    check_count,
    check_fields,
    check_one_batch,
    check_placement,
)
from lightning_pipes.strategies.v.order import Durations, find_order, least_held


@dataclass(frozen=True)
class V(Schedule):
    """Two stages on every rank, placed down the ranks and up again, with at most k half-stages in memory (Qi et al.
    2024, arXiv:2405.15362).

    Rank r of p has the stages r and 2p - 1 - r. A half-stage is one micro-batch on one of them, between its F and its
    W. 1F1B holds 2p half-stages on its first rank. The smallest k is V-Min of the paper, k = p + 2 is V-Half, and k =
    2p is ZB-V, which has no bubble on equal stages with free links if F, I and W take the same time. A smaller k has a
    longer bubble.

    The order is the best of several repeating patterns for the durations in `times`. Each of them is executed within
    the memory limit. A rank that would wait runs a W, or an F or I that comes later in the pattern.

    Attributes:
        k: the largest number of half-stages that a rank holds. None means p + 2.
        times: the relative durations of F, I and W of a stage, and of a message between ranks.
        split: whether the backward is split into I and W. Whole backwards are faster for layers on which a split
            backward costs time, and make the bubble longer.

    Raises:
        PlanError: k is not an integer of at least 2 or is below the smallest k of this number of ranks, `times` are not
            four integers that can be durations, the plan places stages on other ranks, spans differ between stages or
            directions, or the plan has several jobs or several batches, or splits the backward differently.
    """

    k: int | None = None
    times: tuple[int, int, int, int] = (1, 1, 1, 0)
    split: bool = True
    name: ClassVar[str] = "v"

    def __post_init__(self) -> None:
        if self.k is not None:
            check_count(f"{self.name}: k", self.k, most=MAX_STAGES)
        check_fields(self)
        *computations, message = self.times
        if min(computations) < 1 or message < 0:
            raise InputError(
                f"{self.name}: times are the durations of F, I and W, each at least 1, and of a message, at least 0, "
                f"got {tuple(self.times)}"
            )

    @property
    def splits_backward(self) -> bool:
        return self.split

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[V]:
        """Return an empty list, because making the orders would take most of the time of a search over schedules."""
        return []

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        check_count(f"{self.name}: stages of {n_ranks} ranks", 2 * n_ranks, most=MAX_STAGES)
        down = tuple(range(n_ranks))
        return down + down[::-1]

    @staticmethod
    def least_held(n_ranks: int) -> int:
        """Return the smallest k for a number of ranks."""
        return least_held(n_ranks)

    def held(self, n_ranks: int) -> int:
        """Return the largest number of half-stages that a rank holds.

        Raises:
            PlanError: k is below the smallest k of this number of ranks.
        """
        least = least_held(n_ranks)
        k = max(n_ranks + 2, least) if self.k is None else self.k
        if k < least:
            raise PlanError(
                f"{self.name}: k={k} is too small, because on {n_ranks} ranks, a rank holds at least {least} "
                f"half-stages (V-Min). Set k to at least {least}; {2 * n_ranks} has the smallest bubble"
            )
        return k

    # Drawn by `step(V())`:
    # rank 0 |0-1-2-3-..0'0'0'....1'1'0+1'2'2'0~1+2'3'3'2+1~3'2~3+3~| bubble 11.1%
    # rank 1 |..0-1-2-0'3-..0'0'1'0+0~1'2'1'..1+2'3'1~2+3'2'2~3+3'3~| bubble 11.1%
    # rank 2 |....0-0'1-1'2-..0'0+0'2'0~3-1'1+1'3'2'2+1~2'3'3+2~3'3~| bubble 11.1%
    #         - forward  + input gradients  ~ weight gradients  . idle
    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name, self.split)
        check_placement(plan, self)
        spans = plan.spans(Kind.F, 0)
        if any(plan.spans(kind, s) != spans for s in range(plan.n_stages) for kind in (Kind.F, Kind.B)):
            raise PlanError(f"{self.name} needs the same spans on all stages, forward and backward")
        k = self.held(plan.n_ranks)
        order = find_order(plan.n_ranks, len(spans), k, Durations(*self.times), self.split)
        kinds = (F, I if self.split else B, W)
        return Program(
            tuple(
                (*(kinds[kind](stage, spans[n]) for kind, stage, n in row), *map(STEP, stages))
                for row, stages in zip(order.rows, plan.stages, strict=True)
            )
        )
