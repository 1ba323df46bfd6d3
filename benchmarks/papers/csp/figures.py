"""CSP on the paper's search spaces, compared with the systems that the paper names (NASPipe, S5), emulated.

These are the parts of `benchmarks/csp.py` that emulate streams of subnets, and the gain of a cut for each subnet.
Layers have the times of the paper (Table 5), on 8 stages. Nothing is computed; `emulation/` determines when each task
would run. A micro-batch takes its share of the time of the batch and an additional 0.2 ms. Messages take no time, and
an update reaches another stage in twice the swap time of the layer, unless a line names other costs.

A bubble is measured from the end of the first tenth of the subnets to the last subnet that still fills the queue.
`lost` also counts the additional 0.2 ms as idle time. The number of micro-batches is chosen on one sample of subnets,
and measured on other samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import NamedTuple

from benchmarks.harness.report import Output, Report
from benchmarks.papers.csp.emulation.spaces import SPACES, Placed, Subnets, balanced, fixed
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.swapped import Swaps, ahead, in_turn, nothing, one_step, swapped
from benchmarks.papers.csp.emulation.systems import (
    SYSTEMS,
    System,
    bsp,
    by_finished_list,
    choose,
    least_bubble,
    one_by_one,
    stale_reads,
)
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.zero_bubble import ZeroBubble

STAGES = 8
BULKS = (4, 8, 16, 32)
CONTEXTS = 3
CSP, BSP = SYSTEMS["CSP"], SYSTEMS["BSP"]
PAPER = {"NLP.c1": 0.39, "NLP.c2": 0.57, "NLP.c3": 0.68, "CV.c1": 0.43, "CV.c2": 0.58, "CV.c3": 0.68}
"""The bubbles of the paper's Table 2, with one task for each subnet."""
WITHOUT_PREDICTOR = 32 / 192 * 1.13 / 0.54
"""Samples per second without swapping, relative to swapping with a predictor.

This follows from the batch that fits on NLP.c1 without swapping, and from its time, by Table 2.
"""


@dataclass(frozen=True)
class Samples:
    """Random subnets of each space. The seeds differ from the seed for the choice of settings.

    Attributes:
        subnets: the number of subnets for each seed.
        seeds: the seeds.
    """

    subnets: int
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, quick: bool) -> Samples:
        """Return samples with three seeds, or with a third of the subnets and one seed for a quick run."""
        return cls(300, (1,)) if quick else cls(900, (1, 2, 3))

    def ran(self, name: str, system: System, rules: Rules, stages: int = STAGES) -> Means:
        """Run a system on a space, and return the means over the seeds."""
        found = [system.run(SPACES[name].draw(self.subnets, seed), stages, rules) for seed in self.seeds]
        return Means(mean(r.bubble for r in found), mean(r.lost for r in found), mean(r.throughput for r in found))

    def bound(self, name: str, rules: Rules) -> float:
        """Return the mean over the seeds of the smallest possible bubble because of shared layers."""
        drawn = (SPACES[name].draw(self.subnets, seed) for seed in self.seeds)
        return mean(least_bubble(balanced(subnets, STAGES), rules) for subnets in drawn)

    def one_by_one(
        self,
        name: str,
        schedule: OneFOneB | ZeroBubble,
        cut: Callable[[Subnets, int], Placed],
        rules: Rules | None = None,
    ) -> float:
        """Return the mean subnets per second one after another, with the fastest number of micro-batches."""
        placed = [cut(SPACES[name].draw(100, seed), STAGES) for seed in self.seeds]
        every = (replace(rules or Rules(), microbatches=m) for m in (2, 4, 8, 16, 24, 32))
        return max(mean(one_by_one(each, given, schedule) for each in placed) for given in every)


class Means(NamedTuple):
    """The mean results of a system on a space."""

    bubble: float
    lost: float
    throughput: float


