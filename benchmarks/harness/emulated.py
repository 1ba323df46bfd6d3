"""Emulated layers, which take the time given by a profile and compute nothing.

Because emulated layers hardly use the processor, two cores can emulate eight devices. Measurements with them are valid
for the order of computations, for transport and for overhead, but not for anything else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipes.cost import LayerProfile
from lightning_pipes.cost.layer import at_rows
from lightning_pipes.engine import Engine, FailureWatch, Item, Stage, make_transport
from lightning_pipes.ir import Plan, Policy, Program, Span
from lightning_pipes.ir.clock import read_nanoseconds, read_seconds, sleep
from lightning_pipes.sim.timeline import Event

SPIN = 0.00005
"""Seconds before the end of a pause at which `pause_until` stops sleeping and begins to spin."""


def request_realtime_priority() -> None:
    """Request real-time priority for this process, so that other programs do not distort measurements.

    The request is ignored if the operating system does not allow it.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))


def join_ranks(rank: int, ranks: int | None = None, realtime: bool = True) -> FailureWatch:
    """Join the other ranks over gloo, and return the failure watch of this rank.

    Args:
        rank: this rank.
        ranks: the number of ranks for `FailureWatch`, or None for its default.
        realtime: whether this process first requests real-time priority, so that other programs do not affect the
            measurement. Use it for layers that sleep. With real layers, which keep all cores busy, helper threads would
            have to wait for a core.
    """
    if realtime:
        request_realtime_priority()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    store = dist.distributed_c10d._get_default_store()
    return FailureWatch(store, rank) if ranks is None else FailureWatch(store, rank, ranks)


def pause_until(end: float) -> None:
    """Wait until the clock reaches `end`, to within a few microseconds.

    The function sleeps first and then spins, because a sleep alone ends late by as much as the whole overhead of an
    engine.

    Args:
        end: time of the clock `read_seconds`, in seconds.
    """
    left = end - read_seconds() - SPIN
    if left > 0:
        sleep(left)
    while read_seconds() < end:
        os.sched_yield()
        sleep(0.0)  # lets other threads run Python code, as during a real kernel


def sleeping_layer(forward: float, backward: float, weights: float = 0.0, message_bytes: int = 4) -> LayerProfile:
    """Return the profile of a layer that takes a fixed time for any number of rows.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the whole backward pass.
        weights: seconds of the backward pass that compute weight gradients. With 0, the backward pass is not split.
        message_bytes: bytes of the output per row, a multiple of 4.
    """
    layer = LayerProfile("sleeping", ((1, forward),), ((1, backward),), gradient_bytes=4, output=((1, message_bytes),))
    if not weights:
        return layer
    return replace(layer, input_backward=((1, backward - weights),), weight_backward=((1, weights),))


class _Sleep(torch.autograd.Function):
    """Copies its input, and sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, forward: float, backward: float) -> Any:
        end = read_seconds() + forward
        ctx.backward_seconds = backward
        out = x.clone()
        pause_until(end)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        end = read_seconds() + ctx.backward_seconds
        fresh, weight = gradients[0].clone(), torch.zeros(())
        pause_until(end)
        return fresh, weight if ctx.needs_input_grad[1] else None, None, None


class _SleepLater(torch.autograd.Function):
    """Copies a weight, and sleeps while its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        pause_until(read_seconds() + ctx.backward_seconds)
        return gradients[0], None


class EmulatedLayer(nn.Module):
    """A layer that returns its input after the time that its profile specifies for the number of rows.

    If the backward can be split, its weight is not on the path of input gradients, except if the input needs no
    gradient. Otherwise, torch's pipelines would repeat the input gradients to compute the gradient of the weight.

    Args:
        profile: seconds of the layer by number of rows.
        speed: relative speed of the device; all times are divided by it.
    """

    def __init__(self, profile: LayerProfile, speed: float = 1.0) -> None:
        super().__init__()
        self.profile, self.speed = profile, speed
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.profile
        back = p.input_backward if p.weight_backward else p.backward
        forward, backward, weights = (at_rows(t, len(x)) / self.speed for t in (p.forward, back, p.weight_backward))
        weight = None if p.weight_backward and x.requires_grad else self.weight
        out: torch.Tensor = _Sleep.apply(x, weight, forward, backward)  # type: ignore[no-untyped-call]
        if p.weight_backward:  # the sum leads to both, so that a split backward can separate them
            out = out + _SleepLater.apply(self.weight, weights)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Emulation:
    """The training of a model of emulated layers.

    Attributes:
        plan: the plan, including the layers of each stage.
        order: the program or the policy that specifies the order of computations.
        layers: the profiles of all layers of the model. Their outputs have equal sizes.
        speeds: the relative speed of each rank's device.
    """

    plan: Plan
    order: Program | Policy
    layers: tuple[LayerProfile, ...]
    speeds: tuple[float, ...]

    @property
    def rows(self) -> int:
        """The number of samples in a batch."""
        return self.plan.jobs[0].rows

    def stages(self, rank: int) -> list[Stage]:
        """Return the stages of a rank. They have no optimizer step."""
        (size,) = {layer.output[-1][1] / layer.output[-1][0] for layer in self.layers}
        x = torch.zeros(self.rows, int(size) // 4)
        last = self.plan.n_stages - 1

        def run_body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
            return out.mean() if stage.number == last else out

        return [
            Stage(
                s,
                {n: EmulatedLayer(self.layers[n], self.speeds[rank]) for n in _numbers(self.plan.layers[s])},
                run_body,
            )
            for s in self.plan.stages[rank]
        ]


@dataclass(frozen=True)
class EmulatedStep:
    """One rank's record of the steps of one training.

    Attributes:
        spans: the start and the end of each step, in nanoseconds.
        events: the events that the engine recorded in each step.
    """

    spans: tuple[tuple[int, int], ...]
    events: tuple[tuple[Event, ...], ...]


def run_steps(
    plan: Plan,
    order: Program | Policy,
    stages: Sequence[Stage],
    rank: int,
    watch: FailureWatch,
    steps: int,
    warm_up: Sequence[int],
) -> EmulatedStep:
    """Train for a number of steps and return this rank's record of them.

    This is a collective call of all ranks of the default process group. The ranks begin every step together.

    Args:
        plan: the plan of the training.
        order: the program or the policy that specifies the order of computations.
        stages: the stages of this rank.
        rank: this rank.
        watch: the failure watch of this rank.
        steps: the number of steps that are recorded.
        warm_up: the number of samples of each batch before the recorded steps. A few samples are enough to set up the
            channels between ranks.
    """
    transport = make_transport(plan, rank, range(plan.n_ranks), torch.device("cpu"), watch)
    engine = Engine(plan, order, stages, transport, rank=rank, watch=watch)
    spans, events = [], []
    for number, rows in enumerate([*warm_up, *(steps * [plan.jobs[0].rows])]):
        dist.barrier()
        started = read_nanoseconds()
        engine.inject(Item(number, rows))
        engine.drain()
        spans.append((started, read_nanoseconds()))
        events.append(tuple(engine.events))
    engine.close()
    return EmulatedStep(tuple(spans[len(warm_up) :]), tuple(events[len(warm_up) :]))


def step_seconds(by_rank: Sequence[EmulatedStep]) -> list[float]:
    """Return the seconds of each step, from the earliest start on any rank to the latest end."""
    each = zip(*(found.spans for found in by_rank), strict=True)
    return [(max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 for spans in each]


def _numbers(span: Span) -> range:
    return range(span.start, span.stop)
