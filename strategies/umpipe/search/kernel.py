"""The inner loops over chunks, on whole numbers: run by Python, or compiled by numba.

All are in one file, as numba looks only at a function's own file to see whether what it has kept is still so.

Samples are numbered from 1 to `rows`, as in the paper. `ready[j]` is when sample j has left a process, `rest[j]` what
it takes at least from then on until the whole batch has left the last one. `genes` are the options of a chain's
processes.

A label is what a scheme of the first processes comes to: when samples have left the last of them, at the marks, the
samples that end a chunk of an option that the next process may still take. Others do not count for what comes next.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from lightning_pipes.sim.loops.jit import JitKernel


def end_of_chain(rows, sizes, times, genes, before, after):
    """Return when the batch has left a chain (E_{K,P} of E4), by E2: chunk i of process k starts when its last sample
    has left process k - 1 and chunk i - 1 has left process k. `before` and `after` have room for the ends of a
    process's chunks."""
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


def ends_of_chains(rows, sizes, times, people, before, after, ends):
    """Fill `ends` with what `end_of_chain` says of each row of `people`."""
    for i in range(len(people)):
        ends[i] = end_of_chain(rows, sizes, times, people[i], before, after)


def pass_process(rows, size, time, ready, left):
    """Fill `left` with when samples that were `ready` have left a process."""
    t = 0
    begin = 1
    while begin <= rows:
        end = min(begin + size, rows + 1)
        t = max(t, ready[end - 1]) + time
        for j in range(begin, end):
            left[j] = t
        begin = end


