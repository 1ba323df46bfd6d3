"""Check every fault separately, in a program that is otherwise correct."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import (
    STEP,
    B,
    Cut,
    DeadlockError,
    F,
    I,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    ProgramError,
    Span,
    W,
    adapt_plan,
    add_recomputations,
    even_spans,
    lower,
    regular,
    verify,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.sim import simulate
from lightning_pipes.testing.generators import random_plan, tiny_plan

proof = import_module("lightning_pipes.ir.verify")  # the package exports a function of the same name
PLAN = tiny_plan(2, 2)
RIGHT = ["F0.0 F0.1 B0.0 B0.1 STEP0", "F1.0 B1.0 F1.1 B1.1 STEP1"]
ONE = Span(0, 1)


def program(*lines, plan=PLAN):
    return Program.parse(lines, plan)


def test_the_right_program():
    facts = verify(program(*RIGHT), PLAN)
    assert facts.peak_spans == facts.peak_rows == (2, 1)
    assert facts.versions == (1, 1)
    assert facts.staleness == (0, 0)


@pytest.mark.parametrize(
    ("first", "error", "words"),
    [
        ("F0.0 B0.0 B0.1 STEP0", ProgramError, r"rank 0: F0\[1:2\] is missing"),
        ("F0.0 F0.1 B0.0 B0.1", ProgramError, r"rank 0: STEP0 is missing"),
        ("F0.0 F0.1 F0.1 B0.0 B0.1 STEP0", ProgramError, r"rank 0: F0\[1:2\] comes more than once"),
        ("F0.0 F0.1 B0.0 B0.1 STEP0 STEP0", ProgramError, r"rank 0: STEP0 comes more than once"),
        ("F0.0 F0.1 B0.0 B0.1 F1.0 STEP0", ProgramError, r"rank 0: F1\[0:1\] does not belong there"),
        ("F0.0 B0.0 F0.1 B0.1 STEP0", None, ""),  # correct for the first rank
        ("B0.0 F0.0 F0.1 B0.1 STEP0", DeadlockError, r"rank 0 waits at .*B0\[0:1\]"),
        ("F0.0 F0.1 B0.0 STEP0 B0.1", DeadlockError, r"rank 0 waits at STEP0 for B0\[1:2\]"),
        ("F0.1 F0.0 B0.0 B0.1 STEP0", None, ""),
        ("F0.0 F0.1 B0.1 B0.0 STEP0", None, ""),
    ],
)
def test_one_fault_on_the_first_rank(first, error, words):
    if error is None:
        verify(program(first, RIGHT[1]), PLAN)
    else:
        with pytest.raises(error, match=words):
            verify(program(first, RIGHT[1]), PLAN)


def test_a_cycle_between_ranks():
    """Check two ranks that wait for each other.

    Rank 0 needs the first gradient before it sends the second activation, and rank 1 needs the second activation first.
    """
    with pytest.raises(DeadlockError, match=r"rank 0 waits at RB0\[0:1\].*rank 1 waits at RF1\[1:2\]"):
        verify(program("F0.0 B0.0 F0.1 B0.1 STEP0", "F1.0 F1.1 B1.0 B1.1 STEP1"), PLAN)


def test_a_swapped_row():
    with pytest.raises(ProgramError, match="rank 0"):
        verify(program(RIGHT[1], RIGHT[0]), PLAN)


def test_too_few_rows():
    with pytest.raises(ProgramError, match="1 rows"):
        verify(program(RIGHT[0]), PLAN)


@pytest.mark.parametrize("kind", [Kind.SF, Kind.RF, Kind.SB, Kind.RB])
def test_a_message_without_its_other_end(kind):
    rows = [[i for i in row if not (i.kind is kind and i.span == ONE)] for row in lower(program(*RIGHT), PLAN).head]
    with pytest.raises(ProgramError, match=f"{kind}[01].* is missing"):
        verify(Program(tuple(map(tuple, rows))), PLAN)


@pytest.mark.parametrize(
    ("first", "error", "says"),
    [
        ("F0.0 R0.0 F0.1 B0.0 R0.1 B0.1 STEP0", None, ""),
        ("F0.0 R0.0 F0.1 B0.0 B0.1 STEP0", ProgramError, "R0[1:2] is missing"),
        ("F0.0 R0.0 R0.0 F0.1 B0.0 R0.1 B0.1 STEP0", ProgramError, "R0[0:1] comes more than once"),
        ("R0.0 F0.0 F0.1 B0.0 R0.1 B0.1 STEP0", DeadlockError, "rank 0 waits at R0[0:1] for F0[0:1]"),
        ("F0.0 F0.1 B0.0 R0.0 R0.1 B0.1 STEP0", DeadlockError, "rank 0 waits at B0[0:1] for R0[0:1]"),
    ],
)
def test_recomputations_in_a_program(first, error, says):
    """Check where a program may place a recomputation: between its forward and its backward, exactly once."""
    plan = replace(PLAN, recompute=(True, False), early_recompute=True)
    given = program(first, RIGHT[1], plan=plan)
    if error is None:
        assert verify(given, plan) == verify(program(*RIGHT), PLAN)
        return
    with pytest.raises(error, match=re.escape(says)):
        verify(given, plan)
    with pytest.raises(ProgramError, match=r"R0\[0:1\] does not belong there"):
        verify(program(first, RIGHT[1], plan=plan), PLAN)


def test_a_message_sent_before_it_is_computed():
    lowered = lower(program(*RIGHT), PLAN)
    row = list(lowered.head[0])
    assert row[1].kind is Kind.SF
    row[0], row[1] = row[1], row[0]
    with pytest.raises(DeadlockError, match="rank 0 waits at SF0"):
        verify(Program((tuple(row), lowered.head[1])), PLAN)


def test_more_samples_than_the_limit():
    verify(program(*RIGHT), replace(PLAN, limits=(2, 1)))
    with pytest.raises(PlanError, match="stage 0 holds 2 samples"):
        verify(program(*RIGHT), replace(PLAN, limits=(1, 1)))


def test_a_job_that_does_not_occur():
    with pytest.raises(ProgramError, match="job 1"):
        verify(program(*RIGHT), replace(PLAN, jobs=PLAN.jobs * 2))


def test_a_batch_that_does_not_occur():
    with pytest.raises(ProgramError, match="batch 1"):
        verify(program(*RIGHT), replace(PLAN, batches=2))


def test_several_jobs():
    plan = replace(tiny_plan(2, 1), jobs=(Cut.even(1, 1, 2), Cut.even(2, 2, 2)))
    rows = ["F0.0 j1:F0.0 B0.0 STEP0 j1:F0.1 j1:B0.0 j1:B0.1 j1:STEP0"]
    rows += ["F1.0 B1.0 STEP1 j1:F1.0 j1:F1.1 j1:B1.0 j1:B1.1 j1:STEP1"]
    facts = verify(program(*rows, plan=plan), plan)
    assert facts.peak_spans == (2, 2)  # of both jobs together
    assert facts.versions == (1, 1)


def test_split_backward_holds_samples_until_w():
    plan = replace(tiny_plan(2, 2), split_backward=True)
    facts = verify(
        program("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1 STEP0", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1 STEP1", plan=plan), plan
    )
    assert facts.peak_spans == (2, 2)  # with full backwards the last stage would hold one
    with pytest.raises(DeadlockError, match="W0"):
        verify(program("F0.0 F0.1 I0.0 I0.1 W0.0 STEP0 W0.1", "F1.0 I1.0 W1.0 F1.1 I1.1 W1.1 STEP1", plan=plan), plan)
    with pytest.raises(ProgramError, match=r"B0.* does not belong"):
        verify(program("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1 B0.0 STEP0", "", plan=plan), plan)


def batch(stage, number):
    return F(stage, ONE, batch=number), B(stage, ONE, batch=number), STEP(stage, batch=number)


def asynchronous(warmups, batches):
    """Return PipeDream's order, in which stage s starts `warmups[s]` batches before its first backward."""
    rows = []
    for stage, warmup in enumerate(warmups):
        f, b, step = zip(*(batch(stage, n) for n in range(batches)), strict=True)
        row = list(f[:warmup])
        for n in range(batches):
            row += [b[n], step[n], *f[n + warmup : n + warmup + 1]]
        rows.append(tuple(row))
    return Program(tuple(rows))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_asynchronous_versions_and_staleness(p):
    """Check that stage s of p keeps p - s versions and is p - s - 1 updates late.

    See Narayanan et al. 2019, section 3.3.
    """
    plan = Plan(tuple(range(p)), (Cut.even(1, 1, p),), batches=8, versions=tuple(range(p, 0, -1)))
    facts = verify(asynchronous(range(p, 0, -1), 8), plan)
    assert facts.versions == tuple(range(p, 0, -1))
    assert facts.staleness == tuple(range(p - 1, -1, -1))


