"""Optuna studies whose trials are the siblings of a job array."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import optuna
from lightning.pytorch.utilities.exceptions import SIGTERMException
from optuna import Study
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.siblings.sibling import Outcome, current_sibling
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.ir import InputError, PipelineError, check_count, check_number, check_type, shown
from lightning_pipes.tune.studies.leader_store import LeaderStore, RankZeroEndedError
from lightning_pipes.tune.studies.private_optuna import (
    inside_optimize_loop,
    is_stop_requested,
    reset_stop,
    share_storage,
    storage_of,
    untouched_generators,
)
from lightning_pipes.tune.studies.reporting import log, report_result
from lightning_pipes.tune.studies.trial import ArrayTrial, StorageLostError, storage_errors, using_trial

OWNER = "lightning_pipes:owner"
"""The user attribute of a trial that says which process runs it."""
RETRY = "lightning_pipes:retry_of"
"""The user attribute of a trial that repeats one whose process has died: the number of that one."""

_REASON_SECONDS = 2.0
"""How long other ranks wait for rank 0 to say why it ends the study."""

Objective = Callable[[ArrayTrial], Any]
Callback = Callable[[Study, FrozenTrial], None]


class StudyFailedError(PipelineError):
    """The study has ended on rank 0 by an error; the message says which."""


def optimize_array(
    study: Study | Callable[[], Study],
    objective: Objective,
    n_trials: int | None,
    array_size: int | JobArray[Any],
    timeout: float | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = (),
    callbacks: Sequence[Callback] = (),
) -> Study:
    """`study.optimize` with `array_size` trials at a time, which share one pipeline.

    `objective` is an ordinary objective, with a `Trainer.fit` with a PipelineStrategy in it. All ranks call this, run
    all trials, and get rank 0's parameters and decisions to prune. A trial that ends leaves its slot to the next one at
    once. Which one ends first follows the order of their batches and not the clock, so that a seeded sampler gives the
    same trials again. One that a study goes on with draws others than those of the trials that it has.

    Trials that a process which has died left behind fail, those under way when another rank dies do, too, and the
    parameters of both are tried again first when the study goes on.

    Args:
        study: rank 0's is used; nobody else writes to its storage. A function that makes it is called by rank 0 alone.
        n_trials: to start, besides those that the study has; None for as many as there is time for, or until
            `study.stop()`.
        array_size: how many at a time; or a new `JobArray`, which has the timeline afterwards, and may swap memory.
        timeout: seconds after which no trial is started; those under way go on.
        catch: errors of an objective after which the study goes on. After another one no trial is started, and it is
            raised when those under way have ended. One on another rank counts as one on rank 0; where it can't be
            pickled it is a SiblingFailure.
        callbacks: called on rank 0 after each trial, in its order.

    Returns:
        The study, on every rank with all trials.

    Raises:
        InputError: an argument makes no sense, or the ranks have no way to talk to each other before they train.
        StorageLostError: the storage failed; trials that had ended are in it.
        StudyFailedError: on the other ranks, what rank 0 raises.
    """
    if not isinstance(study, Study) and not callable(study):
        raise InputError(f"study must be a study of Optuna, or a function that makes one, got {shown(study)}")
    check_type("objective", objective, Callable)
    if check_type("n_trials", n_trials, int | None):
        check_count("n_trials", n_trials, "; or None for as many as there is time for")
    if not isinstance(array_size, JobArray):
        check_count("array_size", array_size, "; or give a JobArray")
    if timeout is not None:
        check_number("timeout", timeout, "seconds from 0 on, or None", lambda x: x >= 0)
    for kind in catch if isinstance(catch, tuple) else (catch,):
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise InputError(f"catch must be a type of exceptions or a tuple of some, got {shown(catch)}")
    check_type("callbacks", callbacks, Sequence[Callable])  # type: ignore[type-arg]
    return run_leader_or_follower(
        LeaderStore(), study, objective, lambda _: n_trials, array_size, timeout, catch, callbacks
    )


def run_leader_or_follower(
    leader_store: LeaderStore,
    study: Study | Callable[[], Study],
    objective: Objective,
    budget: Callable[[Study], int | None],
    array_size: int | JobArray[Any],
    timeout: float | None,
    catch: type[Exception] | tuple[type[Exception], ...],
    callbacks: Sequence[Callback],
    tracebacks: bool = True,
) -> Study:
    """`optimize_array` on a board of the caller's, with a number of trials that depends on the study's; `tracebacks` of
    trials that fail are logged, or not."""
    array: JobArray[Any] = array_size if isinstance(array_size, JobArray) else JobArray(array_size)
    if not leader_store.is_leader:
        return _Follower(leader_store, objective).run(array, study if isinstance(study, Study) else None)
    leader = _Leader(leader_store, objective, timeout, catch, callbacks, tracebacks)
    try:
        led = leader.run(array, study, budget)
    except BaseException as error:
        leader_store.put("end", f"{type(error).__name__}: {error}")
        raise
    leader_store.put("end", (led.study_name, led.directions, led.user_attrs, led.get_trials(deepcopy=False)))
    leader_store.close()
    return led


def _make_study(study: Study | Callable[[], Study]) -> Study:
    made: Study = check_type("study", study if isinstance(study, Study) else study(), Study)
    return made


class _Leader:
    """Rank 0: owns the study, and says what is tried."""

    def __init__(
        self,
        leader_store: LeaderStore,
        objective: Objective,
        timeout: float | None,
        catch: type[Exception] | tuple[type[Exception], ...],
        callbacks: Sequence[Callback],
        tracebacks: bool,
    ) -> None:
        self._leader_store = leader_store
        self._objective = objective
        self._left: int | None = None
        self._until = None if timeout is None else time.monotonic() + timeout
        self._catch = catch
        self._callbacks = callbacks
        self._tracebacks = tracebacks
        self._open: dict[int, Trial] = {}
        self._error: BaseException | None = None
        self._over = False

    def run(
        self, array: JobArray[Any], study: Study | Callable[[], Study], budget: Callable[[Study], int | None]
    ) -> Study:
        with storage_errors():
            self._study = study = _make_study(study)
            fail_dead_trials(study)
            reseed_for_resume(study)
            self._left = budget(study)
        reset_stop(study)
        with inside_optimize_loop(study):
            lost: PeerFailure | None = None
            try:
                for outcome in array.run(self._jobs()):
                    self._leader_store.put(_ended_key(outcome.index), None)
                    self._finish_trial(outcome)
            except PeerFailure as error:
                lost = error
                raise
            finally:
                for trial in self._open.values():
                    with suppress(StorageLostError), storage_errors():
                        if lost is not None:
                            enqueue_again(study, trial.number, trial.params)
                        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        if self._error is not None:
            raise self._error
        return study

    def _jobs(self) -> Iterator[Callable[[], Any]]:
        for index in itertools.count():
            if self._over:
                return
            yield partial(self._job, index)

    def _job(self, index: int) -> Any:
        """One trial, in its sibling's thread; or nothing, if there is none to start any more."""
        with inside_optimize_loop(self._study):
            try:
                with storage_errors():
                    trial = self._next_trial()
                self._over = trial is None
                self._leader_store.put(
                    f"next/{index}", None if trial is None else (trial.number, self._study.directions)
                )
                if trial is None:
                    sibling = current_sibling()
                    assert sibling is not None
                    sibling.counts = False
                    return None
                self._open[index] = trial
                return _run_objective(self._objective, self._array_trial(index, trial))
            finally:
                storage_of(self._study).remove_session()  # of this thread

    def _next_trial(self) -> Trial | None:
        late = self._until is not None and time.monotonic() >= self._until
        if is_stop_requested(self._study) or self._error is not None or self._left == 0 or late:
            return None
        if self._left is not None:
            self._left -= 1
        return ask_trial(self._study)

    def _array_trial(self, index: int, trial: Trial) -> ArrayTrial:
        return ArrayTrial(trial.number, self._study.directions, self._leader_store, _ended_key(index), trial)

    def _finish_trial(self, outcome: Outcome[Any]) -> None:
        """Tells the study how a trial has ended."""
        trial = self._open.pop(outcome.index, None)
        error = outcome.error
        if isinstance(error, StorageLostError) or (trial is None and error is not None):
            raise error
        if trial is None:
            return
        fault_point("trial.tell")
        with storage_errors():
            if isinstance(error, (PeerFailure, SIGTERMException)):
                enqueue_again(self._study, trial.number, trial.params)
            frozen = report_result(self._study, trial, outcome.value, error, self._tracebacks)
        if frozen.state == TrialState.FAIL and error is not None and not isinstance(error, self._catch):
            self._error = self._error or error
        for callback in self._callbacks:
            callback(self._study, frozen)


