"""Batches that use different layers: who waits for whom, so that each finds and leaves its layers as if they ran one
after another.

    batch   0: layers 0 3      stage 0  F0     F1      B1  B0  STEP0 F2     two batches that share nothing overlap,
            1: layers 1 4      stage 1      F0 B0 STEP0 F1 B1 STEP1     F2  the third waits for the layers that it
            2: layers 0 4                                                   shares with them, stage by stage
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_pipes.ir.errors import PlanError
from lightning_pipes.ir.instruction import STEP, F, Instruction, Kind
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.span import Span

Waits = Mapping[Instruction, tuple[Instruction, ...]]
"""Other instructions that one waits for, besides its data."""


class Delayed(NamedTuple):
    """A layer is stepped by a batch that reads an older version of it.

    Attributes:
        by: batch i reads, forward and backward, what batch i - `by` of the window has left, or the window's first
            version if there is no such batch.
    """

    by: int


@dataclass(frozen=True)
class Use:
    """The layers that a batch uses, by name: "5" is the model's layer number 5, "5.2" the part of it called 2.

    Attributes:
        layers: those of each stage.
        steps: those of them that the batch steps; None means all. The others are read as they are, get no gradients
            from it, and must not change in its forward; several batches may do so at once.
        delays: those of them that it reads late, sorted by name, and by how much.

    Raises:
        PlanError: it steps what it does not use, or reads late what it does not step.
    """

    layers: tuple[frozenset[str], ...]
    steps: frozenset[str] | None = None
    delays: tuple[tuple[str, Delayed], ...] = ()

    def __post_init__(self) -> None:
        for name in sorted(self.steps or ()):
            if not any(name in names for names in self.layers):
                raise PlanError(f"a batch steps {name!r} and does not use it; it uses {_listed(self.layers)}")
        for name, delay in self.delays:
            if not any(name in self.stepped(stage) for stage in range(len(self.layers))):
                raise PlanError(f"a batch reads {name!r} late and does not step it; it uses {_listed(self.layers)}")
            if delay.by < 1:
                raise PlanError(f"a batch reads {name!r} {delay.by} batches late; it can be 1 or more")

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        layers: Sequence[Span],
        steps: Iterable[str] | None = None,
        delays: Mapping[str, Delayed] | None = None,
    ) -> Use:
        """Those layers, each on the stage that has its number; `layers` are those of the stages, as a plan has them.

        Raises:
            PlanError: no stage has one of them.
        """
        stages: list[set[str]] = [set() for _ in layers]
        for name in names:
            number = name.partition(".")[0]
            found = [s for s, (a, b) in enumerate(layers) if number.isdecimal() and a <= int(number) < b]
            if not found:
                last = max((b for _, b in layers), default=0) - 1
                raise PlanError(f"a batch uses a layer that is not there: no layer {name!r}, they are '0' to '{last}'")
            stages[found[0]].add(name)
        late = tuple(sorted((delays or {}).items()))
        return cls(tuple(map(frozenset, stages)), None if steps is None else frozenset(steps), late)

    @classmethod
    def whole(cls, plan: Plan) -> Use:
        """All layers; of a plan that does not say which they are, one a stage."""
        layers = plan.layers or [Span(s, s + 1) for s in range(plan.n_stages)]
        return cls(tuple(frozenset(map(str, range(*span))) for span in layers))

    def stepped(self, stage: int) -> frozenset[str]:
        """Those that are stepped on `stage`."""
        return self.layers[stage] if self.steps is None else self.layers[stage] & self.steps


class Stepped(NamedTuple):
    """How far a layer is.

    Attributes:
        times: it was stepped.
        batch: that has stepped it last.
    """

    times: int
    batch: int


@dataclass
class _Layer:
    """Who comes before the next batch that uses a layer: STEPs that may not have run yet."""

    rank: int
    stage: int
    batch: int
    stepper: Instruction | None = None
    readers: set[Instruction] = field(default_factory=set)  # since then


class _Late:
    """Layers that batches read as earlier ones left them, each batch in a copy of its own: a forward waits for the STEP
    whose result it reads, and STEPs wait for each other."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[Instruction]] = {}  # from the last one on that has been read
        self._read: dict[str, int] = {}  # by the batch before: what this batch has left
        self._ranks: dict[str, int] = {}

    def keys(self) -> Set[str]:
        """Their names."""
        return self._steps.keys()

    def enter(
        self, name: str, step: Instruction, delay: Delayed, rank: int
    ) -> tuple[set[Instruction], set[Instruction]]:
        """The STEPs that the next batch's forwards wait for, and its own `step`.

        Raises:
            PlanError: it would read an older version than the batch before, or a copy on another rank.
        """
        read = step.batch - delay.by
        steps = self._steps.setdefault(name, deque())
        if self._ranks.setdefault(name, rank) != rank:
            raise PlanError(
                f"batch {step.batch} reads layer {name!r} late on rank {rank}, and batches before on rank "
                f"{self._ranks[name]}; keep a layer on one rank"
            )
        if steps and read < steps[0].batch <= self._read[name]:
            raise PlanError(
                f"batch {step.batch} reads layer {name!r} {delay.by} batches late, an older version than the batch "
                "before; a delay may grow by one from batch to batch, not by more"
            )
        while len(steps) > 1 and steps[1].batch <= read:
            steps.popleft()
        self._read[name] = read
        before = {steps[0]} if steps and steps[0].batch <= read else set()
        last = {steps[-1]} if steps else set()
        steps.append(step)
        return before, last


