"""Optuna studies with trials that run as siblings of a job array."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

import optuna
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from optuna import Study
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.siblings.sibling import MisfitError, Outcome, current_sibling
from lightning_pipes.engine.watch.error_output import RemoteError
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import InputError, PipelineError, check_count, check_number, check_type, short_repr
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.tune.studies.leader_store import LeaderStore, RankZeroEndedError
from lightning_pipes.tune.studies.private_optuna import (
    ProgressBar,
    inside_optimize_loop,
    is_stop_requested,
    reset_stop,
    share_storage,
    storage_of,
)
from lightning_pipes.tune.studies.reporting import report_result
from lightning_pipes.tune.studies.shared_study import (
    ask_trials,
    enqueue_again,
    fail_dead_trials,
    join_study,
    open_study,
)
from lightning_pipes.tune.studies.trial import (
    ArrayTrial,
    StorageLostError,
    TrialEndedError,
    storage_errors,
    using_trial,
)

_STUDY_REASON_SECONDS = 2.0
"""The longest time that other ranks wait for rank 0 to publish the reason why the study ended."""

Objective = Callable[[ArrayTrial], Any]
Callback = Callable[[Study, FrozenTrial], None]


class StudyFailedError(PipelineError, RemoteError):
    """The study ended on rank 0 with an error, which the message contains."""


def optimize_array(
    study: Study | Callable[[], Study],
    objective: Objective,
    n_trials: int | None,
    array_size: int | JobArray[Any],
    timeout: float | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = (),
    callbacks: Sequence[Callback] = (),
    show_progress_bar: bool = False,
) -> Study:
    """Run a study like `study.optimize`, but with `array_size` trials at a time that share one pipeline.

    `objective` is an ordinary objective that calls `Trainer.fit` with a PipelineStrategy. All ranks call this function
    and run all trials. They all get the parameters and the pruning decisions of rank 0. When a trial ends, the next
    trial takes its slot immediately. The order of batches, not the clock, determines which trial ends first, so a
    seeded sampler suggests the same trials again. A resumed study draws new parameters, which differ from the
    parameters of its earlier trials.

    If a process dies, its running trials fail, including the trials that run when another rank dies. When the study is
    resumed, it first tries the parameters of these trials again.

    Args:
        study: the study, or a function that creates it. Only rank 0's study is used, only rank 0 writes to its storage,
            and only rank 0 calls the function.
        objective: the objective of the study, which is called on all ranks with an ArrayTrial.
        n_trials: number of trials to start. With None, only `timeout` and `study.stop()` limit the number.
        array_size: number of concurrent trials, or a new `JobArray`. A `JobArray` provides the timeline afterwards and
            can swap memory.
        timeout: seconds after which no further trial starts. Running trials continue.
        catch: exceptions of the objective after which the study continues. After any other exception, no further trial
            starts, and the exception is raised when the running trials have ended. A trial whose layers differ from the
            layers of the other trials, which share one pipeline, fails alone. An exception on another rank is treated
            like an exception on rank 0. If no copy of it can be sent, it becomes a SiblingFailure.
        callbacks: functions that rank 0 calls with the study and the finished trial, in the order in which trials end.
        show_progress_bar: whether rank 0 shows the progress bar of Optuna, which counts the trials that have ended, or
            the seconds if there is a `timeout` but no `n_trials`.

    Returns:
        The study, which contains all trials on every rank.

    Raises:
        InputError: an argument is invalid, the study's sampler needs a package that is not installed, or the ranks
            cannot communicate before they train.
        StorageLostError: the storage failed. It contains the trials that had ended before.
        StudyFailedError: rank 0 raised an exception. Raised on the other ranks.
    """
    if not isinstance(study, Study) and not callable(study):
        raise InputError(f"study must be a study of Optuna, or a function that returns one, got {short_repr(study)}")
    check_study_arguments(objective, n_trials, timeout, catch, callbacks)
    if not isinstance(array_size, JobArray):
        check_count("array_size", array_size, "; or give a JobArray")
    check_type("show_progress_bar", show_progress_bar, bool)
    leader_store, started = LeaderStore(), read_seconds()
    with closing(ProgressBar(show_progress_bar and leader_store.is_leader, n_trials, timeout)) as bar:
        callbacks = [*callbacks, lambda study, _: bar.update(read_seconds() - started, study)]
        return run_leader_or_follower(
            leader_store,
            study,
            objective,
            lambda opened: ask_trials(opened, n_trials),
            array_size,
            timeout,
            catch,
            callbacks,
        )


def check_study_arguments(
    objective: object, n_trials: object, timeout: object, catch: object, callbacks: object
) -> None:
    """Check the arguments that describe how a study runs.

    Raises:
        InputError: an argument is invalid.
    """
    check_type("objective", objective, Callable)
    if check_type("n_trials", n_trials, int | None):
        check_count("n_trials", n_trials, "; or None for as many as there is time for")
    if timeout is not None:
        check_number("timeout", timeout, "seconds from 0 on, or None", lambda x: x >= 0)
    for kind in catch if isinstance(catch, tuple) else (catch,):
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise InputError(f"catch must be an exception type or a tuple of exception types, got {short_repr(catch)}")
    check_type("callbacks", callbacks, Sequence[Callable])  # type: ignore[type-arg]


def run_leader_or_follower(
    leader_store: LeaderStore,
    study: Study | Callable[[], Study],
    objective: Objective,
    new_trials: Callable[[Study], Iterator[Trial]],
    array_size: int | JobArray[Any],
    timeout: float | None,
    catch: type[Exception] | tuple[type[Exception], ...],
    callbacks: Sequence[Callback],
    tracebacks: bool = True,
) -> Study:
    """Run `optimize_array` with an existing leader store and another source of trials.

    Args:
        leader_store: the messages of rank 0.
        study: the study, or a function that creates it.
        objective: the objective of the study.
        new_trials: returns an iterator of the trials to run, as `ask_trials` does. Only rank 0 calls it.
        array_size: number of concurrent trials, or a new `JobArray`.
        timeout: seconds after which no further trial starts.
        catch: exceptions of the objective after which the study continues.
        callbacks: functions that rank 0 calls after each trial.
        tracebacks: whether the tracebacks of failed trials are logged.
    """
    array: JobArray[Any] = array_size if isinstance(array_size, JobArray) else JobArray(array_size)
    if not leader_store.is_leader:
        return _Follower(leader_store, objective).run(array, study if isinstance(study, Study) else None)
    leader = _Leader(leader_store, objective, timeout, catch, callbacks, tracebacks)
    try:
        led = leader.run(array, study, new_trials)
    except BaseException as error:
        leader_store.put("end", f"{type(error).__name__}: {error}")
        raise
    leader_store.put("end", (led.study_name, led.directions, led.user_attrs, led.get_trials(deepcopy=False)))
    leader_store.close()
    return led


class _Leader:
    """Rank 0, which owns the study and decides about trials."""

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
        self._until = None if timeout is None else read_seconds() + timeout
        self._catch = catch
        self._callbacks = callbacks
        self._tracebacks = tracebacks
        self._open: dict[int, Trial] = {}
        self._error: BaseException | None = None
        self._over = False

    def run(
        self,
        array: JobArray[Any],
        study: Study | Callable[[], Study],
        new_trials: Callable[[Study], Iterator[Trial]],
    ) -> Study:
        with ExitStack() as held:
            with storage_errors():
                self._study = made = study if isinstance(study, Study) else open_study(study)
                self._lease = held.enter_context(join_study(made))
                self._new_trials = new_trials(made)
            return self._run_trials(array, made)

    def _run_trials(self, array: JobArray[Any], study: Study) -> Study:
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
                    with suppress(StorageLostError, TrialEndedError), storage_errors():
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
        """Run one trial on the thread of its sibling, or return None if the study starts no further trials."""
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
                storage_of(self._study).remove_session()  # the session of this thread

    def _next_trial(self) -> Trial | None:
        late = self._until is not None and read_seconds() >= self._until
        if is_stop_requested(self._study) or self._error is not None or late:
            return None
        fail_dead_trials(self._study, self._lease)
        return next(self._new_trials, None)

    def _array_trial(self, index: int, trial: Trial) -> ArrayTrial:
        return ArrayTrial(trial.number, self._study.directions, self._leader_store, _ended_key(index), trial)

    def _finish_trial(self, outcome: Outcome[Any]) -> None:
        """Report the end of a trial to the study."""
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
        kinds = self._catch if isinstance(self._catch, tuple) else (self._catch,)
        # Other trials may need less memory, and may be of arrays that renew their leases.
        caught = (*kinds, MisfitError, torch.OutOfMemoryError, TrialEndedError)
        if frozen.state == TrialState.FAIL and error is not None and not isinstance(error, caught):
            self._error = self._error or error
        for callback in self._callbacks:
            callback(self._study, frozen)


class _Follower:
    """Another rank, which runs the trials that rank 0 decides to run.

    Attributes:
        stop_timeout: seconds that rank 0 may continue with a trial that failed on this rank before the ranks were
            connected.
    """

    stop_timeout = 60.0

    def __init__(self, leader_store: LeaderStore, objective: Objective) -> None:
        self._leader_store = leader_store
        self._objective = objective
        self._over = False

    def run(self, array: JobArray[Any], study: Study | None) -> Study:
        try:
            for outcome in array.run(self._jobs()):  # rank 0 handles the outcomes
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
        """Raise the reason why rank 0 ended the study, if it is known.

        The array of rank 0 ends before the study does, and has no information about the reason.
        """
        until = time.monotonic() + _STUDY_REASON_SECONDS
        end = self._leader_store.get("end", until=lambda: time.monotonic() > until)
        if isinstance(end, str):
            raise StudyFailedError(f"the study has ended on rank 0: {end}")

    def _jobs(self) -> Iterator[Callable[[], Any]]:
        for index in itertools.count():
            if self._over:
                return
            yield partial(self._job, index)

    def _check_ends_on_leader(self, outcome: Outcome[Any]) -> None:
        """Raise the error of a trial unless the trial also ends on rank 0.

        If it does not end there, rank 0 would wait for this rank forever.
        """
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
    """Return the key under which rank 0 publishes that a sibling has ended."""
    return f"ended/{index}"


def _run_objective(objective: Objective, trial: ArrayTrial) -> Any:
    fault_point("trial")
    with using_trial(trial):
        return objective(trial)


def _with_trials(study: Study | None, name: str, directions: Any, user_attrs: Any, trials: Any) -> Study:
    """Return a study that contains the trials of rank 0.

    This is `study` itself, either unchanged because its storage already contains the trials, or with replaced trials.
    Without a `study`, it is a new one.
    """
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
