"""Bytes that ranks hold, derived from bytes of stages: activations by instruction, and the rest throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_pipes.ir import Instruction, Kind, Plan, layer_passes


class StageByteCosts(Protocol):
    """Bytes of stages and messages; `CostModel` documents each."""

    @property
    def forward_bytes(self) -> tuple[float, ...]: ...

    @property
    def backward_bytes(self) -> tuple[float, ...]: ...

    @property
    def activation_bytes(self) -> tuple[int, ...]: ...

    @property
    def weight_bytes(self) -> tuple[int, ...]: ...

    @property
    def state_bytes(self) -> tuple[int, ...]: ...

    @property
    def working_bytes(self) -> tuple[float, ...]: ...

    @property
    def waiting_messages(self) -> int: ...


def held_bytes(of: StageByteCosts, i: Instruction, plan: Plan) -> tuple[int, int]:
    """Return the bytes of activations that `i` allocates at its start, and the bytes that it frees at its end. A
    forward in several passes allocates its peak. A backward starts with all activations that it recomputes."""
    if i.kind is Kind.STEP or not (of.activation_bytes or of.working_bytes):
        return 0, 0
    s = i.stage
    all_of_it = of.activation_bytes[s] if of.activation_bytes else 0
    received = int(of.forward_bytes[s - 1]) if s > 0 and of.forward_bytes else 0
    kept = made_again = most = working = 0
    for rows, again in layer_passes(i, plan):
        at_work = int(of.working_bytes[s] * rows) if of.working_bytes else 0
        working = max(working, at_work)
        kept += (received if again else all_of_it) * rows
        made_again += all_of_it * rows if again else 0
        most = max(most, kept + at_work)
    match i.kind:
        case Kind.F:
            return most, most - kept
        case Kind.I:
            return made_again + working, working
        case Kind.B:
            return made_again + working, kept + made_again + working
        case _:
            return working, kept + made_again + working


def resident_bytes(of: StageByteCosts, rank: int, plan: Plan) -> int:
    """Return the bytes that `rank` holds throughout: weights of every version that the plan allows, gradients,
    optimizer states and messages that wait at their receiver."""
    stages = plan.stages[rank]
    weights = sum(of.weight_bytes[s] * plan.versions[s] for s in stages) if of.weight_bytes else 0
    states = sum(of.state_bytes[s] for s in stages) if of.state_bytes else 0
    return len(plan.jobs) * (weights + states + _waiting_bytes(of, stages, plan))


def _waiting_bytes(of: StageByteCosts, stages: Sequence[int], plan: Plan) -> int:
    if not of.waiting_messages:
        return 0
    size = 0.0
    for s in stages:
        if s and plan.is_remote_edge(s - 1) and of.forward_bytes:
            size += of.forward_bytes[s - 1] * max(span.rows for span in plan.spans(Kind.RF, s))
        if s + 1 < plan.n_stages and plan.is_remote_edge(s) and of.backward_bytes:
            size += of.backward_bytes[s] * max(span.rows for span in plan.spans(Kind.RB, s))
    return int(of.waiting_messages * size)
