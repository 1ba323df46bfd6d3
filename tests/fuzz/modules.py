"""Random LightningModules, each of which is a whole script made from a seed.

`python -m tests.fuzz.modules SEED` prints and runs one module, and `0-299` runs many. `--shrink` reduces modules that
are wrong. A module consists of a base (the place of its layers, its batches, loss and optimizer) and some pieces.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.moving import slow_neighbour
from tests.fuzz.pieces import MAKERS, Base, Piece, is_off
from tests.fuzz.scripts import OPTIMIZERS, script


@dataclass(frozen=True)
class Made:
    """A module: all data from which its source is made."""

    seed: int
    base: Base
    pieces: tuple[Piece, ...]

    @property
    def uncompared(self) -> frozenset[str]:
        """Results that are not compared. If batches overlap, hooks get the latest result that is available."""
        return frozenset({"outputs", "rows", "logged"} if self.base.place in ("supernet", "headless") else ())

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(piece.cause for piece in self.pieces)

    def without(self, number: int) -> Made:
        return replace(self, pieces=self.pieces[:number] + self.pieces[number + 1 :])


PLACES = ("sequential", "loop", "enumerated", "nested", "masked", "several")
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("1f1b", {}),
    ("1f1b", {}),
    ("gpipe", {}),
    ("kfkb", {"k": 2}),
    ("interleaved", {"stages_per_rank": 2}),
    ("hanayo", {"waves": 1}),
    ("v", {}),
    ("zero_bubble", {}),
    ("umpipe", {}),
    ("um1f1b", {}),
    ("umpipe", {"forward": (2, 4), "backward": (4, 1)}),
    ("deep", {}),
    ("per_link", {}),
    ("ready", {}),
    ("jap", {}),
)


def random_base(rng: random.Random) -> Base:
    """Return the random base of a module, without pieces."""
    schedule, arguments = rng.choice(SCHEDULES)
    return Base(
        place=rng.choice(PLACES),
        block=rng.choice(("tanh", "residual", "layer norm", "group norm", "weight norm")),
        batches=rng.choice(("pairs", "pairs", "dict", "nested", "tokens", "named")),
        loss=rng.choice(("cross entropy", "cross entropy", "square", "smooth", "weighted")),
        optimizer=rng.choice([name for name in OPTIMIZERS if name != "own"]),
        rows=rng.choice((22, 22, 24, 17)),
        size=rng.choice((8, 8, 6)),
        schedule=schedule,
        schedule_args=arguments,
        microbatches=rng.choice((1, 2, 2, 3, 4, 4)),
        epochs=rng.choice((1, 2, 2)),
        resumes=rng.random() < 0.1,
        siblings=2 if schedule == "jap" and rng.random() < 0.7 else 0,
    )


def random_module(seed: int, ranks: int = 2, pieces_at_most: int = 6, **given: Any) -> Made:
    """Return the module of a seed. It changes only if a piece is added or switched off."""
    rng = random.Random(f"module {seed}")
    base = replace(random_base(rng), ranks=ranks, **given)
    of_ranks = {key: value * (ranks // 2) for key, value in base.schedule_args.items() if isinstance(value, tuple)}
    base = replace(base, schedule_args={**base.schedule_args, **of_ranks})
    names, weights = zip(*((name, weight) for name, (_, weight) in MAKERS.items()), strict=True)
    wanted = min(pieces_at_most, rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))
    pieces: list[Piece] = []
    for attempt in range(40):
        if len(pieces) == wanted:
            break
        (name,) = rng.choices(names, weights)
        new = MAKERS[name][0](rng, base, attempt)
        kinds = {p.kind for p in pieces}
        clash = any(new.kind in p.excludes for p in pieces) or any(kind in new.excludes for kind in kinds)
        given = {key for p in pieces for key in (*p.trainer, *p.strategy, *p.only, *(UNIQUE & p.code.keys()))}
        clash |= "microbatches" in new.strategy and "forward" in base.schedule_args
        clash |= bool(given & {*new.trainer, *new.strategy, *new.only, *(UNIQUE & new.code.keys())})
        odd = any(p.refused or p.warned for p in pieces) and bool(new.refused or new.warned)
        if not (clash or odd or is_off(new.cause)):
            pieces.append(new)
    return Made(seed, base, tuple(pieces))


def padded_module(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the module of a seed, trained on sequences with labels of -100."""
    loss = random.Random(f"padded {seed}").choice(("cross entropy", "cross entropy", "smooth"))
    made = random_module(seed, ranks, pieces_at_most, batches="tokens", loss=loss, padded=True, siblings=0)
    # If the step stores a mean over labels, the stored value is not a mean over samples.
    pieces = [
        replace(p, warned=r"training_step sets self\.") if p.cause.startswith("collected:step_end:loss") else p
        for p in made.pieces
    ]
    return replace(made, pieces=tuple(pieces))


def moving_module(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the module of a seed, with layers that move during training."""
    made = random_module(seed, ranks, pieces_at_most)
    rng = random.Random(f"moves {seed}")
    # An average in a dict of the rank does not move with its layer, and is refused after layers have moved.
    made = replace(made, pieces=tuple(piece for piece in made.pieces if piece.cause != "average:in a dict"))
    return replace(made, base=replace(made.base, moves=rng.choice(("blocking", "overlapped")), epochs=2, siblings=0))


def replanned_module(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the module of a seed, with a planner that moves layers away from a slow rank."""
    rng = random.Random(f"replans {seed}")
    schedule, arguments = rng.choice([each for each in SCHEDULES if each[0] in FIXED])
    given = {"schedule": schedule, "schedule_args": arguments, "siblings": 0, "rows": 48, "microbatches": 2}
    made = random_module(seed, ranks, pieces_at_most, **given)
    if made.base.optimizer == "rmsprop":  # its twelve steps amplify a rounding error to 1e-8
        made = replace(made, base=replace(made.base, optimizer="adam"))
    kept = tuple(p for p in made.pieces if p.cause != "average:in a dict" and p.kind not in ("changes", "placement"))
    relocation = rng.choice(("blocking", "overlapped"))
    neighbour = slow_neighbour(rng, ranks, replan={"every": 2, "windows": 1}, relocation=relocation)
    return replace(made, pieces=(*kept, neighbour))


FIXED = ("1f1b", "gpipe", "kfkb", "interleaved", "hanayo", "zero_bubble")
"""Schedules for which a planner can predict the duration of a step with another cut."""
UNIQUE = {"optimizer_step", "zero_grad", "groups", "scheduler", "clipping", "returned"}
"""Places that can hold only one piece."""


def source(made: Made) -> str:
    """Return the whole script. `python script.py` trains the module in a pipeline on CPUs, `--plain` in one process."""
    return script(made.seed, made.base, made.pieces)


if __name__ == "__main__":
    from tests.fuzz.module_runs import main

    main(sys.argv[1:])
