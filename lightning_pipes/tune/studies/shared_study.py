"""Trials of a study in a storage that outlives a process, and that several arrays may share.

Each array has a lease in the storage of the study, which it renews while it works on the study. The trials of an array
whose lease has ended are repeated. This works the same way in every storage, and needs no clock that several hosts
share: a lease is a counter, and each array measures with its own clock for how long a counter has not changed.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Self

from optuna import Study
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.engine.watch.slurm import slurm_attempt
from lightning_pipes.ir import InputError, check_type
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.tune.studies.private_optuna import (
    is_creation_collision,
    read_study_attributes,
    samplers_of,
    storage_of,
    untouched_generators,
    write_study_attribute,
)
from lightning_pipes.tune.studies.reporting import log
from lightning_pipes.tune.studies.storage_checks import check_storage

OWNER_ATTRIBUTE = "lightning_pipes:owner"
"""The user attribute of a trial that identifies the process that runs it."""
RETRY_ATTRIBUTE = "lightning_pipes:retry_of"
"""The user attribute of a trial that repeats a trial of a dead process.

Its value is the number of the repeated trial.
"""
LEASE_SECONDS = 300.0
"""The time without a renewal after which a lease has ended."""

_LEASE_PREFIX = "lightning_pipes:array:"
"""The start of the system attributes of a study that contain leases. The rest is the owner."""
_RENEWAL_SECONDS = 30.0
_MAX_OPENINGS = 20
"""The number of attempts to open a study. Each table of a new database can cause one collision of two arrays."""
_OPENING_PAUSE_SECONDS = 0.05

_PACKAGES_OF_SAMPLERS = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy"}
"""The packages that samplers of Optuna import only when they suggest their first values."""


def _check_sampler(study: Study) -> None:
    """Check that the packages of the study's sampler are installed.

    Raises:
        InputError: the sampler needs a package that is not installed.
    """
    for sampler in samplers_of(study.sampler):
        package = _PACKAGES_OF_SAMPLERS.get(type(sampler).__name__)
        try:
            import_module(package or __name__)
        except ImportError as error:
            raise InputError(
                f"the study's {type(sampler).__name__} needs the package {package}, which is not installed. Run `pip "
                f"install {package}`, or choose another sampler, such as TPESampler"
            ) from error


class StudyLease:
    """The lease of this array, and what this array knows about the leases of the other arrays.

    The array of an owner has ended if one of the following is true:

    - The owner ran on this host, and its process has ended.
    - The owner ran in this SLURM job, and SLURM has restarted the job since.
    - The array has given back its lease.
    - The array has not renewed its lease for LEASE_SECONDS.

    Use the lease as a context manager. The array holds the lease inside the block.

    Args:
        study: the study that the array works on.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._owner = str(Process.current())
        self._renewals = 0
        self._renewed: dict[str, tuple[Any, float]] = {}
        """The last lease of each other owner, and the time at which this array first saw it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="lease of the study", daemon=True)

    def __enter__(self) -> Self:
        if not isinstance(storage_of(self._study), InMemoryStorage):
            self._renew()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
            with suppress(Exception):  # the storage may be the reason why the array ends
                self._write(None)

    def has_ended(self, owner: str) -> bool:
        """Return whether the array of an owner is known to have ended."""
        process, leases = Process.parse(owner), self._leases()
        if process is None or owner == self._owner:
            return False
        if process.has_ended():
            return True
        if owner not in leases:  # an older version of this package does not write leases
            return False
        lease = leases[owner]
        if lease is None or _was_restarted(lease["slurm"]):
            return True
        before, since = self._renewed.get(owner, (None, 0.0))
        if before != lease:
            self._renewed[owner] = lease, read_seconds()
            return False
        return read_seconds() - since >= LEASE_SECONDS

    def has_others(self) -> bool:
        """Return whether other arrays that are not known to have ended work on the study."""
        return any(owner != self._owner and not self.has_ended(owner) for owner in self._leases())

    def random_number(self) -> int:
        """Return a number that differs from array to array."""
        return int.from_bytes(hashlib.blake2b(self._owner.encode(), digest_size=4).digest())

    def _leases(self) -> dict[str, Any]:
        """Return the leases of all arrays by owner. A lease that was given back is None."""
        attributes = read_study_attributes(self._study)
        return {key.removeprefix(_LEASE_PREFIX): attributes[key] for key in attributes if key.startswith(_LEASE_PREFIX)}

    def _renew(self) -> None:
        self._renewals += 1
        self._write({"renewals": self._renewals, "slurm": slurm_attempt()})

    def _write(self, lease: Any) -> None:
        write_study_attribute(self._study, f"{_LEASE_PREFIX}{self._owner}", lease)

    def _renew_until_closed(self) -> None:
        while not self._closed.wait(_RENEWAL_SECONDS):
            with suppress(Exception):  # the main thread reports that the storage does not respond
                self._renew()
            storage_of(self._study).remove_session()


def _was_restarted(attempt: tuple[str, int] | list[Any] | None) -> bool:
    """Return whether this process is in a later attempt of a SLURM job than `attempt`."""
    now = slurm_attempt()
    return attempt is not None and now is not None and attempt[0] == now[0] and attempt[1] < now[1]


def open_study(make: Callable[[], Study]) -> Study:
    """Return the study that `make` creates or loads.

    Optuna creates the tables of a new database without a lock, so several arrays that begin at the same time collide.
    An array that finds its tables created by another one therefore calls `make` again.

    Raises:
        InputError: `make` does not return a study.
        Exception: any other error of `make`.
    """
    for attempt in range(1, _MAX_OPENINGS):
        try:
            return _checked(make())
        except Exception as error:
            if not is_creation_collision(error):
                raise
        time.sleep(_OPENING_PAUSE_SECONDS * attempt)
    return _checked(make())


def _checked(study: Study) -> Study:
    checked: Study = check_type("study", study, Study)
    return checked


@contextmanager
def join_study(study: Study) -> Iterator[StudyLease]:
    """Hold a lease of the study inside the block, and prepare the study for new trials.

    This checks the sampler and the storage, queues the trials of ended arrays again, and reseeds a new sampler. A
    warning names a storage that the arrays cannot share.

    Raises:
        InputError: the sampler needs a package that is not installed.
    """
    _check_sampler(study)
    check_storage(study)
    with StudyLease(study) as lease:
        fail_dead_trials(study, lease)
        reseed_sampler(study, lease)
        yield lease


def ask_trial(study: Study) -> Trial:
    """Return a new trial of the study, marked as a trial of this process.

    Several arrays may have queued the same trial of an ended array. All repetitions but the first one fail here. The
    first one also fails if the repeated trial has finished after all.
    """
    while True:
        trial = study.ask()
        trial.set_user_attr(OWNER_ATTRIBUTE, str(Process.current()))
        repeated = trial.user_attrs.get(RETRY_ATTRIBUTE)
        if repeated is None or _is_to_repeat(study, repeated, trial.number):
            return trial
        _fail_trial(study, trial.number)
        log.info("Trial %d would repeat trial %d once more, and is skipped", trial.number, repeated)


def _is_to_repeat(study: Study, repeated: int, number: int) -> bool:
    """Return whether trial `number` is the one that repeats trial `repeated`."""
    _fail_trial(study, repeated)  # if an array was killed between queueing the repetition and this
    trials = study.get_trials(deepcopy=False)
    is_first = all(trial.user_attrs.get(RETRY_ATTRIBUTE) != repeated for trial in trials[:number])
    return is_first and trials[repeated].state == TrialState.FAIL


def ask_trials(study: Study, n_trials: int | None) -> Iterator[Trial]:
    """Yield up to `n_trials` new trials of the study, or trials without end if it is None."""
    for _ in itertools.count() if n_trials is None else range(n_trials):
        yield ask_trial(study)


def fail_dead_trials(study: Study, lease: StudyLease | None = None) -> int:
    """Fail the running trials of arrays that have ended, and queue their parameters again.

    If these trials stayed in the state RUNNING, the sampler would avoid their parameters. Optuna's heartbeats serve the
    same purpose, but they need a database, and work only with `study.optimize`.

    Args:
        study: the study.
        lease: the lease of this array, which knows when it first saw the leases of the other arrays.

    Returns:
        The number of these trials.
    """
    lease = lease or StudyLease(study)
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    owners = {trial.user_attrs[OWNER_ATTRIBUTE] for trial in running if OWNER_ATTRIBUTE in trial.user_attrs}
    ended = {owner for owner in owners if lease.has_ended(owner)}
    dead = [trial for trial in running if trial.user_attrs.get(OWNER_ATTRIBUTE) in ended]
    return fail_trials(study, dead)


def fail_trials(study: Study, dead: Sequence[FrozenTrial]) -> int:
    """Fail running trials whose array has ended, and queue their parameters again. Return the number of trials."""
    for trial in dead:
        enqueue_again(study, trial.number, trial.params)
        _fail_trial(study, trial.number)
    if dead:
        log.info("%d trial(s) of arrays that have ended are tried again", len(dead))
    return len(dead)


def _fail_trial(study: Study, number: int) -> None:
    """Fail a trial unless it has finished, in this process or in another one."""
    with suppress(UpdateFinishedTrialError):
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def reseed_sampler(study: Study, lease: StudyLease) -> None:
    """Reseed a new sampler that has a fixed seed if the study has trials or other arrays.

    The seed depends on the number of trials that were started before. A resumed study then draws other parameters than
    before. It draws the same parameters each time it is resumed at this point. If other arrays work on the study, the
    seed also depends on the array, because all arrays may have begun before the first trial.
    """
    begun = sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))
    seed = [begun] if begun else []
    if lease.has_others():
        seed.append(lease.random_number())
    if seed:
        for generator in untouched_generators(study.sampler):
            generator.seed([generator.randint(2**31), *seed])


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
