"""Reference gradients of training without a pipeline, for comparison with the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine import Engine, Item, LoopbackTransport, Mailbox, Stage
from lightning_pipes.engine.compute.stage import NOTHING_SHARED, RankResources
from lightning_pipes.ir import Plan, Policy, Program, Span

MODEL_WIDTH = 3


@dataclass(frozen=True)
class Gradients:
    """Gradients by job, layer and parameter name."""

    values: Mapping[tuple[int, int, str], torch.Tensor]

    def assert_equal(self, other: Gradients, exact: bool = False) -> None:
        """Check that all gradients are equal up to rounding.

        Rounding errors occur because the gradients of samples may be summed in another order. With `exact`, gradients
        must be equal bit by bit.

        Raises:
            AssertionError: if a gradient differs. The message names the parameter.
        """
        rtol, atol = (0.0, 0.0) if exact else (1e-10, 1e-12)
        assert self.values.keys() == other.values.keys()
        for key, value in self.values.items():
            torch.testing.assert_close(value, other.values[key], rtol=rtol, atol=atol, msg=f"(job, layer, name) {key}")


def _layers(plan: Plan, job: int) -> list[nn.Linear]:
    torch.manual_seed(job)
    return [nn.Linear(MODEL_WIDTH, MODEL_WIDTH, dtype=torch.float64) for _ in range(plan.n_stages)]


def _batch(job: int, number: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * job + number)
    return torch.randn(rows, MODEL_WIDTH, dtype=torch.float64, generator=generator)


def _rows(plan: Plan, job: int, rows: int) -> int:
    return min(rows, plan.jobs[job].rows)


def _gradients(models: list[list[nn.Linear]]) -> Gradients:
    found = {
        (job, layer, name): p.grad
        for job, layers in enumerate(models)
        for layer, module in enumerate(layers)
        for name, p in module.named_parameters()
    }
    return Gradients({key: g for key, g in found.items() if g is not None})


def gradients_alone(plan: Plan, rows: int) -> Gradients:
    """Return the gradients of a model with one layer per stage, computed batch by batch without a pipeline."""
    models = [_layers(plan, job) for job in range(len(plan.jobs))]
    for job, layers in enumerate(models):
        for number in range(plan.batches):
            x = _batch(job, number, _rows(plan, job, rows))
            nn.Sequential(*layers)(x).tanh().mean().backward()
    return _gradients(models)


def gradients_in_a_pipeline(plan: Plan, order: Program | Policy, rows: int) -> Gradients:
    """Return the same gradients as computed by the engine, with all ranks in this process.

    The weights are not changed.
    """
    models = [_layers(plan, job) for job in range(len(plan.jobs))]

    def run_body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x = _batch(item.job, item.number, item.rows)[span.start : span.stop] if received is None else received
        out = stage.run_layers(item, span, x)
        return out if stage.number < plan.n_stages - 1 else out.tanh().mean() * span.rows / item.rows

    def stages(rank: int) -> list[Stage]:
        return [Stage(s, {s: m[s]}, run_body, job=job) for s in plan.stages[rank] for job, m in enumerate(models)]

    pipe = Loopback(plan, order, stages)
    for job in range(len(plan.jobs)):
        for number in range(plan.batches):
            pipe.inject(lambda job=job, number=number: Item(number, _rows(plan, job, rows), job=job))  # type: ignore[misc]
    pipe.drain()
    return _gradients(models)


class Loopback:
    """The engines of all ranks in one process. Each engine makes progress as long as it can.

    Args:
        plan: the plan.
        order: the program or policy.
        stages: returns the stages of a rank.
        resources: returns what the stages and the engine of a rank share.
    """

    def __init__(
        self,
        plan: Plan,
        order: Program | Policy,
        stages: Callable[[int], Sequence[Stage]],
        resources: Callable[[int], RankResources] = lambda rank: NOTHING_SHARED,
    ) -> None:
        boxes = [Mailbox() for _ in range(plan.n_ranks)]
        self.engines = [
            Engine(plan, order, stages(r), LoopbackTransport(boxes, r), rank=r, resources=resources(r))
            for r in range(plan.n_ranks)
        ]

    def inject(self, make: Callable[[], Item]) -> None:
        """Add a batch on every rank. `make` is called once per rank."""
        for engine in self.engines:
            engine.inject(make())

    def progress(self) -> None:
        """Run until no rank can run another instruction."""
        while sum(engine.progress(wait=False) for engine in self.engines):
            pass

    def drain(self) -> None:
        """Run all remaining instructions and close the window.

        Raises:
            AssertionError: if the ranks wait for each other.
        """
        for engine in self.engines:
            engine.end_window()
        self.progress()
        self.progress()  # layers return to their ranks after all ranks have sent them
        for rank, engine in enumerate(self.engines):
            assert engine.is_satisfied, f"rank {rank} still waits, and so do all others"
            engine.drain()

    def adopt(self, plan: Plan, order: Program | Policy) -> None:
        """Adopt another plan and order for the next window on every rank."""
        for engine in self.engines:
            engine.adopt(plan, order)
