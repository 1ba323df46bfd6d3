"""Merging of the values that steps log and return for micro-batches, decided by the values of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.ir import Span
from lightning_pipes.trainer.cuts.steps import StepResult
from lightning_pipes.trainer.results.logs import LogCall, LogKey, merge_returned, number_calls, returned_key
from lightning_pipes.trainer.results.loss_weights import (
    EXTREME_WEIGHT,
    FIRST_WEIGHT,
    BatchWeights,
    LossWeights,
    WeightAmounts,
    parts_differ,
    usual_weights,
)
from lightning_pipes.trainer.results.merging import are_close, have_equal_values

_ROUNDING_STEPS = 32
"""The assumed difference of two equal losses, in roundings of the loss."""


class Losses(NamedTuple):
    """The losses of a whole batch and of its parts.

    Attributes:
        whole: the loss of the whole batch.
        parts: the losses of the parts.
        kind: the data type of the losses.
        types: the data types of the numbers from which the losses were computed.
        results: the results of the step for the whole batch (key None) and for its parts.
    """

    whole: float
    parts: dict[Span, float]
    kind: torch.dtype
    types: set[torch.dtype]
    results: Mapping[Span | None, StepResult]

    @classmethod
    def from_results(cls, results: Mapping[Span | None, StepResult], types: set[torch.dtype]) -> Losses:
        """Return the losses of results, each of which has a loss."""
        found = {span: result.loss for span, result in results.items() if result.loss is not None}
        whole = found[None]
        parts = {span: loss.item() for span, loss in found.items() if span is not None}
        return cls(whole.item(), parts, whole.dtype, {whole.dtype, *types}, results)

    def are_different(self, share: Callable[[Span], float], size: float = 0.0) -> bool:
        """Return whether the weighted sum of the losses of the parts differs from the loss of the whole batch.

        Args:
            share: returns the weight of a part's loss in the loss of the batch.
            size: the size of the losses of earlier batches, which allows for their rounding.
        """
        return parts_differ(self.whole, self.parts, share, self.kind, self.types, size)

    def is_closest(self, candidate: WeightAmounts, others: Iterable[WeightAmounts]) -> bool:
        """Return whether no other candidate is closer to the loss of the whole batch by more than rounding.

        This distinguishes candidates whose weights are almost equal. Losses from half-precision numbers do not
        distinguish them.
        """

        def distance(each: WeightAmounts) -> float:
            shares = {span: each.loss_share(span) for span in self.parts}
            return abs(self.whole - sum(loss * shares[span] for span, loss in self.parts.items() if shares[span]))

        eps = max(torch.finfo(kind).eps for kind in self.types if kind.is_floating_point)
        rounding = _ROUNDING_STEPS * eps * abs(self.whole)
        return distance(candidate) <= max(10 * min(map(distance, others)), rounding)


class LoggedValues:
    """Chooses, for the values that steps log and return, the weights that reproduce the values of a whole batch.

    Args:
        module: the user's module.
        weights: receives the chosen weights.
    """

    def __init__(self, module: nn.Module, weights: LossWeights) -> None:
        self._module = module
        self._weights = weights
        self._judged: set[LogKey] = set()

    def weigh_values(
        self, weights: BatchWeights, losses: Losses, only: Collection[LogKey] | None = None
    ) -> set[LogKey]:
        """Choose the weights of the values of a batch.

        Args:
            weights: the weights of the micro-batches of this batch.
            losses: the results of the whole batch and of its parts.
            only: the values to weigh; None for all.

        Returns:
            The values that no weights reproduce, without the values that `warn_of_values` has already judged.
        """
        self._weights.joined_lists |= _find_joined_lists(losses)
        joined = tuple(returned_key(f"[{name!r}]")[0] for name in weights.joined_lists)
        found = {key: each for key, each in find_weights(losses, weights).items() if not key[0].startswith(joined)}
        fitting = {key: each for key, each in found.items() if each[1] and (only is None or key in only)}
        self._weights.weigh_logs(weights, fitting)
        wrong = {key for key, (_, names) in found.items() if not names}
        wrong |= _find_other_returned(losses, weights, found.keys())
        return (wrong if only is None else wrong & {*only}) - self._judged

    def warn_of_values(self, wrong: Collection[LogKey], losses: Losses, again: StepResult) -> None:
        """Warn of values that no weights reproduce, unless they differ between two runs of the whole batch.

        Values that differ between two runs are times, for example.

        Args:
            wrong: the values that no weights reproduce.
            losses: the results of the whole batch and of its parts.
            again: the result of a second run of the whole batch.
        """
        self._judged |= {*wrong}
        once, twice = _read_values(losses.results[None]), _read_values(again)
        wrong = [key for key in wrong if key in twice and _are_equal(once.get(key), twice[key])]
        if wrong:
            calls = dict(number_calls(losses.results[None].logged))
            names = ", ".join(calls[key].call_text if key in calls else key[0] for key in sorted(wrong))
            rank_zero_warn(
                f"{type(self._module).__name__}.training_step returns or logs values that are not a mean, sum or "
                f"extreme over samples, so they differ from one process: {names}. They are computed from the values of "
                f"{len(losses.parts)} micro-batches. Log a torchmetrics.Metric, or set "
                "PipelineStrategy(microbatches=1). PipelineStrategy(check_loss=False) turns this comparison off"
            )


def find_weights(losses: Losses, weights: BatchWeights) -> dict[LogKey, tuple[str, set[str]]]:
    """Return the usual weights of each logged or returned number, and the candidates that reproduce its value.

    A candidate reproduces a value if the values of the parts, weighted by it, add up to the value of the whole batch.
    """
    parts = {span: dict(number_calls(losses.results[span].log_calls)) for span in losses.parts}
    found = {}
    for key, call in number_calls(losses.results[None].log_calls):
        of_parts = {span: calls.get(key) for span, calls in parts.items()}
        numbers = _numbers(call, of_parts)
        if numbers is None:
            continue
        of_it = losses._replace(whole=numbers[0], parts=numbers[1])
        names = {
            each.name
            for each in weights.every
            if each.name != FIRST_WEIGHT and not of_it.are_different(each.loss_share)
        }
        if call.reduction_name in ("max", "min"):
            extreme = (max if call.reduction_name == "max" else min)(of_it.parts.values())
            made = of_it._replace(parts={Span(0, 1): extreme})
            names |= set() if made.are_different(lambda _: 1.0) else {EXTREME_WEIGHT}
        if not names and numbers[0] == numbers[1][min(numbers[1])]:
            names = {FIRST_WEIGHT}
        found[key] = usual_weights(call), names
    return found


def _find_joined_lists(losses: Losses) -> set[str]:
    """Return the names of returned lists that concatenate the entries of all micro-batches."""
    parts = [losses.results[span].extras for span in losses.parts]
    found = set()
    for name, whole in losses.results[None].extras.items():
        lists = [each.get(name) for each in parts]
        if isinstance(whole, list) and all(isinstance(each, list) for each in lists):
            lengths = [len(each) for each in lists if each is not None]
            if len(whole) == sum(lengths) and len(whole) not in lengths:
                found.add(name)
    return found


def _find_other_returned(losses: Losses, weights: BatchWeights, known: Collection[LogKey]) -> set[LogKey]:
    """Return the returned values, without the `known` numbers, that differ from the merged values of micro-batches."""
    spans, whole = sorted(losses.parts), losses.results[None].extras
    if not whole:
        return set()
    of_parts = [losses.results[span] for span in spans]
    shares = weights.shares_of_logs(spans, [each.log_calls for each in of_parts], ())
    merged = merge_returned([each.extras for each in of_parts], spans, shares, weights.joined_lists)
    relative = max(torch.finfo(kind).eps for kind in losses.types) ** (2 / 3)
    found: set[LogKey] = set()
    for name, value in whole.items():
        leaves, others = (
            {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path({name: each})[0]}
            for each in (value, merged.get(name))
        )
        compared = [path for path in leaves if returned_key(path) not in known]
        if leaves.keys() != others.keys() or not all(are_close(others[p], leaves[p], relative) for p in compared):
            found.add(returned_key(f"[{name!r}]"))
    return found


def _read_values(result: StepResult) -> dict[LogKey, Any]:
    """Return the values that a step has logged and returned."""
    returned = {returned_key(f"[{name!r}]"): value for name, value in result.extras.items()}
    return returned | {key: call.value for key, call in number_calls(result.log_calls)}


def _are_equal(some: Any, others: Any) -> bool:
    (values, spec), (other_values, other_spec) = pytree.tree_flatten(some), pytree.tree_flatten(others)
    return spec == other_spec and all(map(have_equal_values, values, other_values))


def _numbers(whole: LogCall, parts: Mapping[Any, LogCall | None]) -> tuple[float, dict[Any, float]] | None:
    """Return the values of a log call for a whole batch and its parts as numbers.

    The number of a tensor with several elements is a sum with random weights, which is linear in the tensor.

    Returns:
        The number of the whole batch and the numbers of the parts; None if the values are not numbers or their shapes
        differ, as the shapes of joined values do.
    """
    calls = [whole, *parts.values()]
    values = [None if call is None else call.value for call in calls]
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        tensors = [value for value in values if isinstance(value, torch.Tensor) and not value.is_complex()]
        if len(tensors) < len(values) or any(t.shape != tensors[0].shape or t.dtype is torch.bool for t in tensors):
            return None
        weights = torch.ones(1, dtype=torch.float64)
        if tensors[0].numel() != 1:
            weights = torch.rand(tensors[0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        numbers = [float((t.detach().cpu().double().reshape(-1) * weights).sum()) for t in tensors]
    return numbers[0], dict(zip(parts, numbers[1:], strict=True))
