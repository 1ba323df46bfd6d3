"""Tests that siblings in one pipeline give the same results as alone, whatever happens to other siblings."""

from __future__ import annotations

import signal
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.arrivals import Arrivals, order_first_batches
from lightning_pipes.arrays.memory_swap import MemorySwap, SiblingMemory
from lightning_pipes.arrays.siblings.sibling import ArrayCancelledError, Sibling, current_sibling
from lightning_pipes.arrays.siblings.sibling_board import SiblingFailure
from lightning_pipes.cost import Costs
from lightning_pipes.cost.layer import at_rows
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import B, F, Kind, PipelineError, Plan, PlanError, Program, Schedule, Span
from lightning_pipes.strategies.jap import round_order
from lightning_pipes.strategies.umpipe import UM1F1B, UMPipe
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from lightning_pipes.trainer.plan import layer_profiler
from lightning_pipes.trainer.plan.decider import _profiles
from tests.arrays.jobs import EXCEPTIONS, LAST, UNEQUAL, Job, Net, assert_equal, told_text
from tests.trainer.lit import quiet
from tests.trainers import make_trainer


def array_and_alone(rank: int, jobs: list[Job], size: int) -> tuple[list[Any], list[Any]]:
    """Return the outcomes of jobs in one array, in the order of their ends, and of each job in its own array."""
    quiet()
    together = [(o.index, o.value, told_text(o.error)) for o in JobArray(size).run(jobs)]
    alone = [outcome.value for job in jobs if not job.harm for outcome in JobArray(size).run([job])]
    return together, alone


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_siblings_are_what_they_are_alone(ranks: int, tmp_path: Path) -> None:
    """Check siblings with dropout, shuffling, clipping, and different batch sizes and numbers of epochs.

    They have four widths, two depths and two LoRA ranks. Two siblings stop early, one fails in its loss, and one joins
    late. The bases of siblings 4 and 6 are equal and therefore shared, and so are those of siblings 5 and 7.
    """
    jobs = [
        Job(0, str(tmp_path)),
        Job(1, batch=16, width=3),
        Job(2, patience=0, epochs=4, depth=8),
        Job(3, harm="loss"),
        Job(4, batch=5, clip=0.1, width=32, lora=1),
        Job(5, patience=0, epochs=4, width=36, depth=8, lora=2),
        Job(6, epochs=3, width=32, lora=2),
        Job(7, str(tmp_path), batch=40, width=36, depth=8, lora=1),
        Job(8, width=3, depth=8),
    ]
    for together, alone in run_ranks(array_and_alone, ranks, jobs, 8, timeout=90):
        assert sorted(index for index, _, _ in together) == list(range(9))
        values = {index: value for index, value, error in together if not error}
        errors = {index: error for index, _, error in together if error}
        assert list(errors) == [3]
        assert "loss of shape" in errors[3]
        for index, expected in zip(sorted(values), alone, strict=True):
            assert_equal(values[index], expected)
        assert values[2][2] < 4 * 5, "it was to stop early"
    assert (tmp_path / "0" / "best.ckpt").exists()
    assert (tmp_path / "7" / "best.ckpt").exists()


@pytest.mark.slow
def test_siblings_with_several_stages_a_rank() -> None:
    """Check siblings with several stages per rank, as the documentation recommends for two siblings on many stages."""
    jobs = [Job(n, schedule="interleaved", batch=batch) for n, batch in enumerate((8, 20))]
    for together, alone in run_ranks(array_and_alone, 2, jobs, 2, timeout=90):
        assert not any(error for _, _, error in together)
        for (_, value, _), expected in zip(sorted(together, key=lambda each: each[0]), alone, strict=True):
            assert_equal(value, expected)


UNEQUAL_ORDERS = [(UMPipe((2, 1), (4, 2)), UM1F1B((4, 2), (2, 3)), "jap"), (UM1F1B(), "umpipe", "ready")]
"""Schedules that the user chooses, and schedules that planners choose from the measurements of the first sibling."""


