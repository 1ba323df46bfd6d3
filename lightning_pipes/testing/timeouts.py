"""How long a test waits for what takes seconds on a quiet machine."""

from __future__ import annotations

import os


def scale_timeout(seconds: float) -> float:
    """`seconds`, times twice as many processes as want each of the machine's cores now, or did in the last minutes; at
    least one and at most 20. What hangs on a quiet machine is still noticed soon."""
    waiting = max(os.getloadavg()) / (os.cpu_count() or 1)
    return seconds * min(max(1.0, 2 * waiting), 20.0)
