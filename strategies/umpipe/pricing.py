"""Prices of all ways to cut a batch on a stage or link, by a cost model and by how the engine runs the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import F, Instruction, Kind, Plan, Span, layer_passes

MIN_MESSAGE_SHARE = 0.1
"""The duration of a message, as a share of a forward, below which changes of the message are ignored."""


class CutOption(NamedTuple):
    """One way to cut a batch on a stage or link, for both directions.

    Attributes:
        forward, backward: the number of samples in a chunk. The last chunk may have fewer.
        forward_time, backward_time: the duration of a full chunk in nanoseconds.
        whole: whether a stage runs a forward that is coarser than its backwards in one piece. The stage then keeps the
            input and runs forward again in each backward. Otherwise, the forward is split in the same way as the
            backwards. See `Plan.whole_forward`.
    """

    forward: int
    backward: int
    forward_time: int
    backward_time: int
    whole: bool = False


def stage_options(costs: CostModel, plan: Plan, stage: int, sizes: Sequence[int]) -> list[CutOption]:
    """Return every way in which `stage` can cut a batch into chunks of `sizes`.

    One of the sizes of forward and backward has to divide the other. Samples that share a forward and a backward share
    one autograd graph, so the finer of the two sizes determines the duration of both. A coarser backward runs through
    the graphs of several forwards. For a coarser forward, see `CutOption.whole`. The cost of joining messages is left
    out, because it also depends on the option of the link. A recomputation is priced as a part of the backward, even if
    it is an instruction of its own that may run before the gradient arrives, because the gain depends on the waits of
    the rank. The simulator, which compares the best cuts, includes both.

    Args:
        costs: the durations of forward and backward on each stage.
        plan: the plan that specifies which stages recompute.
        stage: the number of the stage.
        sizes: the numbers of samples in a chunk, in ascending order.
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
    """Return the time from sending to arrival for messages on the links after `stage`, in nanoseconds.

    Latency is included as if it occupied the link. This is an approximation for the searches, and the simulator is more
    accurate.

    Args:
        costs: the durations of messages.
        plan: the plan that specifies the ranks of the stages.
        stage: the number of the stage before the link.
        sizes: the numbers of samples in a message.

    Returns:
        A list for the link from `stage` to the next stage and a list for the link back, with a time for each of
            `sizes`. All times are 0 if both stages are on the same rank.
    """

    def message_time(kind: Kind, sender: int, rows: int) -> int:
        busy, latency = costs.transfer_ns(Instruction(kind, sender, span=Span(0, rows)), plan)
        return busy + latency

    if not plan.is_remote_edge(stage):
        return [0] * len(sizes), [0] * len(sizes)
    return [message_time(Kind.SF, stage, n) for n in sizes], [message_time(Kind.SB, stage + 1, n) for n in sizes]


def room_of(costs: CostModel, plan: Plan, stage: int, limit: int, size: int) -> int:
    """Return the number of samples that `stage` may hold between F and B.

    The stages of a rank share the memory equally, after weights and optimizer states. The result is negative if this
    memory is too small even for the computation itself.

    Args:
        costs: the bytes of weights, activations and messages.
        plan: the plan that specifies ranks and recomputation.
        stage: the number of the stage.
        limit: the memory of the rank in bytes.
        size: the number of samples on which the stage computes at a time.
    """
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
    """Return the `usual` costs scaled to the `seen` times for all sizes, and the largest relative change.

    Stages and links without an observation keep their usual costs.

    Args:
        usual: the costs by the profile.
        seen: the costs as measured during the run.
        plan: the plan that ran.
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
            then, now = busy + latency, 1e9 * seen.seconds_at(kind, stage, rows)  # seen from start to arrival
            longest = max(1e9 * usual.seconds_at(Kind.F, each, rows) for each in range(plan.n_stages))
            if max(then, now) < MIN_MESSAGE_SHARE * longest:
                continue
            most = max(most, abs(now - then) / max(then, MIN_MESSAGE_SHARE * longest))
            seconds[kind, stage] = ((0, 0.0), (rows, max(0.0, now - latency) / 1e9))
    return replace(usual, seconds=seconds), most
