"""The paper's experiments on CSP that can be said in times (NASPipe, S5), emulated.

    python benchmarks/papers/csp/figures.py [--only f5 f6 f7 t2 t4 t5 theory] [--quick] [--json] [--pictures FOLDER]

f5   throughput of all systems, each with the batch that it has in Table 2, and with the same batch
f6   what scheduler, predictor and mirroring are worth
f7   4 to 16 stages, all systems
t2   bubbles and cache hits (3 contexts), one task a subnet and with the best number of micro-batches; memory and
     utilisation
t4   the order in which subnets 2, 5 and 7 access a layer that they share
t5   times of layers, and what a subnet takes
theory  what shared layers force: formula, longest chain, simulation

Convergence and accuracy (f4, t3) need real training: benchmarks/papers/csp/reproducibility.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks.harness.report import Panel, Picture, Report, make_parser, run_parts
from benchmarks.papers.csp.emulation.spaces import CV, NLP, SPACES, Kind, Placed, Space, Subnets, balanced, fixed
from benchmarks.papers.csp.emulation.stream import Ran, Rules, run
from benchmarks.papers.csp.emulation.swapped import Swaps, ahead, in_turn, nothing, one_step, swapped
from benchmarks.papers.csp.emulation.systems import (
    SYSTEMS,
    System,
    bsp,
    by_finished_list,
    choose,
    one_by_one,
    stale_reads,
)
from benchmarks.papers.csp.emulation.theory import collisions, forced_bubble, least_bubble
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.zero_bubble import ZeroBubble

# ---- Who read and wrote a layer, one after another (NASPipe, Table 4).


def accesses(ran: Ran, block: int, choice: int) -> str:
    """The order in which subnets read and wrote the layer, such as "2F-2B-5F-5B": F where the first forward of one on
    the layer's stage began, B where its last backward there ended, with weight gradients."""
    placed = ran.placed
    found = []
    for subnet in np.flatnonzero(placed.subnets.choices[:, block] == choice):
        stage = placed.stage_of[subnet, block]
        found.append((int(ran.forwards[0, subnet, stage].min()), 1, f"{subnet}F"))
        found.append((int(ran.stepped[subnet, stage]), 0, f"{subnet}B"))  # ends before others begin
    return "-".join(what for _, _, what in sorted(found))


# ---- CSP on the paper's spaces, emulated: layers of its times (Table 5) on 8 stages, against the systems that it
# names.
# Nothing is computed; `emulation/` says when each task would run. A micro-batch takes its share of the batch's time
# and 0.2 ms; messages are free, and an update comes to another stage in twice the layer's swap time, except where a
# line says otherwise. Bubbles are those between the first tenth of the subnets and the last that still fill the
# queue; `lost` counts the fixed 0.2 ms as if idle. Micro-batches are chosen on one sample, and measured on others.

STAGES = 8
BULKS = (4, 8, 16, 32)
CONTEXTS = 3
CSP, BSP = SYSTEMS["CSP"], SYSTEMS["BSP"]
PAPER = {"NLP.c1": 0.39, "NLP.c2": 0.57, "NLP.c3": 0.68, "CV.c1": 0.43, "CV.c2": 0.58, "CV.c3": 0.68}
"""Bubbles of its Table 2, one task a subnet."""
WITHOUT_PREDICTOR = 32 / 192 * 1.13 / 0.54
"""Samples a second without swapping, as a share of those with it: the batch that then fits on NLP.c1, and how long it
takes, by Table 2."""


@dataclass(frozen=True)
class Samples:
    """Subnets of each space: of one seed to choose by, and of others to measure with.

    Attributes:
        subnets: how many of each seed.
        seeds: to measure with.
    """

    subnets: int
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, quick: bool) -> Samples:
        """A third of the subnets, and one seed, if it has to be quick."""
        return cls(300, (1,)) if quick else cls(900, (1, 2, 3))

    def ran(self, name: str, system: System, rules: Rules, stages: int = STAGES) -> Means:
        """Means over the seeds."""
        found = [system.run(SPACES[name].draw(self.subnets, seed), stages, rules) for seed in self.seeds]
        return Means(mean(r.bubble for r in found), mean(r.lost for r in found), mean(r.throughput for r in found))

    def bound(self, name: str, rules: Rules) -> float:
        """Mean of the least bubble that shared layers alone force."""
        drawn = (SPACES[name].draw(self.subnets, seed) for seed in self.seeds)
        return mean(least_bubble(balanced(subnets, STAGES), rules) for subnets in drawn)

    def one_by_one(
        self,
        name: str,
        schedule: OneFOneB | ZeroBubble,
        cut: Callable[[Subnets, int], Placed],
        rules: Rules | None = None,
    ) -> float:
        """Mean of subnets a second, one after another, each with the M that is fastest."""
        placed = [cut(SPACES[name].draw(100, seed), STAGES) for seed in self.seeds]
        every = (replace(rules or Rules(), microbatches=m) for m in (2, 4, 8, 16, 24, 32))
        return max(mean(one_by_one(each, given, schedule) for each in placed) for given in every)


