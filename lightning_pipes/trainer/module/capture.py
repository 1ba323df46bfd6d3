"""Running the user's step around the pipelined layers: up to their call, or past it with a given answer."""

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
    """Unwinds the user's step once the pipelined module is called; `except Exception` must not stop it."""

    def __init__(self, x: Any) -> None:
        self.x = x


class ChangedInput(NamedTuple):
    """The output of layers and their in-place changes of the input, as of `nn.ReLU(inplace=True)` as the first layer.

    Attributes:
        out: what the last of them returns.
        changed: the values of the changed tensors of the input, by their numbers in it.
    """

    out: Any
    changed: dict[int, torch.Tensor]

    def write_changes(self, x: Any) -> Any:
        """Change the input of the layers as they have changed it on another rank, and return their output."""
        tensors = tensors_in(x)
        for number, value in self.changed.items():
            tensors[number].copy_(value)
        return self.out


class NoCallError(PipelineError):
    """A step has ended, and has not called the layers.

    Attributes:
        out: what the step returned.
        calls: what it logged.
    """

    def __init__(self, text: str, out: Any) -> None:
        super().__init__(text)
        self.out = out
        self.calls: Any = None


class Interceptor:
    """Intercepts calls of the pipelined module, or of a loop over its layers.

    Args:
        name: how the user calls the module, for messages.
        loop: whether it can only be called layer by layer.
        around: the context in which steps run, again and again.
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
        """Whether a step is running that may make the call."""
        return self._answer is not None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of the pipelined module by the user's step.

        Raises:
            PipelineError: no step is running, it is the step's second call, or it has not one positional argument.
        """
        if self._answer is None:
            raise PipelineError(
                f"{self._name} was called outside of training_step, validation_step, test_step and predict_step; "
                "its layers are spread over several ranks there. Call it from a step, or after the Trainer has ended; "
                "instead of torch.utils.checkpoint, which calls it again, set PipelineStrategy(recompute=True)"
            )
        if kwargs or len(args) != 1:
            raise PipelineError(
                f"{self._step} calls {self._name} with {len(args)} positional arguments and the keywords "
                f"{sorted(kwargs)}; it takes one positional argument, which may be a tuple or dict of tensors. Layers "
                "with several arguments go into an nn.ModuleList and are called in a loop"
            )
        return self.call_layers(args[0])

    def call_layers(self, x: Any) -> Any:
        """Answer the call of the layers with `x`.

        Raises:
            PipelineError: it is the step's second call, and nothing answers that.
        """
        assert self._answer is not None, "no step is running"
        if in_functorch():
            raise PipelineError(
                f"{self._step} calls {self._name} within a transform of torch.func, such as grad, jvp or vmap, and the "
                "layers are spread over several ranks. Call the transform in a layer, which one stage runs as a whole"
            )
        self._calls += 1
        if self._calls > 1 and self._answer_later is not None:
            return _with_changes(self._answer_later(x), x)
        if self._calls > 1:
            raise PipelineError(
                f"{self._step} calls {self._name} more than once for one batch; in training a batch can pass these "
                "layers once. Cut the module by units, PipelineStrategy(module=''), which may be called again, or join "
                "the inputs along axis 0 and call the layers once"
            )
        return _with_changes(self._answer(x), x)

    def capture(self, step: Step, *args: Any) -> Any:
        """Return the input with which `step(*args)` calls the layers; the step goes no further.

        Raises:
            NoCallError: the step ends without the call.
            PipelineError: it has caught what the call raised.
        """

        def reached(x: Any) -> Any:
            raise _Reached(x)

        try:
            out = self._run(reached, step, args)
        except _Reached as found:
            return found.x
        text = (
            f"{_name(step)} ended without a call of {self._name}, or caught what the call raised; it must make it "
            "once for every batch, and a bare `except:` around the call must become `except Exception:`. Where a batch "
            "goes through other layers, name their container: PipelineStrategy(module=...)"
        )
        raise PipelineError(text) if self._calls else NoCallError(text, out)

    def run_without(self, step: Step, *args: Any) -> Any:
        """Return the result of `step(*args)`, which does not call the layers.

        Raises:
            PipelineError: it does.
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
        """Return the result of `step(*args)` when its call of the pipelined module gives `answer(x)`.

        Args:
            apart: whether the graph of what `answer` gives does not go on to `x`.
            answer_later: returns the result of each call after the first one; None if the step may make only one.

        Raises:
            PipelineError: the step makes no such call, or takes a gradient from after it by something before it.
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
            raise PipelineError(f"{_name(step)} never calls {self._name}; it must make this call once for every batch")
        return out

    def _run(self, answer: Callable[[Any], Any], step: Step, args: tuple[Any, ...]) -> Any:
        self._answer, self._step, self._calls = answer, _name(step), 0
        try:
            with self._around:
                return step(*args)
        finally:
            self._answer = None


class _GapInGraph:
    """The gap in the graph of a step between input and output of the layers.

    Args:
        step: its name.
        layers: how the user calls them.
        x: what enters.
        y: what they return.
    """

    def __init__(self, step: str, layers: str, x: Any, y: Any) -> None:
        self._step, self._layers = step, layers
        self._entering, self._returned = graph_nodes(tensors_in(x)), graph_nodes(tensors_in(y))

    def check(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Raise PipelineError if a backward is to go from `outputs` over the gap.

        Args:
            inputs: whose gradients are asked for; none for all leaves.
        """
        if self._returned and not is_reached(graph_nodes(outputs), self._returned):
            return
        if not inputs or is_reached(self._entering, graph_nodes(inputs)):
            raise PipelineError(
                f"{self._step} takes a gradient of what {self._layers} returns by something before the layers, as "
                "torch.autograd.grad and backward() do. Layers are on other ranks, and every stage has its own part of "
                "the graph. Let layers compute what they add to the loss, and pass it along; Lightning calls "
                "backward() itself"
            )


def _with_changes(y: Any, x: Any) -> Any:
    return y.write_changes(x) if isinstance(y, ChangedInput) else y


def named_step(owner: object, name: str) -> Step:
    """Return a step of a module, with that name; it may be an attribute that has none, such as a functools.partial."""
    step: Step = getattr(owner, name)
    if not hasattr(step, "__name__"):
        step = partial(step)
        step.__dict__["__name__"] = name
    return step


def _name(step: Step) -> str:
    return getattr(step, "__name__", None) or str(step)  # a bound method's text holds the whole module's: slow


class CacheSwitch:
    """Switches `use_cache` off in a Hugging Face model's configs while a step runs.

    A context manager. Outside of it configs are as the user has them: what is saved or generated there is the same.
    """

    def __init__(self, module: nn.Module) -> None:
        configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
        found = {id(config): config for config in configs if _has_cache(config)}
        self._configs = list(found.values())
        self._switched: list[Any] = []

    def log(self) -> None:
        """Log one line where a step would fill a cache."""
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
    """Return whether it is a config of transformers that knows `use_cache`."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(config).__mro__}
    return "transformers" in libraries and isinstance(getattr(config, "use_cache", None), bool)
