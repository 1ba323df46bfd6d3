"""Initialization of weights on `meta`, as created by `with torch.device("meta"):` in `configure_model`.

No rank ever holds all of these weights. Each rank initializes the weights of its own layers and the weights outside of
the pipelined module. The values are read from the files that were passed to `load_pretrained`. Otherwise, they are set
by `reset_parameters`, which is the convention of torch for such modules, or by the initialization of transformers. The
random numbers depend only on the seed and the layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.rng import BEFORE_LAYERS, forked_rng, seed_all, stream_seed
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import whole_parameters
from lightning_pipes.trainer.weights.initializers import (
    Initializer,
    InitialWrites,
    find_initializers,
    list_parts_first,
)
from lightning_pipes.trainer.weights.pretrained import (
    explain_unknown_values,
    give_memory,
    list_names,
    own_meta_tensors,
    own_tensors,
    take_attached,
)
from lightning_pipes.trainer.weights.spread import SPREAD_ATTRIBUTE

FindTensor = Callable[[Hashable, torch.dtype, torch.device], torch.Tensor | None]
"""Returns a tensor with the value of a source, or None."""
INITIALIZATION_SPAN = Span(0, 0)
"""Used instead of the span of a micro-batch in the seed of the random numbers that initialize weights."""


def has_meta(module: nn.Module) -> bool:
    """Return whether any weight of a module is on `meta`."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True)
class _Tied:
    """A tensor that several layers share.

    Attributes:
        tensor: the tensor.
        layer: the number of the last layer that initializes the tensor. Its values are used on all ranks.
    """

    tensor: torch.Tensor
    layer: int


