"""A step that runs unit by unit and records the data that later stages need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.mode import DEVICE_PROPERTIES, Function, UnitMode
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.trace import Done, KnownWeight, map_leaves, tensors_of, tensors_of_call
from lightning_pipes.trainer.cuts.units.values import Values, stands_on
from lightning_pipes.trainer.results.generators import ModuleGenerators

_RANDOM_NAMES = (
    "dropout alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout rrelu "
    "gumbel_softmax rand randn randint randperm rand_like randn_like randint_like normal normal_ bernoulli "
    "bernoulli_ multinomial poisson uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ binomial "
    "multi_head_attention_forward scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d lstm "
    "gru rnn_tanh rnn_relu"
)
_RANDOM_FUNCTIONS = frozenset(_RANDOM_NAMES.split())
"""Functions that may draw random numbers."""
_STATISTICS_FUNCTIONS = frozenset(("batch_norm", "instance_norm"))
"""Functions that change running statistics. torch does not count this as a change in place."""


@dataclass(frozen=True)
class UnitRun:
    """The result of a unit that has run on this stage.

    Attributes:
        done: the record of the unit.
        out: its result.
        read: the tensors that it was given, or whose memory it has read.
        written: the tensors among these that it has changed in place.
        drew: whether it drew random numbers.
    """

    done: Done
    out: Any
    read: list[torch.Tensor]
    written: list[torch.Tensor]
    drew: bool


class TracedStep(UnitMode):
    """Runs units, and records the result of each and whether it is pure.

    Random numbers do not depend on the borders. Layers of a container have their own streams, as if the container was
    cut, and so has the code after them. A stage continues with the state that the previous stage has left.

    Args:
        module: the user's module.
        atomic: modules whose calls are units, by path.
        drawing: the names of the units that draw random numbers.
        device: the device of this stage.
        generators: the module's own generators, whose states are sent along with the units that draw from them; None if
            this is not necessary.
        streams: the paths of the layers that have their own random streams, in order.
        slices: the layers that run together as units; None if there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        atomic: Mapping[str, nn.Module],
        drawing: Collection[str],
        device: torch.device,
        generators: ModuleGenerators | None = None,
        streams: Sequence[str] = (),
        slices: SequentialSlices | None = None,
    ) -> None:
        super().__init__(atomic)
        self.units: list[Done] = []
        self.values = Values(())
        self._module = module
        self._drawing = drawing
        self._device = device
        self._own_generators = generators or None
        self._seed: Callable[[int], None] | None = None
        self._draws = 0
        self._sliced = None if slices is None else module.get_submodule(slices.container)
        """The nn.Sequential whose layers run slice by slice, if there is one."""
        self._slices = {} if slices is None else slices.modules(module)
        self._numbered = {
            name: [*zip(numbers, self._slices[name], strict=True)]
            for name, numbers in ({} if slices is None else slices.units).items()
        }
        self._numbers = {path: number for number, path in enumerate(streams) if path in atomic}
        """The numbers of the layers that are units, by path."""
        self._inner = [(n, module.get_submodule(path)) for n, path in enumerate(streams) if path not in atomic]
        """The other layers, with their numbers."""
        self._n_layers = len(streams)
        self._next_stream, self._called, self._layer_depth = 0, 0, 0
        self._ends_later, self._seeded_at = False, 0
        self._drew: Collection[str] = ()
        """The names of the modules that are known to draw random numbers in training."""
        self._in_module, self._weighed = False, False
        """Whether the running unit is a module, and if not, whether code in it has used weights."""
        inside = {id(part): part for each in atomic.values() for part in each.modules()}
        self._buffers = [part._buffers for part in inside.values() if part._buffers]
        """The tables of the buffers in units."""
        units = (*atomic.items(), *self._slices.items())
        self._weighty = {path for path, part in units if any(True for _ in _weights_of(part))}

    def __enter__(self) -> TracedStep:
        if self._seed is not None:
            for number, layer in self._inner:
                self._replace_forward(layer, partial(self._call_layer, number, layer.forward))
        super().__enter__()
        if self._sliced is not None:
            self._replace_forward(self._sliced, partial(self._call_container, self._sliced.forward))
        return self

    def _replace_forward(self, module: nn.Module, forward: Function) -> None:
        table = module.__dict__
        self._replaced.append((table, "forward", table.get("forward")))
        table["forward"] = forward

    def begin(self, batch: Any, seed: Callable[[int], None] | None = None) -> None:
        """Number the tensors of the batch before the step runs.

        Args:
            batch: the batch.
            seed: called with the number of a layer, or `AFTER_LAYERS`, to draw from its random stream from now on.
        """
        self.units = []
        self._draws, self._seed = 0, seed
        self._next_stream, self._called, self._layer_depth = 0, 0, 0
        self._ends_later, self._seeded_at = False, 0
        self.values = Values(self._ids_of_buffers())
        self.values.meet(tensors_of(batch))

    def _ids_of_buffers(self) -> set[int]:
        return {*map(id, itertools.chain.from_iterable(map(dict.values, self._buffers)))}

    def end(self) -> None:
        """Release the tensors of the step."""
        self.units, self.values, self._seed = [], Values(()), None

    def may_draw(self, name: str, path: str | None) -> bool:
        """Return whether a unit may draw random numbers."""
        return name in self._drawing or (path is None and name in _RANDOM_FUNCTIONS)

    def run_inner(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        if not (self._weighed or self._in_module):
            self._weighed = any(map(self.values.is_placed, tensors_of_call(args, kwargs)))
        return function(*args, **kwargs)

    # ---- random streams

    def begin_checkpoint(self) -> bool:
        if not self._layer_depth and self._next_stream < self._n_layers:  # it draws the same numbers when it runs again
            self._start_stream(self._next_stream)
            self._next_stream += 1
        return True

    def end_checkpoint(self) -> None:
        if self._ends_later:
            self._ends_later = False
            self._start_stream(AFTER_LAYERS)

    def _start_stream(self, number: int) -> None:
        """Draw from the random stream of a layer, or of the code after the layers, from now on."""
        if self._seed is not None:
            self._seed(number)

    def _call_layer(self, number: int, forward: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Run a layer that is not a unit."""
        run = self._run_layer if self._thread == get_ident() else _call_layer
        return run(number, forward, *args, **kwargs)

    def _run_layer(self, number: int, layer: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Run a layer, with its own random stream in its first call."""
        if number >= self._next_stream:
            self._next_stream = number + 1
            if not self._depth:
                self._seeded_at = len(self.units)
                self._start_stream(number)
        is_last = number + 1 == self._n_layers and self._called <= number
        self._called = max(self._called, number + 1)
        self._layer_depth += 1
        try:
            out = layer(*args, **kwargs)
        finally:
            self._layer_depth -= 1
        if is_last and self._depth:
            self._ends_later = True  # a checkpoint around it would not seed again
        elif is_last:
            self._start_stream(AFTER_LAYERS)
        return out

    def _call_container(self, forward: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layers of an nn.Sequential slice by slice."""
        if self._inside or self._thread != get_ident() or kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        (x,) = args
        for name in self._slices:
            x = self._call_module(name, partial(self._run_slice, name), x)
        return x

    def _run_slice(self, name: str, x: Any) -> Any:
        for number, layer in self._numbered[name]:
            x = self._run_layer(number, layer, x)
        return x

    def _compute(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        """Return the result of a unit that runs on this stage."""
        is_known = path is not None and name in self._drew and self._module.training
        self._draws += is_known
        if self.may_draw(name, path) and not is_known:
            function = partial(self._run_drawing, function)
        if path in self._numbers:
            return self._run_layer(self._numbers[path], function, *args, **kwargs)
        return function(*args, **kwargs)

    def _run_drawing(self, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function that may draw random numbers, and count it if it does."""
        state = self._random_state()
        out = function(*args, **kwargs)
        self._draws += self._random_state() != state
        return out

    def _random_state(self) -> Any:
        state = torch.default_generator.get_state().numpy().tobytes()
        if self._device.type != "cuda":
            return state
        return state, torch.cuda.default_generators[self._device.index or 0].get_offset()

    # ---- units

    def run_here(
        self, name: str, path: str | None, function: Function, args: Any, kwargs: Any, given: list[torch.Tensor]
    ) -> UnitRun:
        """Run the next unit on this stage.

        Args:
            name: the name of the function, or the path of the module.
            path: the path of the module; None for a function.
            function: the function, or the forward of the module.
            args: its positional arguments.
            kwargs: its keyword arguments.
            given: the tensors in its arguments.
        """
        self.values.meet(given)
        self._in_module, self._weighed = path is not None, False
        versions = versions_of(given)
        draws, own = self._draws, self._own_generators
        states = {} if own is None else own.read_states()
        out = self._compute(name, path, function, args, kwargs)
        written = find_written(given, versions)
        if path is None and name in _STATISTICS_FUNCTIONS:
            written += [t for t in given[1:] if not isinstance(t, nn.Parameter) and not t.requires_grad]
        if isinstance(kwargs.get("out"), torch.Tensor):
            written.append(kwargs["out"])
        drew = self._draws - draws
        done = self._describe(name, path, out, given, written, drew)
        if own is not None:
            done = done._replace(generators=tuple(own.read_changes(states).items()))
        return UnitRun(done, out, given, written, drew > 0)

    def placed(self, path: str | None, given: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights and buffers of a unit, which belong to its module or are among the given tensors."""
        found = [t for t in given if self.values.is_placed(t)]
        if path is not None:
            found += _weights_of(self._slices[path] if path in self._slices else self._atomic[path])
        return found

    def look(self, name: str, function: Function, args: Any) -> Any:
        device = stands_on(args[0]) if name in DEVICE_PROPERTIES else None
        if device is None:
            return function(*args)
        return device if name == "device" else name == f"is_{device.type}"

    def _describe(
        self, name: str, path: str | None, out: Any, given: list[torch.Tensor], written: list[torch.Tensor], drew: int
    ) -> Done:
        """Record the values of a unit for later stages, and number its results."""
        values = self.values
        weighed = self._weighed or path in self._weighty or any(map(values.is_placed, given))
        if not drew and not weighed and not any(map(values.is_value, given)):
            for tensor in tensors_of(out):
                values.add_pure(tensor)
            return Done(name)
        tainted = {number for t in written if not values.is_value(t) for number in values.sharing_pure(t)}
        now = tuple((number, values.taint(number)) for number in sorted(tainted))
        return Done(name, False, map_leaves(out, self._describe_leaf), now, drew)

    def _describe_leaf(self, leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor and isinstance(leaf, nn.Parameter):  # a cast may return its argument
            name = next((name for name, p in self._module.named_parameters() if p is leaf), None)
            if name is not None:
                return KnownWeight(name)
        return self.values.describe(leaf, self._device) if isinstance(leaf, torch.Tensor) else leaf


def _call_layer(number: int, forward: Function, /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor, as counted by torch."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of in-place changes of each tensor, as counted by torch."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor that was made in inference mode
        return [version_of(tensor) for tensor in tensors]


def find_written(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors that have changed in place since they had these versions."""
    now = versions_of(tensors)
    return [] if now == versions else [t for t, a, b in zip(tensors, versions, now, strict=True) if a != b]


def refuse_unit(number: int, name: str, why: str) -> PipelineError:
    """Return the error for a unit that a stage can't run."""
    return PipelineError(f"unit {number} of the step, {name}, {why}")
