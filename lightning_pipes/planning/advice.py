"""Advice on a recorded run: one sentence, based on simulations of possible changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind, PipelineError, Plan
from lightning_pipes.planning.auto import installed_variants
from lightning_pipes.planning.formatting import (
    Progress,
    describe_moves,
    join_words,
    schedule_label,
    strategy_arguments,
    strategy_line,
)
from lightning_pipes.planning.run_model import RunModel, SimulatedTrial
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.record import PADDING_FACT, RunRecord

MIN_PROPOSED_GAIN = 0.03
"""The share of a step that a change must save to be proposed."""
EQUAL_GAIN_TOLERANCE = 0.01
"""Changes whose step times differ by less than this share are considered equal, and the change that holds fewer samples
is proposed."""
MAX_ADVISED_FORWARDS = 2048
"""The largest number of forwards of a batch, over all stages, for which more micro-batches are tried. Larger batches
take seconds to simulate and gain little."""


@dataclass(frozen=True)
class Change:
    """One simulated change of a run.

    Attributes:
        what: a description of the change.
        arguments: the arguments of `PipelineStrategy` with the change.
        seconds: the duration of a simulated step.
        bubble: the mean share of the simulated step in which ranks idle, from 0 to 1.
        held: the largest number of samples that a rank holds between forward and backward.
        peak_bytes: the peak memory of the rank that needs the most; None if the bytes of the stages were not measured.
    """

    what: str
    arguments: Mapping[str, Any] = field(hash=False)
    seconds: float
    bubble: float
    held: float
    peak_bytes: int | None

    @property
    def call(self) -> str:
        """The `PipelineStrategy(...)` call with the change, ready to be pasted into a script."""
        return strategy_line(self.arguments)


@dataclass(frozen=True)
class Advice:
    """A cause of lost time in a run, and a change that reduces it.

    Attributes:
        sentence: describes the slowest part of the run and the change to make. The bubble in it comes from the measured
            step; the gain of a change is a share of the simulated step.
        proposed: the simulated change that the sentence proposes; None if the sentence proposes no simulated change.
        now: the unchanged run, simulated in the same way as the changes; None if the run can't be simulated.
        changes: all changes that were simulated, the fastest first.
        notes: further sentences for the reader, such as the assumptions of the simulation.
    """

    sentence: str
    proposed: Change | None = None
    now: Change | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


class _Tried(NamedTuple):
    reason: str
    trial: SimulatedTrial


def advise_run(record: RunRecord, progress: Progress = lambda what, done: None) -> Advice:
    """Return advice on a run: the slowest part of the run, and the simulated change that helps most.

    The simulated changes are other cuts, if the times of the layers are known, more or fewer micro-batches, other
    installed schedules, and a combination of the best of these.

    Args:
        record: the recorded run.
        progress: is called before each simulation with a description of the change and the share of the work that is
            done, from 0 to 1.
    """
    slowest = BottleneckRank.from_timeline(record.displayed_timeline)
    if record.siblings > 1:  # siblings fill each other's bubbles: only a slow stage slows them all down
        return Advice(
            f"{slowest}{_less_to_do(slowest, record.plan)}. {record.sibling_note}.", notes=tuple(_padding_notes(record))
        )
    try:
        model = RunModel(record)
        now = model.now
    except PipelineError as error:
        return Advice(f"{slowest}. No change was simulated: {error}", notes=tuple(_list_notes(record)))
    tried: list[_Tried] = []
    candidates = [*_list_changes(model)]
    for number, (reason, label, attempt) in enumerate(candidates):
        progress(label, number / (len(candidates) + 1))
        trial = attempt()
        if trial is not None and _is_different(trial, now):
            tried.append(_Tried(reason, trial))
    together = _combine_trials(model, tried)
    if together is not None and _is_different(together, now):
        tried.append(_Tried("together", together))
    tried.sort(key=lambda found: found.trial.step_seconds)
    changes = {_make_change(model, found.trial): None for found in tried}
    sentence, proposed = _format_advice(model, slowest, _select_proposal(model, slowest, tried))
    if proposed is not None and tried[0].trial is not proposed:
        sentence = f"{sentence} {_explain_proposal(model, proposed, tried[0])}"
    return Advice(
        sentence,
        None if proposed is None else _make_change(model, proposed),
        _make_change(model, now),
        tuple(changes),
        (*_list_limits(model), *_simulation_notes(model), *_list_notes(record)),
    )


def _list_changes(model: RunModel) -> Iterator[tuple[str, str, Callable[[], SimulatedTrial | None]]]:
    """Yield the changes to simulate: the reason, a label, and a function that simulates the change."""
    m = model.now.n_microbatches
    yield "partition", "other cuts", model.with_best_cuts
    for number in (m // 2, 2 * m, *((4 * m,) if model.layers_known else ())):
        if 1 <= number <= model.rows and number != m and number * model.plan.n_stages <= MAX_ADVISED_FORWARDS:
            yield "microbatches", f"{number} micro-batches", partial(model.with_same_cuts, None, number)
    for schedule in installed_variants(model.plan.n_ranks, m):
        if schedule_label(schedule) != schedule_label(model.schedule):
            own_stages = partial(model.with_same_cuts, schedule)
            yield (
                "schedule",
                schedule_label(schedule),
                partial(_first, own_stages, partial(model.with_best_cuts, schedule)),
            )


def _first(*attempts: Callable[[], SimulatedTrial | None]) -> SimulatedTrial | None:
    return next((trial for trial in (attempt() for attempt in attempts) if trial is not None), None)


def _combine_trials(model: RunModel, tried: Iterable[_Tried]) -> SimulatedTrial | None:
    """Return the trial that combines the best schedule, the best number of micro-batches and the best cuts."""
    tried = list(tried)
    best = {
        reason: _select_best(found for found in tried if found.reason == reason)
        for reason in ("microbatches", "schedule")
    }
    better = {reason: found.trial for reason, found in best.items() if found and _compute_gain(model, found.trial) > 0}
    schedule = better["schedule"].schedule if "schedule" in better else None
    number = better["microbatches"].n_microbatches if "microbatches" in better else None
    if schedule is not None and number is not None:
        number = min(
            number,
            max(model.now.n_microbatches, MAX_ADVISED_FORWARDS // len(schedule.place_stages(model.plan.n_ranks))),
        )
    if schedule is None and number is None:
        return None
    return model.with_best_cuts(schedule, number) or model.with_same_cuts(schedule, number)


def _select_best(tried: Iterable[_Tried]) -> _Tried | None:
    """Return the fastest trial or, among trials that are nearly as fast, the one that holds the fewest samples."""
    found = sorted(tried, key=lambda each: each.trial.step_seconds)
    as_good = [
        each for each in found if each.trial.step_seconds <= found[0].trial.step_seconds * (1 + EQUAL_GAIN_TOLERANCE)
    ]
    return min(as_good, key=lambda each: each.trial.held, default=None)


def _select_proposal(model: RunModel, slowest: BottleneckRank, tried: Iterable[_Tried]) -> _Tried | None:
    """Return the change to propose.

    A single change is preferred to a combination if it is nearly as fast. If one stage is slow, other cuts are
    preferred if they gain at least half as much as the best change.
    """
    tried = list(tried)
    singles = [found for found in tried if found.reason != "together"]
    best = _select_best(tried)
    alone = _select_best(singles)
    if best and alone and alone.trial.step_seconds <= best.trial.step_seconds * (1 + MIN_PROPOSED_GAIN):
        best = alone
    cuts = next((found for found in singles if found.reason == "partition"), None)
    if (
        best
        and cuts
        and slowest.is_uneven
        and _compute_gain(model, cuts.trial) >= max(MIN_PROPOSED_GAIN, _compute_gain(model, best.trial) / 2)
    ):
        return cuts
    return best


def _explain_proposal(model: RunModel, proposed: SimulatedTrial, fastest: _Tried) -> str:
    """Return a sentence that explains why the fastest change is not the proposed one."""
    more = 1 - fastest.trial.step_seconds / proposed.step_seconds
    if fastest.trial.held > proposed.held:
        reason = "it holds more samples"
    elif fastest.reason == "together":
        reason = "it changes more at once"
    else:
        reason = "the slow stage comes first"
    what = _make_change(model, fastest.trial).what
    return f"The fastest row of the table, {what}, is {more:.1%} shorter still, but {reason}."


def _is_different(trial: SimulatedTrial, now: SimulatedTrial) -> bool:
    return (trial.schedule, trial.fit.plan) != (now.schedule, now.fit.plan)


def _compute_gain(model: RunModel, trial: SimulatedTrial) -> float:
    return 1 - trial.step_seconds / model.now.step_seconds


def _format_advice(model: RunModel, slowest: BottleneckRank, best: _Tried | None) -> tuple[str, SimulatedTrial | None]:
    """Return the sentence of the advice and the trial that it proposes."""
    now = model.now
    gain = _compute_gain(model, best.trial) if best else 0.0
    even = 1 - model.with_even_stages() / now.step_seconds
    if slowest.is_uneven and not model.layers_known and even > max(gain, MIN_PROPOSED_GAIN):
        less = _less_to_do(slowest, model.plan)
        return f"{slowest}{less}; with equal stages a simulated step is {even:.0%} shorter.", None
    if best is None or gain < MIN_PROPOSED_GAIN:
        idle = f"{slowest}, and ranks idle {model.bubble:.1%} of the time"
        return (f"{idle}; no simulated change makes a step {MIN_PROPOSED_GAIN:.0%} shorter."), None
    words = {
        "partition": _about_cuts,
        "microbatches": _about_microbatches,
        "schedule": _about_schedule,
        "together": _about_several,
    }[best.reason]
    step = f"that makes a simulated step {gain:.0%} shorter"
    return f"{words(model, slowest, best.trial)}; {step}{_describe_assumptions(model, best.trial)}.", best.trial


def _less_to_do(slowest: BottleneckRank, plan: Plan) -> str:
    cuts = [span.start for span in plan.layers[1:]]
    return f": give it less to do{f' (now partition={cuts})' if cuts else ''}" if slowest.is_uneven else ""


def _about_cuts(model: RunModel, slowest: BottleneckRank, trial: SimulatedTrial) -> str:
    moved = describe_moves(model.now.fit.plan.layers, trial.fit.plan.layers)
    cuts = [span.start for span in trial.fit.plan.layers[1:]]
    what = (
        f"move {join_words(moved)}, partition={cuts}" if len(moved) <= 2 else f"cut at other layers, partition={cuts}"
    )
    return f"{slowest}: {what}"


def _about_microbatches(model: RunModel, slowest: BottleneckRank, trial: SimulatedTrial) -> str:
    idle = _describe_idle(model, slowest)
    return f"{idle}: use {trial.n_microbatches} micro-batches instead of {model.now.n_microbatches}"


def _about_several(model: RunModel, slowest: BottleneckRank, trial: SimulatedTrial) -> str:
    return f"{_describe_idle(model, slowest)}: use {_make_change(model, trial).what}"


def _about_schedule(model: RunModel, slowest: BottleneckRank, trial: SimulatedTrial) -> str:
    free = 1 - model.with_free_links() / model.now.step_seconds
    why = _describe_idle(model, slowest)
    if slowest.link and free > _compute_gain(model, trial) / 2:
        a, b = slowest.link
        why = f"Messages, mostly the messages from rank {a} to rank {b}, cost {free:.0%} of a step"
    return f"{why}: choose schedule {schedule_label(trial.schedule)}"


def _describe_idle(model: RunModel, slowest: BottleneckRank) -> str:
    idle = f"anks idle {model.bubble:.1%} of the time"
    return f"{slowest}, and r{idle}" if slowest.is_uneven else f"R{idle}"


def _describe_assumptions(model: RunModel, trial: SimulatedTrial) -> str:
    if model.layers_known or trial.n_microbatches == model.now.n_microbatches:
        return ""
    return (
        ", if half of the samples take half of the time"
        if trial.n_microbatches > model.now.n_microbatches
        else ", if twice as many samples take twice as long"
    )


def _make_change(model: RunModel, trial: SimulatedTrial) -> Change:
    now = model.now
    what = []
    if trial.schedule != now.schedule:
        what.append(f"schedule {schedule_label(trial.schedule)}")
    if trial.n_microbatches != now.n_microbatches:
        what.append(f"{trial.n_microbatches} micro-batches")
    plan = trial.fit.plan
    arguments = strategy_arguments(trial.schedule, plan)
    if not model.layers_known:
        arguments.pop("partition", None)
        if model.plan.layers and plan.ranks == model.plan.ranks:
            arguments["partition"] = [span.start for span in model.plan.layers[1:]]
    elif plan.layers != now.fit.plan.layers:
        what.append("other cuts")
    return Change(
        join_words(what) if what else "as it is",
        arguments,
        trial.step_seconds,
        trial.bubble,
        trial.held,
        max(trial.fit.peak_bytes) if model.memory_known else None,
    )


def _list_limits(model: RunModel) -> Iterator[str]:
    """Yield sentences on the limits of the simulation."""
    if not model.layers_known:
        yield (
            "The times of single layers are not known, so no other cuts were tried, and times were taken as "
            "proportional to samples. Measure them with lightning-pipes profile, and read the report again with "
            "lightning-pipes report RUN --profile FILE."
        )
    if not model.memory_known:
        yield "Bytes are not known, so a change that holds more micro-batches may not fit."


def _simulation_notes(model: RunModel) -> Iterator[str]:
    """Yield a sentence if the simulated step of the unchanged run differs from the measured step by more than 10 %."""
    measured = model.measured_seconds
    off = model.now.step_seconds / measured - 1 if measured else 0.0
    if abs(off) > 0.1:
        now, took = (seconds_text(1e9 * seconds) for seconds in (model.now.step_seconds, measured))
        yield (
            f"Changes are simulated with the median time of each operation. The unchanged run takes {now} in this "
            f"simulation, but {took} were measured ({off:+.0%}). The predicted gains of changes may be off by the "
            "same amount."
        )


def _list_notes(record: RunRecord) -> Iterator[str]:
    yield from _padding_notes(record)
    yield from _queue_notes(record)
    if record.between is not None:
        inside = record.displayed_timeline.makespan / 1e9
        share = record.between / max(record.between + inside, 1e-12)
        if share > 0.2:
            batches = record.displayed_timeline.batches
            steps = "steps of the pipeline" if batches == 1 else f"windows of {batches} batches"
            yield (
                f"{seconds_text(1e9 * record.between)} pass between two {steps}, {share:.0%} of the total time: "
                "loading data, the optimizer, logging and callbacks."
            )


def _padding_notes(record: RunRecord) -> Iterator[str]:
    if PADDING_FACT in record.facts:
        yield f"{record.facts[PADDING_FACT]}."


def _queue_notes(record: RunRecord) -> Iterator[str]:
    """Yield a sentence on the measured queues of inputs while the pipeline was full (Ada-Grouper, S4.4)."""
    queues = () if record.measured is None else record.measured.input_queues
    steady = [q for q in queues if q.slack is not None]
    if not steady:
        return
    if min(q.slack or 0 for q in steady) > 0:
        yield (
            "While the pipeline was full, an input waited at every launch: no rank stalled there, so links are fast "
            "enough for this schedule."
        )
        return
    worst = max(steady, key=lambda q: sum(q.stalled[n] for n in q.steady))
    what = "activation" if worst.kind is Kind.F else "gradient"
    empty = sum(worst.lengths[n] == 0 for n in worst.steady)
    yield (
        f"While the pipeline was full, stage {worst.stage} found no {what} at {empty} of {len(worst.steady)} launches "
        f"and waited {seconds_text(sum(worst.stalled[n] for n in worst.steady))}: the stage or link that it comes from "
        "is slow, or more micro-batches have to be under way."
    )
