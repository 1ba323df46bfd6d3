"""Detection of tensors that a layer stores in an object that it shares with layers of other stages.

On a single process, the other layers find such a tensor in the object. In a pipeline, every process has its own copy of
the object, so that a later layer would find no tensor there, or an outdated one. A shared object alone is not an error,
because it may be a configuration, an activation without weights, or a table that all layers compute identically.
Therefore, the changes of shared objects are checked while the first batches run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.data.batches import checksum_batch
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.user.user_objects import CONTAINER_TYPES, list_entries, list_reachable

_HIDDEN_STATE_WAY_OUT = (
    "in a pipeline each process has its own copy of it. Pass the tensor along: let layers take and return tuples or "
    "dicts"
)


@dataclass
class _Shared:
    """An object that layers of several stages share, or that a layer and the code around the layers share.

    Attributes:
        name: the expression with which user code accesses the object where it was found first.
        thing: the object.
        layers: the numbers of the layers that have a reference to the object.
        outside: whether the code around the layers has a reference to the object.
        before: id and checksum of each tensor in the object before the batch, by the place of the tensor.
        by_layers: the places at which a layer has stored another tensor.
    """

    name: str
    thing: Any
    layers: tuple[int, ...]
    outside: bool
    before: dict[str, tuple[int, str]] = field(default_factory=dict)
    by_layers: set[str] = field(default_factory=set)


class _Change(NamedTuple):
    """The change of a tensor in a shared object during a watched batch.

    Attributes:
        checksum: the checksum of the tensor after the batch.
        shape: the shape of the tensor.
        by_layer: whether a layer has stored the tensor, or whether the tensor was changed in place.
    """

    checksum: str
    shape: tuple[int, ...]
    by_layer: bool


CheckLater = Callable[[Callable[[], bool], Callable[[], object], int], None]


class HiddenState:
    """Watches the objects that layers of several stages share, in the first batch of training and of evaluation.

    Args:
        module: the user's whole module.
        path: the path of the pipelined container in the module.
        holdings: the stage and the rank of each layer.
        control: the control channel of the pipeline.
        check_later: defers a check, see `Connections.check_later`.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        path: str,
        holdings: Holdings,
        control: Control,
        check_later: CheckLater,
    ) -> None:
        self._holdings = holdings
        self._control = control
        self._check_later = check_later
        self._things: dict[int, tuple[str, Any]] = {}
        self._having: dict[int, list[int]] = defaultdict(list)
        layers = module.get_submodule(path)
        for number, (name, layer) in enumerate(layers._modules.items()):
            for where, thing in list_reachable(layer, f"self.{path}.{name}"):
                self._things.setdefault(id(thing), (where, thing))
                self._having[id(thing)].append(number)
        self._outside = {id(thing) for _, thing in list_reachable(module, "self", skip=layers)}
        self.watch_again()

    def watch_again(self) -> None:
        """Watch the next batches again, because layers have moved and other stages may share objects now."""
        stages = self._stages
        self._shared = [
            _Shared(name, thing, tuple(self._having[key]), key in self._outside)
            for key, (name, thing) in self._things.items()
            if key in self._outside or len({stages[n] for n in self._having[key]}) > 1
        ]
        self._seen: set[bool] = set()
        self._watching = False

    @property
    def objects_of_layers(self) -> frozenset[int]:
        """The ids of the objects to which layers have references."""
        return frozenset(self._having)

    @property
    def _stages(self) -> Sequence[int]:
        return self._holdings.stage_of_layer

    @property
    def _ranks(self) -> Sequence[int]:
        return self._holdings.global_rank_of_layer

    def is_due(self, training: bool) -> bool:
        """Return whether the next batch of training (if `training`) or evaluation is watched."""
        return training not in self._seen

    @contextmanager
    def batch(self, training: bool) -> Iterator[None]:
        """Watch the shared objects while the block runs one batch. Collective.

        After a training batch, the check is passed to `check_later`.

        Args:
            training: whether it is a batch of training.

        Raises:
            PipelineError: the code around the layers has changed a tensor in a shared object, or the tensors that
                layers have stored in it differ between ranks.
        """
        self._watching = training not in self._seen
        for shared in self._shared if self._watching else ():
            shared.by_layers.clear()
            shared.before = {place: (id(t), checksum_batch(t)) for place, t in _tensors(shared.thing).items()}
        yield
        if self._watching and self._shared:
            self._compare(training)
        self._seen.add(training)
        self._watching = False

    def layer(self, number: int, layer: nn.Module) -> AbstractContextManager[None] | None:
        """Return a context for the forward pass of a layer, or None if the current batch is not watched.

        Raises:
            PipelineError: raised by the context if the layer stores a tensor that requires gradients in an object that
                layers of other stages share.
        """
        return self._watched(number, layer) if self._watching else None

    @contextmanager
    def _watched(self, number: int, layer: nn.Module) -> Iterator[None]:
        found = [shared for shared in self._shared if number in shared.layers]
        before = [{id(t) for t in _tensors(shared.thing).values()} for shared in found]
        try:
            yield
        except (LookupError, AttributeError, TypeError) as error:  # as for a missing entry
            for shared in found:
                if self._others(shared, number):
                    raise PipelineError(
                        f"{self._named(number)} ended with {type(error).__name__}: {error}. If it looks for a tensor "
                        f"that {self._others(shared, number)} left in {shared.name}: {_HIDDEN_STATE_WAY_OUT}"
                    ) from error
            raise
        for shared, known in zip(found, before, strict=True):
            for place, tensor in _tensors(shared.thing).items():
                if id(tensor) not in known:
                    shared.by_layers.add(place)
                    if tensor.requires_grad and self._others(shared, number) and not shared.outside:
                        raise self._error(shared, place, tuple(tensor.shape), self._named(number), number)

    def _compare(self, training: bool) -> None:
        changes = self._control.start_all_gather([_changes(s) for s in self._shared])
        if training:
            self._check_later(changes.has_arrived, lambda: self._check(changes()), 1)
        else:
            self._check(changes())

    def _check(self, found: Sequence[Sequence[Mapping[str, _Change]]]) -> None:
        by_rank = dict(zip(self._control.ranks, found, strict=True))
        for at, shared in enumerate(self._shared):
            ranks = sorted({self._ranks[n] for n in shared.layers} | ({self._ranks[-1]} if shared.outside else set()))
            for place in sorted({place for changes in by_rank.values() for place in changes[at]}):
                changes = {rank: changes[at][place] for rank, changes in by_rank.items() if place in changes[at]}
                shape = next(iter(changes.values())).shape
                if shared.outside and any(change.by_layer for change in changes.values()):
                    continue  # it is sent to the code after the layers, see `LeftValues`
                if not all(change.by_layer for change in changes.values()):
                    raise self._error(shared, place, shape, "the code around the layers")
                if len({changes[rank].checksum if rank in changes else "" for rank in ranks}) > 1:
                    raise self._error(
                        shared, place, shape, f"a layer on rank {' and one on rank '.join(map(str, changes))}"
                    )

    def _error(
        self, shared: _Shared, place: str, shape: tuple[int, ...], culprit: str, number: int | None = None
    ) -> PipelineError:
        return PipelineError(
            f"{culprit} left a tensor of shape {shape} in {shared.name}{place}, which {self._others(shared, number)} "
            f"may read; {_HIDDEN_STATE_WAY_OUT}. If no other layer needs it, give each layer an object of its own"
        )

    def _others(self, shared: _Shared, number: int | None) -> str:
        """Return the names of the layers on other stages that share the object, or an empty string."""
        others = [n for n in shared.layers if number is None or self._stages[n] != self._stages[number]]
        names = [self._named(n) for n in others[:5]] + ["more"] * (len(others) > 5)
        if shared.outside and number is not None and self._stages[number] != self._stages[-1]:
            names.append("the code after the layers")
        return " and ".join(names)

    def _named(self, number: int) -> str:
        return f"layer {number} (rank {self._ranks[number]})"


def _changes(shared: _Shared) -> dict[str, _Change]:
    found = {}
    for place, tensor in _tensors(shared.thing).items():
        key, before = shared.before.get(place, (0, ""))
        checksum = checksum_batch(tensor)
        if checksum != before:
            by_layer = place in shared.by_layers or key == id(tensor)  # in place, like a running average
            found[place] = _Change(checksum, tuple(tensor.shape), by_layer)
    return found


def _tensors(thing: Any, depth: int = 3) -> dict[str, torch.Tensor]:
    """Return the tensors in an object and in its containers by their place.

    Modules and other objects in it are not searched, because they are separate shared objects.
    """
    found: dict[str, torch.Tensor] = {}
    for place, entry in list_entries(thing):
        if isinstance(entry, torch.Tensor):
            if not entry.is_meta:  # a tensor on meta belongs to a layer on another rank
                found[place] = entry
        elif depth and isinstance(entry, CONTAINER_TYPES):
            found.update({f"{place}{more}": t for more, t in _tensors(entry, depth - 1).items()})
    return found
