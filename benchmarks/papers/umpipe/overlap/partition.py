"""Where a model is cut into stages, and how each of them cuts a batch, together.

The paper takes the stages as given. But what a stage takes for small chunks depends on the layers it has, and how even
stages are depends on the sizes of their chunks: one settled before the other is the best of neither.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.papers.umpipe.overlap.search import Descent, Effort, Found, search
from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.strategies.umpipe.network import Network, Times
from lightning_pipes.strategies.umpipe.overlapped.run import in_flight
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE

LAST = 0.5
"""The share of the effort that the sizes get once the cuts are settled."""
KICK = 3
"""Layers by which a kick moves a cut at most."""

Cuts = tuple[int, ...]
"""The first layer of each stage but the first one's, rising."""


@dataclass(frozen=True, eq=False)
class Layers:
    """A model's layers, and what a chunk takes in each.

    Attributes:
        rows: samples of a batch.
        sizes: of each option the samples of a chunk, falling, as in `Network`.
        forward, backward: whole numbers, a row for each layer and a column for each size.
        forward_links, backward_links: the same for what is sent between layer l and l + 1, one row less.
        overhead: what a stage takes for a chunk besides its layers, forward and backward.

    Raises:
        InputError: tables of other shapes. What `Network` refuses is refused once there is one.
    """

    rows: int
    sizes: tuple[int, ...]
    forward: Times
    backward: Times
    forward_links: Times
    backward_links: Times
    overhead: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        count = len(self.forward)
        for name, rows in (("forward", count), ("backward", count), ("forward_links", count - 1),
                           ("backward_links", count - 1)):  # fmt: skip
            got = np.shape(getattr(self, name))
            if got != (rows, len(self.sizes)) and not (rows == 0 and got[:1] == (0,)):
                raise InputError(
                    f"{name} needs {rows} rows for {count} layers and a column for each of {len(self.sizes)} sizes, "
                    f"got the shape {got}"
                )

    def network(self, cuts: Sequence[int]) -> Network:
        """The network of the stages that begin at layer 0 and at `cuts`.

        Raises:
            InputError: cuts that leave a stage without layers.
        """
        ends = [0, *cuts, len(self.forward)]
        if any(b <= a for a, b in pairwise(ends)):
            raise InputError(f"cuts must rise from 1 to at most {len(self.forward) - 1}, got {short_repr(tuple(cuts))}")

        def chain(layers: Times, links: Times, overhead: int) -> list[Times]:
            table = []
            for a, b in pairwise(ends):
                table.append(np.asarray(layers)[a:b].sum(axis=0) + overhead)
                if b < len(layers):
                    table.append(np.asarray(links)[b - 1])
            return table

        forward = chain(self.forward, self.forward_links, self.overhead[0])
        backward = chain(self.backward, self.backward_links, self.overhead[1])
        return Network(self.rows, self.sizes, np.array(forward), np.array(backward[::-1]))

    def even_cuts(self, stages: int) -> Cuts:
        """The cuts whose busiest stage has least to do if each layer takes the size that suits it best."""
        counts = np.array([-(-self.rows // size) for size in self.sizes])
        work = ((np.asarray(self.forward) + np.asarray(self.backward)) * counts).min(axis=1)
        before = [0, *np.cumsum(work).tolist()]
        layers = len(work)
        if not 1 <= stages <= layers:
            raise InputError(f"{layers} layers make 1 to {layers} stages, got {short_repr(stages)}")
        best: list[tuple[float, Cuts]] = [(before[i], ()) for i in range(layers + 1)]
        for n in range(1, stages):
            best = [
                min(
                    (max(best[cut][0], before[end] - before[cut]), (*best[cut][1], cut)) for cut in range(n, end)
                ) if end > n else (float("inf"), ())
                for end in range(layers + 1)
            ]  # fmt: skip
        return best[layers][1]


@dataclass(frozen=True)
class Joint:
    """Cuts and sizes that were found together.

    Attributes:
        cuts: the first layer of each stage but the first one's.
        network: of these stages.
        found: what to run.
    """

    cuts: Cuts
    network: Network
    found: Found


def joint(
    layers: Layers,
    stages: int,
    *,
    cuts: Sequence[int] | None = None,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
) -> Joint:
    """The best cuts and sizes that a search over both finds, never worse than equal chunks at `cuts`.

    It moves one cut by a layer, lets the sizes beside it follow, and keeps what is not worse; where nothing helps, cuts
    are moved at random. With `evaluations` alone the same seed finds the same.

    Args:
        cuts: where to begin; by default where the busiest stage has least to do.

    Raises:
        InputError: no limit of effort, cuts that leave a stage without layers, or more stages than layers.
    """
    effort = Effort(evaluations, seconds)
    rng = random.Random(seed)
    now = layers.even_cuts(stages) if cuts is None else tuple(cuts)
    network = layers.network(now)
    over = effort.part(1 - LAST).over()
    found = search(network, evaluations=2 * stages * len(layers.sizes) ** 2, seed=seed)
    done = found.evaluations
    best = Joint(now, network, found)
    waiting = _moves(now)
    while stages > 1 and not over(done):
        if waiting:
            i, step = waiting.pop(rng.randrange(len(waiting)))
            tried = tuple(cut + step * (n == i) for n, cut in enumerate(best.cuts))
            near = [2 * i, 2 * i + 1, 2 * i + 2]
        else:
            tried = tuple(sorted(cut + rng.randint(-KICK, KICK) for cut in best.cuts))
            near = []
        if len({0, *tried, len(layers.forward)}) <= stages or not 0 < tried[0] <= tried[-1] < len(layers.forward):
            done += 1
            continue
        network = layers.network(tried)
        descent = Descent(network, in_flight(network, (FREE,) * stages), tune_caps=True)
        descent.take(best.found.scheme, best.found.caps)
        descent.descend(rng, lambda _: False, near or None)
        done += descent.evaluations
        if descent.value <= best.found.value:
            better = descent.value < best.found.value
            found = Found(descent.scheme, descent.policy, descent.value, descent.caps, done)
            best = Joint(tried, network, found)
            waiting = _moves(tried) if better or not waiting else waiting
        elif not waiting and rng.random() < 0.5:
            waiting = _moves(best.cuts)
    last = search(
        best.network, [best.found.scheme], seed=seed, evaluations=effort.part(LAST).evaluations,
        seconds=effort.part(LAST).seconds,
    )  # fmt: skip
    chosen = last if last.value < best.found.value else best.found
    total = done + last.evaluations
    return Joint(best.cuts, best.network, Found(chosen.scheme, chosen.policy, chosen.value, chosen.caps, total))


def _moves(cuts: Cuts) -> list[tuple[int, int]]:
    return [(i, step) for i in range(len(cuts)) for step in (-1, 1)]
