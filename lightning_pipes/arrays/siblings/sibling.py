"""A sibling of a job array: one of the user's functions in a thread of its own, in turns.

A sibling has its turn until it has handed a batch to the pipeline, or waits for another rank in the middle of it.
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
from lightning_pipes.ir import InputError, PipelineError

T = TypeVar("T")

_WINDOWS = 1 << 32
"""Windows that one sibling may open before its numbers run into those of the next."""
_LOOK_SECONDS = 0.001
"""How often it looks whether an answer of other ranks has arrived."""
_REASON_SECONDS = 1.0
"""How long a computation that failed waits for an answer of other ranks that may say why."""
RETURN_SECONDS = 60.0
"""How long a sibling may go on in a turn in which it has returned on another rank, for what that rank has sent
before."""
_PATIENCE = 100
"""How often a sibling that is to end may go on waiting for something before it is left alone."""
_current: contextvars.ContextVar[Sibling[Any] | None] = contextvars.ContextVar("lightning_pipes_sibling", default=None)


class ArrayCancelledError(PipelineError):
    """The array ends before this sibling does: Ctrl-C, a rank that died, or a caller that has enough."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a sibling ended on this rank.

    Attributes:
        index: counts the siblings in the order in which they began.
        value: what its function returned; None where it raised.
        error: what it raised.
    """

    index: int
    value: T | None = None
    error: BaseException | None = None


class Host(Protocol):
    """An array as its siblings need it.

    Attributes:
        size: siblings at a time, as far as it is decided.
        shared: what connects all siblings.
    """

    size: int
    shared: SharedConnections

    @property
    def is_terminated(self) -> bool:
        """Whether this process got SIGTERM."""

    def record_window(self, index: int, engine: Engine) -> None:
        """Record the computations of a batch of sibling number `index`."""

    def release_sibling(self, index: int) -> None:
        """Move the sibling's weights and optimizers out of shared memory."""

    def count_default_microbatches(self, stages: int) -> int:
        """Return the micro-batches of a batch by default."""


