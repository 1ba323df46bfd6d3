"""A simple simulation of a stream of subnets.

At every instant at which a task ends, all conditions are evaluated again from the start.
"""

from __future__ import annotations

from benchmarks.papers.csp.emulation.spaces import Placed
from benchmarks.papers.csp.emulation.stream import Rules


def by_hand(placed: Placed, rules: Rules) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    """Return the start and the end of each task.

    A task is "F", "B" (input gradients if backwards are split) or "W", with its subnet, stage and micro-batch.
    """
    n, stages, m = len(placed.subnets), placed.stages, rules.microbatches
    ran: dict[tuple[str, int, int, int], tuple[int, int]] = {}
    # the time at which the input of a task from another stage arrives
    arrived: dict[tuple[str, int, int, int], int] = {}
    link = {(kind, s): 0 for kind in "FB" for s in range(stages)}
    free = [0] * stages
    last = "W" if rules.split else "B"
    whole = placed.backward // m
    took = {"F": placed.forward // m, "B": whole - whole // 2 if rules.split else whole, "W": whole // 2}
    sent: set[tuple[str, int, int, int]] = set()

    def over(kind: str, y: int, s: int, now: int) -> bool:
        return all((kind, y, s, k) in ran and ran[kind, y, s, k][1] <= now for k in range(m))

    def layers_are_there(y: int, s: int, now: int) -> bool:
        for b in range(placed.subnets.blocks):
            if placed.stage_of[y, b] != s:
                continue
            users = [x for x in range(y) if placed.subnets.choices[x, b] == placed.subnets.choices[y, b]]
            if users and rules.checks:
                x, at = users[-1], int(placed.stage_of[users[-1], b])
                if not over(last, x, at, now):
                    return False
                moving = 0 if at == s else rules.moving * int(placed.subnets.swap[x, b])
                if max(ran[last, x, at, k][1] for k in range(m)) + moving > now:
                    return False
        return True

    def may_enter(y: int, s: int, now: int) -> bool:
        oldest = next((x for x in range(n) if not over(last, x, s, now)), n)
        return y // rules.bulk == oldest // rules.bulk if rules.bulk else y < oldest + rules.depth

    def ready(kind: str, y: int, s: int, k: int, now: int) -> bool:
        if (kind, y, s, k) in ran:
            return False
        if kind == "F":
            held = sum(1 for x in range(n) for j in range(m) if ("F", x, s, j) in ran) - sum(
                1 for x in range(n) for j in range(m) if (last, x, s, j) in ran and ran[last, x, s, j][1] <= now
            )
            if rules.held and held >= rules.held[s]:
                return False
            come = s == 0 or arrived.get(("F", y, s, k), now + 1) <= now
            return come and may_enter(y, s, now) and layers_are_there(y, s, now)
        if kind == "W":
            return ("B", y, s, k) in ran and ran["B", y, s, k][1] <= now
        bulk = range(y // rules.bulk * rules.bulk, min(n, (y // rules.bulk + 1) * rules.bulk)) if rules.bulk else ()
        if rules.forwards_first and not all(over("F", x, s, now) for x in bulk):
            return False
        if s == stages - 1:
            return ("F", y, s, k) in ran and ran["F", y, s, k][1] <= now
        return arrived.get(("B", y, s, k), now + 1) <= now

    def awaited(y: int, s: int, now: int) -> bool:
        """Return whether a later subnet that may enter waits for the layers and only weight gradients are left."""
        later = [x for x in range(y + 1, n) if rules.checks and may_enter(x, s, now)]
        own = [b for b in range(placed.subnets.blocks) if placed.stage_of[y, b] == s]
        return over("B", y, s, now) and any(
            placed.subnets.choices[x, b] == placed.subnets.choices[y, b] for x in later for b in own
        )

    now = 0
    instants = {0}
    while True:
        for task, (_, end) in sorted(ran.items(), key=lambda each: each[1][1]):
            kind, y, s, k = task
            to = s + 1 if kind == "F" else s - 1
            if end <= now and task not in sent:
                sent.add(task)
                if 0 <= to < stages and kind != "W":
                    link[kind, s] = max(link[kind, s], end) + rules.message // m
                    arrived[kind, y, to, k] = link[kind, s] + rules.latency
                    instants.add(arrived[kind, y, to, k])
        for s in range(stages):
            if free[s] > now:
                continue
            found = {kind: [(y, k) for y in range(n) for k in range(m) if ready(kind, y, s, k, now)] for kind in "BFW"}
            if not rules.split:
                found["W"] = []
            first = [("W", *task) for task in found["W"] if awaited(task[0], s, now)]
            tasks = (
                [("B", *task) for task in found["B"]] + first + [(kind, *task) for kind in "FW" for task in found[kind]]
            )
            for kind, y, k in tasks[:1]:
                free[s] = now + int(took[kind][y, s]) + rules.overhead
                ran[kind, y, s, k] = (now, free[s])
                instants.add(free[s])
                if kind == last:  # its layers may move to other stages
                    instants |= {free[s] + rules.moving * int(x) for x in placed.subnets.swap[y]}
        later = [t for t in instants if t > now]
        if not later:
            return ran
        now = min(later)
