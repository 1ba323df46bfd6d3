"""The decision about schedule and cut, from a profile and the measured links between the ranks."""

from __future__ import annotations

import torch

from lightning_pipes.cost import Cluster, Deployment, Device, Link, ModelProfile
from lightning_pipes.engine.messages.links import measure_links
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.ir import Plan, PlanError
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.holdings import positions_of_ranks
from lightning_pipes.trainer.ranks.processes import process_rank
from lightning_pipes.trainer.ranks.ranks import Ranks

USABLE_MEMORY = 0.9
"""The share of a GPU's memory that stages may use. The rest is for the CUDA context, libraries and fragmentation."""
_LINK_SIZES = (2**14, 2**18, 2**21)


class ProfilePlanner:
    """Makes decisions from a profile.

    All methods are collective: all ranks make one planner and make the same calls.

    Args:
        ranks: the ranks of the run.
        transport: the name of the transport for messages.
    """

    def __init__(self, ranks: Ranks, transport: str) -> None:
        self._ranks = ranks
        self._grid = ranks.grid
        self._control = ranks.control
        self._device = ranks.device
        self._transport = transport
        self._deciding_rank = ranks.grid.pipelines[0][-1]

    def plan(
        self, request: RunRequest, plain: Decision, profile: ModelProfile, rows: int, deployment: Deployment
    ) -> Decision:
        """Return the decision from a profile, which one rank makes for all ranks.

        Raises:
            PlanError: no decision is possible.
        """
        made: Decision | str = ""
        if process_rank() == self._deciding_rank:
            try:
                made = request.measured(plain, profile, rows, deployment)
            except PlanError as error:
                made = str(error)
        made = self._control.broadcast(made, self._deciding_rank)
        if isinstance(made, str):
            raise PlanError(made)
        return made

    def make_deployment(self, plain: Decision, speeds: list[float]) -> Deployment:
        """Return the devices and links of a pipeline, in the order of its ranks.

        If there are several replicas, the smallest memory and the lowest speed are used.

        Args:
            plain: the decision without measurements.
            speeds: the relative speed of all processes.
        """
        length, grid = self._grid.length, self._grid
        order = positions_of_ranks(plain.ranks, length)
        memory = self._control.all_gather(device_memory(self._device))
        devices = []
        for at in order:
            same = [pipeline[at] for pipeline in grid.pipelines]
            limits = [memory[rank] for rank in same if memory[rank] is not None]
            devices.append(Device(min(limits, default=None), min(speeds[rank] for rank in same)))
        links = self._measure_links(order)
        slowest = min(links.values(), key=lambda link: link.bandwidth)
        cluster = Cluster(tuple(devices), inside=slowest, links=links)
        return Deployment(cluster, grid.replicas, (slowest,) * length if grid.replicas > 1 else ())

    def _measure_links(self, order: list[int]) -> dict[tuple[int, int], Link]:
        """Measure the links between neighbors with the transport of the run. Return the slowest of all replicas."""
        plan = Plan.even(len(order), 1)
        rank = order.index(self._grid.position)
        to = [self._grid.pipeline[at] for at in order]
        transport = make_transport(plan, rank, to, self._device, self._control.watch, self._transport)
        try:
            mine = measure_links(plan, rank, transport, _LINK_SIZES, device=self._device)
        finally:
            transport.close()
        found: dict[tuple[int, int], Link] = {}
        for links in self._control.all_gather(mine):
            for pair, link in links.items():
                if pair not in found or link.bandwidth < found[pair].bandwidth:
                    found[pair] = link
        return found


def has_memory_limit(request: RunRequest, ranks: Ranks) -> bool:
    """Return whether the memory of a device or of the schedule is limited. This function is collective."""
    limited = device_memory(ranks.device) is not None or planner_of(request.schedule).has_memory_limit
    return any(ranks.control.all_gather(limited))


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that stages may use, or None on the CPU, where memory is not limited."""
    return int(USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
