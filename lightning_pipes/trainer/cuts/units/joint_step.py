"""A step that calls backward and optimizers itself.

All stages run it together to its end, and one stage at a time computes:

units      run on the stage that has their weights; the other stages wait, and then skip them
values     are sent in a transfer when a unit needs them on a stage that has not made them
gradients  return through the transfers, the last one first; each stage has the graph between its own transfers
pauses     occur around optimizers, clipping and their hooks, which all stages run at the same place of the step

Nothing is computed twice, random numbers are drawn from one stream, and gradients of gradients are the same as in one
process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_pipes.engine.private_torch import gradient_hooks, has_gradient_hooks
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.differentiation import Differentiation
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.lazy_step import LazyStep
from lightning_pipes.trainer.cuts.units.mode import Function
from lightning_pipes.trainer.cuts.units.recording import GRAPH_FUNCTIONS
from lightning_pipes.trainer.cuts.units.trace import Done, Made, map_leaves, tensors_of, tensors_of_call
from lightning_pipes.trainer.cuts.units.traced_step import refuse_unit
from lightning_pipes.trainer.cuts.units.values import storage_of
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.user.parameter_hooks import ParameterHooks
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor, find_written

_UNITS_MESSAGE, _PLACE_MESSAGE, _FETCH_MESSAGE = range(3)
"""Messages of the computing stage.

