"""Weight versions: a forward that runs ahead of an update must be differentiated with the weights that it has read.

A version is a copy of the live parameters. It is made at the first forward after an update and is never written to, so
the tensors that autograd has saved stay valid while the optimizer changes the live parameters. Assigning to
`param.data` instead would silently give wrong gradients.

Layers that batches read late have versions by batch:

    STEP 3 -> copy 3 --.            batch 7 reads layer 0 as batch 3 has left it: forward and backward use copy 3,
    STEP 4 -> copy 4    `-> F7 B7   and its gradient is applied to the newest weights at STEP 7, after STEP 6
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lightning_pipes.engine.compute.layer_parameters import LayerParameters
from lightning_pipes.engine.residency.binding import Binding
from lightning_pipes.engine.residency.layer_memory import VersionMemory
from lightning_pipes.ir import LayerUse, PipelineError

_NOTHING = nullcontext()
Change = Callable[[nn.Parameter], torch.Tensor | None]
"""Returns the predicted change of a parameter by one update, or None if no prediction is available."""


@dataclass(eq=False)
class WeightVersion:
    """A version of parameters, by layer and name, which has gradients of its own.

    Attributes:
        parameters: the parameters by the number of their layer and by their name in the layer.
        late: whether the version covers only some layers of one batch and keeps its gradients until the step of that
            batch.
        key: the key of the version among swapped states, if it is swapped.
    """

    parameters: dict[int, dict[str, nn.Parameter]]
    late: bool = False
    key: Hashable = None

    def bind_to(self, device: torch.device) -> Binding:
        """Return a binding of the parameters to `device`.

        With it, the parameters can be moved to the host while no computation uses them; see `Swap`.
        """
        named = {f"{n}.{name}": p for n, each in self.parameters.items() for name, p in each.items()}
        return Binding.from_parameters(named, device)


class WeightVersions:
    """The weight versions that forwards in flight have read.

    Args:
        layers: the live layers by number.
        max_versions: the maximum number of versions that exist at the same time. If it is 1, the live parameters are
            used and nothing is copied.
    """

    def __init__(self, layers: Mapping[int, nn.Module], max_versions: int) -> None:
        self.max_versions = max_versions
        self._layers = layers
        self._newest: WeightVersion | None = None
        self._predicted: dict[int, WeightVersion] = {}

    def current_version(self) -> WeightVersion | None:
        """Return the version that a forward reads now; None stands for the live parameters."""
        if self.max_versions == 1:
            return None
        if self._newest is None:
            self._newest = self._make_version(self._read)
        return self._newest

    def predict_version(self, updates: int, change: Change) -> WeightVersion | None:
        """Return the version that a forward reads now, extrapolated by the updates that its batch will miss.

        Args:
            updates: the number of updates before the update of this batch.
            change: returns the change of a parameter by one update.
        """
        if self.max_versions == 1 or not updates:
            return self.current_version()
        if updates not in self._predicted:
            self._predicted[updates] = self._make_version(
                lambda p: self._read(p) if (each := change(p)) is None else p.detach() + updates * each
            )
        return self._predicted[updates]

    def _make_version(self, read: Callable[[nn.Parameter], torch.Tensor]) -> WeightVersion:
        with torch.no_grad():
            copies = {
                number: {
                    name: nn.Parameter(read(p), requires_grad=p.requires_grad) for name, p in layer.named_parameters()
                }
                for number, layer in self._layers.items()
            }
        return WeightVersion(copies, key=self._next_key())

    def on_device(self, version: WeightVersion | None) -> AbstractContextManager[None]:
        """Return a context in which the weights of `version` are on the device."""
        return _NOTHING

    def before_update(self, others: Iterable[WeightVersion | None]) -> None:
        """Prepare for a change of the live parameters while `others` will still be read."""

    def collect_gradients(self, versions: Iterable[WeightVersion | None]) -> None:
        """Move the gradients of versions to the live parameters, and add them to existing gradients."""
        if self.max_versions == 1:
            return
        for version in {id(v): v for v in versions if v is not None and not v.late}.values():
            for number, copies in version.parameters.items():
                for name, live in self._layers[number].named_parameters():
                    gradient = copies[name].grad
                    if gradient is not None:
                        live.grad = gradient if live.grad is None else live.grad + gradient
                        copies[name].grad = None

    def after_update(self) -> None:
        """Record that the live parameters have changed."""
        self._newest = None
        self._predicted.clear()

    def _read(self, live: nn.Parameter) -> torch.Tensor:
        return live.detach().clone()

    def _next_key(self) -> Hashable:
        return None


class OffloadedVersions(WeightVersions):
    """The weight versions of a stage that runs forward again before backward.

    Some of the versions are on the device, and the others are on the host. This is possible because nothing refers to
    the weights between a forward and its backward. The live parameters themselves are the newest version. They are
    copied only before they change, and only if a batch that has read them still needs its backward. The number of
    copies and live parameters together never exceeds the number of versions in the plan.

        F7      reads the live parameters, which are version 5
        B5      reads version 3, which is on the device; version 4 is loaded meanwhile
        STEP 5  drops version 3; version 5 is copied and goes to the host; the live parameters become version 6

    Args:
        layers: the live layers by number.
        max_versions: the number of versions in the plan.
        stage: the number of the stage.
        memory: the memory that loads and offloads the versions.
        device: the device of the stage.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        max_versions: int,
        stage: int,
        memory: VersionMemory,
        device: torch.device,
    ) -> None:
        super().__init__(layers, max_versions)
        self._stage, self._memory, self._device = stage, memory, device
        self._made = 0
        self._changes: list[int] = []  # version counters of the live parameters at the first read of the newest version
        self._kept: set[Hashable] = set()

    def current_version(self) -> WeightVersion | None:
        if self._newest is None:
            self._changes = self._change_counts()
        return super().current_version()

    @contextmanager
    def on_device(self, version: WeightVersion | None) -> Iterator[None]:
        """Keep the weights of `version` on the device inside the block, and start to load the next versions.

        Raises:
            PipelineError: the live parameters were changed by code other than the optimizers.
        """
        if version is not None and version.key in self._kept:
            with self._memory.lease_version(version.key):
                yield
            return
        self._check_unchanged()
        self._memory.look_ahead()
        yield

    def before_update(self, others: Iterable[WeightVersion | None]) -> None:
        self._check_unchanged()
        wanted = {version.key: version for version in others if version is not None}
        for key in self._kept - wanted.keys():
            self._memory.drop_version(key)
        self._kept &= wanted.keys()
        if self._newest is not None and self._newest.key in wanted:
            self._memory.add_version(self._newest.key, self._newest.bind_to(self._device))
            self._kept.add(self._newest.key)
        self._memory.look_ahead()

    def _read(self, live: nn.Parameter) -> torch.Tensor:
        return live.detach()

    def _next_key(self) -> Hashable:
        self._made += 1
        return f"weights {self._made} of stage {self._stage}"

    def _change_counts(self) -> list[int]:
        return [p._version for layer in self._layers.values() for p in layer.parameters()]

    def _check_unchanged(self) -> None:
        if self._newest is not None and self._change_counts() != self._changes:
            raise PipelineError(
                f"weights of stage {self._stage} were changed between a batch's forward and its backward, and not by "
                "an optimizer's step. MemorySwap does not copy the newest weights, so gradients would be wrong. Change "
                "weights where no batch is in flight, as at the end of an epoch, or leave MemorySwap out"
            )


