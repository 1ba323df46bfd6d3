"""A helper that makes a check of samples without a run."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from lightning_pipes.trainer.watchers.sample_check import SampleCheck


def sample_check(spans: Any = None, **settings: Any) -> SampleCheck:
    """Return a check for a run that consists only of the parts that the check reads."""
    plan = SimpleNamespace(spans=lambda kind, stage: spans, local_spans=lambda kind, stage, rank: spans)
    left = SimpleNamespace(
        reset_layer=lambda number: None, note_whole_batch=lambda number: None, collect_whole_values=dict
    )
    run: Any = SimpleNamespace(
        cut=None,
        user_steps=SimpleNamespace(left=left, step_context=nullcontext),
        device=torch.device("cpu"),
        global_ranks=(0,),
        local_layers=SimpleNamespace(holdings=SimpleNamespace(rank=0)),
        engine=SimpleNamespace(plan=plan, rank=0),
        is_asynchronous=False,
    )
    vars(run).update(settings)
    return SampleCheck(run)
