"""A module that is cut by units.

This rank holds the weights of its own stages, which may be anywhere in the module.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from lightning_pipes.engine.allocator import release_free_memory
from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.private_torch import unsaved_buffers
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.ranks.user_lines import user_line
from lightning_pipes.trainer.user.remote_tensors import ParameterSlot

WHOLE_MODULE = ""
"""The path of the part that is cut, which is the module itself."""


class StageWeights(nn.Module):
    """The weights and buffers of one stage, by their names in the user's module."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._parameters.update(parameters)
        self._buffers.update(buffers)


class LayerWeights(StageWeights):
    """The weights and buffers of one layer, with access to the submodules of the layer.

    Args:
        layer: the layer.
        parameters: its parameters, by their names in the user's module.
        buffers: its buffers, by their names in the user's module.
    """

    def __init__(
        self, layer: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(parameters, buffers)
        self._find_part = layer.get_submodule  # the layer is no submodule, or its parameters would have two names

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the layer; the weights themselves for an empty name."""
        return self._find_part(target) if target else self


def weights_of_stages(module: nn.Module, layout: UnitLayout) -> nn.ModuleList | nn.Sequential:
    """Return the weights of each part. Weights that several parts use are in each of them."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    weights = [
        (
            {name: p for name, p in parameters.items() if part in layout.parts_of.get(name, ())},
            {name: b for name, b in buffers.items() if part in layout.parts_of.get(name, ())},
        )
        for part in range(layout.n_parts)
    ]
    if not layout.layers:
        return nn.ModuleList(StageWeights(*each) for each in weights)
    named = zip(layout.layers, weights, strict=True)
    return nn.Sequential(
        OrderedDict((path.rpartition(".")[2], LayerWeights(module.get_submodule(path), *each)) for path, each in named)
    )


