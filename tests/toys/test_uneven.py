"""A third-party planner that divides batches differently on each stage, installed through its entry point."""

from __future__ import annotations

from tempfile import mkdtemp
from typing import Any

from lightning.pytorch import Callback

from lightning_pipes.ir import Kind, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import simulate
from lightning_pipes.testing.ranks import run_ranks
from tests.toys.install import install
from tests.trainer.lit import Case, LitOutside, differences, train

EIGHT = (Span(0, 4), Span(4, 8)), (Span(0, 2), Span(2, 4), Span(4, 8))
"""The spans of forward and backward on stage 0, for a batch of 8 samples."""


class Keep(Callback):
    """A callback that keeps the trainer and the plans that ran."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trainer, self.plans = trainer, [w.plan for w in trainer.strategy.current_run.windows]


def uneven(rank: int, folder: str) -> tuple[Any, Any, Any]:
    """Train with the planner, and return the results, the plans, and the replayed and simulated makespans."""
    install("uneven")
    keep = Keep()
    settings = {"schedule": "uneven", "partition": "parameters"}
    found = train(Case(LitOutside, {}, settings, {"max_epochs": 2, "callbacks": [keep]}, evaluate=True), 2, folder)
    report = keep.trainer.strategy.report
    plan, costs = report.record.plan, report.record.costs
    again = simulate(make_schedule("uneven").program(plan), plan, costs.with_recorded_times(report.measured))
    report.save(f"{folder}/report{rank}")  # the advice and the page of the report support such a plan
    return found, keep.plans, (plan, report.replayed.makespan, again.makespan)


def test_gradients_are_those_of_one_process_and_the_replay_that_of_this_plan() -> None:
    """The results equal one process without a pipeline, and the replay of the report simulates the uneven plan."""
    alone = train(Case(LitOutside, trainer={"max_epochs": 2}, evaluate=True), 1, mkdtemp())
    for found, plans, (plan, replayed, simulated) in run_ranks(uneven, 2, mkdtemp(), timeout=120):
        for key in ("outputs", "metrics", "weights", "rates", "steps", "validated", "tested", "predicted"):
            assert differences(found[key], alone[key]) == []
        for ours, theirs in zip(found["gradients"], alone["gradients"], strict=True):
            assert differences(ours, {name: theirs[name] for name in ours}) == []
        for each in plans:
            assert (each.spans(Kind.F, 0), each.spans(Kind.B, 0)) == EIGHT or each.jobs[0].rows == 6
            assert each.spans(Kind.B, 1) != each.spans(Kind.B, 0)
        assert (plan.spans(Kind.F, 0), plan.spans(Kind.B, 0)) == EIGHT
        assert replayed == simulated > 0
