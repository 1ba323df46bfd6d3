"""Deadlocks, drawn: what every rank has done so far, and what it waits for.

rank 0 | F0[0:1] F0[1:2]         | waits at B0[0:1] for B1[0:1]
rank 1 |         F1[0:1] B1[1:2] | waits at F1[1:2] for B0[1:2]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.errors import DeadlockError
from lightning_pipes.ir.instruction import COMPUTE, Instruction
from lightning_pipes.ir.plan import Plan

COLUMNS = 6
"""Steps that are drawn, the last ones."""


def deadlock(done: Iterable[Instruction], stuck: Mapping[int, Instruction], plan: Plan) -> DeadlockError:
    """The error for ranks that wait for each other, with a row for each rank and a column for each step in which
    something could run.

    Args:
        done: what has run, in an order in which it could.
        stuck: what each rank that is not through waits at.
    """
    steps: dict[Instruction, int] = {}
    last = [-1] * plan.n_ranks
    for i in done:
        rank, before = plan.ranks[i.stage], max([-1, *(steps[n] for n in needs(i, plan) if n in steps)])
        if i.kind in COMPUTE:
            last[rank] = steps[i] = 1 + max(last[rank], before)
        else:
            steps[i] = before  # messages take no step of their own
    first = max(0, max(last) + 1 - COLUMNS)
    cells = {(plan.ranks[i.stage], step): str(i) for i, step in steps.items() if i.kind in COMPUTE and step >= first}
    columns = range(first, max(last) + 1)
    widths = [max(len(text) for (_, at), text in cells.items() if at == step) for step in columns]
    waits, rows = [], []
    for rank in range(plan.n_ranks):
        row = " ".join(cells.get((rank, at), "").ljust(width) for at, width in zip(columns, widths, strict=True))
        rows.append(f"rank {rank} | {'... ' if first else ''}{row}".rstrip())
        if rank in stuck:
            missing = ", ".join(str(n) for n in needs(stuck[rank], plan) if n not in steps)
            waits.append(f"rank {rank} waits at {stuck[rank]} for {missing}")
    return DeadlockError("\n".join([f"the ranks wait for each other: {'; '.join(waits)}; so far ran", *rows]))
