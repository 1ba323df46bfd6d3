"""The simulator's inner loops, on integer nanoseconds and plain sequences; `tables` says what the structures hold.

They are written once and run in three ways, with the same integers: by Python on lists, compiled by numba on int64
arrays, and `fixed` also on arrays that hold a row of numbers, one for each of many costs, where `max` is numpy's. So
only what all of them understand is used here. A loop unpacks its structures before it begins, and functions that it
calls take numbers only: numba would count references to arrays at each call.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from heapq import heappop, heappush

from lightning_pipes.sim.loops.jit import JitKernel
from lightning_pipes.sim.loops.tables import PriceList

LONG_AGO = -(1 << 62)
"""Before any time that matters: when a full bucket was last drawn from."""
OTHERS, FORWARDS, WEIGHTS = range(3)  # sorts of queues
PLENTY = 1 << 62
"""More samples and bytes than anything has."""


def leave(start, busy, quick, depth, spent):
    """Until when a wire's rate is spent after a message that begins at `start`, and when its last byte is out.

    The wire has a token bucket: it earns its rate all the time, saves up to `depth` nanoseconds of it while it idles,
    and moves bytes at full speed while it has savings. `busy` is the message's time at the rate, `quick` at full speed,
    `spent` what the message before it left. Without a bucket, at depth 0, a message takes `busy`.
    """
    spent = max(spent, start - depth) + busy
    return spent, max(start + quick, spent)


# The order of each row is given; a message takes a link as long as a forward a rank.
# Drawn by `step(OneFOneB(), link=1)`:
# rank 0 |0-1-2-................0===3-1===......2===......3===| bubble 53.8%
# rank 1 |....0-1-........0===2-1===....3-2===......3===......| bubble 53.8%
# rank 2 |........0-0===1-1===....2-2===....3-3===............| bubble 53.8%
#         - forward  = backward  . idle
def fixed(work, prices, clock, wires, ran):
    """Fill `ran` for operations that are listed in an order in which they may run: the longest path.

    Each waits for those that it is joined with, besides its rank and its link. `clock` (r) begins at 0.
    """
    rank, link, group, first, before = work
    overhead, busy, quick, late, depth, posted, wire, blocks, base = prices
    free, spent, moved, there = wires
    starts, ends = ran
    for i in range(len(rank)):
        r = rank[i]
        g = group[i]
        x = link[i]
        t = clock[r]
        for k in range(first[i], first[i + 1]):
            t = max(t, ends[before[k]])
        if x < 0:
            t = t + overhead
            starts[i] = t
            t = t + busy[g]
            ends[i] = t
            clock[r] = t
        else:
            clock[r] = t
            m = base[x] + moved[x]
            if posted[x] > 0 and moved[x] >= posted[x]:
                t = max(t, there[m - posted[x]] + late[g])
            w = wire[x]
            t = max(t, free[w])
            starts[i] = t
            spent[w], t = leave(t, busy[g], quick[g], depth[x], spent[w])
            free[w] = t
            ends[i] = t + late[g]
            there[m] = ends[i]
            moved[x] += 1
            if blocks[x] > 0:
                clock[r] = t


def every(work, prices, clock, wires, ran, last):
    """Fill `last` with when the same order ends under many costs: each a row of `prices.busy` and `prices.quick`."""
    for c in range(len(last)):
        clock[:] = 0
        wires.free[:] = 0
        wires.spent[:] = LONG_AGO
        wires.moved[:] = 0
        case = PriceList(
            prices.overhead, prices.busy[c], prices.quick[c],
            prices.late, prices.depth, prices.posted, prices.wire, prices.blocks, prices.base,
        )  # fmt: skip
        fixed(work, case, clock, wires, ran)
        latest = 0
        for end in ran.ends:
            latest = max(latest, end)
        last[c] = latest


def pick(rank, forward, other, nothing, alternate, after_forward):
    """The next operation of a rank by a rule (see `ir.Rule`), given the first `forward` and the first `other` operation
    that it may run; `nothing` where there is none."""
    if other == nothing or (alternate and forward != nothing and not after_forward):
        return forward
    return other


# The same links where each rank takes what is ready, within limits of what it holds.
# Drawn by `step(Ready(), link=1)`:
# rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
# rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
# rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
#         - forward  = backward  . idle
def chosen(work, standing, ready, prices, needed, held, wires, ran, turn, alternate, weights_last, in_order):
    """Run operations in the order that is chosen as they become ready, and return the number that never ran.

    Fills `ran`, `held` and `turn` (i): operations of a rank that start and end together ran in the order of their
    turns.

    An operation waits for those that hold it up. A queue offers the first of its members that is ready, or with
    `in_order` its next or nothing; what does not fit lets nothing pass. The smallest number comes first. With
    `alternate` a forward follows what is none, see `pick`; with `weights_last` weight gradients run where nothing else
    does.

    All that happens at one instant has happened before any rank is asked; ranks are asked in order, and messages leave
    in the order in which they become complete.
    """
    rank, link, group, first, after = work
    queue, pool, rows, queues, sort, members = standing
    waiting, low, count, room = ready
    overhead, busy, quick, late, depth, posted, wire, blocks, base = prices
    taken, freed, may = needed
    used, peak = held
    free, spent, moved, there = wires
    starts, ends = ran
    n = len(rank)
    n_ranks = len(may)
    working = [False] * n_ranks
    asked = [True] * n_ranks
    after_forward = [False] * n_ranks
    sending = [0] * n_ranks  # until when a blocking send holds the rank
    agenda = [(0, 0, 0)]  # time, number of the event, the operation that ends then, or n + the rank that has sent
    agenda.pop()
    events = 0
    left = n
    now = 0
    while True:
        for r in range(n_ranks):
            if working[r] or not asked[r]:
                continue
            asked[r] = False
            a_forward = n
            other = n
            weights = n
            for q in range(queues[r], queues[r + 1]):
                if count[q] == 0:
                    continue
                k = low[q]
                while waiting[members[k]] < 0:
                    k += 1
                low[q] = k
                while waiting[members[k]] != 0 and not in_order:
                    k += 1
                i = members[k]
                more = taken[group[i]]
                if waiting[i] > 0 or rows[i] > room[q] or (more > 0 and used[r] + more > may[r]):
                    continue
                if sort[q] == FORWARDS:
                    a_forward = min(a_forward, i)
                elif weights_last and sort[q] == WEIGHTS:
                    weights = min(weights, i)
                else:
                    other = min(other, i)
            i = pick(r, a_forward, other, n, alternate, after_forward[r])
            if i == n:
                i = weights
            if i == n:
                continue
            g = group[i]
            q = queue[i]
            waiting[i] = -1
            count[q] -= 1
            working[r] = True
            after_forward[r] = sort[q] == FORWARDS
            if rows[i] > 0:
                room[pool[i]] -= rows[i]
            used[r] += taken[g]
            peak[r] = max(peak[r], used[r])
            t = now + overhead
            starts[i] = t
            t += busy[g]
            ends[i] = t
            events += 1
            turn[i] = events
            heappush(agenda, (t, events, i))
        if len(agenda) == 0:
            return left
        now = agenda[0][0]
        while len(agenda) > 0 and agenda[0][0] == now:
            _, _, i = heappop(agenda)
            if i >= n:
                working[i - n] = False
                asked[i - n] = True
                continue
            left -= 1
            for k in range(first[i], first[i + 1]):
                j = after[k]
                waiting[j] -= 1
                if waiting[j] > 0:
                    continue
                r = rank[j]
                x = link[j]
                if x < 0:
                    count[queue[j]] += 1
                    asked[r] = True
                    continue
                g = group[j]
                m = base[x] + moved[x]
                t = now
                if posted[x] > 0 and moved[x] >= posted[x]:
                    t = max(t, there[m - posted[x]] + late[g])
                w = wire[x]
                t = max(t, free[w])
                starts[j] = t
                spent[w], t = leave(t, busy[g], quick[g], depth[x], spent[w])
                free[w] = t
                ends[j] = t + late[g]
                there[m] = ends[j]
                moved[x] += 1
                if blocks[x] > 0:
                    sending[r] = max(sending[r], t)
                waiting[j] = -1
                events += 1
                turn[j] = events
                heappush(agenda, (ends[j], events, j))
            if link[i] >= 0:
                continue
            r = rank[i]
            used[r] -= freed[group[i]]
            if rows[i] < 0:
                room[pool[i]] -= rows[i]
            if sending[r] > now:
                events += 1
                heappush(agenda, (sending[r], events, n + r))
            else:
                working[r] = False
                asked[r] = True


KERNEL = JitKernel(leave, pick, fixed, every, chosen, patience=1_000_000)


def load_kernel() -> str:
    """Load machine code now, for thousands of simulations to come; return "numba", or "python" where there is none."""
    return KERNEL.load()
