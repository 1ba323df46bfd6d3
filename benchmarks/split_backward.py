"""The cost of computing input and weight gradients separately, and the model size from which zero_bubble pays off.

The benchmark measures one stage of transformer blocks on one thread of one process, in seconds of processor time, so
that other programs have little influence. `I + W` is relative to a whole backward. The column "in two passes" is for a
W that runs through the whole graph again. The steps of 1f1b and zero_bubble are simulated with the measured times, for
equal stages and links that take no time.

    python benchmarks/split_backward.py [--quick] [--json]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.engine import Block
from benchmarks.harness.report import make_parser
from lightning_pipes.cost import CostModel
from lightning_pipes.engine.compute.autograd import SavedForward, backward, enter_stage, leave_stage
from lightning_pipes.engine.compute.split import backward_inputs
from lightning_pipes.ir import Kind, Plan, Span, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import makespan

SAMPLES, TOKENS = 2, 96
STAGES, MICROBATCHES = 4, 8


class Parts:
    """A stage whose forward and backward are timed, the backward as a whole and in two parts.

    Args:
        width: the width of the transformer blocks.
        blocks: the number of blocks.
    """

    def __init__(self, width: int, blocks: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(width, width // 32) for _ in range(blocks)))
        self.x, self.gradient = torch.randn(2, SAMPLES, TOKENS, width)

    def forward(self) -> SavedForward:
        """Run the forward pass, and return what the backward pass needs."""
        saved = SavedForward(Span(0, SAMPLES), None)
        leave_stage(self.net(enter_stage(self.x.clone(), (True,), saved)), saved)
        return saved

    def whole(self) -> tuple[float, ...]:
        """Return the seconds of F and B."""
        f, saved = timed(self.forward)
        b, _ = timed(lambda: backward([(saved, [self.gradient])], last=False))
        return f, b

    def parts(self) -> tuple[float, ...]:
        """Return the seconds of I and W."""
        saved = self.forward()
        i, left = timed(lambda: backward_inputs([(saved, [self.gradient])], last=False))
        assert not left.inseparable
        w, _ = timed(left.compute)
        return i, w

    def twice(self) -> tuple[float, ...]:
        """Return the seconds of I and W if W runs through the whole graph again."""
        saved = self.forward()
        roots: Any = list(saved.outputs)
        i, _ = timed(lambda: torch.autograd.backward(roots, [self.gradient], retain_graph=True, inputs=saved.entered))
        w, _ = timed(lambda: torch.autograd.backward(roots, [self.gradient]))
        return i, w


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of `work` and its result."""
    started = time.thread_time()
    result = work()
    return time.thread_time() - started, result


def medians(run: Callable[[], tuple[float, ...]], repeats: int) -> tuple[float, ...]:
    """Return the median of each part over several runs, without the first ones.

    Each variant runs separately, because its time would otherwise depend on the state of memory that another variant
    left.
    """
    taken = [run() for _ in range(repeats + 3)][3:]
    return tuple(statistics.median(column) for column in zip(*taken, strict=True))


def step_seconds(name: str, times: dict[Kind, float]) -> float:
    """Return the simulated seconds of a step with equal stages.

    Args:
        name: the name of the schedule.
        times: the seconds of each kind of computation.
    """
    schedule = make_schedule(name)
    plan = adapt_plan(Plan.even(STAGES, MICROBATCHES), schedule)
    costs = CostModel({(kind, s): ((1, t),) for kind, t in times.items() for s in range(STAGES)})
    return makespan(schedule.program(plan), plan, costs) / 1e9  # type: ignore[union-attr]


def measure(width: int, blocks: int, repeats: int) -> dict[str, float]:
    """Return the times of a stage, the ratios to a whole backward, and the simulated gain of zero_bubble over 1f1b."""
    parts = Parts(width, blocks)
    rounds = [[medians(run, repeats) for run in (parts.whole, parts.parts, parts.twice)] for _ in range(3)]
    best = [tuple(map(min, zip(*of_run, strict=True))) for of_run in zip(*rounds, strict=True)]
    (f, b), (i, w), (i2, w2) = best
    steps = {
        "1f1b": step_seconds("1f1b", {Kind.F: f, Kind.B: b}),
        "zero_bubble": step_seconds("zero_bubble", {Kind.F: f, Kind.I: i, Kind.W: w}),
    }
    return {
        "width": width,
        "blocks": blocks,
        "F": f,
        "B": b,
        "I": i,
        "W": w,
        "ratio": (i + w) / b,
        "ratio_two_passes": (i2 + w2) / b,
        "gain": steps["1f1b"] / steps["zero_bubble"],
    }


def main() -> None:
    """Measure stages of several sizes and print the table."""
    arguments = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    sizes = [(96, 4), (256, 4), (512, 2)][: 2 if arguments.quick else None]
    rows = [measure(width, blocks, 5 if arguments.quick else 15) for width, blocks in sizes]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"ms; {SAMPLES} samples of {TOKENS} tokens a micro-batch, {STAGES} stages, {MICROBATCHES} micro-batches")
    print("width  blocks      F      B      I      W   I + W   in two passes   1f1b / zero_bubble")
    for r in rows:
        times = " ".join(f"{r[k] * 1e3:6.1f}" for k in ("F", "B", "I", "W"))
        print(
            f"{r['width']:5} {r['blocks']:7} {times} {r['ratio']:6.2f} B {r['ratio_two_passes']:13.2f} B "
            f"{r['gain']:8.2f}"
        )


if __name__ == "__main__":
    main()
