"""Forward and backward of a micro-batch on one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.spans import Unsampled, is_unsampled
from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.private_torch import FunctionNode, like_root, run_backward
from lightning_pipes.engine.trees import flatten_message
from lightning_pipes.ir import PlanError, Span

Flags = tuple[bool, ...]
"""For each tensor of a tree, in order, whether its sender wants a gradient."""


Root = torch.Tensor | GradientEdge


def _root(tensor: torch.Tensor) -> Root:
    """Return the root of backward for `tensor`, without keeping its data alive if possible."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, FunctionNode):
        return tensor  # a leaf has no node, and a node written in Python does not keep the graph alive
    return GradientEdge(node, tensor.output_nr)


@dataclass(eq=False)
class SavedForward:
    """The tensors that a forward saves for its backward.

    Attributes:
        span: the samples of the forward.
        version: the weights that were read; None for the live weights.
        outputs: the roots of backward, one for each output tensor whose flag was sent to the receiver; None where no
            gradient flows. Roots are edges of the graph if possible, so that an output that has no other users is freed
            after it is sent.
        entered: the received tensors whose gradients the sender wants.
        unsampled: the positions in `entered` of tensors that the sender has marked as `Unsampled`.
        received: the received tree with its flags; kept only for recomputation.
        recompute: whether forward runs again before backward.
        has_graph: whether the graph exists, which refers to the weights. With `recompute`, only the second run of the
            forward creates it.
        sent_flags: the flags that were sent before the graph existed; used only for recomputation.
    """

    span: Span
    version: WeightVersion | None
    outputs: list[Root | None] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    unsampled: frozenset[int] = frozenset()
    received: Any = None
    recompute: bool = False
    sent_flags: Flags = ()
    has_graph: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_graph = not self.recompute


def enter_stage(tree: Any, flags: Flags, saved: SavedForward) -> Any:
    """Return the tree with leaves of a new graph in place of the tensors that need gradients.

    Args:
        tree: the received tree.
        flags: for each of its tensors, whether its gradient is wanted.
        saved: receives the leaves and their marks.
    """
    if isinstance(tree, torch.Tensor):
        if flags[0]:
            if tree.requires_grad:  # the tensor was entered before, because forward may run twice
                tree = tree.detach()
            saved.entered = [tree.requires_grad_()]
        return tree
    if not any(flags):
        return tree
    leaves, rebuild = flatten_message(tree, is_unsampled)
    number, unsampled = 0, []
    for at, leaf in enumerate(leaves):
        is_marked = type(leaf) is Unsampled
        tensor = leaf.tensor if is_marked else leaf
        if isinstance(tensor, torch.Tensor):
            if flags[number]:
                entered = tensor.detach().requires_grad_()
                leaves[at] = Unsampled(entered) if is_marked else entered
                unsampled += [len(saved.entered)] * is_marked
                saved.entered.append(entered)
            number += 1
    saved.unsampled = frozenset(unsampled)
    return rebuild(leaves)


def leave_stage(tree: Any, saved: SavedForward, flags: Flags | None = None) -> tuple[Any, Flags]:
    """Return the tree, detached from the graph, with flags for the tensors that require gradients.

    Args:
        tree: the output of the stage.
        saved: receives the roots of backward.
        flags: flags that were sent before the graph existed, which are used instead of the tensors' own flags.

    Raises:
        PlanError: the number of tensors differs from the number of flags that were sent.
    """
    if isinstance(tree, torch.Tensor) and flags is None:
        if not tree.requires_grad:
            return tree, (False,)
        saved.outputs.append(_root(tree))
        return tree.detach(), (True,)
    leaves, rebuild = flatten_message(tree)
    found = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if flags is not None and found != len(flags):
        raise PlanError(
            f"a stage ran the forward of samples {saved.span.start}:{saved.span.stop} a second time to compute their "
            f"gradients, and its output had {found} tensors instead of {len(flags)}. Both runs must return the same "
            "output. Make layers depend only on their inputs and buffers, or remove recompute=True"
        )
    own: list[bool] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            wanted = leaf.requires_grad if flags is None else flags[len(own)]
            own.append(wanted)
            if wanted:
                saved.outputs.append(_root(leaf) if leaf.requires_grad else None)
            leaves[at] = leaf.detach()
    return rebuild(leaves), tuple(own)


def may_want_gradients(tree: Any) -> Flags:
    """Return, for each tensor of a tree that was computed without a graph, whether it can have a gradient."""
    return tuple(
        leaf.is_floating_point() or leaf.is_complex()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    )


def input_gradients(saved: SavedForward) -> list[Any]:
    """Remove and return the gradients of the received tensors, which are sent to the previous stage.

    Returns:
        One entry for each tensor whose gradient the sender wants; None if no gradient has flowed to it.
    """
    gradients = [
        Unsampled(t.grad) if at in saved.unsampled and t.grad is not None else t.grad
        for at, t in enumerate(saved.entered)
    ]
    for t in saved.entered:
        t.grad = None  # a later pass over the graph must not add to gradients in flight
    return gradients


def backward(records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool) -> None:
    """Run the full backward of several forwards at once, and add the gradients to parameters and received tensors.

    Args:
        records: the forwards, each with the gradients of its outputs.
        last: whether this is the last stage, whose outputs are losses.
    """
    roots, gradients = roots_of(records, last)
    if roots and all(g is not None and g.device.type == "cpu" for g in gradients):
        run_backward(roots, gradients)  # type: ignore[arg-type]  # no gradient is None
    elif roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # tensors and edges may be mixed


def roots_of(
    records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool
) -> tuple[list[Root], list[torch.Tensor | None]]:
    """Return the roots of backward and their gradients.

    The gradient is None for an output of the last stage that is not a scalar loss, so that autograd raises its usual
    error.
    """
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
    """Return the gradient of a loss with respect to itself, or None if autograd does not define it."""
    like = like_root(loss)
    if math.prod(like.shape) != 1 or not like.dtype.is_floating_point:
        return None
    return torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
