"""Stops of siblings: agreed by ranks that do not wait for each other."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pipes.arrays.siblings.sibling import Sibling
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.loop.stopping import StopAgreement, check_ends
from lightning_pipes.trainer.ranks.control import Control, PendingGather


class SiblingAgreement:
    """Has ranks agree without waiting for each other where they have nothing to stop for, as siblings of an array do:
    a wait of one would keep the turns of all.

    Stops that all ranks want after the same batch, as callbacks do that look at metrics, come at once. What one of them
    wants alone can't be had: the others have gone on.
    """

    def __init__(self, trainer: pl.Trainer, stops: StopAgreement, control: Control, sibling: Sibling[object]) -> None:
        self._trainer = trainer
        self._stops = stops
        self._control = control
        self._sibling = sibling
        self._last_answer: tuple[int, PendingGather[list[bool]]] | None = None

    def agree(self) -> None:
        """After this call every rank stops, or none.

        Raises:
            PipelineError: only some ranks wanted to stop after this batch, or the epoch has ended there on some only;
                unless this one wants to stop it is raised later.
        """
        flags = self._stops.stop_flags()
        batch = self._trainer.fit_loop.batch_idx
        before, self._last_answer = self._last_answer, (batch, self._control.start_any(*flags, not flags[0]))
        if before is not None:
            self._stops.apply_flags(_agreed(*before), before[0])
        batch, answer = self._last_answer
        if flags[0]:
            self._last_answer = None
            self._stops.apply_flags(_agreed(batch, answer), batch)
        else:
            self._sibling.check_later(answer.has_arrived, lambda: _agreed(batch, answer), late=0)


def _agreed(batch: int, answer: PendingGather[list[bool]]) -> list[bool]:
    *found, some_go_on = answer()
    if found[0] and some_go_on:
        raise PipelineError(
            f"trainer.should_stop was set on some ranks only after batch {batch}; in a job array every rank must "
            "want it, so decide by what all have, such as logged metrics, or by trainer.strategy.broadcast"
        )
    check_ends(found, batch)
    return found
