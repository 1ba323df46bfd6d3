"""The weights with which the losses of micro-batches are summed to the loss of their batch.

Losses are weighted by samples or by tokens, or summed without weights. If the labels of a batch do not determine the
weights, the loss of the batch does. Of the candidates that give different weights for a batch, only those are kept with
which the losses of the micro-batches reproduce the loss of the whole batch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_pipes.engine.private_torch import has_gradient_hooks
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.data.batches import make_cutter, sample_tensors
from lightning_pipes.trainer.data.token_cut import IGNORED_LABEL
from lightning_pipes.trainer.results.logs import LogCall, LogKey, number_calls

SAMPLES_WEIGHT, SUMS_WEIGHT, OWN_WEIGHT = "samples", "1: it is a sum", "microbatch_weight"
FIRST_WEIGHT = "the first micro-batch"
"""The candidate for values that only depend on the first sample, such as `x[0, 0]`."""
EXTREME_WEIGHT = "the largest or smallest"
"""The candidate for values that are logged with reduce_fx="max" or "min", which have no weights."""
_HALF_TOLERANCE = 1e-4
"""The relative difference that is allowed between losses if they are computed from half-precision numbers.

In measurements, other batch sizes changed losses by 2e-6 of their value.
"""
_WEIGHT_TOLERANCE = 1e-12
"""The difference that is allowed between equal weights."""
_COMPARED_GRADIENTS = 2**16
"""The largest number of entries of the gradients of weights with which candidates are compared."""

Sums = Callable[[torch.Tensor], Callable[[], None]]


@runtime_checkable
class WeighsMicrobatches(Protocol):
    """A LightningModule that specifies the weights of the losses of micro-batches."""

    def microbatch_weight(self, batch: Any) -> float:
        """Return the weight of a micro-batch, such as its number of tokens. Only ratios within a batch matter."""


@dataclass(frozen=True)
class WeightAmounts:
    """The amounts with which one candidate weights the micro-batches of a batch.

    Attributes:
        name: the name of the candidate, for messages.
        of: returns the amount for the samples of a span.
        total: the amount for the whole batch of this rank, or 1 if losses are summed.
    """

    name: str
    of: Callable[[Span], float]
    total: float

    def loss_share(self, span: Span) -> float:
        """Return the weight of the loss of a micro-batch in the loss of the batch."""
        return self.of(span) / self.total if self.total else 0.0


def find_candidates(module: pl.LightningModule, batch: Any, rows: int, spans: Iterable[Span]) -> list[WeightAmounts]:
    """Return the candidates for weights of micro-batches, the most likely first.

    The candidates are the module's own weights, the number of samples, the numbers of tokens, and equal weights.
    """
    found = []
    if isinstance(module, WeighsMicrobatches):
        cut = make_cutter(batch, rows)
        own = cache(lambda span: float(module.microbatch_weight(cut(span))))
        found.append(WeightAmounts(OWN_WEIGHT, own, sum(map(own, spans))))
    found.append(WeightAmounts(SAMPLES_WEIGHT, lambda span: span.rows, rows))
    for where, tensor in sample_tensors(batch, rows):
        if tensor.dtype is torch.bool or ("mask" in where and not tensor.is_floating_point()):
            found += _tokens(f"entries of {where}", "that are not 0", tensor, 0)
        elif tensor.dtype in (torch.int64, torch.int32):
            found += _tokens(f"labels in {where}", "that are not -100", tensor, IGNORED_LABEL)
    return [*found, WeightAmounts(SUMS_WEIGHT, lambda span: 1.0, 1.0)]


def _tokens(what: str, which: str, tensor: torch.Tensor, ignored: int) -> Iterator[WeightAmounts]:
    """Yield candidates from the entries of a tensor that are not ignored.

    They are the number of these entries, the number without the first entry of each sequence, and for both the number
    of samples with any such entry.
    """
    counted = tensor != ignored
    shifts = tensor.ndim == 2 and tensor.size(1) > 1
    if bool(counted.all()):  # the same number in each sample
        sizes = [tensor[0].numel(), *([tensor.size(1) - 1] if shifts else [])]
        counts = [([size] * tensor.size(0), [1] * tensor.size(0)) for size in sizes]
    else:
        flat = counted.reshape(len(counted), -1)
        each = flat.sum(1)
        both = torch.stack([each, each - flat[:, 0].long()]) if shifts else each[None]
        counts = [(numbers, [int(n > 0) for n in numbers]) for numbers in both.tolist()]
    for (numbers, some), after in zip(counts, ("", ", shifted by one"), strict=False):
        yield _count_amounts(f"{what} {which}{after}", numbers)
        yield _count_amounts(f"samples with {what} {which}{after}", some)


def _count_amounts(name: str, numbers: Sequence[int]) -> WeightAmounts:
    """Return a candidate from the numbers of all samples."""
    ends = [0, *accumulate(numbers)]
    return WeightAmounts(name, lambda span: ends[span.stop] - ends[span.start], ends[-1])


class BatchWeights:
    """The weights of the micro-batches of one batch.

    Args:
        every: all candidates, including the candidate for values that only depend on the first sample.
        found: the candidates that are possible for the loss, the most likely first.
        spans: the samples of each micro-batch.
        undecided: whether this batch should decide between candidates that give different weights.
        logs: the names of the candidates that are used for logged and returned values.
        ambiguous: the values for which several different candidates are possible.
        request_comparison: called with log calls of such values that would allow a decision.
        joined_lists: the names of returned lists that are concatenated over micro-batches.
        sums: sums numbers over replicas and returns a function that waits for this. None without replicas.
        replicas: the number of replicas.
    """

    def __init__(
        self,
        every: Sequence[WeightAmounts],
        found: Sequence[WeightAmounts],
        spans: Sequence[Span],
        undecided: bool,
        logs: Mapping[LogKey, str],
        ambiguous: Collection[LogKey],
        request_comparison: Callable[[Iterable[LogCall]], None],
        joined_lists: Collection[str],
        sums: Sums | None,
        replicas: int,
    ) -> None:
        self.every = every
        self.found = found
        self.chosen = found[0]
        self.undecided = undecided
        self.joined_lists = joined_lists
        self.logs, self.ambiguous, self.request_comparison = logs, ambiguous, request_comparison
        self.spans, self._replicas = spans, replicas
        self._totals: list[float] = []
        self._numbers: torch.Tensor | None = None
        self._wait: Callable[[], None] | None = None
        if sums is not None:
            names = zlib.crc32("".join(each.name for each in found).encode())
            self._numbers = torch.tensor(
                [float(undecided), float(names), *(each.total for each in found)], dtype=torch.float64
            )
            self._wait = sums(self._numbers)

    def join_replicas(self) -> None:
        """Exchange the amounts of this batch with other replicas, before its first loss.

        Raises:
            PipelineError: the batches of the replicas have different columns.
        """
        if self._wait is None or self._numbers is None:
            return
        wait, self._wait = self._wait, None
        wait()
        undecided, names, *self._totals = self._numbers.tolist()
        if names != self._replicas * zlib.crc32("".join(each.name for each in self.found).encode()):
            raise PipelineError("the replicas of the pipeline have batches with other columns at the same time")
        self.undecided = undecided > 0

    def loss_share(self, span: Span) -> float:
        """Return the weight of the loss of a micro-batch in the loss of this rank's batch."""
        return self.chosen.loss_share(span) if self.chosen.total else span.rows / sum(each.rows for each in self.spans)

    def shares_of_logs(
        self, spans: Sequence[Span], calls: Sequence[Sequence[LogCall]], of_loss: Collection[LogKey]
    ) -> dict[LogKey, list[float]]:
        """Return the weights of the logged and returned values that are not merged as their reduction specifies.

        Args:
            spans: the samples of each micro-batch.
            calls: the log calls of each micro-batch.
            of_loss: the keys of the calls whose value is the loss itself.
        """
        named = {each.name: each for each in self.every}
        known = {key: named[name] for key, name in self.logs.items() if name in named}
        by = {**known, **dict.fromkeys(of_loss, self.chosen)}
        ambiguous = {*self.ambiguous} - {*of_loss}
        calls_of_batch = [
            call for each in calls for key, call in number_calls(each) if key in ambiguous and _is_nonzero(call)
        ]
        if calls_of_batch:
            self.request_comparison(calls_of_batch)
        return {
            key: [by[key].loss_share(span) for span in spans]
            for key, call in (number_calls(calls[0]) if by else ())
            if key in by and by[key].total and by[key].name != usual_weights(call)
        }

    def gradient_factor(self, span: Span) -> float:
        """Return the weight of the loss of a micro-batch, or of the whole batch, for its gradient.

        Replicas average gradients. The factor makes the average equal to the gradient in one process, which would have
        one batch of all samples.
        """
        chosen, is_whole = self.chosen, span.rows == sum(each.rows for each in self.spans)
        share, amount = (1.0, chosen.total) if is_whole else (self.loss_share(span), chosen.of(span))
        if not self._totals or chosen.name == SAMPLES_WEIGHT:
            return share
        total = 1.0 if chosen.name == SUMS_WEIGHT else self._totals[self.found.index(chosen)]
        return amount * self._replicas / total if total else share


