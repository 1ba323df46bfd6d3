"""Several ranks on one GPU: to Lightning each is a machine of its own, for it refuses more processes than GPUs."""

from __future__ import annotations

import os
from typing import Any

SHARED = {"process_group_backend": "gloo"}
"""What `PipelineStrategy` is told there: NCCL, the default, needs a GPU for each rank."""


def on_one_gpu(ranks: int) -> dict[str, Any]:
    """What a Trainer is told on each of `ranks` processes that share the GPU."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ.get("RANK", "0")}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": ranks}
