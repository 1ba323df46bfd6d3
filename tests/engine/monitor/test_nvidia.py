"""NVIDIA's management library in different driver versions, emulated by a stub in C that nvidia-ml-py calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the stub of the driver's library needs a C compiler")
SCRIPT = """
import json, sys, types
from pathlib import Path
import lightning_pipes
engine = sys.modules["lightning_pipes.engine"] = types.ModuleType("lightning_pipes.engine")  # torch takes seconds
engine.__path__ = [str(Path(lightning_pipes.__file__).parent / "engine")]
from lightning_pipes.engine.monitor import nvidia
from lightning_pipes.engine.monitor.nvidia import GpmSource
from lightning_pipes.engine.monitor.nvidia import NvmlSource
from lightning_pipes.engine.monitor.source import SourceError
found = {}
for source in (GpmSource(sys.argv[1]), NvmlSource(sys.argv[1])):
    try:
        source.open()
    except SourceError as error:
        found[source.name] = {"why": str(error)}
        continue
    said = found[source.name] = {"reads": [], "lost": source.lost}
    if source.name == "gpm":
        nvidia.MIN_DEVICE_SECONDS = 60
        found["soon"] = list(map(str, source.read()))
        nvidia.MIN_DEVICE_SECONDS = 0
    for _ in range(5):
        try:
            said["reads"].append({n: v if v == v else None for n, v in zip(source.metrics, map(float, source.read()))})
        except Exception as error:
            said["reads"].append(type(error).__name__)
    source.close()
try:
    import pynvml
    found["open"], found["samples"] = pynvml.nvmlLib.stub_open(), pynvml.nvmlLib.stub_samples()
except AttributeError:
    pass
found["torch"] = "torch" in sys.modules
print(json.dumps(found))
"""


def read_with(folder: Path | None, uuid: str = "GPU-stub") -> dict[str, Any]:
    """Read both sources in a new process that loads the library from `folder`, and return the values and errors."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder or "")}
    done = subprocess.run([sys.executable, "-c", SCRIPT, uuid], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stub(folder: Path, *flags: str) -> Path:
    """Compile the stub of the library into `folder` and return the folder."""
    assert COMPILER is not None
    source = Path(__file__).with_name("nvml_stub.c")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wall", *flags, "-o", str(target), str(source)], check=True)
    return folder


@needs_compiler
def test_a_device_with_counters(tmp_path):
    """Both sources return the values of the stub in the right units, and None for missing values."""
    found = read_with(stub(tmp_path))
    assert set(found["soon"]) == {"nan"}  # too soon after the previous read, the device is not queried
    counters = found["gpm"]["reads"]
    assert counters[0] == counters[4], "each is the difference with the tick before"
    assert (counters[0]["gpu.sm_active_share"], counters[0]["gpu.sm_occupancy_share"]) == (0.8, 0.3)
    assert counters[0]["gpu.unallocated_warps_share"] == pytest.approx(0.5)
    assert counters[0]["gpu.pcie_tx_bytes_per_s"] == 3 * 2**20
    # this driver does not report it, which is not the same as 0
    assert counters[0]["gpu.context_switch_active_share"] is None
    first, second = found["nvml"]["reads"][:2]
    assert (first["gpu.sm_clock_hertz"], first["gpu.memory_clock_hertz"]) == (1.98e9, 2.619e9)
    assert (first["gpu.slowed_share"], first["gpu.processes_count"], first["gpu.free_bytes"]) == (1, 2, 60 * 2**30)
    assert (first["gpu.power_watts"], first["gpu.busy_share"]) == (350, None)
    assert first["gpu.pcie_tx_counted_bytes_per_s"] is None  # no earlier value to compare with
    assert second["gpu.pcie_tx_counted_bytes_per_s"] > 0
    assert second["gpu.pcie_rx_counted_bytes_per_s"] is None
    assert found["nvml"]["lost"] == ["utilisation: Not Supported"]  # queried only once
    assert (found["open"], found["samples"], found["torch"]) == (0, 0, False)


@needs_compiler
@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("-DNO_GPM_DEVICE", "does not have these counters, which exist on Hopper"),
        ("-DOLD_DRIVER", "the driver is older"),
        ("-DFORBIDDEN", "keeps counters for administrators"),
    ],
)
def test_a_device_without(tmp_path, flag, why):
    """Without performance counters, the source reports the reason, and the other source still works."""
    found = read_with(stub(tmp_path, flag))
    assert why in found["gpm"]["why"]
    read = found["nvml"]["reads"][0]
    assert read["gpu.sm_clock_hertz"] == 1.98e9
    assert (read["gpu.processes_count"] is None) == (flag == "-DOLD_DRIVER")
    assert len(found["nvml"]["lost"]) == (3 if flag == "-DOLD_DRIVER" else 1)
    assert (found["open"], found["samples"]) == (0, 0)


@needs_compiler
def test_a_device_that_is_lost(tmp_path):
    """If the device is lost during the run, reads raise the error of the library."""
    found = read_with(stub(tmp_path, "-DDYING"))["nvml"]["reads"]
    assert found[2]["gpu.sm_clock_hertz"] == 1.98e9
    assert found[3:] == ["NVMLError_GpuIsLost"] * 2  # the monitor treats these values as missing


@needs_compiler
def test_another_device(tmp_path):
    """A device that does not exist is named in the error."""
    assert "for device GPU-other" in read_with(stub(tmp_path), "GPU-other")["nvml"]["why"]


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has the library")
def test_no_library():
    found = read_with(None)
    assert "NVML Shared Library Not Found" in found["nvml"]["why"]
    assert "NVML Shared Library Not Found" in found["gpm"]["why"]
