"""All operations of some batches of a plan, before they are ordered."""

from __future__ import annotations

from functools import lru_cache

from lightning_pipes.ir import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Kind,
    Plan,
    batch_instructions,
    needs,
    ready_key,
    send_of,
)
from lightning_pipes.sim.loops.operations import Numbering, flatten_lists
from lightning_pipes.sim.loops.queues import Queues
from lightning_pipes.sim.loops.tables import Graph, Table

_QUEUES = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2, Kind.STEP: 3}
"""The queue of a stage in which each kind waits; B and I never meet."""


@lru_cache(maxsize=16)
def open_queues(plan: Plan, batches: int) -> Queues:
    """The operations of the first `batches` batches of every job; the computations of a rank in order of `ready_key`.

    What waits for something that these batches do not hold waits forever.
    """
    instructions: list[Instruction] = []
    sends: list[Instruction] = []
    for rank in range(plan.n_ranks):
        mine = [
            i
            for job in range(len(plan.jobs))
            for batch in range(batches)
            for i in batch_instructions(plan, rank, job, batch)
        ]
        instructions += sorted((i for i in mine if i.kind in COMPUTE), key=ready_key)
        sends += [i for i in mine if i.kind in SENDS]
    instructions += sends
    number = {i: n for n, i in enumerate(instructions)}

    numbering = Numbering(plan)
    ranks, links, groups = [], [], []
    waiting = []
    after: list[list[int]] = [[] for _ in instructions]
    pool, rows = [], []
    members: list[list[int]] = [[] for _ in range(4 * plan.n_stages)]
    forwards = {stage: 4 * n for n, stage in enumerate(s for stages in plan.stages for s in stages)}
    for n, i in enumerate(instructions):
        rank = plan.rank_of(i)
        link, group = numbering.assign_numbers(i, rank)
        ranks.append(rank)
        links.append(link)
        groups.append(group)
        pool.append(forwards[i.stage])
        rows.append(i.span.rows if i.kind is Kind.F else -i.span.rows if i.kind in (Kind.B, Kind.W) else 0)
        if i.kind in COMPUTE:
            members[forwards[i.stage] + _QUEUES[i.kind]].append(n)
        unmet = _without_receives(i, plan)
        waiting.append(len(unmet))
        for needed in unmet:
            if needed in number:
                after[number[needed]].append(n)
    for followers in after:
        if len(followers) > 1:  # messages that are complete at one instant leave in this order
            followers.sort(key=instructions.__getitem__)
    return Queues(
        plan,
        tuple(instructions),
        tuple(numbering.like),
        numbering.link_pairs,
        Table(Graph(ranks, links, groups, *flatten_lists(after))),
        waiting=waiting,
        members=members,
        owner=[rank for rank, stages in enumerate(plan.stages) for _ in range(4 * len(stages))],
        forwards=forwards,
        pool=pool,
        rows=rows,
        in_order=False,
    )


def _without_receives(i: Instruction, plan: Plan) -> list[Instruction]:
    """The instructions that `i` needs; for a receive, those that it needs, which is its send where the plan demands
    nothing else."""
    out = []
    for n in needs(i, plan):
        if n.kind not in RECEIVES:
            out.append(n)
        elif plan.after:
            out += _without_receives(n, plan)
        else:
            out.append(send_of(n))
    return out
