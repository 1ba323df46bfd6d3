"""Errors that a person can act on: each names the place, what it got, what it needed, and a way out."""


class PipelineError(RuntimeError):
    """Base of every error that lightning_pipes raises on its own account."""


class PlanError(PipelineError):
    """A plan can't be made or carried out: stages, spans, memory or versions do not fit."""


class InputError(PlanError):
    """Something that was given can't be used: a setting, an argument, a file, a number, a unit, a name.

    It is a PlanError for those who catch all that is wrong before anything runs.
    """


class ProgramError(PipelineError):
    """A program is not a correct order of its plan: something is missing, twice, unpaired or too early."""


class DeadlockError(ProgramError):
    """Every rank waits for another one; the message lists who waits for what."""
