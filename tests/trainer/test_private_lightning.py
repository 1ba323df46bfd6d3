"""Tests of every private name of Lightning and related packages that the trainer layer uses, one test per name."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import warnings
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
import transformers
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops import evaluation_loop, fetchers, training_epoch_loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import AsyncCheckpointIO, Precision, TorchCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import _functional_collectives
from torch.utils.data import DataLoader

from lightning_pipes.trainer import private_lightning as private


def trainer() -> pl.Trainer:
    """Return a Trainer on the CPU without output."""
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def arguments(function: Any) -> list[str]:
    """Return the names of a function's arguments."""
    return list(inspect.signature(function).parameters)


def test_sigterm_notifier_fn():
    """Lightning reads this handler from the instance, so a replacement there takes effect."""
    assert "self._sigterm_notifier_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "dist.broadcast" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)


def test_slurm_sigusr_handler_fn():
    """Lightning reads this handler from the instance, and the handler saves a checkpoint."""
    assert "self._slurm_sigusr_handler_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "save_checkpoint" in inspect.getsource(_SignalConnector._slurm_sigusr_handler_fn)


def test_signal_connector_is_replaced_and_restored():
    t = trainer()
    connector = t._signal_connector
    before = connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn
    seen: list[str] = []
    original = private.replace_signal_handlers(t, lambda *_: seen.append("term"), lambda *_: seen.append("requeue"))
    connector._sigterm_notifier_fn(15, None)
    connector._slurm_sigusr_handler_fn(10, None)
    assert seen == ["term", "requeue"]
    assert original == before[1]
    private.restore_signal_handlers(t)
    assert (connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn) == before


def test_received_sigterm():
    t = trainer()
    assert not t.received_sigterm
    private.set_received_sigterm(t)
    assert t.received_sigterm


def test_broadcast_sigterm_tensor():
    """Lightning calls this method on the instance before every batch."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    t = trainer()
    private.silence_sigterm_broadcast(t)
    assert t.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None
    private.restore_sigterm_broadcast(t)
    assert "_broadcast_sigterm_tensor" not in vars(t.fit_loop.epoch_loop)


class _WithData(pl.LightningModule):
    """A module that counts the calls of its data hook."""

    calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return DataLoader(range(8), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch * 2

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize("drawn", [0, 1])
def test_random_numbers_of_a_hook_that_is_asked_ahead_are_drawn_when_lightning_asks(drawn):
    """Calling the data hook early does not change random numbers.

    The hook and Lightning draw the same numbers as without the early call, unless other numbers are drawn in between.
    """

    class Drawing(_WithData):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.rand(8), batch_size=2)

    made = []
    for ahead in (False, True):
        t, module = trainer(), Drawing()
        t.strategy.connect(module)
        module.trainer = t
        t._data_connector.attach_data(module)
        torch.manual_seed(7)
        if ahead:
            private.run_data(t)
        before = torch.rand(drawn)
        t.fit_loop.setup_data()
        made.append((before, t.fit_loop._combined_loader.iterables.dataset, torch.rand(1)))
    (_, data, after), (_, data_ahead, after_ahead) = made
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(data, data_ahead) == torch.equal(after, after_ahead) == (not drawn)


def test_data_source_and_request_dataloader():
    """If the data hook was called early, Lightning gets the same loader without calling the hook again.

    Later requests call the hook, and `forget_run_data` restores the original data sources.
    """
    t, module = trainer(), _WithData()
    t.strategy.connect(module)
    module.trainer = t
    t._data_connector.attach_data(module)
    ahead = private.run_data(t)
    assert module.calls == 1
    assert not private.has_delayed_training_data(t)
    t.fit_loop.setup_data()
    assert module.calls == 1
    assert t.fit_loop._combined_loader.iterables.dataset is ahead.dataset
    assert private.run_data(t) is t.fit_loop._combined_loader.iterables
    t.fit_loop._combined_loader = None
    t.fit_loop.setup_data()
    assert module.calls == 2
    t.fit_loop._combined_loader = None
    private.run_data(t)
    private.forget_run_data(t)
    assert "dataloader" not in vars(t.fit_loop._data_source)
    t._data_connector.attach_data(module, test_dataloaders=[ahead])
    t.state.fn = TrainerFn.TESTING
    assert private.run_data(t) == [ahead]
    private.forget_run_data(t)
    assert "dataloader" not in vars(t.test_loop._data_source)
    t.state.fn = TrainerFn.FITTING
    t.ckpt_path = "somewhere"
    assert private.has_delayed_training_data(t)


def test_batch_transfer_hooks():
    """Both transfer hooks of the module run when a batch is moved to the device."""
    t, module = trainer(), _WithData()
    t.strategy.connect(module)
    module.trainer = t
    t._data_connector.attach_data(module)
    assert private.on_device(t, torch.ones(2)).tolist() == [3.0, 3.0]


def test_init_optimizers_and_lr_schedulers():
    assert arguments(private.init_optimizers) == ["model"]


def test_lightning_optimizer_s_optimizer():
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert private.plain_optimizer(LightningOptimizer(plain)) is plain
    assert private.plain_optimizer(plain) is plain


def test_lightning_optimizers():
    run, plain = trainer(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    run.strategy.optimizers = [plain]
    assert [each.optimizer for each in private.lightning_optimizers(run)] == [plain]


def test_training_step_and_call_strategy_hook():
    """`_training_step` calls the strategy through `_call_strategy_hook`, and a step that returns None is skipped."""
    run = trainer()
    loop = run.fit_loop.epoch_loop.automatic_optimization
    assert arguments(loop._training_step) == ["kwargs"]
    undo = private.allow_skipped_batches(run)
    with mock.patch.object(private, "_call_strategy_hook", return_value=None) as call:
        assert loop._training_step({"batch": 3}).closure_loss is None
    assert call.call_args.args == (run, "training_step", 3)
    undo()
    assert "_training_step" not in vars(loop)


def test_optimizer_to_device():
    assert arguments(private.optimizer_to_device) == ["optimizer", "device"]
    assert arguments(private.optimizers_to_device) == ["optimizers", "device"]


def test_init_dist_connection():
    names = arguments(private.init_distributed)
    assert names[:2] == ["cluster_environment", "torch_distributed_backend"]
    assert "kwargs" in names


def test_subprocess_script_launcher():
    assert arguments(private.SubprocessLauncher)[:3] == ["cluster_environment", "num_processes", "num_nodes"]


def test_call_children_scripts():
    """`_call_children_scripts` fills `procs`, and passes the environment of this process to the children."""
    source = inspect.getsource(private.SubprocessLauncher._call_children_scripts)
    assert "self.procs.append(new_process)" in source
    assert "env_copy = os.environ.copy()" in source


def test_set_num_threads_if_needed(monkeypatch):
    """The number of threads stays unchanged if `OMP_NUM_THREADS` is set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    private.set_num_threads_if_needed(num_processes=1)
    assert torch.get_num_threads() == before


