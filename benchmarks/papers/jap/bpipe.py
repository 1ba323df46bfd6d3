"""BPipe, which ArrayPipe is compared with: 1F1B whose first stages lend activations to its last ones (Kim et al. 2023).

Stage s of S, counted from 1, would hold S + 1 - s micro-batches; one that would hold more than ceil((S + 2) / 2) sends
the surplus to stage S + 1 - s, which holds few, and fetches each before its backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_pipes.strategies.jap.problem import Array, ArrayProblem

Op = tuple[str, int, int]
"""What, micro-batch, stage: F and B compute, OUT lends an activation, IN fetches it back."""
Lane = tuple[str, int]
"""What runs one operation at a time: "" and a stage, or a direction of its pair."""


def most_held(stages: int) -> int:
    """Activations that a stage holds at most, its own and those that it keeps for another."""
    return -(-(stages + 2) // 2)


@dataclass(frozen=True)
class BPipe:
    """What ran when, in nanoseconds.

    Attributes:
        starts, ends: of every operation.
    """

    starts: Mapping[Op, int]
    ends: Mapping[Op, int]

    @property
    def makespan(self) -> int:
        """Until the last backward of stage 0 has ended, with its update."""
        return max(end for (what, _, s), end in self.ends.items() if what == "B" and s == 0)


def bpipe(problem: ArrayProblem, moving: Array) -> BPipe:
    """When all runs if the problem's jobs are micro-batches of one batch, or batches of siblings.

    A stage keeps the oldest activations, for they are needed first; a new one is lent while the next backward runs, and
    the oldest lent one comes back as soon as a backward has made room. Neither stops a stage from computing, but what
    needs its place or its data waits. Each direction of a pair moves one activation at a time.

    Args:
        moving: nanoseconds that an activation takes to the partner or back, by micro-batch, then by stage.
    """
    jobs, stages = problem.jobs, problem.stages
    lanes: dict[Lane, list[Op]] = {}
    needs: dict[Op, list[Op]] = {}
    for s in range(stages):
        held = min(jobs, stages - s)
        kept = most_held(stages) - 1 if held > most_held(stages) else held  # one more place is for what moves
        row = lanes["", s] = one_forward_one_backward(jobs, stages, s)
        out = lanes["OUT", s] = list[Op]()
        back = lanes["IN", s] = list[Op]()
        here: list[int] = []
        lent: list[int] = []
        for op in row:
            what, n, _ = op
            wants = needs.setdefault(op, [])
            if what == "F":
                wants += out[-1:]  # its place is what the last one leaves
                here.append(n)
                if len(here) > kept:
                    lent.append(here.pop())
                    needs["OUT", n, s] = [op, *back[-1:]]  # into the place of what came back
                    out.append(("OUT", n, s))
                continue
            here.remove(n)
            if lent:
                first = lent.pop(0)
                here = sorted([*here, first])
                needs["IN", first, s] = [op, ("OUT", first, s)]
                needs.setdefault(("B", first, s), []).append(("IN", first, s))
                back.append(("IN", first, s))
    return _timed(problem, moving, lanes, needs)


def one_forward_one_backward(jobs: int, stages: int, stage: int) -> list[Op]:
    """The order of a stage."""
    warm = min(stages - stage, jobs)
    row: list[Op] = [("F", n, stage) for n in range(warm)]
    for n in range(jobs):
        row.append(("B", n, stage))
        if warm + n < jobs:
            row.append(("F", warm + n, stage))
    return row


def _timed(problem: ArrayProblem, moving: Array, lanes: Mapping[Lane, list[Op]], needs: Mapping[Op, list[Op]]) -> BPipe:
    """Every lane runs its operations in order, each as early as its data and its needs allow."""
    (forward, backward), (there, home) = problem.occupied, problem.lags
    takes = {"F": forward, "B": backward, "OUT": moving, "IN": moving}
    starts: dict[Op, int] = {}
    ends: dict[Op, int] = {}

    def arrived(op: Op) -> int | None:
        """When its data is there; None if that is not known yet."""
        what, n, s = op
        lags, before = (home, ("B", n, s + 1)) if what == "B" else (there, ("F", n, s - 1))
        if what == "B" and s == problem.stages - 1:
            lags, before = there, ("F", n, s)
        if before[2] < 0 or what in ("OUT", "IN"):
            return 0
        return starts[before] + int(lags[n, before[2]]) if before in starts else None

    at, free = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0)
    waiting = deque(lanes)
    idle = 0
    while idle < len(waiting):
        lane = waiting[0]
        waiting.rotate(-1)
        idle += 1
        while at[lane] < len(lanes[lane]):
            op = lanes[lane][at[lane]]
            there_at, wants = arrived(op), needs.get(op, [])
            if there_at is None or any(each not in ends for each in wants):
                break
            starts[op] = max([free[lane], there_at, *(ends[each] for each in wants)])
            ends[op] = free[lane] = starts[op] + int(takes[op[0]][op[1:]])
            at[lane] += 1
            idle = 0
    assert all(at[lane] == len(row) for lane, row in lanes.items()), "stages wait for each other"
    return BPipe(starts, ends)
