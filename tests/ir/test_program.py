import pickle
import subprocess
import sys

import pytest

from lightning_pipes.ir import STEP, B, Cut, F, Plan, Program, ProgramError, Span, even_spans, verify
from lightning_pipes.testing.generators import tiny_plan
from tests.ir.programs import pipedream

ONE = Span(0, 1)


def test_lines_number_the_spans_of_a_kind():
    spans = even_spans(5, 2)
    program = Program(((F(0, spans[0]), F(0, spans[1]), B(0, Span(0, 5)), STEP(0)),))
    assert program.to_lines() == ["F0.0 F0.1 B0.0 STEP0"]


def test_lines_name_jobs_and_batches():
    program = Program(((F(0, ONE), F(0, ONE, job=1), F(0, ONE, batch=2), STEP(0, job=3, batch=1)),))
    assert program.to_lines() == ["F0.0 j1:F0.0 F0.0@2 j3:STEP0@1"]
    assert str(F(2, Span(4, 6), job=1, batch=3)) == "j1:F2[4:6]@3"


def test_parse_reads_spans_from_the_plan():
    plan = Plan((0,), (Cut(6, (even_spans(6, 3),), (even_spans(6, 2),)),))
    program = Program.parse(["F0.0 F0.1 F0.2 B0.0 B0.1 STEP0"], plan)
    assert program.head[0][:4] == (F(0, Span(0, 2)), F(0, Span(2, 4)), F(0, Span(4, 6)), B(0, Span(0, 3)))


@pytest.mark.parametrize("token", ["X0.0", "F", "F0", "F9.0", "F0.9", "j1:F0.0", "F0.0@", "f0.0"])
def test_parse_says_what_it_can_not_read(token):
    with pytest.raises(ProgramError, match=token.split("@")[0]):
        Program.parse([f"F0.0 {token}"], tiny_plan(1, 2))


def test_parts_have_equal_rows():
    with pytest.raises(ProgramError, match="cycle"):
        Program(((), ()), cycle=((),))


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 7])
def test_endless_program_for_any_number_of_batches(batches):
    """Check numbers of batches that include fewer batches than the head starts."""
    plan = Plan((0, 1), (Cut.even(1, 1, 2),), versions=(2, 1))
    program = pipedream().unroll(batches)
    assert not program.is_endless
    for stage, row in enumerate(program.head):
        for make in (F, B):
            assert [i.batch for i in row if i.kind == make.__name__] == list(range(batches)), (stage, make)
    assert verify(pipedream(), plan, batches=batches) == verify(program, plan)


def test_endless_program_by_hand():
    assert pipedream().unroll(3).to_lines() == [
        "F0.0 F0.0@1 B0.0 STEP0 F0.0@2 B0.0@1 STEP0@1 B0.0@2 STEP0@2",
        "F1.0 B1.0 STEP1 F1.0@1 B1.0@1 STEP1@1 F1.0@2 B1.0@2 STEP1@2",
    ]


def test_a_finite_program_is_itself_however_many_batches():
    program = Program(((F(0, ONE), B(0, ONE), STEP(0)),))
    assert program.unroll(9) is program


def test_hash_holds_in_another_process():
    """Check that the cached hash is not pickled, because strings have other hashes in another process."""
    program = pipedream()
    hash(program)
    code = (
        "import pickle, sys; from tests.ir.programs import pipedream; "
        "p = pickle.load(sys.stdin.buffer); sys.exit(p not in {pipedream()})"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(program), check=True)