def test_process_groups():
    """`process_groups` lists a new group until the group is destroyed."""
    started = not dist.is_initialized()  # the Trainer of another test may have created the default group
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = len(private.process_groups())
        assert before >= 1
        group = dist.new_group([0])
        assert any(found is group for found in private.process_groups())
        dist.destroy_process_group(group)
        assert len(private.process_groups()) == before
    finally:
        if started:
            dist.destroy_process_group()


def test_default_group():
    """Functions of torch use the replacement of the default group until it is hidden."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = dist.group.WORLD
    group = dist.ProcessGroup(0, 1)
    shown = type("Shown", (dist.ProcessGroup,), {"whole": whole, "purpose": "0", "size": lambda self: 7})(0, 7)
    before = len(private.process_groups())
    try:
        dist.group.WORLD = group
        assert dist.group.WORLD is group
        dist.group.WORLD = whole
        private.show_default_group(shown, 7)
        assert dist.get_world_size() == 7
        assert dist.get_process_group_ranks(None) == [*range(7)]
        assert dist.get_backend() == dist.get_backend(whole)
        private.hide_default_group(whole)
        assert dist.group.WORLD is whole
        assert len(private.process_groups()) == before
    finally:
        private.hide_default_group(whole)
        if started:
            dist.destroy_process_group()


def test_resolve_group():
    """Functional collectives use the group returned by the redirection, until it is removed."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, asked = dist.new_group([0]), []
        restore = private.redirect_functional_collectives(lambda found: asked.append(found) or found)
        _functional_collectives.wait_tensor(_functional_collectives.all_reduce(torch.ones(2), "sum", group))
        assert asked == [group]
        restore()
        _functional_collectives.wait_tensor(_functional_collectives.all_reduce(torch.ones(2), "sum", group))
        assert asked == [group]
    finally:
        if started:
            dist.destroy_process_group()


def test_caller_of_property():
    """The caller of a Trainer's property is found if the frame belongs to this property, and is None otherwise."""
    frames = []

    class Strategy:
        @property
        def world_size(self):
            frames.append(private.caller_of_property(sys._getframe(1), "world_size"))
            frames.append(private.caller_of_property(sys._getframe(1), "num_devices", "device_ids"))
            return 1

    t = trainer()
    t._accelerator_connector.strategy = Strategy()
    assert t.world_size == 1
    assert frames == [sys._getframe(), None]


