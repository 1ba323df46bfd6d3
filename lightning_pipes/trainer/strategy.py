"""PipelineStrategy: what Lightning calls, and who does it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import AsyncCheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipes.engine.watch.ending import has_given_up, hurry, never_destroy
from lightning_pipes.engine.watch.failure import HEARTBEAT_TIMEOUT, FailureWatch
from lightning_pipes.engine.watch.launcher import Company, dead_ranks, heed_launcher
from lightning_pipes.engine.watch.meeting import adopted_store, kept, lone_store, made_store, run_store
from lightning_pipes.engine.watch.points import point
from lightning_pipes.engine.watch.rendezvous import store_host
from lightning_pipes.engine.watch.trust import secret_for_children
from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy, Schedule, check_count, check_type
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.callbacks.schedule_tuner import with_tuner
from lightning_pipes.trainer.checkpoint import checkpoints
from lightning_pipes.trainer.checkpoint.data_state import KEY, TrainingData
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO, existing, local_path
from lightning_pipes.trainer.checkpoint.mapped import load_mapped
from lightning_pipes.trainer.checkpoint.saving import Saver
from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint
from lightning_pipes.trainer.ignoring import ignore_warnings
from lightning_pipes.trainer.loop.about import describe_run, gather_run
from lightning_pipes.trainer.loop.adopting import adopt
from lightning_pipes.trainer.loop.connections import Connections, Idle, connections
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.stopping import StopAgreement, as_terminated
from lightning_pipes.trainer.loop.streaming import StreamingRun, check_streaming
from lightning_pipes.trainer.module.capture import named_step
from lightning_pipes.trainer.module.checks import check_async, check_callbacks, check_module
from lightning_pipes.trainer.module.deferred import (
    check_optimizers,
    has_meta,
)
from lightning_pipes.trainer.module.equal_starts import broadcast_random_state, equal_weights
from lightning_pipes.trainer.module.optimizers import OptimizerLayout, keep_local, parameter_names, refuse_unsuitable
from lightning_pipes.trainer.module.pipelined import CutModule, find_pipelined, layer_sizes
from lightning_pipes.trainer.module.summary import log_graphs, show_summaries
from lightning_pipes.trainer.plan.container import find_container
from lightning_pipes.trainer.plan.decision import Decision, Wanted
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.plan.settings import (
    AUTO,
    check_parts,
    known_backend,
    known_form,
    known_partition,
    known_schedule,
    known_seed,
    known_transport,
    long_enough,
    possible_microbatches,
    possible_timeout,
)
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid
from lightning_pipes.trainer.ranks.launching import Launcher
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.ranks.threads import Threads
from lightning_pipes.trainer.reports.report import About, PipelineReport, Window
from lightning_pipes.trainer.reports.timing import Share, Timing
from lightning_pipes.trainer.setup import PipelineSetup
from lightning_pipes.trainer.step.clipping import GradientAgreement, HookClipping
from lightning_pipes.trainer.step.gradient_logs import GradientLogs
from lightning_pipes.trainer.step.hook_view import HookView
from lightning_pipes.trainer.step.hooks import HookWrappers
from lightning_pipes.trainer.step.logs import metrics_gather_over
from lightning_pipes.trainer.step.steps import Context
from lightning_pipes.trainer.versions import tell_if_untested


class PipelineStrategy(PipelineHost):
    """Trains an unmodified LightningModule with its layers spread over the devices.

    One `nn.Sequential` of the module is cut into stages; every batch is cut into micro-batches that flow through
    them. Losses, logs, checkpoints and callbacks are those of one process, given a loss that is a mean over samples.
    The last stage sits on global rank 0, where loggers and the progress bar are.

    Args:
        schedule: the name of an installed schedule, or a Schedule or Policy of your own; "auto" chooses one when `fit`
            starts, with micro-batches, recomputation and cut, by simulating what the measured layers would take.
        microbatches: pieces of a batch; by default two for every stage, or what is best with schedule="auto".
        data_parallel: replicas of the whole pipeline, each with its share of the data, as under DDP. The processes are
            shared out to them, consecutive ones to one pipeline.
        schedule_args: settings of the schedule, such as {"k": 2}.
        module: path of the nn.Sequential or nn.ModuleList to cut; by default the largest by parameters, or the one that
            takes most of a step where that is clearly another.
        partition: "auto" measures the layers for a second or so when `fit` starts, tries the pipeline for another, and
            balances the stages by time, within the devices' memory, where that saves 5 % of a step; else, and with
            "parameters", they have even numbers of parameters. A list names the layers at which stages 1, 2, ... begin.
        recompute: keep only the input of each stage and run its forward again before backward; saves memory.
        seed: what dropout and all other random numbers inside a step start from.
        transport: how tensors travel between stages: "local" is shared memory on one host, "nccl" goes from GPU to
            GPU, "gloo" works everywhere; "auto" takes the fastest that all ranks can use.
        checkpoint: "full" writes ordinary Lightning checkpoints, for which rank 0 gathers the whole; "sharded" writes
            folders to which every rank adds its part. Both resume on any number of stages, whatever is set here.
        async_checkpoint: write in the background while training goes on.
        check_loss: compare the loss of the first batch with those of its micro-batches, and warn where it is no mean
            over samples. The step runs once more for it, without the layers, and leaves no trace.
        timeout: how long ranks wait for each other outside the pipeline.
        heartbeat_timeout: seconds without a sign of life after which a rank is given up, at least 2. A process gives
            them while it computes, too, except inside a call that keeps Python's lock all that time.
        process_group_backend: of the default process group; ours use gloo.

    Raises:
        PlanError: an argument makes no sense, or the schedule does not take these settings; when the run starts, a
            number of processes that can't be shared out, or with schedule="auto" none that fits into memory.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        schedule: str | Schedule | Policy = "1f1b",
        microbatches: int | None = None,
        data_parallel: int = 1,
        schedule_args: dict[str, Any] | None = None,
        module: str | None = None,
        partition: str | list[int] = AUTO,
        recompute: bool = False,
        seed: int = 0,
        transport: str = "auto",
        checkpoint: str = "full",
        async_checkpoint: bool = False,
        check_loss: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_parts(
            accelerator=(accelerator, Accelerator),
            parallel_devices=(parallel_devices, list[torch.device]),
            cluster_environment=(cluster_environment, ClusterEnvironment),
            checkpoint_io=(checkpoint_io, CheckpointIO),
            precision_plugin=(precision_plugin, Precision),
        )
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.num_nodes = 1
        heed_launcher()
        self.schedule = known_schedule(schedule, {} if schedule_args is None else schedule_args)
        self._wanted = Wanted(
            self.schedule,
            possible_microbatches(microbatches),
            check_type("recompute", recompute, bool),
            known_partition(partition, schedule),
            chooses=schedule == AUTO,
        )
        self._data_parallel = check_count("data_parallel", data_parallel)
        self._path = check_type("module", module, str | None)
        self._seed = known_seed(seed)
        self._transport = known_transport(transport)
        self._sharded = known_form(checkpoint) == "sharded"
        self._async = check_type("async_checkpoint", async_checkpoint, bool)
        self._check_loss = check_type("check_loss", check_loss, bool)
        self.checkpoint_io = checkpoint_io
        self._timeout = possible_timeout(timeout)
        self._heartbeat_timeout = long_enough(heartbeat_timeout)
        self._backend = known_backend(process_group_backend)
        self._connections: Connections | None = None
        self._control: Control | None = None
        self._pipeline: Control | None = None
        self._replicas: Replicas | None = None
        self._cut: CutModule | None = None
        self._cut_path: str | None = None
        """Of the container that the last run has cut."""
        self._resumed_path: str | None = None
        self._spread: CutModule | None = None
        """The last run's, if its layers stay where they are: they were made on meta."""
        self._loaded: tuple[Mapping[str, Any], bool] | None = None
        """A state dict that waits for weights to load it into, and whether its keys must be all."""
        self._run: PipelineRun | None = None
        self._layouts: list[OptimizerLayout] = []
        self._parts: ShardedCheckpoint | None = None
        self._stops: StopAgreement | None = None
        self._accumulating = False
        self._streams = False
        self._failed: BaseException | None = None
        self._undo: list[Callable[[], None]] = []
        self._decision: Decision | None = None
        self._prediction: Prediction | None = None
        self._reported: tuple[Sequence[Sequence[Window]], About] = ((), About())

    def __repr__(self) -> str:
        # Fabric shows this in its refusal, the only word of ours that is seen there.
        return (
            f"PipelineStrategy({self.schedule.name!r}), for lightning.pytorch.Trainer(strategy=...) and not for Fabric"
        )

    # ---- processes and devices

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should shard the data: over replicas, for all stages of one see the same batches."""
        return self._data_parallel > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.grid.replicas, "rank": self.grid.replica}

    @property
    def grid(self) -> Grid:
        """Where this rank is among the replicas and stages."""
        return Grid(self._data_parallel, self.world_size, self.global_rank)

    @property
    def _connected(self) -> Connections:
        assert self._connections is not None, "setup_environment has not run"
        return self._connections

    @property
    def control(self) -> Control:
        """What all ranks tell each other."""
        assert self._control is not None, "setup_environment has not run"
        return self._control

    @property
    def pipeline(self) -> Control:
        """What the ranks of this rank's pipeline tell each other outside of it."""
        assert self._pipeline is not None, "setup_environment has not run"
        return self._pipeline

    @property
    def replicas(self) -> Replicas:
        """What the replicas of the pipeline have in common."""
        assert self._replicas is not None, "setup_environment has not run"
        return self._replicas

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._threads = Threads()
        if not self.cluster_environment.creates_processes_externally:
            if self.num_nodes == 1:
                secret_for_children()
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tells the environment who we are, as Lightning's own strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        tell_if_untested()
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        grid = self.grid
        device = self.root_device
        self._failed = None
        if self._control is not None and self._connections is not None:
            self._connections.renew(self._control)
            self._control = None
        started = not private.distributed_is_initialized()
        company = Company(self._heartbeat_timeout)
        if started:
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            if self.world_size > 1:
                run_store(self.global_rank, self.world_size, self.num_processes, self._timeout, company.check)
        self._connections = connections(self._trainer, self.global_rank, self.world_size, self._make_watch)
        if started:
            self._make_process_group(self._connections.watch, company, device)
        self._control = self._connections.connect(self._make_control)
        self._threads.share_cores(self._control)
        self._pipeline = self._control.split(grid.pipelines)
        self._connections.get_ready(self._pipeline)
        self._replicas = Replicas(grid, self._control, device)
        private.set_device_mesh(self.lightning_module, self._replicas.mesh)
        self._data = TrainingData(device, self.is_global_zero)
        self._saver = Saver(self._pipeline)
        broadcast_random_state(self._control, device)

    def _make_process_group(self, watch: FailureWatch, company: Company, device: torch.device) -> None:
        """The default one, once all ranks have come."""
        assert self.cluster_environment is not None
        watch.meet(self._timeout.total_seconds(), company.check, dead_ranks)
        point("process_group")
        atexit.register(_leave)
        watch.call(
            partial(
                private.init_distributed,
                self.cluster_environment,
                self._backend or private.default_backend(device),
                timeout=self._timeout,
                device_id=device if device.type != "cpu" else None,
                store=kept(watch.store()) if self.world_size > 1 else lone_store(),
            )
        )
        point("process_group.made")

    def _make_watch(self) -> FailureWatch:
        store, rank, ranks = None, self.global_rank, self.world_size
        if ranks > 1:
            store = made_store() or adopted_store(private.default_store(), rank, ranks, self.num_processes)
        return FailureWatch(store, rank, ranks, self._heartbeat_timeout, store_host=store_host())

    def _make_control(self, watch: FailureWatch, idle: Idle) -> Control:
        return Control(range(self.world_size), watch, self._timeout, idle=idle)

    # ---- setup and teardown of a run

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if self.grid.replicas == 1:  # every rank logs the same values: there is nothing to synchronise
            ignore_warnings(".*sync_dist=True.*")
        self.model = self.precision_plugin.convert_module(self.model)
        check_module(module, fitting)
        if fitting:
            check_callbacks(private.callbacks(trainer))
            if self._async:
                check_async(private.callbacks(trainer))
        connected = self._connected
        spread = equal_weights(module, self.control)

        private.forget_optimizers(self)
        whole = []
        if fitting:
            self.optimizers, self.lr_scheduler_configs = private.init_optimizers(module)
            refuse_unsuitable(self.optimizers)
            check_optimizers(self.optimizers)
            whole = parameter_names(module, self.optimizers)

        self._cut_path = path = self._container(module)
        made = PipelineSetup(trainer, module, path, self.grid, connected, self.control, self.pipeline, self.root_device)
        wanted = connected.wanted(self._wanted, self.grid.length)
        plain = wanted.unmeasured(layer_sizes(made.full), self.grid.length)

        def decide() -> Decision:
            return made.decide(wanted, plain, self._transport) if fitting else plain

        decision = connected.decide(module, plain, decide)
        self._decision = decision
        self.schedule = decision.schedule
        self._prediction = Prediction(decision, self.pipeline, connected.trainings == 1) if fitting else None

        if fitting:
            with_tuner(trainer, self.schedule)
        made.lay_out(decision)
        self._streams = fitting and made.endless
        if self._streams:
            connected.check_endless(self.schedule.name)
            check_streaming(trainer, self.schedule.name, self.grid, made.tied())
        if fitting:
            self._undo.append(show_summaries(private.callbacks(trainer), trainer, module))
        self._undo.append(log_graphs(trainer, module))
        self._cut = cut = made.cut(self._seed, spread)
        if self._loaded is not None:
            checkpoints.load_model(cut, *self._loaded)
            self._loaded = None
        self._layouts = [keep_local(o, w, cut.is_foreign) for o, w in zip(self.optimizers, whole, strict=True)]
        self.model_to_device()
        kind = StreamingRun if self._streams else PipelineRun
        self._run = run = made.start(
            kind, self.replicas, self.precision_plugin, self._seed, self._transport, self._check_loss
        )

        self.setup_precision_plugin()
        private.optimizers_to_device(self.optimizers, self.root_device)
        agreement = GradientAgreement(self.precision_plugin, run.shared, self.pipeline, self.root_device)
        self._stops = stops = StopAgreement(trainer, self.control, self.writing_at_once, lambda: connected.told_to_end)
        clipping = HookClipping(module, cut.scope, run.shared, None if self._streams else self.pipeline)
        view = HookView(module, private.callbacks(trainer), cut.scope)  # next to the hooks: all else goes around it
        hooks = HookWrappers(
            module, self.pipeline, run.replay, run.last_rank, run.last, run.agreement(stops), self._start_epoch
        )
        if not self._streams:  # where stages step apart, each logs for itself
            logs = GradientLogs(module, private.callbacks(trainer), self.pipeline, run.replay, run.last_rank)
            self._undo.append(logs.remove)
        self._undo += [hooks.remove, view.remove, clipping.remove, stops.remove, agreement.remove]
        self._undo.append(metrics_gather_over(module, self.replicas.group))
        self._undo.append(self._data.forget)
        self._undo.append(partial(private.forget_training_data, trainer))

    def _container(self, module: pl.LightningModule) -> str:
        """The path of what is cut: as named, as before in a run that goes on, or as it is found."""
        before, self._resumed_path = self._resumed_path, None
        if self._path is not None or before in dict(module.named_modules()):
            return find_pipelined(module, before if self._path is None else self._path)
        find = partial(find_container, self._trainer, module, self.control, self.root_device)
        return self._connected.container(module, find)

    def teardown(self) -> None:
        point("teardown")
        module, cut, run = self.lightning_module, self._cut, self._run
        for undo in self._undo:
            undo()
        self._undo, stops, self._stops = [], self._stops, None
        if self._control is not None:
            self._finish_saving()
        if self._connections is not None:
            self._connections.go_home()
        state = None
        if run is not None:
            if not self._down:
                state, reported = gather_run(
                    run, self.pipeline, self.optimizers, self.root_device, describe_run(self, self._connected.trainings)
                )
                self._reported = reported or self._reported
                self._connected.check()
            point("teardown.gathered")
            run.close()
            point("teardown.closed")
        if self._connections is not None:
            self._connections.leave(self._control, self._down)
        if module is not None and not has_meta(module):
            module.cpu()
        if cut is not None:
            cut.restore(state)
            self._cut, self._run, self._spread = None, None, cut if cut.stays_spread else None
        private.optimizers_to_device(self.optimizers, torch.device("cpu"))
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()
        if stops is not None and not self._down:
            stops.end()

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DataLoader) and private.seeded_workers(dataloader):
            rank = self.grid.replica  # the same on all stages
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return self._data.prepared(dataloader) if self._trainer.training else dataloader

    def on_train_start(self) -> None:
        self._data.go_on(self._trainer)

    def on_train_end(self) -> None:
        with self._telling_others():
            self._running.drain()

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_whole()
        with self._telling_others():
            self._saver.check()
            batch, arguments = _batch_and_arguments(args, kwargs)
            out = self._running.train(batch, arguments, self.optimizers, complete=not self._accumulating)
            if self._prediction is not None:
                self._prediction.check(self._running.windows)
            return out

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_whole()
        with self._telling_others():
            step = named_step(self.lightning_module, name)
            output = self._running.evaluate(step, context, *_batch_and_arguments(args, kwargs))
            if self._stops is not None and not self._running.fitting:
                self._stops.agree_to_leave(self.pipeline)
            return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the hooks around backward; the gradients were made in `training_step`."""
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._telling_others():
            self._running.give_back_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self._telling_others():
            if self._streams:
                return closure()  # every stage steps by itself when a batch's gradients are complete
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Batches in the block add to gradients that no step uses yet, so they are not summed over ranks."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def on_validation_end(self) -> None:
        if self._stops is not None and self._running.fitting:
            self._stops.agree()

    @property
    def report(self) -> PipelineReport:
        """Measured and predicted timelines of the last training batches, on every rank once `fit` has ended.

        Raises:
            PlanError: nothing was trained.
        """
        return PipelineReport.of(*self._reported)

    @property
    def flushes(self) -> bool:
        """Whether all stages end a batch before the next one begins."""
        return self.schedule.flushes

    def adopt(
        self, schedule: str | Schedule | Policy, microbatches: int | None = None, plan: Plan | None = None
    ) -> None:
        """From the next training batch on, another schedule or number of micro-batches, as a callback may find better.

        Collective: all ranks call it with the same arguments, at the same batch. Layers stay where they are, so what
        is trained does not change.

        Args:
            schedule: the name of an installed schedule, or one of your own with its settings.
            microbatches: of a batch; by default as many as now.
            plan: how batches of its size are cut, where they are not to be cut evenly; those of other sizes still are.

        Raises:
            PlanError: layers would have to move, a schedule that does not flush takes part, or nothing is trained; all
                stays as it is.
            PipelineError: the ranks do not agree.
        """
        run = self._run
        if run is None or not run.fitting:
            raise PlanError("a schedule can be adopted while trainer.fit runs only")
        adopt(run, self.control, schedule, microbatches, plan)
        self.schedule = run.plans.schedule

    @property
    def decision(self) -> Decision:
        """What the last run is, or was: schedule, micro-batches, recomputation and cut, and why.

        Raises:
            PlanError: nothing has run yet.
        """
        if self._decision is None:
            raise PlanError("nothing is decided before the strategy has run: call trainer.fit first")
        return self._decision

    def last_timing(self) -> Timing | None:
        """Where the time of the last window went, on every rank; None before the first one has ended. Collective: all
        ranks must ask, and be at the same batch."""
        windows = self._running.windows
        if not windows:
            return None
        return Timing.of(self.pipeline.all_gather(Share.of(windows[-1].events)), self._connected.trainings == 1)

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def running(self) -> PipelineRun:
        """The run under way, for callbacks of ours."""
        return self._running

    @property
    def _running(self) -> PipelineRun:
        assert self._run is not None, "setup has not run"
        return self._run

    # ---- state

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads the files of `checkpoint="full"`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, private.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # taken only if it has none
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if type(io) is AsyncCheckpointIO:  # it would remove the previous checkpoint before the next one is written
            self._async = True
            io = io.checkpoint_io
        self._checkpoint_io = io

    @contextmanager
    def writing_at_once(self) -> Iterator[None]:
        """Checkpoints in the block are written when saving them returns, also with async_checkpoint."""
        before, self._async = self._async, False
        try:
            yield
        finally:
            self._async = before

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        cut = self._cut or self._spread
        if cut is None or cut.module is not self.lightning_module:
            return self.lightning_module.state_dict()
        if self._down:
            return cut.local_state(outside=True)
        if self._run is not None:
            self._run.drain()
        if self._sharded:
            return cut.local_state(outside=self.grid.place == 0)
        self.pipeline.connect()
        return {} if self.grid.replica else checkpoints.gather_model(cut, self.pipeline)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint that rank 0 means: a tuner names its own after a random number of its process."""
        self._check_whole()
        self._finish_saving()
        checkpoint = self._read(self.broadcast(checkpoint_path), weights_only)
        if self._run is None:  # while training, tuners go back to where they started
            self._data.load(checkpoint)
            self._resumed_path = checkpoint.get(KEY, {}).get("module")
        self.barrier()  # whoever removes it afterwards must not be too early
        return checkpoint

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        self._parts = None
        module = self.lightning_module
        assert module is not None
        local = local_path(path)
        if local is not None:
            path = existing(local)
            if ShardedCheckpoint.is_at(path):
                self._parts = ShardedCheckpoint(path, weights_only)
                return self._parts.checkpoint({} if self._run is not None else module.state_dict())
        mapped = load_mapped(self, path, weights_only) if has_meta(module) else None
        return super().load_checkpoint(path, weights_only) if mapped is None else mapped

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._run is not None:
            checkpoints.load_model(self._run.cut, checkpoint["state_dict"], strict)
        elif has_meta(self.lightning_module):
            self._loaded = checkpoint["state_dict"], strict
        else:
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = private.plain_optimizer(optimizer)
        if self._down:
            return plain.state_dict()
        number = next(n for n, o in enumerate(self.optimizers) if private.plain_optimizer(o) is plain)
        if self._sharded:
            return self._layouts[number].named_state(plain.state_dict())
        self.pipeline.connect()
        return {} if self.grid.replica else checkpoints.gather_optimizer(plain, self._layouts[number], self.pipeline)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self._parts is not None:
            states = self._parts.optimizer_states([layout.names for layout in self._layouts])
        checkpoints.load_optimizers(self.optimizers, self._layouts, states, self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint. A rank that fails can't ask the others for their parts: it writes its own, to a file of
        its own, `filepath` with `.rank1of2` at its end.
        """
        if self._control is None:  # nothing has run yet, and the module is whole
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        point("checkpoint")
        if "optimizer_states" in checkpoint:  # not for weights alone
            checkpoint[KEY] = self._data.state(self._trainer)
            checkpoint[KEY]["module"] = self._cut_path  # random numbers depend on which layers are counted
        if self._down and self._run is not None and self.world_size > 1:
            part = f"{filepath}.rank{self.global_rank}of{self.world_size}"
            self.checkpoint_io.save_checkpoint(checkpoint, part, storage_options)
            return
        self.pipeline.connect()
        if self.grid.replica:
            return
        background = self._async and self._run is not None and self._run.fitting and not self._down
        with self._telling_others():
            if self._sharded:
                cut = self._cut or self._spread
                order = list(checkpoint["state_dict"]) if cut is None else cut.keys
                self._saver.save_parts(checkpoint, order, filepath, background)
            else:
                write = partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
                self._saver.save(checkpoint, filepath, write, background)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, unless this rank is failing: what it writes then does not replace a whole one."""
        if self.is_global_zero and not self._down:
            self._saver.remove(filepath, self.checkpoint_io)

    def _finish_saving(self) -> None:
        """Waits for the checkpoints that are being written; a failure that came first is not to be covered."""
        if self._down:
            self._saver.close()
        else:
            with self._telling_others():
                self._saver.wait()

    # ---- what ranks decide together; every stage holds the same values, so averages are over replicas

    def barrier(self, name: str | None = None) -> None:
        if not self._down and self._connections is not None and self._connections.waits_at(name):
            self.control.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._down else self.control.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._down else self.replicas.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._down:
            return decision
        return not self.control.any(not decision)[0] if all else self.control.any(decision)[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.replicas.all_gather(tensor, group, sync_grads)

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            as_terminated(exception)
            atexit.register(hurry)
        if self._leaving_together and isinstance(exception, SIGTERMException):
            self.control.barrier()  # whoever started them may end all when the first one has ended
        else:
            self._tell_others(exception)

    def _check_whole(self) -> None:
        """Raises PipelineError if a step of this run has failed, and whoever called it goes on."""
        if self._failed is not None:
            raise PipelineError(
                f"a step of this run has ended in {type(self._failed).__name__}, and ranks can't go on together after "
                "that. If BatchSizeFinder has found a batch size that is too large, the one before it fits: set that, "
                "or let the search end there by max_trials"
            ) from self._failed

    @property
    def _down(self) -> bool:
        """Whether the other ranks can't be counted on: before they are connected, or once this one is failing."""
        if self._control is None or self._failed is not None:
            return True
        module = self.lightning_module
        if module is None or module._trainer is None:
            return False
        return module.trainer.state.status == TrainerStatus.INTERRUPTED and not self._leaving_together

    @property
    def _leaving_together(self) -> bool:
        """Whether all ranks end at the same batch because one got SIGTERM, so that they can save a whole checkpoint."""
        return self._stops is not None and self._stops.terminated

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Tells the other ranks at once of an exception in the block."""
        try:
            yield
        except BaseException as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: BaseException) -> None:
        self._failed = self._failed or error
        if self._connections is not None:
            self._connections.fail(error)

    def _start_epoch(self) -> None:
        self._data.epoch_starts(self._trainer)
        broadcast_random_state(self.control, self.root_device)
        self._running.buffers.start_epoch()


def _leave() -> None:
    """Destroys the process groups before the interpreter ends: gloo's threads abort the process otherwise. Not where
    one of them may sit on a collective that was given up: who destroys its group waits for it."""
    point("exit")
    if has_given_up():
        never_destroy(private.process_groups())
        hurry()
    elif private.distributed_is_initialized():
        dist.destroy_process_group()


def _batch_and_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    values = (*args, *kwargs.values())
    return values[0], values[1:]
