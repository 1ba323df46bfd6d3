"""A mode that splits the user's code into units while a step runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pipes.engine.private_torch import (
    ReentrantCheckpoint,
    backward_hooks,
    has_composable_checkpoint,
    in_functorch,
    pop_function_mode,
    push_function_mode,
    replace_checkpoints,
    select_hooked,
)
from lightning_pipes.trainer.private_lightning import WHOLE_CALL, is_compiled, whole_call

_PROPERTY_NAMES = (
    "size dim numel nelement ndimension stride storage_offset is_contiguous element_size dim_order get_device "
    "is_floating_point is_complex is_signed is_tensor is_storage is_inference is_shared is_pinned is_neg is_conj "
    "is_nested is_same_size is_set_to _is_view __len__ __hash__ __repr__ __format__ __set__ register_hook "
    "retain_grad requires_grad_ untyped_storage broadcast_shapes finfo iinfo result_type promote_types "
    "can_cast set_grad_enabled is_grad_enabled _set_grad_enabled get_default_dtype _use_cudnn_rnn_flatten_weight "
    "__torch_function__ _use_count"
)
_PROPERTY_FUNCTIONS = frozenset(_PROPERTY_NAMES.split())
"""Functions that compute no tensors and read no values."""
_CHANGING_FUNCTIONS = frozenset(("__set__", "requires_grad_"))
"""Functions in `_PROPERTY_FUNCTIONS` that change a property of a tensor other than its values."""
_TENSOR_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""The properties of a tensor that are tensors. All other properties are only read."""
DEVICE_PROPERTIES = frozenset(("device", "is_meta", "is_cpu", "is_cuda"))
"""The properties that depend on the device of a tensor."""

Function = Callable[..., Any]


def runs_as_whole(module: nn.Module) -> bool:
    """Return whether a module has to be a unit with everything around its forward, including its hooks.

    It is compiled, or its hooks apply to the graph of the whole call.
    """
    return is_compiled(module) or bool(backward_hooks(module)) or has_composable_checkpoint(module)