def test_more_versions_than_the_plan_allows():
    plan = Plan((0, 1), (Cut.even(1, 1, 2),), batches=4, versions=(2, 1))
    verify(asynchronous((2, 1), 4), plan)
    with pytest.raises(DeadlockError, match=r"rank 0 waits at F0.*@1 for STEP0"):
        verify(asynchronous((2, 1), 4), replace(plan, versions=(1, 1)))


def test_batches_of_subnets_do_not_wait_for_each_others_update():
    """Check batches that train different layers, so that neither versions nor steps order them."""
    plan = Plan((0, 1), (Cut.even(1, 1, 2),), batches=3, shared_weights=False)
    rows = []
    for stage in (0, 1):
        f, b, step = zip(*(batch(stage, n) for n in range(3)), strict=True)
        rows.append((*f, b[2], step[2], b[0], step[0], b[1], step[1]))
    assert verify(Program(tuple(rows)), plan).peak_spans == (3, 3)


def test_after_adds_needs():
    first, second = F(0, Span(0, 1)), F(0, Span(1, 2))
    plan = replace(PLAN, after={first: (second,)})
    verify(program("F0.1 F0.0 B0.0 B0.1 STEP0", RIGHT[1]), plan)
    with pytest.raises(DeadlockError, match=r"rank 0 waits at F0\[0:1\] for F0\[1:2\]"):
        verify(program(*RIGHT), plan)


