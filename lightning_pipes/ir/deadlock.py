"""Draw deadlocks: the instructions that every rank has run, and those for which it waits.

the ranks wait for each other: rank 0 waits at RB0[0:1] for SB1[0:1]; rank 1 waits at RF1[1:2] for SF0[1:2]; so far
ran
rank 0 | F0[0:1]
rank 1 |         F1[0:1]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightning_pipes.ir.checks import DeadlockError, ProgramError
from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.instruction import COMPUTE, RECEIVES, Instruction, Kind, send_of
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program

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
        rank, before = plan.rank_of(i), max([-1, *(steps.get(n, _sent(n, steps)) for n in needs(i, plan))])
        if i.kind in COMPUTE:
            last[rank] = steps[i] = 1 + max(last[rank], before)
        else:
            steps[i] = before  # messages take no step of their own
    first = max(0, max(last) + 1 - COLUMNS)
    cells = {(plan.rank_of(i), step): str(i) for i, step in steps.items() if i.kind in COMPUTE and step >= first}
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


_WAY_OUT = "this is a program of another plan; make one by schedule.program(plan) of this plan"


def check_program_matches_plan(program: Program, plan: Plan) -> None:
    """Refuse a finite program with instructions that the plan does not have, or has on another rank.

    Missing instructions are not looked for.

    Raises:
        ProgramError: there is one; the message names it, and what the plan has instead.
    """
    if program.n_ranks != plan.n_ranks:
        raise ProgramError(f"the program has {program.n_ranks} rows, the plan {plan.n_ranks} ranks; {_WAY_OUT}")
    known: dict[tuple[Kind, int, int], frozenset[object]] = {}
    for rank, row in enumerate(program.head):
        for i in row:
            key = i.kind, i.stage, i.job
            if key not in known:
                why = _describe_mismatch(i, rank, plan)
                if why:
                    raise ProgramError(f"rank {rank} has {i}, and {why}; {_WAY_OUT}")
                known[key] = frozenset(plan.spans(*key))
            if i.kind is not Kind.STEP and i.span not in known[key]:
                raise ProgramError(
                    f"rank {rank} has {i}, and the plan cuts {i.kind}{i.stage} into {_describe_cut(i, plan)}; "
                    f"{_WAY_OUT}"
                )
            if plan.rank_of(i) != rank:
                raise ProgramError(f"rank {rank} has {i}, and {_describe_mismatch(i, rank, plan)}; {_WAY_OUT}")


def describe_absent_needs(program: Program, plan: Plan, waiting: Collection[Instruction]) -> str:
    """Return a sentence on the needs of `waiting` that no rank runs; empty if every need is in the program."""
    there = set(program.iter_instructions())
    never = [n for i in waiting for n in needs(i, plan) if (send_of(n) if n.kind in RECEIVES else n) not in there]
    if not never:
        return ""
    return f"no rank has {', '.join(map(str, never[:4]))}{', ...' if never[4:] else ''}; {_WAY_OUT}"


def _describe_mismatch(i: Instruction, rank: int, plan: Plan) -> str:
    if i.stage >= plan.n_stages:
        return f"the plan has {plan.n_stages} stages, counted from 0"
    if i.job >= len(plan.jobs):
        return f"the plan has {len(plan.jobs)} jobs, counted from 0"
    if rank not in plan.ranks_of_stages[i.stage]:
        return f"the plan has stage {i.stage} on rank {', '.join(map(str, plan.ranks_of_stages[i.stage]))}"
    sends = i.kind in (Kind.SF, Kind.RB)
    other = i.stage + 1 if sends else i.stage - 1
    if i.kind in (Kind.SF, Kind.RF, Kind.SB, Kind.RB) and not 0 <= other < plan.n_stages:
        return f"stage {i.stage} of the plan has no neighbour for it"
    return ""


def _describe_cut(i: Instruction, plan: Plan) -> str:
    spans = plan.spans(i.kind, i.stage, i.job)
    return f"{len(spans)} micro-batches of a batch of {plan.jobs[i.job].rows}"
