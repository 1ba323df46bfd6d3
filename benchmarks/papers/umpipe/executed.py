"""Executed unequal micro-batches, on emulated stages with the times of real layers, and with real layers.

The forward and backward times of layers are measured on this machine with one thread, for several numbers of samples.
Emulated stages sleep for these times, so that two cores can stand for four devices. These measurements are valid for
order, transport and overhead, but not for anything else. The compared orders take turns in the same processes.

The overhead of the engine for a computation is measured before planning, in a separate training for each network: GPipe
with `LEARNING` equal micro-batches, which is not part of the table.

The real layers are convolutions followed by recurrent layers, which ordinary Trainers train on two processes. All
schedules train the same model from the same weights, in turns. The table shows the least and the median time of their
steps. The stages are cut by hand between the two kinds of layers, so that the schedules only differ in their
micro-batches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.emulated import (
    EmulatedStep,
    Emulation,
    join_ranks,
    request_realtime_priority,
    run_steps,
    step_seconds,
)
from benchmarks.harness.report import QUIET, hush
from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile, Table
from lightning_pipes.engine.compute.profiler import joining_seconds, profile_layers
from lightning_pipes.ir import Kind, Policy, Schedule
from lightning_pipes.planning.auto import installed_variants
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers, improve_cuts
from lightning_pipes.planning.planner import Problem, even_plan, solve_plan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.umpipe import UM1F1B, UMPipe
from lightning_pipes.testing.ranks import run_ranks

RANKS = 4
ROWS = 64
NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 22, 32, 64)
"""Numbers of equal micro-batches.

They cover all sizes that micro-batches of a batch of 64 samples can have, except for some sizes that are close to each
other.
"""
SIZES = (1, 2, 4, 8, 16, 32, 64)
MESSAGE = 4096
"""Bytes of a sample in a message."""
LINK = Link(2e9, 1e-4)
LEARNING = 8
"""The number of micro-batches in the training that measures the overhead of the engine."""
MOST = 2e-3
"""The largest overhead of the engine for a computation, in seconds."""
STRETCH = 8.0
"""The ratio between the times of emulated and real layers.

A sleep is accurate to some tens of microseconds.
"""


class Recurrent(nn.Module):
    """A recurrent layer over short sequences. Its time hardly depends on the number of samples."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.cell = steps, nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.cell(x.reshape(len(x), self.steps, -1))[0]
        return out.reshape(x.shape)


class Scale(nn.Module):
    """A layer with one parameter that takes almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Convolution(nn.Module):
    """A convolution over small images. Its time grows with the number of samples."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.shape = (channels, side, side)
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x.reshape(len(x), *self.shape))).reshape(x.shape)


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "convolution": (lambda: Convolution(24, 16), 24 * 16 * 16),
    "recurrent": (lambda: Recurrent(32, 24), 32 * 24),
}
LAYERS["convolutions"] = (lambda: nn.Sequential(*[Convolution(24, 16) for _ in range(2)]), 24 * 16 * 16)
LAYERS["recurrents"] = (lambda: nn.Sequential(*[Recurrent(32, 24) for _ in range(2)]), 32 * 24)
"""For each kind of layer, a function that creates it, and the number of values of a sample."""
NETWORKS = {
    "6 convolutions, 2 recurrent": ("convolution",) * 6 + ("recurrent",) * 2,
    "the same in pairs": ("convolutions",) * 3 + ("recurrents",),
    "recurrent at both ends": ("recurrent", *("convolution",) * 6, "recurrent"),
    "8 convolutions": ("convolution",) * 8,
}


def measured(kind: str, repeats: int) -> LayerProfile:
    """Return the stretched times of a layer by number of samples, including both parts of a split backward."""
    torch.manual_seed(0)
    make, width = LAYERS[kind]
    inputs = {rows: torch.randn(rows, width) for rows in SIZES}
    before = Scale()  # its gradient makes the layer compute input gradients
    _, layer = profile_layers([before, make()], inputs, split=True, repeats=repeats).layers
    output = ((1, float(MESSAGE)), (ROWS, float(MESSAGE * ROWS)))
    return LayerProfile(
        kind,
        stretched(layer.forward),
        stretched(layer.backward),
        stretched(layer.input_backward),
        stretched(layer.weight_backward),
        gradient_bytes=4,
        output=output,
    )


