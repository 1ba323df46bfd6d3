"""The order without rounds, beside the simulator and by hand."""

import random
from time import process_time

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, Kind, PlanError, Program, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap import Job, Stream, tuned
from lightning_pipes.strategies.jap.generator import batch_sizes, random_costs
from lightning_pipes.strategies.jap.stream import _Running
from lightning_pipes.strategies.jap.tuning import batch_time

SAMPLES = 384


def even(number, rows, stages, batches, microbatches=1, **more):
    return Job(number, Cut.even(rows, microbatches, stages), batches, **more)


def odd_costs(stages, seed):
    """Whole nanoseconds with everything that a `CostModel` has: slow links, latency, steps, overhead."""
    rng = random.Random(seed)
    seconds = {}
    for s in range(stages):
        for kind in (Kind.F, Kind.B, Kind.SF, Kind.SB):
            once, each = rng.randrange(1, 9), rng.randrange(1, 9)
            seconds[kind, s] = ((1, (once + each) * 1e-9), (1001, (once + 1001 * each) * 1e-9))
        seconds[Kind.STEP, s] = ((0, rng.randrange(5) * 1e-9),)
    return CostModel(seconds, link=Link(latency=rng.randrange(6) * 1e-9), overhead=rng.randrange(3) * 1e-9)


def whole(stream, answer=lambda job: None):
    """All pieces as one program; `answer` says what a job that is asked does, None for leaving."""
    rows = [[] for _ in range(stream.stages)]
    asked = []
    while True:
        piece = stream.advance()
        for row, part in zip(rows, piece.rows, strict=True):
            row += part
        if piece.asked is None:
            return Program(tuple(map(tuple, rows))), asked, piece.time
        asked.append((piece.time, piece.asked))
        more = answer(piece.asked)
        if more is None:
            stream.leave(piece.asked)
        else:
            stream.extend(piece.asked, *more)


