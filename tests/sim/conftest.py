"""A fixture with both versions of the kernel."""

import pytest

from lightning_pipes.sim.loops.kernel import SIMULATION_KERNELS


@pytest.fixture(params=["python", "numba"])
def kernel(request, monkeypatch):
    """Return the name of the version that runs the kernel in this test."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(SIMULATION_KERNELS, "patience", 0 if request.param == "numba" else 1 << 60)
    assert SIMULATION_KERNELS.select(1).name == request.param
    return request.param
