"""Readable error messages for mistakes on the command line of a Hydra app.

A message names the setting that is wrong, lists the alternatives, and suggests a correction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

from hydra.errors import (
    CompactHydraException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from lightning_pipes.ir import InputError, PipelineError, PlanError
from lightning_pipes.ir.checks import suggest_name
from lightning_pipes.tune.private_hydra import value_of

HYDRA_ERROR_VARIABLE = "HYDRA_FULL_ERROR"  # if it is 1, Hydra raises errors instead of printing them
OWN_MARK_VARIABLE = (
    "LIGHTNING_PIPES_SET_HYDRA_FULL_ERROR"  # marks for child processes that HYDRA_FULL_ERROR is not the user's
)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the process with a short message if the block raises an error in settings or an error of this package.

    Other errors keep their traceback. Use this context manager around the call of a function that `hydra.main`
    decorates. With HYDRA_FULL_ERROR=1, it does nothing.
    """
    if os.environ.get(HYDRA_ERROR_VARIABLE) == "1" and OWN_MARK_VARIABLE not in os.environ:
        yield
        return
    os.environ.update({HYDRA_ERROR_VARIABLE: "1", OWN_MARK_VARIABLE: "1"})
    try:
        yield
    except (HydraException, OmegaConfBaseException, PipelineError) as error:
        raise SystemExit(f"\n{explain_error(error)}\n\nFor the traceback: {HYDRA_ERROR_VARIABLE}=1") from None
    finally:
        for name in (HYDRA_ERROR_VARIABLE, OWN_MARK_VARIABLE):
            os.environ.pop(name, None)


class SettingsError(InputError, CompactHydraException):
    """Invalid settings. Hydra prints the message without a traceback, unless HYDRA_FULL_ERROR=1 is set."""


@contextmanager
def as_settings_error() -> Iterator[None]:
    """Convert a PlanError, such as an InputError, of the block into a SettingsError.

    Use this context manager in launchers and sweepers, around code that Hydra calls.
    """
    try:
        yield
    except PlanError as error:
        raise SettingsError(str(error)).with_traceback(error.__traceback__) from None


def explain_error(error: Exception) -> str:
    """Return a text that explains an error in a configuration and suggests a correction.

    For any other error, the text of the error is returned unchanged.
    """
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: there is no such {group}. {suggest_name(name, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {error.message}"
    if isinstance(error, InstantiationException) and cause is not None:
        _, _, where = str(error).rpartition("full_key: ")
        return f"{where}: {cause}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        where, _, name = str(cause.full_key).rpartition(".")
        keys = [str(key) for key in cause.parent_node if not str(key).startswith(("_", "hydra"))]
        return f"{cause.full_key}: {where or 'the configuration'} has no {name!r}. {suggest_name(name, keys)}"
    if isinstance(cause, ValidationError) and is_dataclass(cause.object_type):
        if isinstance(cause.child_node, DictConfig):
            keys = [f"{cause.full_key}.{key!s}" for key in cause.child_node]
            return f"{cause.full_key}={cause.value}: set one of its values instead: {', '.join(keys)}"
        kinds = {f.name: f.type for f in fields(cause.object_type)}
        kind = kinds.get(str(cause.key), "another type")
        now = value_of(cause.child_node)
        example = "" if now is None else f", as in {cause.full_key}={now}"
        return f"{cause.full_key}={cause.value}: needs {kind}{example}"
    return f"{error}\n{cause}" if cause is not None and isinstance(error, HydraException) else str(error)
