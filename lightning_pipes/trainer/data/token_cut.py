"""Micro-batches of equal cost, for batches of padded sequences of different lengths (DynaPipe, EuroSys 2024).

The sequences of a batch are sorted by length and divided into groups, so that the pipeline takes the least time. Each
group becomes a micro-batch, and its padding beyond its longest sequence is cropped. Everything follows from the batch,
so all ranks of a pipeline find the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn import functional

from lightning_pipes.engine.trees import map_tensors
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.trainer.data.batches import Path, find_block_masks, make_cutter, reorder_samples, sample_tensors
from lightning_pipes.trainer.data.length_cost import TOKENS_COST, LengthCost, divide_lengths

MicrobatchesBy = Literal["samples", "tokens", "auto"]
SAMPLES: MicrobatchesBy = "samples"
TOKENS: MicrobatchesBy = "tokens"
IGNORED_LABEL = -100
"""The label of entries that do not count, as in `torch.nn.functional.cross_entropy`."""
MIN_PADDING = 0.15
"""The share of padding in the tokens from which sorted sequences are worthwhile."""
MIN_FEWER_TOKENS = 0.05
"""The share of the tokens that sorted sequences must save."""
_MASK_NAME, _IDS_NAME = "attention_mask", "input_ids"
_ALIGNED_NAMES = (_IDS_NAME, "token_type_ids", "position_ids")
"""The names of tensors of Hugging Face models that have an entry for each token. Their padding may have any values."""


@dataclass(frozen=True)
class TokenCut:
    """The micro-batches of one batch of sequences.

    Attributes:
        batch: the batch, with its samples in the order of the micro-batches.
        rows: the number of samples.
        order: the numbers of the samples in the loaded batch, in the order of the micro-batches.
        spans: for each span of the plan with samples, the samples of its micro-batch.
        widths: for each micro-batch, the number of tokens to which its sequences are padded.
        width: the number of tokens to which the sequences of the batch are padded.
        leading: whether the padding precedes the tokens.
        names: the places in the batch of the tensors that have an entry for each token.
    """

    batch: Any
    rows: int
    order: tuple[int, ...]
    spans: Mapping[Span, Span]
    widths: Mapping[Span, int]
    width: int
    leading: bool
    names: frozenset[str]

    def make_cutter(self, batch: Any, samples: Collection[Path]) -> Callable[[Span], Any]:
        """Return a function that selects a micro-batch of `batch`, or of a copy of it, without its common padding.

        Other spans than the micro-batches keep their padding.
        """
        axes = {id(t): _token_axes(where, t, self.width) for where, t in self._aligned_tensors(batch)}

        def narrow(tensor: torch.Tensor, span: Span) -> tuple[slice, ...]:
            kept, own = self._kept_tokens(span), axes.get(id(tensor), ())
            return tuple(kept if axis in own else slice(None) for axis in range(1, max(own, default=0) + 1))

        return make_cutter(batch, self.rows, samples=samples, narrow=narrow)

    def _aligned_tensors(self, batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((where, t) for where, t in sample_tensors(batch, self.rows) if where in self.names)

    def _kept_tokens(self, span: Span) -> slice:
        width = self.widths.get(span, self.width)
        return slice(self.width - width, self.width) if self.leading else slice(width)

    def pad(self, tree: Any, span: Span) -> Any:
        """Return values of a micro-batch with zeros in place of the padding that was cropped.

        The tokens of tensors are on axis 1.
        """
        width = self.widths.get(span, self.width)
        left = self.width - width

        def pad_tensor(t: torch.Tensor) -> torch.Tensor:
            if t.ndim < 2 or t.shape[:2] != (span.rows, width):
                return t
            return functional.pad(t, [0, 0] * (t.ndim - 2) + ([left, 0] if self.leading else [0, left]))

        return map_tensors(pad_tensor, tree) if left else tree

    def describe_crop(self, span: Span) -> str:
        """Return a text about the crop of a micro-batch, for errors of the user's code."""
        return (
            f"The argument microbatches_by has cropped the sequences of this micro-batch from {self.width} to "
            f"{self.widths.get(span, self.width)} tokens, in {', '.join(sorted(self.names))}. If the code needs "
            "sequences of one length, or if one of these tensors has another meaning, leave microbatches_by out"
        )

    def restore_order(self, tree: Any) -> Any:
        """Return values of the whole batch with their samples in the order of the loaded batch."""
        return reorder_samples(tree, self.rows, np.argsort(self.order).tolist())

    def restore_samples(self, entries: Any) -> Any:
        """Return a tensor or a list with an entry for each sample in the order of the loaded batch."""
        numbers = np.argsort(self.order).tolist()
        return entries[numbers] if isinstance(entries, torch.Tensor) else [entries[number] for number in numbers]


