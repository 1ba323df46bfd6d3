"""What a step loses while parcels go the same way: two emulated stages on the hosts of a network laboratory.

    python benchmarks/papers/dynpipe/parcels.py [--quick] [--json]

Each round has a step of each kind, with a parcel under way all the time: chunks that wait for training's messages, as
by default, chunks that do not, and none.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.harness.emulated import Emulation, sleeping_layer
from benchmarks.harness.netlab import NetLab, lab_unavailable_reason
from benchmarks.harness.ranks import join_ranks
from benchmarks.harness.report import make_parser
from lightning_pipes.engine import Engine, Item, make_transport
from lightning_pipes.engine.messages.bulk_transfer import BulkTransfer
from lightning_pipes.ir import Plan, Span
from lightning_pipes.strategies.kfkb import KFKB

KINDS = ("alone", "gated", "ungated")
MESSAGE = 2**17
"""Bytes of an activation."""


@dataclass(frozen=True)
class Trial:
    """A message takes `x` forwards of `forward` seconds on its link."""

    x: float
    k: int
    rounds: int
    forward: float = 0.01
    microbatches: int = 8

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the link."""
        return MESSAGE / (self.x * self.forward)


def rank_main(rank: int, trial: Trial) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of this rank's steps, and bytes a second of parcels meanwhile, by kind."""
    watch = join_ranks(rank, 2)
    plan = replace(Plan.even(2, trial.microbatches), layers=(Span(0, 1), Span(1, 2)))
    layer = sleeping_layer(trial.forward, 2 * trial.forward, message_bytes=MESSAGE)
    order = KFKB(trial.k).program(plan)
    stages = Emulation(plan, order, (layer, layer), (1.0, 1.0)).stages(rank)
    engine = Engine(plan, order, stages, make_transport(plan, rank, range(2), torch.device("cpu"), watch), rank=rank)
    parcels = BulkTransfer(rank, range(2), watch)
    gates = {"gated": None, "ungated": lambda: False}
    busy = max(1.0, trial.x) * trial.forward * 3 * trial.microbatches
    content = torch.zeros(int(trial.bandwidth * busy) // 4)
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(trial.rounds + 1):
        for kind in KINDS:
            dist.barrier()
            handle = None
            if kind != "alone":
                parcels.set_gate(gates[kind] or parcels.is_training_sending)
                key = (kind, number)
                handle = parcels.send(1, key, content) if rank == 0 else parcels.receive(0, key)
                time.sleep(0.05)  # so that it is under way
            sent, begun = parcels.traffic.sent, time.monotonic()
            engine.inject(Item(number, plan.jobs[0].rows))
            engine.drain()
            took = time.monotonic() - begun
            if number:  # the first round sets channels up
                steps[kind].append(took)
                rates[kind].append((parcels.traffic.sent - sent) / took)
            if handle is not None:
                handle.wait()
    engine.close()
    parcels.close()
    watch.close()
    return steps, rates


def main() -> None:
    options = make_parser(__doc__, "few rounds").parse_args()
    rounds = 4 if options.quick else 12
    headline = {}
    reason = lab_unavailable_reason()
    if reason:
        print(f"no network laboratory here: {reason}")
        return
    print(
        "step time over that without parcels (median of rounds, and their quartiles); speed of the parcel's link used"
    )
    for x, k in ((0.5, 1), (2.0, 1), (2.0, 8)):
        trial = Trial(x, k, rounds)
        with NetLab(2, trial.bandwidth) as lab:
            found = lab.run_ranks(rank_main, trial, timeout=600)
        slowest = {kind: [max(both) for both in zip(*(f[0][kind] for f in found), strict=True)] for kind in KINDS}
        base = statistics.median(slowest["alone"])
        print(f"a message takes {x:g} forwards, k={k}: {1000 * base:.0f} ms alone")
        for kind in KINDS[1:]:
            ratios = [a / b for a, b in zip(slowest[kind], slowest["alone"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            share = statistics.median(found[0][1][kind]) / trial.bandwidth
            headline[f"x={x:g} k={k} {kind}"] = round(middle, 4)
            print(f"  {kind:8} {middle:.3f}  ({low:.3f} to {high:.3f})   {share:4.0%} of the link")
    if options.json:
        print(json.dumps(headline))


if __name__ == "__main__":
    main()
