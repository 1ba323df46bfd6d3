"""Who read and wrote a layer, one after another (NASPipe, Table 4)."""

from __future__ import annotations

import numpy as np

from benchmarks.papers.csp.emulation.stream import Ran


def accesses(ran: Ran, block: int, choice: int) -> str:
    """The order in which subnets read and wrote the layer, such as "2F-2B-5F-5B": F where the first forward of one on
    the layer's stage began, B where its last backward there ended, with weight gradients."""
    placed = ran.placed
    found = []
    for subnet in np.flatnonzero(placed.subnets.choices[:, block] == choice):
        stage = placed.stage_of[subnet, block]
        found.append((int(ran.forwards[0, subnet, stage].min()), 1, f"{subnet}F"))
        found.append((int(ran.stepped[subnet, stage]), 0, f"{subnet}B"))  # ends before others begin
    return "-".join(what for _, _, what in sorted(found))