def rest_before_process(rows, size, time, rest, longer):
    """Fill `longer` with the `rest` of samples before a process, given the `rest` after it.

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


def end_through_process(rows, size, time, ready, rest):
    """Return when the batch has left the chain, if this process has chunks of `size` samples."""
    t = 0
    last = 0
    begin = 1
    while begin <= rows:
        end = min(begin + size, rows + 1)
        t = max(t, ready[end - 1]) + time
        last = max(last, t + rest[begin])
        begin = end
    return last


def choose_locally(rows, sizes, times, genes, ready, left, rest):
    """Fill `genes` with the paper's A5: from the first process to the last, the option with which the batch leaves it
    soonest; the largest chunks of several. `rest` is all 0."""
    for j in range(rows + 1):
        ready[j] = 0
    for k in range(len(genes)):
        best = 0
        for q in range(len(sizes)):
            t = end_through_process(rows, sizes[q], times[k, q], ready, rest)
            if q == 0 or t < best:
                best = t
                genes[k] = q
        pass_process(rows, sizes[genes[k]], times[k, genes[k]], ready, left)
        ready, left = left, ready


def descend_by_process(rows, sizes, times, genes, rounds, ready, left, rests):
    """Return when the batch has left the chain after the paper's A6 from `genes` on, which it changes: in each of
    `rounds` rounds, every process takes the option with which it is soonest, all others being as they are.

    Rows of `rests` have room for the rest after each process, and before the first. A round takes K Q passes of one
    process, not of the whole chain: what comes before and after it is known.
    """
    processes = len(genes)
    last = 0
    for j in range(rows + 1):
        rests[processes, j] = 0
    for _ in range(rounds):
        for k in range(processes - 1, -1, -1):
            rest_before_process(rows, sizes[genes[k]], times[k, genes[k]], rests[k + 1], rests[k])
        for j in range(rows + 1):
            ready[j] = 0
        changed = False
        for k in range(processes):
            kept = genes[k]
            last = end_through_process(rows, sizes[kept], times[k, kept], ready, rests[k + 1])
            for q in range(len(sizes)):
                t = end_through_process(rows, sizes[q], times[k, q], ready, rests[k + 1])
                if t < last:
                    last = t
                    genes[k] = q
            changed = changed or genes[k] != kept
            pass_process(rows, sizes[genes[k]], times[k, genes[k]], ready, left)
            ready, left = left, ready
        if not changed:
            break
    return last


def bound_options(rows, sizes, times, allowed, limit, heads, rests, left):
    """Return a lower bound of schemes of `allowed` options, or `limit` if none goes below; disallow options that
    cannot.

    Row k of `heads` comes to when each sample is ready for process k at the earliest, of `rests` to what it takes from
    there on at least: the least of all options, sample by sample. So both may belong to no scheme, and are never too
    long.
    """
    processes = len(times)
    never = limit + 1
    for j in range(rows + 1):
        heads[0, j] = 0
        rests[processes, j] = 0
    for k in range(processes - 1, -1, -1):
        for j in range(rows + 1):
            rests[k, j] = never
        for q in range(len(sizes)):
            if allowed[k, q]:
                rest_before_process(rows, sizes[q], times[k, q], rests[k + 1], left)
                for j in range(1, rows + 1):
                    if left[j] < rests[k, j]:
                        rests[k, j] = left[j]
    low = 0
    for k in range(processes):
        for j in range(rows + 1):
            heads[k + 1, j] = never
        least = limit
        for q in range(len(sizes)):
            if allowed[k, q]:
                t = end_through_process(rows, sizes[q], times[k, q], heads[k], rests[k + 1])
                least = min(least, t)
                if t >= limit:
                    allowed[k, q] = False
                else:
                    pass_process(rows, sizes[q], times[k, q], heads[k], left)
                    for j in range(1, rows + 1):
                        if left[j] < heads[k + 1, j]:
                            heads[k + 1, j] = left[j]
        low = max(low, least)
        if low >= limit:
            return limit
    return low


def extend_suffixes(rows, sizes, times, options, limit, ready, rests, made, notes):
    """Return the number of suffixes `made`: what it takes at least from each sample on before a process, one for each
    of its `options` and of the `rests` after it, unless it cannot go below `limit` as samples are `ready`.

    The rows of `notes` come to the sum of each, and by how much its first sample takes longer than its last.
    """
    count = 0
    for q in options:
        for w in range(len(rests)):
            rest_before_process(rows, sizes[q], times[q], rests[w], made[count])
            bound = 0
            total = 0
            for j in range(1, rows + 1):
                bound = max(bound, ready[j] + made[count, j])
                total += made[count, j]
            if bound < limit:
                notes[0, count] = total
                notes[1, count] = made[count, 1] - made[count, rows]
                count += 1
    return count


def extend_labels(rows, sizes, times, options, limit, rest, rests, place, marks, labels, first, made, notes):
    """Return the number of labels `made`, and of the first label that was not extended: each of `labels` from number
    `first` on by each of the `options` of the next process, unless it cannot go below `limit`; stops where there may
    not be room for one more label's.

    `place[j]` is the number of the mark j of `labels`, `marks` are those of `made`. What follows takes at least `rest`
    from each sample on, and at least one of the rows of `rests` from each mark on. The rows of `notes` come to the
    parent, the option, the bound, and the sum of the times of each.
    """
    count = 0
    at = first
    while at < len(labels) and count + len(options) <= len(made):
        for q in options:
            size = sizes[q]
            time = times[q]
            t = 0
            bound = 0
            total = 0
            mark = 0
            begin = 1
            while begin <= rows:
                end = min(begin + size, rows + 1)
                t = max(t, labels[at, place[end - 1]]) + time
                bound = max(bound, t + rest[begin])
                if bound >= limit:
                    break
                while mark < len(marks) and marks[mark] < end:
                    made[count, mark] = t
                    total += t
                    mark += 1
                begin = end
            if bound < limit:
                least = limit
                for w in range(len(rests)):
                    longest = bound
                    for mark in range(len(marks)):
                        longest = max(longest, made[count, mark] + rests[w, mark])
                        if longest >= least:
                            break
                    least = min(least, longest)
                bound = least
            if bound < limit:
                notes[0, count] = at
                notes[1, count] = q
                notes[2, count] = bound
                notes[3, count] = total
                count += 1
        at += 1
    return count, at


def select_undominated(labels, order, kept):
    """Return the number of labels that no other one is as good as at all marks; fills `kept` with theirs, the first of
    equal ones. `order` has numbers of labels by the sum of their times: no label is as good as one before it."""
    count = 0
    width = labels.shape[1]
    for i in order:
        good = True
        for c in range(count):
            other = kept[c]
            mark = width - 1
            while mark >= 0 and labels[other, mark] <= labels[i, mark]:
                mark -= 1
            if mark < 0:
                good = False
                break
        if good:
            kept[count] = i
            count += 1
    return count


CHUNKS = JitKernel(
    end_of_chain,
    ends_of_chains,
    pass_process,
    rest_before_process,
    end_through_process,
    choose_locally,
    descend_by_process,
    bound_options,
    extend_suffixes,
    extend_labels,
    select_undominated,
    patience=100_000,
)
"""Their steps are chunks; Python, too, takes arrays."""


def load_loops() -> str:
    """Load machine code now rather than when it pays; return "numba", or "python" where there is none."""
    return CHUNKS.load()
