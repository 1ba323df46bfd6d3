"""Evolutionary search: later subnets descend from the best earlier ones."""

from __future__ import annotations

from typing import Any

from lightning_pipes.ir import InputError, check_count, check_number, check_type
from lightning_pipes.supernets.explorers import Choices, Explorer, draw_candidate, draw_subnet, hash64
from lightning_pipes.supernets.subnet import SearchSpace


class Evolution(Explorer):
    """Evolves generations of subnets. The first one is random. Later ones are half crossover, half mutation of the
    `parents` best subnets so far (SPOS, Guo et al. 2020, arXiv:1904.00420, Algorithm 1).

    A generation is scored when all of it has been trained, at a batch that is known before, so that search and weights
    are the same on any number of stages. Of equal losses the earlier subnet counts as better; a loss that is not a
    number as the worst.

    Args:
        space: to search.
        population: subnets of a generation.
        parents: best ones, of all generations, that have descendants.
        mutation: the share of choices that a mutation draws anew.
        seed: equal seeds and losses give equal subnets.

    Raises:
        InputError: a number makes no sense.
    """

    instant = True

    def __init__(
        self, space: SearchSpace, population: int = 50, parents: int = 10, mutation: float = 0.1, seed: int = 0
    ) -> None:
        self.space = check_type("space", space, SearchSpace)
        self.population = check_count("population", population)
        self.parents = check_count("parents", parents, "; subnets of the population", most=population)
        self.mutation = check_number("mutation", mutation, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        self.seed = check_type("seed", seed, int)
        self._pending: dict[int, Choices] = {}  # without a loss so far
        self._best: list[tuple[float, int, Choices]] = []

    def choose_subnet(self, number: int) -> Choices:
        if number not in self._pending:
            self._pending[number] = self._make_subnet(number)
        return self._pending[number]

    def results_needed(self, number: int) -> int:
        return number // self.population * self.population

    def report_loss(self, number: int, loss: float) -> None:
        if number not in self._pending:
            raise InputError(f"the loss of subnet {number} was reported twice, or before the subnet was requested")
        score = loss if loss == loss else float("inf")
        self._best = sorted([*self._best, (score, number, self._pending.pop(number))])
        if (number + 1) % self.population == 0:
            self._best = self._best[: self.parents]

    @property
    def best_subnets(self) -> list[tuple[float, Choices]]:
        """The best subnets so far with their losses, the best first."""
        return [(loss, choices) for loss, _, choices in self._best[: self.parents]]

    def state_dict(self) -> dict[str, Any]:
        asked = [[number, list(choices)] for number, choices in self._pending.items()]
        return {"asked": asked, "best": [[loss, number, list(choices)] for loss, number, choices in self._best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = {number: self.space.check(choices) for number, choices in state["asked"]}
        self._best = [(loss, number, self.space.check(choices)) for loss, number, choices in state["best"]]

    def _make_subnet(self, number: int) -> Choices:
        key = f"{self.seed}/{number}"
        if number < self.population:
            return draw_subnet(self.space, key)
        best = [choices for _, _, choices in self._best_before(number)]
        one, other = (best[hash64(f"{key}/parent {n}") % len(best)] for n in range(2))
        if number % 2:
            return tuple((one, other)[hash64(f"{key}/from {block}") % 2][block] for block in range(len(self.space)))
        return tuple(
            draw_candidate(candidates, f"{key}/{block}")
            if hash64(f"{key}/mutates {block}") < self.mutation * 2**64
            else one[block]
            for block, candidates in enumerate(self.space)
        )

    def _best_before(self, number: int) -> list[tuple[float, int, Choices]]:
        """Return the best subnets of generations before that of `number`; results of its own generation are left
        out."""
        return [each for each in self._best if each[1] < self.results_needed(number)][: self.parents]
