"""Job arrays: several sibling jobs share one pipeline, so that no stage idles while any sibling has work for it.

Siblings are ordinary functions of the user. Each of them creates its own Trainer with its own PipelineStrategy. Every
rank runs all siblings, each in its own thread, but only one thread runs at a time. The turn of a sibling lasts until it
has handed a batch to the pipeline. Its next turn comes when this rank has finished its part of that batch. Turns come
in the order in which batches were handed in, and the first batches are put in an order that keeps all stages busy. All
ranks therefore give the same turns in the same order, regardless of how long anything takes, and each message or
collective that a sibling issues in a turn finds its counterpart on the other ranks. Between turns, and while a sibling
waits for another rank during its turn, a rank computes any batch that is ready, of any sibling.

This implements Definition 1 and section III-A of ArrayPipe, but without its barrier after each iteration: no sibling
waits for the batch of another sibling.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipes.arrays.array_display import ArrayDisplay, ArrayRecord
from lightning_pipes.arrays.arrivals import Arrivals, order_first_batches
from lightning_pipes.arrays.interrupts import Interrupts
from lightning_pipes.arrays.memory_swap import AUTO, MemorySwap, SiblingMemory, choose_microbatches, choose_size
from lightning_pipes.arrays.rounds import RoundOrder, Rounds
from lightning_pipes.arrays.siblings.baton import read_random_state, restore_random_state
from lightning_pipes.arrays.siblings.connections import join
from lightning_pipes.arrays.siblings.shared import SharedConnections
from lightning_pipes.arrays.siblings.sibling import ArrayCancelledError, MisfitError, Outcome, Sibling, current_sibling
from lightning_pipes.arrays.siblings.sibling_board import Failure, JobCount, PeerStore, Return
from lightning_pipes.engine.allocator import kept_heap, share_heap, trim_heap
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.slurm import requeue_slurm_job
from lightning_pipes.ir import InputError, PlanError, check_count, check_type, short_repr
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.sim.timeline import Event, Timeline
from lightning_pipes.trainer.loop.connections import share_connections
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.stopping import sigterm_error
from lightning_pipes.trainer.weights.pretrained import list_names

_log = logging.getLogger(__name__)
T = TypeVar("T")

_END_OF_QUEUE: Any = object()
_IDLE_CHECK_SECONDS = 0.05
"""The interval at which an idle rank checks whether a sibling has ended on another rank."""
_ARRAY_POLL_SECONDS = 0.001
"""The interval at which an idle rank polls for changes that no message reports."""


class JobArray(Generic[T]):
    """Run functions as siblings that share one pipeline.

    Every rank creates an array of the same size and passes it the same functions in the same order.

    Args:
        size: number of siblings that run at a time. Twice the number of stages keeps all stages busy. With fewer
            siblings, each batch is cut into more micro-batches, unless the sibling's strategy sets the number of
            micro-batches. With "auto", the array starts with one sibling. After the first step of this sibling, the
            array runs as many siblings as `memory` has room for, but at most two per stage.
        progress: whether rank 0 shows one line per running sibling. By default, it does so if standard error is a
            terminal.
        memory: moves weights and optimizer states between device and host, so that more siblings can run than fit on
            the device.
        rounds: orders whole batches of all siblings in rounds by the measured times of the stages, as the arrays of the
            paper do. Rounds are meant for comparison: without them, siblings do not wait for each other. `round_order`
            needs one stage per rank.

    Attributes:
        size: number of siblings that run at a time. With "auto", this is 1 until the size is decided.
        timeline: computations of all siblings on each rank, available after `run` has ended. Ranks are in the order of
            the pipeline, starting with stage 0. Batches are numbered per sibling. It is None before the end of `run`,
            after a failure, and if no sibling was trained.

    Raises:
        InputError: `size` is not a positive number, it is "auto" and `memory` is missing, or another argument has a
            wrong type.
    """

    def __init__(
        self,
        size: int | Literal["auto"],
        progress: bool | None = None,
        memory: MemorySwap | None = None,
        rounds: RoundOrder | None = None,
    ) -> None:
        if rounds is not None and not callable(rounds):
            raise InputError(f"rounds must be a function, as in rounds=round_order, got {short_repr(rounds)}")
        check_type("memory", memory, MemorySwap | None)
        check_type("progress", progress, bool | None)
        share_heap()
        decides = isinstance(size, str) and size == AUTO
        if decides and memory is None:
            raise InputError(
                "size='auto' is computed from memory: pass memory=MemorySwap(device_bytes=...), or a number"
            )
        self.size = 1 if decides else check_count("size", size, "; or size='auto'")
        self._rounds: Rounds[Sibling[T]] | None = None if rounds is None else Rounds(rounds)
        self._rounds_begun = 0
        self.memory: SiblingMemory = memory or SiblingMemory()
        self._decides = memory if decides else None
        """The memory that decides the size, or None if the size is given."""
        self._deciding = False
        self._last_asked = -1
        """The index of the sibling after which all ranks were last asked for their room."""
        self.timeline: Timeline | None = None
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._display: ArrayDisplay | None = None
        self._record = ArrayRecord()
        self.shared = SharedConnections()
        self._queue: deque[Sibling[T] | None] = deque()
        """Siblings in the order of their next turns.

        An entry is None if its sibling ended one turn earlier than on other ranks.
        """
        self._arrivals: Arrivals[Sibling[T]] = Arrivals()
        self._running: dict[int, Sibling[T]] = {}
        self._news_of_peers: defaultdict[int, list[tuple[int, Failure | Return, float]]] = defaultdict(list)
        """News from other ranks about siblings that have not ended here, by the index of the sibling.

        Each entry consists of the rank, the news, and its time of arrival.
        """
        self._job_counts_of_peers: dict[int, int] = {}
        """The number of jobs of each rank that has no more jobs."""
        self._started = 0
        self._home: Mapping[str, Any] = {}
        self._interrupts = Interrupts(lambda: self.shared.has_met)
        self._terminated = False
        """Whether all ranks have agreed to end the siblings because of SIGTERM."""
        self._looked = 0.0

    def run(self, jobs: Iterable[Callable[[], T]]) -> Iterator[Outcome[T]]:
        """Yield the outcome of each sibling when it ends. The next job is taken when a slot becomes free.

        If a sibling raises an exception, only this sibling ends. The caller decides whether the other siblings
        continue.

        Args:
            jobs: the functions to run, the same on all ranks.

        Raises:
            InputError: the method is called by a sibling, a job is not a function, or a job behaves differently on
                another rank.
            PlanError: "auto" finds no room for the states of two siblings, or a round is impossible; see
                `Rounds.begin_round`.
            PeerFailure: a rank has died.
            SIGTERMException: any rank received SIGTERM, and the running siblings have ended because of it, each after
                the same batch on all ranks. In a SLURM job, SIGUSR1 does the same, and rank 0 requeues the job. The
                exception is raised immediately if the ranks have not connected yet. In all cases, no further job is
                started.
            KeyboardInterrupt: Ctrl-C was pressed. It is raised after all siblings have been ended, but a second Ctrl-C
                does not wait for them.
        """
        if current_sibling() is not None:
            raise InputError("a sibling of an array can't run another array; pass all jobs to the outer array")
        source, self._home = iter(jobs), read_random_state()
        self._display = ArrayDisplay(self._progress and os.environ.get("LOCAL_RANK", "0") == "0")
        if self._decides is not None:
            self.size, self._deciding, self._last_asked = 1, True, -1
        self.memory.open(several=self._deciding or self.size > 1)
        self._interrupts.open()
        heap = ExitStack()
        heap.enter_context(kept_heap())
        end: BaseException = ArrayCancelledError("the array was closed before this sibling had ended")
        try:
            more = filling = True
            while True:
                while more and not self._terminated and len(self._queue) < self.size:
                    restore_random_state(self._home)
                    job = next(source, _END_OF_QUEUE)
                    if job is _END_OF_QUEUE:
                        more = False
                        self.shared.board.post_news(JobCount(self._started))
                        break
                    if not callable(job):
                        raise InputError(f"job {self._started} of the array is {job!r}, but must be a function")
                    sibling = Sibling(self._started, partial(_run_with_connections, job), self, self._home)
                    self._running[self._started] = sibling
                    self._started += 1
                    yield from self._give_turn(sibling, filling)
                if filling:
                    self._order_first_batches()
                    filling = False
                if not self._queue and self._terminated:
                    self._requeue_if_requested()
                    raise sigterm_error()
                if not self._queue:
                    self.timeline = self._record.timeline(self._gather_events())
                    break
                if self._rounds is not None and not self._rounds.turns_left:
                    turns = self._rounds.begin_round(self._queue, self._share_order, self.memory)
                    self._queue = deque(self._queue[n] for n in turns)
                head = self._queue[0]
                if head is not None:
                    self._work_until(head.is_ready)
                self._queue.popleft()
                if self._rounds is not None:
                    self._rounds.begin_turn(head)
                if head is not None:
                    yield from self._give_turn(head)
        except GeneratorExit:  # the caller stopped iterating, or raised an exception
            raise
        except BaseException as error:
            end = error
            raise
        finally:
            if not self._interrupts.raised_at_once:  # otherwise, a sibling may still be running
                self._cancel(end)
            restore_random_state(self._home)
            self._interrupts.close()
            self._close()
            heap.close()
        self._interrupts.raise_later()

    # ---- called by siblings

    def count_default_microbatches(self, stages: int) -> int:
        """Return the default number of micro-batches per batch.

        It is the smallest number that keeps all stages busy, even if siblings have batches of different sizes. In
        rounds, and if the array decides its size, it is 1.
        """
        return 1 if self._rounds is not None or self._decides is not None else choose_microbatches(stages, self.size)

    @property
    def runs_in_rounds(self) -> bool:
        """Whether one batch of every sibling is computed per round."""
        return self._rounds is not None

    @property
    def is_terminated(self) -> bool:
        """Whether this process got SIGTERM."""
        return self._interrupts.terminated

    def record_window(self, index: int, engine: Engine) -> None:
        """Record the computations of a batch of sibling number `index`."""
        self._record.add(index, engine)

    def release_sibling(self, index: int) -> None:
        """Move the sibling's weights and optimizers out of shared memory."""
        self.memory.release_sibling(index)

    # ---- turns

    def _give_turn(self, sibling: Sibling[T], filling: bool = False) -> Iterator[Outcome[T]]:
        """Give a sibling a turn and yield its outcome if it ends in this turn.

        While the array is `filling`, no other sibling computes during the turn. A computing rank keeps all other ranks
        waiting, so the first siblings would start one by one, each several computations after the previous sibling.
        """
        self._work_until(lambda: self.memory.has_room(sibling.index))
        self.memory.begin_turn(sibling.index)
        self.memory.look_ahead(self._upcoming_indices())
        sibling.begin_turn()
        while not sibling.resume_turn():
            self._work_until(sibling.is_ready, idle=filling)
        if sibling.leaves_free_memory or sibling.outcome is not None:
            trim_heap(kept=True)
            sibling.leaves_free_memory = False
        if sibling.outcome is None:
            self._end_turn(sibling)
        self._update_display(sibling)
        if (
            self._deciding
            and self._last_asked < sibling.index
            and (sibling.outcome is not None or _has_stepped(sibling))
        ):
            self._agree_on_size(sibling)
        if sibling.outcome is None:
            self._queue.append(sibling)
            return
        self._terminated |= isinstance(sibling.outcome.error, SIGTERMException)  # on all ranks, in the same turn
        del self._running[sibling.index]
        self.shared.stage_loads.end_sibling(sibling.index)
        self.shared.tensors.renew(sibling.index)  # the module may exist for some time until it is collected
        self.shared.tensors.release(sibling.index)
        self._news_of_peers.pop(sibling.index, None)
        if self._fails_later_on_peers(sibling):
            self._queue.append(None)
        restore_random_state(self._home)
        yield sibling.outcome

    def _order_first_batches(self) -> None:
        """Put the siblings that have handed in their first batches in an order that keeps all stages busy.

        The order is the same on all ranks, even if the ranks loaded batches of different sizes or measured other times.
        """
        if self._rounds is not None or len(self._queue) < 3:
            return
        rows = {s.index: s.engine.plan.jobs[0].rows for s in self._queue if s is not None and s.engine is not None}
        work = dict(zip(rows, self.shared.stage_loads.compare_batches(rows), strict=True))
        mine = [0.0 if s is None else work.get(s.index, 0.0) for s in self._queue]
        work_of_ranks = map(json.loads, self._exchange("work", json.dumps(mine), idle=True))
        order = order_first_batches([max(each) for each in zip(*work_of_ranks, strict=True)])
        self._queue = deque(self._queue[n] for n in order)

    def _end_turn(self, sibling: Sibling[T]) -> None:
        trainer, memory = sibling.trainer, self.memory
        assert trainer is not None, "a sibling with a window has a trainer"
        host: PipelineHost = trainer.strategy  # type: ignore[assignment]  # a sibling with a window has one
        changed = self.shared.tensors.renew(sibling.index)
        if changed:
            _log.info(
                "Sibling %d has changed %s, which did not train when it began, and has separate memory for it now",
                sibling.index,
                list_names(changed),
            )
            memory.release_sibling(sibling.index)
        try:
            with host.current_run.cut.scope.module_view(False):  # stand-ins for other stages are not part of the state
                memory.end_turn(
                    sibling.index, trainer.lightning_module, trainer.optimizers, trainer.strategy.root_device
                )
        except PlanError as error:
            misfit = MisfitError(str(error))
            sibling.report_failure(misfit)
            sibling.fail_at(sibling.turns + 1, misfit)

    def _agree_on_size(self, sibling: Sibling[T]) -> None:
        """Decide the size together with all ranks, unless the sibling has ended on one of them.

        Each rank publishes the number of states that it has room for, or 0 if the sibling has ended there.
        """
        memory, engine = self._decides, sibling.engine
        assert memory is not None
        self._last_asked = sibling.index
        trainer = None if sibling.outcome is not None or sibling.is_failing else sibling.trainer
        room = 0 if trainer is None else memory.count_states_that_fit(trainer.num_devices)
        rooms = [int(each) for each in self._exchange(f"room/{sibling.index}", str(room))]
        if all(rooms):
            assert engine is not None
            self.size, self._deciding = choose_size(rooms, engine.plan.n_ranks), False

    def _update_display(self, sibling: Sibling[T]) -> None:
        assert self._display is not None
        if sibling.outcome is None:
            self._display.update_sibling(sibling.index, sibling.trainer)
        else:
            self._display.end_sibling(sibling.index, sibling.counts)

    def _fails_later_on_peers(self, sibling: Sibling[T]) -> bool:
        """Return whether a sibling that has ended here continues until its next turn on other ranks.

        If so, its slot stays occupied until that turn. A sibling that has returned also returns in this turn on the
        other ranks, or fails there no later than in this turn.
        """
        board, later = self.shared.board, False
        ended, late = f"ended/{sibling.index}", f"late/{sibling.index}"
        board.post_value(ended)
        if not sibling.has_failed:
            return False
        for rank in board.others:
            self._work_until(partial(_has_posted_either, board, ended, late, rank))
            later |= board.has_posted(late, rank)
        return later

    # ---- computations

    def _share_order(self, find: Callable[[], str]) -> str:
        """Return the order of the next round that rank 0 finds.

        Other ranks may not yet have heard of failing siblings, and a time-limited search finds different orders on
        different ranks.
        """
        self._rounds_begun += 1
        order = "" if self.shared.board.rank else find()
        return self._exchange(f"order/{self._rounds_begun}", order, idle=True)[0]

    def _exchange(self, key: str, value: str, idle: bool = False) -> list[str]:
        """Publish a value of this rank, and return the values of all ranks as soon as they are published.

        Args:
            key: identifies the values. It must not have been used before.
            value: the value of this rank.
            idle: whether the rank sleeps instead of computing while it waits.
        """
        board = self.shared.board
        board.post_value(key, value)
        self._work_until(lambda: board.have_all_posted(key), idle)
        return board.values(key) if board.others else [value]

    def _work_until(self, ready: Callable[[], bool], idle: bool = False) -> None:
        """Compute for siblings between their turns until `ready()` is true.

        The rank sleeps if it has nothing to compute, or always if `idle` is set.
        """
        while not ready():
            if self._interrupts.count:
                raise KeyboardInterrupt
            if idle or not self._work():
                self._sleep()

    def _work(self) -> bool:
        """Run one computation and its messages, and return whether a computation was ready."""
        chosen = (
            self._arrivals.choose_sibling(self._queue, self.memory)
            if self._rounds is None
            else self._rounds.next_sibling(self.memory)
        )
        if chosen is None:
            return False
        started = read_seconds()
        if not chosen.is_failing:
            self._compute_here(chosen)
        assert self._display is not None
        self._display.add_busy_seconds(read_seconds() - started)
        return True

    def _compute_here(self, sibling: Sibling[T]) -> None:
        """Run a computation with the sibling's weights on the device, and prefetch the states of the next siblings."""
        engine, memory = sibling.engine, self.memory
        assert engine is not None
        i = engine.next_ready()
        if i is None:  # another message has arrived since, and the policy now waits for a better choice
            return
        memory.begin_block(sibling.index, i.stage)
        memory.look_ahead(self._upcoming_indices())
        sibling.compute()
        memory.end_block(sibling.index, keep=engine.holds_weights or sibling.is_failing)

    def _upcoming_indices(self) -> Iterable[int]:
        """Return the indices of the siblings that need their states next, in order."""
        if self._rounds is not None:
            return self._rounds.upcoming_indices(self._queue)
        return [*self._arrivals.waiting_indices, *(s.index for s in self._queue if s is not None)]

    def _sleep(self) -> None:
        shared = self.shared
        if shared.watch is not None:
            shared.watch.check()
        if shared.transport is None:
            time.sleep(_ARRAY_POLL_SECONDS)
        else:
            shared.transport.mailbox.wait_any(_ARRAY_POLL_SECONDS)
        now = time.monotonic()
        if now > self._looked + _IDLE_CHECK_SECONDS:
            self._looked = now
            self._handle_news(now)

    def _handle_news(self, now: float) -> None:
        """Handle news about siblings that ended on other ranks, including siblings that have not started here."""
        for rank, news in self.shared.board.read_news():
            if isinstance(news, JobCount):
                self._job_counts_of_peers[rank] = news.jobs
            elif news.index >= self._started or news.index in self._running:
                self._news_of_peers[news.index].append((rank, news, now))
        for rank, jobs in self._job_counts_of_peers.items():
            if self._started > jobs:
                raise InputError(
                    f"rank {rank} has {jobs} jobs for the array, but rank {self.shared.board.rank} has begun another "
                    "one. All ranks need the same jobs in the same order, so jobs must not depend on the rank, or on "
                    "files that only some ranks can read"
                )
        for index in self._news_of_peers.keys() & self._running.keys():
            for rank, news, since in self._news_of_peers[index]:
                self._running[index].handle_news(rank, news, now - since)

    # ---- ends

    def _requeue_if_requested(self) -> None:
        """Requeue the SLURM job if the siblings have ended because SLURM requested this of any rank."""
        requests = self._exchange("requeue", json.dumps(self._interrupts.is_requeue), idle=True)
        if self.shared.board.rank == 0 and any(map(json.loads, requests)):
            requeue_slurm_job()

    def _gather_events(self) -> Sequence[Sequence[Event]]:
        """Return the events of each rank."""
        shared, events = self.shared, self._record.events
        if not shared.board.others:
            return [events]
        fault_point("array.gather")
        return shared.gather_events(self._exchange("last", shared.describe_free_controls(self.size)), events)

    def _cancel(self, error: BaseException) -> None:
        """End all remaining siblings. None of them may wait for other ranks any longer."""
        watch = self.shared.watch
        if self._running and watch is not None and watch.error is None:
            watch.report_failure(error)
        for sibling in self._running.values():
            self.release_sibling(sibling.index)
        cancelled = error
        if not isinstance(error, ArrayCancelledError):
            cancelled = ArrayCancelledError(f"the array has ended: {type(error).__name__} {error}".rstrip())
        for sibling in self._running.values():
            sibling.end_by_error(cancelled)
        self._running.clear()
        self._queue.clear()

    def _close(self) -> None:
        shared, self.shared = self.shared, SharedConnections()
        if self._display is not None:
            self._display.close()
        self.memory.close()
        fault_point("array.close")
        shared.close()


def _has_posted_either(board: PeerStore, one: str, other: str, rank: int) -> bool:
    return board.has_posted(one, rank) or board.has_posted(other, rank)


def _has_stepped(sibling: Sibling[Any]) -> bool:
    return sibling.trainer is not None and sibling.trainer.global_step > 0


def _run_with_connections(job: Callable[[], T]) -> T:
    """Return the value of a sibling's function, and let its training runs use the connections of the array."""
    sibling = current_sibling()
    assert sibling is not None, "a sibling runs it"
    with share_connections(partial(join, sibling)):
        return job()
