"""Measurements of stages next to processes that compete for the same core.

A predictor of interference learns from them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_pipes.engine.compute.footprint import saved_for_backward
from lightning_pipes.engine.monitor.monitor import Monitor, sources_for
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.planning.replanning import NO_NEIGHBOR, HostedStage
from lightning_pipes.tune.neighbors import Neighbor, Quota, why_no_quota

MIN_OBSERVED_STEPS = 5
"""The smallest number of steps in one observation."""
N_PASSES = 4
"""The number of observations of each stage next to each neighbor."""
CPU_WEIGHT = 800
"""The CPU weight of the control group that runs this process and its neighbors."""
SOLO_QUANTILE = 0.1
"""The quantile of step times without a neighbor that counts as the time of an undisturbed step.

It is a low quantile, because other processes of the machine disturb some of the steps.
"""


class TimedStage:
    """A stage that trains, and the measured times of its steps.

    Args:
        kind: the kind of the stage.
        module: the module of the stage.
        x: the input of the module, with samples along axis 0.
        output: returns the output of the stage. By default, it calls `module(x)`.
    """

    def __init__(
        self, kind: str, module: nn.Module, x: torch.Tensor, output: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self.kind, self._module = kind, module
        self._output = output or (lambda: module(x))
        self._rows = len(x)
        self.alone: list[tuple[float, float]] = []
        """Seconds of forwards and of whole steps, measured without a neighbor."""
        with saved_for_backward() as saved:
            out = self._output()
        self._saved = float(sum(size for _, size in saved))
        self._sent = float(out.nbytes)
        self._weights = float(sum(p.nbytes for p in module.parameters()))
        out.sum().backward()

    def step(self) -> tuple[float, float]:
        """Run a forward and a backward. Return the seconds of the forward and the seconds of both."""
        began = read_seconds()
        out = self._output()
        half = read_seconds()
        out.sum().backward()
        for p in self._module.parameters():
            p.grad = None
        return half - began, read_seconds() - began

    @property
    def solo(self) -> float:
        """Seconds of a step without a neighbor."""
        return float(np.quantile([whole for _, whole in self.alone], SOLO_QUANTILE))

    @property
    def stage_load(self) -> HostedStage:
        """The stage in the form that planners use."""
        forward = float(np.quantile([part for part, _ in self.alone], SOLO_QUANTILE))
        backward = max(0.0, self.solo - forward)
        return HostedStage(1, self._rows, forward, backward, self._weights, self._weights, self._saved, self._sent)


def stages(sizes: Sequence[int]) -> list[TimedStage]:
    """Return stages of five kinds, each in every given size. A step takes milliseconds."""
    torch.manual_seed(0)
    found = []
    for size in sizes:
        width = 192 * size
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        found.append(TimedStage("mlp", mlp, torch.randn(48, width)))
        block = nn.TransformerEncoderLayer(64 * size, 4, 128 * size, dropout=0.0, batch_first=True)
        found.append(TimedStage("attention", block, torch.randn(4, 64, 64 * size)))
        conv = nn.Sequential(nn.Conv2d(8 * size, 16 * size, 3, padding=1), nn.ReLU(), nn.Conv2d(16 * size, 8, 3))
        found.append(TimedStage("convolution", conv, torch.randn(2, 8 * size, 32, 32)))
        bag = nn.EmbeddingBag(100_000 * size, 32, mode="sum", sparse=True)
        found.append(TimedStage("embedding", bag, torch.randint(0, 100_000 * size, (512, 32))))
        wide = torch.randn(1, 300_000 * size, requires_grad=True)
        found.append(TimedStage("elementwise", nn.Identity(), wide, lambda x=wide: torch.tanh(x * 1.5 + 0.5) * x))  # type: ignore[misc]
    return found


@dataclass(frozen=True)
class Background:
    """A process or a quota that runs next to a stage.

    Attributes:
        kind: the kind of the neighbor.
        beside: returns a context manager that runs the neighbor.
    """

    kind: str
    beside: Callable[[], AbstractContextManager[object]]


def settings(quick: bool, core: int, other: int | None) -> list[Background]:
    """Return the backgrounds to measure: neighbors of several kinds and intensities, quotas, and no neighbor.

    Args:
        quick: whether fewer backgrounds are returned.
        core: the core of the stage, on which most neighbors run too.
        other: another core, on which some neighbors run, or None.
    """
    wanted: list[tuple[str, dict[str, float]]] = []
    strengths = (0.4, 1.0) if quick else (0.3, 0.6, 1.0)
    for kind in ("spin", "matmul", "memory", "cache", "calls"):
        wanted += [(kind, {"intensity": strength, "core": core}) for strength in strengths]
        if not quick:
            wanted.append((kind, {"core": core, "processes": 2}))
    wanted += [("bursts", {"intensity": share, "core": core}) for share in ((0.5,) if quick else (0.3, 0.6))]
    if not quick:
        wanted.append(("spin", {"core": core, "processes": 3}))
        wanted.append(("spin", {"core": core, "nice": 10}))
    if other is not None:
        wanted += [(kind, {"core": other}) for kind in ("memory", "cache")]
    found = [Background(kind, lambda k=kind, a=arguments: Neighbor(k, **a)) for kind, arguments in wanted]  # type: ignore[misc]
    if why_no_quota() is None:
        shares = (0.5, 0.3) if quick else (0.6, 0.4, 0.25)
        found += [Background("quota", lambda s=share: Quota(s, weight=CPU_WEIGHT)) for share in shares]  # type: ignore[misc]
    return found + [Background(NO_NEIGHBOR, nullcontext)] * (3 if quick else 6)


class NeighbourWindow(NamedTuple):
    """The observations of one stage next to one neighbor.

    Attributes:
        seen: means of the monitor's metrics.
        stage: the stage in the form that planners use.
        ratio: seconds of a step divided by the seconds of a step without a neighbor.
        neighbour: the kind of the neighbor.
        kind: the kind of the stage.
        setting: the number of the background.
    """

    seen: dict[str, float]
    stage: HostedStage
    ratio: float
    neighbour: str
    kind: str
    setting: int


@dataclass
class CollectedObservations:
    """Observations of stages: the means of the monitor's metrics, and the average seconds of a step.

    The odd observations of a stage next to one background are merged, and so are the even ones. This results in two
    windows that cover about the same time.
    """

    looks: dict[tuple[int, str, TimedStage, int], list[tuple[dict[str, float], float]]] = field(default_factory=dict)

    def windows(self) -> list[NeighbourWindow]:
        """Return all windows. The ratios are valid after all stages have been observed without a neighbor."""
        return [
            NeighbourWindow(
                _mean([seen for seen, _ in looks]),
                stage.stage_load,
                float(np.mean([mean for _, mean in looks]) / stage.solo),
                kind,
                stage.kind,
                number,
            )
            for (number, kind, stage, _), looks in self.looks.items()
        ]


def _mean(seen: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in seen])) for name in seen[0]}


@contextmanager
def sample_metrics() -> Iterator[Callable[[], dict[str, float]]]:
    """Yield a function that returns the means of the monitor's metrics of this machine since its last call.

    A thread reads the metrics, as in a monitor.
    """
    monitor = Monitor(sources_for(torch.device("cpu")))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(monitor.open).result()

        def read_means() -> dict[str, float]:
            thread.submit(monitor.take_sample).result()
            return dict(monitor.since_last()[0])

        yield read_means
        thread.submit(monitor.close).result()


def collect_windows(quick: bool, seconds: float, progress: Callable[[str, float], None]) -> list[NeighbourWindow]:
    """Observe each stage next to each neighbor `N_PASSES` times for `seconds` seconds, in random order.

    If control groups are available, this process and its neighbors get a higher CPU weight than the other work on the
    machine, which would distort the measurements.

    Args:
        quick: whether fewer stages and neighbors are measured.
        seconds: duration of one observation.
        progress: called with a text and the finished share of the work.
    """
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    core, other = cores[-1], cores[0] if len(cores) > 1 else None
    all_cores = set(cores)
    chance, collected, why = random.Random(0), CollectedObservations(), why_no_quota()
    beside_others = f"with the same priority as the other work on this machine: {why}"
    progress("with a higher priority than the other work on this machine" if why is None else beside_others, 0.0)
    beside = settings(quick, core, other)
    made = stages((1,) if quick else (1, 2))
    try:
        with nullcontext() if why else Quota(None, weight=CPU_WEIGHT):
            for number, setting in enumerate(chance.sample(beside, len(beside))):
                os.sched_setaffinity(0, all_cores)  # neighbours check their core
                with setting.beside(), sample_metrics() as look:
                    os.sched_setaffinity(0, {core})
                    for turn, stage in [(n % 2, s) for n in range(N_PASSES) for s in chance.sample(made, len(made))]:
                        found = _window(stage, seconds, look, setting.kind)
                        collected.looks.setdefault((number, setting.kind, stage, turn), []).append(found)
                if number % 10 == 9:
                    progress(f"{number + 1} of {len(beside)} settings", (number + 1) / len(beside))
    finally:
        os.sched_setaffinity(0, all_cores)
    return collected.windows()


def _window(
    stage: TimedStage, seconds: float, look: Callable[[], dict[str, float]], kind: str
) -> tuple[dict[str, float], float]:
    """Return the means of the monitor's metrics and the average seconds of a step."""
    stage.step()
    look()
    times: list[tuple[float, float]] = []
    began = read_seconds()
    while read_seconds() - began < seconds or len(times) < MIN_OBSERVED_STEPS:
        times.append(stage.step())
    seen = look()
    if kind == NO_NEIGHBOR:
        stage.alone += times
    return seen, float(np.mean([whole for _, whole in times]))
