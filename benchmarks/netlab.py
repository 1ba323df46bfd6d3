"""The command line of the network laboratory.

python -m benchmarks.netlab check
python -m benchmarks.netlab run -n 2 --bandwidth 5e6 -- python examples/train.py trainer.devices=2
python -m benchmarks.netlab clean
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.harness.namespaces import PORT, host_address, kill_orphans
from benchmarks.harness.netlab import BURST, NetLab, lab_unavailable_reason
from lightning_pipes.testing.ranks import rank_environment


def run(n: int, bandwidth: float | None, burst: int, command: Sequence[str]) -> int:
    """Run a command once on each host, with the same environment variables as with torchrun.

    If the command fails on one host, it is killed on the others.

    Args:
        n: the number of hosts.
        bandwidth: bytes of messages per second, for every link in each direction, or None for no limit.
        burst: bytes that pass at full speed after a link was idle.
        command: the command and its arguments.

    Returns:
        0 if the command returned 0 on all hosts, otherwise 1.
    """
    with NetLab(n, bandwidth, burst=burst) as lab:
        processes = [lab.start(r, command, rank_environment(r, n, host_address(0), PORT)) for r in range(n)]
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.05)
    return int(any(codes))


def main() -> int:
    """Run a subcommand and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run a command on every host")
    running.add_argument("-n", type=int, default=2, help="the number of hosts")
    running.add_argument("--bandwidth", type=float, help="bytes of messages per second, for every link and direction")
    running.add_argument("--burst", type=int, default=BURST, help="bytes that pass at full speed after a link was idle")
    running.add_argument("argv", nargs="+")
    commands.add_parser("check", help="print whether a laboratory can be created here")
    commands.add_parser("clean", help="kill processes of laboratories whose owner has ended")
    options = parser.parse_args()
    if options.command == "clean":
        print(f"killed {len(kill_orphans())} processes")
        return 0
    if options.command == "run":
        return run(options.n, options.bandwidth, options.burst, options.argv)
    reason = lab_unavailable_reason()
    print(reason or "a laboratory can be created here")
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
