"""Unequal micro-batches whose forward and backward overlap: how much faster than the best flushed scheme, and what
memory buys.

    python benchmarks/papers/umpipe/overlapped.py [--quick] [--json] [--pictures FOLDER]
        [--experiment evaluators|merge|gain|front|cuts|links ...]

Seconds are CPU time of one core, without what numba takes to compile. Searches get 2 of them, with --quick fewer.
`gain` is the time of the best scheme with all forwards first (proven unless said) over that of the overlapped one,
minus 1. "equal" is the best 1F1B with equal chunks everywhere. Simulation networks are the paper's (times from 1 to
100, whatever the size of a chunk); realistic ones have times that devices might have.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.pictures import draw
from benchmarks.papers.umpipe.overlapped_experiments import EXPERIMENTS, Report
from lightning_pipes.strategies.umpipe.overlapped.machine import fastest
from lightning_pipes.strategies.umpipe.search import load_loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and seconds; within 60 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for pictures, of experiments that have one")
    options = parser.parse_args()
    load_loops()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {fastest().name}\n")
    keys: dict[str, float] = {}
    for name in options.experiment:
        experiment: Callable[[bool], Report] = EXPERIMENTS[name]
        report = experiment(options.quick)
        print("\n".join(report.lines) + "\n", flush=True)
        keys |= report.keys
        if options.pictures and report.picture:
            options.pictures.mkdir(parents=True, exist_ok=True)
            draw(report.picture, options.pictures / f"umpipe_overlapped_{name}.png")
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
