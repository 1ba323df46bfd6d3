"""Job arrays: sibling jobs share one pipeline, so that no stage waits while any of them has work for it.

Siblings are the user's ordinary functions, each with a Trainer and a PipelineStrategy of its own. Every rank runs all
of them, one thread each, and one thread at a time. A sibling has its turn until it has handed a batch to the pipeline;
it gets the next one when the pipeline is through with that batch here, and turns come in the order in which batches
were handed in. So all ranks give the same turns in the same order, whatever takes how long, and everything that
siblings say to their like on other ranks in their turns finds its partner. Between turns, and while a sibling waits for
another rank in its own, a rank computes whatever batch of whichever sibling can be computed.

Definition 1 and section III-A of ArrayPipe, without its barrier after each iteration: nothing makes one sibling wait
for the batch of another.
"""

from __future__ import annotations

import contextvars
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from types import FrameType
from typing import Any, Generic, Literal, Protocol, TypeVar

import lightning.pytorch as pl

from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.failure import FailureWatch
from lightning_pipes.engine.mailbox import Key, Mailbox, Transport
from lightning_pipes.ir import PipelineError, PlanError, check_count
from lightning_pipes.sim.timeline import Timeline
from lightning_pipes.trainer.array_display import ArrayDisplay
from lightning_pipes.trainer.array_record import ArrayRecord
from lightning_pipes.trainer.array_size import AUTO, decided_size, enough_siblings
from lightning_pipes.trainer.baton import Runner, own_random_state, set_own_random_state
from lightning_pipes.trainer.control import Control, Place
from lightning_pipes.trainer.memory_swap import MemorySwap
from lightning_pipes.trainer.rounds import RoundOrder, Rounds
from lightning_pipes.trainer.sibling_memory import SiblingMemory

T = TypeVar("T")

