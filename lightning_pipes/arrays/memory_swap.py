"""States that take turns on a device: siblings with their optimizers, layers of a supernet, or weight versions.

States are kept on the host if they do not all fit on the device. For job arrays, the available memory can also decide
the number of siblings. After a run, a log message reports whether moving the states was hidden by computations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.cost.units import bytes_text
from lightning_pipes.engine.residency.binding import Binding, still_bound
from lightning_pipes.engine.residency.copier import SlabCopier, Stopwatch, copier_for
from lightning_pipes.engine.residency.swap import Swap
from lightning_pipes.engine.residency.upcoming import PREDICTORS
from lightning_pipes.ir import PlanError, check_count, check_number, check_type
from lightning_pipes.sim.residency import Statistics
from lightning_pipes.trainer.loop.host import PipelineCallback, PipelineHost
from lightning_pipes.trainer.ranks.notices import Notices


@dataclass(frozen=True)
class Switching:
    """Inequality E2 of the paper for the devices of one host: all their states are exchanged during the shortest block.

    Attributes:
        stages: the stages on this host.
        transfer: seconds in which the states of all these stages move to the devices.
        block: seconds of the shortest block that can hide the transfer, without its message.
    """

    stages: tuple[int, ...]
    transfer: float
    block: float

    @property
    def is_hidden(self) -> bool:
        """Whether switching takes no additional time."""
        return self.transfer <= self.block

    @property
    def visible_seconds(self) -> float:
        """Seconds of a switch that are not hidden if every block is as short as the shortest one.

        Longer blocks hide more.
        """
        return max(0.0, self.transfer - self.block)

    def __str__(self) -> str:
        where = f"stages {', '.join(map(str, self.stages))}"
        if self.is_hidden:
            return f"{where}: states move in {self.transfer:.3g} s, while a block of {self.block:.3g} s runs"
        return (
            f"{where}: states move in {self.transfer:.3g} s, and the shortest block that could hide it takes "
            f"{self.block:.3g} s; a switch costs up to {self.visible_seconds:.3g} s. Use batches "
            f"{self.transfer / self.block:.2g} times as large, a faster link to the host, fewer of these stages on "
            "one host, or keep all states resident"
        )


class SiblingMemory:
    """The memory for weights and optimizers of an array's siblings. This base class keeps all of them on the device.

    The array reports its progress through these methods and identifies siblings by their indices.
    """

    def open(self, several: bool) -> None:
        """Prepare for an array.

        Args:
            several: whether several siblings may run at a time.
        """

    def close(self) -> None:
        """Release all resources at the end of the array."""

    def is_leased(self, index: int) -> bool:
        """Return whether the sibling's state has to stay on the device."""
        return True

    def has_room(self, index: int) -> bool:
        """Return whether the sibling's state fits on the device next to the states that have to stay there."""
        return True

    def explain_excess(self, indices: Iterable[int]) -> str:
        """Return why the states of these siblings do not fit on the device together, or an empty text if they fit."""
        return ""

    def begin_turn(self, index: int) -> None:
        """Prepare for a turn of the sibling, in which the sibling may change its state."""

    def end_turn(self, index: int, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Handle the end of a turn, in which the sibling has handed in a batch.

        The sibling's first turn creates its state. The state grows after the first step of the optimizers.

        Raises:
            PlanError: the state does not fit or cannot be moved.
        """

    def begin_block(self, index: int, stage: int) -> None:
        """Prepare for a computation of the sibling between its turns."""

    def end_block(self, index: int, keep: bool) -> None:
        """Handle the end of a computation of the sibling.

        Args:
            index: the index of the sibling.
            keep: whether the state has to stay in place, because a later backward uses the tensors that this
                computation read.
        """

    def look_ahead(self, coming: Iterable[int]) -> None:
        """Announce the siblings that will probably compute or have turns next, in order."""

    def release_sibling(self, index: int) -> None:
        """Move the sibling's tensors back to the host and out of the shared memory."""


class MemorySwap(SiblingMemory, PipelineCallback):
    """Keep states in host memory and move them to the device before they are used.

    A state belongs to a sibling of a job array, to a layer of a supernet, or to a weight version. It contains weights,
    buffers and optimizer states. Results are equal, bit for bit, to the results without swapping. On a CPU, device and
    host are the same memory, and bytes are only counted.

    Siblings (section III-D of ArrayPipe): a state is on the device during the sibling's computations and optimizer
    steps, and the states of the next siblings are prefetched. Without `recompute=True`, a state also stays on the
    device from the first forward of a batch to its last backward. Gradients and activations always stay on the device.

        JobArray(16, memory=MemorySwap(device_bytes=8 << 30))

    Layers of a supernet (NASPipe, Zhao et al. 2022, section 4.2): as a callback, it moves the layers that batches name,
    including batches in validation. Layers that all batches share stay on the device. If a layer, or a backward that
    recomputes, runs out of memory, all other layers are moved off the device and the computation runs again.

        Trainer(callbacks=[MemorySwap(device_bytes=8 << 30)], strategy=PipelineStrategy("csp", recompute=True))

    Weight versions (DynPipe): with a schedule that stashes weights, such as "pipedream" or "dynpipe", it moves the
    versions that batches in flight still need. The newest version, and the version that is currently read, stay on the
    device.

        Trainer(callbacks=[MemorySwap(device_bytes=8 << 30)], strategy=PipelineStrategy("dynpipe", recompute=True))

    Args:
        device_bytes: bytes on each device that states may occupy.
        host_bytes: bytes on the host that the states of one rank may occupy. By default, there is no limit. With
            JobArray("auto"), the default is half of the free memory, shared by the ranks of the host.
        slots: the largest number of states on a device, if it is smaller than the number that fits.
        bandwidth: bytes per second of an emulated link in each direction. CPU only.
        prefetch: whether states are loaded before they are needed. If False, each switch waits for its copy, for
            comparison.
        predictor: method that predicts the next layers of a supernet. "in_turn" uses the tasks that the rank has
            started and the tasks that are ready. "algorithm_3" is the algorithm of NASPipe, in which stages send each
            other records of upcoming backwards. "simulated" uses the simulated order of the schedule, with the same
            costs as `balanced=True` uses for its cuts.

    Attributes:
        statistics: statistics of this rank over the run of the array or the fit: hits, late states and misses, stalls,
            and bytes.
        switching: the paper's inequality E2 with the measured numbers. It shows whether copies were hidden, and its
            text suggests improvements. It is None if no state was copied.

    Raises:
        InputError: an argument has a wrong type, or a number is not positive.
        PlanError: there are fewer than two slots, or the predictor is unknown. During a run: two states do not fit on
            the device, all states together do not fit on the host, or a state cannot be moved.
    """

    def __init__(
        self,
        device_bytes: int,
        host_bytes: int | None = None,
        slots: int | None = None,
        bandwidth: float | None = None,
        prefetch: bool = True,
        predictor: str = PREDICTORS[0],
    ) -> None:
        self.device_bytes = check_count("device_bytes", device_bytes)
        self.host_bytes = None if host_bytes is None else check_count("host_bytes", host_bytes)
        self.slots = None if slots is None else check_count("slots", slots)
        if slots is not None and slots < 2:
            raise PlanError(f"switching needs a slot for the current state and one for the next state, got {slots}")
        if bandwidth is not None:
            check_number("bandwidth", bandwidth, "bytes per second above 0", lambda x: x > 0)
        self.bandwidth = bandwidth
        self.prefetch = check_type("prefetch", prefetch, bool)
        if predictor not in PREDICTORS:
            raise PlanError(f"predictor must be one of {', '.join(PREDICTORS)}, got {predictor!r}")
        self.predictor = predictor
        self.statistics = Statistics()
        self.switching: Switching | None = None
        self._poison = False
        self._several = True
        self._swap: Swap[Hashable] | None = None
        self._copier: SlabCopier | None = None
        self._stages: set[int] = set()
        self._largest = 0
        self._sizes: dict[int, int] = {}
        """The bytes of the last state of each sibling."""
        self._blocks: Stopwatch | None = None
        self._notices: Notices | None = None
        self._all: Statistics | None = None

    def open(self, several: bool) -> None:
        self._several, self._largest, self._sizes, self._blocks = several, 0, {}, None
        self.statistics, self.switching, self._all = Statistics(), None, None

    # ---- as a callback

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.pipeline(trainer).memory = self
        self.open(several=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._notices = Notices(self.pipeline(trainer).control)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Publish this rank's counts. Rank 0 logs the counts that have arrived, without waiting."""
        every: int = getattr(trainer, "log_every_n_steps")  # noqa: B009  # Lightning sets it where no type checker looks
        if self._notices is None or trainer.global_step % every:
            return
        self._notices.put(_name(trainer.global_rank), astuple(self.statistics))
        if trainer.is_global_zero and trainer.logger is not None:
            others = (self._notices.find(_name(rank)) for rank in range(1, trainer.world_size))
            found = Statistics.sum_devices(
                [self.statistics, *(Statistics(*each) for each in others if each is not None)]
            )
            values = {
                "memory_hit_rate": found.hit_rate,
                "memory_late": float(found.late),
                "memory_stall_seconds": found.stall_ns / 1e9,
                "memory_gigabytes": (found.bytes_in + found.bytes_out) / 1e9,
            }
            trainer.logger.log_metrics(values, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._notices is None:
            return
        self._notices.put(_name(trainer.global_rank, "end"), astuple(self.statistics))
        if trainer.is_global_zero:
            others = (self._notices.get(_name(rank, "end")) for rank in range(1, trainer.world_size))
            self._all = Statistics.sum_devices([self.statistics, *(Statistics(*each) for each in others)])

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, PipelineHost) and trainer.strategy.memory is self:
            trainer.strategy.memory = self._notices = None
            self.close()

    # ---- states

    def states(self, device: torch.device) -> Swap[Hashable]:
        """Return the states on `device` by their keys. The states exist from the first call until `close`.

        The key of a sibling's state is the index of the sibling.
        """
        if self._swap is None:
            self._copier = copier_for(device, self.bandwidth)
            self._swap = Swap(
                self.device_bytes,
                self._copier,
                device,
                slots=self.slots,
                host_budget=self.host_bytes,
                poison=self._poison,
            )
            self.statistics = self._swap.statistics
            self._blocks = Stopwatch(device)
        return self._swap

    @property
    def usage_text(self) -> str:
        found = self._all or self.statistics
        if not found.leases:
            return ""
        by = f" (predictor {self.predictor!r})" if self.prefetch else " (no prefetch)"
        return (
            f"{found.hit_rate:.1%} of layers were on the device when a stage switched to them{by}, {found.late} late, "
            f"{found.misses} missed, {found.stall_ns / 1e9:.3g} s of waiting, {bytes_text(found.bytes_in)} in, "
            f"{bytes_text(found.bytes_out)} out"
        ) + (f", cleared {found.cleared} times for tasks that ran out of memory" if found.cleared else "")

    def close(self) -> None:
        if self._swap is None or self._copier is None:
            return
        self._swap.close()
        found, rate = self._all or self.statistics, self._copier.bandwidth
        shortest = float("inf") if self._blocks is None else self._blocks.shortest_seconds()
        if rate is not None and shortest < float("inf"):
            self.switching = Switching(tuple(sorted(self._stages)), self._largest / rate, shortest)
        self._swap = self._copier = None
        rank_zero_info(
            (
                f"MemorySwap: {found.hits} of {found.leases} uses found their state on the device, {found.late} waited "
                f"for a state that was being loaded, {found.misses} for a state that had not been requested; "
                f"{found.stall_ns / 1e9:.3g} s of waiting, {found.bytes_in / 1e9:.3g} GB in, "
                f"{found.bytes_out / 1e9:.3g} GB out"
            )
            + ("" if self.switching is None or not found.stall_ns else f". {self.switching}")
        )

    def count_states_that_fit(self, ranks: int) -> int:
        """Return the number of states as large as the largest one that fit in this rank's share of the host memory.

        The count includes the states that are already on the host.

        Args:
            ranks: number of ranks on this host.
        """
        most = self.host_bytes
        if most is None:  # the other half is left for models during their setup
            held = 0 if self._swap is None else self._swap.host_bytes
            most = held + psutil.virtual_memory().available // 2 // ranks
        return most // max(1, self._largest)

    def is_leased(self, index: int) -> bool:
        return self._swap is not None and self._swap.is_leased(index)

    def has_room(self, index: int) -> bool:
        swap = self._swap
        return swap is None or index not in swap or swap.is_leased(index) or swap.has_room(index)

    def explain_excess(self, indices: Iterable[int]) -> str:
        sizes = [self._sizes.get(index, 0) for index in indices]
        if sum(sizes) <= self.device_bytes and (self.slots is None or len(sizes) <= self.slots):
            return ""
        slots = "" if self.slots is None else f", slots={self.slots}"
        return f"They have {sum(sizes)} bytes, but MemorySwap has device_bytes={self.device_bytes}{slots}"

    def begin_turn(self, index: int) -> None:
        if self._swap is not None and index in self._swap:
            self._swap.release(index)
            self._swap.acquire(index, write=True)

    def end_turn(self, index: int, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        swap = self.states(device)
        if still_bound(swap, index, module, optimizers, device):
            swap.release(index)
            swap.write_back(index)
            return
        self.release_sibling(index)
        found = Binding(module, optimizers, device)
        self._sizes[index] = swap.add(index, found, lambda size: self._check(index, size))
        self._largest = max(self._largest, self._sizes[index])

    def begin_block(self, index: int, stage: int) -> None:
        self._stages.add(stage)
        if self._swap is not None and not self._swap.is_leased(index):
            bound = self._swap.bound_tensors(index)
            if isinstance(bound, Binding):
                self._swap.acquire(index, write=bound.has_buffers)
        if self._blocks is not None:
            self._blocks.start()

    def end_block(self, index: int, keep: bool) -> None:
        if self._blocks is not None:
            self._blocks.stop()
        if not keep and self._swap is not None:
            self._swap.release(index)

    def look_ahead(self, coming: Iterable[int]) -> None:
        if self._swap is not None:
            self._swap.predict(coming)
            if self.prefetch:
                self._swap.prefetch_states()

    def release_sibling(self, index: int) -> None:
        if self._swap is not None:
            self._swap.remove(index)

    def _check(self, index: int, size: int) -> None:
        if self._several and 2 * size > self.device_bytes:
            raise PlanError(
                f"sibling {index} has a state of {size} bytes, but device_bytes={self.device_bytes} has no room for "
                f"two states: the current one and the next one. Use {2 * size} or more, or cut the model into more "
                "stages"
            )


def _name(rank: int, when: str = "now") -> str:
    return f"memory/{when}/{rank}"


AUTO = "auto"
_SIBLINGS_PER_STAGE = 2
"""The number of siblings per stage that keep all stages busy, according to simulations."""


def count_useful_siblings(stages: int) -> int:
    """Return the number of siblings that keep all stages busy."""
    return _SIBLINGS_PER_STAGE * stages


def choose_microbatches(stages: int, siblings: int) -> int:
    """Return the number of micro-batches per batch in an array of this number of siblings.

    It is the smallest number that keeps all stages busy.
    """
    return -(-count_useful_siblings(stages) // siblings)


def choose_size(rooms: Sequence[int], stages: int) -> int:
    """Return the size of an array, and log it.

    It is the number of useful siblings that fit on all ranks (S V-B1 of ArrayPipe).

    Args:
        rooms: number of states that each rank has room for.
        stages: number of stages of the pipeline.

    Raises:
        PlanError: a rank does not have room for two states.
    """
    fits, useful = min(rooms), count_useful_siblings(stages)
    if fits < 2:
        raise PlanError(
            f"the host of rank {rooms.index(fits)} has room for the states of {fits} sibling, but an array needs two. "
            "Raise MemorySwap's host_bytes, or cut the model into more stages"
        )
    size = min(fits, useful)
    rank_zero_info(
        f"JobArray runs {size} siblings at a time: {useful} keep {stages} stages busy, and the host of rank "
        f"{rooms.index(fits)} has room for the states of {fits}. The other siblings start when these have finished"
    )
    return size
