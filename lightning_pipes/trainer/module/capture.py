"""Running the user's step around the pipelined layers: up to their call, or past it with a given answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.ir import PipelineError

Step = Callable[..., Any]


class _Reached(BaseException):
    """Unwinds the user's step once the pipelined module is called; `except Exception` must not stop it."""

    def __init__(self, x: Any) -> None:
        self.x = x


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
    """Decides what a call of the pipelined module does, or a loop over its layers.

    Args:
        name: how the user calls the module, for messages.
        loop: whether it can only be called layer by layer.
        around: the context in which steps run, again and again.
    """

    def __init__(self, name: str, loop: bool = False, around: AbstractContextManager[Any] | None = None) -> None:
        self._around = around or nullcontext()
        self._name = f"the layers of {name}" if loop else f"{name}(...)"
        self._answer: Callable[[Any], Any] | None = None
        self._step = ""
        self._calls = 0

    @property
    def running(self) -> bool:
        """Whether a step is running that may make the call."""
        return self._answer is not None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of the pipelined module, as made by the user's step.

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
        return self.reach(args[0])

    def reach(self, x: Any) -> Any:
        """The call of the layers with `x`; what they return.

        Raises:
            PipelineError: it is the step's second call.
        """
        assert self._answer is not None, "no step is running"
        self._calls += 1
        if self._calls > 1:
            raise PipelineError(
                f"{self._step} calls {self._name} more than once for one batch; a batch can pass the pipeline "
                "once. Join the inputs along axis 0 and call it once"
            )
        return self._answer(x)

    def capture(self, step: Step, *args: Any) -> Any:
        """With what `step(*args)` calls the layers; the step goes no further.

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

    def supply(self, step: Step, answer: Callable[[Any], Any], *args: Any) -> Any:
        """The result of `step(*args)` when its call of the pipelined module gives `answer(x)`.

        Raises:
            PipelineError: the step makes no such call.
        """
        out = self._run(answer, step, args)
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


def named_step(owner: object, name: str) -> Step:
    """A step of a module, with that name; it may be an attribute that has none, such as a functools.partial."""
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
    """Whether it is a config of transformers that knows `use_cache`."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(config).__mro__}
    return "transformers" in libraries and isinstance(getattr(config, "use_cache", None), bool)
