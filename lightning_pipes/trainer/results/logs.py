"""Logs of the user's step: they are recorded on the last stage, merged over micro-batches and replayed on all ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.private_lightning import metric_counts, set_metric_counts, set_metric_sync
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.user.hooks import select_hooks
from lightning_pipes.trainer.user.patches import Patches

_OPTIONS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]
"""The parameters of `self.log` after the name and the value."""


LogKey = tuple[str, int]
"""The name of a logged value, and the number of the call among the calls with this name."""


@dataclass
class LogCall:
    """One call `self.log(name, value, **options)`, or a value that a step has returned."""

    name: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def reduction_name(self) -> str:
        """The name of its `reduce_fx`. Empty for a value that a step has returned."""
        how = self.options.get("reduce_fx", "mean")
        how = how if isinstance(how, str) else getattr(how, "__name__", str(how))
        return "mean" if how == "avg" else how

    @property
    def call_text(self) -> str:
        """The call as the user wrote it."""
        return f"self.log({self.name!r})" if self.reduction_name else self.name


class recorded:  # noqa: N801  # used like a function; a generator would be several times slower
    """Context manager that returns the log calls of `module` in the block. Calls of `log_dict` are included.

    Args:
        module: the module.
        make: whether to make the calls, too. By default, they are only recorded.
    """

    def __init__(self, module: pl.LightningModule, make: bool = False) -> None:
        self._module = module
        self._make = module.log if make else None
        self._calls: list[LogCall] = []

    def __enter__(self) -> list[LogCall]:
        own = self._module.__dict__
        self._outer, own["log"] = own.get("log"), self._record
        return self._calls

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del self._module.__dict__["log"]
        else:
            self._module.__dict__["log"] = self._outer

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._make is not None:
            self._make(name, value, *args, **options)
        if args:
            options.update(zip(_OPTIONS, args, strict=False))
        if isinstance(value, torch.Tensor):
            value = value.detach()
        elif isinstance(value, Metric):
            value = _Seen(value, metric_counts(value)[1])
        self._calls.append(LogCall(name, value, options))


@dataclass
class _Seen:
    """A torchmetrics object, and its value for the last batch at the time of the log call."""

    metric: Metric
    last: Any


@dataclass
class MetricState:
    """The state that the same torchmetrics object on another rank needs.

    Of states that are lists, only the entries that were added since the last message are sent.

    Attributes:
        attribute: the path of the metric in the module.
        tensors: the states that are tensors.
        tails: for each state that is a list, the number of entries that were sent before, and the new entries.
        updates: the number of updates.
        last: the value of the last batch.
    """

    attribute: str
    tensors: dict[str, torch.Tensor]
    tails: dict[str, tuple[int, list[torch.Tensor]]]
    updates: int
    last: Any


def merge(
    recordings: Sequence[Sequence[LogCall]],
    rows: Sequence[int],
    shares: Mapping[LogKey, Sequence[float]] | None = None,
) -> list[LogCall]:
    """Merge the log calls of micro-batches by name: means weighted by batch size, sums, minima and maxima.

    The k-th call of a name in one micro-batch is merged with the k-th call of this name in the other micro-batches. A
    call without `batch_size=` is weighted by the number of samples of its micro-batch. This number is also used if
    `batch_size=` is the same constant for micro-batches of different sizes.

    Args:
        recordings: the calls of each micro-batch.
        rows: the number of samples of each micro-batch.
        shares: for some calls, the weights of the micro-batches, with which their values are summed instead.
    """
    groups: dict[LogKey, list[tuple[LogCall, int]]] = {}
    for number, calls in enumerate(recordings):
        for key, call in number_calls(calls):
            groups.setdefault(key, []).append((call, number))
    return [
        _merge_calls(
            [call for call, _ in group],
            [rows[number] for _, number in group],
            [shares[key][number] for _, number in group] if shares and key in shares else None,
        )
        for key, group in groups.items()
    ]


def number_calls(calls: Iterable[LogCall]) -> Iterator[tuple[LogKey, LogCall]]:
    """Yield each call with its key, which is its name and its number among the calls of this name."""
    seen: dict[str, int] = {}
    for call in calls:
        seen[call.name] = seen.get(call.name, 0) + 1
        yield (call.name, seen[call.name]), call


def _merge_calls(calls: Sequence[LogCall], rows: Sequence[int], shares: Sequence[float] | None) -> LogCall:
    first = calls[0]
    weights = [call.options.get("batch_size") or n for call, n in zip(calls, rows, strict=True)]
    size = int(sum(weights))
    if len({*weights}) == 1 and len({*rows}) > 1:  # a constant, which means the whole batch in one process
        weights, size = [*rows], int(weights[0])
    options = {**first.options, "batch_size": size}
    if isinstance(first.value, _Seen):
        lasts = [call.value.last for call in calls]
        return LogCall(first.name, _Seen(first.value.metric, _mean(lasts, weights)), options)
    values = [call.value for call in calls]
    how = first.reduction_name
    if len(values) == 1:
        value = values[0]
    elif shares is not None:
        value = _add_up(values, shares)
    elif how == "mean":
        value = _mean(values, weights)
    elif how == "sum":
        value = sum(values[1:], start=values[0])
    elif how in ("min", "max"):
        choose = min if how == "min" else max
        value = choose(values)
    else:
        value = values[-1]  # Lightning rejects other reductions when the call is made
    return LogCall(first.name, value, options)


def _add_up(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return the weighted sum of values. Values whose share is 0 may have any type."""
    counted = [(v, share) for v, share in zip(values, shares, strict=True) if share]
    return _mean([v for v, _ in counted], [share for _, share in counted], total=1.0)


