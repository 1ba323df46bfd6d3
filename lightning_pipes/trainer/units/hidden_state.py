"""Modules that are cut by units share objects without a watch: tensors in these travel as any other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lightning_pipes.trainer.module.hidden_state import CheckLater, HiddenState
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings


class NoHiddenState(HiddenState):
    """Watches nothing.

    Args:
        holdings: who has which weights.
        control: of the pipeline.
        check_later: `Connections.check_later`.
    """

    def __init__(self, holdings: Holdings, control: Control, check_later: CheckLater) -> None:
        self._holdings = holdings
        self._control = control
        self._check_later = check_later
        self._things: dict[int, tuple[str, Any]] = {}
        self._having: dict[int, list[int]] = defaultdict(list)
        self._outside: set[int] = set()
        self.look_again()
