"""Tests that checkpoints survive kills and full disks, and can be written in the background."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, wait_until, watch_ranks
from lightning_pipes.trainer import checkpointing
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO
from lightning_pipes.trainer.checkpoint.saving import Saver, snapshot_state
from lightning_pipes.trainer.checks import check_async
from tests.cases import selected_values
from tests.trainer.checkpoint.runs import OneRank, fit
from tests.trainer.lit import differences
from tests.trainers import make_trainer

SOON = 12.0
"""Seconds within which all processes must end. Starting them takes one or two of these."""


class Trouble(Callback):
    """Kills one rank or fills its disk in its second checkpoint."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how, self.saves = rank, how, 0

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        if trainer.global_rank != self.rank or self.saves != 2:
            return
        if self.how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
        elif self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "killed while writing":
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)


def troubled(rank: int, folder: str, strategy: dict[str, Any], in_trouble: int, how: str) -> None:
    fit(Path(folder), strategy, [Trouble(in_trouble, how)])


def resumed(rank: int, cases: list[tuple[Path, dict[str, Any]]], steps: int = 2) -> list[list[str]]:
    """For each checkpoint, return the differences between a run that resumes there and the uninterrupted run.

    The checkpoints were written after `steps` steps.
    """
    with TemporaryDirectory() as folder:
        whole = fit(Path(folder) / "whole", {}, [])
        found = []
        for number, (path, strategy) in enumerate(cases):
            part = fit(Path(folder) / str(number), strategy, [], path)
            found.append(differences(part, {**whole, "outputs": whole["outputs"][steps:]}, tolerance=0.0))
    return found


FULL = "OSError: [Errno 27] File too large"
SHARDED = {"checkpoint": "sharded"}
ASYNC = {"async_checkpoint": True}
TROUBLES: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 0, "full disk", f"rank 0 could not write the checkpoint {{path}}: {FULL}"),
    ({}, 0, "killed while writing", "rank 0"),
    ({}, 1, "killed", "rank 1"),
    (SHARDED, 0, "full disk", f"rank 0 could not write the checkpoint {{path}}: {FULL}"),
    (SHARDED, 1, "full disk", FULL),
    (SHARDED, 0, "killed while writing", "rank 0"),
    (SHARDED, 1, "killed while writing", "rank 1"),
    (ASYNC, 0, "full disk", f"rank 0 could not write the checkpoint {{path}}: {FULL}"),
    ({**SHARDED, **ASYNC}, 1, "full disk", FULL),
    ({**SHARDED, **ASYNC}, 1, "killed while writing", "rank 1"),
]


@pytest.fixture(scope="module")
def after_trouble() -> Any:
    """For each case, yield how the ranks ended, the files left, and the differences after resuming."""
    with TemporaryDirectory() as folder:
        run_ranks(nothing, 1)  # starts the server from which processes are forked
        ended, left, cases = [], [], []
        numbers = selected_values(test_after_trouble_all_ranks_end_and_the_previous_checkpoint_is_valid, "number")
        for number in numbers:
            strategy, rank, how, _ = TROUBLES[number]
            own = Path(folder) / str(number)
            ended.append(watch_ranks(troubled, 2, str(own), strategy, rank, how, timeout=30))
            left.append(sorted(os.listdir(own)))
            cases.append((own / "step=2.ckpt", strategy))
        again = run_ranks(resumed, 2, cases, timeout=100)
        differing = list(zip(*again, strict=True))
        yield {
            number: (ended[n], left[n], list(differing[n]), f"{folder}/{number}") for n, number in enumerate(numbers)
        }


def nothing(rank: int) -> None:
    pass


@pytest.mark.parametrize("number", range(len(TROUBLES)), ids=[str(t[:3]) for t in TROUBLES])
def test_after_trouble_all_ranks_end_and_the_previous_checkpoint_is_valid(number, after_trouble):
    outcomes, left, differing, folder = after_trouble[number]
    _, rank, how, said = TROUBLES[number]
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} continued"
        assert outcome.seconds < scale_timeout(SOON), f"rank {outcome.rank}: {outcome.error}"
        if outcome.rank != rank or how == "full disk":
            assert said.format(path=f"{folder}/step=4.ckpt") in outcome.error
            assert how != "full disk" or (f"rank {rank} could not" in outcome.error and "step=4.ckpt" in outcome.error)
    complete = ["step=2.ckpt"] if how != "killed" else ["step=2.ckpt", "step=4.ckpt"]
    assert [name for name in left if not name.startswith(".")] == complete
    assert differing == [[], []]