def returned_calls(extras: Mapping[str, Any]) -> list[LogCall]:
    """Return the values that a step returns in addition to its loss, as log calls without a reduction."""
    found, _ = pytree.tree_flatten_with_path(dict(extras))
    return [LogCall(returned_key(pytree.keystr(path))[0], value, {"reduce_fx": ""}) for path, value in found]


def returned_key(path: str) -> LogKey:
    """Return the key of a value that a step returns, from its path in the dict."""
    return f"outputs{path}", 1


def merge_returned(
    extras: Sequence[Mapping[str, Any]],
    spans: Sequence[Span],
    shares: Mapping[LogKey, Sequence[float]],
    joined_lists: Collection[str] = (),
) -> dict[str, Any]:
    """Merge the values that the steps of micro-batches returned in addition to their losses.

    Tensors and lists with an entry for each sample are concatenated, and values with shares are summed. Of the
    remaining values, floating-point numbers are averaged, and equal strings and flags become one value. All others
    become a list with one entry for each micro-batch.

    Args:
        extras: the returned values of each micro-batch.
        spans: the samples of each micro-batch.
        shares: the weights of the micro-batches for values that are summed.
        joined_lists: the names of lists that are concatenated in a whole batch.
    """
    lists = {}
    for name in extras[0]:
        joined = _join_lists([each.get(name) for each in extras], spans, name in joined_lists)
        if joined:
            lists[name] = joined
    if lists:
        others = [{name: value for name, value in each.items() if name not in lists} for each in extras]
        merged_others = merge_returned(others, spans, shares)
        return {name: lists.get(name) or merged_others[name] for name in extras[0]}
    found, specs = zip(*(pytree.tree_flatten_with_path(dict(each)) for each in extras), strict=True)
    if any(spec != specs[0] for spec in specs):
        return {name: [each.get(name) for each in extras] for name in extras[0]}
    merged = [
        _merge_returned_parts(
            [value for _, value in leaves], spans, shares.get(returned_key(pytree.keystr(leaves[0][0])))
        )
        for leaves in zip(*found, strict=True)
    ]
    result: dict[str, Any] = pytree.tree_unflatten(merged, specs[0])
    return result


def _join_lists(parts: Sequence[Any], spans: Sequence[Span], is_joined: bool) -> list[Any] | None:
    """Return the concatenation of lists with one entry for each sample, or None for other values.

    If all micro-batches have the same size, lists of numbers may have this length by chance. They are concatenated only
    if a whole batch has shown that they should be.
    """
    rows = [span.rows for span in spans]
    if len(parts) == 1 or not all(isinstance(part, list) for part in parts):
        return None
    entries = [entry for part in parts for entry in part]
    if is_joined:
        return entries
    if [len(part) for part in parts] != rows:
        return None
    return entries if len({*rows}) > 1 or all(isinstance(entry, str) for entry in entries) else None


