"""Tests of layers that move between two batches, compared bitwise with layers that stay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.watch.fault_points import Fault
from lightning_pipes.ir import Plan, PlanError, Span
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.ranks.replicas import BufferSync
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from tests.trainer.lit import (
    WIDTH,
    Case,
    Lit,
    LitFrozen,
    LitOutside,
    LitTied,
    differences,
    loaders,
    plain_values,
    quiet,
    train,
)
from tests.trainer.relocation.rich import LAYERS, LitRich
from tests.trainers import make_trainer

CUTS = ((3,), (1,), (5,), (0,), (4,), (2,))
"""First layer of the second stage, for each batch."""
FOUR = ((2, 4, 6), (1, 5, 7), (3, 3, 8), (0, 4, 9), (2, 5, 6), (2, 6, 6))
"""First layers of the second to fourth of four stages, for nine layers. Each rank has two stages."""


class LitMeta(Lit):
    """A module on the meta device, whose layers no process holds all at once."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with torch.device("meta"):
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)), nn.Linear(WIDTH, 3))


class Moves(Callback):
    """Adopts another cut for the next batch."""

    def __init__(self, cuts: Sequence[tuple[int, ...]] = CUTS) -> None:
        self.cuts = cuts
        self.trained: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        strategy = trainer.strategy
        plan = strategy.current_run.windows[-1].plan
        self.trained.append(tuple(span.start for span in plan.layers[1:]))
        ends = (0, *self.cuts[len(self.trained) % len(self.cuts)], plan.layers[-1].stop)
        strategy.adopt(strategy.schedule, plan=replace(plan, layers=tuple(Span(a, b) for a, b in pairwise(ends))))


