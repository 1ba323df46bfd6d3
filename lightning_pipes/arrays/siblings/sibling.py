"""A sibling of a job array: a function of the user that runs in its own thread, in turns.

A turn of a sibling lasts until it has handed a batch to the pipeline. During a turn, the sibling may have to wait for
another rank.
"""

from __future__ import annotations

import contextvars
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipes.arrays.siblings.baton import Runner, read_random_state, restore_random_state
from lightning_pipes.arrays.siblings.shared import SharedConnections
from lightning_pipes.arrays.siblings.sibling_board import Failure, Return, SiblingFailure, error_from_peer, packed_error
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import InputError, PipelineError, PlanError

T = TypeVar("T")

_MAX_WINDOWS = 1 << 32
"""The number of windows that one sibling may open. More windows would reuse the window numbers of the next sibling."""
_ANSWER_POLL_SECONDS = 0.001
"""The interval at which a sibling polls for an answer of other ranks."""
_SIBLING_REASON_SECONDS = 1.0
"""The longest time that a failed computation waits for an answer of other ranks that may explain the failure."""
RETURN_SECONDS = 60.0
"""The longest time that a sibling may stay in the turn in which it has returned on another rank.

During this time, it can still process messages that the other rank sent before it returned.
"""
_MAX_FINAL_WAITS = 100
"""The number of times that an ending sibling may wait for something again, before it is abandoned."""
_current: contextvars.ContextVar[Sibling[Any] | None] = contextvars.ContextVar("lightning_pipes_sibling", default=None)


class ArrayCancelledError(PipelineError):
    """The array ended before this sibling did.

    The reason is Ctrl-C, a rank that died, or a caller that stopped iterating.
    """


class MisfitError(PlanError):
    """A sibling does not fit into its array. It ends alone, and a study continues with the next trial."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of a sibling on this rank.

    Attributes:
        index: the index of the sibling, in the order in which siblings began.
        value: the return value of its function, or None if the function raised an exception.
        error: the exception that the function raised, or None.
    """

    index: int
    value: T | None = None
    error: BaseException | None = None


class Host(Protocol):
    """The interface of an array that its siblings use.

    Attributes:
        size: number of siblings that run at a time, as far as it is decided.
        shared: the connections that all siblings share.
    """

    size: int
    shared: SharedConnections

    @property
    def runs_in_rounds(self) -> bool:
        """Whether one batch of every sibling is computed per round."""

    @property
    def is_terminated(self) -> bool:
        """Whether this process got SIGTERM."""

    def record_window(self, index: int, engine: Engine) -> None:
        """Record the computations of a batch of sibling number `index`."""

    def release_sibling(self, index: int) -> None:
        """Move the sibling's weights and optimizers out of shared memory."""

    def count_default_microbatches(self, stages: int) -> int:
        """Return the default number of micro-batches per batch."""