@pytest.mark.parametrize("schedules", UNEQUAL_ORDERS, ids=["by hand", "planned"])
def test_siblings_with_orders_of_their_own(schedules: tuple[str | Schedule, ...]) -> None:
    """Check that siblings with different schedules can share an array.

    Some have unequal micro-batches or choose among ready instructions, and others have fixed orders.
    """
    jobs = [
        Job(n, schedule=s, batch=b, microbatches=None)
        for n, (s, b) in enumerate(zip(schedules, (8, 20, 8), strict=True))
    ]
    for together, alone in run_ranks(array_and_alone, 2, jobs, 3, timeout=90):
        assert not [error for _, _, error in together if error]
        for (_, value, _), expected in zip(sorted(together, key=lambda each: each[0]), alone, strict=True):
            assert_equal(value, expected)


def begun_before_computing(rank: int, siblings: int, size: int) -> list[int]:
    quiet()
    found: list[int] = []
    begun = 0

    def begins(job: Job) -> Any:
        nonlocal begun
        begun += 1
        return job()

    def compute(sibling: Sibling[Any]) -> None:
        found.append(begun)
        as_it_is(sibling)

    as_it_is = Sibling.compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sibling, "compute", compute)
        for outcome in JobArray(size).run(
            partial(begins, Job(n, epochs=3 if 0 < n < size else 1)) for n in range(siblings)
        ):
            assert outcome.error is None
    return found


def test_no_sibling_computes_while_the_first_ones_begin() -> None:
    """Check that no sibling computes before all of the first siblings have begun.

    Later siblings begin while others compute.
    """
    for found in run_ranks(begun_before_computing, 2, 6, 4, timeout=60):
        assert found[0] == 4
        assert found[-1] == 6
        assert found.count(5) > 0


def first_batches(rank: int, batches: list[int]) -> list[list[int]]:
    """Return the siblings in the order of their first forwards and of their second forwards on the first stage."""
    quiet()
    array = JobArray[Any](len(batches))
    jobs = [partial(train_only, batch) for batch in batches]
    assert not any(outcome.error for outcome in array.run(jobs))
    assert array.timeline is not None
    rows = array.timeline.program().head
    return [[i.job for i in rows[0] if i.kind is Kind.F and i.batch == n] for n in (0, 1)]


def train_only(batch: int) -> None:
    """Train a small model on two batches, without a validation or a sanity check."""
    data = TensorDataset(torch.ones(2 * batch, 6), torch.ones(2 * batch, 1))
    trainer = make_trainer(strategy=PipelineStrategy("jap", microbatches=1), max_epochs=1)
    trainer.fit(Net(0.1), DataLoader(data, batch))


def test_small_batches_begin_and_end_the_first_round() -> None:
    for found in run_ranks(first_batches, 2, [4, 16, 8, 2, 12], timeout=60):
        assert found == [[3, 2, 1, 4, 0]] * 2


def test_large_first_batches_are_in_the_middle() -> None:
    assert order_first_batches([]) == []
    assert order_first_batches([8, 16, 24, 32, 8, 16, 24]) == [0, 1, 2, 3, 6, 5, 4]
    assert order_first_batches([32, 8, 8]) == [1, 0, 2]
    assert order_first_batches([5, 5, 5]) == [0, 2, 1]


def test_first_arrival_is_computed_first() -> None:
    """Check that the sibling that became ready first computes first.

    A sibling that is found later stays behind the siblings that were found before, even if it was ready earlier.
    """
    arrivals = Arrivals[Any]()
    since: list[int | None] = [30, None, 10, 20]

    def sibling(index: int) -> Any:
        engine = SimpleNamespace(ready_since=lambda: since[index])
        return SimpleNamespace(index=index, engine=engine, is_failing=False)

    siblings = [sibling(index) for index in range(4)]
    first = arrivals.choose_sibling(siblings, SiblingMemory())
    since[first.index], since[1] = None, 5
    later = [arrivals.choose_sibling(siblings, SiblingMemory()) for _ in range(3)]
    assert [first.index, *(s.index for s in later)] == [2, 3, 0, 1]


