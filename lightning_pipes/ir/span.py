"""Spans of samples of a batch."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Samples `start` to `stop` (exclusive) of a batch, counted along axis 0.

    Spans, not micro-batch numbers, address samples, so that stages, directions and links may cut a batch differently.
    """

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Return whether both share a sample."""
        return self.start < other.stop and other.start < self.stop

    def clip_to(self, rows: int) -> Span:
        """Return the part of this span inside a batch of `rows` samples; empty where the batch is too short."""
        return self if self.stop <= rows else Span(min(self.start, rows), rows)


def even_spans(rows: int, pieces: int) -> tuple[Span, ...]:
    """Return `pieces` spans that cover `rows` samples in order; sizes differ by one at most, larger ones are spread."""
    return tuple(Span(i * rows // pieces, (i + 1) * rows // pieces) for i in range(pieces))
