"""The schedule "v": stages on a V, in an order that holds at most k half-stages on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.cost.units import parse_bytes, parse_setting
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
    short_repr,
)
from lightning_pipes.strategies.v.order import Durations, find_order, least_held

EQUAL_TIMES = (1, 1, 1, 0)
MAX_VARIED_FORWARDS = 2**12
"""The largest number of forwards of a step for which a search over schedules also tries the order for equal times."""
MAX_SEARCHED_RANKS = 32
"""The largest number of ranks for which a search over schedules considers v."""


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
        k: the largest number of half-stages that a rank holds. None means p + 2 (3p / 2 + 1 with whole backwards), or
            the largest number that fits into `memory_limit`.
        times: the relative durations of F, I and W of a stage, and of a message between ranks. None means the measured
            durations or, if layers are not measured, equal durations and free messages.
        memory_limit: the bytes that every rank may hold, such as "16GiB", instead of k. If layers or units can't be
            measured, k is the smallest possible one, and a warning reports that the bytes are not checked.
        split: whether the backward is split into I and W. Whole backwards are faster for layers on which a split
            backward costs time, and make the bubble longer.

    Raises:
        PlanError: k is not an integer of at least 1 or is below the smallest k of this number of ranks, `times` are not
            four integers that can be durations, the plan places stages on other ranks, spans differ between stages or
            directions, or the plan has several jobs or several batches, or splits the backward differently.
    """

    k: int | None = None
    times: tuple[int, int, int, int] | None = None
    memory_limit: int | str | None = None
    split: bool = True
    name: ClassVar[str] = "v"

    def __post_init__(self) -> None:
        if self.k is not None:
            check_count(f"{self.name}: k", self.k, most=MAX_STAGES)
        check_fields(self)
        if self.memory_limit is not None:
            parse_setting(f"{self.name}: memory_limit", parse_bytes, self.memory_limit)
            if self.k is not None:
                raise InputError(
                    f"{self.name}: k={self.k} and memory_limit={short_repr(self.memory_limit)} both limit the memory; "
                    "give one of them"
                )
        *computations, message = self.durations
        if min(computations) < 1 or message < 0:
            raise InputError(
                f"{self.name}: times are the durations of F, I and W, each at least 1, and of a message, at least 0, "
                f"got {tuple(self.durations)}"
            )

    @property
    def durations(self) -> Durations:
        """The relative durations with which the order is made."""
        return Durations() if self.times is None else Durations(*self.times)

    @property
    def splits_backward(self) -> bool:
        return self.split

    def make_planner(self) -> object:
        if self.times is not None and self.memory_limit is None:
            return None
        from lightning_pipes.strategies.v.planner import VPlanner  # the planner imports this module

        return VPlanner(None if self.memory_limit is None else parse_bytes(self.memory_limit))

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[V]:
        """Return the variants that a planner tries, from V-Min to ZB-V, and V-Half with whole backwards.

        Each k is tried with the measured durations and, in small plans, with equal ones, because the durations of
        stages may differ from their average. The list is empty for one rank.
        """
        if n_ranks == 1:
            return []
        if n_ranks > MAX_SEARCHED_RANKS:
            return [cls()]
        times = (None, EQUAL_TIMES) if 2 * n_ranks * microbatches <= MAX_VARIED_FORWARDS else (None,)
        least = least_held(n_ranks)
        most = {max(least, min(k, 2 * microbatches)) for k in (n_ranks, n_ranks + 2, 3 * n_ranks // 2, 2 * n_ranks)}
        found = [cls(k, each) for k in sorted({least, *most}) for each in times]
        return [*found, cls(split=False)]

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        check_count(f"{self.name}: stages of {n_ranks} ranks", 2 * n_ranks, most=MAX_STAGES)
        down = tuple(range(n_ranks))
        return down + down[::-1]

    def is_slow_to_order(self, plan: Plan) -> bool:
        return plan.n_ranks > MAX_SEARCHED_RANKS

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
        k = self.k
        if k is None:
            usual = n_ranks + 2 if self.split else 3 * n_ranks // 2 + 1
            k = least if self.memory_limit is not None else max(usual, least)
        if k < least:
            raise PlanError(
                f"{self.name}: k={k} is too small, because on {n_ranks} ranks, a rank holds at least {least} "
                f"half-stages (V-Min). Set k to at least {least}; {2 * n_ranks} has the smallest bubble"
            )
        return k

    # Drawn by `step(V())`:
    # rank 0 |0-1-2-3-..0'0'0'1'1'1'0+0~..2'2'2'..3'3'1+3'2+1~3+2~3~| bubble 11.1%
    # rank 1 |..0-1-2-0'..1'0'0'3-0+1'0~2'1'..2'3'1+2'3'2+1~3+3'2~3~| bubble 11.1%
    # rank 2 |....0-0'1-1'2-..0'0+0'2'1'0~3-1'3'1+2'2+1~3'3+2'2~3'3~| bubble 11.1%
    #         - forward  + input gradients  ~ weight gradients  . idle
    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name, self.split)
        check_placement(plan, self)
        spans = plan.spans(Kind.F, 0)
        if any(plan.spans(kind, s) != spans for s in range(plan.n_stages) for kind in (Kind.F, Kind.B)):
            raise PlanError(f"{self.name} needs the same spans on all stages, forward and backward")
        k = self.held(plan.n_ranks)
        order = find_order(plan.n_ranks, len(spans), k, self.durations, self.split)
        kinds = (F, I if self.split else B, W)
        return Program(
            tuple(
                (*(kinds[kind](stage, spans[n]) for kind, stage, n in row), *map(STEP, stages))
                for row, stages in zip(order.rows, plan.stages, strict=True)
            )
        )