class LossWeights:
    """Determines the weights of the micro-batches of each batch of a run, on the rank of the last stage.

    Args:
        module: the user's module.
        compares: whether losses of batches may be used to decide between candidates.
        sums: sums numbers over replicas in place and returns a function that waits for this. None without replicas.
        replicas: the number of replicas.

    Attributes:
        name: the name of the candidate with which micro-batches are weighted. Empty before the first batch.
        ruled_out: the names of candidates that do not reproduce the loss.
        joined_lists: the names of returned lists for which whole batches have shown that they are concatenated.
    """

    MOST_BATCHES, MOST_FOR_LOGS, MOST_AGAIN = 5, 3, 16
    """The largest numbers of batches with which the candidates are compared.

    The first number is for the loss and the second for logged values. After these batches, the most likely candidate is
    used. If a logged value was 0, one more batch is compared in each epoch and when the value is no longer 0, at most
    MOST_AGAIN times.
    """

    def __init__(self, module: pl.LightningModule, compares: bool, sums: Sums | None, replicas: int) -> None:
        self.name = ""
        self._module = module
        self._batches_left = self.MOST_BATCHES if compares else 0
        self._sums, self._replicas = sums, replicas
        self.ruled_out: set[str] = set()
        self.joined_lists: set[str] = set()
        self._log_batches_left = self.MOST_FOR_LOGS if compares else 0
        self._extra_batches_left = self.MOST_AGAIN if compares else 0
        self._logs: dict[LogKey, set[str]] = {}
        """The candidates that have reproduced each logged value in all batches so far."""
        self._usual: dict[LogKey, str] = {}
        self._ambiguous: set[LogKey] = set()
        self._named_calls: dict[str, None] = {}
        self._epoch = 0

    @staticmethod
    def are_needed(module: pl.LightningModule, check_loss: bool) -> bool:
        """Return whether micro-batches may be weighted by another quantity than their number of samples."""
        return check_loss or isinstance(module, WeighsMicrobatches)

    def weigh_batch(self, batch: Any, rows: int, spans: Sequence[Span]) -> BatchWeights | None:
        """Return the weights of a batch according to its own labels.

        The result is None if the batch is not cut and there are no replicas.
        """
        if len(spans) < 2 and self._sums is None:
            return None
        found = find_candidates(self._module, batch, rows, spans)
        every = [*found, WeightAmounts(FIRST_WEIGHT, lambda span: float(span.start == 0), 1.0)]
        left = [each for each in found if each.name not in self.ruled_out]
        left = left or [each for each in found if each.name == SAMPLES_WEIGHT]
        if not self._batches_left:
            left = left[:1]
        if self._ambiguous and self._module.current_epoch != self._epoch:  # the logged value may be the epoch
            self._compare_next_batch()
        self._epoch = self._module.current_epoch
        undecided = candidates_differ(left, spans) or (self._log_batches_left > 0 and self._logs_disagree(every, spans))
        made = BatchWeights(
            every,
            left,
            spans,
            undecided,
            self._likeliest_for_logs(every),
            self._ambiguous,
            self._request_comparison,
            self.joined_lists,
            self._sums,
            self._replicas,
        )
        self._name(made.chosen)
        return made

    def choose_candidate(self, weights: BatchWeights, fitting: Collection[str] | None) -> None:
        """Choose the most likely candidate that reproduces the loss of a batch.

        This method is collective over replicas.

        Args:
            weights: the weights of the batch.
            fitting: the names of the candidates that reproduce the loss, or None if the losses cannot be compared,
                which keeps all candidates.
        """
        names = [each.name for each in weights.found]
        fit = torch.tensor([float(fitting is None or name in fitting) for name in names], dtype=torch.float64)
        if self._sums is not None:
            self._sums(fit)()
        left = [each for each, number in zip(weights.found, fit.tolist(), strict=True) if number == self._replicas]
        if candidates_differ(weights.found, weights.spans):
            self._batches_left -= 1
        else:
            self._log_batches_left -= 1
        weights.undecided = False
        if not left:
            left = [each for each in weights.found if each.name == SAMPLES_WEIGHT]
            self._batches_left = 0
        self.ruled_out |= set(names) - {each.name for each in left}
        weights.chosen = left[0] if left else weights.found[0]
        self._name(weights.chosen)
        if not self._batches_left:
            self.ruled_out |= set(names) - {weights.chosen.name}

    def weigh_logs(self, weights: BatchWeights, by: Mapping[LogKey, tuple[str, Collection[str]]]) -> None:
        """Choose the weights of logged and returned values among the candidates that reproduce them from micro-batches.

        Args:
            weights: the weights of the batch.
            by: for each value, the name of its usual weights and the names of the candidates.
        """
        for key, (usual, names) in by.items():
            self._usual[key] = usual
            self._logs[key] = self._logs.get(key, {*names}) & {*names}
        named = {each.name: each for each in weights.every}
        self._ambiguous.clear()
        for key, names in self._logs.items():
            left = [named[name] for name in names if name in named]
            if left and candidates_differ(left, weights.spans):
                self._ambiguous.add(key)
        weights.logs = self._likeliest_for_logs(weights.every)

    def _likeliest_for_logs(self, every: Sequence[WeightAmounts]) -> dict[LogKey, str]:
        """Return the most likely candidate of each logged value.

        The order is: the usual candidate, the extremes, the number of samples, the candidate of the loss, and all
        others.
        """
        order = [
            EXTREME_WEIGHT,
            *(e.name for e in sorted(every, key=lambda e: (e.name != SAMPLES_WEIGHT, e.name != self.name))),
        ]
        left = {
            key: sorted((name for name in order if name in names), key=lambda name: name != self._usual[key])
            for key, names in self._logs.items()
        }
        return {key: names[0] if names else self._usual[key] for key, names in left.items()}

    def _request_comparison(self, calls_of_batch: Iterable[LogCall]) -> None:
        names = {call.call_text: None for call in calls_of_batch if call.call_text not in self._named_calls}
        self._named_calls.update(names)
        if names:
            rank_zero_warn(
                f"{', '.join(names)} of {type(self._module).__name__}.training_step was 0 in all batches that were "
                "compared, or equal in all micro-batches, so they do not show whether values of micro-batches are "
                "averaged or added up. In this batch reduce_fx decides. The next batch is compared"
            )
        self._compare_next_batch()

    def _compare_next_batch(self) -> None:
        if self._extra_batches_left and self._log_batches_left <= 0:
            self._extra_batches_left -= 1
            self._log_batches_left = 1

    def _logs_disagree(self, every: Sequence[WeightAmounts], spans: Sequence[Span]) -> bool:
        possible = {frozenset(names) for names in self._logs.values()}
        left = ([each for each in every if each.name in names] for names in possible)
        return any(candidates_differ(each, spans) for each in left if each)

    @property
    def has_no_replicas(self) -> bool:
        """Whether there are no replicas, which would have to choose together."""
        return self._sums is None

    def give_up(self) -> None:
        """Stop comparing losses from the next batch on."""
        self._batches_left = 0

    def _name(self, chosen: WeightAmounts) -> None:
        if chosen.name != self.name and (self.name or chosen.name != SAMPLES_WEIGHT):
            rank_zero_info(
                f"The losses of micro-batches are weighted by {chosen.name}, as in the loss of a whole batch"
            )
        self.name = chosen.name