def stretched(table: Table) -> Table:
    """Return a table of times for an emulated layer."""
    return tuple((rows, STRETCH * seconds) for rows, seconds in table)


Schedules = Callable[[int], Iterable[Schedule | Policy]]
"""A function that returns schedules, given the number of micro-batches."""


def equal_best(
    profile: ModelProfile, place: Deployment, schedules: Callable[[int], Iterable[Schedule | Policy]]
) -> Fit:
    """Return the fastest schedule with equal micro-batches in simulations.

    All numbers of micro-batches are tried, and each schedule has its own cut of the layers.
    """
    found: list[Fit] = []
    for m in NUMBERS:
        for schedule in schedules(m):
            if len(profile.layers) < len(schedule.place_stages(RANKS)):
                continue
            fit = fit_layers(profile, schedule, even_plan(schedule, RANKS, m, ROWS), place, trials=0)
            found.append(fit)
    close = sorted(found, key=lambda fit: fit.seconds)[:8]
    return min((improve_cuts(profile, fit, place) for fit in close), key=lambda fit: fit.seconds)


def unequal_best(profile: ModelProfile, place: Deployment, *schedules: UMPipe | UM1F1B) -> Fit:
    """Return the fastest choice of the planners, including the cut, for schedules that have enough layers."""
    fits = []
    for schedule in schedules:
        if len(schedule.place_stages(RANKS)) <= len(profile.layers):
            plan = solve_plan(Problem(schedule, RANKS, ROWS, profile=profile, deployment=place))
            order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
            fits.append(evaluate_plan(profile, order, plan, place))
    return min(fits, key=lambda fit: fit.seconds)


def ready_ones(m: int) -> list[Schedule | Policy]:
    """Return all installed schedules that flush and have a fixed order, except for those with unequal micro-batches."""
    every = installed_variants(RANKS, m)
    return [s for s in every if isinstance(s, Schedule) and s.name != "umpipe"]


