"""Candidates of the tuner: each k with the largest micro-batches that fit, and other schedules for slow links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_pipes.cost import CostModel, Costs
from lightning_pipes.ir import InputError, Kind, Plan, PlanError, adapt_plan, check_count
from lightning_pipes.planning.candidates import Candidate, TuningPlanner, cut_into, make_candidate, nothing_fits
from lightning_pipes.sim.loops.operations import Limit
from lightning_pipes.strategies.deep import Deep, taper_slack
from lightning_pipes.strategies.kfkb.schedule import DEFAULT_MAX_K, KFKB, PRUNE_MODES
from lightning_pipes.strategies.per_link import PerLink, extra_for, forwards_ahead
from lightning_pipes.strategies.ready import Ready, largest_rows, limits_for
from lightning_pipes.strategies.zero_bubble import ZeroBubble

EXTRA_FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Factors by which `ZeroBubble` candidates scale the extra that hides steady links.

A smaller extra leaves more memory for delayed weight gradients.
"""
SLACKS_PER_LINK = (1, 4)
"""Additional micro-batches in flight per link, for the `Ready` candidates that split the backward."""


def split_candidates(plan: Plan, costs: Costs, memory_limit: Limit) -> Iterator[Candidate | None]:
    """Yield the candidates that split the backward: `zero_bubble` with several extras, and `ready`.

    Every stage of a candidate holds the number of micro-batches that the first stage runs ahead, or as many as fit into
    memory. The function yields None for a candidate that does not fit. It yields nothing if the plan has a single
    stage, if the durations of I and W are unknown, or if a stage does not have enough memory for one micro-batch.
    """
    p = plan.n_stages
    if p == 1 or not prices_split(costs, p):
        return
    plan = adapt_plan(plan, ZeroBubble())
    rows, m = largest_rows(plan), len(plan.spans(Kind.F, 0))
    try:
        fits = limits_for(plan, costs, memory_limit)
    except PlanError:
        return
    may = [limit // size for limit, size in zip(fits, rows, strict=True)]
    limited = min(may) < m
    for times in EXTRA_FACTORS:
        extra = extra_for(plan, costs, times)
        ahead = forwards_ahead(plan, "extra", extra)[0]
        yield make_candidate(ZeroBubble(extra), plan, costs, memory_limit, (ahead,) * p)
        if limited:
            yield make_candidate(ZeroBubble(extra, fits), plan, costs, memory_limit, may)
    for slack in SLACKS_PER_LINK:
        held = [min(taper_slack(p, slack * (p - 1))[0], most) for most in may]
        limits = tuple(most * size for most, size in zip(held, rows, strict=True))
        yield make_candidate(Ready(limits=limits, split=True), plan, costs, memory_limit, held)


def prices_split(costs: Costs, stages: int) -> bool:
    """Return whether the costs contain the durations of I and W on all stages."""
    parts = [(kind, s) for kind in (Kind.I, Kind.W) for s in range(stages)]
    return isinstance(costs, CostModel) and all(part in costs.seconds for part in parts)


MAX_SLACK_PER_LINK = 4
"""The number of additional micro-batches per link from which on a longer warm-up gains nothing."""


def memory_curve(
    plan: Plan,
    costs: Costs,
    memory_limit: Limit = None,
    sizes: Sequence[int] = (),
    prune: str = "per_k",
    largest_k: int = DEFAULT_MAX_K,
) -> tuple[Candidate, ...]:
    """Return a kFkB candidate for k = 1, 2, ... with the largest micro-batches that fit into memory (S4.2 and S5.1).

    Stage s of p holds at most k (p - s) micro-batches, so a larger k requires smaller micro-batches. The memory model
    counts weights, optimizer states, the memory that computations need, and activations from F to the end of B.

    If a size does not divide the batch, the micro-batches differ by at most one sample, and the last group may be
    incomplete. In figure 6 of the paper, a micro-batch has 6 / k samples, which is not an integer for k = 4 and 5 and
    is rounded down here.

    Args:
        plan: the plan whose batch is cut into micro-batches of other sizes.
        costs: the costs of its stages and links.
        memory_limit: the bytes of every rank, or one value for each rank.
        sizes: the candidate numbers of samples of a micro-batch, at least 1. By default, any number is allowed.
        prune: "per_k" keeps one candidate for each k. "pareto" drops a candidate if a larger k also fits with
            micro-batches that are at least as large, as the paper does. A larger k is not always faster, so k = 1 is
            always kept.
        largest_k: the largest k to try.

    Raises:
        PlanError: k = 1 does not fit even with the smallest micro-batches, a size is below 1, or `prune` has another
            value. In the first case, the message names the stage and the missing bytes.
    """
    if prune not in PRUNE_MODES:
        raise InputError(f"kfkb: prune must be 'per_k' or 'pareto', got {prune!r}")
    for size in sizes:
        check_count("kfkb: samples of a micro-batch", size)
    every = sorted({*sizes} or range(1, plan.jobs[0].rows + 1))
    found: list[tuple[int, int, Candidate]] = []
    for k in range(1, largest_k + 1):
        every = [size for size in every if -(-plan.jobs[0].rows // size) >= k]  # at least k micro-batches
        best = _largest(k, plan, costs, memory_limit, every)
        if best is None:
            break
        size, fits = best
        every = every[: every.index(size) + 1]
        found.append((k, size, fits))
    if not found:
        raise nothing_fits(cut_into(plan, every[0]), costs, memory_limit, _held(1, plan.n_stages))
    if prune == "pareto":
        found = [(k, b, c) for k, b, c in found if k == 1 or not any(j > k and a >= b for j, a, _ in found)]
    return tuple(c for _, _, c in found)


@dataclass(frozen=True)
class KFKBPlanner(TuningPlanner):
    """Cuts batches evenly, and lists the candidates to which a run may change during training.

    Attributes:
        prune, largest_k: see `memory_curve`.
    """

    prune: str = "per_k"
    largest_k: int = DEFAULT_MAX_K

    def list_candidates(
        self, plan: Plan, costs: Costs, memory_limit: Limit = None, sizes: Sequence[int] = ()
    ) -> tuple[Candidate, ...]:
        """Return the memory curve, k = 1 with every size that fits, and other schedules for each size.

        The other schedules have more micro-batches in flight: `deep`, `per_link` with the extra that these costs
        require, and `ready` with limits that fit into memory. Schedules that split the backward are included if the
        durations of its parts are known; see `split_candidates`. The arguments are described in
        `TuningPlanner.list_candidates`.
        """
        plan = adapt_plan(plan, KFKB())  # the running schedule may split the backward
        sizes = sizes or (max(span.rows for span in plan.spans(Kind.F, 0)),)
        curve = memory_curve(plan, costs, memory_limit, sizes, self.prune, self.largest_k)
        others = [c for size in sizes for c in _others(cut_into(plan, size), costs, memory_limit) if c is not None]
        return tuple(dict.fromkeys((*curve, *others)))


def _largest(
    k: int, plan: Plan, costs: Costs, memory_limit: Limit, sizes: Sequence[int]
) -> tuple[int, Candidate] | None:
    """Return the largest of the ascending `sizes` with which k fits, by bisection: memory grows with the size."""
    held, best = _held(k, plan.n_stages), None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        fits = make_candidate(KFKB(k), cut_into(plan, sizes[middle]), costs, memory_limit, held)
        if fits is None:
            high = middle
        else:
            best, low = (sizes[middle], fits), middle + 1
    return best


def _held(k: int, stages: int) -> tuple[int, ...]:
    return tuple(k * (stages - s) for s in range(stages))


def _others(plan: Plan, costs: Costs, memory_limit: Limit) -> Iterator[Candidate | None]:
    p, spans = plan.n_stages, plan.spans(Kind.F, 0)
    m, rows = len(spans), max(span.rows for span in spans)
    least = make_candidate(KFKB(1), plan, costs, memory_limit, _held(1, p))
    yield least
    if p == 1 or least is None:
        return
    slacks = [n * (p - 1) // 2 for n in range(1, 2 * MAX_SLACK_PER_LINK + 1) if p + n * (p - 1) // 2 <= m]
    for slack in dict.fromkeys(slacks):
        yield make_candidate(Deep(slack), plan, costs, memory_limit, taper_slack(p, slack))
    for times in (1.0, 1.5, 2.0):
        extra = extra_for(plan, costs, times)
        if max(extra) > min(extra):
            held = [p - s + sum(extra[s:]) for s in range(p)]
            yield make_candidate(PerLink(extra), plan, costs, memory_limit, held)
    may = [most // rows for most in limits_for(plan, costs, memory_limit)]
    for slack in (p - 1, MAX_SLACK_PER_LINK * (p - 1)):
        held = [min(most, a) for most, a in zip(taper_slack(p, slack), may, strict=True)]
        if all(h >= min(p - s, m) for s, h in enumerate(held)):
            yield make_candidate(Ready(limits=tuple(h * rows for h in held)), plan, costs, memory_limit, held)
    yield from split_candidates(plan, costs, memory_limit)
