"""The text and the tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from statistics import median
from string import Template
from typing import Protocol

from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import Kind
from lightning_pipes.sim.page.charts import MESSAGE_LABELS, list_timelines, picture_json, render_charts
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.memory_use import estimate_alternatives
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.sim.simulator import SLOW_QUANTILE, Spread, draw_spread
from lightning_pipes.sim.timeline import KIND_NAMES, Timeline

MIN_SCATTER_RATIO = 1.05
"""The ratio of the mean step time to the step time computed from medians above which the page shows both."""
MAX_DRAWN_OPERATIONS = 10_000
"""The largest number of operations of a step that is simulated repeatedly. More operations would take seconds."""


class SimulatedOption(Protocol):
    """One way to train, as a row of the table of the page.

    It has a description of the change, the seconds of a step, the bubble from 0 to 1, the largest number of samples
    that a rank holds between forward and backward, the peak memory in bytes if it is known, and the call to paste.
    """

    @property
    def what(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bubble(self) -> float: ...
    @property
    def held(self) -> float: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def call(self) -> str: ...


class SimulatedAdvice(Protocol):
    """The advice on a run that the page shows, such as `planning.advice.Advice`."""

    @property
    def sentence(self) -> str: ...
    @property
    def proposed(self) -> SimulatedOption | None: ...
    @property
    def now(self) -> SimulatedOption | None: ...
    @property
    def changes(self) -> Sequence[SimulatedOption]: ...
    @property
    def notes(self) -> Sequence[str]: ...


def render_page(record: RunRecord, finding: SimulatedAdvice) -> str:
    """Return the whole page as HTML.

    Args:
        record: the run.
        finding: the advice on this run.
    """
    here = files(__package__)
    title = "Pipeline run" if record.measured else "Pipeline plan"
    legend = [(kind, word) for kind, word in {**KIND_NAMES, **MESSAGE_LABELS}.items() if _has_kind(record, kind)]
    return Template((here / "template.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{title}: {record.label or 'schedule of your own'}"),
        subtitle=escape(_format_subtitle(record)),
        css=(here / "page.css").read_text(encoding="utf-8"),
        sentence=escape(finding.sentence),
        paste=f"<code>{escape(finding.proposed.call)}</code>" if finding.proposed else "",
        tiles="\n".join(
            f'<div class="tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in _list_tiles(record)
        ),
        legend="".join(f'<li><i style="background:var(--{kind}0)"></i>{escape(word)}</li>' for kind, word in legend),
        described=escape(_describe_record(record), quote=True),
        sections="\n".join(_list_sections(record, finding)),
        footer=escape(" ".join(filter(None, [_list_definitions(record), _describe_links(record)]))),
        data=picture_json(record),
        script=(here / "page.js").read_text(encoding="utf-8"),
    )


def _has_kind(record: RunRecord, kind: Kind) -> bool:
    return any(
        e.instruction.kind is kind and e.end > e.start
        for _, timeline in list_timelines(record)
        for e in timeline.events
    )


def _format_subtitle(record: RunRecord) -> str:
    plan = record.plan
    m, rows = len(plan.spans(Kind.F, 0)), plan.jobs[0].rows
    stages = "" if plan.n_stages == plan.n_ranks else f", {plan.n_stages} stages"
    facts = [f"{plan.n_ranks} rank{'s' if plan.n_ranks > 1 else ''}{stages}", f"{m} micro-batches of a batch of {rows}"]
    return ", ".join([*facts, *record.facts.values()])


def _list_definitions(record: RunRecord) -> str:
    """Return the definitions of the terms on the page."""
    found = ["Times of operations are medians of the last steps."] if record.measured else []
    if record.siblings == 1:
        found.append("The bubble is the share of a step in which ranks do not compute, the mean of all ranks.")
    if record.measured:
        found.append(
            "Measured is the most typical of the last steps. Replayed is that step, simulated with the measured time "
            "of each operation. Predicted is the simulation from before it ran."
        )
    return " ".join(found)


def _describe_links(record: RunRecord) -> str:
    """Return a sentence that describes the link regimes of the simulation."""
    simulated = record.simulated_timeline
    meaning = "; ".join(f"{each.label}: {each.description}" for each in simulated.regimes or ())
    return f"Simulated with {meaning or simulated.regime}." if simulated.regime else ""


def _draw_step_times(record: RunRecord) -> Spread | None:
    """Return the distribution of step times if the duration of each operation varies.

    The result is None if the step times hardly differ, or if the step has too many operations to be simulated
    repeatedly.
    """
    simulated = record.simulated_timeline
    if not record.costs.scatter or record.siblings > 1 or len(simulated.events) > MAX_DRAWN_OPERATIONS:
        return None
    found = draw_spread(simulated.program(), simulated.plan, record.costs)
    return found if found.mean > MIN_SCATTER_RATIO * found.steady else None


def _list_tiles(record: RunRecord) -> list[tuple[str, str]]:
    shown, slowest = record.displayed_timeline, BottleneckRank.from_timeline(record.displayed_timeline)
    of = "" if shown.batches == 1 else f", of {shown.batches} batches that overlap in {seconds_text(shown.makespan)}"
    found = [
        (
            seconds_text(shown.step),
            f"a step of the pipeline{of}, {'measured' if record.measured else 'predicted'}",
        ),
    ]
    if record.measured is not None and record.predicted is not None and record.siblings == 1:
        off = record.predicted.makespan / max(shown.makespan, 1) - 1
        found.append((seconds_text(record.predicted.step), f"a step as predicted before it ran ({off:+.0%})"))
    elif record.prediction_text:
        found.append(("No prediction", record.unpredicted or "the times of layers were not known before training"))
    if record.bubble is not None:
        found.append((f"{record.bubble:.1%}", "bubble: the mean share of the step in which ranks idle"))
        found.append((f"{shown.efficiency:.1%}", "efficiency: the busiest rank's share of the step"))
    if slowest.others and slowest.is_uneven:
        name = slowest.name[0].upper() + slowest.name[1:]
        found.append((name, f"the slowest: {slowest.ratio:.2g}x {slowest.others}"))
    elif slowest.others:
        found.append(("No slow stage", f"{slowest.name} takes {slowest.ratio:.3g}x {slowest.others}"))
    scattered = _draw_step_times(record)
    if scattered is not None:
        found.append(
            (
                seconds_text(scattered.mean),
                (
                    f"mean step if operations vary as measured; {seconds_text(scattered.steady)} by medians, and "
                    f"{seconds_text(scattered.quantile(SLOW_QUANTILE))} or more in {1 - SLOW_QUANTILE:.0%} of all steps"
                ),
            )
        )
    if record.between is not None:
        steps = "steps" if shown.batches == 1 else "windows"
        found.append((seconds_text(1e9 * record.between), f"between two {steps}: data, optimizer, logs"))
    if record.peak_bytes:
        found.append((bytes_text(max(record.peak_bytes)), "peak of a rank's tensors, estimated"))
    return found


def _describe_record(record: RunRecord) -> str:
    slowest = BottleneckRank.from_timeline(record.displayed_timeline)
    names = " and ".join(name for name, _ in list_timelines(record))
    step = seconds_text(record.displayed_timeline.step)
    return f"Timeline, {names}, of {record.plan.n_ranks} ranks; a step of {step}. {slowest}."


# ---- tables


def _list_sections(record: RunRecord, finding: SimulatedAdvice) -> Iterable[str]:
    yield _render_columns(_render_ranks(record), _render_stages(record))
    if record.queues_text:
        yield _render_section("Inputs that waited", _render_queues(record))
    if finding.changes and finding.now:
        yield _render_section("What was simulated", _render_changes(record, finding))
    if finding.notes:
        yield _render_section(
            "Notes", '<ul class="notes">' + "".join(f"<li>{escape(n)}</li>" for n in finding.notes) + "</ul>"
        )
    if record.choice:
        yield _render_section("Why this schedule and this cut", f"<pre>{escape(record.choice)}</pre>")
    if record.monitored:
        yield _render_section("Metrics from the monitors of ranks", render_charts(record.monitored))
    if record.facts:
        pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in record.facts.items())
        yield _render_section("Settings", f"<dl>{pairs}</dl>")


def _render_section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _render_columns(*sections: str) -> str:
    return f'<div class="columns">{"".join(sections)}</div>'


def _render_table(heads: Mapping[str, bool], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table as HTML.

    Args:
        heads: for each column its name, and whether it contains numbers.
        rows: the class and the cells, as HTML, of each row.
    """
    marks = [' class="n"' if number else "" for number in heads.values()]
    head = "".join(f"<th{mark} scope=col>{escape(name)}</th>" for name, mark in zip(heads, marks, strict=True))
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(cells, marks, strict=True))
        + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_ranks(record: RunRecord) -> str:
    shown, slowest = record.displayed_timeline, BottleneckRank.from_timeline(record.displayed_timeline)
    peaks, alone = record.peak_bytes, record.siblings == 1
    predicted = record.predicted if record.measured and alone else None
    heads = {"rank": False, "stages": False, "busy": True}
    heads |= {"bubble": True} if alone else {}
    heads |= {"bubble, predicted": True} if predicted else {}
    measured = record.peaks if any(record.peaks) and alone else ()
    heads |= {"tensors at most": True} if peaks else {}
    heads |= {"process at most" if record.peaks_are_resident else "allocated at most": True} if measured else {}
    rows = []
    for rank, stages in enumerate(record.plan.stages):
        busy = 1 - shown.bubble[rank]
        cells = [
            str(rank),
            ", ".join(map(str, stages)),
            f'{busy:.0%}<span class="meter"><i style="width:{busy:.1%}"></i></span>',
            *([f"{shown.bubble[rank]:.1%}"] if alone else []),
            *([f"{predicted.bubble[rank]:.1%}"] if predicted else []),
            *([bytes_text(peaks[rank])] if peaks else []),
            *([bytes_text(measured[rank] or 0)] if measured else []),
        ]
        rows.append(("slow" if rank == slowest.rank and slowest.is_uneven else "", cells))
    return _render_section("Ranks", _render_table(heads, rows) + _memory_hint(record, bool(measured)))


