"""The resolver `${lightning_pipes.run_name:}`, which names the run directory.

All processes of a training get the same name, and so do all restarts of the training.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_pipes.ir import PipelineError

RESOLVER_NAME = "lightning_pipes.run_name"
_NAME_TIMEOUT = timedelta(minutes=5)
_NAME_KEY = "lightning_pipes/run_name"
_NAME_FILE = "lightning_pipes_run_name"
_NAME_PATTERN = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", re.ASCII)
_MAX_NAME_ATTEMPTS = 100
_log = logging.getLogger(__name__)


def run_name() -> str:
    """Return a name for this training: the time of its first start, such as "2026-03-01/14-05-09", or its SLURM job.

    All processes that torchrun starts keep the first time, on all nodes and for as long as torchrun restarts them. A
    new call of torchrun starts a new training. A SLURM job that is requeued keeps its job ID. Without torchrun and
    SLURM, the name is the current time.

    Raises:
        PipelineError: torchrun started the processes, but no place for the name is protected from other users.
    """
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from lightning_pipes.engine.watch.rendezvous import launcher_hosts_store

        return _torchrun_name(now) if launcher_hosts_store() else f"torchrun-{os.environ['TORCHELASTIC_RUN_ID']}"
    from lightning_pipes.engine.watch.slurm import slurm_job

    job = slurm_job()
    return now if job is None else f"slurm-{job}.{os.environ.get('SLURM_STEP_ID', '0')}"


def register() -> None:
    """Register the resolver with OmegaConf. Its result is cached."""
    OmegaConf.register_new_resolver(RESOLVER_NAME, run_name, replace=True, use_cache=True)


def _torchrun_name(now: str) -> str:
    """Return the name that torchrun's processes keep, or `now` if they do not have one yet.

    On each host, the name is kept in torchrun's own directory. Several hosts agree on a name through torchrun's store.
    Any process that can reach the port of the store can write to it. A value must therefore be signed or, if there is
    no secret, have the form of a name.

    Raises:
        PipelineError: all processes are on one host, and have neither such a directory nor a secret.
    """
    from lightning_pipes.engine.watch.rendezvous import launcher_store
    from lightning_pipes.engine.watch.trust import SECRET_VARIABLE, SignedStore, seal_from_environment

    folder, seal = _launcher_folder(), seal_from_environment()
    one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if one_host and folder is None and seal is None:
        raise PipelineError(
            "the processes of this run need a place for its name that only their user can write to. torchrun's log "
            f"directory is switched off, or open to others. Let torchrun choose it, set {SECRET_VARIABLE} to a long "
            "random text, or set hydra.run.dir to a directory without ${lightning_pipes.run_name:}"
        )
    if one_host and folder is not None:
        now = _kept_in_folder(folder, now)
    if seal is None and not one_host:
        _log.warning(
            "the hosts of this run share no secret, so other users with access to the store of torchrun can choose the "
            "time in the name of the run's directory. Set %s to the same long random text on all hosts",
            SECRET_VARIABLE,
        )
    store: Any = launcher_store(_NAME_TIMEOUT)
    name = _kept_in_store(store if seal is None else SignedStore(store, seal), now)  # also for hosts that join later
    return name if folder is None else _kept_in_folder(folder, name)


def _kept_in_store(store: Any, now: str) -> str:
    """Return the first name in the store. A value that is not a name is replaced."""
    before = b""
    for _ in range(_MAX_NAME_ATTEMPTS):
        found = bytes(store.compare_set(_NAME_KEY, before, now.encode()))
        if _NAME_PATTERN.fullmatch(found.decode(errors="replace")):
            return found.decode()
        before = found
    raise PipelineError(
        f"the store of torchrun gives {before!r} as the name of this run, but it must have the form of {now}"
    )


def _kept_in_folder(folder: Path, now: str) -> str:
    """Return the first name in the directory."""
    file = folder / _NAME_FILE
    own = folder / f"{_NAME_FILE}.{secrets.token_hex(8)}"
    own.write_text(now)
    with suppress(FileExistsError):
        os.link(own, file)  # the file appears atomically, with its content
    own.unlink()
    return file.read_text()


def _launcher_folder() -> Path | None:
    """Return the directory that torchrun created for this run on this host, or None if other users can write to it.

    Inside it, each attempt of torchrun has its own directory.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # RUN/attempt_0/LOCAL_RANK/error.json
    folder = Path(file).parents[2] if file else None
    if folder is None or not folder.is_dir():
        return None
    status = folder.stat()
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None
