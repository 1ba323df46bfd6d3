"""CSP on the search spaces of NASPipe's paper, compared with the systems that the paper names.

The parts spaces, split, bounds, costs, scaling and swaps are emulated, see papers/csp/figures.py. The part decision
measures the cost of a scheduling decision in the engine. The part equality trains on several numbers of processes and
checks whether the results are the same.

    python benchmarks/csp.py [--quick] [--json] [--part spaces|split|bounds|costs|scaling|swaps|decision|equality ...]
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.csp.decision import decision_us
from benchmarks.papers.csp.emulation.kernel import STREAM
from benchmarks.papers.csp.figures import bounds, costs, scaling, spaces, split, swaps
from benchmarks.papers.csp.reproducibility import trained

MICROBATCHES = 8
"""The number of micro-batches for which `decision_us` is reported. It keeps the queue busy."""


def decision(quick: bool) -> Report:
    """Measure the cost of a decision with 30 queued subnets, by number of micro-batches.

    The key `decision_us` is for eight micro-batches.
    """
    report = Report(["M   us a decision   us to take a subnet in   queued"])
    for m in (1, MICROBATCHES, 2 * MICROBATCHES):
        found = decision_us(m, subnets=80 if quick else 150)
        report.lines.append(f"{m:2} {found.decision:15.1f} {found.entering:23.1f} {found.queued:10.1f}")
        report.keys |= {"decision_us": found.decision} if m == MICROBATCHES else {f"decision_us_{m}": found.decision}
    return report


def equality(quick: bool) -> Report:
    """Train on several numbers of stages, and check whether weights and losses are the same.

    The key `bit_equal` is 1 if they are.
    """
    report, equal = Report([]), True
    for system in ("CSP sequential", "CSP delayed by 16"):
        found = {n: trained(system, n, 40 if quick else 200) for n in ((1, 2) if quick else (1, 2, 4, 8))}
        same = len({(each.weights, *each.record.losses.values()) for each in found.values()}) == 1
        equal = equal and same
        report.lines.append(f"{system}: {'equal' if same else 'DIFFERENT'} on {', '.join(map(str, found))} processes")
    report.keys["bit_equal"] = float(equal)
    return report


PARTS: dict[str, Callable[[bool], Report]] = {
    "spaces": spaces,
    "split": split,
    "bounds": bounds,
    "costs": costs,
    "scaling": scaling,
    "swaps": swaps,
    "decision": decision,
    "equality": equality,
}


def main() -> None:
    """Run the given parts of the benchmark."""
    parser = make_parser(__doc__, "fewer subnets and seeds; within 120 s")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    print(f"{describe_machine()}, Python {platform.python_version()}, {STREAM.load()}\n")
    keys = run_parts(PARTS, options.part, options.quick)
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in keys.items()}))


if __name__ == "__main__":
    main()
