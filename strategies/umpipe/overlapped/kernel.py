"""The event loop for overlapping directions, on integers and plain sequences.

The same code is run by Python on lists, or compiled by numba on int64 arrays, with equal results. The fields of the
structures are described in `overlapped.tables`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from lightning_pipes.sim.loops.jit import LATEST_TIME, JitKernel

BACKWARD_FIRST = 0
FORWARD_FIRST = 1
ALL_FORWARDS_FIRST = 2


def runner_of_process(p, width, lead):
    """Return the number of the rank or link that runs process p.

    The number of a rank is the number of its first stage's forward process. The number of a forward link is the number
    of its process. Backward links come after all of these.
    """
    if p < width:
        return p if p % 2 == 1 else 2 * lead[p // 2]
    if p % 2 == 1:
        return 2 * lead[(2 * width - 1 - p) // 2]
    return width + (2 * width - 2 - p) // 2


def run_chunks(chunks, policy, limit, memory, room, log):
    """Return the time at which the last backward chunk ends.

    The result is LATEST_TIME if this time is not before `limit`, if a stage would hold more than its maximum, or if all
    stages wait for each other. The function fills `room.peak`, and `log` if it has room for the chunks.

    A chunk starts as soon as its rank or link is free and the process before has finished all of its rows. The process
    before the first backward process is the last forward process. If a rank could start a forward and a backward, the
    policy decides between them. If several stages of the rank have such a chunk, the first stage runs.
    """
    rows, busy, size = chunks
    caps, weight, weight_arrived, weight_returned, most = memory
    lead, beside, begun, done, rest, tail, idle, running, ends, touched, flying, level, peak = room
    first, starts, turns = log
    logging = len(starts) > 0
    n = len(busy)
    width = n // 2
    stages = (width + 1) // 2
    count = width + stages - 1  # stages and forward links, then backward links
    after = 0
    for p in range(n - 1, -1, -1):
        begun[p] = 0
        done[p] = 0
        rest[p] = (rows + size[p] - 1) // size[p] * busy[p]
        tail[p] = after
        after += busy[p]
    head = 0
    for p in range(n):
        if head + rest[p] + tail[p] >= limit:
            return LATEST_TIME
        if p < width and p % 2 == 0 and head + rest[p] + rest[n - 1 - p] + tail[n - 1 - p] >= limit:
            return LATEST_TIME
        head += busy[p]
    for r in range(count):
        idle[r] = 1
    for i in range(stages):
        flying[i] = 0
        level[i] = 0
        peak[i] = 0
    turn = 0
    t = 0
    active = 0
    touched[0] = 0
    news = 1
    while True:
        for x in range(news):
            r = touched[x]
            chosen = -1
            if r < width and r % 2 == 0:
                forward = -1
                backward = -1
                i = r // 2
                while idle[r] > 0:
                    f = 2 * i
                    b = n - 1 - f
                    if t + rest[f] + rest[b] + tail[b] >= limit:
                        return LATEST_TIME
                    if forward < 0 and begun[f] < rows:
                        end = min(begun[f] + size[f], rows)
                        if (f == 0 or done[f - 1] >= end) and (flying[i] == 0 or flying[i] + end - begun[f] <= caps[i]):
                            forward = f
                    if backward < 0 and begun[b] < rows:
                        end = min(begun[b] + size[b], rows)
                        if done[b - 1] >= end and (policy != ALL_FORWARDS_FIRST or begun[f] == rows):
                            backward = b
                    i = beside[i]
                    if 2 * i == r:
                        break
                if forward >= 0 and (backward < 0 or policy == FORWARD_FIRST):
                    chosen = forward
                    i = forward // 2
                    more = min(begun[chosen] + size[chosen], rows) - begun[chosen]
                    flying[i] += more
                    level[i] += more * weight[i]
                    if i > 0:
                        level[i] -= more * weight_arrived[i]
                elif backward >= 0:
                    chosen = backward
                    if chosen > width:
                        i = (n - 1 - chosen) // 2
                        level[i] -= (min(begun[chosen] + size[chosen], rows) - begun[chosen]) * weight_returned[i]
                i = r // 2
                while True:
                    if level[i] > peak[i]:
                        peak[i] = level[i]
                        if level[i] > most[i]:
                            return LATEST_TIME
                    i = beside[i]
                    if 2 * i == r:
                        break
            elif idle[r] > 0:
                p = r if r < width else n - 2 - 2 * (r - width)
                if t + rest[p] + tail[p] >= limit:
                    return LATEST_TIME
                if begun[p] < rows and done[p - 1] >= min(begun[p] + size[p], rows):
                    chosen = p
            if chosen >= 0:
                if logging:
                    at = first[chosen] + begun[chosen] // size[chosen]
                    starts[at] = t
                    turns[at] = turn
                    turn += 1
                begun[chosen] = min(begun[chosen] + size[chosen], rows)
                rest[chosen] -= busy[chosen]
                idle[r] = 0
                end = t + busy[chosen]
                at = active
                active += 1
                while at > 0 and ends[at - 1] < end:
                    ends[at] = ends[at - 1]
                    running[at] = running[at - 1]
                    at -= 1
                ends[at] = end
                running[at] = chosen
        if active == 0:
            return t if done[n - 1] == rows else LATEST_TIME
        t = ends[active - 1]
        news = 0
        while active > 0 and ends[active - 1] == t:
            active -= 1
            p = running[active]
            r = runner_of_process(p, width, lead)
            more = begun[p] - done[p]
            done[p] = begun[p]
            idle[r] = 1
            touched[news] = r
            news += 1
            if r < width and r % 2 == 0:
                if p >= width:
                    i = (n - 1 - p) // 2
                    flying[i] -= more
                    level[i] -= more * weight[i]
            elif p < width:
                level[(p + 1) // 2] += more * weight_arrived[(p + 1) // 2]
            else:
                level[(n - 2 - p) // 2] += more * weight_returned[(n - 2 - p) // 2]
            p += 1
            if p < n:
                touched[news] = runner_of_process(p, width, lead)
                news += 1


def improve_option(p, options, times, sizes, policies, chunks, memory, room, log, best):
    """Give process p its best option while all other processes keep theirs.

    `best` is [time, option, policy, evaluations]. The first three change only if a better option is found. `times` is
    flat: a chunk of process p with option q takes `times[p * len(sizes) + q]`.
    """
    busy = chunks.busy
    size = chunks.size
    now = best[1]
    for q in options:
        if q == now:
            continue
        busy[p] = times[p * len(sizes) + q]
        size[p] = sizes[q]
        for policy in policies:
            end = run_chunks(chunks, policy, best[0], memory, room, log)
            best[3] += 1
            if end < best[0]:
                best[0] = end
                best[1] = q
                best[2] = policy
    busy[p] = times[p * len(sizes) + best[1]]
    size[p] = sizes[best[1]]


def improve_cap(i, caps, policies, chunks, memory, room, log, best):
    """Give stage i its best cap while all other stages keep theirs.

    `best` is [time, cap, policy, evaluations], as in `improve_option`.
    """
    now = best[1]
    for cap in caps:
        if cap == now:
            continue
        memory.caps[i] = cap
        for policy in policies:
            end = run_chunks(chunks, policy, best[0], memory, room, log)
            best[3] += 1
            if end < best[0]:
                best[0] = end
                best[1] = cap
                best[2] = policy
    memory.caps[i] = best[1]


OVERLAPPED_KERNELS = JitKernel(runner_of_process, run_chunks, improve_option, improve_cap, patience=0)
