"""Layers that take the time of a profile and compute nothing, so that two cores can emulate eight devices. They are
valid for order, transport and overhead only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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


def request_realtime_priority() -> None:
    """Request priority where allowed, so that other programs on a shared machine do not distort measurements."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))


def pause_until(end: float) -> None:
    """Return at `end` of the clock, to some microseconds. It sleeps, then spins, because a sleep alone ends late by as
    much as an engine's whole overhead."""
    left = end - read_seconds() - SPIN
    if left > 0:
        sleep(left)
    while read_seconds() < end:
        os.sched_yield()
        sleep(0.0)  # other threads may have the interpreter, as during a real kernel


def sleeping_layer(forward: float, backward: float, weights: float = 0.0, message_bytes: int = 4) -> LayerProfile:
    """Return a layer that takes fixed seconds for any number of rows. `weights` seconds of the backward belong to
    weight gradients. The output has `message_bytes` per row, a multiple of 4."""
    layer = LayerProfile("sleeping", ((1, forward),), ((1, backward),), gradient_bytes=4, output=((1, message_bytes),))
    if not weights:
        return layer
    return replace(layer, input_backward=((1, backward - weights),), weight_backward=((1, weights),))


class _Sleep(torch.autograd.Function):
    """Takes a time forward and backward, and passes its input on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
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
        return fresh, weight, None, None


class _SleepLater(torch.autograd.Function):
    """Passes a weight on, and takes a time for its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        pause_until(read_seconds() + ctx.backward_seconds)
        return gradients[0], None


class EmulatedLayer(nn.Module):
    """Sleeps according to its profile and the number of rows, on a device of relative `speed`; passes its input on."""

    def __init__(self, profile: LayerProfile, speed: float = 1.0) -> None:
        super().__init__()
        self.profile, self.speed = profile, speed
        self.weight = nn.Parameter(torch.zeros(()))
        if profile.weight_backward:
            self.split_weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.profile
        back = p.input_backward if p.weight_backward else p.backward
        forward, backward, weights = (at_rows(t, len(x)) / self.speed for t in (p.forward, back, p.weight_backward))
        out: torch.Tensor = _Sleep.apply(x, self.weight, forward, backward)  # type: ignore[no-untyped-call]
        if p.weight_backward:  # a sum leads to both, so that a backward in two parts finds them apart
            out = out + _SleepLater.apply(self.split_weight, weights)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Emulation:
    """Training of emulated layers.

    Attributes:
        plan: with the layers of each stage.
        order: what orders it.
        layers: all layers of the model, with outputs of equal size.
        speeds: of each rank's device.
    """

    plan: Plan
    order: Program | Policy
    layers: tuple[LayerProfile, ...]
    speeds: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Samples in a batch."""
        return self.plan.jobs[0].rows

    def stages(self, rank: int) -> list[Stage]:
        """Return the stages of a rank, without an update."""
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
    """One rank's record of the steps of one training: start and end in nanoseconds, and the engine's events."""

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
    """Train for `steps` steps: a collective call of all ranks of the default group, which start every step together.

    Args:
        warm_up: samples of batches before, which do not count; a few are enough to set channels up.
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
    """Return the seconds of each step, from the first rank's start to the last one's end."""
    each = zip(*(found.spans for found in by_rank), strict=True)
    return [(max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9 for spans in each]


def _numbers(span: Span) -> range:
    return range(span.start, span.stop)
