"""Detection of the axis of samples in tensors by comparing a whole batch with its micro-batches.

In most tensors, axis 0 is the axis of samples. In transformers that put the sequence first, it is axis 1. Two augmented
views of a batch may be concatenated on axis 0. A mask or a rotary table has no samples, even if its number of rows is
the number of samples of a micro-batch. The shapes for two batch sizes are compared: the axis of samples is the axis
whose length depends on the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine import trees
from lightning_pipes.ir import Span
from lightning_pipes.trainer.data.batches import weighted_sum

_MAX_GUESSES = 6
"""The maximum number of combinations of layouts that are tried if only the shapes for micro-batches are known."""


class Layout(NamedTuple):
    """The position of samples in a tensor.

    Attributes:
        axis: the axis of samples, which may have several entries for each sample; None for a tensor that all
            micro-batches share.
        groups: the number of groups along the axis, each of which has entries for all samples, such as the views of a
            batch.
        before: the number of entries at the start of the axis that all micro-batches share.
        after: the number of entries at the end of the axis that all micro-batches share.
    """

    axis: int | None = 0
    groups: int = 1
    before: int = 0
    after: int = 0

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of the micro-batches, in their order, to the tensor of the whole batch."""
        if self.axis is None:
            return parts[0]
        if self.groups == 1 and not self.before + self.after:
            return torch.cat([*parts], self.axis)  # keeps the memory format
        cut = [self._of_samples(part) for part in parts]
        joined = torch.cat(cut, self.axis + 1).flatten(self.axis, self.axis + 1)
        ends = [parts[0].narrow(self.axis, 0, self.before), joined]
        ends += [parts[0].narrow(self.axis, parts[0].size(self.axis) - self.after, self.after)]
        return torch.cat(ends, self.axis) if self.before or self.after else joined

    def split(self, whole: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Split the tensor of a whole batch into the tensors of micro-batches.

        The layout must not have entries that all micro-batches share.

        Args:
            whole: the tensor of the whole batch.
            lengths: the length of the axis of samples of each micro-batch.
        """
        assert self.axis is not None
        sizes = [length // self.groups for length in lengths]
        found = torch.split(self._of_samples(whole), sizes, self.axis + 1)
        return [part.flatten(self.axis, self.axis + 1) for part in found]

    def select_from(self, whole: torch.Tensor, first: int, rows: int) -> torch.Tensor | None:
        """Return the entries of the last samples of a batch, with a separate axis for the groups.

        Args:
            whole: the tensor of the whole batch.
            first: the first sample.
            rows: the number of samples in the batch.

        Returns:
            the entries of the samples `first` to `rows - 1`; None if the number of entries is not a multiple of `rows`.
            A tensor that all micro-batches share is returned unchanged.
        """
        if self.axis is None:
            return whole
        found = self._of_samples(whole)
        length = found.size(self.axis + 1)
        if length % rows:
            return None
        return found.narrow(self.axis + 1, length // rows * first, length // rows * (rows - first))

    def _of_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the entries of samples, with an additional axis for the groups before the axis of samples."""
        assert self.axis is not None
        length = tensor.size(self.axis) - self.before - self.after
        inner = tensor.narrow(self.axis, self.before, length)
        shape = inner.shape
        return inner.reshape(*shape[: self.axis], self.groups, length // self.groups, *shape[self.axis + 1 :])


def list_layouts(whole: Sequence[int], parts: Sequence[Sequence[int]], spans: Sequence[Span]) -> list[Layout]:
    """Return the possible layouts of a tensor according to its shapes.

    No layout is returned if the shapes differ on several axes, as for a matrix of all pairs of samples, or if the
    length of the axis does not increase with the number of samples.

    Args:
        whole: the shape for the whole batch.
        parts: the shape for each micro-batch.
        spans: the samples of each micro-batch.
    """
    if any(len(part) != len(whole) for part in parts):
        return []
    axes = [axis for axis, length in enumerate(whole) if any(part[axis] != length for part in parts)]
    if len(axes) != 1:
        return [] if axes else [Layout(None)]
    axis, rows = axes[0], sum(span.rows for span in spans)
    lengths = [part[axis] for part in parts]
    found = [Layout(axis)] if sum(lengths) == whole[axis] else []
    entries, rest = divmod(whole[axis] - lengths[0], rows - spans[0].rows)
    shared = whole[axis] - entries * rows
    is_regular = all(length == entries * s.rows + shared for length, s in zip(lengths, spans, strict=True))
    if rest or entries < 1 or shared < 0 or not is_regular:
        return found
    for groups in (n for n in range(1, entries + 1) if entries % n == 0):
        found += [Layout(axis, groups, 0, shared)] + ([Layout(axis, groups, shared, 0)] if shared else [])
    return list(dict.fromkeys(found))


def is_padded(whole: Sequence[int], parts: Sequence[Sequence[int]]) -> bool:
    """Return whether a tensor seems to be padded to the longest sequence of its batch or micro-batch.

    This is assumed if the lengths of an axis differ between micro-batches, and the length for the whole batch is the
    maximum of these lengths. Such tensors can't be compared.
    """
    return any(
        length == max(part[axis] for part in parts) and any(part[axis] != length for part in parts)
        for axis, length in enumerate(whole)
        if all(len(part) == len(whole) for part in parts)
    )


class TensorComparison(NamedTuple):
    """The comparison of a tensor of a whole batch with the tensors of its micro-batches.

    Attributes:
        whole: the tensor of the whole batch.
        parts: the tensors of its micro-batches.
        layouts: the possible layouts. If a layout reproduces the whole tensor, it is the first one.
        is_different: whether no layout reproduces the whole tensor.
    """

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    layouts: list[Layout]
    is_different: bool

    @property
    def is_decidable(self) -> bool:
        """Whether the tensors can be compared."""
        return bool(self.layouts) or not is_padded(self.whole.shape, [part.shape for part in self.parts])


def compare_tensors(
    whole: Any, parts: Sequence[Any], spans: Sequence[Span], differ: Callable[[torch.Tensor, torch.Tensor], bool]
) -> list[TensorComparison] | None:
    """Compare each tensor of a whole batch with the tensors of its micro-batches.

    Args:
        whole: a tree of tensors for the whole batch.
        parts: the corresponding tree for each micro-batch.
        spans: the samples of each micro-batch.
        differ: returns whether the values of two tensors of one shape differ.

    Returns:
        one comparison for each tensor of the flattened `whole`; None if the structures of the trees differ, as for
        lists with one entry for each sample.
    """
    leaves, spec = trees.flatten(whole)
    flat = [trees.flatten(part) for part in parts]
    if any(other != spec for _, other in flat):
        return None
    found = []
    for leaf, *others in zip(leaves, *(entries for entries, _ in flat), strict=True):
        if not isinstance(leaf, torch.Tensor) or not all(isinstance(other, torch.Tensor) for other in others):
            continue
        if leaf.is_sparse:
            found.append(TensorComparison(leaf, others, [Layout()], False))
            continue
        possible = list_layouts(leaf.shape, [other.shape for other in others], spans)
        right = next((each for each in possible if not _differs(leaf, others, each, differ)), None)
        layouts = possible if right is None else [right, *(each for each in possible if each != right)]
        found.append(TensorComparison(leaf, others, layouts, right is None))
    return found


def _differs(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    layout: Layout,
    differ: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    if whole.dtype != parts[0].dtype:
        return False
    if layout.axis is None:
        return any(differ(whole, part) for part in parts)
    return differ(whole, layout.join(parts))


def join_tensors(parts: Sequence[Any], spans: Sequence[Span], layouts: Sequence[Layout]) -> Any:
    """Join the values of the micro-batches to the values of the whole batch.

    Floating-point tensors without samples that differ between micro-batches, such as auxiliary losses, are averaged
    over the samples. For objects that are not tensors, the object of the first micro-batch is returned.

    Args:
        parts: a tree of tensors for each micro-batch.
        spans: the samples of each micro-batch.
        layouts: the layout of each tensor.
    """
    given, rows = iter(layouts), sum(span.rows for span in spans)

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            return first
        layout = next(given)
        if layout.axis is None and first.is_floating_point() and not all(torch.equal(t, first) for t in leaves[1:]):
            return weighted_sum(leaves, [span.rows / rows for span in spans])
        return layout.join(leaves)

    return trees.close_objects(pytree.tree_map(joined, *map(trees.open_objects, parts)))


def guess_layouts(parts: Sequence[Any], spans: Sequence[Span]) -> Iterator[list[Layout]]:
    """Yield combinations of layouts of all tensors that are compatible with the shapes for micro-batches.

    The most common layouts are yielded first. Nothing is yielded if the micro-batches have different structures.

    Args:
        parts: a tree of tensors for each micro-batch.
        spans: the samples of each micro-batch.
    """
    flat = [trees.flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        return
    every = [
        _guess(leaves, spans) or [Layout(None)]
        for leaves in zip(*(entries for entries, _ in flat), strict=True)
        if isinstance(leaves[0], torch.Tensor)
    ]
    for number in range(min(_MAX_GUESSES, max(map(len, every), default=1))):
        yield [possible[min(number, len(possible) - 1)] for possible in every]


def _guess(parts: Sequence[torch.Tensor], spans: Sequence[Span]) -> list[Layout]:
    first = parts[0]
    if any(part.ndim != first.ndim for part in parts):
        return []
    found = []
    for axis in range(first.ndim):
        others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
        entries, rest = divmod(first.size(axis), spans[0].rows)
        is_regular = all(part.size(axis) == entries * s.rows for part, s in zip(parts, spans, strict=True))
        if len(others) == 1 and not rest and entries and is_regular:
            found += [Layout(axis, groups) for groups in range(1, entries + 1) if entries % groups == 0]
    found.sort(key=lambda layout: (first.size(layout.axis or 0) != spans[0].rows, layout.axis, layout.groups))
    is_shared = all(part.shape == first.shape and torch.equal(part, first) for part in parts[1:])
    return [Layout(None), *found] if is_shared else found
