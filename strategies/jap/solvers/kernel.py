"""The inner loops of the solvers, on integer nanoseconds and plain sequences.

Each loop is written once. Python runs it on lists, or numba compiles it for int64 arrays. Both give the same integers,
because random numbers and the tolerances of annealing are integers, too. The data structures are documented in
`tables`. A block that cannot start yet is ready at LATEST_TIME.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from heapq import heappop, heappush

from lightning_pipes.sim.loops.jit import LATEST_TIME, JitKernel, Kernel
from lightning_pipes.strategies.jap.solvers.tables import Begun

LUCK_SCALE = 1024
"""The unit of `Chance.luck` is 1 / `LUCK_SCALE`, so that minus the logarithms of numbers from 0 to 1 are stored as
integers.
"""


def draw(rng, below):
    """Return a random integer from 0 to `below` - 1 (Park and Miller 1988)."""
    rng[0] = rng[0] * 48271 % 2147483647
    return rng[0] % below


def next_block(o, s, jobs, n):
    """Return the next block of the job of block o, which is on stage s; -1 if o is the job's last block."""
    if o - 2 * jobs * s < jobs:
        if (s + 1) * 2 * jobs < n:
            return o + 2 * jobs
        return o + jobs
    if s > 0:
        return o - 2 * jobs
    return -1


def free_time(o, s, jobs, free, last, saved):
    """Return the time when stage s is free for its block o.

    If o is the backward that follows its own forward, the switch to another job is saved.
    """
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
        after = LATEST_TIME
        for i in range(k):
            o = 2 * jobs * s + active[i]
            work += busy[o] - saved[o] + busy[o + jobs]
            after = min(after, tail[o] - busy[o], tail[o + jobs] - busy[o + jobs])
        need[s] = work + after


# Jobs of 2, 1 and 1 samples: a free stage runs the most urgent block that is ready.
# Drawn by `iteration("backward first")`:
# rank 0 |a---b-c-....................a=======b===c===| bubble 45.5%
# rank 1 |....a---b-c-........a=======b===c===........| bubble 45.5%
# rank 2 |........a---a=======b-b===c-c===............| bubble 45.5%
#         - forward  = backward  . idle
def list_schedule(blocks, urgency, notes, k, patience, limit, starts):
    """Fill `starts` for the jobs `notes.active[:k]`, and return the end of the last one; LATEST_TIME if it is after
    `limit`.

    Whenever a stage is free, it runs the most urgent one of its blocks that are ready within `patience`, and waits for
    it if necessary.
    """
    jobs, n, busy, lag, tail, saved = blocks
    first, second = urgency
    active, need, ready, free, soon, left, known, count, latest = notes
    stages = n // (2 * jobs)
    for s in range(stages):
        free[s] = 0
        soon[s] = LATEST_TIME
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
        best = LATEST_TIME
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
            return LATEST_TIME
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
        t = LATEST_TIME
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
    """Fill `path` with the times of the sequence `order`, and return the end of the last block.

    Every stage runs its blocks in this order as early as possible. The function returns -1 if stages wait for each
    other.
    """
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
    """Insert the job `order[k]` among the k jobs of `row` at the best position, and return the end of these k + 1 jobs.

    `ahead` is added to the urgency numbers of forwards. If it is 4 times the number of jobs, all backwards are
    more urgent than all forwards.
    """
    first, second = urgency
    active = notes.active
    best = LATEST_TIME
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
    """Move job a to the place `to`. The jobs between both places move up or down by one."""
    old = places[a]
    for j in range(len(places)):
        if old < places[j] <= to:
            places[j] -= 1
        elif to <= places[j] < old:
            places[j] += 1
    places[a] = to


def anneal_places(blocks, chance, begin, end, mean, now, before, best, urgency, notes, starts):
    """Run the evaluations `begin` to `end` of `chance.total`.

    An evaluation changes the places, the patience or the direction that goes first of the `Style` `now`. The best style
    is stored in `best`. `before` has room for the places before a change, and `mean` is the exclusive upper limit of
    the patience.
    """
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
        slack = warm * luck[draw(rng, len(luck))] // LUCK_SCALE
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
    """Move the block at the index `source` to the index `to`, and shift the blocks between them by one."""
    o = sequence[source]
    step = 1 if to > source else -1
    for i in range(source, to, step):
        sequence[i] = sequence[i + step]
        place[sequence[i]] = i
    sequence[to] = o
    place[o] = to


