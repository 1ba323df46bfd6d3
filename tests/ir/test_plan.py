import copy
import pickle

import pytest

from lightning_pipes.ir import Cut, Kind, Plan, PlanError, Span, even_spans


@pytest.mark.parametrize(("rows", "pieces"), [(8, 4), (10, 4), (7, 7), (5, 1), (100, 7)])
def test_even_spans_cover_and_differ_by_one(rows, pieces):
    spans = even_spans(rows, pieces)
    assert [n for s in spans for n in range(s.start, s.stop)] == list(range(rows))
    assert len(spans) == pieces
    assert max(s.rows for s in spans) - min(s.rows for s in spans) <= 1


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 2), Span(3, 4)),  # a gap
        (Span(0, 3), Span(2, 4)),  # an overlap
        (Span(0, 2), Span(2, 2), Span(2, 4)),  # an empty one
        (Span(0, 3),),  # too short
        (Span(0, 5),),  # too long
        (),
    ],
)
def test_a_cut_covers_its_batch(spans):
    with pytest.raises(PlanError, match="stage 1"):
        Cut(4, (even_spans(4, 2), spans))


def test_a_cut_has_spans_for_every_stage():
    with pytest.raises(PlanError, match="backward has spans for 1 stages, forward for 2"):
        Cut(4, (even_spans(4, 2),) * 2, (even_spans(4, 2),))


def test_links_default_to_what_the_sender_computes():
    forward, backward = (even_spans(4, 4), even_spans(4, 2)), (even_spans(4, 1), even_spans(4, 2))
    plan = Plan((0, 1), (Cut(4, forward, backward),))
    assert plan.spans(Kind.SF, 0) == plan.spans(Kind.RF, 1) == even_spans(4, 4)
    assert plan.spans(Kind.SB, 1) == plan.spans(Kind.RB, 0) == even_spans(4, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": ()},
        {"ranks": (0, 2)},
        {"jobs": ()},
        {"versions": (1,)},
        {"versions": (1, 0)},
        {"limits": (3,)},
        {"recompute": (True,)},
        {"batches": 0},
        {"ranks": (0, 1, 2)},
    ],
)
def test_refuses_contradictions(fields):
    with pytest.raises(PlanError):
        Plan(**{"ranks": (0, 1), "jobs": (Cut.even(4, 2, 2),), **fields})


@pytest.mark.parametrize(("rows", "pieces"), [(0, 1), (4, 0), (-1, 2)])
def test_refuses_empty_batches(rows, pieces):
    with pytest.raises(PlanError, match="must be at least 1, got"):
        Cut.even(rows, pieces, 2)


def test_fewer_microbatches_than_asked_where_samples_run_out():
    assert len(Cut.even(3, 8, 1).forward[0]) == 3


def test_overlapping_is_what_shares_a_sample():
    plan = Plan((0, 1), (Cut(12, (even_spans(12, 4), even_spans(12, 3))),))
    for span in plan.spans(Kind.F, 1):
        shared = set(range(span.start, span.stop))
        wanted = tuple(s for s in plan.spans(Kind.F, 0) if shared & set(range(s.start, s.stop)))
        assert plan.overlapping_spans(Kind.F, 0, 0, span) == wanted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_used_plan_is_copied_and_sent(copied):
    plan = Plan((0, 1), (Cut(12, (even_spans(12, 4), even_spans(12, 3))),))
    wanted = plan.overlapping_spans(Kind.F, 0, 0, Span(0, 4))
    twin = copied(plan)
    assert twin == plan
    assert hash(twin) == hash(plan)
    assert twin.overlapping_spans(Kind.F, 0, 0, Span(0, 4)) == wanted
    assert twin.overlapping_spans(Kind.F, 1, 0, Span(0, 4)) == (Span(0, 4),)
