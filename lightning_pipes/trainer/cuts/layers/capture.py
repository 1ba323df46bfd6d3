"""Execution of the user's step up to its call of the pipelined layers, or in full with a given result of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.engine.private_torch import check_backward, graph_nodes, in_functorch, is_reached
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError

Step = Callable[..., Any]


class _Reached(BaseException):
    """Raised to leave the user's step when it calls the pipelined module. `except Exception` must not catch it."""

    def __init__(self, x: Any) -> None:
        self.x = x


class ChangedInput(NamedTuple):
    """The output of the layers together with their in-place changes of the input, as by `nn.ReLU(inplace=True)`.

    Attributes:
        out: the output of the last layer.
        changed: the new values of the changed tensors of the input, by the number of the tensor in the input.
    """

    out: Any
    changed: dict[int, torch.Tensor]

    def write_changes(self, x: Any) -> Any:
        """Apply the changes that the layers have made on another rank to their input, and return their output."""
        tensors = tensors_in(x)
        for number, value in self.changed.items():
            tensors[number].copy_(value)
        return self.out


class NoCallError(PipelineError):
    """Raised if a step has ended without calling the layers.

    Attributes:
        out: the return value of the step.
        calls: the logging calls of the step.
    """

    def __init__(self, text: str, out: Any) -> None:
        super().__init__(text)
        self.out = out
        self.calls: Any = None


class Interceptor:
    """Intercepts the call of the pipelined module by the user's step, or the loop of the step over its layers.

    Args:
        name: the expression with which user code accesses the module, for messages.
        loop: whether the module can only be called layer by layer.
        around: a reusable context in which all steps run.
    """

    def __init__(self, name: str, loop: bool = False, around: AbstractContextManager[Any] | None = None) -> None:
        self._around = around or nullcontext()
        self._name = f"the layers of {name}" if loop else f"{name}(...)"
        self._answer: Callable[[Any], Any] | None = None
        self._answer_later: Callable[[Any], Any] | None = None
        self._step = ""
        self._calls = 0

    @property
    def running(self) -> bool:
        """Whether a step is running that may call the layers."""
        return self._answer is not None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the call of the pipelined module by the user's step.

        Raises:
            PipelineError: no step is running, the call does not have exactly one positional argument, or the step has
                called the module before.
        """
        if self._answer is None:
            raise PipelineError(
                f"{self._name} was called outside of training_step, validation_step, test_step and predict_step; "
                "its layers are spread over several ranks there",
                "Call it from a step, or after the Trainer has ended; instead of torch.utils.checkpoint, which calls "
                "it again, set PipelineStrategy(recompute=True)",
            )
        if kwargs or len(args) != 1:
            raise PipelineError(
                f"{self._step} calls {self._name} with {len(args)} positional arguments and the keywords "
                f"{sorted(kwargs)}; it takes one positional argument, which may be a tuple or dict of tensors",
                "Layers with several arguments go into an nn.ModuleList and are called in a loop",
            )
        return self.call_layers(args[0])

    def call_layers(self, x: Any) -> Any:
        """Return the result of the call of the layers with the input `x`.

        Raises:
            PipelineError: the step has called the layers before and may call them only once, or it calls them within a
                transform of torch.func.
        """
        assert self._answer is not None, "no step is running"
        if in_functorch():
            raise PipelineError(
                f"{self._step} calls {self._name} within a transform of torch.func, such as grad, jvp or vmap, and the "
                "layers are spread over several ranks",
                "Call the transform in a layer, which one stage runs as a whole",
            )
        self._calls += 1
        if self._calls > 1 and self._answer_later is not None:
            return _with_changes(self._answer_later(x), x)
        if self._calls > 1:
            raise PipelineError(
                f"{self._step} calls {self._name} more than once for one batch; in training a batch can pass these "
                "layers once",
                "Cut the module by units, PipelineStrategy(module=''), which may be called again, or join the inputs "
                "along axis 0 and call the layers once",
            )
        return _with_changes(self._answer(x), x)

    def capture(self, step: Step, *args: Any) -> Any:
        """Run `step(*args)` until it calls the layers, and return the input of this call.

        Raises:
            NoCallError: the step ends without calling the layers.
            PipelineError: the step has caught the exception that this call raises.
        """

        def reached(x: Any) -> Any:
            raise _Reached(x)

        try:
            out = self._run(reached, step, args)
        except _Reached as found:
            return found.x
        text = (
            f"{_name(step)} ended without a call of {self._name}, or it caught the exception that this call raises "
            "while only the code around the layers runs. It must call the layers once for every batch. Replace a bare "
            "`except:` around the call by `except Exception:`. If the batch goes through other layers, name their "
            "container in PipelineStrategy(module=...)"
        )
        raise PipelineError(text) if self._calls else NoCallError(text, out)

    def run_without(self, step: Step, *args: Any) -> Any:
        """Return the result of `step(*args)`, which must not call the layers.

        Raises:
            PipelineError: the step calls the layers.
        """

        def refused(x: Any) -> Any:
            raise PipelineError(
                f"{_name(step)} calls {self._name} in this batch, and did not in the first one; it must make the call "
                "in every batch, or in none"
            )

        return self._run(refused, step, args)

    def run_with_answer(
        self,
        step: Step,
        answer: Callable[[Any], Any],
        *args: Any,
        apart: bool = False,
        answer_later: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the result of `step(*args)` if its call of the pipelined module with an input `x` returns `answer(x)`.

        Args:
            step: the user's step.
            answer: returns the result of the first call of the pipelined module.
            args: the arguments of the step.
            apart: whether the autograd graph of the result of `answer` is not connected to `x`.
            answer_later: returns the result of each later call. If None, the step may make only one call.

        Raises:
            PipelineError: the step does not call the module, or it computes a gradient of a value after the call with
                respect to a value before the call.
        """

        def watched(x: Any) -> Any:
            y = answer(x)
            check_backward(_GapInGraph(self._step, self._name, x, y).check)
            return y

        self._answer_later = answer_later
        try:
            out = self._run(watched if apart else answer, step, args)
        finally:
            self._answer_later = None
            if apart:
                check_backward(None)
        if not self._calls:
            way_out = "it must make this call once for every batch"
            raise PipelineError(f"{_name(step)} never calls {self._name}", way_out)
        return out

    def _run(self, answer: Callable[[Any], Any], step: Step, args: tuple[Any, ...]) -> Any:
        self._answer, self._step, self._calls = answer, _name(step), 0
        try:
            with self._around:
                return step(*args)
        finally:
            self._answer = None


