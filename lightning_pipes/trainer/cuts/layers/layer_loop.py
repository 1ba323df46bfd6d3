"""Execution of a loop of user code over the layers, `for layer in self.layers: h = layer(h, mask)`, as one call.

While a step runs, its layers are replaced by stand-ins. A call of any layer but the last is recorded and returns a
`PendingResult`. The call of the last layer calls the pipeline and returns the result of the last layer.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.layers.tape import (
    CONSTANT_TYPES,
    Key,
    LayerCall,
    OuterValue,
    Output,
    Path,
    Tape,
    is_shared_dict,
    map_container,
    refuse_objects,
)
from lightning_pipes.trainer.private_lightning import needed_layer_outputs


class NotHereError(PipelineError, AttributeError):
    """Raised if user code reads the output of a layer on another rank. It makes `hasattr` return False."""


class PendingResult:
    """The future result of a layer. The result and its entries can only be passed to later layers.

    Args:
        recording: the recording of the loop.
        layer: the number of the layer.
        path: the indices and keys that lead to an entry of the result.
    """

    def __init__(self, recording: LoopRecording, layer: int, path: Path = ()) -> None:
        self.__dict__.update(_recording=recording, _layer=layer, _path=path)

    def __getitem__(self, step: int | str) -> PendingResult:
        if not isinstance(step, (int, str)):
            raise self._not_here(f"[{step!r}]")
        return PendingResult(self._recording, self._layer, (*self._path, step))

    def __iter__(self) -> Iterator[PendingResult]:
        caller = sys._getframe(1)
        entries = _count_unpacked(caller.f_code, caller.f_lasti)
        if entries is None:
            raise self._not_here("a loop or a call")
        return iter([self[n] for n in range(entries)])

    def __getattr__(self, name: str) -> Any:
        raise self._not_here(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(p for p in _pending((args, kwargs or {})))
        raise found._not_here(getattr(function, "__name__", str(function)))

    def _not_here(self, use: str) -> NotHereError:
        return NotHereError(
            f"what layer {self._layer} of {self._recording.name} returns was used in {use} before the last layer had "
            "run, but it is on another rank then; only the next layers can get it",
            "Move the operation into the layers, call all of them in order, skip none, and do not collect what they "
            "return (output_hidden_states=False); or set PipelineStrategy(module=''), which cuts by units",
        )


def _operator(name: str) -> Callable[..., Any]:
    def refuse(self: PendingResult, *args: Any) -> Any:
        raise self._not_here(name.strip("_"))

    return refuse


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(PendingResult, _form, _operator(_form))
for _name in ("neg", "abs", "invert", "bool", "len", "float", "int", "lt", "le", "gt", "ge", "setitem", "contains"):
    setattr(PendingResult, f"__{_name}__", _operator(f"__{_name}__"))


def _pending(tree: Any) -> Iterator[PendingResult]:
    if type(tree) is PendingResult:
        yield tree
    elif isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from _pending(entry)
    elif isinstance(tree, dict):
        yield from _pending(tuple(tree.values()))


@lru_cache
def _count_unpacked(code: CodeType, at: int) -> int | None:
    """Return the number of variables in an unpacking assignment such as `h, weights = layer(h)`.

    Args:
        code: the code of the caller.
        at: the offset of the current instruction.

    Returns:
        the number of variables; None if the instruction is not an unpacking assignment.
    """
    for instruction in dis.get_instructions(code):
        if instruction.offset == at:
            return instruction.arg if instruction.opname == "UNPACK_SEQUENCE" else None
    return None


class LoopRecording:
    """The recorded calls of one run of the loop.

    Args:
        name: the expression with which user code accesses the layers, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[LayerCall] = []
        self.values: dict[Key, Any] = {}
        self._last_use: dict[Key, int] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the objects in `_numbers` alive, so that their ids stay unique

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the call of the next layer with these arguments."""
        entries = tuple(self._lower_value(a, f"argument {n}") for n, a in enumerate(args))
        call = LayerCall(entries, {key: self._lower_value(a, key) for key, a in kwargs.items()})
        same = bool(self.calls) and call == self.calls[-1]
        self.calls.append(self.calls[-1] if same else call)  # the same object is pickled only once

    def tape(self) -> tuple[Tape, dict[Key, Any]]:
        """Return the recorded calls, and the values from outside of the loop that they need."""
        return Tape(self.calls, self._last_use), self.values

    def _lower_value(self, thing: Any, where: str) -> Any:
        number = len(self.calls)
        if type(thing) is PendingResult:
            if thing._recording is not self:
                raise thing._not_here("another loop")
            self._last_use[thing._layer, thing._path] = number
            return Output(number - thing._layer, thing._path)
        # A list of plain values may have one entry for each sample. It is sent as a value and cut like a tensor.
        shared = is_shared_dict(thing)
        if shared:
            refuse_objects(dict(thing), f"{where} of layer {number} of {self.name}")
        if (
            shared
            or isinstance(thing, torch.Tensor)
            or (type(thing) is list and all(isinstance(e, CONSTANT_TYPES) for e in thing))
        ):
            given = self._numbers.setdefault(id(thing), len(self._numbers))
            self.values[given] = dict(thing) if shared else thing
            self._last_use[given] = number
            self._alive.append(thing)
            return OuterValue(given)
        if isinstance(thing, CONSTANT_TYPES):
            return thing
        lowered = map_container(thing, lambda entry: self._lower_value(entry, where))
        if lowered is thing:
            refuse_objects(thing, f"{where} of layer {number} of {self.name}")
        return lowered


class LayerLoop:
    """Combines the calls of all layers in a loop into one call of the pipeline.

    Args:
        name: the expression with which user code accesses the layers.
        full: the container of all layers. The layers of other ranks may be on `meta`.
        running: returns whether a step is running that may call the layers.
        reach: calls the pipeline with the recorded calls and their values.
    """

    def __init__(
        self,
        name: str,
        full: nn.Sequential | nn.ModuleList,
        running: Callable[[], bool],
        reach: Callable[[Any], Any],
    ) -> None:
        self._name = name
        self._running = running
        self._reach = reach
        self._shown = nn.ModuleList() if isinstance(full, nn.ModuleList) else nn.Sequential()
        stand_ins: Any = [StandIn(self, number, layer) for number, layer in enumerate(full)]
        self._shown._modules.update(zip(full._modules, stand_ins, strict=True))
        self._recording = LoopRecording(name)

    @property
    def shown(self) -> nn.Sequential | nn.ModuleList | None:
        """The container of stand-ins that the user's step sees, or None if no step is running.

        Slices of the container can be called, too.
        """
        return self._shown if self._running() else None

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of one layer by the user's step.

        Args:
            number: the number of the layer.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.

        Returns:
            the output of the last layer; a `PendingResult` for all other layers.

        Raises:
            PipelineError: no step is running, layers are skipped or called out of order, their arguments can't be sent
                to other ranks, or the model collects the outputs of all layers.
        """
        if not self._running():
            raise PipelineError(
                f"layer {number} of {self._name} was called outside of training_step, validation_step, test_step and "
                "predict_step; its neighbours are on other ranks there",
                "Use it in a step, or after the Trainer has ended; instead of torch.utils.checkpoint set "
                "PipelineStrategy(recompute=True)",
            )
        if number == 0:
            self._recording = LoopRecording(self._name)
        done = len(self._recording.calls)
        if number != done:
            raise PipelineError(
                f"layer {number} of {self._name} was called after {f'layer {done - 1}' if done else 'none'}; in a "
                f"pipeline all {len(self._shown)} layers must be called once and in order",
                "PipelineStrategy(module='') cuts by units instead, which may be called in any order",
            )
        self._recording.add(args, kwargs)
        if number + 1 < len(self._shown):
            return PendingResult(self._recording, number)
        wanted = needed_layer_outputs()
        if wanted:
            raise PipelineError(
                f"the model is asked for the {' and '.join(wanted)} of all layers of {self._name}, which are on "
                "several ranks",
                f"set {' and '.join(f'output_{w}=False' for w in wanted)}",
            )
        recording, self._recording = self._recording, LoopRecording(self._name)
        return self._reach(recording.tape())


class StandIn:
    """A layer as the user's step sees it. Calls are passed to the loop, and all other accesses to the layer."""

    def __init__(self, loop: LayerLoop, number: int, layer: nn.Module) -> None:
        self.__dict__.update(_loop=loop, _number=number, _layer=layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.call(self._number, args, kwargs)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._layer, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._layer[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._layer)

    def __len__(self) -> int:
        return len(self._layer)

    def __bool__(self) -> bool:
        return bool(self._layer)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance` works as for the layer
        return type(self._layer)
