"""Batches of the engine, and operations that cut, join and buffer the rows of their pytrees.

A tensor holds rows if the length of its axis 0 is the number of samples in the span. This must be true for all
available spans, and the sender must not have marked the tensor as `Unsampled`. Every other leaf on an edge, such as a
mask, a flag or None, belongs to a whole micro-batch. If such leaves, for example an auxiliary loss, have different
values in micro-batches that are joined, their average over rows is used, and each micro-batch receives its share of the
gradient. If the sender and the receiver cut a batch in the same way, nothing is copied here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.trees import flatten_message
from lightning_pipes.ir import LayerUse, PlanError, Span


@dataclass(eq=False)
class Item:
    """One batch of one job on one rank.

    Attributes:
        number: the number of the batch since training began, counted by job. Random numbers depend on it, so that they
            repeat after training is resumed.
        rows: the number of samples in the batch. It is smaller than in the plan if the last batch is short.
        data: data for the bodies of this rank's stages; the engine does not read it.
        job: the job to which the batch belongs.
        training: whether forward and backward are run, instead of forward only without gradients.
        use: the layers that the batch uses, and those of them that it steps; None means all layers.
        own_spans: the samples of each span of the plan, if the batch has micro-batches of other sizes than the plan.
            Their order is the order of the plan. Empty if the batch is cut as in the plan.
    """

    number: int
    rows: int
    data: Any = None
    job: int = 0
    training: bool = True
    use: LayerUse | None = None
    own_spans: Mapping[Span, Span] = field(default_factory=dict)

    def samples_of(self, span: Span) -> Span:
        """Return the samples of this batch in a span of the plan. The result is empty if the batch is too short."""
        return locate_span(span, self.rows, self.own_spans)


def locate_span(span: Span, rows: int, own_spans: Mapping[Span, Span]) -> Span:
    """Return the samples in a span of the plan, for a batch of `rows` samples with these `Item.own_spans`."""
    clipped = span.clip_to(rows)
    return own_spans[span] if own_spans and clipped.rows else clipped


class Unsampled(NamedTuple):
    """A tensor on an edge, or its gradient, that belongs to a whole micro-batch regardless of its length on axis 0."""

    tensor: Any


class MicrobatchLeaf(ABC):
    """A leaf on an edge that describes a whole micro-batch, and not its samples."""

    @abstractmethod
    def check_joined(self, others: Sequence[Any]) -> None:
        """Check that this leaf also describes the micro-batches of the `others` after they are joined with this one."""


def is_unsampled(node: Any) -> bool:
    return isinstance(node, Unsampled)


def _unwrap(leaf: Any) -> Any:
    return leaf.tensor if is_unsampled(leaf) else leaf


def mark_unsampled(tree: Any, ids: Collection[int]) -> Any:
    """Return the tree with the tensors of these ids marked as `Unsampled`."""
    return pytree.tree_map_only(torch.Tensor, lambda t: Unsampled(t) if id(t) in ids else t, tree) if ids else tree


def remove_marks(tree: Any) -> tuple[Any, frozenset[int]]:
    """Return the tree without the marks of `Unsampled` tensors, and the ids of the tensors that were marked."""
    if isinstance(tree, torch.Tensor):
        return tree, frozenset()
    leaves, rebuild = flatten_message(tree, is_unsampled)
    ids = frozenset(id(leaf.tensor) for leaf in leaves if type(leaf) is Unsampled)
    return (rebuild([*map(_unwrap, leaves)]), ids) if ids else (tree, ids)


def take_rows(tree: Any, span: Span, part: Span, apart: Collection[int] = ()) -> Any:
    """Return some rows of a tree. Leaves without rows are repeated, and tensors without rows are marked as `Unsampled`.

    Args:
        tree: a tree that holds the rows `span`.
        span: the rows of the tree.
        part: the rows to return.
        apart: positions of leaves that hold no rows, although their length may be the number of rows in this span.

    Raises:
        PlanError: the tree contains a list with one tensor for each sample.
    """
    if part == span:
        return tree
    _refuse_lists(tree, span)
    rows = slice(part.start - span.start, part.stop - span.start)
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_unsampled)
    for at, leaf in enumerate(leaves):
        if at not in apart and _holds_rows(leaf, span):
            leaves[at] = leaf[rows]
        elif isinstance(leaf, torch.Tensor):
            leaves[at] = Unsampled(leaf)
    return pytree.tree_unflatten(leaves, spec)


def join_rows(pieces: Sequence[tuple[Span, Any]], apart: Collection[int] = ()) -> Any:
    """Join the trees of neighboring spans.

    If the values of a floating-point tensor without rows differ, they are averaged over rows. Other leaves without rows
    are taken from the first tree. Tensors without rows are marked as `Unsampled`, because they may have the length of
    the joined span.

    Args:
        pieces: the spans with their trees.
        apart: positions of leaves that hold no rows; see `take_rows`.

    Raises:
        PlanError: the rows can't be joined, because the trees differ in structure, contain lists with one tensor for
            each sample, or contain different values without rows that can't be averaged.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    for span, tree in pieces:
        _refuse_lists(tree, span)
    leaves, spec = _flatten_same_structure(pieces)
    joined: list[Any] = []
    for at, column in enumerate(leaves):
        rows = at not in apart and all(_holds_rows(leaf, span) for leaf, (span, _) in zip(column, pieces, strict=True))
        if rows:
            joined.append(torch.cat(list(column)))
            continue
        value = _average(list(map(_unwrap, column)), [span for span, _ in pieces])
        joined.append(Unsampled(value) if isinstance(value, torch.Tensor) else value)
    return pytree.tree_unflatten(joined, spec)


