"""The order of a job array that goes in rounds, as the paper's does: a batch of every sibling, in a searched order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, Cut, F, Instruction, Kind, Plan, Program, check_count, check_fields
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution, problem_from_plan
from lightning_pipes.strategies.jap.solvers.proof import prove_order, require_ortools
from lightning_pipes.strategies.jap.solvers.rules import RULES
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solve import METHODS, solve_array

EFFORT = 40_000
"""Blocks that are placed in all orders that are tried: what Python does in 50 ms, whenever siblings change."""
EXACT = "exact"
PROOF_SECONDS = 0.5
"""Deterministic seconds of CP-SAT, which are the same work on every rank."""


@dataclass(frozen=True)
class RoundOrder:
    """Orders the rounds of a job array: `JobArray(4, rounds=RoundOrder("genetic"))`.

    Blocks are taken to last as long as they have rows, backwards twice as long. Every rank finds the same order, for
    the effort is counted and no clock is read.

    Attributes:
        method: a solver of ArrayPipe's paper (S IV-B): "algorithm 1" as printed, "genetic" its genetic algorithm,
            "branch and bound"; "search" anneals; "exact" proves the order by CP-SAT (pip install
            lightning-pipes[proof]); "auto" chooses; or a rule of `solvers.rules`.
        effort: blocks that are placed in all orders that are tried, whenever siblings change.

    Raises:
        InputError: there is no such method; OR-Tools is missing.
    """

    method: str = "auto"
    effort: int = EFFORT

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("effort", self.effort)
        every = {name: name for name in ("auto", EXACT, *METHODS, *RULES)}
        object.__setattr__(self, "method", lookup_name(every, self.method, "solver"))
        if self.method == EXACT:
            require_ortools()

    def __call__(self, rows: tuple[int, ...], stages: int) -> Program:
        """Return the order of a round.

        Args:
            rows: the samples of each sibling's batch.
            stages: of the pipeline.

        Raises:
            InputError: no jobs, no stages, or a batch without rows.
        """
        return _order(self, tuple(rows), stages)

    def solve(self, problem: ArrayProblem) -> ArraySolution:
        """Return the order of one iteration, with a bound on how good it is."""
        effort = Effort(max(1, self.effort // problem.blocks))
        if self.method != EXACT:
            return solve_array(problem, self.method, effort)
        return prove_order(problem, PROOF_SECONDS, solve_array(problem, effort=effort), deterministic=True)


@lru_cache(maxsize=256)
def _order(order: RoundOrder, rows: tuple[int, ...], stages: int) -> Program:
    plan = Plan(tuple(range(stages)), tuple(Cut.even(each, 1, stages) for each in rows))
    problem = problem_from_plan(plan, CostModel.uniform(stages, 1e-3, 2e-3, rows=1))
    return program_from_order(order.solve(problem).order, plan)


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
