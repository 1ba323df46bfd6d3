"""Small charts of the metrics of monitors, and the timelines as data for the picture on the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import SEND_KINDS, Kind, Span
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.memory_use import memory_curves
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.sim.records.training_record import Curves
from lightning_pipes.sim.timeline import KIND_NAMES, Labels, Timeline

N_OPEN_CHARTS = 6
"""The number of charts that are visible at first. The other charts can be unfolded."""
_N_COLORS = 8
_WIDTH, _HEIGHT, _EDGE = 400, 110, 6
_GRID = "".join(
    f'<path class="grid" d="M0 {y}H{_WIDTH}"/>' for y in (_EDGE, _HEIGHT // 2, _HEIGHT - _EDGE)
)  # the maximum, half of it, and 0
_UNITS = ("share", "cores", "bytes", "bytes_per_s", "seconds", "hertz", "watts", "count", "per_s")


def render_charts(ranks: Sequence[Curves]) -> str:
    """Return the charts of all metrics as HTML without scripts. Metrics that are always missing or 0 are left out."""
    names = dict.fromkeys(name for curves in ranks for name in curves.values)
    shown = sorted((name for name in names if _find_maximum(ranks, name)), key=_sort_key)
    if not shown:
        return "<p>Nothing: no source could be read.</p>"
    figures = [_render_figure(ranks, name) for name in shown]
    legend = "".join(f'<li><i class="line {_color_class(rank)}"></i>rank {rank}</li>' for rank in range(len(ranks)))
    long = seconds_text(1e9 * _find_last_time(ranks))
    hint = f'<p class="hint">{escape(long)} from left to right; each chart ranges from 0 to its largest value.</p>'
    legend = f'<ul class="legend" aria-label="Ranks">{legend}</ul>'
    found = f'{legend}{hint}<div class="charts">{"".join(figures[:N_OPEN_CHARTS])}</div>'
    if figures[N_OPEN_CHARTS:]:
        more = f"<summary>{len(figures) - N_OPEN_CHARTS} more</summary>"
        found += f'<details>{more}<div class="charts">{"".join(figures[N_OPEN_CHARTS:])}</div></details>'
    return found


def _sort_key(name: str) -> tuple[bool, bool, bool, bool]:
    """Return the sort key of a metric.

    Metrics that reveal neighbors on the device come first: times of stages, waits, and hardware counters.
    """
    return (
        not name.startswith("pipeline."),
        "compute" not in name and "active" not in name,
        not name.startswith("gpu."),
        name.endswith("_bytes"),
    )


def _find_maximum(ranks: Sequence[Curves], name: str) -> float:
    known = (abs(value) for curves in ranks for value in curves.values.get(name, ()) if value is not None)
    return max(known, default=0.0)


def _find_last_time(ranks: Sequence[Curves]) -> float:
    """Return the time of the last sample of any rank in seconds."""
    return max((curves.times[-1] for curves in ranks if curves.times), default=0.0)


def _render_figure(ranks: Sequence[Curves], name: str) -> str:
    most, last = _find_maximum(ranks, name), _find_last_time(ranks)
    title, unit = _split_name(name)
    up_to = _format_value(most, unit)
    spoken = f"{title}, up to {up_to}, in {seconds_text(1e9 * last)}, by rank"
    caption = f"<span>{escape(title)}</span><span>up to {escape(up_to)}</span>"
    lines = "".join(
        line for rank, curves in enumerate(ranks) for line in _draw_lines(rank, curves, name, last or 1.0, most or 1.0)
    )
    return (
        f'<figure><figcaption>{caption}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(spoken, quote=True)}">{_GRID}{lines}</svg></figure>'
    )


def _draw_lines(rank: int, curves: Curves, name: str, last: float, most: float) -> Iterable[str]:
    """Yield one line for every stretch without missing values, or a dot if a stretch has a single point."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for time, value in zip(curves.times, curves.values.get(name, ()), strict=False):
        if value is None:
            stretches.append([])
        else:
            high = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * max(value, 0.0) / most
            stretches[-1].append((_WIDTH * time / last, high))
    for stretch in filter(None, stretches):
        tip = f"<title>rank {rank}</title>"
        if len(stretch) == 1:
            x, y = stretch[0]
            yield f'<circle class="{_color_class(rank)}" cx="{x:.1f}" cy="{y:.1f}" r="1.5">{tip}</circle>'
        else:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
            yield f'<polyline class="{_color_class(rank)}" points="{points}">{tip}</polyline>'


def _color_class(rank: int) -> str:
    return f"rank{rank % _N_COLORS}"


