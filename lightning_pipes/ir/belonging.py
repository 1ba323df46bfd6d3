"""Detect programs of another plan before a rank waits for a message that never arrives."""

from __future__ import annotations

from collections.abc import Collection

from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.errors import ProgramError
from lightning_pipes.ir.instruction import RECEIVES, Instruction, Kind, send_of
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program

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
            if plan.ranks[i.stage] != rank:
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
    if plan.ranks[i.stage] != rank:
        return f"the plan has stage {i.stage} on rank {plan.ranks[i.stage]}"
    sends = i.kind in (Kind.SF, Kind.RB)
    other = i.stage + 1 if sends else i.stage - 1
    if i.kind in (Kind.SF, Kind.RF, Kind.SB, Kind.RB) and not 0 <= other < plan.n_stages:
        return f"stage {i.stage} of the plan has no neighbour for it"
    return ""


def _describe_cut(i: Instruction, plan: Plan) -> str:
    spans = plan.spans(i.kind, i.stage, i.job)
    return f"{len(spans)} micro-batches of a batch of {plan.jobs[i.job].rows}"
