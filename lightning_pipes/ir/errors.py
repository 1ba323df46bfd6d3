"""Errors that a person can act on: each names the place, what it got, what it needed, and a way out."""

from numbers import Integral


class PipelineError(RuntimeError):
    """Base of every error that lightning_pipes raises on its own account."""


class PlanError(PipelineError):
    """A plan can't be made or carried out: stages, spans, memory or versions do not fit."""


class ProgramError(PipelineError):
    """A program is not a correct order of its plan: something is missing, twice, unpaired or too early."""


class DeadlockError(ProgramError):
    """Every rank waits for another one; the message lists who waits for what."""


def check_count(what: str, value: object, hint: str = "") -> int:
    """`value`, which counts something there is one of at least; `hint` ends the sentence if it does not.

    Raises:
        PlanError: it is no whole number, or less than one.
    """
    if not isinstance(value, Integral):
        raise PlanError(f"{what} must be a whole number, got {value!r}{hint}")
    if value < 1:
        raise PlanError(f"{what} must be at least 1, got {value}{hint}")
    return int(value)
