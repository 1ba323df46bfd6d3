"""Rounds of a job array: one batch of every sibling per round, in a given order of computations.

The next round starts only after all batches of the round have finished. Rank 0 finds the order of the round from the
measured times of the stages, and each rank computes its own row of that order. A sibling has its turn as soon as its
last backward on this rank has finished. In this turn, its optimizers step and it hands in its next batch. The turns
follow the order of the backwards of stage 0, which is the same on all ranks. As a result, few siblings have gradients
at the same time (S III-D of ArrayPipe).
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.arrays.memory_swap import SiblingMemory
from lightning_pipes.arrays.siblings.sibling import Sibling
from lightning_pipes.cost import CostModel, JobCosts
from lightning_pipes.ir import Kind, Plan, PlanError, Program
from lightning_pipes.planning.fit import price_stages
from lightning_pipes.trainer.loop.host import PipelineHost

RoundOrder = Callable[[Plan, JobCosts], Program]
"""Returns the order of one batch of each job of a plan, given the costs of the stages of each job."""


S = TypeVar("S", bound=Sibling[Any])


class Rounds(Generic[S]):
    """The order of computations of the current round on this rank.

    Args:
        order: finds the order of a round from a plan with one job per sibling and the costs of its stages.

    Attributes:
        turns_left: number of siblings whose turn in this round is still to come.
    """

    def __init__(self, order: RoundOrder) -> None:
        self.turns_left = 0
        self._order = order
        self._row: deque[tuple[S, Kind]] = deque()
        self._plans: dict[int, Plan] = {}
        """The plans of the last round, by the index of the sibling."""
        self._rows: list[list[tuple[int, bool]]] = []
        """The order of the last round, as sent by rank 0."""
        self._usual: list[int] = []
        """Indices of the siblings in the order of this rank's blocks in the last round.

        The order of the next round is probably the same.
        """
        self._warned = False

    def begin_round(
        self, queue: Sequence[S | None], share: Callable[[Callable[[], str]], str], memory: SiblingMemory
    ) -> list[int]:
        """Begin a round and return the order of its turns, as indices into `queue`. Collective.

        Args:
            queue: the siblings, which have handed in their batches. Siblings that have ended or are failing have no
                batch.
            share: returns on all ranks the value that its argument returns on rank 0.
            memory: holds the states of the siblings.

        Raises:
            PlanError: a batch is cut into several micro-batches, or the device has no room for the states that must be
                resident at the same time.
        """
        present = sorted((s for s in queue if s is not None), key=lambda s: s.index)
        working = {s.index: (s, s.engine) for s in present if s.engine is not None}
        plans = {index: engine.plan for index, (_, engine) in working.items()}
        for plan in plans.values():
            pieces = len(plan.jobs[0].forward[0])
            if pieces > 1:
                raise PlanError(
                    f"an array with rounds runs whole batches, but a sibling cuts its batches into {pieces}; set "
                    "microbatches=1, or remove rounds"
                )
        same, self._plans = plans == self._plans, plans

        def find() -> str:
            if not same:
                self._rows = self._find_rows([s for s, _ in working.values()], plans)
            return json.dumps([None if same else self._rows, _order_of_turns(queue, self._rows)])

        rows, turns = json.loads(share(find))
        if rows is not None:
            self._rows = rows
        self.turns_left = len(queue)
        self._row.clear()
        if working and self._rows:
            _, engine = next(iter(working.values()))
            row = [(i, backward) for i, backward in self._rows[engine.rank] if i in working]
            keeping = {i for i, plan in plans.items() if _keeps_state(plan, engine.rank)}
            self._row.extend(
                (working[i][0], Kind.B if backward else Kind.F)
                for i, backward in _fit_row(row, keeping, engine.plan, engine.rank, memory)
            )
            self._usual = [i for i, _ in row]
        found: list[int] = turns
        return found

    def _find_rows(self, siblings: Sequence[S], plans: Mapping[int, Plan]) -> list[list[tuple[int, bool]]]:
        """Return the order of the blocks of each rank. A block is the index of a sibling, and whether it is a backward.

        If a rank has several stages, a sibling computes its blocks on this rank in the order of its own schedule.
        """
        if not siblings:
            return []
        costs = self._measured_costs(siblings, [plans[s.index] for s in siblings])
        plan, program = costs.plan, self._order(costs.plan, costs)
        if len(program.head) != len(plan.stages):
            raise PlanError(
                f"the order of a round has {len(program.head)} rows, but the {plan.n_stages} stages of siblings are "
                f"on {len(plan.stages)} ranks; it needs a row for each rank. Give siblings a schedule with one stage "
                "a rank, which round_order requires, or remove rounds"
            )
        return [
            [(siblings[i.job].index, i.kind is Kind.B) for i in row if i.kind is not Kind.STEP] for row in program.head
        ]

    def _measured_costs(self, siblings: Sequence[S], plans: Sequence[Plan]) -> JobCosts:
        """Return the costs of each sibling's stages according to the profile of its layers.

        If the layers of a sibling were not measured, the stages of all siblings have equal costs.
        """
        models = []
        for sibling, plan in zip(siblings, plans, strict=True):
            assert sibling.trainer is not None, "a sibling with a window has a trainer"
            host: PipelineHost = sibling.trainer.strategy  # type: ignore[assignment]  # a sibling with a window has one
            decision = host.decision
            if decision.profile is None or decision.deployment is None:
                self._warn_about_times(sibling.index, decision.why)
                models = [CostModel.uniform(plan.n_stages, 1e-3, 2e-3, rows=1)] * len(plans)
                break
            models.append(price_stages(decision.profile, plan, decision.deployment))
        return JobCosts(tuple(plans), tuple(models))

    def _warn_about_times(self, index: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            reason = why or "layers are measured where partition='auto'"
            rank_zero_info(
                f"JobArray: rounds are ordered as if stages were equal, because the times of sibling {index} are "
                f"unknown: {reason}"
            )

    def begin_turn(self, sibling: S | None) -> None:
        """Begin a turn of the round. The batch that the sibling hands in during this turn belongs to the next round."""
        self.turns_left -= 1
        if any(each is sibling for each, _ in self._row):  # a batch without a backward leaves its backwards in the row
            self._row = deque(entry for entry in self._row if entry[0] is not sibling)

    def next_sibling(self, memory: SiblingMemory) -> S | None:
        """Return the sibling of the next block, or None if its block is not ready or the round has no more blocks."""
        while self._row:
            sibling, kind = self._row[0]
            engine = sibling.engine
            over = (
                sibling.is_failing
                or engine is None
                or engine.is_satisfied
                or (kind is Kind.B and not engine.is_training)
            )
            if not over:
                assert engine is not None
                if engine.next_ready() is None or not memory.has_room(sibling.index):
                    return None
            self._row.popleft()
            if not over:
                return sibling
        return None

    def upcoming_indices(self, queue: Sequence[S | None]) -> Iterator[int]:
        """Yield the indices of siblings in the order in which this rank needs their states.

        The blocks and turns that are left in this round come first, and the blocks of the next round follow.
        """
        blocks = Counter(sibling.index for sibling, _ in self._row)
        turns = deque(s.index for s in islice(queue, self.turns_left) if s is not None)
        for sibling, _ in self._row:
            while turns and not blocks[turns[0]]:
                yield turns.popleft()
            blocks[sibling.index] -= 1
            yield sibling.index
        yield from turns
        yield from self._usual


def _order_of_turns(queue: Sequence[Sibling[Any] | None], rows: list[list[tuple[int, bool]]]) -> list[int]:
    """Return indices into `queue` in the order of the siblings' last backwards on stage 0.

    Siblings without a backward come first.
    """
    last = {index: at for at, (index, backward) in enumerate(rows[0] if rows else ()) if backward}
    return sorted(range(len(queue)), key=lambda n: -1 if (s := queue[n]) is None else last.get(s.index, -1))


def _keeps_state(plan: Plan, rank: int) -> bool:
    """Return whether a sibling's state stays on the rank between forward and backward.

    It does not have to stay if all stages of the rank recompute every micro-batch.
    """
    return not all(map(plan.recomputes_all, plan.stages[rank]))


def _fit_row(
    row: list[tuple[int, bool]], keeping: Collection[int], plan: Plan, rank: int, memory: SiblingMemory
) -> list[tuple[int, bool]]:
    """Return this rank's blocks in an order in which their states fit on the device.

    The order is changed only on the last stage, and only if the given order needs more resident states than there is
    room for. On that stage, each backward may follow its forward immediately, because this cannot create a cycle of
    stages that wait for each other.

    Args:
        row: the blocks of this rank, as the index of a sibling and whether the block is a backward.
        keeping: indices of the siblings whose states stay on the device from forward to backward.
        plan: the plan of one sibling.
        rank: this rank.
        memory: holds the states of the siblings.

    Raises:
        PlanError: there is no room for the resident states in any order.
    """
    siblings = {index for index, _ in row}

    def find_excess(blocks: list[tuple[int, bool]]) -> tuple[int, str]:
        """Return the number of states that do not fit on the device at the same time, and the reason.

        A state is resident between forward and backward, during a block, and during a turn.
        """
        left, begun = Counter(index for index, _ in blocks), set[int]()
        for index, _ in blocks:
            for other in siblings:
                resident = begun | {index, other}
                if reason := memory.explain_excess(resident):
                    return len(resident), reason
            left[index] -= 1
            if left[index] and index in keeping:
                begun.add(index)
            else:
                begun.discard(index)
        return 0, ""

    if not memory.explain_excess(siblings):
        return row
    needed, reason = find_excess(row)
    if reason and plan.stages[rank] == (plan.n_stages - 1,):
        row = [(index, way) for index, backward in row if not backward for way in (False, True)]
        needed, reason = find_excess(row)
    if reason:
        raise PlanError(
            f"in a round, rank {rank} has {needed} states at the same time: the states of siblings between forward "
            f"and backward, and the state of the current sibling. {reason}. Set recompute=True in all siblings, so "
            "that states may leave the device in between, or give MemorySwap more bytes or slots"
        )
    return row
