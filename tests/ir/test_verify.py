"""Each fault is made by hand, alone, in a program that is right otherwise."""

from dataclasses import replace

import pytest

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
    even_spans,
    lower,
    verify,
)
from lightning_pipes.testing.generators import tiny_plan

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
        ("F0.0 B0.0 F0.1 B0.1 STEP0", None, ""),  # fine for the first rank
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
    """Rank 0 wants the first gradient before it gives the second forward, rank 1 the second forward first."""
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
    """PipeDream's order by hand: stage s starts `warmups[s]` batches before its first backward."""
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
    """Stage s of p keeps p - s versions, p - s - 1 updates late (Narayanan et al. 2019, section 3.3)."""
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
    """Where every batch trains layers of its own, neither versions nor steps order them."""
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
    """Stage 0 computes 4 x 1 forward, sends 2 x 2, stage 1 computes 1 x 4, and gradients come back as 4, 2, 2 x 2."""
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
    assert lower(program(*lines, plan=plan), plan).lines() == [
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
