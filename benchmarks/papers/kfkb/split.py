"""The gain of a split backward over whole backwards on slow links.

For each kind of backward, the plans with the best predictions within the same memory take turns on shaped links. The
stages are emulated, or belong to a real GPT with two stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine import Cell, gpt_parts, make_problem
from benchmarks.harness.emulated import sleeping_layer
from benchmarks.harness.netlab import NetLab
from benchmarks.papers.kfkb.links import Measured, Trial, bandwidth, measure, ordered
from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item, Stage
from lightning_pipes.ir import Kind, Plan, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.sim import makespan

# ---- Real GPTs in place of emulated stages, for steps on shaped links.


Problem = tuple[Sequence[nn.Module], torch.Tensor, torch.Tensor, Callable[[Any, torch.Tensor], torch.Tensor]]
"""The modules of the stages, the batch, the target and the loss function."""


class Real(Trial):
    """A trial with real stages. `forward` is the approximate time of a forward, in which messages are measured.

    Attributes:
        samples: the number of samples in a micro-batch.
    """

    samples: ClassVar[int] = 2

    def make_problem(self) -> Problem:
        """Return the modules of all stages, the batch, the target and the loss function."""
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The plan of all schedules."""
        plan = Plan.even(self.stages, self.microbatches, self.samples * self.microbatches)
        return replace(plan, layers=even_partition([1.0] * self.stages, self.stages))

    def stages_on(self, rank: int) -> list[Stage]:
        """Return the stages of a rank, which computes with one thread."""
        torch.set_num_threads(1)
        parts, x, target, loss = self.make_problem()

        def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
            if stage.number < self.stages - 1:
                return out
            return loss(out, target[span.start : span.stop]) * (span.rows / item.rows)

        return [Stage(rank, {rank: parts[rank]}, body)]

    def replicated_step(self, rank: int) -> Callable[[], None] | None:
        """Return a function that runs a step of DDP.

        Each rank has the whole model, computes its share of the samples at once, and averages gradients with the other
        ranks over the same links.
        """
        parts, x, target, loss = self.make_problem()
        model = DistributedDataParallel(nn.Sequential(*parts))
        rows = len(x) // self.stages
        mine = slice(rank * rows, (rank + 1) * rows)

        def step() -> None:
            model.zero_grad()
            torch.autograd.backward(loss(model(x[mine]), target[mine]))

        return step

    @property
    def operations(self) -> int:
        """The floating point operations of matrix products and convolutions in a step, forward and backward."""
        parts, x, target, loss = self.make_problem()
        with FlopCounterMode(display=False) as counted:
            torch.autograd.backward(loss(nn.Sequential(*parts)(x), target))
        return int(counted.get_total_flops())


@dataclass(frozen=True)
class GPT(Real):
    """The GPT of `engine.py`, with eight blocks on any number of stages and two samples in each micro-batch."""

    def make_problem(self) -> Problem:
        return make_problem(Cell("1f1b", self.stages, self.microbatches, "gpt"))


@dataclass(frozen=True)
class WideGPT(Real):
    """A GPT of width 256 with eight blocks, and micro-batches of two samples of 96 tokens."""

    WIDTH: ClassVar[int] = 256
    TOKENS: ClassVar[int] = 96
    FORWARD: ClassVar[float] = 0.016
    """The approximate seconds of a stage's forward."""
    MESSAGE: ClassVar[int] = 2 * TOKENS * WIDTH * 4

    def make_problem(self) -> Problem:
        parts = gpt_parts(self.stages, self.WIDTH)
        torch.manual_seed(1)
        x, target = torch.randint(256, (2, 2 * self.microbatches, self.TOKENS))
        return parts, x, target, nn.functional.cross_entropy

    def replicated_step(self, rank: int) -> Callable[[], None] | None:
        """Return None, because replicas do not show the effect of split backwards."""
        return None


FIRST = "1f1b"


def costs_of(times: dict[Kind, float], links: Sequence[float]) -> CostModel:
    """Return the costs of equal stages. An activation has one byte.

    The first stage has no input gradients, so its W is a whole backward.

    Args:
        times: seconds of each kind of computation.
        links: seconds of a message over each link, in either direction.
    """
    n = len(links) + 1
    seconds = {(kind, s): ((1, t),) for kind, t in times.items() for s in range(n)}
    seconds |= {(Kind.I, 0): ((1, 0.0),), (Kind.W, 0): ((1, times[Kind.I] + times[Kind.W]),)}
    seconds |= {(Kind.SF, s): ((1, t),) for s, t in enumerate(links)}
    seconds |= {(Kind.SB, s + 1): ((1, t),) for s, t in enumerate(links)}
    return CostModel(seconds, activation_bytes=(1,) * n)


