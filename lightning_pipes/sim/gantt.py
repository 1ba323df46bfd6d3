"""A timeline drawn in text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.ir import COMPUTE, Kind, Plan
from lightning_pipes.sim.event import Event
from lightning_pipes.sim.labels import WORDS, Labels

_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "+", Kind.W: "~", Kind.STEP: "#"}


def gantt(
    plan: Plan, events: Sequence[Event], makespan: int, bubbles: Sequence[float], title: str, width: int = 100
) -> str:
    """The title, and one line a rank with its share of idle time: `width` characters for the makespan, a number where a
    micro-batch begins, dots where the rank idles. What is shorter than half a character is left out, labels that do
    not fit too."""
    labels = Labels(plan, events)
    scale = width / max(1, makespan)
    rows = [["."] * width for _ in range(plan.n_ranks)]
    used = set()
    for e in events:
        if e.instruction.kind not in COMPUTE:
            continue
        left = round(e.start * scale)
        long = round(e.end * scale) - left
        if not long:
            continue
        label = labels.label_of(e.instruction)
        fill = _FILL[e.instruction.kind]
        used.add(e.instruction.kind)
        fits = 1 < long >= len(label)
        rows[e.rank][left : left + long] = label.ljust(long, fill) if fits else fill * long
    digits = len(str(len(rows) - 1))
    lines = [title]
    for rank, (row, bubble) in enumerate(zip(rows, bubbles, strict=True)):
        lines.append(f"rank {rank:>{digits}} |{''.join(row)}| bubble {bubble:.1%}")
    lines.append(
        f"{'':{digits + 5}}  " + "  ".join([f"{_FILL[k]} {WORDS[k]}" for k in _FILL if k in used] + [". idle"])
    )
    return "\n".join(lines)
