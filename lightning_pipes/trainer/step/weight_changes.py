"""Refuses changes of weights by steps and layers, if one process would make different changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.module.remote_tensors import RemoteTensor

IN_HOOKS = (
    "Make this change in on_train_batch_start or on_train_batch_end, where each rank changes its weights once for a "
    "batch"
)
"""The advice for a change of weights in a step."""

_RUNS = 16
"""The runs of each stage in which weights are looked at."""
_RUNS_WITH_CHECKSUMS = (1, 2, 4, 8, 16)
"""The runs that also find writes that torch does not count, such as writes to `weight.data` or to a NumPy array."""


class _Mark(NamedTuple):
    """Facts of a weight, which differ after a change.

    Attributes:
        weight: the tensor itself, which is kept so that no other one gets its identity.
        changes: the number of changes in place that torch has counted.
        checksums: of the values; empty if they are not read.
    """

    weight: torch.Tensor
    changes: int
    checksums: tuple[int, ...]

    @classmethod
    def read(cls, weight: torch.Tensor, has_checksums: bool) -> _Mark:
        """Return the mark of a weight as it is now."""
        if isinstance(weight, RemoteTensor):
            return cls(weight, weight.writes, ())
        return cls(weight, weight._version, _checksums(weight) if has_checksums else ())

    def is_replaced(self, later: _Mark) -> bool:
        """Return whether another tensor has the name of the weight later."""
        return self.weight is not later.weight

    def is_changed(self, later: _Mark) -> bool:
        """Return whether another tensor or other values have the name of the weight later."""
        return self.is_replaced(later) or self[1:] != later[1:]


class WeightChangeCheck:
    """Compares the weights before and after code that one process would run in another way.

    Args:
        container: the path of the pipelined module in the user's.
        layers: all layers of it, by number.
    """

    def __init__(self, module: nn.Module, container: str, layers: Mapping[int, nn.Module]) -> None:
        self._module, self._container, self._layers = module, container, layers
        self._runs: Counter[int] = Counter()
        self._marks: dict[str, _Mark] | None = None
        self._has_checksums = False

    @contextmanager
    def watch(self, stage: Stage) -> Iterator[None]:
        """Look at the weights in the block, which runs a stage in training.

        Nothing is looked at if enough runs were seen, or if layers take turns on the device.
        """
        self._runs[stage.number] += 1
        number = self._runs[stage.number]
        self._has_checksums = number in _RUNS_WITH_CHECKSUMS
        if number <= _RUNS and stage.offload is None:
            self._marks = self._read_marks()
        try:
            yield
        finally:
            self._marks = None

    def check_step(self, span: Span, rows: int, why: str) -> None:
        """Refuse a change by the code around the layers since the last look.

        Args:
            span: the samples of the micro-batch.
            rows: the samples of the batch.
            why: why weights around the layers may not change either, if the batch is not cut; empty if they may.

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
        """Refuse a change since the last look, and look again.

        Args:
            code: what has run since.
            explain: returns why the change of the weight of that name is not that of one process, or an empty string
                if it is; also gets whether another parameter has taken its place.

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
                raise PipelineError(f"{code} {verb} self.{name}. {reason}. {IN_HOOKS}")

    def _read_marks(self) -> dict[str, _Mark]:
        return {
            name: _Mark.read(p, self._has_checksums)
            for name, p in self._named_weights().items()
            if type(p) is nn.Parameter or isinstance(p, RemoteTensor)
        }

    def _named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by name; those that layers and code around them share have their name in the layers."""
        found: dict[str, nn.Parameter] = {}
        left: list[tuple[str, nn.Module]] = [("", self._module)]
        left += ((f"{self._container}.{number}.", each) for number, each in self._layers.items())
        known = set[int]()
        while left:
            prefix, part = left.pop()
            normalizes = getattr(part, "max_norm", None) is not None  # an embedding, which may do so many times
            for name, p in part._parameters.items():
                if not normalizes and p is not None and id(p) not in known:
                    known.add(id(p))
                    found[prefix + name] = p
            for name, child in part._modules.items():
                if child is not None and prefix + name != self._container:
                    left.append((f"{prefix}{name}.", child))
        return found


def explain_repetition(stage: Stage, item: Item, span: Span, overlaps: bool, ends_whole: bool = False) -> str:
    """Return why a change of weights in the forward of a stage is not that of one process; empty if it is.

    Args:
        overlaps: whether other batches are under way.
        ends_whole: whether the end of the step runs again, with the whole batch.
    """
    if not item.training:
        return ""
    if overlaps:
        return "Other batches are under way, which use the weights as they were"
    if stage.recompute:
        return "This stage runs its forward a second time for its gradients. Leave recompute=True out"
    if span.rows == item.rows and not ends_whole:
        return ""
    return (
        "One process makes this change once for a batch, and here the forward runs for each micro-batch. Set "
        "PipelineStrategy(microbatches=1), by which it runs once"
    )


def _checksums(weight: torch.Tensor) -> tuple[int, ...]:
    """Return sums of the bits of the values, weighted by the positions of rows and of columns, so that they also differ
    if values change their places."""
    if weight.is_meta or weight.layout is not torch.strided or not weight.numel():
        return ()
    bits = weight.detach().contiguous().view(-1).view(torch.uint8)
    if len(bits) % 8 or bits.storage_offset() % 8:
        bits = F.pad(bits, (0, -len(bits) % 8))  # a copy, which begins at a multiple of 8
    words = bits.view(torch.int64)  # which torch adds several times faster than smaller integers
    table = words.view(gcd(len(words), 4096), -1)
    sums = [table.sum(axis) for axis in (0, 1)]
    weighted = [torch.arange(1, len(each) + 1, device=each.device).mul_(each).sum() for each in sums]
    return tuple(torch.stack(weighted).tolist())
