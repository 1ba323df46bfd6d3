"""The exit of an interpreter whose threads still wait for other processes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lightning_pipes.engine.watch.process_exit import SerialCaller
from lightning_pipes.testing.ranks import scale_timeout

ENDS = """
import atexit, os, subprocess, sys, threading, time
from contextlib import suppress
import torch.distributed as dist
from lightning_pipes.engine.watch import process_exit
from lightning_pipes.engine.watch.process_exit import SerialCaller

HOST = '''
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
'''
host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)

def call():
    store.wait(["what never comes"])

<<left>>
time.sleep(0.5)  # until it is in torch's call, which nothing tells

class Last:
    '''Has the thread's call come back while the interpreter ends.'''

    def __del__(self, kill=os.kill, pid=host.pid, sleep=time.sleep):
        kill(pid, 9)
        sleep(1.0)

sys.last = Last()
sys.exit(3)
"""
LEFT = {
    "in a group that was given up": """
threading.Thread(target=call, daemon=True).start()
atexit.register(process_exit.leak_until_exit, [store])
""",
    "in a question that nobody waits for": """
with suppress(KeyError), SerialCaller() as asking:
    asking(call, lambda: {}["nobody waits"])
""",
}


@pytest.mark.parametrize("left", LEFT)
def test_a_call_that_comes_back_at_the_end_does_not_abort_it(left: str) -> None:
    """A call of torch that returns to a thread during shutdown does not abort the process, which keeps its status."""
    script = ENDS.replace("<<left>>", LEFT[left])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scale_timeout(60))
    assert ended.returncode == 3, ended.stderr
    assert "terminate called" not in ended.stderr


def test_it_is_as_if_the_call_was_made_here():
    """`SerialCaller` returns the results and raises the errors of the calls, in order."""
    asking = SerialCaller()
    assert [asking(lambda n=n: n * n, lambda: None) for n in range(4)] == [0, 1, 4, 9]
    with pytest.raises(TimeoutError, match="own"):
        asking(lambda: (_ for _ in ()).throw(TimeoutError("own")), lambda: None)
    assert asking(lambda: 5, lambda: None) == 5


def test_waiting_caller_can_leave():
    """An exception from the function that runs while waiting ends the wait."""
    asking, never, looked = SerialCaller(), threading.Event(), []

    def meanwhile() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        asking(never.wait, meanwhile)
    assert len(looked) == 3
    never.set()
