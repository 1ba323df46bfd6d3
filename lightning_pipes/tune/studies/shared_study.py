"""Trials of a study whose storage outlives a process, and which several arrays may share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.ir import InputError
from lightning_pipes.tune.studies.private_optuna import samplers_of, untouched_generators
from lightning_pipes.tune.studies.reporting import log

OWNER_ATTRIBUTE = "lightning_pipes:owner"
"""The user attribute of a trial that identifies the process that runs it."""
RETRY_ATTRIBUTE = "lightning_pipes:retry_of"
"""The user attribute of a trial that repeats a trial of a dead process.

Its value is the number of the repeated trial.
"""

_PACKAGES_OF_SAMPLERS = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy"}
"""The packages that samplers of Optuna import only when they suggest their first values."""


def prepare_study(study: Study) -> None:
    """Prepare a study for new trials: check its sampler, and continue the trials of an earlier run.

    Raises:
        InputError: the sampler needs a package that is not installed.
    """
    for sampler in samplers_of(study.sampler):
        package = _PACKAGES_OF_SAMPLERS.get(type(sampler).__name__)
        if package is not None and find_spec(package) is None:
            raise InputError(
                f"the study's {type(sampler).__name__} needs the package {package}, which is not installed. Run `pip "
                f"install {package}`, or choose another sampler, such as TPESampler"
            )
    fail_dead_trials(study)
    reseed_for_resume(study)


def ask_trial(study: Study) -> Trial:
    """Return a new trial of the study, marked as a trial of this process."""
    trial = study.ask()
    trial.set_user_attr(OWNER_ATTRIBUTE, str(Process.current()))
    return trial


def ask_trials(study: Study, n_trials: int | None) -> Iterator[Trial]:
    """Yield up to `n_trials` new trials of the study, or trials without end if it is None."""
    for _ in itertools.count() if n_trials is None else range(n_trials):
        yield ask_trial(study)


def fail_dead_trials(study: Study) -> int:
    """Fail the running trials of dead processes on this host, and queue their parameters again.

    If these trials stayed in the state RUNNING, the sampler would avoid their parameters. Optuna's heartbeats serve the
    same purpose, but they work only with `study.optimize`.

    Returns:
        The number of these trials.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return fail_trials(study, [trial for trial in running if _has_ended(trial.user_attrs.get(OWNER_ATTRIBUTE))])


def fail_trials(study: Study, dead: Sequence[FrozenTrial]) -> int:
    """Fail running trials whose process has died, and queue their parameters again. Return the number of trials."""
    for trial in dead:
        enqueue_again(study, trial.number, trial.params)
        study.tell(trial.number, state=TrialState.FAIL)
    if dead:
        log.info("%d trial(s) of a process that has died are tried again", len(dead))
    return len(dead)


def reseed_for_resume(study: Study) -> None:
    """Reseed a new sampler that has a fixed seed, using the number of trials that were started before.

    A resumed study then draws other parameters than before. It draws the same parameters each time it is resumed at
    this point.
    """
    begun = sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))
    if begun:
        for generator in untouched_generators(study.sampler):
            generator.seed([generator.randint(2**31), begun])


def enqueue_again(study: Study, number: int, params: Mapping[str, Any]) -> None:
    """Queue the parameters of a trial of a dead process, including queued parameters that it did not suggest yet.

    A trial that had no parameters yet is queued without parameters. Each trial is queued only once, and before it is
    set to FAIL, so that a kill between the two does not lose it.

    Args:
        study: the study of the trial.
        number: the number of the trial.
        params: the parameters that the trial suggested.
    """
    trials = study.get_trials(deepcopy=False)
    parameters = {**trials[number].system_attrs.get("fixed_params", {}), **params}
    if not any(trial.user_attrs.get(RETRY_ATTRIBUTE) == number for trial in trials):
        study.enqueue_trial(parameters, user_attrs={RETRY_ATTRIBUTE: number})


def _has_ended(owner: object) -> bool:
    """Return whether the process that `owner` identifies is known to have ended."""
    process = Process.parse(owner) if isinstance(owner, str) else None
    return process is not None and process.has_ended()
