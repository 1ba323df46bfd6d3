"""What more micro-batches under way gain on slow links, and what adapting to them gains.

Four emulated stages, 24 micro-batches, a backward takes two forwards, and a message x forwards. Steps over steady links
are measured on really shaped ones (`kfkb_links.py`; needs root on Linux), plans in turn in the same processes. Links
that switch between x = 0.25 and 3, or change from phase to phase, are replayed event by event (`replay.py`), with the
tuner's own code in the loop.

    python benchmarks/kfkb.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kfkb_links import AUTO, TORCH, Trial, measure
from replay import Direction, Replay, Trace

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, Policy, Program, Rule, RulePolicy, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, Tunable
from lightning_pipes.planning.measured import WINDOW, Averages, StepSample
from lightning_pipes.planning.tuning import Chooser, Decision
from lightning_pipes.sim import makespan
from lightning_pipes.testing.netlab import NetLab, why_not

STAGES, MICROBATCHES = 4, 24
FORWARD_MS, QUICK_MS = 20, 5
LIMIT = 16
"""Micro-batches that a rank may hold, where a limit is given: four times those of 1F1B."""
FIRST, INTERVAL = 2, 10
"""Steps before the first decision, and between decisions; the second one comes after a window."""
PHASES = (0.15, 1.0, 0.15, 1.0, 0.5, 2.0)
MS = 1_000_000


@dataclass(frozen=True)
class Situation:
    """Equal stages between equal links.

    Attributes:
        forward: milliseconds; a backward takes twice as long.
    """

    forward: int

    @property
    def plan(self) -> Plan:
        """One sample a micro-batch."""
        return Plan.even(STAGES, MICROBATCHES)

    @property
    def times(self) -> dict[Kind, int]:
        """Nanoseconds."""
        return {Kind.F: self.forward * MS, Kind.B: 2 * self.forward * MS}

    def costs(self, x: float) -> CostModel:
        """On steady links; an activation is one byte."""
        times = {**self.times, Kind.SF: x * self.forward * MS, Kind.SB: x * self.forward * MS}
        seconds = {(kind, s): ((1, t * 1e-9),) for kind, t in times.items() for s in range(STAGES)}
        return CostModel(seconds, activation_bytes=(1,) * STAGES)

    def makespan(self, schedule: Schedule | Policy, x: float) -> int:
        """Nanoseconds of a step by the simulator."""
        order = schedule.program(self.plan) if isinstance(schedule, Schedule) else schedule
        return makespan(order, self.plan, self.costs(x))

    def message(self, x: float) -> int:
        """Nanoseconds."""
        return round(x * self.forward * MS)


def directions() -> list[Direction]:
    """Of all links."""
    return [d for s in range(STAGES - 1) for d in ((s, s + 1), (s + 1, s))]


def ordered(schedule: Schedule | Policy, plan: Plan) -> Program | Rule:
    """What a replay runs."""
    if isinstance(schedule, Schedule):
        return schedule.program(plan)
    assert isinstance(schedule, RulePolicy)
    return schedule.rule(plan)


# Steady links


def measured(quick: bool) -> Iterator[tuple[str, Any]]:
    """Figures by name, and lines of a table by "": what steps take over links of several speeds."""
    schedules: dict[str, Schedule | Policy] = {
        "1f1b": make_schedule("1f1b"),
        "kfkb 2": make_schedule("kfkb", k=2),
        "kfkb 3": make_schedule("kfkb", k=3),
        "deep 7": make_schedule("deep", slack=3),
        "ready 8": make_schedule("ready", slack=4),
    }
    speeds: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    if not quick:
        schedules |= {
            "deep 12": make_schedule("deep", slack=8),
            "ready 12": make_schedule("ready", slack=8),
        }
        speeds = (*speeds, 2.0, 3.0)
    names = [*schedules, AUTO, TORCH]
    yield "", "    x " + " ".join(f"{name:>10}" for name in names) + "  foretold  auto takes"
    errors = []
    with NetLab(STAGES) as lab:
        for x in speeds:
            forward = (QUICK_MS if quick else FORWARD_MS) / 1e3
            size = (48 if quick else 128) * 1024
            trial = Trial(schedules, STAGES, MICROBATCHES, forward, size, rounds=3, steps=2, torch=x == 1)
            if x == 0:  # a difference of nothing wants more turns
                trial = replace(trial, schedules={"1f1b": schedules["1f1b"]}, rounds=6)
            found = measure(lab, x, trial)
            worst = max(found.errors().values(), key=abs)
            errors += [worst] if x <= 2 else []
            ms = [f"{1e3 * found.median(n):10.1f}" if n in found.by_rank[0].spans else f"{'':10}" for n in names]
            yield "", f"{x:5} {' '.join(ms)} {worst:+9.1%}  {found.decision.chosen.candidate.label}"
            if x == 0:
                yield "free_link_loss", found.ratio(AUTO, "1f1b") - 1
            elif x <= 1:
                best = max(found.ratio("1f1b", name) for name in schedules if name.startswith("kfkb"))
                yield f"gain_x{'1' if x == 1 else str(x).replace('.', '')}", best
            if x == 1:
                yield "vs_torch_x1", found.ratio(TORCH, AUTO)
    yield "prediction_error", max(map(abs, errors))


def steady_table(case: Situation) -> list[str]:
    """Milliseconds of a step by the simulator, for equal peaks on the first stage."""
    columns: dict[str, Schedule | Policy] = {
        "1f1b (4)": make_schedule("1f1b"),
        "deep 6": make_schedule("deep", slack=2),
        "ready 6": make_schedule("ready", slack=2),
        "deep 7": make_schedule("deep", slack=3),
        "kfkb 2 (8)": make_schedule("kfkb", k=2),
        "deep 8": make_schedule("deep", slack=4),
        "ready 8": make_schedule("ready", slack=4),
        "kfkb 3 (12)": make_schedule("kfkb", k=3),
        "deep 12": make_schedule("deep", slack=8),
        "ready 12": make_schedule("ready", slack=8),
    }
    head = "    x " + " ".join(f"{name:>11}" for name in columns)
    rows = {x: [case.makespan(s, x) / MS for s in columns.values()] for x in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)}
    return [head, *(f"{x:5} " + " ".join(f"{ms:11.0f}" for ms in row) for x, row in rows.items())]


# Links that change


def switching(case: Situation, seed: int, seconds: float) -> dict[Direction, Trace]:
    """Each direction by itself between x = 0.25 and 3, for 25 forwards on average."""
    rng = random.Random(seed)
    takes = (case.message(0.25), case.message(3.0))
    return {d: Trace.switching(rng, takes, 0.025 * case.forward, seconds) for d in directions()}


def phases(case: Situation, seconds_each: float, rounds: int) -> dict[Direction, Trace]:
    """All links alike, `PHASES` in turn."""
    takes = tuple(case.message(x) for x in PHASES * rounds)
    since = tuple(round(1e9 * seconds_each * n) for n in range(len(takes)))
    return dict.fromkeys(directions(), Trace(since, takes))


def fixed(case: Situation, schedule: Schedule | Policy, links: Mapping[Direction, Trace], until: int) -> float:
    """Steps in `until` nanoseconds."""
    order, at, steps = ordered(schedule, case.plan), 0, 0.0
    while at < until:
        end = Replay(order, case.plan, case.times, links, at).end
        steps += min(1.0, (until - at) / (end - at))
        at = end
    return steps


@dataclass
class Adaptive:
    """A run that the tuner's code follows, over a trace."""

    steps: float
    decisions: list[Decision]

    @property
    def changes(self) -> int:
        """How often something else was adopted."""
        return sum(d.switches for d in self.decisions)


