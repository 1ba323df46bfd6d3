"""The ranks decide together how the model is cut, and by which schedule, from what one of them has measured."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.cost import Cluster, Deployment, Device, Link, ModelProfile
from lightning_pipes.engine.footprint import tensors_in
from lightning_pipes.engine.links import measure_links
from lightning_pipes.engine.profiler import synchronize
from lightning_pipes.engine.rng import forked_rng
from lightning_pipes.engine.transport import make_transport
from lightning_pipes.ir import Plan, PlanError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.control import Control
from lightning_pipes.trainer.decision import Decision, Wanted
from lightning_pipes.trainer.deferred import has_meta
from lightning_pipes.trainer.grid import Grid
from lightning_pipes.trainer.layout import places
from lightning_pipes.trainer.measuring import Measuring, NotWorthItError
from lightning_pipes.trainer.sample import NoSampleError, batch_rows, example_batch

PATIENCE = 2.0
"""Seconds after which people are told what takes so long."""
SAME_SPEED = 0.2
"""By what share devices may differ in a short benchmark and still count as equally fast."""
USABLE = 0.9
"""The share of a GPU's memory that stages may take; the rest goes to its context, to libraries and to fragments."""
_LINK_SIZES = (2**14, 2**18, 2**21)
_profiles: dict[tuple[Any, ...], _Found] = {}
"""What this process has measured, by all that it depends on."""


@dataclass(frozen=True)
class _Found:
    """What one rank found out for all.

    Attributes:
        rows: samples of a batch.
        reason: why there is no profile.
        quiet: nobody needs to know that reason.
    """

    rows: int = 0
    profile: ModelProfile | None = None
    reason: str = ""
    quiet: bool = False


