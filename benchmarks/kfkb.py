"""The gain of more micro-batches in flight on slow links, and the gain of adapting to these links.

The benchmark uses four emulated stages and 24 micro-batches. A backward takes as long as two forwards, and a message
takes as long as x forwards. Steps over steady links are measured on links that are really shaped
(`papers/kfkb/links.py`; needs root on Linux), with the plans taking turns in the same processes. Links whose speed
switches between x = 0.25 and 3, or changes from phase to phase, are shaped while steps run (`papers/kfkb/changing.py`).
More traces of such links are replayed event by event (`papers/kfkb/replay.py`), with the tuner's own code in the loop.

    python benchmarks/kfkb.py [--quick] [--only PART...] [--speeds X...] [--seeds A B] [--json]
"""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness.netlab import NetLab, lab_unavailable_reason
from benchmarks.harness.report import describe_machine, make_parser
from benchmarks.papers.kfkb.changing import FIRST, INTERVAL, Course, run
from benchmarks.papers.kfkb.links import AUTO, TORCH, Measured, Trial, bandwidth, measure
from benchmarks.papers.kfkb.replay import Direction, Replay, Trace
from benchmarks.papers.kfkb.split import emulated, gpt
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, Policy, Program, Rule, RulePolicy, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample
from lightning_pipes.planning.tuning import CandidateRanker, TuningDecision
from lightning_pipes.sim import makespan

STAGES, MICROBATCHES = 4, 24
FORWARD_MS, QUICK_MS = 20, 5
MESSAGE, QUICK_MESSAGE = 128 * 1024, 48 * 1024
"""Bytes of a message.

They are several times the burst of a token bucket, and few enough for speeds that the laboratory can keep.
"""
LIMIT = 16
"""The number of micro-batches that a rank may hold if there is a limit. It is four times the number of 1F1B."""
SPEEDS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)
"""Times of a message, in forwards."""
PHASES = (0.15, 1.0, 0.15, 1.0, 0.5, 2.0)
MS = 1_000_000


@dataclass(frozen=True)
class Situation:
    """A pipeline with equal stages and equal links.

    Attributes:
        forward: milliseconds of a forward. A backward takes twice as long.
        stages: the number of stages, with one stage on each rank.
        microbatches: the number of micro-batches in a batch.
    """

    forward: int
    stages: int = STAGES
    microbatches: int = MICROBATCHES

    @property
    def plan(self) -> Plan:
        """A plan with one sample in each micro-batch."""
        return Plan.even(self.stages, self.microbatches)

    @property
    def times(self) -> dict[Kind, int]:
        """The nanoseconds of a forward and of a backward."""
        return {Kind.F: self.forward * MS, Kind.B: 2 * self.forward * MS}

    def costs(self, x: float) -> CostModel:
        """Return the costs on steady links, with one byte for an activation.

        Args:
            x: the time of a message, in forwards.
        """
        times = {**self.times, Kind.SF: x * self.forward * MS, Kind.SB: x * self.forward * MS}
        seconds = {(kind, s): ((1, t * 1e-9),) for kind, t in times.items() for s in range(self.stages)}
        return CostModel(seconds, activation_bytes=(1,) * self.stages)

    def makespan(self, schedule: Schedule | Policy, x: float) -> int:
        """Return the simulated nanoseconds of a step."""
        order = schedule.program(self.plan) if isinstance(schedule, Schedule) else schedule
        return makespan(order, self.plan, self.costs(x))

    def message(self, x: float) -> int:
        """Return the nanoseconds of a message that takes `x` forwards."""
        return round(x * self.forward * MS)


def directions(stages: int = STAGES) -> list[Direction]:
    """Return both directions of all links."""
    return [d for s in range(stages - 1) for d in ((s, s + 1), (s + 1, s))]


def ordered(schedule: Schedule | Policy, plan: Plan) -> Program | Rule:
    """Return the program or the rule that a replay runs."""
    if isinstance(schedule, Schedule):
        return schedule.program(plan)
    assert isinstance(schedule, RulePolicy)
    return schedule.rule(plan)


# Steady links


