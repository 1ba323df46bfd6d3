"""The orders in which a rank runs its instructions: fixed in advance, or chosen among the ready instructions."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from itertools import chain, count, tee, zip_longest
from typing import Protocol

from lightning_pipes.engine.compute.reducer import ReplicaAverages
from lightning_pipes.engine.messages.mailbox import Mailbox
from lightning_pipes.engine.residency.deliveries import LayerDeliveries
from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.engine.residency.upcoming import UpcomingTasks
from lightning_pipes.ir import (
    RECEIVES,
    SENDS,
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
    Reduction,
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
        if i is None or (i.kind in RECEIVES and not mailbox.has_message((number, i))):
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
    """Lets a policy choose among the ready instructions. Messages are sent and received as soon as possible.

    In an endless window, the dependencies between batches follow from the layers that they use, and finished batches
    are forgotten.

    Args:
        policy: chooses among the ready instructions.
        plan: the plan of the window.
        rank: the rank that runs the instructions.
        has_room: returns whether the device has room for the layers that the forward of a batch uses on a stage.
        ahead: the number of batches to be added before their first instruction, as far as the depth of the policy
            allows.
    """

    def __init__(
        self,
        policy: Policy,
        plan: Plan,
        rank: int,
        has_room: Callable[[int, LayerUse], bool] | None = None,
        ahead: int = 0,
    ) -> None:
        if policy.is_endless:
            plan = replace(plan, shared_weights=False)
        self._policy, self._plan, self._rank, self._has_room = policy, plan, rank, has_room
        self._ahead = ahead
        self._tracker = DependencyTracker(plan)
        self._ledger = Ledger(plan, plan.stages[rank])
        self._transfers: deque[Instruction] = deque()
        self._ready: list[Instruction] = []  # sorted
        self._unchecked: list[Instruction] = []  # receives whose message may have arrived earlier
        self._rows: dict[BatchKey, int] = {}
        self._left: dict[BatchKey, int] = {}  # remaining instructions of batches in flight, oldest first
        self._begun: dict[int, None] = {}  # batches in flight that have begun, in the order in which they began
        self._halfway: dict[tuple[int, int], None] = {}  # stage and batch, between first and last forward or backward
        self._newest = -1
        self._closed = False
        self._receives = 0  # the number of receives that have not run yet
        self._in_flight: dict[int, int] = dict.fromkeys(plan.stages[rank], 0)
        self._last: Instruction | None = None
        self._deliveries: LayerDeliveries | None = None
        self._replica_averages: ReplicaAverages | None = None
        self._upcoming: UpcomingTasks | None = None
        self._entrances: dict[tuple[int, int], tuple[Need, ...]] = {}
        """The needs, apart from data, of batches whose forward has not begun, by stage and batch."""

    def enable_deliveries(self, mirrors: Mirrors, mailbox: Mailbox, number: int) -> None:
        """Send layers to the ranks on which batches use them. This must be called before the first batch is added.

        Args:
            mirrors: the copies of other ranks' layers on this rank.
            mailbox: the mailbox whose waiting callers are notified when a layer arrives.
            number: the number of the window.
        """
        self._deliveries = LayerDeliveries(self._ledger, self._rank, number, mirrors, mailbox.notify)

    def wait_for_replicas(self, averages: ReplicaAverages) -> None:
        """Make steps wait for the gradients of other replicas. This must be called before the first batch is added."""
        self._replica_averages = averages

    def predict_by(self, upcoming: UpcomingTasks) -> None:
        """Use `upcoming` to predict the next tasks. This must be called before the first batch is added."""
        self._upcoming = upcoming

    def add(self, item: BatchKey, rows: int, use: LayerUse) -> None:
        self._rows[item] = rows
        mine = batch_instructions(self._plan, self._rank, *item)
        self._left[item] = len(mine)
        self._newest = item[1]
        waits = self._needs_of_newest(use) if self._policy.is_endless else None
        self._add_ready(self._tracker.add(mine, waits))
        receives = [i for i in mine if i.kind in RECEIVES]
        self._unchecked += receives
        self._receives += len(receives)
        for i in mine:
            if i.kind in RECEIVES and not i.span.clip_to(rows).rows:  # no message is sent for missing rows
                self._add_ready(self._tracker.complete(send_of(i)))

    def _needs_of_newest(self, use: LayerUse) -> dict[Instruction, tuple[Need, ...]]:
        """Return the needs of the newest batch apart from data: other batches, layers, and gradients of replicas."""
        batch, plan = self._newest, self._plan
        waits: dict[Instruction, tuple[Need, ...]] = {**self._ledger.enter(batch, use)}
        if self._replica_averages is not None:
            for stage in plan.stages[self._rank]:
                step = STEP(stage, batch=batch)
                waits[step] = (*waits.get(step, ()), Reduction(stage, batch))
        if self._deliveries is not None:
            self._deliveries.enter(batch)
            for stage in plan.stages[self._rank]:
                missing = self._deliveries.missing_transfers(batch, stage)
                for span in plan.spans(Kind.F, stage) if missing else ():
                    i = F(stage, span, batch=batch)
                    waits[i] = (*waits.get(i, ()), *missing)
        if self._upcoming is not None:
            self._upcoming.enter(batch, use)
            for stage in plan.stages[self._rank]:
                first = F(stage, plan.spans(Kind.F, stage)[0], batch=batch)
                self._entrances[stage, batch] = waits.get(first, ())
        return waits

    def _waiting_batches(self, stage: int) -> list[WaitingSubnet]:
        """Return the batches with an available input for a stage and without a forward on that stage so far."""
        found, span = [], self._plan.spans(Kind.F, stage)[0]
        for (at, batch), needs in self._entrances.items():
            if at == stage and not self._tracker.unmet_needs(F(stage, span, batch=batch)):
                missing = () if self._deliveries is None else self._deliveries.missing_transfers(batch, stage)
                unmet = {n.batch for n in needs if isinstance(n, Instruction) and self._ledger.is_pending(n)}
                unmet |= {-1 if t.after is None else t.after.batch for t in missing}
                found.append(WaitingSubnet(batch, frozenset(unmet)))
        return found

    def _take_deliveries(self) -> None:
        """Process layers and gradients that have arrived, and return layers to their owners after the last batch."""
        if self._replica_averages is not None:
            for reduction in self._replica_averages.take_arrived():
                self._add_ready(self._tracker.complete(reduction))
        if self._deliveries is not None:
            for transfer in self._deliveries.take_arrived():
                self._add_ready(self._tracker.complete(transfer))
            if self._closed and not self._left:
                self._deliveries.return_layers()

    def next_instruction(self, mailbox: Mailbox, number: int) -> Instruction | None:
        self._take_deliveries()
        self._complete_receives(i for i in self._unchecked if mailbox.has_message((number, i)))
        self._unchecked.clear()
        self._complete_receives(mailbox.take_new(number))
        if self._transfers:
            return self._transfers[0]
        if not self._ready:
            return None
        unlimited = self._has_room is None and not self._plan.limits
        allowed = tuple(self._ready) if unlimited else eligible_instructions(self._ready, self._fits)
        if not allowed:
            return None
        ledger = self._ledger
        view = RankView(self._rank, self._last, dict(self._in_flight), ledger.uses, ledger.versions)
        picked = self._policy.pick(allowed, view, self._plan)
        if picked is not None and picked not in allowed:
            raise ProgramError(f"policy {self._policy.name!r} picked {picked} on rank {self._rank}, which is not ready")
        return picked

    def mark_begun(self, i: Instruction) -> None:
        if i.kind in SENDS or i.kind in RECEIVES:
            self._transfers.remove(i)
            return
        self._ready.remove(i)
        self._last = i
        if i.kind is Kind.F and self._deliveries is not None:
            self._deliveries.before_forward(i.batch, i.stage)
        if self._upcoming is not None and i.kind is not Kind.STEP:
            self._entrances.pop((i.stage, i.batch), None)
            self._upcoming.begin_task(i, self._waiting_batches)

    def upcoming_layers(self) -> Iterator[str]:
        """Yield the layers of the next tasks in the order in which they will probably be needed.

        If no predictor is used, ready tasks other than forwards come first, together with batches that have run some,
        but not all, of their forwards or backwards on a stage. After these, ready forwards alternate with batches that
        will return for their backward, because their relative order is unknown.
        """
        uses = self._ledger.uses
        if self._upcoming is not None:
            for stage, batch in self._upcoming.contexts(self._waiting_batches):
                yield from sorted(uses[batch].stepped_layers(stage)) if batch in uses else ()
            return
        last = self._last
        over = [last.batch] if last is not None and last.kind is not Kind.F and last.batch in self._begun else []
        waiting = self._ledger.expected_order(dict.fromkeys([*over, *self._begun]))
        first = dict.fromkeys((i.stage, i.batch) for i in self._ready if i.kind is not Kind.F) | self._halfway
        ready = dict.fromkeys((i.stage, i.batch) for i in self._ready)
        forwards = [each for each in ready if each not in first]
        back = [(stage, batch) for batch in waiting for stage in self._in_flight if (stage, batch) not in ready]
        turns = (each for both in zip_longest(forwards, back) for each in both if each is not None)
        for stage, batch in dict.fromkeys(chain(first, turns)):
            yield from sorted(uses[batch].stepped_layers(stage))

    def _fits(self, i: Instruction) -> bool:
        if i.kind is not Kind.F:
            return True
        if self._has_room is not None and not self._has_room(i.stage, self._ledger.uses[i.batch]):
            return False
        if not self._plan.limits:
            return True
        rows = i.span.clip_to(self._rows[i.job, i.batch]).rows
        return self._in_flight[i.stage] + rows <= self._plan.limits[i.stage]

    def mark_done(self, i: Instruction) -> None:
        item = i.job, i.batch
        self._receives -= i.kind in RECEIVES
        if self._upcoming is not None:
            self._upcoming.end_task()
        rows = i.span.clip_to(self._rows[item]).rows
        if i.kind is Kind.F:
            self._in_flight[i.stage] += rows
            self._begun[i.batch] = None
        elif i.kind is Kind.B or i.kind is Kind.W:
            self._in_flight[i.stage] -= rows
        elif i.kind is Kind.STEP and self._policy.is_endless:
            self._halfway.pop((i.stage, i.batch), None)
            self._ledger.mark_done(i)
            if self._deliveries is not None:
                self._deliveries.after_step(i)
        if i.kind in (Kind.F, Kind.B, Kind.I):
            if i.span.stop < self._rows[item]:
                self._halfway[i.stage, i.batch] = None
            else:
                self._halfway.pop((i.stage, i.batch), None)
        self._add_ready(self._tracker.complete(i))
        self._left[item] -= 1
        if not self._left[item]:
            self._forget_batch(item)

    def _forget_batch(self, item: BatchKey) -> None:
        """Delete the records of a batch after its last instruction on this rank."""
        del self._left[item]
        self._begun.pop(item[1], None)
        if self._policy.is_endless:
            del self._rows[item]
            self._ledger.remove_batch(item[1])
            self._tracker.forget_batch(*item)

    def wait(self, mailbox: Mailbox, number: int) -> None:
        if (
            not self._receives
            and not self._n_expected_layers
            and not (self._replica_averages and self._replica_averages.n_expected)
        ):
            raise DeadlockError(
                f"rank {self._rank} waits although nothing is on its way: policy {self._policy.name!r} or the limits "
                f"{self._plan.limits} hold back {', '.join(map(str, self._ready))}"
            )
        self._complete_receives(mailbox.wait_new(number))

    @property
    def waiting_for(self) -> str:
        stages = ", ".join(map(str, self._in_flight))
        layers = f" and {self._n_expected_layers} layers" if self._n_expected_layers else ""
        sums = (
            f" and the gradients of {self._replica_averages.n_expected} batches"
            if self._replica_averages is not None
            else ""
        )
        return f"any of {self._receives} messages{layers}{sums} to stage {stages}"

    @property
    def _n_expected_layers(self) -> int:
        return 0 if self._deliveries is None else self._deliveries.n_expected

    def close(self) -> None:
        self._closed = True

    @property
    def needs_next_batch(self) -> bool:
        if self._closed or self._transfers or len(self._left) - len(self._begun) >= self._ahead:
            return False
        return self.is_satisfied

    @property
    def is_satisfied(self) -> bool:
        if self._closed or not self._policy.is_endless:
            return not self._left and (self._deliveries is None or self._deliveries.is_over)
        oldest = next((batch for _, batch in self._left), self._newest + 1)
        return self._newest + 1 - oldest < self._policy.depth

    def _complete_receives(self, receives: Iterable[Instruction]) -> None:
        for i in receives:
            self._add_ready(self._tracker.complete(send_of(i)))

    def _add_ready(self, ready: list[Instruction]) -> None:
        for i in ready:
            if i.kind in SENDS or i.kind in RECEIVES:
                self._transfers.append(i)
            else:
                if i.kind is Kind.F and self._deliveries is not None and self._deliveries.installs_early:
                    self._deliveries.before_forward(i.batch, i.stage)
                insort(self._ready, i, key=ready_key)