def _split_name(name: str) -> tuple[str, str]:
    """Return the displayed name of a metric, and its unit."""
    unit = max((u for u in _UNITS if name.endswith(f"_{u}")), key=len, default="")
    bare = name.removesuffix(f"_{unit}") if unit else name
    return bare.replace("_", " ").replace(".", ": ", 1), unit


def _format_value(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    if unit in ("bytes", "bytes_per_s"):
        return bytes_text(round(value)) + ("/s" if unit == "bytes_per_s" else "")
    if unit == "seconds":
        return seconds_text(1e9 * value)
    return f"{float(f'{value:.3g}'):.10g}" + (
        f" {unit.replace('per_s', 'a second')}" if unit not in ("", "count") else ""
    )


MESSAGE_LABELS = {Kind.SF: "activation sent", Kind.SB: "gradient sent"}


def picture_json(record: RunRecord) -> str:
    """Return the data of the picture as JSON that is safe inside a script element."""
    text = json.dumps(_picture_data(record), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def list_timelines(record: RunRecord) -> list[tuple[str, Timeline]]:
    """Return the displayed timelines by name: the measured one first, then the predicted one, and the replay last."""
    found = [] if record.measured is None else [(record.measured.name, record.measured)]
    if record.predicted is not None:
        found.append(("predicted", record.predicted))
    if record.replayed is not None:
        found.append(("replayed", record.replayed))
    return found


def _picture_data(record: RunRecord) -> dict[str, Any]:
    shown = list_timelines(record)
    tables = _Tables()
    slowest = BottleneckRank.from_timeline(record.displayed_timeline)
    notes = {} if record.measured is None else PANEL_NOTES
    shares = record.siblings == 1
    panels = [_panel_data(name, timeline, tables, notes.get(name, ""), shares) for name, timeline in shown]
    return {
        "ranks": record.plan.n_ranks,
        "span": max(1, *(timeline.makespan for _, timeline in shown)),
        "kinds": list(Kind),
        "words": {**KIND_NAMES, **MESSAGE_LABELS},
        "slow": slowest.rank if slowest.is_uneven else -1,
        "panels": panels,
        "labels": list(tables.labels),
        "spans": list(tables.spans),
        "memory": _memory_data(record, *shown[0]),
    }


class _Tables:
    """Labels and spans, each stored once."""

    def __init__(self) -> None:
        self.labels: dict[str, int] = {}
        self.spans: dict[Span, int] = {}


_COLUMNS = ("rank", "kind", "stage", "job", "batch", "chunk", "label", "span", "target", "start", "took")


PANEL_NOTES = {"predicted": "before it ran", "replayed": "from the measured time of each operation; no prediction"}
"""Notes in the headings of the simulated timelines that are shown next to a measured one."""


def _panel_data(name: str, timeline: Timeline, tables: _Tables, note: str, has_bubble: bool) -> dict[str, Any]:
    kinds = {kind: number for number, kind in enumerate(Kind)}
    labels = Labels(timeline.plan, timeline.events)
    rows: list[Sequence[int]] = []
    for e in timeline.events:
        i = e.instruction
        rows.append(
            (
                e.rank,
                kinds[i.kind],
                i.stage,
                i.job,
                i.batch,
                labels.stage_index(i),
                tables.labels.setdefault(labels.label_of(i), len(tables.labels)),
                tables.spans.setdefault(i.span, len(tables.spans)),
                timeline.target_rank(e) if i.kind in SEND_KINDS else -1,
                e.start,
                e.end - e.start,
            )
        )
    columns = zip(*rows, strict=True) if rows else ([] for _ in _COLUMNS)
    return {
        "name": name,
        "heading": ", ".join(filter(None, [seconds_text(timeline.makespan), note, timeline.regime])),
        "makespan": timeline.makespan,
        "bubble": [round(share, 4) for share in timeline.bubble] if has_bubble else [],
        "events": {column: list(values) for column, values in zip(_COLUMNS, columns, strict=True)},
    }


def _memory_data(record: RunRecord, name: str, timeline: Timeline) -> dict[str, Any] | None:
    """Return the memory curves, or None if no bytes are known."""
    curves = memory_curves(timeline, record.costs)
    peaks = [max(size for _, size in curve) for curve in curves]
    if not any(peaks):
        return None
    limits = list(record.memory) or [None] * len(curves)
    counted = [limit for limit, peak in zip(limits, peaks, strict=True) if limit and limit < 2 * peak]
    dashed = "; dashed: the memory of its device" if counted else ""
    return {
        "title": f"tensors of each rank, estimated along the {name} timeline, and their peak{dashed}",
        "curves": [[list(column) for column in zip(*curve, strict=True)] for curve in curves],
        "peaks": peaks,
        "limits": limits,
        "most": max(*peaks, *counted, 1),
        "makespan": timeline.makespan,
    }
