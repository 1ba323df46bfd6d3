"""The simulated gain of a cut for each subnet, compared with one cut for all, in the spaces of NASPipe's paper."""

from __future__ import annotations

import json
from itertools import product

from benchmarks.harness.report import Output
from benchmarks.papers.csp.emulation.spaces import balanced, fixed, space_of
from benchmarks.papers.csp.emulation.stream import Rules, run


def mirroring(subnets: int) -> Output:
    """Yield the gains by stages and micro-batches, with the swap times of the paper."""
    for name in ("NLP.c1", "NLP.c2", "NLP.c3", "CV.c1", "CV.c2", "CV.c3"):
        drawn, gains = space_of(name).draw(subnets, seed=1), {}
        for stages, microbatches in product((4, 8), (1, 4, 8)):
            one, each = (run(place(drawn, stages), Rules(microbatches)).throughput for place in (fixed, balanced))
            gains[f"{stages} stages, {microbatches}"] = round(each / one, 2)
        yield f"{name} {json.dumps(gains)}"
        yield {f"{name}, {case}": gain for case, gain in gains.items()}
