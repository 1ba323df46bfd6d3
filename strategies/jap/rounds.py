"""The order of a job array that goes in rounds, as the paper's does: a batch of every sibling, in a searched order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, F, Instruction, Kind, Plan, Program, check_count, check_fields, check_number
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution, problem_from_plan
from lightning_pipes.strategies.jap.solvers.proof import prove_order, require_ortools
from lightning_pipes.strategies.jap.solvers.rules import RULES
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solve import METHODS, THRESHOLD, solve_array

EFFORT = 40_000
"""Blocks that are placed in all orders that are tried: what Python does in 50 ms, whenever siblings change."""
EXACT = "exact"
PROOF_SECONDS = 0.5
"""Deterministic seconds of CP-SAT, which are the same work in every run."""


@dataclass(frozen=True)
class RoundOrder:
    """Orders the rounds of a job array: `JobArray(4, rounds=RoundOrder("genetic"))`.

    Rank 0 searches by the measured times of the stages, whenever siblings change. By `effort` the order is the same in
    every run with the same times; by `seconds` it depends on the speed of the machine.

    Attributes:
        method: a solver of ArrayPipe's paper (S IV-B): "algorithm 1" as printed, "genetic" its genetic algorithm,
            "branch and bound"; "search" anneals; "exact" proves the order by CP-SAT (pip install
            lightning-pipes[proof]); "auto" chooses; or a rule of `solvers.rules`.
        effort: blocks that are placed in all orders that are tried.
        threshold: jobs up to which "auto" searches for a proof as long as it may, by branch and bound; above it
            searches for good orders. The paper has 30.
        seconds: of a search, in place of `effort`; None counts blocks.

    Raises:
        InputError: there is no such method; OR-Tools is missing; a number makes no sense.
    """

    method: str = "auto"
    effort: int = EFFORT
    threshold: int = THRESHOLD
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("effort", self.effort)
        check_count("threshold", self.threshold)
        if self.seconds is not None:
            check_number("seconds", self.seconds, "a finite number above 0, or None", lambda x: 0 < x < inf)
        every = {name: name for name in ("auto", EXACT, *METHODS, *RULES)}
        object.__setattr__(self, "method", lookup_name(every, self.method, "solver"))
        if self.method == EXACT:
            require_ortools()

    def __call__(self, plan: Plan, costs: CostModel) -> Program:
        """Return the order of a round.

        Args:
            plan: of a batch of each sibling, whole, one stage a rank.
            costs: of its stages.
        """
        return _order(self, plan, costs)

    def solve(self, problem: ArrayProblem) -> ArraySolution:
        """Return the order of one iteration, with a bound on how good it is."""
        orders = Effort(max(1, self.effort // problem.blocks))
        effort = orders if self.seconds is None else Effort.from_seconds(self.seconds)
        if self.method != EXACT:
            return solve_array(problem, self.method, effort, threshold=self.threshold)
        found = solve_array(problem, effort=orders)
        return prove_order(problem, self.seconds or PROOF_SECONDS, found, deterministic=self.seconds is None)


@lru_cache(maxsize=256)
def _order(order: RoundOrder, plan: Plan, costs: CostModel) -> Program:
    return program_from_order(order.solve(problem_from_plan(plan, costs)).order, plan)


def program_from_order(order: Array, plan: Plan) -> Program:
    """Return the program of one batch of each job of `plan`, in one micro-batch each; a STEP follows each backward.

    Args:
        order: of block numbers, as `ArraySolution.order` is.
        plan: of the jobs.
    """
    jobs = len(plan.jobs)
    rows = []
    for stage, blocks in enumerate(order.tolist()):
        row: list[Instruction] = []
        for block in blocks:
            job = block % jobs
            span = plan.spans(Kind.F, stage, job)[0]
            if block % (2 * jobs) < jobs:
                row.append(F(stage, span, job))
            else:
                row += [B(stage, span, job), STEP(stage, job)]
        rows.append(tuple(row))
    return Program(tuple(rows))


round_order = RoundOrder()
"""The order of a round by the method "auto", for `JobArray(size, rounds=round_order)`."""