def measured(
    case: Situation, message: int, speeds: Sequence[float], rounds: int, wide: bool
) -> Iterator[tuple[str, Any]]:
    """Measure steps over links of several speeds.

    Args:
        case: the pipeline.
        message: bytes of a message.
        speeds: times of a message, in forwards.
        rounds: the number of rounds in which each schedule runs one step.
        wide: whether to include more schedules.

    Yields:
        Numbers by name, and lines of a table with the name "".
    """
    p = case.stages
    schedules: dict[str, Schedule | Policy] = {
        "1f1b": make_schedule("1f1b"),
        "kfkb 2": make_schedule("kfkb", k=2),
        f"deep {2 * p - 1}": make_schedule("deep", slack=p - 1),
        f"ready {2 * p}": make_schedule("ready", slack=p),
    }
    if wide:
        schedules |= {"kfkb 3": make_schedule("kfkb", k=3), f"deep {3 * p}": make_schedule("deep", slack=2 * p)}
    names = [*schedules, AUTO, TORCH]
    yield "", "    x " + " ".join(f"{name:>10}" for name in names) + "  message predicted  auto takes"
    errors = []
    with NetLab(p) as lab:
        for x in speeds:
            some = schedules if x else {"1f1b": schedules["1f1b"]}
            trial = Trial(some, p, case.microbatches, case.forward / 1e3, message, rounds, torch=x == 1)
            if not x:  # to measure a difference of almost zero, more rounds are needed
                trial = replace(trial, rounds=2 * rounds)
            found = measure(lab, x, trial)
            worst = max(found.errors().values(), key=abs)
            errors += [worst] if x <= 2 else []
            yield "", row(f"{x:5}", found, names)
            apart = max((high - low) / found.median(n) for n in some for low, high in [found.quartiles(n)])
            yield "", f"{'':5} the interquartile range of a schedule's steps is at most {apart:.1%} of the median"
            if x == 0:
                yield "free_link_loss", found.ratio(AUTO, "1f1b") - 1
            elif x <= 1:
                best = max((n for n in some if n.startswith("kfkb")), key=lambda n: found.ratio("1f1b", n))
                gains = found.ratios("1f1b", best)
                yield "", f"{'':5} 1f1b over {best}: {min(gains):.3f} to {max(gains):.3f}"
                yield f"gain_x{'1' if x == 1 else str(x).replace('.', '')}", statistics.median(gains)
            if x == 1:
                yield "vs_torch_x1", found.ratio(TORCH, AUTO)
    if errors:
        yield "prediction_error", max(map(abs, errors))


def row(head: str, found: Measured, names: Sequence[str]) -> str:
    """Return a line of the table: medians, the time of a message, the worst prediction, and the tuner's choice."""
    ms = [f"{1e3 * found.median(n):10.1f}" if n in found.by_rank[0].spans else f"{'':10}" for n in names]
    worst = max(found.errors().values(), key=abs)
    return (
        f"{head} {' '.join(ms)} {1e3 * found.transfer:5.2f} ms {worst:+9.1%}  {found.decision.chosen.candidate.label}"
    )


def competing(case: Situation) -> Iterator[tuple[str, Any]]:
    """Measure steps while other TCP connections send as fast as possible over each link in both directions.

    In one case they send and pause in turn, each for half a second on average.

    Yields:
        Numbers by name, and lines of a table with the name "".
    """
    schedules: dict[str, Schedule | Policy] = {
        "1f1b": make_schedule("1f1b"),
        "kfkb 2": make_schedule("kfkb", k=2),
        "deep 7": make_schedule("deep", slack=3),
        "ready 8": make_schedule("ready", slack=4),
    }
    names = [*schedules, AUTO]
    trial = Trial(schedules, STAGES, MICROBATCHES, case.forward / 1e3, MESSAGE, rounds=2)
    yield "", "flows          " + " ".join(f"{name:>10}" for name in names) + "  message predicted  auto takes"
    with NetLab(STAGES, bandwidth=27.5e6, queue=2**18) as lab:
        for name, flows, off in (("1", 1, 0.0), ("3", 3, 0.0), ("4, on and off", 4, 0.5)):
            with ExitStack() as stack:
                for n, (a, b) in enumerate(directions()):
                    stack.enter_context(lab.compete_on(a, b, flows, 0.5 if off else float("inf"), off, seed=n))
                found = measure(lab, None, trial)
            yield "", row(f"{name:14}", found, names)
            yield f"gain_flows_{flows}", found.ratio("1f1b", "kfkb 2")


