"""The accuracy of simulated step times, and the gain of planning with the simulator.

Steps are predicted before they run. The predictions use the times of layers, which are configured for emulated layers
and measured by the profiler for real ones; the configured speed of links; and the additional time that the engine needs
for a computation and a message, which is measured in a short training.

Emulated stages sleep 20 ms forward and 40 ms backward, and send 128 KiB over links that are really shaped
(`benchmarks/netlab.py`; needs root on Linux). The byte GPT of the examples is real, with two stages of one thread each.
Its error is printed only if the measurement is valid: ranks must hardly have waited for a core while layers were
profiled and trained, and the steps must have been similar.

The tables show the predicted and the measured time of a step, and the relative error of the prediction. The other lines
show by how much the planned cut is faster than an even one, and by how much a chosen schedule is slower than the best
one.

    python benchmarks/fidelity.py [--quick] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import simulator
from benchmarks.harness.emulated import EmulatedStep, Emulation, join_ranks, run_steps, sleeping_layer, step_seconds
from benchmarks.harness.netlab import NetLab, lab_unavailable_reason
from benchmarks.harness.report import describe_machine, make_parser
from lightning_pipes.cost import Cluster, CostModel, Device, Link, ModelProfile
from lightning_pipes.engine import Item, Stage, make_transport
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.engine.messages.channel import N_POSTED_RECEIVES
from lightning_pipes.engine.messages.links import measure_links
from lightning_pipes.ir import SEND_KINDS, Kind, Plan, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import choose_option
from lightning_pipes.planning.fit import evaluate_plan, fit_layers
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import Timeline, makespan
from lightning_pipes.testing.generators import every_fit, random_problem
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.trial import waited_so_far

RANKS, MICROBATCHES = 4, 16
FORWARD, BACKWARD, MESSAGE = 0.020, 0.040, 128 * 1024
SLOWER, SLOW_RANK = 1.5, 1
WARM_UP = (RANKS,)
Links = Mapping[tuple[int, int], Link]


class Known(Protocol):
    """A training with known times of layers and links."""

    @property
    def plan(self) -> Plan:
        """The plan, with its stages and micro-batches."""

    def costs(self, links: Links, overheads: Overheads | None) -> CostModel:
        """Return the known costs of the training.

        Args:
            links: the links between ranks.
            overheads: the additional time of the engine, or None for the configured times only.
        """


@dataclass(frozen=True)
class Overheads:
    """The seconds that the engine needs in addition to the known times of layers and links.

    Attributes:
        between: seconds before a computation whose inputs are available.
        computation: seconds within a computation, by kind. A backward in two parts needs more, because it has to find
            the parts.
        message: seconds of a message from one rank to another.
    """

    between: float
    computation: Mapping[Kind, float]
    message: float

    @classmethod
    def of(cls, trainings: Sequence[tuple[Known, Sequence[EmulatedStep]]], links: Links) -> Overheads:
        """Return the mean differences between measured and known times.

        Args:
            trainings: trainings with the records of all ranks.
            links: the configured links between ranks.
        """
        between, messages, computation = [], [], {}
        for cell, found in trainings:
            timelines = [
                Timeline.from_ranks(events, cell.plan) for events in zip(*(f.events for f in found), strict=True)
            ]
            costs, told = CostModel.from_timelines(timelines), cell.costs(links, None)
            between.append(costs.overhead)
            for kind in {kind for kind, _ in costs.seconds} & {Kind.F, Kind.B, Kind.I, Kind.W}:
                # stage 0 does not need input gradients: all of its backward is in W
                stages = range(kind in (Kind.I, Kind.W), cell.plan.n_stages)
                computation[kind] = statistics.mean(
                    costs.seconds_at(kind, s, 1) - told.seconds_at(kind, s, 1) for s in stages
                )
            for kind, stage in costs.seconds:
                if kind in SEND_KINDS:
                    target = cell.plan.ranks[stage + (1 if kind is Kind.SF else -1)]
                    link = told.link_between(cell.plan.ranks[stage], target)
                    free = max(0.0, link.send_seconds(MESSAGE) - link.burst_seconds)  # the bucket is full again by then
                    messages.append(costs.seconds_at(kind, stage, 1) - free)
        return cls(statistics.mean(between), computation, max(0.0, statistics.mean(messages)))

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {1e3 * seconds:.2f}" for kind, seconds in sorted(self.computation.items()))
        return f"the engine needs {kinds}, {1e3 * self.between:.2f} between, {1e3 * self.message:.2f} a message (ms)"


@dataclass(frozen=True)
class Cell:
    """One training of emulated layers.

    Attributes:
        schedule: the schedule.
        plan: the plan, including its layers.
        profile: the times of the layers.
        slow: the rank whose device takes `SLOWER` times as long, or None.
    """

    schedule: Schedule
    plan: Plan
    profile: ModelProfile
    slow: int | None = None

    @property
    def label(self) -> str:
        """The schedule with its settings, as text."""
        return schedule_label(self.schedule)

    @property
    def speeds(self) -> tuple[float, ...]:
        """The relative speed of each rank's device."""
        return tuple(1 / SLOWER if rank == self.slow else 1.0 for rank in range(self.plan.n_ranks))

    @property
    def emulation(self) -> Emulation:
        """The training as ranks run it."""
        return Emulation(self.plan, self.schedule.program(self.plan), self.profile.layers, self.speeds)

    @property
    def cluster(self) -> Cluster:
        """The devices, connected by links that take no time."""
        return Cluster(tuple(Device(speed=speed) for speed in self.speeds))

    def costs(self, links: Links, overheads: Overheads | None) -> CostModel:
        """Return the costs that are known before the training.

        Args:
            links: the links between ranks.
            overheads: the additional time of the engine, or None for the configured times only.
        """
        links = {(a, b): links[a, b] for a, b, _ in self.plan.directed_links if (a, b) in links}
        costs = self.profile.stage_costs(self.plan.layers, [self.speeds[rank] for rank in self.plan.ranks])
        if overheads is None:
            return replace(costs, links=links)
        seconds = {
            (kind, stage): tuple((rows, t + overheads.computation.get(kind, 0.0)) for rows, t in table)
            for (kind, stage), table in costs.seconds.items()
        }
        slower = {
            pair: replace(link, latency=overheads.message, max_in_flight=N_POSTED_RECEIVES)
            for pair, link in links.items()
        }
        return replace(costs, seconds=seconds, links=slower, overhead=overheads.between)

    def predicted(self, links: Links, overheads: Overheads) -> float:
        """Return the predicted seconds of a step."""
        return makespan(self.emulation.order, self.plan, self.costs(links, overheads)) / 1e9


