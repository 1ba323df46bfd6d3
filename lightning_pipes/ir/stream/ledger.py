"""Dependencies between batches that use different layers: weights are those of one batch after another.

batch   0: layers 0 3      stage 0  F0     F1      B1  B0  STEP0 F2     two batches that share nothing overlap,
        1: layers 1 4      stage 1      F0 B0 STEP0 F1 B1 STEP1     F2  the third waits for the layers that it
        2: layers 0 4                                                   shares with them, stage by stage

Copies of layers on several ranks: the newest one, and the transfers that they need.

The home of a layer is the rank of its stage in the plan. A batch with a cut of its own may use it on another rank,
which gets the newest copy from the rank that has it: layer mirroring (Zhao et al. 2022, ASPLOS, S4.2), by versions, and
only where a batch uses them.

    batch 0 steps layer 5 on rank 0   STEP0 ->.                       in order of batches, on any rank
    batch 1 steps it on rank 1                 `-> F1 .. STEP1 ->.
    batch 2 reads it on rank 0                                    `-> F2
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_pipes.ir.checks import PlanError
from lightning_pipes.ir.instruction import STEP, F, Instruction, Kind
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.stream.use import Delayed, LayerUse


class Transfer(NamedTuple):
    """The transfer of a layer from one rank to another, for a batch that uses it there.

    Attributes:
        name: the layer's.
        batch: the first that uses it there; -1 stands for the end of the window.
        source, target: the ranks.
        after: the STEP whose result it is, on `source`; None where nothing has stepped the layer in this window.
    """

    name: str
    batch: int
    source: int
    target: int
    after: Instruction | None
    job: int = 0


@dataclass
class Copy:
    """The copy of a layer on one rank, as the next batch that uses it there finds it.

    Attributes:
        rank: the rank that has it.
        stage, batch: its last use.
        version: the batch that stepped it last; -1 at the beginning of the window.
        stepper: the STEP of that batch.
        readers: STEPs of later batches that only read it, on this rank.
        before: STEPs of batches that use the copy that it replaces.
        transfer: the transfer that brings it; None where it was stepped on this rank.
    """

    rank: int
    stage: int
    batch: int
    version: int = -1
    stepper: Instruction | None = None
    readers: set[Instruction] = field(default_factory=set)
    before: set[Instruction] = field(default_factory=set)
    transfer: Transfer | None = None


class Layer:
    """All copies of one layer."""

    def __init__(self, name: str, home: Copy) -> None:
        self.name = name
        self.home = home.rank
        self.newest = home
        self._copies = {home.rank: home}

    @property
    def ranks(self) -> Iterable[int]:
        """The ranks that have, or had, a copy."""
        return self._copies.keys()

    def fetch_copy(self, rank: int, stage: int, batch: int) -> tuple[Copy, Transfer | None]:
        """Return the newest copy, on a rank where a batch uses it, and the transfer that brings it, if one is
        needed."""
        old, newest = self._copies.get(rank), self.newest
        if old is not None and old.version == newest.version:
            return old, None
        transfer = Transfer(self.name, batch, newest.rank, rank, newest.stepper)
        before = old.readers | old.before if old is not None else set()
        copy = Copy(rank, stage, batch, newest.version, newest.stepper, set(), before, transfer)
        self._copies[rank] = copy
        return copy, transfer

    def mark_stepped(self, copy: Copy, step: Instruction) -> None:
        """Mark the copy as the newest one, as of `step`."""
        copy.version, copy.stepper = step.batch, step
        copy.readers, copy.before, copy.transfer = set(), set(), None
        self.newest = copy

    def is_stale(self, rank: int, pending: set[Instruction]) -> bool:
        """Return whether a rank away from home no longer needs its copy."""
        copy = self._copies.get(rank)
        if rank == self.home or copy is None or copy.version == self.newest.version:
            return False
        return copy.stepper not in pending and not (copy.readers | copy.before) & pending

    def return_transfer(self) -> Transfer | None:
        """Return the transfer of the newest copy to its home; None if it is there."""
        home, newest = self._copies[self.home], self.newest
        if home.version == newest.version:
            return None
        return Transfer(self.name, -1, newest.rank, self.home, newest.stepper)


def check_names(batch: int, name: str, rank: int, others: Iterable[Layer]) -> None:
    """Refuse a layer on a rank if another rank has one of its parts, or the layer that contains it.

    Raises:
        PlanError: such a layer is on another rank.
    """
    for other in others:
        elsewhere = sorted({other.home, *other.ranks} - {rank})
        if elsewhere:
            raise PlanError(
                f"batch {batch} uses layer {name!r} on rank {rank}, and {other.name!r}, which has parameters in common "
                f"with it, has been on rank {elsewhere[0]}; batches whose cuts differ have to say what they use of a "
                "layer under the same names, all of them the whole layer or all its parts"
            )


class StaleReads:
    """Layers that batches read in an older version, each batch in a copy of its own.

    A forward waits for the STEP whose result it reads, and STEPs wait for each other.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[Instruction]] = {}  # from the last one on that has been read
        self._read: dict[str, int] = {}  # by the batch before: what this batch has left
        self._ranks: dict[str, int] = {}

    def keys(self) -> Set[str]:
        """Return the names of the layers."""
        return self._steps.keys()

    def enter(
        self, name: str, step: Instruction, delay: Delayed, rank: int
    ) -> tuple[set[Instruction], set[Instruction]]:
        """Return the STEPs that the next batch's forwards wait for, and those for its own `step`.

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


Waits = Mapping[Instruction, tuple[Instruction, ...]]
"""Other instructions for which one waits, besides its data."""


class LayerVersion(NamedTuple):
    """The version of a layer.

    Attributes:
        times: the number of optimizer steps that it has seen.
        batch: the batch that stepped it last.
    """

    times: int
    batch: int


class Ledger:
    """A record of the layers that the batches of a window use, in the order in which batches enter.

    A layer that was used on one rank can't be used on another, where it would be another copy, until a batch has a cut
    of its own: from then on layers go where batches use them, see `batch_transfers`.

    Args:
        stages: the stages whose instructions are tracked.

    Attributes:
        uses: the layers of the batches in flight, by batch.
        follows: for each of them the batches that were in flight when it came, and precede it at some layer.
        versions: the version of each layer that was stepped so far.
    """

    def __init__(self, plan: Plan, stages: Iterable[int]) -> None:
        self.uses: dict[int, LayerUse] = {}
        self.follows: dict[int, set[int]] = {}
        self.versions: dict[str, LayerVersion] = {}
        self._plan = plan
        self._stages = tuple(stages)
        self._home = {n: s for s, span in enumerate(plan.layers) for n in range(*span)}
        self._layers: dict[str, Layer] = {}
        self._late = StaleReads()
        self._parts: dict[str, set[str]] = defaultdict(set)  # of each name, those that begin with it
        self._pending: set[Instruction] = set()
        self._travel = False
        self._transfers: dict[int, list[Transfer]] = {}
        self._incoming: dict[tuple[int, int], list[Transfer]] = {}

    def enter(self, batch: int, use: LayerUse) -> Waits:
        """Add batch number `batch`, the next one, and return the further needs of its instructions.

        Raises:
            PlanError: a layer is on another rank than for a batch before, and none had a cut of its own; or `use` is
                for other stages or other layers; or one is read late and was not before, or the other way round.
        """
        self._check(batch, use)
        self._transfers[batch] = []
        before_stage = {stage: self._before(batch, stage, use) for stage in range(len(use.layers))}
        self.uses[batch] = use
        ahead = {i.batch for found in before_stage.values() for some in found for i in some}
        self.follows[batch] = ahead & self.uses.keys()
        self._note(batch, use)
        plan = self._plan
        waits: dict[Instruction, tuple[Instruction, ...]] = {}
        for stage in self._stages:
            first, then = (tuple(sorted(found & self._pending)) for found in before_stage[stage])
            if first:
                waits |= dict.fromkeys((F(stage, span, batch=batch) for span in plan.spans(Kind.F, stage)), first)
            if then:
                waits[STEP(stage, batch=batch)] = then
        self._pending |= {STEP(stage, batch=batch) for stage in self._stages}
        return waits

    def batch_transfers(self, batch: int) -> Sequence[Transfer]:
        """Return the transfers of layers that a batch in flight needs, between any ranks."""
        return self._transfers[batch]

    def incoming_transfers(self, batch: int, stage: int) -> Sequence[Transfer]:
        """Return the transfers of layers that the batch uses on `stage`; its forwards wait until they arrive."""
        return self._incoming.get((batch, stage), ())

    def is_stale(self, name: str, rank: int) -> bool:
        """Return whether a rank away from the layer's home no longer needs its copy."""
        return self._layers[name].is_stale(rank, self._pending)

    def is_pending(self, step: Instruction) -> bool:
        """Return whether a STEP of `stages` is still to run."""
        return step in self._pending

    def return_transfers(self) -> list[Transfer]:
        """Return the transfers that bring all layers to the ranks of the plan when all batches have run."""
        found = (self._layers[name].return_transfer() for name in sorted(self._layers))
        return [transfer for transfer in found if transfer is not None]

    def mark_done(self, step: Instruction) -> None:
        """Record that `step` has run."""
        self._pending.discard(step)
        for name in self.uses[step.batch].stepped_layers(step.stage):
            times = self.versions[name].times if name in self.versions else 0
            self.versions[name] = LayerVersion(times + 1, step.batch)

    def remove_batch(self, batch: int) -> None:
        """Remove a batch that has finished."""
        del self.uses[batch], self.follows[batch], self._transfers[batch]
        for stage in range(self._plan.n_stages):
            self._incoming.pop((batch, stage), None)

    def expected_order(self, begun: Iterable[int]) -> list[int]:
        """Return the batches in flight in the order in which a stage will probably run them.

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

    def _check(self, batch: int, use: LayerUse) -> None:
        plan = self._plan
        if len(use.layers) != plan.n_stages:
            raise PlanError(
                f"batch {batch} says which layers it uses for {len(use.layers)} stages, the plan has {plan.n_stages}"
            )
        if use.cut is None:
            return
        if use.cut[-1].stop != len(self._home):
            raise PlanError(f"batch {batch} is cut into {use.cut[-1].stop} layers, the plan has {len(self._home)}")
        self._travel = True
        for name, _ in use.delays:
            stage = next(s for s, names in enumerate(use.layers) if name in names)
            if stage != self._home_of(name, stage):
                raise PlanError(
                    f"batch {batch} reads layer {name!r} late on stage {stage}, whose home is stage "
                    f"{self._home_of(name, stage)}; cut batches so that what they read late stays at home"
                )

    def _before(self, batch: int, stage: int, use: LayerUse) -> tuple[set[Instruction], set[Instruction]]:
        """Return the needs of the batch's forwards on a stage, and of its STEP."""
        rank, late, stepped = self._plan.ranks[stage], dict(use.delays), use.stepped_layers(stage)
        reads: set[Instruction] = set()
        writes: set[Instruction] = set()
        for name in sorted(use.layers[stage]):
            self._check_late(batch, name, name in late)
            if name in late:
                before, step = self._late.enter(name, STEP(stage, batch=batch), late[name], rank)
                reads |= before
                writes |= step
                continue
            for copy in self._overlapping(batch, name, rank, stage):
                reads |= copy.before
                if copy.stepper is not None:
                    reads.add(copy.stepper)
                if name in stepped:
                    writes |= copy.readers
        return reads, writes

    def _overlapping(self, batch: int, name: str, rank: int, stage: int) -> list[Copy]:
        """Return the copies on this rank of a layer, of the layers that contain it, and of its own parts."""
        layers = [self._layers[other] for other in sorted(self._names(name)) if other in self._layers]
        if not self._travel:
            for layer in layers:
                if layer.newest.rank != rank:
                    raise PlanError(
                        f"batch {batch} uses layer {name!r} on stage {stage}, and batch {layer.newest.batch} on stage "
                        f"{layer.newest.stage}, which is on another rank with another copy of it; keep a layer on one "
                        "rank, or give batches a cut of their own"
                    )
            return [layer.newest for layer in layers]
        if name not in self._layers:
            home = self._home_of(name, stage)
            self._layers[name] = Layer(name, Copy(self._plan.ranks[home], home, batch))
        own = self._layers[name]
        others = [layer for layer in layers if layer is not own]
        if others:
            check_names(batch, name, rank, [*others, own])
        copy, transfer = own.fetch_copy(rank, stage, batch)
        if transfer is not None:
            self._transfers[batch].append(transfer)
        if copy.transfer is not None:
            self._incoming.setdefault((batch, stage), []).append(copy.transfer)
        return [copy, *(layer.newest for layer in others)]

    def _home_of(self, name: str, stage: int) -> int:
        return self._home.get(int(name.partition(".")[0]), stage)

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

    def _note(self, batch: int, use: LayerUse) -> None:
        late = {name for name, _ in use.delays}
        for stage, names in enumerate(use.layers):
            step, stepped, rank = STEP(stage, batch=batch), use.stepped_layers(stage), self._plan.ranks[stage]
            for name in names:
                for above in _above(name):
                    self._parts[above].add(name)
                if name in late:
                    continue
                if name not in self._layers:
                    self._layers[name] = Layer(name, Copy(rank, stage, batch))
                copy, _ = self._layers[name].fetch_copy(rank, stage, batch)
                copy.stage, copy.batch = stage, batch
                copy.readers &= self._pending
                copy.before &= self._pending
                if name in stepped:
                    self._layers[name].mark_stepped(copy, step)
                else:
                    copy.readers.add(step)


def unroll_stream(plan: Plan, uses: Sequence[LayerUse], depth: int) -> Plan:
    """Return `plan` with the first batches of an endless window as a finite one: to simulate, verify and draw.

    On each rank batch n + depth waits until batch n and all before it have run.

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
