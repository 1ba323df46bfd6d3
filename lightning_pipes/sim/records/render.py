"""Draw timelines as pictures, and export them as traces for a viewer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Instruction, Kind, target_stage
from lightning_pipes.sim.timeline import KIND_NAMES, Event, Labels, Timeline

Shade = Callable[[Instruction], Any]
"""A function that returns the color of an instruction in a format of matplotlib."""
_COLORS = {
    Kind.F: "#4f8fd0",
    Kind.R: "#9b86c9",
    Kind.B: "#e8973a",
    Kind.I: "#e8b93a",
    Kind.W: "#7fae5c",
    Kind.STEP: "#555b66",
    Kind.SF: "#a9c8ea",
    Kind.SB: "#f3cda2",
}
_BAR_HEIGHT = 0.62  # the height of a bar in the row of a rank; transfers share the rest
_MAX_BARS = 160
"""The number of computations of a rank that can be distinguished in a picture."""
_LEFT_EDGE, _RIGHT_EDGE = 0.78, 0.9  # inches to the left and to the right of the bars


def save_png(timeline: Timeline, path: str | Path, other: Timeline | None = None, idle: bool = True) -> None:
    """Draw `timeline` with one row for each rank.

    Computations are bars with the number of their micro-batch. Transfers are thin bars, below the row of the sender on
    the way forward and above it on the way back. With `idle`, the share of time that each rank idles is shown.

    With `other`, the picture has two panels with the same scale. If the timelines have no names, the first panel is
    titled "predicted" and the second one "measured". If a timeline is too long to be readable, as an epoch without a
    flush may be, only its end is drawn.

    Args:
        timeline: the timeline.
        path: the file to write.
        other: the timeline of the second panel.
        idle: whether to show the idle time of each rank.
    """
    from matplotlib.figure import Figure  # pyplot would change the figures and the backend of the user

    panels = [timeline] if other is None else [timeline, other]
    heights = [_row_inches(t) * t.plan.n_ranks + 0.75 for t in panels]
    bars = max(len(row) for t in panels for row in t.program().head)
    longest = max(t.makespan for t in panels)
    most = longest * _MAX_BARS // bars if bars > _MAX_BARS else longest  # the number of nanoseconds that are shown
    bars = min(bars, _MAX_BARS)
    width = min(max(13.0, 0.17 * bars), 24.0)
    figure = Figure(figsize=(width, sum(heights) + 0.2))
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0]
    span = most or 1
    for panel, name, axis in zip(panels, ("predicted", "measured"), axes, strict=False):
        title = panel.name or (name if other is not None else "")
        points = 72 * (width - _LEFT_EDGE - _RIGHT_EDGE) / span
        last = panel.makespan > most
        part = _select_window(panel, panel.makespan - most, panel.makespan) if last else panel
        bubbles = panel.bubble if idle else ()
        _draw_panel(axis, part, span, points, partial(_choose_color, labels=Labels(panel.plan, panel.events)), bubbles)
        regime = panel.regime if panel.regimes else ""
        parts = (title, seconds_text(panel.makespan), f"the last {seconds_text(most)} of it" if last else "", regime)
        heading = ", ".join(filter(None, parts))
        axis.set_title(heading, loc="left", fontsize=10, pad=5)
    _draw_legend(axes[0], panels)
    axes[-1].set_xlabel(f"time in {_choose_unit(span)[0]}", fontsize=8)
    figure.subplots_adjust(
        left=_LEFT_EDGE / width,
        right=1 - _RIGHT_EDGE / width,
        top=1 - 0.42 / sum(heights),
        bottom=0.42 / sum(heights),
        hspace=0.6 / min(heights),
    )
    figure.savefig(path, dpi=130)


def _row_inches(timeline: Timeline) -> float:
    return 0.42 if timeline.plan.n_ranks <= 16 else 0.25


def _choose_unit(nanoseconds: int) -> tuple[str, float]:
    return next(((u, s) for u, s in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if nanoseconds >= s), ("ns", 1.0))


def draw_window(axis: Any, timeline: Timeline, start: int, stop: int, shade: Shade) -> None:
    """Draw the computations between two times into `axis`, in the style of `save_png`.

    Args:
        axis: an axis of a figure of the caller.
        timeline: the timeline.
        start: the start of the window in nanoseconds.
        stop: the end of the window in nanoseconds.
        shade: returns the color of an instruction.
    """
    figure = axis.get_figure()
    points = 72 * figure.get_size_inches()[0] * axis.get_position().width / (stop - start)
    part = _select_window(replace(timeline, events=timeline.computations), start, stop)
    _draw_panel(axis, part, stop - start, points, shade, part.bubble)
    axis.set_xlabel(f"time in {_choose_unit(stop - start)[0]}", fontsize=8)


def _select_window(timeline: Timeline, start: int, stop: int) -> Timeline:
    """Return the part of `timeline` from `start` to `stop`."""
    kept = tuple(
        e._replace(start=max(e.start, start) - start, end=min(e.end, stop) - start)
        for e in timeline.events
        if e.start < stop and e.end > start
    )
    return replace(timeline, events=kept)


def _draw_panel(
    axis: Any, timeline: Timeline, span: int, points: float, shade: Shade, bubbles: Sequence[float]
) -> None:
    """Draw one timeline.

    `points` is the size of a nanosecond on paper, and `bubbles` are the idle shares of the ranks.
    """
    from matplotlib.collections import PolyCollection

    labels = Labels(timeline.plan, timeline.events)
    size = _choose_unit(span)[1]
    longest: dict[Kind, int] = defaultdict(int)  # either all numbers of a kind are shown, or none
    for e in timeline.computations:
        longest[e.instruction.kind] = max(longest[e.instruction.kind], len(labels.label_of(e.instruction)))
    boxes: list[list[tuple[float, float]]] = []
    colours: list[Any] = []
    edges: list[float] = []
    for e in timeline.events:
        if e.end == e.start:
            continue
        low, high = _rows_of(e)
        x0, x1 = e.start / size, e.end / size
        boxes.append([(x0, low), (x0, high), (x1, high), (x1, low)])
        colours.append(shade(e.instruction))
        edges.append(min(0.6, 0.08 * points * (e.end - e.start)))
        kind = e.instruction.kind
        fits = (points * (e.end - e.start) - 0.6) / (0.63 * longest[kind]) if kind in KIND_NAMES else 0.0  # font size
        if fits >= 5:
            where, text = (x0 + x1) / 2, labels.label_of(e.instruction)
            axis.text(where, e.rank, text, ha="center", va="center_baseline", fontsize=min(7, fits), color="white")
    axis.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edges))

    n = timeline.plan.n_ranks
    axis.set_xlim(0, span / size)
    axis.set_ylim(n - 0.42, -0.58)
    axis.set_yticks(range(n), [f"rank {rank}" for rank in range(n)], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=7, length=2)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    for rank, bubble in enumerate(bubbles):
        axis.barh(rank, timeline.makespan / size, _BAR_HEIGHT, color="#f1f2f4", zorder=0)
        axis.text(1.006, rank, f"{bubble:.0%} idle", transform=axis.get_yaxis_transform(), fontsize=7.5, va="center")


def _rows_of(e: Event) -> tuple[float, float]:
    """Return the vertical range of the bar of `e`. The axis is inverted: row 0 is at the top."""
    half, thin = _BAR_HEIGHT / 2, (1 - _BAR_HEIGHT) / 2 - 0.07
    match e.instruction.kind:
        case Kind.SF:
            return e.rank + half + 0.04, e.rank + half + 0.04 + thin
        case Kind.SB:
            return e.rank - half - 0.04 - thin, e.rank - half - 0.04
        case _:
            return e.rank - half, e.rank + half


def _choose_color(i: Instruction, labels: Labels) -> tuple[float, float, float]:
    """Return the color of the kind, lighter for later stages of a rank, and darker for every second job or batch."""
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(_COLORS[i.kind])
    if i.kind not in KIND_NAMES:
        return r, g, b
    light = min(0.45, 0.22 * labels.stage_index(i))
    dark = 0.82 if (i.job + i.batch) % 2 else 1.0
    return tuple(dark * (c + (1 - c) * light) for c in (r, g, b))  # type: ignore[return-value]


def _draw_legend(axis: Any, panels: list[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {e.instruction.kind for t in panels for e in t.events if e.end > e.start}
    words = {**KIND_NAMES, Kind.SF: "activation sent", Kind.SB: "gradient sent"}
    patches = [Patch(color=_COLORS[kind], label=word) for kind, word in words.items() if kind in used]
    axis.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(patches),
        fontsize=7.5,
        frameon=False,
        handlelength=1.0,
        handleheight=0.8,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `timeline` as JSON in the Trace Event Format, which Perfetto and chrome://tracing can open.

    Each rank is a process. It has one thread for its computations, and one thread for each link on which it sends, or
    more if latency lets messages overlap. An arrow connects each message with the computation that uses it first. Times
    are in microseconds.
    """
    labels = Labels(timeline.plan, timeline.events)
    lanes = _Lanes()
    records: list[dict[str, Any]] = []
    first_use: dict[Instruction, Event] = {}
    for e in timeline.computations:
        first_use.setdefault(e.instruction, e)
    for rank in range(timeline.plan.n_ranks):
        records.append(_metadata_entry("process_name", rank, 0, f"rank {rank}"))
        records.append(_metadata_entry("thread_name", rank, 0, "compute"))
        records.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    records += [_slice_entry(e, 0, KIND_NAMES[e.instruction.kind], labels) for e in timeline.computations]
    for number, e in enumerate(timeline.transfers):
        target = timeline.target_rank(e)
        thread, new = lanes.place(e, target)
        if new:
            records.append(_metadata_entry("thread_name", e.rank, thread, f"to rank {target}"))
        records.append(_slice_entry(e, thread, "transfer", labels))
        user = _find_user(e, timeline, first_use)
        if user is not None:
            arrow = {"name": "message", "cat": "message", "id": number}
            records.append({**arrow, "ph": "s", "pid": e.rank, "tid": thread, "ts": e.start / 1e3})
            records.append({**arrow, "ph": "f", "bp": "e", "pid": user.rank, "tid": 0, "ts": user.start / 1e3})
    trace = {
        "traceEvents": records,
        "displayTimeUnit": "ns",
        "otherData": {
            "name": timeline.name,
            "makespan_ns": timeline.makespan,
            "regime": timeline.regime,
            **timeline.attributes,
        },
    }
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


