"""Splits backward into input gradients, which the previous stage needs at once, and weight gradients, which can wait.

The graph of a stage consists of a trunk, which contains the nodes on paths from the outputs to the inputs, and of
branches from the trunk to weights. The first half runs only the trunk and keeps the gradients that arrive at nodes with
branches. The second half starts at these nodes and runs only the branches. No large operation runs twice. The first
half frees saved tensors while it runs, and only the tensors that the branches need stay alive between the two halves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_pipes.engine.compute.autograd import Root, SavedForward, roots_of
from lightning_pipes.engine.private_torch import CheckpointNode, FunctionNode, has_gradient_hooks, saved_tensors

Gradient = torch.Tensor | None


class _InseparableError(Exception):
    """Backward can't be split. The message names the obstacle."""


@dataclass
class _Fork:
    """A node of the trunk with branches.

    Attributes:
        arriving: the edges at which gradients arrive at the node.
        branches: the edges at which gradients leave the trunk from the node.
        leaves: the weights at the ends of the branches.
        shared: whether these weights also receive gradients from other branches.
    """

    arriving: list[GradientEdge]
    branches: list[GradientEdge]
    leaves: list[torch.Tensor]
    shared: bool


@dataclass(eq=False)
class WeightGradients:
    """The second half of a backward, which computes the weight gradients.

    Attributes:
        inseparable: the reason why the first half has computed all gradients already; empty if it has not.
    """

    inseparable: str = ""
    _whole: tuple[list[Root], list[Gradient]] | None = None
    _forks: list[tuple[_Fork, list[Gradient]]] = field(default_factory=list)
    _vectors: list[tuple[GradientEdge, Gradient]] = field(default_factory=list)
    _beside: list[tuple[GradientEdge, Gradient]] = field(default_factory=list)

    def compute(self) -> None:
        """Compute the gradients and add them to the weights. The graph is freed step by step."""
        whole, self._whole = self._whole, None
        if whole is not None:
            torch.autograd.backward(*whole)  # type: ignore[arg-type]  # tensors and edges may be mixed
        vectors, self._vectors = self._vectors, []
        _backward(vectors)
        beside, self._beside = self._beside, []
        forks, self._forks = self._forks[::-1], []
        while forks:
            fork, gradients = forks.pop()
            arrived = [(e, g) for e, g in zip(fork.arriving, gradients, strict=True) if g is not None]
            if not fork.shared:
                _backward(arrived, fork.leaves)
            elif arrived:  # a weight must get its whole gradient at once, because hooks may send it
                edges, got = [e for e, _ in arrived], [g for _, g in arrived]
                found = torch.autograd.grad(edges, fork.branches, got, allow_unused=True)
                beside += zip(fork.branches, found, strict=True)
        _backward([(e, g) for e, g in beside if g is not None])


def _backward(roots: Sequence[tuple[GradientEdge, Gradient]], leaves: Sequence[torch.Tensor] | None = None) -> None:
    if roots:
        torch.autograd.backward([e for e, _ in roots], [g for _, g in roots], inputs=leaves)


def backward_inputs(records: Sequence[tuple[SavedForward, Sequence[Any]]], last: bool) -> WeightGradients:
    """Compute the gradients of the received tensors, and return the remaining work for the weights.

    Both are computed at once if they can't be separated. This is the case for layers that are autograd functions in
    Python, reentrant checkpoints, layers whose saved tensors are packed by hooks (as by non-reentrant checkpoints), and
    weights that are used several times in a row without an operation of their own in between, as in a recurrent cell.

    Args:
        records: the forwards, each with the gradients of its outputs.
        last: whether this is the last stage, whose outputs are losses.
    """
    roots, gradients = roots_of(records, last)
    entered = [t for saved, _ in records for t in saved.entered]
    for saved, _ in records:
        saved.outputs = []  # the remaining work refers to the parts of the graph that it needs
    if not roots or not entered:
        return WeightGradients(_whole=(roots, gradients) if roots else None)
    edges = [r if isinstance(r, GradientEdge) else get_gradient_edge(r) for r in roots]
    graph = _Graph(edges, [get_gradient_edge(t).node for t in entered])
    inside = [n for n, e in enumerate(edges) if e.node in graph.trunk]
    if not inside:
        return WeightGradients(_whole=(roots, gradients))
    try:
        forks, vectors = graph.find_forks()
    except _InseparableError as why:
        torch.autograd.backward(edges, gradients)
        return WeightGradients(inseparable=str(why))
    wanted: list[Any] = [*entered, *vectors, *(e for fork in forks for e in fork.arriving)]
    starts, given = [edges[n] for n in inside], [gradients[n] for n in inside]
    with graph.releasing(fork.arriving[0].node for fork in forks):
        found = iter(torch.autograd.grad(starts, wanted, given, retain_graph=True, allow_unused=True))
    for t in entered:
        t.grad = next(found)
    return WeightGradients(
        _vectors=[(e, g) for e in vectors if (g := next(found)) is not None],
        _forks=[(fork, [next(found) for _ in fork.arriving]) for fork in forks],
        _beside=[(e, g) for e, g in zip(edges, gradients, strict=True) if e.node not in graph.trunk],
    )


