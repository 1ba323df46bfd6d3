"""Compare the orders of rounds from every solver with brute force."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, InputError, Kind, Plan
from lightning_pipes.strategies.jap import Effort, RoundOrder, problem_from_plan, round_order
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES
from lightning_pipes.strategies.jap.solvers.solve import SOLVE_METHODS
from tests.strategies.jap.by_hand import best_of_all, random_problem, timed
from tests.strategies.jap.random_arrays import random_array

ROOT = Path(__file__).parents[3]
EQUAL = CostModel.uniform(2, 1e-3, 2e-3, rows=1)


def batches(*rows, stages=2):
    return Plan(tuple(range(stages)), tuple(Cut.even(each, 1, stages) for each in rows))


PROOF = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is an extra")
EXACT = ("branch and bound", pytest.param("exact", marks=PROOF))


@pytest.mark.parametrize("method", ["auto", *SOLVE_METHODS, *PRIORITY_RULES, pytest.param("exact", marks=PROOF)])
def test_an_order_has_all_blocks_of_all_jobs(method):
    program = RoundOrder(method, effort=4000)(batches(8, 20, 40), EQUAL)
    for stage in range(2):
        blocks = sorted((i.kind.name, i.job) for i in program.head[stage])
        assert blocks == sorted((kind.name, job) for kind in (Kind.F, Kind.B, Kind.STEP) for job in range(3))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("seed", range(3))
def test_exact_methods_find_what_brute_force_finds(method, seed):
    problem = random_problem(seed, 2, 2)
    found = RoundOrder(method).solve(problem)
    assert (found.makespan, found.bound) == (best_of_all(problem),) * 2


EARLY = """
from lightning_pipes.strategies.jap import RoundOrder, rounds
from tests.strategies.jap.by_hand import random_problem
rounds.PROOF_SECONDS = 0.02
found = RoundOrder("exact", effort=200).solve(random_problem(1, 12, 4))
assert found.gap > 0, "it has to end before the proof does"
print(found.makespan, found.order.tolist())
"""


@PROOF
def test_a_proof_that_ends_early_is_the_same_in_every_process():
    """Check that two processes print the same result, because a limit by `effort` does not read the clock."""
    command = [sys.executable, "-c", EARLY]
    ended = [subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120) for _ in range(2)]
    assert [each.stderr for each in ended] == ["", ""]
    assert ended[0].stdout == ended[1].stdout != ""


def test_default_chooses_automatically():
    plan = batches(8, 20)
    assert round_order(plan, EQUAL).to_lines() == RoundOrder("auto")(plan, EQUAL).to_lines()
    assert RoundOrder("Genetic").method == "genetic"


def test_unknown_solvers_are_refused():
    with pytest.raises(InputError, match=r"there is no solver called 'genetc'\. Did you mean 'genetic'"):
        RoundOrder("genetc")
    for setting, wrong in {"effort": 0, "threshold": 0, "seconds": -1.0}.items():
        with pytest.raises(InputError, match=setting):
            RoundOrder(**{setting: wrong})


def time_order(program, problem):
    """Return the makespan of a program's order with the times of another problem, computed by hand."""
    rows = [[(i.job, i.kind.name) for i in row if i.kind is not Kind.STEP] for row in program.head]
    return timed(problem, rows)[1]


def test_orders_follow_the_measured_stages():
    """Check that the order for the measured stages is optimal.

    Brute force finds no better order, and the order for equal stages takes longer with these times.
    """
    plan = batches(4, 1)
    seconds = {(kind, s): ((0, 0.0), (1, t)) for s, t in ((0, 3e-3), (1, 1e-3)) for kind in (Kind.F, Kind.B)}
    seconds |= {(Kind.STEP, 0): ((0, 1e-3),), (Kind.SF, 0): ((1, 2e-3),), (Kind.SB, 1): ((1, 2e-3),)}
    costs = CostModel(seconds, overhead=5e-4)
    problem = problem_from_plan(plan, costs)
    assert (problem.forward[0] / 1e6).tolist() == [12.5, 4.5], "a block contains the overhead of a computation"
    best = best_of_all(problem)
    assert time_order(RoundOrder("branch and bound")(plan, costs), problem) == best
    assert time_order(RoundOrder("branch and bound")(plan, EQUAL), problem) > best


def test_size_and_time_choose_the_solver(monkeypatch):
    """Check that small arrays are solved by a proof within a time limit, and larger ones by a search."""
    problem, clock = random_array(6, 4), iter(range(10**6))
    assert RoundOrder().solve(problem).method == "search"
    made = partial(Effort.from_seconds, clock=lambda: next(clock))
    monkeypatch.setattr(Effort, "from_seconds", made)
    asked = {seconds: RoundOrder(threshold=30, seconds=seconds).solve(problem) for seconds in (5.0, 200.0)}
    assert {found.method for found in asked.values()} == {"branch and bound"}
    assert asked[5.0].tried < asked[200.0].tried
    assert RoundOrder(threshold=5, seconds=50.0).solve(problem).method == "search"


def test_a_proof_without_or_tools_is_refused(monkeypatch):
    monkeypatch.setattr("lightning_pipes.strategies.jap.solvers.proof.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install lightning-pipes\[proof\]"):
        RoundOrder("exact")