class UnitCut(ModuleCut):
    """A LightningModule with only the weights of this rank's stages, and the weights that no stage uses.

    The other weights are absent. While a step or a hook of the user runs, stand-ins are in their places.

    Args:
        module: the whole module of the user.
        layout: specifies the stages that use each weight.
        full: the weights of each stage, from `weights_of_stages`.
        local: the stages of this rank.
        device: the device of this rank.
        spread: the description of this cut for a later run, if the weights of the module stay spread over ranks.
        moves: whether weights may move to other ranks later.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layout: UnitLayout,
        full: nn.ModuleList | nn.Sequential,
        local: Collection[int],
        device: torch.device,
        spread: tuple[Any, ...] = (),
        moves: bool = False,
    ) -> None:
        super().__init__(module, WHOLE_MODULE, full, local, device)
        self._moves = moves
        self._parts_of = layout.parts_of
        self._spread = spread
        named = (*module.named_parameters(), *module.named_buffers())
        self._by_id = {id(t): layout.parts_of[name] for name, t in named if name in layout.parts_of}
        self._slots = [
            ParameterSlot(stages[0], table, name, tensor, key)
            for key, table, name, tensor in _places(module)
            if (stages := self._stages(tensor))
        ]
        here = self._find_local()
        self._absent.add([slot for slot in self._slots if id(slot.tensor) not in here])
        self._hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._note_places(here)
        self._hide()
        self._parts = dict(module.named_modules())
        self._children = {id(part): (path, dict(part._modules)) for path, part in self._parts.items()}
        """The path and the submodules of each module, by its id."""
        self._registered = register_module_module_registration_hook(self._check_registration)
        self.scope.module_view = self.show_weights
        release_free_memory()

    def check_in_place(self) -> None:
        """Raise PipelineError if the user's code has removed or replaced modules that have weights."""
        for part, (path, before) in zip(self._parts.values(), self._children.values(), strict=True):
            if part._modules != before:
                for name in before.keys() | part._modules.keys():
                    if before.get(name) is not part._modules.get(name):
                        self._check_change(path, name, before.get(name), part._modules.get(name), "")
                before.clear()
                before.update(part._modules)

    def _check_registration(self, part: nn.Module, name: str, child: nn.Module | None) -> None:
        """Check a submodule that the user's code sets. All modules of the process call this."""
        path, before = self._children.get(id(part), ("", {name: child}))
        if before.get(name) is not child:
            self._check_change(path, name, before.get(name), child, f" at {user_line()}")

    def _check_change(self, path: str, name: str, before: nn.Module | None, now: nn.Module | None, where: str) -> None:
        """Refuse a change of a submodule if weights come or go with it.

        Raises:
            PipelineError: the old or the new submodule has weights.
        """
        given = [part for part in (before, now) if part is not None]
        if any(True for part in given for _ in chain(part.parameters(), part.buffers())):
            how = "added" if before is None else "removed" if now is None else "replaced"
            raise PipelineError(
                f"self.{f'{path}.{name}'.lstrip('.')} is {how}{where} while the weights of the module are "
                "spread over several ranks, which were divided when the run began. Make modules in __init__ or "
                "configure_model; a module can be left out by a flag that the forward reads"
            )

    def check_arrival(self, layer: int) -> None:
        """Check that the weights of a part may arrive on this rank.

        Raises:
            PlanError: the part is a whole stage, or there is a copy of its weights.
        """
        if not self._moves:
            raise PlanError(
                f"stage {layer} can't change its rank: {type(self.module).__name__} is cut by units into one part for "
                "each stage. Have PipelineStrategy(replan=True), or 'dynpipe', cut it into several"
            )
        super().check_arrival(layer)

    def hold(self, local: Collection[int], arrived: Mapping[int, LayerState], device: torch.device) -> None:
        """Hold the weights of the `local` parts from now on.

        Args:
            local: the numbers of the parts.
            arrived: the weights of the parts that have arrived. The weights of the other parts stay.
            device: the device for arrived weights.
        """
        with self.show_weights():
            leaving = {*self.local} - {*local}
            self.local = sorted(local)
            saved = {id(slot.tensor) for slot in self._slots}
            for number, state in arrived.items():
                part, values = self.full[number], dict(state.tensors_on(device))
                names = {id(t): name for name, t in (*part.named_parameters(), *part.named_buffers())}
                slots = (slot for slot in self._absent.slots if slot.layer == number)
                self._absent.take_back(
                    number, {id(slot.table[slot.name]): values[names[id(slot.tensor)]] for slot in slots}
                )
                state.put(part, device)
                for name, buffer in part.named_buffers():
                    if id(buffer) not in saved:
                        self.module.get_buffer(name).data = values[name]
            here = self._find_local()
            self._absent.add(slot for slot in self._slots_of(leaving) if id(slot.tensor) not in here)
            self._note_places(here)
            self._set_parameters((p, p) for number in arrived for p in self.full[number].parameters())

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of the names of a part's weights. It is empty, because they keep their full names."""
        return ""

    def _find_local(self) -> set[int]:
        """Return the ids of the weights and saved buffers of this rank."""
        return {id(slot.tensor) for slot in self._slots if {*self._stages(slot.tensor)} & {*self.local}}

    def _note_places(self, here: Collection[int]) -> None:
        """Note the keys and places of the weights of other ranks, and the places of this rank's parameters."""
        self._foreign_keys = {slot.key for slot in self._absent.slots}
        tables = {id(slot.table): slot.table for slot in self._absent.slots}
        names: dict[int, set[str]] = defaultdict(set)
        for slot in self._absent.slots:
            names[id(slot.table)].add(slot.name)
        self._foreign_names = [(table, names[key]) for key, table in tables.items()]
        self._owners = defaultdict(list)
        for slot in self._slots:
            if id(slot.tensor) in here:
                owner = self.module.get_submodule(slot.key.rpartition(".")[0])
                self._owners[id(slot.tensor)].append((owner, slot.name))

    @contextmanager
    def show_weights(self, whole: bool = True) -> Iterator[None]:
        """Show stand-ins for the weights of other stages in the module during the block.

        Args:
            whole: if False, show only the weights of this rank instead.
        """
        changes = whole is self._is_hidden
        if changes:
            self._show() if whole else self._hide()
        try:
            yield
        finally:
            if changes:
                self._hide() if whole else self._show()

    @contextmanager
    def show_version(self, version: WeightVersion) -> Iterator[None]:
        """Show an earlier version of the weights in the module during the block."""
        shown: list[tuple[nn.Parameter, nn.Parameter]] = []
        for stage, copies in version.parameters.items():
            live = dict(self.full[stage].named_parameters())
            shown += [(live[_name_in_module(name)], copy) for name, copy in copies.items()]
        self._set_parameters(shown)
        try:
            yield
        finally:
            self._set_parameters((live, live) for live, _ in shown)

    @contextmanager
    def show_read_only(self, ids: Collection[int]) -> Iterator[None]:
        """Show parameters of this rank in the module without gradients during the block.

        Args:
            ids: the ids of the live parameters. If the module shows another version of them, this version is kept.
        """
        own = [(owner, name, owner._parameters[name]) for each in ids for owner, name in self._owners[each]]
        for owner, name, shown in own:
            assert shown is not None, "it is a parameter of this rank"
            setattr(owner, name, nn.Parameter(shown.detach(), requires_grad=False))
        try:
            yield
        finally:
            for owner, name, shown in own:
                setattr(owner, name, shown)

    @contextmanager
    def show_buffers(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Show other buffers in the module during the block, and restore its own afterwards.

        Args:
            buffers: the buffers to show, by their names in the part of a stage.
        """
        own: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        for key, buffer in buffers.items():
            owner, _, name = _name_in_module(key).rpartition(".")
            table = self.module.get_submodule(owner)._buffers
            own.append((table, name, table[name]))
            table[name] = buffer
        try:
            yield
        finally:
            for table, name, value in own:
                table[name] = value

    def _set_parameters(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Show other parameters in place of this rank's.

        They are set as attributes, because modules such as nn.LSTM keep lists of their parameters.
        """
        for live, shown in pairs:
            for owner, name in self._owners[id(live)]:
                setattr(owner, name, shown)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The weights of the local stages by number."""
        return {number: self.full[number] for number in self.local}

    def owns(self, name: str) -> bool | None:
        """Return whether a stage of this rank has a buffer; None if no stage has it."""
        stages = self._parts_of.get(name)
        return None if stages is None else not {*stages}.isdisjoint(self.local)

    def select_own(self, state: Mapping[str, Any], outside: bool) -> dict[str, Any]:
        """Return the entries of this rank's stages.

        Args:
            state: a state dict.
            outside: whether to include the entries that no stage uses.
        """
        of_stages = {slot.key for slot in self._slots}
        return {
            key: value
            for key, value in state.items()
            if (key in of_stages and key not in self._foreign_keys) or (outside and key not in of_stages)
        }

    def find_gaps(self) -> dict[str, list[ParameterSlot]]:
        """Return the slots of each tensor by its key, with the stand-ins in them.

        The list of a tensor is empty if the tensor is on this rank.
        """
        gaps: dict[str, list[ParameterSlot]] = {slot.key: [] for slot in self._slots}
        whole = {id(table): entries for table, entries in self._hidden}
        for slot in self._absent.slots:
            gaps[slot.key].append(slot._replace(table=whole[id(slot.table)]))
        return gaps

    def take_unsaved(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers that `unsaved` returned on another rank in the modules of this rank."""
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[own_name] = buffer.to("cpu")

    def unsaved(self, layers: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the buffers of these stages that are not in the state dict, by name."""
        found = {}
        for path, part in self.module.named_modules():
            for name in unsaved_buffers(part):
                key, buffer = f"{path}.{name}".lstrip("."), part._buffers.get(name)
                if buffer is not None and {*self._parts_of.get(key, ())} & {*layers}:
                    found[key] = buffer
        return found

    def _whole_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()

    def _describe_spread(self) -> tuple[Any, ...]:
        path, _, *layout = self._spread
        return path, tuple(self.local), *layout

    def _join(self) -> None:
        self._registered.remove()
        self._show()

    def _put_back(self, slot: ParameterSlot, tensor: torch.Tensor) -> None:
        super()._put_back(slot, tensor)
        if isinstance(tensor, nn.Parameter):  # nn.LSTM keeps a list of its parameters
            setattr(self._parts[slot.key.rpartition(".")[0]], slot.name, tensor)

    def _stages(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return self._by_id.get(id(tensor), ())

    def _hide(self) -> None:
        """Take the stand-ins out of the module, which then has only the weights of this rank."""
        self._is_hidden = True
        self._hidden = [(table, {**table}) for table, _ in self._foreign_names]
        for table, names in self._foreign_names:
            for name in names:
                del table[name]

    def _show(self) -> None:
        for table, whole in self._hidden:
            shown = {**whole, **table}  # in the order of `whole`
            if table:
                table.clear()
            table |= shown
        self._is_hidden, self._hidden = False, []

    def _slots_of(self, layers: Collection[int]) -> Iterator[ParameterSlot]:
        for slot in self._slots:
            if {*self._stages(slot.tensor)} & {*layers}:
                yield slot


def _name_in_module(name: str) -> str:
    """Return the name in the user's module of the weight `name` of a stage's part."""
    return name.removeprefix("layer.")


def _places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield the key, table, name and tensor of each parameter and saved buffer of a module."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}".lstrip("."), part._parameters, name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in unsaved_buffers(part):
                yield f"{path}.{name}".lstrip("."), part._buffers, name, buffer
