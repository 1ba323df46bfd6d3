"""All private names of Lightning, torch, torchmetrics and transformers that the trainer layer uses.

Each name has its own test, so that a new version which renames or changes it fails a test with this name. No other
module may use private names of these libraries.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp,
)
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelCheckpoint,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt, _call_strategy_hook
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed import PrefixStore, _functional_collectives  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_pipes.engine.compute.rng import comparable_state, random_state, set_random_state

init_distributed = _init_dist_connection
set_num_threads_if_needed = _set_num_threads_if_needed
optimizer_to_device = _optimizer_to_device
optimizers_to_device = _optimizers_to_device
init_optimizers = _init_optimizers_and_lr_schedulers
SubprocessLauncher = _SubprocessScriptLauncher


BaseLauncher = _Launcher
call_and_handle_interrupt = _call_and_handle_interrupt


def call_children_scripts(launcher: _SubprocessScriptLauncher, command: Sequence[str], directory: str) -> None:
    """Start the program for the other devices of this node. The processes are in `launcher.procs` afterwards.

    Args:
        launcher: the launcher.
        command: the command of the program. Under Hydra, the command of Hydra is used instead.
        directory: the working directory of `command`.
    """

    def start(given: Sequence[str], env: Mapping[str, str], cwd: str | None) -> Any:
        return subprocess.Popen(given, env=env, cwd=directory if cwd is None else cwd)

    replaced = {"_basic_subprocess_cmd": lambda: command, "subprocess": SimpleNamespace(Popen=start)}
    before = {name: getattr(subprocess_script, name) for name in replaced}
    vars(subprocess_script).update(replaced)
    try:
        launcher._call_children_scripts()
    finally:
        vars(subprocess_script).update(before)


def trainer_results(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state of a Trainer after a run: metrics, the progress of its loops, and the reason why it ended."""
    return {
        "metrics": [dict(each) for each in _metrics(trainer)],
        "loops": [loop.state_dict() for loop in _loops(trainer).values()],
        "state": trainer.state,
        "should_stop": trainer.should_stop,
    }


def restore_trainer_results(trainer: pl.Trainer, results: Mapping[str, Any]) -> None:
    """Set the state of a Trainer to the state of a Trainer in another process."""
    for mine, given in zip(_metrics(trainer), results["metrics"], strict=True):
        mine.clear()
        mine.update(given)
    for loop, state in zip(_loops(trainer).values(), results["loops"], strict=True):
        loop.load_state_dict(state)
        _mark_as_run(loop)
    trainer.state, trainer.should_stop = results["state"], results["should_stop"]


def _mark_as_run(loop: Any) -> None:
    """Reset the flags with which `load_state_dict` makes a loop continue from a checkpoint."""
    loop.restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            _mark_as_run(each)


def _metrics(trainer: pl.Trainer) -> list[dict[str, Any]]:
    connector = trainer._logger_connector
    return [connector.callback_metrics, connector.logged_metrics, connector.progress_bar_metrics]


reduce_over = _sync_ddp
gather_over = _all_gather_ddp_if_available
WrappingCheckpointIO = _WrappingCheckpointIO

