"""The interface between schedules and torch: inject batches into a window, run instructions, drain the window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from lightning_pipes.cost import Link
from lightning_pipes.engine.compute.executor import Executor
from lightning_pipes.engine.compute.order import InstructionOrder, PredictedOrder, ReadyOrder, StaticOrder, StreamOrder
from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import NOTHING_SHARED, RankResources, Stage
from lightning_pipes.engine.messages.links import measure_links, measure_offsets
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.residency.deliveries import LayerDeliveries, NeedSource
from lightning_pipes.engine.residency.upcoming import UpcomingTasks
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import (
    RECEIVE_KINDS,
    SEND_KINDS,
    B,
    Cut,
    F,
    Instruction,
    Kind,
    LayerUse,
    Ledger,
    Plan,
    PlanError,
    Policy,
    Program,
    Reduction,
    Span,
    check_policy,
    check_stream,
    lower,
)
from lightning_pipes.ir.clock import read_nanoseconds
from lightning_pipes.sim.timeline import Event


class Watch(Protocol):
    """Exchanges failures with the other ranks."""

    doing: object | None

    def check(self) -> None:
        """Raise `PeerFailure` if any rank has failed."""

    def report_failure(self, error: BaseException, where: str = "") -> None:
        """Report a failure of this rank to the other ranks."""


class Turns(Protocol):
    """Decides when each of several engines on the same rank runs its window."""

    def window(self) -> int:
        """Return a number for a new window. It is the same on all ranks, and no other engine uses it."""

    def finish(self, engine: Engine) -> None:
        """Run the open window of `engine` to its end by calls of `Engine.advance`, then return."""


MAX_BATCHES_AHEAD = 2
"""The number of batches that are injected ahead of their first task if layers are offloaded.

