"""An order of blocks, run in virtual time where the states of jobs take turns on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Instruction, Kind, Plan
from lightning_pipes.ir.program import Rows
from lightning_pipes.sim.residency import Residency, VirtualCopier

AHEAD = 64
"""Blocks whose states a device knows to come."""


def replayed(
    rows: Rows,
    plan: Plan,
    costs: Costs,
    states: Sequence[int],
    budgets: Sequence[int],
    hosts: Sequence[Sequence[int]],
    bandwidth: float,
) -> tuple[int, int]:
    """Nanoseconds until all has run, and nanoseconds that stages waited for states, all together.

    The order of each stage stays. A block begins when its data is there, and waits for its state then; while it runs,
    the states of those that come are loaded as far as there is room. Messages do not wait for each other.

    Args:
        rows: computations of each stage, of one-stage ranks.
        states: bytes of every job's state, by stage.
        budgets: bytes for states, by stage.
        hosts: the stages of each server, which share `bandwidth` bytes per second in each direction.
    """
    devices: dict[int, Residency[int]] = {}
    links: dict[int, VirtualCopier] = {}
    for host in hosts:
        link = VirtualCopier(bandwidth)
        for s in host:
            links[s] = link
            devices[s] = Residency(budgets[s], dict.fromkeys(range(len(plan.jobs)), states[s]), link)
    blocks = [[i for i in row if i.kind is not Kind.STEP] for row in rows]
    last = {job: cut.forward[0][-1] for job, cut in enumerate(plan.jobs)}
    for s, row in enumerate(blocks):
        devices[s].expect(i.job for i in row[:AHEAD])
    at, free = [0] * len(rows), [0] * len(rows)
    offered = [False] * len(rows)
    arrived: dict[Instruction, int] = {}
    updated: dict[tuple[int, int], int] = {}  # of stage 0, by job and batch
    heap: list[tuple[int, int]] = []
    waited = end = 0

    def offer(s: int) -> None:
        if offered[s] or at[s] == len(blocks[s]):
            return
        i = blocks[s][at[s]]
        first = i.kind is Kind.F and s == 0
        there = (updated.get((i.job, i.batch - 1)) if i.batch else 0) if first else arrived.pop(i, None)
        if there is not None:
            offered[s] = True
            heappush(heap, (max(there, free[s]), s))

    for s in range(len(rows)):
        offer(s)
    while heap:
        now, s = heappop(heap)
        i = blocks[s][at[s]]
        link, device = links[s], devices[s]
        link.now = now
        stall = device.lease(i.job, write=i.kind is Kind.B)
        waited += stall
        if at[s] + AHEAD < len(blocks[s]):
            device.expect([blocks[s][at[s] + AHEAD].job])
        link.now = now
        device.prefetch()
        done = now + stall + costs.duration_ns(i, plan) + costs.overhead_ns
        free[s] = done
        if i.kind is Kind.B and i.span == last[i.job]:
            free[s] += costs.duration_ns(Instruction(Kind.STEP, s, i.job, i.batch), plan)
            if s == 0:
                updated[i.job, i.batch] = free[s]
        device.release(i.job)
        end = max(end, free[s])
        step = 1 if i.kind is Kind.F else -1
        if 0 <= s + step < len(rows):
            send = i._replace(kind=Kind.SF if step > 0 else Kind.SB)
            arrived[i._replace(stage=s + step)] = done + sum(costs.transfer_ns(send, plan))
        elif step > 0:
            arrived[i._replace(kind=Kind.B)] = done
        at[s] += 1
        offered[s] = False
        for each in {s, max(0, s + step), 0}:
            if each < len(rows):
                offer(each)
    return end, waited
