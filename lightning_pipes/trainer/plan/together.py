"""All ranks do the same at the same time: what is measured so is measured under the conditions of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_pipes.trainer.ranks.control import Control

T = TypeVar("T")


class NotMeasuredError(Exception):
    """Why there is no profile, the same on all ranks.

    Attributes:
        quiet: nobody needs to know.
    """

    def __init__(self, reason: str, quiet: bool = False) -> None:
        super().__init__(reason)
        self.quiet = quiet


class Together:
    """Collective: all ranks make one, and the same calls of it.

    Args:
        control: of all ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control = control

    def __call__(self, work: Callable[[], T]) -> list[T]:
        """The results of `work()` on every rank, once all are through with it.

        Raises:
            NotMeasuredError: it raised on any rank.
        """
        reason, quiet, value = "", False, None
        try:
            value = work()
        except NotMeasuredError as why:
            reason, quiet = str(why), why.quiet
        except Exception as error:  # of the user's code, which Lightning will run into where it can be explained
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        said = self._control.all_gather((reason, quiet, value))
        for reason, quiet, _ in said:
            if reason:
                raise NotMeasuredError(reason, quiet)
        return [value for _, _, value in said]
