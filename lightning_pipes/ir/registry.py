"""Find installed schedules by name in the entry point group `lightning_pipes.schedules`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lightning_pipes.ir.checks import PlanError, check_type, short_repr, suggest_name
from lightning_pipes.ir.schedule import Policy, Schedule

SCHEDULE_GROUP = "lightning_pipes.schedules"


@cache
def installed_schedules() -> Mapping[str, EntryPoint]:
    """Return the schedule entry points of all installed distributions, sorted by name."""
    return {e.name: e for e in sorted(entry_points(group=SCHEDULE_GROUP), key=lambda e: e.name)}


def schedule_factory(name: str) -> Any:
    """Return the class or function that creates the schedule `name` from its settings.

    Raises:
        PlanError: if no such schedule is installed. The message lists the installed schedules.
    """
    name = check_type("schedule", name, str)
    found = installed_schedules().get(name)
    if found is None:
        raise PlanError(f"no schedule is called {short_repr(name)}. {suggest_name(name, installed_schedules())}")
    return found.load()


def make_schedule(name: str, **settings: Any) -> Schedule | Policy:
    """Return the schedule `name`, created with the given settings.

    Raises:
        PlanError: if no such schedule is installed, if it does not accept these settings, or if the result is neither a
            Schedule nor a Policy. The message lists the valid names.
    """
    factory = schedule_factory(name)
    try:
        made = factory(**settings)
    except TypeError as error:
        why = _explain_unknown(factory, settings) or error
        raise PlanError(f"schedule {name!r} does not take {short_repr(settings)}: {why}") from None
    if not isinstance(made, (Schedule, Policy)):
        raise PlanError(
            f"{factory!r} returned a {type(made).__name__}, which is neither a Schedule nor a Policy: it has to "
            "inherit from one of these classes of lightning_pipes.ir"
        )
    return made


def _explain_unknown(factory: Any, settings: Mapping[str, Any]) -> str:
    """Return a sentence about the first unknown setting, or an empty string if all settings are known."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return ""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return ""
    unknown = next((name for name in settings if name not in known), None)
    if unknown is None:
        return ""
    choices = suggest_name(unknown, known, cutoff=0.5) if known else "It has no settings"
    return f"it has no setting {unknown!r}. {choices}"