def _merge_returned_parts(parts: Sequence[Any], spans: Sequence[Span], shares: Sequence[float] | None) -> Any:
    tensors = [p for p in parts if isinstance(p, torch.Tensor)]
    if len(parts) == 1:
        return parts[0]
    if shares is not None:
        total = _add_up([p.double() if isinstance(p, torch.Tensor) else p for p in parts], shares)
        if tensors:
            kind = tensors[0].dtype
            return (total if kind.is_floating_point or kind.is_complex else total.round()).to(kind)
        whole = all(isinstance(p, int) for p in parts) and abs(total - round(total)) < 1e-6
        return type(parts[0])(round(total)) if whole else total
    by_sample = all(t.ndim and t.size(0) == s.rows for t, s in zip(tensors, spans, strict=False))
    if len(tensors) == len(parts) and by_sample and len({t.shape[1:] for t in tensors}) == 1:
        return torch.cat(tensors)
    if all(isinstance(p, (float, torch.Tensor)) and getattr(p, "ndim", 0) == 0 for p in parts):
        return _mean(parts, [s.rows for s in spans])
    if all(isinstance(p, (str, bool, type(None))) and p == parts[0] for p in parts):
        return parts[0]
    return list(parts)


def _mean(values: Sequence[Any], weights: Sequence[float], total: float | None = None) -> Any:
    """Return the weighted mean of numbers, tensors, or dicts of them, or the last value if it has another type.

    If `total` is given, it replaces the sum of the weights, so that the result is a weighted sum.
    """
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], dict):
        return {key: _mean([v[key] for v in values], weights, total) for key in values[0]}
    if not isinstance(values[0], (int, float, torch.Tensor)):
        return values[-1]
    total = sum(weights) if total is None else total
    parts = [
        (v if not isinstance(v, torch.Tensor) or v.is_floating_point() else v.to(torch.get_default_dtype()))
        * (w / total)
        for v, w in zip(values, weights, strict=True)
    ]
    return sum(parts[1:], start=parts[0])


class LogReplay:
    """Transfers log calls from the last stage to every rank.

    `pack_calls` runs on the last stage, and `replay_calls` runs on all ranks with its result.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._sent: dict[tuple[str, str], tuple[int, Any]] = {}  # per list: number of sent entries, and the last one

    def pack_calls(self, calls: Sequence[LogCall]) -> list[LogCall]:
        """Return the calls with values that can be sent to other processes."""
        return [LogCall(c.name, self._pack_call(c), c.options) for c in calls]

    def replay_calls(self, calls: Sequence[LogCall]) -> None:
        """Make the calls on the module. This must run inside the hook in which they were recorded."""
        for call in calls:
            value = call.value
            if isinstance(value, MetricState):
                value = self._restore_metric(value)
            elif isinstance(value, _Seen):  # all ranks have run the whole step
                self._log_seen(call, value)
                continue
            elif isinstance(value, torch.Tensor):
                value = value.to(self._module.device)
            self._module.log(call.name, value, **call.options)

    def _log_seen(self, call: LogCall, seen: _Seen) -> None:
        """Log a metric of this rank with the state that it had when the step logged it."""
        updates, last = metric_counts(seen.metric)
        set_metric_counts(seen.metric, updates, seen.last)
        self._module.log(call.name, seen.metric, **call.options)
        set_metric_counts(seen.metric, updates, last)

    def _pack_call(self, call: LogCall) -> Any:
        if not isinstance(call.value, _Seen):
            return call.value
        metric, last = call.value.metric, call.value.last
        attribute = call.options.get("metric_attribute") or self._attribute(metric, call.name)
        tensors: dict[str, torch.Tensor] = {}
        tails: dict[str, tuple[int, list[torch.Tensor]]] = {}
        for name, state in metric.metric_state.items():
            if isinstance(state, list):
                start, end = self._sent.get((attribute, name), (0, None))
                if start > len(state) or (start and state[start - 1] is not end):
                    start = 0  # the metric was reset
                tails[name] = (start, list(state[start:]))
                self._sent[attribute, name] = (len(state), state[-1] if state else None)
            else:
                tensors[name] = state
        return MetricState(attribute, tensors, tails, metric_counts(metric)[0], last)

    def _attribute(self, metric: Metric, name: str) -> str:
        for path, module in self._module.named_modules():
            if module is metric:
                return str(path)
        raise PipelineError(
            f"self.log({name!r}, ...) got a {type(metric).__name__} that is not an attribute of the LightningModule. "
            "Assign it to an attribute in __init__, so that it exists on every rank"
        )

    def _restore_metric(self, state: MetricState) -> Metric:
        metric = self._module.get_submodule(state.attribute)
        assert isinstance(metric, Metric)
        for name, tensor in state.tensors.items():
            setattr(metric, name, tensor.to(metric.device))
        for name, (start, tail) in state.tails.items():
            setattr(metric, name, [*getattr(metric, name)[:start], *(t.to(metric.device) for t in tail)])
        set_metric_counts(metric, state.updates, state.last)
        return metric


def limit_metric_sync(module: pl.LightningModule, group: Any, patches: Patches) -> None:
    """Make torchmetrics objects gather over the replicas only, until `patches` is closed.

    The stages of one pipeline hold the same values. If `group` is None, there are no replicas, and nothing is gathered.
    """
    metrics = [(m, m.sync_on_compute, m.process_group) for m in module.modules() if isinstance(m, Metric)]
    for metric, wanted, _ in metrics:
        set_metric_sync(metric, wanted and group is not None)
        metric.process_group = group

    def restore() -> None:
        for metric, wanted, before in metrics:
            set_metric_sync(metric, wanted)
            metric.process_group = before

    patches.callback(restore)


GRADIENT_HOOKS = select_hooks(lambda hook: hook.merges_logs)

_TOTAL_NORM_PATTERN = re.compile(r"(?P<norms>.*grad_(?P<p>[0-9.]+|inf)_norm)_total")
"""The name of the norm of all norms in `lightning.pytorch.utilities.grad_norm`, after any prefix of the user."""


class GradientLogs:
    """Makes every rank log the merged values that the gradient hooks of the module and of callbacks log on all ranks.

    Args:
        module: the user's module.
        callbacks: the callbacks of the Trainer.
        control: the control channel of the ranks.
        replay: transfers log calls.
        last_rank: the global rank whose value is used if ranks log different values under one name.
        patches: the changes to the hooks, which are reverted when it is closed.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        callbacks: Iterable[pl.Callback],
        control: Control,
        replay: LogReplay,
        last_rank: int,
        patches: Patches,
    ) -> None:
        self._module = module
        self._control = control
        self._replay = replay
        self._last = control.ranks.index(last_rank)
        self._warned = False
        for name in GRADIENT_HOOKS:
            if is_overridden(name, module):
                self._wrap(module, name, patches)
            for callback in callbacks:
                if is_overridden(name, callback, pl.Callback):
                    self._wrap(callback, name, patches)

    def _wrap(self, owner: object, name: str, patches: Patches) -> None:
        hook = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> None:
            with recorded(self._module) as calls:
                hook(*args, **kwargs)
            recordings = self._control.all_gather(self._replay.pack_calls(calls))
            merged, doubtful = merge_over_ranks(recordings, self._last)
            if doubtful and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"{type(owner).__name__}.{name} logs {doubtful[0]!r}, whose value differs between stages, "
                    "because each stage has only the gradients of its own layers. The value of the last stage is "
                    "logged. To log norms over the whole module, pass the whole result of "
                    "lightning.pytorch.utilities.grad_norm: self.log_dict(grad_norm(self, 2))"
                )
            self._replay.replay_calls(merged)

        patches.replace_method(owner, name, run)