def test_after_reaches_across_ranks():
    plan = replace(PLAN, after={F(0, Span(1, 2)): (STEP(1),)})
    with pytest.raises(DeadlockError, match=r"rank 0 waits at F0\[1:2\] for STEP1"):
        verify(program(*RIGHT), plan)


def test_unequal_spans_and_links():
    """Check a cut in which computations and messages have different sizes.

    Stage 0 runs 4 forwards of 1 sample and sends 2 messages of 2 samples. Stage 1 runs 1 forward and 1 backward of 4
    samples. The gradients return in 2 messages of 2 samples, and stage 0 runs 2 backwards.
    """
    cut = Cut(
        4,
        (even_spans(4, 4), even_spans(4, 1)),
        (even_spans(4, 2), even_spans(4, 1)),
        (even_spans(4, 2), even_spans(4, 1)),
        (even_spans(4, 2), even_spans(4, 2)),
    )
    plan = Plan((0, 1), (cut,))
    lines = ["F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 STEP0", "F1.0 B1.0 STEP1"]
    facts = verify(program(*lines, plan=plan), plan)
    assert facts.peak_spans == (4, 1)
    assert facts.peak_rows == (4, 4)
    assert lower(program(*lines, plan=plan), plan).to_lines() == [
        "F0.0 F0.1 SF0.0 F0.2 F0.3 SF0.1 RB0.0 B0.0 RB0.1 B0.1 STEP0",
        "RF1.0 RF1.1 F1.0 B1.0 SB1.0 SB1.1 STEP1",
    ]


def test_backward_in_halves_frees_halves():
    plan = Plan((0,), (Cut(8, (even_spans(8, 2),), (even_spans(8, 4),)),), limits=(6,))
    facts = verify(Program.parse(["F0.0 B0.0 F0.1 B0.1 B0.2 B0.3 STEP0"], plan), plan)
    assert (facts.peak_spans, facts.peak_rows) == ((2,), (6,))


def test_input_and_weight_gradients_are_named():
    assert (str(I(0, ONE)), str(W(1, ONE))) == ("I0[0:1]", "W1[0:1]")
    assert str(Instruction(Kind.STEP, 2)) == "STEP2"


VARIANTS = [
    make_schedule("1f1b"),
    make_schedule("kfkb", k=2),
    make_schedule("gpipe"),
    make_schedule("interleaved", stages_per_rank=2),
    make_schedule("hanayo"),
    make_schedule("v"),
    make_schedule("zero_bubble"),
    make_schedule("pipedream"),
    make_schedule("pipedream_2bw"),
]


def outcome(program, plan):
    try:
        return verify(program, plan)
    except (ProgramError, PlanError) as error:
        return type(error), str(error)


