"""Temporary changes to attributes of the user's objects and of Lightning's objects during a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """Replaces attributes of objects, and restores them in reverse order when it is closed.

    Any other change that a run makes to outside objects also registers its undo function here, with `callback`.
    """

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute on the object itself.

        Closing restores the previous attribute of the object, or the attribute of its class.
        """
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)
        attributes[name] = value
        self.callback(_restore, attributes, name, before)

    def replace_method(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of an object by a function with the same metadata, which usually calls the method."""
        self.replace(owner, name, functools.wraps(getattr(owner, name))(function))


def _restore(attributes: dict[str, Any], name: str, before: object) -> None:
    if before is _MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = before
