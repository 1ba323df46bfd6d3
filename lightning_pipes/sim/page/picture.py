"""The data that the page's script draws: timelines and memory as columns of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import SENDS, Kind, Span
from lightning_pipes.sim.shown.compare import BottleneckRank
from lightning_pipes.sim.shown.memory_use import memory_curves
from lightning_pipes.sim.shown.record import RunRecord
from lightning_pipes.sim.timeline import WORDS, Labels, Timeline

SENT = {Kind.SF: "activation sent", Kind.SB: "gradient sent"}


def picture_json(record: RunRecord) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(_picture(record), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def timelines(record: RunRecord) -> list[tuple[str, Timeline]]:
    """The timelines that are shown, by name: measured first."""
    found = [] if record.measured is None else [(record.measured.name, record.measured)]
    return [*found, ("predicted", record.predicted)]


def _picture(record: RunRecord) -> dict[str, Any]:
    shown = timelines(record)
    tables = _Tables()
    slowest = BottleneckRank.from_timeline(record.displayed_timeline)
    panels = [_panel(name, timeline, tables) for name, timeline in shown]
    return {
        "ranks": record.plan.n_ranks,
        "span": max(1, *(timeline.makespan for _, timeline in shown)),
        "kinds": list(Kind),
        "words": {**WORDS, **SENT},
        "slow": slowest.rank if slowest.is_uneven else -1,
        "panels": panels,
        "labels": list(tables.labels),
        "spans": list(tables.spans),
        "memory": _memory(record, *shown[0]),
    }


class _Tables:
    """Labels and spans, each listed once."""

    def __init__(self) -> None:
        self.labels: dict[str, int] = {}
        self.spans: dict[Span, int] = {}


_COLUMNS = ("rank", "kind", "stage", "job", "batch", "chunk", "label", "span", "target", "start", "took")


def _panel(name: str, timeline: Timeline, tables: _Tables) -> dict[str, Any]:
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
                timeline.target_rank(e) if i.kind in SENDS else -1,
                e.start,
                e.end - e.start,
            )
        )
    columns = zip(*rows, strict=True) if rows else ([] for _ in _COLUMNS)
    return {
        "name": name,
        "heading": ", ".join(filter(None, [seconds_text(timeline.makespan), timeline.regime])),
        "makespan": timeline.makespan,
        "bubble": [round(share, 4) for share in timeline.bubble],
        "events": {column: list(values) for column, values in zip(_COLUMNS, columns, strict=True)},
    }


def _memory(record: RunRecord, name: str, timeline: Timeline) -> dict[str, Any] | None:
    """None where no bytes are known."""
    curves = memory_curves(timeline, record.costs)
    peaks = [max(size for _, size in curve) for curve in curves]
    if not any(peaks):
        return None
    limits = list(record.memory) or [None] * len(curves)
    counted = [limit for limit, peak in zip(limits, peaks, strict=True) if limit and limit < 2 * peak]
    dashed = "; dashed: what its device has" if counted else ""
    return {
        "title": f"memory of each rank by the cost model, along the {name} timeline, and its peak{dashed}",
        "curves": [[list(column) for column in zip(*curve, strict=True)] for curve in curves],
        "peaks": peaks,
        "limits": limits,
        "most": max(*peaks, *counted, 1),
        "makespan": timeline.makespan,
    }
