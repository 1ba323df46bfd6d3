"""Whether an array gains by several stages a rank, simulated: siblings, who came first first, on ranks that have one,
two or four stages each, with the best number of micro-batches.

A stage's forward takes a fixed time and one of each sample, its backward twice that; the stages of a rank share its
layers, and its fixed time. Messages take nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush

from benchmarks.harness.report import Output
from lightning_pipes.ir import even_spans

RANKS, BATCHES = 8, 16
ROWS = (8, 16, 24, 32)
MICROBATCHES = (1, 2, 3, 4, 6, 8)


def over_work(stages_per_rank: int, rows: list[int], microbatches: int, fixed: float) -> float:
    """The time that siblings with batches of `rows` take, over what a rank computes if batches are whole."""
    stages = RANKS * stages_per_rank
    cuts = [[span.rows for span in even_spans(each, min(microbatches, each))] for each in rows]
    ready: list[list[tuple[int, bool, int, int, int]]] = [[] for _ in range(RANKS)]
    idle, events = [True] * RANKS, list[tuple[float, int, int, tuple[bool, int, int, int]]]()
    batches, left = [BATCHES] * len(rows), [len(cut) for cut in cuts]
    turn, now = 0, 0.0

    def arrive(back: bool, stage: int, job: int, part: int) -> None:
        nonlocal turn
        turn += 1
        heappush(ready[stage % RANKS], (turn, back, stage, job, part))

    for job, cut in enumerate(cuts):
        for part in range(len(cut)):
            arrive(False, 0, job, part)
    while True:
        for rank in range(RANKS):
            if idle[rank] and ready[rank]:
                came, back, stage, job, part = heappop(ready[rank])
                idle[rank] = False
                end = now + (2 if back else 1) * (fixed + cuts[job][part]) / stages_per_rank
                heappush(events, (end, came, rank, (back, stage, job, part)))
        if not events:
            return now / (BATCHES * sum(3 * (fixed + each) for each in rows))
        now, _, rank, (back, stage, job, part) = heappop(events)
        idle[rank] = True
        if not back:
            arrive(stage + 1 == stages, min(stage + 1, stages - 1), job, part)
        elif stage:
            arrive(True, stage - 1, job, part)
        else:
            left[job] -= 1
            batches[job] -= not left[job]
            if not left[job] and batches[job]:
                left[job] = len(cuts[job])
                for again in range(left[job]):
                    arrive(False, 0, job, again)


def stages() -> Output:
    """Yield a table by the number of siblings, the fixed time of a block, and the stages of a rank."""
    yield f"{RANKS} ranks, batches of {ROWS} in turn: time over work, by what a block costs besides in samples' worth\n"
    yield (
        f"{'siblings':>10}"
        + "".join(f"{f'cost {fixed:g}, {v} a rank':>20}" for fixed in (0.5, 2, 4) for v in (1, 2, 4))
    )
    for siblings in (2, 4, 6, 8, 12, 16):
        rows = [ROWS[n % len(ROWS)] for n in range(siblings)]
        cells = [min(over_work(v, rows, m, fixed) for m in MICROBATCHES) for fixed in (0.5, 2, 4) for v in (1, 2, 4)]
        yield f"{siblings:>10}" + "".join(f"{cell:20.2f}" for cell in cells)
