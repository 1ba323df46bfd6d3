"""The event loop of a stream whose layers take turns on devices, see `swapped`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Placed
from benchmarks.papers.csp.emulation.stream import Rules
from lightning_pipes.sim.predictor import PendingBackward, Task, TaskPredictor, WaitingSubnet

# ---- The layers on the device of a stage, the next layer to load, and the layers to drop for it.

Layer = int
Needs = Mapping[Layer, int]
"""The version of each layer that a task needs. It is the last subnet that has stepped the layer, or -1 if none has."""


class Load(NamedTuple):
    """A layer to load in a certain version, and the layers to drop first."""

    layer: Layer
    version: int
    dropped: tuple[Layer, ...]


class Residents:
    """The layers on one device with limited memory. This class only keeps account of them and moves nothing.

    Args:
        room: the memory for layers, in the unit of `sizes`.
        sizes: the size of each layer, including its optimizer state.

    Attributes:
        room: the memory for layers.
        loading: the load that is in progress, or None.
        used: the memory of the layers that are on the device or being loaded.
    """

    def __init__(self, room: int, sizes: Mapping[Layer, int]) -> None:
        self.room = room
        self._sizes = sizes
        self._held: dict[Layer, int] = {}  # versions, the least recently used layer first
        self._unsaved: set[Layer] = set()
        self.loading: Load | None = None
        self.used = 0

    def holds(self, layer: Layer, version: int) -> bool:
        """Return whether the layer is completely on the device, in this version."""
        return self._held.get(layer) == version

    def missing(self, needs: Needs) -> list[Layer]:
        """Return the layers of a task that are not on the device."""
        return [layer for layer, version in needs.items() if not self.holds(layer, version)]

    def use(self, layers: Iterable[Layer]) -> None:
        """Record that a task uses these layers now."""
        for layer in layers:
            self._held[layer] = self._held.pop(layer)

    def stepped(self, layer: Layer, version: int) -> None:
        """Record a new version of a layer on the device, which has to be saved before the layer is dropped."""
        self._held[layer] = version
        self._unsaved.add(layer)

    def renewed(self, layer: Layer, version: int) -> None:
        """Record that another stage has stepped the layer and sent it, so that a copy on the device is renewed."""
        if layer in self._held:
            self._held[layer] = version

    def saved(self, layer: Layer) -> None:
        """Record that the layer has been copied to the host."""
        self._unsaved.discard(layer)

    def begin(self, load: Load) -> None:
        """Start a load."""
        for layer in load.dropped:
            del self._held[layer]
            self.used -= self._sizes[layer]
        self.loading = load
        self.used += self._sizes[load.layer]

    def abort(self) -> None:
        """Cancel the load that is in progress."""
        assert self.loading is not None, "no load is in progress"
        self.used -= self._sizes[self.loading.layer]
        self.loading = None

    def end(self) -> None:
        """Complete the load that is in progress."""
        assert self.loading is not None, "no load is in progress"
        self._held[self.loading.layer] = self.loading.version
        self.loading = None

    def next_load(
        self, demanded: Needs, wanted: Sequence[Needs], loadable: Callable[[Layer, int], bool]
    ) -> Load | None:
        """Return the next load, or None if no layer fits or is available.

        The layers of the current task have priority over the layers of predicted tasks, which are loaded in order. No
        layer is dropped that is needed by the current task, or by a predicted task before the one that the load is for.
        Among the other layers, those that are needed last are dropped first, and among these the least recently used
        ones.

        Args:
            demanded: the layers of the task that runs or waits to run.
            wanted: the layers of the predicted tasks, in order.
            loadable: returns whether a version of a layer is available on the host.
        """
        kept: set[Layer] = set()
        for needs in (demanded, *wanted):
            kept |= needs.keys()
            for layer in self.missing(needs):
                if not loadable(layer, needs[layer]):
                    continue
                dropped = self._dropped_for(layer, kept, wanted)
                if dropped is not None:
                    return Load(layer, needs[layer], dropped)
                return None
        return None

    def _dropped_for(self, layer: Layer, kept: set[Layer], wanted: Sequence[Needs]) -> tuple[Layer, ...] | None:
        out = [layer] if layer in self._held else []  # an old version, which the load replaces
        if out and layer in self._unsaved:
            return None
        free = self.room - self.used + sum(self._sizes[each] for each in out)
        if free >= self._sizes[layer]:
            return tuple(out)
        first: dict[Layer, int] = {}
        for at, needs in enumerate(wanted):
            for each in needs:
                first.setdefault(each, at)
        may = [each for each in self._held if each not in kept and each not in self._unsaved and each != layer]
        may.sort(key=lambda each: -first.get(each, len(wanted)))  # stable, so the least recently used layer comes first
        for each in may:
            out.append(each)
            free += self._sizes[each]
            if free >= self._sizes[layer]:
                return tuple(out)
        return None


Make = Callable[[int], TaskPredictor]
"""A function that returns the predictor of a stage."""


class Stage:
    """The current state of a stage."""

    def __init__(self, residents: Residents, predictor: TaskPredictor) -> None:
        self.residents = residents
        self.predictor = predictor
        self.oldest = 0
        self.forwards = 0  # the number of forwards that have begun
        self.held = 0  # micro-batches between forward and backward
        self.task: Task | None = None  # the task that runs
        self.due: Task | None = None  # the first ready task, if no task runs
        self.since = -1  # when the stage began to wait for layers
        self.counted: set[Task] = set()  # counted tasks that have not begun
        self.last: tuple[int, bool] | None = None
        self.wanted: tuple[int, ...] = ()
        self.load = 0  # the number of the last load
        self.saving: deque[Layer] = deque()
        self.told: dict[int, tuple[PendingBackward, ...]] = {}
        self.telling: tuple[PendingBackward, ...] = ()


class Swapping:
    """The emulation of a whole stream. `run` may be called once."""

    def __init__(self, placed: Placed, rules: Rules, contexts: float, make: Make, jitter: float, seed: int) -> None:
        self.placed, self.rules = placed, rules
        subnets = placed.subnets
        self.n, self.stages, self.m = len(subnets), placed.stages, rules.microbatches
        choices = int(subnets.choices.max()) + 1
        layers = subnets.choices + choices * np.arange(subnets.blocks)[None, :]
        self.sizes: dict[Layer, int] = dict(zip(layers.ravel().tolist(), subnets.swap.ravel().tolist(), strict=True))
        last = subnets.last_user if rules.checks else np.full_like(subnets.choices, -1)  # -1 for any version
        self.needs: list[list[Needs]] = [
            [
                dict(zip(layers[y, a:b].tolist(), last[y, a:b].tolist(), strict=True))
                for a, b in zip(placed.cuts[y, :-1], placed.cuts[y, 1:], strict=True)
            ]
            for y in range(self.n)
        ]
        self.next_user = [
            dict(zip(layers[y].tolist(), subnets.next_user[y].tolist(), strict=True)) for y in range(self.n)
        ]
        self.where = [dict(zip(layers[y].tolist(), placed.stage_of[y].tolist(), strict=True)) for y in range(self.n)]
        self.hosts: list[dict[Layer, int]] = [{} for _ in range(self.stages)]  # the versions on each host
        self.owed = [[Counter(x for x in needs.values() if x >= 0) for needs in each] for each in self.needs]
        self.waits = [[frozenset(owed) for owed in each] for each in self.owed]
        mean = subnets.swap.sum() / self.n / self.stages
        self.at: list[Stage] = []
        for stage in range(self.stages):
            largest = max(sum(self.sizes[layer] for layer in needs[stage]) for needs in self.needs)
            room = max(int(contexts * mean), largest)
            self.at.append(Stage(Residents(room, self.sizes), make(stage)))
        rng = np.random.default_rng(seed)
        shape = 2, self.n, self.stages, self.m
        noise = 1 + jitter * rng.uniform(-1, 1, shape) if jitter else np.ones(shape)
        times = np.stack([placed.forward, placed.backward])[..., None] // self.m + rules.overhead
        self.times = np.rint(times * noise).astype(np.int64)
        self.here = [([0] * self.n, [0] * self.n) for _ in range(self.stages)]  # arrived inputs and gradients
        self.here[0] = [self.m] * self.n, [0] * self.n
        self.begun = [([0] * self.n, [0] * self.n) for _ in range(self.stages)]
        self.over = [[0] * self.n for _ in range(self.stages)]  # completed backwards
        self.starts = np.full(shape, -1, np.int64)
        self.free = {(backward, stage): 0 for backward in (False, True) for stage in range(self.stages)}
        self.agenda: list[tuple[int, int, str, int, tuple[int, ...]]] = []
        self.events = 0
        self.now = self.end = self.late = self.stalled = 0
        self.tasks, self.contexts = [0, 0], [0, 0]

    def run(self) -> None:
        """Process all events."""
        touched = {*range(self.stages)}
        while True:
            for stage in sorted(touched):
                self.decide(stage)
            touched.clear()
            if not self.agenda:
                return
            self.now = self.agenda[0][0]
            while self.agenda and self.agenda[0][0] == self.now:
                _, _, what, stage, numbers = heappop(self.agenda)
                touched.add(stage)
                getattr(self, what)(stage, *numbers)

    def after(self, delay: int, what: str, stage: int, *numbers: int) -> None:
        self.events += 1
        heappush(self.agenda, (self.now + delay, self.events, what, stage, numbers))

    def decide(self, stage: int) -> None:
        """Start a task if the stage is free.

        This is the first ready task whose layers are on the device. In the meantime, the layers of the first ready task
        are loaded. A stage therefore only waits if it has no ready task whose layers are on the device.
        """
        at = self.at[stage]
        if at.task is None:
            at.due = None
            for task in self.ready(stage):
                here = not at.residents.missing(self.needs[task.subnet][stage])
                if at.due is None:
                    at.due = task
                    self.count(stage, task)
                if here:
                    self.start(stage, task)
                    break
            if at.due is not None and at.task is None:
                at.since = self.now if at.since < 0 else at.since
            elif at.task is None:
                at.wanted = at.predictor.idle(self.queue(stage)).wanted
        self.move(stage)

    def ready(self, stage: int) -> Iterator[Task]:
        """Yield the ready tasks of a stage, in the order of `CSP`."""
        at, rules = self.at[stage], self.rules
        until = (at.oldest // rules.bulk + 1) * rules.bulk if rules.bulk else at.oldest + rules.depth
        until = min(until, self.n)
        for backward in (1, 0):
            here, begun = self.here[stage][backward], self.begun[stage][backward]
            if backward and rules.forwards_first and at.forwards < until * self.m:
                continue
            if not backward and rules.held and at.held >= rules.held[stage]:
                continue
            for y in range(at.oldest, until):
                k = begun[y]
                if here[y] > k and (backward or k or not rules.checks or not self.waits[y][stage]):
                    yield Task(y, bool(backward), k)

    def count(self, stage: int, task: Task) -> None:
        """Count the layers of a task that are on the device when it could start. Each task is counted once."""
        at = self.at[stage]
        if task in at.counted:
            return
        at.counted.add(task)
        needs = self.needs[task.subnet][stage]
        missing = at.residents.missing(needs)
        for count in [self.tasks] if at.last == task[:2] else [self.tasks, self.contexts]:
            count[0] += len(needs) - len(missing)
            count[1] += len(needs)
        loading = at.residents.loading
        self.late += loading is not None and loading.layer in missing

    def start(self, stage: int, task: Task) -> None:
        """Start a task, and request a prediction of the tasks that follow it."""
        at = self.at[stage]
        self.count(stage, task)
        at.counted.remove(task)
        if at.since >= 0:
            self.stalled += self.now - at.since
            at.since = -1
        y, backward, k = task
        at.task, at.last = task, (y, backward)
        at.residents.use(self.needs[y][stage])
        self.begun[stage][backward][y] += 1
        at.forwards += not backward
        at.held += not backward
        self.starts[int(backward), y, stage, k] = self.now
        self.after(int(self.times[int(backward), y, stage, k]), "ended", stage)
        told = at.told.pop(y, ()) if backward else ()
        said = at.predictor.before(task, self.queue(stage), told)
        at.wanted = tuple(z for z in said.wanted if z != y)
        at.telling = said.pending

    def queue(self, stage: int) -> list[WaitingSubnet]:
        """Return the subnets that have not begun on a stage, first the ones whose input has arrived."""
        at = self.at[stage]
        until = min(at.oldest + self.rules.depth, self.n)
        unbegun = [y for y in range(at.oldest, until) if not self.begun[stage][0][y]]
        unbegun.sort(key=lambda y: not self.here[stage][0][y])
        return [WaitingSubnet(y, self.waits[y][stage]) for y in unbegun]

    def move(self, stage: int) -> None:
        """Start the next load if there is one."""
        at = self.at[stage]
        residents, host = at.residents, self.hosts[stage]
        first = at.task or at.due
        demanded: Needs = {} if first is None else self.needs[first.subnet][stage]

        def loadable(layer: Layer, version: int) -> bool:
            return version < 0 or host.get(layer, -1) >= version

        if residents.loading is not None:
            waits = at.task is None and at.due is not None
            if not waits or not any(loadable(each, demanded[each]) for each in residents.missing(demanded)):
                return
            if residents.loading.layer in demanded:
                return
            residents.abort()
        wanted: Sequence[Needs] = [self.needs[y][stage] for y in at.wanted]
        load = residents.next_load(demanded, wanted, loadable)
        if load is not None:
            residents.begin(load)
            at.load += 1
            self.after(self.sizes[load.layer], "loaded", stage, at.load)

    def loaded(self, stage: int, number: int) -> None:
        if number == self.at[stage].load and self.at[stage].residents.loading is not None:
            self.at[stage].residents.end()

    def save(self, stage: int) -> None:
        self.after(self.sizes[self.at[stage].saving[0]], "saved", stage)

    def saved(self, stage: int) -> None:
        at = self.at[stage]
        at.residents.saved(at.saving.popleft())
        if at.saving:
            self.save(stage)

    def come(self, stage: int, backward: int, y: int) -> None:
        self.here[stage][backward][y] += 1

    def updated(self, stage: int, layer: Layer, version: int) -> None:
        """Record that the update that the next user of a layer waits for has arrived at its stage."""
        self.hosts[stage][layer] = version
        self.at[stage].residents.renewed(layer, version)
        later = self.next_user[version][layer]
        owed = self.owed[later][stage]
        owed[version] -= 1
        if not owed[version]:
            del owed[version]
            self.waits[later][stage] = frozenset(owed)

    def ended(self, stage: int) -> None:
        at, rules = self.at[stage], self.rules
        assert at.task is not None
        y, backward, _ = at.task
        at.task = None
        self.end = max(self.end, self.now)
        to = stage - 1 if backward else stage + 1
        if 0 <= to < self.stages:
            link = backward, stage
            self.free[link] = max(self.now, self.free[link]) + rules.message // self.m
            self.after(self.free[link] + rules.latency - self.now, "come", to, int(backward), y)
            if backward and at.telling:
                self.at[to].told[y] = at.telling
                at.telling = ()
        elif not backward:
            self.here[stage][1][y] += 1
        if backward:
            at.held -= 1
            self.over[stage][y] += 1
            if self.over[stage][y] == self.m:
                self.step(stage, y)

    def step(self, stage: int, y: int) -> None:
        """Step the layers of a subnet, save them, and send them to the stages where they are used next."""
        at = self.at[stage]
        idle = not at.saving
        for layer in self.needs[y][stage]:
            at.residents.stepped(layer, y if self.rules.checks else -1)
            at.saving.append(layer)
            self.hosts[stage][layer] = y
            later = self.next_user[y][layer]
            if later >= 0 and self.rules.checks:
                there = self.where[later][layer]
                self.after(self.rules.moving * self.sizes[layer] * (there != stage), "updated", there, layer, y)
        if idle and at.saving:
            self.save(stage)
        while at.oldest < self.n and self.over[stage][at.oldest] == self.m:
            at.oldest += 1