def _render_queues(record: RunRecord) -> str:
    heads = {"stage": False, "inputs": False, "waited, mean": True, "slack": True, "stalled": True, "for": True}
    rows = [
        (
            "",
            [
                str(q.stage),
                "activations" if q.kind is Kind.F else "gradients",
                f"{q.mean:.1f}",
                "-" if q.slack is None else str(q.slack),
                f"{q.empty} of {len(q.lengths)}",
                seconds_text(sum(q.stalled)),
            ],
        )
        for q in record.displayed_timeline.input_queues
    ]
    note = "Inputs that had arrived when a rank turned to the stage. Slack is the least while the pipeline is full."
    return _render_table(heads, rows) + f"<p>{note}</p>"


def _memory_hint(record: RunRecord, measured: bool) -> str:
    """Return a hint that explains the memory columns and gives the memory of other ways of training."""
    texts = []
    others = estimate_alternatives(record.plan, record.costs)
    if record.peak_bytes:
        texts.append("Tensors are estimated: weights, gradients, optimizer states and saved activations.")
        if others is not None:
            texts.append(
                f"For the same batch, the estimate is {bytes_text(others.one_process)} for one process, and "
                f"{bytes_text(others.ddp)} for each process of DDP."
            )
    if measured and record.peaks_are_resident:
        texts.append("Process is measured: the resident memory excluding imports, which contains more than tensors.")
    elif measured:
        texts.append("Allocated is measured: the peak memory in use by torch's allocator on the GPU.")
    return f'<p class="hint">{escape(" ".join(texts))}</p>' if texts else ""