class Sibling(Generic[T]):
    """A function of an array, as seen by its strategy and by its array.

        state          condition           runs meanwhile      next state, and its cause
        -------------  ------------------  ------------------  -----------------------------------------------------
        new            `turns` is 0        nothing             in turn: `begin_turn`
        in turn        `in_turn`           its function        waiting: `wait_until`, `meet_peers`
                                                               between turns: `finish`, after a batch is handed in
                                                               ended: the function returns or raises
        waiting        `in_turn`           others' batches     in turn: `resume_turn`, when `is_ready`
        between turns  `engine` is set     all batches, its    in turn: `begin_turn`, when `is_ready` and it is first
                                           own by `compute`    in the queue
        failing        `is_failing`        the same            in turn: `resume_turn`, which raises the error
        ended          `outcome` is set    others' batches

    `fail_at` starts the failing state from any other state, and so does `handle_news` after a failure elsewhere.
    `end_by_error` ends the sibling immediately.

    Args:
        index: the index of the sibling.
        fn: the function to run.
        array: the array of the sibling.
        state: the initial random state of the function.

    Attributes:
        index: the index of the sibling, in the order in which siblings began.
        array: the array of the sibling.
        turns: number of turns that have begun. It is the same on all ranks at the same point of the function.
        in_turn: whether the sibling is in a turn, in which it runs or waits for other ranks.
        outcome: the result of the sibling, or None before its end.
        engine: the engine whose window is being computed, between turns only.
        trainer: the trainer to which the sibling passed its model most recently.
        counts: whether the display counts the sibling as ended. It is False if there was nothing left to do.
        leaves_free_memory: whether the current turn frees memory that steps do not need, such as a checkpoint.
    """

    def __init__(self, index: int, fn: Callable[[], T], array: Host, state: Mapping[str, Any]) -> None:
        self.index = index
        self.array = array
        self.turns = 0
        self.in_turn = False
        self.outcome: Outcome[T] | None = None
        self.engine: Engine | None = None
        self.trainer: pl.Trainer | None = None
        self.counts = True
        self.leaves_free_memory = False
        self._fn = fn
        self._windows = 0
        self._meetings = 0
        self._failed = False
        self._checks: deque[tuple[int, Callable[[], bool], Callable[[], object]]] = deque()
        self._ready: Callable[[], bool] = lambda: True
        self._task: Callable[[], None] | None = None
        self._end: tuple[int, BaseException] | None = None  # the turn in which it ends, and the error that ends it
        self._error_of_peer: BaseException | None = None  # the error that another rank reported
        self._runner = Runner(self._body, f"sibling {index}", state)

    # ---- called on its own thread

    def window(self) -> int:
        """Return a number for the next window of the sibling's engines, which no other sibling uses."""
        self._windows += 1
        return self.index * _MAX_WINDOWS + self._windows

    def finish(self, engine: Engine) -> None:
        """End the turn, and return in the next turn, when this rank has finished the open window of `engine`."""
        self.engine, self.in_turn = engine, False
        try:
            self._pause(lambda: engine.is_satisfied)
        finally:
            self.engine = None
        self.array.record_window(self.index, engine)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true.

        The turn continues, and this rank computes for other siblings in the meantime.
        """
        if self._runner.is_current_thread and not ready():
            self._pause(ready)

    def meet_peers(self, word: str) -> Sequence[str]:
        """Return the words of all ranks after all of them have called this method.

        A meeting ensures that each blocking call has its counterpart on the other ranks. If this sibling fails on
        another rank, the failure ends it here too.

        Args:
            word: the word of this rank.

        Returns:
            The words in the order of ranks. With one rank, it is `word` alone.

        Raises:
            InputError: the sibling has failed before. Ranks may be in different turns since then.
        """
        if self.has_failed:
            raise InputError(
                f"sibling {self.index} of the array has failed, but its function continues to train. The ranks may "
                "have stopped at different places, so the sibling can't continue. Return from the function or raise "
                "the error, and try again in another job or trial"
            )
        board = self.array.shared.board
        self._meetings += 1
        meeting = f"meetings/{self.index}/{self._meetings}"
        board.post_value(meeting, word)
        fault_point("sibling.meet")
        self.wait_until(lambda: board.have_all_posted(meeting))
        return board.values(meeting) if board.others else [word]

    def check_later(self, is_ready: Callable[[], bool], check: Callable[[], object], max_turns: int) -> None:
        """Call `check` when `is_ready()` is true, and raise its error in a later turn, which is the same on all ranks.

        All ranks call this method in the same turn, and continue. An error ends the sibling `max_turns` turns after
        this one. It is raised at the start of that turn, or in the middle of the turn if the sibling is waiting there.
        All ranks call `Sibling.check` in that turn at the latest, unless they cannot continue without each other. It
        calls `check` even if `is_ready()` is false, and `check` then has to wait for the missing answers.

        Args:
            is_ready: returns whether `check` can be called without waiting.
            check: raises an error if the sibling has to end.
            max_turns: number of turns after which an error ends the sibling.
        """
        self._checks.append((self.turns + max_turns, is_ready, check))

    def check(self) -> None:
        """Call all pending checks, and return if none of them raises an error."""
        while self._checks:
            *_, check = self._checks.popleft()
            check()

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Report to the other ranks that the sibling ends because of `error`, unless they already know.

        Args:
            error: the error.
            where: the place of the failure, for the message.
        """
        is_known = error is self._error_of_peer or isinstance(
            error, (SiblingFailure, ArrayCancelledError, SIGTERMException)
        )
        if not self._failed and not is_known:
            text = f"{type(error).__name__}: {error}" + (f", in {where}" if where else "")
            self.array.shared.board.post_news(Failure(self.index, self.next_turn, text, packed_error(error)))
        self._failed = True

    @property
    def has_failed(self) -> bool:
        """Whether the sibling has failed on any rank, as far as this rank knows.

        It stays True if the function catches the error.
        """
        return self._failed or self._error_of_peer is not None

    def _pause(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._post_if_late()
        state = read_random_state()
        while True:
            self._runner.pause_thread()
            if self._task is None:
                break
            self._task()
            self._task = None
        restore_random_state(state)
        if self._end is not None and self._end[0] <= self.turns:
            raise self._end[1]

    def _body(self) -> None:
        token = _current.set(self)
        try:
            value = self._fn()
            fault_point("sibling.ended")
            self.array.shared.board.post_news(Return(self.index, self.turns, self._meetings))
            self.outcome = Outcome(self.index, value=value)
        except BaseException as error:  # SystemExit of one sibling must not end the others
            self.report_failure(error)
            self.outcome = Outcome(self.index, error=error)
            self._checks.clear()
        finally:
            self.array.release_sibling(self.index)
            _current.reset(token)

    # ---- called by its array

    def is_ready(self) -> bool:
        """Return whether the condition for which the sibling waits is true, or the sibling is failing."""
        return self.is_failing or self._ready() or self._check_failed()

    @property
    def is_failing(self) -> bool:
        """Whether the sibling ends when it runs next."""
        return self._end is not None and self._end[0] <= self.next_turn

    def begin_turn(self) -> None:
        """Begin the next turn of the sibling. Call `resume_turn` until the turn is over."""
        fault_point("sibling.turn")
        self.turns += 1
        self.in_turn = True

    def resume_turn(self) -> bool:
        """Run the sibling until it waits, and return whether its turn is over."""
        self._runner.resume_thread()
        return self.outcome is not None or not self.in_turn

    def compute(self) -> None:
        """Run the next instructions of the sibling's window on the sibling's thread, until one computation has
        ended."""
        engine = self.engine
        assert engine is not None

        def task() -> None:
            try:
                engine.advance()
            except BaseException as error:
                if not self._check_failed(_SIBLING_REASON_SECONDS):  # otherwise, the check is the reason on all ranks
                    self.report_failure(error)
                    self.fail_at(self.next_turn, error)

        self._task = task
        self._runner.resume_thread()

    def fail_at(self, turn: int, error: BaseException) -> None:
        """Raise `error` in the function in turn number `turn`.

        It is raised at the start of the turn, or in its middle if the sibling already waits there. If the turn is
        already over, the error is raised in the next turn, and the other ranks are informed of this. Only the first
        call has an effect.
        """
        if self._end is None:
            self._end = turn, error
            self._post_if_late()

    def handle_news(self, rank: int, news: Failure | Return, seconds: float) -> None:
        """Handle the news that the sibling has ended on another rank. If it failed there, it gets the same error here.

        Args:
            rank: the other rank.
            news: the news from that rank.
            seconds: seconds since the news arrived on this rank.

        Raises:
            InputError: the sibling has returned on the other rank, but continues here. From then on, collectives of
                other siblings would not find their counterparts.
        """
        if isinstance(news, Failure):
            if self._error_of_peer is None:
                self._error_of_peer = error_from_peer(news.text, news.error)
                self.fail_at(news.turn, self._error_of_peer)
        elif not self.is_failing and (
            self.next_turn > news.turn or self._meetings > news.meetings or seconds > RETURN_SECONDS
        ):
            raise InputError(
                f"sibling {self.index} of the array has returned on rank {rank}, in its turn {news.turn}, but "
                f"continues here, in its turn {self.next_turn}. Its function must do the same on all ranks. Make sure "
                "that its calls of a Trainer do not depend on the rank, the time, or unseeded random numbers"
            )

    def end_by_error(self, error: BaseException) -> None:
        """End the sibling by `error`, no matter where it waits."""
        self._end, self._failed = (0, error), True
        for _ in range(_MAX_FINAL_WAITS):
            if self.outcome is None:
                self._runner.resume_thread()

    def _check_failed(self, patience: float = 0.0) -> bool:
        """Run the pending checks that have received their answers.

        Return whether one of them failed, so that the sibling is failing.
        """
        until = time.monotonic() + patience
        while self._checks and self._end is None:
            turn, is_ready, check = self._checks[0]
            while not is_ready():
                if time.monotonic() >= until:
                    return False
                time.sleep(_ANSWER_POLL_SECONDS)
            self._checks.popleft()
            try:
                check()
            except PipelineError as error:
                self._checks.clear()
                self.fail_at(turn, error)
                return self.is_failing
        return False

    @property
    def next_turn(self) -> int:
        """The number of the turn in which the sibling runs next: the current turn, or the next one between turns."""
        return self.turns if self.in_turn else self.turns + 1

    def _post_if_late(self) -> None:
        if self._end is not None and 0 < self._end[0] < self.next_turn:
            self.array.shared.board.post_value(f"late/{self.index}")


class SiblingWatch:
    """The watch of a sibling's engine. A failure that the engine reports ends only this sibling, not the whole run."""

    def __init__(self, sibling: Sibling[Any], watch: FailureWatch) -> None:
        self.doing: object | None = None
        self._sibling = sibling
        self._watch = watch

    def check(self) -> None:
        """Raise PeerFailure if a rank has died."""
        self._watch.check()

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Report the sibling's failure to the other ranks."""
        self._sibling.report_failure(error, where)


def wait_in_turn(ready: Callable[[], bool]) -> None:
    """Return when `ready()` is true, or immediately if no sibling is running.

    Other siblings' batches are computed meanwhile.
    """
    sibling = current_sibling()
    if sibling is not None:
        sibling.wait_until(ready)


def current_sibling() -> Sibling[Any] | None:
    """Return the sibling that is running in this context, or None outside of arrays."""
    return _current.get()
