"""Whether states change places between host and device without anybody waiting (E2 of ArrayPipe)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switching:
    """The paper's E2 for the devices of one host: all their states change places while the shortest block runs.

    Attributes:
        stages: those on the host.
        transfer: seconds in which the states of all of them move to the devices.
        block: seconds of the shortest block that hides this, without its message.
    """

    stages: tuple[int, ...]
    transfer: float
    block: float

    @property
    def is_hidden(self) -> bool:
        """Whether switching costs no time."""
        return self.transfer <= self.block

    @property
    def visible_seconds(self) -> float:
        """Seconds of a switch that nothing hides, if all blocks are as short as the shortest; longer ones hide more."""
        return max(0.0, self.transfer - self.block)

    def __str__(self) -> str:
        where = f"stages {', '.join(map(str, self.stages))}"
        if self.is_hidden:
            return f"{where}: states move in {self.transfer:.3g} s, while a block of {self.block:.3g} s runs"
        return (
            f"{where}: states move in {self.transfer:.3g} s, and the shortest block that could hide it takes "
            f"{self.block:.3g} s; a switch costs up to {self.visible_seconds:.3g} s. Use batches "
            f"{self.transfer / self.block:.2g} times as large, a faster link to the host, fewer of these stages on "
            "one host, or keep all states resident"
        )
