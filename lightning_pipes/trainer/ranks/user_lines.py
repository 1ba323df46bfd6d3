"""The line of the user's code that a message refers to."""

from __future__ import annotations

import dis
import sys
from types import FrameType

from lightning.pytorch.utilities import rank_zero_warn

_LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
_LIBRARIES = frozenset((*sys.stdlib_module_names, *_LIGHTNING, "lightning_pipes", "torch"))
"""Packages whose lines do not belong to the user's code."""
_warned: set[tuple[str, int]] = set()
"""The lines of the user's code that have been warned about."""


def find_user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost call of the user's code at or above `frame`, by default the caller; None if there is
    none."""
    frame = frame or sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None = None) -> str:
    """Return the file and the line number of the innermost call of the user's code."""
    found = find_user_frame(frame or sys._getframe(1))
    return "a line of a library" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def only_looks(frame: FrameType) -> bool:
    """Return whether the result of a call is only compared with a number, or printed."""
    rest = (i.opname for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    following = next((name for name in rest if name not in ("LOAD_CONST", "LOAD_SMALL_INT", "CACHE")), "")
    return following.startswith(("COMPARE_OP", "FORMAT_", "CONVERT_VALUE"))


def warn_once_per_line(message: str, frame: FrameType | None = None) -> None:
    """Warn on rank 0 about a line of the user's code when it first runs.

    Args:
        message: the warning, with {} in place of the line.
        frame: a call that may belong to the user's code; by default the innermost one. If the call belongs to a
            library, there is no warning.
    """
    found = frame if frame is not None else find_user_frame(sys._getframe(1))
    if found is None or find_user_frame(found) is not found:
        return
    place = found.f_code.co_filename, found.f_lineno
    if place not in _warned:
        _warned.add(place)
        rank_zero_warn(message.format(":".join(map(str, place))))
