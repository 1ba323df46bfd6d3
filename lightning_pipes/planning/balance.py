"""Whether a cut by measured time is worth leaving the even one for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import Plan, PlanError, Policy, Schedule, Span
from lightning_pipes.planning.fit import evaluated, fit_layers, ordered
from lightning_pipes.sim.units import seconds_text

WORTH_IT = 0.05
"""The share of a step that another cut must save: what is measured once, in a second, is not exact."""


@dataclass(frozen=True)
class Balance:
    """The layers of each stage.

    Attributes:
        seconds: of a step, simulated.
        why: for people.
    """

    layers: tuple[Span, ...]
    seconds: float
    why: str


def balanced(
    profile: ModelProfile, schedule: Schedule | Policy, plan: Plan, even: Sequence[Span], place: Deployment
) -> Balance:
    """The fastest cut within the devices' memory if it saves enough, else `even`.

    Where no cut fits by the profile, `even` is kept: a run that was asked for may fit after all.

    Raises:
        PlanError: the schedule does not flush between batches, so there is no step to simulate.
    """
    order, _ = ordered(schedule, plan)
    before = evaluated(profile, order, replace(plan, layers=tuple(even)), place)
    limits = [device.memory for device in place.pipeline.devices]
    fits = all(limit is None or size <= limit for size, limit in zip(before.peak_bytes, limits, strict=True))
    at = [span.start for span in even[1:]]
    try:
        best = fit_layers(profile, schedule, plan, place)
    except PlanError as error:
        if fits:
            raise
        return Balance(tuple(even), before.seconds, f"stages begin at layers {at}, evenly by parameters: {error}")
    if fits and best.seconds > before.seconds * (1 - WORTH_IT):
        return Balance(
            tuple(even),
            before.seconds,
            f"stages begin at layers {at}, evenly by parameters: by measured time a step would take "
            f"{seconds_text(1e9 * best.seconds)} instead of {seconds_text(1e9 * before.seconds)}",
        )
    saved = f"instead of {seconds_text(1e9 * before.seconds)} with {at}, evenly by parameters"
    return Balance(
        best.plan.layers,
        best.seconds,
        f"stages begin at layers {best.cuts}: by measured time a step takes {seconds_text(1e9 * best.seconds)} "
        + (saved if fits else f"and fits into memory, which {at}, evenly by parameters, does not"),
    )
