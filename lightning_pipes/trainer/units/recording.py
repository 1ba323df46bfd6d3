"""One step written down: its units, what they cost, and where it can be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from torchmetrics import Metric

from lightning_pipes.engine.private_torch import TorchDispatchMode, in_checkpoint, packet_of
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.units.mode import Function
from lightning_pipes.trainer.units.traced_step import TracedStep
from lightning_pipes.trainer.units.trees import tensors_of
from lightning_pipes.trainer.units.values import storage_of

_PER_ENTRY = 4.0
"""Operations that an entry of a unit's output counts for, so that units without products have a cost."""
_TRIES = 100
"""Recordings in which modules may turn out not to be atomic."""


@dataclass(frozen=True)
class RecordedUnit:
    """The record of a unit.

    Attributes:
        name: the path of a module, or the name of a function.
        pure: every stage runs it.
        weights: names of the parameters and buffers that it has.
        reads, writes, makes: keys of values.
        operations: what it costs.
        held: whether it is in a checkpoint, as of `torch.utils.checkpoint`, which runs again as a whole.
        drew: whether it drew random numbers.
    """

    name: str
    pure: bool
    weights: frozenset[str]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    operations: float
    held: bool
    drew: bool


@dataclass(frozen=True)
class StepRecord:
    """A step as it was recorded.

    Attributes:
        units: in the order in which they ran.
        atomic: paths of the modules whose calls are units.
        bytes: of each value.
        memory: where each value lies; values with the same number share memory.
        entered: of each module that was called, by path, the number of its first unit.
        results: keys of the values that the step returned or logged.
    """

    units: tuple[RecordedUnit, ...]
    atomic: tuple[str, ...]
    bytes: Mapping[int, int]
    memory: Mapping[int, int | None]
    entered: Mapping[str, int]
    results: frozenset[int] = frozenset()

    @property
    def drawing(self) -> frozenset[str]:
        """Names of the units that drew random numbers."""
        return frozenset(unit.name for unit in self.units if unit.drew)

    @property
    def changes_values(self) -> bool:
        """Whether a unit changes a value in place."""
        return any(unit.writes for unit in self.units)


