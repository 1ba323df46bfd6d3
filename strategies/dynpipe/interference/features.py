"""A device as its monitor sees it, and a stage that it would host, as one row of numbers.

DynPipe has 26 counters of Nsight and 6 numbers of the task (S V-A). Nsight's are not to be had on CPUs, nor in
containers without permission, so the row has whatever the monitor has; what is missing is NaN. The task is described by
what it moves in a second, so that it may be larger or smaller than those of the training, and not by its count of
layers of some type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.planning.replanning import HostedStage

Array = npt.NDArray[np.float64]

RUN, WAIT = "host.compute_run_share", "host.compute_wait_share"
FORMULA = "formula.ratio"
"""The plain formula as a feature."""

DEVICE = (
    RUN,
    WAIT,
    "host.compute_slices_per_s",
    "host.threads_wait_cores",
    "host.forced_switches_per_s",
    "host.minor_faults_per_s",
    "host.cores_busy_share",
    "host.cores_system_share",
    "host.cores_interrupt_share",
    "host.cores_stolen_share",
    "host.machine_busy_share",
    "host.runnable_count",
    "host.cpu_pressure_share",
    "host.memory_pressure_share",
    "host.throttled_cores",
    "gpu.graphics_active_share",
    "gpu.sm_active_share",
    "gpu.sm_occupancy_share",
    "gpu.unallocated_warps_share",
    "gpu.tensor_active_share",
    "gpu.dram_active_share",
    "gpu.pcie_tx_bytes_per_s",
    "gpu.pcie_rx_bytes_per_s",
    "gpu.context_switch_active_share",
    "gpu.sm_clock_hertz",
    "gpu.busy_share",
    "gpu.memory_busy_share",
    "gpu.processes_count",
)
"""Of the metrics of a monitor, those that mean the same on another machine: no bytes of memory."""
STAGE = (
    "stage.backward_share",
    "stage.weight_bytes_per_s",
    "stage.saved_bytes_per_s",
    "stage.sent_bytes_per_s",
)
NAMES = (FORMULA, *DEVICE, *STAGE)
"""Of a row's numbers, in order."""
FORMULA_AT = NAMES.index(FORMULA)
"""Its place in a row."""
_MOST = 1000.0


def predict_by_formula(device: Mapping[str, float]) -> float:
    """Return the slow-down that Linux's scheduler has counted, (run + wait) / run of the computing thread, without any
    learning; NaN where it counts nothing. It is that of the device, whatever stage it would host."""
    run, wait = device.get(RUN, np.nan), device.get(WAIT, np.nan)
    return min((run + wait) / run, _MOST) if run > 0 else float("nan")


def feature_table(rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Array:
    """Return a row for each pair of a device and a stage, with the columns `NAMES`."""
    devices: dict[int, list[float]] = {}
    stages: dict[HostedStage, list[float]] = {}
    found = np.empty((len(rows), len(NAMES)))
    for place, (device, hosting) in enumerate(rows):
        if id(device) not in devices:
            devices[id(device)] = [predict_by_formula(device), *(device.get(name, np.nan) for name in DEVICE)]
        if hosting not in stages:
            stages[hosting] = stage_row(hosting)
        found[place] = devices[id(device)] + stages[hosting]
    return found


def stage_row(stage: HostedStage) -> list[float]:
    """Return the numbers `STAGE`."""
    seconds = stage.forward + stage.backward
    if seconds <= 0:
        return len(STAGE) * [float("nan")]
    moved = (stage.weights, stage.saved, stage.sent)
    return [stage.backward / seconds, *(size / seconds for size in moved)]
