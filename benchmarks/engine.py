"""Step time of our engine compared with torch.distributed.pipelining, measured alternately in one run.

Emulated stages sleep for their forward and backward time, so that two cores can stand for eight devices. They are valid
for order, transport and overhead, but not for anything else. Empty stages take no time, so that only the time of the
engine remains. The GPT is a real model with two stages of one thread each.

By default, our engine sends through shared memory on one host, and torch sends through gloo. A third side is our engine
with gloo. torch keeps no outputs (`return_outputs=False`), like our engine.

- *simulated* is the simulated step with the configured times of the stages. For the GPT it uses the medians of the
  times that the engine recorded, including messages and gaps between computations.
- *predicted* is the simulated step with the configured times of the stages and with the additional time of the engine,
  which is measured in another setting: 1F1B with `LEARNING` micro-batches on the same number of ranks. `sim_error` is
  the largest relative error of the prediction.
- *overhead* is the step time beyond the simulated time, for each forward or backward of a rank. For the GPT, the
  overhead depends on the variation of layer times: a rank that waits for two others waits for the slower one, which
  medians do not reflect. Two more numbers are therefore reported. *beyond own* is the time beyond a simulation of each
  step with its own recorded computations and messages and with the median gap. *beyond computing* is the time beyond a
  simulation of each step with its own forwards and backwards only. It contains messages and gaps, which is all that the
  engine adds.

    python benchmarks/engine.py [--quick] [--json] [--rounds N]
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.fidelity import Links, Overheads
from benchmarks.harness.emulated import EmulatedLayer, EmulatedStep, join_ranks, sleeping_layer
from benchmarks.harness.report import describe_machine, make_parser
from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Engine, FailureWatch, Item, Stage, make_transport
from lightning_pipes.ir import COMPUTE_KINDS, Plan, Schedule, Span, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import Timeline, simulate
from lightning_pipes.sim.timeline import Event
from lightning_pipes.testing.ranks import run_ranks

FORWARD, BACKWARD = 0.005, 0.010
EDGE_FLOATS = 64 * 1024 // 4
BLOCKS = 16
"""The number of equal transformer blocks of the model "blocks"."""
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "v": ScheduleZBVZeroBubble,
}
"""The schedule of torch for each of our schedules. For "v", it is ZB-V."""
WARM_UP = 2
LEARNING = 6
"""The number of micro-batches in the training that measures the additional time of the engine."""


@dataclass(frozen=True)
class Cell:
    """One comparison of our engine and torch with the same schedule.

    Attributes:
        schedule: the name of the schedule.
        ranks: the number of processes.
        microbatches: the number of micro-batches in a batch.
        model: "emulated", "empty", "gpt", "blocks" for equal transformer blocks, or "learning" for the training that
            measures the engine's own time.
        settings: the names and values of the settings of the schedule.
        separable: whether input and weight gradients of emulated stages take half of the backward each, and can be
            computed separately.
        scale: the factor of the times of emulated stages.
        recompute: whether all stages except the last one recompute: "early" for before the gradient arrives, "late" for
            afterwards, or an empty text.
    """

    schedule: str
    ranks: int
    microbatches: int
    model: str = "emulated"
    settings: tuple[tuple[str, Any], ...] = ()
    separable: bool = False
    scale: float = 1.0
    recompute: str = ""

    @cached_property
    def made_schedule(self) -> Schedule:
        """The schedule with its settings."""
        schedule = make_schedule(self.schedule, **dict(self.settings))
        assert isinstance(schedule, Schedule)
        return schedule

    @property
    def stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return len(self.made_schedule.place_stages(self.ranks)) // self.ranks

    @property
    def rows(self) -> int:
        """The number of samples in a batch."""
        return self.microbatches * (2 if self.model == "gpt" else 1)

    @property
    def seconds(self) -> tuple[float, float]:
        """The forward and backward seconds of an emulated stage. The stages of one rank share its time."""
        if self.model == "empty":
            return 0.0, 0.0
        share = self.scale / self.stages_per_rank
        return share * FORWARD, share * BACKWARD

    @property
    def learning(self) -> bool:
        """Whether the cell only measures the engine's own time, without a comparison with torch."""
        return self.model == "learning"

    @cached_property
    def plan(self) -> Plan:
        """The plan, with its stages and micro-batches."""
        where = self.made_schedule.place_stages(self.ranks)
        again = [bool(self.recompute) and s < len(where) - 1 for s in range(len(where))]
        plan = Plan.even(len(where), self.microbatches, self.rows, where, recompute=again if self.recompute else ())
        return adapt_plan(replace(plan, early_recompute=self.recompute == "early"), self.made_schedule)

    def costs(self, links: Links, overheads: Overheads | None) -> CostModel:
        """Return the costs that are known before the training.

        Args:
            links: the links between ranks.
            overheads: the additional time of the engine, or None for the configured times only.
        """
        costs = CostModel.uniform(self.plan.n_stages, *self.seconds)
        if overheads is None:
            return costs
        seconds = {
            (kind, stage): tuple((rows, t + overheads.computation.get(kind, 0.0)) for rows, t in table)
            for (kind, stage), table in costs.seconds.items()
        }
        link = replace(costs.link, latency=overheads.message)
        return replace(costs, seconds=seconds, links=links, link=link, overhead=overheads.between)


