"""The simulated gain of a cut for each subnet, compared with one cut for all, in the spaces of NASPipe's paper.

python benchmarks/papers/csp/mirroring.py
"""

from __future__ import annotations

import json
from itertools import product

from benchmarks.papers.csp.emulation.spaces import balanced, fixed, space_of
from benchmarks.papers.csp.emulation.stream import Rules, run


def simulated(subnets: int) -> None:
    """Print the gains by stages and micro-batches, with the swap times of the paper."""
    for name in ("NLP.c1", "NLP.c2", "NLP.c3", "CV.c1", "CV.c2", "CV.c3"):
        drawn, gains = space_of(name).draw(subnets, seed=1), {}
        for stages, microbatches in product((4, 8), (1, 4, 8)):
            one, each = (run(place(drawn, stages), Rules(microbatches)).throughput for place in (fixed, balanced))
            gains[f"{stages} stages, {microbatches}"] = round(each / one, 2)
        print(name, json.dumps(gains))


if __name__ == "__main__":
    simulated(300)
