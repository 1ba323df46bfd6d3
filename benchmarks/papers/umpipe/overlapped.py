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

import json
import platform
from pathlib import Path

from benchmarks.harness.report import describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.overlapped_experiments import EXPERIMENTS
from lightning_pipes.strategies.umpipe.overlapped.machine import fastest
from lightning_pipes.strategies.umpipe.search import load_loops


def main() -> None:
    parser = make_parser(__doc__, "fewer seeds and seconds; within 60 s")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for pictures, of experiments that have one")
    options = parser.parse_args()
    load_loops()
    print(f"{describe_machine()}, Python {platform.python_version()}, {fastest().name}\n")
    keys = run_parts(EXPERIMENTS, options.experiment, options.quick, options.pictures)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