class BadDay(Callback):
    """Raises an error on rank 1 after four steps."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            raise ValueError("a bad day")


def failing(rank: int, folder: str, strategy: dict[str, Any]) -> None:
    """Train until rank 1 fails, with a callback that saves a checkpoint on exceptions."""
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_last=True, save_on_exception=True)
    saver.CHECKPOINT_NAME_LAST = "last-{step}"
    fit(Path(folder), strategy, [BadDay()], callbacks=[saver])


def test_the_parts_of_a_failing_run_replace_nothing(tmp_path):
    outcomes = watch_ranks(failing, 2, str(tmp_path), {**SHARDED, **ASYNC}, timeout=30)
    assert all("a bad day" in outcome.error and outcome.seconds < scale_timeout(SOON) for outcome in outcomes)
    parts = {f"{name}.ckpt.rank{rank}of2" for name in ("step=4", "last-step=4") for rank in (0, 1)}
    assert set(os.listdir(tmp_path)) == {"step=3.ckpt", "last-step=3.ckpt", *parts}


def test_ranks_after_the_same_step_join_their_parts_where_one_fails(tmp_path):
    outcomes = watch_ranks(failing, 2, str(tmp_path), ASYNC, timeout=30)
    assert all("a bad day" in outcome.error and outcome.seconds < scale_timeout(SOON) for outcome in outcomes)
    assert set(os.listdir(tmp_path)) == {"step=3.ckpt", "step=4.ckpt", "last-step=4.ckpt"}  # as in one process
    assert run_ranks(resumed, 2, [(tmp_path / "step=4.ckpt", {})], 4, timeout=100) == [[[]], [[]]]


class Busy(Callback):
    """Delays rank 0 on an exception until another rank has written its part."""

    def __init__(self, part: Path) -> None:
        self.part = part

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 0:
            assert wait_until(self.part.exists, scale_timeout(10.0))


def saved_apart(rank: int, folder: str, late: bool) -> tuple[str, bool]:
    """Return this rank's error, and whether the other rank also finished within five seconds.

    Both runs fail. Either rank 0 comes too late to join the parts, or the ranks have no common file system.
    """
    checkpointing._MEETING_SECONDS = 0.5 if late else 20.0
    disk = Path(folder)
    trouble: list[Callback] = [BadDay()]
    if late:
        trouble.append(Busy(disk / "last.ckpt.rank1of2"))
    elif rank == 1:  # rank 1 has another disk with the same names
        usual = AtomicCheckpointIO.save_checkpoint

        def save(io: Any, checkpoint: Any, path: Any, *more: Any) -> None:
            usual(io, checkpoint, Path(folder, "other", Path(path).name), *more)

        AtomicCheckpointIO.save_checkpoint = save  # type: ignore[method-assign]
    error = ""
    try:
        fit(disk, {}, trouble, callbacks=[OnExceptionCheckpoint(disk, "last")])
    except Exception as raised:
        error = str(raised)
    (disk / f"done{rank}").touch()
    return error, wait_until((disk / f"done{1 - rank}").exists, scale_timeout(5.0))


@pytest.mark.parametrize("how", ["late", "own disks", "own disks, stale part"])
def test_ranks_keep_their_parts_where_they_do_not_meet(tmp_path, how):
    """Check that ranks keep their parts if they cannot join them.

    One rank comes too late, or the ranks have no common file system. In the last case, a part of an earlier failure
    exists there.
    """
    if "stale" in how:
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt.rank1of2")
    for error, both_end in run_ranks(saved_apart, 2, str(tmp_path), how == "late", timeout=30):
        assert "a bad day" in error
        assert both_end
    assert not (tmp_path / "last.ckpt").exists()
    assert (tmp_path / "last.ckpt.rank0of2").exists()
    assert (tmp_path / ("" if how == "late" else "other") / "last.ckpt.rank1of2").exists()


def test_a_checkpoint_is_removed_before_anything_has_run(tmp_path):
    path = tmp_path / "step=1.ckpt"
    path.touch()
    make_trainer(strategy=PipelineStrategy()).strategy.remove_checkpoint(path)
    assert not path.exists()


class Slow(AtomicCheckpointIO):
    """Waits for an event before it writes, and fails for paths that contain "bad"."""

    def __init__(self) -> None:
        self.go, self.done = Event(), list[str]()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert self.go.wait(scale_timeout(30))
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path)
        self.done.append(f"saved {Path(path).name}")

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        self.done.append(f"removed {Path(path).name}")


def background(io: Slow, *actions: str, folder: Path) -> Saver:
    """Save and remove checkpoints in the background, and return the saver."""
    saver = Saver(OneRank())  # type: ignore[arg-type]
    for action in actions:
        verb, name = action.split()
        if verb == "save":
            saver.save({"name": name}, folder / name, io.save_checkpoint, background=True)
        else:
            saver.remove(folder / name, io)
    return saver


def test_the_previous_checkpoint_goes_when_the_next_is_there(tmp_path):
    io = Slow()
    (tmp_path / "old").touch()
    saver = background(io, "save new", "remove old", folder=tmp_path)
    assert os.listdir(tmp_path) == ["old"]
    io.go.set()
    saver.wait()
    assert io.done == ["saved new", "removed old"]


def test_the_previous_checkpoint_stays_when_the_next_fails(tmp_path):
    io = Slow()
    (tmp_path / "old").touch()
    saver = background(io, "save bad", "remove old", folder=tmp_path)
    saver.check()  # nothing has happened yet
    io.go.set()
    said = rf"rank 0 could not write the checkpoint {tmp_path}/bad: OSError: \[Errno 28\] No space left on device"
    with pytest.raises(PipelineError, match=said):
        saver.wait()
    with pytest.raises(PipelineError, match=said):
        saver.save({}, tmp_path / "next", io.save_checkpoint, background=True)
    with pytest.warns(UserWarning, match=said):
        saver.close()
    assert os.listdir(tmp_path) == ["old"]


def test_one_save_waits_for_the_other(tmp_path):
    io = Slow()
    saver = background(io, "save first", folder=tmp_path)
    Timer(0.2, io.go.set).start()
    with pytest.warns(UserWarning, match=r"second had to wait [\d.]+ s because the checkpoint before was still being"):
        saver.save({}, tmp_path / "second", io.save_checkpoint, background=True)
    assert io.done[0] == "saved first"
    saver.close()
    assert io.done == ["saved first", "saved second"]


def full_disk(rank: int, folder: str) -> list[str]:
    """Save a tensor to a disk that becomes full in the middle of it, and return the error and the files left."""
    saver = Saver(OneRank())  # type: ignore[arg-type]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(PipelineError) as error:
        saver.save_parts({"state_dict": {"a": torch.zeros(50_000)}}, ["a"], Path(folder) / "a.ckpt", background=False)
    return [str(error.value), *os.listdir(folder)]


def test_a_full_disk_is_called_that(tmp_path):
    said = f"rank 0 could not write the checkpoint {tmp_path}/a.ckpt: OSError: [Errno 27] File too large"
    assert run_ranks(full_disk, 1, str(tmp_path), timeout=30)[0] == [said]


def test_a_snapshot_is_not_reached_by_later_steps():
    weight = torch.ones(2)
    tree = {"a": weight, "b": [weight, {"c": 1}]}
    copied = snapshot_state(tree)
    weight.add_(1)
    tree["b"][1]["c"] = 2
    assert copied["a"].tolist() == [1, 1]
    assert copied["b"][0] is copied["a"]
    assert copied["b"][1] == {"c": 1}


def asynchronous(rank: int, folder: str) -> list[Any]:
    """For each strategy, return the files when `fit` returns, the expected names, and the weights.

    The expected names are the best checkpoints and the last one.
    """
    found = []
    os.fsync = lambda descriptor: time.sleep(0.1)  # the disk is so slow that steps cannot wait for it by chance
    plugin = AsyncCheckpointIO()
    for number, (strategy, more) in enumerate([(ASYNC, {}), ({**SHARDED, **ASYNC}, {}), ({}, {"plugins": [plugin]})]):
        own = Path(folder) / str(number)
        saver = ModelCheckpoint(
            own, "{step}", monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=1
        )
        result = fit(own, strategy, [], callbacks=[saver], **more)
        kept = {Path(path).name for path in saver.best_k_models}
        found.append((sorted(os.listdir(own)), sorted({*kept, "last.ckpt"}), result["weights"]))
    return found


def test_everything_is_written_when_fit_returns(tmp_path):
    whole, *others = run_ranks(asynchronous, 2, str(tmp_path), timeout=60)[0]
    assert len(whole[1]) == 3
    for left, kept, weights in (whole, *others):
        assert left == kept
        assert differences(weights, whole[2], tolerance=0.0) == []


def test_links_need_files_that_are_there():
    with pytest.raises(PipelineError, match="use save_last=True"):
        check_async([ModelCheckpoint(save_last="link")])


def test_forms_are_checked_at_once():
    with pytest.raises(PlanError, match="checkpoint must be 'full' or 'sharded', got 'both'"):
        PipelineStrategy(checkpoint="both")