Averaging: TypeAlias = WeightAveraging | StochasticWeightAveraging
SignalHandler = Callable[[int, FrameType | None], None]
_MAX_FRAMES = 10
"""The largest number of calls between a Lightning function that reads a tensor and the method of the tensor."""


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return the entry for the position of a tensor in the index of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def process_groups() -> list[object]:
    """Return all process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def caller_of_property(frame: FrameType, *names: str) -> FrameType | None:
    """Return the caller of a property of the Trainer if `frame` runs that property, and None otherwise.

    Args:
        frame: the frame to examine.
        names: the name of the property, and the names of the properties that compute it, the innermost last.
    """
    found: FrameType | None = frame
    for name in reversed(names):
        if found is None or found.f_code is not vars(pl.Trainer)[name].fget.__code__:
            return None
        found = found.f_back
    return found


def show_default_group(group: Any, size: int) -> None:
    """Make a group of `size` ranks the default process group. `group.whole` is the previous default group."""
    world: Any = dist.distributed_c10d._world
    whole = group.whole
    backend, store = world.pg_map[whole]
    world.pg_map[group] = backend, PrefixStore(f"replicas/{group.purpose}", store)
    world.pg_names[group] = f"replicas {group.purpose}"
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.pg_backend_config[group] = world.pg_backend_config[whole]
    world.default_pg = group


def hide_default_group(whole: Any) -> None:
    """Undo `show_default_group`, so that `whole` is the default group again."""
    world: Any = dist.distributed_c10d._world
    group = dist.group.WORLD
    world.default_pg = whole
    if group is not whole:
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(group, None)


def redirect_functional_collectives(redirect: Callable[[Any], Any]) -> Callable[[], None]:
    """Make the functional collectives of torch use `redirect(group)`, and return a function that undoes this."""
    module: Any = _functional_collectives
    resolve = module._resolve_group

    def resolve_redirected(group: Any, tag: str = "") -> Any:
        found = resolve(group, tag)
        return redirect(found) if isinstance(found, dist.ProcessGroup) else found

    module._resolve_group = resolve_redirected
    return partial(setattr, module, "_resolve_group", resolve)


def plain_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the optimizer inside of Lightning's wrapper, or the given optimizer if it is not wrapped."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def lightning_optimizers(trainer: pl.Trainer) -> list[LightningOptimizer]:
    """Return the optimizers that `self.optimizers()` returns in the user's step."""
    return list(trainer.strategy._lightning_optimizers)


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh | None) -> None:
    """Set the module's `device_mesh`."""
    module._device_mesh = mesh


def callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks of the Trainer.

    The attribute is public, but another class sets it, so that type checkers do not find it.
    """
    found: list[pl.Callback] = vars(trainer)["callbacks"]
    return found


def remove_progress_bars(trainer: pl.Trainer) -> None:
    """Remove the progress bars from the callbacks of the Trainer."""
    vars(trainer)["callbacks"] = [c for c in callbacks(trainer) if not isinstance(c, ProgressBar)]


def replace_signal_handlers(trainer: pl.Trainer, sigterm: SignalHandler, requeue: SignalHandler) -> SignalHandler:
    """Install handlers in the place from which Lightning registers its own handlers.

    The handlers of Lightning broadcast over all ranks and save checkpoints inside the handler, while the other ranks
    are elsewhere.

    Returns:
        Lightning's handler for a requeue by SLURM.
    """
    connector = trainer._signal_connector
    original = connector._slurm_sigusr_handler_fn
    connector.__dict__["_sigterm_notifier_fn"] = sigterm
    connector.__dict__["_slurm_sigusr_handler_fn"] = requeue
    return cast(SignalHandler, original)


def restore_signal_handlers(trainer: pl.Trainer) -> None:
    """Undo `replace_signal_handlers`."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        trainer._signal_connector.__dict__.pop(name, None)


def ends_at_sigterm(trainer: pl.Trainer) -> bool:
    """Return whether SIGTERM ends the process while no Trainer is running."""
    return trainer._signal_connector._original_handlers.get(signal.SIGTERM) == signal.SIG_DFL


def set_received_sigterm(trainer: pl.Trainer) -> None:
    """Make Lightning leave its loop at the next opportunity."""
    trainer._signal_connector.received_sigterm = True


def silence_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Prevent the training loop from broadcasting over all ranks before every batch."""
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None


def restore_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Undo `silence_sigterm_broadcast`."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def allow_skipped_batches(trainer: pl.Trainer) -> Callable[[], None]:
    """Allow a training step with several processes to skip a batch by returning None, as is allowed with one process.

    Returns:
        A function that undoes this.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization

    def run_step(kwargs: Mapping[str, Any]) -> Any:
        out = _call_strategy_hook(trainer, "training_step", *kwargs.values())
        return loop.output_result_cls.from_training_step_output(out, trainer.accumulate_grad_batches)

    vars(loop)["_training_step"] = run_step
    return partial(vars(loop).pop, "_training_step", None)