_WINDOWS = 1 << 32
"""Windows that one sibling may open before its numbers run into those of the next."""
_NOTICE_SECONDS = 0.05
"""How often a rank with nothing to do looks whether a sibling has failed elsewhere."""
_LOOK_SECONDS = 0.001
"""How often it looks whether something has come about that does not come as a message."""
_GATHER_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other in the end, where no sibling says it."""
_REASON_SECONDS = 1.0
"""How long a computation that failed waits for an answer of other ranks that may say why."""
_PATIENCE = 100
"""How often a sibling that was told to end may go on waiting for something before it is left alone."""
_current: contextvars.ContextVar[Sibling[Any] | None] = contextvars.ContextVar("lightning_pipes_sibling", default=None)


class ArrayCancelledError(PipelineError):
    """The array ends before this sibling does: Ctrl-C, a rank that died, or a caller that has enough."""


class SiblingFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is elsewhere
    """This sibling failed on another rank; the message says where and why."""


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


@dataclass
class Shared:
    """What siblings have in common: made by the first that needs it, and ended with the array.

    Attributes:
        places: the host and process of each rank, once they are known.
        board: a part of the ranks' store, for what is told when a sibling ends; None for a single rank.
        facts: what the first sibling found out, by name; the others take it over, or have to agree.
    """

    watch: FailureWatch | None = None
    transport: Transport | None = None
    controls: list[Control] = field(default_factory=list)
    places: Sequence[Place] = ()
    board: Any = None
    rank: int = 0
    ranks: int = 1
    facts: dict[str, Any] = field(default_factory=dict)


class Sibling(Generic[T]):
    """One function of an array, as its strategy and its array see it.

    Attributes:
        index: counts the siblings in the order in which they began.
        turns: those that it has had, with the one it is in; the same on all ranks at the same point of the function.
        in_turn: whether it is in one: it runs, or waits for other ranks.
        outcome: how it ended; None before.
        engine: whose window is being worked on between its turns.
        trainer: the one that it has given its model last.
    """

    def __init__(self, index: int, fn: Callable[[], T], array: JobArray[T], state: Mapping[str, Any]) -> None:
        self.index = index
        self.array = array
        self.turns = 0
        self.in_turn = False
        self.outcome: Outcome[T] | None = None
        self.engine: Engine | None = None
        self.trainer: pl.Trainer | None = None
        self._fn = fn
        self._windows = 0
        self._meetings = 0
        self._failed = False
        self._checks: deque[tuple[int, Callable[[], bool], Callable[[], object]]] = deque()
        self._ready: Callable[[], bool] = lambda: True
        self._task: Callable[[], None] | None = None
        self._fate: tuple[int, BaseException] | None = None  # the turn that it does not survive, and what ends it
        self._runner = Runner(self._body, f"sibling {index}", state)

    # ---- called on its own thread

    def window(self) -> int:
        """A number for the next window of its engines, which no other sibling uses."""
        self._windows += 1
        return self.index * _WINDOWS + self._windows

    def finish(self, engine: Engine) -> None:
        """Ends its turn; returns in the next one, when the window that is open in `engine` is through on this rank."""
        self.engine, self.in_turn = engine, False
        try:
            self._pause(lambda: engine.satisfied)
        finally:
            self.engine = None
        self.array.keep(self.index, engine)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()`; its turn goes on, and meanwhile this rank computes for others."""
        if self._runner.running and not ready():
            self._pause(ready)

    def meet(self) -> None:
        """Returns when all ranks have come here, so that calls that block find their like; a failure of this sibling
        elsewhere ends it."""
        board, shared = self.array.shared.board, self.array.shared
        if board is not None:
            self._meetings += 1
            place = f"meetings/{self.index}/{self._meetings}"
            board.set(f"{place}/{shared.rank}", "")
            self.wait_until(lambda: bool(board.check([f"{place}/{rank}" for rank in range(shared.ranks)])))

    def check_later(self, come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
        """Has `check` called when `come()`, to raise what is wrong. All ranks ask for it in the same turn, go on as if
        nothing was, and find the same: an error ends the sibling `late` turns after this one, or in the middle of what
        it waits for. In that turn they call `check`, unless they can't go on without each other. `check` waits by
        itself where it is called before that."""
        self._checks.append((self.turns + late, come, check))

    def check(self) -> None:
        """Returns when all that was to be checked later is right."""
        while self._checks:
            *_, check = self._checks.popleft()
            check()

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells the other ranks that it ends by `error`, unless they know."""
        if not self._failed and not isinstance(error, (SiblingFailure, ArrayCancelledError)):
            text = f"{type(error).__name__}: {error}" + (f", in {where}" if where else "")
            self.array.tell_failure(self, text)
        self._failed = True

    def _pause(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._meet_fate()
        state = own_random_state()
        while True:
            self._runner.pause()
            if self._task is None:
                break
            self._task()
            self._task = None
        set_own_random_state(state)
        if self._fate is not None and self._fate[0] <= self.turns:
            raise self._fate[1]

    def _body(self) -> None:
        token = _current.set(self)
        try:
            self.outcome = Outcome(self.index, value=self._fn())
        except BaseException as error:  # SystemExit of one sibling must not end the others
            self.fail(error)
            self.outcome = Outcome(self.index, error=error)
            self._checks.clear()
        finally:
            self.array.take_home(self)
            _current.reset(token)

    # ---- called by its array

    @property
    def ready(self) -> bool:
        """Whether what it waits for has come about, or never will."""
        return self.doomed or self._ready() or self._wrong()

    @property
    def doomed(self) -> bool:
        """Whether it ends when it runs next."""
        return self._fate is not None and self._fate[0] <= self.next_turn

    def begin_turn(self) -> None:
        """Its next turn comes now; `go_on` until it is over."""
        self.turns += 1
        self.in_turn = True

    def go_on(self) -> bool:
        """Lets it run until it waits; whether its turn is over."""
        self._runner.go()
        return self.outcome is not None or not self.in_turn

    def compute(self) -> None:
        """Runs on its thread what its window has next, up to one computation."""
        engine = self.engine
        assert engine is not None

        def task() -> None:
            try:
                engine.advance()
            except BaseException as error:
                if not self._wrong(_REASON_SECONDS):  # else that is the reason, and other ranks find it, too
                    self.fail(error)
                    self.doom(self.next_turn, error)

        self._task = task
        self._runner.go()

    def doom(self, turn: int, error: BaseException) -> None:
        """It gets `error` in turn number `turn`: at its start, or in its middle where it waits there already. Where
        that turn is over it is the next one, and the other ranks hear of it."""
        if self._fate is None:
            self._fate = turn, error
            self._meet_fate()

    def cancel(self, error: BaseException) -> None:
        """Ends it by `error`, wherever it waits."""
        self._fate, self._failed = (0, error), True
        for _ in range(_PATIENCE):
            if self.outcome is None:
                self._runner.go()

    def _wrong(self, patience: float = 0.0) -> bool:
        """Whether one of the things to be checked later turns out to be wrong, which dooms it."""
        until = time.monotonic() + patience
        while self._checks and self._fate is None:
            turn, come, check = self._checks[0]
            while not come():
                if time.monotonic() >= until:
                    return False
                time.sleep(_LOOK_SECONDS)
            self._checks.popleft()
            try:
                check()
            except PipelineError as error:
                self._checks.clear()
                self.doom(turn, error)
                return self.doomed
        return False

    @property
    def next_turn(self) -> int:
        """The number of the turn in which it runs next: the one it is in, or the one after."""
        return self.turns if self.in_turn else self.turns + 1

    def _meet_fate(self) -> None:
        if self._fate is not None and 0 < self._fate[0] < self.next_turn:
            self.array.tell_late_end(self)


class SiblingWatch:
    """What the engine of a sibling tells of failures: they are the sibling's own, not the whole run's."""

    def __init__(self, sibling: Sibling[Any], watch: FailureWatch) -> None:
        self.doing: object | None = None
        self._sibling = sibling
        self._watch = watch

    def check(self) -> None:
        """Raises PeerFailure if a rank has died."""
        self._watch.check()

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells the other ranks."""
        self._sibling.fail(error, where)


class _Kept:
    """The transport of all siblings, which no single one closes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def mailbox(self) -> Mailbox:
        return self._transport.mailbox

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._transport.send(rank, key, tree, flags)

    def close(self) -> None:
        pass


def wait_in_turn(ready: Callable[[], bool]) -> None:
    """Returns when `ready()`, or at once where no sibling is running; meanwhile others' batches are computed."""
    sibling = current_sibling()
    if sibling is not None:
        sibling.wait_until(ready)


def soon(come: Callable[[], bool], check: Callable[[], object], late: int) -> None:
    """`Sibling.check_later`, or `check` at once where no sibling is running."""
    sibling = current_sibling()
    if sibling is None:
        check()
    else:
        sibling.check_later(come, check, late)


def current_sibling() -> Sibling[Any] | None:
    """The sibling whose function is running; None outside of arrays."""
    return _current.get()


def siblings_at_a_time() -> int:
    """How many share the ranks with the one that is running, itself included; 1 outside of arrays."""
    sibling = current_sibling()
    return 1 if sibling is None else sibling.array.size


class JobArray(Generic[T]):
    """Runs functions as siblings that share one pipeline.

    Every rank makes one of the same size and gives it the same functions in the same order.

    Args:
        size: how many siblings are under way at a time. Twice as many as there are stages keep all stages busy; with
            fewer than stages, each batch is cut into more micro-batches. "auto" begins with one, and after its first
            step, which shows what a sibling takes, has as many as `memory` has room for, but no more than are of use.
        progress: whether to show on rank 0 how far the siblings are; by default where standard error is a terminal.
        memory: lets weights and optimizers of more siblings take part than the device has room for.
        rounds: says in which order a batch of every sibling is computed, whole, one stage a rank; nobody's next batch
            begins before all are over, as in the paper. For comparison: without, siblings go on as soon as they can.

    Attributes:
        size: siblings at a time, as far as it is decided.
        timeline: when each rank computed for which sibling, on all ranks, once `run` has come to its end; the numbers
            of its batches count those of a sibling. None before, after a failure, and where nothing was trained.

    Raises:
        PlanError: `size` is no positive number, or "auto" without `memory`, or there are rounds and memory is swapped;
            in `run`, "auto" finds no room for two.
    """

    def __init__(
        self,
        size: int | Literal["auto"],
        progress: bool | None = None,
        memory: MemorySwap | None = None,
        rounds: RoundOrder | None = None,
    ) -> None:
        if size == AUTO and memory is None:
            raise PlanError("size='auto' follows from memory: give memory=MemorySwap(device_bytes=...), or a number")
        if rounds is not None and memory is not None:
            raise PlanError("an array in rounds keeps all siblings on the device; leave out memory, or rounds")
        self.size = 1 if size == AUTO else check_count("size", size)
        self._rounds: Rounds[Sibling[T]] | None = None if rounds is None else Rounds(rounds)
        self.memory: SiblingMemory = memory or SiblingMemory()
        self._decides = memory if size == AUTO else None
        """What decides the size."""
        self._deciding = False
        self._asked = -1
        """The sibling after which all ranks were asked last."""
        self.timeline: Timeline | None = None
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._display: ArrayDisplay | None = None
        self._record = ArrayRecord()
        self.shared = Shared()
        self._queue: deque[Sibling[T] | None] = deque()
        """Who has a turn next; None where a sibling has ended one turn earlier than on other ranks."""
        self._computable: deque[Sibling[T]] = deque()
        """Siblings whose windows have something to compute, in the order in which it was seen."""
        self._living: dict[int, Sibling[T]] = {}
        self._begun = 0
        self._home: Mapping[str, Any] = {}
        self._interrupts = 0
        self._failures = 0
        self._looked = 0.0

    def run(self, jobs: Iterable[Callable[[], T]]) -> Iterator[Outcome[T]]:
        """How each sibling ended, as they end. The next job is asked for when a place is free.

        A sibling that raises ends alone; whoever iterates decides whether the others go on.

        Raises:
            PlanError: it is called by a sibling.
            PeerFailure: a rank has died.
            KeyboardInterrupt: after Ctrl-C, when all siblings have been told. A second one does not wait for them.
        """
        if current_sibling() is not None:
            raise PlanError("a sibling of an array can't run an array itself; give the outer one all the jobs")
        source, self._home = iter(jobs), own_random_state()
        self._display = ArrayDisplay(self._progress and os.environ.get("LOCAL_RANK", "0") == "0")
        if self._decides is not None:
            self.size, self._deciding, self._asked = 1, True, -1
        self.memory.open(several=self._deciding or self.size > 1)
        restore = self._note_interrupts()
        end: BaseException = ArrayCancelledError("the array was closed before this sibling had ended")
        try:
            more = filling = True
            while True:
                while more and len(self._queue) < self.size:
                    set_own_random_state(self._home)
                    job = next(source, None)
                    if job is None:
                        more = False
                        break
                    sibling = Sibling(self._begun, job, self, self._home)
                    self._living[self._begun] = sibling
                    self._begun += 1
                    yield from self._have_turn(sibling, filling)
                filling = False
                if not self._queue:
                    self._gather_timeline()
                    return
                if self._rounds is not None:
                    self._compute_round(self._rounds)
                head = self._queue[0]
                if head is not None:
                    self._work_until(head)
                self._queue.popleft()
                if head is not None:
                    yield from self._have_turn(head)
        except BaseException as error:
            end = error
            raise
        finally:
            if self._interrupts < 2:  # else a sibling may be running
                self._cancel(end)
            set_own_random_state(self._home)
            restore()
            self._close()

    # ---- what its siblings ask for

    def expected(self, stages: int) -> int:
        """Siblings at a time; as many as are of use where memory decides, so that all cut their batches alike."""
        return self.size if self._decides is None else enough_siblings(stages)

    def keep(self, index: int, engine: Engine) -> None:
        """Writes down what was computed for a batch of sibling number `index`."""
        self._record.add(index, engine)

    def watch(self, make: Callable[[], FailureWatch], rank: int, ranks: int) -> FailureWatch:
        """The watch of all siblings; the first one makes it."""
        shared = self.shared
        if shared.watch is None:
            shared.watch, shared.rank, shared.ranks = make(), rank, ranks
            if ranks > 1:
                shared.board = shared.watch.store()
        return shared.watch

    def control(self, sibling: Sibling[T], make: Callable[[Sequence[Place]], Control]) -> Control:
        """Connections for one sibling, made unless one that has ended left its own. Collective. All ranks meet before:
        one that took connections although the sibling has failed elsewhere would have others than those later."""
        sibling.meet()
        control = self.shared.controls.pop(0) if self.shared.controls else make(self.shared.places)
        self.shared.places = control.places
        return control

    def take_back(self, control: Control) -> None:
        """A sibling has no use for its connections any more. Collective: all calls on them were made by all ranks."""
        self.shared.controls.append(control)

    def transport(self, make: Callable[[], Transport]) -> Transport:
        """The transport of all siblings, which `close` leaves open; the first one makes it."""
        if self.shared.transport is None:
            self.shared.transport = make()
        return _Kept(self.shared.transport)

    def tell_failure(self, sibling: Sibling[T], text: str) -> None:
        """Lets the other ranks know by which turn `sibling` fails here, and why."""
        shared = self.shared
        if shared.board is not None:
            number = shared.board.add("failures", 1)
            text = f"sibling {sibling.index} failed on rank {shared.rank}: {text}"
            shared.board.set(f"failure/{number}", pickle.dumps((sibling.index, sibling.next_turn, shared.rank, text)))

    def tell_late_end(self, sibling: Sibling[T]) -> None:
        """Lets a rank on which `sibling` has ended already know that it has its place here for one more turn."""
        if self.shared.board is not None:
            self.shared.board.set(f"late/{sibling.index}/{self.shared.rank}", "")

    def take_home(self, sibling: Sibling[T]) -> None:
        """Its weights and optimizers are its own again, and lie in no memory that siblings share."""
        self.memory.leave(sibling.index)

    # ---- turns

    def _have_turn(self, sibling: Sibling[T], filling: bool = False) -> Iterator[Outcome[T]]:
        """A turn of a sibling. While the array is `filling` nobody computes meanwhile: a rank that computes keeps all
        others waiting, and the first siblings would start one by one, each some computations after the one before."""
        self._work_until(_Room(self.memory, sibling.index))
        self.memory.begin_turn(sibling.index)
        self.memory.look_ahead(self._coming())
        sibling.begin_turn()
        while not sibling.go_on():
            self._work_until(sibling, idle=filling)
        if sibling.outcome is None:
            self._end_turn(sibling)
        self._show(sibling)
        if self._deciding and self._asked < sibling.index and (sibling.outcome is not None or _has_stepped(sibling)):
            self._agree_on_size(sibling)
        if sibling.outcome is None:
            self._queue.append(sibling)
            return
        del self._living[sibling.index]
        if self._ends_later_elsewhere(sibling.index, sibling.outcome):
            self._queue.append(None)
        set_own_random_state(self._home)
        yield sibling.outcome

    def _end_turn(self, sibling: Sibling[T]) -> None:
        trainer, memory = sibling.trainer, self.memory
        assert trainer is not None, "who has a window has a trainer"
        try:
            memory.end_turn(sibling.index, trainer.lightning_module, trainer.optimizers, trainer.strategy.root_device)
        except PlanError as error:
            sibling.fail(error)
            sibling.doom(sibling.turns + 1, error)

    def _agree_on_size(self, sibling: Sibling[T]) -> None:
        """Decides with all ranks, unless the sibling has ended on one: each says so, or for how many it has room."""
        memory, shared, engine = self._decides, self.shared, sibling.engine
        assert memory is not None
        self._asked = sibling.index
        trainer = None if sibling.outcome is not None or sibling.doomed else sibling.trainer
        rooms = [0 if trainer is None else memory.room(trainer.num_devices)]
        if shared.board is not None:
            keys = [f"room/{sibling.index}/{rank}" for rank in range(shared.ranks)]
            shared.board.set(keys[shared.rank], str(rooms[0]))
            for key in keys:
                self._work_until(_Told(shared.board, key, key))
            rooms = [int(shared.board.get(key)) for key in keys]
        if all(rooms):
            assert engine is not None
            self.size, self._deciding = decided_size(rooms, engine.plan.n_ranks), False

    def _show(self, sibling: Sibling[T]) -> None:
        assert self._display is not None
        if sibling.outcome is None:
            self._display.after_turn(sibling.index, sibling.trainer)
        else:
            self._display.ended(sibling.index)

    def _ends_later_elsewhere(self, index: int, outcome: Outcome[T]) -> bool:
        """Whether a sibling that has ended here goes on to its next turn on other ranks, so that its place is taken
        until then. One that has returned does the same everywhere, or fails by the same turn."""
        shared, later = self.shared, False
        if shared.board is None:
            return False
        shared.board.set(f"ended/{index}/{shared.rank}", "")
        if outcome.error is None:
            return False
        for rank in range(shared.ranks):
            if rank != shared.rank:
                ended, late = f"ended/{index}/{rank}", f"late/{index}/{rank}"
                self._work_until(_Told(shared.board, ended, late))
                later |= bool(shared.board.check([late]))
        return later

    # ---- work

    def _compute_round(self, rounds: Rounds[Sibling[T]]) -> None:
        """Computes all that siblings have handed in, once each has; then all of them have a turn."""
        if not rounds.to_come:
            siblings = [s for s in self._queue if s is not None]
            rounds.begin(siblings)
            for sibling in siblings:
                self._work_until(sibling)
            rounds.end(len(self._queue))
        rounds.to_come -= 1

    def _work_until(self, awaited: _Awaited, idle: bool = False) -> None:
        """Computes for siblings between their turns until `awaited.ready`; sleeps where there is nothing to do, or
        always if `idle`."""
        while not awaited.ready:
            if self._interrupts:
                raise KeyboardInterrupt
            if idle or not self._work():
                self._sleep()

    def _work(self) -> bool:
        """Runs one computation with what it sends; whether there was one."""
        chosen = self._choose() if self._rounds is None else self._rounds.next()
        if chosen is None:
            return False
        started = time.monotonic()
        if not chosen.doomed:
            self._compute_here(chosen)
        assert self._display is not None
        self._display.computed(time.monotonic() - started)
        return True

    def _choose(self) -> Sibling[T] | None:
        """Whose computation could be run first. Simulated on 8 stages with 16 siblings of mixed batch sizes, a stage
        that is to compute all the time idles 5 % of it where turns decide among what has come during a computation,
        and a quarter where backwards come first."""
        found: list[tuple[int, Sibling[T]]] = []
        for sibling in self._queue:
            if sibling is None or sibling.engine is None or sibling.doomed or sibling in self._computable:
                continue
            since = sibling.engine.upcoming_since()
            if since is not None:
                found.append((since, sibling))
        self._computable.extend(sibling for _, sibling in sorted(found, key=itemgetter(0)))
        memory = self.memory
        chosen = next((s for s in self._computable if s.doomed or memory.holds(s.index)), None)
        if chosen is None:  # who holds its place on the device comes first, to give it free
            chosen = next((s for s in self._computable if memory.has_room(s.index)), None)
        if chosen is not None:
            self._computable.remove(chosen)
        return chosen

    def _compute_here(self, sibling: Sibling[T]) -> None:
        """Runs a computation with the sibling's weights on the device, while those that come next are brought."""
        engine, memory = sibling.engine, self.memory
        i = None if engine is None else engine.upcoming()
        assert engine is not None
        assert i is not None
        memory.begin_block(sibling.index, i.stage)
        memory.look_ahead(self._coming())
        started = time.monotonic()
        sibling.compute()
        memory.end_block(sibling.index, time.monotonic() - started, keep=engine.holds_weights or sibling.doomed)

    def _coming(self) -> list[int]:
        """Whose weights will be wanted next, the first one first."""
        return [s.index for s in (*self._computable, *self._queue) if s is not None]

    def _sleep(self) -> None:
        shared = self.shared
        if shared.watch is not None:
            shared.watch.check()
        if shared.transport is None:
            time.sleep(_LOOK_SECONDS)
        else:
            shared.transport.mailbox.wait_some(_LOOK_SECONDS)
        now = time.monotonic()
        if shared.board is not None and now > self._looked + _NOTICE_SECONDS:
            self._looked = now
            while shared.board.check([f"failure/{self._failures + 1}"]):
                self._failures += 1
                index, turn, rank, text = pickle.loads(shared.board.get(f"failure/{self._failures}"))
                if rank != shared.rank and index in self._living:
                    self._living[index].doom(turn, SiblingFailure(text))

    # ---- ends

    def _gather_timeline(self) -> None:
        shared = self.shared
        rows = [self._record.events]
        if shared.ranks > 1:
            if not shared.controls:  # siblings that were pruned, or failed, leave none
                assert shared.watch is not None
                shared.controls.append(Control(range(shared.ranks), shared.watch, _GATHER_TIMEOUT))
            rows = shared.controls[0].all_gather(self._record.events)
        self.timeline = self._record.timeline(rows)

    def _cancel(self, error: BaseException) -> None:
        """Ends all siblings that are left, none of which may count on other ranks any more."""
        watch = self.shared.watch
        if self._living and watch is not None and watch.error is None:
            watch.fail(error)
        for sibling in self._living.values():
            self.take_home(sibling)
        cancelled = ArrayCancelledError(f"the array has ended: {type(error).__name__} {error}".rstrip())
        for sibling in self._living.values():
            sibling.cancel(cancelled)
        self._living.clear()
        self._queue.clear()

    def _close(self) -> None:
        shared, self.shared = self.shared, Shared()
        if self._display is not None:
            self._display.close()
        self.memory.close()
        for control in shared.controls:
            control.close()
        if shared.transport is not None:
            shared.transport.close()
        if shared.watch is not None:
            shared.watch.close()

    def _note_interrupts(self) -> Callable[[], None]:
        """Ctrl-C is taken note of, and raised where nothing runs; the second one is raised at once."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = signal.getsignal(signal.SIGINT)

        def note(signum: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, note)

        def restore() -> None:
            signal.signal(signal.SIGINT, before)

        return restore


def _has_stepped(sibling: Sibling[Any]) -> bool:
    return sibling.trainer is not None and sibling.trainer.global_step > 0


class _Awaited(Protocol):
    @property
    def ready(self) -> bool:
        """Whether waiting is over."""


@dataclass(frozen=True)
class _Room:
    """A sibling's weights can be brought to the device."""

    memory: SiblingMemory
    index: int

    @property
    def ready(self) -> bool:
        return self.memory.has_room(self.index)


@dataclass(frozen=True)
class _Told:
    """One of two keys has been set."""

    board: Any
    one: str
    other: str

    @property
    def ready(self) -> bool:
        return any(self.board.check([key]) for key in (self.one, self.other))
