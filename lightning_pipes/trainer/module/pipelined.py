"""Cutting the user's module: which part is pipelined, what stays on this rank, and the way back."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.engine.allocator import release_free_memory
from lightning_pipes.engine.private_torch import BatchNorm, backward_hooks, forward_hooks, unsaved_buffers
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.proxy import Layers, StageProxy
from lightning_pipes.trainer.module.remote_tensors import HookScope, ParameterSlot, RemoteParameters
from lightning_pipes.trainer.private_lightning import is_compiled

INCOMPLETE = "_lightning_pipes_incomplete"
"""Attribute of a module whose last run failed, so that the layers of other ranks have no values."""

SPREAD = "_lightning_pipes_spread"
"""Attribute of a module that was made on meta and has been run: the path of its container, and the layers here."""

MEASURABLE = 1e-3
"""Seconds that a container must take for its time to count: less is noise."""
CLEARLY_LARGER = 1.5
"""By what factor the parameters of a container must exceed those of all others for it to be cut without being named."""

_CPU = torch.device("cpu")


class NoContainerError(PipelineError):
    """There is no container of layers that is clearly the largest."""


def find_pipelined(module: pl.LightningModule, path: str | None, seconds: Mapping[str, float] | None = None) -> str:
    """Return the path of the container to cut: `path`, or else the largest outermost nn.Sequential or nn.ModuleList.

    Size is the number of parameters without embeddings, or time where one clearly takes longer. Of several nearly as
    large, a child of the module is taken. A container that a Hugging Face model's pipeline plan names is preferred,
    unless another is known to run.

    Args:
        seconds: the time of each container that a step has run layer by layer, by path; None if not measured.

    Raises:
        PipelineError: there is none or no clear one, or it is not run layer by layer.
    """
    owner = type(module).__name__
    path = _largest(module, seconds) if path is None else path
    try:
        full = module.get_submodule(path)
    except AttributeError:
        close = difflib.get_close_matches(path, [name for name, _ in module.named_modules()], n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ";"
        children = ", ".join(repr(n) for n, _ in module.named_children())
        raise PipelineError(f"module={path!r}: {owner} has no such module{hint} It has {children}") from None
    what = f"{owner}.{path} is a {type(full).__name__}"
    parts = path.split(".")
    for around in (".".join(parts[:n]) for n in range(len(parts) + 1)):
        if is_compiled(module.get_submodule(around)):
            raise PipelineError(
                f"{owner}.{around}".rstrip(".") + " is compiled as a whole, but every rank holds only some of its "
                "layers; compile these instead, each by itself: for layer in layers: layer.compile()"
            )
    if not path or not isinstance(full, nn.Sequential | nn.ModuleList):
        raise PipelineError(
            f"{what}; only an nn.Sequential, or an nn.ModuleList that is run in a loop, can be cut into stages. "
            f"{_candidates(module)}"
        )
    if _has_own_forward(full):
        raise PipelineError(
            f"{what} with a forward of its own, which would not be run; "
            "name a plain nn.Sequential or nn.ModuleList inside it: PipelineStrategy(module=...)"
        )
    for name, layer in full.named_children():
        if isinstance(layer, nn.ModuleList | nn.ModuleDict) and type(layer).forward is nn.Module.forward:
            raise PipelineError(
                f"{owner}.{path}.{name} is a {type(layer).__name__}, which has no forward, so the layers can't be "
                "called one after the other; make each layer one module with a forward"
            )
    if not all(map(_only_records, forward_hooks(full))):
        raise PipelineError(f"{owner}.{path} has forward hooks, which no rank could run; register them on its layers")
    if backward_hooks(full):
        raise PipelineError(
            f"{owner}.{path} has backward hooks, which no rank could run, because its gradients are on several; "
            "register them on its layers"
        )
    return path


def _only_records(hook: object) -> bool:
    """Return whether a forward hook is PyTorchProfiler's, which times the module; its layers have hooks of their
    own."""
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return isinstance(owner, RegisterRecordFunction)


def _largest(module: pl.LightningModule, seconds: Mapping[str, float] | None) -> str:
    """Return the path of the container that is cut if none is named."""
    found = list_containers(module)
    sizes = dict(found if seconds is None else [each for each in found if each[0] in seconds])
    by_size = max(sizes, key=lambda path: sizes[path], default=None)
    close = [path for path, size in sizes.items() if by_size is not None and CLEARLY_LARGER * size > sizes[by_size]]
    planned = None
    if by_size is not None and len(close) > 1:
        children = [path for path in close if "." not in path and isinstance(getattr(module, path), nn.Sequential)]
        planned = None if children else _planned(module, sizes)
        by_size = max(children, key=lambda path: sizes[path], default=planned)
    elif by_size is not None and seconds is None:  # towers for images and sounds run for some batches only
        planned = _planned(module, sizes, inside=by_size)
        by_size = planned or by_size
    if seconds:
        slowest = sorted(seconds, key=lambda path: -seconds[path])
        before = by_size or (slowest[1] if len(slowest) > 1 else None)
        told_apart = seconds[slowest[0]] >= MEASURABLE
        if told_apart and (before is None or seconds[slowest[0]] >= CLEARLY_LARGER * seconds[before]):
            by_size = slowest[0]
    if by_size is None:
        single = [(_size(m), n) for n, m in module.named_children() if isinstance(m, nn.Sequential)]
        if not single or (found and max(single)[0] < found[0][1]):
            raise NoContainerError(
                f"{type(module).__name__} has no attribute that is an nn.Sequential, and there is no other container "
                f"of layers that is clearly the largest. {_candidates(module)}"
            )
        by_size = max(single)[1]  # one layer is enough for one stage; a later check names what else is wrong with it
    return by_size


def log_choice(module: pl.LightningModule, path: str) -> None:
    """Log which container was chosen, where it is not the only one or is a part of another module."""
    if "." in path or len(list_containers(module)) > 1:
        why = ", which the model's pp_plan names" if path in _plan_keys(module) else ""
        rank_zero_info(f"The pipeline is cut from self.{path}{why}; PipelineStrategy(module=...) names another")


def _plan_keys(module: nn.Module, inside: str | None = None) -> set[str]:
    """Return the paths that pipeline plans of Hugging Face models name. With `inside` only plans count of models that
    this container is a part of."""
    plans = (
        (path, getattr(part, "pp_plan", None))
        for path, part in module.named_modules()
        if inside is None or f"{inside}.".startswith(f"{path}." if path else "")
    )
    return {f"{path}.{key}".lstrip(".") for path, plan in plans if isinstance(plan, Mapping) for key in plan}


def _planned(module: nn.Module, sizes: Mapping[str, int], inside: str | None = None) -> str | None:
    """Return the largest container that a Hugging Face model's pipeline plan names; the last of equal ones."""
    keys = _plan_keys(module, inside)
    places = {path: place for place, (path, _) in enumerate(module.named_modules())}
    named = [path for path in sizes if path in keys and isinstance(module.get_submodule(path), nn.ModuleList)]
    return max(named, key=lambda path: (sizes[path], places[path]), default=None)


