"""Events of batches that overlap, from one flush to the next, for the report."""

from __future__ import annotations

from collections import deque

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import LayerUse, Plan, Program
from lightning_pipes.trainer.plan.plans import Plans
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
