"""Layers of a random module that move after random batches."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning.pytorch import Callback

from lightning_pipes.ir import PlanError, Span

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
        wanted, plan = self._rng.random() < OFTEN, strategy.running.engine.plan
        layers = len(strategy.running.part.cut.full)
        ends = [0, *sorted(self._rng.choices(range(layers + 1), k=plan.n_stages - 1)), layers]
        if wanted:
            with suppress(PlanError):  # layers that share a parameter stay together
                strategy.adopt(
                    strategy.schedule, plan=replace(plan, layers=tuple(Span(a, b) for a, b in pairwise(ends)))
                )
                self.moved += 1