class Ledger:
    """The layers as the batches of a window use them, in the order in which these enter.

    A layer that was used on one rank can't be used on another, where it would be another copy.

    Args:
        stages: those whose instructions are asked about.

    Attributes:
        uses: those of the batches under way, by batch.
        follows: for each of them those that were under way when it came, and come before it at some layer.
        versions: of each layer that was stepped so far.
    """

    def __init__(self, plan: Plan, stages: Iterable[int]) -> None:
        self.uses: dict[int, Use] = {}
        self.follows: dict[int, set[int]] = {}
        self.versions: dict[str, Stepped] = {}
        self._plan = plan
        self._stages = tuple(stages)
        self._layers: dict[str, _Layer] = {}
        self._late = _Late()
        self._parts: dict[str, set[str]] = defaultdict(set)  # of each name, those that begin with it
        self._pending: set[Instruction] = set()

    def enter(self, batch: int, use: Use) -> Waits:
        """Batch number `batch`, the next one, uses these layers: what its instructions wait for.

        Raises:
            PlanError: a layer is on another rank than for a batch before, or `use` is for other stages; or it is read
                late and was not before, or the other way round.
        """
        plan, late = self._plan, dict(use.delays)
        if len(use.layers) != plan.n_stages:
            raise PlanError(
                f"batch {batch} says which layers it uses for {len(use.layers)} stages, the plan has {plan.n_stages}"
            )
        before_stage: dict[int, tuple[set[Instruction], set[Instruction]]] = {}
        for stage, names in enumerate(use.layers):
            reads, writes = before_stage[stage] = set(), set()
            stepped = use.stepped(stage)
            for name in names:
                self._check_late(batch, name, name in late)
                if name in late:
                    before, step = self._late.enter(name, STEP(stage, batch=batch), late[name], plan.ranks[stage])
                    reads |= before
                    writes |= step
                    continue
                for layer in self._overlapping(name):
                    if layer.rank != plan.ranks[stage]:
                        raise PlanError(
                            f"batch {batch} uses layer {name!r} on stage {stage}, and batch {layer.batch} on stage "
                            f"{layer.stage}, which is on another rank with another copy of it; keep a layer on one rank"
                        )
                    if layer.stepper is not None:
                        reads.add(layer.stepper)
                    if name in stepped:
                        writes |= layer.readers
        self.uses[batch] = use
        ahead = {i.batch for found in before_stage.values() for some in found for i in some}
        self.follows[batch] = ahead & self.uses.keys()
        self._note(batch, use)
        waits: dict[Instruction, tuple[Instruction, ...]] = {}
        for stage in self._stages:
            first, then = (tuple(sorted(found & self._pending)) for found in before_stage[stage])
            if first:
                waits |= dict.fromkeys((F(stage, span, batch=batch) for span in plan.spans(Kind.F, stage)), first)
            if then:
                waits[STEP(stage, batch=batch)] = then
        self._pending |= {STEP(stage, batch=batch) for stage in self._stages}
        return waits

    def done(self, step: Instruction) -> None:
        """`step` has run."""
        self._pending.discard(step)
        for name in self.uses[step.batch].stepped(step.stage):
            times = self.versions[name].times if name in self.versions else 0
            self.versions[name] = Stepped(times + 1, step.batch)

    def leave(self, batch: int) -> None:
        """All of the batch has run."""
        del self.uses[batch], self.follows[batch]

    def expected(self, begun: Iterable[int]) -> list[int]:
        """The batches under way in the order in which a stage will probably turn to them.

        Those that it has `begun`, in that order, come back one after the other; another one begins when the last of
        those that it follows is back, and takes as long.
        """
        back = {batch: turn for turn, batch in enumerate(begun)}
        takes, turns = len(back), dict(back)
        for batch, before in self.follows.items():
            if batch not in back:
                turns[batch] = max((back[b] + 1 for b in before if b in back), default=0)
                back[batch] = turns[batch] + takes
        return sorted(turns, key=lambda batch: (turns[batch], batch))

    def _check_late(self, batch: int, name: str, late: bool) -> None:
        others = self._names(name) & (self._layers.keys() if late else self._late.keys())
        if late:
            others |= (self._names(name) & self._late.keys()) - {name}
        if others:
            raise PlanError(
                f"batch {batch} reads layer {name!r} {'late' if late else 'as it is'}, and a batch before has read "
                f"{sorted(others)[0]!r} otherwise; let all batches say the same of a layer, under the same name"
            )

    def _names(self, name: str) -> set[str]:
        return {name, *_above(name), *self._parts.get(name, ())}

    def _overlapping(self, name: str) -> list[_Layer]:
        """The layer of this name, those that it is a part of, and its own parts."""
        return [self._layers[other] for other in self._names(name) if other in self._layers]

    def _note(self, batch: int, use: Use) -> None:
        late = {name for name, _ in use.delays}
        for stage, names in enumerate(use.layers):
            step, stepped = STEP(stage, batch=batch), use.stepped(stage)
            for name in names:
                for above in _above(name):
                    self._parts[above].add(name)
                if name in late:
                    continue
                layer = self._layers.get(name)
                if layer is None:
                    layer = self._layers[name] = _Layer(self._plan.ranks[stage], stage, batch)
                layer.stage, layer.batch = stage, batch
                layer.readers &= self._pending
                if name in stepped:
                    layer.stepper = step
                    layer.readers = set()
                else:
                    layer.readers.add(step)


def unrolled(plan: Plan, uses: Sequence[Use], depth: int) -> Plan:
    """`plan` with the first batches of an endless window, which use those layers, as a finite one: to simulate, verify
    and draw. On each rank batch n + depth waits until batch n and all before it have run.

    Raises:
        PlanError: see `Ledger.enter`.
    """
    ledger = Ledger(plan, range(plan.n_stages))
    after: dict[Instruction, tuple[Instruction, ...]] = {}
    for batch, use in enumerate(uses):
        after |= ledger.enter(batch, use)
        left = range(max(0, batch - 2 * depth + 1), batch - depth + 1)  # those before left when the last of these came
        for stage, rank in enumerate(plan.ranks):
            over = tuple(STEP(s, batch=n) for n in left for s in plan.stages[rank])
            for span in plan.spans(Kind.F, stage) if over else ():
                i = F(stage, span, batch=batch)
                after[i] = tuple(dict.fromkeys((*over, *after.get(i, ()))))
    return replace(plan, batches=max(1, len(uses)), shared_weights=False, after=after)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _listed(layers: Iterable[frozenset[str]]) -> str:
    return ", ".join(sorted(name for names in layers for name in names)) or "none"
