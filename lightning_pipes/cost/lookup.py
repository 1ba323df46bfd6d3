"""Looks up entries by name, with a suggestion for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from lightning_pipes.ir import InputError, check_type, short_repr

_T = TypeVar("_T")


def lookup_name(things: Mapping[str, _T], name: str, what: str) -> _T:
    """Return the entry `name`; capitals do not matter.

    Raises:
        InputError: there is none; lists all names, and suggests a close one.
    """
    check_type(what, name, str)
    folded = {each.casefold(): each for each in things}
    if name.casefold() in folded:
        return things[folded[name.casefold()]]
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    hint = f"; did you mean {folded[close[0]]!r}?" if close else "."
    raise InputError(f"there is no {what} called {short_repr(name)}{hint} There is: {', '.join(things)}")
