"""A process is not confused with another process that has the same number, or whose host has the same name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import namespaces
from lightning_pipes.engine.watch.identity import Process


def test_zombie_process_has_ended() -> None:
    """A killed child that its parent has not waited for counts as ended, as rank 1 does if rank 0 has started it."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.from_pid(child.pid)
        assert Process.parse(str(process)) == process
        assert not process.has_ended()
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.has_ended()
    assert process.has_ended()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        Process.from_pid(child.pid)


def test_what_is_known_of_others() -> None:
    """Processes with another start time have ended; nothing is assumed about processes of other hosts."""
    own = Process.current()
    assert not own.has_ended()
    assert own._replace(started=own.started - 1).has_ended()  # its number was reused
    gone = own._replace(pid=2**22 + 1)  # larger than the largest process number
    assert gone.has_ended()
    assert not gone._replace(machine="another").has_ended()
    assert not gone._replace(space="another").has_ended()
    assert not gone._replace(boot="").has_ended()


def test_process_from_before_a_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process from before the last boot of this host has ended, except if it may belong to another container."""
    before = Process("machine", "before", "effffffc", 1, 1)
    monkeypatch.setattr("lightning_pipes.engine.watch.identity._host_marks", lambda: ("machine", "now", "effffffc"))
    assert before.has_ended()
    in_container = before._replace(space="f0000001")  # several containers may have the same host name
    monkeypatch.setattr("lightning_pipes.engine.watch.identity._host_marks", lambda: ("machine", "now", "f0000001"))
    assert not in_container.has_ended()


@pytest.mark.parametrize("text", ["", "a-b", "m-b-s-1-", "m-b-s-x-2", "host:17:1.0"])
def test_other_texts(text: str) -> None:
    assert Process.parse(text) is None


CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""A command prefix that creates a PID namespace, with the same host name."""


@pytest.mark.root
@pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason())
def test_containers_with_one_host_name_leave_each_others_files_alone(tmp_path: Path) -> None:
    """Temporary files of a process in one container are not deleted by another container or by the host.

    The processes in both containers have the same number, which on the host is free or belongs to another process.
    """
    code = (
        "import sys; from pathlib import Path; from lightning_pipes.trainer.checkpoint.files import temporary_for\n"
        "path = temporary_for(Path(sys.argv[1], 'a')); path.touch(); print(path, flush=True); sys.stdin.read()"
    )

    def start() -> subprocess.Popen[str]:
        command = [*CONTAINER, sys.executable, "-c", code, str(tmp_path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert first.stdout is not None
        live = Path(first.stdout.readline().strip())
        assert live.exists()
        with start() as second:
            assert second.stdout is not None
            assert Path(second.stdout.readline().strip()) != live
            assert live.exists()
            second.communicate()
        from lightning_pipes.trainer.checkpoint.files import temporary_for

        temporary_for(tmp_path / "a")  # from outside both containers
        assert live.exists()
        first.communicate()
