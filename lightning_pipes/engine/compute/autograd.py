"""Forward and backward of one micro-batch on one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.private_torch import FunctionNode, like_root, run_backward
from lightning_pipes.ir import Span

Flags = tuple[bool, ...]
"""For each tensor of a tree, in order, whether a gradient for it is wanted."""


Root = torch.Tensor | GradientEdge


def _root(tensor: torch.Tensor) -> Root:
    """Where to start backward instead of from `tensor`, without keeping its data alive."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, FunctionNode):
        return tensor  # a leaf has no node, and one written in Python does not keep the graph alive
    return GradientEdge(node, tensor.output_nr)


@dataclass(eq=False)
class SavedForward:
    """The tensors that a forward leaves for its backward.

    Attributes:
        span: the samples.
        version: the weights that were read; None for the live ones.
        outputs: where backward starts, one entry per output tensor that the receiver was told to want a gradient
            for; None where none flows after all. Edges of the graph where possible, not the tensors, so that an
            output nobody saved is freed when it has been sent.
        entered: the tensors that came in and whose gradients the sender wants.
        received: what came in; kept only for recomputation.
        sent_flags: what the receiver was told before the graph existed; for recomputation.
    """

    span: Span
    version: WeightVersion | None
    outputs: list[Root | None] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    received: Any = None
    recompute: bool = False
    sent_flags: Flags = ()


def enter_stage(tree: Any, flags: Flags, saved: SavedForward) -> Any:
    """The tree with those tensors that want gradients made leaves of a graph."""
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
    return pytree.tree_unflatten(leaves, spec)


def leave_stage(tree: Any, saved: SavedForward, flags: Flags | None = None) -> tuple[Any, Flags]:
    """The tree cut off from the graph, and which of its tensors want gradients; remembers where backward starts.

    With `flags`, which were sent before the graph existed, those tensors count that they name.
    """
    if isinstance(tree, torch.Tensor) and flags is None:
        if not tree.requires_grad:
            return tree, (False,)
        saved.outputs.append(_root(tree))
        return tree.detach(), (True,)
    leaves, spec = pytree.tree_flatten(tree)
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
    """For each tensor of a tree that was made without a graph, whether a gradient for it could exist."""
    return tuple(
        leaf.is_floating_point() or leaf.is_complex()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    )


def input_gradients(saved: SavedForward) -> list[Any]:
    """Takes the gradients to send back: one entry per tensor that the sender marked, None where nothing flowed."""
    gradients = [t.grad for t in saved.entered]
    for t in saved.entered:
        t.grad = None  # a later pass over the graph must not add to what is on its way
    return gradients


def backward(records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool) -> None:
    """Full backward of several forwards at once; gradients add to the parameters and to what entered."""
    roots, gradients = roots_of(records, last)
    if roots and all(g is not None and g.device.type == "cpu" for g in gradients):
        run_backward(roots, gradients)  # type: ignore[arg-type]  # none is missing
    elif roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # tensors and edges may be mixed


def roots_of(
    records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool
) -> tuple[list[Root], list[torch.Tensor | None]]:
    """Where backward starts, and with which gradients; None stands for that of what is no loss and is taken for one."""
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
    """The gradient of a loss by itself; None for what has none by itself, as autograd says."""
    like = like_root(loss)
    if math.prod(like.shape) != 1 or not like.dtype.is_floating_point:
        return None
    return torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
