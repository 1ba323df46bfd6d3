"""Numbers of every NVIDIA GPU's driver: utilisation, clocks and reasons for low clocks, PCIe, memory, other
processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from lightning_pipes.engine.monitor.nvidia import Nvidia
from lightning_pipes.engine.monitor.source import Rates, Source

_PCIE_TX, _PCIE_RX, _POWER = 197, 198, 186
"""Fields that are read at once: counters of bytes, where nvmlDeviceGetPcieThroughput counts for 20 ms; milliwatts."""
_SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Of the reasons for a clock: power cap, slow-downs by hardware, heat, a brake of the power supply."""
_SM, _MEMORY = 1, 2
_MEGA = 1e6


class NvmlSource(Source):
    """Calls that return at once; a call that the driver does not support is made once, and missing afterwards.

    Args:
        uuid: of the device.
    """

    name: ClassVar[str] = "nvml"
    metrics = tuple(
        f"gpu.{name}"
        for name in (
            "busy_share",
            "memory_busy_share",
            "sm_clock_hertz",
            "memory_clock_hertz",
            "slowed_share",
            "pcie_tx_counted_bytes_per_s",
            "pcie_rx_counted_bytes_per_s",
            "power_watts",
            "processes_count",
            "free_bytes",
        )
    )

    def __init__(self, uuid: str | None) -> None:
        super().__init__()
        self._device = Nvidia(uuid)
        self._rates = Rates()
        self._calls: dict[str, tuple[Callable[[Any, Any], list[float]], int]] = {
            "utilisation": (_utilisation, 2),
            "the clock of multiprocessors": (lambda api, d: [_MEGA * api.nvmlDeviceGetClockInfo(d, _SM)], 1),
            "the clock of memory": (lambda api, d: [_MEGA * api.nvmlDeviceGetClockInfo(d, _MEMORY)], 1),
            "reasons for clocks": (_slowed, 1),
            "field values": (self._fields, 3),
            "running processes": (lambda api, d: [float(len(api.nvmlDeviceGetComputeRunningProcesses(d)))], 1),
            "memory": (lambda api, d: [float(api.nvmlDeviceGetMemoryInfo(d).free)], 1),
        }
        self._without: set[str] = set()

    def open(self) -> None:
        self._device.open()

    def read(self) -> list[float]:
        api, handle = self._device.api, self._device.handle
        found: list[float] = []
        for what, (call, count) in self._calls.items():
            values = [math.nan] * count
            if what not in self._without:
                try:
                    values = call(api, handle)
                except self._device.permanent_errors as error:
                    self._without.add(what)
                    self.lost.append(f"{what}: {error}")
            found += values
        return found

    def close(self) -> None:
        self._device.close()

    def _fields(self, api: Any, handle: Any) -> list[float]:
        fields = api.nvmlDeviceGetFieldValues(handle, [_PCIE_TX, _PCIE_RX, _POWER])
        sent, received, power = (_value(field) for field in fields)
        return [*map(float, self._rates.per_second([sent, received])), power / 1000]


def _utilisation(api: Any, handle: Any) -> list[float]:
    found = api.nvmlDeviceGetUtilizationRates(handle)
    return [found.gpu / 100, found.memory / 100]


def _slowed(api: Any, handle: Any) -> list[float]:
    return [float(bool(api.nvmlDeviceGetCurrentClocksEventReasons(handle) & _SLOWED))]


def _value(field: Any) -> float:
    """Return the number in a field, according to the field's own type; NaN where there is none."""
    if field.nvmlReturn:
        return math.nan
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return float(getattr(field.value, names[field.valueType])) if field.valueType < len(names) else math.nan