def link_times(case: Situation, message: int) -> Iterator[tuple[str, Any]]:
    """Compare the link times that are measured from the timestamps of messages with the configured times.

    The links have random speeds in each direction. Under 1F1B, no message directly follows another one. With k = 2,
    some messages do and find the token bucket empty, so that any value between the times of both kinds of messages is
    correct. Acknowledgements have to wait behind messages in the opposite direction, which is visible if a fast
    direction has a slow opposite one.

    Yields:
        Numbers by name, and lines of a table with the name "".
    """
    with NetLab(STAGES) as lab:
        for k in (1, 2):
            rng = random.Random(k - 1)
            trial = Trial(
                {"kfkb": make_schedule("kfkb", k=k)}, STAGES, MICROBATCHES, case.forward / 1e3, message, WINDOW_STEPS
            )
            alone = {d: rng.uniform(0.5, 1.5) * trial.forward for d in directions()}
            for direction, seconds in alone.items():
                lab.shape(bandwidth(seconds, message), [direction])
            found = measure(lab, None, replace(trial, tuned=False)).links("kfkb")
            parts, worst = [], 0.0
            for (a, b), low in alone.items():
                high = message / bandwidth(low, message) if k > 1 else low
                right = min(max(found[a, b], low), high)
                error = found[a, b] / right - 1
                worst = max(worst, abs(error))
                truth = f"{1e3 * low:.2f}" + (f"-{1e3 * high:.2f}" if k > 1 else "")
                parts.append(f"{a}-{b} {1e3 * found[a, b]:.2f} / {truth} ({error:+.1%})")
            yield "", f"k={k}, ms measured / set: {', '.join(parts)}"
            yield "link_error" if k == 1 else "link_error_both_ways", worst


def steady_table(case: Situation) -> list[str]:
    """Return a table of the simulated milliseconds of a step, for schedules with equal peaks on the first stage."""
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
    """Return traces in which the directions switch independently between x = 0.25 and 3.

    A direction switches after 25 forwards on average.
    """
    rng = random.Random(seed)
    takes = (case.message(0.25), case.message(3.0))
    return {d: Trace.switching(rng, takes, 0.025 * case.forward, seconds) for d in directions(case.stages)}


def phases(case: Situation, seconds_each: float, rounds: int) -> dict[Direction, Trace]:
    """Return traces in which all links go through `PHASES` together."""
    takes = tuple(case.message(x) for x in PHASES * rounds)
    since = tuple(round(1e9 * seconds_each * n) for n in range(len(takes)))
    return dict.fromkeys(directions(), Trace(since, takes))


def fixed(case: Situation, schedule: Schedule | Policy, links: Mapping[Direction, Trace], until: int) -> float:
    """Return the number of steps that a schedule completes in `until` nanoseconds."""
    order, at, steps = ordered(schedule, case.plan), 0, 0.0
    while at < until:
        end = Replay(order, case.plan, case.times, links, at).end
        steps += min(1.0, (until - at) / (end - at))
        at = end
    return steps


@dataclass
class Adaptive:
    """The result of a replay in which the tuner changes the schedule.

    Attributes:
        steps: the number of completed steps.
        decisions: the decisions of the tuner.
    """

    steps: float
    decisions: list[TuningDecision]

    @property
    def changes(self) -> int:
        """The number of decisions that adopted another schedule."""
        return sum(d.has_change for d in self.decisions)


