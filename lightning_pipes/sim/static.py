"""A fixed order in time: the longest path through what each rank, each link and the data flow demand.

Ranks run their rows in order and links serve messages in the order in which they were sent, so every resource's order
is known in advance and one pass over the instructions, in any order that respects them all, gives every start.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache

from lightning_pipes.cost import Costs
from lightning_pipes.ir import RECEIVES, SENDS, DeadlockError, Instruction, Kind, Plan, Program, lower, needs


@dataclass(frozen=True)
class Compiled:
    """A lowered program as integers. Receives are gone: what they wait for holds up whatever comes after them.

    Attributes:
        instructions: computations and sends, each after all that it waits for.
        ranks: who runs each of them.
        steps: (rank, link or -1, index into `like`, predecessors that the rank's own order does not imply).
        like: one instruction of every group that costs the same.
        n_links: the number of links.
    """

    instructions: tuple[Instruction, ...]
    ranks: tuple[int, ...]
    steps: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    like: tuple[Instruction, ...]
    n_links: int


@lru_cache(maxsize=64)
def compiled(program: Program, plan: Plan) -> Compiled:
    """The finite `program` with its transfers, ready to be timed.

    Raises:
        ProgramError: the program has not as many rows as the plan has ranks.
        DeadlockError: ranks wait for each other, or for what nobody runs.
    """
    lowered = lower(program, plan)
    number: dict[Instruction, int] = {}  # position in `kept`; of a receive, that of its send
    kept: list[Instruction] = []
    ranks: list[int] = []
    steps: list[tuple[int, int, int, tuple[int, ...]]] = []
    groups: dict[tuple[Kind, int, int, int, int], int] = {}
    like: list[Instruction] = []
    links: dict[tuple[int, int], int] = {}
    arrived: list[list[int]] = [[] for _ in range(plan.n_ranks)]  # awaited by receives since the rank's last step
    at = [0] * plan.n_ranks
    sleepers: dict[Instruction, list[int]] = {}  # ranks that wait for an instruction
    awake = list(range(plan.n_ranks - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row = lowered.head[rank]
        while at[rank] < len(row):
            i = row[at[rank]]
            kind, stage, job, batch, (first, last) = i
            foreign = []  # what the rank's own order does not imply
            for n in needs(i, plan):
                position = number.get(n)
                if position is None:
                    sleepers.setdefault(n, []).append(rank)
                    break
                if plan.ranks[n.stage] != rank or n.kind in SENDS:
                    foreign.append(position)
            else:
                at[rank] += 1
                if i in sleepers:
                    awake += sleepers.pop(i)
                if kind in RECEIVES:
                    number[i] = foreign[-1]  # its send
                    arrived[rank] += foreign
                    continue
                link = -1
                if kind in SENDS:
                    target = plan.ranks[stage + 1 if kind is Kind.SF else stage - 1]
                    link = links.setdefault((rank, target), len(links))
                group = groups.setdefault((kind, stage, job, batch, last - first), len(like))
                if group == len(like):
                    like.append(i)
                number[i] = len(kept)
                kept.append(i)
                ranks.append(rank)
                steps.append((rank, link, group, (*arrived[rank], *foreign)))
                arrived[rank].clear()
                continue
            break
    stuck = [(rank, row[at[rank]]) for rank, row in enumerate(lowered.head) if at[rank] < len(row)]
    if stuck:
        raise DeadlockError(
            "the ranks wait for each other: " + "; ".join(_why(rank, i, plan, number) for rank, i in stuck)
        )
    return Compiled(tuple(kept), tuple(ranks), tuple(steps), tuple(like), len(links))


def _why(rank: int, i: Instruction, plan: Plan, done: Container[Instruction]) -> str:
    return f"rank {rank} waits at {i} for {', '.join(str(n) for n in needs(i, plan) if n not in done)}"


def run(compiled: Compiled, plan: Plan, costs: Costs, blocking_sends: bool = False) -> tuple[list[int], list[int]]:
    """Start and end of every instruction of `compiled`, in nanoseconds."""
    lasting, late = [], []
    for i in compiled.like:
        busy, latency = costs.transfer(i, plan) if i.kind in SENDS else (costs.duration(i, plan), 0)
        lasting.append(busy)
        late.append(latency)
    overhead = costs.overhead_ns
    clock = [0] * plan.n_ranks
    free = [0] * compiled.n_links
    starts: list[int] = []
    ends: list[int] = []
    for rank, link, group, before in compiled.steps:
        t = clock[rank]
        for n in before:
            if ends[n] > t:
                t = ends[n]
        if link < 0:
            t += overhead
            starts.append(t)
            t += lasting[group]
            ends.append(t)
            clock[rank] = t
        else:
            clock[rank] = t
            if free[link] > t:
                t = free[link]
            starts.append(t)
            t += lasting[group]
            ends.append(t + late[group])
            free[link] = t
            if blocking_sends:
                clock[rank] = t
    return starts, ends