# The jobs of `list_schedule` in the order that insertion, annealing and these exchanges find.
# Drawn by `iteration("search")`:
# rank 0 |b-a---c-......b===............a=======c===| bubble 42.9%
# rank 1 |..b-..a---b===c-......a=======c===........| bubble 42.9%
# rank 2 |....b-b===a---a=======c-c===..............| bubble 42.9%
#         - forward  = backward  . idle
def exchange_blocks(blocks, chance, begin, end, order, value, best_sequence, path, path_new, sweep):
    """Run the evaluations `begin` to `end` of `chance.total`.

    An evaluation exchanges blocks of `order` that follow each other on the longest path and on a stage, or moves one of
    them. The best order is stored in `best_sequence`. `value` is [current makespan, best makespan], `path` has the
    times of `order`, and `path_new` is working memory.
    """
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
        while o >= 0:  # draw one of the arcs of the longest path on a stage, with equal probabilities
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
        if v >= 0 and v <= value[0] + warm * luck[draw(rng, len(luck))] // LUCK_SCALE:
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
    """Return the end of the blocks of a stage if it may interrupt them (Jackson).

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
    """Return the block of step k of job j, counted from 0."""
    stages = n // (2 * jobs)
    if k < stages:
        return 2 * jobs * k + j
    return 2 * jobs * (2 * stages - 1 - k) + jobs + j


def bound_rest(blocks, limit, begun, rest):
    """Return a lower bound of the end of a partial order, and fill `rest.head` for the blocks that have not begun.

    The function returns LATEST_TIME if the bound is above `limit`, for example if stages are reserved for each other's
    blocks.
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
                    return LATEST_TIME
                t += lag[o]
    for s in range(stages):
        count = 0
        for i in range(2 * jobs):
            o = 2 * jobs * s + i
            k = s if i < jobs else 2 * stages - 1 - s
            if k >= step[o % jobs]:
                some_head[count] = head[o]
                some_busy[count] = busy[o] - saved[o]
                some_tail[count] = tail[o] - some_busy[count]  # negative if the stage is still busy when the job ends
                count += 1
        if count > 0:
            least = max(least, one_machine(count, some_head, some_busy, some_tail))
    return least


# A single pass: it begins with job c, and never revises this choice, which delays the end.
# Drawn by `iteration("algorithm 1")`:
# rank 0 |c-a---b-......c===........b===........a=======| bubble 47.8%
# rank 1 |..c-..a---c===b-......b===....a=======........| bubble 47.8%
# rank 2 |....c-c===a---..b-b===a=======................| bubble 47.8%
#         - forward  = backward  . idle
def construct_order(blocks, begun, rest, starts):
    """Fill `starts` by Algorithm 1 as printed, and return the end of the last block.

    Block by block, the algorithm chooses the candidate with the least bound, or the last of several equal ones.
    """
    jobs, n, busy, lag, tail, saved = blocks
    step, ready, free, _, last = begun
    stages = n // (2 * jobs)
    low = 0
    for _ in range(n):
        t = LATEST_TIME
        s = -1
        for j in range(jobs):
            if step[j] < 2 * stages:
                o = block_of(j, step[j], jobs, n)
                x = o // (2 * jobs)
                end = max(ready[j], free_time(o, x, jobs, free, last, saved)) + busy[o]
                if end < t:
                    t = end
                    s = x
        best = LATEST_TIME
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
            least = bound_rest(blocks, LATEST_TIME, begun, rest)
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


# The optimal order of these jobs.
# Drawn by `iteration("branch and bound")`:
# rank 0 |b-a---c-......b===............a=======c===| bubble 42.9%
# rank 1 |..b-..a---b===c-......a=======c===........| bubble 42.9%
# rank 2 |....b-b===a---a=======c-c===..............| bubble 42.9%
#         - forward  = backward  . idle
def expand_nodes(blocks, same, depth, nodes, best, best_starts, starts, tree, rest):
    """Expand up to `nodes` nodes of the search tree from `depth` on, and return the depth at which the search stops.

    The search is depth first, with the most promising child first. It returns -1 when the tree is exhausted. `best` is
    [makespan], and `best_starts` has the starts of the best order.

    A node determines how the row of each stage begins. Its children are all the blocks that can come next on one stage,
    in a schedule in which no block can start earlier without delaying another one (Giffler and Thompson 1960). Updates
    and switches do not delay the job, so a block may come next although its predecessor has not begun. In this case,
    the stage is reserved for it. Of equal jobs, the one with the smaller number goes first everywhere: `same` (j) is
    the previous job with equal times, -1 for none.
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
        t = LATEST_TIME
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


SOLVER_KERNELS = JitKernel(
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
    """Return the kernel that places this number of blocks: Python if it needs less time than loading numba does."""
    return SOLVER_KERNELS.python if blocks <= SOLVER_KERNELS.patience else SOLVER_KERNELS.fastest
