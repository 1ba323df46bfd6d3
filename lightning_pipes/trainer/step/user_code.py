"""Where the user's code is, for messages."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

import lightning
import torch

import lightning_pipes

_LIBRARIES = tuple(str(Path(each.__file__).parent) for each in (torch, lightning, lightning_pipes) if each.__file__)


def find_user_line() -> str:
    """Return file, number and text of the line of the user's code that runs now: the innermost one that is in no
    library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        if not path.startswith((*_LIBRARIES, "<", sys.prefix, sys.base_prefix + "/lib")):
            return f"{path}:{number} ({linecache.getline(path, number).strip()})"
        frame = frame.f_back
    return "an unknown line"
