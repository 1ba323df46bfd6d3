"""The user's step as one stage runs it, without computing the units of other stages.

units before the stage   are not computed: placeholders stand for the tensors that they make
the border before        placeholders become the values that the previous stage has sent
units of the stage       run as usual
the border behind        the step is unwound, and the values that the user's code still holds are sent to the next stage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, read_generators, set_generators
from lightning_pipes.engine.compute.sendable import check_sendable
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import set_versions
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.mode import Function
from lightning_pipes.trainer.cuts.units.recording import GRAPH_FUNCTIONS
from lightning_pipes.trainer.cuts.units.trace import Done, Trace, tensors_of_call
from lightning_pipes.trainer.cuts.units.traced_step import (
    TracedStep,
    find_written,
    refuse_unit,
    version_of,
    versions_of,
)
from lightning_pipes.trainer.cuts.units.values import DEVICE_ATTRIBUTE, storage_of
from lightning_pipes.trainer.ranks.user_lines import user_line
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.weight_changes import IN_HOOKS_WAY_OUT

Values = tuple[torch.Tensor, ...]
Crossing = tuple[Values, Trace]
"""The message of a stage to the next one."""
STATES = (-1, -2)
"""The keys of the states of torch's generators for the CPU and for the device, in a trace."""


BACKWARD_HOOKS_REASON = (
    "has backward hooks, so that it must be on one stage as a whole: the gradients of its input and output would be on "
    "two ranks otherwise. Register such hooks on smaller modules before training begins, or hooks on tensors in the "
    "module's forward, by Tensor.register_hook"
)
"""The reason why hooks of `register_full_backward_hook` are refused. It follows the name of a module."""


class EarlierStageError(PipelineError):
    """A step needs weights or a graph of an earlier stage, which has already sent the step to the next stage."""


class _Border(BaseException):
    """Unwinds the user's step at the end of a stage. `except Exception` must not catch it."""


