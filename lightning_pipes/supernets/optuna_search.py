"""Optuna as a front-end: it suggests subnets and receives their losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_pipes.ir import InputError, check_count, check_type
from lightning_pipes.supernets.explorers import Choices, Explorer
from lightning_pipes.supernets.subnet import SearchSpace

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler


class OptunaExplorer(Explorer):
    """An Optuna study over the choices, one parameter per block. A batch of trials is requested together and scored
    together, so that the study is equal on every rank and on any number of stages.

    Each rank has the study in memory and gives it the same results; so the sampler needs a seed.

    Args:
        space: to search.
        sampler: makes the sampler, such as `lambda: TPESampler(seed=1)`.
        population: trials asked for at once.

    Raises:
        InputError: `sampler` makes no sampler, or the population makes no sense.
    """

    def __init__(self, space: SearchSpace, sampler: Callable[[], BaseSampler], population: int = 50) -> None:
        self.space = check_type("space", space, SearchSpace)
        self.population = check_count("population", population)
        self._sampler: Callable[[], BaseSampler] = check_type("sampler", sampler, Callable[[], Any])
        self._losses: list[float] = []
        self._begin()

    def choose_subnet(self, number: int) -> Choices:
        while len(self._asked) <= number:
            self._asked.append(self._ask_trial())
        return self._asked[number]

    def results_needed(self, number: int) -> int:
        return number // self.population * self.population

    def report_loss(self, number: int, loss: float) -> None:
        if number != len(self._losses):
            raise InputError(f"the loss of subnet {number} was reported; the next one is subnet {len(self._losses)}")
        self._losses.append(loss)
        if len(self._losses) % self.population == 0:
            self._score()

    @property
    def study(self) -> Study:
        """The study, with the generations that were scored."""
        return self._study

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self._losses), "asked": len(self._asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replay all requests and results, because a sampler's own state is not accessible."""
        self._begin()
        self._losses = []
        for number, loss in enumerate(state["told"]):
            self.choose_subnet(number)
            self.report_loss(number, loss)
        if state["asked"]:
            self.choose_subnet(state["asked"] - 1)

    def _begin(self) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            sampler = self._sampler()
        except TypeError as error:
            raise InputError(
                f"sampler must make a sampler without arguments, as lambda: TPESampler(seed=1) does: {error}"
            ) from error
        check_type("what sampler makes", sampler, optuna.samplers.BaseSampler)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: list[Choices] = []
        self._trials: list[Trial] = []

    def _ask_trial(self) -> Choices:
        trial = self._study.ask()
        self._trials.append(trial)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tuple(trial.suggest_categorical(f"block {n}", c) for n, c in enumerate(self.space))

    def _score(self) -> None:
        from optuna.trial import TrialState

        for trial, loss in zip(self._trials, self._losses[-self.population :], strict=True):
            if loss == loss:
                self._study.tell(trial, loss)
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        self._trials.clear()
