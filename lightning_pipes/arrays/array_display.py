"""A common progress display and event record for all siblings of an array."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import Cut, Plan
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.sim.timeline import Event, Timeline

_REDRAW_SECONDS = 0.2


class ArrayDisplay:
    """Show one progress line per running sibling, and a summary line above them.

    The line of a sibling shows its epoch, its batches, the remaining time, and the metrics of its progress bar. The
    summary line shows the number of siblings that have ended, and the share of the time in which this rank computed.
    If other progress bars are open, such as the bar of a study, the lines are shown below them.

    Args:
        shown: whether anything is shown.
    """

    def __init__(self, shown: bool) -> None:
        self._bars: dict[int, Any] = {}
        self._slots: dict[int, int] = {}
        self._started = read_seconds()
        self._drawn: dict[int, float] = {}
        self._computed = 0.0
        self._ended = 0
        self._whole = tqdm(bar_format="{desc}", file=sys.stderr, leave=True, disable=not shown)
        self._shown = shown

    def add_busy_seconds(self, seconds: float) -> None:
        """Add seconds during which this rank computed."""
        self._computed += seconds

    def update_sibling(self, index: int, trainer: pl.Trainer | None) -> None:
        """Update the line of a sibling after its turn."""
        if not self._shown or trainer is None:
            return
        if index not in self._bars:
            slot = self._slots[index] = next(n for n in count(1) if n not in self._slots.values())
            self._bars[index] = tqdm(position=abs(self._whole.pos) + slot, leave=False, file=sys.stderr, unit="batch")
        bar, now = self._bars[index], read_seconds()
        bar.n, bar.total = trainer.fit_loop.total_batch_idx + 1, _batches(trainer)
        if now > self._drawn.get(index, 0.0) + _REDRAW_SECONDS:
            self._drawn[index] = now
            bar.set_description(f"sibling {index}, epoch {trainer.current_epoch}", refresh=False)
            bar.set_postfix(trainer.progress_bar_metrics, refresh=False)
            bar.refresh()
            self._draw()

    def end_sibling(self, index: int, counts: bool) -> None:
        """Remove the line of a sibling that has ended.

        Args:
            index: the index of the sibling.
            counts: whether the sibling is added to the number of siblings that have ended.
        """
        self._ended += counts
        bar = self._bars.pop(index, None)
        if bar is not None:
            del self._slots[index]
            bar.close()
        self._draw()

    def close(self) -> None:
        """Close all lines."""
        for bar in self._bars.values():
            bar.close()
        self._whole.close()

    def _draw(self) -> None:
        share = self._computed / max(read_seconds() - self._started, 1e-9)
        self._whole.set_description_str(
            f"job array: {self._ended} ended, {len(self._bars)} under way, {share:.0%} busy"
        )


def _batches(trainer: pl.Trainer) -> int | None:
    """Return the total number of training batches, or None if it is unknown, as during the sanity check."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    by_epochs = float("inf") if epochs in (None, -1) else trainer.num_training_batches * epochs
    by_steps = float("inf") if steps == -1 else steps * trainer.accumulate_grad_batches
    total = min(by_epochs, by_steps)
    return int(total) if 0 < total < float("inf") else None


MAX_RECORDED_EVENTS = 200_000
"""The largest number of recorded events. Later events of a long run are not recorded."""


class ArrayRecord:
    """The events of all siblings on this rank.

    In each event, the job is the index of the sibling, and the batch is the number of this sibling's batch.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._batches: Counter[int] = Counter()
        self._cuts: dict[int, Cut] = {}
        self._ranks: tuple[int, ...] = ()

    def add(self, index: int, engine: Engine) -> None:
        """Add the computations of the engine's open window to sibling number `index`, if the engine is training."""
        if not engine.is_training:
            return
        batch, plan = self._batches[index], engine.plan
        self._batches[index] += 1
        if len(self.events) < MAX_RECORDED_EVENTS:
            self.events += [
                e._replace(instruction=e.instruction._replace(job=index, batch=batch)) for e in engine.events_so_far
            ]
        cut = self._cuts.get(index)
        if cut is None or cut.rows < plan.jobs[0].rows:
            self._cuts[index] = plan.jobs[0]
        self._ranks = plan.ranks

    def timeline(self, rows: Sequence[Sequence[Event]]) -> Timeline | None:
        """Return a timeline of the events that all ranks recorded, or None if no sibling was trained.

        Args:
            rows: the events of each rank, in the order of the pipeline.
        """
        if not self._cuts:
            return None
        some = next(iter(self._cuts.values()))
        jobs = tuple(self._cuts.get(index, some) for index in range(max(self._cuts) + 1))
        return Timeline.from_ranks(rows, Plan(self._ranks, jobs), name="measured")
