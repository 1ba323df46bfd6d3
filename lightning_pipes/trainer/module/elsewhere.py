"""Weights of other ranks' layers as the user's hooks see them: each can be worked on by itself, and has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.private_lightning import in_grad_norm

_READING = {
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "data_ptr", "untyped_storage", "storage"),
    *("__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "__dlpack__"),
}
"""Methods and functions of tensors that give values."""

_MOVING = ("to", "cpu", "cuda")


class HookScope:
    """Which of the user's hooks runs, if any, for messages and for what it is to see.

    Attributes:
        hook: its name; empty where none runs.
        everywhere: whether all ranks run it.
        device: of this rank.
        gradients: says whether weights have gradients now.
    """

    def __init__(self, device: torch.device) -> None:
        self.hook = ""
        self.everywhere = True
        self.device = device
        self.gradients: Callable[[], bool] = lambda: False
        self._thread = 0

    @property
    def here(self) -> bool:
        """Whether it is a hook that asks: siblings of an array have a thread each."""
        return bool(self.hook) and self._thread == get_ident()

    @contextmanager
    def running(self, hook: str, everywhere: bool) -> Iterator[None]:
        """In the block that hook runs."""
        before = self.hook, self.everywhere, self._thread
        self.hook, self.everywhere, self._thread = hook, everywhere, get_ident()
        try:
            yield
        finally:
            self.hook, self.everywhere, self._thread = before


class Elsewhere(torch.Tensor):
    """A tensor without values: a weight of a layer on another rank, or what was made from one.

    What is computed from it is Elsewhere too, and writing to it does nothing here: the rank that has the layer does the
    same with the values. So work on each weight by itself, a running average for example, gives what it should.

    Raises:
        PipelineError: its values are read, stored, or written to a tensor that is here.
    """

    _name = "a weight"
    is_whole = False
    """Whether it is a weight or its gradient, not what was made from one."""
    _scope = HookScope(torch.device("meta"))

    @staticmethod
    def of(tensor: torch.Tensor, name: str, scope: HookScope) -> Elsewhere:
        """Shape, type and kind of `tensor`, which is called `name`."""
        found = tensor.detach().to("meta").as_subclass(Elsewhere)
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, tensor.requires_grad)  # type: ignore[assignment]
        found.__dict__["is_whole"] = True
        return found._tell(name, scope)

    @property
    def gradient(self) -> Elsewhere | None:
        """Of a weight that is trained, as `grad`."""
        if not (self.is_whole and self.requires_grad and self._scope.gradients()) or in_grad_norm(2):
            return None
        return Elsewhere.of(self.detach(), f"the gradient of {self._name}", self._scope)

    def _tell(self, name: str, scope: HookScope) -> Elsewhere:
        self.__dict__.update(_name=name, _scope=scope)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Elsewhere))
        if func == torch.Tensor.device.__get__:
            return first._scope.device
        if func == torch.Tensor.grad.__get__:  # type: ignore[union-attr]
            return first.gradient
        if name in _READING:
            first.refuse("takes the value of")
        if name == "__deepcopy__":
            return first._copied(args[1])
        if name.startswith("_foreach_") and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        written = _written(name, args, kwargs)
        if written:
            if any(not isinstance(t, Elsewhere) for t in written):
                first.refuse("writes into a tensor of this rank what it has of")
            if not first._scope.everywhere:
                first.refuse("changes, on one rank only,")
            return args[0]
        if name in _MOVING:
            kind = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), first.dtype)
            func, args, kwargs = torch.Tensor.to, (first, kind), {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Elsewhere) and "_scope" not in leaf.__dict__:
                leaf._tell(first._name, first._scope)
        return result

    def _copied(self, memo: dict[int, Any]) -> Elsewhere:
        memo[id(self)] = copy = Elsewhere.of(self, self._name, self._scope)
        copy.__dict__["is_whole"] = False
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("stores")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._name}, {tuple(self.shape)}, {self.dtype})"

    def refuse(self, what: str) -> NoReturn:
        """Raises PipelineError, for a hook that does `what` with it."""
        scope, mark = (
            self._scope,
            "" if self._scope.everywhere else "mark it with @lightning_pipes.trainer.on_every_stage",
        )
        raise PipelineError(
            f"{scope.hook or 'code outside of a step'} {what} {self._name}, which is on another rank: every process "
            "has the layers of its stages. What is done to each weight by itself, as averaging over time, is done "
            f"where it is{mark and f', if all ranks run the hook: {mark}'}. Whole weights come from "
            "trainer.save_checkpoint(path) and trainer.strategy.lightning_module_state_dict(), whose result is on "
            f"rank 0; all ranks must call them{mark and f', so {mark}'}. Norms over gradients or weights come from "
            "torch.nn.utils.get_total_norm and clip_grad_norm_, or lightning.pytorch.utilities.grad_norm in "
            "self.log_dict. p.is_meta says what is on another rank"
        )


def _one_by_one(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """What a function of lists makes of the n-th entries of all, for each n: some are here, and some are not."""
    rows = [[[a[n]] if isinstance(a, (list, tuple)) else a for a in args] for n in range(len(args[0]))]
    results = [func(*row, **kwargs) for row in rows]
    return None if results[0] is None else [entry for result in results for entry in result]


def _written(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a function of that name writes to."""
    if kwargs.get("out") is not None:
        return [t for t in pytree.tree_leaves(kwargs["out"]) if isinstance(t, torch.Tensor)]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    assigned = name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE)
    if name == "__set__" and len(args) > 1 and isinstance(args[1], torch.Tensor):  # p.data = ..., p.grad = ...
        assigned = True
    if not in_place and not assigned:
        return []
    return [t for t in pytree.tree_leaves(args[0]) if isinstance(t, torch.Tensor)]


_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, Elsewhere) or tensor.is_meta else tensor.to("meta")
