"""Dependencies between batches that use different layers.

The weights are the same as if the batches ran one after another. Batches without common layers overlap. In the
following example, batch 2 waits on each stage for the layers that it shares with batches 0 and 1:

    batch 0: layers 0 3      stage 0  F0     F1      B1  B0  STEP0 F2
    batch 1: layers 1 4      stage 1      F0 B0 STEP0 F1 B1 STEP1     F2
    batch 2: layers 0 4

Layers may have copies on several ranks. The home of a layer is the rank of its stage in the plan. A batch with a cut of
its own may use the layer on another rank, which then receives the newest copy from the rank that holds it. This is
layer mirroring (Zhao et al. 2022, ASPLOS, S4.2), based on versions and only for the ranks on which a batch uses the
layer:

    batch 0 steps layer 5 on rank 0   STEP0 ->.
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
        name: the name of the layer.
        batch: the first batch that uses the layer on the target; -1 is the end of the window.
        source: the rank that sends the layer.
        target: the rank that receives the layer.
        after: the STEP on `source` that produced the transferred version, or None if no batch has stepped the layer in
            this window.
        job: the job of the batch.
    """

    name: str
    batch: int
    source: int
    target: int
    after: Instruction | None
    job: int = 0


@dataclass
class Copy:
    """The copy of a layer on one rank, in the state in which the next batch on that rank uses it.

    Attributes:
        rank: the rank that holds the copy.
        stage: the stage that used the copy last.
        batch: the batch that used the copy last.
        version: the batch that stepped the layer last; -1 if no batch has stepped it in this window.
        stepper: the STEP of the batch in `version`.
        readers: the STEPs of later batches on this rank that only read the copy.
        before: the STEPs of batches that use the previous copy on this rank, which this copy replaces.
        transfer: the transfer that brings the copy to this rank, or None if the layer was stepped here.
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
        """The ranks that have or had a copy."""
        return self._copies.keys()

    def fetch_copy(self, rank: int, stage: int, batch: int) -> tuple[Copy, Transfer | None]:
        """Return the newest version of the layer as a copy on `rank`, where a batch uses it.

        Returns:
            The copy, and the transfer that brings it to the rank, or None if no transfer is needed.
        """
        old, newest = self._copies.get(rank), self.newest
        if old is not None and old.version == newest.version:
            return old, None
        transfer = Transfer(self.name, batch, newest.rank, rank, newest.stepper)
        before = old.readers | old.before if old is not None else set()
        copy = Copy(rank, stage, batch, newest.version, newest.stepper, set(), before, transfer)
        self._copies[rank] = copy
        return copy, transfer

    def mark_stepped(self, copy: Copy, step: Instruction) -> None:
        """Record that `step` has updated the copy, which makes it the newest one."""
        copy.version, copy.stepper = step.batch, step
        copy.readers, copy.before, copy.transfer = set(), set(), None
        self.newest = copy

    def is_stale(self, rank: int, pending: set[Instruction]) -> bool:
        """Return whether `rank` holds an outdated copy that no pending STEP needs. The home keeps its copy."""
        copy = self._copies.get(rank)
        if rank == self.home or copy is None or copy.version == self.newest.version:
            return False
        return copy.stepper not in pending and not (copy.readers | copy.before) & pending

    def return_transfer(self) -> Transfer | None:
        """Return the transfer of the newest copy to its home, or None if it is already there."""
        home, newest = self._copies[self.home], self.newest
        if home.version == newest.version:
            return None
        return Transfer(self.name, -1, newest.rank, self.home, newest.stepper)


def check_names(batch: int, name: str, rank: int, others: Iterable[Layer]) -> None:
    """Check that no other rank has a layer that shares parameters with the layer `name`.

    Args:
        batch: the number of the batch, used in the error message.
        name: the name of the layer that the batch uses.
        rank: the rank on which the batch uses the layer.
        others: the layers that contain this layer or are parts of it.

    Raises:
        PlanError: if such a layer is on another rank.
    """
    for other in others:
        elsewhere = sorted({other.home, *other.ranks} - {rank})
        if elsewhere:
            raise PlanError(
                f"batch {batch} uses layer {name!r} on rank {rank}, but {other.name!r}, which shares parameters with "
                f"it, has been on rank {elsewhere[0]}. Batches with different cuts must list a layer under the same "
                "names: either all of them list the whole layer, or all of them list its parts"
            )


class StaleReads:
    """Layers that batches read in an older version. Each batch reads its own copy.

    A forward waits for the STEP whose result it reads, and each STEP waits for the previous STEP.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[Instruction]] = {}  # by layer, from the STEP whose result was read last
        self._read: dict[str, int] = {}  # by layer, the batch whose result the previous batch read
        self._ranks: dict[str, int] = {}

    def keys(self) -> Set[str]:
        """Return the names of the layers."""
        return self._steps.keys()

    def enter(
        self, name: str, step: Instruction, delay: Delayed, rank: int
    ) -> tuple[set[Instruction], set[Instruction]]:
        """Add the next batch that reads the layer, and return the STEPs that it waits for.

        Args:
            name: the name of the layer.
            step: the STEP of the batch.
            delay: the delay with which the batch reads the layer.
            rank: the rank on which the batch uses the layer.

        Returns:
            The STEPs that the forwards of the batch wait for, and the STEPs that its own `step` waits for.

        Raises:
            PlanError: if the batch reads an older version than the previous batch, or reads the layer on another rank.
        """
        read = step.batch - delay.by
        steps = self._steps.setdefault(name, deque())
        if self._ranks.setdefault(name, rank) != rank:
            raise PlanError(
                f"batch {step.batch} reads layer {name!r} late on rank {rank}, but earlier batches are on rank "
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
"""For each instruction, other instructions that it waits for besides its data dependencies."""


class LayerVersion(NamedTuple):
    """The version of a layer.

    Attributes:
        times: the number of optimizer steps that have updated the layer.
        batch: the batch that updated the layer last.
    """

    times: int
    batch: int


class Ledger:
    """A record of the layers that the batches of a window use, in the order in which batches enter.

    A layer that was used on one rank can't be used on another, because the other rank would have a separate copy. This
    changes when a batch enters with its own cut: from then on, layers move to the ranks on which batches use them, see
    `batch_transfers`.

    Args:
        plan: the plan of the window.
        stages: the stages whose instructions are tracked.

    Attributes:
        uses: the layers that each batch in flight uses.
        follows: for each batch in flight, the batches that were in flight when it entered and precede it in at least
            one layer.
        versions: the version of each layer that has been stepped.
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
        self._parts: dict[str, set[str]] = defaultdict(set)  # by name, the names of its parts
        self._pending: set[Instruction] = set()
        self._travel = False
        self._transfers: dict[int, list[Transfer]] = {}
        self._incoming: dict[tuple[int, int], list[Transfer]] = {}

    def enter(self, batch: int, use: LayerUse) -> Waits:
        """Add the next batch and return the additional needs of its instructions.

        Args:
            batch: the number of the batch.
            use: the layers that the batch uses.

        Raises:
            PlanError: if the batch uses a layer on another rank than earlier batches although no batch has had its own
                cut; if `use` is for other stages or layers; or if the batch reads a layer with a delay that earlier
                batches read without one, or the other way around.
        """
        self._check(batch, use)
        self._transfers[batch] = []
        before_stage = {stage: self._steps_before(batch, stage, use) for stage in range(len(use.layers))}
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
        """Return the layer transfers between any ranks that a batch in flight needs."""
        return self._transfers[batch]

    def incoming_transfers(self, batch: int, stage: int) -> Sequence[Transfer]:
        """Return the transfers of layers that the batch uses on `stage`. Its forwards wait for these transfers."""
        return self._incoming.get((batch, stage), ())

    def is_stale(self, name: str, rank: int) -> bool:
        """Return whether a rank other than the home of the layer no longer needs its copy."""
        return self._layers[name].is_stale(rank, self._pending)

    def is_pending(self, step: Instruction) -> bool:
        """Return whether a STEP on the tracked stages has not run yet."""
        return step in self._pending

    def return_transfers(self) -> list[Transfer]:
        """Return the transfers that bring all layers back to the ranks of the plan after all batches have run."""
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

        The estimate assumes that the batches in `begun` finish one after another in their order. Each other batch
        begins when the last of the batches that it follows has finished, and then takes as many turns as there are
        batches in `begun`.

        Args:
            begun: the batches that the stage has begun, in their order.
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
                f"batch {batch} specifies its layers for {len(use.layers)} stages, but the plan has {plan.n_stages}"
            )
        if use.cut is None:
            return
        if use.cut[-1].stop != len(self._home):
            raise PlanError(f"batch {batch} is cut into {use.cut[-1].stop} layers, but the plan has {len(self._home)}")
        self._travel = True
        for name, _ in use.delays:
            stage = next(s for s, names in enumerate(use.layers) if name in names)
            if stage != self._home_of(name, stage):
                raise PlanError(
                    f"batch {batch} reads layer {name!r} late on stage {stage}, but its home is stage "
                    f"{self._home_of(name, stage)}; cut batches so that layers that they read late stay on their home "
                    "stage"
                )

    def _steps_before(self, batch: int, stage: int, use: LayerUse) -> tuple[set[Instruction], set[Instruction]]:
        """Return the STEPs that the batch's forwards on a stage wait for, and the STEPs that its own STEP waits for."""
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
            for copy in self._find_overlapping(batch, name, rank, stage):
                reads |= copy.before
                if copy.stepper is not None:
                    reads.add(copy.stepper)
                if name in stepped:
                    writes |= copy.readers
        return reads, writes

    def _find_overlapping(self, batch: int, name: str, rank: int, stage: int) -> list[Copy]:
        """Return the copies on the stage's rank of the layer, of the layers that contain it, and of its parts."""
        layers = [self._layers[other] for other in sorted(self._layer_names(name)) if other in self._layers]
        if not self._travel:
            for layer in layers:
                if layer.newest.rank != rank:
                    raise PlanError(
                        f"batch {batch} uses layer {name!r} on stage {stage}, but batch {layer.newest.batch} uses it "
                        f"on stage {layer.newest.stage} of another rank, which has a separate copy; keep a layer on "
                        "one rank, or cut batches separately"
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
        others = self._layer_names(name) & (self._layers.keys() if late else self._late.keys())
        if late:
            others |= (self._layer_names(name) & self._late.keys()) - {name}
        if others:
            raise PlanError(
                f"batch {batch} reads layer {name!r} {'late' if late else 'without a delay'}, but an earlier batch has "
                f"read {sorted(others)[0]!r} differently. All batches must specify a layer under the same name, and "
                "either always or never with a delay"
            )

    def _layer_names(self, name: str) -> set[str]:
        return {name, *_parent_names(name), *self._parts.get(name, ())}

    def _note(self, batch: int, use: LayerUse) -> None:
        late = {name for name, _ in use.delays}
        for stage, names in enumerate(use.layers):
            step, stepped, rank = STEP(stage, batch=batch), use.stepped_layers(stage), self._plan.ranks[stage]
            for name in names:
                for above in _parent_names(name):
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
    """Return a finite plan of the first batches of an endless window, in order to simulate, verify or draw it.

    Args:
        plan: the plan of the endless window.
        uses: the layers of each batch.
        depth: the maximum number of batches in flight. On each rank, batch n + depth waits until batch n and all
            earlier batches have run.

    Raises:
        PlanError: for the same reasons as `Ledger.enter`.
    """
    ledger = Ledger(plan, range(plan.n_stages))
    after: dict[Instruction, tuple[Instruction, ...]] = {}
    for batch, use in enumerate(uses):
        after |= ledger.enter(batch, use)
        left = range(max(0, batch - 2 * depth + 1), batch - depth + 1)  # batches before these are already done
        for stage, rank in enumerate(plan.ranks):
            over = tuple(STEP(s, batch=n) for n in left for s in plan.stages[rank])
            for span in plan.spans(Kind.F, stage) if over else ():
                i = F(stage, span, batch=batch)
                after[i] = tuple(dict.fromkeys((*over, *after.get(i, ()))))
    return replace(plan, batches=max(1, len(uses)), shared_weights=False, after=after)


def _parent_names(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