class UnitMode(TorchFunctionMode, ABC):
    """Calls `run_unit` for every unit of the code in its block, in order.

    A unit can't be divided by a border. It is a call of an atomic module, of a torch function between such calls, or of
    an autograd.Function. Calls within a unit or within a transform of torch.func are not units.

    Args:
        atomic: modules whose calls are units, by path.
    """

    def __init__(self, atomic: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._atomic = atomic
        self._closed = {path for path, module in atomic.items() if any(map(runs_as_whole, module.modules()))}
        """The modules within which no mode may be active, by path."""
        self._inside = 0
        self._thread = 0
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._checkpoints, self._depth = 0, 0

    @abstractmethod
    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        """Return the result of a unit.

        Args:
            name: the name of the function, or the path of the module.
            path: the path of the module; None for a function.
            function: the function, or the forward of the module.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """

    def look(self, name: str, function: Function, args: Any) -> Any:
        """Return a property of a tensor that is not a tensor itself, or the address of its memory."""
        return function(*args)

    def change(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        """Set the property `name` of a tensor."""
        return function(*args, **kwargs)

    def run_inner(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        """Return the result of a function within a unit.

        This method is called in modules for which `sees_inside` returns True, and in an autograd.Function.
        """
        return function(*args, **kwargs)

    def run_transformed(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        """Return the result of a call within a transform of torch.func, such as vmap. The call is not a unit.

        The arguments are the same as for `run_unit`.
        """
        return function(*args, **kwargs)

    def sees_inside(self, path: str) -> bool:
        """Return whether `run_inner` should be called for each operation in a module, which takes time."""
        return False

    @property
    def checkpoint(self) -> int:
        """The number of the running block of `torch.utils.checkpoint`, counted from 1; 0 outside of such blocks.

        A nested block has the number of the outer one.
        """
        return self._checkpoints if self._depth else 0

    def begin_checkpoint(self) -> bool:
        """Return whether the block that begins should run again in backward."""
        return True

    def end_checkpoint(self) -> None:
        """Called when a block that is not within another one has ended."""

    def __enter__(self) -> UnitMode:
        self._thread, self._inside = get_ident(), 0
        self._checkpoints, self._depth = 0, 0
        whole = self._closed | select_hooked(self._atomic)
        for path, module in self._atomic.items():
            name, call = (WHOLE_CALL, whole_call(module)) if path in whole else ("forward", module.forward)
            table = module.__dict__
            self._replaced.append((table, name, table.get(name)))
            table[name] = partial(self._call_module, path, call)
        self._apply = torch.autograd.Function.__dict__["apply"]  # it makes tensors, but is not a torch function
        before = self._apply

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            function = before.__get__(None, cls)
            if self._thread != get_ident():
                return function(*args, **kwargs)
            with self._open_checkpoint() if cls is ReentrantCheckpoint else nullcontext():
                if self._inside:
                    return function(*args, **kwargs)
                return self._unit(f"{cls.__name__}.apply", None, function, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        self._checkpoint_before = replace_checkpoints(self._make_checkpoint)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._thread = 0  # forwards that a checkpoint still holds then run unchanged
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        replace_checkpoints(self._checkpoint_before)
        for table, name, before in reversed(self._replaced):
            if before is None:
                del table[name]
            else:
                table[name] = before
        self._replaced = []

    def __torch_function__(self, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", None) or str(function)
        if self._inside:
            return self.run_inner(name, function, args, kwargs)
        if in_functorch():
            return self.run_transformed(name, None, function, args, kwargs)
        if name == "__get__":
            name = function.__self__.__name__  # type: ignore[attr-defined]
            if name not in _TENSOR_PROPERTIES:
                return self.look(name, function, args)
        elif name in _CHANGING_FUNCTIONS:
            name = "requires_grad" if name == "requires_grad_" else function.__self__.__name__  # type: ignore[attr-defined]
            return self.change(name, function, args, kwargs)
        elif name == "data_ptr":
            return self.look(name, function, args)
        elif name in _PROPERTY_FUNCTIONS or (not isinstance(function, type) and name.startswith("_assert")):
            return function(*args, **kwargs)
        return self._unit(name, None, function, args, kwargs)

    def _call_module(self, path: str, forward: Function, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside or self._thread != get_ident():
            return forward(*args, **kwargs)
        if self.sees_inside(path):
            return self._unit(path, path, forward, args, kwargs)
        top = pop_function_mode()
        if top is not self:
            push_function_mode(top)
            return self._unit(path, path, forward, args, kwargs)
        try:
            return self._unit(path, path, forward, args, kwargs)  # its operations have no overhead
        finally:
            push_function_mode(self)

    def _make_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        make = self._checkpoint_before
        follows = self._thread == get_ident() and torch.is_grad_enabled()
        return self._run_checkpoint(make, args, kwargs) if follows else make(*args, **kwargs)

    @contextmanager
    def _open_checkpoint(self) -> Iterator[bool]:
        """Count the block as a checkpoint.

        Yields:
            Whether the block should run again in backward.
        """
        self._checkpoints += not self._depth
        self._depth += 1
        try:
            yield self._depth > 1 or self.begin_checkpoint()
        finally:
            self._depth -= 1
            if not self._depth:
                self.end_checkpoint()

    def _run_checkpoint(self, make: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        with self._open_checkpoint() as runs_again:
            if not runs_again:
                yield
                return
            around = make(*args, **kwargs)
            self._advance(around)
            try:
                yield
            except BaseException as error:
                around.throw(error)
                raise
            self._advance(around)

    def _advance(self, around: Iterator[None]) -> None:
        """Run torch's code around a checkpoint. Its hooks of saved tensors call functions that are not units."""
        self._inside += 1
        try:
            next(around, None)
        finally:
            self._inside -= 1

    def _unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        self._inside += 1
        try:
            if in_functorch():
                return self.run_transformed(name, path, function, args, kwargs)
            return self.run_unit(name, path, function, args, kwargs)
        finally:
            self._inside -= 1
