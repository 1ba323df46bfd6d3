"""All ranks of a pipeline in one process, in turn, for tests with real tensors and without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipes.engine import Engine, Item, LoopbackTransport, Mailbox, Stage
from lightning_pipes.ir import Plan, Policy, Program


class Loopback:
    """One engine per rank; each makes progress while it can.

    Args:
        stages: what each rank holds.
    """

    def __init__(
        self, plan: Plan, order: Program | Policy, stages: Callable[[int], Sequence[Stage]], seed: int = 0
    ) -> None:
        boxes = [Mailbox() for _ in range(plan.n_ranks)]
        self.engines = [
            Engine(plan, order, stages(r), LoopbackTransport(boxes, r), rank=r, seed=seed) for r in range(plan.n_ranks)
        ]

    def inject(self, make: Callable[[], Item]) -> None:
        """Add a batch on every rank; `make` is called once for each."""
        for engine in self.engines:
            engine.inject(make())

    def progress(self) -> None:
        """Run until no rank can run anything."""
        while sum(engine.progress(wait=False) for engine in self.engines):
            pass

    def drain(self) -> None:
        """Run all remaining instructions and close the window.

        Raises:
            AssertionError: the ranks wait for each other.
        """
        for engine in self.engines:
            engine.end_window()
        self.progress()
        self.progress()  # layers on other ranks return when all ranks have sent them
        for rank, engine in enumerate(self.engines):
            assert engine.satisfied, f"rank {rank} still waits, and so do all others"
            engine.drain()

    def adopt(self, plan: Plan, order: Program | Policy) -> None:
        """Adopt another plan or order for the next window, on every rank."""
        for engine in self.engines:
            engine.adopt(plan, order)
