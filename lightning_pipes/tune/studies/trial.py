"""Trials that run on several ranks. The study on rank 0 answers the calls of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Never

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalChoiceType
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.arrays.siblings.sibling_board import SiblingFailure
from lightning_pipes.ir import InputError, PipelineError
from lightning_pipes.tune.studies.leader_store import LeaderStore
from lightning_pipes.tune.studies.private_optuna import id_of, storage_of

_trial: ContextVar[ArrayTrial | None] = ContextVar("lightning_pipes_trial", default=None)


class StorageLostError(PipelineError):
    """The study's storage does not respond. Earlier results remain in the storage."""


class TrialEndedError(PipelineError):
    """Another process has ended a trial that this array runs."""


STUDY_ATTRIBUTES = (
    "best_params",
    "best_trial",
    "best_trials",
    "best_value",
    "direction",
    "directions",
    "metric_names",
    "study_name",
    "trials",
    "user_attrs",
)
STUDY_METHODS = ("enqueue_trial", "get_trials", "set_metric_names", "set_user_attr", "stop")
_ADVICE = (
    "To prune trials, give the Trainer OptunaPruning(monitor) of lightning_pipes in place of the "
    "PyTorchLightningPruningCallback of optuna-integration"
)


class ArrayStudy:
    """The study that an objective reads from `trial.study`.

    It has the attributes and methods of a study that do not need the study's sampler, pruner or storage, which only
    rank 0 has. They return rank 0's values on every rank. All ranks must make the same calls in the same order.

    Args:
        ask: returns the result of a function of rank 0's study on every rank, given the name of the call.
    """

    def __init__(self, ask: Callable[[str, Callable[[Study], Any]], Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of rank 0's study.

        Raises:
            AttributeError: only rank 0 has this attribute.
        """
        if name in STUDY_ATTRIBUTES:
            return self._ask(name, lambda study: getattr(study, name))
        if name in STUDY_METHODS:
            return lambda *args, **kwargs: self._ask(name, lambda study: getattr(study, name)(*args, **kwargs))
        if name.startswith("__"):  # copy and pickle look up such names
            raise AttributeError(name)
        raise AttributeError(
            f"trial.study of an array has no {name}, because only rank 0 has the study with its sampler and its "
            f"storage. All ranks can use {', '.join(STUDY_ATTRIBUTES + STUDY_METHODS)}. For everything else, use the "
            f"study in optimize_array(callbacks=[lambda study, trial: ...]). {_ADVICE}"
        )


class ArrayTrial(Trial):
    """The trial that an objective receives.

    It behaves like a trial of Optuna and returns rank 0's values on every rank. It is an instance of `optuna.Trial`,
    because functions such as `optuna.artifacts.upload_artifact` accept nothing else, but shares no code with it.

    All ranks must make the same calls in the same order, which they do if they run the same code. Only the storage,
    and functions that use it, are available on rank 0 alone.

    Args:
        number: the number of the trial.
        directions: the directions of the study.
        leader_store: the messages of rank 0.
        ended: the key under which rank 0 publishes that the trial has ended.
        trial: the trial of the study on rank 0, and None on the other ranks.
    """

    def __init__(
        self,
        number: int,
        directions: Sequence[StudyDirection],
        leader_store: LeaderStore,
        ended: str,
        trial: Trial | None,
    ) -> None:
        self.directions = list(directions)
        self._number = number
        self._leader_store = leader_store
        self._ended = ended
        self._trial = trial
        self._calls = 0

    @property
    def number(self) -> int:
        return self._number

    @property
    def study(self) -> ArrayStudy:  # type: ignore[override]
        """The study of this trial, as far as all ranks can read it."""
        return ArrayStudy(lambda name, ask: self._ask_leader(f"study.{name}", lambda t: ask(t.study)))

    @property
    def storage(self) -> BaseStorage:  # type: ignore[override]
        """The storage of the study, on rank 0 only. `upload_artifact` writes to it.

        Raises:
            InputError: this is another rank.
        """
        return storage_of(self._trial_of_leader().study)

    @property
    def _trial_id(self) -> int:  # type: ignore[override]
        return id_of(self._trial_of_leader())

    def _trial_of_leader(self) -> Trial:
        if self._trial is None:
            raise InputError(
                f"trial {self._number}: rank {self._leader_store.rank} has no storage of the study, so functions such "
                "as upload_artifact work on rank 0 only, and the artifact is uploaded once. Write `if "
                "trainer.is_global_zero:` before the call"
            )
        return self._trial

    def __getattr__(self, name: str) -> Never:
        """Raise an error for attributes that exist only in a trial of a single process.

        Raises:
            AttributeError: always, with an alternative in its message.
        """
        if name.startswith("__"):  # copy and pickle look up such names
            raise AttributeError(name)
        raise AttributeError(
            f"a trial of an array has no {name}, because only rank 0 has the trial of Optuna. The public methods of "
            f"optuna.Trial are available, and trial.find_duplicate() finds equal parameters. {_ADVICE}"
        )

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return float(
            self._ask_leader(f"suggest_float {name}", lambda t: t.suggest_float(name, low, high, step=step, log=log))
        )

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(
            self._ask_leader(f"suggest_int {name}", lambda t: t.suggest_int(name, low, high, step=step, log=log))
        )

    def suggest_categorical(self, name: str, choices: Sequence[CategoricalChoiceType]) -> Any:
        return self._ask_leader(f"suggest_categorical {name}", lambda t: t.suggest_categorical(name, choices))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None:
        self._ask_leader(f"report {step}", lambda t: t.report(value, step))

    def should_prune(self) -> bool:
        return bool(self._ask_leader("should_prune", lambda t: t.should_prune()))

    def set_user_attr(self, key: str, value: Any) -> None:
        self._ask_leader(f"set_user_attr {key}", lambda t: t.set_user_attr(key, value))

    def set_constraint(self, key: str, value: float) -> None:
        self._ask_leader(f"set_constraint {key}", lambda t: t.set_constraint(key, value))

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._ask_leader("params", lambda t: t.params))

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return dict(self._ask_leader("distributions", lambda t: t.distributions))

    @property
    def user_attrs(self) -> dict[str, Any]:
        return dict(self._ask_leader("user_attrs", lambda t: t.user_attrs))

    @property
    def datetime_start(self) -> datetime | None:
        start: datetime | None = self._ask_leader("datetime_start", lambda t: t.datetime_start)
        return start

    @property
    def constraints(self) -> dict[str, float]:
        return dict(self._ask_leader("constraints", lambda t: t.constraints))

    def find_duplicate(self) -> FrozenTrial | None:
        """Return a finished trial with the same parameters, or None.

        An objective can return the values of that trial.
        """
        found: FrozenTrial | None = self._ask_leader("find_duplicate", find_duplicate_trial)
        return found

    def _ask_leader(self, what: str, ask: Callable[[Trial], Any]) -> Any:
        """Return the answer of the study on rank 0, or raise its exception. `what` must be the same on all ranks."""
        self._calls += 1
        key = f"trials/{self._number}/{self._calls}"
        if self._trial is None:
            reply = self._leader_store.get(key, until=lambda: self._leader_store.has_key(self._ended))
            if reply is None:
                raise SiblingFailure(f"trial {self._number} has ended on rank 0, but continues here with {what!r}")
        else:
            reply = (what, *_answer(self._trial, ask))
            self._leader_store.put(key, reply)
        asked, answer, error = reply
        if asked != what:
            raise InputError(
                f"trial {self._number}: rank 0 calls {asked!r}, rank {self._leader_store.rank} {what!r}; the objective "
                f"must "
                "do the same on all ranks, so it can't depend on the rank, the time, or unseeded random numbers"
            )
        if error is not None:
            raise error
        return answer


def find_duplicate_trial(trial: Trial) -> FrozenTrial | None:
    """Return the first finished trial of the study that has the same parameters, or None."""
    done = trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return next((one for one in done if one.params == trial.params), None)


def _answer(trial: Trial, ask: Callable[[Trial], Any]) -> tuple[Any, Exception | None]:
    try:
        with storage_errors():
            return ask(trial), None
    except Exception as error:
        return None, error


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert exceptions of a study's storage inside the block into StorageLostError or TrialEndedError."""
    try:
        yield
    except UpdateFinishedTrialError as error:
        raise TrialEndedError(
            "another process has ended this trial, and its result is not used. Other arrays end and repeat the trials "
            "of an array that did not renew its lease of the study. Check whether this process was stopped, or could "
            "not reach the storage for minutes"
        ) from error
    except (StorageInternalError, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Optuna's own error is general, and the last cause is specific
            cause = cause.__cause__
        raise StorageLostError(
            f"the storage of the study is no longer available ({type(cause).__name__}: {cause}). It has all trials "
            "that have ended. Make it available and run again to repeat the other trials"
        ) from error


def current_trial() -> ArrayTrial | None:
    """Return the trial of the calling sibling, or None outside of studies that run as arrays."""
    return _trial.get()


@contextmanager
def using_trial(trial: ArrayTrial) -> Iterator[None]:
    """Make `current_trial()` return `trial` inside the block."""
    token = _trial.set(trial)
    try:
        yield
    finally:
        _trial.reset(token)
