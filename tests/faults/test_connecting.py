"""A rank dies before, during or after the connection phase, or continues alone, and no other rank waits without end.

Ranks end like complete interpreters, which also wait for their threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.engine.watch.fault_points import Fault
from lightning_pipes.testing.ranks import RankResult, run_ranks, scale_timeout, watch_ranks
from tests.faults.training import ROWS, Net, Run, pairs, terminate, train
from tests.launch.example import environment
from tests.trainer.lit import quiet
from tests.trainers import make_trainer


def soon() -> float:
    """Return the limit in seconds for the end of a rank.

    Each time limit of the package is below ten seconds. Without these limits, ranks waited for half a minute and more
    on a quiet machine.
    """
    return scale_timeout(30.0, least=1.0)


KILLED = {
    "before the process group": Fault(1, "process_group", ""),
    "before the first group": Fault(1, "new_group", ""),
    "in a later group": Fault(1, "new_group", "", nth=2),
    "rank 0": Fault(0, "new_group", "", nth=2),
    "connecting stages": Fault(1, "transport.told", ""),
    "teardown": Fault(1, "teardown", ""),
}


def killed(fault: Fault, folder: Path) -> list[RankResult]:
    """Train on two ranks with a fault, and return the results of the ranks."""
    fault = Fault(fault.rank, fault.point, str(folder / "when"), fault.nth)
    return watch_ranks(train, 2, Run(str(folder)), timeout=60, env=dict(fault.to_environment()))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[RankResult], float]]:
    """The results of each case, with the seconds from the death of the victim to the end of the last rank."""
    found = {}
    for name, fault in KILLED.items():
        folder = tmp_path_factory.mktemp("killed")
        outcomes = killed(fault, folder)
        found[name] = outcomes, time.monotonic() - float((folder / "when").read_text())
    return found


@pytest.mark.parametrize("name", KILLED)
def test_a_death_while_connections_are_made(name, outcomes):
    """The surviving rank ends in time, with an error that names the killed rank."""
    found, seconds = outcomes[name]
    victim = KILLED[name].rank
    assert found[victim].exitcode == -signal.SIGKILL
    assert found[1 - victim].exitcode == 1
    assert f"rank {victim} " in found[1 - victim].error
    assert "has ended" in found[1 - victim].error
    assert seconds < soon()


def fit(**options: Any) -> pl.Trainer:
    """Train for a few steps on this rank, and return the trainer."""
    quiet()
    trainer = make_trainer(
        strategy=PipelineStrategy(microbatches=2, partition="parameters"),
        **{"enable_checkpointing": False, "max_steps": 2, **options},
    )
    trainer.fit(Net(options.get("default_root_dir", os.devnull)), loader())
    return trainer


def loader(rows: int = 3 * ROWS, batch_size: int = ROWS) -> DataLoader[Any]:
    return DataLoader(pairs(0, rows), batch_size=batch_size)


class Quiet(Net):
    """A module that writes no files."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()


def one_goes_on(rank: int, folder: str, who: int) -> str:
    """Train on both ranks, then train again on the rank `who` only."""
    fit(default_root_dir=folder)
    if rank == who:
        fit(default_root_dir=folder)
    return "through"


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_continues_alone_learns_that_the_other_has_ended(who, tmp_path):
    """A rank that starts another run alone, as with `if trainer.is_global_zero: trainer.test()`, gets an error."""
    outcomes = watch_ranks(one_goes_on, 2, str(tmp_path), who, timeout=60)
    assert outcomes[1 - who].value == "through"
    error = outcomes[who].error
    assert f"rank {1 - who}" in error
    assert "has ended because its interpreter exited, although other ranks were in a run" in error
    assert abs(outcomes[0].seconds - outcomes[1].seconds) < soon()


# ---- out of memory


