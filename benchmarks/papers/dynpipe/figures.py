"""The paper's experiments with DynPipe in virtual time, small: time to a loss beside neighbours against four baselines
(table II), iteration times, throughput and losses over time without, under light and under heavy traces (figures 3, 11
and 12), staleness and memory by the number of stages (figure 2), what a neighbour of 10 to 40 % costs (figure 14), the
share of time that trains (figure 17), and what re-partitioning costs by how often something changes (figure 18).

    python benchmarks/papers/dynpipe/figures.py [--only NAME] [--json]

Four emulated stages, 16 layers, a batch of 8 micro-batches takes about 0.8 s; devices have neighbours as of
`neighbourhood.visiting_slowdown`, light, or heavy, which is three times as many. Losses are those of the network of
staleness.py beside this file on digits, whose gradients are as old as the schedule has them: each batch costs the
simulated seconds of its step. A restart takes RESTART seconds, as published, and comes at the end of an epoch only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from benchmarks.papers.dynpipe.neighbourhood import Neighbourhood, constant_slowdown, layered_model, visiting_slowdown
from benchmarks.papers.dynpipe.planner import EPOCH, LOOK, RESTART, Run, Trace, trained
from benchmarks.papers.dynpipe.staleness import LAYERS, RATE, batches, lags, loss_of, network
from lightning_pipes.cost import Link
from lightning_pipes.ir import Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.memory import held_rows, stage_bytes

RANKS, BATCHES, SAMPLES = 4, 2000, 16
LOADS = {"quiet": 0.0, "light": 0.2, "heavy": 0.6}
STAY = 600.0
TARGETS = 750, 1500
"""The losses to reach are those that training with fresh gradients has after so many batches."""
SLOWER = 100
"""By how much lower the rate is than in benchmarks/papers/dynpipe/staleness.py: so that training takes that long."""
AGED = (200, RATE / 2), (1500, RATE / SLOWER)
"""Batches and rates with which it is shown what stale gradients do."""
SMOOTHED = 20


def world(name: str, trace: Trace, ranks: int = RANKS) -> Neighbourhood:
    """A pipeline with these neighbours."""
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    profile = layered_model(
        (np.random.default_rng(5).uniform(0.7, 1.3, 16) * 5e-3).tolist(), edge=2e5, weights=4 * 10**6
    )
    return Neighbourhood(profile, schedule, ranks, SAMPLES, 8, trace.slowdown, Link(bandwidth=1.25e9))


def visited(load: str, seed: int = 3) -> Trace:
    """Neighbours of all ranks."""
    return Trace(visiting_slowdown(RANKS, LOADS[load], STAY, seed))


@cache
def losses(lag: tuple[int, ...], count: int, rate: float = RATE / SLOWER) -> tuple[float, ...]:
    """Of each batch, with gradients of weights that are `lag` batches old, by layer."""
    now = [p.detach().clone() for layer in network(0) for p in layer.parameters()]
    old: deque[list[torch.Tensor]] = deque([now], maxlen=max(lag) + 1)
    found, data = [], batches(0)
    for _ in range(count):
        x, y = next(data)
        used = [old[max(-1 - behind, -len(old))][2 * n + k] for n, behind in enumerate(lag) for k in (0, 1)]
        used = [w.requires_grad_() for w in used]
        loss = loss_of(used, x, y)
        found.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, used)
        old.append([(w - rate * g).detach() for w, g in zip(old[-1], gradients, strict=True)])
    return tuple(found)


def batches_to(target: float, lag: tuple[int, ...], count: int) -> int | None:
    """Batches until the mean of the last losses is as low."""
    found = losses(lag, count)
    means = (statistics.fmean(found[n - SMOOTHED : n]) for n in range(SMOOTHED, len(found) + 1))
    return next((n + SMOOTHED for n, mean in enumerate(means) if mean <= target), None)


STALE = {"1f1b": (0,) * LAYERS, "pipedream_2bw": (1,) * LAYERS, "pipedream": tuple(lags(RANKS))}
"""How old gradients are, by schedule and layer."""


@cache
def runs_of(load: str) -> dict[str, tuple[Run, str]]:
    """Return the run of each system under a trace, and the schedule that says how stale its gradients are."""
    runs: dict[str, tuple[Run, str]] = {}
    for name, label in (("1f1b", "PipeDream-Flush"), ("pipedream", "PipeDream"), ("pipedream_2bw", "2BW")):
        runs[label] = trained(world(name, visited(load)), BATCHES, True, ("never",))["never"], name
    moved = trained(world("dynpipe", visited(load)), BATCHES, True, ("restart", "dynpipe", "oracle"))
    runs |= {
        "PipeDream-Re": (moved["restart"], "pipedream"),
        "DynPipe": (moved["dynpipe"], "pipedream"),
        "oracle": (moved["oracle"], "pipedream"),
    }
    return runs


def to_a_loss(load: str) -> dict[str, float]:
    """Seconds to each target of the baselines and of DynPipe."""
    found: dict[str, float] = {}
    runs = runs_of(load)
    print(f"\nseconds to a loss, {load} trace ({LOADS[load]:g} neighbours a device, each for {STAY:g} batches)")
    for label, (run, name) in runs.items():
        ends, took = [*accumulate(run.seconds)], []
        for batch in TARGETS:
            target = statistics.fmean(losses(STALE["1f1b"], BATCHES)[batch - SMOOTHED : batch])
            count = batches_to(target, STALE[name], BATCHES)
            took.append(float("inf") if count is None else ends[count - 1])
        found[label] = took[-1]
        cells = "".join(f"{seconds:10.0f}" for seconds in took)
        print(f"{label:16}{cells}   {ends[-1] / BATCHES:6.3f} s a batch, {run.moves} re-plans")
    print(f"{'':16}" + "".join(f"{f'loss {n}':>10}" for n in TARGETS))
    return {f"{load}_vs_{name}": seconds / found["DynPipe"] for name, seconds in found.items() if name != "DynPipe"}


def curves(loads: Sequence[str]) -> dict[str, float]:
    """Iteration times, samples a second, and the loss after each quarter of the time that Flush takes."""
    found: dict[str, float] = {}
    heads = "".join(f"{f'loss at {n}/4':>12}" for n in range(1, 5))
    print(f"\n{'trace':6}{'':16}{'median':>9}{'nine in ten':>13}{'samples/s':>11}{heads}")
    for load in loads:
        runs = runs_of(load)
        whole = sum(runs["PipeDream-Flush"][0].seconds)
        for label, (run, name) in runs.items():
            median, most = np.quantile(run.seconds, (0.5, 0.9))
            rate = SAMPLES * BATCHES / sum(run.seconds)
            ends, known = [*accumulate(run.seconds)], losses(STALE[name], BATCHES)
            counts = [max(SMOOTHED, bisect_right(ends, whole * n / 4)) for n in range(1, 5)]
            cells = "".join(f"{statistics.fmean(known[n - SMOOTHED : n]):12.4f}" for n in counts)
            print(f"{load:6}{label:16}{median:7.3f} s{most:11.3f} s{rate:11.1f}{cells}")
            found[f"{load}_rate_{label}"] = rate
    return found


def sensitivity(shares: Sequence[float]) -> dict[str, float]:
    """Seconds of a batch where a neighbour takes so much of one device for good, moved or not, over quiet ones."""
    found: dict[str, float] = {}
    quiet = float(np.median(runs_of("quiet")["PipeDream"][0].seconds))
    print(f"\n{'a neighbour takes':>18} {'never':>8} {'dynpipe':>8} {'oracle':>8}")
    for share in shares:
        factors = [1 / (1 - share) if rank == 1 else 1.0 for rank in range(RANKS)]
        there = world("dynpipe", Trace(constant_slowdown(factors, since=200)))
        runs = trained(there, BATCHES // 2, True, ("never", "dynpipe", "oracle"))
        late = {name: float(np.median(run.seconds[-200:])) / quiet for name, run in runs.items()}
        print(f"{share:17.0%} " + " ".join(f"{each:8.3f}" for each in late.values()))
        found |= {f"share_{share:.0%}_{name}": each for name, each in late.items()}
    return found


def staleness() -> dict[str, float]:
    """Loss after so many batches with a high rate and a low one, and the memory of the first stage, by the number of
    stages."""
    found = {}
    heads = [f"loss after {count} batches, rate {rate:g}" for count, rate in AGED]
    print(f"\n{'stages':>6}" + "".join(f"{head:>36}" for head in heads) + f"{'memory of the first stage':>28}")
    quiet = Trace(lambda rank, first, batches: np.ones((1, 1)))
    for stages in (1, 2, 4, 8):
        loss = [statistics.fmean(losses(tuple(lags(stages)), *each)[-SMOOTHED:]) for each in AGED]
        size = 0.0
        if stages > 1:
            at = world("pipedream", quiet, stages)
            plan = at.plan()
            held = held_rows(at.order(plan).unroll(2 * stages), plan)[0]
            size = float(stage_bytes(at.profile, plan, 0, held)(np.array(0), np.array(plan.layers[0].stop)))
        found[f"loss_{stages}"] = loss[0]
        print(
            f"{stages:6}" + "".join(f"{each:36.4f}" for each in loss) + f"{f'{size / 1e6:.1f} MB' if size else '':>28}"
        )
    return found


def effective(load: str) -> dict[str, float]:
    """The share of a training's time that is no move, and no restart."""
    runs = trained(world("dynpipe", visited(load)), BATCHES, True, ("restart", "dynpipe"))
    shares = {name: 1 - run.waits / sum(run.seconds) for name, run in runs.items()}
    print(
        f"\n{load} trace: " + ", ".join(f"{name} trains for {share:.1%} of its time" for name, share in shares.items())
    )
    return {f"{load}_effective_{name}": share for name, share in shares.items()}


