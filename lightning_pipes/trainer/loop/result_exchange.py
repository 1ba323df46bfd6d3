"""Results of batches that are in flight, which the last stage sends to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pipes.trainer.ranks.notices import Notices
from lightning_pipes.trainer.ranks.processes import process_rank


class ResultExchange:
    """Exchanges the results of batches.

    The last stage publishes each result and continues. The other stages read it later. When a rank has stepped for a
    batch, the result of the batch is already available.

    Args:
        notices: the messages between ranks.
        pipeline: a number that identifies the pipeline, because all replicas share one store.
        max_lag: the largest number of batches between two ranks.
        last_stage: the global ranks of the last stage. Each of them has a part of the result, and the first one
            publishes the whole.
    """

    def __init__(self, notices: Notices, pipeline: int, max_lag: int, last_stage: Sequence[int]) -> None:
        self._notices, self._pipeline, self._max_lag = notices, pipeline, max_lag
        self._others = last_stage[1:]
        self._n_sent = self._n_received = self._n_parts = 0

    def send_part(self, results: Any) -> None:
        """Send this rank's part of the result of the next batch to the first rank of the last stage."""
        self._notices.put(f"{process_rank()}/{self._name(self._n_parts)}", results)
        self._n_parts += 1

    def receive_parts(self) -> list[Any]:
        """Return the parts that other ranks of the last stage have of the next batch's result.

        These ranks have sent their parts before gradients are summed.
        """
        names = [f"{rank}/{self._name(self._n_parts)}" for rank in self._others]
        self._n_parts += 1
        found = [self._notices.get(name) for name in names]
        for name in names:
            self._notices.remove(name)
        return found

    def send_result(self, message: Any) -> None:
        """Send the result of the next batch from the last stage."""
        self._notices.put(self._name(self._n_sent), message)
        old = self._n_sent - self._max_lag - 1
        self._n_sent += 1
        if old >= 0:
            self._notices.remove(self._name(old))  # all have read it: their later messages depend on it

    def receive_result(self) -> Any:
        """Return the result of the next batch, on ranks without the last stage.

        Raises:
            PeerFailure: another rank failed.
        """
        self._n_received += 1
        return self._notices.get(self._name(self._n_received - 1))

    def _name(self, batch: int) -> str:
        return f"{self._pipeline}/{batch}"
