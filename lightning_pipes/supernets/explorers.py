"""Explorers, which choose the subnet of each batch.

A choice depends only on the number of the subnet, the seed, and the reported losses. Every rank requests the numbers in
order, starting at 0.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_pipes.ir import InputError, check_count, check_number, check_type, short_repr
from lightning_pipes.supernets.subnet import SearchSpace

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler

Choices = tuple[int, ...]


class Explorer(ABC):
    """Base class of explorers, which choose subnets by number.

    Attributes:
        space: the search space.
        instant: whether it answers immediately, so that no timeout is needed.
    """

    space: SearchSpace
    instant: bool = False

    @abstractmethod
    def choose_subnet(self, number: int) -> Choices:
        """Return the choices of subnet `number`.

        All results that `results_needed(number)` counts have been reported before.

        Raises:
            InputError: there are no more subnets, or the source of the subnets has failed.
        """

    def results_needed(self, number: int) -> int:
        """Return the number of results that must be reported before subnet `number` can be chosen.

        These are the results of the subnets 0, 1, ..., in this order.
        """
        return 0

    @property
    def learns(self) -> bool:
        """Whether its choices depend on losses."""
        return type(self).report_loss is not Explorer.report_loss

    def report_loss(self, number: int, loss: float) -> None:  # noqa: B027  # most learn nothing from results
        """Record the loss of subnet `number`. Losses are reported in the order of numbers."""

    def space_index(self, number: int) -> int:
        """Return the number of the space to which subnet `number` belongs, if there are several."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learned from results, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that `state_dict` returned."""


class Uniform(Explorer):
    """Draw each choice uniformly, block by block: single path one-shot, SPOS (Guo et al. 2020, arXiv:1904.00420, S3.3).

    Args:
        space: the space from which subnets are drawn.
        seed: the random seed. Equal seeds give equal subnets on any machine.
    """

    instant = True

    def __init__(self, space: SearchSpace, seed: int = 0) -> None:
        self.space, self.seed = check_type("space", space, SearchSpace), check_type("seed", seed, int)

    def choose_subnet(self, number: int) -> Choices:
        return draw_subnet(self.space, f"{self.seed}/{number}")


class FromList(Explorer):
    """Choose the given subnets, in order.

    Args:
        subnets: the choices of each subnet, one per block.
        space: the space of the subnets.
        repeat: whether to start again at the first subnet after the last one.

    Raises:
        InputError: there are no subnets, or one of them is not in the space.
    """

    instant = True

    def __init__(self, subnets: Sequence[Sequence[int]], space: SearchSpace, repeat: bool = False) -> None:
        self.space, self.repeat = check_type("space", space, SearchSpace), check_type("repeat", repeat, bool)
        self._subnets = [self.space.check(subnet) for subnet in check_type("subnets", subnets, Sequence)]
        if not self._subnets:
            raise InputError("a list of subnets is empty; it needs at least one")

    def choose_subnet(self, number: int) -> Choices:
        if number >= len(self._subnets) and not self.repeat:
            raise InputError(
                f"training asks for subnet {number}, and the list ends after {len(self._subnets)}; give one for each "
                "batch of all epochs, or repeat=True, or train for fewer batches"
            )
        return self._subnets[number % len(self._subnets)]


class FromIterable(Explorer):
    """Choose the subnets that a generator or another iterable yields.

    A resumed training requests earlier subnets again.

    Args:
        subnets: an iterable of subnets, each with one choice per block.
        space: the space of the subnets.
    """

    def __init__(self, subnets: Iterable[Sequence[int]], space: SearchSpace) -> None:
        self.space = check_type("space", space, SearchSpace)
        self._given = 0
        self._producing = as_iterator("subnets", subnets)
        self._latest: Choices = ()

    def choose_subnet(self, number: int) -> Choices:
        while self._given <= number:
            self._latest = self._next()
        return self._latest

    def _next(self) -> Choices:
        number = self._given
        try:
            found = self.space.check(next(self._producing))
        except StopIteration:
            raise InputError(
                f"training requested subnet {number}, but the iterable of subnets has ended. It must contain one "
                "subnet for each batch of all epochs. Extend it, or train for fewer batches"
            ) from None
        except Exception as error:
            raise InputError(
                f"the iterable of subnets has failed at subnet {number}: {type(error).__name__}: {error}. The batches "
                "before it have been trained. Fix the iterable, and resume the training from a checkpoint"
            ) from error
        self._given += 1
        return found


