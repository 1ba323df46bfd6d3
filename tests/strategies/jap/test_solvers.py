"""Solvers beside brute force, CP-SAT and each other."""

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.papers.jap.jobs import random_array
from lightning_pipes.ir import PlanError
from lightning_pipes.strategies.jap import Effort, solved
from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.solvers.bounds import interrupted, lower_bound, two_stages
from lightning_pipes.strategies.jap.solvers.branch import branched
from lightning_pipes.strategies.jap.solvers.genetic import (
    Genetic,
    _crossed,
    _filled,
    _parents,
    _swapped,
    _winners,
    decoded,
    evolved,
)
from lightning_pipes.strategies.jap.solvers.greedy import as_printed
from lightning_pipes.strategies.jap.solvers.kernel import SOLVERS
from lightning_pipes.strategies.jap.solvers.rules import RULES, by_rule, pyramid
from lightning_pipes.strategies.jap.solvers.search import searched
from lightning_pipes.strategies.jap.solvers.solution import Solution
from lightning_pipes.strategies.jap.solvers.solve import METHODS
from tests.cases import for_each
from tests.strategies.jap.by_hand import best_of_all, random_problem

PACKAGE = "lightning_pipes.strategies.jap.solvers"
SMALL = [(jobs, stages) for jobs in (1, 2, 3) for stages in (1, 2, 3) if jobs * stages <= 6]


@pytest.fixture(scope="module")
def optimum():
    """Brute force, once for each problem."""
    known = {}

    def of(seed, jobs, stages):
        key = (seed, jobs, stages)
        if key not in known:
            problem = random_problem(seed, jobs, stages, equal=seed % 3 == 0)
            known[key] = problem, best_of_all(problem)
        return known[key]

    return of