class LazyStep(TracedStep):
    """Runs steps of a module in which the weights of other stages are on `meta`.

    A step that is like the recorded one ends at the border of the layout. Any other step ends in front of the first
    unit whose weights are not on this stage, so the stages need no record of it.

    Args:
        module: the user's module, with the weights of this stage.
        layout: the layout of the recorded step.
        stage: the number of the stage.
        device: the device of the stage.
        last: the last part of the layout that the stage has; by default, the part with the number of the stage.
        generators: the module's own random generators.
        sends_states: whether the states of torch's generators may be sent to the next stage.
        continues: whether the stage continues with the states of the previous stage. Otherwise, its micro-batches are
            other ones, and it begins with its own random stream.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: UnitLayout,
        stage: int,
        device: torch.device,
        last: int | None = None,
        generators: ModuleGenerators | None = None,
        sends_states: bool = True,
        continues: bool = True,
    ) -> None:
        super().__init__(
            module, layout.modules(module), layout.drawing, device, generators, layout.streams, layout.slices
        )
        self._drew = layout.drew
        self._layout = layout
        self._stage = stage
        last = stage if last is None else last
        self._ends = last == layout.n_parts - 1
        self._border = layout.border_of(last)
        self._spans = _find_layers(layout)
        """The numbers of the first and the last layer in each unit that contains layers."""
        self._sends_states, self._continues = sends_states and not self._ends, continues
        self._draws_later = bool(layout.drew) or not layout.names
        self._of_stage: Stage | None = None
        self._received: Crossing = ((), Trace())
        self._n_received, self._n_names = 0, len(layout.names)
        self._as_recorded = True
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._crossing: Crossing | None = None
        self._sent: Trace | None = None
        self._rows = 0
        self._why_once = ""
        """The reason why the step must not change weights; empty if it may."""
        self._refusal: PipelineError | None = None
        self.n_draws = 0
        """The number of draws of random numbers in the latest run, on the stages up to this one."""
        self._held = 0
        """The checkpoint that contains the last unit of this stage that makes values."""

    def run(
        self,
        step: Callable[..., Any],
        batch: Any,
        arguments: Sequence[Any],
        received: Crossing | None,
        seed: Callable[[int], None] | None = None,
        rows: int = 0,
        why_once: str = "",
        stage: Stage | None = None,
    ) -> Crossing | Any:
        """Run the part of the step that belongs to this stage.

        Args:
            step: the user's step.
            batch: the micro-batch.
            arguments: further arguments of the step.
            received: the message of the previous stage; None on the first stage.
            seed: called with the number of a layer, or `AFTER_LAYERS`, to draw from its random stream from now on.
            rows: the number of samples of the micro-batch, for the trace.
            why_once: the reason why a change of weights by the step would differ from one process; empty if it would
                not.
            stage: the stage in the engine, which specifies the random generators; None for the generators of torch.

        Returns:
            The message to the next stage. On the last stage, the result of the step.

        Raises:
            PipelineError: the step takes another path than on the previous stage, needs weights of an earlier stage, or
                changes weights although it must not.
        """
        self._why_once, self._refusal, self._of_stage = why_once, None, stage
        self.begin(batch, seed)
        self._received, self._rows = received or ((), Trace()), rows
        self._n_received = len(self._received[1].units)
        self._as_recorded, self._watched, self._crossing, self._held = True, [], None, 0
        try:
            with self:
                out = step(batch, *arguments)
            if self._crossing is not None:
                raise _Border  # a bare `except:` has caught the first one
            if len(self.units) < self._n_received:
                raise self._other_way(f"it ended after {len(self.units)} units")
            if not self._ends:
                self._crossing = self._pack()  # the step uses no weights of later stages
        except _Border:
            out = None
        except Exception:
            if self._refusal is not None:  # load_state_dict has replaced the error by another one
                raise self._refusal from None
            raise
        finally:
            self._check_shared()
            self.n_draws, self._of_stage = self._draws, None
            self.end()
        crossing, self._crossing, self._received = self._crossing, None, ((), Trace())  # these hold values and graphs
        return out if self._ends else crossing

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        if self._crossing is not None:
            raise _Border
        if name == "BackwardHookFunction.apply":
            raise PipelineError(f"A module that the step calls {BACKWARD_HOOKS_REASON}")
        number = len(self.units)
        self._as_recorded = self._as_recorded and number < self._n_names and self._layout.names[number] == name
        if number >= self._n_received:
            return self._run_own(number, name, path, function, args, kwargs)
        done = self._received[1].units[number]
        if done.name != name:
            raise self._other_way(
                f"it called {name} as unit {number} at {user_line()}, which was {done.name} on the previous stage"
            )
        given = tensors_of_call(args, kwargs)
        if done.pure:
            if any(map(self.values.is_placed, given)) or any(map(self.values.is_value, given)):
                raise self._other_way(f"it passed tensors that depend on weights to unit {number}, {name}")
            out = self.run_here(name, path, function, args, kwargs, given).out
            self.units.append(Done(name))
        else:
            out = self._pass_over(done, given)
        if number + 1 == self._n_received:  # immediately, because code before the next unit may keep values
            self._arrive()
        return out

    def run_transformed(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        if not self._ends and any(t.is_meta for t in self.placed(path, tensors_of_call(args, kwargs))):
            self._crossing = self._pack()
            raise _Border
        return function(*args, **kwargs)

    def _run_own(self, number: int, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        given = tensors_of_call(args, kwargs)
        if function in GRAPH_FUNCTIONS and self._received[1].keys:
            raise EarlierStageError(
                f"the step calls torch's {name} at {user_line()}, and earlier stages have a part of the graph. Return "
                "the loss instead, or train in one process what needs gradients in its loss"
            )
        has_weights = self._as_recorded and number < self._border  # the weights of its module
        if self._ends:
            return self._run_last(number, name, path, function, args, kwargs, given, has_weights)
        is_border = self._as_recorded and number >= self._border
        if is_border or any(t.is_meta for t in self.placed(None if has_weights else path, given)):
            if self.checkpoint and self.checkpoint == self._held:
                raise refuse_unit(
                    number,
                    name,
                    "is in a checkpoint of torch.utils.checkpoint, and its weights are on another stage than those "
                    "before it. A checkpoint runs again as a whole: let it have weights of one stage",
                )
            self._crossing = self._pack(path)
            raise _Border
        ran = self.run_here(name, path, function, args, kwargs, given)
        if path is None and ran.written:
            self._check_weights(ran.written)
        self.units.append(ran.done)
        self._held = self._held if ran.done.pure else self.checkpoint
        self.values.prune()
        return ran.out

    def _run_last(
        self,
        number: int,
        name: str,
        path: str | None,
        function: Function,
        args: Any,
        kwargs: Any,
        given: Sequence[torch.Tensor],
        has_weights: bool,
    ) -> Any:
        """Run a unit of the last stage. No other stage needs its results, so they are not numbered.

        Args:
            number: the number of the unit.
            name: the name of the function, or the path of the module.
            path: the path of the module; None for a function.
            function: the function, or the forward of the module.
            args: its positional arguments.
            kwargs: its keyword arguments.
            given: the tensors in its arguments.
            has_weights: whether this stage has the weights of the module.

        Raises:
            EarlierStageError: the unit needs weights of an earlier stage.
            PipelineError: it changes weights although it must not.
        """
        placed = given if path is None or has_weights else self.placed(path, given)
        foreign = [t for t in placed if t.is_meta and self.values.is_placed(t)]
        if foreign:
            named = (*self._module.named_parameters(), *self._module.named_buffers())
            weight = next((name for name, t in named if any(t is each for each in foreign)), "weights")
            refused = refuse_unit(
                number,
                name,
                f"needs {weight}, which an earlier stage has: this step calls modules in another order than the "
                "training step that was recorded. Call them in the same order, or name other borders by "
                "PipelineStrategy(partition=[...])",
            )
            raise EarlierStageError(str(refused))
        self._in_module = True  # only records of units need to know whether code in a function uses weights
        versions = versions_of(given) if path is None else []
        out = self._compute(name, path, function, args, kwargs)
        if path is None and (written := find_written(given, versions)):
            self._check_weights(written)
        self.units.append(Done(name))
        return out

    def _describe_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            check_sendable(leaf, f"a module of stage {self._stage} returns")
        return super()._describe_leaf(leaf)

    def look(self, name: str, function: Function, args: Any) -> Any:
        if name == "data_ptr" and args[0].is_meta:
            raise PipelineError(
                f"the step reads the memory of a tensor at {user_line()}, and the tensor is on another stage. Call "
                "code that reads memory in the forward of a module without submodules, which one stage runs as a whole"
            )
        return super().look(name, function, args)

    def change(self, name: str, function: Function, args: Any, kwargs: Any) -> Any:
        if name == "data" and args and self.values.is_placed(args[0]):
            self._check_weights([args[0]], f"assigns {name} to")
            if args[0].is_meta:  # the stage that has the weight assigns it
                return None
        return super().change(name, function, args, kwargs)

    def _start_stream(self, number: int) -> None:
        if len(self.units) >= self._n_received:  # the units of earlier stages draw nothing here
            super()._start_stream(number)

    def _check_weights(self, written: Sequence[torch.Tensor], how: str = "changes") -> None:
        """Refuse a change of weights that would differ from one process.

        Raises:
            PipelineError: the step runs for each of several micro-batches, or other stages also have these weights.
        """
        where = {storage_of(t) for t in written} - {None}
        for name, p in self._module.named_parameters():
            if not any(p is t for t in written) and storage_of(p) not in where:
                continue
            why = explain_change(self._layout, name, self._why_once)
            if why:
                self._refusal = self._refusal or PipelineError(
                    f"the step {how} self.{name} at {user_line()}. {why}. {IN_HOOKS_WAY_OUT}"
                )
                raise self._refusal

    def begin_checkpoint(self) -> bool:
        super().begin_checkpoint()
        return len(self.units) >= self._n_received  # otherwise the checkpoint would hold placeholders

    def _pass_over(self, done: Done, given: Sequence[torch.Tensor]) -> Any:
        """Return placeholders for the results of a unit on an earlier stage."""
        self.values.meet(given)
        for number, key in done.written:
            if self.values.taint(number) != key:
                raise self._other_way(f"other tensors were changed in place by {done.name}")
        try:
            out = self.values.stand_for(done.out, self._device, self._module.get_parameter)
        except LookupError as error:
            raise self._other_way(f"it no longer holds a tensor that {done.name} returned again") from error
        self.units.append(done)
        self._draws += done.draws
        if done.name in self._spans:
            behind = self._spans[done.name][1] + 1
            self._next_stream, self._called = max(self._next_stream, behind), max(self._called, behind)
        if self._own_generators is not None:
            self._own_generators.set_states(dict(done.generators))
        return out

    def _arrive(self) -> None:
        """Replace the placeholders by the received values, wherever the user's code holds them."""
        values, trace = self._received
        with torch.enable_grad():  # the border may be inside a block without gradients
            for key, value in zip(trace.keys, values, strict=True):
                if key not in STATES:
                    self._put(self.values.value(key), value)
        states = [value for key, value in zip(trace.keys, values, strict=True) if key in STATES]
        if states and self._of_stage is not None:
            self._of_stage.set_generators(states)
        elif states:
            set_generators(states, self._device)
        if not self._continues:
            self._start_stream(AFTER_LAYERS - self._n_received)
        groups = [self.values.value(key) for group in trace.shared for key in group]
        self._watched = [(t, t._version) for t in groups]

    def _put(self, stand: torch.Tensor, value: torch.Tensor) -> None:
        if not value.requires_grad and not stand.is_meta and not stand.requires_grad and stand.shape == value.shape:
            stand.copy_(value)  # a buffer must remain the same object
            return
        if self._layout.clones:  # a unit may change the value in place, which is not possible for a leaf
            value = value.clone()
        else:
            value = value.view_as(value) if value.requires_grad else value.detach()
        attributes = {name: each for name, each in vars(stand).items() if name != DEVICE_ATTRIBUTE}
        version, is_state = version_of(stand), not stand.is_meta
        try:
            torch.utils.swap_tensors(stand, value)  # type: ignore[no-untyped-call]
            vars(stand).update(attributes)  # the attributes that the user's code has set
            if is_state:  # a unit of an earlier stage has changed it in place, which `ModuleState` has to find
                set_versions((stand,), (version + 1,))
        except RuntimeError as error:
            raise PipelineError(
                f"a tensor of shape {tuple(value.shape)} is sent to another stage before unit {len(self.units)}, but "
                "its placeholder can't be replaced, because torch.utils.checkpoint, a weak reference or C++ code holds "
                "it. Remove the checkpoint around that unit (with manual optimization, it must not begin with a value "
                "of another stage), or choose another border with PipelineStrategy(partition=[...])"
            ) from error

    def _pack(self, path: str | None = None) -> Crossing:
        """Return the message to the next stage: the values that the user's code holds, and the units so far.

        Args:
            path: the path of the module that the next stage begins with, if it is a unit.
        """
        keys = tuple(self.values.alive())
        found = tuple(self.values.value_to_send(key, self._stage) for key in keys)
        memory: dict[int, list[int]] = defaultdict(list)
        for key, value in zip(keys, found, strict=True):
            where = storage_of(value)
            if where is not None:
                memory[where].append(key)
        shared = tuple(tuple(group) for group in memory.values() if len(group) > 1)
        states: list[torch.Tensor] = []
        if self._must_send_states(path):
            states = read_generators(self._device) if self._of_stage is None else self._of_stage.read_generators()
        return (*found, *states), self._make_trace((*keys, *STATES[: len(states)]), shared)

    def _make_trace(self, keys: tuple[int, ...], shared: tuple[tuple[int, ...], ...]) -> Trace:
        """Return the trace up to here.

        If it equals the trace of the previous micro-batch, that trace is returned, so that it is serialized only once.
        """
        last, ends = self._sent, (keys, shared, self._rows)
        if last is None or (last.keys, last.shared, last.rows) != ends or not _equal(last.units, self.units):
            self._sent = last = Trace(list(self.units), *ends)
        return last

    def _must_send_states(self, path: str | None) -> bool:
        """Return whether the next stage must continue with the states of torch's generators.

        Args:
            path: the path of the module that the next stage begins with, if it is a unit.
        """
        if not self._sends_states or self._seed is None or len(self.units) == self._seeded_at:
            return False
        if not self._draws and not (self._draws_later and self._module.training):
            return False
        begins_layer = path in self._numbers or path in self._slices
        return not begins_layer or self._depth > 0 or self._spans[path or ""][0] < self._next_stream

    def _check_shared(self) -> None:
        """Refuse a change of a value that shared memory with other values on the previous stage."""
        if any(t._version != version for t, version in self._watched):
            raise PipelineError(
                "the step changes a tensor in place, and a view of it on the other side of a border between stages "
                "would keep its old values. Change a copy, or name another border by PipelineStrategy(partition=[...])"
            )
        self._watched = []

    def _other_way(self, what: str) -> PipelineError:
        return PipelineError(
            f"Stage {self._stage} took another path through the step than the previous stage: {what}. The path may "
            "depend only on the batch, the weights, and torch's random numbers, which are the same on all ranks"
        )


