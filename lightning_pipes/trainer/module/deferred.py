"""Weights made on `meta`, as by `with torch.device("meta"):` in configure_model: no rank ever holds all of them.

A rank makes those of its own layers and of what is outside of the pipelined module. They are read from the files that
`load_pretrained` was given, or start as `reset_parameters` has them, torch's convention for such modules, or as models
of transformers initialize their parts. Random numbers depend on the seed and the layer alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.rng import BEFORE_LAYERS, forked_rng, seed_all, stream_seed
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.module.pipelined import SPREAD
from lightning_pipes.trainer.module.pretrained import (
    explain_unknown_values,
    find_initializers,
    give_memory,
    own_meta_tensors,
    own_tensors,
    take_attached,
)
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.replicas import whole_parameters

NOT_SAMPLES = Span(0, 0)
"""In place of a micro-batch in the seed of the random numbers that weights start from."""


def has_meta(module: nn.Module) -> bool:
    """Return whether any weight of a module is on `meta`."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True)
class _Tied:
    """A tensor in several places, and the last layer that resets it, which has the last word."""

    tensor: torch.Tensor
    layer: int


class DeferredWeights:
    """The tensors of a whole module that are on `meta`, and how they get values. Made before the module is cut.

    Args:
        module: the user's module, whole.
        path: the pipelined container in it.

    Raises:
        PipelineError: nobody says what the values should be.
    """

    def __init__(self, module: pl.LightningModule, path: str) -> None:
        self._units: dict[int, list[nn.Module]] = {}
        self._tied: list[_Tied] = []
        self._initializers: dict[int, Callable[[], object]] = {}
        self._adapters: dict[int, list[Callable[[], object]]] = {}
        self._pretrained = take_attached(module)
        if SPREAD in vars(module) or not has_meta(module):  # an earlier run has made what belongs here
            return
        self._initializers = find_initializers(module)
        self._adapters = _find_adapters(module)
        layers = module.get_submodule(path)
        inside = {id(m) for m in layers.modules()}
        outside = [m for m in module.modules() if id(m) not in inside]
        self._units[BEFORE_LAYERS] = [m for m in outside if own_meta_tensors(m)]
        for number, layer in enumerate(layers._modules.values()):
            assert layer is not None
            self._units[number] = [m for m in layer.modules() if own_meta_tensors(m)]
        self._check(module)
        self._tied = list(self._find_tied())

    def make(
        self, local: Iterable[int], positions: Sequence[int], seed: int, device: torch.device, pipe: Control
    ) -> None:
        """Give values to the weights of the `local` layers and to those outside; a collective call of the pipeline.

        Tensors stay the same objects, so optimizers need not be told.

        Args:
            positions: of each layer in the pipeline.
            seed: what the random numbers start from, besides torch's own seed.
        """
        if not self._units:
            return
        started = pipe.broadcast(torch.initial_seed(), pipe.ranks[0])
        with forked_rng(device):
            for number in (BEFORE_LAYERS, *sorted(local)):
                unit = self._units[number]
                for module in unit:
                    for tensor in own_meta_tensors(module):
                        give_memory(tensor, device)
                seed_all(stream_seed(seed, 0, number, started, NOT_SAMPLES), device, everything=True)
                for module in unit:
                    if id(module) in self._initializers and not all(map(self._is_in_files, own_tensors(module))):
                        with whole_parameters(module):
                            self._initializers[id(module)]()
                for weights in self._pretrained:
                    weights.fill([tensor for module in unit for tensor in own_tensors(module)])
                for initialize in (each for module in unit for each in self._adapters.get(id(module), ())):
                    initialize()
        for tied in self._tied:
            value = torch.empty_like(tied.tensor, device="cpu")
            if not tied.tensor.is_meta:
                value.copy_(tied.tensor.detach())
            pipe.broadcast_tensor(value.view(-1).view(torch.uint8), pipe.ranks[positions[tied.layer]])
            if not tied.tensor.is_meta:
                tied.tensor.detach().copy_(value)

    def _is_in_files(self, tensor: torch.Tensor) -> bool:
        return any(tensor in weights for weights in self._pretrained)

    def _check(self, module: pl.LightningModule) -> None:
        owners = [m for unit in self._units.values() for m in unit]
        known = {id(t) for m in owners if id(m) in self._initializers for t in own_meta_tensors(m)}
        for name, part in module.named_modules():
            if any(id(t) not in known and not self._is_in_files(t) for t in own_meta_tensors(part)):
                where = f"{type(module).__name__}{f'.{name}' if name else ''}"
                raise PipelineError(explain_unknown_values(where, part))

    def _find_tied(self) -> Iterator[_Tied]:
        having: dict[int, set[int]] = defaultdict(set)
        resetting: dict[int, tuple[torch.Tensor, int]] = {}
        for number, unit in self._units.items():
            for module in unit:
                for tensor in own_meta_tensors(module):
                    having[id(tensor)].add(number)
                    if id(module) in self._initializers and not self._is_in_files(tensor):
                        resetting[id(tensor)] = (tensor, number)
        for key, (tensor, last) in resetting.items():
            if len(having[key]) > 1 and last != BEFORE_LAYERS:  # what is outside starts equal on all ranks
                yield _Tied(tensor, last)


def _find_adapters(module: nn.Module) -> dict[int, list[Callable[[], object]]]:
    """Return what sets the first values of LoRA's adapters, by the id of the last part of each; some of them are 0."""
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
    """Raise PipelineError for state that an optimizer has made of weights without values."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise PipelineError(
                        f"{type(optimizer).__name__} makes its state {name!r} before weights on meta have values; use "
                        "an optimizer that makes its state in the first step, or build the module without meta"
                    )


def check_same_cut(module: pl.LightningModule, path: str, local: Sequence[int], control: Control) -> None:
    """Raise PipelineError on all ranks if an earlier run has left other layers on any of them. Collective."""
    before = vars(module).get(SPREAD)
    if control.any(before is not None and before != (path, tuple(local)))[0]:
        where = "" if before is None else f" (here layers {list(before[1])} of {before[0]}, and now {list(local)})"
        raise PipelineError(
            f"this run cuts {type(module).__name__} differently from the last one, and its layers, made on meta, are "
            f"where that run left them{where}. Keep devices, schedule and partition, or "
            "make a new module and load a checkpoint: ckpt_path=..."
        )
