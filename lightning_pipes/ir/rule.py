"""Policies as data: the simulator's kernel runs them without calling Python."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_pipes.ir.instruction import Instruction, Kind
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.schedule import Policy, RankView


@dataclass(frozen=True)
class Rule:
    """A rule that picks the ready instruction with the least `ready_key`; forwards only while their stage has room.

    Attributes:
        limits: most samples that each stage may hold between F and B, besides the plan's own limits; empty means none.
        alternate: where a forward and something else are both ready, take the sort that did not run last, a forward at
            the start; otherwise forwards come last.
        weights_last: whether weight gradients (W) wait until there is nothing else to run.
    """

    limits: tuple[int, ...] = ()
    alternate: bool = True
    weights_last: bool = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        """Return the instruction that a policy with this rule picks; see `Policy.pick`."""
        limits = self.limits
        if limits:
            ready = eligible_instructions(ready, lambda i: i.kind is not Kind.F or has_room(i, view.in_flight, limits))
        forward = next((i for i in ready if i.kind is Kind.F), None)
        late = (Kind.F, Kind.W) if self.weights_last else (Kind.F,)
        other = next((i for i in ready if i.kind not in late), None)
        if forward is None or other is None:
            return forward or other or next((i for i in ready if i.kind is Kind.W), None)
        after_forward = view.last is not None and view.last.kind is Kind.F
        return forward if self.alternate and not after_forward else other


class RulePolicy(Policy):
    """A policy that a `Rule` describes."""

    @abstractmethod
    def rule(self, plan: Plan) -> Rule:
        """Return the rule that orders `plan`.

        Raises:
            PlanError: it can't order such a plan.
        """

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return self.rule(plan).pick(ready, view, plan)


def eligible_instructions(ready: Iterable[Instruction], fits: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
    """Return the instructions of `ready`, sorted by `ready_key`, that a policy may pick.

    An instruction that does not fit holds back the later ones of its kind on its stage, so that gradients are summed in
    the order of samples.
    """
    out: list[Instruction] = []
    held_back: set[tuple[Kind, int]] = set()
    for i in ready:
        if (i.kind, i.stage) not in held_back:
            if fits(i):
                out.append(i)
            else:
                held_back.add((i.kind, i.stage))
    return tuple(out)


def has_room(forward: Instruction, in_flight: dict[int, int], limits: Sequence[int]) -> bool:
    """Whether the stage of `forward` may hold its samples too."""
    return in_flight[forward.stage] + forward.span.rows <= limits[forward.stage]