def test_original_signal_handlers():
    """`_original_handlers` contains the handlers that were installed before those of Lightning."""
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer._signal_connector.register_signal_handlers()
        assert private.ends_at_sigterm(trainer)
        trainer._signal_connector.teardown()
        signal.signal(signal.SIGTERM, lambda *_: None)
        trainer._signal_connector.register_signal_handlers()
        assert not private.ends_at_sigterm(trainer)
        trainer._signal_connector.teardown()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_metric_counts():
    """`metric_counts` and `set_metric_counts` use `_update_count`, `_forward_cache` and `_computed` of torchmetrics."""
    metric, other = torchmetrics.SumMetric(), torchmetrics.SumMetric()
    metric(torch.tensor(2.0))
    metric(torch.tensor(3.0))
    assert private.metric_counts(metric) == (2, torch.tensor(3.0))
    assert other._computed is None
    other._computed = torch.tensor(7.0)
    private.set_metric_counts(other, *private.metric_counts(metric))
    assert private.metric_counts(other) == (2, torch.tensor(3.0))
    assert other._computed is None


def test_metric_to_sync():
    """The wrapped `compute` reads `_to_sync`, which only `forward` would update."""
    metric = torchmetrics.SumMetric()
    private.set_metric_sync(metric, False)
    assert "should_sync=self._to_sync" in inspect.getsource(torchmetrics.Metric._wrap_compute)
    assert not metric._to_sync


def test_auto_add_worker_init_fn(monkeypatch):
    """Lightning seeds workers by rank only if the loader has no `worker_init_fn`."""
    monkeypatch.setitem(os.environ, "PL_SEED_WORKERS", "1")
    loader = DataLoader([1, 2], num_workers=1)
    assert private.seeded_workers(loader)
    fabric_data._auto_add_worker_init_fn(loader, rank=3)
    assert loader.worker_init_fn.keywords == {"rank": 3}
    assert not private.seeded_workers(loader)


class Halves(private.LoaderOfSamples):
    """A loader that uses every second entry of its sampler."""

    def wrap_sampler(self, sampler: Any) -> Any:
        return list(sampler)[::2]


@pytest.mark.parametrize("workers", [0, 1])
def test_index_sampler(workers):
    """Torch's iterators and the length of a loader both use the wrapped sampler."""
    loader = Halves(torch.arange(8), 2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 5]]
    assert len(loader) == 2
    assert loader.samples() == [[0, 1], [4, 5]]


