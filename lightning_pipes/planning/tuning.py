"""Which candidate a run should change to: costs in, a ranking out. No clock, no chance: equal input, equal decision."""

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

HYSTERESIS = 0.01
"""A change must promise more than this share of a step, twice as much where its costs are extrapolated."""
TIE = 0.005
"""Candidates whose steps differ by less are as fast."""
UNDERSTATED = 0.05
"""The least share by which averages understate an order that is not fixed, where links are unsteady."""
UNSTEADY = 0.3
"""Standard deviation over mean of a link's transfers in one step, from which on averages do not tell the whole."""
_KEPT = 128


class LinkEffect(StrEnum):
    """The effect of links on the pipeline; the best number of micro-batches under way differs."""

    FREE = "free links"
    """1F1B loses less than 3 % to them, and it holds least."""
    LATENCY = "slow links"
    """Messages take long, and more micro-batches under way hide that."""
    BANDWIDTH = "busy links"
    """A link works longer for a micro-batch than any stage does: nothing hides that, a few more under way suffice."""
    BLOCKING = "blocking sends"
    """Ranks do not compute while they send: next to nothing can be hidden, whatever is under way."""


def effect_of(plan: Plan, costs: CostModel, lag: float = 0.0) -> LinkEffect:
    """Return the effect of the links of `plan`, if every micro-batch is as its first one.

    Args:
        lag: seconds that ranks are held up before computations although nothing is missing. Where it is a good part of
            what stages work, and of what messages take, sends block.
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
    if trips <= 0.03 * plan.n_stages * pace:  # what 1F1B waits for messages while p micro-batches pass
        return LinkEffect.FREE
    if lag * 1e9 > max(sum(sent) / len(sent) / 2, pace / 20):
        return LinkEffect.BLOCKING
    return LinkEffect.BANDWIDTH if busy > pace else LinkEffect.LATENCY


class RankedCandidate(NamedTuple):
    """A candidate, seconds of its step, and whether its costs are extrapolated from other sizes of micro-batches."""

    candidate: Candidate
    seconds: float
    extrapolated: bool = False


@dataclass(frozen=True)
class TuningDecision:
    """The decision on what runs from the next step on.

    Attributes:
        ranked: candidates whose steps were worked out, the fastest first: as many as it takes to be sure.
        current: what runs now, by its own costs.
        chosen: what shall run.
        effect: what the links do.
        unsteadiness: standard deviation over mean of the transfers of the worst link.
        slack: the fewest inputs that waited at a launch while the pipeline was full; None where nothing was received.
        stalled: the share of a step in which the rank that stalled least found no input, 0 to 1; None likewise. Another
            order of the same micro-batches can't save more (Ada-Grouper, S4.4: with an input there, no rank stalls).
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
        """Whether anything changes."""
        return self.chosen.candidate.schedule != self.current.candidate.schedule or (
            self.chosen.candidate.plan != self.current.candidate.plan
        )

    @property
    def gain(self) -> float:
        """The share by which the step is predicted to take less than it does now; 0 where nothing changes."""
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
    """Ranks candidates by simulation. What it has set up for one is kept, so that asking again is cheap."""

    def __init__(self, hysteresis: float = HYSTERESIS) -> None:
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

        What runs is left at once if it is not among the candidates. Of those that are as fast, the one that holds least
        is taken. Where links are unsteady, averages do not show what an order gains that is not fixed: measured, 13 %
        over kFkB with as much memory. So it goes first there if it is predicted to be slower by less than 5 %, with all
        the memory it can have, and needs no predicted gain.

        Args:
            base: bytes of the stages.

        Raises:
            PlanError: there are no candidates.
            ProgramError, DeadlockError: what is chosen does not hold.
        """
        if not candidates:
            raise PlanError("there is nothing to choose from")
        effect = effect_of(current.plan, measured.costs(base), measured.lag)
        blocking = effect is LinkEffect.BLOCKING
        unsteady = measured.unsteadiness > UNSTEADY and effect is not LinkEffect.FREE
        costs = measured.costs(base, overhead=not blocking)
        costs = replace(costs, regime="blocking") if blocking else costs
        plans = {*(c.plan for c in candidates), current.plan}
        sizes = {plan: measured.has_measured(plan) for plan in plans}
        least = {plan: least_step(plan, costs) / 1e9 for plan in plans}

        def ranked(candidate: Candidate) -> RankedCandidate:
            known = self._rehearsal(candidate)
            seconds = known.makespan(costs) / 1e9
            return RankedCandidate(candidate, seconds, not sizes[candidate.plan])

        every: dict[int, RankedCandidate] = {}
        left = _in_turn(candidates, unsteady)
        best: RankedCandidate | None = None
        while best is None:
            every |= {n: ranked(candidates[n]) for n in left.pop(0)}
            rest = min((least[candidates[n].plan] for together in left for n in together), default=inf)
            best = _certain(_sorted(every), rest, unsteady)
        listed = next((n for n, c in enumerate(candidates) if _same(c, current)), None)
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
            tuple(_sorted(every)), now, chosen, effect, measured.unsteadiness, measured.slack, measured.stalled
        )

    def prepare(self, candidates: Iterable[Candidate], costs: CostModel) -> None:
        """Do for candidates that are known before anything is measured what their first decision would have to: set
        them up, simulate them once, under any costs, and verify them.

        Raises:
            ProgramError, DeadlockError: one of them does not hold.
        """
        for candidate in candidates:
            self._rehearsal(candidate).makespan(costs)
            self._verify(candidate)

    def _rehearsal(self, candidate: Candidate) -> CompiledSimulation:
        key = candidate.schedule, candidate.plan
        found = self._known.get(key)
        if found is None:
            found = CompiledSimulation(_ordered(candidate), candidate.plan)
            if len(self._known) >= _KEPT:
                self._known.popitem(last=False)
            self._known[key] = found
        self._known.move_to_end(key)
        return found

    def _verify(self, candidate: Candidate) -> None:
        key = candidate.schedule, candidate.plan
        if key in self._verified:
            return
        order = _ordered(candidate)
        if isinstance(order, Program):
            verify(order, candidate.plan)
        if len(self._verified) >= _KEPT:
            self._verified.clear()
        self._verified.add(key)


def _in_turn(candidates: Sequence[Candidate], unsteady: bool) -> list[list[int]]:
    """Return the numbers of candidates in the order in which they are worked out: those that hold least first, and
    those that hold as much together, for the faster one is taken; all policies before that where links are unsteady."""
    turn: dict[int, list[int]] = {}
    for number, candidate in enumerate(candidates):
        first = unsteady and not isinstance(candidate.schedule, Schedule)
        turn.setdefault(-1 if first else sum(candidate.peak_bytes), []).append(number)
    return [turn[key] for key in sorted(turn)]


def _certain(every: Sequence[RankedCandidate], rest: float, unsteady: bool) -> RankedCandidate | None:
    """Return the best of `every`, sorted, if nothing that holds more and takes `rest` seconds at least can change
    that."""
    fastest = every[0].seconds
    best = _best(every, fastest, unsteady)
    return best if rest >= fastest or _best(every, rest, unsteady) is best else None


def _best(every: Sequence[RankedCandidate], fastest: float, unsteady: bool) -> RankedCandidate | None:
    """Return the candidate that is taken where the fastest candidate takes so many seconds; None where none of these is
    as fast."""
    close = [r for r in every if r.seconds <= fastest * (1 + TIE)]
    policies = [r for r in every if _is_policy(r) and r.seconds <= fastest * (1 + UNDERSTATED)]
    if unsteady and policies:
        return max(policies, key=lambda r: sum(r.candidate.peak_bytes))
    return min(close, key=lambda r: (sum(r.candidate.peak_bytes), r.seconds), default=None)


def _sorted(every: Mapping[int, RankedCandidate]) -> list[RankedCandidate]:
    """Return the fastest first; of equals, what comes first among the candidates."""
    return [ranked for _, ranked in sorted(every.items(), key=lambda item: (item[1].seconds, item[0]))]


def _same(one: Candidate, other: Candidate) -> bool:
    return (one.schedule, one.plan) == (other.schedule, other.plan)


def _ordered(candidate: Candidate) -> Program | Policy:
    schedule = candidate.schedule
    return schedule.program(candidate.plan) if isinstance(schedule, Schedule) else schedule


def _is_policy(ranked: RankedCandidate) -> bool:
    return not isinstance(ranked.candidate.schedule, Schedule)
