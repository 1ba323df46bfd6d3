from dataclasses import replace

import pytest

from lightning_pipes.ir import B, F, Instruction, Kind, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestKFKB(ScheduleConformance):
    schedules = [KFKB(k=1), KFKB(k=2), KFKB(k=3), KFKB(k=64)]
    refused = [
        lambda: KFKB(k=0),
        lambda: KFKB(k=-1),
        lambda: KFKB().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
    ]

    def most_held(self, schedule, plan, stage):
        return min(schedule.k * (plan.n_stages - stage), len(plan.jobs[0].forward[0]))


def test_small_order():
    program = KFKB(k=2).program(tiny_plan(stages=2, microbatches=4))
    assert program.to_lines() == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 STEP0",
        "F1.0 F1.1 B1.0 B1.1 F1.2 F1.3 B1.2 B1.3 STEP1",
    ]


@for_each("m", [1, 3, 4, 9])
@for_each("p", [1, 2, 4])
def test_its_ends_are_1f1b_and_gpipe(p, m):
    plan = tiny_plan(p, m)
    assert KFKB(k=1).program(plan).to_lines() == OneFOneB().program(plan).to_lines()
    for k in (m, m + 1, 100):
        assert KFKB(k=k).program(plan).to_lines() == GPipe().program(plan).to_lines()


def merged_copies(p, stage, m, k):
    """Return the order of section 5.4 for one stage: k copies of 1F1B, merged entry by entry.

    Copy c runs the micro-batches c, c + k, and so on.
    """
    copies = []
    for c in range(k):
        mine = list(range(c, m, k))
        warmup = min(p - 1 - stage, len(mine))
        steady = [(kind, n) for f, b in zip(mine[warmup:], mine, strict=False) for kind, n in ((F, f), (B, b))]
        copies.append([(F, n) for n in mine[:warmup]] + steady + [(B, n) for n in mine[len(mine) - warmup :]])
    return [copy[at] for at in range(max(map(len, copies))) for copy in copies if at < len(copy)]


@for_each("k", [1, 2, 3, 4])
@for_each(("p", "m"), [(2, 12), (4, 12), (4, 24), (3, 12)])
def test_equals_the_papers_merge_of_k_copies(p, m, k):
    plan = tiny_plan(p, m)
    program = KFKB(k=k).program(plan)
    spans = plan.spans(Kind.F, 0)
    for stage in range(p):
        wanted = [kind(stage, spans[n]) for kind, n in merged_copies(p, stage, m, k)]
        assert list(program.head[stage][:-1]) == wanted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_holds_k_microbatches_per_later_stage(k):
    plan = tiny_plan(4, 24)
    assert verify(KFKB(k=k).program(plan), plan).peak_spans == tuple(k * (4 - s) for s in range(4))


def by_hand(k, m, f, b, c):
    """Return the makespan of two stages, computed step by step from the rules of figure 2 without the simulator."""
    f_end, b_end, sent, back = {}, {}, {}, {}
    orders = [[(i.kind, i.span.start) for i in row[:-1]] for row in KFKB(k=k).program(tiny_plan(2, m)).head]
    at, clock, link = [0, 0], [0, 0], [0, 0]
    while at[0] < len(orders[0]) or at[1] < len(orders[1]):
        for s in (0, 1):
            while at[s] < len(orders[s]):
                kind, n = orders[s][at[s]]
                inputs = {(0, Kind.F): {n: 0}, (1, Kind.F): sent, (1, Kind.B): f_end, (0, Kind.B): back}[s, kind]
                if n not in inputs:
                    break
                end = max(clock[s], inputs[n]) + (f if kind is Kind.F else b)
                clock[s] = end
                at[s] += 1
                if (s, kind) == (0, Kind.F):
                    link[0] = sent[n] = max(end, link[0]) + c
                elif (s, kind) == (1, Kind.F):
                    f_end[n] = end
                elif (s, kind) == (1, Kind.B):
                    link[1] = back[n] = max(end, link[1]) + c
                else:
                    b_end[n] = end
    return max(b_end.values())


@for_each("k", [1, 2, 3, 6])
@for_each("c", [0, 1, 2, 5])
def test_two_stages_against_times_by_hand(k, c):
    plan, costs = uniform(2, 6, f=2, b=4, link=c)
    assert simulate(KFKB(k=k).program(plan), plan, costs).makespan == by_hand(k, 6, 2, 4, c)


def test_figure_2():
    """Check the starts and the makespans of figure 2, with two stages and four micro-batches.

    The times are F = 2, B = 2F = 4, and F / 2 = 1 for a transfer. In 1F1B, every pair of the steady phase waits for a
    round trip of two transfers. 2F2B hides these waits.
    """
    plan, costs = uniform(stages=2, microbatches=4, f=2, b=4, link=1)
    one = simulate(KFKB(k=1).program(plan), plan, costs)
    two = simulate(KFKB(k=2).program(plan), plan, costs)
    # 1F1B, rank 1: F0 3-5, B0 5-9, F1 9-11, B1 11-15; rank 0: B0 10-14, F2 14-16, B1 16-20, F3 20-22, B2 ...
    starts = {e.instruction: e.start for e in one.computations}
    spans = plan.spans(Kind.F, 0)
    assert [starts[B(0, spans[n])] for n in range(4)] == [10, 16, 24, 30]
    assert [starts[F(1, spans[n])] for n in range(4)] == [3, 9, 17, 23]
    assert one.makespan == 34
    assert two.makespan == 32  # 30 without transfers: only the first and the last transfer lengthen the step
    assert uniform_without_links(2, 4) == 30


def uniform_without_links(p, m):
    plan, costs = uniform(p, m, f=2, b=4)
    return simulate(KFKB(k=1).program(plan), plan, costs).makespan


def test_blocking_sends_undo_the_gain():
    """Check that a larger k does not help if a send blocks the computation."""
    plan, costs = uniform(stages=4, microbatches=12, f=4, b=8, link=2)
    free = [simulate(KFKB(k=k).program(plan), plan, costs).makespan for k in (1, 2)]
    blocking = replace(costs, regime="blocking")
    blocked = [simulate(KFKB(k=k).program(plan), plan, blocking).makespan for k in (1, 2)]
    assert free[1] < free[0]
    assert blocked[1] > free[1]
    assert blocked[0] - free[0] < blocked[1] - free[1]


def test_step_comes_last_on_every_rank():
    plan = tiny_plan(3, 4)
    assert [row[-1] for row in KFKB(k=2).program(plan).head] == [Instruction(Kind.STEP, s) for s in range(3)]
