"""A PostgreSQL server for a test, in a temporary folder and on a Unix socket that no other host can reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

DRIVER = "psycopg"


def missing_reason() -> str:
    """Return why no server can be started here, or an empty string if it can."""
    if find_spec(DRIVER) is None:
        return f"the driver {DRIVER} is not installed; pip install 'psycopg[binary]'"
    if _programs() is None:
        return "the programs of the PostgreSQL server are not installed; apt-get install postgresql"
    return ""


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the URL of a database of a new server, which ends with the block."""
    programs = _programs()
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="pg") as name:  # a short path, because it contains the socket
        folder = Path(name)
        user = None
        if os.geteuid() == 0:  # the server refuses to run as root
            user = "nobody"
            shutil.chown(folder, user)

        def run(program: str, *arguments: str) -> None:
            command = [str(programs / program), "-D", str(folder / "data"), *arguments]
            log = folder / f"{program}.log"
            with log.open("w") as out:  # not a pipe, which the server would keep open
                done = subprocess.run(command, user=user, cwd=folder, stdout=out, stderr=out, check=False)
            assert done.returncode == 0, log.read_text()

        run("initdb", "--username=study", "--auth=trust", "--no-sync", "--no-locale", "--encoding=UTF8")
        run("pg_ctl", "start", "--wait", "-o", f"-k {folder} -c listen_addresses= -c fsync=off", "-l", "server.log")
        try:
            yield f"postgresql+{DRIVER}://study@/postgres?host={folder}"
        finally:
            run("pg_ctl", "stop", "--wait", "--mode=immediate")


def _programs() -> Path | None:
    """Return the folder with the programs of the server, which Debian does not add to PATH."""
    for found in (shutil.which("initdb"), *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)):
        if found:
            return Path(found).resolve().parent
    return None
