"""Layers and weight versions that `MemorySwap` moves between host and device, in runs with overlapping batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.profiler import optimizer_state
from lightning_pipes.engine.compute.stage import RankResources
from lightning_pipes.engine.residency.layer_memory import LayerMemory, StateMemory, VersionMemory
from lightning_pipes.engine.residency.mirrors import BulkTreeTransport
from lightning_pipes.engine.residency.slab import SLAB_ALIGNMENT_BYTES
from lightning_pipes.engine.residency.upcoming import PREDICTORS, PredictorChoice
from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy, Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.layer_copies import Cuts, LayerCosts
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.uses import ChoosesLayers


def add_offload(resources: RankResources, run: PipelineRun, plan: Plan, memory: StateMemory) -> RankResources:
    """Return the resources of a rank that swaps weights between host and device.

    Layers are swapped, or weight versions if the schedule has a fixed order.

    Raises:
        PipelineError: the run, the module or its optimizers do not allow it.
    """
    if isinstance(run.plans.schedule, Schedule):
        check_stash(run, plan)
        return replace(resources, version_memory=VersionMemory(memory, run.device))
    check_turns(run, plan)
    plain = [private.plain_optimizer(o) for o in run.trainer.optimizers]
    for number in plan.stages[run.local_layers.holdings.rank]:
        layers = run.local_layers.layers_of(number)
        check_room(number, layers, plain, memory.device_bytes, run.device.type == "cpu")
    run.relocation.check_layers_stay("MemorySwap keeps only some layers on the device at a time")
    layer_memory = LayerMemory(memory, run.device, lambda: run.trainer.optimizers)
    return replace(resources, memory=layer_memory, predictor=choose_predictor(run, memory.predictor))


def choose_predictor(run: PipelineRun, name: str) -> PredictorChoice | None:
    """Return the predictor of the next layers of a rank, with the same costs that are used to cut batches.

    None selects the default predictor.
    """
    module, policy = run.cut.module, run.plans.schedule
    if name == PREDICTORS[0]:
        return None
    assert isinstance(policy, Policy), "only policies order batches that overlap"
    costs = Cuts(module, run.cut.full, policy, module.costs_of_layers() if isinstance(module, LayerCosts) else None)
    tells = name == "algorithm_3" and len(run.global_ranks) > 1
    transport = BulkTreeTransport(run.local_layers.bulk_transfer, run.global_ranks) if tells else None
    return PredictorChoice(name, costs.cost, transport)


def check_turns(run: PipelineRun, plan: Plan) -> None:
    """Check whether the layers of the run can be swapped between host and device.

    Raises:
        PipelineError: the module does not specify the layers that batches use, forwards keep layers on the device, or
            the two halves of a split backward need the same layers.
    """
    module = run.cut.module
    if not isinstance(module, ChoosesLayers):
        raise PipelineError(
            f"MemorySwap keeps only the layers on the device that batches use, but {type(module).__name__} does not "
            "specify these layers. Define layers_of_batch in the module, as in a Supernet, or leave MemorySwap out"
        )
    if not _recomputes(plan):
        raise PipelineError(
            "MemorySwap needs PipelineStrategy(recompute=True). Without recomputation of all micro-batches, a forward "
            "keeps its layers on the device until its backward, and batches in flight could block each other"
        )
    if plan.split_backward:
        raise PipelineError(
            f"MemorySwap moves layers to the device and back, but schedule {run.plans.schedule.name!r} splits the "
            "backward pass, and weight gradients need the layers in the same memory as input gradients did. Leave "
            "MemorySwap or split_backward out"
        )


def check_stash(run: PipelineRun, plan: Plan) -> None:
    """Check whether the weight versions of the run can be swapped between host and device.

    Raises:
        PipelineError: a forward keeps its version on the device until the backward, or the two halves of a split
            backward need the same version.
    """
    name = run.plans.schedule.name
    if not _recomputes(plan):
        raise PipelineError(
            f"MemorySwap moves weight versions of schedule {name!r}, and needs PipelineStrategy(recompute=True). "
            "Without recomputation of all micro-batches, a forward keeps its version on the device until its backward"
        )
    if plan.split_backward:
        raise PipelineError(
            f"MemorySwap moves weight versions, but schedule {name!r} splits the backward pass, and its second half "
            "needs the versions in the same memory as its first half. Leave MemorySwap out, or use a schedule that "
            "does not split the backward pass"
        )


def _recomputes(plan: Plan) -> bool:
    """Return whether all forwards that wait for their backward keep only their input.

    On the last stage, no forward waits.
    """
    return all(map(plan.recomputes_all, range(plan.n_stages - 1)))


def check_room(
    stage: int, layers: Mapping[int, nn.Module], optimizers: Sequence[Optimizer], device_bytes: int, on_cpu: bool
) -> None:
    """Reject a memory that has no room for the largest part of each layer with alternatives, with its optimizer states.

    Args:
        stage: the number of the stage, for the message.
        layers: the layers of the stage, by number. A ModuleList is a choice block: a batch uses one of its entries.
        optimizers: the optimizers.
        device_bytes: the size of the memory.
        on_cpu: whether the device is the CPU.

    Raises:
        PlanError: there is not enough room.
    """
    needed, names = 0, []
    for number, layer in layers.items():
        sizes = {name: _held_bytes(part) for name, part in layer.named_children()} if _offers(layer) else {}
        if sizes and max(sizes.values()):
            name = max(sizes, key=lambda each: sizes[each])
            names.append(f"{number}.{name}")
            kept = optimizer_state(layer.get_submodule(name), optimizers[0] if optimizers else None)
            needed += sizes[name] + _aligned_bytes(t for t in kept if t.ndim or on_cpu)
    if needed > device_bytes:
        raise PlanError(
            f"no room on the device for layers {', '.join(names[:6])}, the largest that a batch may use on stage "
            f"{stage}. They take {needed} bytes with their optimizer states, and device_bytes={device_bytes}. Give "
            "MemorySwap more device_bytes, cut the model into more stages, or leave such layers out of the network"
        )


def _offers(layer: nn.Module) -> bool:
    return isinstance(layer, nn.ModuleList)


def _held_bytes(part: nn.Module) -> int:
    return _aligned_bytes((*part.parameters(), *part.buffers()))


def _aligned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(-(-t.nbytes // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES for t in tensors)
