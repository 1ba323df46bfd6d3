"""Check studies of several arrays on a Ray cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from lightning_pipes.ir import InputError
from lightning_pipes.tune.studies.shared_study import RETRY_ATTRIBUTE

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install lightning-pipes[ray]")

from lightning_pipes.ray import run_arrays  # noqa: E402 - needs Ray
from lightning_pipes.ray.arrays import RankLostError, _rank_environment  # noqa: E402
from tests.ray.training import KILLS, deadly, faulty, fit, lethal, open_study  # noqa: E402

pytestmark = pytest.mark.slow


def test_no_trial_is_lost_or_completed_twice_if_ranks_are_killed(cluster: Path, tmp_path: Path) -> None:
    """Check that each trial has one result, which equals the result of one process."""
    study = run_arrays(partial(open_study, tmp_path), deadly, n_trials=8, array_size=2, arrays=2, ranks=2)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    lost = study.get_trials(states=(TrialState.FAIL,))
    assert {trial.number for trial in lost} >= {*KILLS}
    assert len(complete) == 8
    assert len(study.trials) == 8 + len(lost)
    again = {trial.user_attrs[RETRY_ATTRIBUTE]: trial for trial in study.trials if RETRY_ATTRIBUTE in trial.user_attrs}
    assert {number: trial.params for number, trial in again.items()} == {trial.number: trial.params for trial in lost}
    assert len({trial.params["lr"] for trial in complete}) == 8
    for trial in complete:
        assert trial.value == float(fit(trial.params["lr"]).callback_metrics["val_loss"])


def test_an_error_of_the_objective_ends_all_arrays(cluster: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="harm"):
        run_arrays(partial(open_study, tmp_path), faulty, n_trials=1000, array_size=1, arrays=2, ranks=1)
    study = open_study(tmp_path)
    assert [trial.number for trial in study.trials if trial.state == TrialState.FAIL] == [2]
    assert not study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))
    assert len(study.trials) < 1000


def test_an_array_that_dies_too_often_ends_the_study(cluster: Path, tmp_path: Path) -> None:
    """Check that the trial is queued for the next time, with the same parameters."""
    with pytest.raises(RankLostError, match=r"array 0 has lost a rank, for the 2\. time.*max_failures=1"):
        run_arrays(partial(open_study, tmp_path), lethal, 3, 1, arrays=1, ranks=1, max_failures=1)
    trials = open_study(tmp_path).trials
    assert [trial.state for trial in trials] == [TrialState.FAIL, TrialState.FAIL, TrialState.WAITING]
    assert [trial.user_attrs.get(RETRY_ATTRIBUTE) for trial in trials] == [None, 0, 1]
    assert trials[1].params == trials[0].params == trials[2].system_attrs["fixed_params"]


def test_small_and_busy_clusters_and_bad_input(cluster: Path, tmp_path: Path) -> None:
    run = partial(run_arrays, partial(open_study, tmp_path), faulty, 4, 1)
    with pytest.raises(
        InputError,
        match=r"3 array\(s\) of 2 rank\(s\) with 1 CPU each need 6 CPU. Its 1 node\(s\) have 4 CPU, which is room for",
    ):
        run(arrays=3, ranks=2)
    with pytest.raises(InputError, match=r"need 2 GPU, 2 CPU. Its 1 node\(s\) have 0 GPU, 4 CPU"):
        run(arrays=1, ranks=2, resources_per_rank={"GPU": 1, "CPU": 1})
    busy = ray.util.placement_group([{"CPU": 3}])
    ray.get(busy.ready())
    try:
        with pytest.raises(InputError, match=r"no room for all arrays within 1 s.* need 2 CPU.* 1 CPU are free"):
            run(arrays=1, ranks=2, start_timeout=1)
    finally:
        ray.util.remove_placement_group(busy)
    with pytest.raises(InputError, match=r"in the memory of this process.*postgresql"):
        run_arrays(optuna.create_study, faulty, 4, 1, arrays=1, ranks=1)
    with pytest.raises(InputError, match="ranks must be"):
        run(arrays=1, ranks=0)


def test_ranks_of_a_node_are_consecutive() -> None:
    nodes = ["a", "b", "a", "b"]
    found = [_rank_environment(number, ("host", 5), nodes) for number in range(4)]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [tuple(int(each[name]) for name in names) for each in found] == [
        (0, 0, 2, 0),
        (2, 0, 2, 1),
        (1, 1, 2, 0),
        (3, 1, 2, 1),
    ]
