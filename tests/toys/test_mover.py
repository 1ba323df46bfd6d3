"""A planner that moves a layer to a neighboring stage every ten batches, installed through its entry point."""

from __future__ import annotations

from functools import cache
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from tests.toys.install import install
from tests.trainer.lit import Case, Lit, LitFrozen, data, differences, plain_values, quiet, train
from tests.trainers import make_trainer

BATCHES = 24
"""The number of batches, three per epoch. Layers move before batches 10 and 20, counted from 0."""
NINE = [(0, 4), (4, 9)], [(0, 5), (5, 9)], [(0, 4), (4, 9)]
"""The layers of both stages before, between and after the two moves."""
MOVERS = [pytest.param("mover", marks=pytest.mark.slow), "stashing_mover"]
"""The schedules to test. tests/trainer/test_replan.py has a smaller and faster test of a schedule that flushes."""


class Sees(Callback):
    """A callback that records the layers of each stage after every batch, and saves checkpoints at the first move."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.layers: list[Any] = []
        self.consistent: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        holdings, layers = trainer.strategy.current_run.local_layers.holdings, module.model._modules
        self.layers.append([tuple(span) for span in holdings.layers])
        here = [n for n, p in module.named_parameters() if n.startswith("model.") and not p.is_meta]
        names = {id(p): n for n, p in module.named_parameters()}
        (group,) = ([p for g in o.param_groups for p in g["params"]] for o in trainer.optimizers)
        stepped = [names[id(p)] for p in group if names[id(p)].startswith("model.") and not p.is_meta]
        self.consistent.append(
            sorted(here) == sorted(stepped)
            and {int(n.split(".")[1]) for n in here} <= {*holdings.local}
            and list(layers) == [str(n) for n in holdings.local]
        )
        if trainer.global_step in (10, 11):
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer


def runs(rank: int, schedule: str, folder: str) -> list[tuple[Any, ...]]:
    """Run four trainings: with moves, without moves, and two that resume before and after the first move."""
    install("mover")
    found = []
    for moves, resume in ((True, None), (False, None), (True, 10), (True, 11)):
        sees = Sees(f"{folder}/{moves}{resume}")
        form = "sharded" if moves and resume is None else "full"
        strategy = {
            "schedule": schedule,
            "partition": "parameters",
            "checkpoint": form,
            "schedule_args": {"moves": moves},
        }
        options = {"max_steps": BATCHES, "max_epochs": -1, "limit_val_batches": 0, "callbacks": [sees]}
        if schedule == "mover":
            options |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        case = Case(
            LitFrozen, {"dropout": 0.2}, strategy, options, resume=resume and f"{folder}/TrueNone/{resume}.ckpt"
        )
        out = train(case, 2, sees.folder)
        for output in out["outputs"][:1]:  # not known yet if stages step at different times
            output["loss"] = np.nan_to_num(output["loss"])
        report = sees.trainer.strategy.report
        about = [tuple(span) for span in report.record.plan.layers], report.measured.makespan > 0
        found.append((out, sees.layers, all(sees.consistent), about))
    return found


@cache
def results(schedule: str) -> list[list[tuple[Any, ...]]]:
    """Return the results of `runs` on both ranks."""
    return run_ranks(runs, 2, schedule, mkdtemp(), timeout=120)


@pytest.mark.parametrize("schedule", MOVERS)
def test_everything_is_as_in_a_run_that_drains_and_moves_nothing(schedule: str) -> None:
    """A training with moves gives the same results bit by bit as a training that only drains."""
    for (moved, layers, consistent, about), (stayed, same, *_), *_ in results(schedule):
        # A stream moves layers when all ranks have reported or are drained: after batch 20, with which an epoch ends.
        assert [layers[n] for n in (0, 9, 10, 19, 21, 23)] == [p for p in NINE for _ in (0, 1)]
        assert (same, consistent, about) == ([NINE[0]] * BATCHES, True, (NINE[2], True))
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(moved[key], stayed[key], tolerance=0) == []
        assert differences(moved.get("rows"), stayed.get("rows"), tolerance=0) == []


@pytest.mark.parametrize("schedule", MOVERS)
def test_training_continues_from_directly_before_and_after_a_move(schedule: str) -> None:
    """Trainings resumed from checkpoints directly before and after a move give the same results bit by bit."""
    for (moved, *_), _, (before, layers, *_), (after, *_) in results(schedule):
        assert [layers[n] for n in (0, 9, 11)] == [NINE[1], NINE[1], NINE[0]]
        for found in (before, after):
            assert differences(found["weights"], moved["weights"], tolerance=0) == []
            later = found["outputs"][1:]
            assert len(later) >= BATCHES - 12
            assert differences(later, moved["outputs"][-len(later) :], tolerance=0) == []


class Layers(Callback):
    """A callback that records the layers of each stage after every batch."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found.append([tuple(span) for span in trainer.strategy.current_run.local_layers.holdings.layers])


def accumulating(rank: int) -> list[Any]:
    """Train with accumulated gradients, with and without moves.

    Returns:
        For both trainings, the weights and the batches before which layers moved.
    """
    install("mover")
    quiet()
    found = []
    for moves in (True, False):
        pl.seed_everything(3, verbose=False)
        module, layers = Lit().double(), Layers()
        trainer = make_trainer(
            strategy=PipelineStrategy(
                "stashing_mover", 2, partition="parameters", schedule_args={"moves": moves, "every": 5}
            ),
            max_epochs=1,
            limit_val_batches=0,
            accumulate_grad_batches=4,
            callbacks=[layers],
        )
        trainer.fit(module, DataLoader(data(4 * 15), batch_size=4))
        moved = [n for n in range(1, len(layers.found)) if layers.found[n] != layers.found[n - 1]]
        found.append((plain_values(dict(module.state_dict())), moved))
    return found


def test_gradients_that_are_accumulated_move_with_their_layer() -> None:
    for (moved, batches), (stayed, none) in run_ranks(accumulating, 2, timeout=60):
        assert (batches, none) == ([8, 13], [])  # batch 13 is the second of four that are stepped together
        assert differences(moved, stayed, tolerance=0) == []