class _Lanes:
    """Assigns transfers to threads, because the slices of one thread must not overlap."""

    def __init__(self) -> None:
        self._until: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        self._threads: dict[int, int] = defaultdict(int)

    def place(self, e: Event, target: int) -> tuple[int, bool]:
        """Return the thread for `e`, and whether the thread is new."""
        lanes = self._until[e.rank][target]
        for n, (until, thread) in enumerate(lanes):
            if until <= e.start:
                lanes[n] = e.end, thread
                return thread, False
        self._threads[e.rank] += 1
        thread = self._threads[e.rank]
        lanes.append((e.end, thread))
        return thread, True


def _find_user(e: Event, timeline: Timeline, first_use: dict[Instruction, Event]) -> Event | None:
    i, plan = e.instruction, timeline.plan
    stage = target_stage(i.kind, i.stage)
    kinds = (Kind.F,) if i.kind is Kind.SF else (Kind.B, Kind.I)
    users = (
        first_use.get(Instruction(kind, stage, i.job, i.batch, span))
        for kind in kinds
        for span in plan.overlapping_spans(kind, stage, i.job, i.span)
    )
    return min((u for u in users if u is not None), key=lambda u: u.start, default=None)


def _slice_entry(e: Event, thread: int, category: str, labels: Labels) -> dict[str, Any]:
    i = e.instruction
    return {
        "ph": "X",
        "name": f"{i.kind}{i.stage}" if i.kind is Kind.STEP else f"{i.kind}{i.stage} {labels.label_of(i)}",
        "cat": category,
        "pid": e.rank,
        "tid": thread,
        "ts": e.start / 1e3,
        "dur": (e.end - e.start) / 1e3,
        "args": {"stage": i.stage, "job": i.job, "batch": i.batch, "rows": [i.span.start, i.span.stop]},
    }


def _metadata_entry(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": value}}