class Sibling(Generic[T]):
    """One function of an array, as its strategy and its array see it.

    state          seen by             runs meanwhile      next, and by what
    -------------  ------------------  ------------------  ---------------------------------------------------
    new            `turns` is 0        nothing             in turn: `begin_turn`
    in turn        `in_turn`           its own function    waiting: `wait_until`, `meet_peers`
                                                           between turns: `finish`, with a batch handed in
                                                           ended: the function returns or raises
    waiting        `in_turn`           others' batches     in turn: `resume_turn`, when `is_ready`
    between turns  `engine` is set     all batches, its    in turn: `begin_turn`, when `is_ready` and its turn comes
                                       own by `compute`
    failing        `is_failing`           the same            in turn: `resume_turn`, where it raises the error
    ended          `outcome` is set    all the others'

    `fail_at` and `handle_news`, of a failure on a peer, make it failing in any state; `end_by_error` ends it at once.

    Attributes:
        index: counts the siblings in the order in which they began.
        turns: those that it has had, with the one it is in; the same on all ranks at the same point of the function.
        in_turn: whether it is in one: it runs, or waits for other ranks.
        outcome: how it ended; None before.
        engine: whose window is being worked on between its turns.
        trainer: the one that it has given its model last.
        counts: whether it is to be shown as one that has ended; not where there was nothing left to do.
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
        self._fn = fn
        self._windows = 0
        self._meetings = 0
        self._failed = False
        self._checks: deque[tuple[int, Callable[[], bool], Callable[[], object]]] = deque()
        self._ready: Callable[[], bool] = lambda: True
        self._task: Callable[[], None] | None = None
        self._end: tuple[int, BaseException] | None = None  # the turn that it does not survive, and what ends it
        self._error_of_peer: BaseException | None = None  # what ends it, by the message of another rank
        self._runner = Runner(self._body, f"sibling {index}", state)

    # ---- called on its own thread

    def window(self) -> int:
        """Return a number for the next window of its engines, which no other sibling uses."""
        self._windows += 1
        return self.index * _WINDOWS + self._windows

    def finish(self, engine: Engine) -> None:
        """Ends its turn; returns in the next one, when the window that is open in `engine` is through on this rank."""
        self.engine, self.in_turn = engine, False
        try:
            self._pause(lambda: engine.is_satisfied)
        finally:
            self.engine = None
        self.array.record_window(self.index, engine)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()`; its turn goes on, and meanwhile this rank computes for others."""
        if self._runner.is_current_thread and not ready():
            self._pause(ready)

    def meet_peers(self, word: str) -> Sequence[str]:
        """Return the words of all ranks once all of them call this, so that each blocking call has its counterpart.

        The words are in the order of ranks; with one rank it is `word` alone. A failure of this sibling on another rank
        ends it.

        Raises:
            InputError: it has failed before; ranks may be in different turns since.
        """
        if self.has_failed:
            raise InputError(
                f"sibling {self.index} of the array has failed, and its function goes on to train: ranks are not at "
                "one place any more. Return, or raise, and try again in another job, or trial"
            )
        board = self.array.shared.board
        self._meetings += 1
        meeting = f"meetings/{self.index}/{self._meetings}"
        board.post_value(meeting, word)
        fault_point("sibling.meet")
        self.wait_until(lambda: board.have_all_posted(meeting))
        return board.values(meeting) if board.others else [word]

    def check_later(self, is_ready: Callable[[], bool], check: Callable[[], object], max_turns: int) -> None:
        """Call `check` when `is_ready()`, to raise its error in a later turn, the same on all ranks.

        All ranks ask for it in the same turn, and go on. An error ends the sibling `max_turns` turns after this one, or
        in the middle of what it waits for. In that turn they call `check`, unless they can't go on without each other.
        `check` waits by itself where it is called before that.
        """
        self._checks.append((self.turns + max_turns, is_ready, check))

    def check(self) -> None:
        """Return when all that was to be checked later is right."""
        while self._checks:
            *_, check = self._checks.popleft()
            check()

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Report to the other ranks that it ends by `error`, unless they know."""
        is_known = error is self._error_of_peer or isinstance(
            error, (SiblingFailure, ArrayCancelledError, SIGTERMException)
        )
        if not self._failed and not is_known:
            text = f"{type(error).__name__}: {error}" + (f", in {where}" if where else "")
            self.array.shared.board.post_news(Failure(self.index, self.next_turn, text, packed_error(error)))
        self._failed = True

    @property
    def has_failed(self) -> bool:
        """Whether it has failed on any rank, as far as this one knows, also if its function has caught the error."""
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
        """Return whether its condition holds, or the sibling is failing."""
        return self.is_failing or self._ready() or self._check_failed()

    @property
    def is_failing(self) -> bool:
        """Whether it ends when it runs next."""
        return self._end is not None and self._end[0] <= self.next_turn

    def begin_turn(self) -> None:
        """Begin the next turn of the sibling; call `resume_turn` until it is over."""
        fault_point("sibling.turn")
        self.turns += 1
        self.in_turn = True

    def resume_turn(self) -> bool:
        """Let it run until it waits; whether its turn is over."""
        self._runner.resume_thread()
        return self.outcome is not None or not self.in_turn

    def compute(self) -> None:
        """Run on its thread what its window has next, up to one computation."""
        engine = self.engine
        assert engine is not None

        def task() -> None:
            try:
                engine.advance()
            except BaseException as error:
                if not self._check_failed(_REASON_SECONDS):  # else that is the reason, and other ranks find it, too
                    self.report_failure(error)
                    self.fail_at(self.next_turn, error)

        self._task = task
        self._runner.resume_thread()

    def fail_at(self, turn: int, error: BaseException) -> None:
        """It gets `error` in turn number `turn`: at its start, or in its middle where it waits there already. Where
        that turn is over it is the next one, and the other ranks hear of it."""
        if self._end is None:
            self._end = turn, error
            self._post_if_late()

    def handle_news(self, rank: int, news: Failure | Return, seconds: float) -> None:
        """It has ended on another rank, which is known here for so many seconds; of an error it gets the same here.

        Raises:
            InputError: it has returned there, and does something else here. What other siblings say in turns finds no
                partner any more then.
        """
        if isinstance(news, Failure):
            if self._error_of_peer is None:
                self._error_of_peer = error_from_peer(news.text, news.error)
                self.fail_at(news.turn, self._error_of_peer)
        elif not self.is_failing and (
            self.next_turn > news.turn or self._meetings > news.meetings or seconds > RETURN_SECONDS
        ):
            raise InputError(
                f"sibling {self.index} of the array has returned on rank {rank}, in its turn {news.turn}, and goes on "
                f"here, in its turn {self.next_turn}. Its function must do the same on all ranks. Calls of a Trainer "
                "can't depend on the rank, the time, or unseeded random numbers"
            )

    def end_by_error(self, error: BaseException) -> None:
        """End it by `error`, wherever it waits."""
        self._end, self._failed = (0, error), True
        for _ in range(_PATIENCE):
            if self.outcome is None:
                self._runner.resume_thread()

    def _check_failed(self, patience: float = 0.0) -> bool:
        """Run the pending checks that have answers; return whether one failed, which ends the sibling."""
        until = time.monotonic() + patience
        while self._checks and self._end is None:
            turn, is_ready, check = self._checks[0]
            while not is_ready():
                if time.monotonic() >= until:
                    return False
                time.sleep(_LOOK_SECONDS)
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
        """The number of the turn in which it runs next: the one it is in, or the one after."""
        return self.turns if self.in_turn else self.turns + 1

    def _post_if_late(self) -> None:
        if self._end is not None and 0 < self._end[0] < self.next_turn:
            self.array.shared.board.post_value(f"late/{self.index}")


class SiblingWatch:
    """The watch of a sibling's engine: failures are the sibling's own, not the whole run's."""

    def __init__(self, sibling: Sibling[Any], watch: FailureWatch) -> None:
        self.doing: object | None = None
        self._sibling = sibling
        self._watch = watch

    def check(self) -> None:
        """Raise PeerFailure if a rank has died."""
        self._watch.check()

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Tell the other ranks."""
        self._sibling.report_failure(error, where)


def wait_in_turn(ready: Callable[[], bool]) -> None:
    """Return when `ready()`, or at once where no sibling is running; meanwhile others' batches are computed."""
    sibling = current_sibling()
    if sibling is not None:
        sibling.wait_until(ready)


def current_sibling() -> Sibling[Any] | None:
    """Return the running sibling of this context; None outside of arrays."""
    return _current.get()
