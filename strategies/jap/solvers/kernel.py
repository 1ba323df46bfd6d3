"""The inner loops of the solvers, on whole nanoseconds and plain sequences.

They are written once and run by Python on lists, or compiled by numba on int64 arrays, with the same integers: so
random numbers and the readiness to accept something worse are whole numbers too.

`tables` says what the structures hold. What has not begun is ready NEVER.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from heapq import heappop, heappush

from lightning_pipes.sim.loops.jit import JitKernel, Kernel
from lightning_pipes.strategies.jap.solvers.tables import Begun

NEVER = 1 << 60
"""After any time that matters."""
SCALE = 1024
"""Of `luck`: minus the logarithms of numbers from 0 to 1, as whole numbers."""


def draw(rng, below):
    """Return a random number from 0 to `below` - 1 (Park and Miller 1988)."""
    rng[0] = rng[0] * 48271 % 2147483647
    return rng[0] % below


def next_block(o, s, jobs, n):
    """Return the next block of the job of o, which is on stage s; -1 after its last one."""
    if o - 2 * jobs * s < jobs:
        if (s + 1) * 2 * jobs < n:
            return o + 2 * jobs
        return o + jobs
    if s > 0:
        return o - 2 * jobs
    return -1


def free_time(o, s, jobs, free, last, saved):
    """Return when stage s is free for its block o: no switch to another job precedes a job's own backward."""
    if last[s] >= 0 and o == last[s] + jobs:
        return free[s] - saved[last[s]]
    return free[s]


