"""How many bytes every rank holds at every moment of a timeline."""

from __future__ import annotations

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Kind
from lightning_pipes.sim.timeline import Timeline

Curve = tuple[tuple[int, int], ...]
"""(nanoseconds, bytes held from then on), ascending."""


def memory_curves(timeline: Timeline, costs: Costs) -> tuple[Curve, ...]:
    """Bytes of each rank over time: what it holds throughout, and what every computation takes when it starts and gives
    back when it ends, as `costs` has it. What cannot be known is not counted."""
    found = []
    for rank in range(timeline.plan.n_ranks):
        held = costs.resident_bytes(rank, timeline.plan)
        curve = [(0, held)]
        for e in timeline.computations:  # one after the other on a rank
            if e.rank != rank:
                continue
            taken, freed = costs.memory_change(e.instruction, timeline.plan)
            for time, change in ((e.start, taken), (e.end, -freed)):
                held += change
                if change and time == curve[-1][0]:
                    curve[-1] = (time, held)
                elif change:
                    curve.append((time, held))
        found.append(tuple(curve))
    return tuple(found)


def most_held(timeline: Timeline) -> int:
    """The most samples that a rank holds between the start of their forward and the end of their backward."""
    held = [0] * timeline.plan.n_ranks
    most = 0
    for e in timeline.computations:  # one after the other on a rank
        rows = e.instruction.span.rows
        if e.instruction.kind is Kind.F:
            held[e.rank] += rows
            most = max(most, held[e.rank])
        elif e.instruction.kind in (Kind.B, Kind.W):
            held[e.rank] -= rows
    return most
