"""A forest that is trained in a process of its own, of a lower priority, without a file.

this process   numbers -->  (its end of the pipe stays open)              --> the other ends with it
the other                   trains          forest, or what went wrong -->
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
from typing import BinaryIO

import numpy as np

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, Array
from lightning_pipes.strategies.dynpipe.interference.forest import Forest, train

_NICE = 5
"""Who is more polite than this never ends beside a training that takes all cores, which then waits for it."""
_SIZE = struct.Struct("<q")
_FOREST, _WORDS = b"F", b"W"
"""The first byte of an answer: a forest, or words on what went wrong."""


class ForestTraining:
    """A training under way, of a forest of so many `trees` on these rows and logarithms."""

    def __init__(self, rows: Array, logs: Array, trees: int) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=alone)
        data = io.BytesIO()
        np.savez(data, rows=rows, logs=logs, trees=trees)
        self._told = threading.Thread(target=self._send_error, args=(data.getvalue(),), daemon=True)
        self._told.start()  # the other takes a second to start, and then reads

    def result(self) -> Forest:
        """Return the forest, as soon as it is there.

        Raises:
            InputError: the other process has failed; with its last words.
        """
        assert self._process.stdout is not None
        try:
            answer = self._process.stdout.read()
        finally:
            self.close()
        if answer[:1] == _FOREST:
            return Forest.load(io.BytesIO(answer[1:]))
        words = answer[1:].decode(errors="replace") or f"it ended with {self._process.returncode}"
        raise InputError(f"the process that trains it failed: {words}")

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process.stdout is None or self._process.stdout.closed:
            return
        self._process.kill()
        self._process.wait()
        self._told.join()
        self._process.stdout.close()

    def _send_error(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_SIZE.pack(len(data)) + data)
            self._process.stdin.flush()
        except OSError:  # it has ended, and `result` says so
            pass


def main() -> None:
    """Trains on what comes by standard input, as the process that does nothing else, and ends when that does."""
    os.nice(_NICE)
    source, answer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    (size,) = _SIZE.unpack(source.read(_SIZE.size))
    data = source.read(size)
    threading.Thread(target=_end_with, args=(source,), daemon=True).start()
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            forest = io.BytesIO()
            train(found["rows"], found["logs"], NAMES, trees=int(found["trees"])).save(forest)
        answer.write(_FOREST + forest.getvalue())
    except Exception as error:  # goes to who started this
        answer.write(_WORDS + str(error)[-300:].encode())
    answer.close()
    os._exit(0)


def _end_with(source: BinaryIO) -> None:
    source.read()
    os._exit(1)