class _GapInGraph:
    """The gap in the autograd graph of a step between the input and the output of the layers.

    Args:
        step: the name of the step.
        layers: the expression with which user code calls the layers.
        x: the input of the layers.
        y: the output of the layers.
    """

    def __init__(self, step: str, layers: str, x: Any, y: Any) -> None:
        self._step, self._layers = step, layers
        self._entering, self._returned = graph_nodes(tensors_in(x)), graph_nodes(tensors_in(y))

    def check(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Raise PipelineError if a backward pass from `outputs` would have to cross the gap.

        Args:
            outputs: the tensors at which the backward pass starts.
            inputs: the tensors whose gradients are computed. If empty, these are all leaves of the graph.
        """
        if self._returned and not is_reached(graph_nodes(outputs), self._returned):
            return
        if not inputs or is_reached(self._entering, graph_nodes(inputs)):
            raise PipelineError(
                f"{self._step} computes a gradient of the output of {self._layers} with respect to a tensor that was "
                "used before the layers, as torch.autograd.grad and backward() do. The layers are on other ranks, and "
                "each stage has only its own part of the autograd graph",
                "Compute this contribution to the loss in the layers and return it with their output. Lightning calls "
                "backward() automatically",
            )


def _with_changes(y: Any, x: Any) -> Any:
    return y.write_changes(x) if isinstance(y, ChangedInput) else y


def named_step(owner: object, name: str) -> Step:
    """Return the step `name` of a module. A callable without `__name__`, such as functools.partial, gets this name."""
    step: Step = getattr(owner, name)
    if not hasattr(step, "__name__"):
        step = partial(step)
        step.__dict__["__name__"] = name
    return step


def _name(step: Step) -> str:
    return getattr(step, "__name__", None) or str(step)  # the repr includes the whole module and is slow


class CacheSwitch:
    """A context manager that disables `use_cache` in the configs of Hugging Face models while a step runs.

    Outside of the context, the configs are unchanged, so that saving a model and generating with it are not affected.
    """

    def __init__(self, module: nn.Module) -> None:
        configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
        found = {id(config): config for config in configs if _has_cache(config)}
        self._configs = list(found.values())
        self._switched: list[Any] = []

    def log(self) -> None:
        """Log one line if `use_cache` of a config is enabled, because it will be disabled in steps."""
        names = {type(config).__name__: None for config in self._configs if config.use_cache}
        if names:
            rank_zero_info(
                f"use_cache=True of {', '.join(names)} is switched off while steps run in the pipeline, whose layers "
                "see each batch once; the config itself is not changed"
            )

    def __enter__(self) -> None:
        self._switched = [config for config in self._configs if config.use_cache]
        for config in self._switched:
            config.use_cache = False

    def __exit__(self, *_: object) -> None:
        for config in self._switched:
            config.use_cache = True


def _has_cache(config: Any) -> bool:
    """Return whether an object is a config of transformers with the option `use_cache`."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(config).__mro__}
    return "transformers" in libraries and isinstance(getattr(config, "use_cache", None), bool)