def test_enough_is_under_way_for_all_stages() -> None:
    """Check that the micro-batches of all siblings together are at least twice as many as the stages.

    Arrays with rounds, and arrays whose size depends on memory, do not split batches.
    """
    assert {size: JobArray[Any](size).count_default_microbatches(4) for size in (1, 3, 4, 7, 8, 20)} == {
        1: 8,
        3: 3,
        4: 2,
        7: 2,
        8: 1,
        20: 1,
    }
    assert JobArray[Any](3, rounds=round_order).count_default_microbatches(4) == 1
    assert JobArray[Any]("auto", memory=MemorySwap(device_bytes=1000)).count_default_microbatches(4) == 1


def in_rounds(rank: int, jobs: list[Job], size: int) -> tuple[Any, ...]:
    """Run jobs in an array in rounds, and return the values that the tests compare.

    Returns:
        The values and errors by job, the values of each job alone, the timeline of the array, the orders that were
        requested on this rank (each with its plan, its costs and the profiles), and the bytes of gradients by sibling
        after each block.
    """
    quiet()
    layer_profiler.MIN_MEASURED_SECONDS = 0.0  # layers as small as these count, in the process of this rank
    asked = []

    def order(plan: Plan, costs: Costs) -> Program:
        found = round_order(plan, costs)
        asked.append((plan, costs, list(_profiles.values()), found))
        return found

    array, gradients = JobArray[Any](size, rounds=order), []
    compute = array._compute_here

    def watched(sibling: Sibling[Any]) -> None:
        compute(sibling)
        training = [s for s in array._running.values() if s.engine is not None and s.engine.is_training]
        found = {s.index: [p.grad for p in s.trainer.lightning_module.parameters()] for s in training if s.trainer}
        gradients.append({n: sum(g.nbytes for g in each if g is not None) for n, each in found.items()})

    array._compute_here = watched  # type: ignore[method-assign]
    outcomes = {o.index: o for o in array.run(jobs)}
    alone = [outcome.value for job in jobs if not job.harm for outcome in JobArray(size).run([job])]
    errors = {n: told_text(o.error) for n, o in outcomes.items() if o.error}
    values = {n: o.value for n, o in outcomes.items() if not o.error}
    return values, errors, alone, array.timeline, asked, gradients


def test_rounds() -> None:
    """Check that unlike siblings in rounds give the same results as alone, and run in the order of the rounds.

    In each round, a rank runs a batch of every sibling, in the order that rank 0 has found from the measured times of
    each sibling's own stages. A sibling steps after its last backward, so that at most one sibling has gradients on the
    first stage.
    """
    jobs = [
        Job(0, epochs=2, microbatches=1),
        Job(1, batch=20, epochs=2, microbatches=1, width=9, depth=9),
        Job(2, batch=40, epochs=2, microbatches=1, depth=3, recompute=True),
    ]
    results = run_ranks(in_rounds, 2, jobs, 3, timeout=90)
    plan, costs, profiles, order = next(
        each for each in results[0][4] if [cut.rows for cut in each[0].jobs] == [8, 20, 40]
    )
    assert not results[1][4]
    assert [own.layers[-1].stop for own in costs.plans] == [7, 10, 4], "the layers of each sibling"
    for job, ((profile, _), own) in enumerate(zip(profiles, costs.plans, strict=True)):
        for stage, layers in enumerate(own.layers):
            rows = plan.jobs[job].rows
            parts = [*profile.layers[layers.start : layers.stop], profile.after if stage else profile.before]
            backward, forward = (
                sum(at_rows(table, rows) for table in each)
                for each in ([part.backward for part in parts], [part.forward for part in parts])
            )
            expected = backward + forward * (job == 2 and stage == 0)  # sibling 2 recomputes there
            found = costs.duration_ns(B(stage, Span(0, rows), job), plan)
            assert found == pytest.approx(1e9 * expected, rel=1e-6, abs=5)
    for rank, (values, errors, alone, timeline, _, gradients) in enumerate(results):
        assert not errors
        assert max(map(len, gradients)) == 3, "siblings with a batch"
        assert rank == LAST or max(sum(map(bool, each.values())) for each in gradients) == 1
        for n, expected in enumerate(alone):
            assert_equal(values[n], expected)
        rows = [[(i.kind, i.job, i.batch) for i in row if i.kind is not Kind.STEP] for row in timeline.program().head]
        for stage, row in enumerate(rows):
            wanted = [(i.kind, i.job, 0) for i in order.head[stage] if i.kind is not Kind.STEP]
            assert row[:6] == wanted
            assert sorted((batch, job) for kind, job, batch in row if kind is Kind.F) == sorted(
                (batch, n) for n, batches in enumerate((10, 4, 2)) for batch in range(batches)
            )
        ends = {}
        for e in timeline.computations:
            i = e.instruction
            ends[i.job, i.batch] = max(e.end, ends.get((i.job, i.batch), 0))
        second = min(
            e.start for e in timeline.computations if e.instruction.batch == 1 and e.instruction.kind is Kind.F
        )
        assert second > max(end for (_, batch), end in ends.items() if batch == 0)


