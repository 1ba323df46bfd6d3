"""The timeline of an array: the computations of all siblings in one timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import Cut, Plan
from lightning_pipes.sim.timeline import Event, Timeline

KEPT = 200_000
"""Events; an array that goes on loses its later ones."""


class ArrayRecord:
    """Siblings' events on this rank, with the sibling's number as job and the number of its batch."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._batches: Counter[int] = Counter()
        self._cuts: dict[int, Cut] = {}
        self._ranks: tuple[int, ...] = ()

    def add(self, index: int, engine: Engine) -> None:
        """Add the computations of the engine's open window to sibling number `index`, if it trains."""
        if not engine.training:
            return
        batch, plan = self._batches[index], engine.plan
        self._batches[index] += 1
        if len(self.events) < KEPT:
            self.events += [
                e._replace(instruction=e.instruction._replace(job=index, batch=batch)) for e in engine.under_way
            ]
        cut = self._cuts.get(index)
        if cut is None or cut.rows < plan.jobs[0].rows:
            self._cuts[index] = plan.jobs[0]
        self._ranks = plan.ranks

    def timeline(self, rows: Sequence[Sequence[Event]]) -> Timeline | None:
        """All of it, from what each rank has recorded; None if nobody trained."""
        if not self._cuts:
            return None
        some = next(iter(self._cuts.values()))
        jobs = tuple(self._cuts.get(index, some) for index in range(max(self._cuts) + 1))
        return Timeline.from_ranks(rows, Plan(self._ranks, jobs), name="measured")
