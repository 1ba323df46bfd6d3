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

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.pictures import draw
from benchmarks.papers.umpipe.search_experiments import Report, f5, f6, realistic_networks, t2, t3, t6
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and sizes; within 100 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each experiment")
    options = parser.parse_args()
    by = load_loops()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {by}\n")
    keys: dict[str, float] = {}
    for name in options.experiment:
        report = EXPERIMENTS[name](options.quick)
        print("\n".join(report.lines) + "\n", flush=True)
        keys |= report.keys
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            draw(report.picture, options.pictures / f"umpipe_{name}.png")
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
