"""All private names of Optuna that this package uses. Tests check each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from optuna import Study
from optuna.progress_bar import _ProgressBar
from optuna.samplers import BaseSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.study._tell import _tell_with_warning
from optuna.trial import FrozenTrial, Trial

ProgressBar = _ProgressBar
tell_with_warning = _tell_with_warning
_INITIAL_POSITION = 624
"""The position of a newly seeded Mersenne Twister, which is at the end of its block of numbers."""


def storage_of(study: Study) -> BaseStorage:
    """Return the storage of a study."""
    return study._storage


def id_of(trial: Trial) -> int:
    """Return the identifier of a trial in its storage."""
    return trial._trial_id


def read_study_attributes(study: Study) -> dict[str, Any]:
    """Return the system attributes of a study, which users do not see."""
    return study._storage.get_study_system_attrs(study._study_id)


def write_study_attribute(study: Study, name: str, value: Any) -> None:
    """Write a system attribute of a study."""
    study._storage.set_study_system_attr(study._study_id, name, value)


def database_url(storage: BaseStorage) -> str | None:
    """Return the URL of a storage in a database, or None for another storage."""
    inner = storage._backend if isinstance(storage, _CachedStorage) else storage
    return inner.url if isinstance(inner, RDBStorage) else None


def is_creation_collision(error: BaseException | None) -> bool:
    """Return whether an error occurred because another process created the tables of a database at the same time."""
    from sqlalchemy.exc import DBAPIError, IntegrityError

    while error is not None:  # Optuna replaces errors of some commits by its own error
        if isinstance(error, DBAPIError):
            texts = "already exists", "database is locked"
            return isinstance(error, IntegrityError) or any(text in str(error.orig) for text in texts)
        error = error.__cause__
    return False


def share_storage(study: Study, other: Study) -> None:
    """Make `study` use the storage and the trials of `other`."""
    study._storage, study._study_id = other._storage, other._study_id


def stored_trial(study: Study, trial: Trial) -> FrozenTrial:
    """Return a trial as the storage contains it."""
    return study._storage.get_trial(id_of(trial))


def log_completed(study: Study, values: Any, trial: FrozenTrial) -> None:
    """Log a completed trial in the same way as `study.optimize` does."""
    study._log_completed_trial(values, trial.number, trial.params)


def is_stop_requested(study: Study) -> bool:
    """Return whether `study.stop()` was called."""
    return study._stop_flag


def reset_stop(study: Study) -> None:
    """Reset the stop flag, as `study.optimize` does at its start."""
    study._stop_flag = False


@contextmanager
def inside_optimize_loop(study: Study) -> Iterator[None]:
    """Allow calls of `study.stop()` in this thread inside the block.

    Callbacks, exhausted samplers and objectives may call it.
    """
    local = study._thread_local
    before, local.in_optimize_loop = local.in_optimize_loop, True
    try:
        yield
    finally:
        local.in_optimize_loop = before


def samplers_of(sampler: BaseSampler) -> Iterator[BaseSampler]:
    """Yield a sampler and its inner samplers."""
    yield sampler
    for value in vars(sampler).values():
        if isinstance(value, BaseSampler):
            yield from samplers_of(value)


def untouched_generators(sampler: BaseSampler) -> Iterator[np.random.RandomState]:
    """Yield the seeded random generators of a sampler and its inner samplers that have not drawn any numbers yet."""
    for value in (value for each in samplers_of(sampler) for value in vars(each).values()):
        if (
            isinstance(value, LazyRandomState)
            and value._rng is not None
            and value.rng.get_state(legacy=False)["state"]["pos"] == _INITIAL_POSITION
        ):
            yield value.rng
