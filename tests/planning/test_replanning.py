"""Compare steps with a different duration for every operation with a longest path by hand and with the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, Instruction, Kind, Plan, PlanError, Program, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.planning.replanning import Replay, sends_of
from lightning_pipes.sim import makespan


def replay(name: str, stages: int, microbatches: int, batches: int, **settings: object) -> tuple[Replay, Plan]:
    schedule = make_schedule(name, **settings)
    assert isinstance(schedule, Schedule)
    plan = solve_plan(Problem(schedule, stages, microbatches * 2, microbatches))
    return Replay(schedule.program(plan), plan, batches), plan


def by_hand(forward: np.ndarray, backward: np.ndarray, link: float) -> float:
    """Return the end of 1F1B by definition.

    Stage s starts its n-th backward after p - s + n forwards. Messages are short, so links have no contention.
    """
    p, m = forward.shape
    done: dict[tuple[str, int, int], float] = {}
    rows = []
    for s in range(p):
        warm = min(p - 1 - s, m)
        row = [("F", n) for n in range(warm)]
        for n in range(m):
            row += ([("F", n + warm)] if n + warm < m else []) + [("B", n)]
        rows.append(row)
    free, at = [0.0] * p, [0] * p
    while any(at[s] < len(rows[s]) for s in range(p)):
        for s in range(p):
            while at[s] < len(rows[s]):
                kind, n = rows[s][at[s]]
                source = ("F", s - 1, n) if kind == "F" else ("B", s + 1, n)
                inside = 0 <= source[1] < p
                if inside and source not in done:
                    break
                start = max(free[s], done[source] + link if inside else 0.0)
                free[s] = done[kind, s, n] = start + (forward if kind == "F" else backward)[s, n]
                at[s] += 1
    return max(done.values())


def test_one_slow_operation_counts_where_it_is() -> None:
    rng = np.random.default_rng(1)
    p, m, batches, cases = 4, 6, 3, 2
    made, plan = replay("1f1b", p, m, batches)
    forward, backward = (rng.integers(1, 50, (p, cases, batches, m)) / 100 for _ in range(2))
    durations = {(Kind.F, s): forward[s] for s in range(p)} | {(Kind.B, s): backward[s] for s in range(p)}
    durations |= dict.fromkeys(sends_of(plan), np.full((1, 1, 1), 1e-4))
    found = made.step_seconds(durations)
    assert found.shape == (cases, batches)
    for case in range(cases):
        for batch in range(batches):
            expected = by_hand(forward[:, case, batch], backward[:, case, batch], 1e-4)
            assert found[case, batch] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble", "kfkb", "interleaved"])
def test_equal_durations_match_the_simulator(name: str) -> None:
    made, plan = replay(name, 4, 8, 2)
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    costs = CostModel.uniform(plan.n_stages, 0.1, 0.2, message_bytes=50, link=Link(bandwidth=1e4))
    ones = np.ones((1, 1, 1))
    kinds = {Kind.F: 0.1, Kind.B: 0.2, Kind.I: 0.1, Kind.W: 0.1}
    durations = {(kind, s): t * ones for kind, t in kinds.items() for s in range(plan.n_stages)}
    durations |= dict.fromkeys(sends_of(plan), 0.01 * ones)  # 2 rows of 50 bytes
    expected = makespan(schedule.program(plan), plan, costs) / 1e9
    assert made.step_seconds(durations).tolist() == [[pytest.approx(expected)] * 2]


def test_a_stream_is_timed_when_it_is_full() -> None:
    """Check that a stream is as fast as its slowest stage, without the time to fill the pipeline.

    The stages take 1, 2 and 1 seconds per batch.
    """
    made, _ = replay("pipedream", 3, 1, 5)
    each = np.array([1.0, 2.0, 1.0]) / 3
    durations = {
        (kind, s): np.full((1, 1, 1), t) for s in range(3) for kind, t in ((Kind.F, each[s]), (Kind.B, 2 * each[s]))
    }
    assert made.step_seconds(durations).tolist() == [[pytest.approx(2.0)]]
    durations[Kind.STEP, 1] = np.full((1, 1, 1), 0.5)
    assert made.step_seconds(durations).tolist() == [[pytest.approx(2.5)]]
    slow = np.ones((1, 5, 1)) / 3
    slow[0, 2, 0] += 6.0
    durations[Kind.F, 0] = slow  # once in five batches, all stages wait for it
    assert made.step_seconds(durations)[0, 0] > 2.5 + 0.8


def test_cases_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    for name in ("1f1b", "pipedream"):
        made, _ = replay(name, 2, 2, 3)
        durations = {(kind, s): rng.random((5, 3, 2)) for kind in (Kind.F, Kind.B) for s in range(2)}
        durations[Kind.STEP, 0] = np.full((1, 1, 1), 0.1)
        whole = made.step_seconds(durations)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_pipes.planning.replanning.MAX_DURATIONS_PER_CALL", 1)
            assert made.step_seconds(durations).tolist() == whole.tolist()


def test_stages_that_cut_a_batch_differently() -> None:
    """Check unequal micro-batches, as in UMPipe, against the simulator with the durations of single operations."""
    plan = Plan((0, 1), (Cut(4, ((Span(0, 2), Span(2, 4)), (Span(0, 4),))),))
    schedule = make_schedule("umpipe")
    assert isinstance(schedule, Schedule)
    program, rng = schedule.program(plan), np.random.default_rng(3)
    keys = [(kind, s) for kind in (Kind.F, Kind.B) for s in range(2)] + sends_of(plan)
    durations = {(kind, s): rng.integers(1, 90, (3, 2, len(plan.spans(kind, s)))) / 100 for kind, s in keys}
    found = Replay(program, plan, 2).step_seconds(durations)
    for case in range(3):
        for batch in range(2):
            each = {
                Instruction(kind, s, span=span): durations[kind, s][case, batch, n]
                for kind, s in keys
                for n, span in enumerate(plan.spans(kind, s))
            }
            costs = replace(CostModel.uniform(2, 0.0, 0.0), each=each)
            assert found[case, batch] == pytest.approx(makespan(program, plan, costs) / 1e9, abs=1e-8)


def test_several_jobs_are_refused() -> None:
    plan = Plan((0, 1), (Cut.even(2, 2, 2),) * 2)
    with pytest.raises(PlanError, match="has 2"):
        Replay(Program(((), ())), plan, 1)
