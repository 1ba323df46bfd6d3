"""Tests of layers that move while batches continue, compared with one process that computes the same values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.request import Placement, RunRequest
from lightning_pipes.trainer.relocation.relocation import LayerRelocation
from tests.trainer.lit import differences
from tests.trainer.relocation.waiting import BATCHES, Waiting, expected, fit, folder_of, pauses

NORM = {"gradient_clip_val": 0.05}
VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
TWO = {"accumulate_grad_batches": 2, **NORM}
CASES = {
    "buffered": Waiting(trainer=NORM),
    "while gradients add up": Waiting(held={2: 9}, trainer=TWO),
    "to an empty stage and back": Waiting("kfkb", cuts={-1: (3,), 1: (0,), 6: (4,)}, held={1: 4, 6: 9}),
    "past the end of an epoch": Waiting(cuts={-1: (3,), 8: (5,)}, held={8: 99}, epochs=2),
    "pipedream, buffered": Waiting("pipedream", trainer=VALUE),
    "pipedream, ahead": Waiting("pipedream", "overlapped", trainer=VALUE),
    "2bw, buffered": Waiting("pipedream_2bw", cuts={-1: (4,), 2: (2,)}, epochs=2),
    "2bw, ahead": Waiting("pipedream_2bw", "overlapped", held={2: 15}, epochs=2),
    "a stream that accumulates": Waiting("pipedream", held={2: 8}, trainer={"accumulate_grad_batches": 2, **VALUE}),
    "a stream that accumulates, ahead": Waiting(
        "pipedream", "overlapped", held={2: 7}, trainer={"accumulate_grad_batches": 2, **VALUE}
    ),
    "in opposite directions": Waiting("interleaved", cuts={-1: (1, 3, 5), 2: (2, 3, 4)}, trainer=TWO),
    "a validation comes": Waiting(held={2: 99}, free=(5,), trainer={"val_check_interval": 6, "limit_val_batches": 1}),
    "stopped": Waiting(held={2: 99}, free=(5,), stopped=5),
    "stopped, ahead": Waiting(relocation="overlapped", held={2: 99}, free=(5,), stopped=5),
    "a stream is stopped": Waiting("pipedream", held={2: 99}, free=(5,), stopped=5),
    "a stream is stopped, ahead": Waiting("pipedream", "overlapped", held={2: 99}, free=(5,), stopped=5),
    "saved": Waiting(held={2: 99}, free=(5,), saved=(5,), saves=True),
    "a stream is saved": Waiting("pipedream", held={2: 99}, free=(5,), saved=(5,), saves=True),
    "saved, ahead": Waiting(relocation="overlapped", held={2: 9}, saved=(5,), saves=True),
    "somebody meddles": Waiting(meddles=5),
    "somebody meddles, ahead": Waiting(relocation="overlapped", meddles=5),
    "ahead": Waiting(relocation="overlapped", held={2: 15}, epochs=2, trainer={"accumulate_grad_batches": 2}),
    "elsewhere while they travel": Waiting(cuts={-1: (3,), 2: (1,), 4: (5,)}, held={2: 99}, free=(4,)),
    "elsewhere while they travel, in a stream": Waiting(
        "pipedream", "overlapped", cuts={-1: (3,), 2: (1,), 4: (5,)}, held={2: 99}, free=(4,)
    ),
    "nothing moves": Waiting(cuts={-1: (3,)}, epochs=2, trainer={"accumulate_grad_batches": 2}),
}
SLOW = {
    "to an empty stage and back",
    "pipedream, ahead",
    "2bw, buffered",
    "a stream that accumulates, ahead",
    "a stream is saved",
    "stopped, ahead",
    "a stream is stopped",
    "somebody meddles",
}
"""Cases that resemble another case. They run only as slow tests."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
ENDS = {"a validation comes": 6, "stopped": 6, "stopped, ahead": 6, "saved": 6, "a stream is saved": 6}
"""Batch before which layers change ranks, for cases in which this is not the arrival of their data."""
STOPPED = {"stopped": 6, "stopped, ahead": 6, "a stream is stopped": 8, "a stream is stopped, ahead": 8}
"""Number of batches that are trained."""


def run_all(rank: int, names: list[str], folder: str) -> list[Any]:
    return [fit(CASES[name], 2, folder_of(folder, name)) for name in names]


def found(name: str) -> list[dict[str, Any]]:
    return of_all(name in SLOW)[name]


@cache
def of_all(slow: bool) -> dict[str, list[dict[str, Any]]]:
    """Train all slow or all other cases, and return the results of both ranks by name."""
    names = [name for name in CASES if (name in SLOW) == slow]
    by_rank = run_ranks(run_all, 2, names, mkdtemp(), timeout=120)
    return {name: [of[n] for of in by_rank] for n, name in enumerate(names)}


