"""The inner loops of the simulator, on integer nanoseconds and plain sequences. `tables` describes the data structures.

The loops are written once and run in three ways, with the same integer results: in Python on lists; compiled by numba
on int64 arrays; and, for `run_fixed_order`, in Python on arrays that contain a row of numbers, one for each of many
costs, with `max` replaced by the function of numpy. They use only features that all three ways support. A loop unpacks
its structures before it begins, and the functions that it calls take only numbers, because numba would count references
to arrays at each call.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from heapq import heappop, heappush

from lightning_pipes.sim.loops.jit import JitKernel
from lightning_pipes.sim.loops.tables import PriceList

EARLIEST_TIME = -(1 << 62)
"""A time before all relevant times. A bucket that was last used at this time is full."""
OTHER_KIND, FORWARD_KIND, WEIGHT_KIND = range(3)  # types of queues
UNLIMITED = 1 << 62
"""A number that is larger than all numbers of samples and bytes."""


def compute_departure(start, busy, quick, depth, spent):
    """Return the time until which the rate of a wire is used up by a message, and the time when its last byte has left.

    A wire has a token bucket. It earns tokens at its rate, stores up to `depth` nanoseconds of them while it is idle,
    and sends at full speed as long as it has tokens. Without a bucket, `depth` is 0 and a message takes `busy`
    nanoseconds.

    Args:
        start: the time at which the message begins.
        busy: the duration of the message at the rate of the wire.
        quick: the duration of the message at full speed.
        depth: the size of the bucket.
        spent: the time until which the rate is used up by the previous message.
    """
    spent = max(spent, start - depth) + busy
    return spent, max(start + quick, spent)


# The order of each row is fixed. A message occupies a link for the same time as a forward occupies a rank.
# Drawn by `step(OneFOneB(), link=1)`:
# rank 0 |0-1-2-................0===3-1===......2===......3===| bubble 53.8%
# rank 1 |....0-1-........0===2-1===....3-2===......3===......| bubble 53.8%
# rank 2 |........0-0===1-1===....2-2===....3-3===............| bubble 53.8%
#         - forward  = backward  . idle
def run_fixed_order(work, prices, clock, wires, ran):
    """Compute the start and end of operations in a given order by the longest path, and write them to `ran`.

    The operations are listed in an order in which they can run. Each operation waits for its rank, for its link, and
    for the operations that are listed in `work`. All times in `clock` (r) must be 0 at the beginning.
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
            spent[w], t = compute_departure(t, busy[g], quick[g], depth[x], spent[w])
            free[w] = t
            ends[i] = t + late[g]
            there[m] = ends[i]
            moved[x] += 1
            if blocks[x] > 0:
                clock[r] = t


def run_many_costs(work, prices, clock, wires, ran, last):
    """Write the makespan of the same order under many costs to `last`.

    Each row of `prices.busy` and `prices.quick` contains the times of one case.
    """
    for c in range(len(last)):
        clock[:] = 0
        wires.free[:] = 0
        wires.spent[:] = EARLIEST_TIME
        wires.moved[:] = 0
        case = PriceList(
            prices.overhead, prices.busy[c], prices.quick[c],
            prices.late, prices.depth, prices.posted, prices.wire, prices.blocks, prices.base,
        )  # fmt: skip
        run_fixed_order(work, case, clock, wires, ran)
        latest = 0
        for end in ran.ends:
            latest = max(latest, end)
        last[c] = latest


def pick_operation(rank, forward, other, nothing, alternate, after_forward):
    """Return the next operation of a rank according to a rule (see `ir.Rule`).

    `forward` and `other` are the first forward and the first other operation that the rank may run. `nothing` means
    that there is no such operation.
    """
    if other == nothing or (alternate and forward != nothing and not after_forward):
        return forward
    return other


# The same links, with ranks that run ready operations within limits of the samples that they hold.
# Drawn by `step(Ready(), link=1)`:
# rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
# rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
# rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
#         - forward  = backward  . idle
def run_chosen_order(work, standing, ready, prices, needed, held, wires, ran, turn, alternate, weights_last, in_order):
    """Run operations in an order that is decided as they become ready, and return the number that never ran.

    The results are written to `ran`, `held` and `turn` (i). Operations of a rank that start and end at the same times
    ran in the order of their turns.

    An operation waits for the operations that hold it up. A queue offers its first member that is ready or, with
    `in_order`, only its next member. If this operation does not fit, no later operation of the queue is offered. Among
    the offered operations, the one with the smallest number comes first. With `alternate`, a forward follows an
    operation that is not a forward, see `pick_operation`. With `weights_last`, weight gradients run only if nothing
    else can run.

    All events of one instant are processed before any rank picks its next operation. Ranks pick in order, and messages
    leave in the order in which they become complete.
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
    sending = [0] * n_ranks  # the time until which a blocking send holds the rank
    agenda = [(0, 0, 0)]  # time, number of the event, and the operation that ends, or n + the rank whose send has ended
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
                if sort[q] == FORWARD_KIND:
                    a_forward = min(a_forward, i)
                elif weights_last and sort[q] == WEIGHT_KIND:
                    weights = min(weights, i)
                else:
                    other = min(other, i)
            i = pick_operation(r, a_forward, other, n, alternate, after_forward[r])
            if i == n:
                i = weights
            if i == n:
                continue
            g = group[i]
            q = queue[i]
            waiting[i] = -1
            count[q] -= 1
            working[r] = True
            after_forward[r] = sort[q] == FORWARD_KIND
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
                spent[w], t = compute_departure(t, busy[g], quick[g], depth[x], spent[w])
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


SIMULATION_KERNELS = JitKernel(
    compute_departure, pick_operation, run_fixed_order, run_many_costs, run_chosen_order, patience=1_000_000
)


def load_kernel() -> str:
    """Load the compiled loops now, for thousands of simulations that follow.

    Return "numba", or "python" if numba is not available.
    """
    return SIMULATION_KERNELS.load()
