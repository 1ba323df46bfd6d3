"""Timeouts of tests that adapt to a busy machine."""

from __future__ import annotations

import os


def scale_timeout(seconds: float) -> float:
    """Return `seconds` scaled by the load: twice the number of runnable processes per core, now or in the last minutes,
    from 1 to 20. A hang on a quiet machine is still noticed soon."""
    waiting = max(os.getloadavg()) / (os.cpu_count() or 1)
    return seconds * min(max(1.0, 2 * waiting), 20.0)
