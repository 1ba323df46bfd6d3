"""What an embedding and a head that all subnets share cost, by what becomes of them: bubbles in virtual time.

    python benchmarks/papers/csp/shared.py [--stages 8] [--choices 72]

80 subnets drawn uniformly, 48 choice blocks on equal stages, a first layer on the first and a last one on the last.
Forward takes 1 and backward 2 on every stage, whatever a subnet has chosen. With every subnet stepping the first layer,
one follows the other: the bubble is (p - 1) / (m + p - 1).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import pairwise

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Delayed, LayerUse, Plan, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.csp import CSP

BLOCKS, SUBNETS = 48, 80
WAYS = {"frozen": 0, "per_choice": 0, "delayed by 8": 8, "delayed by 30": 30, "sequential": 0}


def uses(way: str, layers: list[Span], choices: int) -> Iterator[LayerUse]:
    """The layers of each subnet: 0 and the last one are shared."""
    rng, last = random.Random(0), str(BLOCKS + 1)
    for _ in range(SUBNETS):
        chosen = [rng.randrange(choices) for _ in range(BLOCKS)]
        names = [f"{block}.{choice}" for block, choice in enumerate(chosen, 1)]
        if way == "per_choice":
            names += [f"0.{chosen[0]}", f"{last}.{chosen[-1]}"]
        elif way != "frozen":
            names += ["0", last]
        late = dict.fromkeys(("0", last), Delayed(WAYS[way])) if WAYS[way] else {}
        yield LayerUse.from_names(names, layers, delays=late)


def bubble(way: str, stages: int, microbatches: int, choices: int) -> float:
    cuts = [0, *(1 + BLOCKS * s // stages for s in range(1, stages)), BLOCKS + 2]
    layers = [Span(a, b) for a, b in pairwise(cuts)]
    plan = Plan.even(stages, microbatches, layers=layers)
    costs = CostModel.uniform(stages, 1.0, 2.0)
    timeline = simulate(CSP(), plan, costs, batches=list(uses(way, layers, choices)))
    return sum(timeline.bubble) / stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--choices", type=int, default=72, help="candidates of a block")
    parser.add_argument("--quick", action="store_true", help="4 micro-batches only")
    asked = parser.parse_args()
    counts = (4,) if asked.quick else (1, 2, 4, 8)
    print(f"{'micro-batches':14}" + "".join(f"{m:>8}" for m in counts))
    for way in WAYS:
        found = [bubble(way, asked.stages, m, asked.choices) for m in counts]
        print(f"{way:14}" + "".join(f"{each:8.1%}" for each in found))


if __name__ == "__main__":
    main()