def _find_layers(layout: UnitLayout) -> dict[str, tuple[int, int]]:
    """Return the numbers of the first and the last layer in each unit that contains layers, by path."""
    found = {} if layout.slices is None else {name: (n[0], n[-1]) for name, n in layout.slices.units.items()}
    for path in layout.atomic:
        inside = [n for n, layer in enumerate(layout.streams) if f"{layer}.".startswith(f"{path}.")]
        if inside:
            found[path] = inside[0], inside[-1]
    return found


def explain_change(layout: UnitLayout, name: str, why_once: str) -> str:
    """Return the reason why a change of a weight by the step differs from one process; empty if it does not.

    Args:
        layout: the layout of the step.
        name: the name of the weight.
        why_once: the reason that applies to all weights; empty if there is none.
    """
    stages = layout.parts_of.get(name, ())
    if why_once or len(stages) < 2:
        return why_once
    return f"Stages {', '.join(map(str, stages))} use it, each has a copy, and one of these would be changed"


def _equal(some: Sequence[Done], others: Sequence[Done]) -> bool:
    """Return whether two lists have the same units with the same results, as far as results can be compared."""
    try:
        return bool(some == others)
    except (TypeError, ValueError, RuntimeError):  # results may contain objects without a truth value, such as arrays
        return False
