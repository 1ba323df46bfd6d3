"""A step that runs unit by unit, while it is written down what later stages need of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.private_torch import in_checkpoint
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.units.mode import DEVICES, Function, UnitMode
from lightning_pipes.trainer.units.trace import Done
from lightning_pipes.trainer.units.trees import map_leaves, tensors_of
from lightning_pipes.trainer.units.values import Values, stands_on

_DRAWING_NAMES = (
    "dropout alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout rrelu "
    "gumbel_softmax rand randn randint randperm rand_like randn_like randint_like normal normal_ bernoulli "
    "bernoulli_ multinomial poisson uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ binomial "
    "multi_head_attention_forward scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d lstm "
    "gru rnn_tanh rnn_relu"
)
_DRAWING = frozenset(_DRAWING_NAMES.split())
"""Functions that may draw random numbers."""
_KEEPING_STATISTICS = frozenset(("batch_norm", "instance_norm"))
"""Functions that change running statistics, which torch does not count as a change in place."""


@dataclass(frozen=True)
class UnitRun:
    """The facts of a unit that has run here.

    Attributes:
        read: tensors that it was given, or whose memory it has read.
        written: those of them that it has changed in place.
    """

    done: Done
    out: Any
    read: list[torch.Tensor]
    written: list[torch.Tensor]
    drew: bool


class TracedStep(UnitMode):
    """Runs units, and records for each whether it is pure, and its results.

    Args:
        atomic: modules whose calls are units, by path.
        drawing: paths of those that draw random numbers.
        device: of this stage.
        seed: called with the number of a unit before it may draw random numbers.
    """

    def __init__(
        self,
        atomic: Mapping[str, nn.Module],
        drawing: Collection[str],
        device: torch.device,
        seed: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(atomic)
        self.units: list[Done] = []
        placed = [id(b) for module in atomic.values() for b in module.buffers(recurse=False)]
        self._placed_buffers = frozenset(placed)
        self.values = Values(self._placed_buffers)
        self._drawing = drawing
        self._device = device
        self._seed = seed

    def begin(self, batch: Any) -> None:
        """Number the tensors of the batch, before the step runs."""
        self.units = []
        self.values = Values(self._placed_buffers)
        self.values.meet(tensors_of(batch))

    def run_here(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> UnitRun:
        """Run the next unit."""
        given = tensors_of((args, kwargs))
        self.values.meet(given)
        versions = [_version(t) for t in given]
        if self._seed is not None and (name in _DRAWING or path in self._drawing) and not in_checkpoint():
            self._seed(len(self.units))  # not in a checkpoint, which draws the same numbers once more by itself
        state = self._random_state()
        out = function(*args, **kwargs)
        drew = self._random_state() != state
        written = [t for t, version in zip(given, versions, strict=True) if _version(t) != version]
        if path is None and name in _KEEPING_STATISTICS:
            written += [t for t in given[1:] if not isinstance(t, nn.Parameter) and not t.requires_grad]
        if isinstance(kwargs.get("out"), torch.Tensor):
            written.append(kwargs["out"])
        return UnitRun(self._describe(name, path, out, given, written, drew), out, given, written, drew)

    def placed(self, path: str | None, given: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights and buffers that a unit has: those of its module, or among what it is given."""
        found = [t for t in given if self.values.is_placed(t)]
        if path is not None:
            module = self._atomic[path]
            found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        return found

    def look(self, name: str, function: Function, args: Any) -> Any:
        device = stands_on(args[0]) if name in DEVICES else None
        if device is None:
            return function(*args)
        return device if name == "device" else name == f"is_{device.type}"

    def _describe(
        self, name: str, path: str | None, out: Any, given: list[torch.Tensor], written: list[torch.Tensor], drew: bool
    ) -> Done:
        """Record the values of a unit for later stages, and number its results."""
        values, made = self.values, tensors_of(out)
        if not drew and not self.placed(path, given) and not any(map(values.is_value, given)):
            for tensor in made:
                values.add_pure(tensor)
            return Done(name)
        tainted = {number for t in written if not values.is_value(t) for number in values.sharing_pure(t)}
        now = tuple((number, values.taint(number)) for number in sorted(tainted))
        return Done(name, False, map_leaves(out, self._describe_leaf), now)

    def _describe_leaf(self, leaf: Any) -> Any:
        return self.values.describe(leaf, self._device) if isinstance(leaf, torch.Tensor) else leaf

    def _random_state(self) -> Any:
        state = torch.default_generator.get_state().numpy().tobytes()
        if self._device.type != "cuda":
            return state
        return state, torch.cuda.default_generators[self._device.index or 0].get_offset()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def refuse_unit(number: int, name: str, why: str) -> PipelineError:
    """Return the error for a unit that a stage can't run."""
    return PipelineError(f"unit {number} of the step, {name}, {why}")
