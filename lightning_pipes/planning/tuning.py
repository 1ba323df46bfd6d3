"""Rank candidates by measured costs and decide whether a run should change its order or micro-batches.

Decisions depend only on their input: they use no clock and no random numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import NamedTuple

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import (
    B,
    F,
    I,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Policy,
    Program,
    Schedule,
    W,
    check_number,
    verify,
)
from lightning_pipes.planning.bounds import least_step
from lightning_pipes.planning.candidates import Candidate
from lightning_pipes.planning.measured import Averages
from lightning_pipes.sim import CompiledSimulation

MIN_SWITCH_GAIN = 0.01
"""A change must reduce the step time by more than this share, or twice this share if the costs are extrapolated."""
TIE_TOLERANCE = 0.005
"""Candidates whose step times differ by less than this share count as equally fast."""
MIN_UNDERSTATEMENT = 0.05
"""A lower bound of the share by which averages understate orders that are not fixed, if links are unsteady."""
MAX_STEADY_VARIATION = 0.3
"""The threshold of the standard deviation divided by the mean of the transfers of a link in one step. Above it,
averages do not describe the link sufficiently."""
_MAX_CACHED_PLANS = 128


class LinkEffect(StrEnum):
    """The effect of the links on the pipeline. It determines the best number of micro-batches in flight."""

    FREE = "free links"
    """The links cost 1F1B less than 3 %. 1F1B is then best, because it holds the fewest samples."""
    LATENCY = "slow links"
    """Messages take long, and more micro-batches in flight hide this."""
    BANDWIDTH = "busy links"
    """A link needs more time for a micro-batch than any stage. This can't be hidden, so a few more micro-batches in
    flight suffice."""
    BLOCKING = "blocking sends"
    """Ranks do not compute while they send, so more micro-batches in flight hide almost nothing."""


def effect_of(plan: Plan, costs: CostModel, lag: float = 0.0) -> LinkEffect:
    """Return the effect of the links of `plan`, assuming that all micro-batches are like the first one.

    Args:
        plan: the plan.
        costs: the costs of its stages and links.
        lag: the seconds for which computations are delayed although they are ready. If these are a considerable part of
            both the time of the stages and the time of messages, sends block.
    """
    pace, busy, trips, sent = 0, 0, 0, []
    for s in range(plan.n_stages):
        span = plan.spans(Kind.F, s)[0]
        backward = (I(s, span), W(s, span)) if plan.split_backward else (B(s, span),)
        pace = max(pace, sum(costs.duration_ns(i, plan) for i in (F(s, span), *backward)))
        for kind, edge in ((Kind.SF, s), (Kind.SB, s - 1)):
            if 0 <= edge < plan.n_stages - 1 and plan.is_remote_edge(edge):
                takes, latency = costs.transfer_ns(Instruction(kind, s, span=plan.spans(kind, s)[0]), plan)
                busy, trips = max(busy, takes), trips + takes + latency
                sent.append(takes + latency)
    if trips <= 0.03 * plan.n_stages * pace:  # the time for which 1F1B waits for messages while p micro-batches pass
        return LinkEffect.FREE
    if lag * 1e9 > max(sum(sent) / len(sent) / 2, pace / 20):
        return LinkEffect.BLOCKING
    return LinkEffect.BANDWIDTH if busy > pace else LinkEffect.LATENCY


class RankedCandidate(NamedTuple):
    """A candidate with the seconds of its step.

    Attributes:
        candidate: the candidate.
        seconds: the simulated seconds of a step.
        extrapolated: whether its costs are extrapolated from other sizes of micro-batches.
    """

    candidate: Candidate
    seconds: float
    extrapolated: bool = False


@dataclass(frozen=True)
class TuningDecision:
    """The order and plan that will run from the next step on.

    Attributes:
        ranked: the candidates that were simulated, the fastest first. Candidates that can't change the decision are not
            simulated.
        current: the candidate that runs now, with its own costs.
        chosen: the candidate that will run.
        effect: the effect of the links.
        unsteadiness: the standard deviation divided by the mean of the transfers, for the link with the largest value.
        slack: the smallest number of inputs that waited at a launch while the pipeline was full; None if no inputs were
            received.
        stalled: the share of a step, from 0 to 1, for which the rank that stalled least found no input; None if no
            inputs were received. Another order of the same micro-batches can't save more than this (Ada-Grouper, S4.4:
            a rank does not stall if an input is available).
    """

    ranked: tuple[RankedCandidate, ...]
    current: RankedCandidate
    chosen: RankedCandidate
    effect: LinkEffect
    unsteadiness: float = 0.0
    slack: int | None = None
    stalled: float | None = None

    @property
    def has_change(self) -> bool:
        """Whether the schedule or the plan changes."""
        return self.chosen.candidate.schedule != self.current.candidate.schedule or (
            self.chosen.candidate.plan != self.current.candidate.plan
        )

    @property
    def gain(self) -> float:
        """The share by which the predicted step is shorter than the current one; 0 if nothing changes."""
        return 1 - self.chosen.seconds / self.current.seconds if self.has_change and self.current.seconds else 0.0

    def __str__(self) -> str:
        now, then = self.current, self.chosen
        if not self.has_change:
            return f"{self.effect}: stays with {now.candidate.label}, {1e3 * now.seconds:.1f} ms a step"
        note = ", extrapolated" if then.extrapolated else ""
        return (
            f"{self.effect}: {now.candidate.label} takes {1e3 * now.seconds:.1f} ms a step; changes to "
            f"{then.candidate.label} with {1e3 * then.seconds:.1f} ms, {self.gain:.1%} less{note}"
        )


class CandidateRanker:
    """Ranks candidates by simulation. Compiled simulations are cached, so repeated decisions are cheap.

    Args:
        hysteresis: the share of a step that a change must save.
    """

    def __init__(self, hysteresis: float = MIN_SWITCH_GAIN) -> None:
        check_number("hysteresis", hysteresis, "a share of a step, from 0 to less than 1", lambda x: 0 <= x < 1)
        self.hysteresis = hysteresis
        self._known: OrderedDict[tuple[Schedule | Policy, Plan], CompiledSimulation] = OrderedDict()
        self._verified: set[tuple[Schedule | Policy, Plan]] = set()

    def decide(
        self,
        candidates: Sequence[Candidate],
        current: Candidate,
        measured: Averages,
        base: CostModel | None = None,
    ) -> TuningDecision:
        """Choose a candidate by measured costs.

        If the current candidate is not in `candidates`, it is replaced in any case. Among candidates that are equally
        fast, the one that holds the least memory is chosen.

        If links are unsteady, averages do not show the advantage of an order that is not fixed; the measured advantage
        over kFkB with the same memory is 13 %. In this case, such a candidate is preferred if its predicted step is
        less than 5 % longer. Among these candidates, the one with the most memory is chosen, and no predicted gain is
        required.

        Args:
            candidates: the candidates to choose from.
            current: the candidate that runs now.
            measured: the measured costs.
            base: the bytes of the stages.

        Raises:
            PlanError: there are no candidates.
            ProgramError, DeadlockError: the chosen order is invalid.
        """
        if not candidates:
            raise PlanError("there is nothing to choose from")
        effect = effect_of(current.plan, measured.costs(base), measured.lag)
        blocking = effect is LinkEffect.BLOCKING
        unsteady = measured.unsteadiness > MAX_STEADY_VARIATION and effect is not LinkEffect.FREE
        costs = measured.costs(base, overhead=not blocking)
        costs = replace(costs, regime="blocking") if blocking else costs
        plans = {*(c.plan for c in candidates), current.plan}
        sizes = {plan: measured.has_measured(plan) for plan in plans}
        least = {plan: least_step(plan, costs) / 1e9 for plan in plans}

        def ranked(candidate: Candidate) -> RankedCandidate:
            known = self._simulation_for(candidate)
            seconds = known.makespan(costs) / 1e9
            return RankedCandidate(candidate, seconds, not sizes[candidate.plan])

        every: dict[int, RankedCandidate] = {}
        left = _in_turn(candidates, unsteady)
        best: RankedCandidate | None = None
        while best is None:
            every |= {n: ranked(candidates[n]) for n in left.pop(0)}
            rest = min((least[candidates[n].plan] for together in left for n in together), default=inf)
            best = _find_certain(_sort_candidates(every), rest, unsteady)
        listed = next((n for n, c in enumerate(candidates) if _is_same(c, current)), None)
        if listed is None:
            now = ranked(current)
        else:
            now = every[listed] = every.get(listed) or ranked(candidates[listed])
        margin = self.hysteresis * (2 if best.extrapolated else 1)
        worth_it = best.seconds < now.seconds * (1 - margin)
        better_order = unsteady and _is_policy(best) and not _is_policy(now)
        if best.candidate.plan == current.plan and measured.stalled is not None and measured.stalled < margin:
            worth_it = better_order = False
        chosen = best if worth_it or better_order or listed is None else now
        if chosen is not now:
            self._verify(chosen.candidate)
        return TuningDecision(
            tuple(_sort_candidates(every)), now, chosen, effect, measured.unsteadiness, measured.slack, measured.stalled
        )

    def prepare(self, candidates: Iterable[Candidate], costs: CostModel) -> None:
        """Compile, simulate and verify candidates in advance, so that their first decision is fast.

        Args:
            candidates: candidates that are available before anything is measured.
            costs: any costs of the stages and links.

        Raises:
            ProgramError, DeadlockError: the order of a candidate is invalid.
        """
        for candidate in candidates:
            self._simulation_for(candidate).makespan(costs)
            self._verify(candidate)

    def _simulation_for(self, candidate: Candidate) -> CompiledSimulation:
        key = candidate.schedule, candidate.plan
        found = self._known.get(key)
        if found is None:
            found = CompiledSimulation(_has_fixed_order(candidate), candidate.plan)
            if len(self._known) >= _MAX_CACHED_PLANS:
                self._known.popitem(last=False)
            self._known[key] = found
        self._known.move_to_end(key)
        return found

    def _verify(self, candidate: Candidate) -> None:
        key = candidate.schedule, candidate.plan
        if key in self._verified:
            return
        order = _has_fixed_order(candidate)
        if isinstance(order, Program):
            verify(order, candidate.plan)
        if len(self._verified) >= _MAX_CACHED_PLANS:
            self._verified.clear()
        self._verified.add(key)


def _in_turn(candidates: Sequence[Candidate], unsteady: bool) -> list[list[int]]:
    """Return the numbers of the candidates in groups, in the order in which they are simulated.

    The groups are sorted by memory, the smallest first. Candidates with equal memory form one group, because the
    fastest of them is chosen. If links are unsteady, all policies form the first group.
    """
    turn: dict[int, list[int]] = {}
    for number, candidate in enumerate(candidates):
        first = unsteady and not isinstance(candidate.schedule, Schedule)
        turn.setdefault(-1 if first else sum(candidate.peak_bytes), []).append(number)
    return [turn[key] for key in sorted(turn)]


def _find_certain(every: Sequence[RankedCandidate], rest: float, unsteady: bool) -> RankedCandidate | None:
    """Return the best of the simulated candidates, or None if another candidate may change the result.

    Args:
        every: the simulated candidates, the fastest first.
        rest: a lower bound of the step time of all other candidates, which hold more memory.
        unsteady: whether links are unsteady.
    """
    fastest = every[0].seconds
    best = _choose_best(every, fastest, unsteady)
    return best if rest >= fastest or _choose_best(every, rest, unsteady) is best else None


def _choose_best(every: Sequence[RankedCandidate], fastest: float, unsteady: bool) -> RankedCandidate | None:
    """Return the candidate to choose if the fastest of all candidates takes `fastest` seconds.

    The result is None if no candidate in `every` is as fast as this.
    """
    close = [r for r in every if r.seconds <= fastest * (1 + TIE_TOLERANCE)]
    policies = [r for r in every if _is_policy(r) and r.seconds <= fastest * (1 + MIN_UNDERSTATEMENT)]
    if unsteady and policies:
        return max(policies, key=lambda r: sum(r.candidate.peak_bytes))
    return min(close, key=lambda r: (sum(r.candidate.peak_bytes), r.seconds), default=None)


def _sort_candidates(every: Mapping[int, RankedCandidate]) -> list[RankedCandidate]:
    """Return the candidates, the fastest first. Equally fast candidates keep their order."""
    return [ranked for _, ranked in sorted(every.items(), key=lambda item: (item[1].seconds, item[0]))]


def _is_same(one: Candidate, other: Candidate) -> bool:
    return (one.schedule, one.plan) == (other.schedule, other.plan)


def _has_fixed_order(candidate: Candidate) -> Program | Policy:
    schedule = candidate.schedule
    return schedule.program(candidate.plan) if isinstance(schedule, Schedule) else schedule


def _is_policy(ranked: RankedCandidate) -> bool:
    return not isinstance(ranked.candidate.schedule, Schedule)