def adaptive(case: Situation, links: Mapping[Direction, Trace], until: int, limit: int | None) -> Adaptive:
    """Replay a training that begins with 1F1B, with the same decisions as `ScheduleTuner`.

    Args:
        case: the pipeline.
        links: the trace of each direction.
        until: nanoseconds of the replay.
        limit: the number of micro-batches that a rank may hold, or None for no limit.
    """
    source, plan = tuning_planner(make_schedule("kfkb", k="auto")), case.plan
    base = case.costs(0.0)
    averages, chooser, decisions = Averages(), CandidateRanker(), list[TuningDecision]()
    running = Candidate(make_schedule("kfkb", k=1), plan, (4, 3, 2, 1))
    recent: list[list[StepSample]] = []
    at, steps, count, next_ = 0, 0.0, 0, FIRST
    while at < until:
        replay = Replay(ordered(running.schedule, plan), plan, case.times, links, at)
        chosen = not isinstance(running.schedule, Schedule)
        recent = [*recent, [StepSample.from_events(events, plan, at, chosen) for events in replay.by_rank()]][
            -WINDOW_STEPS:
        ]
        steps += min(1.0, (until - at) / (replay.end - at))
        at, count = replay.end, count + 1
        if count == next_:
            next_ = count + (WINDOW_STEPS if count == FIRST else INTERVAL)
            for step in recent[-1:] if count == FIRST else recent:
                averages.add(step)
            candidates = source.list_candidates(plan, averages.costs(base), limit)
            decision = chooser.decide([*candidates, running], running, averages, base)
            decisions.append(decision)
            running = decision.chosen.candidate
    return Adaptive(steps, decisions)


def regret(case: Situation, links: Mapping[Direction, Trace], until: int, limit: int | None) -> tuple[float, str]:
    """Compare the adaptive run with the best fixed schedule in hindsight.

    Returns:
        The share of time by which the adaptive run is slower, and a line that describes both.
    """
    source = tuning_planner(make_schedule("kfkb", k="auto"))
    every = {c.schedule for x in PHASES for c in source.list_candidates(case.plan, case.costs(x), limit)}
    by_steps = {schedule: fixed(case, schedule, links, until) for schedule in every}
    best = max(by_steps, key=lambda s: by_steps[s])
    kfkb = max((s for s in by_steps if s.name == "kfkb"), key=lambda s: by_steps[s])
    found = adaptive(case, links, until, limit)
    worse = by_steps[best] / found.steps - 1
    changed = [d.chosen.candidate.schedule for d in found.decisions if d.has_change]
    line = (
        f"{worse:+.2%} against the best fixed, {best}; the best k, {kfkb}, {by_steps[best] / by_steps[kfkb] - 1:+.1%}; "
        f"1f1b {by_steps[best] / by_steps[make_schedule('kfkb', k=1)] - 1:+.1%}; adopted {', '.join(map(str, changed))}"
    )
    return worse, line


def ready_gain(case: Situation, seeds: Sequence[int], steps: int) -> list[float]:
    """Return the time of kFkB with k = 2 over the time of ready, for each trace.

    In both, the first stage holds up to eight micro-batches.
    """
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


def executed(case: Situation) -> Iterator[tuple[str, Any]]:
    """Measure steps over shaped links that change during the steps.

    All schedules and the tuner run with the same traces.

    Yields:
        Numbers by name, and lines with the name "".
    """
    schedules: dict[str, Schedule | Policy] = {
        "kfkb 2": make_schedule("kfkb", k=2),
        "deep 8": make_schedule("deep", slack=4),
        "ready 8": make_schedule("ready", slack=4),
    }
    trial = Trial(schedules, STAGES, MICROBATCHES, case.forward / 1e3, MESSAGE)
    turn = 12 * 0.13 * case.forward
    settings = {f"switching, seed {n}": (9, turn, switching(case, n, turn)) for n in range(2)}
    each = 4 * 0.09 * case.forward
    settings["phases"] = (24, 6.8 * each, phases(case, each, 1))
    gains, worst = [], -1.0
    with NetLab(STAGES) as lab:
        for name, (steps, seconds, links) in settings.items():
            ran = run(lab, Course(trial, steps, seconds, limit=8), links)
            took = {n: t / steps for n, t in ran.seconds.items()}
            line = ", ".join(f"{n} {1e3 * t:.0f}" for n, t in took.items())
            yield "", f"{name}, ms a step: {line}; adopted {', '.join(ran.adopted)}"
            if name != "phases":
                gains.append(took["kfkb 2"] / took["ready 8"])
            worst = max(worst, took[AUTO] / min(t for n, t in took.items() if n != AUTO) - 1)
    yield "ready_gain_fluctuating", statistics.median(gains)
    yield "adaptive_regret", worst


