"""Tests of the state after a run: nothing stays open in the process, and an incomplete module raises a clear error."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.watch import failure
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checks import check_module
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from tests.trainer.lit import Lit, LitOutside, data, quiet
from tests.trainers import make_trainer


def make_two_steps_trainer(**strategy: Any) -> pl.Trainer:
    """Return a Trainer that trains for two steps in a pipeline."""
    return make_trainer(strategy=PipelineStrategy(**{"microbatches": 2, **strategy}), max_steps=2, precision="64-true")


def loader() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8)


def open_things(rank: int, folder: str) -> list[tuple[int, int]]:
    """Return the numbers of open file descriptors and threads of this process after each of five runs."""
    quiet()
    counts = []
    for n in range(5):
        trainer = make_two_steps_trainer()
        module = LitOutside()
        trainer.fit(module, loader())
        trainer.validate(module, loader(), verbose=False)
        trainer.save_checkpoint(f"{folder}/{n}.ckpt")  # gathers the optimizer's state once more
        trainer.validate(module, loader(), verbose=False)
        del trainer, module
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
def test_nothing_stays_open(tmp_path):
    """The numbers of file descriptors and threads do not grow from the second to the fifth run."""
    for counts in run_ranks(open_things, 2, str(tmp_path), timeout=60):
        first, *_, last = counts[1:]  # the process keeps some resources of the first run
        assert last[0] <= first[0], counts
        assert last[1] <= first[1], counts


def list_new_threads(rank: int) -> list[str]:
    """Return the names of the threads that a run leaves behind.

    In ranks that tests launch, this includes the thread of the launcher.
    """
    quiet()
    before = {*threading.enumerate()}
    make_two_steps_trainer().fit(LitOutside(), loader())
    return sorted(thread.name for thread in threading.enumerate() if thread not in before)


@pytest.mark.parametrize(
    ("ranks", "left"), [(1, []), pytest.param(2, ["lightning_pipes heart"], marks=pytest.mark.slow)]
)
def test_only_the_watch_of_other_ranks_goes_on_after_a_run(ranks, left):
    """Only the heartbeat thread outlives a run with several ranks, to detect a rank that dies between two runs."""
    for found in run_ranks(list_new_threads, ranks, timeout=40):
        assert [name for name in found if name != "lightning_pipes launcher"] == left


class SlowToLeave(Lit):
    """A module that moves to the CPU slowly on rank 1, after all ranks have exchanged their last messages."""

    def cpu(self) -> SlowToLeave:
        if os.environ["RANK"] == "1":
            time.sleep(2.0)
        return super().cpu()


def leave(rank: int) -> str:
    """Train SlowToLeave with a short grace period."""
    quiet()
    failure.GRACE_SECONDS = 0.3
    make_two_steps_trainer().fit(SlowToLeave(), loader())
    return "done"


def test_a_slow_teardown_outlives_rank_0():
    """A rank that is still in its teardown does not report a failure when rank 0 ends.

    Rank 0 hosts the store, as without torchrun, and its end would look like a failure to ranks that still monitor it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    assert run_ranks(leave, 2, timeout=30, env=env) == ["done", "done"]


def test_module_without_foreign_layers_reports_it():
    """A module whose layers were lost in a failed run is refused with a message that names the reason."""
    module = Lit()
    ContainerCut(module, "model", [2], Interceptor("self.model")).restore(ended=False)
    with pytest.raises(PipelineError, match=r"Lit.model.0.0.weight has no values: the last run .* failed, .*ckpt_path"):
        check_module(module, fitting=True)


def test_lazy_layers_are_still_told_from_it():
    module = Lit()
    module.model.append(nn.LazyLinear(3))
    with pytest.raises(PipelineError, match="initialize lazy layers"):
        check_module(module, fitting=True)


def fail_and_try_again(rank: int) -> list[str]:
    """Fail before a run begins, try again with the same module, and return both messages."""
    quiet()
    module, said = Lit(), []
    for strategy in ({"transport": "nccl"}, {}):
        try:
            make_two_steps_trainer(**strategy).fit(module, loader())
        except PipelineError as error:
            said.append(f"{type(module.model).__name__}: {error}")
    return said


def test_a_run_that_fails_before_it_begins():
    """The layers are still an `nn.Sequential` after the failure, and the second run names the lost weights."""
    for first, second in run_ranks(fail_and_try_again, 2, timeout=30):
        assert first.startswith("Sequential: ")  # the module does not contain a stand-in
        assert "transport 'nccl' needs tensors on a GPU" in first
        assert "has no values: the last run" in second
