"""Manual optimization: the user's step calls backward and optimizers, and all stages run it together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import Clipping
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.watcher import TrainingStep
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.module.capture import named_step
from lightning_pipes.trainer.step.logs import recorded


class ManualLoop(TrainingLoop):
    """Trains by steps that call backward and optimizers themselves."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        run, module, trainer = self._run, self._run.cut.module, self._run.trainer
        assert run.steps.joint is not None, "the module is cut by units"
        step = TrainingStep(
            batch,
            rows_of(batch),
            arguments,
            1,
            number=trainer.fit_loop.total_batch_idx,
            batch_idx=arguments[0] if arguments else trainer.fit_loop.batch_idx,
        )
        run.watchers.before_batch(step)
        with run.watchers.around_batch(step), ExitStack() as stack:
            stack.enter_context(run.cut.scope.running(f"{type(module).__name__}.training_step", everywhere=True))
            stack.enter_context(self._paused_calls(optimizers))
            calls = stack.enter_context(recorded(module))
            stack.enter_context(trainer.precision_plugin.train_step_context())
            out = run.steps.joint.run_together(named_step(module, "training_step"), batch, arguments, calls)
        step.last_mark = run.control.broadcast(step.mark, run.last_rank)
        run.watchers.of_evaluation.after_batch(step)
        with trainer.precision_plugin.train_step_context():
            run.replay.replay_calls(calls)
        return move_data_to_device(out, run.device)

    def run_backward(
        self, precision: Precision, loss: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run backward between Lightning's hooks, as its strategies do."""
        module = self._run.cut.module
        loss = precision.pre_backward(loss, module)
        precision.backward(loss, module, None, *args, **kwargs)
        with self.pause_step():
            return precision.post_backward(loss, module)

    def pause_step(self) -> AbstractContextManager[None]:
        joint = self._run.steps.joint
        return nullcontext() if joint is None else joint.pause_units()

    def resume_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        joint = self._run.steps.joint
        return closure if joint is None else joint.resume_units(closure)

    @contextmanager
    def _paused_calls(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Run optimizers, schedulers and clipping of the step in pauses, on each stage with its own weights."""
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
            shown: list[Any] = private.lightning_optimizers(run.trainer)
            for each in (*optimizers, *shown):
                stack.enter_context(_replaced(each, "zero_grad", paused(each.zero_grad, local=True)))
            stack.enter_context(_replaced(module, "clip_gradients", paused(module.clip_gradients, local=False)))
            yield

    def drain(self) -> None:
        pass

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        return self._run.connections.make_agreement(self._run.trainer, stops, self._run.control)

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """No stage runs apart from the others."""

    def give_back_gradients(self) -> None:
        """They are where backward has left them."""


@contextmanager
def idle_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Switch off steps of optimizers and schedulers in the block; backward is torch's own."""

    def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    trained = [(p, p.requires_grad) for p in module.parameters()]
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
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
