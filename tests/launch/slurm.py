"""A stand-in for the programs of SLURM."""

from __future__ import annotations

import os
from pathlib import Path

_SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS"
"""


def path_with_scontrol(folder: Path) -> str:
    """Write a `scontrol` command that records its calls, and return a PATH that contains it."""
    (folder / "scontrol").write_text(_SCONTROL)
    (folder / "scontrol").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
