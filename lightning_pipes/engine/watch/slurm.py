"""The SLURM job of this process."""

from __future__ import annotations

import logging
import os
import subprocess

_log = logging.getLogger(__name__)


def slurm_job() -> str | None:
    """Return the ID of the SLURM job that started this process, such as "4711", or "4711_3" in a job array.

    The result is None without SLURM, and in interactive jobs. A job that is requeued keeps its ID.
    """
    if not _is_in_job():
        return None
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"


def slurm_attempt() -> tuple[str, int] | None:
    """Return the ID of the SLURM job of this process, and how often SLURM has restarted it. None without SLURM."""
    job = slurm_job()
    return None if job is None else (job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def count_slurm_tasks() -> int:
    """Return the number of processes that SLURM started together with this one, or 1 without SLURM."""
    return int(os.environ.get("SLURM_NTASKS", "1")) if _is_in_job() else 1


def requeue_slurm_job() -> None:
    """Request that SLURM ends this job and starts it again."""
    job = slurm_job()
    assert job is not None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        failure = f"exit status {done.returncode}, {done.stderr.strip()}" if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        _log.warning("SLURM did not requeue job %s: %s. Submit it again to continue", job, failure)
    else:
        _log.info("Requeued SLURM job %s", job)


def _is_in_job() -> bool:
    return "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
