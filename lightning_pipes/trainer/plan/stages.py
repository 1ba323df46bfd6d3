"""The choice of the stages before ranks connect, from layer times that an earlier run has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.cost import Cluster, Device
from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.plan.profile_cache import describe_module, find_cache
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import AUTO, Settings

Stages = str | Mapping[int, float]


def check_stages(stages: Stages | None, request: RunRequest, settings: Settings) -> Stages | None:
    """Return the argument `stages` after checking it. None means one stage per rank.

    Raises:
        InputError: the argument is invalid, or another argument fixes what it would choose.
    """
    if stages is None:
        return None
    counts = isinstance(stages, Mapping) and all(isinstance(n, int) and t > 0 for n, t in stages.items())
    if not (isinstance(stages, str) and stages == AUTO) and not (counts and len(stages) > 1):
        raise InputError(
            "stages must be 'auto', or the batches until the target by number of stages, of two numbers or more, as in "
            f"{{1: 196, 4: 222}}, got {short_repr(stages)}"
        )
    if not hasattr(request.schedule, "choose_stages"):
        raise InputError(
            f"stages={short_repr(stages)} weighs staler gradients against faster batches, and schedule "
            f"{AUTO if request.chooses else request.schedule.name} has no stale gradients; take schedule='dynpipe', "
            "or leave stages out"
        )
    fixed = {"partition": (request.partition, AUTO), "data_parallel": (settings.data_parallel, 1)}
    fixed |= {"tensor_parallel": (settings.tensor_parallel, 1)}
    for name, (given, free) in fixed.items():
        if given != free:
            raise InputError(
                f"stages={short_repr(stages)} chooses the layers and the ranks of each stage, and {name}={given!r} "
                "fixes them; leave one of them out"
            )
    return stages


def choose_stages(
    stages: Stages,
    request: RunRequest,
    settings: Settings,
    trainer: pl.Trainer,
    hosts: list[str],
    memory: int | None,
) -> tuple[RunRequest, Settings]:
    """Choose the stages that need the least time until the target (DynPipe, Algorithm 1).

    Every rank makes this choice independently, from the same file. The ranks of one stage share the samples of each
    micro-batch, so all ranks train the batches of one pipeline.

    Args:
        stages: the argument of the strategy.
        request: the request of the user.
        settings: the settings of the strategy.
        trainer: the Trainer.
        hosts: the host of each rank, in the order of the ranks.
        memory: the bytes of memory of each device, or None if they are unknown.

    Returns:
        The request and the settings with the chosen stages.

    Raises:
        InputError: no earlier run has measured this module, or nothing fits into memory.
    """
    known = find_cache(trainer).find_run(describe_module(trainer.lightning_module))
    if known is None:
        raise InputError(
            f"stages={short_repr(stages)} chooses by times of layers, and no earlier run of "
            f"{type(trainer.lightning_module).__name__} has left any below {trainer.default_root_dir}. Run a few "
            "batches once on two processes or more without stages, which measures layers where a batch takes 20 ms or "
            "more; or choose by `lightning-pipes stages`, and set partition and data_parallel"
        )
    cluster = Cluster(tuple(Device(memory, host=host) for host in hosts), inside=known.link, between=known.link)
    batches = {} if isinstance(stages, str) else stages
    cached = any(isinstance(callback, StateMemory) for callback in private.callbacks(trainer))
    choice = request.schedule.choose_stages(  # type: ignore[union-attr]  # `check_stages` has looked
        known.profile, cluster, known.rows, request.microbatches or 1, batches=batches, cached=cached
    )
    best = choice.best.best
    rank_zero_info(str(choice))
    degrees = tuple(mesh.data for mesh in best.meshes)
    chosen = settings if set(degrees) == {1} else replace(settings, data_parallel=degrees)
    return replace(request, partition=best.cuts), chosen