@pytest.mark.parametrize("backward_first", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_simulator_gives_the_same_times(seed, backward_first):
    """The stream looks at each stage as if nobody else decided; replayed in this order everything takes as long."""
    rng = random.Random(seed)
    stages, resident = rng.randint(1, 5), rng.randint(1, 4)
    costs = odd_costs(stages, seed)
    stream = Stream(stages, costs, resident, backward_first=backward_first)
    for number in range(rng.randint(1, 7)):
        stream.admit(even(number, rng.randint(1, 6), stages, rng.randint(1, 5), rng.randint(1, 3)))
    program, _, time = whole(stream)
    verify(program, stream.plan)
    timeline = simulate(program, stream.plan, costs)
    assert timeline.makespan == time
    if resident > 1:
        for stage in range(stages):  # nobody idles while something is ready, so no delay was put in
            assert timeline.busy[stage] <= time


def test_small_order():
    """Two jobs, f = 1 and b = 2 each, backwards first; updates come right after their backward."""
    stream = Stream(2, CostModel.uniform(2, 1e-9, 2e-9), 2, backward_first=True)
    for number in range(2):
        stream.admit(even(number, 1, 2, 2))
    program, _, time = whole(stream)
    assert program.lines() == [
        "F0.0 j1:F0.0 B0.0 STEP0 F0.0@1 j1:B0.0 j1:STEP0 j1:F0.0@1 B0.0@1 STEP0@1 j1:B0.0@1 j1:STEP0@1",
        "F1.0 B1.0 STEP1 j1:F1.0 j1:B1.0 j1:STEP1 F1.0@1 B1.0@1 STEP1@1 j1:F1.0@1 j1:B1.0@1 j1:STEP1@1",
    ]
    assert time == 15


def test_the_longest_waiting_job_takes_a_free_place_at_once():
    costs = CostModel.uniform(2, 1e-9, 2e-9, rows=1)
    stream = Stream(2, costs, 2)
    for number, batches in enumerate((2, 1, 3, 5)):
        stream.admit(even(number, 1, 2, batches))
    assert stream.waiting == (3, 2, 0, 1)
    program, _, _ = whole(stream)
    row = [i for i in program.head[0] if i.kind is not Kind.B]
    first = {job: min(n for n, i in enumerate(row) if i.job == job) for job in range(4)}
    assert sorted(first, key=first.get) == [3, 2, 0, 1]
    ends = max(n for n, i in enumerate(row) if i.job == 2)
    assert next(i.job for i in row[ends + 1 :] if i.kind is Kind.F) == 0


@pytest.mark.parametrize("promise", [1, 2, 3])
def test_what_jobs_promise_changes_no_order(promise):
    """Asked after every batch or never: the same order, and questions come in the order of virtual time."""
    costs, jobs = random_costs(3, seed=1), {0: (8, 6), 1: (16, 3), 2: (24, 4), 3: (8, 5)}
    told = Stream(3, costs, 2)
    asked = Stream(3, costs, 2)
    for number, (rows, batches) in jobs.items():
        told.admit(even(number, rows, 3, batches))
        asked.admit(even(number, rows, 3, min(promise, batches), more=True, expected=batches))
    left = {number: batches - min(promise, batches) for number, (_, batches) in jobs.items()}

    def answer(number):
        more = min(promise, left[number])
        left[number] -= more
        return (more,) if more else None

    program, questions, time = whole(asked, answer)
    assert (program, time) == (whole(told)[0], time)
    assert questions == sorted(questions)
    assert simulate(program, asked.plan, costs).makespan == time


def test_a_trial_that_is_asked_for_takes_the_place_at_that_instant():
    """As a study does: a job leaves, and the next one is admitted while it is asked."""
    costs = random_costs(4, seed=2)
    known, found = Stream(4, costs, 3), Stream(4, costs, 3)
    for number in range(3):
        known.admit(even(number, 8, 4, 4 + number))
        found.admit(even(number, 8, 4, 4 + number, more=True))
    for number in range(3, 6):
        known.admit(even(number, 8, 4, 3))
    fresh = iter(range(3, 6))

    def answer(_):
        number = next(fresh, None)
        if number is not None:
            found.admit(even(number, 8, 4, 3))

    program, questions, time = whole(found, answer)
    assert [job for _, job in questions] == [0, 1, 2]
    reference, _, same = whole(known)
    assert (program, time) == (reference, same)


def test_cut_short():
    """A job that fails ends with its batch; one that waits never begins; the others are not disturbed."""
    costs = random_costs(2, seed=3)
    stream = Stream(2, costs, 2)
    stream.admit(even(0, 8, 2, 4, more=True))
    stream.admit(even(1, 8, 2, 9))
    stream.admit(even(2, 8, 2, 3))
    assert stream.advance().asked == 0
    assert set(stream.running) == {0, 1}
    stream.cut_short(1)
    stream.cut_short(2)
    stream.leave(0)
    piece = stream.advance()
    assert piece.asked is None
    assert not stream.running
    assert not stream.waiting
    assert {i.job for row in piece.rows for i in row} <= {1}
    assert sum(i.kind is Kind.F for i in piece.rows[0]) <= 1  # of the batch that was begun
    with pytest.raises(PlanError, match="job 2 neither runs nor waits"):
        stream.cut_short(2)
    stream.admit(even(3, 8, 2, 1, more=True))  # and goes on
    assert stream.advance().asked == 3
    stream.cut_short(3)
    assert stream.advance() == (((), ()), None, stream.now)


def test_other_costs_from_a_question_on():
    slow, fast = CostModel.uniform(1, 2e-9, 2e-9), CostModel.uniform(1, 1e-9, 1e-9)
    stream = Stream(1, slow, 1)
    stream.admit(even(0, 1, 1, 1, more=True))
    assert stream.advance().time == 4
    stream.retime(fast)
    stream.extend(0, 3, more=False)
    assert stream.advance().time == 4 + 3 * 2


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda s: s.admit(even(3, 1, 2, 1)), "number 1"),
        (lambda s: s.admit(even(1, 1, 3, 1)), "cut for 2 stages"),
        (lambda s: s.leave(0), "was not asked"),
        (lambda s: s.extend(0, 1), "was not asked"),
        (lambda s: (s.advance(), s.advance()), "extend it, or let it leave"),
        (lambda s: (s.advance(), s.extend(0, 0)), "batches must be at least 1"),
        (lambda s: even(1, 1, 2, 0), "batches must be at least 1"),
        (lambda s: Stream(0, CostModel.uniform(1, 1, 1), 1), "stages must be at least 1"),
        (lambda s: Stream(1, CostModel.uniform(1, 1, 1), 0), "resident jobs must be at least 1"),
        (lambda s: Job(1, Cut(2, (Cut.even(2, 1, 1).forward[0], Cut.even(2, 2, 1).forward[0])), 1), "same spans"),
    ],
)
def test_refused(mistake, says):
    stream = Stream(2, CostModel.uniform(2, 1, 1), 1)
    stream.admit(even(0, 1, 2, 1, more=True))
    with pytest.raises(PlanError, match=says):
        mistake(stream)


