"""Which versions of torch this one was tested with."""

from __future__ import annotations

from functools import cache

import torch
from lightning.pytorch.utilities import rank_zero_info

TESTED = (2, 14)
"""The newest torch that the tests run on; a newer one may be installed."""


@cache
def tell_if_untested(version: str = torch.__version__) -> None:
    """Says on rank 0, once, that torch is newer than what was tested, if it is."""
    if tuple(int(part) for part in version.split(".")[:2]) > TESTED:
        rank_zero_info(
            f"lightning_pipes was tested with torch {TESTED[0]}.{TESTED[1]} and older, and this is {version}; if "
            f"something fails inside of torch, try torch {TESTED[0]}.{TESTED[1]}"
        )