@dataclass(frozen=True)
class Row:
    """The results of one cell. Times are in seconds, as medians over the rounds.

    Attributes:
        cell: the cell.
        ours: a step of our engine, with its default transport.
        torch: a step of torch.
        ratio: ours over torch.
        ratio_low, ratio_high: the quartiles of this ratio.
        gloo: ours over torch, both with gloo.
        efficiency: the computing time of the busiest rank over the step.
        overhead: the step beyond the simulated one, for each forward or backward of a rank.
        simulated: the simulated step.
        predicted: the predicted step, or None if the cell is not emulated.
        computing: the step beyond its own computations, for each forward or backward of a rank.
        own: the step beyond its own computations and messages, for each forward or backward of a rank.
    """

    cell: Cell
    ours: float
    torch: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gloo: float
    efficiency: float
    overhead: float
    simulated: float
    predicted: float | None
    computing: float
    own: float


class Block(nn.Module):
    """A pre-norm transformer block with causal attention. Its input and output have shape (samples, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, w))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Computes logits of shape (samples, classes, tokens), as cross entropy expects them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).transpose(1, 2)  # type: ignore[no-any-return]


def gpt_parts(stages: int, width: int = 128, blocks: int = 8) -> list[nn.Sequential]:
    """Return a byte-level GPT in `stages` parts."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(256, width), *(Block(width, 4) for _ in range(blocks)), Head(width)]
    cuts = [round(i * len(layers) / stages) for i in range(stages + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]


def make_problem(cell: Cell) -> tuple[list[nn.Module], torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    """Return the modules of all stages, the batch, the target and the loss function."""
    n = cell.plan.n_stages
    parts: list[nn.Module]
    torch.manual_seed(1)
    if cell.model == "gpt":
        x = torch.randint(256, (cell.rows, 96))
        return list(gpt_parts(n)), x, torch.randint(256, x.shape), nn.functional.cross_entropy
    if cell.model == "blocks":
        parts = [nn.Sequential(*(Block(64, 2) for _ in range(BLOCKS // n))) for _ in range(n)]
        return parts, torch.randn(cell.rows, 64, 64), torch.zeros(cell.rows), lambda output, target: output.mean()
    forward, backward = cell.seconds
    layer = sleeping_layer(forward, backward, backward / 2 if cell.separable else 0.0)
    parts = [EmulatedLayer(layer) for _ in range(n)]
    x = torch.randn(cell.rows, EDGE_FLOATS)
    return parts, x, torch.zeros(cell.rows), lambda output, target: output.mean()


def make_stages(cell: Cell, rank: int) -> list[Stage]:
    """Return the stages of one rank, which contain their batch."""
    parts, x, target, loss = make_problem(cell)

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
        if stage.number < len(parts) - 1:
            return out
        return loss(out, target[span.start : span.stop]) * (span.rows / item.rows)

    return [Stage(s, {s: parts[s]}, body) for s in cell.plan.stages[rank]]


def make_ours(cell: Cell, rank: int, watch: FailureWatch, kind: str) -> tuple[Callable[[int], None], Engine]:
    """Return a function that runs one step of our engine, and the engine.

    Args:
        cell: the cell.
        rank: the rank of this process.
        watch: the failure watch of this rank.
        kind: the kind of transport, "auto" or "gloo".
    """
    plan = cell.plan
    transport = make_transport(plan, rank, range(cell.ranks), torch.device("cpu"), watch, kind)
    program = cell.made_schedule.program(plan)
    engine = Engine(plan, program, make_stages(cell, rank), transport, rank=rank, watch=watch)

    def step(number: int) -> None:
        engine.inject(Item(number, cell.rows))
        engine.drain()

    return step, engine


def make_torch(cell: Cell, rank: int) -> tuple[Callable[[int], None], Any]:
    """Return a function that runs one step of torch's schedule through its public API, and the schedule."""
    parts, x, target, loss = make_problem(cell)
    stages = [PipelineStage(parts[s], s, len(parts), torch.device("cpu")) for s in cell.plan.stages[rank]]
    kind = TORCH_SCHEDULES[cell.schedule]
    schedule = kind(stages if cell.stages_per_rank > 1 else stages[0], cell.microbatches, loss_fn=loss)

    def step(number: int) -> None:
        arguments = (x,) if rank == 0 else ()
        if any(stage.is_last for stage in stages):
            schedule.step(*arguments, target=target, return_outputs=False)
        else:
            schedule.step(*arguments, return_outputs=False)

    return step, schedule


def rank_main(rank: int, cells: list[Cell], rounds: int) -> list[dict[str, Any]]:
    """Run all sides of all cells on this rank.

    Returns:
        For each cell, the start and end of each step by side, and the events that the engine recorded.
    """
    watch = join_ranks(rank)
    found = []
    for cell in cells:
        ours, engine = make_ours(cell, rank, watch, "auto")
        sides, engines = {"ours": ours}, [engine]
        if not cell.learning:
            sides["gloo"], other = make_ours(cell, rank, watch, "gloo")
            sides["torch"], _ = make_torch(cell, rank)
            engines.append(other)
        spans: dict[str, list[tuple[int, int]]] = {side: [] for side in sides}
        windows: list[list[Event]] = []
        for number in range(WARM_UP + rounds):
            for side in list(sides) if number % 2 else reversed(sides):
                dist.barrier()
                started = time.monotonic_ns()
                sides[side](number)
                spans[side].append((started, time.monotonic_ns()))
            windows.append(engine.events)
        for each in engines:
            each.close()
        found.append({"spans": spans, "windows": windows[WARM_UP:]})
    watch.close()
    return found


def busiest(cell: Cell, by_rank: list[dict[str, Any]]) -> float:
    """Return the seconds for which the busiest rank computes in a step."""

    def of(rank: int, window: list[Event]) -> int:
        return sum(e.end - e.start for e in window if e.rank == rank and e.instruction.kind in "FB")

    return max(statistics.median(of(n, w) for w in r["windows"]) for n, r in enumerate(by_rank)) / 1e9


def learned(cell: Cell, by_rank: list[dict[str, Any]]) -> Overheads:
    """Return the additional time of the engine, from the results of a learning cell."""
    steps = [EmulatedStep((), tuple(map(tuple, r["windows"]))) for r in by_rank]
    return Overheads.of([(cell, steps)], {})


def evaluate(cell: Cell, by_rank: list[dict[str, Any]], overheads: Overheads) -> Row:
    """Return the row of a cell, from the measurements of all ranks."""

    def steps(side: str) -> list[float]:
        each = zip(*(r["spans"][side][WARM_UP:] for r in by_rank), strict=True)
        return [(max(end for _, end in s) - min(start for start, _ in s)) / 1e9 for s in each]

    ours, gloo, peer = steps("ours"), steps("gloo"), steps("torch")
    ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
    quarter = len(ratios) // 4
    plan = cell.plan
    program = cell.made_schedule.program(plan)
    timelines = [Timeline.from_ranks(w, plan) for w in zip(*(r["windows"] for r in by_rank), strict=True)]
    measured = CostModel.from_timelines(timelines)
    alone = CostModel({key: table for key, table in measured.seconds.items() if key[0] in COMPUTE_KINDS})

    def takes(costs: CostModel) -> float:
        return simulate(program, plan, costs).makespan / 1e9

    def beyond(simulated: Sequence[float]) -> float:
        return statistics.median(a - b for a, b in zip(ours, simulated, strict=True)) / each

    own = [measured.with_recorded_times(t).each for t in timelines]
    computing = [takes(replace(alone, each={i: s for i, s in e.items() if i.kind in COMPUTE_KINDS})) for e in own]
    simulated = takes(measured if cell.model == "gpt" else cell.costs({}, None))
    emulated = cell.model == "emulated"
    step, each = statistics.median(ours), 2 * cell.microbatches * cell.stages_per_rank
    return Row(
        cell,
        step,
        statistics.median(peer),
        statistics.median(ratios),
        ratios[quarter],
        ratios[-1 - quarter],
        statistics.median(a / b for a, b in zip(gloo, peer, strict=True)),
        busiest(cell, by_rank) / step,
        (step - simulated) / each,
        simulated,
        takes(cell.costs({}, overheads)) if emulated else None,
        beyond(computing),
        beyond([takes(replace(measured, each=e)) for e in own]),
    )


def measure(cells: list[Cell], rounds: int) -> list[Row]:
    """Measure all cells and return their rows. Cells with the same number of ranks share one set of processes."""
    rows: dict[Cell, Row] = {}
    for ranks in sorted({c.ranks for c in cells}):
        learning = Cell("1f1b", ranks, LEARNING, "learning")
        group = [c for c in cells if c.ranks == ranks]
        found = run_ranks(rank_main, ranks, [learning, *group], rounds, timeout=1800)
        overheads = learned(learning, [r[0] for r in found])
        for number, cell in enumerate(group, start=1):
            rows[cell] = evaluate(cell, [r[number] for r in found], overheads)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [rows[c] for c in cells]


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [
        "model     schedule     S   M   ours ms  torch ms  ratio (quartiles)    both gloo  efficiency  overhead us"
        "  simulated ms  predicted ms"
    ]
    for r in rows:
        c = r.cell
        lines.append(
            f"{c.model:9} {c.schedule:11} {c.ranks:2} {c.microbatches:3} {1e3 * r.ours:9.1f} {1e3 * r.torch:9.1f}"
            f"  {r.ratio:.3f} ({r.ratio_low:.3f}-{r.ratio_high:.3f}) {r.gloo:10.3f} {r.efficiency:11.3f}"
            f" {1e6 * r.overhead:12.0f} {1e3 * r.simulated:13.1f} "
            + ("            -" if r.predicted is None else f"{1e3 * r.predicted:13.1f}")
        )
    return "\n".join(lines)


def headline(rows: list[Row]) -> dict[str, float]:
    """Return the headline numbers of the engine."""
    by = {(r.cell.model, r.cell.schedule, r.cell.ranks, r.cell.microbatches): r for r in rows}
    emulated = [r for r in rows if r.cell.model == "emulated"]
    gpt = [r for r in rows if r.cell.model == "gpt"]
    plain = by["emulated", "1f1b", 4, 16]
    return {
        "vs_torch_1f1b": plain.ratio,
        "vs_torch_gpipe": by["emulated", "gpipe", 4, 16].ratio,
        "vs_torch_empty": by["empty", "1f1b", 2, 16].ratio,
        "vs_torch_gpt": max(r.ratio for r in gpt),
        "vs_torch_gloo": max(r.gloo for r in emulated + gpt),
        "worst_cell": max(r.ratio for r in emulated),
        "overhead_us": 1e6 * max(r.overhead for r in gpt),
        "beyond_own_us": 1e6 * max(r.own for r in gpt),
        "beyond_computing_us": 1e6 * max(r.computing for r in gpt),
        "empty_us": 1e6 * by["empty", "1f1b", 2, 16].computing,
        "emulated_overhead_us": 1e6 * plain.overhead,
        "sim_error": max(abs(r.ours - r.predicted) / r.ours for r in emulated if r.predicted is not None),
    }


def main() -> None:
    """Measure the cells and print the table."""
    parser = make_parser(__doc__, "only S=4 and M=16, another cell, and the GPT; within 120 s")
    parser.add_argument("--rounds", type=int, default=15, help="the number of steps of each side in a cell")
    options = parser.parse_args()
    if options.quick:
        cells = [Cell("1f1b", 4, 16), Cell("gpipe", 4, 16), Cell("interleaved", 4, 16), Cell("1f1b", 2, 8)]
    else:
        kinds = ("gpipe", "1f1b", "interleaved")
        cells = [Cell(k, s, m) for s in (2, 4, 8) for m in (8, 16, 32) for k in kinds]
    cells.append(Cell("1f1b", 2, 16, "empty"))
    cells += [Cell(k, 2, 16, "gpt") for k in (("1f1b",) if options.quick else ("gpipe", "1f1b"))]
    rows = measure(cells, options.rounds)
    print(f"{describe_machine()}, torch {torch.__version__}, Python {platform.python_version()}; ")
    print(
        f"emulated stages sleep {1e3 * FORWARD:.0f} ms forward, {1e3 * BACKWARD:.0f} ms backward; "
        f"{options.rounds} rounds"
    )
    print(table(rows))
    if options.json:
        print(json.dumps(headline(rows)))


if __name__ == "__main__":
    main()