class Recorder(TracedStep):
    """Runs a step as it is, on a whole module, and writes it down."""

    def __init__(self, module: nn.Module, atomic: Mapping[str, nn.Module], device: torch.device) -> None:
        super().__init__(atomic, frozenset(), device)
        named = (*module.named_parameters(), *module.named_buffers())
        self._module = module
        self._names = {id(t): name for name, t in named}
        self._flops = _Operations()  # type: ignore[no-untyped-call]
        self._running: str | None = None
        self._given: set[int] = set()
        self._left: dict[int, tuple[str, int]] = {}
        self._kept: list[Any] = []  # ids stand for tensors, which must not be freed
        self.seen: list[RecordedUnit] = []
        self.hidden: set[str] = set()
        self.entered: dict[str, int] = {}
        self.bytes: dict[int, int] = {}
        self.memory: dict[int, int | None] = {}

    @property
    def sees_inner(self) -> bool:
        return True

    def record(self, step: Callable[..., Any], batch: Any, arguments: Sequence[Any]) -> StepRecord:
        """Return the record of a step; `hidden` has the modules afterwards that are not atomic."""
        self.begin(batch)
        hooks = [m.register_forward_pre_hook(self._enter(path)) for path, m in self._module.named_modules() if path]
        try:
            with self, self._flops:
                out = step(batch, *arguments)
        finally:
            for hook in hooks:
                hook.remove()
        results = [key for t in tensors_of(out) if (key := self.values.key_of(t)) is not None]
        return StepRecord(
            tuple(self.seen), tuple(self._atomic), self.bytes, self.memory, self.entered, frozenset(results)
        )

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        held, before = in_checkpoint(), self._flops.total
        given = tensors_of((args, kwargs))
        for tensor in given:
            self._look_for_hidden(tensor)
        self._given = {id(t) for t in given}
        ran = self.run_here(name, path, partial(self._run_watched, path, function), args, kwargs)
        made = tensors_of(ran.out)
        self._kept.append((ran.out, ran.read))
        for tensor in made:
            self._left.pop(id(tensor), None)
        weights = self.placed(path, ran.read)
        self.units.append(ran.done)
        keys = [self._key(t) for t in made]
        self.seen.append(
            RecordedUnit(
                name,
                ran.done.pure,
                frozenset(self._names[id(t)] for t in weights if id(t) in self._names),
                frozenset(key for t in ran.read if (key := self._key(t)) is not None),
                frozenset(key for t in ran.written if (key := self._key(t)) is not None),
                frozenset(key for key in keys if key is not None),
                self._flops.total - before + _PER_ENTRY * sum(t.numel() for t in made),
                held,
                ran.drew,
            )
        )
        return ran.out

    def _run_watched(self, path: str | None, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        self._running = path
        try:
            return function(*args, **kwargs)
        finally:
            self._running = None

    def see_inner(self, args: Any, out: Any) -> None:
        if self._running is None:
            return
        here = self._running, len(self.units)
        for tensor in tensors_of(args):
            if self._left.get(id(tensor), here) != here:
                self.hidden.add(self._left[id(tensor)][0])
            elif self.values.is_value(tensor) and id(tensor) not in self._given:
                self.hidden.add(self._running)  # it looks into an attribute or an object that the user's code fills
        for tensor in tensors_of(out):
            self._left.setdefault(id(tensor), here)
            self._kept.append(tensor)

    def _look_for_hidden(self, tensor: torch.Tensor) -> None:
        """Note the module that has stored a tensor besides returning it."""
        if id(tensor) in self._left and not self.values.is_value(tensor):
            self.hidden.add(self._left[id(tensor)][0])

    def _key(self, tensor: torch.Tensor) -> int | None:
        key = self.values.key_of(tensor)
        if key is not None and key not in self.bytes:
            self.bytes[key], self.memory[key] = tensor.nbytes, storage_of(tensor)
        return key

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if not self._inside:
                self.entered.setdefault(path, len(self.units))

        return enter


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications and additions, as `FlopCounterMode` does, but without calls of torch in its hooks."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(packet_of(func))
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


def find_atomic(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children, by path: their calls are units."""
    return {path: part for path, part in module.named_modules() if path and _is_atomic(part)}


def record_step(
    module: nn.Module,
    run: Callable[[Callable[[], StepRecord]], StepRecord],
    step: Callable[..., Any],
    batch: Callable[[], Any],
    arguments: Sequence[Any],
    device: torch.device,
) -> StepRecord:
    """Return the record of a step.

    A module that leaves tensors where others read them is no unit: then the step is recorded again.

    Args:
        module: the user's module, whole.
        run: calls what it is given, and returns its result, such that no trace is left in the module.
        step: takes the batch and `arguments`.
        batch: returns the batch anew.

    Raises:
        PipelineError: the step can't be cut into units.
    """
    atomic = find_atomic(module)
    for _ in range(_TRIES):
        recorder = Recorder(module, atomic, device)
        record = run(partial(_record, recorder, step, batch, arguments))
        if not recorder.hidden:
            return record
        atomic = {path: part for path, part in atomic.items() if path not in recorder.hidden}
    raise PipelineError(
        f"modules of {type(module).__name__} leave tensors in attributes that others read, and these differ whenever "
        "the step runs. Return the tensors instead"
    )


def _record(
    recorder: Recorder, step: Callable[..., Any], batch: Callable[[], Any], arguments: Sequence[Any]
) -> StepRecord:
    return recorder.record(step, batch(), arguments)


def _is_atomic(part: nn.Module) -> bool:
    if isinstance(part, Metric) or any(True for _ in part.children()):
        return False
    return type(part).forward is not nn.Module.forward
