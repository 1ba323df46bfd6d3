"""The event loop of a stream of subnets in whole nanoseconds, run by Python or compiled by numba.

Subnet y on stage s has the number y * stages + s. Its micro-batch k has this number times `microbatches`, plus k.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from heapq import heappop, heappush

from lightning_pipes.sim.loops.jit import JitKernel

FORWARD, BACKWARD, LAYER = 1, 2, 3
"""The kinds of events.

These are the arrivals of an input, of a gradient and of a layer. The number 0 is the end of a task.
"""


def stream(shape, times, waits, rules, ran):
    """Run a stream and return the number of tasks that never ran.

    All events of one time are processed before any stage decides. Then the stages for which something has changed
    decide, in order.

    Args:
        shape: the numbers of subnets, stages and micro-batches.
        times: the forward, backward and weight gradient times of a micro-batch by subnet and stage, the time for which
            a message occupies its link, and its latency.
        waits: the arrays of `Waits`: the number of layers that each subnet waits for on each stage, the targets of
            layer updates, and their delays.
        rules: the largest distance between subnets in progress, the size of a bulk or 0, whether all forwards of a bulk
            run before its backwards, the number of micro-batches that each stage may hold, and whether the backward is
            split.
        ran: six arrays that the function fills with the starts and ends of each forward, of each backward, and of each
            weight gradient if the backward is split.
    """
    subnets, stages, microbatches = shape
    forward, backward, weights, busy, latency = times
    missing, first, target, delay = waits
    depth, bulk, forwards_first, most, split = rules
    starts_f, ends_f, starts_b, ends_b, starts_w, ends_w = ran
    here_f = [0] * (subnets * stages)  # arrived inputs
    here_b = [0] * (subnets * stages)  # arrived gradients
    ran_f = [0] * (subnets * stages)
    ran_b = [0] * (subnets * stages)
    ran_w = [0] * (subnets * stages)
    oldest = [0] * stages  # all earlier subnets have ended on the stage
    held = [0] * stages
    begun = [0] * stages  # started forwards
    doing = [-1] * stages  # the running task: 3 * its number + its kind
    changed = [True] * stages  # since the last decision of the stage
    free_f = [0] * stages  # the time at which the link to the next stage is free
    free_b = [0] * stages
    for y in range(subnets):
        here_f[y * stages] = microbatches
    agenda = [(0, 0, 0)]  # (time, order, 4 * number + kind)
    agenda.pop()
    left = (3 if split else 2) * subnets * stages * microbatches
    events = 0
    now = 0
    while True:
        for s in range(stages):
            if doing[s] >= 0 or not changed[s]:
                continue
            changed[s] = False
            until = (oldest[s] // bulk + 1) * bulk if bulk > 0 else oldest[s] + depth
            until = min(until, subnets)
            may_return = not forwards_first or begun[s] == until * microbatches
            chosen = -1
            a_forward = -1
            awaited = -1  # weight gradients that a later subnet waits for
            others = -1
            for y in range(oldest[s], until):
                i = y * stages + s
                if may_return and here_b[i] > ran_b[i]:
                    chosen = i
                    break
                if a_forward < 0 and here_f[i] > ran_f[i] and missing[i] == 0 and held[s] < most[s]:
                    a_forward = i
                if split and ran_b[i] > ran_w[i]:
                    if others < 0:
                        others = i
                    if awaited < 0 and ran_b[i] == microbatches:
                        for n in range(first[i], first[i + 1]):
                            if target[n] // stages < until:
                                awaited = i
            if awaited < 0 and a_forward < 0:
                awaited = others
            if chosen >= 0:
                k = chosen * microbatches + ran_b[chosen]
                doing[s] = 3 * k + 1
                starts_b[k] = now
                ends_b[k] = now + backward[chosen]
                t = ends_b[k]
            elif awaited >= 0:
                k = awaited * microbatches + ran_w[awaited]
                doing[s] = 3 * k + 2
                starts_w[k] = now
                ends_w[k] = now + weights[awaited]
                t = ends_w[k]
            elif a_forward >= 0:
                k = a_forward * microbatches + ran_f[a_forward]
                doing[s] = 3 * k
                held[s] += 1
                begun[s] += 1
                starts_f[k] = now
                ends_f[k] = now + forward[a_forward]
                t = ends_f[k]
            else:
                continue
            events += 1
            heappush(agenda, (t, events, 4 * s))
        if len(agenda) == 0:
            return left
        now = agenda[0][0]
        while len(agenda) > 0 and agenda[0][0] == now:
            _, _, event = heappop(agenda)
            what = event % 4
            i = event // 4
            if what == FORWARD:
                here_f[i] += 1
                changed[i % stages] = True
            elif what == BACKWARD:
                here_b[i] += 1
                changed[i % stages] = True
            elif what == LAYER:
                missing[i] -= 1
                changed[i % stages] = True
            else:
                s = i
                changed[s] = True
                k = doing[s] // 3
                kind = doing[s] % 3
                doing[s] = -1
                left -= 1
                i = k // microbatches
                if kind == 0:
                    ran_f[i] += 1
                    if s == stages - 1:
                        here_b[i] += 1
                    else:
                        free_f[s] = max(now, free_f[s]) + busy
                        events += 1
                        heappush(agenda, (free_f[s] + latency, events, 4 * (i + 1) + FORWARD))
                    continue
                if kind == 1:
                    ran_b[i] += 1
                    if s > 0:
                        free_b[s] = max(now, free_b[s]) + busy
                        events += 1
                        heappush(agenda, (free_b[s] + latency, events, 4 * (i - 1) + BACKWARD))
                    if split:
                        continue
                ran_w[i] += 1
                held[s] -= 1
                if ran_w[i] == microbatches:
                    for n in range(first[i], first[i + 1]):
                        if delay[n] == 0:
                            missing[target[n]] -= 1
                            changed[target[n] % stages] = True
                        else:
                            events += 1
                            heappush(agenda, (now + delay[n], events, 4 * target[n] + LAYER))
                    while oldest[s] < subnets and ran_w[oldest[s] * stages + s] == microbatches:
                        oldest[s] += 1


STREAM = JitKernel(stream, patience=100_000)
"""The compiled event loop. The patience is counted in tasks."""
