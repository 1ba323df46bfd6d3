"""Tests of `Prediction`, which corrects a decision that the measured steps contradict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.ir import Kind, Plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import simulate
from lightning_pipes.trainer.plan import prediction
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.reports.timing import Share

ROWS, PIECES, LAYERS = 8, 4, 6
PLACE = Deployment(Cluster((Device(), Device())))
SCHEDULE = make_schedule("1f1b")
STEPS = prediction.N_SKIPPED_STEPS + prediction.MIN_COMPARED_STEPS


def profile(*seconds: float) -> ModelProfile:
    """Return a profile with the given forward seconds of each layer, for any number of rows.

    A backward takes twice as long as a forward.
    """
    return ModelProfile(tuple(LayerProfile(str(n), ((1, s),), ((1, 2 * s),)) for n, s in enumerate(seconds)))


def decision(known: ModelProfile) -> Decision:
    """Return the decision for two ranks by a profile."""
    request = RunRequest(SCHEDULE, PIECES, False, "auto")
    return request.measured(request.unmeasured([1] * LAYERS, 2), known, ROWS, PLACE)


def windows(true: Sequence[float], made: Decision, plan: Plan | None = None) -> list[Window]:
    """Return one window per rank, in which layers take the given true seconds."""
    plan = plan or made.plans().for_rows(ROWS)[0]
    each = [sum(true[span.start : span.stop]) for span in made.layers]
    costs = CostModel({(k, s): ((1, t * f),) for s, t in enumerate(each) for k, f in ((Kind.F, 1), (Kind.B, 2))})
    order = SCHEDULE.program(plan)
    events = simulate(order, replace(plan, layers=()), costs).events
    return [Window(plan, order, [e for e in events if e.rank == rank]) for rank in range(2)]


class Told:
    """A control for both ranks in one process. The other rank is always at the same step, with its own window."""

    position = 0
    ranks = (0, 1)

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.gathered = 0

    def all_gather(self, own: Any) -> list[Any]:
        self.gathered += 1
        return [own, self.shares[-len(own) :]]

    def broadcast(self, thing: Any, source: int) -> Any:
        return thing


def looks(made: Decision, alone: bool = True, stays: bool = False) -> tuple[Prediction, Told]:
    """Return a prediction for a decision, and its control."""
    told = Told()
    ranks: Any = SimpleNamespace(control=told, grid=SimpleNamespace(pipelines=[[0, 1]]))
    return Prediction(made, ranks, alone, stays), told


def run(looking: tuple[Prediction, Told], pair: Sequence[Window], steps: int = STEPS) -> Decision | None:
    """Return the last answer to a number of steps."""
    found = None
    for _ in range(steps):
        looking[1].shares.append(Share.from_events(pair[1].events))
        found = looking[0].correct_decision([pair[0]])
    return found


def cut(made: Decision) -> list[int]:
    return [span.start for span in made.layers[1:]]


def test_cut_is_corrected_by_step_times() -> None:
    """Check that the cut changes if layers take other times than in the profile.

    In the profile, the first layer takes as long as all others together. In fact, all layers take the same time.
    """
    made = decision(profile(5, 1, 1, 1, 1, 1))
    assert cut(made) == [1]
    looking = looks(made)
    true = windows([1.0] * LAYERS, made)
    assert run(looking, true, STEPS - 1) is None
    found = run(looking, true, 1)
    assert found is not None
    assert cut(found) == [3]
    assert found.computing == pytest.approx((PIECES + 1) * 9)  # three layers of 1 + 2 seconds on each rank
    assert "Stages now begin at layers [3] instead of [1]" in found.why
    assert made.why in found.why
    assert run(looking, windows([1.0] * LAYERS, found)) is None
    assert run(looking, windows([7.0] * LAYERS, found), 2 * STEPS) is None
    assert looking[1].gathered == 2  # after one correct look, no rank looks again


def test_only_the_prediction_changes_if_all_stages_are_slower() -> None:
    """Check that only the predicted time changes if all layers are slower by the same factor."""
    looking = looks(made := decision(profile(*[1.0] * LAYERS)))
    found = run(looking, windows([1.5] * LAYERS, made))
    assert found is not None
    assert (cut(found), found.computing) == ([3], pytest.approx(1.5 * (made.computing or 0)))
    assert "no other cut is at least 5% faster" in found.why


@pytest.mark.parametrize("alone", [True, False])
def test_run_continues_if_steps_are_as_predicted(alone: bool) -> None:
    """Check that a small difference changes nothing, and that a run that shares its ranks is never compared."""
    looking = looks(made := decision(profile(*[1.0] * LAYERS)), alone)
    assert run(looking, windows([1.09 if alone else 3.0] * LAYERS, made), 3 * STEPS) is None
    assert looking[1].gathered == alone


def test_layers_that_have_to_stay_do() -> None:
    looking = looks(made := decision(profile(5, 1, 1, 1, 1, 1)), stays=True)
    found = run(looking, windows([1.0] * LAYERS, made))
    assert found is not None
    assert (cut(found), found.computing) == ([1], pytest.approx(3 + 4 * 15))
    assert "layers cannot be moved in this run" in found.why


def test_a_run_is_corrected_three_times_at_most() -> None:
    looking, slow, made = looks(first := decision(profile(*[1.0] * LAYERS))), 1.0, first
    for _ in range(prediction.MAX_COMPARISONS):
        slow *= 1.5
        found = run(looking, windows([slow] * LAYERS, made))
        assert found is not None
        made = found
    assert run(looking, windows([99.0] * LAYERS, made), 3 * STEPS) is None


def test_other_batches_are_not_compared() -> None:
    made = decision(profile(*[1.0] * LAYERS))
    short = made.plans().for_rows(ROWS - 1)[0]
    assert run(looks(made), windows([3.0] * LAYERS, made, short), 2 * STEPS) is None
    looking = looks(made)  # a second plan is adopted after some steps
    assert run(looking, windows([3.0] * LAYERS, made), 3) is None
    other = replace(made, microbatches=2).plans().for_rows(ROWS)[0]
    assert run(looking, windows([3.0] * LAYERS, made, other), 3 * STEPS) is None
