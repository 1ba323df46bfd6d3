"""Schemas of schedules, derived from the schedules' own dataclasses, so that settings are defined once.

A schema is made when a config asks for it. Hydra loads ours at the start of every app in the environment, and loading
all schedules takes as long as loading Hydra.
"""

from __future__ import annotations

from dataclasses import MISSING as NOTHING
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, get_args, get_type_hints

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, OmegaConf

from lightning_pipes.ir.errors import InputError
from lightning_pipes.ir.registry import schedule_factory

MAKE_SCHEDULE = "lightning_pipes.ir.registry.make_schedule"


@dataclass
class ScheduleSettings:
    """A schedule by the name of its entry point; the other fields are those of the schedule.

    `hydra.utils.instantiate(cfg.schedule)` makes it.
    """

    _target_: str = MAKE_SCHEDULE
    name: str = MISSING


def schedule_schema(name: str) -> type[ScheduleSettings]:
    """Return the settings of the installed schedule `name`, with the types and defaults of its fields.

    Raises:
        InputError: there is none, or it is no dataclass.
    """
    made = schedule_factory(name)
    if not is_dataclass(made):
        raise InputError(f"schedule {name!r} is made by {made!r}; its settings are found if it is a dataclass")
    types = {name: _configurable(hint) for name, hint in get_type_hints(made).items()}
    own: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for each in fields(made):
        if each.default_factory is not NOTHING:
            own.append((each.name, types[each.name], field(default_factory=each.default_factory)))
        else:
            own.append((each.name, types[each.name], MISSING if each.default is NOTHING else each.default))
    return make_dataclass(f"{name.title().replace('_', '')}Settings", own, bases=(ScheduleSettings,))


def _configurable(hint: Any) -> Any:
    """Return the type without members that a config can't hold: for a name or an object, the name."""
    if not isinstance(hint, UnionType):
        return hint
    return reduce(or_, (each for each in get_args(hint) if each.__module__ == "builtins"))


class _LazySchema(ConfigNode):
    """A schedule's schema in Hydra's store, created on first use. The store copies a node and sets the copy's value."""

    def __init__(self, name: str, group: str, schedule: str) -> None:
        self.name, self.group, self.package, self.provider = f"{name}.yaml", group, None, "lightning_pipes"
        self._schedule = schedule
        self._made: Any = None

    @property
    def node(self) -> Any:
        if self._made is None:
            self._made = OmegaConf.structured(schedule_schema(self._schedule))
        return self._made

    @node.setter
    def node(self, made: Any) -> None:
        self._made = made


def register_schedule(name: str, group: str) -> None:
    """Add the schema of an installed schedule to Hydra's config store, as `group`/`name`."""
    here: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        here = here.setdefault(part, {})
    here[f"{name}.yaml"] = _LazySchema(name, group, name)