def _average(column: Sequence[Any], spans: Sequence[Span]) -> Any:
    """Return the average over rows of values without rows, or the first value if all are equal or not tensors."""
    first, tensors = column[0], [leaf for leaf in column if isinstance(leaf, torch.Tensor)]
    if isinstance(first, MicrobatchLeaf):
        first.check_joined(column[1:])
    if len(tensors) < len(column) or all(t is first or torch.equal(t, first) for t in tensors):
        return first
    if any(t.shape != first.shape for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise PlanError(
            f"an edge carries tensors of the shapes {shapes} for {', '.join(map(str, spans))}, which do not have one "
            "row for each sample on axis 0. To be cut differently on the two ends of the edge, tensors need their "
            "samples on axis 0, or the same shape for every micro-batch. Move the samples there, or use a schedule "
            "that cuts a batch equally everywhere, such as '1f1b'"
        )
    if not (first.is_floating_point() or first.is_complex()):
        raise PlanError(
            f"an edge carries a {first.dtype} tensor of shape {tuple(first.shape)} without samples, whose values for "
            f"{', '.join(map(str, spans))} differ, and the next stage needs one for all of these samples. Return it "
            "with an entry for each sample, or use a schedule that cuts a batch equally everywhere, such as '1f1b'"
        )
    rows = sum(span.rows for span in spans)
    shares = [t * (span.rows / rows) for t, span in zip(tensors, spans, strict=True)]
    return torch.stack(shares).sum(0)


def take_gradient_rows(tree: Any, span: Span, part: Span, apart: Collection[int] = ()) -> Any:
    """Take rows as `take_rows` does, but give each part only its share of a gradient without rows.

    The shares add up to the gradient, so that it counts once.
    """
    if part == span:
        return tree
    rows = slice(part.start - span.start, part.stop - span.start)
    share = part.rows / span.rows
    return [
        None if g is None else g[rows] if at not in apart and _holds_rows(g, span) else Unsampled(_unwrap(g) * share)
        for at, g in enumerate(tree)
    ]


def join_gradient_rows(pieces: Sequence[tuple[Span, Any]], apart: Collection[int] = ()) -> Any:
    """Join trees as `join_rows` does, but add up gradients without rows. A missing gradient counts as zero."""
    if len(pieces) == 1:
        return pieces[0][1]
    joined: list[Any] = []
    for at, column in enumerate(zip(*(tree for _, tree in pieces), strict=True)):
        present = [(span, g) for g, (span, _) in zip(column, pieces, strict=True) if g is not None]
        if not present:
            joined.append(None)
        elif at not in apart and all(_holds_rows(g, span) for span, g in present):
            like = present[0][1]
            joined.append(
                torch.cat(
                    [
                        like.new_zeros(span.rows, *like.shape[1:]) if g is None else g
                        for g, (span, _) in zip(column, pieces, strict=True)
                    ]
                )
            )
        else:
            joined.append(Unsampled(sum(_unwrap(g) for _, g in present)))
    return joined


def _holds_rows(leaf: Any, span: Span) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == span.rows


def _refuse_lists(tree: Any, span: Span) -> None:
    """Raise PlanError if the tree contains a list with one tensor for each sample and the tensors differ in shape.

    The rows of such a list can't be taken or joined, because gradients arrive without the list.
    """

    def holds_samples(node: Any) -> bool:
        if not isinstance(node, (list, tuple)) or len(node) != span.rows:
            return False
        shapes = [leaf.shape for leaf in node if isinstance(leaf, torch.Tensor) and not _holds_rows(leaf, span)]
        return len(shapes) == len(node) and len(set(shapes)) > 1

    if any(map(holds_samples, pytree.tree_leaves(tree, is_leaf=holds_samples))):
        raise PlanError(
            f"an edge carries a list with a tensor for each of {span.rows} samples, which can't be cut differently on "
            "its two ends: pad the tensors and stack them, or take a schedule that cuts a batch equally everywhere"
        )


def _flatten_same_structure(pieces: Sequence[tuple[Span, Any]]) -> tuple[list[tuple[Any, ...]], Any]:
    flat = [pytree.tree_flatten(tree, is_leaf=is_unsampled) for _, tree in pieces]
    spec = flat[0][1]
    for (span, _), (_, other) in zip(pieces, flat, strict=True):
        if other != spec:
            raise PlanError(
                f"an edge carries {spec} for {pieces[0][0]} and {other} for {span}: to be cut differently on its two "
                "ends it must carry the same structure for every micro-batch"
            )
    return list(zip(*(leaves for leaves, _ in flat), strict=True)), spec


class SpanBuffer:
    """Stores rows until they are used. Rows can be put and taken in different spans."""

    def __init__(self, gradients: bool) -> None:
        self._pieces: dict[Span, Any] = {}
        self._left: dict[Span, int] = {}  # remaining rows of pieces that were taken in part
        self._apart: set[int] = set()  # positions of tensors that hold no rows in at least one piece
        self._take = take_gradient_rows if gradients else take_rows
        self._join = join_gradient_rows if gradients else join_rows

    def put(self, span: Span, tree: Any) -> None:
        """Store a tree that holds the rows `span`."""
        self._pieces[span] = tree

    def take_span(self, span: Span) -> Any:
        """Remove the rows `span`, and return them as one tree.

        Raises:
            PlanError: some of the rows are missing.
        """
        if span in self._pieces:  # the usual case: nothing to cut or join
            self._left.pop(span, None)
            return self._pieces.pop(span)
        for held, tree in self._pieces.items():
            leaves = enumerate(pytree.tree_leaves(tree, is_leaf=is_unsampled))
            self._apart |= {at for at, x in leaves if isinstance(x, torch.Tensor) and not _holds_rows(x, held)}
        parts = []
        for held in sorted(held for held in self._pieces if held.overlaps(span)):
            part = Span(max(held.start, span.start), min(held.stop, span.stop))
            parts.append((part, self._take(self._pieces[held], held, part, self._apart)))
            self._left[held] = self._left.get(held, held.rows) - part.rows
        if sum(part.rows for part, _ in parts) != span.rows:
            raise PlanError(f"samples {span} are needed and only {[p for p, _ in parts]} are there")
        for held in [held for held, left in self._left.items() if not left]:
            del self._pieces[held], self._left[held]
        return self._join(parts, self._apart)
