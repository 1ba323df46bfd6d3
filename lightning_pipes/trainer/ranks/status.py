"""Whether a rank still counts for the others, and how they hear when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_pipes.ir import PipelineError


class RankStatus:
    """The status of this rank in its run.

    Args:
        report: tells the other ranks of an error.

    Attributes:
        error: what this rank ends by; None while it goes on.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self.error: BaseException | None = None
        self._report = report

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this rank ends by `error`."""
        self.error = self.error or error
        self._report(error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other ranks at once of an exception in the block."""
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise

    def check(self) -> None:
        """Raise PipelineError if a step of this run has failed and its caller goes on."""
        if self.error is not None:
            raise PipelineError(
                f"a step of this run has ended in {type(self.error).__name__}, and ranks can't go on together after "
                "that. If BatchSizeFinder has found a batch size that is too large, the one before it fits: set that, "
                "or let the search end there by max_trials"
            ) from self.error