def fill_needs(blocks, notes, k):
    """Fill `notes.need` for the jobs `notes.active[:k]`."""
    jobs, n, busy, _, tail, saved = blocks
    active = notes.active
    need = notes.need
    for s in range(n // (2 * jobs)):
        work = 0
        after = NEVER
        for i in range(k):
            o = 2 * jobs * s + active[i]
            work += busy[o] - saved[o] + busy[o + jobs]
            after = min(after, tail[o] - busy[o], tail[o + jobs] - busy[o + jobs])
        need[s] = work + after


# Jobs of 2, 1 and 1 samples: a free stage takes the most urgent block that is ready.
# Drawn by `iteration("backward first")`:
# rank 0 |a---b-c-....................a=======b===c===| bubble 45.5%
# rank 1 |....a---b-c-........a=======b===c===........| bubble 45.5%
# rank 2 |........a---a=======b-b===c-c===............| bubble 45.5%
#         - forward  = backward  . idle
def list_schedule(blocks, urgency, notes, k, patience, limit, starts):
    """Return when the jobs `notes.active[:k]` end, NEVER if that is after `limit`; fills `starts`.

    Whenever a stage is free, it takes the most urgent of its blocks that are ready within `patience`, and may wait for
    a better one.
    """
    jobs, n, busy, lag, tail, saved = blocks
    first, second = urgency
    active, need, ready, free, soon, left, known, count, latest = notes
    stages = n // (2 * jobs)
    for s in range(stages):
        free[s] = 0
        soon[s] = NEVER
        left[s] = need[s]
        count[s] = 0
        latest[s] = -1
    for i in range(k):
        ready[active[i]] = 0
        known[i] = active[i]
    soon[0] = 0
    count[0] = k
    last = 0
    for _ in range(2 * stages * k):
        s = 0
        t = soon[0]
        for x in range(1, stages):
            if soon[x] < t:
                t = soon[x]
                s = x
        base = 2 * jobs * s
        until = t + patience
        best = NEVER
        at = 0
        for c in range(base, base + count[s]):
            o = known[c]
            if ready[o] <= until:
                number = first[o - base] if o < base + jobs else second[o - base - jobs]
                if number < best:
                    best = number
                    at = c
        o = known[at]
        count[s] -= 1
        known[at] = known[base + count[s]]
        t = max(t, ready[o], free_time(o, s, jobs, free, latest, saved))
        if t + tail[o] > limit or t + left[s] > limit:
            return NEVER
        left[s] -= busy[o] - saved[o]
        starts[o] = t
        free[s] = t + busy[o]
        latest[s] = o
        f = next_block(o, s, jobs, n)
        if f < 0:
            last = max(last, free[s])
        else:
            ready[f] = t + lag[o]
            x = f // (2 * jobs)
            known[2 * jobs * x + count[x]] = f
            count[x] += 1
            if x != s:
                t = max(ready[f], free_time(f, x, jobs, free, latest, saved))
                if t < soon[x]:
                    soon[x] = t
        t = NEVER
        for c in range(base, base + count[s]):
            if ready[known[c]] < t:
                t = ready[known[c]]
        soon[s] = t if t > free[s] else free[s]
        if f == o + jobs:
            soon[s] = min(soon[s], max(ready[f], free[s] - saved[o]))
    return last


# The same jobs in another order, short ones at both ends.
# Drawn by `iteration("pyramid")`:
# rank 0 |b-a---c-......b===............a=======c===| bubble 42.9%
# rank 1 |..b-..a---b===c-......a=======c===........| bubble 42.9%
# rank 2 |....b-b===a---a=======c-c===..............| bubble 42.9%
#         - forward  = backward  . idle
def time_sequence(blocks, order, path, sweep):
    """Return when stages end that run their part of the sequence `order`, -1 if they wait for each other; fills
    `path`."""
    jobs, n, busy, lag, _, saved = blocks
    sequence, place = order
    starts, cause = path
    queue, unmet = sweep
    width = 2 * jobs
    low = 0
    high = 0
    for row in range(0, n, width):
        for p in range(row, row + width):
            o = sequence[p]
            starts[o] = 0
            cause[o] = -1
            unmet[o] = (o >= jobs) + (p > row)  # all but the first forwards follow a block of their job
            if unmet[o] == 0:
                queue[high] = o
                high += 1
    last = 0
    while low < high:
        o = queue[low]
        low += 1
        s = o // width
        f = next_block(o, s, jobs, n)
        if f < 0:
            last = max(last, starts[o] + busy[o])
        else:
            t = starts[o] + lag[o]
            if t > starts[f]:
                starts[f] = t
                cause[f] = o
            unmet[f] -= 1
            if unmet[f] == 0:
                queue[high] = f
                high += 1
        p = place[o] + 1
        if p < (s + 1) * width:
            f = sequence[p]
            t = starts[o] + busy[o]
            if f == o + jobs:
                t -= saved[o]
            if t > starts[f]:
                starts[f] = t
                cause[f] = o
            unmet[f] -= 1
            if unmet[f] == 0:
                queue[high] = f
                high += 1
    return last if high == n else -1


def insert_job(blocks, urgency, notes, order, k, row, ahead, limit, starts):
    """Return when the first k + 1 jobs of `order` end, once job `order[k]` stands where it does least harm among the k
    of `row`; puts it there.

    `ahead` is added to the numbers of forwards: 4 jobs lets backwards go first.
    """
    first, second = urgency
    active = notes.active
    best = NEVER
    at = 0
    for i in range(k + 1):
        active[i] = order[i]
    fill_needs(blocks, notes, k + 1)
    for p in range(k + 1):
        for i in range(k):
            second[row[i]] = 2 * (i + (i >= p))
            first[row[i]] = second[row[i]] + 1 + ahead
        second[order[k]] = 2 * p
        first[order[k]] = 2 * p + 1 + ahead
        t = list_schedule(blocks, urgency, notes, k + 1, 0, min(limit, best), starts)
        if t < best:
            best = t
            at = p
    for i in range(k, at, -1):
        row[i] = row[i - 1]
    row[at] = order[k]
    return best


def move_place(places, a, to):
    """Job a comes to place `to`; those between move up or down by one."""
    old = places[a]
    for j in range(len(places)):
        if old < places[j] <= to:
            places[j] -= 1
        elif to <= places[j] < old:
            places[j] += 1
    places[a] = to


def anneal_places(blocks, chance, begin, end, mean, now, before, best, urgency, notes, starts):
    """Evaluations `begin` to `end` of `chance.total`: changes the places, the patience and what goes first of the
    `Style` `now`, and keeps what is best; `before` has room for the places before a change, `mean` is the longest
    patience."""
    jobs = blocks.jobs
    target, luck, heat, total, rng = chance
    there, back, style = now
    there_old, back_old, _ = before
    there_best, back_best, best_style = best
    first, second = urgency
    active = notes.active
    for j in range(jobs):
        active[j] = j
    fill_needs(blocks, notes, jobs)
    for e in range(begin, end):
        if best_style[2] <= target:
            return
        rule = style[0]
        patience = style[1]
        for j in range(jobs):
            there_old[j] = there[j]
            back_old[j] = back[j]
        r = draw(rng, 100)
        a = draw(rng, jobs)
        b = draw(rng, jobs)
        if r < 55:
            there[a], there[b] = there[b], there[a]
        if r < 30 or 55 <= r < 75:
            back[a], back[b] = back[b], back[a]
        if 75 <= r < 85:
            move_place(there, a, there[b])
        if 75 <= r < 93:
            move_place(back, a, back[b])
        if 93 <= r < 96:
            rule = draw(rng, 3)
        if r >= 96:
            patience = 0 if draw(rng, 10) < 4 else draw(rng, mean)
        for j in range(jobs):
            first[j] = 2 * there[j] + 1 + (4 * jobs if rule == 0 else 0)
            second[j] = 2 * back[j] + (4 * jobs if rule == 1 else 0)
        warm = style[2] // heat * (total - e) // total
        slack = warm * luck[draw(rng, len(luck))] // SCALE
        v = list_schedule(blocks, urgency, notes, jobs, patience, style[2] + slack, starts)
        if v <= style[2] + slack:
            style[0] = rule
            style[1] = patience
            style[2] = v
            if v < best_style[2]:
                for j in range(jobs):
                    there_best[j] = there[j]
                    back_best[j] = back[j]
                for i in range(3):
                    best_style[i] = style[i]
        else:
            for j in range(jobs):
                there[j] = there_old[j]
                back[j] = back_old[j]


def shift_block(sequence, place, source, to):
    """Move the block at `source` to `to`; those between make room."""
    o = sequence[source]
    step = 1 if to > source else -1
    for i in range(source, to, step):
        sequence[i] = sequence[i + step]
        place[sequence[i]] = i
    sequence[to] = o
    place[o] = to


# What insertion, annealing and these exchanges make of the jobs of `list_schedule`.
# Drawn by `iteration("search")`:
# rank 0 |b-a---c-......b===............a=======c===| bubble 42.9%
# rank 1 |..b-..a---b===c-......a=======c===........| bubble 42.9%
# rank 2 |....b-b===a---a=======c-c===..............| bubble 42.9%
#         - forward  = backward  . idle
def exchange_blocks(blocks, chance, begin, end, order, value, best_sequence, path, path_new, sweep):
    """Evaluations `begin` to `end` of `chance.total`: moves blocks of `order` that follow each other on the longest
    path and on a stage; keeps the best. `value` is [now, best], `path` that of `order`; `path_new` has room for one."""
    jobs, n, busy, _, _, _ = blocks
    target, luck, heat, total, rng = chance
    sequence, place = order
    starts, cause = path
    starts_new, cause_new = path_new
    width = 2 * jobs
    if begin == 0:
        value[0] = time_sequence(blocks, order, path, sweep)
        value[1] = value[0]
        for i in range(n):
            best_sequence[i] = sequence[i]
    for e in range(begin, end):
        if value[1] <= target:
            return
        o = -1
        for i in range(width):
            x = sequence[i]
            if x >= jobs and starts[x] + busy[x] == value[0]:
                o = x
        chosen = -1
        seen = 0
        while o >= 0:  # one of the longest path's arcs on a stage, each equally likely
            p = cause[o]
            if p >= 0 and place[p] + 1 == place[o] and next_block(p, p // width, jobs, n) != o:
                seen += 1
                if draw(rng, seen) == 0:
                    chosen = p
            o = p
        if chosen < 0:
            return
        source = place[chosen]
        to = source + 1
        row = source - source % width
        r = draw(rng, 10)
        if r >= 9:
            to = min(row + width - 1, source + 1 + draw(rng, 4))
        elif r >= 7:
            to = max(row, source - draw(rng, 4))
            source += 1
        shift_block(sequence, place, source, to)
        v = time_sequence(blocks, order, path_new, sweep)
        warm = value[1] // heat * (total - e) // total
        if v >= 0 and v <= value[0] + warm * luck[draw(rng, len(luck))] // SCALE:
            value[0] = v
            for i in range(n):
                starts[i] = starts_new[i]
                cause[i] = cause_new[i]
            if v < value[1]:
                value[1] = v
                for i in range(n):
                    best_sequence[i] = sequence[i]
        else:
            shift_block(sequence, place, to, source)


def one_machine(count, head, busy, tail):
    """Return when the blocks of a stage end if it may interrupt them (Jackson).

    Block i can begin at head[i], and needs tail[i] after its end.
    """
    coming = [(0, 0)]
    coming.pop()
    for i in range(count):
        heappush(coming, (head[i], i))
    here = [(0, 0, 0)]
    here.pop()
    t = 0
    last = 0
    while len(coming) > 0 or len(here) > 0:
        if len(here) == 0:
            t = max(t, coming[0][0])
        while len(coming) > 0 and coming[0][0] <= t:
            _, i = heappop(coming)
            heappush(here, (-tail[i], i, busy[i]))
        q, i, left = heappop(here)
        if len(coming) > 0 and coming[0][0] < t + left:
            heappush(here, (q, i, left - (coming[0][0] - t)))
            t = coming[0][0]
        else:
            t += left
            last = max(last, t - q)
    return last


def block_of(j, k, jobs, n):
    """Step k of job j, counted from 0."""
    stages = n // (2 * jobs)
    if k < stages:
        return 2 * jobs * k + j
    return 2 * jobs * (2 * stages - 1 - k) + jobs + j


def bound_rest(blocks, limit, begun, rest):
    """Return a lower bound of the end of a partial order; fill `rest.head` of the blocks that have not begun.

    NEVER where it would be after `limit`, as when stages are held for each other's blocks.
    """
    jobs, n, busy, lag, tail, saved = blocks
    step, ready, free, held, last = begun
    head, some_head, some_busy, some_tail = rest
    stages = n // (2 * jobs)
    for j in range(jobs):
        for k in range(step[j], 2 * stages):
            head[block_of(j, k, jobs, n)] = 0
    least = 0
    again = True
    while again:
        again = False
        for j in range(jobs):
            t = ready[j]
            for k in range(step[j], 2 * stages):
                o = block_of(j, k, jobs, n)
                s = o // (2 * jobs)
                t = max(t, free_time(o, s, jobs, free, last, saved))
                if held[s] >= 0 and held[s] != o:
                    t = max(t, head[held[s]] + busy[held[s]] - (saved[held[s]] if o == held[s] + jobs else 0))
                if t > head[o]:
                    head[o] = t
                    if held[s] == o:
                        again = True
                least = max(least, t + tail[o])
                if least > limit:
                    return NEVER
                t += lag[o]
    for s in range(stages):
        count = 0
        for i in range(2 * jobs):
            o = 2 * jobs * s + i
            k = s if i < jobs else 2 * stages - 1 - s
            if k >= step[o % jobs]:
                some_head[count] = head[o]
                some_busy[count] = busy[o] - saved[o]
                some_tail[count] = tail[o] - some_busy[count]  # below 0 where its stage is busy when the job has ended
                count += 1
        if count > 0:
            least = max(least, one_machine(count, some_head, some_busy, some_tail))
    return least


# One pass: it begins with c, and what that costs the end is never taken back.
# Drawn by `iteration("algorithm 1")`:
# rank 0 |c-a---b-......c===........b===........a=======| bubble 47.8%
# rank 1 |..c-..a---c===b-......b===....a=======........| bubble 47.8%
# rank 2 |....c-c===a---..b-b===a=======................| bubble 47.8%
#         - forward  = backward  . idle
def construct_order(blocks, begun, rest, starts):
    """Return when Algorithm 1 as printed ends: it fills `starts` block by block with the one that promises most, the
    last of equals."""
    jobs, n, busy, lag, tail, saved = blocks
    step, ready, free, _, last = begun
    stages = n // (2 * jobs)
    low = 0
    for _ in range(n):
        t = NEVER
        s = -1
        for j in range(jobs):
            if step[j] < 2 * stages:
                o = block_of(j, step[j], jobs, n)
                x = o // (2 * jobs)
                end = max(ready[j], free_time(o, x, jobs, free, last, saved)) + busy[o]
                if end < t:
                    t = end
                    s = x
        best = NEVER
        chosen = -1
        for j in range(jobs):
            if step[j] == 2 * stages:
                continue
            o = block_of(j, step[j], jobs, n)
            start = max(ready[j], free_time(o, s, jobs, free, last, saved))
            if o // (2 * jobs) != s or start >= t:
                continue
            old = ready[j]
            before = free[s]
            latest = last[s]
            ready[j] = start + lag[o]
            free[s] = start + busy[o]
            last[s] = o
            step[j] += 1
            least = bound_rest(blocks, NEVER, begun, rest)
            step[j] -= 1
            ready[j] = old
            free[s] = before
            last[s] = latest
            if max(low, least) <= best:
                best = max(low, least)
                chosen = j
        o = block_of(chosen, step[chosen], jobs, n)
        start = max(ready[chosen], free_time(o, s, jobs, free, last, saved))
        starts[o] = start
        step[chosen] += 1
        ready[chosen] = start + lag[o]
        free[s] = start + busy[o]
        last[s] = o
        low = max(low, start + tail[o])
    return low


# The best order there is of these jobs.
# Drawn by `iteration("branch and bound")`:
# rank 0 |b-a---c-......b===............a=======c===| bubble 42.9%
# rank 1 |..b-..a---b===c-......a=======c===........| bubble 42.9%
# rank 2 |....b-b===a---a=======c-c===..............| bubble 42.9%
#         - forward  = backward  . idle
def expand_nodes(blocks, same, depth, nodes, best, best_starts, starts, tree, rest):
    """Return the depth at which the search stops, -1 when all is searched: depth first, the most promising first, it
    expands up to `nodes` nodes from `depth` on. `best` is [makespan], with its `best_starts`.

    A node has decided how the row of each stage begins. Its children are all the blocks that can come next on one stage
    in a schedule where no block can be moved ahead of others without delaying them (Giffler and Thompson 1960). Updates
    and switches do not hold up a job, so a block may come next whose predecessor has not begun: then the stage is held
    for it. Of equal jobs the one with the smaller number goes first everywhere: `same` (j) is the one before it, -1 for
    none.
    """
    jobs, n, busy, lag, tail, saved = blocks
    steps, readies, frees, holds, lasts, lows, counts, children, promises = tree
    head = rest.head
    stages = n // (2 * jobs)
    while depth >= 0 and nodes > 0:
        c = counts[depth]
        if c == 0:
            depth -= 1
            continue
        counts[depth] = c - 1
        o = children[depth * 2 * jobs + c - 1]
        if promises[depth * 2 * jobs + c - 1] >= best[0]:
            continue
        nodes -= 1
        d = depth + 1
        step = steps[d * jobs : (d + 1) * jobs]
        ready = readies[d * jobs : (d + 1) * jobs]
        free = frees[d * stages : (d + 1) * stages]
        held = holds[d * stages : (d + 1) * stages]
        last = lasts[d * stages : (d + 1) * stages]
        for j in range(jobs):
            step[j] = steps[depth * jobs + j]
            ready[j] = readies[depth * jobs + j]
        for s in range(stages):
            free[s] = frees[depth * stages + s]
            held[s] = holds[depth * stages + s]
            last[s] = lasts[depth * stages + s]
        low = lows[depth]
        s = o // (2 * jobs)
        j = o % jobs
        if block_of(j, step[j], jobs, n) == o:
            start = max(ready[j], free_time(o, s, jobs, free, last, saved))
            starts[o] = start
            step[j] += 1
            ready[j] = start + lag[o]
            free[s] = start + busy[o]
            last[s] = o
            held[s] = -1
            low = max(low, start + tail[o])
        else:
            held[s] = o
        for i in range(jobs):
            steps[d * jobs + i] = step[i]
            readies[d * jobs + i] = ready[i]
        for i in range(stages):
            frees[d * stages + i] = free[i]
            holds[d * stages + i] = held[i]
            lasts[d * stages + i] = last[i]
        begun = Begun(step, ready, free, held, last)
        lows[d] = low
        left = 0
        for i in range(jobs):
            left += 2 * stages - step[i]
        if left == 0:
            if low < best[0]:
                best[0] = low
                for i in range(n):
                    best_starts[i] = starts[i]
            continue
        counts[d] = 0
        if bound_rest(blocks, best[0], begun, rest) >= best[0]:
            continue
        s = -1
        t = NEVER
        forced = -1
        for j in range(jobs):
            if step[j] == 2 * stages:
                continue
            o = block_of(j, step[j], jobs, n)
            x = o // (2 * jobs)
            if held[x] == o:
                forced = o
            elif held[x] < 0:
                end = max(ready[j], free_time(o, x, jobs, free, last, saved)) + busy[o]
                if end < t:
                    t = end
                    s = x
        count = 0
        if forced >= 0:
            children[d * 2 * jobs] = forced
            promises[d * 2 * jobs] = low
            count = 1
        elif s >= 0:
            for i in range(2 * jobs):
                o = 2 * jobs * s + i
                j = i % jobs
                k = s if i < jobs else 2 * stages - 1 - s
                if k < step[j] or (i >= jobs and step[j] <= s) or (same[j] >= 0 and step[same[j]] <= k):
                    continue
                if head[o] >= t:
                    continue
                old = ready[j]
                before = free[s]
                latest = last[s]
                if step[j] == k:
                    start = max(ready[j], free_time(o, s, jobs, free, last, saved))
                    ready[j] = start + lag[o]
                    free[s] = start + busy[o]
                    last[s] = o
                    step[j] += 1
                else:
                    held[s] = o
                keep = [head[2 * jobs * s + x] for x in range(2 * jobs)]
                least = bound_rest(blocks, best[0], begun, rest)
                for x in range(2 * jobs):
                    head[2 * jobs * s + x] = keep[x]
                held[s] = -1
                if step[j] > k:
                    step[j] = k
                ready[j] = old
                free[s] = before
                last[s] = latest
                if step[j] == k:
                    least = max(least, max(ready[j], free_time(o, s, jobs, free, last, saved)) + tail[o])
                least = max(low, least)
                if least >= best[0]:
                    continue
                p = d * 2 * jobs + count
                while p > d * 2 * jobs and promises[p - 1] < least:
                    promises[p] = promises[p - 1]
                    children[p] = children[p - 1]
                    p -= 1
                promises[p] = least
                children[p] = o
                count += 1
        counts[d] = count
        depth = d
    return depth


SOLVERS = JitKernel(
    draw,
    next_block,
    free_time,
    fill_needs,
    list_schedule,
    time_sequence,
    insert_job,
    move_place,
    anneal_places,
    shift_block,
    exchange_blocks,
    one_machine,
    block_of,
    bound_rest,
    construct_order,
    expand_nodes,
    patience=300_000,
)


def kernel_for(blocks: int) -> Kernel:
    """Return what places so many blocks: Python where it takes less time than loading numba does."""
    return SOLVERS.python if blocks <= SOLVERS.patience else SOLVERS.fastest