@pytest.mark.slow
def test_rounds_continue_without_siblings_that_fail_or_end() -> None:
    """Check rounds with more siblings than places, early stops, and failures of every kind."""
    jobs = [Job(n, batch=(8, 20, 5)[n % 3], harm=harm, microbatches=1) for n, harm in enumerate(["", *HARMS, ""])]
    for values, errors, alone, *_ in run_ranks(
        in_rounds, 2, [*jobs, Job(7, patience=0, epochs=4, microbatches=1)], 3, timeout=90
    ):
        assert set(errors) >= {1, 2, 3, 5}
        for n, expected in zip((0, 6, 7), alone, strict=True):
            assert_equal(values[n], expected)


def test_settings_that_rounds_refuse() -> None:
    """Check that arrays with rounds refuse micro-batches, and orders that do not match the stages of siblings."""
    for text in run_ranks(cut_in_rounds, 2, Job(0), timeout=60):
        assert "a sibling cuts its batches into 2; set microbatches=1" in text
    for text in run_ranks(cut_in_rounds, 2, Job(0, schedule="hanayo", microbatches=1), timeout=60):
        assert "the order of a round has 4 rows, but the 4 stages of siblings are on 2 ranks" in text


def cut_in_rounds(rank: int, job: Job) -> str:
    """Return the error of an array in rounds with two siblings."""
    quiet()
    with pytest.raises((PlanError, PeerFailure)) as caught:  # a rank may receive the error from the other one
        list(JobArray(2, rounds=round_order).run([job, job]))
    return str(caught.value)


def in_waves(plan: Plan, costs: Costs) -> Program:
    """Return an order of two siblings with stages 0 and 3 on one rank, and stages 1 and 2 on the other.

    Each rank runs the forwards of both siblings, stage by stage, and then the backwards. The second rank begins with
    stage 1, the first stage for which it gets inputs.
    """
    spans = [cut.forward[0][0] for cut in plan.jobs]
    rows = []
    for first, last in ((0, 3), (1, 2)):
        row = [F(s, span, job) for s in (first, last) for job, span in enumerate(spans)]
        rows.append((*row, *(B(s, span, job) for s in (last, first) for job, span in enumerate(spans))))
    return Program(tuple(rows))


def several_stages(rank: int) -> tuple[Any, ...]:
    """Return the results of siblings with two stages per rank in rounds, their results alone, and the timeline."""
    quiet()
    jobs = [Job(n, batch=20, schedule="hanayo", microbatches=1) for n in range(2)]
    array = JobArray[Any](2, rounds=in_waves)
    found = [o.value for o in sorted(array.run(jobs), key=lambda o: o.index)]
    return found, [o.value for job in jobs for o in JobArray(2).run([job])], array.timeline


