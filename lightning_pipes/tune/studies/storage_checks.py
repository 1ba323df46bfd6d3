"""Checks of whether several arrays can share the storage of a study."""

from __future__ import annotations

import os
import re
from pathlib import Path

from optuna import Study
from optuna.storages import InMemoryStorage

from lightning_pipes.tune.studies.private_optuna import database_url, storage_of
from lightning_pipes.tune.studies.reporting import log

NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs",
    "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
"""The names that Linux gives to file systems that several hosts can mount. FUSE adds a prefix to some of them."""
_FUSE_NETWORK_FILE_SYSTEMS = NETWORK_FILE_SYSTEMS | {"sshfs", "s3fs", "gcsfuse", "blobfuse", "juicefs", "rclone"}

_USE_INSTEAD = (
    "Use a database server, as in postgresql+psycopg://user@host/database, or a journal file, as in "
    "JournalStorage(JournalFileBackend(path))"
)


def check_storage(study: Study) -> None:
    """Log a warning if several arrays cannot share the storage of the study, although there may be several arrays."""
    storage = storage_of(study)
    tasks = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
    if isinstance(storage, InMemoryStorage):
        if tasks > 1:
            log.warning(
                "The study %r is in the memory of this process, but SLURM runs %d tasks of this job array. Each task "
                "has a separate study, and does not learn from the trials of the others. To share one study, give "
                "create_study a storage and load_if_exists=True. %s",
                *(study.study_name, tasks, _USE_INSTEAD),
            )
        return
    path = _sqlite_file(database_url(storage))
    if path is None:
        return
    kind = file_system_of(path)
    if is_network_file_system(kind):
        log.warning(
            "The study %r is in the SQLite file %s on a network file system (%s), on which locks of SQLite may fail. "
            "Only one array may use it. %s",
            *(study.study_name, path, kind, _USE_INSTEAD),
        )


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the name of the file system that contains a path, or an empty string if it is not known.

    Args:
        path: the path. It does not have to exist.
        mounts: the file with the mounts of this process, in the format of Linux.
    """
    if not mounts.exists():
        return ""
    place, found, length = path.absolute(), "", -1
    for line in mounts.read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= length:  # a later mount hides an earlier one
            found, length = after.split()[0], len(point.parts)
    return found


def is_network_file_system(kind: str) -> bool:
    """Return whether several hosts can mount a file system, given its name in the list of mounts."""
    prefix, _, name = kind.partition(".")
    return kind in NETWORK_FILE_SYSTEMS or (prefix == "fuse" and name in _FUSE_NETWORK_FILE_SYSTEMS)


def _sqlite_file(url: str | None) -> Path | None:
    """Return the file of an SQLite URL, or None for another database, and for a database in memory."""
    found = re.match(r"sqlite(?:\+\w+)?:///(.+?)(?:\?.*)?$", url or "")
    return None if found is None or ":memory:" in found[1] else Path(found[1])