def replayed(case: Situation, quick: bool) -> Iterator[tuple[str, Any]]:
    """Replay links that change event by event, without real links.

    Yields:
        Numbers by name, and lines with the name "".
    """
    gains = ready_gain(case, range(2 if quick else 16), 40 if quick else 100)
    yield "ready_gain_fluctuating", statistics.median(gains)
    spread = f"{statistics.median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})"
    yield "", f"ready over kfkb k=2, links switching: {spread}"
    worst = -1.0
    step = 0.087 * case.forward  # seconds of a typical step
    steps = 300 if quick else 600
    until = round(steps * step * 1e9)
    traces = {f"switching, seed {n}": switching(case, n, 2 * steps * step) for n in range(1 if quick else 4)}
    traces["phases"] = phases(case, step * steps / 12, 2)
    for name, links in traces.items():
        for limit in (8, LIMIT):
            worse, line = regret(case, links, until, limit)
            worst = max(worst, worse)
            yield "", f"{name}, {limit} held at most: {line}"
    yield "adaptive_regret", worst


def choices(case: Situation, seeds: Iterable[int]) -> Iterator[tuple[str, Any]]:
    """Measure how often the tuner's choice is right: the fastest of all kinds of schedules, or at most 2 % slower.

    Each kind of schedule uses the settings with the best prediction. The links have random speeds in each direction,
    and the memory is random.

    Yields:
        Numbers by name, and lines with the name "".
    """
    trial = Trial(
        {"1f1b": make_schedule("1f1b")}, STAGES, MICROBATCHES, case.forward / 1e3, QUICK_MESSAGE, 3, rivals=True
    )
    right = []
    with NetLab(STAGES) as lab:
        for seed in seeds:
            rng = random.Random(seed)
            for direction in directions():
                x = 0.1 * 20 ** rng.random()
                lab.shape(bandwidth(x * trial.forward, trial.message), [direction])
            found = measure(lab, None, replace(trial, limit=rng.randint(STAGES, 4 * STAGES)))
            others = {n: found.ratio(AUTO, n) - 1 for n in found.by_rank[0].spans if n != AUTO}
            worst = max(others, key=lambda n: others[n])
            right.append(others[worst] <= 0.02)
            label = found.decision.chosen.candidate.label
            yield (
                "",
                f"seed {seed:2}: {label}, {others[worst]:+.1%} against {worst}, {others['1f1b']:+.1%} against 1f1b",
            )
    yield "choices_right", sum(right) / len(right)


def choices_replayed(seeds: Iterable[int], forward: int = QUICK_MS, steps: int = 20) -> Iterator[tuple[str, Any]]:
    """Replay how often the tuner's choice is right: the fastest of all candidates, or at most 2 % slower.

    The choice is made after a window of 1F1B, and compared over the steps that follow. There are 2, 4 or 8 stages. The
    links keep their random speeds for even seeds, and switch for odd ones.

    Args:
        seeds: the seeds of the random cases.
        forward: milliseconds of a forward.
        steps: the number of steps that are compared.

    Yields:
        Numbers by name, and lines with the name "".
    """
    right, source, first = [], tuning_planner(make_schedule("kfkb", k="auto")), make_schedule("kfkb", k=1)
    for seed in seeds:
        rng = random.Random(seed)
        stages = rng.choice((2, 4, 8))
        case = Situation(forward, stages, stages * rng.choice((2, 4, 6)))
        plan, base = case.plan, case.costs(0.0)
        at = 0
        averages = Averages()
        if seed % 2:
            links = switching(case, seed, 0.02 * forward * (WINDOW_STEPS + 2 + steps) * case.microbatches)
        else:
            links = {d: Trace.steady(case.message(0.1 * 20 ** rng.random())) for d in directions(stages)}
        for _ in range(WINDOW_STEPS + 1):
            replay = Replay(ordered(first, plan), plan, case.times, links, at)
            averages.add(StepSample.from_events(events, plan, at) for events in replay.by_rank())
            at = replay.end
        candidates = source.list_candidates(plan, averages.costs(base), rng.randint(stages, 4 * stages))
        decision = CandidateRanker().decide(candidates, Candidate(first, plan, ()), averages, base)
        took = {}
        for c in {*candidates, decision.chosen.candidate}:
            end = at
            for _ in range(steps):
                end = Replay(ordered(c.schedule, plan), plan, case.times, links, end).end
            took[c.schedule] = end - at
        best = min(took, key=lambda schedule: took[schedule])
        worse = took[decision.chosen.candidate.schedule] / took[best] - 1
        right.append(worse <= 0.02)
        kind = "switching" if seed % 2 else "steady"
        label = decision.chosen.candidate.label
        yield "", f"seed {seed:2}, {stages} stages, {kind}: {label}, {worse:+.1%} against {best}"
    yield "choices_right_replayed", sum(right) / len(right)


