"""Unequal micro-batches, all forwards before all backwards: the paper's searches beside the exact one.

    python benchmarks/papers/umpipe/search.py [--quick] [--json] [--pictures FOLDER]
        [--experiment t2|t3|f5|f6|t6|realistic ...]

Seconds are CPU time of one core, without what numba takes to compile. The paper publishes no networks and does not name
its option set, so its numbers stand beside those of networks that are drawn in the same way (times from 1 to 100, all
counts of micro-batches from 1 to P): distributions are compared, not instances. "each size once": options are sizes of
chunks, with the cheapest of the counts that come to the same size; "all counts" leaves them to the search, as the paper
does. No real device has such times; `realistic` has networks that one might have, and t6 sorted times, too.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.search_experiments import f5, f6, realistic_networks, t2, t3, t6
from lightning_pipes.strategies.umpipe.search import load_loops

EXPERIMENTS: dict[str, Callable[[bool], Report]] = {
    "t2": t2,
    "t3": t3,
    "f5": f5,
    "f6": f6,
    "t6": t6,
    "realistic": realistic_networks,
}


def main() -> None:
    parser = make_parser(__doc__, "fewer seeds and sizes; within 100 s")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each experiment")
    options = parser.parse_args()
    by = load_loops()
    print(f"{describe_machine()}, Python {platform.python_version()}, {by}\n")
    keys = run_parts(EXPERIMENTS, options.experiment, options.quick, options.pictures)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