def usual_weights(call: LogCall) -> str:
    """Return the candidate for a log call unless a batch shows otherwise. Empty if a batch must show it."""
    return {"mean": SAMPLES_WEIGHT, "sum": SUMS_WEIGHT, "max": EXTREME_WEIGHT, "min": EXTREME_WEIGHT}.get(
        call.reduction_name, ""
    )


def _is_nonzero(call: LogCall) -> bool:
    """Return whether a value is not 0. All candidates reproduce a value of 0."""
    value = call.value
    return bool(value.any()) if isinstance(value, torch.Tensor) else bool(value)


def candidates_differ(found: Sequence[WeightAmounts], spans: Sequence[Span]) -> bool:
    """Return whether candidates give different weights to the micro-batches of a batch."""
    first = [found[0].loss_share(span) for span in spans]
    return any(
        abs(each.loss_share(span) - share) > _WEIGHT_TOLERANCE
        for each in found[1:]
        for span, share in zip(spans, first, strict=True)
    )


def most_different_pair(found: Sequence[WeightAmounts], pairs: Iterable[tuple[Span, Span]]) -> tuple[Span, Span] | None:
    """Return the pair of neighboring spans for which the candidates give the most different weights.

    The samples of both spans count as a batch. The result is None if no pair distinguishes the candidates.
    """

    def spread(pair: tuple[Span, Span]) -> float:
        shares = [_share_of_first(each, pair) for each in found]
        return max(shares) - min(shares)

    best = max(pairs, key=spread, default=None)
    return best if best is not None and spread(best) > _WEIGHT_TOLERANCE else None


