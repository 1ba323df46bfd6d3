"""Start times by definition, as the longest paths in an explicit graph over samples, without a simulator."""

from __future__ import annotations

from functools import cache

from lightning_pipes.ir import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, Instruction, Kind, Plan, Program, lower
from tests.sim.links import Links


def starts(program: Program, plan: Plan, costs, blocking_sends=False) -> dict[Instruction, int]:
    """Return the start of every computation and send of a finite program."""
    rows = lower(program, plan).head
    where = {i: (rank, at) for rank, row in enumerate(rows) for at, i in enumerate(row)}
    links = Links(plan, costs)
    gradient = Kind.I if plan.split_backward else Kind.B

    def made_by(kind, stage, like):
        return [
            i
            for i in where
            if (i.kind, i.stage, i.job, i.batch) == (kind, stage, like.job, like.batch)
            and set(range(*i.span)) & set(range(*like.span))
        ]

    def message(i):
        forward = i.kind is Kind.RF
        return made_by(Kind.SF if forward else Kind.SB, i.stage + (-1 if forward else 1), i)[:1]

    def data(i):
        """Return the instructions that `i` itself depends on, without the earlier instructions of its rank."""
        if i.kind in RECEIVE_KINDS:
            return [m for m in message(i) if m.span == i.span]
        out = list(plan.after.get(i, ()))
        if i.kind is Kind.F and i.stage and not plan.is_remote_edge(i.stage - 1):
            out += made_by(Kind.F, i.stage - 1, i)
        if i.kind in (Kind.B, Kind.I) and i.stage + 1 < plan.n_stages and not plan.is_remote_edge(i.stage):
            out += made_by(gradient, i.stage + 1, i)
        return out

    @cache
    def reached(i):
        rank, at = where[i]
        return max([rank_free(rank, at), *(there(n) for n in data(i))])

    @cache
    def moved(i):
        """Return the start, the last byte out and the arrival of a send, after the earlier sends of its rank."""
        rank, at = where[i]
        earlier = [j for j in rows[rank][:at] if j.kind in SEND_KINDS]
        if earlier:
            moved(earlier[-1])
        return links.send(reached(i), i)

    def begin(i):
        if i.kind in SEND_KINDS:
            return moved(i)[0]
        return reached(i) + (costs.overhead_ns if i.kind in COMPUTE_KINDS else 0)

    @cache
    def rank_free(rank, at):
        """Return the time at which the rank reaches a position of its row."""
        if at == 0:
            return 0
        before = rows[rank][at - 1]
        if before.kind in SEND_KINDS:
            return moved(before)[1] if blocking_sends else max(rank_free(rank, at - 1), *map(there, data(before)), 0)
        return there(before)

    @cache
    def there(i):
        if i.kind in SEND_KINDS:
            return moved(i)[2]
        return begin(i) + (costs.duration_ns(i, plan) if i.kind in COMPUTE_KINDS else 0)

    return {i: begin(i) for i in where if i.kind not in RECEIVE_KINDS}