def merge_over_ranks(recordings: Sequence[Sequence[LogCall]], last: int) -> tuple[list[LogCall], list[str]]:
    """Merge the log calls of all ranks by name, and also return the names without a value for the whole module.

    A name that only one rank has logged keeps its value. If several ranks have logged a name, for example for
    parameters that several ranks hold, the value of rank number `last` is used, or otherwise the first value. Totals of
    `grad_norm` are computed again from all norms.
    """
    calls: dict[str, LogCall] = {}
    doubtful: dict[str, None] = {}
    for recording in (recordings[last], *recordings):
        for call in recording:
            known = calls.setdefault(call.name, call)
            if not _equal(known.value, call.value):
                doubtful[call.name] = None
    for name, call in calls.items():
        norms = list(_norms_under(name, calls))
        if norms:
            doubtful.pop(name, None)
            p = float(_TOTAL_NORM_PATTERN.fullmatch(name)["p"])  # type: ignore[index]
            calls[name] = LogCall(name, torch.tensor(norms).norm(p), call.options)  # as in grad_norm
    return list(calls.values()), list(doubtful)


def _norms_under(name: str, calls: dict[str, LogCall]) -> Iterator[Any]:
    """Yield the values of which `name` is the total."""
    total = _TOTAL_NORM_PATTERN.fullmatch(name)
    if total is not None:
        yield from (call.value for other, call in calls.items() if other.startswith(total["norms"]) and other != name)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two ranks have logged equal values, within rounding because their devices may differ."""
    if isinstance(a, (int, float, torch.Tensor)) and isinstance(b, (int, float, torch.Tensor)):
        return torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=1e-4, equal_nan=True)
    return True
