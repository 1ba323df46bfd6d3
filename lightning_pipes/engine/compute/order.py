"""The orders in which a rank runs its instructions: fixed in advance, or chosen among the ready instructions."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import chain, count, tee, zip_longest
from typing import Any, Protocol

from lightning_pipes.engine.messages.mailbox import Mailbox
from lightning_pipes.engine.residency.deliveries import NeedSource
from lightning_pipes.engine.residency.upcoming import UpcomingTasks
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    STEP,
    DeadlockError,
    DependencyTracker,
    F,
    Instruction,
    Kind,
    LayerUse,
    Ledger,
    Need,
    Plan,
    Policy,
    Program,
    ProgramError,
    RankView,
    Transfer,
    batch_instructions,
    eligible_instructions,
    ready_key,
    send_of,
)
from lightning_pipes.ir.program import shift_batches
from lightning_pipes.sim.predictor import WaitingSubnet

BatchKey = tuple[int, int]
"""A job, and the number of one of its batches in the window."""


class InstructionOrder(Protocol):
    """Chooses the instructions of one rank in one window."""

    def add(self, item: BatchKey, rows: int, use: LayerUse) -> None:
        """Add a batch.

        Args:
            item: the job and the number of the batch.
            rows: the number of samples.
            use: the layers that the batch uses.
        """

    def next_instruction(self, mailbox: Mailbox, number: int) -> Instruction | None:
        """Return the instruction to run now, or None if no instruction can run yet.

        If the method is called again before `mark_begun`, it may return another instruction that has become ready.

        Args:
            mailbox: the received messages.
            number: the number of the window.
        """

    def mark_begun(self, i: Instruction) -> None:
        """Mark the instruction `i`, which was returned by `next_instruction`, as begun."""

    def wait(self, mailbox: Mailbox, number: int) -> None:
        """Wait until a message or a layer arrives, so that `next_instruction` may return an instruction.

        Raises:
            PeerFailure: a rank has failed.
        """

    @property
    def waiting_for(self) -> str:
        """A phrase that describes what `wait` is waiting for."""

    def mark_done(self, i: Instruction) -> None:
        """Mark the begun instruction `i` as done."""

    def close(self) -> None:
        """Close the window. No more batches are added."""

    @property
    def needs_next_batch(self) -> bool:
        """Whether another batch must be added before any instruction runs."""

    @property
    def is_satisfied(self) -> bool:
        """Whether nothing is left to run until another batch is added."""


class StaticOrder:
    """The order of a lowered program on one rank.

    A receive is ready when its message has arrived. Every other instruction is ready when its predecessors in the
    program are done.
    """

    needs_next_batch = False

    def __init__(self, program: Program, rank: int) -> None:
        self._program, self._rank = program, rank
        self._batches: Counter[int] = Counter()  # by job
        self._rows: dict[BatchKey, int] = {}
        self._closed = False
        (self._upcoming,) = tee(self._endless() if program.is_endless else iter(program.head[rank]), 1)
        self._ran = 0
        self._next: Instruction | None = next(self._upcoming, None)

    def _endless(self) -> Iterator[Instruction]:
        yield from self._program.head[self._rank]
        for turn in count():
            yield from shift_batches(self._program.cycle[self._rank], turn)

    def add(self, item: BatchKey, rows: int, use: LayerUse) -> None:
        self._batches[item[0]] += 1
        self._rows[item] = rows

    def next_instruction(self, mailbox: Mailbox, number: int) -> Instruction | None:
        i = self._current()
        if i is None or (i.kind in RECEIVE_KINDS and not mailbox.has_message((number, i))):
            return None
        return i

    def mark_begun(self, i: Instruction) -> None:
        pass

    def mark_done(self, i: Instruction) -> None:
        self._advance()

    def wait(self, mailbox: Mailbox, number: int) -> None:
        i = self._current()
        assert i is not None
        mailbox.wait((number, i))

    @property
    def waiting_for(self) -> str:
        i = self._current()
        return "nothing" if i is None else f"{i.describe()} from stage {send_of(i).stage}"

    def close(self) -> None:
        """Close the window.

        Instructions of batches that were not added are skipped, and an endless program ends.
        """
        self._closed = True
        if self._program.is_endless:
            row = self._program.unroll(max(self._batches.values(), default=0)).head[self._rank]
            left = [i for i in row if i.batch < self._batches[i.job]][self._ran :]
            (self._upcoming,) = tee(iter(left), 1)
            self._next = next(self._upcoming, None)

    @property
    def is_satisfied(self) -> bool:
        return self._current() is None

    def upcoming_instructions(self) -> Iterator[Instruction]:
        """Yield the remaining instructions of the added batches in order, including the one that is running."""
        program, rank, others = self._program, self._rank, 0
        most = len(program.head[rank]) + len(program.cycle[rank]) if program.is_endless else None
        for i in () if self._next is None else chain((self._next,), copy(self._upcoming)):
            if i.batch < self._batches[i.job]:
                others = 0
                yield i
            else:
                others += 1
                if others == most:  # a whole cycle of later batches: no added batch follows
                    return

    def _current(self) -> Instruction | None:
        """Return the next instruction with samples, or None if its batch was not added yet or the program has ended."""
        while (i := self._next) is not None:
            if i.batch < self._batches[i.job]:
                if i.kind is Kind.STEP or i.span.start < self._rows[i.job, i.batch]:
                    return i
            elif not self._closed:
                return None
            self._advance()  # skip instructions of batches or samples that do not exist
        return None

    def _advance(self) -> None:
        self._ran += 1
        self._next = next(self._upcoming, None)


class ReadyOrder:
    """Lets a policy that flushes choose among the ready instructions.

    Messages are sent and received as soon as possible.

    Args:
        policy: chooses among the ready instructions.
        plan: the plan of the window.
        rank: the rank that runs the instructions.
    """

    def __init__(self, policy: Policy, plan: Plan, rank: int) -> None:
        self._policy, self._plan, self._rank = policy, plan, rank
        self._tracker = DependencyTracker(plan)
        self._transfers: deque[Instruction] = deque()
        self._ready: list[Instruction] = []  # sorted
        self._unchecked: list[Instruction] = []  # receives whose message may have arrived earlier
        self._rows: dict[BatchKey, int] = {}
        self._left: dict[BatchKey, int] = {}  # remaining instructions of batches in flight, oldest first
        self._closed = False
        self._receives = 0  # the number of receives that have not run yet
        self._in_flight: dict[int, int] = dict.fromkeys(plan.stages[rank], 0)
        self._last: Instruction | None = None

    def add(self, item: BatchKey, rows: int, use: LayerUse) -> None:
        self._rows[item] = rows
        mine = batch_instructions(self._plan, self._rank, *item)
        self._left[item] = len(mine)
        self._add_ready(self._tracker.add(mine, self._needs_besides_data(item[1], use)))
        receives = [i for i in mine if i.kind in RECEIVE_KINDS]
        self._unchecked += receives
        self._receives += len(receives)
        for i in mine:
            if i.kind in RECEIVE_KINDS and not i.span.clip_to(rows).rows:  # no message is sent for missing rows
                self._add_ready(self._tracker.complete(send_of(i)))

    def _needs_besides_data(self, batch: int, use: LayerUse) -> Mapping[Instruction, tuple[Need, ...]] | None:
        """Return the needs of a new batch besides data."""
        return None

    def next_instruction(self, mailbox: Mailbox, number: int) -> Instruction | None:
        self._complete_receives(i for i in self._unchecked if mailbox.has_message((number, i)))
        self._unchecked.clear()
        self._complete_receives(mailbox.take_new(number))
        if self._transfers:
            return self._transfers[0]
        if not self._ready:
            return None
        allowed = eligible_instructions(self._ready, self._fits) if self._is_limited else tuple(self._ready)
        if not allowed:
            return None
        picked = self._policy.pick(allowed, self._view(), self._plan)
        if picked is not None and picked not in allowed:
            raise ProgramError(f"policy {self._policy.name!r} picked {picked} on rank {self._rank}, which is not ready")
        return picked

    def _view(self) -> RankView:
        return RankView(self._rank, self._last, dict(self._in_flight))

    @property
    def _is_limited(self) -> bool:
        return bool(self._plan.limits)

    def _fits(self, i: Instruction) -> bool:
        if i.kind is not Kind.F or not self._plan.limits:
            return True
        rows = i.span.clip_to(self._rows[i.job, i.batch]).rows
        return self._in_flight[i.stage] + rows <= self._plan.limits[i.stage]

    def mark_begun(self, i: Instruction) -> None:
        if i.kind in SEND_KINDS or i.kind in RECEIVE_KINDS:
            self._transfers.remove(i)
            return
        self._ready.remove(i)
        self._last = i

    def mark_done(self, i: Instruction) -> None:
        item = i.job, i.batch
        self._receives -= i.kind in RECEIVE_KINDS
        if i.kind is Kind.F or i.kind is Kind.B or i.kind is Kind.W:
            rows = i.span.clip_to(self._rows[item]).rows
            self._in_flight[i.stage] += rows if i.kind is Kind.F else -rows
        self._add_ready(self._tracker.complete(i))
        self._left[item] -= 1
        if not self._left[item]:
            self._forget_batch(item)

    def _forget_batch(self, item: BatchKey) -> None:
        """Delete the records of a batch after its last instruction on this rank."""
        del self._left[item]

    def wait(self, mailbox: Mailbox, number: int) -> None:
        if not self._expected:
            raise DeadlockError(
                f"rank {self._rank} waits although nothing is on its way: policy {self._policy.name!r} or the limits "
                f"{self._plan.limits} hold back {', '.join(map(str, self._ready))}"
            )
        self._complete_receives(mailbox.wait_new(number))

    @property
    def waiting_for(self) -> str:
        return f"any of {' and '.join(self._expected)} to stage {', '.join(map(str, self._in_flight))}"

    @property
    def _expected(self) -> list[str]:
        """Descriptions of everything that is on its way to this rank."""
        return [f"{self._receives} messages"] if self._receives else []

    def close(self) -> None:
        self._closed = True

    @property
    def needs_next_batch(self) -> bool:
        return False

    @property
    def is_satisfied(self) -> bool:
        return not self._left

    def _complete_receives(self, receives: Iterable[Instruction]) -> None:
        for i in receives:
            self._add_ready(self._tracker.complete(send_of(i)))

    def _add_ready(self, ready: list[Instruction]) -> None:
        for i in ready:
            if i.kind in SEND_KINDS or i.kind in RECEIVE_KINDS:
                self._transfers.append(i)
            else:
                insort(self._ready, i, key=ready_key)


class StreamOrder(ReadyOrder):
    """Lets an endless policy choose among the ready instructions.

    The dependencies between batches follow from the layers that they use, and finished batches are forgotten.

    Args:
        policy: chooses among the ready instructions.
        plan: the plan of the window.
        rank: the rank that runs the instructions.
        sources: create the sources of further needs of batches from the record of the layers that batches use.
        has_room: returns whether the device has room for the layers that the forward of a batch uses on a stage.
        ahead: the number of batches to be added before their first instruction, as far as the depth of the policy
            allows.
    """

    def __init__(
        self,
        policy: Policy,
        plan: Plan,
        rank: int,
        sources: Iterable[Callable[[Ledger], NeedSource]] = (),
        has_room: Callable[[int, LayerUse], bool] | None = None,
        ahead: int = 0,
    ) -> None:
        super().__init__(policy, replace(plan, shared_weights=False), rank)
        self._has_room, self._ahead = has_room, ahead
        self._ledger = Ledger(self._plan, plan.stages[rank])
        self._sources = [source(self._ledger) for source in sources]
        self._begun: dict[int, None] = {}  # batches in flight that have begun, in the order in which they began
        self._halfway: dict[tuple[int, int], None] = {}  # stage and batch, between first and last forward or backward
        self._newest = -1

    def _needs_besides_data(self, batch: int, use: LayerUse) -> Mapping[Instruction, tuple[Need, ...]] | None:
        self._newest, waits = batch, dict[Instruction, tuple[Need, ...]](self._ledger.enter(batch, use))
        for source in self._sources:
            source.enter(batch)
            for stage in self._plan.stages[self._rank]:
                spans = self._plan.spans(Kind.F, stage)
                needs = dict.fromkeys((F(stage, s, batch=batch) for s in spans), source.forward_needs(batch, stage))
                needs[STEP(stage, batch=batch)] = source.step_needs(batch, stage)
                waits |= {i: (*waits.get(i, ()), *missing) for i, missing in needs.items() if missing}
        return waits

    def next_instruction(self, mailbox: Mailbox, number: int) -> Instruction | None:
        for source in self._sources:
            for need in source.take_arrived():
                self._add_ready(self._tracker.complete(need))
            if self._closed and not self._left:
                source.end_window()
        return super().next_instruction(mailbox, number)

    def _view(self) -> RankView:
        return RankView(self._rank, self._last, dict(self._in_flight), self._ledger.uses, self._ledger.versions)

    @property
    def _is_limited(self) -> bool:
        return self._has_room is not None or super()._is_limited

    def _fits(self, i: Instruction) -> bool:
        if self._has_room is not None and i.kind is Kind.F and not self._has_room(i.stage, self._ledger.uses[i.batch]):
            return False
        return super()._fits(i)

    def mark_begun(self, i: Instruction) -> None:
        super().mark_begun(i)
        if i.kind is Kind.F:
            for source in self._sources:
                source.before_forward(i.batch, i.stage)

    def mark_done(self, i: Instruction) -> None:
        if i.kind is Kind.F:
            self._begun[i.batch] = None
        elif i.kind is Kind.STEP:
            self._ledger.mark_done(i)
            for source in self._sources:
                source.after_step(i)
        if i.kind in (Kind.F, Kind.B, Kind.I) and i.span.stop < self._rows[i.job, i.batch]:
            self._halfway[i.stage, i.batch] = None
        elif i.kind in (Kind.F, Kind.B, Kind.I, Kind.STEP):
            self._halfway.pop((i.stage, i.batch), None)
        super().mark_done(i)

    def _forget_batch(self, item: BatchKey) -> None:
        super()._forget_batch(item)
        del self._rows[item]
        self._begun.pop(item[1], None)
        self._ledger.remove_batch(item[1])
        self._tracker.forget_batch(*item)

    def upcoming_layers(self) -> Iterator[str]:
        """Yield the layers of the next tasks in the order in which they will probably be needed."""
        uses = self._ledger.uses
        for stage, batch in self._upcoming_tasks():
            yield from sorted(uses[batch].stepped_layers(stage)) if batch in uses else ()

    def _upcoming_tasks(self) -> Iterable[tuple[int, int]]:
        """Return the stages and batches of the next tasks.

        Ready tasks other than forwards come first, together with batches that have run some, but not all, of their
        forwards or backwards on a stage. After these, ready forwards alternate with batches that will return for their
        backward, because their relative order is unknown.
        """
        last = self._last
        over = [last.batch] if last is not None and last.kind is not Kind.F and last.batch in self._begun else []
        waiting = self._ledger.expected_order(dict.fromkeys([*over, *self._begun]))
        first = dict.fromkeys((i.stage, i.batch) for i in self._ready if i.kind is not Kind.F) | self._halfway
        ready = dict.fromkeys((i.stage, i.batch) for i in self._ready)
        forwards = [each for each in ready if each not in first]
        back = [(stage, batch) for batch in waiting for stage in self._in_flight if (stage, batch) not in ready]
        turns = (each for both in zip_longest(forwards, back) for each in both if each is not None)
        return dict.fromkeys(chain(first, turns))

    @property
    def _expected(self) -> list[str]:
        return [*super()._expected, *(source.expected_text for source in self._sources if source.n_expected)]

    @property
    def needs_next_batch(self) -> bool:
        if self._closed or self._transfers or len(self._left) - len(self._begun) >= self._ahead:
            return False
        return self.is_satisfied

    @property
    def is_satisfied(self) -> bool:
        if self._closed:
            return not self._left and all(source.is_over for source in self._sources)
        oldest = next((batch for _, batch in self._left), self._newest + 1)
        return self._newest + 1 - oldest < self._policy.depth

    def _add_ready(self, ready: list[Instruction]) -> None:
        for source in self._sources:
            for i in ready:
                if i.kind is Kind.F:
                    source.on_ready(i.batch, i.stage)
        super()._add_ready(ready)


class PredictedOrder(StreamOrder):
    """An order whose next tasks are predicted by one of the `PREDICTORS`.

    Args:
        upcoming: predicts the next tasks.
        args, kwargs: the other arguments of `StreamOrder`.
    """

    def __init__(self, upcoming: UpcomingTasks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._upcoming = upcoming
        self._entrances: dict[tuple[int, int], tuple[Need, ...]] = {}
        """The needs besides data of batches whose forward has not begun, by stage and batch."""

    def _needs_besides_data(self, batch: int, use: LayerUse) -> Mapping[Instruction, tuple[Need, ...]] | None:
        waits = super()._needs_besides_data(batch, use) or {}
        self._upcoming.enter(batch, use)
        for stage in self._plan.stages[self._rank]:
            first = F(stage, self._plan.spans(Kind.F, stage)[0], batch=batch)
            self._entrances[stage, batch] = waits.get(first, ())
        return waits

    def _waiting_batches(self, stage: int) -> list[WaitingSubnet]:
        """Return the batches with an available input for a stage and without a forward on that stage so far."""
        found, span = [], self._plan.spans(Kind.F, stage)[0]
        for (at, batch), needs in self._entrances.items():
            if at == stage and not self._tracker.unmet_needs(F(stage, span, batch=batch)):
                missing = [t for source in self._sources for t in source.forward_needs(batch, stage)]
                unmet = {n.batch for n in needs if isinstance(n, Instruction) and self._ledger.is_pending(n)}
                unmet |= {-1 if t.after is None else t.after.batch for t in missing if isinstance(t, Transfer)}
                found.append(WaitingSubnet(batch, frozenset(unmet)))
        return found

    def mark_begun(self, i: Instruction) -> None:
        super().mark_begun(i)
        if i.kind in COMPUTE_KINDS and i.kind is not Kind.STEP:
            self._entrances.pop((i.stage, i.batch), None)
            self._upcoming.begin_task(i, self._waiting_batches)

    def mark_done(self, i: Instruction) -> None:
        self._upcoming.end_task()
        super().mark_done(i)

    def _upcoming_tasks(self) -> Iterable[tuple[int, int]]:
        return self._upcoming.contexts(self._waiting_batches)
