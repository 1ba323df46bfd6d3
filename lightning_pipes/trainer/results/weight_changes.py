"""Rejects changes of weights by steps and layers that differ from the changes in training with one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor

IN_HOOKS_WAY_OUT = (
    "Make this change in on_train_batch_start or on_train_batch_end, where each rank changes its weights once for a "
    "batch"
)
"""The advice for a step that changes weights."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_N_COMPARED_RUNS = 16
"""The number of runs of each stage in which weights are compared."""
_RUNS_WITH_CHECKSUMS = (1, 2, 4, 8, 16)
"""The runs that also detect writes that torch does not count, such as writes to `weight.data` or to a NumPy array."""


class _Mark(NamedTuple):
    """Properties of a weight that differ after a change.

    Attributes:
        weight: the tensor itself. It is kept so that no other tensor can get the same id.
        changes: the number of in-place changes that torch has counted.
        checksums: checksums of the values. Empty if they are not read.
    """

    weight: torch.Tensor
    changes: int
    checksums: tuple[int, ...]

    @classmethod
    def read(cls, weight: torch.Tensor, has_checksums: bool) -> _Mark:
        """Return the current mark of a weight."""
        if isinstance(weight, RemoteTensor):
            return cls(weight, weight.writes, ())
        return cls(weight, weight._version, _checksums(weight) if has_checksums else ())

    def is_replaced(self, later: _Mark) -> bool:
        """Return whether the name of the weight belongs to another tensor in a later mark."""
        return self.weight is not later.weight

    def is_changed(self, later: _Mark) -> bool:
        """Return whether the name of the weight belongs to another tensor or other values in a later mark."""
        return self.is_replaced(later) or self[1:] != later[1:]


class WeightChangeCheck:
    """Compares the weights before and after code that runs differently in one process.

    Args:
        module: the user's module.
        container: the path of the pipelined module in the user's module; empty if there is none.
        layers: all layers of the pipelined module, by number.
    """

    def __init__(self, module: nn.Module, container: str = "", layers: Mapping[int, nn.Module] | None = None) -> None:
        self._module, self._container, self._layers = module, container, layers or {}
        self._runs: Counter[int] = Counter()
        self._marks: dict[str, _Mark] | None = None
        self._has_checksums = False

    def watch(self, stage: Stage) -> AbstractContextManager[None]:
        """Return a context that records the weights for its block, which runs a stage in training.

        Nothing is recorded if enough runs were checked, or if layers take turns on the device.
        """
        number = self._runs[stage.number] + 1
        if number > _N_COMPARED_RUNS or stage.offload is not None:
            return _NOTHING
        self._runs[stage.number] = number
        return self._record(number in _RUNS_WITH_CHECKSUMS)

    @contextmanager
    def _record(self, has_checksums: bool) -> Iterator[None]:
        self._has_checksums = has_checksums
        self._marks = self._read_marks()
        try:
            yield
        finally:
            self._marks = None

    def check_step(self, span: Span, rows: int, why: str) -> None:
        """Reject a change by the code around the layers since the last check.

        Args:
            span: the samples of the micro-batch.
            rows: the number of samples of the batch.
            why: the reason why weights around the layers must not change even if the batch is not cut. Empty if they
                may.

        Raises:
            PipelineError: the step has changed a weight.
        """

        def explain(name: str, is_replaced: bool) -> str:
            if name.startswith(f"{self._container}."):
                return "The layers are on several processes, which would have different weights"
            if span.rows < rows:
                return "One process makes this change once for a batch, and here the step runs for each micro-batch"
            return why

        self.check(f"{type(self._module).__name__}.training_step", explain)

    def check(self, code: str, explain: Callable[[str, bool], str]) -> None:
        """Reject a change since the last check, and record the weights again.

        Args:
            code: a description of the code that has run since.
            explain: returns the reason why the change of a weight differs from training in one process, or an empty
                string if it does not. Its arguments are the name of the weight, and whether another parameter has
                replaced it.

        Raises:
            PipelineError: a weight was changed.
        """
        if self._marks is None:
            return
        before, self._marks = self._marks, self._read_marks()
        for name, mark in before.items():
            later = self._marks.get(name)
            if later is None or not mark.is_changed(later):
                continue
            reason = explain(name, mark.is_replaced(later))
            if reason:
                verb = "replaces" if mark.is_replaced(later) else "changes"
                raise PipelineError(f"{code} {verb} self.{name}. {reason}. {IN_HOOKS_WAY_OUT}")

    def _read_marks(self) -> dict[str, _Mark]:
        return {
            name: _Mark.read(p, self._has_checksums)
            for name, p in self._named_weights().items()
            if type(p) is nn.Parameter or isinstance(p, RemoteTensor)
        }

    def _named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by name. Weights that layers share with code around them have their name in the layers."""
        found: dict[str, nn.Parameter] = {}
        left: list[tuple[str, nn.Module]] = [("", self._module)]
        left += ((f"{self._container}.{number}.", each) for number, each in self._layers.items())
        known = set[int]()
        while left:
            prefix, part = left.pop()
            normalizes = getattr(part, "max_norm", None) is not None  # an embedding that renormalizes its weights
            for name, p in part._parameters.items():
                if not normalizes and p is not None and id(p) not in known:
                    known.add(id(p))
                    found[prefix + name] = p
            for name, child in part._modules.items():
                if child is not None and prefix + name != self._container:
                    left.append((f"{prefix}{name}.", child))
        return found


def explain_repetition(stage: Stage, item: Item, span: Span, overlaps: bool, ends_whole: bool = False) -> str:
    """Return the reason why a change of weights in the forward of a stage differs from one process, or an empty text.

    Args:
        stage: the stage.
        item: the batch.
        span: the samples of the micro-batch.
        overlaps: whether other batches are in flight.
        ends_whole: whether the end of the step runs again with the whole batch.
    """
    if not item.training:
        return ""
    if overlaps:
        return "Other batches are under way, which use the weights as they were"
    if stage.runs_again or stage.recomputing:
        return "This stage runs its forward a second time for its gradients. Leave recompute=True out"
    if span.rows == item.rows and not ends_whole:
        return ""
    return (
        "One process makes this change once for a batch, and here the forward runs for each micro-batch. Set "
        "PipelineStrategy(microbatches=1), by which it runs once"
    )


def _checksums(weight: torch.Tensor) -> tuple[int, ...]:
    """Return sums of the bits of the values.

    The sums are weighted by the positions of rows and of columns, so that they also differ if values are exchanged.
    """
    if weight.is_meta or weight.layout is not torch.strided or not weight.numel():
        return ()
    bits = weight.detach().contiguous().view(-1).view(torch.uint8)
    if len(bits) % 8 or bits.storage_offset() % 8:
        bits = F.pad(bits, (0, -len(bits) % 8))  # a copy, whose offset is a multiple of 8
    words = bits.view(torch.int64)  # torch adds these several times faster than smaller integers
    table = words.view(gcd(len(words), 4096), -1)
    sums = [table.sum(axis) for axis in (0, 1)]
    weighted = [torch.arange(1, len(each) + 1, device=each.device).mul_(each).sum() for each in sums]
    return tuple(torch.stack(weighted).tolist())
