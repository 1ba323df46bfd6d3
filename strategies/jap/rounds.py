"""The order of a job array that runs in rounds, as in the paper. A round is one batch of every sibling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from lightning_pipes.cost import CostModel, JobCosts
from lightning_pipes.ir import STEP, B, F, Instruction, Kind, Plan, Program, check_count, check_fields, check_number
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution, problem_from_plan
from lightning_pipes.strategies.jap.solvers.proof import prove_order, require_ortools
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solve import MAX_PROOF_JOBS, SOLVE_METHODS, solve_array

DEFAULT_SEARCH_BLOCKS = 40_000
"""The default number of blocks that a search places, summed over all orders that it tries.

Python needs about 50 ms for it. The search runs again whenever the set of siblings changes.
"""
EXACT_SEARCH = "exact"
PROOF_SECONDS = 0.5
"""The default limit of CP-SAT, in deterministic seconds. A deterministic second is the same work in every run."""


@dataclass(frozen=True)
class RoundOrder:
    """Orders the rounds of a job array, as in `JobArray(4, rounds=RoundOrder("genetic"))`.

    Rank 0 searches for an order with the measured times of the stages whenever the set of siblings changes. With a
    limit by `effort`, the same times give the same order in every run. With a limit by `seconds`, the order depends on
    the speed of the machine.

    Attributes:
        method: the solver. The solvers of ArrayPipe's paper (S IV-B) are "algorithm 1", as printed, "genetic" and
            "branch and bound". "search" inserts jobs and anneals. "exact" proves the order with CP-SAT (pip install
            lightning-pipes[proof]). "auto" chooses a solver by the size of the problem. A rule of `solvers.rules` is
            also allowed.
        effort: the number of blocks to place, summed over all orders that are tried.
        threshold: the largest number of jobs for which "auto" spends the whole effort on a proof by branch and bound.
            With more jobs, it searches for good orders. The paper uses 30.
        seconds: the time limit of a search, which replaces `effort`. None limits the search by `effort`.

    Raises:
        InputError: the method does not exist, OR-Tools is not installed, or a number is out of range.
    """

    method: str = "auto"
    effort: int = DEFAULT_SEARCH_BLOCKS
    threshold: int = MAX_PROOF_JOBS
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("effort", self.effort)
        check_count("threshold", self.threshold)
        if self.seconds is not None:
            check_number("seconds", self.seconds, "a finite number above 0, or None", lambda x: 0 < x < inf)
        every = {name: name for name in ("auto", EXACT_SEARCH, *SOLVE_METHODS, *PRIORITY_RULES)}
        object.__setattr__(self, "method", lookup_name(every, self.method, "solver"))
        if self.method == EXACT_SEARCH:
            require_ortools()

    def __call__(self, plan: Plan, costs: CostModel | JobCosts) -> Program:
        """Return the program of a round.

        Args:
            plan: one batch of each sibling, in a single micro-batch, with one stage per rank.
            costs: the costs of each sibling's stages.
        """
        return _order(self, plan, costs)

    def solve(self, problem: ArrayProblem) -> ArraySolution:
        """Return an order of one iteration, with a lower bound of the makespan of any order."""
        orders = Effort(max(1, self.effort // problem.blocks))
        effort = orders if self.seconds is None else Effort.from_seconds(self.seconds)
        if self.method != EXACT_SEARCH:
            return solve_array(problem, self.method, effort, threshold=self.threshold)
        found = solve_array(problem, effort=orders)
        return prove_order(problem, self.seconds or PROOF_SECONDS, found, deterministic=self.seconds is None)


@lru_cache(maxsize=256)
def _order(order: RoundOrder, plan: Plan, costs: CostModel | JobCosts) -> Program:
    return program_from_order(order.solve(problem_from_plan(plan, costs)).order, plan)


def program_from_order(order: Array, plan: Plan) -> Program:
    """Return the program of one batch of each job of `plan`, in one micro-batch each, with a STEP after each backward.

    Args:
        order: block numbers of shape (stages, 2 jobs), like `ArraySolution.order`.
        plan: the plan of the jobs.
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
"""A round order with the method "auto", for `JobArray(size, rounds=round_order)`."""