class _Follower:
    """Another rank: runs what rank 0 says.

    Attributes:
        patience: seconds for which rank 0 may go on with a trial that has failed here before the ranks had connections.
    """

    stop_timeout = 60.0

    def __init__(self, leader_store: LeaderStore, objective: Objective) -> None:
        self._leader_store = leader_store
        self._objective = objective
        self._over = False

    def run(self, array: JobArray[Any], study: Study | None) -> Study:
        try:
            for outcome in array.run(self._jobs()):  # what becomes of it is rank 0's business
                if outcome.error is not None and array.shared.watch is None:
                    self._check_ends_on_leader(outcome)
        except PeerFailure:
            with suppress(RankZeroEndedError):
                self._check_ended()
            raise
        end = self._leader_store.get("end")
        self._leader_store.close()
        if isinstance(end, str):
            raise StudyFailedError(f"the study has ended on rank 0: {end}")
        return _with_trials(study, *end)

    def _check_ended(self) -> None:
        """Raises why rank 0 has ended the study, if it says so; its array, which ends before, does not know it."""
        until = time.monotonic() + _REASON_SECONDS
        end = self._leader_store.get("end", until=lambda: time.monotonic() > until)
        if isinstance(end, str):
            raise StudyFailedError(f"the study has ended on rank 0: {end}")

    def _jobs(self) -> Iterator[Callable[[], Any]]:
        for index in itertools.count():
            if self._over:
                return
            yield partial(self._job, index)

    def _check_ends_on_leader(self, outcome: Outcome[Any]) -> None:
        """Raises the error of a trial that does not end on rank 0, which would wait for this rank for ever."""
        assert outcome.error is not None
        until = time.monotonic() + self.stop_timeout
        self._leader_store.get(_ended_key(outcome.index), until=lambda: time.monotonic() > until)
        if not self._leader_store.has_key(_ended_key(outcome.index)):
            raise outcome.error

    def _job(self, index: int) -> Any:
        ended = _ended_key(index)
        following = self._leader_store.get(f"next/{index}", until=lambda: self._leader_store.has_key(ended))
        self._over = following is None
        if following is None:
            return None
        number, directions = following
        return _run_objective(self._objective, ArrayTrial(number, directions, self._leader_store, ended, None))