def split(case: Situation, message: int, quick: bool) -> Iterator[tuple[str, Any]]:
    """Compare backwards in two parts with whole ones.

    A quick run uses equal links only. A complete run also uses one slow link, and a real model.

    Yields:
        Numbers by name, and lines of a table with the name "".
    """
    runs: dict[str, tuple[str, Callable[[], Iterator[tuple[str, Any]]]]] = {
        "split_gain_x1": (
            "four stages, a message as long as a forward, at most 8 micro-batches held",
            lambda: emulated(STAGES, MICROBATCHES, case.forward / 1e3, message, 8, 7, 1.0),
        ),
        "split_gain_far": (
            "eight stages, messages of two forwards on the link before the last one, at most 12 held",
            lambda: emulated(8, MICROBATCHES, 0.010, MESSAGE, 12, 5, 2.0, slow=6),
        ),
        "split_gain_gpt": ("GPT of two stages, 256 wide, 4 micro-batches, at most 4 held", lambda: gpt(12)),
    }
    for name in list(runs)[: 1 if quick else None]:
        title, work = runs[name]
        yield "", title
        for key, found in work():
            yield (name, found) if key else ("", f"  {found}")


PARTS = ("split", "steady", "links", "eight", "flows", "executed", "choices", "choices_replayed", "replayed")


def main() -> None:
    """Run the selected parts and print their tables."""
    parser = make_parser(__doc__, "only split, steady and replayed, with fewer rounds and forwards of 5 ms")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to run")
    parser.add_argument("--speeds", nargs="+", type=float, default=SPEEDS, help="message times in forwards, for steady")
    parser.add_argument(
        "--seeds", nargs=2, type=int, default=(0, 20), help="the first seed and the end of the range, for choices"
    )
    options = parser.parse_args()
    quick = options.quick
    case = Situation(QUICK_MS if quick else FORWARD_MS)
    message = QUICK_MESSAGE if quick else MESSAGE
    speeds = [x for x in options.speeds if x <= 1 or not quick]
    print(f"{describe_machine()}, torch {torch.__version__}, Python {platform.python_version()}")
    parts: dict[str, tuple[str, Callable[[], Iterator[tuple[str, Any]]]]] = {
        "steady": (
            f"Steady links, measured; ms of a step, emulated stages, F {case.forward} ms",
            lambda: measured(case, message, speeds, 4, wide=not quick),
        ),
        "split": ("Backwards in two parts, measured; ms of a step", lambda: split(case, message, quick)),
        "links": ("Link times measured while steps run", lambda: link_times(case, message)),
        "eight": (
            "The same with eight stages and 32 micro-batches",
            lambda: measured(Situation(FORWARD_MS, 8, 32), message, (0.5, 1.0), 2, wide=False),
        ),
        "flows": ("Next to other TCP connections on each link, of 27.5 MB/s", lambda: competing(case)),
        "executed": ("Links that change, measured", lambda: executed(Situation(FORWARD_MS // 2))),
        "choices": (
            "The choices of the tuner for links of random speeds, measured, F 5 ms",
            lambda: choices(Situation(QUICK_MS), range(*options.seeds)),
        ),
        "choices_replayed": ("The same replayed", lambda: choices_replayed(range(*options.seeds))),
        "replayed": ("Links that change, replayed", lambda: replayed(case, quick)),
    }
    results: dict[str, Any] = {}
    reason = lab_unavailable_reason()
    for part in options.only if not quick else [p for p in options.only if p in ("split", "replayed", "steady")]:
        if reason and "replayed" not in part:
            print(f"\n{part} can't be measured here: {reason}")
            continue
        title, work = parts[part]
        print(f"\n{title}")
        for name, found in work():
            if not name:
                print(found, flush=True)
            elif part == "eight":
                results[f"eight_{name}"] = found
            elif part != "replayed" or name not in results:
                results[name] = found
        if part == "steady":
            print("\nThe same simulated, without the overhead of the engine; held by the first stage")
            print("\n".join(steady_table(case)))
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
