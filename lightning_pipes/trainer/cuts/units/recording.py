"""The record of a step: its units, their costs, and the data from which possible borders are derived."""

from __future__ import annotations

import difflib
import io
import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from torchmetrics import Metric

from lightning_pipes.engine.private_torch import BatchNorm, FakeTensor, TorchDispatchMode, in_functorch
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.cuts.units.fake_run import FakeRun, list_places
from lightning_pipes.trainer.cuts.units.mode import Function, runs_as_whole
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.trace import TemplateLeaf, map_leaves, tensors_of, tensors_of_call
from lightning_pipes.trainer.cuts.units.traced_step import TracedStep, version_of, versions_of
from lightning_pipes.trainer.cuts.units.values import has_attributes, storage_of
from lightning_pipes.trainer.private_lightning import is_compiled
from lightning_pipes.trainer.ranks.user_lines import user_line

_OPERATIONS_PER_ENTRY = 4.0
"""The number of operations counted per entry of a unit's output, so that units without products have a cost."""
_MAX_RECORDINGS = 100
"""The largest number of recordings. Each may find further modules that are not atomic."""


@dataclass(frozen=True)
class RecordedUnit:
    """The record of a unit.

    Attributes:
        name: the path of a module, or the name of a function.
        pure: whether every stage runs it.
        weights: the names of the parameters and buffers that it uses.
        reads: the keys of the values that it reads.
        writes: the keys of the values that it changes in place.
        makes: the keys of the values that it returns.
        operations: its number of operations.
        held: the number of the block of `torch.utils.checkpoint` that contains it, which runs again as a whole; 0 for
            none.
        drew: whether it drew random numbers.
        changes: the names of the parameters that it changes.
    """

    name: str
    pure: bool
    weights: frozenset[str]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    operations: float
    held: int
    drew: bool
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepRecord:
    """A recorded step.

    Attributes:
        units: the units in the order in which they ran.
        atomic: paths of the modules whose calls are units.
        bytes: the size of each value in bytes.
        memory: the memory location of each value. Values with the same location share memory.
        entered: the number of the first unit of each called module, by path.
        results: the keys of the values that the step returned.
        calls: for each module that is not a unit, by path, the first unit of each call and the unit behind the call.
        stateful: paths of modules whose attributes or buffers the step has changed.
        weight_memory: the memory locations of the parameters.
        metric_calls: the first unit of each call of a metric and the unit behind the call. A metric that is called
            has the state of this call alone until the call ends.
    """

    units: tuple[RecordedUnit, ...]
    atomic: tuple[str, ...]
    bytes: Mapping[int, int]
    memory: Mapping[int, int | None]
    entered: Mapping[str, int]
    results: frozenset[int] = frozenset()
    calls: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    stateful: frozenset[str] = frozenset()
    weight_memory: frozenset[int] = frozenset()
    metric_calls: Sequence[tuple[int, int]] = ()

    @property
    def drawing(self) -> frozenset[str]:
        """The names of the units that drew random numbers."""
        return frozenset(unit.name for unit in self.units if unit.drew)

    @property
    def changes_values(self) -> bool:
        """Whether a unit changes a value in place."""
        return any(unit.writes for unit in self.units)

    def find_entry(self, place: str) -> int:
        """Return the number of the first unit of a module.

        Args:
            place: the path of the module.

        Raises:
            PlanError: the step does not call the module.
        """
        whole = next((path for path in self.atomic if place.startswith(f"{path}.")), None)
        if place not in self.entered and whole is not None:
            raise PlanError(
                f"partition names {place!r}, but one stage runs {whole!r} as a whole, because it is compiled, has "
                "backward hooks or a checkpoint of torch.distributed, or calls a transform of torch.func. Name "
                f"{whole!r} itself, or a module outside of it"
            )
        if place not in self.entered:
            close = difflib.get_close_matches(place, self.entered, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ";"
            known = ", ".join(repr(path) for path in list(self.entered)[:20])
            raise PlanError(f"partition names {place!r}, which the step does not call{hint} It calls {known}")
        return self.entered[place]


GRAPH_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
"""Functions that traverse the graph of other units."""


class Recorder(TracedStep):
    """Runs a step unchanged on a whole module, and records it.

    Args:
        module: the whole module of the user.
        atomic: modules whose calls are units, by path.
        device: the device of the module.
        differentiates: whether the step may call backward.
        fake: runs units without values if weights are on `meta`. The module then keeps weights without values.
        slices: the layers that run together as units; None if there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        atomic: Mapping[str, nn.Module],
        device: torch.device,
        differentiates: bool = False,
        fake: FakeRun | None = None,
        slices: SequentialSlices | None = None,
    ) -> None:
        super().__init__(module, atomic, (), device, slices=slices)
        self._differentiates = differentiates
        self._fake = fake
        self._names: dict[int, str] = {}
        self._memory_names: dict[int | None, str] = {}
        self._flops = _Operations()  # type: ignore[no-untyped-call]
        self._running: str | None = None
        self._given: set[int] = set()
        self._used: set[str] = set()
        self._merged: set[int] = set()
        """The ids of the buffers whose values of micro-batches are merged, so that units must not change them."""
        self._left: dict[int, tuple[str, int]] = {}
        self._kept: list[Any] = []  # the ids of these tensors are in use, so that they must not be freed
        self.seen: list[RecordedUnit] = []
        self.hidden: set[str] = set()
        self.transformed: set[str] = set()
        self._open: list[str] = []
        self.entered: dict[str, int] = {}
        self.calls: dict[str, list[tuple[int, int]]] = {}
        self.bytes: dict[int, int] = {}
        self.memory: dict[int, int | None] = {}

    def sees_inside(self, path: str) -> bool:
        return True

    def may_draw(self, name: str, path: str | None) -> bool:
        return True

    def record(self, step: Callable[..., Any], batch: Any, arguments: Sequence[Any]) -> StepRecord:
        """Return the record of a step.

        Afterwards `hidden` contains the modules that are not atomic, and `transformed` a module that must be atomic, if
        one was found.

        Args:
            step: the user's step.
            batch: the batch.
            arguments: further arguments of the step.
        """
        if self._fake is not None:
            owned = self._ids_of_buffers()
            self._fake.replace_weights(self._module, lambda buffer: id(buffer) in owned)
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        self._names = {id(t): name for name, t in named}
        self._memory_names = {storage_of(p): name for name, p in self._module.named_parameters()}
        self._memory_names.pop(None, None)
        self.begin(batch)
        parts = {path: part for path, part in self._module.named_modules() if path}
        before = {path: _attributes(part) for path, part in parts.items()}
        buffers = {path: _merged_buffers(part) for path, part in parts.items()}
        versions = {path: versions_of(own) for path, own in buffers.items()}
        self._merged = {id(b) for path, own in buffers.items() if not runs_as_whole(parts[path]) for b in own}
        hooks = [part.register_forward_pre_hook(self._enter(path)) for path, part in parts.items()]
        whole = {path: vars(part).get("forward") for path, part in parts.items() if path not in self._atomic}
        for path in whole:
            vars(parts[path])["forward"] = partial(self._call_whole, path, parts[path].forward)
        try:
            compiled = any(map(is_compiled, self._module.modules()))  # compiled code hides its operations
            with (
                nullcontext() if self._fake is None else self._fake.explain_errors(),
                torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
                self,
            ):
                out = step(batch, *arguments)
        except _InTransform:
            out = None
        finally:
            for path, forward in whole.items():
                vars(parts[path]).pop("forward")
                if forward is not None:
                    vars(parts[path])["forward"] = forward
            for hook in hooks:
                hook.remove()
        results = [key for t in tensors_of(out) if (key := self.values.key_of(t)) is not None]
        return StepRecord(
            tuple(self.seen),
            tuple(self._atomic),
            self.bytes,
            self.memory,
            self.entered,
            frozenset(results),
            {path: tuple(calls) for path, calls in self.calls.items()},
            frozenset(
                path
                for path, part in parts.items()
                if not _are_same(before[path], _attributes(part)) or versions_of(buffers[path]) != versions[path]
            ),
            frozenset(where for where in self._memory_names if where is not None),
            [call for path, calls in self.calls.items() if isinstance(parts[path], Metric) for call in calls],
        )

    def _call_whole(self, path: str, forward: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module that consists of several units, and record their range."""
        start = len(self.units)
        is_open = not (self._inside or in_functorch())
        self._open += [path] * is_open
        try:
            out = forward(*args, **kwargs)
        finally:
            del self._open[len(self._open) - is_open :]
        if not self._inside:
            self.calls.setdefault(path, []).append((start, len(self.units)))
        return out

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        if function in GRAPH_FUNCTIONS and self._differentiates and function is not torch.autograd.grad:
            return function(*args, **kwargs)
        if function in GRAPH_FUNCTIONS and not self._differentiates:
            raise PipelineError(
                f"a step calls torch's {name} between its modules, and each stage has only a part of the graph from "
                "loss to weights. Return the loss instead, or train in one process what needs gradients in its loss"
            )
        if path is not None:
            self.entered.setdefault(path, len(self.units))
        before = self._flops.total
        given = tensors_of_call(args, kwargs)
        for tensor in given:
            self._look_for_hidden(tensor)
        self._given, self._used = {id(t) for t in given}, set()
        fake = self._fake is not None and self._lacks_values(path, given)
        if fake and name == "__getitem__":
            args = args[0], list_places(args[1])
        ran = self.run_here(name, path, partial(self._run_watched, path, fake, function), args, kwargs, given)
        made = tensors_of(ran.out)
        self._kept.append((ran.out, ran.read))
        for tensor in made:
            self._left.pop(id(tensor), None)
        weights = self.placed(path, ran.read)
        if function in GRAPH_FUNCTIONS:  # checkpoints run again in these functions
            weights, self._used = [], set()
        self.units.append(ran.done)
        if path is not None and not ran.done.pure and (_holds_tensors(ran.done.out) or any(map(has_attributes, made))):
            self.hidden.add(path)
        keys = [self._key(t) for t in made]
        self.seen.append(
            RecordedUnit(
                name,
                ran.done.pure,
                frozenset(self._names[id(t)] for t in weights if id(t) in self._names) | self._used,
                frozenset(key for t in ran.read if (key := self._key(t)) is not None),
                frozenset(key for t in ran.written if (key := self._key(t)) is not None),
                frozenset(key for key in keys if key is not None),
                self._flops.total - before + _OPERATIONS_PER_ENTRY * sum(t.numel() for t in made),
                self.checkpoint,
                ran.drew,
                self._names_of_memory(ran.written),
            )
        )
        return ran.out

    def run_transformed(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        if path not in self._weighty and not any(map(self.values.depends_on_weights, tensors_of_call(args, kwargs))):
            return function(*args, **kwargs)
        if not self._open:
            raise PipelineError(
                "a step uses a weight, or a tensor that modules have made, within a transform of torch.func, such as "
                f"grad or vmap, or within a mask_mod of flex attention, at {user_line()}. Other stages do not have its "
                "values, and a transform can't be cut. Call the transform in the forward of a module, which one stage "
                "then runs as a whole, or make the mask from the batch"
            )
        self.transformed.add(self._open[-1])
        raise _InTransform

    def _run_watched(self, path: str | None, fake: bool, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        self._running, drawn = path, self._flops.drawn
        try:
            with nullcontext() if self._fake is None or not fake else self._fake.mode, self._flops:
                return function(*args, **kwargs)
        finally:
            self._running = None
            if fake:  # no generator has changed its state
                self._draws += self._flops.drawn - drawn

    def _lacks_values(self, path: str | None, given: Sequence[torch.Tensor]) -> bool:
        """Return whether a unit depends on weights or random numbers, or is given a tensor without values."""
        found = (isinstance(t, FakeTensor) or self.values.is_placed(t) or self.values.is_value(t) for t in given)
        return path in self._weighty or any(found)

    def run_inner(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        given = tensors_of_call(args, kwargs) if self._inside else []
        if self._running is None:  # within an autograd.Function
            self._used.update(self._names[id(t)] for t in given if self.values.is_placed(t) and id(t) in self._names)
        if self._running is None or not self._inside:
            return super().run_inner(name, function, args, kwargs)
        versions = [version_of(t) for t in given]
        out = super().run_inner(name, function, args, kwargs)
        here = self._running, len(self.units)
        for tensor, version in zip(given, versions, strict=True):
            maker = self._left.get(id(tensor))
            if maker not in (None, here):
                self.hidden.add(maker[0])
            elif self.values.is_placed(tensor):
                self._used.update(filter(None, [self._names.get(id(tensor))]))
                if id(tensor) in self._merged and version_of(tensor) != version:
                    self.hidden.add(self._running)
            elif id(tensor) in self._given or maker == here:
                continue
            elif self.values.is_value(tensor) or version_of(tensor) != version:
                self.hidden.add(self._running)  # it reads or changes a tensor that other modules hold
        for tensor in tensors_of(out):
            self._left.setdefault(id(tensor), here)
            self._kept.append(tensor)
        return out

    def _look_for_hidden(self, tensor: torch.Tensor) -> None:
        """Mark the module that has stored a tensor in addition to returning it."""
        if id(tensor) in self._left and not self.values.is_value(tensor):
            self.hidden.add(self._left[id(tensor)][0])

    def _names_of_memory(self, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
        """Return the names of the parameters that share memory with the tensors."""
        found = (self._memory_names.get(storage_of(t)) for t in tensors)
        return frozenset(each for each in found if each is not None)

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


class _InTransform(BaseException):
    """Unwinds the user's step if a transform of torch.func needs values. `except Exception` must not catch it."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications and additions, like `FlopCounterMode`, but without calls of torch in its hooks."""

    total = 0.0
    drawn = 0
    """The number of operations that draw random numbers, or may do so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.drawn += torch.Tag.nondeterministic_seeded in func.tags
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


def find_atomic(
    module: nn.Module, hidden: Collection[str] = (), transformed: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return the modules that are called as units, by path.

    These are the modules without children, except the `hidden` ones. The `transformed` modules replace all modules
    inside of them, because they call transforms of torch.func. So do modules that have to run as a whole.

    Args:
        module: the user's module.
        hidden: paths of modules that can't be units.
        transformed: paths of modules that must be units.
    """
    whole = {*transformed, *(path for path, m in module.named_modules() if path and runs_as_whole(m))}
    within = tuple(f"{path}." for path in whole)
    named = [(path, m) for path, m in module.named_modules() if path and not path.startswith(within)]
    return {path: m for path, m in named if path in whole or (path not in hidden and _is_atomic(m))}


def record_step(
    module: nn.Module,
    run: Callable[[Callable[[], StepRecord]], StepRecord],
    step: Callable[..., Any],
    batch: Callable[[], Any],
    arguments: Sequence[Any],
    device: torch.device,
    choose: Callable[[Collection[str]], Mapping[str, nn.Module]] | None = None,
    differentiates: bool = False,
    fake: FakeRun | None = None,
    slices: SequentialSlices | None = None,
) -> StepRecord:
    """Return the record of a step.

    A module can't be a unit if it stores tensors where others read them. A module must be a unit if it calls a
    transform of torch.func with values. If such a module is found, the step is recorded again.

    Args:
        module: the whole module of the user.
        run: calls its argument and returns the result, such that no trace is left in the module.
        step: takes the batch and `arguments`.
        batch: returns a new copy of the batch.
        arguments: further arguments of the step.
        device: the device of the module.
        choose: takes the paths of modules that can't be units, and returns the modules whose calls are units. By
            default, `find_atomic` chooses them.
        differentiates: whether the step may call backward.
        fake: runs units without values if weights are on `meta`.
        slices: layers that are units together, unless they store tensors; None if there are none.

    Raises:
        PipelineError: the step can't be divided into units.
    """
    hidden: set[str] = set()
    transformed: set[str] = set()
    for _ in range(_MAX_RECORDINGS):
        atomic = choose(hidden) if choose is not None else find_atomic(module, hidden, transformed)
        recorder = Recorder(module, atomic, device, differentiates, fake, slices)
        record = run(partial(_record, recorder, step, batch, arguments))
        if not recorder.hidden and not recorder.transformed:
            return record
        if slices is not None and not recorder.hidden.isdisjoint(slices.units):
            slices = None
            continue
        closed = next((path for path in recorder.hidden if runs_as_whole(module.get_submodule(path))), None)
        if closed is not None:
            raise PipelineError(
                f"{type(module).__name__}.{closed} stores tensors in attributes that code outside of it reads. It must "
                "return them, because it is compiled, or has backward hooks or a checkpoint of torch.distributed, and "
                "such a module runs as a whole on one stage"
            )
        hidden |= recorder.hidden
        transformed |= recorder.transformed
    raise PipelineError(
        f"modules of {type(module).__name__} leave tensors in attributes that others read, and these differ whenever "
        "the step runs. Return the tensors instead"
    )


def _record(
    recorder: Recorder, step: Callable[..., Any], batch: Callable[[], Any], arguments: Sequence[Any]
) -> StepRecord:
    return recorder.record(step, batch(), arguments)


def _attributes(part: nn.Module) -> dict[str, tuple[Any, list[Any]]]:
    """Return the attributes of a module by name, each with its entries."""
    own = vars(part).items()
    return {name: (value, _entries(value)) for name, value in own if name not in ("_parameters", "_modules")}


def _merged_buffers(part: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a module that a step changes once per batch, and not once per micro-batch.

    Running statistics of batch norms are an exception, and metrics combine the values of micro-batches themselves.
    """
    return [] if isinstance(part, (BatchNorm, Metric)) else [b for b in part._buffers.values() if b is not None]


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        return [*value]
    if isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
        return []
    return [*vars(value).values()] if hasattr(value, "__dict__") else []


def _are_same(before: Mapping[str, tuple[Any, list[Any]]], after: Mapping[str, tuple[Any, list[Any]]]) -> bool:
    return before.keys() == after.keys() and all(
        value is after[name][0]
        and len(entries) == len(after[name][1])
        and all(a is b for a, b in zip(entries, after[name][1], strict=True))
        for name, (value, entries) in before.items()
    )


class _TensorFinder(pickle.Pickler):
    found = False

    def persistent_id(self, thing: Any) -> str | None:
        self.found = self.found or isinstance(thing, torch.Tensor)
        return "tensor" if isinstance(thing, torch.Tensor) else None


def _holds_tensors(out: Any) -> bool:
    """Return whether an object in the result of a unit contains tensors, or can't be sent."""
    things: list[Any] = []
    map_leaves(out, things.append)
    for thing in things:
        if isinstance(thing, (TemplateLeaf, str, bytes, int, float, complex, type(None))):
            continue
        finder = _TensorFinder(io.BytesIO())
        try:
            finder.dump(thing)
        except Exception:  # an error of the user's code or of pickle
            return True
        if finder.found:
            return True
    return False


def _is_atomic(part: nn.Module) -> bool:
    if isinstance(part, Metric) or any(True for _ in part.children()):
        return False
    return type(part).forward is not nn.Module.forward