The layers of the next batch can then be loaded while another batch runs.
"""
_FOLLOWING_KINDS = SEND_KINDS | {Kind.STEP}
"""The kinds of instructions that run directly after a computation."""


@dataclass(frozen=True)
class _Window:
    """An open window: the batches between two flushes, with their order and the executor that runs them."""

    order: InstructionOrder
    executor: Executor
    training: bool = True


class Engine:
    """Runs the instructions of one rank of a pipeline.

    All ranks must make the same calls in the same order. A window opens with the first call of `inject` and ends with
    `drain`.

    Args:
        plan: the plan that the order refers to.
        order: a program, or a policy that chooses among the ready instructions.
        stages: the stages of this rank, for every job.
        transport: sends messages to the other ranks and receives messages from them.
        rank: the rank of this process in the pipeline.
        device: the device on which this rank computes; the CPU by default.
        watch: receives the failures of this rank, and raises an error here if another rank fails.
        turns: decides when the engine runs its window, if several engines share the rank.
        resources: what the engine shares with its stages, which were created with the same resources.

    Raises:
        PlanError: `stages` are not the stages that the plan assigns to this rank, or the plan can't be run by an
            endless policy.
    """

    def __init__(
        self,
        plan: Plan,
        order: Program | Policy,
        stages: Sequence[Stage],
        transport: Transport,
        *,
        rank: int = 0,
        device: torch.device | None = None,
        watch: Watch | None = None,
        turns: Turns | None = None,
        resources: RankResources = NOTHING_SHARED,
    ) -> None:
        self.events: list[Event] = []
        """Events of this rank in the last drained window, with times in nanoseconds of its monotonic clock."""
        self._transport = transport
        self._rank = rank
        self._device = device or torch.device("cpu")
        self._watch = watch
        self._turns = turns
        self._offsets: dict[int, int] = {}
        self._windows = 0
        self._window: _Window | None = None
        self._batches: Counter[int] = Counter()
        self._mirrors, self._memory, self._predictor = resources.mirrors, resources.memory, resources.predictor
        self._version_memory, self._replica_averages = resources.version_memory, resources.replica_averages
        self._set_stages(plan, stages)
        self.plan, self._program = self._prepare_order(plan, order)

    def adopt(self, plan: Plan, order: Program | Policy, stages: Sequence[Stage] | None = None) -> None:
        """Use another plan or another order from the next window on.

        The new plan must have the same stages on the same ranks. The layers in the stages may differ if `stages` is
        given.

        Args:
            plan: the new plan.
            order: a program for the new plan, or a policy.
            stages: the new stages of this rank; needed if the new plan assigns layers to stages differently.

        Raises:
            PlanError: a window is open, the plan moves a stage to another rank, or the plan changes the layers of
                stages and `stages` is missing.
        """
        self._require_closed("a plan can be swapped")
        for name in ("ranks", "replicas", *(() if stages is not None else ("layers", "recompute", "whole_forward"))):
            if getattr(plan, name) != getattr(self.plan, name):
                raise PlanError(
                    f"the plan to adopt has {name} {getattr(plan, name)}, the engine was made for "
                    f"{getattr(self.plan, name)}; only spans, limits and versions may change"
                )
        if len(plan.jobs) != len(self.plan.jobs):
            raise PlanError(f"the plan to adopt has {len(plan.jobs)} jobs, the engine {len(self.plan.jobs)}")
        if stages is not None:
            self._set_stages(plan, stages)
        self.plan, self._program = self._prepare_order(plan, order)

    def inject(self, item: Item) -> None:
        """Add one batch to the window, without running any instruction of it.

        Raises:
            PlanError: the batch has no samples or more samples than the plan, uses layers that its stages don't have,
                reads layers late although the order is fixed in advance, or has a cut of its own although the order is
                not an endless policy or there are no mirrors.
        """
        if self._watch is not None:
            self._watch.check()
        window = self._window = self._window or self._open(self.plan, self._program)
        most = window.executor.plan.jobs[item.job].rows
        if not 1 <= item.rows <= most:
            raise PlanError(
                f"a batch of {item.rows} samples was injected, the plan cuts 1 to {most}; "
                "adopt a plan for the larger batch"
            )
        if item.use is not None and item.use.cut is not None and (self._mirrors is None or not self._is_endless):
            raise PlanError(
                "a batch has a cut of its own, and layers do not move between batches here: take a policy that does "
                "not flush, and give the stages and the engine mirrors, or leave the cut to the plan"
            )
        if item.use is not None and item.use.delays and isinstance(self._program, Program):
            raise PlanError(
                f"a batch reads layer {item.use.delays[0][0]!r} late, but this schedule fixes its order before the "
                "layers of a batch are known. Use a policy that waits for the layers that each batch reads, or remove "
                "the delay"
            )
        for stage in self._stages:
            if item.use is not None:
                stage.check_use(item.use)
                if stage.offload is not None:
                    stage.offload.enter(item.use)
        batch = self._batches[item.job]
        whole = self._whole if self._mirrors is None else LayerUse.from_plan(window.executor.plan)
        if self._replica_averages is not None and item.training and self._is_endless:
            for stage in self._stages:
                reduction = Reduction(stage.number, batch, item.job)
                self._replica_averages.expect(reduction, item.number, self._transport.mailbox.notify)
        window.order.add((item.job, batch), item.rows, item.use or whole)
        window.executor.add(item, batch)
        self._batches[item.job] += 1
        if self._memory is not None:
            self._memory.look_ahead()

    def progress(self, wait: bool = True) -> bool:
        """Run the instructions that are ready, and return whether any instruction was run.

        The method returns when the order needs another batch, or when nothing is left to run. If `wait` is false, it
        also returns when it would have to wait for a message.

        Raises:
            PeerFailure: another rank failed.
        """
        window = self._window
        if window is None:
            return False
        with forked_rng(self._device):
            return self._progress(window, wait)

    def end_window(self) -> None:
        """Close the window to further batches.

        Afterwards, `progress` or `drain` runs the remaining instructions.
        """
        if self._window is not None:
            self._window.order.close()

    @property
    def is_satisfied(self) -> bool:
        """Whether nothing is left to run until another batch is injected."""
        return self._window is None or self._window.order.is_satisfied

    def drain(self) -> None:
        """Run all remaining instructions of the window, then close it."""
        if self._window is None:
            return
        self.end_window()
        self._finish()
        self.events = list(self._window.executor.events)
        self._discard()

    @property
    def is_open(self) -> bool:
        """Whether a window is open, so that batches were injected and not yet drained."""
        return self._window is not None

    def evaluate(self, item: Item, micro_batches: int | None = None) -> list[tuple[Span, Any]]:
        """Run only the forward of a batch, without gradients.

        The batch may have any number of samples.

        Args:
            item: the batch.
            micro_batches: the number of micro-batches into which the batch is cut; by default, the number in training.

        Returns:
            The outputs of the last stage with their spans; an empty list on ranks without the last stage.

        Raises:
            PlanError: a window is open.
        """
        self._require_closed("an evaluation runs")
        item = replace(item, training=False)
        micro_batches = micro_batches or len(self.plan.spans(Kind.F, 0, item.job))
        forward = self._open(*_forward_only(self.plan, item.job, item.rows, micro_batches))
        self._window = window = replace(forward, training=False)
        try:
            with torch.no_grad():
                self.inject(item)
                self.end_window()
                self._finish()
        finally:
            self._discard()
        return window.executor.outputs

    def run_apart(self, item: Item, stages: Sequence[Stage], micro_batches: int | None = None) -> None:
        """Run one batch between two windows in separate stages, and discard its events.

        The gradients of the batch are added to the gradients of the parameters. No weight is updated.

        Args:
            item: the batch. Without `training`, only its forward runs, without gradients.
            stages: the stages of this rank that run it.
            micro_batches: the number of micro-batches into which the batch is cut; by default, it is cut as in
                training.

        Raises:
            PlanError: a window is open.
        """
        self._require_closed("a batch runs apart")
        cut = None if micro_batches is None else Cut.even(item.rows, micro_batches, self.plan.n_stages)
        window = self._open(*_forwards_first(self.plan, item.job, cut, item.training), stages)
        self._window = replace(window, training=item.training)
        try:
            with nullcontext() if item.training else torch.no_grad():
                self.inject(item)
                self.end_window()
                self._finish()
        finally:
            self._discard()

    @property
    def rank(self) -> int:
        """The rank of this process in the pipeline."""
        return self._rank

    @property
    def shares_rank(self) -> bool:
        """Whether engines of other trainings may run on this rank until a window of this engine has ended."""
        return self._turns is not None

    @property
    def is_training(self) -> bool:
        """Whether a window is open that also runs backwards."""
        return self._window is not None and self._window.training

    @property
    def holds_weights(self) -> bool:
        """Whether the weights must not change, because a backward of the open window needs their current values."""
        return self._window is not None and self._window.executor.holds_weights

    @property
    def events_so_far(self) -> list[Event]:
        """Events of this rank in the open window so far. After the window is drained, they are in `events`."""
        return [] if self._window is None else list(self._window.executor.events)

    def next_ready(self) -> Instruction | None:
        """Return an instruction that can run now, or None if no instruction is ready."""
        window = self._window
        return (
            None if window is None else window.order.next_instruction(self._transport.mailbox, window.executor.window)
        )

    def ready_since(self) -> int | None:
        """Return the time at which the instruction of `next_ready` became ready, or None if no instruction is ready.

        The time is in nanoseconds of the monotonic clock. For an instruction that needs no message, it is the current
        time, because such an instruction follows a computation that this rank has just finished.
        """
        i = self.next_ready()
        if i is None or self._window is None:
            return None
        return self._transport.mailbox.arrival_time((self._window.executor.window, i)) or read_nanoseconds()

    def advance(self) -> None:
        """Run the next instructions until one computation and its sends are finished.

        The method may change the caller's random state, which `progress` restores.
        """
        window, computed = self._window, False
        assert window is not None, "nothing was injected"
        while (i := self.next_ready()) is not None and not (computed and i.kind not in _FOLLOWING_KINDS):
            computed = computed or i.kind not in SEND_KINDS | RECEIVE_KINDS
            self._run(window, i)

    def measure_clock_offsets(self) -> None:
        """Measure how the clocks of neighboring ranks differ, so that the times of transfers can be compared.

        All ranks must call this method.

        Raises:
            PlanError: a window is open.
        """
        self._require_closed("clocks are compared")
        self._offsets = measure_offsets(self.plan, self._rank, self._transport)

    def probe_links(self, sizes: Sequence[int], repeats: int) -> dict[tuple[int, int], Link]:
        """Measure the links of this rank by `measure_links`, using the transport of this engine.

        Raises:
            PlanError: a window is open.
        """
        self._require_closed("links are probed")
        return measure_links(self.plan, self._rank, self._transport, sizes, repeats, self._device)

    def close(self) -> None:
        """Close the transport. All ranks must call this method."""
        self._transport.close()

    def _require_closed(self, what: str) -> None:
        """Raise PlanError if a window is open. `what` names the operation, for the message."""
        if self._window is not None:
            raise PlanError(f"{what} between two windows only; drain first")

    def _set_stages(self, plan: Plan, stages: Sequence[Stage]) -> None:
        wanted = {(number, job) for number in plan.stages[self._rank] for job in range(len(plan.jobs))}
        if {(stage.number, stage.job) for stage in stages} != wanted:
            got = sorted((stage.number, stage.job) for stage in stages)
            raise PlanError(f"rank {self._rank} needs a stage for each (number, job) of {sorted(wanted)}, got {got}")
        self._stages = list(stages)
        here = {stage.number: frozenset(map(str, stage.layers)) for stage in self._stages}
        self._whole = LayerUse(tuple(here.get(s, frozenset()) for s in range(plan.n_stages)))

    def _finish(self) -> None:
        if self._turns is None:
            self.progress()
        else:
            self._turns.finish(self)

    def _progress(self, window: _Window, wait: bool) -> bool:
        ran = False
        while not window.order.needs_next_batch:
            i = window.order.next_instruction(self._transport.mailbox, window.executor.window)
            if i is not None:
                self._run(window, i)
                ran = True
                continue
            if window.order.is_satisfied or not wait:
                return ran
            if self._watch is not None:
                self._watch.doing = window.order.waiting_for
            window.order.wait(self._transport.mailbox, window.executor.window)
            if self._watch is not None:
                self._watch.doing = None
        return ran

    def _open(self, plan: Plan, order: Program | Policy, stages: Sequence[Stage] | None = None) -> _Window:
        self._windows = self._windows + 1 if self._turns is None else self._turns.window()
        stages = self._stages if stages is None else stages
        executor = Executor(plan, stages, self._transport, self._rank, self._windows, self._offsets)
        if not isinstance(order, Program):
            return _Window(self._ready_order(order, plan), executor)
        static = StaticOrder(order, self._rank)
        if self._version_memory is not None:
            self._version_memory.upcoming = lambda: (
                version.key for version in executor.upcoming_versions(static.upcoming_instructions())
            )
        return _Window(static, executor)

    def _ready_order(self, policy: Policy, plan: Plan) -> ReadyOrder:
        if not policy.is_endless:
            return ReadyOrder(policy, plan, self._rank)
        rank, number, notify = self._rank, self._windows, self._transport.mailbox.notify
        sources: list[Callable[[Ledger], NeedSource]] = []
        if (averages := self._replica_averages) is not None:
            sources.append(lambda ledger: averages)
        if (mirrors := self._mirrors) is not None:
            sources.append(lambda ledger: LayerDeliveries(ledger, rank, number, mirrors, notify))
        if self._memory is None:
            return StreamOrder(policy, plan, rank, sources)
        turns = {stage.number: stage.offload for stage in self._stages if stage.offload is not None}
        settings = policy, plan, rank, sources, lambda stage, use: turns[stage].has_room(use), MAX_BATCHES_AHEAD
        if self._predictor is None:
            order = StreamOrder(*settings)
        else:
            order = PredictedOrder(UpcomingTasks(self._predictor, policy, plan, rank, number, notify), *settings)
        self._memory.upcoming = order.upcoming_layers
        return order

    @property
    def _is_endless(self) -> bool:
        return isinstance(self._program, Policy) and self._program.is_endless

    def _discard(self) -> None:
        self._window = None
        self._batches.clear()

    def _run(self, window: _Window, i: Instruction) -> None:
        window.order.mark_begun(i)
        try:
            window.executor.run(i)
        except BaseException as error:
            where = i.describe()
            if self._watch is not None and not isinstance(error, PeerFailure):
                self._watch.report_failure(error, where)
            error.add_note(f"in {where}")
            self._discard()
            raise
        window.order.mark_done(i)

    def _prepare_order(self, plan: Plan, order: Program | Policy) -> tuple[Plan, Program | Policy]:
        for stage in self._stages:
            stage.adopt(plan)
        if isinstance(order, Program):
            return plan, lower(order, plan)
        check_policy(order, plan)
        if order.is_endless:
            check_stream(order, plan)
        return plan, order


@lru_cache(maxsize=32)
def _forward_only(plan: Plan, job: int, rows: int, micro_batches: int) -> tuple[Plan, Program]:
    cut = Cut.even(rows, micro_batches, plan.n_stages)
    forward = Plan(plan.ranks, (cut,) * len(plan.jobs), replicas=plan.replicas)  # on the first replica of each stage
    rows_of_ranks = tuple(
        tuple(F(s, span, job) for s in stages for span in forward.local_spans(Kind.F, s, rank, job))
        for rank, stages in enumerate(plan.stages)
    )
    return forward, lower(Program(rows_of_ranks), forward)


@lru_cache(maxsize=32)
def _forwards_first(plan: Plan, job: int, cut: Cut | None, training: bool) -> tuple[Plan, Program]:
    """Return a plan and a program in which all forwards of a batch come before its backwards.

    Args:
        plan: the plan of training.
        job: the job of the batch.
        cut: the cut of the batch; None for the cut of training.
        training: whether the program has backwards.
    """
    plan = replace(plan, batches=1, versions=(), limits=(), after={}, split_backward=False)
    if cut is not None:
        plan = replace(plan, jobs=(cut,) * len(plan.jobs), whole_forward=())
    rows_of_ranks = []
    for rank, stages in enumerate(plan.stages):
        forwards = [F(s, span, job) for s in stages for span in plan.local_spans(Kind.F, s, rank, job)]
        backwards = [B(s, span, job) for s in reversed(stages) for span in plan.local_spans(Kind.B, s, rank, job)]
        rows_of_ranks.append((*forwards, *(backwards if training else ())))
    return plan, lower(Program(tuple(rows_of_ranks)), plan)