@dataclass(frozen=True)
class Row:
    """The predicted and the measured seconds of a step."""

    condition: str
    label: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error of the prediction. A value of 0.03 means that the prediction is 3 % too long."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        times = f"{1e3 * self.predicted:9.1f} ms {1e3 * self.measured:9.1f} ms"
        return f"{self.condition:32} {self.label:28} {times} {self.error:+7.1%}"


# Every schedule on links of several speeds


def equal_stages(name: str, slow: int | None = None, microbatches: int = MICROBATCHES, **settings: int) -> Cell:
    """Return a cell with equal stages. All stages of a rank together take `FORWARD` and `BACKWARD`."""
    schedule = made(name, **settings)
    plan = even_plan(schedule, RANKS, microbatches, microbatches)
    n, share = plan.n_stages, RANKS / plan.n_stages
    weights = share * BACKWARD / 2 if plan.split_backward else 0.0
    layer = sleeping_layer(share * FORWARD, share * BACKWARD, weights, MESSAGE)
    return Cell(schedule, replace(plan, layers=even_partition([1.0] * n, n)), ModelProfile((layer,) * n), slow)


def made(name: str, **settings: int) -> Schedule:
    """Return the schedule with a name and settings."""
    schedule = make_schedule(name, **settings)
    assert isinstance(schedule, Schedule)
    return schedule


