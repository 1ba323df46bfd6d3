"""Trees of tensors and objects as bytes, for transfers in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine import trees
from lightning_pipes.engine.messages.chunks import ByteLayout
from lightning_pipes.engine.watch.trust import Seal, dumps, loads
from lightning_pipes.ir import InputError, PipelineError


def pack_tree(tree: Any, seal: Seal | None) -> tuple[bytes, list[torch.Tensor]]:
    """Return a description of a tree, which `TreeDescription` reads, and its tensors in order.

    Args:
        tree: tensors, and objects that can be pickled.
        seal: signs the description.

    Raises:
        InputError: an object or a tensor can't be sent.
    """
    leaves, spec = trees.flatten(tree)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_meta or leaf.is_quantized):
            path, _ = pytree.tree_flatten_with_path(trees.open_objects(tree))[0][number]
            raise InputError(
                f"a bulk transfer can't carry {pytree.keystr(path) or 'this'}: a tensor of layout {leaf.layout} on "
                f"{leaf.device}. Send the plain tensors that it is made of"
            )
    described = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves]
    try:
        description = dumps((pytree.tree_unflatten(range(len(leaves)), spec), described), seal)
    except Exception as error:  # the objects of a user may raise any error
        raise InputError(
            f"a bulk transfer can't carry an object that can't be pickled: {error}; send tensors, numbers and texts"
        ) from error
    return description, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class TreeDescription:
    """The description of a tree that `pack_tree` has packed.

    Attributes:
        specs: the shape and dtype of each tensor.
    """

    def __init__(self, description: bytes, seal: Seal | None) -> None:
        skeleton, self._leaves = loads(description, seal)
        self._spec = pytree.tree_structure(skeleton)
        self.specs: list[tuple[Sequence[int], torch.dtype]] = [leaf for leaf in self._leaves if type(leaf) is tuple]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with these tensors. Its objects are open; see `trees.close_objects`."""
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if type(v) is tuple else v for v in self._leaves], self._spec)


class IncomingTree:
    """A tree that is received, as bytes.

    Args:
        description: the number of bytes of the description.
        size: the number of bytes of the whole tree.
        seal: signs the description.
    """

    def __init__(self, description: int, size: int, seal: Seal | None) -> None:
        self._description = torch.empty(description, dtype=torch.uint8)
        self._size, self._seal = size, seal
        self._described: TreeDescription | None = None
        self._tensors: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = [self._description]
        self._layout = ByteLayout([description])

    def put(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Store the bytes start to stop; they arrive in order."""
        at = 0
        while start + at < stop:
            if self._described is None and start + at >= self._description.numel():
                self._allocate()
            end = stop if self._described is not None else min(stop, self._description.numel())
            for part, first, last in self._layout.locate_bytes(start + at, end):
                self._parts[part][first:last] = data[at : at + last - first]
                at += last - first

    def content(self) -> Any:
        """Return the key and the opened content. All of its bytes must have arrived."""
        described = self._described or self._allocate()
        return described.fill(self._tensors)

    def _allocate(self) -> TreeDescription:
        """Read the description, and allocate the tensors."""
        described = self._described = TreeDescription(self._description.numpy().tobytes(), self._seal)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described.specs]
        if self._description.numel() + sum(sizes) != self._size:
            raise PipelineError(
                "received a bulk transfer of another size than its header: do all ranks run the same version?"
            )
        self._tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in described.specs]
        self._parts += [t.reshape(-1).view(torch.uint8) if t.numel() else t for t in self._tensors]
        self._layout = ByteLayout([self._description.numel(), *sizes])
        return described