def disturbed(every: Sequence[int]) -> dict[str, float]:
    """A neighbour comes to another device every so many batches, and stays until the next comes: speed in share of the
    oracle's, whose layers move at once and for nothing."""
    found = {}
    print(f"\n{'a disturbance every':>20} {'waits a move':>13} {'of the oracle':>14} {'restarts':>10}")
    for period in every:
        count = max(BATCHES, 3 * period)

        def of(rank: int, first: int, batches: int, period: int = period) -> np.ndarray:
            there = (np.arange(first, first + batches) // period - 1) % RANKS == rank
            return np.where(there & (np.arange(first, first + batches) >= period), 2.0, 1.0)[:, None]

        runs = trained(world("dynpipe", Trace(of)), count, True, ("restart", "dynpipe", "oracle"))
        total = {name: sum(run.seconds) for name, run in runs.items()}
        waits = runs["dynpipe"].waits / max(1, runs["dynpipe"].moves)
        share, other = total["oracle"] / total["dynpipe"], total["oracle"] / total["restart"]
        found[f"disturbed_{period}"] = share
        print(f"{period:12} batches {waits:11.2f} s {share:14.1%} {other:10.1%}")
    print(f"a restart takes {RESTART} s, at the end of an epoch of {EPOCH} batches; a look is {LOOK} batches")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("loss", "curves", "staleness", "sensitivity", "effective", "disturbed"))
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    if options.only in (None, "loss"):
        found |= to_a_loss("light") | to_a_loss("heavy")
    if options.only in (None, "curves"):
        found |= curves([*LOADS])
    if options.only in (None, "sensitivity"):
        found |= sensitivity((0.1, 0.2, 0.3, 0.4))
    if options.only in (None, "staleness"):
        found |= staleness()
    if options.only in (None, "effective"):
        found |= effective("light") | effective("heavy")
    if options.only in (None, "disturbed"):
        found |= disturbed((1000, 400, 200))
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
