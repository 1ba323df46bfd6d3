"""Which versions of torch this one was tested with."""

from __future__ import annotations

from functools import cache

import torch
from lightning.pytorch.utilities import rank_zero_info

TESTED = (2, 14)
"""The newest torch that the tests run on; a newer one may be installed."""


@cache
def warn_if_untested(version: str = torch.__version__) -> None:
    """Warn on rank 0, once, of a torch newer than the tested one."""
    if tuple(int(part) for part in version.split(".")[:2]) > TESTED:
        rank_zero_info(
            f"lightning_pipes was tested with torch {TESTED[0]}.{TESTED[1]} and older, and this is {version}; if "
            f"something fails inside of torch, try torch {TESTED[0]}.{TESTED[1]}"
        )
