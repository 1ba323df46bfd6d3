"""Lowering of programs: the recomputations of stages, and the transfers between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_pipes.ir.checks import ProgramError
from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.instruction import COMPUTE_KINDS, RECEIVE_KINDS, Instruction, Kind, Span
from lightning_pipes.ir.passes import recomputation_of
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program, Row, remember_results


@remember_results(64)
def lower(program: Program, plan: Plan) -> Program:
    """Return the program with its recomputations and its transfers.

    Each receive is placed directly before its first use. Each send is placed directly after the computation that
    completes its message. Because sends never block, no order of sends can deadlock. If the program already contains
    transfers, it is returned unchanged.

    Raises:
        ProgramError: if the number of rows of the program differs from the number of ranks of the plan.
    """
    if program.n_ranks != plan.n_ranks:
        raise ProgramError(f"the program has {program.n_ranks} rows, but the plan has {plan.n_ranks} ranks")
    if any(i.kind not in COMPUTE_KINDS for i in program.iter_instructions()):
        return program
    return _change_rows(add_recomputations(program, plan), lambda row: _lower_row(row, plan))


@remember_results(64)
def add_recomputations(program: Program, plan: Plan) -> Program:
    """Return a program without transfers, in which each R of the plan is placed directly before its backward.

    When the program is lowered, the gradient is received between the two. The rank therefore recomputes while the
    gradient is on its way, and holds the recomputed activations of one micro-batch at a time. A program that already
    contains an R is returned unchanged, and so is a program for a plan without `early_recompute`.
    """
    if not plan.early_recompute or any(i.kind is Kind.R for i in program.iter_instructions()):
        return program
    return _change_rows(program, lambda row: tuple(_with_recomputations(row, plan)))


def _with_recomputations(row: Row, plan: Plan) -> Iterator[Instruction]:
    for i in row:
        if (recomputation := recomputation_of(i, plan)) is not None:
            yield recomputation
        yield i


def _change_rows(program: Program, change: Callable[[Row], Row]) -> Program:
    return Program(*(tuple(map(change, part)) for part in (program.head, program.cycle, program.tail)))


def sends_after(i: Instruction, plan: Plan) -> list[Instruction]:
    """Return the sends that transmit samples of the computation `i`. The result may be empty."""
    kind, stage, job, batch, span = i
    if kind is Kind.F and stage + 1 < plan.n_stages and plan.is_remote_edge(stage):
        send = Kind.SF
    elif (kind is Kind.B or kind is Kind.I) and stage > 0 and plan.is_remote_edge(stage - 1):
        send = Kind.SB
    else:
        return []
    return [Instruction(send, stage, job, batch, s) for s in plan.overlapping_spans(send, stage, job, span)]


def _lower_row(row: Row, plan: Plan) -> Row:
    out: list[Instruction] = []
    received: set[Instruction] = set()
    parts_left: dict[Instruction, int] = {}  # number of computations that a message still waits for
    for i in row:
        if i.kind is not Kind.STEP:
            for n in needs(i, plan):
                if n.kind in RECEIVE_KINDS and n not in received:
                    received.add(n)
                    out.append(n)
        out.append(i)
        for send in sends_after(i, plan):
            producer = Kind.F if send.kind is Kind.SF else i.kind
            left = parts_left.pop(send, None) or len(plan.overlapping_spans(producer, send.stage, send.job, send.span))
            if left == 1:
                out.append(send)
            else:
                parts_left[send] = left - 1
    return tuple(out)


def batch_instructions(plan: Plan, rank: int, job: int, batch: int) -> list[Instruction]:
    """Return all instructions of one batch on one rank, including transfers, in no particular order."""
    out: list[Instruction] = []
    for stage in plan.stages[rank]:
        kinds = [*plan.compute_kinds]
        if stage > 0 and plan.is_remote_edge(stage - 1):
            kinds += [Kind.RF, Kind.SB]
        if stage + 1 < plan.n_stages and plan.is_remote_edge(stage):
            kinds += [Kind.SF, Kind.RB]
        found = [Instruction(k, stage, job, batch, s) for k in kinds for s in plan.local_spans(k, stage, rank, job)]
        out += [r for i in found if (r := recomputation_of(i, plan)) is not None] + found
        replica = plan.ranks_of_stages[stage].index(rank)
        out.append(Instruction(Kind.STEP, stage, job, batch, Span(replica, replica)))
    return out