def _render_stages(record: RunRecord) -> str:
    plan = record.plan
    kinds = [kind for kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W) if _has_kind(record, kind)]
    heads = {"stage": False, "layers": False} | {KIND_NAMES[kind]: True for kind in kinds} | {"share": True}
    by_stage = BottleneckRank.from_timeline(record.displayed_timeline).by_stage
    whole = sum(by_stage) or 1.0
    took = _compute_medians(record.displayed_timeline)
    rows = []
    for stage in range(plan.n_stages):
        span = plan.layers[stage] if plan.layers else None
        names = _format_names(record, stage)
        layers = "" if span is None else f"{span.start} to {span.stop - 1}" if span.rows > 1 else str(span.start)
        cells = [str(stage), f"{layers} {escape(names)}".strip()]
        cells += [seconds_text(took[kind, stage]) if (kind, stage) in took else "" for kind in kinds]
        rows.append(("", [*cells, f"{by_stage[stage] / whole:.0%}"]))
    return _render_section("Stages, one micro-batch", _render_table(heads, rows))


def _format_names(record: RunRecord, stage: int) -> str:
    if record.profile is None or not record.plan.layers:
        return ""
    names = [layer.name for layer in record.profile.layers[slice(*record.plan.layers[stage])]]
    return f"({', '.join(names)})" if len(names) <= 2 else f"({names[0]} ... {names[-1]})"


def _compute_medians(timeline: Timeline) -> dict[tuple[Kind, int], float]:
    found: dict[tuple[Kind, int], list[int]] = {}
    for e in timeline.computations:
        found.setdefault((e.instruction.kind, e.instruction.stage), []).append(e.end - e.start)
    return {key: median(times) for key, times in found.items()}


def _render_changes(record: RunRecord, finding: SimulatedAdvice) -> str:
    now = finding.now
    assert now is not None
    memory = now.peak_bytes is not None
    heads = {"change": False, "step": True, "": True, "bubble": True, "samples held": True}
    heads |= {"tensors at most": True} if memory else {}
    heads |= {"to paste": False}
    rows = []
    if record.measured is not None and record.measured.batches == 1:
        cells = ["as measured", seconds_text(record.measured.makespan), "", f"{record.measured.mean_bubble:.1%}", ""]
        rows.append(("", [*cells, *([""] if memory else []), ""]))
    for row in (now, *finding.changes[:12]):
        faster = row.seconds / now.seconds - 1
        cells = [
            escape(f"{row.what}, simulated" if row is now and record.measured is not None else row.what),
            seconds_text(1e9 * row.seconds),
            "" if row is now else f"{faster:+.0%}",
            f"{row.bubble:.1%}",
            f"{row.held:g}",
        ]
        cells += [bytes_text(row.peak_bytes or 0)] if memory else []
        rows.append(("slow" if row is now else "", [*cells, f"<code>{escape(row.call)}</code>"]))
    note = "All rows but the measured one are simulated with the median time of each operation."
    return _render_table(heads, rows) + (f'<p class="hint">{note}</p>' if record.measured is not None else "")
