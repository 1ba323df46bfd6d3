"""Forward and backward of one micro-batch on one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.spans import Unsampled, remove_marks
from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.private_torch import FunctionNode, like_root, run_backward
from lightning_pipes.ir import PlanError, Span

Flags = tuple[bool, ...]
"""For each tensor of a tree, in order, whether a gradient for it is wanted."""


Root = torch.Tensor | GradientEdge


def _root(tensor: torch.Tensor) -> Root:
    """Return the root of backward for `tensor`, without keeping its data alive."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, FunctionNode):
        return tensor  # a leaf has no node, and one written in Python does not keep the graph alive
    return GradientEdge(node, tensor.output_nr)


@dataclass(eq=False)
class SavedForward:
    """The tensors that a forward saves for its backward.

    Attributes:
        span: the samples.
        version: the weights that were read; None for the live ones.
        outputs: roots of backward, one for each output tensor flagged to the receiver; None where no gradient flows.
            Roots are edges of the graph where possible, so that an output without other users is freed once sent.
        entered: received tensors with gradients that the sender wants.
        unsampled: positions of those among them that the sender has marked as `Unsampled`.
        received: the received tree; kept only for recomputation.
        sent_flags: the flags sent before the graph existed; for recomputation.
    """

    span: Span
    version: WeightVersion | None
    outputs: list[Root | None] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    unsampled: frozenset[int] = frozenset()
    received: Any = None
    recompute: bool = False
    sent_flags: Flags = ()


def enter_stage(tree: Any, flags: Flags, saved: SavedForward) -> Any:
    """Return the tree with tensors that want gradients as leaves of a graph."""
    if isinstance(tree, torch.Tensor):
        if flags[0]:
            if tree.requires_grad:  # entered before: it may run twice
                tree = tree.detach()
            saved.entered = [tree.requires_grad_()]
        return tree
    if not any(flags):
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    number = 0
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if flags[number]:
                leaves[at] = leaf.detach().requires_grad_()
                saved.entered.append(leaves[at])
            number += 1
    tree = pytree.tree_unflatten(leaves, spec)
    _, marked = remove_marks(tree)
    saved.unsampled = frozenset(at for at, tensor in enumerate(saved.entered) if id(tensor) in marked)
    return tree


def leave_stage(tree: Any, saved: SavedForward, flags: Flags | None = None) -> tuple[Any, Flags]:
    """Return the tree detached from the graph, and the flags of tensors that want gradients; saves the roots of
    backward.

    `flags` that were sent before the graph existed override the tensors' own.

    Raises:
        PlanError: the tree has another number of tensors than flags that were sent.
    """
    if isinstance(tree, torch.Tensor) and flags is None:
        if not tree.requires_grad:
            return tree, (False,)
        saved.outputs.append(_root(tree))
        return tree.detach(), (True,)
    leaves, spec = pytree.tree_flatten(tree)
    found = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if flags is not None and found != len(flags):
        raise PlanError(
            f"a stage ran the forward of samples {saved.span.start}:{saved.span.stop} a second time for its gradients, "
            f"and sent {found} tensors in place of {len(flags)}. Both runs have to give the same. Let layers depend on "
            "their inputs and buffers only, or leave recompute=True out"
        )
    own: list[bool] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            wanted = leaf.requires_grad if flags is None else flags[len(own)]
            own.append(wanted)
            if wanted:
                saved.outputs.append(_root(leaf) if leaf.requires_grad else None)
            leaves[at] = leaf.detach()
    return pytree.tree_unflatten(leaves, spec), tuple(own)


def may_want_gradients(tree: Any) -> Flags:
    """Return for each tensor of a tree that was computed without a graph whether a gradient could exist."""
    return tuple(
        leaf.is_floating_point() or leaf.is_complex()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    )


def input_gradients(saved: SavedForward) -> list[Any]:
    """Take the gradients to send back: one entry per tensor that the sender flagged, None where no gradient flowed."""
    gradients = [
        Unsampled(t.grad) if at in saved.unsampled and t.grad is not None else t.grad
        for at, t in enumerate(saved.entered)
    ]
    for t in saved.entered:
        t.grad = None  # a later pass over the graph must not add to what is on its way
    return gradients


def backward(records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool) -> None:
    """Run the full backward of several forwards at once; gradients add to the parameters and to the input tensors."""
    roots, gradients = roots_of(records, last)
    if roots and all(g is not None and g.device.type == "cpu" for g in gradients):
        run_backward(roots, gradients)  # type: ignore[arg-type]  # none is missing
    elif roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # tensors and edges may be mixed


def roots_of(
    records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool
) -> tuple[list[Root], list[torch.Tensor | None]]:
    """Return the roots of backward and their gradients; None stands for a value that is no scalar loss."""
    roots: list[Root] = []
    gradients: list[torch.Tensor | None] = []
    for saved, received in records:
        for number, edge in enumerate(saved.outputs):
            if edge is None:
                continue
            gradient = _loss_gradient(edge) if last else received[number]
            if last or gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
    return roots, gradients


def _loss_gradient(loss: Root) -> torch.Tensor | None:
    """Return the gradient of a loss with respect to itself; None where autograd defines none."""
    like = like_root(loss)
    if math.prod(like.shape) != 1 or not like.dtype.is_floating_point:
        return None
    return torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
