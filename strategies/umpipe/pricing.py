"""The price of each way to cut a batch, for a stage or a link, by a cost model and as the engine runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import F, Instruction, Kind, Plan, Span, layer_passes

NOTICED = 0.1
"""The share of a forward that a message must take to matter at all."""


class CutOption(NamedTuple):
    """One way in which a stage or a link cuts a batch, in both directions.

    Attributes:
        forward, backward: samples of a chunk; the last one may have fewer.
        forward_time, backward_time: nanoseconds of a chunk with all its samples.
        whole: of a stage, whether it runs a coarse forward in one piece, keeps its input, and runs forward again in
            each of its finer backwards; otherwise that forward is split as the backwards are: `Plan.whole_forward`.
    """

    forward: int
    backward: int
    forward_time: int
    backward_time: int
    whole: bool = False


def stage_options(costs: CostModel, plan: Plan, stage: int, sizes: Sequence[int]) -> list[CutOption]:
    """Return every way in which `stage` can cut, with chunks of `sizes`, ascending, one of which divides the other.
    What joining messages takes depends on the link's choice, too: the simulator knows, the search does without.

    Samples that share a forward and a backward share one graph, so the finer of the two sizes says how long both take.
    A coarser backward goes through the graphs of several forwards; of a coarser forward see `CutOption.whole`.

    Args:
        plan: says which stages recompute.
    """
    again = bool(plan.recompute) and plan.recompute[stage]
    once = costs.overhead_ns

    def chunk_time(kind: Kind, rows: int) -> int:
        return round(1e9 * costs.seconds_at(kind, stage, rows))

    forward = {rows: chunk_time(Kind.F, rows) for rows in sizes}
    backward = {rows: chunk_time(Kind.B, rows) + (forward[rows] if again else 0) for rows in sizes}
    found = []
    for f in sizes:
        for b in sizes:
            if max(f, b) % min(f, b):
                continue
            finest = min(f, b)
            found.append(CutOption(f, b, once + f // finest * forward[finest], once + b // finest * backward[finest]))
            if f > b and stage < plan.n_stages - 1:
                other = once + backward[b] + (0 if again else forward[b])
                found.append(CutOption(f, b, once + forward[f], other, whole=True))
    return found


def link_times(costs: CostModel, plan: Plan, stage: int, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return nanoseconds from the moment when a message of so many samples leaves until it is there, for each of
    `sizes`: on the link from `stage` to the next one, and back.

    Latency counts as if it occupied the link: searches take it so, the simulator knows better.
    """

    def message_time(kind: Kind, sender: int, rows: int) -> int:
        busy, latency = costs.transfer_ns(Instruction(kind, sender, span=Span(0, rows)), plan)
        return busy + latency

    if not plan.is_remote_edge(stage):
        return [0] * len(sizes), [0] * len(sizes)
    return [message_time(Kind.SF, stage, n) for n in sizes], [message_time(Kind.SB, stage + 1, n) for n in sizes]


def room_of(costs: CostModel, plan: Plan, stage: int, limit: int, size: int) -> int:
    """Return the samples that `stage` may hold between F and B in its share of `limit` bytes, while it computes on
    `size` of them; negative where the weights of its rank alone are more."""
    again = bool(plan.recompute) and plan.recompute[stage]
    every = costs.activation_bytes[stage] if costs.activation_bytes else 0
    received = int(costs.forward_bytes[stage - 1]) if stage and costs.forward_bytes else 0
    kept, made_again = (received, every) if again else (every, 0)
    working = int(costs.working_bytes[stage]) if costs.working_bytes else 0
    rank = plan.ranks[stage]
    left = (limit - costs.resident_bytes(rank, plan)) // len(plan.stages[rank]) - (made_again + working) * size
    if not kept:
        return plan.jobs[0].rows if left >= 0 else -1
    return left // kept


def drifted_costs(usual: CostModel, seen: CostModel, plan: Plan) -> tuple[CostModel, float]:
    """Return the `usual` costs scaled to the `seen` times, for all sizes, and the largest relative change. What was not
    seen has not changed.

    Args:
        plan: what ran.
    """
    seconds = dict(usual.seconds)
    most = 0.0
    for stage in range(plan.n_stages):
        sizes = {size for i in plan.spans(Kind.F, stage) for size, _ in layer_passes(F(stage, i), plan)}
        for kind in (Kind.F, Kind.B):
            if (kind, stage) not in seen.seconds:
                continue
            then = sum(usual.seconds_at(kind, stage, n) for n in sizes)
            ratio = sum(seen.seconds_at(kind, stage, n) for n in sizes) / then if then else 1.0
            most = max(most, abs(ratio - 1))
            seconds[kind, stage] = tuple((n, t * ratio) for n, t in usual.seconds[kind, stage])
        for kind, edge in ((Kind.SF, stage), (Kind.SB, stage - 1)):
            if (kind, stage) not in seen.seconds or not 0 <= edge < plan.n_stages - 1:
                continue
            rows = max(span.rows for span in plan.spans(kind, stage))
            busy, latency = usual.transfer_ns(Instruction(kind, stage, span=Span(0, rows)), plan)
            then, now = busy + latency, 1e9 * seen.seconds_at(kind, stage, rows)  # seen from its start to its arrival
            longest = max(1e9 * usual.seconds_at(Kind.F, each, rows) for each in range(plan.n_stages))
            if max(then, now) < NOTICED * longest:
                continue
            most = max(most, abs(now - then) / max(then, NOTICED * longest))
            seconds[kind, stage] = ((0, 0.0), (rows, max(0.0, now - latency) / 1e9))
    return replace(usual, seconds=seconds), most
