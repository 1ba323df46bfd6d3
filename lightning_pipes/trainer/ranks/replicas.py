"""Operations over the replicas of a pipeline, and tensors that are sharded over several ranks.

Replicas average logged values, gather tensors and synchronize buffers. Sharded tensors are DTensors, as created by
`fully_shard` and `parallelize_module`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.reducer import Reducer, Wait, is_distributed, local_part
from lightning_pipes.engine.private_torch import finish_sharded_backward, is_fully_sharded
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.private_lightning import gather_over, reduce_over
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.processes import all_processes
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.ranks.replica_world import is_alone

if TYPE_CHECKING:  # the import takes half a second, and most runs have no shards
    from torch.distributed.tensor import DTensor


def has_shards(module: nn.Module) -> bool:
    """Return whether any parameter of a module is a DTensor."""
    return any(map(is_distributed, module.parameters()))


def is_sharded_over(tensor: torch.Tensor, dimension: str) -> bool:
    """Return whether ranks along a dimension of the mesh hold different parts of a tensor."""
    if not is_distributed(tensor):
        return False
    sharded = cast("DTensor", tensor)
    pairs = zip(sharded.device_mesh.mesh_dim_names or (), sharded.placements, strict=False)
    return any(name == dimension and not placement.is_replicate() for name, placement in pairs)


def gather_whole(tree: Any) -> Any:
    """Return a tree in which sharded tensors are replaced by whole tensors.

    Collective over the ranks that hold the parts.
    """
    return pytree.tree_map(lambda t: t.detach().full_tensor() if is_distributed(t) else t, tree)


def gather_uneven(tree: Any) -> Any:
    """Return a tree in which unevenly sharded tensors are replaced by whole tensors. Collective like `gather_whole`.

    A tensor is sharded unevenly if two dimensions of the mesh shard the same axis, and the product of their sizes does
    not divide it.
    """
    return pytree.tree_map(lambda t: gather_whole(t) if is_distributed(t) and own_box(t) is None else t, tree)


def own_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of this rank's shard in the whole tensor, and the shape of the shard.

    The result is None if the tensor is not sharded, or if its shards are not boxes.
    """
    if not is_distributed(tensor):
        return None
    sharded: Any = tensor
    parts: dict[int, list[int]] = {}
    for dimension, placement in enumerate(sharded.placements):
        if hasattr(placement, "dim"):
            parts.setdefault(placement.dim, []).append(sharded.device_mesh.size(dimension))
    if any(len(sizes) > 1 and sharded.shape[axis] % math.prod(sizes) for axis, sizes in parts.items()):
        return None
    (chunk,) = sharded.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def shard_from_local(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like another one, from this rank's shard."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which all ranks have, as a tensor that is sharded like another one. No message is sent."""
    if not is_distributed(like) or is_distributed(whole):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    replicated: Any = DTensor.from_local(whole.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return cast(torch.Tensor, replicated.redistribute(placements=placements))


def copy_whole(whole: torch.Tensor, into: torch.Tensor) -> None:
    """Copy the values of a whole tensor into a tensor that may be sharded."""
    local_part(into).copy_(local_part(shard_like(whole, into)))


def unshard_over(parameter: torch.Tensor, dimension: str) -> nn.Parameter:
    """Return a parameter that is not sharded over a dimension of the mesh.

    Collective over this dimension, unless the parameter is on `meta`.
    """

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
    """Replace the shards of a module by whole parameters in the block. After it, each rank keeps its own shard.

    The initial random values of the parameters are then equal to the values in a single process.
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
    """Layers under FSDP2. Their weights are gathered once per batch, and their gradients are reduced once per batch.

    The whole weights and gradients of a stage exist from its first forward to its last backward. Therefore, the
    collectives of a replica do not depend on its number of micro-batches.

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
        """Wrap a batch without a backward, and free the whole weights after it.

        The weights are gathered outside of inference mode, because otherwise they could not be trained later.
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


DATA_PARALLEL, PIPELINE, TENSOR_PARALLEL = "data_parallel", "pipeline", "tensor_parallel"
"""The dimensions of the mesh, in this order."""


class Replicas:
    """The ranks that hold the same stages as this rank, one in each pipeline.

    Collective: all ranks create one together.

    Args:
        grid: the coordinates of this rank.
        control: the collectives of all ranks.
        device: the device of this rank.
        has_mesh: whether to create a mesh even if there is one replica without shards.

    Attributes:
        mesh: all ranks by replica, by position in the pipeline with the last stage first, and by shard; None without
            replicas and shards, unless `has_mesh` is set.
        has_own_order: returns whether each replica currently runs batches in its own order.
    """

    def __init__(self, grid: Grid, control: Control, device: torch.device, has_mesh: bool = False) -> None:
        self.grid = grid
        self.mesh: DeviceMesh | None = None
        self._control = control
        self._device = device
        self.has_own_order: Callable[[], bool] = lambda: False
        if has_mesh or grid.replicas * grid.shards > 1:
            names = (DATA_PARALLEL, PIPELINE, TENSOR_PARALLEL)
            with all_processes():
                self.mesh = init_device_mesh(device.type, grid.shape, mesh_dim_names=names)

    @property
    def group(self) -> Any:
        """The process group of the replicas; None without replicas."""
        return None if self.mesh is None or self.grid.replicas == 1 else self.mesh.get_group(DATA_PARALLEL)

    def reduce(self, value: Any, group: Any = None, op: Any = "mean") -> Any:
        """Return a tensor that is reduced in place over the replicas.

        Other values, and tensors of a single replica, are returned unchanged, because all stages of a pipeline have the
        same logged values.
        """
        if self.grid.replicas == 1 or not isinstance(value, torch.Tensor):
            return value
        self._check_order()
        return reduce_over(value, group or self._group_of_step, op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the stacked tensors of all replicas, or the tensor itself if there is one replica."""
        if self.grid.replicas == 1:
            return tensor
        self._check_order()
        return gather_over(tensor, group or self._group_of_step, sync_grads)

    @property
    def _group_of_step(self) -> Any:
        """The process group of the replicas that run the same step as this one."""
        return dist.group.WORLD if is_alone() else self.group

    def _check_order(self) -> None:
        """Check that all replicas make collective calls in the same order.

        Raises:
            PipelineError: batches are in flight in a different order on each replica.
        """
        if self.has_own_order():
            raise PipelineError(
                "a value is reduced or gathered over replicas while batches are under way, as by "
                "self.log(..., sync_dist=True) in training_step: with schedule 'csp' and data_parallel > 1 each "
                "replica runs batches in an order of its own, and values of different batches would mix. Log with "
                "on_step=False and on_epoch=True, leave sync_dist out, or use a schedule that flushes between "
                "batches, such as '1f1b'"
            )

    def gather_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the 1-D tensors of all replicas, stacked along a first axis of replicas.

        The tensors must have equal lengths. Collective over the replicas.
        """
        own = flat.to(self._device)
        found = own.new_empty(self.grid.replicas * len(own))
        self._control.start_all_gather_into(found, own, self.group)()
        return found.view(self.grid.replicas, -1).to(flat.device)

    def share_shard(self, tensor: torch.Tensor) -> None:
        """Broadcast a sharded tensor from the first rank of a pipeline, and from the first replica. Collective.

        The replicas receive it only if they have the same shard.
        """
        assert self.mesh is not None, "sharded tensors have a mesh"
        with torch.no_grad():
            dist.broadcast(local_part(tensor), group=self.mesh.get_group(PIPELINE), group_src=0)
            if not is_sharded_over(tensor, DATA_PARALLEL):
                dist.broadcast(local_part(tensor), group=self.mesh.get_group(DATA_PARALLEL), group_src=0)

    def reducer(self, layers_of_stages: Mapping[int, Iterable[nn.Module]], holdings: Holdings) -> Reducer | None:
        """Return a reducer of the gradients of parameters that occur in a single stage; None for one replica."""
        if self.grid.replicas == 1:
            return None
        parameters = {
            stage: [
                p
                for layer in layers
                for p in layer.parameters()
                if holdings.in_one_stage(p) and not is_sharded_over(p, DATA_PARALLEL)  # FSDP2 reduces sharded gradients
            ]
            for stage, layers in layers_of_stages.items()
        }
        return Reducer(parameters, self._start, self.grid.replicas)

    def _start(self, flat: torch.Tensor) -> Wait:
        return self._control.start_all_reduce(flat, self.group)


class BufferSync:
    """Copies buffers that change during training, such as running averages, from the first replica to the others.

    The changing buffers are detected in the first batch of every epoch. Constant buffers, such as masks and tables, are
    not sent.

    Args:
        module: the module with the buffers.
        group: the process group of the ranks that hold the same stages; None if there is one rank.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = module
        self._group = group
        self._changing: set[str] = set()
        self._watching = False
        self._before: dict[str, torch.Tensor] = {}

    @property
    def has_peers(self) -> bool:
        """Whether other ranks hold the same stages."""
        return self._group is not None

    def start_epoch(self) -> None:
        """Detect in the next batch which buffers change."""
        self._watching, self._before = True, {}

    def before_batch(self) -> None:
        """Broadcast the changing buffers of the first replica. Collective."""
        if self._group is None or not (self._watching or self._changing):
            return
        buffers = dict(self._module.named_buffers())
        if self._watching and buffers:
            self._watch(buffers)
        for name in sorted(self._changing & buffers.keys()):
            dist.broadcast(buffers[name], group=self._group, group_src=0)

    def changing_names(self, prefix: str) -> list[str]:
        """Return the names of the changing buffers that begin with `prefix`, without this prefix."""
        return [name.removeprefix(prefix) for name in sorted(self._changing) if name.startswith(prefix)]

    def follow_names(self, prefix: str, names: Iterable[str]) -> None:
        """Add the changing buffers of a layer that arrived from another rank, as detected by that rank."""
        self._changing.update(f"{prefix}{name}" for name in names)

    def _watch(self, buffers: dict[str, torch.Tensor]) -> None:
        if not self._before:  # copies, because batch_norm does not increment the version of its buffers
            self._before = {name: b.clone() for name, b in buffers.items()}
            return
        flags = [int(name not in self._before or not torch.equal(self._before[name], b)) for name, b in buffers.items()]
        device = next(iter(buffers.values())).device
        changed = torch.tensor(flags, device=device)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        self._changing.update(name for name, flag in zip(buffers, changed.tolist(), strict=True) if flag)
        self._watching, self._before = False, {}
