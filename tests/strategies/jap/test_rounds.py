"""The orders of rounds by every solver, beside brute force."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_pipes.ir import InputError, Kind
from lightning_pipes.strategies.jap import RoundOrder, round_order
from lightning_pipes.strategies.jap.solvers.rules import RULES
from lightning_pipes.strategies.jap.solvers.solve import METHODS
from tests.strategies.jap.by_hand import best_of_all, random_problem

ROOT = Path(__file__).parents[3]
PROOF = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is an extra")
EXACT = ("branch and bound", pytest.param("exact", marks=PROOF))


@pytest.mark.parametrize("method", ["auto", *METHODS, *RULES, pytest.param("exact", marks=PROOF)])
def test_an_order_has_all_blocks_of_all_jobs(method):
    program = RoundOrder(method, effort=4000)((8, 20, 40), 2)
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
    """Ranks search by themselves; a clock would give each another order."""
    command = [sys.executable, "-c", EARLY]
    ended = [subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120) for _ in range(2)]
    assert [each.stderr for each in ended] == ["", ""]
    assert ended[0].stdout == ended[1].stdout != ""


def test_the_default_chooses_by_itself():
    assert round_order((8, 20), 2).to_lines() == RoundOrder("auto")((8, 20), 2).to_lines()
    assert RoundOrder("Genetic").method == "genetic"


def test_unknown_solvers_are_refused():
    with pytest.raises(InputError, match="there is no solver called 'genetc'; did you mean 'genetic'"):
        RoundOrder("genetc")
    with pytest.raises(InputError, match="effort"):
        RoundOrder(effort=0)


def test_a_proof_without_or_tools_is_refused(monkeypatch):
    monkeypatch.setattr("lightning_pipes.strategies.jap.solvers.proof.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install lightning-pipes\[proof\]"):
        RoundOrder("exact")
