"""UMPIPE as a whole: its searches, its overlapped form, and the execution of both.

    python benchmarks/umpipe.py [--quick] [--json] [--part search|overlapped|executed|real ...]

The seconds of searches are processor time of one core. The executed steps are steps of emulated stages, and of real
layers on two processes, see papers/umpipe/executed.py. Left out: GPUs, because none was available.
"""

from __future__ import annotations

import json
import platform

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.executed import compare_schedules, emulated, keys_of, lines_of
from benchmarks.papers.umpipe.overlapped import gain
from benchmarks.papers.umpipe.search import t6
from lightning_pipes.strategies.umpipe.search import load_loops


def executed(quick: bool) -> Report:
    """Measure executed steps of emulated stages."""
    found = emulated(quick)
    return Report(lines_of(found), keys_of(found))


def real(quick: bool) -> Report:
    """Measure executed steps of real layers on two processes."""
    return Report(*compare_schedules(quick))


PARTS = {"search": t6, "overlapped": gain, "executed": executed, "real": real}


def main() -> None:
    """Run the given parts of the benchmark."""
    parser = make_parser(__doc__, "fewer seeds, sizes and steps; within 120 s")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    print(f"{describe_machine()}, Python {platform.python_version()}, {load_loops()}\n")
    keys = run_parts(PARTS, options.part, options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
