"""Check predictions by hand."""

from __future__ import annotations

from benchmarks.papers.csp.emulation.swapped import InTurn, Nothing, looks_ahead
from lightning_pipes.sim.predictor import (
    PendingBackward,
    SimulatedPredictor,
    StepAheadPredictor,
    Task,
    TaskPrediction,
    WaitingSubnet,
    find_admissible,
)


def queue(**waits: set[int]) -> list[WaitingSubnet]:
    """Return a queue; for example, q0={1} means that subnet 0 waits for subnet 1."""
    return [WaitingSubnet(int(name[1:]), frozenset(each)) for name, each in waits.items()]


def forward(subnet: int, k: int = 0) -> Task:
    return Task(subnet, False, k)


def backward(subnet: int, k: int = 0) -> Task:
    return Task(subnet, True, k)


def test_the_first_that_may_run() -> None:
    waiting = queue(q3={1}, q4={1, 2}, q5=set(), q6=set())
    assert find_admissible(waiting) == 5
    assert find_admissible(waiting, frozenset([1])) == 3
    assert find_admissible(queue(q3={1})) is None
    assert find_admissible(queue(q0=set())) == 0


class TestInTurn:
    def test_the_first_forward_and_the_first_to_come_back_take_turns(self) -> None:
        predictor = InTurn(microbatches=2)
        waiting = queue(q0=set(), q1=set(), q2={0}, q3=set())
        assert predictor.idle(waiting) == TaskPrediction((0, 1, 3, 2))
        assert predictor.before(forward(0), waiting[1:]) == TaskPrediction((0, 1, 3, 2))
        assert predictor.before(forward(0, 1), waiting[1:]) == TaskPrediction((1, 0, 3, 2))
        assert predictor.before(forward(1), waiting[2:]) == TaskPrediction((1, 3, 0, 2))

    def test_one_that_is_back_is_over(self) -> None:
        predictor = InTurn(microbatches=2)
        for task in (forward(5), forward(5, 1), forward(7), forward(7, 1)):
            predictor.before(task, [])
        assert predictor.before(backward(5), queue(q8=set())) == TaskPrediction((5, 8, 7))
        assert predictor.before(backward(5, 1), queue(q8=set())) == TaskPrediction((8, 7))


class TestOneStep:
    def test_before_a_backward_pretends_that_it_has_stepped(self) -> None:
        waiting = queue(q0={7}, q8=set())
        predictor = StepAheadPredictor(last=False)
        assert predictor.before(backward(7), waiting) == TaskPrediction((0,))
        assert waiting == queue(q0={7}, q8=set())
        assert predictor.before(backward(6), waiting) == TaskPrediction((8,))

    def test_before_a_forward_takes_the_next_one(self) -> None:
        assert StepAheadPredictor(False).before(forward(0), queue(q0=set(), q1={0}, q2=set())) == TaskPrediction((2,))
        assert StepAheadPredictor(False).before(forward(0), queue(q0=set(), q1={0})) == TaskPrediction()

    def test_the_last_stage_tells_of_the_backward_of_its_next_forward(self) -> None:
        assert StepAheadPredictor(last=True).before(backward(1), queue(q2={1})) == TaskPrediction(
            (2,), (PendingBackward(2, 2),)
        )
        assert StepAheadPredictor(last=True).before(backward(1), queue(q2={0})) == TaskPrediction()

    def test_a_pending_backward_is_fetched_before_the_forward_that_it_comes_after_and_told_on(self) -> None:
        predictor = StepAheadPredictor(last=False)
        told = (PendingBackward(0, 9),)
        assert predictor.before(backward(1), queue(q2={1}, q3=set()), told) == TaskPrediction(
            (2,), (PendingBackward(0, 2),)
        )
        # too early, but it is not forgotten
        assert predictor.before(forward(3), queue(q2={1}, q3=set())) == TaskPrediction()
        assert predictor.before(forward(2), queue(q2=set(), q4=set())) == TaskPrediction((0, 4))
        assert predictor.before(forward(4), queue(q4=set(), q5=set())) == TaskPrediction((5,))
        assert predictor.before(forward(2, 1), queue(q5=set())) == TaskPrediction((5,))  # only once

    def test_arrived_contexts_are_not_fetched_again(self) -> None:
        predictor = StepAheadPredictor(last=False)
        predictor.before(backward(1), queue(q2={1}), (PendingBackward(0, 9),))
        predictor.before(backward(0), queue(q2={1}))
        assert predictor.before(forward(2), queue(q2=set())) == TaskPrediction()

    def test_a_pending_backward_without_a_forward_before_it_is_next(self) -> None:
        assert StepAheadPredictor(False).before(
            backward(1), [], (PendingBackward(0, 9), PendingBackward(3, 9))
        ) == TaskPrediction((0, 3))

    def test_prediction_is_the_same_within_a_context(self) -> None:
        predictor = StepAheadPredictor(False)
        said = predictor.before(backward(1), queue(q2={1}), (PendingBackward(0, 9),))
        assert predictor.before(backward(1, 1), queue(q2={1})) == said

    def test_idle_wants_what_is_pending_and_the_next_forward(self) -> None:
        predictor = StepAheadPredictor(False)
        assert predictor.idle(queue(q0=set())) == TaskPrediction((0,))
        predictor.before(backward(1), queue(q2={1}), (PendingBackward(0, 9),))
        assert predictor.idle(queue(q2=set())) == TaskPrediction((0, 2))


class TestAhead:
    ORDER = [forward(0), forward(1), forward(1, 1), backward(0), forward(2), backward(1)]

    def test_wants_what_comes_next(self) -> None:
        predictor = SimulatedPredictor(self.ORDER, 2)
        assert predictor.idle([]) == TaskPrediction((0, 1))
        assert predictor.before(forward(0), []) == TaskPrediction((1, 0))
        assert predictor.before(forward(1), []) == TaskPrediction((1, 0))
        assert predictor.before(forward(1, 1), []) == TaskPrediction((0, 2))

    def test_what_ran_out_of_order_is_over_once(self) -> None:
        predictor = SimulatedPredictor(self.ORDER, 3)
        assert predictor.before(forward(2), []) == TaskPrediction((0, 1))
        assert predictor.before(forward(0), []) == TaskPrediction((1, 0))
        for task in (forward(1), forward(1, 1), backward(0)):
            said = predictor.before(task, [])
        assert said == TaskPrediction((1,))
        assert predictor.before(backward(1), []) == TaskPrediction()


def test_nothing_predicts_nothing() -> None:
    assert Nothing().before(forward(0), queue(q1=set())) == Nothing().idle([]) == TaskPrediction()


def test_looks_as_far_as_there_is_room() -> None:
    assert [looks_ahead(room, 2.0) for room in (1, 2, 6, 7)] == [1, 1, 3, 3]