def test_rounds_of_several_stages_a_rank() -> None:
    for values, alone, timeline in run_ranks(several_stages, 2, timeout=90):
        for value, expected in zip(values, alone, strict=True):
            assert_equal(value, expected)
        rows = [[(i.kind, i.stage, i.job) for i in row if i.kind is not Kind.STEP] for row in timeline.program().head]
        for row, (first, last) in zip(rows, ((0, 3), (1, 2)), strict=True):
            forward = [(Kind.F, s, job) for s in (first, last) for job in range(2)]
            assert row[:8] == [*forward, *((Kind.B, s, job) for s in (last, first) for job in range(2))]


HARMS = ["everywhere", "one rank", "hook on one rank", "after fit", "loss"]


def harmed(rank: int, size: int) -> list[Any]:
    """Return the outcomes of siblings of which every other one fails."""
    quiet()
    jobs = [job for n, harm in enumerate(HARMS) for job in (Job(2 * n, harm=harm), Job(2 * n + 1))]
    return [(o.index, o.value, told_text(o.error)) for o in JobArray(size).run(jobs)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_failure_ends_one_sibling_only(size: int) -> None:
    results = run_ranks(harmed, 2, size, timeout=90)
    for rank, result in enumerate(results):
        errors = {index: error for index, _, error in result}
        for n, harm in enumerate(HARMS):
            assert not errors[2 * n + 1], errors
            if harm != "after fit" or rank == LAST:
                assert errors[2 * n], harm
        elsewhere = " <- SiblingFailure: sibling 2 failed on rank 0: ValueError: one rank"
        assert errors[2] == "ValueError: one rank" + (elsewhere if rank != LAST else "")
    values = [{index: value for index, value, error in r if not error} for r in results]
    for index in values[1].keys() & values[0].keys():
        assert values[0][index][0] == values[1][index][0]


def unequal(rank: int, size: int) -> list[Any]:
    """Return the outcomes of siblings of which every other one loads different data on its ranks."""
    quiet()
    jobs = [job for n, harm in enumerate(UNEQUAL) for job in (Job(2 * n, harm=harm), Job(2 * n + 1))]
    return [(o.index, o.value, told_text(o.error)) for o in JobArray(size).run(jobs)]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(6, marks=pytest.mark.slow)])
def test_ranks_that_load_other_data_end_one_sibling_only(size: int) -> None:
    for result in run_ranks(unequal, 3, size, timeout=90):
        errors = {index: error for index, _, error in result}
        for n, message in enumerate(UNEQUAL.values()):
            assert message in errors[2 * n]
            assert not errors[2 * n + 1], errors


def misfits(rank: int) -> list[str]:
    """Return the errors of jobs that cannot run in an array."""
    quiet()
    found = [
        told_text(o.error)
        for o in JobArray(2, rounds=round_order).run(
            [Job(0, microbatches=1), Job(1, "", schedule="hanayo", microbatches=1)]
        )
    ]
    found += [told_text(o.error) for o in JobArray(2).run([Job(0, width=6 + rank), lambda: 7])]
    found += [told_text(o.error) for o in JobArray(2).run([lambda: [*JobArray(1).run([])]])]
    with pytest.raises(PlanError, match="size must be"):
        JobArray(0)
    assert current_sibling() is None
    return found


def test_what_does_not_fit_is_refused() -> None:
    """Check siblings with other ranks in rounds, other layers on each rank, and siblings that run an array."""
    for found in run_ranks(misfits, 2, timeout=60):
        assert found.count("") == 2
        assert any(
            "sibling 1 of the array has its stages on the ranks (0, 1, 1, 0), with schedule 'hanayo', but sibling 0 "
            "has them on the ranks (0, 1), with schedule 'jap'" in text
            for text in found
        )
        assert any("the ranks have built different modules" in text for text in found)
        assert any("can't run another array" in text for text in found)


