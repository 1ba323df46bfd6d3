"""The end of an interpreter whose threads are still waiting for others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_pipes.testing.ranks import scale_timeout

ENDS = """
import atexit, os, subprocess, sys, threading, time
from contextlib import suppress
import torch.distributed as dist
from lightning_pipes.engine.watch import process_exit
from lightning_pipes.engine.watch.serial_caller import SerialCaller

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
    script = ENDS.replace("<<left>>", LEFT[left])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scale_timeout(60))
    assert ended.returncode == 3, ended.stderr
    assert "terminate called" not in ended.stderr