def list_containers(module: nn.Module) -> list[tuple[str, int]]:
    """Paths and sizes of outermost containers that could be cut, the largest first; embeddings do not count, which take
    much memory and little time."""
    found: list[tuple[str, int]] = []

    def search(part: nn.Module, prefix: str) -> None:
        for name, child in part.named_children():
            if _could_be_cut(child):
                found.append((f"{prefix}{name}", work_size(child)))
            else:
                search(child, f"{prefix}{name}.")

    search(module, "")
    return sorted(found, key=lambda f: -f[1])


def _could_be_cut(part: nn.Module) -> bool:
    if not isinstance(part, nn.Sequential | nn.ModuleList) or len(part) < 2 or _has_own_forward(part):
        return False
    return not any(isinstance(layer, nn.ModuleList | nn.ModuleDict) and _no_forward(layer) for layer in part)


def _no_forward(layer: nn.Module) -> bool:
    return type(layer).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _candidates(module: nn.Module) -> str:
    found = list_containers(module)
    if not found:
        return "Put the layers into one and call them in order: PipelineStrategy(module='path.to.it')"
    listed = ", ".join(f"{path!r} ({size} parameters)" for path, size in found[:5])
    return f"Name one: PipelineStrategy(module=...); there are {listed}"


def _has_own_forward(full: nn.Module) -> bool:
    return type(full).forward not in (nn.Sequential.forward, nn.ModuleList.forward)


