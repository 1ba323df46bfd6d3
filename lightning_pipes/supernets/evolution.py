"""Evolution: later subnets descend from the best ones before."""

from __future__ import annotations

from typing import Any

from lightning_pipes.ir import InputError, check_count, check_number, check_type
from lightning_pipes.supernets.explorers import Choices, Explorer, among, drawn, lot
from lightning_pipes.supernets.subnet import Space


class Evolution(Explorer):
    """Generations of subnets: the first by lot; the next ones half by crossover, half by mutation of the `parents` best
    so far (as SPOS searches, Guo et al. 2020, arXiv:1904.00420, Algorithm 1).

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
        self, space: Space, population: int = 50, parents: int = 10, mutation: float = 0.1, seed: int = 0
    ) -> None:
        self.space = check_type("space", space, Space)
        self.population = check_count("population", population)
        self.parents = check_count("parents", parents, "; subnets of the population", most=population)
        self.mutation = check_number("mutation", mutation, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        self.seed = check_type("seed", seed, int)
        self._asked: dict[int, Choices] = {}  # not told yet
        self._best: list[tuple[float, int, Choices]] = []

    def choices(self, number: int) -> Choices:
        if number not in self._asked:
            self._asked[number] = self._made(number)
        return self._asked[number]

    def needs(self, number: int) -> int:
        return number // self.population * self.population

    def tell(self, number: int, loss: float) -> None:
        if number not in self._asked:
            raise InputError(f"the loss of subnet {number} was told, which was not asked for, or told twice")
        score = loss if loss == loss else float("inf")
        self._best = sorted([*self._best, (score, number, self._asked.pop(number))])
        if (number + 1) % self.population == 0:
            self._best = self._best[: self.parents]

    @property
    def best(self) -> list[tuple[float, Choices]]:
        """The best subnets so far with their losses, the best first."""
        return [(loss, choices) for loss, _, choices in self._best[: self.parents]]

    def state_dict(self) -> dict[str, Any]:
        asked = [[number, list(choices)] for number, choices in self._asked.items()]
        return {"asked": asked, "best": [[loss, number, list(choices)] for loss, number, choices in self._best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked = {number: self.space.check(choices) for number, choices in state["asked"]}
        self._best = [(loss, number, self.space.check(choices)) for loss, number, choices in state["best"]]

    def _made(self, number: int) -> Choices:
        key = f"{self.seed}/{number}"
        if number < self.population:
            return drawn(self.space, key)
        best = [choices for _, _, choices in self._before(number)]
        one, other = (best[lot(f"{key}/parent {n}") % len(best)] for n in range(2))
        if number % 2:
            return tuple((one, other)[lot(f"{key}/from {block}") % 2][block] for block in range(len(self.space)))
        return tuple(
            among(candidates, f"{key}/{block}") if lot(f"{key}/mutates {block}") < self.mutation * 2**64 else one[block]
            for block, candidates in enumerate(self.space)
        )

    def _before(self, number: int) -> list[tuple[float, int, Choices]]:
        """The best of the generations before that of `number`, of which some results may have been told already."""
        return [each for each in self._best if each[1] < self.needs(number)][: self.parents]
