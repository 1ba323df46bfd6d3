"""Tests that subnets with their own cuts give, bit by bit, the result of one subnet after another.

Their layers move between ranks.
"""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from benchmarks.harness import namespaces
from lightning_pipes import PipelineStrategy
from lightning_pipes.sim.records.training_record import TrainingRecord
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.supernets import SubnetStream
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.supernets.nets import Cut, after, explorer, fit, loader, new_module, plain, steppers
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

SHORT = 20
"""The number of subnets in each of two epochs."""


def cut(
    rank: int, ranks: int, shared: str, batches: int, folder: str, resume: str | None = None, dies_at: int = -1
) -> dict[str, Any]:
    """Train with a different cut for each subnet, validate after each epoch, and save a checkpoint at subnet 30."""
    return fit(rank, ranks, shared, batches, folder, resume, dies_at, every=30, kind=Cut)


def in_turn(rank: int, ranks: int, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Run several trainings in the same processes, and return their results and the transfer threads that are left.

    The trainings have random cuts, one of them is resumed in the middle of an epoch, and the last one is balanced.
    """
    delayed = cut(rank, ranks, "delayed", SHORT, folder)
    resumed = cut(rank, ranks, "delayed", SHORT, folder, f"{folder}/step=30.ckpt")
    sequential = cut(rank, ranks, "sequential", SHORT, folder)
    balanced = fit(rank, ranks, "frozen", SHORT, f"{folder}/balanced", schedule=CSP(depth=8, balanced=True))
    left = [thread.name for thread in threading.enumerate() if "bulk transfer" in thread.name]
    return [delayed, resumed, sequential, balanced], left


def test_two_stages_train_as_one_process() -> None:
    """Check the results of two stages against one process, and that layers were stepped on both ranks."""
    folder = mkdtemp()
    for (delayed, resumed, sequential, balanced), threads in run_ranks(in_turn, 2, 2, folder, timeout=120):
        assert delayed == plain("delayed", SHORT, (30,))
        assert resumed == after(delayed, 30)
        assert sequential == plain("sequential", SHORT)
        assert balanced == plain("frozen", SHORT)
        assert threads == []
    for where, share in ((folder, 0.5), (f"{folder}/balanced", 0.1)):
        on = steppers(where)
        assert len(on) > 20
        assert sum(ranks == {"rank0", "rank1"} for ranks in on.values()) > share * len(on)
    accesses = TrainingRecord.load(Path(folder, "balanced")).accesses
    for name in on:
        assert [(kind, batch) for batch, kind in accesses[name]] == [
            (kind, batch) for batch in sorted({batch for batch, _ in accesses[name]}) for kind in "FB"
        ], name


def test_validation_and_whole_module_have_the_newest_layers() -> None:
    """Check that validation and the module after training have the latest weights."""
    for logged, whole, more, bubbles in run_ranks(validated, 2, timeout=120):
        assert logged == pytest.approx(whole, abs=1e-6)
        assert more == 0
        assert all(0 <= bubble < 1 for bubble in bubbles)


def validated(rank: int) -> tuple[float, float, int, tuple[float, float]]:
    """Train a module, and return values that show which weights it has afterwards.

    Returns:
        The last logged value, the same value from the module after training, the number of parameters by which a group
        of the optimizer has grown, and the replayed and the measured bubble of the report.
    """
    quiet()
    torch.set_num_threads(1)
    module = new_module("sequential", kind=Cut)
    assert isinstance(module, Cut)
    module.stages = 2
    strategy = PipelineStrategy(CSP(depth=8), 2, partition=[5])
    trainer = make_trainer(strategy=strategy, max_epochs=2)
    stream = SubnetStream(explorer("sequential"))
    trainer.fit(module, stream.pair_with(loader(SHORT)))
    logged = float(trainer.callback_metrics["validated"])
    module.eval()
    with torch.no_grad():
        mean = sum(float(module.validated(batch)) for batch in loader(3)) / 3
    more = len(trainer.optimizers[0].param_groups[0]["params"]) - len(list(module.parameters()))
    return logged, mean, max(0, more), (strategy.report.bubble_replayed, strategy.report.bubble_measured)


def test_killed_rank_ends_all_and_training_continues_on_more() -> None:
    folder, wanted = mkdtemp(), plain("sequential", SHORT, (30,))
    outcomes = watch_ranks(cut, 2, 2, "sequential", SHORT, folder, None, 34, timeout=60)
    assert "exit code -9" in outcomes[0].error
    assert "rank 0" in outcomes[1].error
    assert "no heartbeat" not in outcomes[1].error  # the end of the connection is noticed long before
    for found in run_ranks(cut, 4, 4, "sequential", SHORT, folder, f"{folder}/step=30.ckpt", timeout=120):
        assert found == after(wanted, 30)


class Severed(Cut):
    """A module that cuts the network link to the other host at the given subnet."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch[-1].id == self.dies_at:
            self.dies_at = -1
            namespaces.cut()
        return super().training_step(batch, batch_idx)


def severed(rank: int, folder: str) -> dict[str, Any]:
    """Train a module that cuts the network link at subnet 34."""
    return fit(
        rank, 2, "sequential", SHORT, folder, dies_at=34, every=30, kind=Severed, strategy={"heartbeat_timeout": 5.0}
    )


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason())
def test_both_ends_of_a_cut_link_end_and_training_continues() -> None:
    folder, wanted = mkdtemp(), plain("sequential", SHORT, (30,))
    with namespaces.Hosts(2) as hosts:
        outcomes = hosts.watch_ranks(severed, folder, timeout=200)
    for outcome in outcomes:
        assert outcome.exitcode == 1
        assert "PeerFailure" in outcome.error
    for found in run_ranks(cut, 2, 2, "sequential", SHORT, folder, f"{folder}/step=30.ckpt", timeout=120):
        assert found == after(wanted, 30)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 4, 8])
@pytest.mark.parametrize("shared", ["sequential", "delayed", "per_choice"])
def test_many_subnets_on_any_number_of_stages(shared: str, stages: int) -> None:
    wanted = plain(shared, 100, (30, 60, 90, 120, 150, 180))
    for found in run_ranks(cut, stages, stages, shared, 100, mkdtemp(), timeout=500):
        assert found == wanted
