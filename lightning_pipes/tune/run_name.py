"""`${lightning_pipes.run_name:}`: a run directory that all processes of a training share, and all its restarts."""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from omegaconf import OmegaConf

RESOLVER = "lightning_pipes.run_name"
_TIMEOUT = timedelta(minutes=5)


def run_name() -> str:
    """The time at which this training was first started, such as "2026-03-01/14-05-09", or the name of its SLURM job.

    torchrun keeps the time in its store, for its processes on all nodes and for as long as it restarts them; a new
    torchrun starts a new training. A requeued SLURM job keeps its number. Without either it is the time now.
    """
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from lightning_pipes.engine.watch.rendezvous import launcher_hosts_store, launcher_store

        if launcher_hosts_store():
            name: str = launcher_store(_TIMEOUT).compare_set("lightning_pipes/run_name", "", now).decode()
            return name
        return f"torchrun-{os.environ['TORCHELASTIC_RUN_ID']}"
    if "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
        return f"slurm-{job}.{os.environ.get('SLURM_STEP_ID', '0')}"
    return now


def register() -> None:
    """Makes the resolver known; it is asked once, and its answer kept."""
    OmegaConf.register_new_resolver(RESOLVER, run_name, replace=True, use_cache=True)