def change(rows, rng, plan):
    """Return the program with one random change, which is not always a fault."""
    rows = [list(row) for row in rows]
    row = rng.choice(rows)
    at, other = rng.randrange(len(row)), rng.randrange(len(row))
    i = row[at]
    match rng.randrange(9):
        case 0:
            row[at], row[other] = row[other], row[at]
        case 1:
            del row[at]
        case 2:
            row.insert(other, i)
        case 3:
            row[at] = i._replace(kind=rng.choice(list(Kind)))
        case 4:
            row[at] = i._replace(span=Span(i.span.start, i.span.stop + 1))
        case 5:
            row[at] = i._replace(stage=(i.stage + 1) % plan.n_stages)
        case 6:
            row[at] = i._replace(batch=i.batch + 1)
        case 7:
            rng.choice(rows).append(row.pop(at))
        case 8:
            row[at] = i._replace(span=Span(0, 0)) if rng.random() < 0.5 else i._replace(job=i.job + 1)
    return Program(tuple(map(tuple, rows)))


@pytest.mark.parametrize("schedule", VARIANTS, ids=lambda schedule: schedule.name)
def test_the_quick_way_proves_the_same(schedule, monkeypatch):
    """Compare the fast proof with the check of every instruction, for correct and for changed programs.

    About a quarter of the changed programs are still correct.
    """
    rng, right = random.Random(0), 0
    for ranks, m, rows in ((1, 1, 1), (2, 4, 4), (3, 5, 7), (4, 8, 16)):
        where = schedule.place_stages(ranks)
        plan = adapt_plan(Plan.even(len(where), m, rows, ranks=where), schedule)
        order = schedule.program(plan)
        finite = order.unroll(order.head_batches + 2) if order.is_endless else order
        bounded = replace(plan, limits=(rows // 2 + 1,) * plan.n_stages)
        cases = [(order, plan), (finite, plan), (finite, bounded), (lower(finite, plan), plan)]
        again = replace(plan, recompute=(True,) * plan.n_stages, early_recompute=True)
        cases += [(order, again), (finite, again), (add_recomputations(finite, again), again)]
        cases += [(change(finite.head, rng, plan), plan) for _ in range(60)]
        for program, given in cases:
            found = outcome(program, given)
            right += isinstance(found, proof.ProgramStats)
            with monkeypatch.context() as patch:
                patch.setattr(proof, "_regular_stats", lambda *_: None)
                assert outcome(program, given) == found
    assert right > 12


def test_irregular_plans_are_looked_at_one_by_one(monkeypatch):
    monkeypatch.setattr(proof, "_compute_stats", None)
    for seed in range(5):
        plan = random_plan(seed, unequal=True)
        if not all(plan.uniform_jobs):
            with pytest.raises(TypeError):
                verify(make_schedule("gpipe").program(plan), plan)


def test_needs_are_asked_once_a_kind_and_stage(monkeypatch):
    """Check that `needs` is not called for each of 16 x 200 micro-batches.

    Ranks verify a program at every start and for each new size of a batch.
    """
    asked = []
    needs = regular.needs
    monkeypatch.setattr(regular, "needs", lambda i, plan: asked.append(i) or needs(i, plan))
    monkeypatch.setattr(proof, "needs", None)
    plan = Plan.even(16, 200)
    assert verify(make_schedule("1f1b").program(plan), plan).peak_spans == tuple(range(16, 0, -1))
    assert len(asked) < 100


COSTS = CostModel.uniform(2, forward=1.0, backward=2.0)


@pytest.mark.parametrize("finds", [verify, lambda program, plan: simulate(program, plan, COSTS)])
def test_a_deadlock_is_drawn(finds: Callable[[Program, Plan], object]) -> None:
    plan = tiny_plan(stages=2, microbatches=2)
    a, b = plan.jobs[0].forward[0]
    wrong = Program(((F(0, a), B(0, a), F(0, b), B(0, b), STEP(0)), (F(1, a), F(1, b), B(1, a), B(1, b), STEP(1))))
    with pytest.raises(DeadlockError) as error:
        finds(wrong, plan)
    head, *rows = str(error.value).splitlines()
    assert head.startswith("the ranks wait for each other: rank 0 waits at ")
    assert rows == ["rank 0 | F0[0:1]", "rank 1 |         F1[0:1]"]


def test_a_long_one_shows_the_end() -> None:
    plan = tiny_plan(stages=2, microbatches=20)
    spans = plan.jobs[0].forward[0]
    first = (*(F(0, s) for s in spans), *(B(0, s) for s in spans), STEP(0))
    second = (*(F(1, s) for s in spans), B(1, spans[0]), STEP(1), *(B(1, s) for s in spans[1:]))
    with pytest.raises(DeadlockError, match=r"(?s)rank 1 waits at STEP1 .*\nrank 1 \| \.\.\. .*B1\[0:1\]$"):
        verify(Program((first, second)), plan)
