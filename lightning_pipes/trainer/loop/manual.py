"""The training loop of manual optimization.

The user's step calls backward and the optimizers, and all stages run it together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import Clipping, averages_one_by_one
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.data.batches import rows_of
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.watcher import TrainingStep
from lightning_pipes.trainer.results.logs import recorded


class ManualLoop(TrainingLoop):
    """Train with steps that call backward and the optimizers themselves."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        run, module, trainer = self._run, self._run.cut.module, self._run.trainer
        assert run.user_steps.joint is not None, "the module is cut by units"
        step = TrainingStep(
            batch,
            rows_of(batch, run.plans.microbatches > 1),
            arguments,
            1,
            number=trainer.fit_loop.total_batch_idx,
            batch_idx=arguments[0] if arguments else trainer.fit_loop.batch_idx,
        )
        run.watchers.before_batch(step)
        with run.watchers.around_batch(step), ExitStack() as stack:
            stack.enter_context(run.cut.scope.running(f"{type(module).__name__}.training_step", on_all_ranks=True))
            stack.enter_context(self._paused_calls(optimizers))
            calls = stack.enter_context(recorded(module))
            stack.enter_context(trainer.precision_plugin.train_step_context())
            user_step = named_step(module, "training_step")
            out, step.last_mark = run.user_steps.joint.run_together(user_step, batch, arguments, calls, step.mark)
        run.watchers.of_evaluation.after_batch(step)
        with trainer.precision_plugin.train_step_context():
            run.replay.replay_calls(calls)
        return move_data_to_device(out, run.device)

    def run_backward(
        self, precision: Precision, loss: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run backward between Lightning's hooks, as Lightning's own strategies do."""
        module = self._run.cut.module
        loss = precision.pre_backward(loss, module)
        precision.backward(loss, module, None, *args, **kwargs)
        with self.pause_step():
            return precision.post_backward(loss, module)

    def pause_step(self) -> AbstractContextManager[None]:
        joint = self._run.user_steps.joint
        return nullcontext() if joint is None else joint.pause_units()

    def resume_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        joint = self._run.user_steps.joint
        return closure if joint is None else joint.resume_units(closure)

    @contextmanager
    def _paused_calls(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Run the optimizers, schedulers and clipping of the step in pauses, on each stage with its own weights."""
        run = self._run
        scope, module = run.cut.scope, run.cut.module

        def paused(function: Callable[..., Any], local: bool) -> Callable[..., Any]:
            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.pause_step(), scope.suspend_hooks() if local else nullcontext():
                    return function(*args, **kwargs)

            return call

        def clip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return paused(original, local=False)(*args, **kwargs)

        with ExitStack() as stack:
            for name in (Clipping.WHOLE, Clipping.BY_VALUE):
                stack.callback(Clipping.around(name, clip))
            stack.enter_context(averages_one_by_one())
            for optimizer in optimizers:
                stack.enter_context(_replaced(optimizer, "step", self._paused_step(optimizer)))
            shown: list[Any] = private.lightning_optimizers(run.trainer)
            for each in (*optimizers, *shown):
                stack.enter_context(_replaced(each, "zero_grad", paused(each.zero_grad, local=True)))
            stack.enter_context(_replaced(module, "clip_gradients", paused(module.clip_gradients, local=False)))
            yield

    def _paused_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return a `step` for an optimizer that is called without Lightning.

        The call pauses the units, and then steps the weights of this stage only.
        """
        original, run = optimizer.step, self._run
        joint = run.user_steps.joint
        assert joint is not None

        @wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not joint.is_computing:
                return original(*args, **kwargs)
            if args or any(value is not None for value in kwargs.values()):
                raise PipelineError(
                    f"{type(optimizer).__name__}.step is given a closure without Lightning, and stages can't compute "
                    "in it together. Call step(closure) of self.optimizers()"
                )
            with self.pause_step(), run.cut.scope.suspend_hooks():
                return original()

        return step

    def drain(self) -> None:
        pass

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        return self._run.connections.make_agreement(self._run.trainer, stops, self._run.control)

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Do nothing, because no stage runs apart from the others."""

    def give_back_gradients(self) -> None:
        """Do nothing, because the gradients are already in place after backward."""


class _Settings(NamedTuple):
    """The saved settings of an optimizer: the settings of its groups, its defaults, and its state."""

    optimizer: Optimizer
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    defaults: dict[str, Any]
    state: dict[Any, Any]

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer) -> _Settings:
        groups = [(group, _copy_settings(group)) for group in optimizer.param_groups]
        return cls(optimizer, groups, _copy_settings(optimizer.defaults), dict(optimizer.state))

    def restore(self) -> None:
        """Restore the settings of the optimizer."""
        optimizer = self.optimizer
        optimizer.param_groups[:] = [group for group, _ in self.groups]
        for table, kept in (*self.groups, (optimizer.defaults, self.defaults)):
            for name in [name for name in table if name not in kept]:
                del table[name]
            for name, (before, copied) in kept.items():
                table[name] = before
                if isinstance(before, torch.Tensor) and name != "params":
                    before.detach().copy_(copied)  # schedulers refer to this tensor
                elif name != "params":
                    table[name] = copied
        optimizer.state.clear()
        optimizer.state.update(self.state)


def _copy_settings(table: dict[str, Any]) -> dict[str, Any]:
    """Return each setting together with a copy of it. Parameters are not copied."""
    found = {}
    for name, value in table.items():
        if isinstance(value, torch.Tensor):
            found[name] = value, value.detach().clone()
        else:
            found[name] = value, value if name == "params" else copy.deepcopy(value)
    return found


@contextmanager
def idle_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Disable the steps of optimizers and schedulers in the block. A backward is an ordinary backward of torch."""

    def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    trained = [(p, p.requires_grad) for p in module.parameters()]
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    settings = [_Settings.from_optimizer(each) for each in trainer.optimizers]
    replaced = {"manual_backward": backward, "clip_gradients": _do_nothing}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(_replaced(module, name, function))
        for each in (*trainer.optimizers, *private.lightning_optimizers(trainer)):
            stack.enter_context(_replaced(each, "step", step))
        for scheduler in schedulers:
            stack.enter_context(_replaced(scheduler, "step", _do_nothing))
        try:
            yield
        finally:
            for parameter, before in trained:
                parameter.requires_grad_(before)
            for kept in settings:
                kept.restore()


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _replaced(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    own = vars(owner)
    before = own.get(name)
    own[name] = function
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before
