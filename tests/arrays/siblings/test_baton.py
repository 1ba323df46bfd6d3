"""Tests for functions that take turns in threads."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_pipes.arrays.siblings.baton import Runner, read_random_state, restore_random_state


class Gpus(threading.local):
    """The current device of torch.cuda. Each thread begins with the first GPU."""

    chosen = 0


def test_random_state_belongs_to_the_holder() -> None:
    """Check that a function draws the same numbers if other code draws numbers while the function is paused."""
    torch.manual_seed(7)
    expected = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(7)
    state, drawn = read_random_state(), []

    def fn() -> None:
        drawn.append(float(torch.rand(())))
        mine = read_random_state()
        runner.pause_thread()
        restore_random_state(mine)
        drawn.append(float(torch.rand(())))

    runner = Runner(fn, "draws", state)
    runner.resume_thread()
    torch.rand(100)
    runner.resume_thread()
    assert runner.ended
    assert drawn == expected


def test_no_rank_touches_the_gpu_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the caller and later functions use the GPU that a function has chosen."""
    gpus, touched = Gpus(), set[int]()
    before = read_random_state()
    generator = torch.Generator()

    def read(device: torch.device) -> torch.Tensor:
        touched.add(device.index)
        return generator.get_state()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.chosen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(gpus, "chosen", device.index))
    monkeypatch.setattr(torch.cuda, "get_rng_state", read)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: touched.add(device.index))

    def first() -> None:
        torch.cuda.set_device(torch.device("cuda", 3))
        runners[0].pause_thread()

    def second() -> None:
        read_random_state()

    runners = [Runner(first, "first", before)]
    runners[0].resume_thread()
    touched.clear()
    restore_random_state(read_random_state())
    runners.append(Runner(second, "second", read_random_state()))
    runners[1].resume_thread()
    runners[0].resume_thread()
    assert touched == {3}
    assert gpus.chosen == 3
