"""Propagates a failure on one rank to all other ranks, so that no rank waits for a failed one.

The store of the rendezvous serves as the side channel. The first rank that fails writes its failure to the store, and
all ranks read it several times a second. Broken connections, and processes of the same host that have ended, are
reported in the same way. A stopped process or an interrupted link does not break a connection, but its heartbeat
expires. Each rank checks the heartbeat of the next rank in a ring, so that the load on the store grows only linearly
with the number of ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lightning_pipes.engine.private_torch import silence_store_warnings
from lightning_pipes.engine.watch import process_exit
from lightning_pipes.engine.watch.error_output import limit_tracebacks, to_one_line
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.heartbeat import BEAT_SECONDS, StallTimer, get_heartbeat
from lightning_pipes.engine.watch.process_exit import SerialCaller
from lightning_pipes.engine.watch.rendezvous import explain_missing_tasks
from lightning_pipes.engine.watch.trust import Seal, seal_of, sub_store_of, to_printable
from lightning_pipes.ir import PipelineError

_log = logging.getLogger(__name__)

WATCH_POLL_SECONDS = 0.2
REASON_SECONDS = 5 * WATCH_POLL_SECONDS
SETUP_SECONDS = 1800.0
"""Default for the time that ranks wait for each other while they connect, in seconds."""
GRACE_SECONDS = 7.0
"""How long a rank may take to exit after it has learned of a failure, in seconds. After that, its watchdog ends it."""
PUBLISH_SECONDS = 2.0
"""How long a failing rank waits for the store to accept its report, in seconds."""
LOG_SECONDS = 30.0
"""Interval at which a rank logs the ranks that it is waiting for, in seconds."""
HEARTBEAT_TIMEOUT = 120.0
"""Default timeout of heartbeats in seconds. It is longer than any call that holds the GIL, such as loading a large
pickle."""
EVENT_SECONDS = 3.0
"""How long a rank waits for the same event before it publishes the reason for other ranks, in seconds."""
_REFUSED_KEY = "refused"
"""Key that marks an exchange of texts in which a rank has given up."""
T = TypeVar("T")


class PeerFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is on another rank
    """Another rank failed. The message contains the rank, its stage, its instruction, and the cause."""


class _FailureReport:
    """A failure to be written to the store.

    Attributes:
        first: the failure that was written first. It is set after the store has answered.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.first: str | None = None
        self._answered = threading.Event()

    def set_answer(self, first: str | None) -> None:
        """Set the answer of the store, or None if the store failed."""
        self.first = first
        self._answered.set()

    def wait(self, seconds: float) -> str | None:
        """Wait for the store, and return the failure that was written first.

        The result is None if the store does not answer in time.
        """
        self._answered.wait(seconds)
        return self.first


