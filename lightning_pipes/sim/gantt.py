"""A timeline drawn in text."""

from __future__ import annotations

from lightning_pipes.ir import Kind
from lightning_pipes.sim.labels import WORDS, Labels
from lightning_pipes.sim.timeline import Timeline
from lightning_pipes.sim.units import seconds_text

_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "+", Kind.W: "~", Kind.STEP: "#"}


def gantt(timeline: Timeline, width: int = 100) -> str:
    """One line a rank, `width` characters for the makespan, a number where a micro-batch begins, dots where the rank
    idles. What is shorter than half a character is left out, labels that do not fit too."""
    labels = Labels(timeline)
    scale = width / max(1, timeline.makespan)
    rows = [["."] * width for _ in range(timeline.plan.n_ranks)]
    used = set()
    for e in timeline.computations:
        left = round(e.start * scale)
        long = round(e.end * scale) - left
        if not long:
            continue
        label = labels.of(e.instruction)
        fill = _FILL[e.instruction.kind]
        used.add(e.instruction.kind)
        fits = 1 < long >= len(label)
        rows[e.rank][left : left + long] = label.ljust(long, fill) if fits else fill * long
    digits = len(str(len(rows) - 1))
    lines = [f"{timeline.name + ': ' if timeline.name else ''}{seconds_text(timeline.makespan)}"]
    for rank, (row, bubble) in enumerate(zip(rows, timeline.bubble, strict=True)):
        lines.append(f"rank {rank:>{digits}} |{''.join(row)}| bubble {bubble:.1%}")
    lines.append(
        f"{'':{digits + 5}}  " + "  ".join([f"{_FILL[k]} {WORDS[k]}" for k in _FILL if k in used] + [". idle"])
    )
    return "\n".join(lines)