All of them contain the units that it has run. In addition, they contain the stage that computes next, the place of a
pause, or the values that it needs, respectively.
"""


class _RunUnit(NamedTuple):
    """A unit that the stage `stage` has run.

    Attributes:
        done: the record of the unit.
        stage: the stage that has run it.
        changed: the keys of earlier values that it has changed.
        shared: the keys of the values that lie in the memory of weights or of their gradients.
    """

    done: Done
    stage: int
    changed: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass
class _Transfer:
    """Values that the stage `home` has sent to the stage `to`.

    Attributes:
        home: the sender.
        to: the receiver.
        edges: on `home`, the places of the values in its graph; None for values without gradients.
        leaves: on `to`, the received values; None for values without gradients.
    """

    home: int
    to: int
    edges: list[Any] = field(default_factory=list)
    leaves: list[torch.Tensor | None] = field(default_factory=list)


class JointStep(LazyStep):
    """Runs steps of a module together with the other stages, each with its own weights. Collective.

    Args:
        module: the user's module, with the weights of this stage.
        layout: specifies the part that has a weight.
        stage: the number of this rank's stage. A rank has one stage here.
        stages: the stage of each part of the layout.
        device: the device of this rank.
        control: collectives of all stages.
        ranks: the global rank of each stage.
        generators: the module's own random generators.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: UnitLayout,
        stage: int,
        stages: Sequence[int],
        device: torch.device,
        control: Control,
        ranks: Sequence[int],
        generators: ModuleGenerators,
    ) -> None:
        super().__init__(module, layout, stage, device, generators=generators)
        self._stages = stages
        self._control = control
        self._ranks = ranks
        self._hooks = ParameterHooks(device)
        self._places: dict[int, int] = {}
        self._is_running = False
        self._reset()

    def _reset(self) -> None:
        self._turn, self._paused_there = 0, False
        self._coming: deque[_RunUnit] = deque()
        self._leaving: list[_RunUnit] = []
        self._home: dict[int, int] = {}
        self._known: set[int] = set()
        self._shared: set[int] = set()
        self._place = ""
        self._asked: tuple[int, list[int]] | None = None
        self._transfers: list[_Transfer] = []
        self._generators = self._random_state()

    def run_together(
        self, step: Callable[..., Any], batch: Any, arguments: Sequence[Any], keep: Any, mark: Any
    ) -> tuple[Any, Any]:
        """Run a step together with the other stages.

        All tensors that the user's code still holds have values afterwards.

        Args:
            step: the user's step.
            batch: the batch.
            arguments: further arguments of the step.
            keep: an object that is kept alive until the end, such as a list that the step fills.
            mark: a few numbers that identify the batch.

        Returns:
            The result of the step with values, on every stage, and the `mark` of the last stage.

        Raises:
            PipelineError: the stages take different paths through the step, or the step can't be run in stages.
        """
        self.begin(batch)
        if not self._places:
            for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
                if parts := self._layout.parts_of.get(name):
                    self._places[id(tensor)] = self._stages[parts[0]]
                elif self.values.is_placed(tensor):  # the recorded step does not use it: all ranks have it
                    self._places[id(tensor)] = len(self._ranks) - 1
        self._reset()
        self._is_running = True
        try:
            with self:
                out = step(batch, *arguments)
                self._meet("reached its end")
            last_mark = self._settle(mark)
        finally:
            self._is_running = False
            self.end()
            self._reset()
        return out, last_mark

    # ---- pauses

    @contextmanager
    def pause_units(self) -> Iterator[None]:
        """Run the block on all stages at the same place of the step. No call in the block is a unit."""
        if not self._is_running or self._inside:
            yield
            return
        self._meet("reached an optimizer")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._forget_shared()

    @property
    def is_computing(self) -> bool:
        """Whether units of a step are running, outside of pauses."""
        return self._is_running and not self._inside

    def _forget_shared(self) -> None:
        """Forget values of other stages in the memory of weights and gradients, which may have changed."""
        self._known.difference_update([key for key in self._shared if self._home[key] != self._stage])

    def resume_units(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that calls `function` during a pause, such that calls in it are units again."""

        def run() -> Any:
            if not self._is_running:
                return function()
            before, self._inside = self._inside, 0
            self._forget_shared()
            try:
                out = function()
                self._meet("reached the end of a closure")
                return out
            finally:
                self._inside = before

        return run

    # ---- units

    def look(self, name: str, function: Function, args: Any) -> Any:
        if name == "grad":
            return self._unit("grad", None, partial(_view_gradient, function), args, {})
        return super().look(name, function, args)

    def change(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        key = self.values.key_of(tensor)
        if name in ("data", "grad") and isinstance(args[1], torch.Tensor):
            return self._assign(name, function, tensor, args[1])
        before = tensor.requires_grad
        out = function(*args, **kwargs)
        if key is not None and self._home[key] != self._stage and tensor.requires_grad != before:
            self._known.discard(key)  # the value is sent again, this time with its gradient
        return out

    def _assign(self, name: str, function: Function, to: torch.Tensor, value: torch.Tensor) -> None:
        """Set `data` or `grad` on the stage that has a tensor.

        The value moves to that stage.
        """
        if not self.values.is_placed(to) and not self.values.is_value(to):
            if self.values.is_placed(value) or self.values.is_value(value):
                raise refuse_unit(
                    len(self.units),
                    f"the assignment to {name}",
                    "gives a value of one stage to a tensor of the batch, of which every stage has a copy. Use a new "
                    "tensor instead",
                )
            function(to, value)
            return
        if (to.shape, to.dtype) != (value.shape, value.dtype):
            raise refuse_unit(
                len(self.units),
                f"the assignment to {name}",
                f"changes shape or type, from {tuple(to.shape)}, {to.dtype} to {tuple(value.shape)}, {value.dtype}, "
                "and other stages would not see it. Assign a tensor that looks the same",
            )
        if not self.values.is_value(value) and not self.values.is_placed(value):
            value = value.clone()  # all stages have the value, but an assigned tensor belongs to one

        def assign(to: torch.Tensor, value: torch.Tensor) -> None:
            function(to, value)

        home = self._find_home(to)
        self._unit(f"set_{name}", None, assign, (to, value), {})
        key = self.values.key_of(value)
        if key is None:
            return
        self._home[key] = home
        self._shared.add(key)
        if home == self._stage:
            self._known.add(key)
        else:
            self._known.discard(key)

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        if function in GRAPH_FUNCTIONS:
            return self._differentiate(function, args, kwargs)
        given = tensors_of_call(args, kwargs)
        while not self._coming:
            # Answered here, where the user's code has reached the same place as on the other stage.
            if self._asked is not None:
                (home, keys), self._asked = self._asked, None
                self._transfer(home, self._turn, keys)
                continue
            if self._turn != self._stage:
                self._listen()
                if self._paused_there and not self._coming:
                    raise self._other_way(f"it called {name}, and the other stage has stopped computing there")
                continue
            stage = self._find_stage(name, path, args, kwargs, given)
            if stage != self._stage:
                self._say(_UNITS_MESSAGE, stage)
                continue
            self._fetch_missing(given)
            return self._run_mine(name, path, function, args, kwargs, given)
        done, stage, changed, shared = self._coming.popleft()
        if done.name != name:
            raise self._other_way(f"it called {name} as unit {len(self.units)}, which was {done.name} there")
        if done.pure:
            if any(map(self.values.is_placed, given)) or any(map(self.values.is_value, given)):
                raise self._other_way(f"it passed tensors that depend on weights to {name}")
            out = self.run_here(name, path, function, args, kwargs, given).out
            self.units.append(Done(name))
        else:
            out = self._pass_over(done, given)
        self._known.difference_update(changed)
        self._shared.update(shared)
        self._home.update(dict.fromkeys(_new_keys(done), stage))
        return out

    def _run_mine(
        self, name: str, path: str | None, function: Function, args: Any, kwargs: Any, given: list[torch.Tensor]
    ) -> Any:
        before = {key for t in given if (key := self.values.key_of(t)) is not None}
        ran = self.run_here(name, path, function, args, kwargs, given)
        written = [t for t in ran.written if self.values.key_of(t) in before]
        changed = self._find_changed(written) if written else ()
        if any(self._home[key] != self._stage for key in changed):
            raise refuse_unit(
                len(self.units), name, "changes a tensor in place that another stage has made. Let it change a copy"
            )
        self.units.append(ran.done)
        made = _new_keys(ran.done)
        shared = tuple(self._find_shared(name, self.placed(path, given), given, made))
        self._shared.update(shared)
        self._leaving.append(_RunUnit(ran.done, self._stage, changed, shared))
        self._home.update(dict.fromkeys(made, self._stage))
        self._known.update(made)
        self.values.prune()
        return ran.out

    def _find_changed(self, written: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the keys of the values that lie in the memory of these tensors."""
        memory = {storage_of(t) for t in written}
        return tuple(key for key in sorted(self._known) if self.values.lies_in(key, memory))

    def _find_shared(
        self, name: str, placed: Sequence[torch.Tensor], given: Sequence[torch.Tensor], made: Sequence[int]
    ) -> list[int]:
        """Return the keys of the new values that lie in the memory of weights or of their gradients."""
        if name == "grad":
            return list(made)
        sources = [*placed, *(t for t in given if self.values.key_of(t) in self._shared)]
        memory = {storage_of(t) for t in sources} if made else set()
        return [key for key in made if memory and self.values.lies_in(key, memory)]

    def _find_stage(self, name: str, path: str | None, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> int:
        """Return the stage that must run a unit. If any stage could, this is the stage in turn."""
        placed = self.placed(path, given)
        for tensor in placed:
            if id(RemoteTensor.find_stand_in(tensor)) not in self._places:
                raise refuse_unit(
                    len(self.units),
                    name,
                    f"uses a parameter of shape {tuple(tensor.shape)} that does not belong to the module. Assign it "
                    "to the module in __init__",
                )
        stages = {self._places[id(RemoteTensor.find_stand_in(t))] for t in placed}
        if not stages and name in ("set_data", "set_grad"):
            stages = {self._find_home(given[0])}
        if not stages:
            keys = [self.values.key_of(t) for t in find_written(name, args, kwargs)]
            stages = {self._home[key] for key in keys if key is not None}
        if not stages and name == "grad":
            stages = self._find_gradient(given[0])
        if len(stages) > 1:
            raise refuse_unit(
                len(self.units),
                name,
                f"uses or changes tensors of several stages, {sorted(stages)}, but the recorded step did not. Use "
                "tensors of one stage only, or set other borders with PipelineStrategy(partition=[...])",
            )
        return stages.pop() if stages else self._stage

    def _find_gradient(self, of: torch.Tensor) -> set[int]:
        """Return the stage that has the gradient of a tensor, if a single stage has it."""
        key = self.values.key_of(of)
        if key is None and of.requires_grad and len(self._ranks) > 1:
            raise refuse_unit(
                len(self.units),
                "grad",
                "of a tensor of the batch is read, but each stage has only a part of this gradient. Use "
                "torch.autograd.grad(loss, tensor)",
            )
        return set() if key is None else {self._home[key]}

    # ---- messages

    def _share(self, thing: Any, stage: int) -> Any:
        """Return the `thing` of a stage on all stages."""
        return self._control.broadcast(thing, self._ranks[stage])

    def _say(self, kind: int, content: Any) -> None:
        """Send the units that have run here to the other stages, with the kind and content of the message."""
        now = self._random_state()
        state = None
        if now != self._generators:
            cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
            state, self._generators = (torch.default_generator.get_state(), cuda), now
        units, self._leaving = self._leaving, []
        self._share((kind, content, units, state), self._stage)
        if kind == _UNITS_MESSAGE:
            self._turn = content

    def _listen(self) -> None:
        """Receive the next message of the stage in turn."""
        kind, content, units, state = self._share(None, self._turn)
        self._coming.extend(units)
        if state is not None:
            torch.default_generator.set_state(state[0])
            if self._device.type == "cuda" and state[1] is not None:
                torch.cuda.set_rng_state(state[1], self._device)
            self._generators = self._random_state()
        if kind == _FETCH_MESSAGE:
            self._asked = content
        elif kind == _UNITS_MESSAGE:
            self._turn = content
        else:
            self._paused_there, self._place = True, content

    def _meet(self, what: str) -> None:
        """Wait until all stages are at this place."""
        self._inside += 1  # computations here are not units
        try:
            if self._turn == self._stage and not self._coming:
                self._say(_PLACE_MESSAGE, what)
                return
            while not (self._paused_there or self._coming or self._asked) and self._turn != self._stage:
                self._listen()
            if self._coming or not self._paused_there:
                raise self._other_way(f"it {what} after {len(self.units)} units")
            if self._place != what:
                raise self._other_way(f"it {what} after {len(self.units)} units, where the other stage {self._place}")
            self._paused_there = False
        finally:
            self._inside -= 1

    def _fetch_missing(self, given: Sequence[torch.Tensor]) -> None:
        """Request the inputs of a unit that this stage does not have, from the stages that made them."""
        missing: dict[int, list[int]] = {}
        for tensor in given:
            key = self.values.key_of(tensor)
            if key is not None and key not in self._known and key not in missing.get(self._home[key], ()):
                missing.setdefault(self._home[key], []).append(key)
        for home, keys in missing.items():
            self._say(_FETCH_MESSAGE, (home, keys))
            self._transfer(home, self._stage, keys)

    def _transfer(self, home: int, to: int, keys: Sequence[int]) -> None:
        """Send values from one stage to another."""
        transfer, message = _Transfer(home, to), None
        if home == self._stage:
            found = [self.values.value_to_send(key, self._stage) for key in keys]
            transfer.edges = [get_gradient_edge(t) if t.requires_grad else None for t in found]
            message = [self._pack_tensor(t, t.requires_grad) for t in found]
        message = self._share(message, home)
        if any(trained for _, trained, _ in message):
            self._transfers.append(transfer)
        if to != self._stage:
            return
        for key, packed in zip(keys, message, strict=True):
            leaf = self._unpack_tensor(packed)
            transfer.leaves.append(leaf if leaf.requires_grad else None)
            with torch.enable_grad():
                self._put(self.values.value(key), leaf)
            self._known.add(key)

    def _pack_tensor(self, tensor: torch.Tensor, trained: bool) -> tuple[torch.Tensor, bool, bool]:
        on_host = tensor.device.type == "cpu" and self._device.type != "cpu"
        return tensor.detach().contiguous(), trained, on_host

    def _unpack_tensor(self, packed: tuple[torch.Tensor, bool, bool]) -> torch.Tensor:
        tensor, trained, on_host = packed
        tensor = tensor if on_host else tensor.to(self._device)
        return tensor.detach().requires_grad_(trained)

    def _settle(self, mark: Any) -> Any:
        """Send all values that the user's code still holds to the stages that did not make them.

        Returns:
            The mark of the last stage.
        """
        mine = [key for key in self.values.alive() if self._home.get(key) == self._stage]
        values = {key: self._pack_tensor(self.values.value_to_send(key, self._stage), False) for key in mine}
        found = self._control.all_gather((values, mark))
        for of_rank, _ in found:
            for key, packed in of_rank.items():
                if key not in self._known and self.values.holds(key):
                    self._put(self.values.value(key), self._unpack_tensor(packed))
        return found[self._control.ranks.index(self._ranks[-1])][1]

    # ---- gradients

    def _differentiate(self, function: Function, args: Any, kwargs: Any) -> Any:
        asked = Differentiation.from_call(function, args, kwargs)
        self._meet(f"reached {function.__name__}")
        roots = list(asked.roots)
        self.values.meet(t for t in (*roots, *(asked.inputs or ()), *tensors_of(asked.gradients)))
        for root, gradient in zip(roots, asked.gradients, strict=True):
            key = None if gradient is None else self.values.key_of(gradient)
            if key is not None:
                self._transfer(self._home[key], self._find_home(root), [key])
        pending = [(t, g) for t, g in zip(roots, asked.gradients, strict=True) if self._find_home(t) == self._stage]
        with self._defer_hooks(asked) as of_inputs:
            sums = self._go_back(asked, pending)
        self._forget_shared()
        if asked.inputs is None:
            return None
        for tensor, hooks in of_inputs:
            for hook in hooks if id(tensor) in sums else ():
                changed = hook(sums[id(tensor)])
                sums[id(tensor)] = sums[id(tensor)] if changed is None else changed
        results = self._agree_on_sums(asked, [sums.get(id(t)) for t in asked.inputs])
        if asked.returns:
            return tuple(results)
        for tensor, result in zip(asked.inputs, results, strict=True):
            if result is not None and self._has(tensor):
                tensor.grad = result if tensor.grad is None else tensor.grad + result
        return None

    @contextmanager
    def _defer_hooks(self, asked: Differentiation) -> Iterator[list[tuple[torch.Tensor, list[Any]]]]:
        """Collect the hooks of weights, so that they run once for the block.

        Yields:
            The inputs with hooks and these hooks, which the caller runs afterwards.
        """
        if asked.inputs is None:
            weights = [p for p in self._module.parameters() if not p.is_meta]
            with self._hooks.defer_hooks(weights, None, True, lambda _: None):
                yield []
            return
        hooked = [t for t in asked.inputs if isinstance(t, nn.Parameter) and not t.is_meta and has_gradient_hooks(t)]
        tables = [gradient_hooks(t) for t in hooked]
        found = [dict(table) for table in tables]
        for table in tables:
            table.clear()
        try:
            yield [(t, list(table.values())) for t, table in zip(hooked, found, strict=True)]
        finally:
            for table, kept in zip(tables, found, strict=True):
                table.update(kept)

    def _find_home(self, tensor: torch.Tensor) -> int:
        """Return the stage with the graph of a tensor.

        For a tensor that all stages have, this is the stage in turn.
        """
        key = self.values.key_of(tensor)
        if key is not None:
            return self._home[key]
        return self._places.get(id(RemoteTensor.find_stand_in(tensor)), self._turn)

    def _has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the graph of this stage."""
        key = self.values.key_of(tensor)
        if key is None and not self.values.is_placed(tensor):
            return True
        return self._find_home(tensor) == self._stage

    def _go_back(
        self, asked: Differentiation, pending: list[tuple[Any, torch.Tensor | None]]
    ) -> dict[int, torch.Tensor]:
        """Run backward on all stages.

        Returns:
            The gradients of the requested inputs on this stage, by id of the input.
        """
        sums: dict[int, torch.Tensor] = {}
        before = list(self._transfers)
        for number in reversed(range(len(before))):
            transfer, gradients = before[number], list[torch.Tensor | None]()
            if transfer.to == self._stage:
                self._run_backward(asked, pending, before[: number + 1], sums)
                for leaf in transfer.leaves:
                    gradients.append(None if leaf is None else sums.pop(id(leaf), leaf.grad))
                    if leaf is not None:
                        leaf.grad = None
            arrived = self._send_gradients(transfer, gradients, asked.create)
            if transfer.home == self._stage:
                pairs = zip(transfer.edges, arrived, strict=True)
                pending += [(edge, g) for edge, g in pairs if edge is not None and g is not None]
        self._run_backward(asked, pending, (), sums)
        return sums

    def _run_backward(
        self,
        asked: Differentiation,
        pending: list[tuple[Any, torch.Tensor | None]],
        earlier: Sequence[_Transfer],
        sums: dict[int, torch.Tensor],
    ) -> None:
        """Run backward from the pending gradients to the leaves of earlier transfers and to the inputs."""
        if not pending:
            return
        outputs, gradients = (list(each) for each in zip(*pending, strict=True))
        pending.clear()
        retain = asked.retain or any(each.home == self._stage for each in earlier)
        if asked.inputs is None:
            torch.autograd.backward(outputs, gradients, retain, asked.create)
            return
        leaves = [leaf for each in earlier if each.to == self._stage for leaf in each.leaves if leaf is not None]
        wanted = [t for t in asked.inputs if self._has(t) and t.requires_grad]
        if not leaves and not wanted:
            return
        inputs = list({id(t): t for t in (*leaves, *wanted)}.values())
        found = torch.autograd.grad(outputs, inputs, gradients, retain, asked.create, allow_unused=True)
        for tensor, gradient in zip(inputs, found, strict=True):
            if gradient is not None:
                known = sums.get(id(tensor))
                sums[id(tensor)] = gradient if known is None else known + gradient

    def _send_gradients(
        self, transfer: _Transfer, gradients: Sequence[torch.Tensor | None], create: bool
    ) -> list[torch.Tensor | None]:
        """Send the gradients of a transfer back, and return them.

        If the gradients will be differentiated again, this is recorded as a further transfer.
        """
        message = [None if g is None else self._pack_tensor(g, create and g.requires_grad) for g in gradients]
        message = self._share(message, transfer.to)
        arrived = [None if each is None else self._unpack_tensor(each) for each in message]
        if any(each is not None and each[1] for each in message):
            back = _Transfer(transfer.to, transfer.home)
            if transfer.to == self._stage:
                kept = [g if g is not None and g.requires_grad else None for g in gradients]
                back.edges = [None if g is None else get_gradient_edge(g) for g in kept]
            if transfer.home == self._stage:
                back.leaves = [g if g is not None and g.requires_grad else None for g in arrived]
            self._transfers.append(back)
        return arrived

    def _agree_on_sums(self, asked: Differentiation, found: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return the requested gradients, as values of the stages that have them."""
        assert asked.inputs is not None
        described = [None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in found]
        of_ranks = self._control.all_gather(described)
        of_stages = [of_ranks[self._control.ranks.index(rank)] for rank in self._ranks]
        results: list[Any] = []
        for number, (tensor, own) in enumerate(zip(asked.inputs, found, strict=True)):
            stages = [stage for stage, each in enumerate(of_stages) if each[number] is not None]
            if not stages:
                if not asked.may_be_unused:
                    raise RuntimeError(
                        "One of the differentiated Tensors appears to not have been used in the graph. Set "
                        "allow_unused=True if this is the desired behavior."
                    )
                zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
                results.append(zeros if asked.fills_unused else None)
                continue
            home = stages[0]
            if len(stages) > 1:
                if asked.create:
                    raise PipelineError(
                        "a gradient of a gradient goes through a tensor of the batch that several stages use. Give "
                        "its modules to one stage by PipelineStrategy(partition=[...]), or train in one process"
                    )
                parts = [self._unpack_tensor(self._share(self._packed_or_none(own), stage)) for stage in stages]
                own = torch.stack(parts).sum(0) if home == self._stage else None
            results.append(self._add_result(own, home, of_stages[home][number]))
        return results

    def _packed_or_none(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else self._pack_tensor(tensor, False)

    def _add_result(self, own: torch.Tensor | None, home: int, described: Any) -> torch.Tensor:
        """Return a new value of the stage `home`."""
        key = self.values.next_key
        self._home[key] = home
        if home != self._stage:
            shape, stride, dtype, trained = described
            made = Made(key, shape, stride, dtype, False, trained)
            stand: torch.Tensor = self.values.stand_for(made, self._device, self._module.get_parameter)
            return stand
        assert own is not None
        own = own.view_as(own) if self.values.is_value(own) else own
        self.values.add_value(own)
        self._known.add(key)
        return own


def _view_gradient(function: Function, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the gradient of a tensor.

    It is a new value, because other stages may have released the old one.
    """
    found: torch.Tensor | None = function(tensor)
    if found is None:
        return None
    return found.view_as(found) if found.requires_grad else found.detach()


def _new_keys(done: Done) -> list[int]:
    """Return the keys of the values that a unit has made."""
    if done.pure:
        return []
    found: list[int] = []
    map_leaves(done.out, lambda leaf: found.append(leaf.key) if isinstance(leaf, Made) else None)
    return found + [key for _, key in done.written]
