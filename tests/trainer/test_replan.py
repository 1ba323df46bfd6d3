"""Layers leave a rank that something slows down, or that has too many by what steps show, while training goes on."""

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
from lightning_pipes.trainer.plan.trial import Trial, Trials
from lightning_pipes.trainer.ranks.processes import process_rank
from tests.trainer.lit import WIDTH, Case, Lit, differences, train
from tests.virtual_clock import VirtualClock

BATCHES = 24
SLOW_FROM = 6
PLANNER = {"every": 4, "windows": 2}
LAYERS = 8
_slow = {"rank": -1}
_time = VirtualClock()


class Pause(torch.autograd.Function):
    """Takes as long as a layer of a large model would, three times as long where something slows the rank down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        pause(0.001)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        pause(0.002)
        return gradients[0]


def pause(seconds: float) -> None:
    rank = process_rank() if dist.is_initialized() else 0
    _time.sleep(seconds * (3 if rank == _slow["rank"] else 1))


class Paced(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.inner(x))  # type: ignore[no-any-return,no-untyped-call]


class LitPaced(Lit):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        layers = [Paced(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS - 1)]
        self.model = nn.Sequential(*layers, Paced(nn.Linear(WIDTH, 3)))


class Sees(Callback):
    """Slows the process of stage 1 down after some batches, and keeps who has how many layers."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.after = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        _slow["rank"] = 0 if len(self.sizes) >= SLOW_FROM else -1  # the last stage is on the first process

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.sizes.append([span.rows for span in trainer.strategy.current_run.local_layers.holdings.layers])


def faked(self: Any, pieces: int | None, split: bool) -> ModelProfile:
    """In place of a measurement: the first two layers take twice as long as they do, the others half as long."""
    seconds = [0.002] * 2 + [0.0005] * (LAYERS - 2)
    layers = (LayerProfile(str(n), ((1, s),), ((1, 2 * s),), output=((1, 64.0),)) for n, s in enumerate(seconds))
    return ModelProfile(tuple(layers))


def as_predicted(self: Any, made: Any, *_: Any) -> Trial:
    """In place of a trial of a faked profile."""
    return Trial(1.0, 1.0, (1.0,) * len(made.layers))


def corrected(rank: int, folder: str) -> tuple[dict[str, Any], list[list[int]], str, float | None]:
    """A run by a profile that is wrong: what it leaves, who had how many layers, and what its report says."""
    with pytest.MonkeyPatch.context() as patch:
        _time.patch(patch)
        patch.setattr(LayerProfiler, "profile", faked)
        patch.setattr(Trials, "run", as_predicted)
        patch.setattr(prediction, "FEWEST", 4)
        patch.setattr(prediction, "MOST", 4)
        _slow["rank"], sees = -1, Sees()
        sees.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]  # nobody slows anything down
        options = {"max_steps": BATCHES, "max_epochs": -1, "limit_val_batches": 0, "callbacks": [sees]}
        case = Case(LitPaced, {}, {"schedule": "1f1b", "microbatches": 4}, options)
        kept: list[Any] = []
        end = Kept(kept)
        options["callbacks"] = [sees, end]
        out = train(case, 2, folder)
        record = kept[0].report.record
        return out, sees.sizes, record.choice, kept[0].decision.computing


class Kept(Callback):
    """The strategy of a run."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.kept.append(trainer.strategy)


def runs(rank: int, names: tuple[str, ...], folder: str) -> list[tuple[Any, ...]]:
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
    return run_ranks(runs, 2, ("1f1b replan", "1f1b", "dynpipe"), mkdtemp(), timeout=200)


def test_layers_of_a_schedule_that_flushes_move_and_weights_are_the_same() -> None:
    for (moved, sizes), (stayed, same), _ in results():
        assert {tuple(each) for each in same} == {(4, 4)}
        assert sizes[: SLOW_FROM + 1] == [[4, 4]] * (SLOW_FROM + 1)
        assert sizes[-1][0] > 4
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(moved[key], stayed[key], tolerance=0) == []


def test_a_profile_that_steps_contradict_is_corrected_and_the_cut_made_anew() -> None:
    for (moved, sizes, choice, seconds), (_, (stayed, _), _) in zip(
        run_ranks(corrected, 2, mkdtemp(), timeout=200), results(), strict=True
    ):
        assert sizes[0] == [2, 6]
        assert sizes[-1] == [4, 4]
        assert "stages begin at layers [4] from now on instead of [2]" in choice
        assert seconds is not None
        assert seconds > 0.05  # 12 ms a micro-batch on each stage, and one more to fill and to drain
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(moved[key], stayed[key], tolerance=0) == []


def test_layers_of_dynpipe_move() -> None:
    for _, _, (out, sizes) in results():
        assert sizes[: SLOW_FROM + 1] == [[4, 4]] * (SLOW_FROM + 1)
        assert sizes[-1][0] > 4
        assert out["steps"] == BATCHES


def test_who_can_replan() -> None:
    assert PipelineStrategy("kfkb", replan={"every": 7})._request.replanner.every == 7  # type: ignore[union-attr]
    assert PipelineStrategy("kfkb")._request.replanner is None
    with pytest.raises(InputError, match="goes on planning by itself"):
        PipelineStrategy("dynpipe", replan=True)
    with pytest.raises(InputError, match="decides its order while it runs"):
        PipelineStrategy("ready", replan=True)
    with pytest.raises(PlanError, match="evry"):
        PipelineStrategy("1f1b", replan={"evry": 7})
