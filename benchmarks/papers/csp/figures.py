"""The paper's experiments on CSP that can be said in times (NASPipe, S5), emulated; see papers/csp/emulated.py for how.

    python benchmarks/papers/csp/figures.py [--only f5 f6 f7 t2 t4 t5 theory] [--subnets 300]

f5   throughput of all systems, each with the batch that it has in Table 2, and with the same batch
f6   what scheduler, predictor and mirroring are worth
f7   4 to 16 stages
t2   bubbles and cache hits (3 contexts), one task a subnet and with the best number of micro-batches
t4   the order in which subnets 2, 5 and 7 access a layer that they share
t5   times of layers, and what a subnet takes
theory  what shared layers force: formula, longest chain, simulation

Convergence and accuracy (f4, t3) need real training: benchmarks/papers/csp/reproducibility.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.papers.csp.emulation.accesses import accesses
from benchmarks.papers.csp.emulation.bounds import least_bubble
from benchmarks.papers.csp.emulation.choosing import choose
from benchmarks.papers.csp.emulation.placed import balanced
from benchmarks.papers.csp.emulation.spaces import CV, NLP, SPACES, Space
from benchmarks.papers.csp.emulation.stream import Rules, run
from benchmarks.papers.csp.emulation.swapped import ahead, nothing, one_step, swapped
from benchmarks.papers.csp.emulation.systems import SYSTEMS, System, bsp
from benchmarks.papers.csp.emulation.theory import collisions, forced_bubble

STAGES = 8
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


def f5(subnets: int) -> list[str]:
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
        lines.append(
            f"{name:8} {same[0]:5.0f} {best.microbatches:2} {same[1]:5.0f} {same[2]:5.0f} "
            f"{batches.csp * 64e9 / took:5.0f} | {one[0]:5.0f} {one[1]:5.0f} {one[2]:5.0f} {one[0] / one[1]:8.2f}"
        )
    return [*lines, "The paper: 1.1 to 7.8 times GPipe, 0.87 to 6.5 times PipeDream, 0.77 to 1.5 times VPipe."]


def f6(subnets: int) -> list[str]:
    lines = ["subnets a second, 8 stages, best M   whole   no scheduler   no predictor (3 contexts)   no mirroring"]
    for name in NAMES:
        rules = Rules(choose(SPACES[name], STAGES).microbatches, STAGES)
        drawn = SPACES[name].draw(subnets, 1)
        few = drawn.first(100)
        placed = balanced(few, STAGES)
        with_, without = (swapped(placed, rules, 3, make).makespan for make in (ahead(placed, rules, 3), nothing()))
        speeds = [SYSTEMS[what].run(drawn, STAGES, rules).throughput for what in SYSTEMS if what not in ("BSP", "ASP")]
        lines.append(
            f"{name:24} {rules.microbatches:10} {speeds[0]:7.2f} {speeds[1]:14.2f} {speeds[0] * with_ / without:27.2f} "
            f"{speeds[2]:14.2f}"
        )
    return lines


def f7(subnets: int) -> list[str]:
    lines = ["stages   M  bubble  subnets/s   one task: bubble  subnets/s   (paper: bubble .39 on 8, .42 on 16)"]
    for stages in (4, 6, 8, 12, 16):
        best = Rules(choose(SPACES["NLP.c1"], stages).microbatches, stages)
        placed = balanced(SPACES["NLP.c1"].draw(subnets, 1), stages)
        fast, one = run(placed, best), run(placed, Rules(1, stages))
        lines.append(
            f"{stages:6} {best.microbatches:3} {fast.bubble:7.3f} {fast.throughput:10.2f} {one.bubble:18.3f} "
            f"{one.throughput:10.2f}"
        )
    return lines


def t2(subnets: int) -> list[str]:
    lines = ["space    M  bubble  BSP: bubble  ASP: bubble  hits at switches: Algorithm 3  exact   BSP, no prediction"]
    for name in NAMES:
        drawn = SPACES[name].draw(subnets, 1)
        few = drawn.first(60)
        for m in (1, choose(SPACES[name], STAGES).microbatches):
            rules, placed = Rules(m, STAGES), balanced(few, STAGES)
            bubbles = [SYSTEMS[what].run(drawn, STAGES, rules).bubble for what in ("CSP", "BSP", "ASP")]
            makes = one_step(placed), ahead(placed, rules, 3)
            hits = [swapped(placed, rules, 3, make).switch_hit_rate for make in makes]
            bulk = bsp()
            lru = swapped(bulk.cut(few, STAGES), bulk.rules(rules, STAGES), 3, nothing()).switch_hit_rate
            lines.append(
                f"{name:7} {m:2} {bubbles[0]:7.3f} {bubbles[1]:12.3f} {bubbles[2]:12.3f} {hits[0]:30.3f} "
                f"{hits[1]:6.3f} {lru:20.3f}"
            )
    return [
        *lines,
        "The paper: bubbles .39 .57 .68, .43 .58 .68; GPipe .57, PipeDream .1; hits .86 to .97, VPipe .01 to .08.",
    ]


def t4(subnets: int) -> list[str]:
    choices = np.tile(np.arange(1, 10)[:, None], (1, 16))
    choices[[2, 5, 7], 0] = 0
    drawn = Space("apart", 16, 10, NLP).subnets(choices)
    lines = ["stages  CSP                BSP                ASP"]
    for stages in (1, 2, 4, 8, 16):
        found = [accesses(SYSTEMS[what].run(drawn, stages, Rules()), 0, 0) for what in ("CSP", "BSP", "ASP")]
        lines.append(f"{stages:6}  " + "  ".join(f"{each:17}" for each in found))
    return lines


def t5(subnets: int) -> list[str]:
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
    return lines


def theory(subnets: int) -> list[str]:
    lines = ["8 stages  M  at most, by the formula  longest chain  CSP, simulated   two subnets share a layer"]
    for name in NAMES:
        for m in (1, 2, 4, 8):
            placed = balanced(SPACES[name].draw(subnets, 1), STAGES)
            rules = Rules(m, overhead=0, moving=0)
            formula, chain = forced_bubble(SPACES[name], STAGES, m), least_bubble(placed, rules)
            share = f"{collisions(SPACES[name], 2):15.3f}" if m == 1 else ""
            lines.append(f"{name:8} {m:2} {formula:23.3f} {chain:14.3f} {run(placed, rules).bubble:15.3f} {share}")
    return lines


EXPERIMENTS: dict[str, Callable[[int], list[str]]] = {
    "f5": f5,
    "f6": f6,
    "f7": f7,
    "t2": t2,
    "t4": t4,
    "t5": t5,
    "theory": theory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--subnets", type=int, default=300)
    options = parser.parse_args()
    for name in options.only:
        print(f"{name}\n" + "\n".join(EXPERIMENTS[name](options.subnets)) + "\n", flush=True)


if __name__ == "__main__":
    main()