def spaces(quick: bool) -> Report:
    """Report the bubble and the throughput of all systems on all spaces."""
    report, samples = Report(), Samples.of(quick)
    report.lines += [
        "8 stages             bubble:                   subnets a second:                              one by one:"
        "         CSP without:         printed rule:",
        "space      M depth    CSP   lost  bound  paper    CSP    BSP   best  bulk  BSP,1   ASP  VPipe   1f1b     zb"
        "  scheduler mirroring zb,fixed  bubble stale",
    ]
    for name in SPACES:
        report.lines.append(_space(name, samples, report.keys))
    report.lines.append(
        f"BSP: bulks of 8, all forwards first, the same M; best: the fastest of bulks {', '.join(map(str, BULKS))},\n"
        "which hold this number of batches on every stage; BSP,1: one task a subnet, as in the paper; VPipe: BSP\n"
        "with 3 contexts on a device, no prediction; one by one: each with its fastest M, zb is zero_bubble; fixed:\n"
        "also without mirroring; stale: stale reads of the printed rule, per 1000 layers."
    )
    speeds = [report.keys[f"throughput_{name}"] for name in SPACES if name.startswith("NLP")]
    report.keys["rises_with_choices"] = float(speeds == sorted(speeds, reverse=True))
    return report


def _space(name: str, samples: Samples, keys: dict[str, float]) -> str:
    chosen = choose(SPACES[name], STAGES)
    rules = Rules(chosen.microbatches, chosen.depth)
    bubble, lost, speed = samples.ran(name, CSP, rules)
    bound = samples.bound(name, rules)
    bulks = {bulk: samples.ran(name, bsp(bulk), rules).throughput for bulk in BULKS}
    best = max(bulks, key=lambda bulk: bulks[bulk])
    equal = bulks[STAGES]
    whole = samples.ran(name, BSP, replace(rules, microbatches=1)).throughput
    asp = samples.ran(name, SYSTEMS["ASP"], rules).throughput
    vpipe = _vpipe(name, rules)
    alone = {schedule.name: samples.one_by_one(name, schedule, balanced) for schedule in (OneFOneB(), ZeroBubble())}
    alone_fixed = samples.one_by_one(name, ZeroBubble(), fixed)
    unscheduled = samples.ran(name, SYSTEMS["without scheduler"], rules).throughput
    unmirrored = samples.ran(name, SYSTEMS["without mirroring"], rules).throughput
    printed, stale = _printed(name, samples, rules)
    short = name.split(".")[1] if name.startswith("NLP") else name
    keys |= {f"bubble_{short}": bubble, f"lost_{short}": lost, f"bound_{short}": bound, f"throughput_{name}": speed}
    keys |= {f"vs_bsp_{short}_whole": speed / equal, f"vs_bsp_{short}_best_bulk": speed / bulks[best]}
    keys |= {f"vs_bsp_{short}_one_task": speed / whole, f"vs_one_by_one_{short}": speed / max(alone.values())}
    keys[f"vs_one_by_one_{short}_fixed"] = unmirrored / alone_fixed
    paper = f"{PAPER[name]:6.2f}" if name in PAPER else 6 * " "
    return (
        f"{name:8} {rules.microbatches:3} {rules.depth:5} {bubble:6.3f} {lost:6.3f} {bound:6.3f} {paper} {speed:6.2f} "
        f"{equal:6.2f} {bulks[best]:6.2f} {best:5} {whole:6.2f} {asp:5.1f} {vpipe:6.2f} {alone['1f1b']:6.2f} "
        f"{alone['zero_bubble']:6.2f} {unscheduled:10.2f} {unmirrored:9.2f} {alone_fixed:8.2f} {printed:7.3f} "
        f"{1000 * stale:5.1f}"
    )


def _vpipe(name: str, rules: Rules) -> float:
    subnets = SPACES[name].draw(64, 1)
    found = swapped(BSP.cut(subnets, STAGES), BSP.rules(rules, STAGES), CONTEXTS, nothing())
    return len(subnets) / found.makespan * 1e9


def _printed(name: str, samples: Samples, rules: Rules) -> tuple[float, float]:
    subnets = SPACES[name].draw(samples.subnets, samples.seeds[0])
    placed = balanced(subnets, STAGES)
    ran = run(placed, rules, by_finished_list(placed, rules.depth))
    return ran.bubble, stale_reads(ran) / (subnets.last_user >= 0).sum()


