"""A model of a recorded run in which changes can be simulated.

It contains the layers of the run, and its devices and links with their measured speeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pipes.cost import FREE_LINK, Cluster, CostModel, Device, LayerProfile, Link, ModelProfile, Table
from lightning_pipes.ir import (
    DeadlockError,
    Kind,
    Plan,
    PlanError,
    Policy,
    ProgramError,
    Schedule,
    Span,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers, step_seconds
from lightning_pipes.planning.planner import Problem, recompute_setting, solve_plan
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.memory_use import held_samples
from lightning_pipes.sim.records.record import RunRecord

MIN_SIZE_RATIO = 2
"""The ratio of the sizes of two micro-batches above which their times are used to separate fixed and proportional
costs."""


@dataclass(frozen=True)
class SimulatedTrial:
    """A simulation of one way to train.

    Attributes:
        schedule: the schedule that ordered the plan.
        fit: the plan with the resulting seconds and bytes.
        bubble: the mean share of the simulated step in which ranks idle, from 0 to 1.
        held: the largest number of samples that a rank holds between forward and backward.
    """

    schedule: Schedule | Policy
    fit: Fit
    bubble: float
    held: float

    @property
    def step_seconds(self) -> float:
        """The simulated seconds of a step."""
        return self.fit.seconds

    @property
    def n_microbatches(self) -> int:
        """The number of micro-batches of a batch."""
        return len(self.fit.plan.spans(Kind.F, 0))


class RunModel:
    """Simulates changes of a recorded run.

    If the profile of the layers is known, the speed of every device is the ratio of the profiled times of its stages to
    their measured times. A layer that moves takes the time that corresponds to the speed of its new device. Without a
    profile, every stage is one layer, and times that were measured with micro-batches of about one size are assumed to
    be proportional to their samples.

    Optimizer steps are included if the timeline of the run contains them, which is the case if batches overlap.

    Raises:
        PlanError: the schedule is not installed; it overlaps batches in an order that is not fixed; or the plan has
            several jobs or several batches between two flushes.
    """

    def __init__(self, record: RunRecord) -> None:
        plan = record.plan
        if len(plan.jobs) > 1 or plan.batches > 1:
            raise PlanError(
                f"changes can only be tried for one batch of one job; this plan has {len(plan.jobs)} jobs and "
                f"{plan.batches} batches"
            )
        self.schedule = make_schedule(record.schedule, **record.settings)
        if not isinstance(self.schedule, Schedule) and self.schedule.is_endless:
            raise PlanError(
                f"{record.schedule} orders overlapping batches while they run, so no single step represents all steps"
            )
        self.plan = plan
        self.layers_known = record.profile is not None and bool(plan.layers)
        self.memory_known = bool(record.costs.activation_bytes)
        self._record = record
        self._rows = Counter(span.rows for span in plan.spans(Kind.F, 0)).most_common(1)[0][0]
        self.profile, self.cluster = self._of_layers() if self.layers_known else self._of_stages()

    @cached_property
    def now(self) -> SimulatedTrial:
        """The simulation of the unchanged run."""
        layers = self.plan.layers if self.layers_known else self._each_its_own
        return self._evaluate_plan(self.schedule, replace(self.plan, layers=layers))

    @property
    def bubble(self) -> float:
        """The bubble of the measured step, or of the predicted step if nothing was measured."""
        return self._record.displayed_timeline.mean_bubble

    @property
    def measured_seconds(self) -> float:
        """The seconds of the measured step.

        The value is 0 if nothing was measured, or if batches overlap, because the timeline then contains the filling of
        the pipeline only once.
        """
        measured = self._record.measured
        return measured.makespan / 1e9 if measured is not None and measured.batches == 1 else 0.0

    @property
    def rows(self) -> int:
        """The number of samples of a batch."""
        return self.plan.jobs[0].rows

    def with_best_cuts(
        self, schedule: Schedule | Policy | None = None, microbatches: int | None = None
    ) -> SimulatedTrial | None:
        """Return the trial with the best cuts for a schedule and a number of micro-batches.

        By default, the schedule and the number of micro-batches of the run are used. The result is None if the times of
        the layers are not known, or if nothing fits.
        """
        if not self.layers_known:
            return None
        schedule = schedule or self.schedule
        try:
            plan = self._make_plan(schedule, microbatches)
            # for other stages, balanced cuts are sufficient to see whether a change pays off
            own = plan.ranks == self.plan.ranks
            return self._with_bubble(schedule, fit_layers(self.profile, schedule, plan, self.cluster, 60 if own else 0))
        except (PlanError, DeadlockError, ProgramError):
            return None

    def with_same_cuts(
        self, schedule: Schedule | Policy | None = None, microbatches: int | None = None
    ) -> SimulatedTrial | None:
        """Return the trial with another schedule or number of micro-batches on the same stages.

        The result is None if the schedule needs other stages, or if the plan does not fit.
        """
        schedule = schedule or self.schedule
        try:
            plan = self._make_plan(schedule, microbatches)
            if plan.ranks != self.plan.ranks:
                return None
            trial = self._evaluate_plan(schedule, replace(plan, layers=self.now.fit.plan.layers))
        except (PlanError, DeadlockError, ProgramError):
            return None
        limits = [device.memory for device in self.cluster.devices]
        fits = all(m is None or peak <= m for m, peak in zip(limits, trial.fit.peak_bytes, strict=False))
        return trial if fits else None

    def with_even_stages(self) -> float:
        """Return the seconds of a step in which every stage takes the mean time of all stages."""
        costs = self.now.fit.costs
        means = {
            kind: sum(costs.seconds_at(kind, s, self._rows) for s in range(self.plan.n_stages)) / self.plan.n_stages
            for kind in {kind for kind, _ in costs.seconds} & {Kind.F, Kind.R, Kind.B, Kind.I, Kind.W}
        }
        even = {(kind, s): _linear_table(self._rows, t) for kind, t in means.items() for s in range(self.plan.n_stages)}
        return self._step_seconds(replace(costs, seconds={**costs.seconds, **even}))

    def with_free_links(self) -> float:
        """Return the seconds of a step in which every message arrives immediately."""
        costs = self.now.fit.costs
        seconds = {key: table for key, table in costs.seconds.items() if key[0] not in (Kind.SF, Kind.SB)}
        return self._step_seconds(replace(costs, seconds=seconds, links={}, link=FREE_LINK))

    def _step_seconds(self, costs: CostModel) -> float:
        fit = self.now.fit
        return step_seconds(fit.order, replace(fit.plan, layers=()), costs)

    def _make_plan(self, schedule: Schedule | Policy, microbatches: int | None) -> Plan:
        m = microbatches or len(self.plan.spans(Kind.F, 0))
        setting = recompute_setting(self.plan)
        # other stages can't be compared with the stages of the run
        own = schedule.place_stages(self.plan.n_ranks) == self.plan.ranks
        again = setting if own else bool(setting)
        late = bool(again) and isinstance(self.schedule, Schedule) and not self.plan.early_recompute
        kept = self.plan.kept_microbatches if own else ()
        given = Problem(schedule, self.plan.n_ranks, self.rows, m, again, late_recompute=late, kept_microbatches=kept)
        return solve_plan(given)

    def _evaluate_plan(self, schedule: Schedule | Policy, plan: Plan) -> SimulatedTrial:
        order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
        return self._with_bubble(schedule, evaluate_plan(self.profile, order, plan, self.cluster))

    @staticmethod
    def _with_bubble(schedule: Schedule | Policy, fit: Fit) -> SimulatedTrial:
        run = simulate(
            fit.order, replace(fit.plan, layers=()), fit.costs
        )  # `evaluate_plan` has run the same simulation, which is cached
        return SimulatedTrial(schedule, fit, fit.bubble, max(held_samples(run)))

    # ---- the model of the run

    @property
    def _each_its_own(self) -> tuple[Span, ...]:
        return tuple(Span(s, s + 1) for s in range(self.plan.n_stages))

    def _of_stages(self) -> tuple[ModelProfile, Cluster]:
        """Return a profile with every stage as one layer.

        If the bytes of outputs are unknown, they are set to one byte per sample.
        """
        costs, n = self._record.costs, self.plan.n_stages
        bytes_ = [*(costs.forward_bytes or (1.0,) * (n - 1)), 1.0]

        def per_stage(values: tuple[float, ...], s: int) -> float:
            return values[s] if values else 0

        layers = tuple(
            LayerProfile(
                f"stage {s}",
                forward=self._scale_table(Kind.F, s),
                backward=self._scale_table(Kind.B, s) or _sum_table(costs, s, self._rows),
                input_backward=self._scale_table(Kind.I, s),
                weight_backward=self._scale_table(Kind.W, s),
                weight_bytes=int(per_stage(costs.weight_bytes, s)),
                step=self._step(s),
                gradient_bytes=max(1, int(per_stage(costs.state_bytes, s))),
                saved=((1, per_stage(costs.activation_bytes, s)),),
                working=((1, per_stage(costs.working_bytes, s)),),
                output=((1, bytes_[s] or 1.0),),
            )
            for s in range(n)
        )
        profile = ModelProfile(layers, overhead=costs.overhead, joining=costs.joining)
        return profile, self._make_cluster([1.0] * self.plan.n_ranks, profile, self._each_its_own)

    def _scale_table(self, kind: Kind, stage: int) -> Table:
        """Return a table of seconds by number of samples.

        The times are proportional to the time of the largest micro-batch, unless sizes that differ sufficiently were
        measured. The time of a slightly smaller last micro-batch varies by chance, so a line through two similar sizes
        would extrapolate badly.
        """
        table = self._record.costs.seconds.get((kind, stage), ())
        sizes, times = [rows for rows, _ in table if rows], [seconds for _, seconds in table]
        if len(table) < 2 or (sizes[-1] >= MIN_SIZE_RATIO * sizes[0] and times == sorted(times)):
            return table
        return _linear_table(*table[-1])

    def _of_layers(self) -> tuple[ModelProfile, Cluster]:
        costs, plan = self._record.costs, self.plan
        assert self._record.profile is not None
        given = self._record.profile
        profile = replace(
            given,
            layers=tuple(replace(layer, step=0.0) for layer in given.layers),
            before=replace(given.before, step=0.0),
            after=replace(given.after, step=0.0),
            overhead=costs.overhead,
        )
        expected = profile.stage_costs(plan.layers)
        speeds = []
        for stages in plan.stages:
            work = sum(_compute_work(expected, s, self._rows) for s in stages)
            took = sum(_compute_work(costs, s, self._rows) for s in stages)
            speeds.append(work / took if work > 0 and took > 0 else 1.0)
        steps = [
            self._step(s) * speeds[plan.ranks[s]] * share
            for s, span in enumerate(plan.layers)
            for share in _compute_shares([layer.weight_bytes for layer in given.layers[span.start : span.stop]])
        ]
        layers = tuple(replace(layer, step=step) for layer, step in zip(profile.layers, steps, strict=True))
        return replace(profile, layers=layers), self._make_cluster(speeds, profile, plan.layers)

    def _step(self, stage: int) -> float:
        """Return the seconds of the optimizer step of a stage; 0 if the timeline does not contain it."""
        return (
            self._record.costs.seconds_at(Kind.STEP, stage) if (Kind.STEP, stage) in self._record.costs.seconds else 0.0
        )

    def _make_cluster(self, speeds: list[float], profile: ModelProfile, layers: tuple[Span, ...]) -> Cluster:
        """Return devices with the given speeds, and links that move the bytes of `profile` in the measured times."""
        found: dict[tuple[int, int], list[Link]] = {}
        for pair, link in self._measured_links(profile, layers):
            found.setdefault(pair, []).append(link)
        links = {pair: min(seen, key=lambda link: link.bandwidth) for pair, seen in found.items()}
        others = sorted(links.values(), key=lambda link: link.bandwidth)
        memory = self._record.memory or (None,) * len(speeds)
        devices = tuple(Device(m, speed) for m, speed in zip(memory, speeds, strict=True))
        return Cluster(devices, others[len(others) // 2] if others else FREE_LINK, links=links)

    def _measured_links(
        self, profile: ModelProfile, layers: tuple[Span, ...]
    ) -> Iterator[tuple[tuple[int, int], Link]]:
        costs, plan = self._record.costs, self.plan
        for s in range(plan.n_stages - 1):
            if not plan.is_remote_edge(s):
                continue
            size = profile.edge_bytes(layers[s].stop) * self._rows
            ends = plan.ranks[s], plan.ranks[s + 1]
            for kind, stage, pair in ((Kind.SF, s, ends), (Kind.SB, s + 1, ends[::-1])):
                given = costs.links.get(pair, costs.link)
                if (kind, stage) in costs.seconds:
                    took = costs.seconds_at(kind, stage, self._rows)
                    given = Link(size / took, given.latency) if took > 0 and size > 0 else Link(latency=given.latency)
                yield pair, given


def _compute_work(costs: CostModel, stage: int, rows: int) -> float:
    backward = (
        costs.seconds_at(Kind.B, stage, rows)
        if (Kind.B, stage) in costs.seconds
        else costs.seconds_at(Kind.I, stage, rows) + costs.seconds_at(Kind.W, stage, rows)
    )
    return costs.seconds_at(Kind.F, stage, rows) + backward


def _compute_shares(sizes: Sequence[float]) -> list[float]:
    whole = sum(sizes)
    return [size / whole if whole else 1 / len(sizes) for size in sizes]


def _sum_table(costs: CostModel, stage: int, rows: int) -> Table:
    return _linear_table(rows, costs.seconds_at(Kind.I, stage, rows) + costs.seconds_at(Kind.W, stage, rows))


def _linear_table(rows: int, seconds: float) -> Table:
    return ((0, 0.0), (rows, seconds))