def epoch(stages, resident, imbalance, setup=None):
    """An epoch of the paper's grid of 64 jobs, over the work of the stage that has most."""
    costs = random_costs(stages, imbalance=imbalance, seed=1)
    sizes = batch_sizes(64).tolist()
    chosen = setup and tuned(stages, costs, resident, sizes)
    stream = Stream(stages, costs, resident, backward_first=bool(chosen and chosen.backward_first))
    work = [0] * stages
    for number, rows in enumerate(sizes):
        cut = Cut.even(rows, chosen.microbatches[rows] if chosen else 1, stages)
        stream.admit(Job(number, cut, SAMPLES // rows))
        one = _Running(even(number, rows, stages, 1), stream.plan, costs)
        for s in range(stages):
            work[s] += (SAMPLES // rows) * (one.blocks[0][s][0] + one.blocks[1][s][0] + one.update[s])
    return stream.advance().time / max(work)


@pytest.mark.parametrize(("imbalance", "most"), [(0, 1.02), (0.4, 1.03)])
def test_as_many_jobs_as_stages_fill_the_pipeline(imbalance, most):
    assert 1 <= epoch(8, 8, imbalance) <= most


@pytest.mark.parametrize("imbalance", [0, 0.4])
def test_half_as_many_with_micro_batches(imbalance):
    """Cut batches cost more: 1.20 of 1.40 is that."""
    assert epoch(8, 4, imbalance, setup=True) <= 1.40
    assert epoch(8, 4, imbalance) > 1.55


def test_tuned_is_the_best_of_what_it_tries():
    costs = random_costs(4, seed=5)
    setup = tuned(4, costs, 2, [8, 32, 1])
    assert setup.microbatches[1] == 1
    times = {m: batch_time(4, costs, 2, Cut.even(32, m, 4), setup.backward_first) for m in (2, 3, 4)}
    assert setup.microbatches[32] == min(times, key=times.get)
    assert tuned(4, costs, 4, [8]).microbatches == {8: 1}


def test_coming_and_going_takes_milliseconds():
    """64 jobs on 8 stages: one leaves, another comes, and the next 64 batches are ordered."""
    costs = random_costs(8)
    stream = Stream(8, costs, 64)
    for number in range(64):
        stream.admit(even(number, 8, 8, 1, more=True))
    took = []
    for number in range(64, 128):
        piece = stream.advance()
        start = process_time()
        stream.leave(piece.asked)
        stream.admit(even(number, 8, 8, 1, more=True))
        stream.advance()
        took.append(process_time() - start)
        stream.extend(stream._asked, 1)
    assert min(took) < 0.05