@dataclass(frozen=True)
class _Lengths:
    """The lengths of the sequences of a batch.

    Attributes:
        numbers: the number of tokens of each sequence.
        width: the number of tokens to which the sequences are padded.
        leading: whether the padding precedes the tokens.
        names: the places in the batch of the tensors that have an entry for each token.
        source: the place in the batch of the tensor that shows the lengths.
        obstacle: the reason why padding before the tokens can't be cropped. Empty if it can, or if there is none.
    """

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    width: int
    leading: bool
    names: frozenset[str]
    source: str
    obstacle: str = ""


@dataclass(frozen=True)
class SequenceSample:
    """The sequences of a batch, of which samples of chosen lengths are taken for measurements.

    Attributes:
        batch: the batch, with the longest sequences first.
        rows: the number of sequences.
        order: the numbers of the sequences in the loaded batch.
        lengths: the lengths of the sequences.
        mean: the mean number of tokens to which sequences are padded in micro-batches.
    """

    batch: Any
    rows: int
    order: tuple[int, ...]
    lengths: _Lengths
    mean: int

    @property
    def longest(self) -> int:
        """The largest number of tokens."""
        return int(self.lengths.numbers.max())

    def take(self, rows: int, width: int) -> Any:
        """Return a batch of the longest sequences, cropped or padded to one length.

        Args:
            rows: the number of sequences.
            width: the number of tokens, at most `longest`.
        """
        span, known = Span(0, rows), self.lengths
        cut = TokenCut(self.batch, self.rows, self.order, {}, {span: width}, known.width, known.leading, known.names)
        return cut.make_cutter(self.batch, ())(span)


