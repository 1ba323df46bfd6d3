"""Layers of random modules that move after random batches, or because a planner finds a slow rank."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning.pytorch import Callback

from lightning_pipes.ir import PlanError, Span
from tests.fuzz.pieces import Piece, frozen

OFTEN = 0.5
"""The share of batches after which a new cut is tried."""


class MovesLayers(Callback):
    """A callback that adopts random cuts, the same on all ranks. Cuts that are not possible are skipped.

    Attributes:
        moved: the number of adopted cuts.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self.moved = random.Random(f"cuts {seed}"), 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        wanted, plan = self._rng.random() < OFTEN, strategy.current_run.engine.plan
        layers = len(strategy.current_run.local_layers.cut.full)
        ends = [0, *sorted(self._rng.choices(range(layers + 1), k=plan.n_stages - 1)), layers]
        if wanted:
            with suppress(PlanError):  # layers that share a parameter stay together
                strategy.adopt(
                    strategy.schedule, plan=replace(plan, layers=tuple(Span(a, b) for a, b in pairwise(ends)))
                )
                self.moved += 1


class KeepsCuts(Callback):
    """A callback that records the cut of each batch, from which the batches before which layers moved follow."""

    def __init__(self) -> None:
        self._cuts: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._cuts.append(tuple(span.start for span in trainer.strategy.current_run.local_layers.holdings.layers[1:]))

    @property
    def moved(self) -> dict[int, tuple[int, ...]]:
        """The new cuts, by the number of the batch before which layers moved."""
        return {n: new for n, (old, new) in enumerate(pairwise(self._cuts), 1) if new != old}


REPLANS = "replans"


def slow_neighbour(rng: random.Random, ranks: int, **strategy: Any) -> Piece:
    """Return a piece that slows down the layers on one rank for some time, and later on another rank."""
    first, calls = rng.randrange(ranks), rng.choice((60, 100, 1000))
    top = [
        "import os",
        "import time",
        "",
        "calls = 0",
        "",
        "def interfere():",
        "    global calls",
        "    calls += 1",
        "    if not torch.distributed.is_initialized():",
        "        return",
        f"    if int(os.environ['LOCAL_RANK']) == ({first} + calls // {calls}) % {ranks}:",
        "        time.sleep(0.004)",
        "",
    ]
    return Piece(REPLANS, frozen({"top": top, "block_in": ["interfere()"]}), strategy=strategy)
