"""The choice of the container that is pipelined, and the user's module while it has only the layers of this rank."""

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
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.proxy import Layers, StageProxy
from lightning_pipes.trainer.private_lightning import is_compiled
from lightning_pipes.trainer.user.remote_tensors import ParameterSlot

MIN_CONTAINER_SECONDS = 1e-3
"""Minimum time in seconds of a container for its time to be considered, because shorter times are mostly noise."""
MIN_CONTAINER_RATIO = 1.5
"""Minimum ratio of the parameters, or of the seconds, of two containers for one to be clearly larger than the other."""

_CPU = torch.device("cpu")


class NoContainerError(PipelineError):
    """Raised if no container of layers is clearly the largest."""


def find_pipelined(module: pl.LightningModule, path: str | None, seconds: Mapping[str, float] | None = None) -> str:
    """Return the path of the container to cut: `path`, or the largest outermost nn.Sequential or nn.ModuleList.

    The size of a container is its number of parameters without embeddings. If several containers have similar sizes,
    the largest nn.Sequential that is a child of the module is selected, or if there is none, the container that the
    pipeline plan of a Hugging Face model names. If one container is clearly the largest and no times were measured, a
    container that the pipeline plan of a surrounding model names is preferred. If times were measured and another
    container takes clearly longer than the container of this choice, it is selected regardless of its size.

    Args:
        module: the user's whole module.
        path: the path that the user named, if any.
        seconds: the time of each container that a step has run layer by layer, by path; None if not measured.

    Raises:
        NoContainerError: no path is given, and no container is clearly the largest.
        PipelineError: the module has no submodule with this path, or the submodule can't be run layer by layer.
    """
    owner = type(module).__name__
    path = _largest(module, seconds) if path is None else path
    try:
        full = module.get_submodule(path)
    except AttributeError:
        close = difflib.get_close_matches(path, [name for name, _ in module.named_modules()], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        children = ", ".join(repr(n) for n, _ in module.named_children())
        raise PipelineError(f"module={path!r}: {owner} has no such module.{hint} It has {children}") from None
    what = f"{owner}.{path} is a {type(full).__name__}"
    parts = path.split(".")
    for around in (".".join(parts[:n]) for n in range(len(parts) + 1)):
        if is_compiled(module.get_submodule(around)):
            raise PipelineError(
                f"{owner}.{around}".rstrip(".")
                + " is compiled as a whole, but every rank holds only some of its layers",
                "compile each layer separately instead: for layer in layers: layer.compile()",
            )
    if not path or not isinstance(full, nn.Sequential | nn.ModuleList):
        raise PipelineError(
            f"{what}; only an nn.Sequential, or an nn.ModuleList that is run in a loop, can be cut into stages",
            _candidates(module),
        )
    if _has_own_forward(full):
        raise PipelineError(
            f"{what} with a forward of its own, which would not be run",
            "name a plain nn.Sequential or nn.ModuleList inside it: PipelineStrategy(module=...)",
        )
    for name, layer in full.named_children():
        if isinstance(layer, nn.ModuleList | nn.ModuleDict) and type(layer).forward is nn.Module.forward:
            raise PipelineError(
                f"{owner}.{path}.{name} is a {type(layer).__name__}, which has no forward, so the layers can't be "
                "called one after the other",
                "make each layer one module with a forward",
            )
    if not all(map(_only_records, forward_hooks(full))):
        raise PipelineError(f"{owner}.{path} has forward hooks, which no rank could run", "register them on its layers")
    if backward_hooks(full):
        raise PipelineError(
            f"{owner}.{path} has backward hooks, which no rank could run, because its gradients are spread over "
            "several ranks",
            "register them on its layers",
        )
    return path


def _only_records(hook: object) -> bool:
    """Return whether a forward hook is a hook of PyTorchProfiler, which may be skipped because the profiler also
    registers hooks on the layers.
    """
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return isinstance(owner, RegisterRecordFunction)


def _largest(module: pl.LightningModule, seconds: Mapping[str, float] | None) -> str:
    """Return the path of the container that is cut if the user names none."""
    found = list_containers(module)
    sizes = dict(found if seconds is None else [each for each in found if each[0] in seconds])
    by_size = max(sizes, key=lambda path: sizes[path], default=None)
    close = [
        path for path, size in sizes.items() if by_size is not None and MIN_CONTAINER_RATIO * size > sizes[by_size]
    ]
    planned = None
    if by_size is not None and len(close) > 1:
        children = [path for path in close if "." not in path and isinstance(getattr(module, path), nn.Sequential)]
        planned = None if children else _planned(module, sizes)
        by_size = max(children, key=lambda path: sizes[path], default=planned)
    elif by_size is not None and seconds is None:  # an encoder of images or audio may run for some batches only
        planned = _planned(module, sizes, inside=by_size)
        by_size = planned or by_size
    if seconds:
        slowest = sorted(seconds, key=lambda path: -seconds[path])
        before = by_size or (slowest[1] if len(slowest) > 1 else None)
        told_apart = seconds[slowest[0]] >= MIN_CONTAINER_SECONDS
        if told_apart and (before is None or seconds[slowest[0]] >= MIN_CONTAINER_RATIO * seconds[before]):
            by_size = slowest[0]
    if by_size is None:
        single = [(_size(m), n) for n, m in module.named_children() if isinstance(m, nn.Sequential)]
        if not single or (found and max(single)[0] < found[0][1]):
            raise NoContainerError(
                f"{type(module).__name__} has no attribute that is an nn.Sequential, and there is no other container "
                "of layers that is clearly the largest",
                _candidates(module),
            )
        by_size = max(single)[1]  # one layer is enough for one stage; other problems are reported by a later check
    return by_size


def log_choice(module: pl.LightningModule, path: str) -> None:
    """Log the path of the selected container if there are other containers, or if it is nested in another module."""
    if "." in path or len(list_containers(module)) > 1:
        why = ", which the model's pp_plan names" if path in _plan_keys(module) else ""
        rank_zero_info(
            f"The pipeline is cut from self.{path}{why}. Set PipelineStrategy(module=...) to cut another container"
        )


def _plan_keys(module: nn.Module, inside: str | None = None) -> set[str]:
    """Return the paths in the pipeline plans of Hugging Face models. If `inside` is given, only plans of models that
    contain this container are considered.
    """
    plans = (
        (path, getattr(part, "pp_plan", None))
        for path, part in module.named_modules()
        if inside is None or f"{inside}.".startswith(f"{path}." if path else "")
    )
    return {f"{path}.{key}".lstrip(".") for path, plan in plans if isinstance(plan, Mapping) for key in plan}


def _planned(module: nn.Module, sizes: Mapping[str, int], inside: str | None = None) -> str | None:
    """Return the largest nn.ModuleList in the pipeline plans of Hugging Face models, or the last one of equal size."""
    keys = _plan_keys(module, inside)
    places = {path: place for place, (path, _) in enumerate(module.named_modules())}
    named = [path for path in sizes if path in keys and isinstance(module.get_submodule(path), nn.ModuleList)]
    return max(named, key=lambda path: (sizes[path], places[path]), default=None)


def list_containers(module: nn.Module) -> list[tuple[str, int]]:
    """Return the paths and sizes of the outermost containers that could be cut, in descending order of size.

    The size is the number of parameters without embeddings, which take much memory but little time.
    """
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
    """Return the number of parameters of a module without its embeddings."""
    tables = [m for m in part.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return _size(part) - sum(map(_size, tables))


def layer_sizes(full: Layers) -> list[int]:
    """Return the number of parameters of each layer plus one, so that no layer has size zero."""
    return [_size(layer) + 1 for layer in full]


MIN_STATISTICS_SAMPLES = 2
"""Minimum number of samples in a micro-batch for a mean and a variance. A short last batch is cut into fewer
micro-batches.
"""


def batch_statistics(full: nn.Module) -> list[str]:
    """Return the names of layers whose result for a sample depends on the other samples of a micro-batch."""
    return [name for name, m in full.named_modules() if isinstance(m, BatchNorm)]


class ContainerCut(ModuleCut):
    """A LightningModule whose pipelined container is replaced by a proxy with only the layers of this rank.

    Args:
        module: the user's whole module.
        path: the path of the pipelined container in the module.
        local: the numbers of the layers on this rank.
        interceptor: handles calls of the pipelined container and of its layers.
        device: the device of this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        path: str,
        local: Collection[int],
        interceptor: Interceptor,
        device: torch.device = _CPU,
    ) -> None:
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        super().__init__(module, path, full, local, device)
        self.proxy = StageProxy(full, self.local, interceptor, f"self.{path}", self.scope)
        self._set(self.proxy)
        self._let_go(set(range(len(full))) - {*self.local})
        self._slot_keys = {slot.key for slot in self._slots_of(range(len(full)))}
        release_free_memory()

    def owns(self, name: str) -> bool | None:
        """Return None, because all ranks have the buffers outside of the layers."""
        return None

    def check_in_place(self) -> None:
        """Raise PipelineError if the user's code has replaced the proxy of the layers by another object."""
        parent, _, name = self.path.rpartition(".")
        if getattr(self.module.get_submodule(parent), name, None) is not self.proxy:
            raise PipelineError(
                f"self.{self.path} has been replaced while its layers are spread over several ranks, which were cut "
                "when the run began. Make layers in __init__ or configure_model; a layer can be left out by a flag "
                "that its forward looks at"
            )

    def hold(self, local: Collection[int], arrived: Mapping[int, LayerState], device: torch.device) -> None:
        """Change the layers of this rank.

        Args:
            local: the numbers of the layers that this rank has afterwards. Other layers are released.
            arrived: the states of the layers that have moved to this rank, by number.
            device: the device on which the arrived layers are placed.
        """
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
        """Remove all layers from the module while the block runs."""
        layers, self.proxy._modules = self.proxy._modules, {}
        yield
        self.proxy._modules = layers

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the keys of the local layers in the state dict."""
        names = list(self.full._modules)
        return tuple(f"{self.path}.{names[number]}." for number in self.local)

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of the names of a layer's weights in the user's module."""
        return f"{self.path}.{list(self.full._modules)[layer]}."

    def select_own(self, state: Mapping[str, Any], outside: bool) -> dict[str, Any]:
        """Return the entries of this rank's layers in a state dict and, if `outside`, all entries of other modules than
        the pipelined container.
        """
        inside = f"{self.path}."
        return {
            key: value
            for key, value in state.items()
            if key.startswith(self.layer_prefixes) or (outside and not key.startswith(inside))
        }

    def unsaved(self, layers: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the buffers of these layers that state dicts do not contain, by name."""
        return {
            f"{key}.{name}": buffer
            for _, key, part in self._modules_of(layers)
            for name, buffer in part._buffers.items()
            if buffer is not None and name in unsaved_buffers(part)
        }

    def find_gaps(self) -> dict[str, list[ParameterSlot]]:
        """Return the slots that lack a tensor of another rank, by the key of the tensor.

        All keys of the layers are listed. The list of slots is empty if the tensor is on this rank.

        Raises:
            PipelineError: the user's code has wrapped modules of layers on other ranks, or has added parameters to
                layers during the run.
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
                f"self.{added[0]} was added to a layer during the run, and other ranks do not have it: a hook has "
                "added a module, as peft's load_adapter does. Add it before fit, in __init__ or configure_model"
            )
        return gaps

    def replaced_modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs of a module that is in use while the module is cut, and the original that it replaces."""
        return [(self.proxy, self.full)]

    def take_unsaved(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set buffers of layers of other ranks to the values that `unsaved` returned on these ranks, on the CPU."""
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            part = self.full.get_submodule(owner[len(self.path) + 1 :])
            part._buffers[own_name] = buffer.to("cpu")

    def _whole_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.full.parameters()
        yield from self.full.buffers()

    def _describe_spread(self) -> tuple[Any, ...]:
        return self.path, tuple(self.local)

    def _join(self) -> None:
        training = self.proxy.training
        self._set(self.full)
        self.full.training = training

    def _set(self, part: nn.Module) -> None:
        parent, _, name = self.path.rpartition(".")
        setattr(self.module.get_submodule(parent), name, part)

    def _slots_of(self, layers: Collection[int]) -> Iterator[ParameterSlot]:
        for number, key, part in self._modules_of(layers):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield ParameterSlot(number, part._parameters, name, parameter, f"{key}.{name}")
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in unsaved_buffers(part):
                    yield ParameterSlot(number, part._buffers, name, buffer, f"{key}.{name}")

    def _modules_of(self, layers: Collection[int]) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield all modules of these layers, each with the number of its layer and its name in the whole module."""
        for number, (layer_name, layer) in enumerate(self.full._modules.items()):
            if number in layers:
                assert layer is not None
                for key, part in layer.named_modules(prefix=f"{self.path}.{layer_name}"):
                    yield number, key, part


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
