"""CSP on the search spaces of NASPipe's paper, compared with the systems that the paper names.

The parts spaces, split, bounds, costs, scaling and swaps are emulated, see papers/csp/figures.py. The part decision
measures the cost of a scheduling decision in the engine. The part equality trains on several numbers of processes and
checks whether the results are the same.

    python benchmarks/csp.py [--quick] [--json] [--part spaces|split|bounds|costs|scaling|swaps|decision|equality ...]
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from time import process_time_ns
from typing import NamedTuple

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.csp.emulation.kernel import STREAM
from benchmarks.papers.csp.emulation.spaces import fixed, space_of
from benchmarks.papers.csp.figures import STAGES, bounds, costs, scaling, spaces, split, swaps
from benchmarks.papers.csp.reproducibility import trained
from lightning_pipes.engine.compute.order import StreamOrder
from lightning_pipes.engine.messages.mailbox import Key, Mailbox
from lightning_pipes.ir import (
    RECEIVE_KINDS,
    SEND_KINDS,
    Instruction,
    Kind,
    LayerUse,
    Plan,
    Span,
    adapt_plan,
    batch_instructions,
)
from lightning_pipes.strategies.csp import CSP

MICROBATCHES = 8
"""The number of micro-batches for which `decision_us` is reported. It keeps the queue busy."""
RANK = 3
"""The rank whose decisions are measured, in the middle of the stages."""


class Cost(NamedTuple):
    """The processor time of decisions in microseconds.

    Attributes:
        decision: the mean time of a decision: receiving what has arrived, choosing an instruction, and recording that
            it has run.
        entering: the median time to add a subnet.
        queued: the mean number of subnets that wait on the stage.
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
    """Run a stream through the order of one rank, and return the processor time of its decisions.

    The measured code is the code that a training runs, in one process: `StreamOrder` receives the messages that have
    arrived, chooses an instruction, and is notified that it has run, which makes other instructions ready. Nothing is
    computed or sent, and sends end immediately. A decision is one forward, backward or step. All inputs are available
    from the start, so the queue is always as long as `depth`. Gradients arrive when all forwards of a subnet have run.
    """
    placed = fixed(space_of(space).draw(subnets, 0), STAGES)
    layers = [Span(int(a), int(b)) for a, b in zip(placed.cuts[0, :-1], placed.cuts[0, 1:], strict=True)]
    uses = [LayerUse.from_names([f"{b}.{c}" for b, c in enumerate(row)], layers) for row in placed.subnets.choices]
    policy = CSP(depth)
    plan = adapt_plan(Plan.even(STAGES, microbatches, layers=tuple(layers)), policy)
    order, mailbox = StreamOrder(policy, plan, RANK), Arrivals()
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
        if i.kind in RECEIVE_KINDS or i.kind in SEND_KINDS:
            continue
        decisions.append(spent)
        queued.append(sum(n > 0 for y, n in left.items() if y < entered))
        spent = 0
        if i.kind is Kind.F:
            left[i.batch] -= 1
            if not left[i.batch]:
                mailbox.come += [j for j in batch_instructions(plan, RANK, 0, i.batch) if j.kind is Kind.RB]
    whole = decisions[: len(decisions) * 3 // 4]  # the queue becomes empty at the end
    return Cost(
        sum(whole) / len(whole) / 1e3,
        sorted(entering)[len(entering) // 2] / 1e3,
        sum(queued[: len(whole)]) / len(whole),
    )


def decision_us(microbatches: int = 8, runs: int = 3, subnets: int = 150) -> Cost:
    """Return the result of the fastest of several runs."""
    return min(measured(microbatches=microbatches, subnets=subnets) for _ in range(runs))


def decision(quick: bool) -> Report:
    """Measure the cost of a decision with 30 queued subnets, by number of micro-batches.

    The key `decision_us` is for eight micro-batches.
    """
    report = Report(["M   us a decision   us to add a subnet       queued"])
    for m in (1, MICROBATCHES, 2 * MICROBATCHES):
        found = decision_us(m, subnets=80 if quick else 150)
        report.lines.append(f"{m:2} {found.decision:15.1f} {found.entering:23.1f} {found.queued:10.1f}")
        report.keys |= {"decision_us": found.decision} if m == MICROBATCHES else {f"decision_us_{m}": found.decision}
    return report


def equality(quick: bool) -> Report:
    """Train on several numbers of stages, and check whether weights and losses are the same.

    The key `bit_equal` is 1 if they are.
    """
    report, equal = Report([]), True
    for system in ("CSP sequential", "CSP delayed by 16"):
        found = {n: trained(system, n, 40 if quick else 200) for n in ((1, 2) if quick else (1, 2, 4, 8))}
        same = len({(each.weights, *each.record.losses.values()) for each in found.values()}) == 1
        equal = equal and same
        report.lines.append(f"{system}: {'equal' if same else 'DIFFERENT'} on {', '.join(map(str, found))} processes")
    report.keys["bit_equal"] = float(equal)
    return report


PARTS: dict[str, Callable[[bool], Report]] = {
    "spaces": spaces,
    "split": split,
    "bounds": bounds,
    "costs": costs,
    "scaling": scaling,
    "swaps": swaps,
    "decision": decision,
    "equality": equality,
}


def main() -> None:
    """Run the given parts of the benchmark."""
    parser = make_parser(__doc__, "fewer subnets and seeds; within 120 s")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    print(f"{describe_machine()}, Python {platform.python_version()}, {STREAM.load()}\n")
    keys = run_parts(PARTS, options.part, options.quick)
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in keys.items()}))


if __name__ == "__main__":
    main()