def schedules(quick: bool, slow: int | None) -> list[Cell]:
    """Return a cell for each schedule. kfkb with k = 1 is left out because it is the same as 1f1b."""
    names: list[tuple[str, dict[str, int]]] = [
        ("1f1b", {}),
        ("kfkb", {"k": 2}),
        ("interleaved", {}),
        ("zero_bubble", {}),
    ]
    if not quick:
        names = [("gpipe", {}), *names, ("kfkb", {"k": 3}), ("kfkb", {"k": 4})]
    return [equal_stages(name, slow, **settings) for name, settings in names]


def emulated_rows(lab: NetLab, overheads: Overheads, quick: bool) -> Iterator[Row]:
    """Yield rows for all schedules on links of several speeds, also with a slow rank."""
    conditions: list[tuple[float, int | None]] = [(0.005, None), (0.020, None), (0.005, SLOW_RANK)]
    for transfer, slow in conditions if quick else [(0.0, None), *conditions]:
        lab.shape(MESSAGE / transfer if transfer else None)
        cells = schedules(quick, slow)
        condition = f"transfers of {1e3 * transfer:.0f} ms" + (f", rank {slow} slower" if slow is not None else "")
        for cell, measured in zip(cells, medians(lab, cells, quick), strict=True):
            yield Row(condition, cell.label, cell.predicted(lab.links, overheads), measured)