def split(quick: bool) -> Report:
    """Compare split backwards with whole ones, for CSP and BSP, with the best M for CSP in each case.

    `vs_bsp_c1` is the throughput of CSP relative to BSP with the same number of micro-batches. It is the larger one of
    the ratios with whole and with split backwards.
    """
    report, samples = Report(), Samples.of(quick)
    report.lines += [
        "8 stages  whole:                                split:",
        "space      M depth   CSP bubble    BSP CSP/BSP   M depth    CSP bubble    BSP CSP/BSP",
    ]
    for name in ("NLP.c1", "NLP.c3", "CV.c1") if quick else PAPER:
        line = name.ljust(8)
        ratios: dict[bool, float] = {}
        for parts in (False, True):
            rules = Rules(split=parts)
            chosen = choose(SPACES[name], STAGES, rules, (4, 8, 12, 16, 24), (STAGES, 2 * STAGES))
            rules = replace(rules, microbatches=chosen.microbatches, depth=chosen.depth)
            bubble, _, speed = samples.ran(name, CSP, rules)
            own = samples.ran(name, BSP, rules).throughput
            line += f" {rules.microbatches:3} {rules.depth:5} {speed:6.2f} {bubble:6.3f} {own:6.2f} {speed / own:7.2f}"
            ratios[parts] = speed / own
        report.lines.append(line)
        short = name.split(".")[1] if name.startswith("NLP") else name
        report.keys |= {f"vs_bsp_{short}": max(ratios.values()), f"vs_bsp_{short}_both_split": ratios[True]}
    report.lines.append(
        "BSP: bulks of 8, all forwards first, the same M; each part takes half of a backward plus 0.2 ms."
    )
    return report


def bounds(quick: bool) -> Report:
    """Report bounds by number of micro-batches.

    These are the smallest possible bubble because of shared layers, and the largest possible gain of any order over
    BSP.
    """
    report, samples = Report(), Samples.of(quick)
    report.lines.append("NLP.c1: M   bubble  bound  CSP/BSP, bulks of 8, the same M   at most, with the bound's bubble")
    most = 0.0
    for m in (1, 2, 4, 8, 12, 16, 24, 32):
        bubble, _, csp = samples.ran("NLP.c1", CSP, Rules(m))
        other = samples.ran("NLP.c1", BSP, Rules(m)).throughput
        least = samples.bound("NLP.c1", Rules(m))
        limit = csp / other * (1 - least) / (1 - bubble)
        most = max(most, limit)
        report.lines.append(f"{m:9} {bubble:8.3f} {least:6.3f} {csp / other:8.2f} {limit:38.2f}")
    report.keys["vs_bsp_c1_at_most"] = most
    return report


def costs(quick: bool) -> Report:
    """Report the results for NLP.c1 if tasks, messages or updates cost more, with the best M for each case."""
    report, samples = Report(), Samples.of(quick)
    report.lines.append("NLP.c1, M chosen for each:                           M  bubble  lost  CSP/BSP  CSP/one by one")
    ethernet = round(15.76 / 0.867)
    for what, rules in (
        ("as above", Rules()),
        ("0.6 ms a task, the engine's time on busy cores", Rules(overhead=600_000)),
        ("2 ms a task", Rules(overhead=2_000_000)),
        ("updates with Adam's moments, over PCIe", Rules(moving=6)),
        (
            "867 MB/s Ethernet: 0.8 MB messages, 0.1 ms, updates",
            Rules(message=907_000, latency=100_000, moving=ethernet),
        ),
    ):
        chosen = choose(SPACES["NLP.c1"], STAGES, rules)
        given = replace(rules, microbatches=chosen.microbatches, depth=chosen.depth)
        bubble, lost, speed = samples.ran("NLP.c1", CSP, given)
        other = samples.ran("NLP.c1", BSP, given).throughput
        alone = samples.one_by_one("NLP.c1", ZeroBubble(), balanced, rules)
        report.lines.append(
            f"{what:52} {given.microbatches:2} {bubble:7.3f} {lost:5.3f} {speed / other:8.2f} {speed / alone:15.2f}"
        )
    return report