class DeferredWeights:
    """The tensors on `meta` of a module and their initialization. It must be created before the module is cut.

    Args:
        module: the user's whole module.
        groups: the parts of the module in groups that are initialized together, by the number of the group. The random
            numbers of a group depend on its number.
        find: returns a tensor with the value that another training has read from the same entry of the same files, with
            a dtype and on a device, or None. Frozen weights use its memory instead of reading the files.

    Attributes:
        sources: the entries of the files from which frozen tensors have their values, by the id of the tensor.

    Raises:
        PipelineError: the values of a tensor are unknown, because it is not in any file and no initializer sets it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        groups: Mapping[int, Iterable[nn.Module]],
        find: FindTensor = lambda *_: None,
    ) -> None:
        self.sources: dict[int, Hashable] = {}
        self._find = find
        self._groups: dict[int, list[nn.Module]] = {}
        self._tied: list[_Tied] = []
        self._initializers: dict[int, Initializer] = {}
        self._inside: dict[int, list[torch.Tensor]] = {}
        """The tensors of inner parts that the initializer of a part sets, by the id of the part."""
        self._kept: set[int] = set()
        """The ids of the tensors in `_inside` that had values before and keep them."""
        self._adapters: dict[int, list[Callable[[], object]]] = {}
        self._pretrained = take_attached(module)
        if SPREAD_ATTRIBUTE in vars(module) or not has_meta(module):
            return  # an earlier run has initialized the weights of this rank
        self._initializers = find_initializers(module)
        self._adapters = _find_adapters(module)
        writes = InitialWrites(module, self._initializers)
        self._inside = writes.inside
        self._kept = {id(t) for tensors in writes.inside.values() for t in tensors if not t.is_meta}
        self._groups = {
            number: [m for m in parts if own_meta_tensors(m) or id(m) in self._inside]
            for number, parts in groups.items()
        }
        self._leave_out_crossing(module)
        self._check(module)
        self._warn_of_lost(module, writes.lost)
        self._tied = list(self._find_tied())

    def make_layers(self, local: Iterable[int], positions: Sequence[int], seed: int, ranks: Ranks) -> None:
        """Initialize the weights of the `local` groups and the weights outside of the layers. Collective.

        The tensors stay the same objects, so that optimizers do not have to be changed.

        Args:
            local: the numbers of the groups on this rank.
            positions: the position in the pipeline of the rank that has each group.
            seed: the seed of the random numbers, which is combined with the initial seed of torch.
            ranks: the ranks of the run.
        """
        if not self._groups:
            return
        seeds, pipe = self._agree_on_seeds(seed, ranks), ranks.pipeline
        for number in (BEFORE_LAYERS, *sorted(local)):
            self._make_group(number, seeds, ranks.device)
        for tied in self._tied:
            value = torch.empty_like(tied.tensor, device="cpu")
            if not tied.tensor.is_meta:
                value.copy_(tied.tensor.detach())
            pipe.broadcast_tensor(value.view(-1).view(torch.uint8), pipe.ranks[positions[tied.layer]])
            if not tied.tensor.is_meta:
                tied.tensor.detach().copy_(value)

    def make_tensors(self, is_here: Callable[[torch.Tensor], bool], seed: int, ranks: Ranks) -> None:
        """Initialize the tensors of this rank to values that do not depend on the distribution over ranks. Collective.

        Each group with such a tensor is initialized as a whole. The memory of its other tensors is then released.

        Args:
            is_here: returns whether this rank has a tensor.
            seed: the seed of the random numbers, which is combined with the initial seed of torch.
            ranks: the ranks of the run.
        """
        if not self._groups:
            return
        seeds = self._agree_on_seeds(seed, ranks)
        for number, group in self._groups.items():
            if not any(is_here(t) for part in group for t in own_tensors(part)):
                continue
            foreign = [(part, [t for t in own_meta_tensors(part) if not is_here(t)]) for part in group]
            self._make_group(number, seeds, ranks.device)
            for part, tensors in foreign:
                give_memory(part, tensors, torch.device("meta"))

    @staticmethod
    def _agree_on_seeds(seed: int, ranks: Ranks) -> tuple[int, int]:
        """Return the seed and the initial seed of torch on the first rank."""
        return seed, ranks.control.broadcast(torch.initial_seed(), ranks.control.ranks[0])

    def _make_group(self, number: int, seeds: tuple[int, int], device: torch.device) -> None:
        group = self._groups[number]
        adopted = self._adopt_tensors(group, device)
        with forked_rng(device):
            for module in group:
                give_memory(module, own_meta_tensors(module), device)
            seed_all(stream_seed(seeds[0], 0, number, seeds[1], INITIALIZATION_SPAN), device, everything=True)
            inside = [t for module in group for t in self._inside.get(id(module), ())]
            kept = [(t, t.detach().clone()) for t in inside if id(t) in self._kept]
            for module in group:
                if self._needs_initializer(module):
                    with whole_parameters(module):
                        self._initializers[id(module)]()
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
            for weights in self._pretrained:
                weights.fill([t for module in group for t in own_tensors(module) if id(t) not in adopted])
            for initialize in (each for module in group for each in self._adapters.get(id(module), ())):
                initialize()

    def _needs_initializer(self, module: nn.Module) -> bool:
        """Return whether the initializer of a part runs, because the files do not contain all tensors that it sets."""
        return id(module) in self._initializers and not all(map(self._is_in_files, self._list_initialized(module)))

    def _list_initialized(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the tensors that the initializer of a part sets."""
        return [*own_tensors(module), *self._inside.get(id(module), ())]

    def _adopt_tensors(self, group: Sequence[nn.Module], device: torch.device) -> set[int]:
        """Let frozen tensors of a group use the values that another training has read.

        Returns:
            The ids of these tensors. They are neither initialized nor read.
        """
        adopted: set[int] = set()
        initialized = {id(t) for m in group if self._needs_initializer(m) for t in self._list_initialized(m)}
        for module in group:
            values = {}
            for tensor in own_meta_tensors(module):
                weights = next((each for each in self._pretrained if tensor in each), None)
                if weights is None or tensor.requires_grad or id(tensor) in initialized:
                    continue
                source = self.sources[id(tensor)] = weights.describe_source(tensor)
                value = self._find(source, tensor.dtype, device)
                if value is not None and value.shape == tensor.shape:
                    values[id(tensor)] = value
            give_memory(module, [t for t in own_meta_tensors(module) if id(t) in values], device, values)
            adopted.update(values)
        return adopted

    def _is_in_files(self, tensor: torch.Tensor) -> bool:
        return any(tensor in weights for weights in self._pretrained)

    def _check(self, module: pl.LightningModule) -> None:
        owners = [m for group in self._groups.values() for m in group]
        known = {id(t) for m in owners if id(m) in self._initializers for t in own_meta_tensors(m)}
        known.update(id(t) for m in owners for t in self._inside.get(id(m), ()))
        for name, part in module.named_modules():
            if any(id(t) not in known and not self._is_in_files(t) for t in own_meta_tensors(part)):
                where = f"{type(module).__name__}{f'.{name}' if name else ''}"
                raise PipelineError(explain_unknown_values(where, part))

    def _leave_out_crossing(self, module: nn.Module) -> None:
        """Skip initializers that set tensors of several groups, which are on several ranks, and warn about them."""
        paths = {id(part): path for path, part in module.named_modules()}
        for group in self._groups.values():
            held = {id(t) for part in group for t in own_meta_tensors(part)}
            for part in list(group):
                if all(id(t) in held for t in self._inside.get(id(part), ()) if t.is_meta):
                    continue
                del self._inside[id(part)]
                if not own_meta_tensors(part):
                    group.remove(part)
                where = f"{type(module).__name__}.{paths[id(part)]}".rstrip(".")
                rank_zero_warn(
                    f"{where} initializes weights of several layers, which are on meta and on several ranks. "
                    "Therefore, only the modules that own these weights initialize them. Initialize each weight in a "
                    'module of its own layer, or cut the module by units with PipelineStrategy(module="")'
                )

    def _warn_of_lost(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        lost = [name for name in names if not self._is_in_files((parameters | buffers)[name])]
        if lost:
            rank_zero_warn(
                f"{type(module).__name__} sets {list_names(lost)} outside of reset_parameters() when it is created. "
                "These values are lost, because the tensors are on meta and only reset_parameters() initializes them. "
                "Set them in reset_parameters() of their module or of a module that contains it, or load a checkpoint"
            )

    def _find_tied(self) -> Iterator[_Tied]:
        having: dict[int, set[int]] = defaultdict(set)
        resetting: dict[int, tuple[torch.Tensor, int]] = {}
        for number, group in self._groups.items():
            for module in group:
                for tensor in own_meta_tensors(module):
                    having[id(tensor)].add(number)
                    if id(module) in self._initializers and not self._is_in_files(tensor):
                        resetting[id(tensor)] = (tensor, number)
        for key, (tensor, last) in resetting.items():
            if len(having[key]) > 1 and last != BEFORE_LAYERS:  # weights outside start equal on all ranks
                yield _Tied(tensor, last)


def group_layers(module: nn.Module, path: str) -> dict[int, Iterable[nn.Module]]:
    """Return the parts of each layer of a container in the order of their initialization, by the number of the layer.

    The parts outside of the container have the number `BEFORE_LAYERS`.
    """
    layers = module.get_submodule(path)
    inside = {id(m) for m in layers.modules()}
    outside = [m for m in list_parts_first(module) if id(m) not in inside]
    found = {
        number: list_parts_first(layer) for number, layer in enumerate(layers._modules.values()) if layer is not None
    }
    return {BEFORE_LAYERS: outside, **found}


def group_owners(module: nn.Module) -> dict[int, Iterable[nn.Module]]:
    """Return a separate group for each part of a module, so that its initial values do not depend on the cut.

    A layer of peft and its adapters are in one group. Parts that one initializer sets together are also in one group.
    """
    group_of = {id(part): number for number, part in enumerate(module.modules())}
    for part in module.modules():
        if hasattr(part, "reset_lora_parameters"):
            group_of.update((id(inside), group_of[id(part)]) for inside in part.modules())
    for key, tensors in InitialWrites(module, find_initializers(module)).inside.items():
        changed = {id(t) for t in tensors if t.is_meta}
        joined = {group_of[id(m)] for m in module.modules() if changed & {*map(id, own_tensors(m))}} | {group_of[key]}
        group_of = {part: min(joined) if number in joined else number for part, number in group_of.items()}
    found: dict[int, list[nn.Module]] = defaultdict(list)
    for part in list_parts_first(module):
        found[group_of[id(part)]].append(part)
    return {number: found[number] for number in sorted(found)}


def _find_adapters(module: nn.Module) -> dict[int, list[Callable[[], object]]]:
    """Return functions that initialize the adapters of LoRA, by the id of the last part of each adapter.

    They are needed in addition to `reset_parameters`, because some of the initial values are zero.
    """
    configs = [vars(part).get("peft_config") for part in module.modules()]
    kinds = {name: config for found in configs if isinstance(found, dict) for name, config in found.items()}
    adapters: dict[int, list[Callable[[], object]]] = defaultdict(list)
    parts: Iterable[Any] = module.modules()
    for part in parts:
        for name in part.lora_A if hasattr(part, "reset_lora_parameters") else ():
            kind = getattr(kinds.get(name), "init_lora_weights", True)
            adapters[id(part.lora_B[name])].append(partial(part.reset_lora_parameters, name, kind))
    return adapters


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise PipelineError if an optimizer has created state from weights without values."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise PipelineError(
                        f"{type(optimizer).__name__} makes its state {name!r} before weights on meta have values; use "
                        "an optimizer that makes its state in the first step, or build the module without meta"
                    )


def check_same_cut(module: pl.LightningModule, cut: tuple[Any, ...], control: Control) -> None:
    """Raise PipelineError on all ranks if an earlier run has cut the module differently. Collective.

    Args:
        module: the user's module.
        cut: the value of the module's attribute `SPREAD_ATTRIBUTE` after this run. It begins with the path of the
            container and the numbers of the local layers.
        control: the control channel of the ranks.
    """
    before = vars(module).get(SPREAD_ATTRIBUTE)
    if control.any(before is not None and before != cut)[0]:
        layers = "" if before is None else f"layers {list(before[1])} of {before[0]}, and now {list(cut[1])}"
        where = f" (here {layers})" if layers and cut[0] else ""
        raise PipelineError(
            f"this run cuts {type(module).__name__} differently from the last run, but the layers were created on the "
            f"meta device, and remain on the ranks of the last run{where}. Keep devices, schedule and partition, or "
            "create a new module and load a checkpoint with ckpt_path=..."
        )