class TokenCounts(NamedTuple):
    """The numbers of tokens of batches.

    Attributes:
        own: the tokens without padding.
        padded: the tokens if all sequences of a batch are padded to one length.
        cropped: the tokens if sequences are sorted into micro-batches that are padded to their own lengths.
    """

    own: int = 0
    padded: int = 0
    cropped: int = 0

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of padding, without and with sorted sequences."""
        return (1 - self.own / self.padded, 1 - self.own / self.cropped) if self.own else (0.0, 0.0)

    @property
    def is_worth_sorting(self) -> bool:
        """Whether there is much padding, and sorted sequences save enough of it."""
        return self.shares[0] >= MIN_PADDING and self.cropped <= (1 - MIN_FEWER_TOKENS) * self.padded


class TokenCutter:
    """Sorts the sequences of the batches of a run into micro-batches of equal cost.

    Args:
        stages: the number of stages of the pipeline.
        least: the smallest number of sequences in a micro-batch, unless a batch has too few.
        cost: the cost of a sequence by its length.
        is_required: whether a batch that can't be divided by lengths is an error. Otherwise, it is divided by samples.

    Attributes:
        cost: the cost of a sequence by its length. All ranks of a pipeline must have the same cost.
    """

    def __init__(self, stages: int, least: int = 1, cost: LengthCost = TOKENS_COST, is_required: bool = True) -> None:
        self._is_required = is_required
        self._stages, self._least, self.cost = stages, least, cost
        self._source: str | None = None
        """The place of the tensor from which the lengths of the last batch were taken."""
        self._other_axes: set[str] = set()
        """The places of tensors whose axis 1 was not as long as the sequences in some batch."""
        self._has_warned = self._has_logged = False
        self._exceeded: LengthCost | None = None
        """The last cost that was used for longer sequences than were measured."""

    def cut(self, batch: Any, rows: int, spans: Sequence[Span], samples: Collection[Path]) -> TokenCut | None:
        """Return the micro-batches of a batch, or None if it is divided by samples.

        This is the case if all of its sequences have the same length.

        Args:
            batch: the batch.
            rows: the number of samples of the batch.
            spans: the spans of the plan that have samples, which gives the number of micro-batches.
            samples: the paths of lists that have one entry for each sample; see `take_samples`.

        Raises:
            PipelineError: no tensor of the batch shows the lengths of its sequences, or the batch contains a mask that
                can't be cropped.
        """
        lengths = self._find_lengths(batch, rows)
        if lengths is None:
            if not self._is_required:
                return None
            shapes = ", ".join(f"{where} of shape {tuple(t.shape)}" for where, t in sample_tensors(batch, rows))
            raise PipelineError(
                "microbatches_by='tokens' sorts the sequences of a batch by their lengths, but no tensor of the batch "
                f"shows them: {shapes or 'there is no tensor with an entry for each sample'}. It looked for a mask "
                "with an entry for each token, such as attention_mask, and for labels that are -100 where a sequence "
                "has ended. Add an attention_mask to the batch, as the collators of transformers do, or leave "
                "microbatches_by out"
            )
        if lengths.obstacle and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"The padding before the tokens of sequences is not cropped, because {lengths.obstacle}. "
                "Pad sequences at their end (tokenizer.padding_side = 'right')"
            )
        found = self._divide(lengths, rows, spans)
        if found is None:
            return None
        if any(lengths.width in mask.seq_lengths for mask in find_block_masks(batch)):
            if not self._is_required:
                return None
            raise PipelineError(
                f"the batch contains a BlockMask for {lengths.width} tokens, and microbatches_by='tokens' crops the "
                "sequences of each micro-batch to its own length. A BlockMask keeps its length. Call create_block_mask "
                "in training_step, for the tensors that it gets, or leave microbatches_by out"
            )
        order, widths = found
        longest = max(widths.values())
        if self.cost.longest and longest > self.cost.longest and self._exceeded is not self.cost:
            self._exceeded = self.cost
            rank_zero_info(
                f"A batch has sequences of {longest} tokens, and times were measured for up to {self.cost.longest}. "
                "The times of longer sequences are extrapolated"
            )
        if not self._has_logged:
            self._has_logged = True
            least, most = min(span.rows for span in widths), max(span.rows for span in widths)
            before, after = _count_tokens(lengths, rows, widths).shares
            rank_zero_info(
                f"Sequences are sorted into micro-batches by {lengths.source}: the first batch has {least} to {most} "
                f"sequences in a micro-batch, and {after:.0%} of its tokens are padding instead of {before:.0%}"
            )
        return TokenCut(
            reorder_samples(batch, rows, order, samples),
            rows,
            tuple(order),
            dict(zip(spans, widths, strict=True)),
            widths,
            lengths.width,
            lengths.leading,
            lengths.names,
        )

    def count_tokens(self, batch: Any, rows: int, spans: Sequence[Span]) -> TokenCounts | None:
        """Return the numbers of tokens of a batch, or None if the batch does not clearly show lengths.

        Args:
            batch: the batch.
            rows: the number of samples of the batch.
            spans: the spans of the plan that have samples.
        """
        lengths = self._find_lengths(batch, rows)
        if lengths is None or (_MASK_NAME not in lengths.source and len(lengths.names) < 2):
            return None
        found = self._divide(lengths, rows, spans)
        return None if found is None else _count_tokens(lengths, rows, found[1])

    def sample_sequences(self, batch: Any, rows: int, microbatches: int) -> SequenceSample | None:
        """Return the sequences of a batch for measurements, or None if the batch does not show different lengths.

        Args:
            batch: the batch.
            rows: the number of samples of the batch.
            microbatches: the number of micro-batches.
        """
        lengths = self._find_lengths(batch, rows)
        found = None if lengths is None else self._divide(lengths, rows, even_spans(rows, microbatches))
        if lengths is None or found is None:
            return None
        order, widths = found
        mean = -(-sum(span.rows * width for span, width in widths.items()) // rows)
        return SequenceSample(reorder_samples(batch, rows, order), rows, tuple(order), lengths, mean)

    def _divide(self, lengths: _Lengths, rows: int, spans: Sequence[Span]) -> tuple[list[int], dict[Span, int]] | None:
        """Return the order of the sequences, and the lengths of the micro-batches. None if all lengths are equal."""
        if len(spans) < 2 or lengths.numbers.min() == lengths.numbers.max():
            return None
        order = np.argsort(-lengths.numbers, kind="stable")  # as a batch that is too large for the memory fails early
        numbers = lengths.numbers[order]
        ends = divide_lengths(numbers, len(spans), self._stages, min(self._least, rows // len(spans)), self.cost)
        own = [Span(start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True)]
        return order.tolist(), {span: int(numbers[span.start]) for span in own}

    def _find_lengths(self, batch: Any, rows: int) -> _Lengths | None:
        """Return the lengths of the sequences, or None if no tensor shows them."""
        tensors = dict(sample_tensors(batch, rows))
        tables = {where: t for where, t in tensors.items() if _is_table(t)}
        for where, counted in self._list_sources(tables):
            width = counted.size(1)
            starts, ends = _token_ranges(counted)
            leading = bool(starts.max() > 0 and ends.min() == width)
            if where in self._label_names(tables) or not leading:
                starts, leading = torch.zeros_like(starts), False
            places = torch.arange(width, device=counted.device)
            outside = (places < starts[:, None]) | (places >= ends[:, None])
            self._other_axes.update(name for name, t in tensors.items() if t.ndim < 2 or width not in t.shape[1:])
            known = {name for name, t in tensors.items() if name not in self._other_axes}
            checked = {name: tables[name] for name in known & tables.keys() if not _is_aligned(name, where)}
            varying = _varying_names(checked, outside)
            inputs = [name for name, t in checked.items() if name != where and not t.is_floating_point()]
            if _MASK_NAME not in where and inputs and all(name in varying for name in inputs):
                continue  # the entries that are left out are not padding
            self._source = where
            obstacle = _why_not_leading(tables, starts) if leading else ""
            if obstacle:
                starts, leading = torch.zeros_like(starts), False
            numbers = (ends - starts).clamp(min=1).cpu().numpy()
            names = frozenset(name for name in known if name not in varying and _token_axes(name, tensors[name], width))
            return _Lengths(numbers, width, leading, names, where, obstacle)
        return None

    def _list_sources(self, tables: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that may show the lengths, the likeliest first, as masks of the tokens."""
        named = [where for where in tables if _MASK_NAME in where]
        masks = [w for w, t in tables.items() if w not in named and ("mask" in w or t.dtype is torch.bool)]
        for where in sorted(named, key=lambda each: each != self._source):
            mask = tables[where]
            adds = mask.is_floating_point() and bool((mask < 0).any())  # such a mask is added to the scores
            yield where, mask == 0 if adds else mask != 0
        for where in sorted(masks, key=lambda each: each != self._source):
            for counted in (tables[where] == 0, tables[where] != 0)[:: 1 if "pad" in where else -1]:
                starts, ends = _token_ranges(counted)
                if torch.equal(counted.sum(1), (ends - starts).clamp(min=0)):
                    yield where, counted
        for where in self._label_names(tables):
            yield where, tables[where] != IGNORED_LABEL

    def _label_names(self, tables: Mapping[str, torch.Tensor]) -> list[str]:
        return [
            where
            for where, t in tables.items()
            if t.dtype in (torch.int64, torch.int32)
            and (where == self._source or "label" in where or bool((t == IGNORED_LABEL).any()))
        ]