def _ended_key(index: int) -> str:
    """Where rank 0 says that a sibling has ended there."""
    return f"ended/{index}"


def _run_objective(objective: Objective, trial: ArrayTrial) -> Any:
    fault_point("trial")
    with using_trial(trial):
        return objective(trial)


def ask_trial(study: Study) -> Trial:
    """A new trial of this process."""
    trial = study.ask()
    trial.set_user_attr(OWNER, str(Process.current()))
    return trial


def fail_dead_trials(study: Study) -> int:
    """How many trials were still running for processes of this host that have died; their parameters are queued again.

    They would also repel the sampler, and heartbeats, which Optuna has for this, need its own `optimize`.
    """
    dead = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if OWNER in trial.user_attrs and _has_ended(trial.user_attrs[OWNER]):
            enqueue_again(study, trial.number, trial.params)
            study.tell(trial.number, state=TrialState.FAIL)
            dead += 1
    if dead:
        log.info("%d trial(s) of a process that has died are tried again", dead)
    return dead


def reseed_for_resume(study: Study) -> None:
    """Has a new sampler with a fixed seed draw others than when the trials of the study began, and the same ones each
    time that a study goes on from there. Otherwise it would try again what was tried."""
    begun = sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))
    if begun:
        for generator in untouched_generators(study.sampler):
            generator.seed([generator.randint(2**31), begun])


def enqueue_again(study: Study, number: int, params: Mapping[str, Any]) -> None:
    """Queues the parameters of a trial that a process has taken with it: those too that were queued for it, and that it
    had not come to suggest. Once, and before the trial is said to have failed: who is killed in between has lost
    nothing."""
    trials = study.get_trials(deepcopy=False)
    parameters = {**trials[number].system_attrs.get("fixed_params", {}), **params}
    if parameters and not any(trial.user_attrs.get(RETRY) == number for trial in trials):
        study.enqueue_trial(parameters, user_attrs={RETRY: number})


def _has_ended(owner: object) -> bool:
    """Whether the process of that name is known to have ended."""
    process = Process.parse(owner) if isinstance(owner, str) else None
    return process is not None and process.has_ended()


def _with_trials(study: Study | None, name: str, directions: Any, user_attrs: Any, trials: Any) -> Study:
    """A study with rank 0's trials: `study` itself, unless it reads them in their storage."""
    if study is not None and not isinstance(storage_of(study), InMemoryStorage):
        return study
    with _silent():
        made = optuna.create_study(study_name=name, directions=directions)
    made.add_trials(trials)
    for key, value in user_attrs.items():
        made.set_user_attr(key, value)
    if study is None:
        return made
    share_storage(study, made)
    return study


@contextmanager
def _silent() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
