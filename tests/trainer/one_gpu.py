"""Settings for several ranks that share one GPU.

Each rank appears to Lightning as a separate machine because Lightning does not start more processes than GPUs on one
machine.
"""

from __future__ import annotations

import os
from typing import Any

SHARED = {"process_group_backend": "gloo"}
"""Arguments for `PipelineStrategy` on a shared GPU. NCCL, the default backend, needs one GPU per rank."""


def on_one_gpu(ranks: int) -> dict[str, Any]:
    """Set the environment of one of `ranks` processes that share a GPU, and return the arguments of its Trainer."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ.get("RANK", "0")}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": ranks}
