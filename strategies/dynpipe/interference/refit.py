"""Refit a predictor from observations of the training, in a separate process.

Every look at a run tells, for nothing, how much a device's neighbours slow down the stage that it hosts.
"""

from __future__ import annotations

import io
import logging
import math
import os
import struct
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np

from lightning_pipes.ir import InputError, check_count
from lightning_pipes.planning.replanning import HostedStage, Interference, Predicted
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, Array, feature_table
from lightning_pipes.strategies.dynpipe.interference.forest import Forest, train
from lightning_pipes.strategies.dynpipe.interference.predictor import Predictor, formula_of

Rows = Sequence[tuple[Mapping[str, float], HostedStage]]
VALIDATED = 0.2
"""The share of rows, the newest ones, on which a new forest has to be better than the old one; it has not learned from
them."""
_LEAST = 20
_log = logging.getLogger(__name__)


@runtime_checkable
class LearningPredictor(Interference, Protocol):
    """A predictor that learns from how much stages were slowed down."""

    def observe(self, rows: Rows, ratios: Sequence[float]) -> None:
        """Stages ran on devices as seen, and took `ratios` times as long as alone."""


class RefittedPredictor:
    """A predictor that is trained anew after `every` rows that it has observed, in another process of a lower
    priority. Training goes on meanwhile.

    All ranks observe the same, and each has to plan with the same forest: so a new one counts from a certain row on,
    however long it took, and the first rank there waits for it. It replaces the old one only if it is better on the
    newest rows, which it has not seen.

    Args:
        first: predicts before; without it nothing is known at first.
        every: rows from one training to the next.
        after: rows from the start of a training to its use.
        most: rows that are kept. Of too many, those go first that have been there longest with a ratio that many have:
            heavy neighbours are rare, and a forest knows nothing beyond what it has seen.
        trees: of a forest.

    Attributes:
        predictor: the one that counts now; None before there is one.
        refits: how many were taken.

    Raises:
        InputError: a number below 1.
    """

    def __init__(
        self, first: Predictor | None = None, every: int = 100, after: int = 20, most: int = 1000, trees: int = 128
    ) -> None:
        for name, value in (("every", every), ("after", after), ("most", most), ("trees", trees)):
            check_count(f"RefittedPredictor: {name}", value)
        self.predictor = first
        self.refits = 0
        self._every, self._after, self._most, self._trees = max(every, _LEAST), after, most, trees
        self._bins: dict[int, deque[tuple[int, Array, float]]] = defaultdict(deque)
        self._seen = self._began = 0
        self._fit: _Fit | None = None
        self._broken = False

    def predict(self, rows: Rows) -> Predicted:
        """See `Predictor.predict`."""
        if self.predictor is None:
            return Predicted(np.ones(len(rows)), np.zeros(len(rows), np.bool_))
        return self.predictor.predict(rows)

    def observe(self, rows: Rows, ratios: Sequence[float]) -> None:
        """See `LearningPredictor.observe`. A ratio that is no positive number says nothing."""
        for row, ratio in zip(feature_table(rows), ratios, strict=True):
            if not (math.isfinite(ratio) and ratio > 0):
                continue
            self._bins[math.floor(4 * math.log2(ratio))].append((self._seen, row, ratio))
            self._seen += 1
            if sum(map(len, self._bins.values())) > self._most:
                max(self._bins.values(), key=len).popleft()
            if self._fit is not None and self._seen - self._began >= self._after:
                self._take(self._fit)
            if self._fit is None and not self._broken and self._seen - self._began >= self._every:
                self._begin()

    def close(self) -> None:
        """End a training that is under way."""
        if self._fit is not None:
            self._fit.training.close()
            self._fit = None

    def _begin(self) -> None:
        kept = sorted((each for kept in self._bins.values() for each in kept), key=lambda each: each[0])
        rows, ratios = np.array([row for _, row, _ in kept]), np.array([ratio for _, _, ratio in kept])
        learned = round((1 - VALIDATED) * len(rows))
        logs = np.log(ratios / formula_of(rows))
        training = ForestTraining(rows[:learned], logs[:learned], self._trees)
        self._fit, self._began = _Fit(training, rows[learned:], logs[learned:]), self._seen

    def _take(self, fit: _Fit) -> None:
        self._fit = None
        try:
            found = fit.training.result()
        except (InputError, OSError) as error:
            self._broken = True
            _log.warning("No forest is trained any more: %s", error)
            return
        old = self.predictor
        if old is None:
            self.predictor, self.refits = Predictor(found), 1
        elif _error(found, fit) < _error(old.forest, fit):
            self.predictor, self.refits = replace(old, forest=found), self.refits + 1


@dataclass(frozen=True)
class _Fit:
    """A training under way, and the newest rows, from which it does not learn: they are for comparing."""

    training: ForestTraining
    rows: Array
    logs: Array


def _error(forest: Forest, fit: _Fit) -> float:
    return float(np.abs(forest.predict(fit.rows).mean(axis=1) - fit.logs).mean())


_NICE = 5
"""A process with a higher niceness never ends beside a training that takes all cores, which then waits for it."""
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
        """End the process, whatever it is doing."""
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
    """Train on what comes by standard input, as the process that does nothing else, and end when that does."""
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
    except Exception as error:  # raised where the result is asked for
        answer.write(_WORDS + str(error)[-300:].encode())
    answer.close()
    os._exit(0)


def _end_with(source: BinaryIO) -> None:
    source.read()
    os._exit(1)
