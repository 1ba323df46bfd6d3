"""The policy "csp": batches that use different layers of a supernet overlap, with the weights of sequential
training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from lightning_pipes.ir import Instruction, Kind, LayerUse, Plan, Policy, RankView, Span, check_count, check_fields
from lightning_pipes.planning.partition import balanced_cuts
from lightning_pipes.planning.planner import EvenPlanner, Planner, Problem


@dataclass(frozen=True)
class CSP(Policy):
    """Causal synchronous parallelism (NASPipe, Zhao et al. 2022, ASPLOS, section 3) for batches of a supernet.

    Each batch trains the layers that were chosen for it, and batches that share no layer overlap. A rank runs steps
    first, then backwards, then forwards, in each case of the earliest batch (section 3.2, Algorithm 2). A forward is
    ready when its input has arrived and earlier batches have stepped its layers on the stage. To check this, `Ledger`
    keeps a version of each layer. The paper's list of finished batches is not sufficient if a layer moves to another
    stage. The weights are bitwise equal to the weights of training one batch after another, and the oldest batch never
    waits.

    A batch that uses all layers waits for the complete previous batch. This is also the case if the module does not
    specify the layers of a batch.

    Attributes:
        depth: the largest number of batches in flight, from the oldest to the newest. The paper uses a queue of 30. A
            larger depth finds more work that is ready, and holds the activations of more batches.
        balanced: whether each batch has its own cut, which balances the costs of its layers (section 3.2). A layer then
            moves to the rank that runs it, with its optimizer states (section 4.2). Layers that all batches use stay on
            their ranks. The weights are the same.
        split_backward: whether the backward has two parts. The input gradients (I) are sent back immediately. The
            weight gradients (W) run if nothing else is ready, or before forwards if a later batch in flight waits for
            them. Until then, a stage holds the activations that they need, for up to `depth` batches. The weights are
            the same.
    """

    depth: int = 30
    balanced: bool = False
    split_backward: bool = False
    name: ClassVar[str] = "csp"
    flushes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_count(f"depth of {self.name}", self.depth)

    @property
    def splits_backward(self) -> bool:
        return self.split_backward

    @property
    def moves_layers_by_batch(self) -> bool:
        return self.balanced

    def cut(self, use: LayerUse, cost: Callable[[str], float], plan: Plan) -> tuple[Span, ...] | None:
        costs, late = [0.0] * plan.layers[-1].stop, {name for name, _ in use.delays}
        allowed = np.ones((plan.n_stages, len(costs)), np.bool_)
        for stage, names in enumerate(use.layers):
            for name in sorted(names):
                number, _, part = name.partition(".")
                costs[int(number)] += cost(name)
                if not part or name in late:
                    allowed[:, int(number)] = np.arange(plan.n_stages) == stage
        cuts = balanced_cuts([costs], plan.n_stages, allowed)[0].tolist()
        return tuple(Span(a, b) for a, b in pairwise(cuts)) if cuts[-1] else None

    def make_planner(self) -> SubnetPlanner:
        return SubnetPlanner()

    # Batch 2 shares a layer of stage 0 with batch 0. Batch 3 does not have to wait, and overtakes it.
    # Drawn by `subnets(CSP(), "000", "111", "020", "202")`:
    # rank 0 |0-1-3-........0===2-1===..3===..2===| bubble 33.3%
    # rank 1 |..0-1-....0===3-1===2-3===..2===....| bubble 33.3%
    # rank 2 |....0-0===1-1===3-3===2-2===........| bubble 33.3%
    #         - forward  = backward  . idle
    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        first: dict[Kind, Instruction] = {}
        for i in ready:
            first.setdefault(i.kind, i)
            if i.kind is Kind.F:
                break
        for kind in (Kind.STEP, Kind.B, Kind.I):
            if kind in first:
                return first[kind]
        if Kind.W not in first:
            return first[Kind.F]
        return _awaited(ready, view, plan) or first.get(Kind.F, ready[0])


def _awaited(ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
    """Return the first weight gradients that a later batch in flight waits for; None if there are none.

    They belong to the earliest batch for which only weight gradients are left on their stage before its step.
    """
    first: dict[tuple[int, int], Instruction] = {}
    for i in ready:
        if i.kind is not Kind.W:
            continue
        w = first.setdefault((i.batch, i.stage), i)
        if i.span == plan.spans(Kind.W, i.stage)[-1] and i.batch in view.uses:
            own = view.uses[i.batch]
            steps = own.stepped_layers(i.stage) - {name for name, _ in own.delays}
            others = (use for batch, use in view.uses.items() if batch > i.batch)
            if any(not steps.isdisjoint(use.layers[i.stage]) for use in others):
                return w
    return None


DEFAULT_MICROBATCHES = 1
"""The default number of micro-batches.

On real layers, a whole batch is fastest. Smaller micro-batches use a device less efficiently, and each of them adds
messages and Python overhead. Subnets already overlap, so micro-batches are not needed to fill the stages.
"""


@dataclass(frozen=True)
class SubnetPlanner(Planner):
    """Cuts batches evenly into a number of micro-batches that does not depend on the number of stages.

    On any number of stages, gradients are then summed in the same order, so that weights are bitwise equal. For the
    same reason, the number of micro-batches does not depend on measured times, which differ from run to run. More
    micro-batches are faster if a layer that all subnets step makes them wait for each other, and if one micro-batch is
    still large enough to use a device fully. In this case, pass their number as `microbatches`.
    """

    def plan(self, problem: Problem) -> Plan:
        return EvenPlanner().plan(replace(problem, microbatches=problem.microbatches or DEFAULT_MICROBATCHES))

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        return super().profile_sizes(rows, stages, microbatches or DEFAULT_MICROBATCHES)
