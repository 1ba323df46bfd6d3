"""Draw deadlocks: the instructions that every rank has run, and those for which it waits.

the ranks wait for each other: rank 0 waits at RB0[0:1] for SB1[0:1]; rank 1 waits at RF1[1:2] for SF0[1:2]; so far
ran
rank 0 | F0[0:1]
rank 1 |         F1[0:1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.errors import DeadlockError
from lightning_pipes.ir.instruction import COMPUTE, RECEIVES, Instruction, send_of
from lightning_pipes.ir.plan import Plan

COLUMNS = 6
"""The number of steps that are drawn."""


def deadlock_error(
    done: Iterable[Instruction], stuck: Mapping[int, Instruction], plan: Plan, why: str = ""
) -> DeadlockError:
    """Return the error for ranks that wait for each other, with a drawing of the finished instructions.

    Args:
        done: finished instructions, in a valid order.
        stuck: the next instruction of each rank that has not finished.
        why: a sentence on the reason, where one is known.
    """
    ran = dict.fromkeys(done)
    waits = []
    for rank, i in sorted(stuck.items()):
        missing = ", ".join(str(n) for n in needs(i, plan) if n not in ran)
        waits.append(f"rank {rank} waits at {i} for {missing}")
    begin = f"{why}. The ranks" if why else "the ranks"
    return DeadlockError(f"{begin} wait for each other: {'; '.join(waits)}; so far ran\n{draw_grid(ran, plan)}")


def draw_grid(done: Iterable[Instruction], plan: Plan) -> str:
    """Return a row for each rank and a column for each of the last steps.

    Args:
        done: finished instructions, in a valid order. Receives may be left out where sends are there.
    """
    steps: dict[Instruction, int] = {}
    last = [-1] * plan.n_ranks
    for i in done:
        rank, before = plan.ranks[i.stage], max([-1, *(steps.get(n, _sent(n, steps)) for n in needs(i, plan))])
        if i.kind in COMPUTE:
            last[rank] = steps[i] = 1 + max(last[rank], before)
        else:
            steps[i] = before  # messages take no step of their own
    first = max(0, max(last) + 1 - COLUMNS)
    cells = {(plan.ranks[i.stage], step): str(i) for i, step in steps.items() if i.kind in COMPUTE and step >= first}
    columns = range(first, max(last) + 1)
    widths = [max(len(text) for (_, at), text in cells.items() if at == step) for step in columns]
    rows = []
    for rank in range(plan.n_ranks):
        row = " ".join(cells.get((rank, at), "").ljust(width) for at, width in zip(columns, widths, strict=True))
        rows.append(f"rank {rank} | {'... ' if first else ''}{row}".rstrip())
    return "\n".join(rows)


def _sent(i: Instruction, steps: Mapping[Instruction, int]) -> int:
    """Return the step after which a message was sent; -1 where `i` is no receive, or was not sent."""
    return steps.get(send_of(i), -1) if i.kind in RECEIVES else -1