@pytest.mark.parametrize("name", NAMES)
def test_as_in_one_process(name: str) -> None:
    case = CASES[name]
    moved = found(name)[0]["moved"]
    assert all(m["ended"] - m["began"] >= 2 and m["late"] >= 1 for m in moved)
    assert sum(m["again"] for ours in found(name) for m in ours["moved"]) == (
        case.meddles >= 0 and case.relocation == "overlapped"
    )
    assert [m["ended"] for m in moved if name in ENDS] == [ENDS[name] for _ in moved if name in ENDS]
    flushes = [*(BATCHES * n for n in range(case.epochs)), *(n + 1 for n in case.saved)]
    wanted = expected(case, STOPPED.get(name, BATCHES * case.epochs), pauses(case, moved), flushes)
    for ours in found(name):
        assert [(m["began"], m["ended"]) for m in ours["moved"]] == [(m["began"], m["ended"]) for m in moved]
        for what in ("weights", "steps", "rate"):
            assert differences(ours[what], wanted[what], at=what) == []


def test_ahead_nothing_is_lost_to_the_bit() -> None:
    """Check that a move loses no gradients, bitwise, even across a checkpoint, a validation or the end of an epoch.

    Such a move runs ahead of the change, so no step has to wait.
    """
    moved, stayed = found("ahead"), found("nothing moves")
    for ours, theirs in zip(moved, stayed, strict=True):
        assert ours["moved"][0]["began"] < BATCHES < ours["moved"][0]["ended"]
        assert differences(ours["weights"], theirs["weights"], tolerance=0) == []


def resumed(rank: int, folder: str) -> list[Any]:
    """Resume from checkpoints that were saved during a move, and return the results."""
    out = []
    for name in SAVED:
        case = replace(CASES[name], cuts={-1: (3,)}, saved=())
        there = folder_of(folder, name)
        fit(CASES[name], 2, there)
        out.append(fit(case, 2, there, resume=f"{there}/5.ckpt"))
    return out


SAVED = ("saved", "saved, ahead")


def test_a_checkpoint_in_the_middle_is_whole() -> None:
    for of_rank in run_ranks(resumed, 2, mkdtemp(), timeout=60):
        for name, went_on in zip(SAVED, of_rank, strict=True):
            assert differences(went_on["weights"], found(name)[0]["weights"]) == []


PLACED = {
    "full": Waiting("dynpipe", "blocking", saved=(5,), saves=True),
    "sharded": Waiting("pipedream", "blocking", saved=(5,), saves=True, checkpoint="sharded"),
}
"""When the checkpoint is written, layers have moved to another stage, which steps with another delay."""


def placed(rank: int, folder: str) -> list[tuple[Any, Any]]:
    """Return the results of each training whose layers have moved, and of a run that resumes from its checkpoint."""
    out = []
    for name, case in PLACED.items():
        there = folder_of(folder, name)
        whole = fit(case, 2, there)
        out.append((whole, fit(replace(case, cuts={-1: (3,)}, saved=()), 2, there, resume=f"{there}/5.ckpt")))
    return out


def test_layers_that_have_moved_are_there_after_a_resume() -> None:
    for of_rank in run_ranks(placed, 2, mkdtemp(), timeout=60):
        for whole, resumed in of_rank:
            assert resumed["cuts"] == whole["cuts"] == (1,)
            assert differences(resumed["weights"], whole["weights"], tolerance=0) == []


def test_runs_that_continue_with_the_layers_of_their_checkpoint() -> None:
    before = Placement.from_data(Placement((Span(0, 1), Span(1, 6)), (0, 1), [3]).data())

    def cut(partition: Any, schedule: str = "dynpipe", layers: int = 6, ranks: int = 2, replan: bool = False) -> Any:
        request = RunRequest.from_arguments(schedule, None, 2, False, partition, replan)
        return request.resume_cut(before, layers, ranks).partition

    assert cut([3]) == cut("auto") == cut("parameters") == cut("auto", "pipedream") == [1]
    assert cut("auto", "1f1b", replan=True) == [1]
    assert cut([2]) == [2], "the user asks for another cut now"
    assert cut("auto", "1f1b") == "auto", "weights do not depend on it"
    assert cut("auto", ranks=3) == cut("auto", layers=7) == "auto"


def moving(trainer: Any, way: str) -> LayerRelocation:
    nothing: Any = None
    return LayerRelocation(trainer, nothing, nothing, way, nothing)


def test_a_scaler_can_not_wait() -> None:
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()))
    assert not moving(trainer, "overlapped").defers_steps()
    with pytest.raises(PipelineError, match="Use 'bf16-mixed', or relocation='overlapped'"):
        moving(trainer, "buffered")


def test_layers_that_somebody_else_moves_do_not_travel() -> None:
    trainer = SimpleNamespace(precision_plugin=None)
    moving(trainer, "blocking").check_layers_stay("they take turns")
    with pytest.raises(PipelineError, match=r"they take turns\. Use relocation='blocking'"):
        moving(trainer, "overlapped").check_layers_stay("they take turns")