def adaptive(case: Situation, links: Mapping[Direction, Trace], until: int, limit: int | None) -> Adaptive:
    """Begins as 1F1B, and decides as `ScheduleTuner` does."""
    source, plan = make_schedule("kfkb", k="auto"), case.plan
    assert isinstance(source, Tunable)
    base = case.costs(0.0)
    averages, chooser, decisions = Averages(), Chooser(), list[Decision]()
    running = Candidate(make_schedule("kfkb", k=1), plan, (4, 3, 2, 1))
    recent: list[list[StepSample]] = []
    at, steps, count, next_ = 0, 0.0, 0, FIRST
    while at < until:
        replay = Replay(ordered(running.schedule, plan), plan, case.times, links, at)
        chosen = not isinstance(running.schedule, Schedule)
        recent = [*recent, [StepSample.of(events, plan, at, chosen) for events in replay.by_rank()]][-WINDOW:]
        steps += min(1.0, (until - at) / (replay.end - at))
        at, count = replay.end, count + 1
        if count == next_:
            next_ = count + (WINDOW if count == FIRST else INTERVAL)
            for step in recent[-1:] if count == FIRST else recent:
                averages.add(step)
            candidates = source.candidates(plan, averages.costs(base), limit)
            decision = chooser.decide([*candidates, running], running, averages, base)
            decisions.append(decision)
            running = decision.chosen.candidate
    return Adaptive(steps, decisions)


