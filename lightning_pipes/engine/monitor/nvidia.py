"""Sources of metrics for NVIDIA GPUs, from the NVIDIA Management Library (NVML) and from torch.

NVML numbers devices without regard to CUDA_VISIBLE_DEVICES, so the device of a rank is identified by its UUID.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lightning_pipes.engine.monitor.source import Rates, Source, SourceError
from lightning_pipes.ir.clock import read_seconds

if TYPE_CHECKING:
    import torch


class Nvidia:
    """A device in NVML.

    Args:
        uuid: the UUID that `uuid_of` returns, or None if the rank does not compute on an NVIDIA GPU.

    Attributes:
        api: the module `pynvml` of the package nvidia-ml-py.
        handle: the device, as an argument for functions of `api`.
    """

    api: ModuleType
    handle: Any

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def open(self) -> None:
        """Load the library and find the device.

        Raises:
            SourceError: the library or the device is not available.
        """
        if self._uuid is None:
            raise SourceError("this rank computes on no CUDA device")
        try:
            import pynvml
        except ImportError as error:
            raise SourceError(f"{error}; install nvidia-ml-py") from error
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError as error:
            raise SourceError(f"{error}, for device {self._uuid}") from error
        self.api = pynvml

    def close(self) -> None:
        """Release the library."""
        self.api.nvmlShutdown()

    @property
    def permanent_errors(self) -> tuple[type[Exception], ...]:
        """The errors of calls that this device, driver or user will never support."""
        api = self.api
        # Some calls raise NVMLLibraryMismatchError, which is not an NVMLError.
        missing = getattr(api, "NVMLLibraryMismatchError", api.NVMLError_FunctionNotFound)
        return api.NVMLError_NotSupported, api.NVMLError_FunctionNotFound, api.NVMLError_NoPermission, missing


def uuid_of(device: int) -> str | None:
    """Return the UUID of a CUDA device of torch in the format of NVML, or None if torch does not provide it.

    Args:
        device: the index of the device in torch.
    """
    import torch

    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if found is None:
        return None
    text = str(found)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


class CudaSource(Source):
    """Measures the free memory of the device, and the memory that torch holds in this process."""

    name: ClassVar[str] = "torch.cuda"
    metrics = ("gpu.torch_free_bytes", "gpu.torch_allocated_bytes", "gpu.torch_reserved_bytes")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def open(self) -> None:
        if self._device.type != "cuda":
            raise SourceError("this rank computes on no CUDA device")

    def read(self) -> list[float]:
        import torch

        device = self._device
        free, _ = torch.cuda.mem_get_info(device)
        return [float(free), float(torch.cuda.memory_allocated(device)), float(torch.cuda.memory_reserved(device))]


_PCIE_TX, _PCIE_RX, _POWER = 197, 198, 186
"""Fields that can be read without waiting: two counters of bytes, and milliwatts. In contrast,
nvmlDeviceGetPcieThroughput measures for 20 ms."""
_SLOWDOWN_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons for a reduced clock: the power cap, slowdowns by hardware, temperature, and the brake of the power supply."""
_SM, _MEMORY = 1, 2
_MEGA = 1e6


class NvmlSource(Source):
    """Reads metrics of the device with NVML calls that return immediately.

    A call that the driver does not support is made only once. Its metrics are missing afterwards.

    Args:
        uuid: the UUID of the device, as in `Nvidia`.
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
    return [float(bool(api.nvmlDeviceGetCurrentClocksEventReasons(handle) & _SLOWDOWN_REASONS))]


def _value(field: Any) -> float:
    """Return the number in a field according to the type of the field, or NaN if the field does not have a value."""
    if field.nvmlReturn:
        return math.nan
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return float(getattr(field.value, names[field.valueType])) if field.valueType < len(names) else math.nan


MEBI = 2.0**20
MIN_DEVICE_SECONDS = 0.1
"""Shortest interval between two samples that the device supports, in seconds."""


class _Metric(NamedTuple):
    number: int
    name: str
    scale: float  # converts the values of the library, which are percentages or MiB/s


_REQUESTED_METRICS = (
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
"""Indices in `_REQUESTED_METRICS`. Their difference is the most informative counter of the paper: the unallocated warps
in active multiprocessors."""


class GpmSource(Source):
    """Measures hardware counters as differences between two samples of the device.

    Each read takes one sample, without waiting. Metrics that the driver does not support are missing.

    Args:
        uuid: the UUID of the device, as in `Nvidia`.
    """

    name: ClassVar[str] = "gpm"
    metrics = (*(f"gpu.{m.name}" for m in _REQUESTED_METRICS), "gpu.unallocated_warps_share")

    def __init__(self, uuid: str | None) -> None:
        super().__init__()
        self._device = Nvidia(uuid)
        self._samples: list[Any] = []
        self._asked: Any = None
        self._at = 0.0  # time of the last sample

    def open(self) -> None:
        self._device.open()
        api, handle = self._device.api, self._device.handle
        try:
            if not api.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise SourceError("the device does not have these counters, which exist on Hopper and newer devices")
            self._samples = [api.nvmlGpmSampleAlloc(), api.nvmlGpmSampleAlloc()]
            api.nvmlGpmSampleGet(handle, self._samples[0])
            self._at = read_seconds()
        except (api.NVMLError, *self._device.permanent_errors, SourceError) as error:
            self.close()
            raise SourceError(_reason(api, error)) from error
        asked = self._asked = api.c_nvmlGpmMetricsGet_t()  # created only once, because its size is 19 KB
        asked.version, asked.numMetrics = api.NVML_GPM_METRICS_GET_VERSION, len(_REQUESTED_METRICS)
        for place, metric in enumerate(_REQUESTED_METRICS):
            asked.metrics[place].metricId = metric.number

    def read(self) -> list[float]:
        api, asked = self._device.api, self._asked
        if read_seconds() - self._at < MIN_DEVICE_SECONDS:
            return len(self.metrics) * [math.nan]
        before, now = self._samples
        api.nvmlGpmSampleGet(self._device.handle, now)
        self._at = read_seconds()
        self._samples.reverse()
        asked.sample1, asked.sample2 = before, now
        api.nvmlGpmMetricsGet(asked)
        found = [
            asked.metrics[place].value * metric.scale if asked.metrics[place].nvmlReturn == 0 else math.nan
            for place, metric in enumerate(_REQUESTED_METRICS)
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
