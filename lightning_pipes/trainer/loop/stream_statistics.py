"""Observations of batches that overlap, for planners; no rank waits for them.

batch 50    every rank leaves what it has seen since the last look         a few numbers, in the store
batch 54    all have come that far: every rank reads what all have left, and asks its planner
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import Kind, LayerUse, Plan, Program
from lightning_pipes.planning.replanning import FreeBytes, Observation
from lightning_pipes.sim import Event
from lightning_pipes.trainer.loop.step_statistics import RankStatistics, StepStatistics
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.notices import Notices
from lightning_pipes.trainer.reports.report import Window

SHOWN_BATCHES = 50
"""Batches of a window that a policy ordered: predicting thousands by the policy takes minutes."""


class WindowRecorder:
    """Records the batches since the last flush."""

    def __init__(self) -> None:
        self._batches = 0
        self._uses: deque[LayerUse] = deque(maxlen=SHOWN_BATCHES)
        self._programs: dict[tuple[Plan, int], Program] = {}

    def add(self, use: LayerUse) -> None:
        """Add a batch that uses these layers."""
        self._batches += 1
        self._uses.append(use)

    def last_window(self, engine: Engine, plans: Plans) -> Window:
        """Return the window of this rank's last batches, counted from 0, ordered by `plans`."""
        plan, batches, uses = engine.plan, self._batches, tuple(self._uses)
        self._batches = 0
        self._uses.clear()
        order = plans.for_rows(plan.jobs[0].rows)[1]
        if isinstance(order, Program):
            if (plan, batches) not in self._programs:
                self._programs[plan, batches] = order.unroll(batches)
            return Window(plan, self._programs[plan, batches], engine.events)
        first = batches - len(uses)
        events = [
            e._replace(instruction=e.instruction._replace(batch=e.instruction.batch - first))
            for e in engine.events
            if e.instruction.batch >= first
        ]
        return Window(plan, order, events, uses)


class StreamStatistics:
    """Observations of a stream, one at a time.

    Collective: all ranks make one, and the same calls for the same batches.

    Args:
        looks: what all ranks have seen so far.
        notices: by which they tell each other.
        ranks: global ones, of all replicas.
        rank: this one.
        late: batches that ranks may be apart.
    """

    def __init__(self, looks: StepStatistics, notices: Notices, ranks: Sequence[int], rank: int, late: int) -> None:
        self._looks, self._notices, self._ranks, self._rank, self._late = looks, notices, ranks, rank, late
        self._begun: tuple[int, Plan, RankStatistics] | None = None
        self._left: deque[int] = deque()  # batches of looks whose notices are there
        self._told: deque[int] = deque()  # batches before which free bytes were told
        self._ended: list[Window] = []
        self._from = 0  # events that end before were looked at

    def add_window(self, window: Window) -> None:
        """Add a window of the rank that a flush has ended; windows since the last observation count."""
        events = complete_events(window.events, self._from)
        if events:
            self._ended.append(replace(window, events=events))

    @property
    def is_pending(self) -> bool:
        """Whether an observation waits for other ranks."""
        return self._begun is not None

    def drop_observation(self) -> None:
        """Drop the observation that waits for other ranks."""
        self._begun = None

    def start_observation(self, batch: int, window: Window) -> None:
        """Send this rank's part of an observation, before batch number `batch`; none is pending.

        Args:
            window: the one that goes on.
        """
        plan = window.plan
        self.add_window(window)
        self._from = max((e.end for each in (*self._ended, window) for e in each.events), default=self._from)
        first = replace(window, events=[])  # a sample is that of a window after another one
        sight = self._looks.own_statistics(plan, [first, *(each for each in self._ended if each.plan is plan)])
        self._ended.clear()
        # The one after it has begun everywhere, so all have read it.
        while len(self._left) > 1 and self._left[1] <= batch - self._late:
            self._notices.remove(self._name(self._left.popleft(), self._rank))
        self._left.append(batch)
        self._notices.put(self._name(batch, self._rank), sight)
        self._begun = batch, plan, sight

    def collect_observations(self, batch: int, rows: int, flushed: bool) -> tuple[Observation, ...] | None:
        """Return observations of the plan for `rows` samples, before batch number `batch`; None without a new one.

        Args:
            flushed: whether all ranks are at this batch.
        """
        if self._begun is None or self._begun[1].jobs[0].rows != rows:
            return None
        begun, plan, mine = self._begun
        if not flushed and batch - begun <= self._late:
            return None
        self._begun = None
        sights = [mine if r == self._rank else self._notices.get(self._name(begun, r)) for r in self._ranks]
        return self._looks.merge_observations(sights, plan)

    def collect_free_bytes(self, batch: int, plan: Plan) -> FreeBytes | None:
        """Send the free bytes of this rank before batch number `batch`, and return those of the devices of `plan`.

        They are those of about `late` batches before; None until all ranks are sure to have told."""
        self._told.append(batch)
        self._notices.put(f"free/{batch}/{self._rank}", self._looks.own_free_bytes())
        while self._told[0] < batch - 2 * self._late - 1:
            self._notices.remove(f"free/{self._told.popleft()}/{self._rank}")
        then = batch - self._late - 1
        if then not in self._told:
            return None
        return self._looks.merge_free_bytes([self._notices.get(f"free/{then}/{r}") for r in self._ranks], plan)

    @staticmethod
    def _name(batch: int, rank: int) -> str:
        return f"look/{batch}/{rank}"


def complete_events(events: Sequence[Event], since: int) -> list[Event]:
    """Return events of batches that began and ended since a time of the rank's clock, with batches counted from 0."""
    events = [e for e in events if e.start > since]
    ended = {e.instruction.batch for e in events if e.instruction.kind is Kind.STEP}
    begun = {e.instruction.batch for e in events if e.instruction.kind is Kind.F and not e.instruction.span.start}
    numbers = {batch: n for n, batch in enumerate(sorted(ended & begun))}
    return [
        e._replace(instruction=e.instruction._replace(batch=numbers[e.instruction.batch]))
        for e in events
        if e.instruction.batch in numbers
    ]
