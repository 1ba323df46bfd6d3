"""Toys: distributions of their own beside the tests, as other people's schedules are. Each is one folder."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_pipes.ir.registry import installed_schedules


def install(name: str) -> None:
    """From now on this process finds the distribution in the folder `name`, as if pip had installed it."""
    folder = str(Path(__file__).with_name(name))
    if folder not in sys.path:
        sys.path.append(folder)
        installed_schedules.cache_clear()
