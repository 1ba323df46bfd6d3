"""Attributes of the user's objects and of Lightning's that differ while a run lasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """Replaces attributes of objects, and restores them in reverse order when it is closed.

    Whatever else a run changes outside of itself registers its undo here, too, by `callback`.
    """

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute on the object itself; closing restores the one before, or that of the class."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)
        attributes[name] = value
        self.callback(_restore, attributes, name, before)

    def replace_method(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of an object by a function that looks like it; usually it calls the method."""
        self.replace(owner, name, functools.wraps(getattr(owner, name))(function))


def _restore(attributes: dict[str, Any], name: str, before: object) -> None:
    if before is _MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = before
