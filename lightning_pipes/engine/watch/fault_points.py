"""Named points at which a test can inject a fault into a process.

A fault is requested by an environment variable, which each process reads once. Without it, the points have no effect.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FAULT_VARIABLE = "LIGHTNING_PIPES_FAULT"
"""The environment variable that contains a `Fault` as JSON."""

FAULT_POINTS = {
    "rendezvous": "a rank is about to look for the other ranks in the launcher's store",
    "rendezvous.asked": "a rank other than 0 has requested the name of this attempt",
    "rendezvous.answered": "rank 0 has answered another rank",
    "process_group": "the default process group is about to be created",
    "process_group.made": "the default process group has been created",
    "watch.made": "the rank watches the other ranks, but they have not exchanged any data yet",
    "new_group": "a group of processes is about to be created by all ranks; with a delay: during its creation",
    "new_group.made": "the group has been created on this rank",
    "collective": "a collective call of the ranks is in progress",
    "transport": "the stages are about to be connected",
    "transport.told": "this rank has published the addresses of its listeners, but is not connected yet",
    "transport.made": "the stages of this rank are connected",
    "F": "the forward of a stage",
    "R": "the recomputation of a stage",
    "B": "the full backward of a stage",
    "I": "the backward of a stage for input gradients",
    "W": "the backward of a stage for weight gradients",
    "STEP": "the optimizer step of a stage",
    "SF": "a stage sends an activation",
    "RF": "a stage has received an activation",
    "SB": "a stage sends a gradient",
    "RB": "a stage has received a gradient",
    "checkpoint": "a checkpoint is about to be saved",
    "checkpoint.write": "the file of the checkpoint, or this rank's part, is about to be written",
    "checkpoint.part": "this rank's part has been written, but the other ranks have not been notified",
    "checkpoint.put": "the checkpoint is complete, but has not been renamed yet",
    "move": "layers are about to move, and nothing has been sent",
    "move.launched": "the layers are being sent while training continues",
    "move.step": "during a move, a batch steps, or would step if steps did not wait",
    "move.arrived": "all layers that are sent to this rank have arrived, and nothing has changed yet",
    "move.taken": "the layers have changed ranks, but the postponed steps have not been taken yet",
    "move.ended": "the postponed steps have been taken",
    "sibling.turn": "a sibling of an array begins its turn",
    "sibling.meet": "a sibling has reported that it waits at a meeting of all ranks",
    "sibling.pause": "a sibling ends its turn",
    "sibling.ended": "the function of a sibling has returned or raised, but the other ranks have not been notified",
    "array.gather": "all siblings have ended, and the ranks exchange their recorded events",
    "array.close": "an array closes its connections",
    "trial": "a trial of a study begins",
    "trial.tell": "the trial has ended, but its result has not been reported to the study",
    "teardown": "a run is about to be torn down",
    "teardown.gathered": "the weights and records of the run have been gathered",
    "teardown.closed": "the connections of stages have been closed",
    "control.close": "the connections of ranks are about to be closed",
    "watch.close": "the rank is about to stop watching the other ranks",
    "watch.closed": "the rank has stopped watching the other ranks",
    "exit": "the interpreter exits",
}
"""All points with their descriptions. The point of an instruction has the name of its kind."""


@dataclass(frozen=True)
class Fault:
    """A fault to be injected into one process.

    Attributes:
        rank: the rank of the process, as numbered by its launcher.
        point: a key of `FAULT_POINTS`.
        file: the path to which the time of the fault, on the monotonic clock, is written. If the file already exists,
            for example because the process was restarted, the fault is not injected.
        nth: the number of the pass of the point that triggers the fault, starting at 1.
        act: "kill" and "stop" send SIGKILL and SIGSTOP to the process. "wait" only blocks it until `file` is removed.
        delay: seconds between the pass and the fault. The process continues during this time.
    """

    rank: int
    point: str
    file: str
    nth: int = 1
    act: str = "kill"
    delay: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in FAULT_POINTS:
            raise ValueError(f"there is no point {self.point!r}; lightning_pipes.engine.watch.fault_points lists them")
        if self.act not in ("kill", "stop", "wait"):
            raise ValueError(f"a fault can kill, stop or wait, not {self.act!r}")

    def to_environment(self) -> Mapping[str, str]:
        """Return the environment variables that request this fault. They may be set for all ranks."""
        return {FAULT_VARIABLE: json.dumps(asdict(self))}

    def trigger(self) -> None:
        """Trigger the fault in this process immediately, unless `file` exists."""
        path = Path(self.file)
        if path.exists():
            return
        unnamed = path.with_name(f"{path.name}.{os.getpid()}")
        unnamed.write_text(str(time.monotonic()))
        unnamed.rename(path)  # atomic, because other processes wait for the file
        if self.act == "wait":
            while path.exists():
                time.sleep(0.005)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.act == "kill" else signal.SIGSTOP)


class _PassCounter:
    """Counts how often this process passes the point of its fault."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._left = fault.nth
        self._lock = threading.Lock()

    def count_pass(self, name: str) -> None:
        if name != self._fault.point:
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self._fault.delay:
            threading.Timer(self._fault.delay, self._fault.trigger).start()
        else:
            self._fault.trigger()


@cache
def _requested_fault() -> _PassCounter | None:
    text = os.environ.get(FAULT_VARIABLE)
    if not text:
        return None
    fault = Fault(**json.loads(text))
    own = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
    return _PassCounter(fault) if int(own) == fault.rank else None


def fault_point(name: str) -> None:
    """Mark a point of `FAULT_POINTS`. If a fault is requested for it, the fault is triggered here."""
    count = _requested_fault()
    if count is not None:
        count.count_pass(name)