class FailureWatch:
    """Propagates the first failure of any rank to all ranks.

    All threads are created in the constructor, because a process that runs out of memory can't start new threads.

    Args:
        store: the c10d store of the process group, or None for ranks that share one process.
        rank: the global rank of this process.
        ranks: the number of ranks.
        heartbeat_timeout: seconds without a heartbeat after which a rank is declared dead. The same limit applies to
            answers of the store.
        store_host: a description of the host of the store, for messages.
        enforce: whether the watchdog ends the process if it has not closed the watch `GRACE_SECONDS` after a failure on
            another rank. This is necessary because a rank that is blocked in a collective neither sees exceptions nor
            runs signal handlers. After any failure, the watchdog also ends the process if it has not exited
            `GRACE_SECONDS` after the end of its main thread.
        ended: returns descriptions of how ranks are known to have ended, by rank. These may include ranks that have not
            reached the store.
        setup_seconds: how long ranks wait for each other while they connect. It limits the time that the setup of a
            rank may take.

    Attributes:
        setup_seconds: how long ranks wait for each other while they connect, as in the arguments.
        stages: the stages of each global rank, for messages.
        doing: a description of what this rank is waiting for, for messages. None while the rank computes.
        error: the failure of the run, or None.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int = 1,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        store_host: str = "the launcher",
        enforce: bool = True,
        ended: Callable[[], Mapping[int, str]] = dict,
        setup_seconds: float = SETUP_SECONDS,
    ) -> None:
        self.setup_seconds = setup_seconds
        self.stages: Mapping[int, Sequence[int]] = {}
        self.doing: object | None = None
        self.error: PipelineError | None = None
        self._store = store
        self._rank, self._neighbour = rank, (rank + 1) % ranks
        self._others = [other % ranks for other in range(rank + 1, rank + ranks)]
        self._timeout = heartbeat_timeout
        self._store_host = store_host
        self._enforce = enforce
        self._ended = ended
        self._stores = 0
        self._listeners: list[Callable[[BaseException], None]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed_at: float | None = None
        self._failure, self._is_remote = "", False
        self._announced, self._acknowledged = threading.Event(), threading.Event()
        self._polls = 0
        self._n_meetings = 0
        self._waits_for: tuple[object | None, int] = None, 0
        """The value of `doing` in the last poll, and the number of consecutive earlier polls with the same value."""
        self._reports: SimpleQueue[_FailureReport | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        if store is not None:
            self._heartbeat = get_heartbeat(store, rank)
            self._prefix = f"lightning_pipes/{self._heartbeat.next_run(rank)}"
            self._key = f"{self._prefix}/failure"
            for name, target in (("watch", self._watch), ("watchdog", self._run_watchdog), ("last words", self._write)):
                thread = threading.Thread(target=target, name=f"lightning_pipes failure {name}", daemon=True)
                thread.start()
                self._threads.append(thread)
            if ranks > 1:
                limit_tracebacks(self)
                silence_store_warnings()
            fault_point("watch.made")

    def sub_store(self) -> Any:
        """Return a part of the store for one purpose of this run.

        Ranks that call this method the same number of times get the same part.
        """
        return self.sub_store_factory()()

    def sub_store_factory(self) -> Callable[[], Any]:
        """Return a function that returns such a part of the store.

        Each call of the function opens a separate connection to the store, which takes up to a tenth of a second.
        """
        self._stores += 1
        prefix = f"{self._prefix}/{self._stores}"
        return lambda: sub_store_of(self._store, prefix)

    @property
    def seal(self) -> Seal | None:
        """The seal of data from other ranks, or None if the ranks do not share a secret."""
        return seal_of(self._store)

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages, which includes its stages."""
        stages = self.stages.get(rank, ())
        return f"rank {rank}" + (f" (stage {', '.join(map(str, stages))})" if stages else "")

    def on_failure(self, listener: Callable[[BaseException], None]) -> None:
        """Register a listener for failures.

        When a rank fails, `listener(error)` is called, usually from another thread. If a rank has already failed, it is
        called immediately.
        """
        with self._lock:
            self._listeners.append(listener)
            error = self.error
        if error is not None:
            listener(error)

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Report a failure of this rank to all ranks, unless another failure was reported first.

        Args:
            error: the exception that this rank raised.
            where: the place of the failure, for the message.
        """
        failed = f"rank {self._rank} failed in {where}" if where else f"{self.name(self._rank)} failed"
        text = f": {error}" if str(error) else ""  # KeyboardInterrupt has none
        self._publish_failure(f"{failed}: {type(error).__name__}{text}", is_remote=False)

    def report_lost_peer(self, peer: int, error: BaseException) -> None:
        """Report a broken connection to `peer`.

        If the peer has reported a failure, that failure is the cause. Otherwise, the peer is reported as ended.
        """
        if self._closed.is_set():
            return
        if self._store is not None and self._closed.wait(2 * WATCH_POLL_SECONDS):
            return
        if self.error is None:
            lost = f"rank {self._rank} lost the connection to it{self._while_doing()} ({error})"
            self._publish_failure(f"{self.name(peer)} has ended or can't be reached: {lost}")

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of `rank` is known to have ended.

        The result is always False for processes of other hosts.
        """
        process = None if self._store is None else self._heartbeat.known_process(rank)
        return process is not None and process.has_ended()

    def remote_failure(self) -> str | None:
        """Return the failure of another rank if this rank has logged one. Otherwise, return None."""
        return self._failure if self._announced.is_set() and self._is_remote else None

    def wait_for_reports(self) -> None:
        """Wait until each other rank has logged the failure of this rank, has left the run, or has ended.

        The wait is limited to `GRACE_SECONDS`.
        """
        if self._announced.is_set() and self._store is not None:
            self._acknowledged.wait(GRACE_SECONDS)

    def check(self) -> None:
        """Raise the failure of the run if a rank has failed.

        Raises:
            PeerFailure: a rank has failed.
        """
        if self.error is not None:
            raise self.error

    def call(self, fn: Callable[[], T]) -> T:
        """Call a function that waits for other ranks and that exceptions can't interrupt.

        The function runs in a separate thread, which is abandoned when a rank fails.

        Args:
            fn: the function to call.

        Returns:
            The result of the function.

        Raises:
            PeerFailure: a rank has failed.
        """
        if self._store is None:
            return fn()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def run() -> T:
            if device is not None:
                torch.cuda.set_device(device)
            return fn()

        before, self.doing = self.doing, self.doing or "connections to other ranks"
        try:
            with SerialCaller() as asking:
                result = asking(run, self.check)
        except RuntimeError as error:
            if not isinstance(error, PipelineError):
                self.raise_reason()
            raise
        self.doing = before
        return result

    def meet(self, call: str, line: str) -> None:
        """Wait until all ranks have made a call that every rank must make. Each rank may make it at a different place.

        Args:
            call: the name of the function, which must be equal on all ranks.
            line: the file and line of the caller.

        Raises:
            PeerFailure: a rank has failed.
            PipelineError: a rank made a different call, or all ranks wait for different events, so that none of them
                can continue.
        """
        if self._store is None:
            return
        self._n_meetings += 1
        store = sub_store_of(self._store, f"{self._prefix}/meetings/{self._n_meetings}")
        store.set(str(self._rank), f"{call}\n{line}")
        before, self.doing = self.doing, f"all ranks to call {call}, as this one does at {line}"
        waiting, looked = dict.fromkeys(self._others, ""), time.monotonic()
        while missing := [other for other in self._others if not store.check([str(other)])]:
            self.check()
            time.sleep(WATCH_POLL_SECONDS / 20)
            if time.monotonic() > looked + 2 * EVENT_SECONDS:
                looked = time.monotonic()
                found = {other: self._find_wait(other) for other in missing}
                if all(found.values()) and all(waiting.get(other) == text for other, text in found.items()):
                    other, text = next(iter(found.items()))
                    raise PipelineError(
                        f"rank {self._rank} calls {call} at {line}, and waits for {_ranks(missing)}, which does not "
                        f"call it: rank {other} waits for {text.partition(' ')[2]}. All ranks must make this call, so "
                        "take it out of code that runs on one rank only, such as a branch for trainer.is_global_zero"
                    )
                waiting = found
        self.doing = before
        for other in self._others:
            theirs, _, place = store.get(str(other)).decode().partition("\n")
            if theirs != call:
                raise PipelineError(
                    f"rank {self._rank} calls {call} at {line}, while rank {other} calls {theirs} at {place}. All "
                    "ranks must make the same calls in the same order"
                )

    def _find_wait(self, other: int) -> str:
        """Return the reason why another rank waits, preceded by a number that identifies the wait.

        The result is empty if the rank does not wait.
        """
        key = f"{self._prefix}/wait/{other}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _publish_wait(self) -> None:
        """Publish the reason why this rank waits, and clear it when the wait is over."""
        doing, looks = self.doing, self._waits_for[1] + 1
        published = looks * WATCH_POLL_SECONDS > EVENT_SECONDS
        if doing is None or doing is not self._waits_for[0]:
            if published:
                self._heartbeat.connection.set(f"{self._prefix}/wait/{self._rank}", "")
            self._waits_for = doing, 0
            return
        self._waits_for = doing, looks
        if not published and (looks + 1) * WATCH_POLL_SECONDS > EVENT_SECONDS:
            self._heartbeat.connection.set(f"{self._prefix}/wait/{self._rank}", f"{self._polls} {doing}")

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not reached the store yet."""
        return (
            []
            if self._store is None
            else [rank for rank in sorted(self._others) if self._heartbeat.find_process(rank) is None]
        )

    def wait_for_ranks(self, timeout: float, check: Callable[[], None]) -> None:
        """Wait until all ranks have reached the store.

        Args:
            timeout: seconds to wait for the last rank.
            check: called repeatedly during the wait. It may raise an exception.

        Raises:
            PeerFailure: a rank has ended, or has not reached the store in time.
        """
        started = time.monotonic()
        why = explain_missing_tasks()
        logged = started - LOG_SECONDS + WATCH_POLL_SECONDS if why else started
        while missing := self.missing_ranks():
            self.check()
            check()
            for rank, how in self._ended().items():
                if rank in missing:
                    self._publish_failure(f"{self.name(rank)} {how} before it connected to the other ranks")
            now = time.monotonic()
            if now > logged + LOG_SECONDS:
                logged = now
                _log.warning("[rank %d] waits for %s to connect%s", self._rank, _ranks(missing), why)
            if now > started + timeout:
                late = f"{_ranks(missing)} did not connect to the other ranks within {timeout:.0f} s"
                self._publish_failure(late + why)
            time.sleep(WATCH_POLL_SECONDS / 4)
        self.check()

    def wait_for_values(self, store: Any, keys: Mapping[int, str]) -> dict[int, str]:
        """Wait for values that other ranks store while they connect, and return them by rank.

        Args:
            store: a part of the store of the run.
            keys: the key under which each rank stores its value, by rank.

        Raises:
            PeerFailure: a rank has failed, or has not stored its value within `setup_seconds`.
        """
        deadline = time.monotonic() + self.setup_seconds
        while missing := [rank for rank, key in keys.items() if not store.check([key])]:
            self.check()
            if time.monotonic() > deadline:
                self.report_late_ranks(missing)
            time.sleep(WATCH_POLL_SECONDS / 40)
        return {rank: store.get(key).decode() for rank, key in keys.items()}

    def report_late_ranks(self, ranks: Sequence[int]) -> None:
        """Report that ranks have not connected within `setup_seconds`.

        Raises:
            PeerFailure: always, with the first failure of the run.
        """
        late = f"{_ranks(ranks)} did not connect to the other ranks within {self.setup_seconds:.0f} s"
        self._publish_failure(f"{late}. If setup takes longer on a rank, set PipelineStrategy(timeout=...)")
        self.check()

    def exchange_texts(self, topic: str, text: str | None, timeout: float) -> list[str]:
        """Exchange one text per rank after a failure.

        Args:
            topic: a name that has not been used in this run.
            text: the text of this rank. None refuses the exchange.
            timeout: seconds to wait for the texts of the other ranks.

        Returns:
            The texts of all ranks. The result is empty if a rank has ended, does not send its text in time, or refuses.
            Ranks that join after another rank has given up get an empty result immediately.
        """
        found: list[str] = []
        if self._store is not None:
            thread = threading.Thread(target=self._exchange, args=(topic, text, timeout, found), daemon=True)
            thread.start()  # a separate thread, because a stopped store would block this one
            thread.join(timeout + WATCH_POLL_SECONDS)
        return list(found)

    def _exchange(self, topic: str, text: str | None, timeout: float, found: list[str]) -> None:
        keys, until = [str(rank) for rank in range(len(self._others) + 1)], time.monotonic() + timeout
        with suppress(RuntimeError):  # raised if the store has ended
            store = sub_store_of(self._store, f"{self._prefix}/{topic}")
            if text is not None:
                store.set(str(self._rank), text)
            while not store.check([_REFUSED_KEY]):
                if text is not None and store.check(keys):
                    found.extend(store.get(key).decode() for key in keys)
                    return
                if text is None or time.monotonic() > until or any(map(self.has_ended, self._others)):
                    store.set(_REFUSED_KEY, "")
                    return
                time.sleep(WATCH_POLL_SECONDS / 10)

    def raise_reason(self) -> None:
        """Raise the failure of the run that explains another error, waiting for it if necessary.

        If no failure becomes known within `REASON_SECONDS`, the method returns.

        Raises:
            PeerFailure: a rank has failed.
        """
        until = time.monotonic() + REASON_SECONDS
        # A failing rank first writes to the store, and then closes its connections.
        while time.monotonic() < until:
            self.check()
            time.sleep(WATCH_POLL_SECONDS / 4)

    def close(self) -> None:
        """Stop watching. This process does not need the heartbeats of other ranks any longer.

        Afterwards, the watchdog does not end this process until its main thread has ended.
        """
        fault_point("watch.close")
        self._closed.set()
        self._reports.put(None)
        until = time.monotonic() + 1.0  # reached only if the store does not answer
        while self._threads:
            thread = self._threads.pop()
            if thread is not threading.current_thread() and self.error is None:
                thread.join(timeout=max(0.0, until - time.monotonic()))
        fault_point("watch.closed")

    def _watch(self) -> None:
        """Check the store for failures, the heartbeat of the next rank, and the processes of this host.

        The calls of this thread block if the store is stopped.
        """
        silence, looks = StallTimer(2 * BEAT_SECONDS), round(BEAT_SECONDS / WATCH_POLL_SECONDS)
        try:
            while self.error is None and not self._closed.wait(WATCH_POLL_SECONDS):
                self._polls += 1
                self._publish_wait()
                if self._heartbeat.connection.check([self._key]):
                    self._accept_failure(self._heartbeat.connection.get(self._key).decode())
                elif self._others:
                    self._check_process(self._others[self._polls % len(self._others)])
                    if self._polls % looks == 0:
                        self._check_heartbeat(silence)
            if self.error is None:
                self._heartbeat.connection.set(self._left_key(self._rank), "")
            else:
                self._wait_for_others()
        except Exception as error:
            if not self._closed.is_set():
                what = to_one_line(str(error))  # torch appends a C++ stack trace
                self._accept_failure(f"{self._store_host}, which hosts the store of this run, has ended ({what})")
        finally:
            self._acknowledged.set()

    def _wait_for_others(self) -> None:
        """Mark that this rank has logged the failure of the run, and wait for the marks of the other ranks."""
        self._announced.wait()
        connection = self._heartbeat.connection
        connection.set(self._acknowledged_key(self._rank), "")
        missing, until = set(self._others), time.monotonic() + GRACE_SECONDS
        while missing and not self._is_remote and time.monotonic() < until:
            missing = {
                rank
                for rank in missing
                if not (
                    self.has_ended(rank) or self._has_left(rank) or connection.check([self._acknowledged_key(rank)])
                )
            }
            time.sleep(WATCH_POLL_SECONDS / 4)

    def _check_process(self, other: int) -> None:
        """Publish a failure if the process of another rank is known to have ended during this run."""
        process = self._heartbeat.find_process(other)
        if process is not None and process.has_ended() and not self._has_left(other):
            how = self._ended().get(other)
            note = self._exit_note(other) or (f" (it {how})" if how else "")
            self._publish_failure(
                f"{self.name(other)} has ended{note}: rank {self._rank} found its process gone{self._while_doing()}"
            )

    def _check_heartbeat(self, silence: StallTimer) -> None:
        """Publish a failure if the next rank has exited or its heartbeat has expired."""
        if self._heartbeat.find_process(self._neighbour) is None:
            return  # the rank has not connected yet; its setup may take an hour
        seconds = silence.stalled_seconds(self._heartbeat.count_beats(self._neighbour), time.monotonic())
        ended = self._heartbeat.has_exited(self._neighbour)
        if (not ended and seconds <= self._timeout) or self._has_left(self._neighbour):
            return
        failed = self.name(self._neighbour)
        if ended:
            self._publish_failure(
                f"{failed} has ended{self._exit_note(self._neighbour)}: rank {self._rank} noticed it"
                f"{self._while_doing()}"
            )
        else:
            self._publish_failure(
                f"{failed} was declared dead by rank {self._rank}: no heartbeat for "
                f"{seconds:.0f} s. Its process or host is stopped, or can't be reached; if it was only "
                f"busy, raise heartbeat_timeout (now {self._timeout:g})"
            )

    def _exit_note(self, other: int) -> str:
        if not self._heartbeat.has_exited(other):
            return ""
        return " because its interpreter exited, although other ranks were in a run, in which all ranks must take part"

    def _run_watchdog(self) -> None:
        """Detect a store that does not answer, and end this process if it is blocked. This thread does not block."""
        silence = StallTimer(2 * WATCH_POLL_SECONDS)
        while not self._closed.wait(WATCH_POLL_SECONDS):
            now = time.monotonic()
            if self.error is None:
                seconds = silence.stalled_seconds(self._polls, now)
                if seconds > self._timeout:
                    text = (
                        f"{self._store_host}, which hosts the store of this run, has not answered rank {self._rank} "
                        f"for {seconds:.0f} s: it is stopped, or can't be reached"
                    )
                    self._accept_failure(text)
                    self._reports.put(_FailureReport(text))  # written if the host continues later
            elif self._enforce and self._failed_at is not None and now > self._failed_at + GRACE_SECONDS:
                self._end_process(f"is still blocked {GRACE_SECONDS:.0f} s after the failure")
        if self.error is not None and self._enforce and process_exit.claim_final_wait():
            process_exit.wait_for_main_thread()
            time.sleep(GRACE_SECONDS)
            self._end_process(f"has not exited {GRACE_SECONDS:.0f} s after the end of its script, which failed")

    def _end_process(self, what: str) -> None:
        with suppress(Exception):  # the process must end even if printing fails
            print(f"[rank {self._rank}] {what}, and is stopped: {to_one_line(str(self.error))}", file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)

    def _publish_failure(self, text: str, is_remote: bool = True) -> None:
        """Make `text` the failure of the run, unless a failure was written before.

        Args:
            text: the description of the failure.
            is_remote: whether the failure happened on another rank.
        """
        text = to_printable(text)
        first = None
        # The store may have ended with its host. Closed connections then inform the other ranks.
        if self._store is not None and not self._closed.is_set():
            words = _FailureReport(text)
            self._reports.put(words)
            first = words.wait(PUBLISH_SECONDS)
        if first is None or first == text:
            self._set_failure(text, is_remote)
        else:
            self._accept_failure(first)

    def _write(self) -> None:
        """Write failures to the store, and read the one that was written first. This thread may block."""
        while (words := self._reports.get()) is not None:
            try:
                words.set_answer(self._heartbeat.report_connection.compare_set(self._key, "", words.text).decode())
            except RuntimeError:
                words.set_answer(None)

    def _accept_failure(self, text: str) -> None:
        doing, text = self._while_doing(), to_printable(text)
        self._set_failure(text, note=f"\nrank {self._rank} stopped{doing}" if doing else "")

    def _set_failure(self, text: str, is_remote: bool = True, note: str = "") -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = PeerFailure(text + note)
            self._failed_at = time.monotonic()
            self._failure, self._is_remote = text, is_remote and not text.startswith(f"rank {self._rank} ")
            listeners = list(self._listeners)
        process_exit.give_up()
        if is_remote:  # log it immediately: the launcher may kill this process before its own error is printed
            _log.error("[rank %d] %s", self._rank, to_one_line(text))
        self._announced.set()
        for listener in listeners:
            listener(self.error)

    def _while_doing(self) -> str:
        return "" if self.doing is None else f" while waiting for {self.doing}"

    def _has_left(self, rank: int) -> bool:
        return bool(self._heartbeat.connection.check([self._left_key(rank)]))

    def _acknowledged_key(self, rank: int) -> str:
        return f"{self._prefix}/acknowledged/{rank}"

    def _left_key(self, rank: int) -> str:
        return f"{self._prefix}/left/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
