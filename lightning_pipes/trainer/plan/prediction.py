"""Comparison of the first steps of a run with the prediction of its decision, and corrections of the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Plan, PlanError
from lightning_pipes.planning.balance import MIN_CUT_GAIN
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.trial import Trial, simulate_step
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.reports.timing import Share

COMPARED_SECONDS = 3.0
"""The seconds of steps that are compared, within the limits MIN_COMPARED_STEPS and MAX_COMPARED_STEPS for their
number."""
MIN_COMPARED_STEPS, MAX_COMPARED_STEPS = 10, 50
N_SKIPPED_STEPS = 2
"""The number of first steps that are skipped, because they contain one-time work."""
MAX_COMPARISONS = 3
"""The largest number of comparisons in a run. Another comparison follows each correction of the decision."""


class Prediction:
    """Compares the first steps of a run, and the first steps after each correction, with their prediction.

    All methods are collective: all ranks make one object and make the same calls.

    Args:
        decision: the decision of the run. A decision without a prediction is not checked.
        ranks: the ranks of the run.
        alone: whether no siblings of an array compute on the ranks.
        stays: whether layers must stay on their ranks even if the decision allows moves.
        contradicted: called on rank 0 if steps contradict the decision.
    """

    def __init__(
        self,
        decision: Decision,
        ranks: Ranks,
        alone: bool,
        stays: bool,
        contradicted: Callable[[], None] = lambda: None,
    ) -> None:
        self._contradicted = contradicted
        self._made = replace(decision, movable=decision.movable and not stays)
        self._ranks = ranks
        self._left = MAX_COMPARISONS if alone and decision.computing is not None else 0
        self._plan: Plan | None = None
        self._shares: list[Share] = []

    def correct_decision(self, windows: Sequence[Window]) -> Decision | None:
        """Return the corrected decision if steps contradict the current one, and None otherwise.

        Args:
            windows: the last windows of this rank. The last one must be new since the previous call.
        """
        if not self._left:
            return None
        made, window = self._made, windows[-1]
        if window.plan.jobs[0].rows != made.rows or window.plan.layers != made.layers:
            return None  # this is a short batch, or layers have not moved yet
        if window.plan is not (self._plan or window.plan):
            self._left = 0  # another schedule was adopted
            return None
        self._plan = window.plan
        self._shares.append(Share.from_events(window.events))
        assert made.computing is not None
        wanted = min(
            MAX_COMPARED_STEPS,
            max(MIN_COMPARED_STEPS, int(COMPARED_SECONDS / made.computing) if made.computing else MAX_COMPARED_STEPS),
        )
        if len(self._shares) < N_SKIPPED_STEPS + wanted:
            return None
        own, self._shares = self._shares[N_SKIPPED_STEPS:], []
        control = self._ranks.control
        shares = control.all_gather(own)
        found: Decision | None = control.broadcast(
            self._found(made, shares, window) if control.position == 0 else None, control.ranks[0]
        )
        self._left = 0 if found is None else self._left - 1
        if found is None:
            return None
        self._plan = None
        if control.position == 0:
            self._contradicted()
        rank_zero_info(found.why.splitlines()[-1])
        self._made = found
        return found

    def _found(self, made: Decision, shares: Sequence[Sequence[Share]], window: Window) -> Decision | None:
        assert made.profile is not None
        assert made.deployment is not None
        predicted = simulate_step(made.profile, window.plan, window.order, made.deployment)
        trial = Trial.from_steps(shares, self._ranks.control.ranks, self._ranks.grid.pipelines, predicted)
        if not trial.is_contradicted:
            return None
        first, *_, last = trial.ratios if len(trial.ratios) > 1 else trial.ratios * 2
        profile = made.profile.scaled(trial.factors(made.layers), first, last)
        between, _ = simulate_step(profile, window.plan, window.order, made.deployment)
        rest = trial.measured / between  # other times of messages, and all work without a cost in the model
        profile = profile.scaled([rest] * len(profile.layers), rest, rest)
        found = made.predicted(profile)
        if made.movable:
            with suppress(PlanError):  # no cut fits with these times either, so the run continues
                found = made.cut_anew(profile)
        return replace(
            found, why="\n".join([*made.why.splitlines(), _correction_text(made, found, trial, len(shares[0]))])
        )


def _correction_text(made: Decision, found: Decision, trial: Trial, steps: int) -> str:
    was, now = ([span.start for span in each.layers[1:]] for each in (made, found))
    assert found.computing is not None
    if was != now:
        then = f"Stages now begin at layers {now} instead of {was}"
    elif made.movable:
        then = f"Stages still begin at layers {was}, because no other cut is at least {MIN_CUT_GAIN:.0%} faster"
    else:
        then = f"Stages still begin at layers {was}, because layers cannot be moved in this run"
    return (
        f"{steps} steps took {seconds_text(1e9 * trial.measured)} each, excluding the optimizer, but the prediction "
        f"was {seconds_text(1e9 * trial.predicted)}. The layer times were corrected. {then}, and the prediction is now "
        f"{seconds_text(1e9 * found.computing)}"
    )
