"""The functions that initialize the parts of a module on `meta`, and detection of the tensors that they set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.engine.private_torch import TorchDispatchMode, list_changed_arguments, storage_key
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.weights import private_transformers as private

_RESET_METHOD = "reset_parameters"


@dataclass(frozen=True)
class Initializer:
    """The function that initializes a part of a module.

    If the function is `reset_parameters` of the part, its calls of `reset_parameters` of inner parts without arguments
    have no effect, because inner parts are initialized before.

    Attributes:
        part: the part of the module.
        model: the model of transformers that contains the part, whose `_init_weights` is the function; None if the
            function is `reset_parameters` of the part.
    """

    part: nn.Module
    model: nn.Module | None

    def __call__(self) -> None:
        self.run(_skip_plain_call)

    def run(self, change: Callable[[Any], Any]) -> None:
        """Initialize the part.

        Args:
            change: takes the `reset_parameters` of an inner part and returns the function that replaces it meanwhile.
        """
        if self.model is not None:
            private.initialize(self.model, self.part)
            return
        inside = [each for each in self.part.modules() if each is not self.part and _can_reset(each)]
        before = [vars(each).get(_RESET_METHOD) for each in inside]
        for each in inside:
            vars(each)[_RESET_METHOD] = change(getattr(each, _RESET_METHOD))
        try:
            getattr(self.part, _RESET_METHOD)()
        finally:
            for each, own in zip(inside, before, strict=True):
                vars(each).pop(_RESET_METHOD)
                if own is not None:
                    vars(each)[_RESET_METHOD] = own


def _skip_plain_call(reset: Any) -> Any:
    return lambda *args, **kwargs: reset(*args, **kwargs) if args or kwargs else None


def _can_reset(part: nn.Module) -> bool:
    """Return whether a part has a `reset_parameters` that can be called without arguments."""
    reset = getattr(part, _RESET_METHOD, None)
    if not callable(reset):
        return False
    try:
        inspect.signature(reset).bind()
    except TypeError:
        return False
    return True


def find_initializers(module: nn.Module) -> dict[int, Initializer]:
    """Return the initializers of the parts of a module by the id of the part. Some parts have no initializer."""
    found: dict[int, Initializer] = {}

    def visit(part: nn.Module, model: nn.Module | None) -> None:
        model = part if private.is_pretrained_model(part) else model
        if model is not None or _can_reset(part):
            found[id(part)] = Initializer(part, model)
        for child in part.children():
            visit(child, model)

    visit(module, None)
    return found


def list_parts_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module in the order of their initialization: inner parts before the part around them."""
    seen: set[int] = set()

    def visit(part: nn.Module) -> Iterator[nn.Module]:
        seen.add(id(part))
        for child in part.children():
            if id(child) not in seen:
                yield from visit(child)
        yield part

    return visit(module)


class InitialWrites:
    """The tensors that initializers set, which are found by running the initializers on `meta`.

    Args:
        module: the module.
        initializers: the initializers of its parts, see `find_initializers`.

    Attributes:
        inside: the tensors of inner parts that the initializer of a part sets, by the id of the part.
        lost: the names of tensors on `meta` that code outside of initializers has set.
    """

    def __init__(self, module: nn.Module, initializers: Mapping[int, Initializer]) -> None:
        self.inside: dict[int, list[Tensor]] = {}
        self.lost: list[str] = []
        if has_shards(module) or not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            return
        with _without_values(module) as originals, forked_rng(torch.device("cpu")):
            for part in list_parts_first(module):
                if id(part) in initializers:
                    self._find_inside(initializers[id(part)], originals)
            for path, part in module.named_modules():
                initializer = initializers.get(id(part))
                if initializer is not None and initializer.model is None:
                    self.lost += [f"{path}.{name}".lstrip(".") for name in _list_lost(part, originals)]

    def _find_inside(self, initializer: Initializer, originals: Mapping[int, Tensor]) -> None:
        own, mode = {id(t) for t in _tensors_of(initializer.part)}, _ChangedMemory()
        inside = [t for part in initializer.part.modules() for t in _tensors_of(part) if id(t) not in own]
        try:
            with mode:
                initializer.run(mode.pause_in)
            changed = [t for t in inside if storage_key(t) in mode.found]
        except Exception:  # the user's code needs values; it may set any tensor
            changed = inside
        if changed:
            self.inside[id(initializer.part)] = [originals[key] for key in dict.fromkeys(map(id, changed))]


def _list_lost(part: nn.Module, originals: Mapping[int, Tensor]) -> list[str]:
    """Return the names of tensors of a part that were changed more often than initializers change them.

    Torch counts in-place changes also for tensors on `meta`. A part may call its initializer several times when it is
    created.
    """
    inits = [vars(kind)["__init__"] for kind in type(part).__mro__ if "__init__" in vars(kind)]
    times = sum(_RESET_METHOD in getattr(getattr(init, "__code__", None), "co_names", ()) for init in inits)
    named = {**part._parameters, **part._buffers}
    pairs = ((name, t, originals[id(t)]) for name, t in named.items() if t is not None)
    return [name for name, stand, t in pairs if t.is_meta and t._version > stand._version * max(times, 1)]


class _ChangedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the storages that operations change.

    Attributes:
        found: the keys of the changed storages, see `storage_key`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()
        self._is_paused = False

    def pause_in(self, reset: Any) -> Any:
        """Return a wrapper of `reset` that records no changes if it is called without arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, not (args or kwargs)
            try:
                return reset(*args, **kwargs)
            finally:
                self._is_paused = before

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_paused:
            self.found.update(map(storage_key, list_changed_arguments(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _tensors_of(part: nn.Module) -> list[Tensor]:
    return [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]


@contextmanager
def _without_values(module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Replace the tensors of a module by tensors on `meta` while the block runs.

    Yields:
        the original tensors by the ids of their replacements.
    """
    stands: dict[int, Tensor] = {}
    originals: dict[int, Tensor] = {}
    tables = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    before: list[dict[str, Any]] = [dict(table) for table in tables]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                if id(tensor) not in stands:
                    empty = torch.empty_like(tensor, device="meta")
                    is_weight = isinstance(tensor, nn.Parameter)
                    stands[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    originals[id(stands[id(tensor)])] = tensor
                table[name] = stands[id(tensor)]  # type: ignore[assignment]
    try:
        yield originals
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