def _count_tokens(lengths: _Lengths, rows: int, widths: Mapping[Span, int]) -> TokenCounts:
    cropped = sum(span.rows * width for span, width in widths.items())
    return TokenCounts(int(lengths.numbers.sum()), rows * lengths.width, cropped)


def _is_table(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.layout is torch.strided and not tensor.is_nested


def _token_ranges(counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token of each sequence and the end of its last token. A sequence without tokens is empty."""
    width = counted.size(1)
    places = torch.arange(width, device=counted.device)
    ends = (counted * (places + 1)).amax(1)
    return torch.minimum(torch.where(counted, places, width).amin(1), ends), ends


def _token_axes(where: str, tensor: torch.Tensor, width: int) -> tuple[int, ...]:
    """Return the axes of a tensor that have an entry for each token."""
    if tensor.ndim < 2 or tensor.is_nested:
        return ()
    if "mask" in where and tensor.ndim > 2:  # a mask of pairs of tokens
        return tuple(axis for axis in range(max(1, tensor.ndim - 2), tensor.ndim) if tensor.size(axis) == width)
    return (1,) if tensor.size(1) == width else ()


def _is_aligned(where: str, source: str) -> bool:
    """Return whether the name of a tensor shows that the tensor has the lengths that `source` shows.

    `decoder_input_ids` has the lengths of `decoder_attention_mask`, but not those of `attention_mask`. Tokens may be
    unlike padding even if no label counts them, so labels do not show the lengths of `input_ids`.
    """
    names = [name for name in _ALIGNED_NAMES if name in where]
    if _MASK_NAME in source:
        return any(where.replace(name, _MASK_NAME) == source for name in names)
    return bool(names) and _IDS_NAME not in names


def _varying_names(tables: Mapping[str, torch.Tensor], outside: torch.Tensor) -> set[str]:
    """Return the names of the tensors that have several values in the padding."""
    checked = {where: t for where, t in tables.items() if t.shape == outside.shape}
    if not checked or not bool(outside.any()):
        return set()
    values = [t.to(torch.float64)[outside] for t in checked.values()]
    same = torch.stack([(v == v[0]).all() for v in values]).tolist()
    return {where for where, alike in zip(checked, same, strict=True) if not alike}


def _why_not_leading(tables: Mapping[str, torch.Tensor], starts: torch.Tensor) -> str:
    """Return the reason why results depend on the length of padding that precedes the tokens, or an empty text."""
    if not any("position" in where for where in tables):
        return "the batch has no position_ids, so the positions of tokens depend on the padding"
    rows = torch.arange(len(starts), device=starts.device)
    for where, t in tables.items():
        if "label" in where and bool((t[rows, starts] != IGNORED_LABEL).any()):
            return f"{where} counts the first token of sequences, which is predicted from the padding before it"
    return ""
