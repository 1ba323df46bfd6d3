"""The inner loops over chunks, on whole numbers: run by Python, or compiled by numba; `search.machine` chooses.

Samples are numbered from 1 to `rows`, as in the paper. `ready[j]` is when sample j has left a process, `rest[j]` what
it takes at least from then on until the whole batch has left the last one. `genes` are the options of a chain's
processes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations


def ended(rows, sizes, times, genes, before, after):
    """When the batch has left a chain (E_{K,P} of E4), by E2: chunk i of process k starts when its last sample has left
    process k - 1 and chunk i - 1 has left process k. `before` and `after` have room for the ends of a process's
    chunks."""
    before[0] = 0
    size = rows
    t = 0
    for k in range(len(genes)):
        step = sizes[genes[k]]
        time = times[k, genes[k]]
        t = 0
        end = 0
        i = 0
        there = 0
        edge = size
        while end < rows:
            end = min(end + step, rows)
            while edge < end:
                edge += size
                there += 1
            t = max(t, before[there]) + time
            after[i] = t
            i += 1
        before, after = after, before
        size = step
    return t


def ended_all(rows, sizes, times, people, before, after, ends):
    """Fills `ends` with what `ended` says of each row of `people`."""
    for i in range(len(people)):
        ends[i] = ended(rows, sizes, times, people[i], before, after)


def passed(rows, size, time, ready, left):
    """Fills `left` with when samples that were `ready` have left a process."""
    t = 0
    begin = 1
    while begin <= rows:
        end = min(begin + size, rows + 1)
        t = max(t, ready[end - 1]) + time
        for j in range(begin, end):
            left[j] = t
        begin = end


def lasting(rows, size, time, rest, longer):
    """Fills `longer` with the `rest` of samples before a process, from what it is after it.

    An earlier sample of a chunk never has less before it than a later one, so the first one's `rest` counts.
    """
    t = 0
    begin = (rows - 1) // size * size + 1
    end = rows + 1
    while begin >= 1:
        t = max(t, rest[begin]) + time
        for j in range(begin, end):
            longer[j] = t
        end = begin
        begin -= size


def through(rows, size, time, ready, rest):
    """When the batch has left the chain, if this process has chunks of `size` samples."""
    t = 0
    last = 0
    begin = 1
    while begin <= rows:
        end = min(begin + size, rows + 1)
        t = max(t, ready[end - 1]) + time
        last = max(last, t + rest[begin])
        begin = end
    return last


def local(rows, sizes, times, genes, ready, left, rest):
    """Fills `genes` with the paper's A5: from the first process to the last, the option with which the batch leaves it
    soonest; the largest chunks of several. `rest` is all 0."""
    for j in range(rows + 1):
        ready[j] = 0
    for k in range(len(genes)):
        best = 0
        for q in range(len(sizes)):
            t = through(rows, sizes[q], times[k, q], ready, rest)
            if q == 0 or t < best:
                best = t
                genes[k] = q
        passed(rows, sizes[genes[k]], times[k, genes[k]], ready, left)
        ready, left = left, ready


def descended(rows, sizes, times, genes, rounds, ready, left, rests):
    """When the batch has left the chain after the paper's A6 from `genes` on, which it changes: in each of `rounds`
    rounds, every process takes the option with which it is soonest, all others being as they are.

    Rows of `rests` have room for the rest after each process, and before the first. A round takes K Q passes of one
    process, not of the whole chain: what comes before and after it is known.
    """
    processes = len(genes)
    last = 0
    for j in range(rows + 1):
        rests[processes, j] = 0
    for _ in range(rounds):
        for k in range(processes - 1, -1, -1):
            lasting(rows, sizes[genes[k]], times[k, genes[k]], rests[k + 1], rests[k])
        for j in range(rows + 1):
            ready[j] = 0
        changed = False
        for k in range(processes):
            kept = genes[k]
            last = through(rows, sizes[kept], times[k, kept], ready, rests[k + 1])
            for q in range(len(sizes)):
                t = through(rows, sizes[q], times[k, q], ready, rests[k + 1])
                if t < last:
                    last = t
                    genes[k] = q
            changed = changed or genes[k] != kept
            passed(rows, sizes[genes[k]], times[k, genes[k]], ready, left)
            ready, left = left, ready
        if not changed:
            break
    return last
