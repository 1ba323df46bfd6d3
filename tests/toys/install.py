"""Toys: separate distributions next to the tests, like schedules of third parties. Each of them is one folder."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_pipes.ir.registry import installed_schedules


def install(name: str) -> None:
    """Make the distribution in the folder `name` available in this process, as if pip had installed it."""
    folder = str(Path(__file__).with_name(name))
    if folder not in sys.path:
        sys.path.append(folder)
        installed_schedules.cache_clear()