class _Place(NamedTuple):
    """The place of a parameter: the number of its layer, its name in this layer, and the live parameter."""

    layer: int
    name: str
    live: nn.Parameter


class LateWeights:
    """The versions of the layers of one stage that batches read late, between two flushes.

    A layer has as many versions as the batches in flight may read. With a constant delay d, these are at most d + 1
    versions in addition to the live weights.

    Args:
        stage: the number of the stage.
        layers: the layers of the stage by number.
        parts: finds the parameters of layers by the names that batches use.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module], parts: LayerParameters) -> None:
        self._stage, self._layers, self._parts = stage, layers, parts
        self._places: dict[str, list[_Place]] = {}
        self._copies: dict[str, deque[tuple[int, list[torch.Tensor]]]] = {}  # each with the batch that stepped it
        self._reads: dict[int, dict[str, int]] = {}  # versions by layer, for batches that have not begun
        self._latest: dict[str, int] = {}
        self._made: dict[int, WeightVersion] = {}
        self._steps: dict[int, frozenset[str]] = {}

    def enter(self, batch: int, use: LayerUse | None) -> None:
        """Register the next batch and the layers that it uses."""
        delays = () if use is None else [each for each in use.delays if each[0] in use.layers[self._stage]]
        here = {name: max(-1, batch - delay.by) for name, delay in delays}
        for name in here:
            if name not in self._places:
                self._places[name] = self._find_places(name)
                self._copies[name] = deque()
                self._keep(name, -1)
        self._reads[batch] = here
        self._latest |= here
        self._steps[batch] = frozenset(here)
        self._drop_old()

    def make_version(self, batch: int) -> WeightVersion | None:
        """Return the weights that the batch reads, which also collect its gradients.

        Returns:
            The version, or None if the batch reads no layer of this stage late.
        """
        reads = self._reads.pop(batch, {})
        made: dict[int, dict[str, nn.Parameter]] = {}
        for name, read in reads.items():
            tensors = [kept for left_by, kept in self._copies[name] if left_by <= read][-1]
            for place, tensor in zip(self._places[name], tensors, strict=True):
                own = nn.Parameter(tensor, requires_grad=place.live.requires_grad)
                made.setdefault(place.layer, {})[place.name] = own
        if made:
            self._made[batch] = WeightVersion(made, late=True)
        return self._made.get(batch)

    def gradients(self, batch: int) -> dict[int, torch.Tensor | None]:
        """Return the gradients of the parameters that the batch has read late, by the ids of the live parameters."""
        version = self._made.get(batch)
        if version is None:
            return {}
        places = (place for name in self._steps[batch] for place in self._places[name])
        return {id(place.live): version.parameters[place.layer][place.name].grad for place in places}

    def before_step(self, batch: int) -> None:
        """Move the gradients of the batch to the live parameters."""
        version = self._made.pop(batch, None)
        if version is not None:
            for name in self._steps[batch]:
                for place in self._places[name]:
                    place.live.grad = version.parameters[place.layer][place.name].grad

    def after_step(self, batch: int) -> None:
        """Keep a copy of the live weights, which the batch has just stepped."""
        for name in self._steps.pop(batch, ()):
            self._keep(name, batch)
        self._drop_old()

    def _find_places(self, name: str) -> list[_Place]:
        number = int(name.partition(".")[0])
        mine = {id(p) for p in self._parts.parameters([name])}
        return [_Place(number, at, p) for at, p in self._layers[number].named_parameters() if id(p) in mine]

    def _keep(self, name: str, batch: int) -> None:
        self._copies[name].append((batch, [place.live.detach().clone() for place in self._places[name]]))

    def _drop_old(self) -> None:
        """Drop the versions that no batch will read. Later batches never read older versions than earlier batches."""
        for name, copies in self._copies.items():
            if len(copies) > 1:
                waiting = (reads[name] for reads in self._reads.values() if name in reads)
                oldest = min(waiting, default=self._latest[name])  # waiting batches are older than the latest
                while len(copies) > 1 and copies[1][0] <= oldest:
                    copies.popleft()


MAX_COPIED_ELEMENTS = 4096
"""The number of elements up to which a buffer is always copied, whether or not a forward has changed it before."""


class BuffersBefore:
    """Keeps the values of buffers before the first of two forwards, so that the second forward reads the same values.

    The first forward of a layer shows which of its large buffers change. Later forwards copy only these large buffers.
    If another one changes later, a warning is issued.
    """

    def __init__(self) -> None:
        self._changing: dict[int, set[str]] = {}
        self._kept: dict[Hashable, dict[str, torch.Tensor]] = {}
        self._taken: dict[Hashable, dict[str, torch.Tensor]] = {}

    @contextmanager
    def keep_before(self, key: Hashable, number: int, layer: nn.Module) -> Iterator[None]:
        """Keep the previous values of buffers that a layer's forward changes inside the block.

        The values are kept until `take_kept` is called with `key`.
        """
        now = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
        known = self._changing.get(number)
        copies = {
            name: buffer.clone()
            for name, (buffer, _) in now.items()
            if known is None or name in known or buffer.numel() <= MAX_COPIED_ELEMENTS
        }
        yield
        changed = {
            name
            for name, buffer in layer.named_buffers()
            if name in now and (buffer is not now[name][0] or buffer._version != now[name][1])
        }
        lost = sorted(name for name in changed - copies.keys() if now[name][0]._version != now[name][1])
        if lost:
            warnings.warn(
                f"layer {number} changes its buffer {lost[0]!r} in place for the first time after the first batch. In "
                "this batch, the recomputed forward reads the new value, so its gradients may differ from one process. "
                "Later batches are not affected. Set recompute=False to avoid the second forward",
                stacklevel=2,
            )
        self._changing[number] = (known or set()) | changed
        if changed:
            self._kept[key] = {name: copies.get(name, now[name][0]) for name in changed}

    def keep_copies(self, key: Hashable, buffers: Mapping[str, torch.Tensor]) -> None:
        """Keep copies of these buffers until `take_kept` is called with `key`."""
        self._kept[key] = {name: buffer.clone() for name, buffer in buffers.items()}

    def take_kept(self, key: Hashable) -> dict[str, torch.Tensor]:
        """Remove the buffers that were kept under `key`, and return them."""
        self._taken[key] = self._kept.pop(key, {})
        return self._taken[key]

    def forget_taken(self) -> None:
        """Discard the buffers that `take_kept` has returned."""
        self._taken.clear()

    def put_back(self, key: Hashable = None) -> None:
        """Keep buffers that `take_kept` has returned again, because a run is repeated.

        Args:
            key: the key of the buffers; by default, all buffers are kept again.
        """
        keys = [key] if key is not None else list(self._taken)
        self._kept.update({each: self._taken[each] for each in keys if each in self._taken})
