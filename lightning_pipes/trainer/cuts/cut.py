"""The base class of the user's module while this rank has only some of its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.private_torch import shield_copies_on_write, unsaved_buffers
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.user.remote_tensors import HookScope, ParameterSlot, RemoteParameters
from lightning_pipes.trainer.weights.spread import INCOMPLETE_ATTRIBUTE, SPREAD_ATTRIBUTE, on_meta


class ModuleCut(ABC):
    """A LightningModule that is cut into layers, of which this rank has some.

    A layer is a layer of a container, or a sequence of units. The memory of the layers of other ranks is released, and
    tensors without values stand in for their weights. `restore` makes the module whole again, with the same Parameter
    objects as before unless the run has failed or `stays_spread` is True.

    Subclasses differ in how the module is cut.

    Attributes:
        keys: the keys of the state dict of the whole module.
        scope: specifies which of the user's hooks is running.
        stays_spread: whether the layers of other ranks remain on `meta` when the run ends. This is the case if a tensor
            of the layers was on `meta` when the run began.
        is_whole_elsewhere: whether the layers of other ranks remain on `meta` on this rank only, and the first rank has
            the whole module when the run ends.

    Args:
        module: the user's whole module.
        path: the path of the container that is cut, or an empty path for the whole module.
        full: all layers.
        local: the numbers of the layers on this rank.
        device: the device of this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        path: str,
        full: Layers,
        local: Collection[int],
        device: torch.device,
    ) -> None:
        self.module = module
        self.path = path
        self.full = full
        self.local = sorted(local)
        self.keys = list(module.state_dict())
        self.scope = HookScope(device)
        self.stays_spread = any(t.is_meta for t in self._whole_tensors())
        self.is_whole_elsewhere = False
        self._absent = RemoteParameters(self.scope)

    @abstractmethod
    def owns(self, name: str) -> bool | None:
        """Return whether this rank has the valid value of a buffer outside of the layers.

        None means that all ranks have the same value.

        Args:
            name: the name of the buffer in the module.
        """

    @abstractmethod
    def check_in_place(self) -> None:
        """Raise PipelineError if the user's code has replaced the layers by other objects."""

    @abstractmethod
    def hold(self, local: Collection[int], arrived: Mapping[int, LayerState], device: torch.device) -> None:
        """Change the layers of this rank.

        Args:
            local: the numbers of the layers that this rank has afterwards. Other layers are released.
            arrived: the states of the layers that have moved to this rank, by number.
            device: the device on which the arrived layers are placed.
        """

    @abstractmethod
    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of the names of a layer's weights in the user's module."""

    @abstractmethod
    def select_own(self, state: Mapping[str, Any], outside: bool) -> dict[str, Any]:
        """Return the entries of this rank's layers in a state dict.

        Args:
            state: the state dict.
            outside: whether to include the entries that belong to no layer.
        """

    @abstractmethod
    def unsaved(self, layers: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the buffers of these layers that state dicts do not contain, by name."""

    @abstractmethod
    def take_unsaved(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set buffers of layers of other ranks to the values that `unsaved` returned on these ranks, on the CPU."""

    @abstractmethod
    def find_gaps(self) -> dict[str, list[ParameterSlot]]:
        """Return the slots that lack a tensor of another rank, by the key of the tensor.

        All keys of the layers are listed. The list of slots is empty if the tensor is on this rank.
        """

    @abstractmethod
    def _whole_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are distributed over ranks."""

    @abstractmethod
    def _slots_of(self, layers: Collection[int]) -> Iterator[ParameterSlot]:
        """Yield the slots of the parameters and saved buffers of these layers. Other buffers keep their memory, and
        `take_unsaved` updates their values.
        """

    @abstractmethod
    def _describe_spread(self) -> tuple[Any, ...]:
        """Return the value of the module's attribute `SPREAD_ATTRIBUTE` if the layers stay distributed."""

    @abstractmethod
    def _join(self) -> None:
        """Give the module the modules and the tables of weights that it had when it was whole."""

    @contextmanager
    def without_layers(self) -> Iterator[None]:
        """Remove all layers from the module while the block runs, if the module refers to them by one container."""
        yield

    def replaced_modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs of a module that is in use while the module is cut, and the original that it replaces."""
        return []

    def restore(self, ended: bool) -> None:
        """Make the module whole again.

        Args:
            ended: whether the run has ended normally, so that the layers of other ranks have received their values
                unless `stays_spread` is True. Otherwise, the layers of other ranks are placed on `meta`.
        """
        self._join()
        self._absent.put_back()
        vars(self.module).pop(SPREAD_ATTRIBUTE, None)
        for slot in self._absent.slots:
            whole = ended and not (self.stays_spread and slot.tensor.untyped_storage().nbytes() == 0)
            self._put_back(slot, slot.tensor if whole else on_meta(slot.table[slot.name]))
        if ended and self.stays_spread:
            self.module.__dict__[SPREAD_ATTRIBUTE] = self._describe_spread()
        elif not ended and self._absent.slots:
            self.module.__dict__[INCOMPLETE_ATTRIBUTE] = True

    def _put_back(self, slot: ParameterSlot, tensor: torch.Tensor) -> None:
        """Put a tensor into its slot of the whole module."""
        slot.table[slot.name] = tensor

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter of the whole module has its values only on other ranks."""
        return tensor in self._absent

    def check_arrival(self, layer: int) -> None:
        """Check that a layer can move to this rank.

        Raises:
            PlanError: see `RemoteParameters.check`.
        """
        self._absent.check(layer)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The local layers by number."""
        return {number: self.full[number] for number in self.local}

    def local_state(self, outside: bool) -> dict[str, Any]:
        """Return this rank's part of the module's state dict, which `select_own` selects.

        The entries can be saved and sent without giving copies on write of the module separate memory.
        """
        return shield_copies_on_write(self.select_own(self.module.state_dict(), outside))

    def in_order(self, parts: Collection[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the parts of all ranks into one state dict, with the keys in the order of the whole module."""
        merged = {key: value for part in parts for key, value in part.items()}
        ordered = {key: merged.pop(key) for key in self.keys if key in merged}
        return {**ordered, **merged}

    def tensors(self, layers: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield key and value of each parameter and saved buffer of these layers, in the order of the whole module.

        A tensor that is used in several places is yielded once. Tensors of layers on other ranks have no values.
        """
        seen: set[int] = set()
        for slot in self._slots_of(layers):
            if id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                yield slot.key, slot.tensor

    def list_parameters(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the name and the parameter for the id of each parameter that the module currently shows.

        If the module shows the stand-in of a parameter on another rank, as in hooks, the parameter is the original
        object of the whole module.
        """
        absent = {id(slot.table[slot.name]): slot.tensor for slot in self._absent.slots}
        return {id(p): (name, absent.get(id(p), p)) for name, p in self.module.named_parameters()}

    def name_tensors(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the name and the tensor of each parameter and saved buffer, by the id of the tensor.

        Tensors of other ranks are listed under the ids of their stand-ins, and also under the ids of the original
        objects, to which user code may have kept references.
        """
        roots = [("", self.module), *((self.path, full) for _, full in self.replaced_modules())]
        named = {
            id(tensor): (f"{path}.{name}".lstrip("."), tensor)
            for prefix, root in roots
            for path, part in root.named_modules(prefix=prefix)
            for table, skipped in ((part._parameters, ()), (part._buffers, unsaved_buffers(part)))
            for name, tensor in table.items()
            if tensor is not None and name not in skipped
        }
        return {**named, **{id(s.tensor): (s.key, s.table.get(s.name, s.tensor)) for s in self._absent.slots}}
