"""Whether a rank still counts for the others, and who is told when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_pipes.ir import PipelineError


class Standing:
    """Of this rank in its run.

    Attributes:
        failed: what this rank ends by; None while it goes on.
    """

    def __init__(self) -> None:
        self.failed: BaseException | None = None
        self._tell: Callable[[BaseException], None] = _nobody

    def renew(self) -> None:
        """Another run begins, and nobody is connected."""
        self.failed = None
        self._tell = _nobody

    def connected(self, tell: Callable[[BaseException], None]) -> None:
        """From now on the others hear of a failure by `tell`."""
        self._tell = tell

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank ends by `error`."""
        self.failed = self.failed or error
        self._tell(error)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others at once of an exception in the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def check(self) -> None:
        """Raises PipelineError if a step of this run has failed, and whoever called it goes on."""
        if self.failed is not None:
            raise PipelineError(
                f"a step of this run has ended in {type(self.failed).__name__}, and ranks can't go on together after "
                "that. If BatchSizeFinder has found a batch size that is too large, the one before it fits: set that, "
                "or let the search end there by max_trials"
            ) from self.failed


def _nobody(error: BaseException) -> None:
    pass