def fit_by_units(number: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Train a module that is cut by units. Return the stages that compute here, by layer, and the weights."""
    torch.manual_seed(number)
    data = TensorDataset(torch.randn(16, 8), torch.ones(16, 1))
    module = Net(0.1, width=8, depth=8 + number)
    strategy = PipelineStrategy("jap", microbatches=1, module="", seed=number)
    make_trainer(strategy=strategy, max_epochs=1).fit(module, DataLoader(data, 8))
    assert strategy.decision.stage_seconds
    cut = [
        sum(piece.layer == stage and piece.name.startswith("layers") for piece in strategy.decision.pieces)
        for stage in range(2)
    ]
    return cut, {name: p.detach().clone() for name, p in module.named_parameters()}


def level_units(rank: int) -> Any:
    """Return the results of `fit_by_units` next to siblings that are busy on one stage each, and without siblings."""
    quiet()
    found = []
    for busy in ([1e3, 0.0], [0.0, 1e3], None):
        array = JobArray[Any](2)
        if busy is not None:
            array.shared.stage_loads._seconds[-1] = np.array(busy)
        found.append([o.value for o in array.run([partial(fit_by_units, 1)])])
        assert found[-1][0] is not None
    return [each for (each,) in found]


def test_units_are_cut_so_that_ranks_have_the_same_work() -> None:
    """Check that a sibling that is cut by units leaves a rank that other siblings keep busy almost without work.

    Its weights are the same as with any other cut.
    """
    for first, last, alone in run_ranks(level_units, 2, timeout=90):
        assert first[0][0] <= 2 < 8 <= first[0][1]
        assert last[0][1] <= 2 < 8 <= last[0][0]
        for name, expected in alone[1].items():
            assert torch.equal(first[1][name], expected)
            assert torch.equal(last[1][name], expected)


def ended(rank: int, harm: str) -> tuple[str, list[str]]:
    """Return the error that ends an array, and the exceptions that its siblings received."""
    quiet()
    EXCEPTIONS.clear()
    try:
        list(JobArray(3).run([Job(0), Job(1, harm=harm), Job(2)]))
    except BaseException as error:
        return told_text(error), EXCEPTIONS
    return "", EXCEPTIONS


def test_ctrl_c_tells_every_sibling() -> None:
    """Check that Ctrl-C on one rank ends the siblings on all ranks with a suitable error."""
    by_rank = run_ranks(ended, 2, "Ctrl-C", timeout=60)
    assert by_rank[LAST] == ("KeyboardInterrupt: ", [ArrayCancelledError.__name__] * 3)
    error, told = by_rank[1]
    assert "PeerFailure" in error
    assert "KeyboardInterrupt" in error
    assert told[1:] == [ArrayCancelledError.__name__] * 2
    assert told[0] in (ArrayCancelledError.__name__, "PeerFailure")  # the first one may notice it itself


def test_a_dead_rank_ends_the_array() -> None:
    dead, other = watch_ranks(ended, 2, "rank dies", timeout=60)
    assert dead.exitcode == -signal.SIGKILL
    assert other.seconds < scale_timeout(30)
    assert "PeerFailure" in other.value[0]
    assert other.value[1][1:] == [ArrayCancelledError.__name__] * 2  # the first one had its turn, and noticed it itself


def closed_early(rank: int) -> int:
    """Return the number of the first sibling that ends, and close the array before the others have ended."""
    quiet()
    array: JobArray[Any] = JobArray(2)
    with closing(array.run([Job(0, epochs=1), Job(1, epochs=9), Job(2)])) as outcomes:
        return next(outcomes).index


def test_a_caller_that_has_enough() -> None:
    """Check that a caller can stop reading outcomes before all siblings have ended."""
    assert run_ranks(closed_early, 2, timeout=60) == [0, 0]


def test_errors_are_of_one_family() -> None:
    """Check that errors of arrays derive from PipelineError."""
    assert issubclass(SiblingFailure, PipelineError)
    assert issubclass(ArrayCancelledError, PipelineError)