class RoundRobin(Explorer):
    """Alternate between explorers.

    Subnets of different spaces share fewer layers, so that more of them overlap (NASPipe, Zhao et al. 2022, S5.5).

    Args:
        explorers: the explorers. Subnet number n is the next subnet of explorer n modulo the number of explorers.

    Raises:
        InputError: there are no explorers, or their spaces differ in the number of blocks.
    """

    def __init__(self, *explorers: Explorer) -> None:
        for number, each in enumerate(explorers):
            check_type(f"explorers[{number}]", each, Explorer)
        if not explorers or len({len(each.space) for each in explorers}) > 1:
            raise InputError(
                f"explorers of spaces with {[len(each.space) for each in explorers]} blocks can't take turns; all "
                "choose for the blocks of one supernet: take parts of its space, by space.restrict_to({block: "
                "candidates})"
            )
        self._explorers = explorers
        self.instant = all(each.instant for each in explorers)
        merged = zip(*(each.space for each in explorers), strict=True)
        self.space = SearchSpace(tuple(tuple(sorted(set().union(*blocks))) for blocks in merged))

    def choose_subnet(self, number: int) -> Choices:
        explorer, own = self._explorer_of(number)
        return explorer.choose_subnet(own)

    def results_needed(self, number: int) -> int:
        explorer, own = self._explorer_of(number)
        needed = explorer.results_needed(own)
        return (needed - 1) * len(self._explorers) + self.space_index(number) + 1 if needed else 0

    @property
    def learns(self) -> bool:
        return any(each.learns for each in self._explorers)

    def report_loss(self, number: int, loss: float) -> None:
        explorer, own = self._explorer_of(number)
        explorer.report_loss(own, loss)

    def space_index(self, number: int) -> int:
        return number % len(self._explorers)

    def state_dict(self) -> dict[str, Any]:
        return {"explorers": [each.state_dict() for each in self._explorers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for explorer, own in zip(self._explorers, state["explorers"], strict=True):
            explorer.load_state_dict(own)

    def _explorer_of(self, number: int) -> tuple[Explorer, int]:
        return self._explorers[self.space_index(number)], number // len(self._explorers)


def as_iterator(what: str, value: object) -> Iterator[Any]:
    """Return an iterator over `value`.

    Raises:
        InputError: `value` is not iterable. A tensor without axes is detected only when its iterator is created.
    """
    try:
        return iter(check_type(what, value, Iterable))
    except TypeError:
        raise InputError(f"{what} must be an Iterable, got {short_repr(value)}") from None


def draw_subnet(space: SearchSpace, key: str) -> Choices:
    """Draw a subnet from `space`. Equal keys give equal subnets."""
    return tuple(draw_candidate(candidates, f"{key}/{block}") for block, candidates in enumerate(space))


def draw_candidate(entries: Sequence[int], key: str) -> int:
    """Draw one entry uniformly, depending only on `key`."""
    return entries[hash64(key) % len(entries)]


def hash64(key: str) -> int:
    """Return a 64-bit number that depends only on the key and is equal on all machines."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


class Evolution(Explorer):
    """Evolve generations of subnets (SPOS, Guo et al. 2020, arXiv:1904.00420, Algorithm 1).

    The first generation is random. In later generations, one half is produced by crossover and the other half by
    mutation of the `parents` best subnets so far.

    A generation is scored when all of its subnets have been trained. The batch at which this happens is known in
    advance, so the search and the weights are the same on any number of stages. If losses are equal, the earlier subnet
    counts as better. A loss of NaN counts as the worst loss.

    Args:
        space: the search space.
        population: number of subnets in a generation.
        parents: number of best subnets, over all generations, that have descendants.
        mutation: the share of choices that a mutation draws again.
        seed: the random seed. Equal seeds and equal losses give equal subnets.

    Raises:
        InputError: an argument is invalid.
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
        self._pending: dict[int, Choices] = {}  # subnets without a loss so far
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
        """The best subnets so far with their losses, in ascending order of loss."""
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
        """Return the best subnets of the generations before the generation of `number`.

        Results of its own generation are not used.
        """
        return [each for each in self._best if each[1] < self.results_needed(number)][: self.parents]


class OptunaExplorer(Explorer):
    """Search with an Optuna study over the choices, with one parameter per block.

    A whole generation of trials is requested before any of them is scored, and its trials are scored together. The
    study is therefore equal on every rank and on any number of stages.

    Each rank keeps its own study in memory and reports the same results to it, so the sampler needs a seed.

    Args:
        space: the search space.
        sampler: returns the sampler, such as `lambda: TPESampler(seed=1)`.
        population: number of trials that are requested and scored together.

    Raises:
        InputError: `sampler` does not return a sampler, or an argument is invalid.
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
        """The study with all generations that have been scored."""
        return self._study

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self._losses), "asked": len(self._asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replay all requests and results, because the state of the sampler is not accessible."""
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
