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

VARIABLE = "LIGHTNING_PIPES_FAULT"
"""The environment variable that contains a `Fault` as JSON."""

POINTS = {
    "rendezvous": "a rank is about to look for the others in the launcher's store",
    "rendezvous.asked": "a rank other than 0 has asked for the name of this attempt",
    "rendezvous.answered": "rank 0 has answered another rank",
    "process_group": "the default process group is about to be made",
    "process_group.made": "it is there",
    "watch.made": "the rank watches the others, and they have exchanged nothing yet",
    "new_group": "a group of processes is about to be made, which takes all ranks; with a delay: inside of that",
    "new_group.made": "it is there on this rank",
    "collective": "a collective call of ranks is under way",
    "transport": "the stages are about to be connected",
    "transport.told": "this rank has published where it listens, and is not connected yet",
    "transport.made": "its stages are connected",
    "F": "a stage's forward",
    "B": "its backward",
    "I": "its backward for inputs",
    "W": "its backward for weights",
    "STEP": "its optimizer step",
    "SF": "it sends an activation",
    "RF": "it has received one",
    "SB": "it sends a gradient",
    "RB": "it has received one",
    "checkpoint": "a checkpoint is about to be saved",
    "checkpoint.write": "its file, or this rank's part, is about to be written",
    "checkpoint.part": "this rank's part is written, and the others do not know it",
    "checkpoint.put": "it is complete, and has not got its name",
    "move": "layers are about to move, and nothing has been sent",
    "move.launched": "they leave while training goes on",
    "move.step": "meanwhile a batch steps, or would step if steps did not wait",
    "move.arrived": "all that is sent to this rank has arrived, and nothing has changed",
    "move.taken": "the layers have changed ranks, and the steps of that time are still to be taken",
    "move.ended": "they have been taken",
    "sibling.turn": "a sibling of an array gets its turn",
    "sibling.meet": "it has reported that it is at a place where all ranks meet",
    "sibling.pause": "it hands the baton back",
    "sibling.ended": "its function has returned or raised, and the other ranks do not know it",
    "array.gather": "all siblings have ended, and ranks tell each other what has run",
    "array.close": "an array ends its connections",
    "trial": "a trial of a study begins",
    "trial.tell": "it has ended, and the study does not know it",
    "teardown": "a run is about to be torn down",
    "teardown.gathered": "weights and records of the run are gathered",
    "teardown.closed": "the connections of stages have ended",
    "control.close": "the connections of ranks are about to end",
    "watch.close": "the rank is about to watch no longer",
    "watch.closed": "it does not watch any more",
    "exit": "the interpreter ends",
}
"""All points with their descriptions. The point of an instruction has the name of its kind."""


@dataclass(frozen=True)
class Fault:
    """A fault to be injected into one process.

    Attributes:
        rank: the rank of the process, as numbered by its launcher.
        point: a key of `POINTS`.
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
        if self.point not in POINTS:
            raise ValueError(f"there is no point {self.point!r}; lightning_pipes.engine.watch.fault_points lists them")
        if self.act not in ("kill", "stop", "wait"):
            raise ValueError(f"a fault can kill, stop or wait, not {self.act!r}")

    def to_environment(self) -> Mapping[str, str]:
        """Return the environment variables that request this fault. They may be set for all ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

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
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    fault = Fault(**json.loads(text))
    own = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
    return _PassCounter(fault) if int(own) == fault.rank else None


def fault_point(name: str) -> None:
    """Mark a point of `POINTS`. If a fault is requested for it, the fault is triggered here."""
    count = _requested_fault()
    if count is not None:
        count.count_pass(name)