RICH = Case(
    LitRich,
    strategy={"partition": [3], "microbatches": 1},
    trainer={"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
)
TWICE = replace(RICH, trainer={"max_epochs": 2, "gradient_clip_val": 0.3})
CASES = {"rich": RICH, "twice": TWICE}
THREE = ((4, 6), (3, 6), (3, 5), (1, 8), (2, 2), (4, 6))
"""The same for three ranks with one stage each. At first, layers move between two of the ranks only."""
CLIPPED = Case(LitOutside, trainer={"max_epochs": 2, "gradient_clip_val": 0.3})
WAYS = {
    2: ({"schedule": "interleaved", "partition": [2, 4, 6], "recompute": True}, FOUR),
    3: ({"schedule": "zero_bubble", "partition": [4, 6]}, THREE),
}
KEYS = ("outputs", "metrics", "weights", "rates", "steps")


def moving(rank: int, name: str, ranks: int, more: dict[str, Any], folder: str) -> tuple[Any, Any, Any]:
    """Return the results of a training whose layers move and of one whose layers stay, and the cuts of each batch."""
    case, moves = CASES[name], Moves()
    strategy = {**(case.strategy or {}), **more}
    options = {**case.trainer, "callbacks": [moves]}
    stayed = train(Case(case.module, case.settings, strategy, case.trainer, case.evaluate), ranks, f"{folder}/stayed")
    moved = train(Case(case.module, case.settings, strategy, options, case.evaluate), ranks, f"{folder}/moved")
    return moved, stayed, moves.trained


def test_state_of_every_kind_moves() -> None:
    """Check that all state of a layer moves, against one process and bitwise against a pipeline whose layers stay.

    Meanwhile, gradients of two batches accumulate and are clipped by the norm over all layers.
    """
    alone = train(RICH.plain(), 1, mkdtemp())
    for moved, stayed, trained in run_ranks(moving, 2, "rich", 2, {}, mkdtemp(), timeout=90):
        assert trained == list(CUTS)
        for key in KEYS:
            assert differences(moved[key], alone[key]) == []
            assert differences(moved[key], stayed[key], tolerance=0) == []


def several(rank: int, ranks: int, folder: str) -> tuple[Any, Any]:
    strategy, cuts = WAYS[ranks]
    moves = Moves(cuts)
    case = replace(CLIPPED, strategy=strategy, trainer={**CLIPPED.trainer, "callbacks": [moves]})
    return train(case, ranks, folder), moves.trained


@pytest.mark.parametrize("ranks", WAYS)
def test_between_several_stages_of_a_rank_and_between_some_of_the_ranks(ranks: int) -> None:
    alone = train(CLIPPED, 1, mkdtemp())
    for moved, trained in run_ranks(several, ranks, ranks, mkdtemp(), timeout=60):
        assert trained == list(WAYS[ranks][1])
        for key in KEYS:
            assert differences(moved[key], alone[key]) == []


def test_replicas_move_alike_and_keep_their_averages_equal() -> None:
    for moved, stayed, trained in run_ranks(moving, 4, "twice", 4, {"data_parallel": 2}, mkdtemp(), timeout=90):
        assert trained == list(CUTS)[: len(trained)]
        for key in KEYS:
            assert differences(moved[key], stayed[key], tolerance=0) == []


def spread(rank: int, folder: str) -> list[Any]:
    """Return the metrics and the validation after training of a module that no process holds as a whole."""
    quiet()
    found = []
    for callbacks in ([Moves()], []):
        pl.seed_everything(3, verbose=False)
        case = Case(LitMeta)
        trainer = make_trainer(
            max_epochs=2,
            strategy=PipelineStrategy(partition=[3], module="model"),
            precision="64-true",
            callbacks=callbacks,
        )
        module = LitMeta()
        trainer.fit(module, **loaders(case))
        found.append(
            (plain_values(dict(trainer.callback_metrics)), trainer.validate(module, loaders(case)["val_dataloaders"]))
        )
    return found


def test_a_module_that_nobody_has_whole_goes_home_when_training_ends() -> None:
    for moved, stayed in run_ranks(spread, 2, mkdtemp(), timeout=60):
        assert differences(moved, stayed, tolerance=0) == []


class Adopts(Callback):
    """Adopts a cut after four of six batches, and records the error of a schedule that cannot begin there."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.error = ""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == 4:
            try:
                strategy.adopt("1f1b")
            except PlanError as error:
                self.error = str(error)
            layers = (Span(0, self.start), Span(self.start, 9))
            strategy.adopt("pipedream_2bw", plan=replace(strategy.current_run.engine.plan, layers=layers))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.held = trainer.strategy.current_run.local_layers.holdings.local


def streaming(rank: int, folder: str) -> list[Any]:
    """Return the results of streams that adopt their own cut and another one."""
    found = []
    for start in (4, 7):
        adopts = Adopts(start)
        strategy = {"schedule": "pipedream_2bw", "partition": [4]}
        options = {"max_epochs": 2, "limit_val_batches": 0, "callbacks": [adopts]}
        out = train(Case(LitFrozen, strategy=strategy, trainer=options), 2, f"{folder}/{start}")
        found.append((out["weights"], out["metrics"], adopts.error, adopts.held))
    return found


def test_overlapping_batches_are_finished_first() -> None:
    for rank, (stayed, moved) in enumerate(run_ranks(streaming, 2, mkdtemp(), timeout=60)):
        assert differences(moved[:2], stayed[:2], tolerance=0) == []
        assert "1f1b flushes between batches, and pipedream_2bw does not" in moved[2]
        first, second = ([0, 1, 2, 3], [4, 5, 6, 7, 8]), ([0, 1, 2, 3, 4, 5, 6], [7, 8])
        assert (stayed[3], moved[3]) == (first[1 - rank], second[1 - rank])


class Refused(Callback):
    """Adopts cuts, most of which are invalid, and records the errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for spans in ((Span(0, 1), Span(1, 5)), (Span(0, 5), Span(5, 5)), (Span(0, 1), Span(2, 5)), (Span(0, 4),) * 2):
            try:
                trainer.strategy.adopt("1f1b", plan=Plan.even(2, 2, 8, layers=spans))
                self.errors.append("")
            except PlanError as error:
                self.errors.append(str(error))


def asking(rank: int, folder: str) -> tuple[Any, list[str]]:
    refused = Refused()
    case = Case(LitTied, strategy={"partition": [2]}, trainer={"limit_train_batches": 1, "callbacks": [refused]})
    return train(case, 2, folder), refused.errors


def test_layers_that_share_a_weight_stay_together() -> None:
    for _, (fine, tied, gap, twice) in run_ranks(asking, 2, mkdtemp(), timeout=60):
        assert fine == ""
        assert "model.0.weight is shared by layers 0 and 4" in tied
        assert "every layer has to be in one stage" in gap
        assert "every layer has to be in one stage" in twice


def test_layers_of_siblings_stay_where_their_memory_is() -> None:
    part = object.__new__(LocalLayers)
    part.holdings, part._shares_rank = Holdings(Grid(1, 2, 0), (0, 1), (Span(0, 3), Span(3, 5))), True
    part.check_placement(part.holdings.layers)
    with pytest.raises(PlanError, match="siblings of a job array share the ranks"):
        part.check_placement((Span(0, 2), Span(2, 5)))


def test_gradients_of_other_replicas_arrive_on_the_device_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def make_transfer(rank: int, ranks: tuple[int, ...], watch: object, device: torch.device) -> object:
        assert (rank, ranks) == (0, (0, 2))
        devices.append(device)
        return object()

    monkeypatch.setattr("lightning_pipes.trainer.relocation.local_layers.process_rank", lambda: 0)
    monkeypatch.setattr("lightning_pipes.trainer.relocation.local_layers.BulkTransfer", make_transfer)
    part = object.__new__(LocalLayers)
    part.holdings, part.device = Holdings(Grid(2, 4, 0), (0, 1), (Span(0, 3), Span(3, 5))), torch.device("meta")
    part._control = SimpleNamespace(watch=None)  # type: ignore[assignment]
    part._make_replica_averages()
    assert devices == [torch.device("meta")]


def test_a_layer_takes_along_which_of_its_buffers_change() -> None:
    module = LitRich()
    buffers = BufferSync(module, None)
    buffers.follow_names("model.1.", ["count", "norm.running_mean"])
    assert buffers.changing_names("model.1.") == ["count", "norm.running_mean"]
    assert buffers.changing_names("model.2.") == []


def test_a_copy_of_weights_elsewhere_keeps_their_layer_there() -> None:
    module = Lit()
    cut = ContainerCut(module, "model", [0, 1], Interceptor("self.model"))
    average = copy.deepcopy(module.model)
    cut.check_arrival(1)
    with pytest.raises(PlanError, match=r"a copy of self.model.2.0.weight, such as a running average, are on the rank"):
        cut.check_arrival(2)
    del average
    cut.check_arrival(2)


def dying(rank: int, folder: str) -> None:
    train(Case(LitRich, strategy=RICH.strategy, trainer={"callbacks": [Moves()]}), 2, folder)


@pytest.mark.parametrize("place", ["move", "move.arrived"])
def test_a_rank_that_dies_while_layers_move_is_named(place: str) -> None:
    folder = mkdtemp()
    fault = Fault(1, place, f"{folder}/when")
    other, victim = watch_ranks(dying, 2, folder, timeout=60, env=dict(fault.to_environment()))
    assert victim.exitcode == -9
    assert "rank 1 (stage 0) has ended" in other.error
    assert other.seconds - victim.seconds < scale_timeout(10.0)
