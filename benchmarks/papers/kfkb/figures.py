"""The experiments of Ada-Grouper's paper (Wang et al. 2023, arXiv:2303.01675): emulated stages on shaped links.

The analysis is simulated. The GPT has real stages with one thread each, and is compared with SPMD, which is torch's DDP
over the same links. The quartiles of steps over rounds are in parentheses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.netlab import NetLab
from benchmarks.harness.report import Output
from benchmarks.kfkb import MESSAGE, PHASES, Situation, phases
from benchmarks.papers.kfkb.changing import Course, run
from benchmarks.papers.kfkb.links import AUTO, SPMD, Measured, Trial, measure, ordered
from benchmarks.papers.kfkb.split import GPT
from lightning_pipes.cost import LayerProfile
from lightning_pipes.ir import Policy, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import cut_into
from lightning_pipes.sim import makespan
from lightning_pipes.testing.generators import uniform

X = 0.5
"""The time of a message in forwards, as in the paper's analysis."""
SMALL = 32 * 1024
"""Bytes of a message in trainings with many messages."""


def named(ks: Sequence[int]) -> dict[str, Schedule | Policy]:
    """Return kFkB with each k by name. k = 1 is 1F1B."""
    return {f"k={k}": make_schedule("kfkb", k=k) for k in ks}


def line(head: str, found: Measured) -> str:
    """Return a line with the milliseconds of a step of each schedule, and the gain over the first schedule."""
    first, *others = found.trial.schedules
    parts = [f"{first} {milliseconds(found, first)}"]
    parts += [f"{n} {milliseconds(found, n)} {found.ratio(first, n) - 1:+.1%}" for n in others]
    return f"{head:22} {', '.join(parts)}"


def milliseconds(found: Measured, name: str) -> str:
    """Return the median milliseconds of a step and its quartiles, as text."""
    low, high = found.quartiles(name)
    return f"{1e3 * found.median(name):.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})"


def analysis(cases: Sequence[tuple[int, int]]) -> Output:
    """Yield the simulated gain of 2F2B for several numbers of stages and micro-batches."""
    for stages, microbatches in cases:
        plan, costs = uniform(stages=stages, microbatches=microbatches, f=2, b=4, link=1)
        one, two = (makespan(ordered(make_schedule("kfkb", k=k), plan), plan, costs) / 2 for k in (1, 2))
        head = f"{stages} stages, {microbatches} micro-batches"
        yield f"{head}: 1F1B {one:.1f} forwards, 2F2B {two:.1f}, {one / two - 1:+.1%}"
        yield {f"f2_gain_{stages}": round(one / two - 1, 4)}


def granularity(samples: int) -> Output:
    """Yield the gain of k = 1 to 6 with micro-batches of floor(6 / k) samples, on eight stages."""
    per_row, fixed = 0.004, 0.001
    forward, backward = (((1, n * (fixed + per_row)), (6, n * (fixed + 6 * per_row))) for n in (1, 2))
    layer = LayerProfile("sleeping", forward, backward, gradient_bytes=4, output=((1, SMALL),))
    trial = Trial(named(range(1, 7)), 8, samples, per_row, SMALL, rounds=5, layer=layer, tuned=False)
    trial = replace(trial, plans={f"k={k}": cut_into(trial.plan, 6 // k) for k in range(1, 7)})
    with NetLab(8) as lab:
        for x in (0.0, X):
            found = measure(lab, x, trial)
            yield line(f"x = {x}", found)
            gains = {n: found.ratio("k=1", n) - 1 for n in trial.schedules}
            yield {f"f6_gain_x{x}".replace(".", ""): round(max(gains.values()), 4)}


def weak(name: str, microbatches: Sequence[int]) -> Output:
    """Yield the gain of k on 2, 4 and 8 workers if a forward takes 10 ms on each of them."""
    for stages, m in zip((2, 4, 8), microbatches, strict=True):
        with NetLab(stages) as lab:
            trial = Trial(named((1, 2, 3)), stages, m, 0.01, SMALL, rounds=5, tuned=False)
            found = measure(lab, X, trial)
            yield line(f"{stages} workers, {m} micro-batches", found)
            yield {f"{name}_gain_{stages}": round(max(found.ratio("k=1", n) for n in trial.schedules) - 1, 4)}


def strong() -> Output:
    """Yield the gain of k for one model with a forward of 40 ms on 2, 4 and 8 workers, and messages of 5 ms."""
    base = 0.0
    for stages in (2, 4, 8):
        forward = 0.04 / stages
        with NetLab(stages) as lab:
            trial = Trial(named((1, 2, 3)), stages, 32, forward, SMALL, rounds=4, tuned=False)
            found = measure(lab, 0.005 / forward, trial)
        best = min(found.median(n) for n in trial.schedules)
        base = base or best
        yield line(f"{stages} workers", found) + f"; best {base / best:.2f} times as fast as 2 workers"
        yield {f"f9_gain_{stages}": round(max(found.ratio("k=1", n) for n in trial.schedules) - 1, 4)}


def changing() -> Output:
    """Yield the step times of the adaptive run on changing links, compared with constant values of k."""
    case = Situation(10)
    trial = Trial(named((1, 2, 3)), case.stages, case.microbatches, 0.01, MESSAGE)
    each = 3 * 0.9
    with NetLab(case.stages) as lab:
        ran = run(lab, Course(trial, 18, 8.5 * each, limit=12), phases(case, each, 1))
    yield f"messages of {', '.join(map(str, PHASES))} forwards in turn, {each:.1f} s each; 18 steps"
    for name, seconds in ran.seconds.items():
        yield f"{name}: {1e3 * seconds / 18:.0f} ms a step, {ran.seconds['k=1'] / seconds - 1:+.1%} over 1F1B"
    yield f"adopted {', '.join(ran.adopted)}"
    best = min(seconds for name, seconds in ran.seconds.items() if name != AUTO)
    yield {"f10_gain": round(ran.seconds["k=1"] / ran.seconds[AUTO] - 1, 4)}
    yield {"f10_over_best_fixed": round(ran.seconds[AUTO] / best - 1, 4)}


def gpt(rounds: int, speeds: Sequence[float]) -> Output:
    """Yield the step times of a real GPT with two stages, in which a forward takes about 5 ms.

    Args:
        rounds: the number of rounds.
        speeds: the times of a message, in forwards.
    """
    message = 2 * 96 * 128 * 4
    trial = GPT(named((1, 2)), 2, 16, 0.005, message, rounds=rounds, limit=16)
    operations = trial.operations
    yield f"{operations / 1e9:.2f} GFLOP a step; SPMD is DDP of two replicas, with one micro-batch each"
    with NetLab(2) as lab:
        for x in speeds:
            found = measure(lab, x, trial)
            chosen = found.decision.chosen.candidate.label
            yield line(f"messages of {5 * x:.0f} ms", found) + (
                f", auto {milliseconds(found, AUTO)} {found.ratio('k=1', AUTO) - 1:+.1%}, {chosen}; "
                f"SPMD {milliseconds(found, SPMD)}; predicted {max(found.errors().values(), key=abs):+.1%}"
            )
            rates = {name: operations / found.median(name) / 1e9 for name in ("k=1", "k=2", AUTO, SPMD)}
            yield f"{'':22} GFLOP/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            yield {f"gpt_gain_x{x:.0f}": round(found.ratio("k=1", AUTO) - 1, 4)}
            yield {f"gpt_over_spmd_x{x:.0f}": round(found.ratio(SPMD, AUTO), 4)}
            yield {f"gpt_gflops_x{x:.0f}": round(rates[AUTO], 4)}