def _share_of_first(candidate: WeightAmounts, pair: tuple[Span, Span]) -> float:
    """Return the weight of the loss of the first span in the loss of the samples of both spans."""
    first, second = map(candidate.of, pair)
    total = 1.0 if candidate.name == SUMS_WEIGHT else first + second
    return first / total if total else 0.0


def select_by_gradients(
    found: Sequence[WeightAmounts],
    pair: tuple[Span, Span],
    gradients: Sequence[Sequence[torch.Tensor]],
    types: set[torch.dtype],
) -> Sequence[WeightAmounts]:
    """Return the candidates that reproduce the gradients of the samples of two spans, or `found` if none does.

    The gradient of the loss of all samples is a sum of the gradients of the losses of both spans, with the weights of
    these losses. This distinguishes candidates even if all losses are equal, as before the first step of a language
    model with small weights.

    Args:
        found: the candidates.
        pair: the two spans.
        gradients: the gradients of the loss of the samples of both spans, of the loss of the first span, and of the
            loss of the second span, with respect to the same tensors.
        types: the types of the numbers from which the losses were computed.
    """
    of_both, *of_spans = (torch.cat([g.detach().flatten().double() for g in each]) for each in gradients)
    matrix = torch.stack([torch.stack([a @ b for b in of_spans]) for a in of_spans])
    if not matrix.isfinite().all() or float(torch.linalg.matrix_rank(matrix)) < len(pair):
        return found
    first, second = torch.linalg.solve(matrix, torch.stack([a @ of_both for a in of_spans]))

    def distance(each: WeightAmounts) -> float:
        share = _share_of_first(each, pair)
        other = 1.0 if each.name == SUMS_WEIGHT else 1.0 - share
        return max(abs(share - float(first)), abs(other - float(second)))

    rounding = max(torch.finfo(kind).eps for kind in types if kind.is_floating_point) ** (2 / 3)
    return [each for each in found if distance(each) <= rounding] or found


