"""UMPIPE whole: its searches, its overlapped form, and both executed.

    python benchmarks/umpipe.py [--quick] [--json] [--part search|overlapped|executed ...]

The parts have more to show by themselves: search.py and overlapped.py in papers/umpipe, experiment by experiment, with
pictures. Seconds of searches are CPU time of one core; executed steps are those of emulated stages, see
papers/umpipe/executed.py. Left out: GPUs, of which there was none, and real layers on as many devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform

from benchmarks.papers.umpipe.executed import emulated, keys_of, lines_of
from benchmarks.papers.umpipe.overlapped_experiments import EXPERIMENTS
from benchmarks.papers.umpipe.search_experiments import t6
from lightning_pipes.strategies.umpipe.search import load_loops

PARTS = ("search", "overlapped", "executed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, sizes and steps; within 120 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {load_loops()}\n")
    keys: dict[str, float] = {}
    for part in options.part:
        if part == "executed":
            found = emulated(options.quick)
            print("\n".join(lines_of(found)), flush=True)
            keys |= keys_of(found)
            continue
        report = t6(options.quick) if part == "search" else EXPERIMENTS["gain"](options.quick)
        print("\n".join(report.lines) + "\n", flush=True)
        keys |= report.keys
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