class Means(NamedTuple):
    """Of a system on a space."""

    bubble: float
    lost: float
    throughput: float


def spaces(quick: bool) -> Report:
    """Bubbles and throughput of all systems on all spaces."""
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
        "which hold so many batches on every stage; BSP,1: one task a subnet, as in the paper; VPipe: BSP with 3\n"
        "contexts on a device, no prediction; one by one: each with its fastest M, zb is zero_bubble; fixed: without\n"
        "mirroring, too; stale: of 1000 layers that the printed rule reads."
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
    """A backward in two parts beside a whole one, for CSP and for BSP, with the M that is best for CSP in each case.

    `vs_bsp_c1` is CSP over BSP with as many micro-batches, both with a whole backward, or both with a split one where
    that is more.
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
        "BSP: bulks of 8, all forwards first, the same M; each part takes half of a backward, and 0.2 ms."
    )
    return report


def bounds(quick: bool) -> Report:
    """By number of micro-batches: what shared layers alone forbid, and the most that any order could gain over BSP."""
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
    """NLP.c1 where tasks, messages or updates cost more, M chosen for each."""
    report, samples = Report(), Samples.of(quick)
    report.lines.append("NLP.c1, M chosen for each:                           M  bubble  lost  CSP/BSP  CSP/one by one")
    ethernet = round(15.76 / 0.867)
    for what, rules in (
        ("as above", Rules()),
        ("0.6 ms a task, as the engine needs on busy cores", Rules(overhead=600_000)),
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
    """4 to 16 stages, M chosen for each number."""
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
    """Layers that take turns on devices with room for three contexts: hits, stalls, and what they cost."""
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
            if name == "NLP.c1":  # the last M is the chosen one
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
        f"Without a predictor all layers would have to fit, and the batch be smaller: {WITHOUT_PREDICTOR:.2f} of the "
        "samples a second (Table 2, NLP.c1)."
    )
    return report


def _hits(name: str, m: int, cases: dict[str, Swaps], plain: int) -> Iterable[str]:
    for what, found in cases.items():
        missed = found.tasks[1] - found.tasks[0]
        yield (
            f"{name:30} {m:2}  {what:15} {found.hit_rate:5.3f} {found.switch_hit_rate:8.3f} "
            f"{found.late / max(1, missed):9.2f} {found.stall:6.3f} {found.makespan / plain:9.3f}"
        )


NAMES = [name for name in SPACES if name != "NLP.c0"]


class Batches(NamedTuple):
    """Samples of a batch in Table 2: what fits into 11 GB a device."""

    csp: int
    bsp: int
    asp: int


TABLE_2 = {
    "NLP.c1": Batches(192, 32, 16),
    "NLP.c2": Batches(192, 64, 24),
    "NLP.c3": Batches(192, 128, 48),
    "CV.c1": Batches(64, 24, 12),
    "CV.c2": Batches(64, 32, 16),
    "CV.c3": Batches(64, 48, 24),
}
SHRINKS = np.log(0.54 / 1.13) / np.log(32 / 192)
"""A batch n times as small takes n ** -0.41 of the time: Table 2 has 1.13 s for 192 samples and 0.54 s for 32."""


def rate(name: str, system: System, rules: Rules, samples: int, subnets: int) -> float:
    """Samples a second, with a batch of so many; layers take what they take for the batch of CSP, but for `SHRINKS`."""
    share = (samples / TABLE_2[name].csp) ** SHRINKS
    drawn = SPACES[name].draw(subnets, 1)
    shrunk = replace(
        drawn, **{what: (getattr(drawn, what) * share).astype(np.int64) for what in ("forward", "backward")}
    )
    return samples * system.run(shrunk, STAGES, rules).throughput


def f5(subnets: int) -> Report:
    keys: dict[str, float] = {}
    lines = [
        "samples a second, 8 stages",
        "space    CSP, M   BSP   ASP VPipe | CSP,1 BSP,1 ASP,1   CSP,1/BSP,1, batches of Table 2",
    ]
    for name, batches in TABLE_2.items():
        best = Rules(choose(SPACES[name], STAGES).microbatches, STAGES)
        same = [rate(name, SYSTEMS[what], best, batches.csp, subnets) for what in ("CSP", "BSP", "ASP")]
        drawn = SPACES[name].draw(64, 1)
        bulk = SYSTEMS["BSP"]
        took = swapped(bulk.cut(drawn, STAGES), bulk.rules(best, STAGES), 3, nothing()).makespan
        one = [
            rate(name, SYSTEMS[what], Rules(), n, subnets)
            for what, n in zip(("CSP", "BSP", "ASP"), batches, strict=True)
        ]
        vpipe = batches.csp * 64e9 / took
        keys |= {f"f5_{name}_over_{what}": same[0] / x for what, x in zip(("bsp", "asp"), same[1:], strict=True)}
        keys[f"f5_{name}_over_vpipe"] = same[0] / vpipe
        lines.append(
            f"{name:8} {same[0]:5.0f} {best.microbatches:2} {same[1]:5.0f} {same[2]:5.0f} "
            f"{vpipe:5.0f} | {one[0]:5.0f} {one[1]:5.0f} {one[2]:5.0f} {one[0] / one[1]:8.2f}"
        )
    lines.append("The paper: 1.1 to 7.8 times GPipe, 0.87 to 6.5 times PipeDream, 0.77 to 1.5 times VPipe.")
    return Report(lines, keys)


def f6(subnets: int) -> Report:
    report = Report(
        [
            "subnets a second, 8 stages, best M   whole   no scheduler   no predictor: 3 contexts   all there, BSP's"
            " batch   no mirroring"
        ]
    )
    for name in NAMES:
        rules = Rules(choose(SPACES[name], STAGES).microbatches, STAGES)
        drawn = SPACES[name].draw(subnets, 1)
        few = drawn.first(100)
        placed = balanced(few, STAGES)
        with_, without = (swapped(placed, rules, 3, make).makespan for make in (ahead(placed, rules, 3), nothing()))
        whole, unscheduled, unmirrored = (
            SYSTEMS[what].run(drawn, STAGES, rules).throughput
            for what in ("CSP", "without scheduler", "without mirroring")
        )
        batches = TABLE_2[name]
        small, large = (rate(name, CSP, rules, samples, subnets) for samples in (batches.bsp, batches.csp))
        demand = whole * with_ / without
        report.lines.append(
            f"{name:24} {rules.microbatches:10} {whole:7.2f} {unscheduled:14.2f} {demand:26.2f} "
            f"{whole * small / large:29.2f} {unmirrored:14.2f}"
        )
        if name == "NLP.c1":
            report.keys |= {
                "f6_without_scheduler": unscheduled / whole,
                "f6_on_demand": demand / whole,
                "f6_all_resident": small / large,
                "f6_without_mirroring": unmirrored / whole,
            }
    report.lines.append("A subnet of the smaller batch counts as the part of one that its samples are.")
    return report


def f7(subnets: int) -> Report:
    report = Report(
        [
            "NLP.c1                                        subnets a second, the same M:              one task:",
            "stages   M  bubble   CSP    BSP    ASP  without scheduler  without mirroring   bubble  subnets/s"
            "   (paper: bubble .39 on 8, .42 on 16; .75 without scheduler)",
        ]
    )
    counts, drawn = (4, 6, 8, 12, 16), SPACES["NLP.c1"].draw(subnets, 1)
    speeds: dict[str, list[float]] = {what: [] for what in SYSTEMS}
    idle: dict[str, list[float]] = {what: [] for what in SYSTEMS}
    for stages in counts:
        best = Rules(choose(SPACES["NLP.c1"], stages).microbatches, stages)
        found = {what: system.run(drawn, stages, best) for what, system in SYSTEMS.items()}
        for what, ran in found.items():
            speeds[what].append(ran.throughput)
            idle[what].append(ran.bubble)
        one = CSP.run(drawn, stages, Rules(1, stages))
        s = {what: ran.throughput for what, ran in found.items()}
        report.lines.append(
            f"{stages:6} {best.microbatches:3} {found['CSP'].bubble:7.3f} "
            f"{s['CSP']:5.1f} {s['BSP']:6.1f} {s['ASP']:6.1f} "
            f"{s['without scheduler']:18.1f} {s['without mirroring']:18.1f} {one.bubble:8.3f} {one.throughput:10.2f}"
        )
    report.keys |= {"f7_speedup_16_over_4": speeds["CSP"][-1] / speeds["CSP"][0], "f7_bubble_16": idle["CSP"][-1]}
    x = list(counts)
    panels = [Panel("throughput", "stages", "subnets/s", x, speeds), Panel("idle", "stages", "bubble", x, idle)]
    report.picture = Picture("F7: NLP.c1, emulated", panels)
    return report


PARAMETERS = {"NLP.c1": 14.8, "NLP.c2": 10.8, "NLP.c3": 5.8, "CV.c1": 7.4, "CV.c2": 3.8, "CV.c3": 1.7}
"""Billions of parameters that GPipe holds in Table 2: the whole space."""


def parameters(name: str) -> tuple[float, float]:
    """Return billions of parameters of a space and of three contexts on all stages, by the paper's totals.

    Swap times of Table 5 give the totals of NLP within 15 %, and 1.6 to 1.8 times those of CV.
    """
    return PARAMETERS[name], CONTEXTS * PARAMETERS[name] / SPACES[name].choices


def utilisation(name: str, busy: float, samples: int) -> float:
    """The share of what devices could compute, if a batch of CSP fills them: `busy` of the time, with such a batch."""
    return float(busy * (samples / TABLE_2[name].csp) ** (1 - SHRINKS))


def memory_and_utilisation(name: str, subnets: int) -> list[str]:
    """Lines of Table 2 for one space, one task a subnet, each system with its batch there."""
    whole, contexts = parameters(name)
    drawn, rules, batches = SPACES[name].draw(subnets, 1), Rules(1, STAGES), TABLE_2[name]
    few, moments = drawn.first(60), 3 * 4  # bytes of a parameter with Adam's
    placed = balanced(few, STAGES)
    swapping = {
        "CSP": (SYSTEMS["CSP"], swapped(placed, rules, CONTEXTS, one_step(placed))),
        "VPipe": (BSP, swapped(BSP.cut(few, STAGES), BSP.rules(rules, STAGES), CONTEXTS, nothing())),
    }
    lines = []
    for what, samples in (("CSP", batches.csp), ("VPipe", batches.csp), ("BSP", batches.bsp), ("ASP", batches.asp)):
        system, swaps = swapping.get(what, (SYSTEMS.get(what), None))
        assert system is not None, "one of both has it"
        busy = 1 - system.run(drawn, STAGES, rules).bubble - (0 if swaps is None else swaps.stall)
        here = whole if swaps is None else contexts
        lines.append(
            f"{name:8} {what:6} {samples:5} {here:14.2f} {here * moments / STAGES:16.1f} "
            f"{0 if swaps is None else whole * moments:8.0f} {utilisation(name, busy, samples):13.2f} "
            + ("" if swaps is None else f"{swaps.switch_hit_rate:11.3f}")
        )
    return lines


def t2(subnets: int) -> Report:
    keys: dict[str, float] = {}
    lines = ["space    M  bubble  BSP: bubble  ASP: bubble  hits at switches: Algorithm 3  exact   BSP, no prediction"]
    for name in NAMES:
        drawn = SPACES[name].draw(subnets, 1)
        few = drawn.first(60)
        for m in (1, choose(SPACES[name], STAGES).microbatches):
            rules, placed = Rules(m, STAGES), balanced(few, STAGES)
            bubbles = [SYSTEMS[what].run(drawn, STAGES, rules).bubble for what in ("CSP", "BSP", "ASP")]
            makes = one_step(placed), ahead(placed, rules, 3)
            hits = [swapped(placed, rules, 3, make).switch_hit_rate for make in makes]
            keys |= {f"t2_bubble_{name}_m{m}": bubbles[0], f"t2_hits_{name}_m{m}": hits[0]}
            bulk = bsp()
            lru = swapped(bulk.cut(few, STAGES), bulk.rules(rules, STAGES), 3, nothing()).switch_hit_rate
            lines.append(
                f"{name:7} {m:2} {bubbles[0]:7.3f} {bubbles[1]:12.3f} {bubbles[2]:12.3f} {hits[0]:30.3f} "
                f"{hits[1]:6.3f} {lru:20.3f}"
            )
    lines += [
        "The paper: bubbles .39 .57 .68, .43 .58 .68; GPipe .57, PipeDream .1; hits .86 to .97, VPipe .01 to .08.",
        "one task a subnet        billions of  GB, with Adam's         GB   utilisation     hits at",
        "space    system batch     parameters moments, a device  on host     of devices    switches",
    ]
    for name in NAMES:
        lines += memory_and_utilisation(name, subnets)
    lines.append(
        "Utilisation: a device is full with a batch of CSP; a smaller one fills it by what it takes in Table 2."
    )
    return Report(lines, keys)


SHARED = 4
"""The block of the shared layer of Table 4, on the second of 4 stages and on the third of 8."""
TABLE_4 = {
    4: {"CSP": "2F-2B-5F-5B-7F-7B", "BSP": "2F-2B-5F-5B-7F-7B", "ASP": "2F-2B-5F-7F-5B-7B"},
    8: {"CSP": "2F-2B-5F-5B-7F-7B", "BSP": "2F-5F-7F-2B-5B-7B", "ASP": "2F-5F-7F-2B-5B-7B"},
}
"""As published, by the number of stages."""


def draw_sharing(*users: int) -> Subnets:
    """Return nine subnets of equal layers, of which `users` share one in block `SHARED`, and no others share any."""
    choices = np.tile(np.arange(1, 10)[:, None], (1, 16))
    choices[list(users), SHARED] = 0
    return Space("apart", 16, 10, (Kind("equal", 1.0, 2.0, 0.0),)).subnets(choices)


def t4(subnets: int) -> Report:
    drawn = draw_sharing(2, 5, 7)
    systems = {"CSP": CSP, "BSP": BSP, "BSP, bulks of 3": bsp(3), "ASP": SYSTEMS["ASP"]}
    lines = ["stages  " + "  ".join(f"{name:17}" for name in systems)]
    for stages in (1, 2, 4, 8, 16):
        found = [accesses(system.run(drawn, stages, Rules()), SHARED, 0) for system in systems.values()]
        lines.append(f"{stages:6}  " + "  ".join(f"{each:17}" for each in found))
    for stages, row in TABLE_4.items():
        lines.append(f"{stages:6}  " + "  ".join(f"{row.get(name, ''):17}" for name in systems) + "  as published")
    lines.append(
        "The published BSP on 4 stages has 2, 5 and 7 in three bulks; bulks of 4 from subnet 0 have 5 and 7 in one."
    )
    return Report(lines)


def t5(subnets: int) -> Report:
    lines = ["layer                 forward backward   swap   (ms; computing it takes so many times its swap)"]
    for kinds in (NLP, CV):
        for kind in kinds:
            times = (kind.forward + kind.backward) / kind.swap
            lines.append(f"{kind.name:20} {kind.forward:8.2f} {kind.backward:8.2f} {kind.swap:6.2f} {times:8.1f}")
    lines.append("space    a subnet: forward backward   swap   slowest stage of 8 beside the mean: balanced  fixed")
    for name in SPACES:
        drawn = SPACES[name].draw(subnets, 1)
        sums = [float(each.sum(axis=1).mean()) / 1e6 for each in (drawn.forward, drawn.backward, drawn.swap)]
        worst = [
            float(((p.forward + p.backward).max(axis=1) / (p.forward + p.backward).mean(axis=1)).mean())
            for p in (SYSTEMS[what].cut(drawn, STAGES) for what in ("CSP", "without mirroring"))
        ]
        lines.append(f"{name:8} {sums[0]:17.0f} {sums[1]:8.0f} {sums[2]:6.1f} {worst[0]:42.2f} {worst[1]:6.2f}")
    return Report(lines)


def theory(subnets: int) -> Report:
    lines = ["8 stages  M  at most, by the formula  longest chain  CSP, simulated   two subnets share a layer"]
    for name in NAMES:
        for m in (1, 2, 4, 8):
            placed = balanced(SPACES[name].draw(subnets, 1), STAGES)
            rules = Rules(m, overhead=0, moving=0)
            formula, chain = forced_bubble(SPACES[name], STAGES, m), least_bubble(placed, rules)
            share = f"{collisions(SPACES[name], 2):15.3f}" if m == 1 else ""
            lines.append(f"{name:8} {m:2} {formula:23.3f} {chain:14.3f} {run(placed, rules).bubble:15.3f} {share}")
    return Report(lines)


EXPERIMENTS: dict[str, Callable[[int], Report]] = {
    "f5": f5,
    "f6": f6,
    "f7": f7,
    "t2": t2,
    "t4": t4,
    "t5": t5,
    "theory": theory,
}


def _sized(experiment: Callable[[int], Report]) -> Callable[[bool], Report]:
    return lambda quick: experiment(100 if quick else 300)


def main() -> None:
    parser = make_parser(__doc__, "100 subnets in place of 300; within 100 s")
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each experiment that has one")
    options = parser.parse_args()
    parts = {name: _sized(experiment) for name, experiment in EXPERIMENTS.items()}
    keys = run_parts(parts, options.only, options.quick, options.pictures)
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in keys.items()}))


if __name__ == "__main__":
    main()
