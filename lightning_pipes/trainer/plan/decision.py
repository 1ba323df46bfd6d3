"""A run as asked for and as decided: schedule, micro-batches, recomputation and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import Policy, Schedule, Span
from lightning_pipes.planning.auto import Choice, choose, numbers_to_try
from lightning_pipes.planning.balance import balanced
from lightning_pipes.planning.fit import evaluated, ordered
from lightning_pipes.planning.planner import Problem, planned, planner_of
from lightning_pipes.planning.wording import schedule_label
from lightning_pipes.sim.units import seconds_text
from lightning_pipes.trainer.plan.plans import Plans, stage_layers
from lightning_pipes.trainer.plan.settings import AUTO, PARAMETERS

LEAST_ROWS = "least_rows"
"""In a profile's notes: the fewest samples that the model was found to run on, where fewer were tried in vain."""


@dataclass(frozen=True)
class Decision:
    """The decision on a run.

    Attributes:
        ranks: the rank of each stage.
        layers: the layers of each stage.
        seconds: of a step, as predicted by a profile; None where nothing was measured.
        computing: seconds of them up to the optimizers' part, which is what a report measures.
        rows: samples of the batch that they are predicted for.
        why: for people; empty where there was nothing to choose.
        table: what was compared, for people.
        profile: of the layers, where they were measured.
        place: devices, links and memory, where they were asked for.
    """

    schedule: Schedule | Policy
    microbatches: int | None
    recompute: bool
    ranks: tuple[int, ...]
    layers: tuple[Span, ...]
    seconds: float | None = None
    computing: float | None = None
    rows: int = 0
    why: str = ""
    table: str = ""
    profile: ModelProfile | None = None
    place: Deployment | None = None

    @property
    def endless(self) -> bool:
        """Whether batches follow each other without a flush."""
        plans = self.plans()
        _, order = plans.for_rows(plans.trial_rows)
        return order.endless

    def plans(self) -> Plans:
        """The plans of its batches."""
        return Plans(
            Problem(
                self.schedule,
                max(self.ranks) + 1,
                1,
                self.microbatches,
                self.recompute,
                self.layers,
                self.profile,
                self.place,
            )
        )


@dataclass(frozen=True)
class Wanted:
    """The wishes of the user.

    Attributes:
        schedule: the one named; what stands in for it where `chooses`.
        microbatches: of a batch; None for the default, or what is best where `chooses`.
        partition: "auto", "parameters", or the layers at which stages begin.
        chooses: schedule, micro-batches and recomputation are to be chosen.
    """

    schedule: Schedule | Policy
    microbatches: int | None
    recompute: bool
    partition: str | list[int]
    chooses: bool = False

    def unmeasured(self, sizes: Sequence[int], ranks: int) -> Decision:
        """The decision if nobody measures the layers; `sizes` are their parameters.

        Raises:
            PlanError: layers can't be cut so, or the schedule can't order it.
        """
        where = self.schedule.placement(ranks)
        partition = PARAMETERS if isinstance(self.partition, str) else self.partition
        layers = stage_layers(partition, sizes, len(where))
        found = Decision(self.schedule, self.microbatches, self.recompute, where, layers)
        plans = found.plans()
        plans.for_rows(plans.trial_rows)
        return found

    @property
    def needs_profile(self) -> bool:
        """Whether layers are to be measured."""
        return self.chooses or self.partition == AUTO

    def microbatch_rows(self, rows: int, ranks: int) -> tuple[int, ...]:
        """The numbers of samples to measure for batches of `rows`: ascending, none twice."""
        if self.chooses and self.microbatches is None:
            return tuple(sorted({max(1, n) for n in (1, rows // (4 * ranks), -(-rows // ranks))}))
        stages = len(self.schedule.placement(ranks))
        return planner_of(self.schedule).measures(rows, stages, self.microbatches)

    def sample_rows(self, rows: int, ranks: int) -> int:
        """How many samples of a batch of `rows` are needed to run micro-batches as large as may be decided."""
        if self.chooses and self.microbatches is None:
            return -(-rows // max(1, ranks // 2))
        return max(self.microbatch_rows(rows, ranks))

    def measured(self, plain: Decision, profile: ModelProfile, rows: int, place: Deployment) -> Decision:
        """The decision by the profile of the layers, for batches of `rows` samples on these devices.

        Args:
            plain: what would run without a profile.

        Raises:
            PlanError: a schedule is to be chosen, and none fits into the devices' memory.
        """
        if self.chooses:
            return self._chosen(profile, rows, place)
        ranks = max(plain.ranks) + 1
        asked = plain.microbatches
        plan = planned(Problem(plain.schedule, ranks, rows, asked, plain.recompute, profile=profile, place=place))
        found = balanced(profile, plain.schedule, plan, plain.layers, place)
        made = replace(plain, layers=found.layers, why=found.why, place=place)
        return self.predicted(made, profile, rows, place)

    def predicted(self, made: Decision, profile: ModelProfile, rows: int, place: Deployment) -> Decision:
        """The same decision with what it comes to by a profile."""
        ranks, asked = max(made.ranks) + 1, made.microbatches
        plan = planned(
            Problem(made.schedule, ranks, rows, asked, made.recompute, made.layers, profile=profile, place=place)
        )
        order, _ = ordered(made.schedule, plan)
        whole, computing = (evaluated(p, order, plan, place).seconds for p in (profile, profile.without_steps()))
        return replace(made, seconds=whole, computing=computing, rows=rows, profile=profile)

    def _numbers(self, profile: ModelProfile, rows: int, ranks: int) -> list[int]:
        """Numbers of micro-batches to try, whose size was found to run."""
        if self.microbatches is not None:
            return [min(self.microbatches, rows)]
        least = profile.notes.get(LEAST_ROWS, 1)
        return [m for m in numbers_to_try(ranks, rows) if rows // m >= least] or [1]

    def _chosen(self, profile: ModelProfile, rows: int, place: Deployment) -> Decision:
        ranks = len(place.pipeline.devices)
        choice = choose(
            profile,
            ranks,
            rows,
            place,
            microbatches=self._numbers(profile, rows, ranks),
            recompute=(True,) if self.recompute else (False, True),
        )
        best, plan = choice.best, choice.fit.plan
        made = Decision(
            best.schedule,
            best.microbatches,
            best.recompute,
            plan.ranks,
            plan.layers,
            why=_reason(choice),
            table=str(choice),
            place=place,
        )
        return self.predicted(made, profile, rows, place)


def _reason(choice: Choice) -> str:
    best = choice.best
    again = ", recomputation" if best.recompute else ""
    return (
        f"schedule='auto' takes {schedule_label(best.schedule)} with {best.microbatches} micro-batches{again}, cut at "
        f"{choice.fit.cuts}: predicted {seconds_text(1e9 * choice.fit.seconds)} a step"
    )
