"""A trial of a decision before training: a few steps of the pipeline show whether the profile is right."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipes.cost import Deployment, LayerProfile, ModelProfile
from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.ir import B, F, Kind, Plan, Policy, Program, Span, graph_spans
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.sim import simulate
from lightning_pipes.trainer.cuts.layers.left_messages import pack_message, unpack_message
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.layer_profiler import LayerProfiler
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.timing import Share

TRIAL_SECONDS = 2.0
"""The seconds of a trial after its first step, unless a single step takes longer."""
MAX_TRIAL_STEPS = 16
"""The largest number of steps that count."""
PREDICTION_TOLERANCE = 0.1
"""The relative difference that is allowed between a measured and a predicted step."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        predicted: the predicted seconds of a step, which only contains the layers.
        measured: the measured seconds of such a step.
        ratios: for each stage, the measured computing time divided by the predicted computing time.
        busiest: the largest computing time of any stage, divided by the largest predicted time.
    """

    predicted: float
    measured: float
    ratios: tuple[float, ...]
    busiest: float = 1.0

    @classmethod
    def from_steps(
        cls,
        shares: Sequence[Sequence[Share]],
        ranks: Sequence[int],
        pipelines: Sequence[Sequence[int]],
        predicted: tuple[float, Share],
    ) -> Trial:
        """Return the result from the recordings of all ranks.

        A step takes as long as on its slowest rank. The times of replicas, which do the same work, are combined by the
        median.

        Args:
            shares: for each rank, one recording per step.
            ranks: the global numbers of these ranks.
            pipelines: the global ranks of every replica.
            predicted: the predicted seconds of a step, and the computing time of each stage in it.
        """
        alike = [[shares[ranks.index(rank)] for rank in pipeline] for pipeline in pipelines]
        took = [max(share.took for share in step) for own in alike for step in zip(*own, strict=True)]
        seconds, computed = predicted
        wanted = [computed.stages.get(stage, 0) for stage in range(1 + max(computed.stages))]
        each = [
            [s.stages[n] for own in alike for rank in own for s in rank if n in s.stages] for n in range(len(wanted))
        ]
        found = [median(times) if times else 0 for times in each]
        ratios = tuple(now / was if now and was else 1.0 for now, was in zip(found, wanted, strict=True))
        return cls(seconds, median(took) / 1e9, ratios, max(found) / max(wanted) if any(wanted) else 1.0)

    def factors(self, layers: Sequence[Span]) -> list[float]:
        """Return for each layer the ratio of its stage."""
        return [ratio for ratio, span in zip(self.ratios, layers, strict=True) for _ in range(span.rows)]

    @property
    def is_contradicted(self) -> bool:
        """Whether the measured times differ from the profile by more than the allowed difference."""
        return any(abs(ratio - 1) > PREDICTION_TOLERANCE for ratio in (self.measured / self.predicted, self.busiest))


class Trials:
    """Runs layers through the engine with random gradients, while every rank has the whole module.

    All methods are collective: all ranks make one object and make the same calls.

    Args:
        profiler: provides the input of the layers, and moves layers to the device.
        ranks: the ranks of the run.
        transport: the name of the transport for messages.
    """

    def __init__(self, profiler: LayerProfiler, ranks: Ranks, transport: str) -> None:
        self._profiler = profiler
        self._grid = ranks.grid
        self._control = ranks.control
        self._device = ranks.device
        self._transport = transport

    def run(
        self, made: Decision, pieces: int, rows: int, deployment: Deployment, seconds: float = TRIAL_SECONDS
    ) -> Trial:
        """Return the result of a trial of `made`.

        Args:
            made: the decision to try.
            pieces: the number of micro-batches of a batch.
            rows: the number of samples of each micro-batch.
            deployment: the devices and links.
            seconds: the time after which no further step begins, except for the first step that counts. It must be the
                same on all ranks.

        Raises:
            NotMeasuredError: the user's code fails with this number of samples.
        """
        plans = made.plans()
        plan, order = plans.for_rows(pieces * rows)
        sizes = {part.rows for span in plan.spans(Kind.F, 0) for part in (span, *graph_spans(F(0, span), plan))}
        sizes |= {part.rows for span in plan.spans(Kind.B, 0) for part in graph_spans(B(0, span), plan)}
        entering = {n: self._profiler.capture_input(n) for n in sorted(sizes)}
        holdings = Holdings(self._grid, made.ranks, made.layers)
        mine = {stage: list(range(*plan.layers[stage])) for stage in plan.stages[holdings.rank]}
        numbers = [n for layers in mine.values() for n in layers]
        with self._profiler.place_layers(numbers) as layers:
            by_number = dict(zip(numbers, layers, strict=True))
            stages = [
                Stage(
                    stage,
                    {n: by_number[n] for n in inside},
                    _body(stage, plan, entering),
                    device=self._device,
                )
                for stage, inside in mine.items()
            ]
            shares = self._steps(plan, order, stages, holdings, min(TRIAL_SECONDS, max(seconds, 0.0)))
        assert made.profile is not None
        return Trial.from_steps(
            shares, self._control.ranks, self._grid.pipelines, _predicted(made.profile, plan, order, deployment)
        )

    def _steps(
        self, plan: Plan, order: Program | Policy, stages: Sequence[Stage], holdings: Holdings, seconds: float
    ) -> list[list[Share]]:
        """Return, for every rank, the recordings of the steps that count."""
        rank, watch = holdings.rank, self._control.watch
        transport = make_transport(plan, rank, holdings.global_ranks, self._device, watch, self._transport)
        parameters = [p for stage in stages for layer in stage.layers.values() for p in layer.parameters()]
        engine = Engine(plan, order, stages, transport, rank=rank, device=self._device, watch=watch)
        found: list[list[Share]] = []
        turns: list[StepTiming] = []
        wanted, shortest = 1, sys.maxsize
        try:
            while needs_more_steps(turns, wanted):
                self._control.barrier()
                before = waited_so_far()
                engine.inject(Item(len(found), plan.jobs[0].rows))
                engine.drain()
                of_ranks = self._control.all_gather((Share.from_events(engine.events), waited_so_far() - before))
                shares, waited = zip(*of_ranks, strict=True)
                longest = max(share.took for share in shares)
                if found:  # the first step takes longer
                    turns.append(StepTiming(longest, max(waited)))
                shortest = min(shortest, longest)
                wanted = min(MAX_TRIAL_STEPS, max(1, int(1e9 * seconds / max(shortest, 1))))
                found.append([*shares])
                for p in parameters:
                    p.grad = None  # as at the start of a batch
        finally:
            engine.close()
        counted = [found[1 + number] for number in counting(turns)]
        return [[*each] for each in zip(*counted, strict=True)]


def _body(number: int, plan: Plan, entering: Mapping[int, Any]) -> Body:
    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x = trees.map_tensors(torch.clone, entering[span.rows]) if number == 0 else unpack_message(received)[0]
        out = stage.run_layers(item, span, x)
        return _loss(out) if number == plan.n_stages - 1 else pack_message(out, {})

    return body


def _loss(out: Any) -> torch.Tensor:
    """Return a scalar whose backward computes a gradient for each output of the last layer."""
    parts = [t.float().sum() for t in trees.tensors_in(out) if t.requires_grad]
    return sum(parts[1:], start=parts[0]) if parts else nn.Parameter(torch.zeros(()))


def simulate_step(
    profile: ModelProfile, plan: Plan, order: Program | Policy, deployment: Deployment
) -> tuple[float, Share]:
    """Return the predicted seconds of a step before the optimizer steps, and the computing time of each stage in it."""
    fit = evaluate_plan(profile.without_steps(), order, plan, deployment)
    return fit.seconds, Share.from_events(simulate(fit.order, replace(plan, layers=()), fit.costs).events)


def _predicted(
    profile: ModelProfile, plan: Plan, order: Program | Policy, deployment: Deployment
) -> tuple[float, Share]:
    """Return the prediction of a step that only contains the layers, on one of the replicas."""
    nothing = LayerProfile("", ((1, 0.0),), ((1, 0.0),))
    bare = replace(profile, before=replace(nothing, output=profile.before.output), after=nothing)
    return simulate_step(bare, plan, order, Deployment(deployment.pipeline))


_MAX_WAIT_SHARE = 0.05
"""The largest share of a step for which any rank may wait for a core if the step counts as undisturbed."""
_MAX_STEPS_RATIO = 2
"""The largest number of steps, relative to the wanted number, if other processes disturb them."""
_MIN_UNDISTURBED_SHARE = 0.25
"""The share of steps that must be undisturbed. If fewer are, other processes are considered to be always running."""


class StepTiming(NamedTuple):
    """The timing of one step of all ranks.

    Attributes:
        took: the duration in nanoseconds.
        waited: the longest time, in nanoseconds, for which a rank waited for a core during the step.
    """

    took: float
    waited: float


def needs_more_steps(turns: Sequence[StepTiming], wanted: int) -> bool:
    """Return whether another step is needed.

    Steps are needed until the wanted number is reached and a quarter of the steps was undisturbed, but at most twice
    the wanted number.
    """
    return len(turns) < wanted or (not _enough(turns) and len(turns) < _MAX_STEPS_RATIO * wanted)


def counting(turns: Sequence[StepTiming]) -> list[int]:
    """Return the indices of the steps that count.

    These are the undisturbed steps, or the less disturbed half of all steps if other processes are always running.
    """
    if _enough(turns):
        return [number for number, turn in enumerate(turns) if _steady(turn)]
    by_waiting = sorted(range(len(turns)), key=lambda number: turns[number].waited / max(turns[number].took, 1))
    return sorted(by_waiting[: -(-len(turns) // 2)])


def _enough(turns: Sequence[StepTiming]) -> bool:
    return sum(map(_steady, turns)) >= _MIN_UNDISTURBED_SHARE * len(turns)


def _steady(turn: StepTiming) -> bool:
    return turn.waited <= _MAX_WAIT_SHARE * turn.took


def waited_so_far() -> int:
    """Return the nanoseconds for which this thread was runnable but had to wait for a core.

    This is the time that other processes on the machine have taken, without the time spent waiting for messages. The
    result is 0 if the system does not report it.
    """
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1])
    return 0