class Deciding:
    """Collective: all ranks make one, and the same calls of it.

    Args:
        path: the pipelined container in the Trainer's module.
        control: of all ranks.
        pipeline: of those of this rank's pipeline.
        transport: how messages will travel.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        path: str,
        grid: Grid,
        control: Control,
        pipeline: Control,
        device: torch.device,
        transport: str,
    ) -> None:
        self._trainer = trainer
        self._path = path
        self._grid = grid
        self._control = control
        self._pipeline = pipeline
        self._device = device
        self._transport = transport
        # Not rank 0, whose loggers write: a training step may use them.
        self._who = grid.pipelines[0][-1]

    def decide(self, wanted: Wanted, plain: Decision) -> Decision:
        """What runs: `plain` where there is nothing to choose, or nothing to choose by, which it says then.

        Raises:
            PlanError: a schedule is to be chosen, and none fits.
        """
        if not wanted.needs_profile or self._grid.length == 1 or self._trainer.limit_train_batches == 0:
            return plain
        if not wanted.chooses and plain.endless:
            reason = f"{plain.schedule.name} does not flush between batches, so there is no step to balance"
            return self._kept(wanted, plain, reason, quiet=True)
        with _told(f"Measuring the layers of self.{self._path}, to cut them by time", self._control):
            found = self._found(wanted)
            if found.profile is None:
                return self._kept(wanted, plain, found.reason, found.quiet)
            place = self._place(plain)
            made: Decision | str = ""
            if dist.get_rank() == self._who:
                try:
                    made = wanted.measured(plain, found.profile, found.rows, place)
                except PlanError as error:
                    made = str(error)
            made = self._control.broadcast(made, self._who)
        if isinstance(made, str):
            if wanted.chooses:
                raise PlanError(f"schedule='auto': {made}")
            return self._kept(wanted, plain, made, False)
        rank_zero_info("\n".join(filter(None, [made.table, made.why])))
        return made

    def _kept(self, wanted: Wanted, plain: Decision, reason: str, quiet: bool) -> Decision:
        what = f"Schedule {plain.schedule.name!r} runs, its layers" if wanted.chooses else "The layers are"
        if not quiet:
            rank_zero_info(f"{what} cut evenly by parameters: {reason}")
        return replace(plain, why=reason)

    def _found(self, wanted: Wanted) -> _Found:
        module = self._trainer.lightning_module
        if self._control.any(has_meta(module))[0]:
            return _Found(reason=f"weights of {type(module).__name__} are on meta until the module is cut")
        if private.training_data_come_later(self._trainer):
            return _Found(
                reason="train_dataloader has to wait until a resumed run has its counters, or the batch size is known"
            )
        data = private.training_data(self._trainer)  # on all ranks: it may draw random numbers
        found = _Found()
        if dist.get_rank() == self._who:
            try:
                found = self._measured(wanted, data)
            except (NoSampleError, NotWorthItError) as why:
                found = _Found(reason=str(why), quiet=isinstance(why, NotWorthItError))
            except Exception as error:  # of the user's code, which Lightning will run into where it can be explained
                found = _Found(reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return self._control.broadcast(found, self._who)  # type: ignore[no-any-return]

    def _measured(self, wanted: Wanted, loader: Any) -> _Found:
        rows = batch_rows(loader)
        sizes = wanted.microbatch_rows(rows, self._grid.length)
        with forked_rng(self._device):
            batch = example_batch(loader, max(sizes))
        pieces = None if wanted.chooses else -(-rows // max(sizes))
        split = wanted.chooses or wanted.schedule.splits_backward
        trainer = self._trainer
        full = trainer.lightning_module.get_submodule(self._path)
        key = (
            _structure(trainer.lightning_module, full, batch),
            (sizes, pieces, split, str(trainer.precision_plugin.precision), _device_name(self._device)),
        )
        if key not in _profiles:
            try:
                profile = Measuring(trainer, self._path, batch, sizes, self._device).profile(pieces, split)
                _profiles[key] = _Found(rows, profile)
            except NotWorthItError as why:
                _profiles[key] = _Found(reason=str(why), quiet=True)
        return replace(_profiles[key], rows=rows)

    def _place(self, plain: Decision) -> Deployment:
        """The devices and links of a pipeline, in the order of its ranks; of replicas the worst."""
        length, grid = self._grid.length, self._grid
        order = places(plain.ranks, length)
        speeds = self._speeds()
        memory = self._control.all_gather(device_memory(self._device))
        devices = []
        for at in order:
            same = [pipeline[at] for pipeline in grid.pipelines]
            limits = [memory[rank] for rank in same if memory[rank] is not None]
            devices.append(Device(min(limits, default=None), min(speeds[rank] for rank in same)))
        links = self._links(order)
        slowest = min(links.values(), key=lambda link: link.bandwidth)
        cluster = Cluster(tuple(devices), inside=slowest, links=links)
        return Deployment(cluster, grid.replicas, (slowest,) * length if grid.replicas > 1 else ())

    def _speeds(self) -> list[float]:
        """Of every process, relative to the one that has measured; equal ones need no benchmark."""
        names = self._control.all_gather(_device_name(self._device))
        if len(set(names)) == 1:
            return [1.0] * len(names)
        seconds = self._control.all_gather(benchmark(self._device))
        mine = seconds[self._control.ranks.index(self._who)]
        speeds = [mine / each for each in seconds]
        return [1.0 if 1 - SAME_SPEED < speed < 1 + SAME_SPEED else speed for speed in speeds]

    def _links(self, order: list[int]) -> dict[tuple[int, int], Link]:
        """Between neighbours, as messages will travel; where replicas differ, the slowest."""
        plan = Plan.even(len(order), 1)
        rank = order.index(self._grid.place)
        to = [self._grid.pipeline[place] for place in order]
        transport = make_transport(plan, rank, to, self._device, self._control.watch, self._transport)
        try:
            mine = measure_links(plan, rank, transport, _LINK_SIZES, repeats=3, device=self._device)
        finally:
            transport.close()
        found: dict[tuple[int, int], Link] = {}
        for links in self._control.all_gather(mine):
            for pair, link in links.items():
                if pair not in found or link.bandwidth < found[pair].bandwidth:
                    found[pair] = link
        return found


def benchmark(device: torch.device) -> float:
    """Seconds of the same short work on every device."""
    a = torch.ones(512, 512, device=device)
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(4):
            a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best


def device_memory(device: torch.device) -> int | None:
    """Bytes that stages may take of a GPU; None on CPU, where nobody counts."""
    return int(USABLE * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def _device_name(device: torch.device) -> str:
    """Equal for devices that are as fast as each other."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU of {socket.gethostname()}, {torch.get_num_threads()} threads"


def _structure(module: nn.Module, full: nn.Module, batch: Any) -> tuple[Any, ...]:
    """What the times of layers depend on, besides the device."""

    def settings(part: nn.Module) -> list[tuple[str, Any]]:
        plain = (bool, int, float, str, tuple)
        return [(name, value) for name, value in vars(part).items() if isinstance(value, plain)]

    parts = tuple(
        (type(part), repr(settings(part)), tuple((p.shape, p.dtype, p.requires_grad) for p in part.parameters(False)))
        for part in full.modules()
    )
    return type(module), parts, tuple((t.shape, t.dtype) for t in tensors_in(batch))


@contextmanager
def _told(what: str, control: Control) -> Iterator[None]:
    """Says what is done if it takes long, on rank 0."""
    timer = threading.Timer(PATIENCE, rank_zero_info, (f"{what} ...",))
    timer.daemon = True
    if control.position == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
