"""The cost of one scheduling decision of CSP in the engine, with 30 subnets queued on a stage in the middle of eight.

CPU time of the real path in one process: `ReadyOrder` is told what has arrived, asked what to run, and told that it
has run, with all that this sets free. Nothing is computed or sent; sends are taken once they are ready. A decision
is one forward, backward or step; entering a subnet is counted apart.
"""

from __future__ import annotations

from time import process_time_ns
from typing import NamedTuple

from benchmarks.papers.csp.emulation.spaces import fixed, space_of
from lightning_pipes.engine.compute.order import ReadyOrder
from lightning_pipes.engine.messages.mailbox import Key, Mailbox
from lightning_pipes.ir import RECEIVES, SENDS, Instruction, Kind, LayerUse, Plan, Span, adapt_plan, batch_instructions
from lightning_pipes.strategies.csp import CSP

STAGES, RANK = 8, 3


class Cost(NamedTuple):
    """Microseconds, medians over the stream.

    Attributes:
        decision: to be told what has arrived, to choose, and to be told that it has run.
        entering: to take one more subnet in.
        queued: subnets that wait on the stage, on average.
    """

    decision: float
    entering: float
    queued: float


class Arrivals(Mailbox):
    """A mailbox into which messages are put without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.come: list[Instruction] = []

    def has_message(self, key: Key) -> bool:
        return False

    def take_new(self, window: int) -> list[Instruction]:
        come, self.come = self.come, []
        return come


def measured(space: str = "NLP.c1", microbatches: int = 8, subnets: int = 150, depth: int = 30) -> Cost:
    """Runs a stream through the order of one rank. Every input is there from the start, so the queue is always as long
    as `depth`; gradients arrive when all forwards of a subnet have run."""
    placed = fixed(space_of(space).draw(subnets, 0), STAGES)
    layers = [Span(int(a), int(b)) for a, b in zip(placed.cuts[0, :-1], placed.cuts[0, 1:], strict=True)]
    uses = [LayerUse.from_names([f"{b}.{c}" for b, c in enumerate(row)], layers) for row in placed.subnets.choices]
    policy = CSP(depth)
    plan = adapt_plan(Plan.even(STAGES, microbatches, layers=tuple(layers)), policy)
    order, mailbox = ReadyOrder(policy, plan, RANK), Arrivals()
    decisions, entering, queued = [], [], []
    spent = 0
    left = dict.fromkeys(range(subnets), microbatches)
    entered = 0
    while entered < subnets or not order.is_satisfied:
        while entered < subnets and order.is_satisfied:
            begun = process_time_ns()
            order.add((0, entered), microbatches, uses[entered])
            entering.append(process_time_ns() - begun)
            mine = batch_instructions(plan, RANK, 0, entered)
            mailbox.come += [i for i in mine if i.kind is Kind.RF]
            entered += 1
            if entered == subnets:
                order.close()
        begun = process_time_ns()
        i: Instruction | None = order.next_instruction(mailbox, 0)
        assert i is not None, "everything that a stage waits for has arrived"
        order.mark_begun(i)
        order.mark_done(i)
        spent += process_time_ns() - begun
        if i.kind in RECEIVES or i.kind in SENDS:
            continue
        decisions.append(spent)
        queued.append(sum(n > 0 for y, n in left.items() if y < entered))
        spent = 0
        if i.kind is Kind.F:
            left[i.batch] -= 1
            if not left[i.batch]:
                mailbox.come += [j for j in batch_instructions(plan, RANK, 0, i.batch) if j.kind is Kind.RB]
    whole = decisions[: len(decisions) * 3 // 4]  # the queue runs dry at the end
    return Cost(
        sum(whole) / len(whole) / 1e3,
        sorted(entering)[len(entering) // 2] / 1e3,
        sum(queued[: len(whole)]) / len(whole),
    )


def decision_us(microbatches: int = 8, runs: int = 3, subnets: int = 150) -> Cost:
    """The fastest of some runs."""
    return min(measured(microbatches=microbatches, subnets=subnets) for _ in range(runs))