@pytest.mark.parametrize("size", SMALL, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_branch_and_bound_finds_what_brute_force_finds(optimum, size, seed):
    if size == (3, 2) and seed > 2:
        seed = 2  # 8100 orders each
    problem, best = optimum(seed, *size)
    found = branched(problem, Effort(100_000), by_rule(problem, "forward first"))
    problem.check(found.starts)
    assert (found.makespan, found.bound) == (best, best)
    assert problem.makespan(problem.starts(found.order)) == best
    assert lower_bound(problem) <= best <= solved(problem, "search", Effort(2_000), seed).makespan
    chosen = solved(problem, effort=Effort(100_000))
    assert (chosen.makespan, chosen.gap) == (best, 0)


@for_each(("seed", "stages"), [*((n, 2) for n in range(20)), *((n, 3) for n in (5, 7, 29, 44, 56))])
def test_stages_may_be_held_for_a_block_that_is_not_there_yet(seed, stages):
    """After a long update a job's next block can be there before what is ready could end."""
    problem = random_problem(seed, 2, stages, most=4, equal=stages == 2 and seed % 2 == 0, late=40)
    best = best_of_all(problem)
    assert lower_bound(problem) <= best
    assert branched(problem, Effort(100_000), by_rule(problem, "forward first")).makespan == best


def test_recomputation_before_the_gradient_is_there():
    """Solvers find the best orders of brute force, which are never longer than with recomputation after it."""
    gained = 0
    for seed in range(8):
        late, early = (random_problem(seed, 2, 2 + seed % 2, early=early) for early in (False, True))
        best = best_of_all(early)
        found = branched(early, Effort(100_000), by_rule(early, "forward first"))
        early.check(found.starts)
        assert (found.makespan, found.bound) == (best, best)
        assert best == solved(early, "search", Effort(2_000), seed).makespan <= best_of_all(late)
        gained += best < best_of_all(late)
        backward = found.starts.reshape(early.stages, 2, early.jobs)[:, 1].T
        gradient = backward + early.recompute + early.backward + early.transfer_back
        assert (gradient[:, 1:] <= (backward + early.recompute)[:, :-1]).all()
    assert gained >= 4


def test_bounds_by_hand():
    """Two jobs of f = 2, b = 3 on two stages, a nanosecond between them: stage 1 begins after 3 and has 4 after it."""
    two, three, one = (np.full((2, 2), n) for n in (2, 3, 1))
    problem = ArrayProblem(two, three, transfer=one, transfer_back=one)
    assert interrupted(problem) == (2 + 1) + 2 * (2 + 3) + (1 + 3)
    assert solved(problem).makespan == 17


def test_a_stage_knows_the_longest_job_and_its_own_work():
    for seed in range(20):
        problem = random_problem(seed, 1 + seed % 4, 1 + seed % 3)
        busy, heads, tails = (a.reshape(problem.stages, -1) for a in (problem.busy, problem.heads, problem.tails))
        work = heads.min(1) + busy.sum(1) + (tails - busy).min(1)
        assert interrupted(problem) >= max(work.max(), problem.tails.max())


def test_two_stages_by_hand():
    """Blocks take 1, but B on stage 0 takes 2, and job 0 comes back 2 later. Run first by stage 1, it comes back
    from 5 to 7. So does job 1, run from 3 to 5; but stage 0 runs one at a time. Each stage alone would need 7."""
    one = np.ones((2, 2), np.int64)
    problem = ArrayProblem(one, np.array([[2, 1], [2, 1]]), transfer_back=np.array([[0, 2], [0, 0]]))
    assert (interrupted(problem), two_stages(problem), best_of_all(problem)) == (7, 8, 9)


@pytest.mark.parametrize("kind", range(4))
def test_no_order_beats_a_bound(kind):
    """Long and short jobs, where the bound of two stages is above that of one, beside all orders and a search."""
    above = 0
    for seed in range(4):
        small = random_problem(seed, 2, 2 + kind % 2, late=(1, 9, 40)[seed % 3], early=kind == 3)
        assert lower_bound(small) <= best_of_all(small)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        jobs, stages = int(rng.integers(4, 9)), int(rng.integers(2, 6))
        forward = np.repeat(rng.integers(1, 60, (jobs, 1)), stages, axis=1)
        update = rng.integers(1, 20, (jobs, stages)) if kind == 1 else 0 * forward
        links = rng.integers(0, 20, (2, jobs, stages)) if kind == 2 else [0 * forward] * 2
        recompute = forward if kind == 3 else 0 * forward
        problem = ArrayProblem(forward, 2 * forward, recompute, update, 0 * forward, *links, kind == 3)
        above += two_stages(problem) > interrupted(problem)
        assert lower_bound(problem) <= searched(problem, Effort(3_000), seed, bound=1).makespan
    assert above


@pytest.mark.parametrize("method", ["auto", *METHODS, *RULES])
def test_all_give_an_order_that_holds(method):
    problem = random_array(6, 4, imbalance=0.3, seed=5)
    found = solved(problem, method, Effort(3000), seed=1)
    problem.check(found.starts)
    assert found.makespan == problem.makespan(found.starts) == problem.makespan(problem.starts(found.order))
    assert found.bound <= found.makespan
    assert found.gap == found.makespan / found.bound - 1
    again = solved(problem, method, Effort(3000), seed=1)
    assert (again.starts == found.starts).all()


def test_auto_proves_small_arrays_and_searches_large_ones():
    assert solved(random_array(3, 4), effort=Effort(50_000)).gap == 0
    large = solved(random_array(6, 4), effort=Effort(2000))
    assert large.method == "search"
    assert solved(random_array(6, 4), effort=Effort(2000), threshold=30).method == "branch and bound"
    with pytest.raises(PlanError, match="no solver called 'magic'"):
        solved(random_array(2, 2), "magic")


def test_the_clock_ends_a_search():
    looks = iter(range(10**6))
    found = searched(random_array(12, 4), Effort(10**9, lambda: next(looks) > 20))
    assert 0 < found.tried < 10_000


@pytest.mark.skipif(SOLVERS.numba is None, reason="numba is not installed")
def test_the_same_with_and_without_numba(monkeypatch):
    problem = random_array(9, 5, imbalance=0.3, seed=2)
    small = random_array(4, 3, seed=1)
    tried = []
    for kernel in (SOLVERS.python, SOLVERS.numba):
        for module in ("search", "greedy", "rules"):
            monkeypatch.setattr(
                f"lightning_pipes.strategies.jap.solvers.{module}.kernel_for", lambda blocks, k=kernel: k
            )
        monkeypatch.setitem(SOLVERS.__dict__, "numba", kernel)
        found = [searched(problem, Effort(10_000), 3), as_printed(problem)]
        found.append(branched(small, Effort(2_000), by_rule(small, "pyramid")))
        tried.append([(f.makespan, f.bound, f.starts.tolist()) for f in found])
    assert tried[0] == tried[1]


@pytest.mark.skipif(
    find_spec("ortools") is None, reason="OR-Tools is not installed: pip install lightning-pipes[proof]"
)
@pytest.mark.parametrize(("jobs", "stages"), [(3, 4), (4, 4), (3, 8), (4, 8)])
def test_search_equals_what_cp_sat_proves(jobs, stages):
    from lightning_pipes.strategies.jap.solvers.proof import proven

    for seed in range(2):
        problem = random_array(jobs, stages, imbalance=0.3, seed=seed)
        proof = proven(problem, 10, by_rule(problem, "pyramid"))
        problem.check(proof.starts)
        found = solved(problem, effort=Effort(40_000))
        assert proof.bound <= found.makespan
        if proof.gap == 0:
            assert found.makespan == proof.makespan


@pytest.mark.skipif(find_spec("ortools") is not None, reason="OR-Tools is installed")
def test_cp_sat_says_what_to_install():
    from lightning_pipes.strategies.jap.solvers.proof import proven

    problem = random_array(2, 2)
    with pytest.raises(PlanError, match=r"lightning-pipes\[proof\]"):
        proven(problem, 1, by_rule(problem, "pyramid"))


def test_algorithm_1_commits_to_the_last_of_equals():
    """Two equal jobs on one stage: the print's <= lets job 1 go first, and what it begins it ends."""
    ones = np.ones((2, 1), np.int64)
    assert as_printed(ArrayProblem(ones, 2 * ones)).order.tolist() == [[1, 3, 0, 2]]


def test_rules():
    problem = random_array(4, 2)  # ascending batch sizes
    assert pyramid(problem).tolist() == [0, 3, 1, 2]
    assert by_rule(problem, "longest first").order[0, 0] == 3
    assert by_rule(problem, "backward first").order[0, 0] == 0


def test_genes_are_blocks_in_the_order_of_their_jobs():
    """Every chromosome beside a decoder that does one gene at a time."""
    problem = random_problem(4, 3, 3)
    rng = np.random.default_rng(0)
    people = rng.permuted(np.tile(np.repeat(np.arange(3), 6), (20, 1)), axis=1)
    spans, starts = decoded(problem, people)
    for genes, span, begun in zip(people, spans, starts, strict=True):
        step, ready, free = [0] * 3, [0] * 3, [0] * 3
        for j in genes.tolist():
            k = step[j]
            s = k if k < 3 else 5 - k
            block = 6 * s + j + (0 if k < 3 else 3)
            t = max(ready[j], free[s])
            assert begun[block] == t
            ready[j], free[s], step[j] = t + problem.lag[block], t + problem.busy[block], k + 1
        assert span == max(ready)
        problem.check(begun)


def test_crossover_keeps_the_places_of_some_jobs_and_the_order_of_the_others():
    one, two = np.array([[0, 1, 2, 0, 2, 1]]), np.array([[2, 2, 1, 0, 1, 0]])
    assert _filled(one, one == 0, two, two == 0).tolist() == [[0, 2, 2, 0, 1, 1]]
    assert _filled(two, two != 1, one, one != 1).tolist() == two.tolist()
    rng = np.random.default_rng(1)
    one, two = (rng.permuted(np.tile(np.repeat(np.arange(4), 6), (30, 1)), axis=1) for _ in range(2))
    children = np.concatenate(_crossed(one, two, 4, rng))
    assert (np.sort(children, axis=1) == np.sort(one[0])).all()
    assert (children != np.concatenate([one, two])).any(1).mean() > 0.5  # not where a single job does not stay


def test_parents_and_survivors_are_drawn_by_their_makespans():
    """A roulette on 1 / makespan; the best of three at random, each of which may be any of four."""
    rng = np.random.default_rng(0)
    spans = np.array([1, 2, 4, 4])
    drawn = np.bincount(_parents(spans, 20_000, rng).reshape(-1), minlength=4) / 40_000
    assert drawn == pytest.approx([4 / 8, 2 / 8, 1 / 8, 1 / 8], abs=0.01)
    won = np.bincount(_winners(np.array([3, 9, 1, 5]), 40_000, 3, rng), minlength=4) / 40_000
    at_least = [(n / 4) ** 3 for n in (4, 3, 2, 1, 0)]  # that all three are the best, second, ... or worse
    assert won[[2, 0, 3, 1]] == pytest.approx(-np.diff(at_least), abs=0.01)


def test_mutation_exchanges_two_genes():
    rng = np.random.default_rng(0)
    people = rng.permuted(np.tile(np.repeat(np.arange(4), 6), (200, 1)), axis=1)
    mutants = _swapped(people.copy(), rng)
    assert (np.sort(mutants, axis=1) == np.sort(people[0])).all()
    changed = (mutants != people).sum(1)
    assert set(changed.tolist()) == {0, 2}
    assert (changed == 2).mean() == pytest.approx(18 / 24, abs=0.1)  # two genes of one job change nothing


@pytest.mark.parametrize("seed", range(3))
def test_evolution_keeps_the_best(seed):
    problem = random_array(5, 3, seed=1)
    spans = [evolved(problem, Effort(10**6), seed, Genetic(20, generations=g)).makespan for g in range(15)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]


def test_search_beats_the_paper():
    """A small effort, which Python spends in seconds; see benchmarks/jap.py for a second of machine code."""
    problem = random_array(16, 8)
    found = searched(problem, Effort(1500))
    assert found.makespan < 0.95 * as_printed(problem).makespan
    assert found.makespan < 0.90 * evolved(problem, Effort(3000)).makespan


def test_auto_is_at_least_as_good_as_every_other_method():
    """Arrays with more jobs than are searched for a proof, on few stages: branch and bound proves some at once."""
    proven = []
    for seed in range(12):
        problem = random_problem(seed, 5 + seed % 3, 2, most=60, late=20)
        found = solved(problem, effort=Effort(2_000))
        problem.check(found.starts)
        others = [solved(problem, method, Effort(2_000)) for method in ("algorithm 1", "branch and bound", "search")]
        assert found.makespan <= min(other.makespan for other in others)
        assert found.bound >= lower_bound(problem)
        proven += [found.method] * (found.gap == 0)
    assert len(proven) > 6
    assert "branch and bound" in proven


def test_auto_begins_with_algorithm_1s_order(monkeypatch):
    """Also where there is no effort left for anything else."""
    problem = random_array(12, 4)
    best = Solution(problem, problem.heads, 1, 1, "algorithm 1")
    seen = []

    def search(problem, effort, seed=0, bound=0, incumbent=None):
        seen.append(incumbent)
        return best

    monkeypatch.setattr(f"{PACKAGE}.solve.searched", search)
    assert solved(problem, effort=Effort(20_000)) is not None
    assert seen[0].starts.tolist() == as_printed(problem).starts.tolist()
    solved(problem, effort=Effort(1_000))
    assert seen[-1] is None, "it would take more than the effort"


def test_effort_in_seconds():
    """Of a clock that goes on by one at each look."""
    ticks = iter(range(1000))
    effort = Effort.within(5, clock=lambda: next(ticks))
    assert [effort.left for _ in range(8)] == [True] * 5 + [False] * 3
    problem = random_array(8, 4)
    assert solved(problem, effort=0.05).makespan <= by_rule(problem, "pyramid").makespan


def test_a_seeded_population_begins_with_the_rules():
    problem = random_array(16, 4)
    best = min(by_rule(problem, rule).makespan for rule in RULES)
    seeded = evolved(problem, Effort(100), settings=Genetic(seeded=True))
    assert seeded.makespan <= best < evolved(problem, Effort(100)).makespan
    problem.check(seeded.starts)
