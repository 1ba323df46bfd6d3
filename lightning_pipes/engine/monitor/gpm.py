"""Hardware counters of Hopper and newer GPUs (GPM): the load of a device's units by all processes."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar, NamedTuple

from lightning_pipes.engine.monitor.nvidia import Nvidia
from lightning_pipes.engine.monitor.source import Source, SourceError

MEBI = 2.0**20
LEAST_SECONDS = 0.1
"""The shortest time between two samples that the device supports."""


class _Metric(NamedTuple):
    number: int
    name: str
    scale: float  # from what the library gives: 0 to 100, or MiB/s


_ASKED = (
    _Metric(1, "graphics_active_share", 0.01),
    _Metric(2, "sm_active_share", 0.01),
    _Metric(3, "sm_occupancy_share", 0.01),
    _Metric(4, "integer_active_share", 0.01),
    _Metric(5, "tensor_active_share", 0.01),
    _Metric(10, "dram_active_share", 0.01),
    _Metric(11, "fp64_active_share", 0.01),
    _Metric(12, "fp32_active_share", 0.01),
    _Metric(13, "fp16_active_share", 0.01),
    _Metric(20, "pcie_tx_bytes_per_s", MEBI),
    _Metric(21, "pcie_rx_bytes_per_s", MEBI),
    _Metric(60, "nvlink_rx_bytes_per_s", MEBI),
    _Metric(61, "nvlink_tx_bytes_per_s", MEBI),
    _Metric(174, "context_switch_active_share", 0.01),
)
_ACTIVE, _OCCUPANCY = 1, 2
"""Places in `_ASKED`. Their difference is the paper's most informative counter: unallocated warps in active
multiprocessors."""


class GpmSource(Source):
    """Differences of two samples that the device takes by itself, one at each tick, without waiting.

    A metric that the driver does not know is missing.

    Args:
        uuid: of the device.
    """

    name: ClassVar[str] = "gpm"
    metrics = (*(f"gpu.{m.name}" for m in _ASKED), "gpu.unallocated_warps_share")

    def __init__(self, uuid: str | None) -> None:
        super().__init__()
        self._device = Nvidia(uuid)
        self._samples: list[Any] = []
        self._asked: Any = None
        self._at = 0.0  # when the last one was taken

    def open(self) -> None:
        self._device.open()
        api, handle = self._device.api, self._device.handle
        try:
            if not api.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise SourceError("the device has no such counters; those of Hopper and newer do")
            self._samples = [api.nvmlGpmSampleAlloc(), api.nvmlGpmSampleAlloc()]
            api.nvmlGpmSampleGet(handle, self._samples[0])
            self._at = time.monotonic()
        except (api.NVMLError, *self._device.permanent_errors, SourceError) as error:
            self.close()
            raise SourceError(_reason(api, error)) from error
        asked = self._asked = api.c_nvmlGpmMetricsGet_t()  # of 19 KB, so made once
        asked.version, asked.numMetrics = api.NVML_GPM_METRICS_GET_VERSION, len(_ASKED)
        for place, metric in enumerate(_ASKED):
            asked.metrics[place].metricId = metric.number

    def read(self) -> list[float]:
        api, asked = self._device.api, self._asked
        if time.monotonic() - self._at < LEAST_SECONDS:
            return len(self.metrics) * [math.nan]
        before, now = self._samples
        api.nvmlGpmSampleGet(self._device.handle, now)
        self._at = time.monotonic()
        self._samples.reverse()
        asked.sample1, asked.sample2 = before, now
        api.nvmlGpmMetricsGet(asked)
        found = [
            asked.metrics[place].value * metric.scale if asked.metrics[place].nvmlReturn == 0 else math.nan
            for place, metric in enumerate(_ASKED)
        ]
        return [*found, found[_ACTIVE] - found[_OCCUPANCY]]

    def close(self) -> None:
        for sample in self._samples:
            self._device.api.nvmlGpmSampleFree(sample)
        self._samples = []
        self._device.close()


def _reason(api: Any, error: Exception) -> str:
    if isinstance(error, api.NVMLError_NoPermission):
        return (
            f"{error}; the driver keeps counters for administrators (NVreg_RestrictProfilingToAdminUsers=0 opens them)"
        )
    if isinstance(error, api.NVMLError_FunctionNotFound):
        return f"{error}: the driver is older than these counters"
    return str(error)