def share_validation_time(trainer: pl.Trainer, share: Callable[[bool], bool]) -> Callable[[], None]:
    """Make all ranks validate after the same batch if `val_check_interval` is a time.

    Args:
        trainer: the Trainer.
        share: returns whether the time is over on any rank. It is called at most once per batch.

    Returns:
        A function that undoes this.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    times: Any = trainer  # the Trainer does not declare these attributes
    interval, decided = times._val_check_time_interval, dict[int, bool]()
    if interval is None:
        return lambda: None

    def should_validate(fetcher: Any) -> bool:
        batch, since = loop.total_batch_idx, times._last_val_time
        if batch not in decided:
            decided.clear()
            decided[batch] = share(time.monotonic() - since >= interval)
        times._last_val_time = -math.inf if decided[batch] else math.inf
        try:
            found: bool = type(loop)._should_check_val_fx(loop, fetcher)
            return found
        finally:
            times._last_val_time = since

    vars(loop)["_should_check_val_fx"] = should_validate
    return partial(vars(loop).pop, "_should_check_val_fx", None)


def pauses_after_this_batch(trainer: pl.Trainer) -> bool:
    """Return whether training pauses after the current batch, as far as all ranks can determine this.

    Training pauses if the epoch, the training or an uninterrupted sequence of batches ends, or if a scheduler or a
    checkpoint reads metrics. A stop that one rank requests is not considered, because ranks agree on it later.
    """
    loop, fetcher, asked = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher, trainer.should_stop
    assert fetcher is not None, "nothing is being trained"
    trainer.should_stop = False
    try:
        return (
            loop._num_ready_batches_reached()
            or _is_max_limit_reached(trainer.global_step + 1, trainer.max_steps)
            or loop._should_check_val_fx(fetcher)
            or _reads_metrics(trainer)
        )
    finally:
        trainer.should_stop = asked


def _reads_metrics(trainer: pl.Trainer) -> bool:
    """Return whether a scheduler that monitors a metric, or ModelCheckpoint, acts after the batch in training_step."""
    loop = trainer.fit_loop.epoch_loop
    if loop._should_accumulate():
        return False
    step, batch = trainer.global_step + 1, loop.batch_idx + 1
    return any(
        config.reduce_on_plateau and config.interval == "step" and batch % config.frequency == 0
        for config in trainer.lr_scheduler_configs
    ) or any(
        c._every_n_train_steps >= 1 and step % c._every_n_train_steps == 0
        for c in trainer.checkpoint_callbacks
        if isinstance(c, ModelCheckpoint)
    )


def monitors_by_time(trainer: pl.Trainer) -> bool:
    """Return whether a ModelCheckpoint with `train_time_interval` monitors a metric."""
    return any(
        c._train_time_interval is not None and c.monitor is not None
        for c in trainer.checkpoint_callbacks
        if isinstance(c, ModelCheckpoint)
    )


@contextmanager
def as_in_training_step(trainer: pl.Trainer) -> Iterator[None]:
    """Make `self.log` behave in the block as it does in training_step."""
    module, stage = trainer.lightning_module, trainer.state.stage
    hook, module._current_fx_name = module._current_fx_name, "training_step"
    trainer.training = True
    try:
        yield
    finally:
        module._current_fx_name, trainer.state.stage = hook, stage


def in_grad_norm() -> bool:
    """Return whether this function is called, a few calls below, from Lightning's `grad_norm`.

    `grad_norm` needs values immediately. The values for layers of other ranks are assembled from the logs of these
    ranks.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_globals is grad_norm.__globals__:
            return frame is not None
        frame = frame.f_back
    return False