class _Graph:
    """The graph behind some edges, and its trunk: the nodes on paths from these edges to `entered`."""

    def __init__(self, edges: Sequence[GradientEdge], entered: Iterable[Node]) -> None:
        self.trunk = set(entered)
        self._edges = edges
        self._next: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self._arriving: dict[Node, set[int]] = defaultdict(set)
        self._branches: dict[Node, list[GradientEdge]] = {}  # by node of the trunk, nodes near the inputs first
        for edge in edges:
            self._arriving[edge.node].add(edge.output_nr)
        stack = [e.node for e in reversed(edges)]
        while stack:
            node = stack[-1]
            following = self._next.get(node)
            if following is None:
                following = self._next[node] = node.next_functions
                stack.extend([n for n, _ in following if n is not None and n not in self._next])
            else:  # all following nodes have been visited
                stack.pop()
                if node not in self.trunk and not self.trunk.isdisjoint([n for n, _ in following]):
                    self.trunk.add(node)
                    self._add(node, following)

    def _add(self, node: Node, following: tuple[tuple[Node | None, int], ...]) -> None:
        for n, number in following:
            if n in self.trunk:
                self._arriving[n].add(number)
            elif n is not None:
                self._branches.setdefault(node, []).append(GradientEdge(n, number))

    def find_forks(self) -> tuple[list[_Fork], list[GradientEdge]]:
        """Return the nodes of the trunk with branches, and edges to weights whose gradients the first half should
        compute.

        The nodes are in order from the outputs to the inputs. The edges lead to vectors, such as the weights of norms,
        because both halves would have to read all data for them.

        Raises:
            _InseparableError: the branches can't run without the trunk, or the trunk can't run without the branches.
        """
        if any(isinstance(node, CheckpointNode) for node in self._next):
            raise _InseparableError("a reentrant checkpoint")
        behind = {node: self._behind([b.node for b in mine]) for node, mine in reversed(self._branches.items())}
        beside = self._behind([e.node for e in self._edges if e.node not in self.trunk])
        users = Counter(n for side in (*behind.values(), beside) for n in side)
        forks, vectors = [], []
        for node, side in behind.items():
            mine = self._branches[node]
            shared = any(users[n] > 1 for n in side)
            leaves = [_leaf(n) for n in side if not self._next[n]]
            if (
                not shared
                and len(leaves) == len(side)
                and all(p.ndim < 2 and not has_gradient_hooks(p) for p in leaves)
            ):
                vectors += mine
            else:
                self._check_separable(node, mine if shared else ())
                forks.append(_Fork([GradientEdge(node, k) for k in self._arriving[node]], mine, leaves, shared))
        return forks, vectors

    @contextmanager
    def releasing(self, kept: Iterable[Node]) -> Iterator[None]:
        """Free the tensors that a node of the trunk has saved as soon as it has run, except for the nodes `kept`.

        The trunk can't run again.
        """
        handles = []
        for node in self.trunk.difference(kept):
            tensors = [t for t in saved_tensors(node) if t.unpack_hook is None and t.data is not None]
            if tensors:
                handles.append(node.register_hook(partial(_release, tensors)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _behind(self, nodes: list[Node]) -> dict[Node, None]:
        """Return `nodes` and all nodes that follow them in backward."""
        found: dict[Node, None] = {}
        while nodes:
            node = nodes.pop()
            if node not in found:
                found[node] = None
                nodes.extend([n for n, _ in self._next[node] if n is not None])
        return found

    def _check_separable(self, node: Node, shared: Sequence[GradientEdge]) -> None:
        kind: type[Any] = type(node)
        if issubclass(kind, FunctionNode):
            raise _InseparableError(f"{kind.__name__}, an autograd function in Python with weights")
        if any(tensor.unpack_hook is not None for tensor in saved_tensors(node)):
            raise _InseparableError("a checkpoint, or other hooks that pack saved tensors")
        if any(not self._next[e.node] and has_gradient_hooks(_leaf(e.node)) for e in shared):
            raise _InseparableError("a hook on a weight that is used several times")
        if shared:
            further = self._behind([n for n, _ in self._next[node] if n in self.trunk])
            nodes = {e.node for e in shared}
            if any(e.node in nodes for n in further if n in self._branches for e in self._branches[n]):
                raise _InseparableError("a weight that is used several times in a row")


def _leaf(node: Any) -> torch.Tensor:
    """Return the tensor to which a node without following nodes adds its gradient."""
    leaf: torch.Tensor = node.variable
    return leaf


def _release(tensors: list[Any], *_: object) -> None:
    """Free saved tensors, after the node that saved them has run."""
    for tensor in tensors:
        tensor.register_hooks(_drop, _refuse)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("the input gradients of this stage have been computed; the graph can't be run again")
