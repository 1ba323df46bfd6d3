"""Both ways to run the kernel."""

import pytest

from lightning_pipes.sim.loops import machine


@pytest.fixture(params=["python", "numba"])
def kernel(request, monkeypatch):
    """The name of what runs the kernel in this test."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(machine, "PATIENCE", 0 if request.param == "numba" else 1 << 60)
    assert machine.machine(1).name == request.param
    return request.param
