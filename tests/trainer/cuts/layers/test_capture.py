"""Tests of `Interceptor`, which separates the parts of a step before, within and after the pipelined module."""

from __future__ import annotations

import pytest

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.layers.capture import Interceptor


class TestInterceptor:
    def test_capture_stops_at_the_call(self):
        reached = []
        inner = Interceptor("self.model")

        def step(x: int) -> None:
            reached.append("before")
            try:
                inner((x * 2,), {})
            except Exception:
                reached.append("caught")
            reached.append("after")

        assert inner.capture(step, 21) == 42
        assert reached == ["before"]

    def test_supply_gives_the_answer(self):
        inner = Interceptor("self.model")
        assert inner.run_with_answer(lambda x: inner((x,), {}) + 1, lambda x: 10 * x, 4) == 41

    def test_outside_of_a_step(self):
        with pytest.raises(PipelineError, match="called outside of training_step"):
            Interceptor("self.model")((1,), {})
