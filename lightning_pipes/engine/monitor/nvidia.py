"""NVIDIA's management library, and the device of a rank.

The library ignores CUDA_VISIBLE_DEVICES in its numbering, so a device is found by its UUID.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lightning_pipes.engine.monitor.source import SourceError


class Nvidia:
    """A device, while it is open.

    Args:
        uuid: as `uuid_of` gives it; None where the rank computes on no GPU of NVIDIA's.

    Attributes:
        api: the module `pynvml` of nvidia-ml-py.
        handle: the device, for its functions.
    """

    api: ModuleType
    handle: Any

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def open(self) -> None:
        """Load the library and find the device.

        Raises:
            SourceError: there is none.
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
        """Errors of calls that this device, driver or user will never support."""
        api = self.api
        missing = getattr(
            api, "NVMLLibraryMismatchError", api.NVMLError_FunctionNotFound
        )  # of some calls, no NVMLError
        return api.NVMLError_NotSupported, api.NVMLError_FunctionNotFound, api.NVMLError_NoPermission, missing


def uuid_of(device: int) -> str | None:
    """Return the UUID of one of torch's CUDA devices, as NVIDIA's library names it; None where torch does not know
    it."""
    import torch

    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if found is None:
        return None
    text = str(found)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