def regret(case: Situation, links: Mapping[Direction, Trace], until: int, limit: int | None) -> tuple[float, str]:
    """The share of time by which the adaptive run is slower than the best fixed choice in hindsight, and a line."""
    source = make_schedule("kfkb", k="auto")
    assert isinstance(source, Tunable)
    every = {c.schedule for x in PHASES for c in source.candidates(case.plan, case.costs(x), limit)}
    by_steps = {schedule: fixed(case, schedule, links, until) for schedule in every}
    best = max(by_steps, key=lambda s: by_steps[s])
    kfkb = max((s for s in by_steps if s.name == "kfkb"), key=lambda s: by_steps[s])
    found = adaptive(case, links, until, limit)
    worse = by_steps[best] / found.steps - 1
    changed = [d.chosen.candidate.schedule for d in found.decisions if d.switches]
    line = (
        f"{worse:+.2%} against the best fixed, {best}; the best k, {kfkb}, {by_steps[best] / by_steps[kfkb] - 1:+.1%}; "
        f"1f1b {by_steps[best] / by_steps[make_schedule('kfkb', k=1)] - 1:+.1%}; adopted {', '.join(map(str, changed))}"
    )
    return worse, line


def ready_gain(case: Situation, seeds: Sequence[int], steps: int) -> list[float]:
    """The time of kFkB with k = 2 over that of ready, both with eight held by the first stage, for each trace."""
    found = []
    for seed in seeds:
        until = round(0.1 * case.forward * steps * 1e9)
        links = switching(case, seed, 2 * until / 1e9)
        ours, theirs = (
            fixed(case, schedule, links, until)
            for schedule in (make_schedule("ready", slack=4), make_schedule("kfkb", k=2))
        )
        found.append(ours / theirs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter traces, forwards of 5 ms")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    case = Situation(QUICK_MS if options.quick else FORWARD_MS)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )

    results: dict[str, Any] = {}
    if reason := why_not():
        print(f"\nNothing can be measured here: {reason}")
    else:
        print(f"\nMilliseconds of a step on steady links, measured; emulated stages, F {case.forward} ms")
        for name, found in measured(options.quick):
            if name:
                results[name] = found
            else:
                print(found, flush=True)
    print("\nThe same simulated, without what the engine itself takes; held by the first stage")
    print("\n".join(steady_table(case)))

    gains = ready_gain(case, range(3 if options.quick else 16), 40 if options.quick else 100)
    results["ready_gain_fluctuating"] = statistics.median(gains)
    print(
        f"\nready over kfkb k=2, links switching: {statistics.median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})"
    )

    print("\nThe adaptive run, replayed")
    worst = -1.0
    step = 0.087 * case.forward  # seconds of a typical one
    steps = 300 if options.quick else 600
    until = round(steps * step * 1e9)
    traces = {f"switching, seed {n}": switching(case, n, 2 * steps * step) for n in range(1 if options.quick else 4)}
    traces["phases"] = phases(case, step * steps / 12, 2)
    for name, links in traces.items():
        for limit in (8, LIMIT):
            worse, line = regret(case, links, until, limit)
            worst = max(worst, worse)
            print(f"{name}, {limit} held at most: {line}")
    results["adaptive_regret"] = worst
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
