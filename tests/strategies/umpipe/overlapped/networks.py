"""Random and uniform networks for tests."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.umpipe.network import Network, Scheme


def simulation(stages: int, rows: int, seed: int, *, least: int = 1, most: int = 100) -> Network:
    """Return a network as in the paper's simulations.

    Times are independent and uniform for every process and every number of micro-batches.
    """
    rng = np.random.default_rng(seed)
    shape = (2 * stages - 1, rows)
    forward, backward = (rng.integers(least, most + 1, shape) for _ in range(2))
    return Network.from_counts(rows, range(1, rows + 1), forward, backward)


def realistic(stages: int, rows: int, seed: int, *, link: float = 0.3, spread: float = 0.3) -> Network:
    """Return a network whose stages differ in speed, with powers of two as chunk sizes.

    The time of a chunk is an overhead plus a part that is constant while the device is not full and then grows
    linearly.
    """
    rng = np.random.default_rng(seed)
    sizes = [rows >> i for i in range(rows.bit_length()) if rows % (1 << i) == 0]

    def times(scale: float) -> np.ndarray:
        table = []
        for k in range(2 * stages - 1):
            speed = scale * float(np.exp(spread * rng.standard_normal())) * (1 if k % 2 == 0 else link)
            floor = 4 if k % 2 == 0 else 0
            table.append([round(100 * speed * (1 + max(floor, size))) for size in sizes])
        return np.array(table)

    return Network(rows, tuple(sizes), times(1.0), times(2.0))


def uniform(stages: int, rows: int, forward: int, backward: int, link: int = 0) -> Network:
    """Return a network with chunks of one and of two samples.

    All stages take the same time, and a chunk of one sample takes half the time of a chunk of two.
    """
    k = np.arange(2 * stages - 1)[:, None] % 2
    times = [np.where(k == 0, t, link) * np.array([[2, 1]]) for t in (forward, backward)]
    return Network(rows, (2, 1), *times)


def random_scheme(network: Network, seed: int) -> Scheme:
    """Return a scheme with independent, uniformly drawn options."""
    rng = np.random.default_rng(seed)
    options = rng.integers(0, len(network.sizes), (2, network.processes)).tolist()
    return Scheme(tuple(options[0]), tuple(options[1]))
