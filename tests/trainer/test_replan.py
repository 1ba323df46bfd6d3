"""Tests of replanning: layers move to other ranks during training if a rank slows down or a profile turns out wrong."""

from __future__ import annotations

from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.ir import InputError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan import prediction
from lightning_pipes.trainer.plan.layer_profiler import LayerProfiler
from lightning_pipes.trainer.plan.trial import Trials
from lightning_pipes.trainer.ranks.processes import process_rank
from tests.trainer.lit import WIDTH, Case, Lit, as_predicted, differences, train
from tests.virtual_clock import VirtualClock

BATCHES = 24
SLOW_FROM = 6
PLANNER = {"every": 4, "windows": 2}
LAYERS = 8
_slow = {"rank": -1}
_time = VirtualClock()


class Pause(torch.autograd.Function):
    """A function that takes the time of a large layer on the virtual clock, and three times as long on a slow rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        pause(0.001)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        pause(0.002)
        return gradients[0]


def pause(seconds: float) -> None:
    """Advance the virtual clock, three times as far on the slow rank."""
    rank = process_rank() if dist.is_initialized() else 0
    _time.sleep(seconds * (3 if rank == _slow["rank"] else 1))


class Paced(nn.Module):
    """A layer that also takes the time of a large layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.inner(x))  # type: ignore[no-any-return,no-untyped-call]


class LitPaced(Lit):
    """A module of layers that take the time of large layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        layers = [Paced(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS - 1)]
        self.model = nn.Sequential(*layers, Paced(nn.Linear(WIDTH, 3)))


class Sees(Callback):
    """A callback that slows down the process of the last stage after some batches.

    It also records the number of layers of each stage.
    """

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.after = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        _slow["rank"] = 0 if len(self.sizes) >= SLOW_FROM else -1  # the last stage is on the first process

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.sizes.append([span.rows for span in trainer.strategy.current_run.local_layers.holdings.layers])


def faked(self: Any, pieces: int | None, split: bool) -> ModelProfile:
    """Return a wrong profile in place of a measurement.

    The first two layers take twice their real time, and all others half of it.
    """
    seconds = [0.002] * 2 + [0.0005] * (LAYERS - 2)
    layers = (LayerProfile(str(n), ((1, s),), ((1, 2 * s),), output=((1, 64.0),)) for n, s in enumerate(seconds))
    return ModelProfile(tuple(layers))


def corrected(rank: int, folder: str) -> tuple[dict[str, Any], list[list[int]], str, float | None]:
    """Train with a wrong profile.

    Returns:
        The results of the run, the number of layers of each stage after each batch, the reason of the choice in the
        report, and the predicted seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        _time.patch(patch)
        patch.setattr(LayerProfiler, "profile", faked)
        patch.setattr(Trials, "run", as_predicted)
        patch.setattr(prediction, "MIN_COMPARED_STEPS", 4)
        patch.setattr(prediction, "MAX_COMPARED_STEPS", 4)
        _slow["rank"], sees = -1, Sees()
        sees.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]  # no rank is slowed down
        options = {"max_steps": BATCHES, "max_epochs": -1, "limit_val_batches": 0, "callbacks": [sees]}
        case = Case(LitPaced, {}, {"schedule": "1f1b", "microbatches": 4}, options)
        kept: list[Any] = []
        end = Kept(kept)
        options["callbacks"] = [sees, end]
        out = train(case, 2, folder)
        record = kept[0].report.record
        return out, sees.sizes, record.choice, kept[0].decision.computing


class Kept(Callback):
    """A callback that records the strategy of a run."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.kept.append(trainer.strategy)


def runs(rank: int, names: tuple[str, ...], folder: str) -> list[tuple[Any, ...]]:
    """Train with each of the named schedules, and return the results and the number of layers of each stage."""
    found = []
    for n, name in enumerate(names):
        schedule, _, replan = name.partition(" ")
        sees = Sees()
        _slow["rank"] = -1
        strategy: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "partition": "parameters"}
        if replan:
            strategy["replan"] = PLANNER
        elif schedule == "dynpipe":
            strategy["schedule_args"] = PLANNER
        options = {"max_steps": BATCHES, "max_epochs": -1, "limit_val_batches": 0, "callbacks": [sees]}
        with pytest.MonkeyPatch.context() as patch:
            _time.patch(patch)
            out = train(Case(LitPaced, {}, strategy, options), 2, f"{folder}/{n}")
        found.append((out, sees.sizes))
    return found


@cache
def results() -> list[list[tuple[Any, ...]]]:
    """Return the results of both ranks for 1F1B with and without replanning, and for dynpipe."""
    return run_ranks(runs, 2, ("1f1b replan", "1f1b", "dynpipe"), mkdtemp(), timeout=200)


def test_layers_of_a_schedule_that_flushes_move_and_weights_are_the_same() -> None:
    """With replanning, layers leave the slow rank, and all results stay bitwise equal to a run without replanning."""
    for (moved, sizes), (stayed, same), _ in results():
        assert {tuple(each) for each in same} == {(4, 4)}
        assert sizes[: SLOW_FROM + 1] == [[4, 4]] * (SLOW_FROM + 1)
        assert sizes[-1][0] > 4
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(moved[key], stayed[key], tolerance=0) == []


def test_a_profile_that_steps_contradict_is_corrected_and_the_cut_made_anew() -> None:
    """A run that starts with a wrong profile returns to the even cut, and its results stay bitwise equal."""
    for (moved, sizes, choice, seconds), (_, (stayed, _), _) in zip(
        run_ranks(corrected, 2, mkdtemp(), timeout=200), results(), strict=True
    ):
        assert sizes[0] == [2, 6]
        assert sizes[-1] == [4, 4]
        assert "Stages now begin at layers [4] instead of [2]" in choice
        assert seconds is not None
        assert seconds > 0.05  # 12 ms per micro-batch and stage, and 12 ms to fill and drain the pipeline
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(moved[key], stayed[key], tolerance=0) == []


def test_layers_of_dynpipe_move() -> None:
    for _, _, (out, sizes) in results():
        assert sizes[: SLOW_FROM + 1] == [[4, 4]] * (SLOW_FROM + 1)
        assert sizes[-1][0] > 4
        assert out["steps"] == BATCHES


def test_schedules_that_can_replan() -> None:
    """`replan` is refused for schedules that always replan, schedules without a fixed order, and unknown settings."""
    assert PipelineStrategy("kfkb", replan={"every": 7})._request.replanner.every == 7  # type: ignore[union-attr]
    assert PipelineStrategy("kfkb")._request.replanner is None
    with pytest.raises(InputError, match="already revises its plan during the run"):
        PipelineStrategy("dynpipe", replan=True)
    with pytest.raises(InputError, match="decides its order at run time"):
        PipelineStrategy("ready", replan=True)
    with pytest.raises(PlanError, match="evry"):
        PipelineStrategy("1f1b", replan={"evry": 7})
