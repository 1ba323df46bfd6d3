"""Features of a device, as its monitor reports them, and of a stage that runs on it, as one row of numbers.

DynPipe uses 26 counters of Nsight and 6 numbers of the task (S V-A). The counters of Nsight are not available on CPUs,
or in containers without permission. Therefore, the row contains whatever the monitor provides, and missing values are
NaN. The task is described by the bytes that it moves per second, so that it may be larger or smaller than the tasks in
training, and not by its number of layers of certain types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.planning.replanning import HostedStage

Array = npt.NDArray[np.float64]

RUN_SHARE_METRIC, WAIT_SHARE_METRIC = "host.compute_run_share", "host.compute_wait_share"
FORMULA_FEATURE = "formula.ratio"
"""The name of the plain formula as a feature."""

DEVICE_METRICS = (
    RUN_SHARE_METRIC,
    WAIT_SHARE_METRIC,
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
"""The metrics of a monitor that have the same meaning on another machine. Bytes of memory do not, for example."""
STAGE_FEATURES = (
    "stage.backward_share",
    "stage.weight_bytes_per_s",
    "stage.saved_bytes_per_s",
    "stage.sent_bytes_per_s",
)
FEATURE_NAMES = (FORMULA_FEATURE, *DEVICE_METRICS, *STAGE_FEATURES)
"""The names of the numbers in a row, in order."""
FORMULA_COLUMN = FEATURE_NAMES.index(FORMULA_FEATURE)
"""The index of the formula in a row."""
_MAX_FEATURE_VALUE = 1000.0


def predict_by_formula(device: Mapping[str, float]) -> float:
    """Return the slowdown by the counters of Linux's scheduler: (run + wait) / run of the computing thread.

    The formula is not learned. It is the slowdown of the device, for whatever stage. The result is NaN if there are no
    counters.
    """
    run, wait = device.get(RUN_SHARE_METRIC, np.nan), device.get(WAIT_SHARE_METRIC, np.nan)
    return min((run + wait) / run, _MAX_FEATURE_VALUE) if run > 0 else float("nan")


def feature_table(rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Array:
    """Return a row for each pair of a device and a stage, with the columns `FEATURE_NAMES`."""
    devices: dict[int, list[float]] = {}
    stages: dict[HostedStage, list[float]] = {}
    found = np.empty((len(rows), len(FEATURE_NAMES)))
    for place, (device, hosting) in enumerate(rows):
        if id(device) not in devices:
            devices[id(device)] = [predict_by_formula(device), *(device.get(name, np.nan) for name in DEVICE_METRICS)]
        if hosting not in stages:
            stages[hosting] = stage_row(hosting)
        found[place] = devices[id(device)] + stages[hosting]
    return found


def stage_row(stage: HostedStage) -> list[float]:
    """Return the numbers of a stage, with the columns `STAGE_FEATURES`."""
    seconds = stage.forward + stage.backward
    if seconds <= 0:
        return len(STAGE_FEATURES) * [float("nan")]
    moved = (stage.weights, stage.saved, stage.sent)
    return [stage.backward / seconds, *(size / seconds for size in moved)]