def work_size(part: nn.Module) -> int:
    """Return the number of parameters without embeddings."""
    tables = [m for m in part.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return _size(part) - sum(map(_size, tables))


def layer_sizes(full: Layers) -> list[int]:
    """Return the number of parameters of each layer, plus one so that no layer is free."""
    return [_size(layer) + 1 for layer in full]


LEAST_FOR_STATISTICS = 2
"""Samples that a micro-batch needs for a mean and a variance: a short last batch is cut into fewer."""


def batch_statistics(full: nn.Module) -> list[str]:
    """Return names of layers with results that depend on the samples beside each in a micro-batch."""
    return [name for name, m in full.named_modules() if isinstance(m, BatchNorm)]


class CutModule:
    """A LightningModule with the layers of this rank in place of its pipelined part.

    The weights of other ranks' layers are released; what is left of them is on `meta`. `restore` brings the whole
    module back, with the very same Parameter objects, unless `stays_spread`.

    Attributes:
        stays_spread: whether the layers of other ranks stay on `meta` when the run ends, as where they were made there.

    Args:
        module: the user's module, whole.
        path: the pipelined container in it.
        local: numbers of the layers that live here.
        interceptor: what calling the pipelined module or its layers does.
        device: of this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        path: str,
        local: Collection[int],
        interceptor: Interceptor,
        device: torch.device = _CPU,
    ) -> None:
        self.module = module
        self.path = path
        self.keys = list(module.state_dict())
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        self.full = full
        self.local = sorted(local)
        self.scope = HookScope(device)
        """Says which of the user's hooks runs."""
        self.proxy = StageProxy(full, self.local, interceptor, f"self.{path}", self.scope)
        self._set(self.proxy)
        self.stays_spread = any(t.is_meta for t in (*full.parameters(), *full.buffers()))
        self._absent = RemoteParameters(self.scope)
        self._let_go(set(range(len(full))) - {*self.local})
        self._slot_keys = {slot.key for slot in self._slots_of(range(len(full)))}
        release_free_memory()

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter of the whole module lives on other ranks only."""
        return tensor in self._absent

    def owns(self, name: str) -> bool | None:
        """Return whether this rank's value of a buffer outside of the layers counts; None if all ranks have the same.

        Args:
            name: of the buffer in the module.
        """
        return None

    def check_in_place(self) -> None:
        """Raise PipelineError if code of the user's has put something else in the place of the layers."""
        parent, _, name = self.path.rpartition(".")
        if getattr(self.module.get_submodule(parent), name, None) is not self.proxy:
            raise PipelineError(
                f"self.{self.path} has been replaced while its layers are spread over several ranks, which were cut "
                "when the run began. Make layers in __init__ or configure_model; a layer can be left out by a flag "
                "that its forward looks at"
            )

    def check_arrival(self, layer: int) -> None:
        """Check that a layer can move to this rank.

        Raises:
            PlanError: see `RemoteParameters.check`.
        """
        self._absent.check(layer)

    def hold(self, local: Collection[int], arrived: Mapping[int, LayerState], device: torch.device) -> None:
        """Take the `local` layers: those that have `arrived`, on `device`, and those that stay."""
        leaving = {*self.local} - {*local}
        self.local = sorted(local)
        self.proxy.hold_layers(self.local)
        for number, state in arrived.items():
            layer = self.full[number]
            values = dict(state.tensors_on(device))
            own = dict([*layer.named_parameters(), *layer.named_buffers()])
            self._absent.take_back(number, {id(t): values[name] for name, t in own.items()})
            state.put(layer, device)
        self._let_go(leaving)

    def _let_go(self, layers: Collection[int]) -> None:
        here = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        self._absent.add(slot for slot in self._slots_of(layers) if id(slot.tensor) not in here)

    @contextmanager
    def without_layers(self) -> Iterator[None]:
        """The module has none of its layers for as long as the block runs."""
        layers, self.proxy._modules = self.proxy._modules, {}
        yield
        self.proxy._modules = layers

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The local layers by number."""
        return {number: self.full[number] for number in self.local}

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        """How the state-dict keys of the local layers begin."""
        names = list(self.full._modules)
        return tuple(f"{self.path}.{names[number]}." for number in self.local)

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of a layer's weights in the user's module."""
        return f"{self.path}.{list(self.full._modules)[layer]}."

    def local_state(self, outside: bool) -> dict[str, Any]:
        """This rank's part of the state dict: its layers, and with `outside` what is not pipelined."""
        return self.select_own(self.module.state_dict(), outside)

    def select_own(self, state: Mapping[str, Any], outside: bool) -> dict[str, Any]:
        """Return the entries of this rank's layers, and with `outside` those of what is not pipelined."""
        inside = f"{self.path}."
        return {
            key: value
            for key, value in state.items()
            if key.startswith(self.layer_prefixes) or (outside and not key.startswith(inside))
        }

    def unsaved(self, layers: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the buffers of these layers that are in no state dict, by name."""
        return {
            f"{key}.{name}": buffer
            for _, key, part in self._modules_of(layers)
            for name, buffer in part._buffers.items()
            if buffer is not None and name in unsaved_buffers(part)
        }

    def in_order(self, parts: Collection[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the whole state dict from all ranks' parts, with the keys in the order of the whole module."""
        merged = {key: value for part in parts for key, value in part.items()}
        ordered = {key: merged.pop(key) for key in self.keys if key in merged}
        return {**ordered, **merged}

    def tensors(self, layers: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield key and value of each parameter and saved buffer of these layers, in the order of the whole module.

        A tensor in several places comes once. Those of other ranks' layers are stand-ins on `meta`.
        """
        seen: set[int] = set()
        for slot in self._slots_of(layers):
            if id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                yield slot.key, slot.tensor

    def find_gaps(self) -> dict[str, list[ParameterSlot]]:
        """Return the slots of each tensor by its key, which are none where the tensor is here.

        Raises:
            PipelineError: code of the user's has put other modules around those of layers on other ranks.
        """
        slots = [*self._slots_of(range(len(self.full)))]
        gaps: dict[str, list[ParameterSlot]] = {slot.key: [] for slot in slots}
        for slot in self._absent.slots:
            if slot.key not in gaps:
                raise PipelineError(
                    f"a hook has replaced self.{slot.key} of a layer on another rank, as adapters of peft do. Put such "
                    "modules in before fit, in __init__ or configure_model"
                )
            gaps[slot.key].append(slot)
        added = [
            slot.key for slot in slots if isinstance(slot.tensor, nn.Parameter) and slot.key not in self._slot_keys
        ]
        if added:
            raise PipelineError(
                f"self.{added[0]} has come into a layer while the run went on, and other ranks do not have it: a hook "
                "has added a module, as peft's load_adapter does. Add it before fit, in __init__ or configure_model"
            )
        return gaps

    def list_parameters(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the parameters that are seen of the module now, with their names, by id.

        Those of other ranks' layers, of which hooks see stand-ins, are what the whole module has.
        """
        absent = {id(slot.table[slot.name]): slot.tensor for slot in self._absent.slots}
        return {id(p): (name, absent.get(id(p), p)) for name, p in self.module.named_parameters()}

    def name_tensors(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the name and the tensor of each parameter and saved buffer by the ids of tensors.

        Those of other ranks are found by their stand-ins, and by the objects that user code may have kept.
        """
        roots = [("", self.module), *((self.path, full) for _, full in self.replaced_modules())]
        named = {
            id(tensor): (f"{path}.{name}".lstrip("."), tensor)
            for prefix, root in roots
            for path, part in root.named_modules(prefix=prefix)
            for table, skipped in ((part._parameters, ()), (part._buffers, unsaved_buffers(part)))
            for name, tensor in table.items()
            if tensor is not None and name not in skipped
        }
        return {**named, **{id(s.tensor): (s.key, s.table.get(s.name, s.tensor)) for s in self._absent.slots}}

    def replaced_modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the modules that stand in the place of others while the module is cut, each with that other one."""
        return [(self.proxy, self.full)]

    def take_unsaved(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Give layers of other ranks the buffers that `unsaved` gave there."""
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            part = self.full.get_submodule(owner[len(self.path) + 1 :])
            part._buffers[own_name] = buffer.to("cpu")

    def restore(self, ended: bool) -> None:
        """Put the whole module back.

        Args:
            ended: whether the run has ended as it should and all gaps have values, unless `stays_spread`; the
                layers of other ranks are on `meta` otherwise.
        """
        training = self.proxy.training
        self._set(self.full)
        self._absent.put_back()
        vars(self.module).pop(SPREAD, None)
        for slot in self._absent.slots:
            whole = ended and not (self.stays_spread and slot.tensor.untyped_storage().nbytes() == 0)
            slot.table[slot.name] = slot.tensor if whole else on_meta(slot.table[slot.name])
        if ended and self.stays_spread:
            self.module.__dict__[SPREAD] = (self.path, tuple(self.local))
        elif not ended and self._absent.slots:
            self.module.__dict__[INCOMPLETE] = True
        self.full.training = training

    def _set(self, part: nn.Module) -> None:
        parent, _, name = self.path.rpartition(".")
        setattr(self.module.get_submodule(parent), name, part)

    def _slots_of(self, layers: Collection[int]) -> Iterator[ParameterSlot]:
        """Where these layers keep parameters and saved buffers. Buffers that are not saved stay: `take_unsaved`
        brings back their values."""
        for number, key, part in self._modules_of(layers):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield ParameterSlot(number, part._parameters, name, parameter, f"{key}.{name}")
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in unsaved_buffers(part):
                    yield ParameterSlot(number, part._buffers, name, buffer, f"{key}.{name}")

    def _modules_of(self, layers: Collection[int]) -> Iterator[tuple[int, str, nn.Module]]:
        """All modules of these layers: the layer's number, and the name in the whole module."""
        for number, (layer_name, layer) in enumerate(self.full._modules.items()):
            if number in layers:
                assert layer is not None
                for key, part in layer.named_modules(prefix=f"{self.path}.{layer_name}"):
                    yield number, key, part


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values in the place of another one."""
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