def no_threads(rank: int) -> str:
    """Let rank 1 fail when it cannot start threads, and return the error of each rank."""
    quiet()

    class Full(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 2 and rank == 1:
                threading.Thread.start = refuse  # type: ignore[method-assign]
                raise MemoryError("no room")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trainer = make_trainer(
        strategy=PipelineStrategy(microbatches=2, partition="parameters"), max_steps=9, callbacks=[Full()]
    )
    try:
        trainer.fit(Quiet(os.devnull), loader(9 * ROWS))
    except (MemoryError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "through"


def test_failure_is_reported_without_a_new_thread():
    """A rank that cannot start threads still reports its failure to the other rank."""
    other, own = run_ranks(no_threads, 2, timeout=40)
    assert own == "MemoryError: no room"
    assert other.startswith("PeerFailure: rank 1 (stage 0) failed: MemoryError: no room")


class TooSmall(Quiet):
    """A module that runs out of memory on one stage if a batch has more than 8 rows."""

    def __init__(self, rank: int, batch_size: int = 2) -> None:
        super().__init__(os.devnull)
        self.rank = rank
        self.batch_size = batch_size
        self.layers[0 if rank == 1 else 5].register_forward_pre_hook(self._need)

    def _need(self, module: Any, arguments: tuple[torch.Tensor]) -> None:
        if self.trainer.global_rank == self.rank and self.batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(64, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(64, self.batch_size)


def find_batch_size(rank: int, folder: str, full: int) -> str:
    """Train with `BatchSizeFinder` and a module that runs out of memory on rank `full`."""
    quiet()
    trainer = make_trainer(
        strategy=PipelineStrategy(microbatches=2, partition="parameters"),
        max_steps=3,
        callbacks=[BatchSizeFinder(steps_per_trial=1)],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    trainer.fit(TooSmall(full))
    return "through"


@pytest.mark.parametrize("full", [0, 1])
def test_a_batch_size_that_is_too_large_ends_all_ranks(full, tmp_path):
    """If BatchSizeFinder exceeds the memory of one rank, all ranks end with an error that explains it."""
    outcomes = watch_ranks(find_batch_size, 2, str(tmp_path), full, timeout=60)
    for o in outcomes:
        assert "If BatchSizeFinder tried a batch size that is too large, set the one before it" in o.error
    assert "OutOfMemoryError" in outcomes[full].error
    assert abs(outcomes[0].seconds - outcomes[1].seconds) < soon()


# ---- SIGTERM in an array


class Told(Callback):
    """A callback that sends SIGTERM to rank 1 once, in the fourth step of the first sibling."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4:
            terminate()


def array(rank: int, folder: str) -> list[tuple[Any, str]]:
    """Run an array of three jobs, two at a time, and return the steps and errors of the two that began."""
    quiet()
    begun: dict[int, pl.Trainer] = {}  # by index, because siblings may begin in another order

    def job(number: int) -> None:
        saver = OnExceptionCheckpoint(folder, filename=f"left{number}")
        begun[number] = trainer = make_trainer(
            strategy=PipelineStrategy(microbatches=2, partition="parameters"),
            max_steps=2000,
            callbacks=[saver, *([Told()] if number == 0 else [])],
        )
        trainer.fit(Quiet(os.devnull), loader())

    def jobs() -> Any:
        for number in range(3):
            yield lambda number=number: job(number)

    ended = JobArray(2).run(jobs())
    found = []
    with pytest.raises(SIGTERMException) as raised:
        found.extend((begun[outcome.index].global_step, type(outcome.error).__name__) for outcome in ended)
    return [*found, (raised.value.code, "array")]


def test_sigterm_ends_all_siblings_with_whole_checkpoints(tmp_path):
    zero, one = run_ranks(array, 2, str(tmp_path), timeout=60)
    assert zero == one
    *siblings, end = zero
    assert end == (128 + 15, "array")
    assert [kind for _, kind in siblings] == ["SIGTERMException"] * 2
    for number, (steps, _) in enumerate(siblings):
        checkpoint = torch.load(tmp_path / f"left{number}.ckpt", weights_only=False)
        assert checkpoint["global_step"] == steps
        assert checkpoint["state_dict"].keys() == Net("").state_dict().keys()


ALONE = """
from lightning_pipes import JobArray, PipelineStrategy
import lightning.pytorch as pl
from tests.trainer.lit import Lit, data
from torch.utils.data import DataLoader

def job():
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=PipelineStrategy(microbatches=2), max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(data(), batch_size=8))

for outcome in JobArray(2).run([job, job]):
    print(outcome)
"""


def test_sigterm_ends_siblings_that_have_not_met(tmp_path):
    """SIGTERM ends a rank that still waits for the others.

    torchrun sends this signal to all ranks when one has died, and kills the remaining ranks after 30 s.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ,
        **environment("alone"),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    }
    rank = subprocess.Popen([sys.executable, "-c", ALONE], env=env, text=True, stderr=subprocess.PIPE)
    try:
        store.wait(["lightning_pipes/asks/0"], timedelta(seconds=scale_timeout(90)))  # the rank now waits for rank 1
        rank.send_signal(signal.SIGTERM)
        told = time.monotonic()
        _, said = rank.communicate(timeout=scale_timeout(60))
        assert rank.returncode == 128 + 15, said
        assert time.monotonic() < told + soon()
    finally:
        rank.kill()
        rank.communicate()
