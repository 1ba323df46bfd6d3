"""Stand-ins without values for the weights of layers on other ranks, with which the user's hooks can work.

This module also stores the places of the original tensors until the layers come back to this rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.private_torch import NoSubclassFunctions
from lightning_pipes.engine.residency.layer_state import with_layout_of
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.private_lightning import in_grad_norm
from lightning_pipes.trainer.ranks.replica_world import in_hook

_READING_FUNCTIONS = {
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "data_ptr", "untyped_storage", "storage"),
    *("__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "__dlpack__"),
}
"""Methods and functions of tensors that return values of the tensor or give access to its memory."""

_MOVING_FUNCTIONS = ("to", "cpu", "cuda")
_SHAPE_FUNCTIONS = ("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "requires_grad_")


class ParameterSlot(NamedTuple):
    """The place of a tensor in a layer.

    Attributes:
        layer: the number of the layer.
        table: the dict of parameters or buffers of the submodule that has the tensor.
        name: the name of the tensor in this dict.
        tensor: the tensor that belongs in this place.
        key: the key of the tensor in the state dict of the whole module.
    """

    layer: int
    table: dict[str, Any]
    name: str
    tensor: torch.Tensor
    key: str


def no_view(whole: bool) -> AbstractContextManager[None]:
    """Return a context that does nothing, so that optimizers and modules keep their own tensors."""
    return nullcontext()


class HookScope:
    """The hook of the user that is currently running, if any, and the settings of the tensors that it sees.

    Attributes:
        hook: the name of the running hook, for messages. It is empty if no hook is running.
        on_all_ranks: whether all ranks run the hook.
        device: the device of this rank.
        gradients: returns whether weights currently have gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.hook = ""
        self.on_all_ranks = True
        self.device = device
        self.copies: WeakValueDictionary[int, RemoteTensor] = WeakValueDictionary()
        """Copies of stand-ins that the user's code has made, for example for a moving average."""
        self.gradients: Callable[[], bool] = lambda: False
        self.view: Callable[[bool], AbstractContextManager[None]] = no_view
        """Returns a context in which optimizers have the parameters of all ranks, or of this rank if passed False."""
        self.module_view: Callable[[bool], AbstractContextManager[None]] = no_view
        """The same context for a module that is cut without a proxy. A proxy detects a running hook itself."""
        self.digests: Mapping[str, bytes] = {}
        """Digests of the weights of all ranks by name, while a hook may compare two weights."""
        self.writes: Counter[str] = Counter()
        """The number of writes of the user's code to the stand-in of each name."""
        self.on_layers: Callable[[], None] = lambda: None
        """Called when the hook accesses layers, or the stand-in of a tensor on another rank."""
        self._thread = 0

    @property
    def is_active(self) -> bool:
        """Whether a hook is running in the current thread. Each job of an array has its own thread."""
        return bool(self.hook) and self._thread == get_ident()

    def find_digest(self, tensor: torch.Tensor) -> bytes:
        """Return the digest of a weight on this rank or on another rank."""
        return self.digests[tensor._name] if isinstance(tensor, RemoteTensor) else digest_of_tensor(tensor)

    @contextmanager
    def running(self, hook: str, on_all_ranks: bool, whole: bool = True) -> Iterator[None]:
        """Mark a hook as running while the block runs.

        Args:
            hook: the name of the hook.
            on_all_ranks: whether all ranks run the hook.
            whole: whether modules and optimizers have the parameters of all ranks in the block.
        """
        with self._set_hook(hook, on_all_ranks), self.module_view(whole), self.view(whole):
            yield

    @contextmanager
    def suspend_hooks(self) -> Iterator[None]:
        """Mark no hook as running while the block runs, for internal code and code of Lightning that only concerns this
        rank.
        """
        with self.view(False), self.module_view(False), self._set_hook("", True):
            yield

    def bind(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that runs `function` in the same state of the scope as at the time of this call."""
        hook, on_all_ranks = self.hook, self.on_all_ranks

        def run() -> Any:
            with self.running(hook, on_all_ranks) if hook else self.suspend_hooks():
                return function()

        return run

    @contextmanager
    def _set_hook(self, hook: str, on_all_ranks: bool) -> Iterator[None]:
        before = self.hook, self.on_all_ranks, self._thread
        self.hook, self.on_all_ranks, self._thread = hook, on_all_ranks, get_ident()
        try:
            with in_hook(on_all_ranks) if hook else nullcontext():
                yield
        finally:
            self.hook, self.on_all_ranks, self._thread = before


class RemoteTensor(torch.Tensor):
    """A tensor without values that represents a weight of a layer on another rank, or a result computed from one.

    Operations on a RemoteTensor return a RemoteTensor. Writing to it has no effect on this rank, because the rank that
    has the layer runs the same code and writes the values. Code that processes each weight separately, such as a moving
    average, therefore has the correct result.

    Raises:
        PipelineError: code reads or stores the values of a RemoteTensor, or writes them to a tensor of this rank.
    """

    _name = "a weight"
    is_weight_or_gradient = False
    """Whether the tensor stands in for a weight or its gradient, not for a result computed from one."""
    _scope = HookScope(torch.device("meta"))

    @staticmethod
    def make_like(tensor: torch.Tensor, name: str, scope: HookScope) -> RemoteTensor:
        """Return a RemoteTensor with the shape, type and class (tensor or parameter) of `tensor`.

        Args:
            tensor: the tensor, which may be sharded.
            name: the name in messages.
            scope: the scope of hooks that the RemoteTensor belongs to.
        """
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_distributed(tensor) else tensor
        found = whole.detach().to("meta").as_subclass(RemoteTensor)
        if isinstance(tensor, nn.Parameter):
            with NoSubclassFunctions():  # as nn.Parameter does, at a tenth of the cost
                found.requires_grad_(tensor.requires_grad)
            found.__dict__["_is_param"] = True
        found.__dict__["is_weight_or_gradient"] = True
        return found._describe(name, scope)

    @property
    def writes(self) -> int:
        """The number of times that the user's code has written to this tensor."""
        return self._scope.writes[self._name]

    @property
    def gradient(self) -> RemoteTensor | None:
        """The gradient of a trained weight as a RemoteTensor, or None. User code reads it as `grad`."""
        if not (self.is_weight_or_gradient and self.requires_grad and self._scope.gradients()) or in_grad_norm():
            return None
        return RemoteTensor.make_like(self.detach(), f"the gradient of {self._name}", self._scope)

    @staticmethod
    def replace(tensor: torch.Tensor, stand_in: RemoteTensor) -> None:
        """Release the memory of `tensor` and make it behave like `stand_in`, because user code may have kept it.

        `put_back` reverts this change.
        """
        kept = tensor.__class__
        tensor.data = tensor.data.new_empty(()).expand(tensor.shape)
        tensor.__class__ = RemoteTensor
        tensor.__dict__.update(
            _kept_class=kept,
            _stand_in=stand_in,
            _name=stand_in._name,
            _scope=stand_in._scope,
            is_weight_or_gradient=True,
            _is_param=isinstance(stand_in, nn.Parameter),
        )

    @staticmethod
    def find_stand_in(tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in that the module has for `tensor` after `replace`, or `tensor` if there is none."""
        found: torch.Tensor = tensor.__dict__.get("_stand_in", tensor)
        return found

    @staticmethod
    def put_back(tensor: torch.Tensor) -> None:
        """Revert `replace` for a tensor, which then has no values. Other tensors are left unchanged."""
        kept, _ = tensor.__dict__.pop("_kept_class", None), tensor.__dict__.pop("_stand_in", None)
        if kept is None:
            return
        for name in ("_name", "_scope", "is_weight_or_gradient", "_is_param"):
            tensor.__dict__.pop(name, None)
        tensor.__class__ = kept
        tensor.data = tensor.data.new_empty(0)

    def _describe(self, name: str, scope: HookScope) -> RemoteTensor:
        self.__dict__.update(_name=name, _scope=scope)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RemoteTensor))
        if func == torch.Tensor.device.__get__:
            return first._scope.device
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            _draw_as_init(sys._getframe(1), first._scope.device)
            return True
        if first._scope.is_active and name not in _SHAPE_FUNCTIONS:
            first._scope.on_layers()
        if func == torch.Tensor.grad.__get__:  # type: ignore[union-attr]
            return first.gradient
        if name in _READING_FUNCTIONS:
            if func == torch.equal and first._scope.digests:
                return len({first._scope.find_digest(t) for t in (*args, *kwargs.values())}) == 1
            first.refuse_use("takes the value of")
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            first.refuse_use("takes a gradient of, or by,")
        if name == "__deepcopy__":
            return first._copy_remote(args[1])
        if name.startswith("_foreach_") and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        if name in _RANDOM_TENSOR_FUNCTIONS:
            _draw(func, args, kwargs, first._scope.device)
        written = find_written(name, args, kwargs)
        if written:
            if any(not isinstance(t, RemoteTensor) for t in written):
                first.refuse_use("copies into a tensor of this rank the values of")
            if not first._scope.on_all_ranks:
                first.refuse_use("changes, on one rank only,")
            first._scope.writes.update(t._name for t in written if isinstance(t, RemoteTensor))
            return args[0] if args else written[0]
        if name in _MOVING_FUNCTIONS:
            kind = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), first.dtype)
            func, args, kwargs = torch.Tensor.to, (first, kind), {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, RemoteTensor) and "_scope" not in leaf.__dict__:
                leaf._describe(first._name, first._scope)
        return result

    def _copy_remote(self, memo: dict[int, Any]) -> RemoteTensor:
        memo[id(self)] = copy = RemoteTensor.make_like(self, self._name, self._scope)
        self._scope.copies[id(copy)] = copy
        copy.__dict__["is_weight_or_gradient"] = False
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse_use("stores")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._name}, {tuple(self.shape)}, {self.dtype})"

    def derive(self, like: torch.Tensor, what: str) -> RemoteTensor:
        """Return a RemoteTensor for a value that belongs to this tensor.

        Args:
            like: a tensor of the shape and type of the result.
            what: the first part of the name of the result, such as "an optimizer's 'exp_avg' of". The name of this
                tensor follows it.
        """
        found = RemoteTensor.make_like(like, f"{what} {self._name}", self._scope)
        found.__dict__["is_weight_or_gradient"] = False
        return found

    def refuse_use(self, what: str) -> NoReturn:
        """Raise PipelineError because the running hook does `what` with this tensor."""
        scope = self._scope
        alone = "" if scope.on_all_ranks else f" {scope.hook} runs on rank 0 only; use a hook that all ranks run."
        raise PipelineError(
            f"{scope.hook or 'code outside of a step'} {what} {self._name}, which is on another rank: every process "
            f"has only the layers of its stages. Change each weight separately, as a moving average does.{alone} For "
            "whole weights, call trainer.save_checkpoint(path) or trainer.strategy.lightning_module_state_dict() on "
            "all ranks; rank 0 gets the result. For norms of gradients or weights, call torch.nn.utils.get_total_norm "
            "or clip_grad_norm_, or log lightning.pytorch.utilities.grad_norm with self.log_dict. p.is_meta is True "
            "for weights of other ranks"
        )


class RemoteParameters:
    """The tensors of layers on other ranks, which have no memory and are replaced by stand-ins in their slots.

    The original objects are kept and later put back, so that references of optimizers and user code stay valid.
    """

    def __init__(self, scope: HookScope) -> None:
        self.slots: list[ParameterSlot] = []
        self._ids: set[int] = set()
        self._scope = scope

    def check(self, layer: int) -> None:
        """Check that a layer can move back to this rank.

        Raises:
            PlanError: the user's code has copied a weight of the layer, and the values of the copy are on the rank that
                currently has the layer.
        """
        names = {f"self.{slot.key}" for slot in self.slots if slot.layer == layer}
        for copy in self._scope.copies.values():
            if copy._name in names:
                raise PlanError(
                    f"layer {layer} can't move to this rank. The values of a copy of {copy._name}, such as a running "
                    "average, are on the rank that has the layer now, and would stay there. Keep the layer on its "
                    "rank, or delete the copy before the layer moves"
                )

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._ids

    def add(self, slots: Iterable[ParameterSlot]) -> None:
        """Replace the tensors in these slots by stand-ins, because their layers are now on other ranks."""
        slots = list(slots)
        stand_ins = {
            id(s.tensor): RemoteTensor.make_like(s.tensor, f"self.{s.key}", self._scope) for s in reversed(slots)
        }
        for slot in slots:
            slot.table[slot.name] = stand_ins[id(slot.tensor)]
        for key, tensor in {id(s.tensor): s.tensor for s in slots}.items():
            tensor.grad = None
            if tensor.is_meta:
                tensor.__dict__["_stand_in"] = stand_ins[key]
            else:
                RemoteTensor.replace(tensor, stand_ins[key])
        self.slots += slots
        self._ids.update(id(s.tensor) for s in slots)

    def put_back(self) -> None:
        """Make all tensors ordinary tensors without values again. They are not put into their slots."""
        for slot in self.slots:
            RemoteTensor.put_back(slot.tensor)
            slot.tensor.requires_grad_(slot.table[slot.name].requires_grad)

    def take_back(self, layer: int, values: Mapping[int, torch.Tensor]) -> None:
        """Put the tensors of a layer back into their slots.

        Args:
            layer: the number of the layer.
            values: the values of each tensor, by the id of its stand-in.
        """
        for slot in (s for s in self.slots if s.layer == layer):
            stand_in = slot.table[slot.name]
            give_values(slot.tensor, values[id(stand_in)], stand_in)
            slot.tensor.requires_grad_(stand_in.requires_grad)
            slot.table[slot.name] = slot.tensor
            self._ids.discard(id(slot.tensor))
        self.slots = [s for s in self.slots if s.layer != layer]


def digest_of_tensor(tensor: torch.Tensor) -> bytes:
    """Return a digest that is equal for tensors of equal shape, type and values."""
    values = (tensor.detach() + 0).cpu().contiguous()  # -0.0 equals 0.0
    found = blake2b(f"{tuple(values.shape)} {values.dtype}".encode(), digest_size=16)
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def give_values(tensor: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> None:
    """Give values to a tensor without memory.

    Args:
        tensor: the tensor, which stays the same object.
        values: the values.
        like: a tensor whose memory layout `tensor` gets.
    """
    with NoSubclassFunctions():  # `like` is a stand-in, whose functions are slow
        values = with_layout_of(values, like)
    RemoteTensor.put_back(tensor)
    if tensor.is_meta:
        made = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    else:
        tensor.data = values


def _one_by_one(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """Apply a function of lists of tensors to each position separately, because some entries are on other ranks."""
    rows = [[[a[n]] if isinstance(a, (list, tuple)) else a for a in args] for n in range(len(args[0]))]
    results = [func(*row, **kwargs) for row in rows]
    return None if results[0] is None else [entry for result in results for entry in result]


def find_written(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call of a torch function writes to.

    Args:
        name: the name of the function.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    if kwargs.get("out") is not None:
        return [t for t in pytree.tree_leaves(kwargs["out"]) if isinstance(t, torch.Tensor)]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    assigned = name == "__setitem__" or (
        name.startswith("__i") and name.endswith("__") and name not in _CONVERSION_METHODS
    )
    if name == "__set__" and len(args) > 1 and isinstance(args[1], torch.Tensor):  # p.data = ..., p.grad = ...
        assigned = True
    if not in_place and not assigned:
        return []
    target = args[0] if args else kwargs.get("tensor")  # nn.init passes the tensor by keyword
    return [t for t in pytree.tree_leaves(target) if isinstance(t, torch.Tensor)]


_CONVERSION_METHODS = ("__invert__", "__index__", "__int__", "__iter__")


_RANDOM_TENSOR_FUNCTIONS = {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_"),
    *("rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson"),
    *("dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "rrelu_"),
    *("kaiming_uniform_", "kaiming_normal_"),
}
"""Functions that draw random numbers, including the functions of `nn.init` that dispatch to `__torch_function__`."""


def _draw(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Draw the random numbers of `func` for a temporary local tensor, so that later random numbers are not affected."""

    kept = {key: value for key, value in kwargs.items() if key != "out"}
    args, kept = pytree.tree_map_only(RemoteTensor, lambda tensor: _make_placeholder(tensor, device), (args, kept))
    func(*args, **kept)


def _draw_as_init(caller: FrameType, device: torch.device) -> None:
    """Draw the random numbers of a function of `nn.init` that reads `is_meta`, because it skips tensors on `meta`."""
    code = caller.f_code
    if caller.f_globals is vars(nn.init):
        given = {name: caller.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        vars(nn.init)[code.co_name](**pytree.tree_map_only(RemoteTensor, lambda t: _make_placeholder(t, device), given))


def _make_placeholder(tensor: RemoteTensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device` with the shape and type of a remote tensor. All its values are 0.5."""
    like = _without_values(tensor)
    return torch.full(tuple(like.shape), 0.5, dtype=like.dtype, device=device)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, RemoteTensor):
        found: torch.Tensor = tensor.__dict__.get("_stand_in", tensor)
        return found
    return tensor if tensor.is_meta else tensor.to("meta")