def before_step(precision: Precision, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Run what Lightning runs between backward and the optimizer step: hooks and gradient clipping."""
    precision._after_closure(module, optimizer)


def expect_late_steps(optimizer: Optimizer) -> None:
    """Prevent schedulers from warning that the optimizer has not stepped yet."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def metric_counts(metric: Metric) -> tuple[int, Any]:
    """Return the number of updates of a torchmetrics object, and the value of its last `forward`."""
    return metric._update_count, metric._forward_cache


def set_metric_counts(metric: Metric, updates: int, last: Any) -> None:
    """Set the values that `metric_counts` returned, and drop any computed value."""
    metric._update_count = updates
    metric._forward_cache = last
    metric._computed = None


def set_metric_sync(metric: Metric, on: bool) -> None:
    """Set whether a torchmetrics object gathers over all ranks when it computes, even if it has not been updated."""
    metric.sync_on_compute = on
    metric._to_sync = on


class LoaderOfSamples(DataLoader[Any]):
    """A DataLoader with iterators that take indices from a wrapper around its sampler or batch sampler."""

    def wrap_sampler(self, sampler: Iterable[Any]) -> Any:
        """Return the sampler from which iterators take indices."""
        raise NotImplementedError

    def samples(self) -> Any:
        """Return the wrapped sampler."""
        return self._index_sampler

    @property
    def has_workers(self) -> bool:
        """Whether persistent workers exist already. A pass draws no seed for them in this case."""
        return self._iterator is not None

    @property
    def _index_sampler(self) -> Any:
        return self.wrap_sampler(super()._index_sampler)


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of the training data, in the order of their dict or list.

    The list is empty before Lightning has set the loaders up.
    """
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def run_data(trainer: pl.Trainer) -> Any:
    """Return the data from the hook that creates the loaders of a run.

    If Lightning has not requested the data yet, it receives the same object at its next request, so that the hook is
    not called again. `forget_run_data` undoes this. The random numbers of the hook count as drawn at the request of
    Lightning, if no other numbers are drawn before.
    """
    loop = _loops(trainer)[trainer.state.fn or TrainerFn.FITTING]
    if loop._combined_loader is not None:
        return loop._combined_loader.iterables
    source = loop._data_source
    device = trainer.strategy.root_device
    before = random_state(device)
    data = _request_dataloader(source)
    after = random_state(device)
    set_random_state(before, device)

    def given() -> Any:
        forget_run_data(trainer)
        if comparable_state(random_state(device)) == comparable_state(before):
            set_random_state(after, device)
        return data

    source.__dict__["dataloader"] = given
    return data


@contextmanager
def show_training_data(trainer: pl.Trainer, data: Any) -> Iterator[None]:
    """Make `trainer.train_dataloader` return these data in the block if Lightning has not requested its data yet."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        yield
        return
    loop._combined_loader = CombinedLoader(data, "max_size_cycle")
    try:
        yield
    finally:
        loop._combined_loader = None


def _loops(trainer: pl.Trainer) -> dict[TrainerFn, Any]:
    return {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }


def has_delayed_training_data(trainer: pl.Trainer) -> bool:
    """Return whether the hook that creates the training data must be called later.

    This is the case if the counters of the Trainer may still be replaced by a checkpoint, or if the batch size is still
    to be found.
    """
    fit = trainer.fit_loop
    changing = trainer.ckpt_path is not None or any(isinstance(c, BatchSizeFinder) for c in callbacks(trainer))
    return changing and fit._combined_loader is None and fit._data_source.is_module()


def forget_run_data(trainer: pl.Trainer) -> None:
    """Make Lightning call the hooks for loaders again when it requests data."""
    for loop in _loops(trainer).values():
        loop._data_source.__dict__.pop("dataloader", None)


def on_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Return a batch as a step receives it: converted, and passed through the module's hooks for the transfer.

    The profiler of the Trainer is disabled meanwhile, because the batch is a sample from before training.
    """
    module, profiler = trainer.lightning_module, vars(trainer)["profiler"]
    vars(trainer)["profiler"] = PassThroughProfiler()
    try:
        batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
        return trainer.strategy.batch_to_device(batch)
    finally:
        vars(trainer)["profiler"] = profiler


def training_passes(trainer: pl.Trainer) -> list[Any]:
    """Return the current iterators of the training batches, in the order of `training_loaders`. Empty after `fit`."""
    combined = trainer.fit_loop._combined_loader
    if combined is None or combined._iterator is None or trainer.fit_loop._data_fetcher is None:
        return []
    return list(combined._iterator.iterators)


def batches_of_epoch(trainer: pl.Trainer) -> tuple[int, int, int]:
    """Return the number of training batches of this epoch that were loaded, trained, and completed by all hooks."""
    fetcher = trainer.fit_loop._data_fetcher
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    loaded = current.ready if fetcher is None else max(fetcher.fetched, current.ready)
    return loaded, current.processed, current.completed


def between_epochs(trainer: pl.Trainer) -> bool:
    """Return whether no epoch has begun, or the last one has ended."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.processed >= epochs.started)


def validation_follows(trainer: pl.Trainer) -> bool:
    """Return whether the hooks after a training batch are running and a validation follows."""
    fetcher = trainer.fit_loop._data_fetcher
    _, trained, hooked = batches_of_epoch(trainer)
    return fetcher is not None and trained > hooked and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def finish_batch(trainer: pl.Trainer, validate: bool) -> None:
    """Make a resumed run continue as it did after its checkpoint was written in `on_train_batch_end`.

    Lightning would skip the validation, and after the last batch of an epoch also the end of the epoch. This function
    sets the counters to the values of a checkpoint that is written after the batch and before the validation.

    Args:
        trainer: the Trainer.
        validate: whether a validation followed.
    """
    fit: Any = trainer.fit_loop
    epoch = fit.epoch_loop
    if not epoch.restarted_on_train_batch_end or not (validate or epoch.batch_progress.is_last_batch):
        return
    if epoch.batch_progress.is_last_batch and fit.restarted_mid_epoch:
        for counter in (fit.epoch_progress.total, fit.epoch_progress.current):  # Lightning counted the epoch's end
            counter.processed -= 1
            counter.completed -= 1
    epoch.batch_progress.increment_completed()
    epoch._restart_stage = "restarted_on_last"
    if validate:
        epoch.val_loop._restart_stage = "restarted_mid_evaluation"
        epoch.val_loop.restarting = False  # from its first batch
    else:
        fit._data_fetcher.done = True
        fit._data_fetcher.batches = []
        epoch._batches_that_stepped += 1


def forget_unfinished_batch(trainer: pl.Trainer) -> None:
    """Give the batch that failed before a checkpoint the same number again, because its random numbers depend on it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    if batches.total.ready > batches.total.processed:
        for counter in (batches.total, batches.current):
            counter.ready = counter.started = counter.processed


def begin_epoch(trainer: pl.Trainer) -> None:
    """Make a run that resumes between two epochs begin the next epoch normally, with a new pass over the data.

    With `max_steps`, Lightning would end the last epoch a second time.
    """
    fit = trainer.fit_loop
    epochs: Any = fit.epoch_progress.current
    epochs.completed = epochs.processed
    fit._restarting = fit.epoch_loop.restarting = fit._resuming_from_checkpoint = False
    fit.reset_restart_stage()


def seeded_workers(loader: DataLoader[Any]) -> bool:
    """Return whether Lightning would seed the workers of a loader by global rank.

    The ranks of a pipeline would then load different batches.
    """
    wanted = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    return wanted and loader.num_workers > 0 and loader.worker_init_fn is None


def is_spectral_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is the parametrization that `torch.nn.utils.parametrizations.spectral_norm` adds."""
    return isinstance(module, _SpectralNorm)


def spectral_norms(module: torch.nn.Module) -> list[str]:
    """Return the names of the layers with `torch.nn.utils.parametrizations.spectral_norm`."""
    found = [name for name, part in module.named_modules() if is_spectral_norm(part)]
    return [name.partition(".parametrizations.")[0] for name in found]


def unscale_gradients(scaler: torch.amp.GradScaler) -> Callable[..., dict[torch.device, torch.Tensor]]:
    """Return the method that divides gradients by the scale and reports whether one of them was not finite."""
    return scaler._unscale_grads_


def replace_unscale_gradients(
    scaler: torch.amp.GradScaler, method: Callable[..., dict[torch.device, torch.Tensor]] | None
) -> None:
    """Replace `_unscale_grads_` by `method`, or restore it if `method` is None."""
    if method is None:
        scaler.__dict__.pop("_unscale_grads_", None)
    else:
        scaler.__dict__["_unscale_grads_"] = method


def needed_layer_outputs() -> list[str]:
    """Return the outputs, such as hidden_states, that a running Hugging Face model collects with hooks."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return [] if collector is None else sorted(k for k in collector.get() or () if not k.startswith("_"))


WHOLE_CALL = "_compiled_call_impl"
"""The attribute of a module with a function that calls run in place of the module's hooks and forward."""


def whole_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls of a module run, with its hooks around its forward."""
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    return call


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module go through torch.compile, by a wrapper or in place."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def replace_strategy(trainer: pl.Trainer, strategy: Strategy, folder: str) -> None:
    """Replace the strategy and the root folder of the Trainer at the start of `fit`, and remove its profiler."""
    connector = trainer._accelerator_connector
    vars(connector).update(strategy=strategy, accelerator=strategy.accelerator)
    vars(trainer).update(_default_root_dir=folder, profiler=PassThroughProfiler())


def logged_values(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Return the values that have been logged so far, by hook and name.

    These are the values of the last step, and the sums from which the values of epochs are computed.
    """
    results, found = trainer._results, {}
    for name, logged in ({} if results is None else dict(results)).items():
        states = {"value": logged.value} if logged.is_tensor else dict(logged.value.metric_state)
        if logged.is_tensor and logged.meta.is_mean_reduction and logged.meta.on_epoch:
            states["samples"] = logged.cumulated_batch_size
        states["last"] = logged._forward_cache
        for state, value in states.items():
            if isinstance(value, list) and value and all(isinstance(part, torch.Tensor) for part in value):
                value = torch.cat([part.reshape(-1) for part in value])
            if isinstance(value, torch.Tensor):
                found[f"{name} ({state})"] = value
    return found


def ignore_warnings(message: str) -> Callable[[], None]:
    """Ignore warnings that match a regular expression, and return a function that undoes this.

    The undo function looks up the filters again, because other code may have changed them. It does not report the
    change to Python, which would show all warnings of a process again, in every sibling of an array.
    """
    ignored = "ignore", re.compile(message, re.IGNORECASE), Warning, None, 0
    filters = cast(list[Any], warnings.filters)
    filters.insert(0, ignored)

    def undo() -> None:
        for number, each in enumerate(filters := cast(list[Any], warnings.filters)):
            if each is ignored:
                del filters[number]
                return

    return undo


def find_average(callback: Averaging) -> nn.Module | None:
    """Return the copy of a module in which a callback averages weights. The `setup` of the callback creates it."""
    average: nn.Module | None = callback._average_model
    return average


def count_averaged(callback: Averaging) -> int:
    """Return the number of times that weights were averaged, in this run and before it was resumed."""
    if isinstance(callback, StochasticWeightAveraging):
        return callback._init_n_averaged
    return 0 if callback._average_model is None else int(callback._average_model.n_averaged)


def drop_average(callback: Averaging) -> None:
    """Reset a callback to its state before `setup`."""
    callback._average_model = None


def find_pruning_obstacles(callback: ModelPruning) -> Iterator[str]:
    """Yield the settings of a callback that prevent pruning each layer separately, and the settings to use instead."""
    prunes_at_random = (callback._pruning_method_name or "").startswith("random")
    resamples = bool(callback._use_lottery_ticket_hypothesis) and callback._resample_parameters
    obstacles = {
        "compares the weights of all layers: set use_global_unstructured=False": callback._use_global_unstructured,
        "draws random numbers for one layer after another: take an 'l1' or 'ln' function": prunes_at_random,
        "draws new weights for one layer after another: set resample_parameters=False": resamples,
        "leaves weights with other names when it ends: set make_pruning_permanent=True": (
            not callback._make_pruning_permanent
        ),
        "prunes in each validation: set prune_on_train_epoch_end=True": not callback._prune_on_train_epoch_end,
    }
    return (obstacle for obstacle, is_set in obstacles.items() if is_set)


def pruned_layers(callback: ModelPruning) -> tuple[list[tuple[nn.Module, str]], dict[int, Any]]:
    """Return the layers and weight names that a callback prunes, and the copies of the layers from its `setup`."""
    return [*callback._parameters_to_prune], callback._original_layers or {}


def keep_pruned(callback: ModelPruning, kept: Sequence[tuple[nn.Module, str]], copies: Mapping[int, Any]) -> None:
    """Make a callback prune only these weights, and use these copies if it starts again from the original weights."""
    numbers = {(id(layer), name): n for n, (layer, name) in enumerate(kept)}
    callback._parameters_to_prune = kept
    if callback._original_layers is not None:
        callback._original_layers = {
            key: {
                "data": copies[key]["data"],
                "names": [(numbers[key, name], name) for _, name in copies[key]["names"]],
            }
            for key in dict.fromkeys(id(layer) for layer, _ in kept)
        }
