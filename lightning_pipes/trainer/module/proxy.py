"""The proxy that stands where the pipelined module stood: the layers of this rank, under their old names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.layer_loop import LayerLoop
from lightning_pipes.trainer.module.remote_tensors import HookScope

Layers = nn.Sequential | nn.ModuleList
"""Modules that can be cut: called as a whole, or layer by layer in a loop of the user's code."""


class StageProxy(nn.Module):
    """Registers only the layers that live here, so `parameters()`, `state_dict()` and `train()` see those; its length,
    order, indices and type are those of the whole module. Layers of other ranks can be looked at, with weights on
    `meta`; while a step of the user's runs, stand-ins are in their place.

    Args:
        full: the whole module; not registered.
        local: numbers of the layers that live here.
        interceptor: what a call does, and a loop over the layers.
        name: how the user calls the module.
        scope: while it names a hook, all layers are there.
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
        self.__dict__.update(hidden)  # past nn.Module, which would register the whole module
        self.hold_layers(local)
        self.training = full.training  # layers keep their own modes, as Lightning has it

    def hold_layers(self, local: Iterable[int]) -> None:
        """Register these layers, and no others."""
        full = self.__dict__["_full"]
        names = list(full._modules)
        self._modules.clear()
        for number in sorted(local):
            self._modules[names[number]] = full[number]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.__dict__["_full"], nn.ModuleList):
            return self.__dict__["_full"](*args, **kwargs)  # torch says that a list can't be called
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
        """Iterate over submodules; a hook sees the layers of all ranks.

        Raises:
            PipelineError: a step needs the layers of all ranks, as a penalty on all weights does.
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
        """Iterate over the layers; a hook sees those of all ranks, and a step the stand-ins of all."""
        shown = self.__dict__["_full"] if self._reach_layers() else self.__dict__["_loop"].shown
        yield from super().named_children() if shown is None else shown.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the layers; a hook sees those of all ranks."""
        return (
            self.__dict__["_full"].state_dict(*args, **kwargs)
            if self._reach_layers()
            else super().state_dict(*args, **kwargs)
        )

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Drop the entries of other ranks' layers, which load them themselves, from a state dict."""
        remote = tuple(f"{prefix}{n}." for n in self.__dict__["_full"]._modules if n not in self._modules)
        for key in [key for key in state if key.startswith(remote)] if self._in_hook else ():
            del state[key]
        super()._load_from_state_dict(state, prefix, *args)

    def _reach_layers(self) -> bool:
        """Return whether a hook runs, and tell its scope that it reaches layers."""
        in_hook = self._in_hook
        if in_hook:
            self.__dict__["_scope"].on_layers()
        return in_hook

    @property
    def _in_hook(self) -> bool:
        scope = self.__dict__["_scope"]
        return scope is not None and bool(scope.hook) and not self.__dict__["_call"].running

    def _refuse(self, what: str) -> NoReturn:
        """Raise PipelineError: the layers are those that training began with."""
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
            return getattr(self.__dict__["_full"], name)  # attributes of a subclass, foreign layers

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """Return a copy of the whole module with the weights of this rank, which can be paired with those here; those
        of other ranks have none. It can't be called, unless all are here."""
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
    def __class__(self) -> type:  # so that `isinstance` answers as for the whole module
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
