"""Choice of the number of stages, and of the layers and devices of each stage (DynPipe, Algorithm 1)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind, Plan, Span, adapt_plan, check_count, short_repr
from lightning_pipes.ir.checks import InputError
from lightning_pipes.planning.replanning import Replay
from lightning_pipes.strategies.dynpipe.meshes import DeviceMesh, Pricing, list_meshes
from lightning_pipes.strategies.pipedream import PipeDream

MAX_SIMULATED_ASSIGNMENTS = 40
"""The number of assignments with the lowest bounds that are simulated for each number of stages."""
MAX_PARTIAL_ASSIGNMENTS = 12
"""The number of partial assignments that are kept for the same remaining layers and devices."""
MAX_INCREASES = 2
"""The number of consecutive increases of the total time after which no further numbers of stages are tried."""


@dataclass(frozen=True)
class Assignment:
    """The layers and devices of each stage.

    Attributes:
        layers: the layers of each stage.
        meshes: the devices of each stage.
        stages: the seconds of a batch on each stage.
        transfers: the seconds of the messages of a batch between stages, both directions together.
        iteration: the seconds from one batch to the next.
    """

    layers: tuple[Span, ...]
    meshes: tuple[DeviceMesh, ...]
    stages: tuple[float, ...]
    transfers: tuple[float, ...]
    iteration: float

    @property
    def is_executable(self) -> bool:
        """Whether the engine can run the assignment: without shards, or with equal meshes for all stages."""
        return {mesh.tensor for mesh in self.meshes} == {1} or len({*self.meshes}) == 1

    @property
    def data_parallel(self) -> int | list[int]:
        """The value for `data_parallel=`: the number of replicas, or a list if it differs between stages."""
        ranks = [mesh.data for mesh in self.meshes]
        return ranks[0] if len({*ranks}) == 1 else ranks

    @property
    def tensor_parallel(self) -> int:
        """The value for `tensor_parallel=`: the number of shards of each stage, if the assignment is executable."""
        return self.meshes[0].tensor

    @property
    def cuts(self) -> list[int]:
        """The value for `partition=`: the layers at which stages 1, 2, ... begin."""
        return [span.start for span in self.layers[1:]]


@dataclass(frozen=True)
class StageOption:
    """The result for one number of stages.

    Attributes:
        n_stages: the number of stages.
        iterations: T(S), the number of batches until the target. It is infinite if stale gradients never reach it.
        best: the best assignment, or None if nothing fits or T(S) is infinite.
        why_not: the reason if `best` is None.
    """

    n_stages: int
    iterations: float
    best: Assignment | None
    why_not: str = ""

    @property
    def seconds(self) -> float:
        """T(S) W(S), the seconds of the whole run."""
        return math.inf if self.best is None else self.iterations * self.best.iteration


@dataclass(frozen=True)
class StageChoice:
    """The results for all numbers of stages that were tried."""

    options: tuple[StageOption, ...]

    @property
    def best(self) -> StageOption:
        """The option with the shortest run.

        Raises:
            InputError: there is no such option. The message contains the reason for each number of stages.
        """
        found = min(self.options, key=lambda option: option.seconds)
        if found.best is None:
            reasons = "; ".join(f"{option.n_stages}: {option.why_not}" for option in self.options)
            raise InputError(f"no number of stages reaches the target: {reasons}")
        return found

    def __str__(self) -> str:
        lines = [f"{'stages':>6} {'batches':>10} {'a batch':>10} {'in all':>10}  layers of each stage on its devices"]
        least = min(self.options, key=lambda option: option.seconds)
        for option in self.options:
            batches = f"{option.iterations:.0f}" if math.isfinite(option.iterations) else "never"
            start = f"{option.n_stages:6} {batches:>10}"
            if option.best is None:
                lines.append(f"{start} {'':>10} {'':>10}  {option.why_not}")
                continue
            best = option.best
            each = " ".join(f"{span.rows}@{mesh}" for span, mesh in zip(best.layers, best.meshes, strict=True))
            times = [seconds_text(1e9 * t) for t in (best.iteration, option.seconds)]
            notes = ["the best"] * (option is least) + ["only planned: shards that differ between stages"] * (
                not best.is_executable
            )
            note = f"  ({'; '.join(notes)})" if notes else ""
            lines.append(f"{start} {times[0]:>10} {times[1]:>10}  {each}{note}")
        return "\n".join([*lines, "n@DxT: n layers on D replicas of T shards each"])


def choose_stages(
    pricing: Pricing,
    iterations: Callable[[int], float] = lambda stages: 1.0,
    stages: Sequence[int] = (),
    mode: Literal["simulated", "paper"] = "simulated",
    scan_all: bool = False,
    executable: bool = False,
    sharded: bool = False,
) -> StageChoice:
    """Return the number of stages with the lowest T(S) W(S), and its best layers and devices (DynPipe, Algorithm 1).

    For every S from 1, the function assigns layers and devices to stages in all ways that fit. A stage has consecutive
    layers, and consecutive devices of one machine. The search ends when the total time has increased twice in a row.

    Args:
        pricing: the seconds and bytes of layers on devices.
        iterations: T(S). By default, it is the same for all S, so that W(S) alone decides.
        stages: the numbers of stages to try. By default, from 1 to the number of devices or layers, whichever is less.
        mode: "simulated" selects the best assignments by a lower bound and simulates them. "paper" uses E4 and E5,
            which are exact for two stages.
        scan_all: whether to try all numbers of stages.
        executable: whether to consider only assignments that can run, without shards except for those that `sharded`
            allows.
        sharded: whether to also consider assignments with shards in which all stages have meshes of the same shape.

    Raises:
        InputError: the mode is unknown, or there is no number of stages to try.
    """
    if mode not in ("simulated", "paper"):
        raise InputError(f"mode must be 'simulated' or 'paper', got {short_repr(mode)}")
    most = min(len(pricing.cluster.devices), len(pricing.profile.layers))
    options: list[StageOption] = []
    for n in stages or range(1, most + 1):
        check_count("stages", n)
        options.append(_option(pricing, n, iterations(n), mode, executable, sharded))
        rises = sum(a.seconds < b.seconds for a, b in pairwise(options[-MAX_INCREASES - 1 :]))
        if rises == MAX_INCREASES and not scan_all and not stages:
            break
    if not options:
        raise InputError("no number of stages to try; give at least one")
    return StageChoice(tuple(options))


def _option(pricing: Pricing, n: int, iterations: float, mode: str, executable: bool, sharded: bool) -> StageOption:
    if not math.isfinite(iterations):
        return StageOption(
            n,
            iterations,
            None,
            "training never reaches the target with gradients this stale: target <= 2 lr^2 S^3 L^2 xi^2",
        )
    devices, layers = len(pricing.cluster.devices), len(pricing.profile.layers)
    if n > min(devices, layers):
        return StageOption(n, iterations, None, f"{layers} layers and {devices} devices are too few for {n} stages")
    every: list[Assignment] = []
    even = [[mesh] for mesh in list_meshes(devices // n, replicas_only=not sharded)] if devices % n == 0 else []
    for shapes in ([], *even):  # with even shares of devices there are fewer ways, so that none is dropped
        search = _Search(pricing, n, executable, shapes)
        every += search.by_paper() if mode == "paper" else search.by_simulator()
    if not every:
        return StageOption(
            n, iterations, None, "no distribution of layers and devices fits into the memory and the machines"
        )
    return StageOption(n, iterations, min(every, key=lambda each: each.iteration))


class _Way(NamedTuple):
    """The stages from a certain layer and device to the end.

    Attributes:
        least: a lower bound for the seconds of an iteration, by these stages alone.
        way: the seconds of a batch through these stages and their messages.
        stages: the first layer and the mesh of each stage.
    """

    least: float
    way: float
    stages: tuple[tuple[int, DeviceMesh], ...]  # the first layer and the mesh of each stage


class _Search:
    def __init__(self, pricing: Pricing, n: int, executable: bool, shapes: Sequence[DeviceMesh] = ()) -> None:
        self._pricing, self._n = pricing, n
        self._devices, self._layers = len(pricing.cluster.devices), len(pricing.profile.layers)
        machine = pricing.machine_of_device
        largest = max(machine.count(m) for m in {*machine})
        shapes = shapes or [m for size in range(1, largest + 1) for m in list_meshes(size, executable)]
        shapes = [m for m in shapes if m.data <= max(1, pricing.rows // pricing.microbatches)]
        self._seconds = {mesh: pricing.stage_seconds(mesh) for mesh in shapes}
        self._fits = {
            (mesh, stage): pricing.memory_limit is None or pricing.bytes(mesh, n - stage) <= pricing.memory_limit
            for mesh in shapes
            for stage in range(n)
        }

    def _allowed(self, mesh: DeviceMesh, stage: int, start: int, stop: int, device: int) -> bool:
        """Return whether the stage fits into the memory of its devices, and whether these are in one machine.

        The first of the devices is `device`.
        """
        machine, fits = self._pricing.machine_of_device, self._fits[mesh, stage]
        last = device + mesh.size - 1
        if last >= self._devices or machine[device] != machine[last]:
            return False
        return fits if isinstance(fits, bool) else bool(fits[start, stop])

    def _transfer(self, cut: int, before: DeviceMesh, after: DeviceMesh, device: int) -> float:
        """Return the seconds of messages between the stage that ends before `device` and the stage after it."""
        machine = self._pricing.machine_of_device
        return self._pricing.transfer_seconds(cut, before, after, machine[device - 1] != machine[device])

    def by_simulator(self) -> list[Assignment]:
        """Return the assignments with the lowest bounds, simulated.

        The search goes from the last stage to the first, and keeps the Pareto front for the same remaining layers and
        devices.
        """
        fronts: dict[tuple[int, int, DeviceMesh], list[_Way]] = {}
        for stage in reversed(range(self._n)):
            now: dict[tuple[int, int, DeviceMesh], list[_Way]] = defaultdict(list)
            if stage == self._n - 1:
                after: list[tuple[int, int, DeviceMesh | None, list[_Way]]] = [
                    (self._layers, self._devices, None, [_Way(0.0, 0.0, ())])
                ]
            else:
                after = [(layer, device, mesh, ways) for (layer, device, mesh), ways in fronts.items()]
            for stop, end, next_mesh, ways in after:
                for mesh, seconds in self._seconds.items():
                    device = end - mesh.size
                    if device < 0 or (stage == 0) != (device == 0):
                        continue
                    between = 0.0 if next_mesh is None else self._transfer(stop, mesh, next_mesh, end)
                    for start in [0] if stage == 0 else range(stage, stop):
                        if start < stop and self._allowed(mesh, stage, start, stop, device):
                            takes = float(seconds[start, stop])
                            for least, way, rest in ways:
                                whole = way + takes + between
                                bound = max(least, takes, whole / (self._n - stage))
                                now[start, device, mesh].append(_Way(bound, whole, ((start, mesh), *rest)))
            fronts = {key: _front(found) for key, found in now.items()}
        best = sorted((way for ways in fronts.values() for way in ways), key=lambda way: way[:2])[
            :MAX_SIMULATED_ASSIGNMENTS
        ]
        return self._assigned([way.stages for way in best], true_seconds)

    def by_paper(self) -> list[Assignment]:
        """Return the best assignments by E4 and E5. The search goes from the first stage to the last."""
        best: dict[tuple[int, int, DeviceMesh], tuple[float, tuple[tuple[int, DeviceMesh], ...]]] = {}
        for stage in range(self._n):
            now: dict[tuple[int, int, DeviceMesh], tuple[float, tuple[tuple[int, DeviceMesh], ...]]] = {}
            before = best.items() if stage else [((0, 0, DeviceMesh(1, 1)), (0.0, ()))]
            for (start, device, last), (so_far, made) in before:
                for mesh, seconds in self._seconds.items():
                    end = device + mesh.size
                    left = self._n - 1 - stage
                    if (left == 0) != (end == self._devices):
                        continue
                    stops = range(start + 1, self._layers - left + 1) if left else [self._layers]
                    for stop in stops:
                        if not self._allowed(mesh, stage, start, stop, device):
                            continue
                        takes = float(seconds[start, stop])
                        between = self._transfer(start, last, mesh, device) if stage else 0.0
                        total = extend_pipeline(so_far, takes, between) if stage else takes
                        key = stop, end, mesh
                        if key not in now or total < now[key][0]:
                            now[key] = total, (*made, (start, mesh))
            best = now
        return self._assigned([made for _, made in best.values()], lambda every: [paper_seconds(*p) for p in every])

    def _assigned(
        self, made: Sequence[Sequence[tuple[int, DeviceMesh]]], judge: Callable[[Sequence[Pipeline]], Sequence[float]]
    ) -> list[Assignment]:
        if not made:
            return []
        parts = [self._parts(each) for each in made]
        judged = judge([(seconds, between) for _, _, seconds, between in parts])
        return [Assignment(*each, iteration) for each, iteration in zip(parts, judged, strict=True)]

    def _parts(
        self, made: Sequence[tuple[int, DeviceMesh]]
    ) -> tuple[tuple[Span, ...], tuple[DeviceMesh, ...], tuple[float, ...], tuple[float, ...]]:
        layers = tuple(Span(a, b) for a, b in pairwise([*(start for start, _ in made), self._layers]))
        shapes = tuple(mesh for _, mesh in made)
        seconds = tuple(float(self._seconds[m][s.start, s.stop]) for s, m in zip(layers, shapes, strict=True))
        ends = np.cumsum([mesh.size for mesh in shapes]).tolist()
        between = tuple(
            self._transfer(span.start, a, b, end)
            for span, (a, b), end in zip(layers[1:], pairwise(shapes), ends[:-1], strict=True)
        )
        return layers, shapes, seconds, between


def _front(ways: list[_Way]) -> list[_Way]:
    """Return at most `MAX_PARTIAL_ASSIGNMENTS` ways: the Pareto front of bound and sum, then the others in the order of
    their bounds."""
    kept: list[_Way] = []
    rest: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        better = not kept or way.way < kept[-1].way
        (kept if better else rest).append(way)
    return [*kept, *rest][:MAX_PARTIAL_ASSIGNMENTS]


Pipeline = tuple[Sequence[float], Sequence[float]]
"""The seconds of a batch on each stage, and of its messages between stages, both directions together."""


def extend_pipeline(before: float, seconds: float, transfer: float, printed: bool = False) -> float:
    """Return the seconds of an iteration of a pipeline that is extended by one stage (DynPipe, E4).

    The result is exact for two stages: max(p1, p2, (p1 + p2 + c) / 2), because two batches are in flight. As `printed`
    in the paper, the first stage can't be the slowest: if p1 > p2 + c, the result is less than p1.

    Args:
        before: the seconds of an iteration of the stages before.
        seconds: the seconds of a batch on the added stage.
        transfer: the seconds of the messages between them, both directions together.
        printed: whether to use the equation as printed.
    """
    if seconds >= before + transfer:
        return seconds
    half = (before + seconds + transfer) / 2
    return half if printed else max(before, seconds, half)


def paper_seconds(stages: Sequence[float], transfers: Sequence[float], printed: bool = False) -> float:
    """Return the seconds of an iteration by E5, which treats all stages except the last as one.

    This is exact for two stages. With more stages, more than two batches are in flight.

    Args:
        stages: the seconds of a batch on each stage.
        transfers: the seconds of the messages of a batch between stages, both directions together.
        printed: whether to use E4 as printed; see `extend_pipeline`.
    """
    found = stages[0]
    for seconds, transfer in zip(stages[1:], transfers, strict=True):
        found = extend_pipeline(found, seconds, transfer, printed)
    return found


def true_seconds(pipelines: Sequence[Pipeline], share: float = 1 / 3, batches: int = 24) -> list[float]:
    """Return the simulated seconds of an iteration of several pipelines with the same number of stages.

    The schedule is 1F1B without flushes, with one micro-batch per batch. Links work at the same time as stages, in both
    directions.

    Args:
        pipelines: the seconds of the stages and messages of each pipeline.
        share: the share of a stage's seconds that its forward takes.
        batches: the number of batches over which the mean is computed, after the pipeline is full. Their times differ.
    """
    stages, transfers = (np.array([each[n] for each in pipelines], float) for n in (0, 1))
    n = stages.shape[1]
    durations = {(Kind.F, s): share * stages[:, s] for s in range(n)}
    durations |= {(Kind.B, s): (1 - share) * stages[:, s] for s in range(n)}
    durations |= {(Kind.SF, s): transfers[:, s] / 2 for s in range(n - 1)}
    durations |= {(Kind.SB, s + 1): transfers[:, s] / 2 for s in range(n - 1)}
    found = _replay(n, batches).step_seconds({key: seconds[:, None, None] for key, seconds in durations.items()})
    return [float(seconds) for seconds in found[:, 0]]


@lru_cache(maxsize=32)
def _replay(stages: int, batches: int) -> Replay:
    schedule = PipeDream()
    plan = adapt_plan(Plan.even(stages, 1), schedule)
    return Replay(schedule.program(plan), plan, batches)