def calibrated(lab: NetLab) -> Overheads:
    """Measure the additional time of the engine.

    The measurement uses a smaller number of micro-batches and another link speed than all trainings that are predicted
    from it.
    """
    lab.shape(MESSAGE / 0.010)
    cells = [equal_stages(name, microbatches=MICROBATCHES // 2) for name in ("zero_bubble", "1f1b")]
    return Overheads.of(list(zip(cells, train(lab, cells, steps(quick=False)), strict=True)), lab.links)


def steps(quick: bool) -> int:
    """Return the number of steps in each training."""
    return 2 if quick else 3


def medians(lab: NetLab, cells: Sequence[Cell], quick: bool) -> list[float]:
    """Return the median seconds of a step of each cell."""
    return [statistics.median(step_seconds(found)) for found in train(lab, cells, steps(quick))]


def train(lab: NetLab, cells: Sequence[Cell], steps: int) -> list[list[EmulatedStep]]:
    """Train all cells, and return the records of all ranks for each cell."""
    found = lab.run_ranks(rank_main, [cell.emulation for cell in cells], steps, timeout=900)
    return [[of_rank[n] for of_rank in found] for n in range(len(cells))]


def rank_main(rank: int, emulations: list[Emulation], steps: int) -> list[EmulatedStep]:
    """Run the trainings on this rank, and return its record of each one."""
    watch = join_ranks(rank)
    found = [run_steps(e.plan, e.order, e.stages(rank), rank, watch, steps, WARM_UP) for e in emulations]
    watch.close()
    return found


# Real layers


@dataclass(frozen=True)
class Real:
    """The results of one rank of the GPT.

    Attributes:
        profile: the times of the layers, measured before the training.
        plan: the plan.
        links: the links, measured before the training.
        empty: the record of a training with stages that take no time.
        steps: the record of the training.
        waited: the share of the time for which the rank waited for a core, during profiling and training.
    """

    profile: ModelProfile
    plan: Plan
    links: Links
    empty: EmulatedStep
    steps: EmulatedStep
    waited: float


WAITED, SCATTERED = 0.02, 0.1
"""The limits for a valid measurement.

They are the share of the time for which a rank may wait for a core, and the range of the middle half of the steps
relative to the median.
"""
GPT_ROWS, GPT_MICROBATCHES = 16, 8


def empty_stages() -> Cell:
    """Return a cell with two stages that take no time, so that only the time of the engine remains."""
    schedule, layer = made("1f1b"), sleeping_layer(0.0, 0.0)
    plan = replace(even_plan(schedule, 2, GPT_MICROBATCHES, GPT_MICROBATCHES), layers=even_partition([1.0] * 2, 2))
    return Cell(schedule, plan, ModelProfile((layer,) * 2))


def gpt_plan(layers: Sequence[nn.Module]) -> Plan:
    """Return the default plan of the strategy, with stages of similar numbers of parameters."""
    parameters = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    return replace(Plan.even(2, GPT_MICROBATCHES, GPT_ROWS), layers=even_partition(parameters, 2))


class Loss(nn.Module):
    """The loss of the first rows of a batch."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x.flatten(0, -2), self.target[: len(x)].flatten())


def gpt_main(rank: int, steps: int) -> Real:
    """Profile the layers on all ranks at the same time, measure the links, and train the GPT."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from models import GPT

    watch = join_ranks(rank, realtime=False)
    began, waited = time.monotonic_ns(), waited_so_far()
    torch.manual_seed(0)
    layers = list(GPT(blocks=6).layers)
    x, target = torch.randint(256, (2, GPT_ROWS, 128))
    plan = gpt_plan(layers)
    mine = {n: layers[n] for n in range(plan.layers[rank].start, plan.layers[rank].stop)}
    optimizer = torch.optim.AdamW([p for layer in mine.values() for p in layer.parameters()])
    rows = GPT_ROWS // GPT_MICROBATCHES
    dist.barrier()
    found = profile_layers([*layers, Loss(target)], {rows: x[:rows]}, optimizer=optimizer, repeats=9)
    profile = replace(found, layers=found.layers[:-1], after=found.layers[-1])
    dist.barrier()
    transport = make_transport(plan, rank, range(2), torch.device("cpu"), watch)
    links = measure_links(plan, rank, transport)
    transport.close()
    cell = empty_stages()
    empty = run_steps(
        cell.plan, cell.emulation.order, cell.emulation.stages(rank), rank, watch, steps, 5 * [cell.plan.jobs[0].rows]
    )

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
        if stage.number == 0:
            return out
        loss = nn.functional.cross_entropy(out.flatten(0, -2), target[span.start : span.stop].flatten())
        return loss * (span.rows / item.rows)

    def update(item: Item) -> None:
        optimizer.step()
        optimizer.zero_grad()

    order = made("1f1b").program(plan)
    trained = run_steps(plan, order, [Stage(rank, mine, body, update)], rank, watch, steps, 5 * [plan.jobs[0].rows])
    watch.close()
    share = (waited_so_far() - waited) / (time.monotonic_ns() - began)
    return Real(profile, plan, links, empty, trained, share)


def gpt_row(steps: int) -> Row | str:
    """Return the row of the byte GPT in two stages, or the reason why its measurement is not valid."""
    found = run_ranks(gpt_main, 2, steps, timeout=300)
    overheads = Overheads.of([(empty_stages(), [r.empty for r in found])], {})
    each = overheads.between + statistics.mean(overheads.computation.values())
    profile, plan = replace(found[0].profile, overhead=each), found[0].plan
    links = {pair: link for r in found for pair, link in r.links.items()}
    order = made("1f1b").program(plan)
    predicted = evaluate_plan(profile, order, plan, Cluster((Device(),) * 2, links=links)).seconds
    took = step_seconds([r.steps for r in found])
    low, measured, high = statistics.quantiles(took)
    waited = max(r.waited for r in found)
    if waited > WAITED or high - low > SCATTERED * measured:
        return (
            f"real, byte GPT, 2 stages: not valid, ranks waited for a core for {waited:.0%} of the time, and the "
            f"middle half of the steps took {1e3 * low:.0f} to {1e3 * high:.0f} ms; repeat it on a quiet machine"
        )
    return Row("real, byte GPT, 2 stages", "1f1b", predicted, measured)


# The gain of planning with the simulator


@dataclass(frozen=True)
class Candidate:
    """One way to train a problem of `CHOICES`.

    Attributes:
        cell: the training.
        predicted: the predicted seconds of a step.
        measured: the measured seconds of a step.
        chosen: whether the planner chose this candidate.
    """

    cell: Cell
    predicted: float
    measured: float
    chosen: bool

    def __str__(self) -> str:
        name = f"{self.cell.label}, {len(self.cell.plan.spans(Kind.F, 0))} micro-batches"
        times = f"{1e3 * self.predicted:9.1f} ms {1e3 * self.measured:9.1f} ms"
        return f"    {name:48} {times}{'   chosen' if self.chosen else ''}"


CHOICES: tuple[tuple[str, float, int | None], ...] = (
    ("fast links", 0.0005, None),
    ("slow links", 0.008, None),
    ("slow links, rank 1 slower", 0.004, SLOW_RANK),
)
"""Problems: a name, the seconds of a message for a sixteenth of a batch, and the slow rank."""
LAYERS, ROWS, NUMBERS = 8, 16, (8, 16)


def choice_layers() -> ModelProfile:
    """Return layers whose times are not proportional to rows, so that many small micro-batches also have a cost."""
    forward, backward, half = (tuple((rows, t * (1 + rows)) for rows in (1, ROWS)) for t in (1e-3, 2e-3, 1e-3))
    layer = replace(sleeping_layer(1.0, 2.0, 1.0, MESSAGE), forward=forward, backward=backward)
    return ModelProfile((replace(layer, input_backward=half, weight_backward=half),) * LAYERS)


def regret_measured(lab: NetLab, overheads: Overheads, quick: bool) -> Iterator[tuple[str, list[Candidate]]]:
    """Yield the name and the candidates of each problem."""
    given = [made("gpipe"), made("1f1b"), made("kfkb", k=2), made("interleaved"), made("zero_bubble")]
    for name, transfer, slow in CHOICES[2:] if quick else CHOICES:
        lab.shape(MESSAGE / transfer)
        nothing = Cell(given[0], even_plan(given[0], RANKS, 1, 1), choice_layers(), slow)
        links = {pair: replace(link, latency=overheads.message) for pair, link in lab.links.items()}
        profile = replace(nothing.profile, overhead=overheads.between + overheads.computation[Kind.F])
        cluster = replace(nothing.cluster, links=links)
        best = choose_option(profile, RANKS, ROWS, cluster, given, microbatches=NUMBERS, recompute=(False,)).best
        fits = {
            (schedule, m): fit_layers(profile, schedule, even_plan(schedule, RANKS, m, ROWS), cluster)
            for schedule in given
            for m in NUMBERS
        }
        cells = [replace(nothing, schedule=schedule, plan=fit.plan) for (schedule, _), fit in fits.items()]
        yield (
            name,
            [
                Candidate(cell, cell.predicted(lab.links, overheads), t, key == (best.schedule, best.microbatches))
                for key, cell, t in zip(fits, cells, medians(lab, cells, quick), strict=True)
            ],
        )


def regret(candidates: Sequence[Candidate]) -> float:
    """Return the relative difference between the chosen candidate and the best one. A value of 0.02 means 2 %."""
    (chosen,) = [c.measured for c in candidates if c.chosen]
    return chosen / min(c.measured for c in candidates) - 1


def regret_simulated(problems: int) -> list[float]:
    """Return the relative difference between the choice and the best option, for each of several random problems."""
    found = []
    for seed in range(problems):
        p = random_problem(seed)
        best = min(fit.seconds for fit in every_fit(p))
        found.append(choose_option(p.profile, p.ranks, p.rows, p.cluster).fit.seconds / best - 1)
    return found


PROBLEMS = 20
MANY = 44
"""The number of layers. It can be divided by speed: 12, 8, 12 and 12 layers if rank 1 takes 1.5 times as long."""


@dataclass(frozen=True)
class Partitions:
    """Results for a model with a slow rank.

    Attributes:
        even: the layers cut evenly by parameters.
        planned: the layers cut by the planner.
        ideal: seconds of a step that no partition can beat, with work in proportion to the speeds of ranks.
    """

    even: Row
    planned: Row
    ideal: float

    @property
    def gain(self) -> float:
        """The speedup of the planned cut over the even one. With a value of 1.2, it takes a sixth less time."""
        return self.even.measured / self.planned.measured

    @property
    def beyond_ideal(self) -> float:
        """The relative difference from total work over the sum of speeds: 0.02 means that a step takes 2 % longer."""
        return self.planned.measured / self.ideal - 1


def partitions(lab: NetLab, overheads: Overheads, quick: bool) -> Partitions:
    """Measure the even and the planned cut on links without a limit, with a slow rank."""
    lab.shape(None)
    schedule, share = made("1f1b"), RANKS / MANY
    plan = even_plan(schedule, RANKS, MICROBATCHES, MICROBATCHES)
    profile = ModelProfile((sleeping_layer(share * FORWARD, share * BACKWARD, 0.0, MESSAGE),) * MANY)
    even = Cell(schedule, replace(plan, layers=even_partition([1.0] * MANY, RANKS)), profile, SLOW_RANK)
    planned = replace(even, plan=fit_layers(profile, schedule, plan, even.cluster).plan)
    rows = [
        Row(f"rank {SLOW_RANK} slower, {title}", "1f1b", cell.predicted(lab.links, overheads), measured)
        for title, cell, measured in zip(
            ("even cut", "planned cut"), (even, planned), medians(lab, [even, planned], quick), strict=True
        )
    ]
    work = RANKS * (FORWARD + BACKWARD)
    return Partitions(rows[0], rows[1], (MICROBATCHES + RANKS - 1) * work / sum(even.speeds))


# The whole benchmark


def on_shaped_links(quick: bool) -> dict[str, float]:
    """Print the results with emulated layers, and return the headline numbers."""
    with NetLab(RANKS) as lab:
        overheads = calibrated(lab)
        print(f"emulated layers; {overheads}")
        print(f"{'':61} {'predicted':>12} {'measured':>12}   error")
        rows = []
        for row in emulated_rows(lab, overheads, quick):
            rows.append(row)
            print(row, flush=True)
        cuts = partitions(lab, overheads, quick)
        print(cuts.even, cuts.planned, sep="\n")
        print(f"planned cut {cuts.gain:.2f} times as fast, {cuts.beyond_ideal:+.1%} from work over the sum of speeds")
        regrets = []
        for name, candidates in regret_measured(lab, overheads, quick):
            regrets.append(regret(candidates))
            print(f"choice with {name}: {regrets[-1]:.1%} slower than the best measured")
            print(*candidates, sep="\n", flush=True)
    return {
        "worst_error_emulated": max(abs(row.error) for row in rows),
        "auto_regret_measured": max(regrets),
        "auto_partition_gain": cuts.gain,
        "auto_partition_beyond_ideal": cuts.beyond_ideal,
    }


def main() -> None:
    """Measure the GPT and the emulated layers, and print the results."""
    options = make_parser(__doc__, "fewer cells; within 120 s").parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # suppresses a warning about hosts without a name server
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{describe_machine()}, {versions}; medians of {steps(options.quick)} steps")
    gpt = gpt_row(9 if options.quick else 21)
    print(gpt)
    if reason := lab_unavailable_reason():
        print(f"without measurements on shaped links: {reason}")
    headline = {} if reason else on_shaped_links(options.quick)
    simulated = regret_simulated(PROBLEMS)
    print(f"choice in {PROBLEMS} random problems: at most {max(simulated):.2%} slower than the best simulated")
    times = simulator.measure(quick=True)
    headline |= {"worst_error_gpt": abs(gpt.error)} if isinstance(gpt, Row) else {}
    headline |= {"auto_regret": max(simulated)}
    headline |= {key: times[key].median for key in ("sim_us_fixed", "sim_us_dispatch")}
    print(", ".join(f"{key} {headline[key]:.1f}" for key in ("sim_us_fixed", "sim_us_dispatch")))
    if options.json:
        print(json.dumps(headline))


if __name__ == "__main__":
    main()
