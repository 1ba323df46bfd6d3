"""The inner loops over chunks, on integers. They are run by Python or compiled by numba.

All functions are in one file, because numba only checks a function's own file when it decides whether a cached function
is still valid.

Samples are numbered from 1 to `rows`, as in the paper. `ready[j]` is the time at which sample j has left the process
before. `rest[j]` is the minimum time from then until the whole batch has left the last process. `genes` are the options
of the processes of a chain.

A label describes the result of a scheme of the first processes: the times at which samples have left the last of them.
It contains only the samples at the marks, which are the samples that end a chunk of an option that the next process may
still take. Other samples do not affect the following processes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from lightning_pipes.sim.loops.jit import JitKernel


def end_of_chain(rows, sizes, times, genes, before, after):
    """Return the time at which the batch has left a chain (E_{K,P} of E4), computed by E2.

    Chunk i of process k starts when its last sample has left process k - 1 and chunk i - 1 has left process k. `before`
    and `after` have room for the end times of the chunks of a process.
    """
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
    """Fill `ends` with the result of `end_of_chain` for each row of `people`."""
    for i in range(len(people)):
        ends[i] = end_of_chain(rows, sizes, times, people[i], before, after)


def pass_process(rows, size, time, ready, left):
    """Fill `left` with the times at which samples leave a process, given the times `ready` at which they reach it."""
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

    The `rest` of the samples of a chunk never increases from one sample to the next, so the first sample of the chunk
    determines it.
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
    """Return the time at which the batch has left the chain, if this process has chunks of `size` samples."""
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
    """Fill `genes` with the result of the paper's A5.

    From the first process to the last, each process takes the option with which the batch leaves it first. If several
    options are equally good, it takes the one with the largest chunks. All entries of `rest` are 0.
    """
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
    """Return the time at which the batch has left the chain after the paper's A6.

    The descent begins at `genes` and changes them. In each of at most `rounds` rounds, every process takes the option
    with which the batch leaves the chain first, while all other processes keep their options.

    The rows of `rests` have room for the rest before each process and after the last one. A round takes K Q passes of
    one process, not of the whole chain, because the times before and after the process are already known.
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
    """Return a lower bound for the schemes of `allowed` options, or `limit` if no scheme is below it.

    Options that cannot be part of a scheme below `limit` are disallowed.

    Row k of `heads` is filled with the earliest time at which each sample is ready for process k, and row k of `rests`
    with the minimum time from there on. Both are the minimum over all options, sample by sample. They may not belong to
    any scheme, but they are never too long.
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
    """Return the number of suffixes in `made`.

    A suffix is the minimum time from each sample on before a process. There is one suffix for each of the `options` of
    the process and each of the `rests` after it. Suffixes that cannot be below `limit` with samples that are ready at
    `ready` are left out. The rows of `notes` are filled with the sum of each suffix, and with the difference between
    its first and last sample.
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
    """Return the number of labels in `made`, and the number of the first label that was not extended.

    Each label from number `first` on is extended by each of the `options` of the next process, unless the result cannot
    be below `limit`. The function stops when `made` might not have enough room for the extensions of one more label.

    `place[j]` is the index of sample j among the marks of `labels`, and `marks` are the marks of the labels in `made`.
    The remaining processes take at least `rest[j]` from each sample j on, and at least as long as one of the rows of
    `rests` from each mark on. The rows of `notes` are filled with the parent of each label, its option, its bound, and
    the sum of its times.
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
    """Return the number of labels that are not dominated, and fill `kept` with their indices.

    A label dominates another one if it is not later at any mark. Of equal labels, the first one is kept. `order`
    contains the indices of labels in the order of the sum of their times, so that no label dominates a label before it.
    """
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


CHUNK_KERNELS = JitKernel(
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
"""The compiled or interpreted loops. One step is one chunk. The Python version also takes arrays."""