def parts_differ(
    whole: float,
    parts: Mapping[Span, float],
    share: Callable[[Span], float],
    kind: torch.dtype,
    types: set[torch.dtype],
    size: float = 0.0,
) -> bool:
    """Return whether the weighted losses of the parts of a batch sum to a different value than its loss.

    Args:
        whole: the loss of the batch.
        parts: the loss of each part.
        share: returns the weight of the loss of a part in the loss of the batch.
        kind: the type of the losses.
        types: the types of the numbers from which the losses were computed.
        size: the magnitude of the numbers that were rounded, if it is larger than the magnitude of the losses.
    """
    weighed = [(loss, share(span)) for span, loss in parts.items()]
    mean = sum(loss * weight for loss, weight in weighed if weight)
    return losses_differ(whole, mean, [whole, *parts.values(), size], kind, types)


class SplitLosses(NamedTuple):
    """The result of a comparison of the loss of a batch with the losses of its parts.

    Attributes:
        wrong: the candidates for weights with which the losses of the parts do not reproduce the loss of the batch.
        unexplained: a description of the losses if no candidate reproduces the loss, and otherwise empty.
    """

    wrong: frozenset[str]
    unexplained: str


def last_trained(weights: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return some of the last weights that train and have no hooks, and at least one of them if there is any."""
    found: list[torch.nn.Parameter] = []
    for weight in reversed([p for p in weights if p.requires_grad and not has_gradient_hooks(p)]):
        if not found or sum(p.numel() for p in found) + weight.numel() <= _COMPARED_GRADIENTS:
            found.append(weight)
    return found


def first_entries(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the first entries of gradients of weights, which are enough for a comparison of candidates.

    The gradient of the head of a language model would need as much memory as the head, several times.
    """
    return [gradient.flatten()[:_COMPARED_GRADIENTS].clone() for gradient in gradients]


def compare_losses(
    module: pl.LightningModule,
    batch: Any,
    rows: int,
    compute: Callable[[list[Any]], Sequence[torch.Tensor]],
    compute_gradients: Callable[[Any], Sequence[torch.Tensor]] | None = None,
) -> SplitLosses:
    """Compare the loss of a batch with the losses of its parts.

    If several candidates reproduce the loss, they are also compared by gradients.

    Args:
        module: the user's module.
        batch: the batch.
        rows: the number of samples of the batch, at least 2.
        compute: returns the losses of batches.
        compute_gradients: returns the gradients of the loss of a batch, always with respect to the same weights. None
            if gradients are not compared.
    """
    cuts = [[Span(0, at), Span(at, rows)] for at in range(1, rows)]
    means = [each for each in find_candidates(module, batch, rows, cuts[0]) if each.name != SUMS_WEIGHT]
    first = next((each for each in cuts if candidates_differ(means, each)), cuts[0])
    cut = make_cutter(batch, rows)
    spans = [*first, *cuts[len(cuts) // 2]]  # two cuts are compared, because a loss may be 0 for one sample
    whole, *parts = compute([batch, *map(cut, spans)])
    kinds = {t.dtype for t in (*module.parameters(), whole) if t.is_floating_point()}
    wrong, candidates = set[str](), find_candidates(module, batch, rows, spans[:2])
    for at in (0, 2):
        losses = {span: loss.item() for span, loss in zip(spans[at : at + 2], parts[at : at + 2], strict=True)}
        differ = partial(parts_differ, whole.item(), losses, kind=whole.dtype, types=kinds)
        every = find_candidates(module, batch, rows, list(losses))
        wrong |= {each.name for each in every if differ(share=each.loss_share)}
    left = [each for each in candidates if each.name not in wrong]
    if left:
        pairs = [(cut[0], cut[1]) for cut in cuts]
        pair = most_different_pair(left, pairs)
        if compute_gradients is not None and pair is not None:
            gradients = [compute_gradients(each) for each in (batch, *map(cut, pair))]
            wrong |= {each.name for each in left} - {
                each.name for each in select_by_gradients(left, pair, gradients, kinds)
            }
        return SplitLosses(frozenset(wrong), "")
    of_parts = " and ".join(f"{loss:.6g}" for loss in losses.values())
    return SplitLosses(
        frozenset(wrong - {SAMPLES_WEIGHT}),
        f"{whole.item():.6g} for {rows} samples, and no sum or mean of its losses for parts of them, {of_parts}",
    )


def losses_differ(
    whole: float, mean: float, losses: Iterable[float], kind: torch.dtype, types: set[torch.dtype]
) -> bool:
    """Return whether the loss of a batch and the mean over its parts differ by more than rounding.

    Args:
        whole: the loss of the batch.
        mean: the weighted mean of the losses of its parts.
        losses: all losses, from which the magnitude is taken.
        kind: the type of the losses.
        types: the types of the numbers from which the losses were computed.
    """
    if not math.isfinite(whole) or not math.isfinite(mean):
        return math.isfinite(whole) or math.isfinite(mean)
    coarsest, own = (max(torch.finfo(dtype).eps for dtype in of) for of in (types, {kind}))
    if coarsest <= _HALF_TOLERANCE:  # a loss in double precision may be computed from numbers in single precision
        own = max(own, coarsest)
    relative = max(
        _HALF_TOLERANCE if coarsest > _HALF_TOLERANCE else 0.0, own if own > _HALF_TOLERANCE else own ** (2 / 3)
    )
    return abs(whole - mean) > relative * max(abs(loss) for loss in losses if math.isfinite(loss))
