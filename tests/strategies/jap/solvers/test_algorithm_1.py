"""Compare Algorithm 1 with a direct transcription of the paper's sentences.

The transcription finds longest paths by repeated passes, and simulates one machine second by second.
"""

import numpy as np

from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.solvers.solve import solve_as_printed
from tests.cases import for_each
from tests.strategies.jap.by_hand import random_problem


def chain(stages):
    return [("F", s) for s in range(stages)] + [("B", s) for s in reversed(range(stages))]


def times(problem, j, step):
    """Return the stage of a step, the time for which it occupies the stage, and the lag to the job's next block."""
    d, s = chain(problem.stages)[step]
    table = {
        name: int(getattr(problem, name)[j, s]) for name in ("forward", "backward", "recompute", "update", "switch")
    }
    if d == "F":
        busy = table["forward"] + table["switch"]
        sent = 0 if s == problem.stages - 1 else int(problem.transfer[j, s])
        return s, busy, table["forward"] + sent
    busy = table["recompute"] + table["backward"] + table["update"] + table["switch"]
    gone = table["recompute"] + table["backward"] + int(problem.transfer_back[j, s])
    return s, busy, busy if s == 0 else gone


def free_for(problem, j, s, free, last):
    """Return the time at which stage s is free for job j, without the switch if j was the last job on the stage."""
    return free[s] - (int(problem.switch[j, s]) if last[s] == j else 0)


def second_by_second(blocks):
    """Return the end of blocks (head, busy, tail) on one stage by Jackson's rule, the longest tail first."""
    left = [busy for _, busy, _ in blocks]
    t, end = 0, 0
    while any(left):
        ready = [i for i, (head, _, _) in enumerate(blocks) if left[i] and head <= t]
        t += 1
        if ready:
            i = max(ready, key=lambda i: blocks[i][2])
            left[i] -= 1
            if not left[i]:
                end = max(end, t + blocks[i][2])
    return end


def promise(problem, done, ready, free, last):
    """Return the bound of a partial selection, from the critical path and from each stage alone."""
    steps, stages = 2 * problem.stages, problem.stages
    machines = [[] for _ in range(stages)]
    worst = 0
    for j in range(problem.jobs):
        head = ready[j]
        for k in range(done[j], steps):
            s, busy, lag = times(problem, j, k)
            head = max(head, free_for(problem, j, s, free, last))
            tail = sum(times(problem, j, i)[2] for i in range(k, steps))
            worst = max(worst, head + tail)
            # the job's backward may follow without a switch
            least = busy - int(problem.switch[j, s]) * (k < problem.stages)
            machines[s].append((head, least, tail - least))
            head += lag
    return max([worst, *map(second_by_second, machines)])


def by_sentences(problem):
    """Return the orders of the stages as rows of (job, direction)."""
    jobs, steps = range(problem.jobs), 2 * problem.stages
    done, ready, free, last = [0] * problem.jobs, [0] * problem.jobs, [0] * problem.stages, [-1] * problem.stages
    rows = [[] for _ in free]
    over = 0
    while any(k < steps for k in done):
        open_ = [(j, *times(problem, j, done[j])) for j in jobs if done[j] < steps]  # the paper's omega
        begins = {j: max(ready[j], free_for(problem, j, s, free, last)) for j, s, *_ in open_}
        earliest = min(begins[j] + busy for j, s, busy, _ in open_)
        machine = next(s for j, s, busy, _ in open_ if begins[j] + busy == earliest)
        found = []
        for j, s, busy, lag in open_:  # the paper's omega'
            start = begins[j]
            if s == machine and start < earliest:
                after = [done.copy(), ready.copy(), free.copy(), last.copy()]
                after[0][j], after[1][j], after[2][s], after[3][s] = done[j] + 1, start + lag, start + busy, j
                ends = max(over, start + lag) if after[0][j] == steps else over
                found.append((max(ends, promise(problem, *after)), j, after, ends))
        least = min(bound for bound, *_ in found)
        _, j, after, over = [each for each in found if each[0] == least][-1]  # the <= in the printed algorithm
        rows[machine].append((j, chain(problem.stages)[done[j]][0]))
        done, ready, free, last = after
    return rows


@for_each("seed", range(30))
def test_every_choice_follows_the_text_of_the_paper(seed):
    problem = random_problem(seed, 2 + seed % 4, 1 + seed % 3, equal=seed % 5 == 0, late=(1, 9, 30)[seed % 3])
    numbers = np.arange(problem.blocks).reshape(problem.stages, 2, problem.jobs)
    expected = [[int(numbers[s, "FB".index(d), j]) for j, d in row] for s, row in enumerate(by_sentences(problem))]
    assert solve_as_printed(problem).order.tolist() == expected


def test_algorithm_1_commits_to_the_last_of_equals():
    """Check two equal jobs on one stage.

    The <= in the printed algorithm lets job 1 start first, and the algorithm then finishes the job that it has started.
    """
    ones = np.ones((2, 1), np.int64)
    assert solve_as_printed(ArrayProblem(ones, 2 * ones)).order.tolist() == [[1, 3, 0, 2]]