def test_iterator_of_lasting_workers():
    """`has_workers` is true once the loader has started persistent workers."""
    loader = Halves(torch.arange(8), 2, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    assert not loader.has_workers
    next(iter(loader))
    assert loader.has_workers


class Looks(pl.Callback):
    """A callback that records the state of the loops in the hooks of a run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: pl.Trainer, where: str) -> None:
        follows = private.validation_follows(trainer)
        self.seen.append((where, private.batches_of_epoch(trainer), private.between_epochs(trainer), follows))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.look(trainer, "batch")
        assert private.training_loaders(trainer) == [trainer.train_dataloader]
        assert next(private.training_passes(trainer)[0], None) is None

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.look(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.look(trainer, "epoch")


def test_state_of_a_run():
    """`_combined_loader`, `_iterator`, `_data_fetcher` and the counters of the loops show the position of a run."""
    from tests.trainer.lit import Lit, data

    looks = Looks()
    t = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[looks],
    )
    assert private.training_loaders(t) == private.training_passes(t) == []
    assert private.between_epochs(t)
    t.fit(Lit().double(), DataLoader(data(8), batch_size=8), DataLoader(data(5), batch_size=5))
    assert looks.seen == [
        ("batch", (1, 1, 0), False, True),
        ("validation", (1, 1, 1), False, False),
        ("epoch", (1, 1, 1), True, False),
    ]
    assert private.training_passes(t) == []


def test_restart_stages():
    """The loops have the attributes that decide how a restart continues, and read them in the expected order.

    `checkpoint/test_resumable.py` tests their effect.
    """
    assert training_epoch_loop.RestartStage.RESTARTED_ON_LAST == "restarted_on_last"
    assert evaluation_loop.RestartStage.RESTARTED_MID_EVALUATION == "restarted_mid_evaluation"
    fit, epoch = trainer().fit_loop, trainer().fit_loop.epoch_loop
    assert {"_restart_stage", "_restarting", "_resuming_from_checkpoint"} <= vars(fit).keys()
    assert {"_restart_stage", "_batches_that_stepped"} <= vars(epoch).keys()
    assert "_restart_stage" in vars(epoch.val_loop)
    assert {"done", "batches"} <= vars(fetchers._PrefetchDataFetcher()).keys()
    run = inspect.getsource(type(fit).run)
    assert run.index("self.reset()") < run.index("self.on_run_start()") < run.index("self.on_advance_start()")
    start = inspect.getsource(type(fit).on_run_start)
    assert start.rstrip().endswith('call._call_strategy_hook(trainer, "on_train_start")')


def test_wrapping_checkpoint_io():
    """A wrapping plugin keeps the first plugin that it wraps, and ignores a second one."""
    inner, other = TorchCheckpointIO(), TorchCheckpointIO()
    assert issubclass(AsyncCheckpointIO, private.WrappingCheckpointIO)
    for wrapping in (AsyncCheckpointIO(inner), AsyncCheckpointIO()):
        wrapping.checkpoint_io = inner
        wrapping.checkpoint_io = other
        assert wrapping.checkpoint_io is inner


def test_unscale_grads():
    """A replaced `_unscale_grads_` decides whether the scaler skips a step, and the original can be restored."""
    scaler = torch.amp.GradScaler("cpu")
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    private.replace_unscale_gradients(scaler, lambda *_: {torch.device("cpu"): torch.ones(1)})
    scaler.step(optimizer)
    assert p.item() == 1.0  # the step is skipped because the replaced method reports an overflow
    private.replace_unscale_gradients(scaler, None)
    assert "_unscale_grads_" not in vars(scaler)
    assert private.unscale_gradients(scaler).__name__ == "_unscale_grads_"


def test_trainer_of_a_module():
    """`_trainer` is None on a module without a Trainer, although the property would raise an error."""
    assert pl.LightningModule()._trainer is None


def test_spectral_norm():
    """Layers with spectral normalization are found by name."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert private.spectral_norms(plain) == []
    torch.nn.utils.parametrizations.spectral_norm(plain[1][0])
    assert private.spectral_norms(plain) == ["1.0"]


def test_collector_of_hidden_states():
    """While a model of transformers runs, `_active_collector` contains the outputs that its hooks collect."""
    config = transformers.GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2Model(config)
    seen = []
    model.h[0].register_forward_hook(lambda *args: seen.append(private.needed_layer_outputs()))
    for wanted in ({}, {"output_hidden_states": True}, {"output_hidden_states": [-1]}):
        model(torch.zeros(1, 2, dtype=torch.long), **wanted)
    assert seen == [[], ["hidden_states"], ["hidden_states"]]
    assert private.needed_layer_outputs() == []


def test_compiled_in_place():
    """`nn.Module.compile` sets `_compiled_call_impl`."""
    layer = torch.nn.Linear(1, 1)
    assert not private.is_compiled(layer)
    assert private.is_compiled(torch.compile(layer, backend="eager"))
    layer.compile(backend="eager")
    assert private.is_compiled(layer)


def test_whole_calls():
    """A call of a module runs the function in `WHOLE_CALL`, which takes the place of its hooks and its forward."""
    layer = torch.nn.Linear(1, 1)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    call = private.whole_call(layer)
    vars(layer)[private.WHOLE_CALL] = lambda x: calls.append("whole") or call(x)
    layer(torch.zeros(1))
    assert calls == ["whole", "hook"]


def test_pauses_after_this_batch(tmp_path):
    """`pauses_after_this_batch` is true before Lightning does something other than train the next batch.

    This includes the end of an epoch or of training, validation, a scheduler that monitors a value, and a checkpoint. A
    requested stop does not count.
    """
    seen: dict[str, list[bool]] = {
        name: [] for name in ("epoch", "steps", "validation", "stop", "plateau", "checkpoint", "accumulated")
    }

    class Module(pl.LightningModule):
        def __init__(self, what: str) -> None:
            super().__init__()
            self.what, self.layer = what, torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.what == "stop":
                self.trainer.should_stop = True
            seen[self.what].append(private.pauses_after_this_batch(self.trainer))
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            if self.what != "plateau":
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": scheduler, "interval": "step", "frequency": 3, "monitor": "loss"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    loader = DataLoader(torch.ones(4, 1), batch_size=1)
    saving = [ModelCheckpoint(tmp_path, every_n_train_steps=2)]
    options: dict[str, dict[str, Any]] = {
        "epoch": {"max_epochs": 1},
        "steps": {"max_steps": 3},
        "validation": {"max_epochs": 1, "val_check_interval": 2},
        "stop": {"max_epochs": 1},
        "plateau": {"max_epochs": 1},
        "checkpoint": {"max_steps": 3, "callbacks": saving},
        "accumulated": {"max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": saving},
    }
    for what, more in options.items():
        fitted = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing="callbacks" in more, enable_progress_bar=False, **more
        )
        fitted.fit(Module(what), loader, loader if what == "validation" else None)
    assert seen == {
        "epoch": [False, False, False, True],
        "steps": [False, False, True],
        "validation": [False, True, False, True],
        "stop": [False],
        "plateau": [False, False, True, True],
        "checkpoint": [False, True, True],
        "accumulated": [False, False, False, True],
    }