def scaling(quick: bool) -> Report:
    """Report the results for 4 to 16 stages, with the best M for each number."""
    report, samples = Report(), Samples.of(quick)
    report.lines.append(
        "stages   NLP.c1: M  bubble  lost  utilisation  subnets/s   (paper: bubble .39 on 8, .42 on 16)"
    )
    for stages in (4, 8, 12, 16):
        chosen = choose(SPACES["NLP.c1"], stages)
        rules = Rules(chosen.microbatches, chosen.depth)
        bubble, lost, speed = samples.ran("NLP.c1", CSP, rules, stages)
        report.lines.append(
            f"{stages:6} {chosen.microbatches:11} {bubble:7.3f} {lost:5.3f} {1 - bubble:12.3f} {speed:10.2f}"
        )
        report.keys[f"bubble_{stages}_stages"] = bubble
    return report


def swaps(quick: bool) -> Report:
    """Report the hits, stalls and costs of layers that take turns on devices with room for three contexts."""
    report = Report()
    n = 60 if quick else 150
    report.lines.append(
        f"{CONTEXTS} contexts, 8 stages:             M  predictor        hits  at switches late  stall  time (plain: 1)"
    )
    for name in ("NLP.c1", "NLP.c3") if quick else PAPER:
        placed = balanced(SPACES[name].draw(n, 1), STAGES)
        chosen = choose(SPACES[name], STAGES)
        for m in sorted({1, chosen.microbatches}):
            rules = Rules(m, chosen.depth)
            plain = run(placed, rules)
            exact = ahead(placed, rules, CONTEXTS, plain)
            cases = {
                "none": swapped(placed, rules, CONTEXTS, nothing()),
                "algorithm 3": swapped(placed, rules, CONTEXTS, one_step(placed)),
                "in turn": swapped(placed, rules, CONTEXTS, in_turn(rules)),
                "exact": swapped(placed, rules, CONTEXTS, exact),
                "exact, 10 % off": swapped(placed, rules, CONTEXTS, exact, jitter=0.1, seed=1),
            }
            report.lines += _hits(name, m, cases, plain.makespan)
            if name == "NLP.c1":  # keeps the results of the last M, which is the chosen one
                report.keys |= {
                    "hit_rate": cases["algorithm 3"].switch_hit_rate,
                    "hit_rate_all_tasks": cases["algorithm 3"].hit_rate,
                    "stall": cases["algorithm 3"].stall,
                    "stall_in_turn": cases["in turn"].stall,
                    "hit_rate_exact": cases["exact"].switch_hit_rate,
                    "hit_rate_all_tasks_exact": cases["exact"].hit_rate,
                    "stall_exact": cases["exact"].stall,
                }
    report.lines.append(
        f"Without a predictor all layers have to fit, so the batch is smaller: {WITHOUT_PREDICTOR:.2f} of the samples "
        "a second (Table 2, NLP.c1)."
    )
    return report


def _hits(name: str, m: int, cases: dict[str, Swaps], plain: int) -> Iterable[str]:
    for what, found in cases.items():
        missed = found.tasks[1] - found.tasks[0]
        yield (
            f"{name:30} {m:2}  {what:15} {found.hit_rate:5.3f} {found.switch_hit_rate:8.3f} "
            f"{found.late / max(1, missed):9.2f} {found.stall:6.3f} {found.makespan / plain:9.3f}"
        )


def mirroring(subnets: int) -> Output:
    """Yield the gain of a cut for each subnet by stages and micro-batches, with the swap times of the paper."""
    for name in PAPER:
        drawn, gains = SPACES[name].draw(subnets, seed=1), {}
        for stages, microbatches in product((4, 8), (1, 4, 8)):
            one, each = (run(place(drawn, stages), Rules(microbatches)).throughput for place in (fixed, balanced))
            gains[f"{stages} stages, {microbatches}"] = round(each / one, 2)
        yield f"{name} {json.dumps(gains)}"
        yield {f"{name}, {case}": gain for case, gain in gains.items()}
