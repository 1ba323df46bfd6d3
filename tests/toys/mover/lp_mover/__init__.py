"""A complete third-party schedule in one folder: every few batches, a layer moves to the next stage during training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_pipes.ir import Plan, Program, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.partition import with_layer
from lightning_pipes.planning.planner import EvenPlanner, Problem


@dataclass(frozen=True)
class Mover(Schedule):
    """1F1B with a planner that moves layers.

    Every `every` batches, the pipeline is drained. If `moves` is True, a layer then moves from the stage with the most
    layers to the stage before or after it.
    """

    every: int = 10
    moves: bool = True
    name: ClassVar[str] = "mover"
    like: ClassVar[str] = "1f1b"

    def make_planner(self) -> object:
        return MovingPlanner(self.every, self.moves)

    def program(self, plan: Plan) -> Program:
        order: Schedule = make_schedule(self.like)
        return order.program(plan)


@dataclass(frozen=True)
class StashingMover(Mover):
    """PipeDream-2BW, which stashes weights, with the same moves.

    All stages have the same delay of updates, so a layer is trained in the same way on each of them. In PipeDream, a
    move would change the delay of a layer.
    """

    name: ClassVar[str] = "stashing_mover"
    like: ClassVar[str] = "pipedream_2bw"
    flushes: ClassVar[bool] = False

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        return tuple(make_schedule(self.like).weight_versions(plan))


@dataclass(frozen=True)
class MovingPlanner(EvenPlanner):
    """A planner with even micro-batches that changes the layers of the stages regularly."""

    every: int = 10
    moves: bool = True

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        if not self.moves:
            return replace(plan)
        sizes = [span.rows for span in plan.layers]
        largest = max(range(len(sizes)), key=lambda stage: sizes[stage])
        down = largest + 1 == len(sizes)
        layer = plan.layers[largest].start if down else plan.layers[largest].stop - 1
        return with_layer(plan, layer, plan.ranks[largest + (-1 if down else 1)])