@dataclass(frozen=True)
class Executed:
    """An executed order of a network.

    Attributes:
        network: the name of the network.
        label: the name of the order.
        fit: the plan with its predicted time.
        steps: seconds of each executed step.
    """

    network: str
    label: str
    fit: Fit
    steps: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median seconds of a step."""
        return statistics.median(self.steps)

    @property
    def counts(self) -> str:
        """The number of micro-batches of each stage, as text."""
        every = [len(self.fit.plan.spans(Kind.F, s)) for s in range(self.fit.plan.n_stages)]
        return " ".join(map(str, every)) if len(set(every)) > 1 else str(every[0])


def execute(fits: Iterable[tuple[ModelProfile, Fit]], rounds: int) -> list[tuple[float, ...]]:
    """Return the seconds of the executed steps of each plan.

    The plans take turns of three steps each, for a number of rounds.
    """
    emulations = []
    # A whole backward of an emulated layer with split times would take the sum of both parts.
    for profile, fit in fits:
        whole = tuple(replace(layer, input_backward=(), weight_backward=()) for layer in profile.layers)
        layers = profile.layers if fit.plan.split_backward else whole
        emulations.append(Emulation(fit.plan, fit.order, layers, (1.0,) * RANKS))
    found = run_ranks(_rank_main, RANKS, emulations, rounds, timeout=300)

    def steps(n: int) -> tuple[float, ...]:
        return tuple(s for turn in range(rounds) for s in step_seconds([of_rank[turn][n] for of_rank in found]))

    return [steps(n) for n in range(len(emulations))]


def learned(profiles: Sequence[ModelProfile], place: Deployment) -> list[ModelProfile]:
    """Return the profiles with the overhead of the engine for each computation.

    With this overhead, the simulated step of a training takes as long as the executed one.
    """
    plan = even_plan(GPipe(), RANKS, LEARNING, ROWS)
    fits = [fit_layers(profile, GPipe(), plan, place, trials=0) for profile in profiles]
    result = []
    for profile, fit, steps in zip(profiles, fits, execute(zip(profiles, fits, strict=True), 4), strict=True):
        low, high = 0.0, MOST
        while high - low > 1e-6:
            middle = (low + high) / 2
            seconds = evaluate_plan(replace(profile, overhead=middle), fit.order, fit.plan, place).seconds
            low, high = (middle, high) if seconds < statistics.median(steps) else (low, middle)
        result.append(replace(profile, overhead=low))
    return result


def _rank_main(rank: int, emulations: list[Emulation], rounds: int) -> list[list[EmulatedStep]]:
    watch = join_ranks(rank)
    found = [
        [run_steps(e.plan, e.order, e.stages(rank), rank, watch, 3, [ROWS]) for e in emulations] for _ in range(rounds)
    ]
    watch.close()
    return found


def lines_of(found: Sequence[Executed]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "Executed on four emulated ranks, with times of layers that were measured here and stretched by "
        f"{STRETCH:.0f}, batches of {ROWS} samples; ms of a step",
        f"{'network':28} {'order':28} {'micro-batches':>14} {'layers begin at':>16} {'predicted':>10} {'median':>8} "
        "(quartiles)",
    ]
    for each in found:
        low, _, high = statistics.quantiles(each.steps, n=4)
        lines.append(
            f"{each.network:28} {each.label + _order(each):28} {each.counts:>14} {each.fit.cuts!s:>16} "
            f"{1e3 * each.fit.seconds:10.1f} {1e3 * each.median:8.1f} ({1e3 * low:.1f}-{1e3 * high:.1f})"
        )
    return lines


def _order(each: Executed) -> str:
    """Return a description of the best equal schedule, or an empty string for other orders."""
    if each.label != "best equal schedule":
        return ""
    return f" ({each.fit.plan.n_stages} stages{', split' if each.fit.plan.split_backward else ''})"


def keys_of(found: Sequence[Executed]) -> dict[str, float]:
    """Return the times of the best orders with equal micro-batches relative to unequal ones, and the largest error.

    GPipe is compared on the first network. All schedules are compared on the second network, whose ranks can't have two
    stages, and on the first one.
    """
    first, second = ({each.label: each for each in found[at : at + 4]} for at in (0, 4))
    return {
        "executed_gain": round(first["best equal gpipe"].median / first["umpipe"].median, 4),
        "executed_um1f1b_gain": round(second["best equal schedule"].median / second["um1f1b"].median, 4),
        "executed_um1f1b_gain_split": round(first["best equal schedule"].median / first["um1f1b"].median, 4),
        "executed_worst_error": round(max(abs(each.fit.seconds / each.median - 1) for each in found), 4),
    }


def emulated(quick: bool) -> list[Executed]:
    """Execute the best equal GPipe, UMPIPE, the best equal schedule, and UM-1F1B on every network."""
    torch.set_num_threads(1)
    layers = {kind: measured(kind, 5 if quick else 15) for kind in LAYERS}
    place = Deployment(Cluster((Device(),) * RANKS, inside=LINK))
    networks = dict(list(NETWORKS.items())[: 2 if quick else None])
    joining = joining_seconds(torch.device("cpu"))
    bare = [ModelProfile(tuple(layers[kind] for kind in kinds), joining=joining) for kinds in networks.values()]
    found = []
    for network, profile in zip(networks, learned(bare, place), strict=True):
        fits = {
            "best equal gpipe": equal_best(profile, place, lambda m: [GPipe()]),
            "umpipe": unequal_best(profile, place, UMPipe()),
            "best equal schedule": equal_best(profile, place, ready_ones),
            "um1f1b": unequal_best(profile, place, UM1F1B(), UM1F1B(stages_per_rank=2)),
        }
        seconds = execute([(profile, fit) for fit in fits.values()], 4 if quick else 8)
        found += [
            Executed(network, label, fit, steps) for (label, fit), steps in zip(fits.items(), seconds, strict=True)
        ]
    return found


# ---- Real layers on two processes, trained by ordinary Trainers

EQUAL = (1, 2, 4, 8)
"""The numbers of equal micro-batches."""
SKIPPED = 2
"""The number of first steps that do not count."""
UNEQUAL = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 1))
"""The numbers of micro-batches of the convolutions and of the recurrent layers."""


class Mixed(pl.LightningModule):
    """Convolutions followed by recurrent layers, with a linear layer between them."""

    def __init__(self, convolutions: int, recurrent: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        (first, self.width), (last, width) = LAYERS["convolution"], LAYERS["recurrent"]
        narrowing = nn.Linear(self.width, width)
        self.layers = nn.Sequential(
            *[first() for _ in range(convolutions)], narrowing, *[last() for _ in range(recurrent)]
        )
        self.began: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.layers(batch)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(
    rank: int,
    schedules: dict[str, tuple[Schedule | Policy, int | None]],
    layers: tuple[int, int],
    turns: int,
    steps: int,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Train with each schedule in turns, and return the seconds of steps and the sum of the final weights of each."""
    hush()
    request_realtime_priority()
    torch.set_num_threads(1)
    data = torch.randn((steps + SKIPPED) * ROWS, LAYERS["convolution"][1], generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    sums = {}
    for _ in range(turns):
        for name, (schedule, microbatches) in schedules.items():
            module = Mixed(*layers)
            strategy = PipelineStrategy(
                schedule, microbatches=microbatches, partition=[layers[0] + 1], check_loss=False
            )
            trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **QUIET)
            trainer.fit(module, DataLoader(data, ROWS))  # type: ignore[arg-type]
            began = module.began[SKIPPED:]
            seconds[name] += [after - before for before, after in pairwise(began)]
            sums[name] = float(sum(p.detach().double().sum() for p in module.parameters()))
    return seconds, sums


