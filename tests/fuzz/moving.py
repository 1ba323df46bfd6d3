"""Layers of a random module that move: after random batches, or because a planner sees that a rank is slow."""

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
"""The share of batches after which layers are to move."""


class MovesLayers(Callback):
    """Adopts cuts that a seed says, the same on all ranks; those that can't be had are left out.

    Attributes:
        moved: how many were adopted.
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
    """Where stages begin in each batch, from which the numbers of batches before which layers have moved follow."""

    def __init__(self) -> None:
        self._cuts: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._cuts.append(tuple(span.start for span in trainer.strategy.current_run.local_layers.holdings.layers[1:]))

    @property
    def moved(self) -> dict[int, tuple[int, ...]]:
        """The new cut, by the batch before which layers have moved."""
        return {n: new for n, (old, new) in enumerate(pairwise(self._cuts), 1) if new != old}


REPLANS = "replans"


def slow_neighbour(rng: random.Random, ranks: int, **strategy: Any) -> Piece:
    """A neighbour that has layers take longer on one rank for some time, and on another one later."""
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
