"""Tests of the names of the arguments of `PipelineStrategy`."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import InputError


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {"microbatch": 4}, "called 'microbatch'. Did you mean 'microbatches'?"),
        ((), {"nothing_like_it": 4}, "called 'nothing_like_it'. Choose from: schedule, microbatches"),
        (("v",), {"memory_limit": 4}, "PipelineStrategy('v', schedule_args={'memory_limit': ...})"),
        (("1f1b",), {"memory_limit": 4}, "called 'memory_limit'. Choose from: schedule, microbatches"),
        (("1f1b", 4, 2), {}, "only schedule and microbatches by position, and got 3 values, the last of which is 2."),
    ],
)
def test_unknown_names_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        PipelineStrategy(*args, **kwargs)
    assert expected in str(caught.value)


def test_subclasses_may_have_other_arguments() -> None:
    class WithName(PipelineStrategy):
        def __init__(self, name: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.name = name

    assert repr(WithName("mine", microbatches=4)) == "PipelineStrategy('1f1b', microbatches=4)"