def test_as_in_training_step():
    """A value logged in a later hook is stored under the name of the training step within the context."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("early", 1.0, on_step=True, on_epoch=True)
            return self.layer(batch).sum()

        def on_train_batch_end(self, *args: Any) -> None:
            with private.as_in_training_step(self.trainer):
                self.log("early", 3.0, on_step=True, on_epoch=True)
            assert self._current_fx_name == "on_train_batch_end"

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    fitted = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    fitted.fit(Module(), DataLoader(torch.ones(2, 1)))
    assert fitted.callback_metrics["early_epoch"] == 2.0


def test_before_step():
    """`_after_closure` runs the hook before the optimizer step first, and then clips gradients."""
    assert arguments(Precision._after_closure) == ["self", "model", "optimizer"]
    source = inspect.getsource(Precision._after_closure)
    assert source.index("on_before_optimizer_step") < source.index("_clip_gradients")


def test_expect_late_steps(recwarn):
    """A scheduler steps without a warning although its optimizer has not made a step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.expect_late_steps(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_storage_info():
    """`storage_info` returns an entry in the index of torch.distributed.checkpoint, with the place of a tensor."""
    info = private.storage_info("a", 1, 2)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == ("a", 1, 2, None)


def test_strategy_is_replaced(tmp_path):
    """Replacing the strategy also replaces the accelerator, the folder and the profiler of the Trainer."""
    t = trainer()
    other = pl.strategies.SingleDeviceStrategy("cpu", pl.accelerators.CPUAccelerator())
    private.replace_strategy(t, other, str(tmp_path))
    assert (t.strategy, t.accelerator, t.default_root_dir) == (other, other.accelerator, str(tmp_path))
    assert isinstance(t.profiler, pl.profilers.PassThroughProfiler)


class Logs(pl.LightningModule):
    """A module that logs a number and a metric, and records the values that Lightning has accumulated."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.metric = torchmetrics.MeanMetric()
        self.found = {}

    def training_step(self, batch, batch_idx):
        self.log("number", 2.0 + batch_idx, on_step=True, on_epoch=True, batch_size=3)
        self.metric(torch.tensor(4.0))
        self.log("metric", self.metric)
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_):
        self.found = {name: float(value) for name, value in private.logged_values(self.trainer).items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_logged_values():
    """`logged_values` returns the sums, sample counts and last values of Lightning's results."""
    module = Logs()
    t = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
    t.fit(module, DataLoader(torch.ones(2, 1), batch_size=1))
    found = module.found
    assert found["training_step.number (value)"] == 3 * 2.0 + 3 * 3.0
    assert found["training_step.number (samples)"] == 6
    assert found["training_step.number (last)"] == 3.0
    assert found["training_step.metric (mean_value)"] == 8.0
    assert found["training_step.metric (last)"] == 4.0


def test_messages_that_were_shown_once_are_not_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignoring warnings repeatedly does not make Python show other warnings again, and leaves the filters unchanged."""
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
        before = list(warnings.filters)
        for _ in range(3):
            undo = [private.ignore_warnings("not .* in a pipeline") for _ in range(2)]
            for text in ("other", "not true in a pipeline"):
                warnings.warn(text, stacklevel=1)
            for each in undo:
                each()
        assert warnings.filters == before
    assert shown == ["other"]


def test_average_model_and_init_n_averaged():
    """The averaged model of both callbacks is found, counted and dropped."""
    for callback in (WeightAveraging(), StochasticWeightAveraging(0.1)):
        assert private.find_average(callback) is None
        callback.setup(trainer(), pl.LightningModule(), "fit")
        assert isinstance(private.find_average(callback), torch.nn.Module)
        assert private.count_averaged(callback) == 0
        private.drop_average(callback)
        assert callback._average_model is None
    state = {"n_averaged": 2, "latest_update_epoch": 1, "scheduler_state": None, "average_model_state": None}
    callback.load_state_dict(state)
    assert private.count_averaged(callback) == 2
