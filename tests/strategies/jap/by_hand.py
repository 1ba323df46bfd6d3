"""Orders of small arrays by brute force, without code shared with the solvers."""

from itertools import permutations, product

import numpy as np

from lightning_pipes.strategies.jap.problem import ArrayProblem


def random_problem(seed, jobs, stages, most=9, equal=False, late=9, early=False):
    """Return a random problem with small whole numbers.

    Updates and switches are below `late`, so they may take longer than the blocks that follow them.
    """
    rng = np.random.default_rng(seed)

    def times(least, most=most):
        table = rng.integers(least, most, (jobs, stages))
        if equal:  # the first half of the jobs, and one more
            table[: jobs // 2 + 1] = table[0]
        return table

    return ArrayProblem(times(1), times(1), times(0), times(0, late), times(0, late), times(0), times(0), early)


def rows_of_a_stage(jobs):
    """Return every order of the blocks (job, "F" or "B") in which the F of a job precedes its B."""
    blocks = [(j, d) for j in range(jobs) for d in "FB"]
    return [row for row in permutations(blocks) if all(row.index((j, "F")) < row.index((j, "B")) for j in range(jobs))]


def timed(problem, rows):
    """Return the starts by (job, "F" or "B", stage) and the makespan of the order `rows`, or None for a deadlock.

    The starts are updated repeatedly until they no longer change.
    """
    jobs, stages = problem.forward.shape
    start = {(j, d, s): 0 for j in range(jobs) for d in "FB" for s in range(stages)}

    def taken(j, d, s):
        p = problem
        own = p.forward[j, s] if d == "F" else p.recompute[j, s] + p.backward[j, s] + p.update[j, s]
        return own + p.switch[j, s]

    def arrival(j, d, s):
        """Return the time at which the input of a block has arrived."""
        p = problem
        if d == "F":
            return start[j, "F", s - 1] + p.forward[j, s - 1] + p.transfer[j, s - 1] if s else 0
        if s == stages - 1:
            return start[j, "F", s] + p.forward[j, s]
        before = start[j, "B", s + 1]
        gradient = before + p.recompute[j, s + 1] + p.backward[j, s + 1] + p.transfer_back[j, s + 1]
        return max(before, gradient - p.recompute[j, s]) if p.early_recompute else gradient

    for _ in range(4 * jobs * stages + 2):
        changed = False
        for s, row in enumerate(rows):
            free, before = 0, None
            for j, d in row:
                stays = before == j  # undoes the switch to another job, which `taken` includes
                t = max(free - stays * problem.switch[j, s], arrival(j, d, s))
                changed |= t != start[j, d, s]
                start[j, d, s] = t
                free, before = t + taken(j, d, s), j
        if not changed:
            return start, max(start[j, "B", 0] + taken(j, "B", 0) for j in range(jobs))
    return None


def best_of_all(problem):
    """Return the smallest makespan over all orders."""
    jobs, stages = problem.forward.shape
    each = [found[1] for rows in product(rows_of_a_stage(jobs), repeat=stages) if (found := timed(problem, rows))]
    return min(each)
