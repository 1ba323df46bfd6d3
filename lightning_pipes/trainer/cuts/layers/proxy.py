"""The proxy that replaces the pipelined container and has the layers of this rank under their original names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.layer_loop import LayerLoop
from lightning_pipes.trainer.user.remote_tensors import HookScope

Layers = nn.Sequential | nn.ModuleList
"""Containers that can be cut, which user code calls either as a whole or layer by layer in a loop."""


class StageProxy(nn.Module):
    """A proxy of the pipelined container in which only the layers of this rank are registered.

    Therefore, `parameters()`, `state_dict()` and `train()` only concern these layers. The length, order, indices and
    type of the proxy are the same as for the whole container. The layers of other ranks can be accessed, but their
    weights have no values. While a step of the user runs, all layers are replaced by stand-ins.

    Args:
        full: the whole container, which is not registered.
        local: the numbers of the layers on this rank.
        interceptor: handles a call of the proxy, or a loop over its layers.
        name: the expression with which user code accesses the container.
        scope: specifies whether a hook is running. While a hook runs, the layers of all ranks are visible.
    """

    def __init__(
        self,
        full: Layers,
        local: Iterable[int],
        interceptor: Interceptor,
        name: str,
        scope: HookScope | None = None,
    ) -> None:
        super().__init__()
        loop = LayerLoop(name, full, lambda: interceptor.running, interceptor.call_layers)
        hidden = {"_full": full, "_call": interceptor, "_loop": loop, "_name": name, "_scope": scope}
        self.__dict__.update(hidden)  # bypasses nn.Module, which would register `full`
        self.hold_layers(local)
        self.training = full.training  # layers keep their own modes, as in Lightning

    def hold_layers(self, local: Iterable[int]) -> None:
        """Register these layers instead of the current ones."""
        full = self.__dict__["_full"]
        names = list(full._modules)
        self._modules.clear()
        for number in sorted(local):
            self._modules[names[number]] = full[number]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.__dict__["_full"], nn.ModuleList):
            return self.__dict__["_full"](*args, **kwargs)  # torch raises its own error for lists
        return self.__dict__["_call"](args, kwargs)

    def __len__(self) -> int:
        return len(self.__dict__["_full"])

    def __iter__(self) -> Iterator[Any]:
        self._reach_layers()
        return iter(self.__dict__["_loop"].shown or self.__dict__["_full"])

    def __getitem__(self, index: int | slice) -> Any:
        self._reach_layers()
        return (self.__dict__["_loop"].shown or self.__dict__["_full"])[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules and their names. A hook sees the layers of all ranks.

        Raises:
            PipelineError: a step iterates over all modules or parameters, for example for a penalty on all weights, but
                some layers are on other ranks.
        """
        call = self.__dict__["_call"]
        if self._reach_layers():
            memo = set() if memo is None else memo
            if self not in memo:
                if remove_duplicate:
                    memo.add(self)
                yield prefix, self
                for name, layer in self.__dict__["_full"]._modules.items():
                    yield from layer.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)
            return
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if call.running and len(self._modules) < len(self):
            where = f"self.{prefix}" if prefix else "the pipelined module"
            raise PipelineError(
                f"a step goes through all modules or parameters of {where}, but only some of its layers are on "
                "this rank. A sum over them would differ from one process. Penalise weights by the optimizer's "
                "weight_decay; let layers return what they add to the loss with their output"
            )

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers and their names. A hook sees the layers of all ranks, and a step sees all stand-ins."""
        shown = self.__dict__["_full"] if self._reach_layers() else self.__dict__["_loop"].shown
        yield from super().named_children() if shown is None else shown.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the layers. A hook sees the layers of all ranks."""
        return (
            self.__dict__["_full"].state_dict(*args, **kwargs)
            if self._reach_layers()
            else super().state_dict(*args, **kwargs)
        )

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Load a state dict. In a hook, entries of layers on other ranks are removed, because those ranks load them."""
        remote = tuple(f"{prefix}{n}." for n in self.__dict__["_full"]._modules if n not in self._modules)
        for key in [key for key in state if key.startswith(remote)] if self._in_hook else ():
            del state[key]
        super()._load_from_state_dict(state, prefix, *args)

    def _reach_layers(self) -> bool:
        """Return whether a hook is running, and if so, notify the scope that it accesses layers."""
        in_hook = self._in_hook
        if in_hook:
            self.__dict__["_scope"].on_layers()
        return in_hook

    @property
    def _in_hook(self) -> bool:
        scope = self.__dict__["_scope"]
        return scope is not None and bool(scope.hook) and not self.__dict__["_call"].running

    def _refuse(self, what: str) -> NoReturn:
        """Raise PipelineError because the layers can't be changed while they are on several ranks."""
        call, scope, name = (self.__dict__[key] for key in ("_call", "_scope", "_name"))
        caller = (scope.hook if scope is not None else "") or ("a step" if call.running else "code outside of a step")
        raise PipelineError(
            f"{caller} {what} {name} while its layers are spread over several ranks, which were cut when the run "
            "began. Make layers in __init__ or configure_model, and hooks on the layers; a layer can be left out by a "
            "flag that its forward looks at"
        )

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse(f"adds a layer {name!r} to")

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        self._refuse(f"replaces layer {index} of")

    def __delitem__(self, index: Any) -> None:
        self._refuse(f"removes layer {index} of")

    def _added(self, *_: Any) -> NoReturn:
        self._refuse("adds layers to")

    append = extend = insert = __iadd__ = __add__ = __mul__ = __imul__ = _added

    def pop(self, *_: Any) -> NoReturn:
        """Refuse to remove a layer."""
        self._refuse("removes a layer of")

    def _hooked(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("registers a backward hook on")

    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _hooked

    def __getattr__(self, name: str) -> Any:
        shown = self.__dict__["_loop"].shown
        if shown is not None and name in shown._modules:
            return shown._modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_full"], name)  # an attribute of a subclass, or a layer on another rank

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """Return a copy of the whole container, with parameters that correspond to the parameters of the original.

        Only the layers of this rank have values. The copy can't be called unless this rank has all layers.
        """
        copied: Layers = copy.deepcopy(self.__dict__["_full"], memo)
        if len(self._modules) < len(self):
            copied.register_forward_pre_hook(partial(_refuse_call, self.__dict__["_name"]))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = self.__dict__["_name"]
        raise PipelineError(
            f"{name} can't be pickled while its layers are spread over several ranks; write a checkpoint, by "
            "trainer.save_checkpoint on all ranks, or pickle the module when the Trainer has ended"
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance` works as for the container
        return type(self.__dict__["_full"])

    def __repr__(self) -> str:
        layers = self.__dict__["_full"]._modules.items()
        lines = [f"  ({n}): {m!r}" if n in self._modules else f"  ({n}): on another rank" for n, m in layers]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])


def _refuse_call(name: str, *_: Any) -> None:
    raise PipelineError(
        f"a copy of {name} that was made while its layers were spread over several ranks holds this rank's layers only "
        "and can't be called; load a checkpoint into a copy that was made before or after training"
    )