def compare_schedules(quick: bool) -> tuple[list[str], dict[str, float]]:
    """Return the lines of the table, and the times with equal micro-batches relative to unequal ones."""
    schedules: dict[str, tuple[Schedule | Policy, int | None]] = {}
    for m in EQUAL:
        schedules |= {f"gpipe {m}": (GPipe(), m), f"1f1b {m}": (OneFOneB(), m)}
    for counts in UNEQUAL:
        text = " ".join(map(str, counts))
        schedules |= {
            f"umpipe {text}": (UMPipe(counts, counts), None),
            f"um1f1b {text}": (UM1F1B(counts, counts), None),
        }
    found = run_ranks(train, 2, schedules, (4, 2), 1 if quick else 6, 6 if quick else 8, timeout=600)
    seconds, sums = found[0]
    if max(sums.values()) - min(sums.values()) > 1e-3 * max(map(abs, sums.values())):
        raise AssertionError(f"the final weights differ between schedules: {sums}")
    least = {name: min(each) for name, each in seconds.items()}
    lines = ["Real layers on two processes: 4 convolutions, 2 recurrent; ms of a step of 64 samples, least and median"]
    best = {}
    for kind in ("gpipe", "umpipe", "1f1b", "um1f1b"):
        mine = sorted((name for name in least if name.split()[0] == kind), key=lambda name: least[name])
        best[kind] = least[mine[0]]
        lines += [
            f"  {name:14} {1e3 * least[name]:7.1f} {1e3 * statistics.median(seconds[name]):7.1f}" for name in mine[:2]
        ]
    gains = {"real_umpipe_gain": best["gpipe"] / best["umpipe"], "real_um1f1b_gain": best["1f1b"] / best["um1f1b"]}
    return lines, {name: round(gain, 4) for name, gain in gains.items()}