def rivals(plan: Plan, costs: CostModel, held: int) -> tuple[dict[str, Candidate], dict[str, Candidate]]:
    """Return the best plans with whole backwards, and the best plans with split backwards, by name.

    In both cases, these are the fixed order and the policy with the best predictions.

    Args:
        plan: the plan with the stages and the micro-batches.
        costs: the costs for the predictions.
        held: the largest number of micro-batches that a stage may hold.
    """
    rows = plan.spans(Kind.F, 0)[0].rows
    costs = replace(costs, activation_bytes=(1,) * plan.n_stages)
    found = tuning_planner(make_schedule("kfkb", k="auto")).list_candidates(plan, costs, held * rows)
    best: dict[tuple[bool, bool], tuple[int, Candidate]] = {}
    for c in found:
        kind = c.plan.split_backward, c.schedule.name == "ready"
        takes = makespan(ordered(c.schedule, c.plan), c.plan, costs)
        if kind not in best or takes < best[kind][0]:
            best[kind] = takes, c
    by_side = {side: [c for (split, _), (_, c) in best.items() if split is side] for side in (False, True)}
    whole, split = ({schedule_label(c.schedule): c for c in by_side[side]} for side in (False, True))
    return whole, split


def in_turn(lab: NetLab, trial: Trial, costs: CostModel, held: int, x: float | None) -> Iterator[tuple[str, Any]]:
    """Measure the best plans with whole and with split backwards, in turns.

    Yields:
        Lines of a table with the name "", and with the name "gain" the median over rounds of the time with whole
        backwards divided by the time with split ones.
    """
    whole, split = rivals(trial.plan, costs, held)
    every = {**whole, **split}
    schedules = {FIRST: make_schedule("1f1b"), **{name: c.schedule for name, c in every.items()}}
    plans = {name: c.plan for name, c in every.items()}
    found = measure(lab, x, replace(trial, schedules=schedules, plans=plans))
    best = [min(side, key=found.median) for side in (whole, split)]
    yield "", f"{FIRST:60} {1e3 * found.median(FIRST):8.1f} ms"
    for name, c in every.items():
        predicted = makespan(ordered(c.schedule, c.plan), c.plan, costs) / 1e6
        yield "", f"{name:60} {1e3 * found.median(name):8.1f} ms, predicted {predicted:.1f}"
    gains = found.ratios(*best)
    yield "", f"whole over split: {min(gains):.3f} to {max(gains):.3f}; a message {1e3 * found.transfer:.2f} ms"
    yield "gain", statistics.median(gains)


def emulated(
    stages: int, microbatches: int, forward: float, message: int, held: int, rounds: int, x: float, slow: int = -1
) -> Iterator[tuple[str, Any]]:
    """Measure emulated stages. A whole backward takes two forwards, and each of its two parts takes one.

    Args:
        stages: the number of stages.
        microbatches: the number of micro-batches.
        forward: seconds of a forward.
        message: bytes of a message.
        held: the largest number of micro-batches that a stage may hold.
        rounds: the number of rounds.
        x: the time of a message, in forwards.
        slow: the stage whose link to the next stage has this speed, while all other links are not limited. With -1, all
            links have this speed.
    """
    layer = sleeping_layer(forward, 2 * forward, weights=forward, message_bytes=message)
    trial = Trial({}, stages, microbatches, forward, message, rounds, tuned=False, layer=layer)
    times = {Kind.F: forward, Kind.B: 2 * forward, Kind.I: forward, Kind.W: forward}
    links = [x * forward if slow in (-1, s) else 0.0 for s in range(stages - 1)]
    with NetLab(stages) as lab:
        if slow >= 0:
            lab.shape(bandwidth(x * forward, message), [(slow, slow + 1), (slow + 1, slow)])
        yield from in_turn(lab, trial, costs_of(times, links), held, x if slow < 0 else None)


def gpt(rounds: int) -> Iterator[tuple[str, Any]]:
    """Measure a real GPT with two stages on links on which a message takes about one forward.

    The blocks are wide enough that splitting costs little, and there are few micro-batches. The times of stages are
    measured before, with whole and with split backwards.
    """
    trial = WideGPT({}, 2, 4, WideGPT.FORWARD, WideGPT.MESSAGE, rounds, tuned=False)
    with NetLab(2) as lab:
        costs = seen(measure(lab, 1.0, replace(trial, rounds=2, **looked_at(trial))))
        yield from in_turn(lab, trial, costs, 4, 1.0)


def looked_at(trial: Trial) -> dict[str, Any]:
    """Return a schedule with whole backwards and one with split backwards, and their plans."""
    split = make_schedule("zero_bubble")
    return {
        "schedules": {FIRST: make_schedule("1f1b"), "zero_bubble": split},
        "plans": {"zero_bubble": replace(trial.plan, split_backward=True)},
    }


def seen(found: Measured) -> CostModel:
    """Return the costs that were measured in the steps of both schedules."""
    both = [found.costs(name) for name in (FIRST, "zero_bubble")]
    return replace(both[0], seconds={**both[1].seconds, **both[0].seconds})
