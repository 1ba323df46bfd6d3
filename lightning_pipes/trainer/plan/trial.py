"""A few steps of the pipeline before training begins, as a decision has it: whether its profile is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.cost import Deployment, LayerProfile, ModelProfile
from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.ir import B, F, Kind, Plan, Policy, Program, Span, graphs
from lightning_pipes.planning.fit import evaluated
from lightning_pipes.sim import simulate
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.measuring import Measuring
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.timing import Share

SECONDS = 2.0
"""How long a trial takes, but for its first step, if steps are not longer."""
STEPS = 16
"""The most steps that count."""
CONTRADICTION = 0.1
"""By what share a measured step may differ from what the profile says."""


@dataclass(frozen=True)
class Trial:
    """The outcome of a decision that was tried.

    Attributes:
        predicted: seconds of a step, of its layers alone, by the profile.
        measured: the same in the trial.
        ratios: for each stage, how many times as long as predicted it computes.
    """

    predicted: float
    measured: float
    ratios: tuple[float, ...]

    @property
    def contradicts(self) -> bool:
        """Whether the profile was wrong by more than may be."""
        return abs(self.measured / self.predicted - 1) > CONTRADICTION


class Trials:
    """Runs layers through the engine, with random gradients, on modules that are whole everywhere.

    Collective: all ranks make one, and the same calls of it.

    Args:
        measuring: what the layers get, and where.
        transport: how messages will travel.
    """

    def __init__(self, measuring: Measuring, ranks: Ranks, transport: str) -> None:
        self._measuring = measuring
        self._grid = ranks.grid
        self._control = ranks.control
        self._device = ranks.device
        self._transport = transport

    def run(self, made: Decision, pieces: int, rows: int, place: Deployment) -> Trial:
        """The outcome of `made`, for batches of so many micro-batches that all have `rows` samples.

        Raises:
            NotMeasuredError: the user's code fails for so many samples.
        """
        plans = made.plans()
        plan, order = plans.for_rows(pieces * rows)
        sizes = {part.rows for span in plan.spans(Kind.F, 0) for part in (span, *graphs(F(0, span), plan))}
        sizes |= {part.rows for span in plan.spans(Kind.B, 0) for part in graphs(B(0, span), plan)}
        entering = {n: self._measuring.entering(n) for n in sorted(sizes)}
        holdings = Holdings(self._grid, made.ranks, made.layers)
        mine = {stage: list(range(*plan.layers[stage])) for stage in plan.stages[holdings.rank]}
        numbers = [n for layers in mine.values() for n in layers]
        with self._measuring.there(numbers) as layers:
            by_number = dict(zip(numbers, layers, strict=True))
            stages = [
                Stage(
                    stage,
                    {n: by_number[n] for n in inside},
                    _body(stage, plan, entering),
                    recompute=bool(plan.recompute) and plan.recompute[stage],
                )
                for stage, inside in mine.items()
            ]
            shares = self._steps(plan, order, stages, holdings)
        assert made.profile is not None
        return self._compared(shares, _predicted(made.profile, plan, order, place), plan)

    def _steps(
        self, plan: Plan, order: Program | Policy, stages: Sequence[Stage], holdings: Holdings
    ) -> list[list[Share]]:
        """For every rank of the job the shares of the steps that count."""
        rank, watch = holdings.rank, self._control.watch
        transport = make_transport(plan, rank, holdings.global_ranks, self._device, watch, self._transport)
        parameters = [p for stage in stages for layer in stage.layers.values() for p in layer.parameters()]
        engine = Engine(plan, order, stages, transport, rank=rank, device=self._device, watch=watch)
        found: list[Share] = []
        steps = 2
        try:
            while len(found) < steps:
                self._control.barrier()
                engine.inject(Item(len(found), plan.jobs[0].rows))
                engine.drain()
                found.append(Share.of(engine.events))
                for p in parameters:
                    p.grad = None  # as when a batch begins
                if len(found) == 1:
                    longest = max(self._control.all_gather(found[0].took)) / 1e9
                    steps = 1 + min(STEPS, max(1, int(SECONDS / max(longest, 1e-9))))
        finally:
            engine.close()
        return list(self._control.all_gather(found[1:]))

    def _compared(
        self, shares: Sequence[Sequence[Share]], predicted: tuple[float, dict[int, int]], plan: Plan
    ) -> Trial:
        """Every step takes what the rank took that took longest; of replicas, which are alike, the mean counts."""
        pipelines = [[shares[self._control.ranks.index(rank)] for rank in ranks] for ranks in self._grid.pipelines]
        took = [max(share.took for share in step) for ranks in pipelines for step in zip(*ranks, strict=True)]
        seconds, computed = predicted
        ratios = []
        for stage in range(plan.n_stages):
            each = [s.stages[stage] for ranks in pipelines for rank in ranks for s in rank if stage in s.stages]
            ratios.append(median(each) / computed[stage] if each and computed.get(stage) else 1.0)
        return Trial(seconds, median(took) / 1e9, tuple(ratios))


def _body(number: int, plan: Plan, entering: Mapping[int, Any]) -> Body:
    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x = received
        if number == 0:
            x = pytree.tree_map_only(torch.Tensor, torch.clone, entering[span.rows])
        out = stage.run_layers(item, span, x)
        return _loss(out) if number == plan.n_stages - 1 else out

    return body


def _loss(out: Any) -> torch.Tensor:
    """Something whose gradient reaches all that the last layer gives."""
    parts = [t.float().sum() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(parts[1:], start=parts[0]) if parts else nn.Parameter(torch.zeros(()))


def _predicted(
    profile: ModelProfile, plan: Plan, order: Program | Policy, place: Deployment
) -> tuple[float, dict[int, int]]:
    """Seconds of a step of the layers alone, and nanoseconds that each stage computes in it."""
    nothing = LayerProfile("", ((1, 0.0),), ((1, 0.0),))
    bare = replace(profile.without_steps(), before=replace(nothing, output=profile.before.output), after=nothing)
    fit = evaluated(bare, order, plan, Deployment(place.pipeline))
    share = Share.of(simulate(fit.order, replace(plan, layers=()), fit.costs).events)
    return fit.seconds, share.stages
