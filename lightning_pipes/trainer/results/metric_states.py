"""The states of metrics in steps that a rank runs several times on a micro-batch.

A rank with several stages runs the step once for each stage, and a stage that recomputes runs it a second time. Each
run updates the metrics of the module, but one process updates them once. Therefore, the last stage of a rank updates
the metrics themselves, and each other stage updates its own copy of their states. A second run begins with the states
that the first run has read, and its updates are discarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torchmetrics import Metric

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import Span
from lightning_pipes.trainer.private_lightning import metric_counts, set_metric_counts


class _MetricState(NamedTuple):
    """The state of a metric: its tensors and lists by name, its number of updates, and its last value."""

    entries: dict[str, Any]
    updates: int
    last: Any


class MetricStates:
    """Gives each run of a step the states of metrics that this run would find in one process.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics: list[Metric] | None = None
        self._of_stages: dict[int, list[_MetricState]] = {}
        """The states of the metrics for each stage but the last one of this rank."""
        self._of_runs: dict[tuple[int, Span, int], list[_MetricState]] = {}
        """The states with which a second run begins, by the batch, the samples and the stage."""
        self._seen: list[tuple[Any, ...]] = []
        """The identity of the states of the metrics after the latest run."""

    @contextmanager
    def run(self, stage: Stage, item: Item, span: Span, is_last: bool) -> Iterator[None]:
        """Give the metrics the states of a run of the step, and their own states afterwards.

        Args:
            stage: the stage that runs.
            item: the batch.
            span: the samples of the micro-batch.
            is_last: whether the step does not continue on another stage of this rank.
        """
        if self._metrics is None:  # metrics may be created when training begins
            self._metrics = [part for part in self._module.modules() if isinstance(part, Metric)]
        if not self._metrics:
            yield
            return
        is_own, repeats = is_last and not stage.recomputing, stage.runs_again and not stage.runs_in_parts
        if is_own and not (repeats or self._of_stages):  # no run needs other states
            yield
            return
        number = stage.number
        own, key = self._read(), (item.number, span, number)
        if self._identify(own) != self._seen:  # a hook has reset or updated the metrics
            self._of_stages.clear()
        try:
            if stage.recomputing:
                self._write(self._of_runs.pop(key) if key in self._of_runs else copy_states(own))
            elif not is_own:
                self._write(self._of_stages.get(number) or copy_states(own))
            if repeats:
                self._of_runs[key] = copy_states(self._read())
            yield
            if not (is_own or stage.recomputing):
                self._of_stages[number] = self._read()
        finally:
            if not is_own:
                self._write(own)
            self._seen = self._identify(self._read())

    def discard_runs(self) -> None:
        """Discard the states for second runs that do not take place."""
        self._of_runs.clear()

    def _read(self) -> list[_MetricState]:
        return [_MetricState({**each.metric_state}, *metric_counts(each)) for each in self._metrics or ()]

    def _write(self, states: Iterable[_MetricState]) -> None:
        for metric, state in zip(self._metrics or (), states, strict=True):
            for name, value in state.entries.items():
                setattr(metric, name, value)
            set_metric_counts(metric, state.updates, state.last)

    @staticmethod
    def _identify(states: Iterable[_MetricState]) -> list[tuple[Any, ...]]:
        return [(state.updates, *map(id, state.entries.values())) for state in states]


def copy_states(states: Iterable[_MetricState]) -> list[_MetricState]:
    """Return copies of the states that updates do not change. The metrics of a collection may share their tensors."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = value.clone() if isinstance(value, torch.Tensor) else [*value]
        return copies[id(value)]

    return [
        _MetricState({name: copy(value) for name, value in state.entries.items()}, state.updates, state.last)
        for state in states
    ]
