"""The layers that a batch uses, and the stages that run them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from lightning_pipes.ir.checks import PlanError
from lightning_pipes.ir.instruction import Span
from lightning_pipes.ir.plan import Plan


class Delayed(NamedTuple):
    """A delayed read: the batch steps a layer but reads an older version of it.

    Attributes:
        by: the delay in batches. The forward and backward of batch i read the version that batch i - `by` of the window
            leaves, or the first version of the window if there is no such batch.
    """

    by: int


@dataclass(frozen=True)
class LayerUse:
    """The layers that a batch uses, by name.

    The name "5" is the layer with number 5 of the model, and "5.2" is its part with the name 2.

    Attributes:
        layers: the names of the layers on each stage.
        steps: the names of the layers that the batch steps; None means all of its layers. The batch reads its other
            layers without computing their gradients, and its forward must not change them. Several batches may read
            such a layer at the same time.
        delays: the names of the layers that the batch reads with a delay, and their delays, sorted by name.
        cut: the numbers of the model's layers that each stage runs for this batch; None means the layers of the plan.

    Raises:
        PlanError: if the batch steps a layer that it does not use, or delays the read of a layer that it does not step,
            or if `cut` omits layers or changes their order.
    """

    layers: tuple[frozenset[str], ...]
    steps: frozenset[str] | None = None
    delays: tuple[tuple[str, Delayed], ...] = ()
    cut: tuple[Span, ...] | None = None

    def __post_init__(self) -> None:
        cut = self.cut
        if cut is not None and (
            len(cut) != len(self.layers)
            or cut[0].start != 0
            or any(before.stop != span.start for before, span in pairwise(cut))
            or any(span.start > span.stop for span in cut)
        ):
            raise PlanError(
                f"a batch of {len(self.layers)} stages is cut into layers {[tuple(span) for span in cut]}; every layer "
                "has to be in one stage, in order"
            )
        for name in sorted(self.steps or ()):
            if not any(name in names for names in self.layers):
                raise PlanError(f"a batch steps {name!r}, but does not use it; it uses {_join_names(self.layers)}")
        for name, delay in self.delays:
            if not any(name in self.stepped_layers(stage) for stage in range(len(self.layers))):
                raise PlanError(
                    f"a batch reads {name!r} late, but does not step it; it uses {_join_names(self.layers)}"
                )
            if delay.by < 1:
                raise PlanError(f"a batch reads {name!r} {delay.by} batches late; it must be at least 1")

    @classmethod
    def from_names(
        cls,
        names: Iterable[str],
        layers: Sequence[Span],
        steps: Iterable[str] | None = None,
        delays: Mapping[str, Delayed] | None = None,
        cut: Sequence[Span] | None = None,
    ) -> LayerUse:
        """Return the use of the named layers, with each layer on the stage that contains its number.

        Args:
            names: the names of the layers.
            layers: the layers of each stage, as in `Plan.layers`. A `cut` replaces them.
            steps: the names of the layers that the batch steps; None means all.
            delays: the delays of layers that the batch reads with a delay, by name.
            cut: the layers of each stage for this batch; None means the layers of the plan.

        Raises:
            PlanError: if no stage contains one of the layers, or for the same reasons as the constructor.
        """
        layers = layers if cut is None else cut
        stages: list[set[str]] = [set() for _ in layers]
        for name in names:
            number = name.partition(".")[0]
            found = [s for s, (a, b) in enumerate(layers) if number.isdecimal() and a <= int(number) < b]
            if not found:
                last = max((b for _, b in layers), default=0) - 1
                raise PlanError(f"a batch uses layer {name!r}, which does not exist; layers are '0' to '{last}'")
            stages[found[0]].add(name)
        late = tuple(sorted((delays or {}).items()))
        own = None if cut is None else tuple(cut)
        return cls(tuple(map(frozenset, stages)), None if steps is None else frozenset(steps), late, own)

    @classmethod
    def from_plan(cls, plan: Plan) -> LayerUse:
        """Return the use of all layers. If the plan has no layer numbers, each stage counts as one layer."""
        layers = plan.layers or [Span(s, s + 1) for s in range(plan.n_stages)]
        return cls(tuple(frozenset(map(str, range(*span))) for span in layers))

    def with_cut(self, cut: Sequence[Span]) -> LayerUse:
        """Return the same layers, assigned to the stages of another cut.

        Raises:
            PlanError: if the cut omits one of the layers.
        """
        return LayerUse.from_names((n for names in self.layers for n in names), (), self.steps, dict(self.delays), cut)

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the layers, steps, delays and cut. It is the same in every process."""
        steps = None if self.steps is None else sorted(self.steps)
        return zlib.crc32(repr(([sorted(names) for names in self.layers], steps, self.delays, self.cut)).encode())

    def stepped_layers(self, stage: int) -> frozenset[str]:
        """Return the names of the layers on `stage` that the batch steps."""
        return self.layers[stage] if self.steps is None else self.layers[stage] & self.steps


def _join_names(layers: Iterable[frozenset[str]]) -> str:
    return ", ".join(sorted(name for names in layers for name in names)) or "none"
