"""Tensors that several ranks hold in parts: DTensors, as `fully_shard` and `parallelize_module` make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.reducer import is_distributed, local_part
from lightning_pipes.engine.private_torch import finish_sharded_backward, is_fully_sharded

if TYPE_CHECKING:  # it takes half a second, and most runs have no shards
    from torch.distributed.tensor import DTensor


def has_shards(module: nn.Module) -> bool:
    """Return whether any parameter of a module is a DTensor."""
    return any(map(is_distributed, module.parameters()))


def is_sharded_over(tensor: torch.Tensor, dimension: str) -> bool:
    """Return whether ranks along a dimension of the mesh have different parts of a tensor."""
    if not is_distributed(tensor):
        return False
    sharded = cast("DTensor", tensor)
    pairs = zip(sharded.device_mesh.mesh_dim_names or (), sharded.placements, strict=False)
    return any(name == dimension and not placement.is_replicate() for name, placement in pairs)


def gather_whole(tree: Any) -> Any:
    """Return a tree with whole tensors in place of sharded ones. Collective over the ranks that hold the parts."""
    return pytree.tree_map(lambda t: t.detach().full_tensor() if is_distributed(t) else t, tree)


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which all ranks have, sharded as another one; no message is sent."""
    if not is_distributed(like) or is_distributed(whole):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    replicated: Any = DTensor.from_local(whole.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return cast(torch.Tensor, replicated.redistribute(placements=placements))


def copy_whole(whole: torch.Tensor, into: torch.Tensor) -> None:
    """Copy the values of a whole tensor into one that may be sharded."""
    local_part(into).copy_(local_part(shard_like(whole, into)))


def unshard_over(parameter: torch.Tensor, dimension: str) -> nn.Parameter:
    """Return a parameter that is whole over a dimension of the mesh. Collective over it, unless it is on `meta`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    assert isinstance(parameter, DTensor)
    found: Any = parameter.detach()
    mesh = parameter.device_mesh
    pairs = list(zip(mesh.mesh_dim_names or (), found.placements, strict=True))
    rest = [(name, Shard(p.dim) if p.is_shard() else p) for name, p in pairs if name != dimension]
    if found.is_meta:
        whole: torch.Tensor = torch.empty(found.shape, dtype=found.dtype, device="meta")
        for name, placement in rest:
            whole = distribute_tensor(whole, mesh[name], [placement])
    else:
        placements = [Replicate() if name == dimension else p for name, p in pairs]
        whole = found.redistribute(placements=placements).to_local()
        for name, placement in rest:
            whole = DTensor.from_local(whole, mesh[name], [placement], run_check=False)
    return nn.Parameter(whole, parameter.requires_grad)


@contextmanager
def whole_parameters(part: nn.Module) -> Iterator[None]:
    """Let a part have whole parameters in place of its shards in the block; each rank then keeps its own shard.

    So random numbers that the parameters start from are those of one process.
    """
    shards = {name: p for name, p in part._parameters.items() if p is not None and is_distributed(p)}
    for name, shard in shards.items():
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        part._parameters[name] = nn.Parameter(whole, shard.requires_grad)
    try:
        yield
        with torch.no_grad():
            for name, shard in shards.items():
                copy_whole(part.get_parameter(name).detach(), shard)
    finally:
        part._parameters.update(shards)


class GatheredStages:
    """Layers under FSDP2: their weights are gathered once for a batch, and their gradients reduced once.

    Whole weights and gradients of a stage last from its first forward to its last backward. So the collectives of a
    replica don't depend on its number of micro-batches.

    Args:
        layers_of_stages: the layers of this rank, by stage.
    """

    def __init__(self, layers_of_stages: Mapping[int, Iterable[nn.Module]]) -> None:
        self._modules = {
            stage: [m for layer in layers for m in layer.modules() if is_fully_sharded(m)]
            for stage, layers in layers_of_stages.items()
        }
        for stage, modules in self._modules.items():
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
            self._reduce(stage, False)

    def __bool__(self) -> bool:
        return any(self._modules.values())

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """Wrap the backward of a stage that completes the gradients of a batch."""
        self._reduce(stage, True)
        yield
        for module in self._modules[stage]:
            finish_sharded_backward(module)
        self._reduce(stage, False)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Wrap a batch that no backward follows: whole weights are dropped after it.

        Weights that are gathered in inference mode can't be trained later.
        """
        if not self:
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            yield
        for modules in self._modules.values():
            for module in modules:
                module.reshard()

    def _reduce(self, stage: int, is_last: bool) -> None:
        for module in self._modules[stage]:
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)
