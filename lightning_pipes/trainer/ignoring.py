"""Warnings that are wrong in a pipeline."""

from __future__ import annotations

import re
import warnings


def ignore_warnings(message: str) -> None:
    """Ignore warnings with this text, a regular expression.

    Nothing is done where they are: after any change of the filters Python shows all warnings of a process again, and
    every sibling of an array would repeat those that a script shows once.
    """
    wanted = "ignore", re.compile(message, re.IGNORECASE), Warning, None, 0
    if wanted not in warnings.filters:
        warnings.filterwarnings("ignore", message=message)
