"""Runs the instructions of one rank on torch, for every schedule."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute import autograd, split
from lightning_pipes.engine.compute.autograd import SavedForward
from lightning_pipes.engine.compute.spans import Item, SpanBuffer, remove_marks, take_rows
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.compute.weights import LateWeights, WeightVersion
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    Instruction,
    Kind,
    Plan,
    Span,
    graph_spans,
    layer_passes,
    receive_of,
    send_of,
)
from lightning_pipes.ir.clock import read_nanoseconds
from lightning_pipes.sim.timeline import Event

Records = list[tuple[SavedForward, Sequence[Any]]]
"""Forwards, each with the gradients of its outputs."""

_NOTHING = nullcontext()
MAX_STORED_EVENTS = 100_000
"""The maximum number of events that an executor stores. In an endless window the oldest events are dropped."""


class Executor:
    """Runs instructions on one rank and holds the state of one window.

    The state consists of computed and received tensors, and of the forwards that wait for their backward.

    Args:
        plan: the plan of the window.
        stages: the stages of this rank, for every job.
        transport: sends and receives messages.
        rank: the rank of this process in the pipeline.
        window: the number of the window.
        offsets: the nanoseconds to add to the clock of each neighboring rank to get the clock of this rank.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        transport: Transport,
        rank: int,
        window: int,
        offsets: Mapping[int, int] | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.window = window
        self.events: deque[Event] = deque(maxlen=MAX_STORED_EVENTS)
        self.outputs: list[tuple[Span, Any]] = []
        """The outputs of the last stage in an evaluation, with their spans."""
        self._stages = {(stage.number, stage.job): stage for stage in stages}
        self._transport = transport
        self._offsets = offsets or {}
        self._items: dict[tuple[int, int], Item] = {}
        self._buffers: dict[tuple[Kind, int, int, int], SpanBuffer] = {}
        self._saved: dict[tuple[int, int, int], list[SavedForward]] = defaultdict(list)
        self._split: dict[Instruction, tuple[split.WeightGradients, list[WeightVersion | None]]] = {}
        self._versions: dict[tuple[int, int, int], WeightVersion | None] = {}
        self._late: dict[tuple[int, int], LateWeights] = {}
        self._rows_left: dict[tuple[int, int, int], int] = {}  # rows whose weight gradients are not computed yet
        self._steps: Counter[tuple[int, int]] = Counter()
        self._updates: Counter[tuple[int, int]] = Counter()  # by stage and job, in this window
        self._last_arrival: dict[tuple[int, Kind], int] = {}

    def add(self, item: Item, batch: int) -> None:
        """Add `item` as batch number `batch` of its job in this window."""
        self._items[item.job, batch] = item
        if self._late or (item.use is not None and item.use.delays):
            for key, stage in self._stages.items():
                if key[1] == item.job:
                    late = self._late[key] = self._late.get(key) or stage.late_weights()
                    late.enter(batch, item.use)

    def run(self, i: Instruction) -> None:
        """Run one instruction. Everything that it needs must be available."""
        item = self._items[i.job, i.batch]
        fault_point(i.kind)
        if i.kind is Kind.STEP:
            with self._stages[i.stage, i.job].task_context(i.kind, item):
                started = read_nanoseconds()
                self._step(i, item)
                self.events.append(Event(self.rank, i, started, read_nanoseconds()))
            return
        span = item.samples_of(i.span)
        if span.start == span.stop:  # the batch is short and ends before this span
            return
        if i.kind is Kind.RF or i.kind is Kind.RB:
            self._receive(i, span)
        elif i.kind is Kind.SF or i.kind is Kind.SB:
            self._send(i, span)
        else:
            stage = self._stages[i.stage, i.job]
            version = self._version_of(stage, i, item) if item.training else None
            with stage.compute_context(i.kind, item, version):
                started = read_nanoseconds()
                self._compute(i, item, span)
                self.events.append(Event(self.rank, i, started, read_nanoseconds()))

    def upcoming_versions(self, upcoming: Iterable[Instruction]) -> Iterator[WeightVersion]:
        """Yield the weight versions that upcoming instructions will read, in order.

        Only versions that were already chosen by a forward are included.
        """
        for i in upcoming:
            version = self._versions.get((i.stage, i.job, i.batch))
            if version is not None and i.kind in COMPUTE_KINDS and i.kind is not Kind.STEP:
                yield version

    @property
    def holds_weights(self) -> bool:
        """Whether some forwards wait for their backward and still refer to the weights that they read."""
        return bool(self._split) or any(saved.has_graph for held in self._saved.values() for saved in held)

    def _compute(self, i: Instruction, item: Item, span: Span) -> None:
        """Run a forward (F) for the first time or again (R), a full backward (B), or half of a backward (I, W)."""
        if i.kind is Kind.F:
            self._forward(i, item)
            return
        stage, last = self._stages[i.stage, i.job], self._is_last(i.stage)
        if i.kind is Kind.R:
            self._recompute(stage, item, self._saved_of(i, span))
            return
        if i.kind is Kind.W:
            with self._last_backward_context(stage, i, item, span):
                left, versions = self._split.pop(i)
                left.compute()
                stage.weights.collect_gradients(versions)
            return
        records = self._take_saved(i, item, span)
        if i.kind is Kind.I:
            left = split.backward_inputs(records, last)
            stage.note_split(left.inseparable)
            self._split[i._replace(kind=Kind.W)] = left, [saved.version for saved, _ in records]
        else:
            with self._last_backward_context(stage, i, item, span):
                versions = [saved.version for saved, _ in records]
                repeats = all(saved.recompute for saved, _ in records)
                stage.run_backward(
                    item,
                    versions,
                    lambda: autograd.backward(records, last),
                    (lambda: self._run_again(stage, item, [saved for saved, _ in records])) if repeats else None,
                )
                stage.weights.collect_gradients(versions)
        if i.stage > 0:
            for saved, _ in records:
                self._pass_on(Kind.SB, i, saved.span, autograd.input_gradients(saved))

    def _last_backward_context(
        self, stage: Stage, i: Instruction, item: Item, span: Span
    ) -> AbstractContextManager[None]:
        """Return the stage's context for the last weight gradients of a batch, or an empty context for earlier ones."""
        batch = (i.stage, i.job, i.batch)
        if batch not in self._rows_left:
            own = self.plan.local_spans(Kind.B, i.stage, self.rank, i.job) if self.plan.replicas else ()
            self._rows_left[batch] = sum(item.samples_of(each).rows for each in own) or item.rows
        left = self._rows_left[batch] = self._rows_left[batch] - span.rows
        if left:
            return _NOTHING
        del self._rows_left[batch]
        if stage.replica_averages is not None:
            return self._sending_gradients(stage, i, item)
        return _NOTHING if stage.last_backward is None else stage.last_backward(item)

    @contextmanager
    def _sending_gradients(self, stage: Stage, i: Instruction, item: Item) -> Iterator[None]:
        yield
        late = self._late.get((i.stage, i.job))
        stage.send_gradients(item, {} if late is None else late.gradients(i.batch))

    def _forward(self, i: Instruction, item: Item) -> None:
        stage, last = self._stages[i.stage, i.job], self._is_last(i.stage)
        cuts_differ = not self.plan.uniform_jobs[i.job]
        version = self._version_of(stage, i, item) if item.training else None
        recomputes = self.plan.recomputes(i.stage, i.job, i.span)
        for part, kept in self._split_forward(i, item):
            received, flags = (None, ()) if i.stage == 0 else self._buffer_of(Kind.RF, i).take_span(part)
            wanted: autograd.Flags = ()
            if not item.training:
                output = stage.forward(item, part, received, None, cuts_differ=cuts_differ)
            elif recomputes or len(kept) > 1:
                with torch.no_grad():
                    in_parts = len(kept) > 1
                    output = stage.forward(
                        item, part, received, version, runs_again=True, in_parts=in_parts, cuts_differ=cuts_differ
                    )
                wanted = autograd.may_want_gradients(output)
                for span in kept:
                    saved = SavedForward(span, version, recompute=True, sent_flags=wanted)
                    saved.received = (_copy_rows(received, part, span), flags)
                    self._saved[i.stage, i.job, i.batch].append(saved)
            else:
                saved = SavedForward(part, version)
                entered = autograd.enter_stage(received, flags, saved)
                output = stage.forward(item, part, entered, version, cuts_differ=cuts_differ)
                output, wanted = autograd.leave_stage(output, saved)
                self._saved[i.stage, i.job, i.batch].append(saved)
            if not last:
                self._pass_on(Kind.SF, i, part, (output, wanted))
            elif not item.training:
                self.outputs.append((part, output))

    def _split_forward(self, i: Instruction, item: Item) -> list[tuple[Span, list[Span]]]:
        """Return the samples of each run of a forward, with the spans of the graphs that backward needs for it.

        A run has several graphs if it creates none itself, because forward runs again before each backward.
        """
        whole = item.samples_of(i.span)
        if not item.training:
            return [(whole, [whole])]
        kept = [part for span in graph_spans(i, self.plan) if (part := item.samples_of(span)).rows]
        if len(kept) == 1 or len(layer_passes(i, self.plan)) == 1:
            return [(whole, kept)]
        return [(part, [part]) for part in kept]

    def _version_of(self, stage: Stage, i: Instruction, item: Item) -> WeightVersion | None:
        """Return the weights that the first forward of the batch has read, so that the whole batch reads the same."""
        batch = (i.stage, i.job, i.batch)
        if batch not in self._versions:
            late = self._late.get((i.stage, i.job))
            if late is not None:
                self._versions[batch] = late.make_version(i.batch)
            elif (predict := stage.predict(item)) is not None:
                missed = i.batch - self._updates[i.stage, i.job]
                self._versions[batch] = stage.weights.predict_version(missed, predict)
            else:
                self._versions[batch] = stage.weights.current_version()
        return self._versions[batch]

    def _take_saved(self, i: Instruction, item: Item, span: Span) -> Records:
        """Remove and return the forwards that a backward differentiates, each with the gradients of its outputs."""
        mine = self._saved_of(i, span)
        held = self._saved[i.stage, i.job, i.batch]
        self._saved[i.stage, i.job, i.batch] = [saved for saved in held if not saved.span.overlaps(span)]
        self._recompute(self._stages[i.stage, i.job], item, mine)
        if self._is_last(i.stage):
            return [(saved, ()) for saved in mine]
        gradients = self._buffer_of(Kind.RB, i)
        return [(saved, remove_marks(gradients.take_span(saved.span))[0]) for saved in mine]

    def _saved_of(self, i: Instruction, span: Span) -> list[SavedForward]:
        """Return the forwards that a backward of these samples differentiates."""
        return [saved for saved in self._saved[i.stage, i.job, i.batch] if saved.span.overlaps(span)]

    def _recompute(self, stage: Stage, item: Item, forwards: Sequence[SavedForward]) -> None:
        """Create the graphs of forwards that have none yet. A backward finds the graphs that an R has created."""
        missing = [saved for saved in forwards if not saved.has_graph]
        if missing:
            stage.begin_backward()
            self._run_again(stage, item, missing)

    def _run_again(self, stage: Stage, item: Item, forwards: Sequence[SavedForward]) -> None:
        """Run forwards again to create their graphs."""
        for saved in forwards:
            received, flags = saved.received
            if stage.offload is None:  # otherwise it may have to run once more
                saved.received = None
            saved.entered, saved.outputs = [], []
            entered = autograd.enter_stage(received, flags, saved)
            cuts_differ = not self.plan.uniform_jobs[stage.job]
            output = stage.forward(item, saved.span, entered, saved.version, again=True, cuts_differ=cuts_differ)
            autograd.leave_stage(output, saved, saved.sent_flags)
            saved.has_graph = True

    def _step(self, i: Instruction, item: Item) -> None:
        stage, late = self._stages[i.stage, i.job], self._late.get((i.stage, i.job))
        if late is not None:
            late.before_step(i.batch)
        others = (of for at, of in self._versions.items() if at[:2] == (i.stage, i.job) and at[2] != i.batch)
        stage.weights.before_update(others)
        if stage.step is not None:
            stage.step(item)
        stage.weights.after_update()
        self._updates[i.stage, i.job] += 1
        if late is not None:
            late.after_step(i.batch)
        batch = (i.stage, i.job, i.batch)
        self._saved.pop(batch, None)
        self._versions.pop(batch, None)
        for kind in SEND_KINDS | RECEIVE_KINDS:
            self._buffers.pop((kind, *batch), None)
        self._steps[i.job, i.batch] += 1
        if self._steps[i.job, i.batch] == len(self.plan.stages[self.rank]):  # this rank has finished the batch
            del self._steps[i.job, i.batch], self._items[i.job, i.batch]

    def _pass_on(self, send: Kind, i: Instruction, span: Span, tree: Any) -> None:
        """Put a tree into the receive buffer of the next or previous stage.

        If that stage is on another rank, put the tree into the send buffer of this stage.
        """
        if not self.plan.is_remote_edge(i.stage if send is Kind.SF else i.stage - 1):
            receive = receive_of(i._replace(kind=send))
            self._buffer_of(receive.kind, receive).put(span, tree)
        else:
            self._buffer_of(send, i).put(span, tree)

    def _send(self, i: Instruction, span: Span) -> None:
        receive = receive_of(i)
        content = self._buffer_of(i.kind, i).take_span(span)
        tree, flags = content if i.kind is Kind.SF else (content[0] if len(content) == 1 else content, ())
        self._transport.send(self.plan.rank_of(receive), (self.window, receive), tree, flags)

    def _receive(self, i: Instruction, span: Span) -> None:
        message = self._transport.mailbox.take_message((self.window, i))
        assert message is not None, f"{i} was run before its message was there"
        if i.kind is Kind.RF:
            self._buffer_of(i.kind, i).put(span, (message.tree, message.flags))
        else:  # a list of gradients; a single gradient is sent without a list
            self._buffer_of(i.kind, i).put(span, message.tree if isinstance(message.tree, list) else [message.tree])
        if message.arrived:
            send = send_of(i)
            source = self.plan.rank_of(send)
            sent = message.sent + self._offsets.get(source, 0)  # on the clock of this rank
            started = max(sent, message.posted, self._last_arrival.get((source, i.kind), 0))
            self._last_arrival[source, i.kind] = message.arrived
            self.events.append(Event(source, send, min(started, message.arrived), message.arrived))

    def _buffer_of(self, kind: Kind, i: Instruction) -> SpanBuffer:
        key = (kind, i.stage, i.job, i.batch)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = SpanBuffer(gradients=kind is Kind.SB or kind is Kind.RB)
        return buffer

    def _is_last(self, stage: int) -> bool:
        return stage == self.plan.n_stages - 1


def _copy_rows(tree: Any, span: Span, part: Span) -> Any:
    """Return rows as `take_rows` does, in separate memory, so that each part can be freed separately."""
    rows = take_rows(tree, span, part)
    return rows if part == span else pytree.tree_map_only(torch.Tensor, torch.clone, rows)
