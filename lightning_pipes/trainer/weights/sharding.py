"""Support for modules that `configure_model` shards by `fully_shard` or `parallelize_module` on the mesh of the run.

As under Lightning's ModelParallelStrategy, every rank shards all layers over the ranks of its own stage. It then keeps
only the layers of its stages. The parameters around the layers are not sharded over `data_parallel`, so that every
replica has them as without sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.private_torch import (
    forget_shards,
    is_fully_sharded,
    managed_parameters,
    remove_fully_shard,
)
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.ranks.replicas import (
    DATA_PARALLEL,
    PIPELINE,
    TENSOR_PARALLEL,
    is_sharded_over,
    unshard_over,
)
from lightning_pipes.trainer.weights.pretrained import find_attached, own_tensors
from lightning_pipes.trainer.weights.spread import SPREAD_ATTRIBUTE


def holds_own_part(parameter: torch.Tensor, grid: Grid) -> bool:
    """Return whether this rank contributes its part of a parameter to a sum over all replicas and shards."""
    in_replicas = is_sharded_over(parameter, DATA_PARALLEL) or grid.replica == 0
    return in_replicas and (is_sharded_over(parameter, TENSOR_PARALLEL) or grid.shard == 0)


def check_shards(module: pl.LightningModule, mesh: DeviceMesh | None) -> None:
    """Check that the sharded parameters of a module are compatible with the mesh of the run.

    Args:
        module: the user's module.
        mesh: the mesh of the run, if any.

    Raises:
        PipelineError: a parameter is sharded over another mesh, over the stages, over the wrong dimension of the mesh
            for its function, or unevenly over tensor-parallel ranks.
    """
    owner = type(module).__name__
    units = [part for part in module.modules() if is_fully_sharded(part)]
    managed = {id(part._parameters.get(leaf)) for unit in units for part, leaf, _ in managed_parameters(unit)}
    sharded: Iterable[tuple[str, Any]] = ((n, p) for n, p in module.named_parameters() if is_distributed(p))
    for name, parameter in sharded:
        found = parameter.device_mesh
        names = found.mesh_dim_names or ()
        where = f"{owner}.{name} is sharded over {', '.join(names) or 'a mesh without names'}"
        if PIPELINE in names:
            raise PipelineError(
                f"{where}; the ranks along {PIPELINE} hold other layers. Use self.device_mesh[{DATA_PARALLEL!r}] for "
                f"fully_shard and self.device_mesh[{TENSOR_PARALLEL!r}] for parallelize_module"
            )
        own = () if mesh is None else mesh.mesh_dim_names or ()
        if (
            not names
            or mesh is None
            or any(n not in own or found[n].mesh.tolist() != mesh[n].mesh.tolist() for n in names)
        ):
            raise PipelineError(
                f"{where} of other processes than this run's; take the mesh from self.device_mesh in configure_model"
            )
        over_replicas, is_unit = is_sharded_over(parameter, DATA_PARALLEL), id(parameter) in managed
        if over_replicas != is_unit:
            function = "parallelize_module, and replicas have other samples" if over_replicas else "fully_shard"
            right = TENSOR_PARALLEL if over_replicas else DATA_PARALLEL
            raise PipelineError(f"{where} by {function}; hand self.device_mesh[{right!r}] to it")
        for dimension, placement in zip(names, parameter.placements, strict=True):
            if dimension == TENSOR_PARALLEL and placement.is_shard(1):
                _check_columns(f"{owner}.{name}", parameter.shape[1], found[dimension].size())
    for name, part in module.named_modules():
        _check_heads(f"{owner}.{name}", part)


def _check_columns(name: str, columns: int, shards: int) -> None:
    """Check that the shards of the columns of a weight have equal sizes, which DTensor assumes for sharded inputs."""
    if columns % shards:
        raise PipelineError(
            f"tensor_parallel={shards} does not divide axis 1 of {name}, which has {columns} entries; take a number of "
            "processes that divides it, or leave this layer out of the plan of parallelize_module"
        )


def _check_heads(name: str, part: nn.Module) -> None:
    """Check that each tensor-parallel rank has a whole number of heads of an attention module.

    A sharded axis of a projection is considered to consist of heads if its length is a multiple of `head_dim`.
    """
    size = getattr(part, "head_dim", None)
    if type(size) is not int or size < 1:
        return
    for child_name, child in part.named_children():
        if not isinstance(child, nn.Linear) or not is_distributed(child.weight):
            continue
        weight: Any = child.weight
        shards = weight.device_mesh[TENSOR_PARALLEL].size() if is_sharded_over(weight, TENSOR_PARALLEL) else 1
        rows, columns = weight.shape
        names = weight.device_mesh.mesh_dim_names or ()
        placed: list[Any] = [p for n, p in zip(names, weight.placements, strict=True) if n == TENSOR_PARALLEL]
        dims = [p.dim for p in placed if p.is_shard()]
        for length in ((rows, columns)[dim] for dim in dims):
            if length % size == 0 and length // size % shards:
                raise PipelineError(
                    f"tensor_parallel={shards} does not divide the {length // size} heads of {name}.{child_name}; take "
                    "a number of processes that divides them"
                )


def unshard_outside(module: pl.LightningModule, path: str) -> None:
    """Gather the parameters that `fully_shard` has sharded around the container of layers. Collective over replicas.

    Args:
        module: the user's module.
        path: the path of the container in the module.

    Raises:
        PipelineError: one unit of `fully_shard` contains layers of several stages, or a parameter that was shared
            belongs to two units, which makes it two parameters.
    """
    names = {id(part): name for name, part in module.named_modules()}
    units = dict.fromkeys(part for part in module.modules() if is_fully_sharded(part))
    first: dict[int, str] = {}
    for owner, name, number in dict.fromkeys(each for unit in units for each in managed_parameters(unit)):
        where = f"self.{names[id(owner)]}.{name}"
        if number in first:
            raise PipelineError(
                f"{first[number]} and {where} were one parameter, and fully_shard has made two of it in two groups; "
                "leave the layers that share it as they are, or put both around the layers that are cut"
            )
        first[number] = where

    def unshard(shard: torch.Tensor) -> nn.Parameter:
        whole = unshard_over(shard, DATA_PARALLEL)
        for weights in find_attached(module):
            weights.replace_tensor(shard, whole)
        return whole

    container = module.get_submodule(path)
    inside = {id(part) for layer in container.children() for part in layer.modules()}
    for name, part in module.named_modules():
        if not is_fully_sharded(part) or id(part) in inside:
            continue
        if any(id(owner) in inside for owner, *_ in managed_parameters(part)):
            raise PipelineError(
                f"fully_shard has sharded the layers of self.{path} as one unit, self{name and '.'}{name}, but these "
                "layers are on several ranks. Before that, shard each layer separately: for layer in layers: "
                "fully_shard(layer, ...)"
            )
        remove_fully_shard(part, unshard)


def leave_spread(module: pl.LightningModule, path: str, local: Iterable[int]) -> None:
    """Release the memory of the layers of other ranks in a sharded module.

    Their tensors are moved to `meta` and stay the same objects. Nothing is done if an earlier run has done this.

    Args:
        module: the user's module.
        path: the path of the container in the module.
        local: the numbers of the layers on this rank.
    """
    if SPREAD_ATTRIBUTE in vars(module):
        return
    container, kept = module.get_submodule(path), {*local}
    inside = set(container.modules())
    here = {part for n, layer in enumerate(container.children()) if n in kept for part in layer.modules()}
    here |= {part for part in module.modules() if part not in inside}
    stays = {id(tensor) for part in here for tensor in own_tensors(part)}
    for part in inside - here - {container}:
        for tensor in own_tensors(part):
            if id(tensor) not in stays and not tensor.is_meta:
                empty = torch.empty_like(tensor, device="meta")
                made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
        if is_fully_sharded(part):
            forget_shards(part)
