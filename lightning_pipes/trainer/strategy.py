"""Implementation of `PipelineStrategy`, the Lightning strategy of this package."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipes.engine.allocator import share_heap
from lightning_pipes.engine.private_torch import is_imported_by_worker
from lightning_pipes.engine.watch.error_output import shorten_traceback
from lightning_pipes.engine.watch.failure import HEARTBEAT_TIMEOUT, PeerFailure
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.launcher import exit_with_launcher
from lightning_pipes.engine.watch.process_exit import skip_final_gc
from lightning_pipes.ir import Plan, PlanError, Policy, Schedule, check_type
from lightning_pipes.planning.planner import BLOCKING
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.active_run import ActiveRun
from lightning_pipes.trainer.checkpoint.files import CheckpointWriter
from lightning_pipes.trainer.checkpointing import load_model
from lightning_pipes.trainer.checks import broadcast_random_state
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.steps import Context
from lightning_pipes.trainer.data.shared_data import Data, share_loader
from lightning_pipes.trainer.data.token_cut import MicrobatchesBy
from lightning_pipes.trainer.fork_launcher import ForkLauncher
from lightning_pipes.trainer.launchers import make_launcher
from lightning_pipes.trainer.loop.adopting import adopt_plan
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.manual import ManualLoop
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.stopping import as_terminated
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.profile_planner import device_memory
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import (
    AUTO,
    PLAN_VARIABLE,
    Gather,
    Settings,
    check_parts,
    describe_changes,
    parse_verify,
    with_checked_names,
)
from lightning_pipes.trainer.plan.stages import check_stages, choose_stages
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.processes import all_processes
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.ranks.replica_world import ReplicaWorld, in_step, is_in_step
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.ranks.threads import Threads
from lightning_pipes.trainer.ranks.user_lines import find_user_frame, only_looks, user_line, warn_once_per_line
from lightning_pipes.trainer.reports.report import PipelineReport, RunInfo, Window
from lightning_pipes.trainer.reports.timing import Share, Timing
from lightning_pipes.trainer.session import Session, SessionStart, warn_if_untested
from lightning_pipes.trainer.setup.module_setup import SetupContext
from lightning_pipes.trainer.setup.prepare import prepare
from lightning_pipes.trainer.setup.weight_callbacks import restore_averages
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope
from lightning_pipes.trainer.verify.reference import ReferenceProcess, fork_reference
from lightning_pipes.trainer.weights.deferred import has_meta
from lightning_pipes.trainer.weights.pretrained import reads_later

_log = logging.getLogger(__name__)
_REFUSALS = {
    "pytorch_lightning.trainer.connectors.accelerator_connector": (
        "this Trainer comes from the package pytorch_lightning, which does not accept strategies of the package "
        "lightning"
    ),
    "lightning.fabric.connector": "this is a Fabric, whose loops do not let a strategy run the training step",
    "lightning_fabric.connector": "this is a Fabric, whose loops do not let a strategy run the training step",
}
"""The modules of other trainers that call `repr(strategy)` only to reject the strategy, each with its explanation."""


class PipelineStrategy(PipelineHost):
    """Train an unmodified LightningModule with its layers distributed over several devices.

    The strategy cuts a container of layers (an `nn.Sequential` or `nn.ModuleList`) into stages. If the module has no
    suitable container, the strategy cuts the whole module into units, which are calls of submodules and of functions
    between these calls. Every batch is split along axis 0 into micro-batches, which flow through the stages. If the
    loss is a mean or a sum over samples or tokens, then losses, logs, checkpoints and callbacks are the same as in
    training with one process. The last stage runs on global rank 0, which also runs the loggers and the progress bar.
    See docs/guide.md.

    The arguments after `microbatches` are keyword-only. They are listed by theme: the schedule and the cut; losses and
    checks; replicas, shards and data; checkpoints; layers that move, and the number of stages; network and processes;
    what the Trainer sets. An argument works with every schedule unless its description says otherwise.

    Args:
        schedule: the name of an installed schedule, or your own `Schedule` or `Policy` object. With "auto", a schedule
            is chosen when `fit` starts, together with the number of micro-batches, recomputation and the cut. For this
            choice, the layers are measured and the candidates are simulated.
        microbatches: the number of micro-batches per batch. Each micro-batch holds at least one sample. The default is
            two per stage, or one with "csp". With `schedule="auto"`, the default is the fastest number.
        schedule_args: the settings of a schedule that is given by name, such as {"k": 2}.
        microbatches_by: how a training batch is divided into micro-batches. With "samples", micro-batches have equal
            numbers of samples. With "tokens", the sequences of a batch are sorted by length into micro-batches of equal
            time, and each micro-batch is padded to its longest sequence only. The time is measured together with the
            layers, or is the number of tokens if layers are not measured. The lengths are taken from `attention_mask`,
            from another mask of the tokens, or from labels that are -100. With "auto", tokens are used if at least 15 %
            of the tokens in the first batch are padding, if this saves at least 5 % of the tokens, and if the other
            settings allow it. Otherwise, samples are used. The log gives the reason.
        module: the path of the `nn.Sequential` or `nn.ModuleList` to cut. The default is the container with the most
            parameters, or the container that takes most of a step if that is clearly a different one. An empty path
            cuts the module by units.
        partition: the layers of each stage. With "auto", the layers are measured and the pipeline is tried when `fit`
            starts, which takes about three seconds in total. The stages are then balanced by time, within the memory of
            the devices, if this saves at least 5 % of a step. Otherwise, and with "parameters", the stages have similar
            numbers of parameters. A list contains the numbers of the layers at which stages 1, 2, ... begin, or the
            paths of modules, such as ["net.decoder"]. With paths, the module is cut by units even if it has containers.
        recompute: whether to keep only the input of each stage and to run the forward of the stage again before its
            backward. This saves memory. If the order of a schedule is fixed, a stage recomputes while the gradient is
            on its way. With "late", it recomputes only when the gradient has arrived, as it always does under a policy,
            `MemorySwap` or a job array. The last stage does not recompute. With "auto", only those stages recompute
            that do not fit into the memory of the devices otherwise; the layers are measured for this. With a list of
            numbers, exactly these stages recompute. `schedule="auto"` also chooses recomputation.
        loss: the samples for which the loss is computed at once. With "batch", the loss is computed once for all
            samples of a batch, which is necessary for losses that compare samples. The module is then cut by units, and
            the last units run on the whole batch. "microbatch" never does this. "auto" does this if the loss of a batch
            is neither the sum nor the mean of the losses of its micro-batches, unless `module` names a container.
        check_loss: whether to compare the loss of the first batches with the combined losses of their micro-batches.
            Candidates for the weights of micro-batches are, among others, the number of samples, the number of labels
            other than -100, and the module's method `microbatch_weight(batch)`. A warning is shown if no candidate
            reproduces the loss of the batch. The comparison runs the step once more without the layers, and then
            restores the previous state.
        verify: the number of first batches that one plain Lightning process on the host of rank 0 also trains, so that
            all results can be compared; see docs/verify.md. The first difference is reported and ends training. With
            "warn", two batches are compared, and a difference only causes a warning. Verification needs
            `data_parallel=1` and a schedule that flushes between batches. 0 compares nothing, unless the environment
            variable LIGHTNING_PIPES_VERIFY is set.
        seed: the seed of dropout and of all other random numbers inside a step.
        data_parallel: the number of replicas of the whole pipeline. Each replica trains on its own share of the data,
            as in DDP, and consists of consecutive ranks. A list makes one pipeline and specifies the number of
            processes of each stage, such as [2, 1]. The processes of a stage then share the samples of each
            micro-batch.
        tensor_parallel: the number of processes that hold the shards of the layers of each stage. `configure_model`
            makes these shards with `parallelize_module` and `self.device_mesh["tensor_parallel"]`. All processes of a
            stage get the same batches.
        shard_optimizer: whether to shard optimizer states over the replicas of each stage (ZeRO stage 1). Each replica
            updates an equal part of every parameter, and the parts are then gathered. Checkpoints do not depend on this
            setting. The optimizers must update every element independently, as AdamW and SGD do, and the schedule must
            flush between batches.
        data: the ranks that load batches. With "each", all ranks of a pipeline load them, and every rank must load the
            same batches. With "one", the last stage of a pipeline loads the batches and sends them to the other ranks.
            "auto" selects "one" for loaders whose first batches differ between ranks.
        checkpoint: the format of checkpoints. "full" writes ordinary Lightning checkpoints, for which rank 0 gathers
            the whole state. "sharded" writes folders to which every rank adds its part. Training can resume from both
            formats with any number of stages and with either value of this argument.
        async_checkpoint: whether to write checkpoints in the background while training continues.
        gather: the ranks that have the whole module after `fit`: "all", "rank0", or "none", which leaves the layers on
            their ranks. With "trained", rank 0 gets the parameters that train, such as adapters, and all others stay on
            their ranks. "auto" selects "all" if the hosts have enough free memory. Otherwise, it selects "rank0" if the
            host of rank 0 has enough free memory, and "none" if it has not. For layers that were made on `meta`, it
            selects "trained" if at most a quarter of their bytes trains, and "none" otherwise.
        replan: whether to move layers to other stages during training, away from devices that are slowed down, if the
            move is expected to save time. The trained weights do not change. The planner of "dynpipe" makes the
            decision, and a dict contains the settings of this planner, such as {"every": 50}. The schedule must flush
            between batches and must have a fixed order.
        relocation: how layers move between ranks during training. With "blocking", all ranks wait. With "overlapped",
            batches continue while the states of the layers are sent. The gradients of each step follow, and the new
            ranks repeat these steps. With "buffered", batches continue, but no optimizer steps are taken during the
            transfer. All ranks take the steps of these batches afterwards, so the gradients of these batches come from
            older weights. With the first two methods, the weights are the same as in training without a move. This
            argument matters only if layers move, which they do with "dynpipe" and with `replan`.
        stages: how to choose the number of stages, and the layers and processes of each stage, such that the time until
            a training target is shortest. The choice needs the layer times of an earlier run. It is available for
            "dynpipe", whose gradients are staler with more stages. A dict contains the number of batches that earlier
            runs needed to reach the target, by the number of stages, such as {1: 196, 4: 222}. "auto" assumes that this
            number does not depend on the stages and minimizes the time per batch. By default, every process is one
            stage.
        stale_gradients: whether `schedule="auto"` may choose a schedule that does not flush between batches, if such a
            schedule is faster. The gradients of these schedules are stale. True assumes that stale gradients do not
            increase the number of batches until the target. A dict contains this number by the number of stages, as in
            `stages`, and the smallest product of batches and seconds per batch is chosen.
        transport: how tensors are sent between stages. "local" uses shared memory on one host, "nccl" sends from GPU to
            GPU, and "gloo" works everywhere. "auto" selects the fastest transport that all ranks can use.
        process_group_backend: the backend of torch's default process group. The default is gloo on the CPU and NCCL on
            GPUs.
        timeout: the longest time that ranks wait for each other outside the pipeline.
        heartbeat_timeout: the number of seconds without a heartbeat after which a rank is considered failed, at least
            2. Heartbeats continue while a process computes, except during a call that holds the GIL for the whole time.
        accelerator: the accelerator of the processes. The Trainer sets this argument and the following ones if they are
            None, as for Lightning's strategies.
        parallel_devices: the devices of this node, one for each process.
        cluster_environment: the environment that numbers the processes, such as torchrun's or SLURM's.
        checkpoint_io: the plugin that reads and writes the files of checkpoints.
        precision_plugin: the plugin for the `precision` of the Trainer.

    Raises:
        PlanError: an argument is invalid, or the schedule does not accept these settings. When a run starts, this error
            is also raised if the number of processes cannot be divided among the replicas and stages, or if
            `schedule="auto"` finds no schedule that fits into memory.
    """

    strategy_name = "pipeline"

    @with_checked_names
    def __init__(
        self,
        schedule: str | Schedule | Policy = "1f1b",
        microbatches: int | None = None,
        *,
        schedule_args: dict[str, Any] | None = None,
        microbatches_by: MicrobatchesBy = "samples",
        module: str | None = None,
        partition: str | list[int] | list[str] = AUTO,
        recompute: bool | str | Sequence[int] = False,
        # losses and checks
        loss: str = AUTO,
        check_loss: bool = True,
        verify: int | str = 0,
        seed: int = 0,
        # replicas, shards and data
        data_parallel: int | list[int] = 1,
        tensor_parallel: int = 1,
        shard_optimizer: bool = False,
        data: Data = "auto",
        # checkpoints
        checkpoint: str = "full",
        async_checkpoint: bool = False,
        gather: Gather = "auto",
        # layers that move, and the number of stages
        replan: bool | dict[str, Any] = False,
        relocation: str = BLOCKING,
        stages: str | dict[int, float] | None = None,
        stale_gradients: bool | dict[int, float] = False,
        # network and processes
        transport: str = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        # what the Trainer sets
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_parts(
            accelerator=(accelerator, Accelerator),
            parallel_devices=(parallel_devices, list[torch.device]),
            cluster_environment=(cluster_environment, ClusterEnvironment),
            checkpoint_io=(checkpoint_io, CheckpointIO),
            precision_plugin=(precision_plugin, Precision),
        )
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        self._arguments = describe_changes(PipelineStrategy.__init__, given)
        self.num_nodes = 1
        self._request = RunRequest.from_arguments(
            schedule, schedule_args, microbatches, recompute, partition, replan, stale_gradients, microbatches_by
        )
        self.schedule = self._request.schedule
        self._settings = Settings(
            data_parallel=data_parallel,
            shard_optimizer=shard_optimizer,
            tensor_parallel=tensor_parallel,
            module=module,
            microbatches_by=microbatches_by,
            seed=seed,
            transport=transport,
            checkpoint=checkpoint,
            gather=gather,
            data=data,
            check_loss=check_loss,
            loss=loss,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            relocation=relocation,
            process_group_backend=process_group_backend,
            verify=parse_verify(verify),
        )
        share_heap()
        exit_with_launcher(self._settings.heartbeat_timeout)
        self._stages = check_stages(stages, self._request, self._settings)
        self._writing = CheckpointWriter(check_type("async_checkpoint", async_checkpoint, bool))
        self.checkpoint_io = checkpoint_io
        self._opened: SessionStart | None = None
        self._session: Session | None = None
        self._spread: ModuleCut | None = None
        """The module of the last run if its layers stay on their ranks because they were made on `meta`."""
        self._by_units = WeakSet[pl.LightningModule]()
        self._reference: ReferenceProcess | None = None
        self._accumulating = False
        self._patches = Patches()
        self._replica_world = ReplicaWorld()
        self._log_dirs: list[str | None] = []
        """The `trainer.log_dir` of rank 0 at the start of the run, so that a single rank may read it."""
        self._decision: Decision | None = None
        self._reported: tuple[Sequence[Sequence[Window]], RunInfo] = ((), RunInfo())

    def __repr__(self) -> str:
        name = sys._getframe(1).f_globals.get("__name__", "")
        if name in _REFUSALS:  # another kind of Trainer shows the strategy in an unhelpful message
            raise PlanError(
                f"PipelineStrategy is a strategy of lightning.pytorch.Trainer, but {_REFUSALS[name]}. Use `import "
                "lightning.pytorch as pl` for the Trainer, the LightningModule and all callbacks"
            )
        return f"PipelineStrategy({self._arguments})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has the settings but neither the connections nor the current run."""
        state = {**self.__dict__, **dict.fromkeys(("_opened", "_session", "_spread"))}
        return {**state, "_patches": Patches(), "_by_units": WeakSet(), "_replica_world": ReplicaWorld()}

    # ---- processes and devices

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node."""
        caller = private.caller_of_property(sys._getframe(1), "num_devices", "device_ids")
        if caller is not None:
            self._warn_of_count(f"trainer.num_devices, which is {len(self._parallel_devices or ())}", caller)
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def world_size(self) -> int:
        """The number of processes of all replicas, with their stages and their shards of tensor parallelism."""
        size: int = super().world_size
        frame = sys._getframe(1)
        self._warn_of_count(
            f"trainer.world_size, which is {size}", private.caller_of_property(frame, "world_size") or frame
        )
        return size

    def _warn_of_count(self, what: str, caller: FrameType) -> None:
        """Warn about a line of the user's code that computes with a number of processes.

        Samplers and learning rates that depend on this number would mistake stages for replicas. Lines that only
        compare or print the number cause no warning. The properties nevertheless count processes, because they are used
        together with `global_rank`, which numbers processes, also in names of files.
        """
        replicas = self._settings.replicas
        if super().world_size != replicas and not only_looks(caller):
            warn_once_per_line(
                f"{{}} reads {what}, the number of processes. The stages of a pipeline train on the same batches, so "
                "a batch size or learning rate that is divided or multiplied by this number differs from one process. "
                f"Use trainer.strategy.data_parallel_size, the number of replicas, which is {replicas} here. In "
                "hooks, torch.distributed.get_world_size() also returns the number of replicas, as under DDP",
                caller,
            )

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas of the pipeline, which share the data. Under DDP, `world_size` has this meaning."""
        return self._settings.replicas

    @property
    def data_parallel_rank(self) -> int:
        """The index of this process's replica, which is the same on all its stages.

        For the data, it has the role that `global_rank` has under DDP.
        """
        return self.grid.replica

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should shard the data over replicas. All stages of a replica need the same batches."""
        return self.grid.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.grid.replicas, "rank": self.grid.replica}

    @property
    def grid(self) -> Grid:
        """The position of this rank among the replicas and stages."""
        settings, size, rank = self._settings, self.world_size, self.global_rank
        return Grid(settings.replicas, size, rank, settings.tensor_parallel, settings.degrees)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks.

        Its dimensions are `data_parallel`, `pipeline` (the last stage first) and `tensor_parallel`.

        Raises:
            PlanError: the processes are not connected, or the run has no mesh because the module does not override
                `configure_model`.
        """
        mesh = None if self._session is None else self.session.replicas.mesh
        if mesh is None:
            raise PlanError(
                "there is a device mesh while trainer.fit or another method runs, for modules that override "
                "configure_model, and with data_parallel or tensor_parallel; ask for it in configure_model or later"
            )
        return mesh

    @property
    def control(self) -> Control:
        """The control channel, through which all ranks exchange objects."""
        return self.session.control

    @property
    def session(self) -> Session:
        """The session, which connects this rank with the other ranks until the next call of `setup_environment`."""
        assert self._session is not None, "setup_environment has not run"
        return self._session

    @property
    def _environment(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None, "the Trainer has one"
        return self.cluster_environment

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "the Trainer has one"
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer

    def _configure_launcher(self) -> None:
        self._threads = Threads()
        if not self._environment.creates_processes_externally:
            self._launcher = make_launcher(self, self._environment, self.num_processes, self.num_nodes)

    def begin_forked_rank(self) -> None:
        """Prepare this process, which was forked as a rank, to run as that rank."""
        self._launcher = None
        dist.group.WORLD = None  # left over from training in the original process
        self._threads = Threads()
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Set the ranks of this process in the cluster environment, as Lightning's own strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        if is_imported_by_worker():
            raise PlanError(
                "this process is a worker, as of a DataLoader with multiprocessing_context='spawn', which imports the "
                "script that has started it, and the script begins to train outside of a main guard. Put what it does "
                'below `if __name__ == "__main__":`, so that importing the script starts nothing'
            )
        self.set_world_ranks()
        if self._fork_reference():
            return
        super().setup_environment()
        warn_if_untested()
        before, self._opened, self._session = self._session, None, None
        if before is not None:
            before.connections.renew_control(before.control)
        device, local_size = self.root_device, self.num_processes
        if self._stages is not None and self.world_size > 1:
            hosts = [str(rank // local_size) for rank in range(self.world_size)]
            chosen = choose_stages(
                self._stages, self._request, self._settings, self._trainer, hosts, device_memory(device)
            )
            (self._request, self._settings), self._stages = chosen, None
        settings = self._settings
        self._opened = SessionStart(self._trainer, self.grid, device, self._environment, local_size, settings)
        self._session = self._opened.connect(self._threads, self._writing)
        if self.world_size > 1:
            self._replica_world.install(self.grid, self.control)

    def _fork_reference(self) -> bool:
        """Fork the plain process that verifies this run, if verification is requested.

        Returns:
            True in the forked process, whose Trainer has a different strategy by then, and False in all other
            processes.
        """
        fits = self._trainer.state.fn == TrainerFn.FITTING
        if not (fits and self._settings.verify.batches and self.is_global_zero):
            return False
        self._reference = fork_reference(self, self._trainer, self._module)
        return self._reference is None

    # ---- setup and teardown of a run

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        if self.session.ranks.grid.replicas == 1:  # every rank logs the same values, so synchronization is not needed
            self._patches.callback(private.ignore_warnings(".*sync_dist=True.*"))
        self.model = self.precision_plugin.convert_module(self.model)
        swaps = self.memory is not None or self.session.connections.turns is not None
        context = SetupContext(
            self,
            self.session,
            replace(self._request, late_recompute=self._request.late_recompute or swaps),
            self._settings,
            self._writing,
            self._reference,
            self._start_epoch,
            self._patches,
            self._by_units,
        )
        prepare(context)
        self._log_dirs = []
        self._log_dirs = [trainer.log_dir]

    def adopt_decision(self, decision: Decision) -> None:
        """Use a decision for the run from now on.

        Under `lightning-pipes plan`, write the decision to a file and end all processes instead.
        """
        self._decision, self.schedule = decision, decision.schedule
        file = os.environ.get(PLAN_VARIABLE)
        if file and self._trainer.state.fn == TrainerFn.FITTING:
            self._write_plan_and_exit(decision, file)

    def _write_plan_and_exit(self, decision: Decision, file: str) -> None:
        """Write the layers or units of each stage to `file` on rank 0, and end the processes of all ranks."""
        if self.is_global_zero:
            decision.save_pieces(file)
        sys.stdout.flush()
        self.control.barrier()
        os._exit(0)

    def teardown(self) -> None:
        fault_point("teardown")
        module, cut, current, session = self.lightning_module, self._cut, self._active_run, self._session
        opened = self._opened
        _log.debug("teardown: restoring the module and removing the patches of the run")
        self._patches.close()
        self._replica_world.remove()
        if self._reference is not None:
            self._reference.close()
            self._reference = None
        if session is not None:
            session.verifier = None
            session.checkpointing.finish(self._is_isolated)
        if opened is not None:
            opened.connections.release_state()
        ended = False
        if current is not None:
            current.run.settle_layers()
            ended = not self._is_isolated
            connections, ranks = self.session.connections, self.session.ranks if ended else None
            self._reported = current.close(self, connections, ranks, self._settings.gather) or self._reported
        if opened is not None:
            opened.connections.release_control(None if session is None else session.control, self._is_isolated)
        if module is not None and not has_meta(module):
            module.cpu()
        if cut is not None:
            cut.restore(ended)
            restore_averages(private.callbacks(cut.module.trainer), cut.module)
            self.session.cut = self.session.active_run = None
            self._spread = cut if cut.stays_spread else None
        private.optimizers_to_device(self.optimizers, torch.device("cpu"))
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()
        if current is not None and not self._is_isolated:
            current.stops.end_run()

    @property
    def _layers_take_turns(self) -> bool:
        """Whether layers are on the device only while they are used.

        Otherwise, `memory` only manages weight versions, if any.
        """
        return self.memory is not None and isinstance(self.schedule, Policy)

    def model_to_device(self) -> None:
        cut = self._cut if self._layers_take_turns else None
        layers = nullcontext() if cut is None else cut.without_layers()
        with layers:  # layers that take turns are loaded at their first use
            self._module.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        if self._session is None or self._session.status.error is not None:
            return dataloader  # the data of a loop is requested outside of a run
        if isinstance(dataloader, DataLoader) and private.seeded_workers(dataloader):
            rank = self.grid.replica  # the same on all stages
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        if not self._trainer.predicting and self.grid.shards == 1:  # Lightning reads predicted indices from samplers
            settings, pipeline = self._settings, self.session.ranks.pipeline
            dataloader = share_loader(dataloader, settings.data, pipeline, pipeline.ranks[0], settings.replicas)
        return self.session.checkpointing.data.prepare_loader(dataloader) if self._trainer.training else dataloader

    def on_train_start(self) -> None:
        self.session.checkpointing.data.go_on(self._trainer, self._patches)

    def on_train_end(self) -> None:
        with self.session.status.report_errors():
            self.current_run.drain()
            if self.session.verifier is not None:
                self.session.verifier.training_ended()
            self.current_run.finish_move()

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.session.status.check()
        with self.session.status.report_errors():
            self.session.checkpointing.check()
            batch, arguments = _batch_and_arguments(args, kwargs)
            active = self._required_run
            is_cut = active.run.plans.microbatches > 1 and not active.run.user_steps.ends_whole
            with self._scope.suspend_hooks(), in_step(is_cut):  # the user's code may call this method
                out = active.run.training_loop.train(batch, arguments, self.optimizers, not self._accumulating)
            if self.session.verifier is not None:
                self.session.verifier.training_step_ended(out)
            self._decision = active.run.decision or self._decision
            return out

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.session.status.check()
        with self.session.status.report_errors():
            step = named_step(self.lightning_module, name)
            active = self._required_run
            with in_step():
                output = active.evaluation.evaluate(step, context, *_batch_and_arguments(args, kwargs))
            if not active.run.is_fitting:
                active.stops.agree_to_leave(self.session.ranks.pipeline)
            return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Call the hooks around backward.

        The gradients were already computed in `training_step`. With manual optimization, they are computed here.
        """
        training_loop = self.current_run.training_loop
        if isinstance(training_loop, ManualLoop):
            return training_loop.run_backward(self.precision_plugin, closure_loss, args, kwargs)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        with self.session.status.report_errors(), self._scope.suspend_hooks():
            self.current_run.training_loop.give_back_gradients()
        if self.current_run.is_asynchronous:  # later hooks run on each stage once its gradients are complete
            return closure_loss.detach()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        if self.session.verifier is not None:
            self.session.verifier.backward_ended()
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        training_loop, step_count = self.current_run.training_loop, self.session.step_count
        shards, closure = self.session.checkpointing.shards, training_loop.resume_step(closure)
        take_step = super().optimizer_step
        with (
            self.session.status.report_errors(),
            training_loop.pause_step(),
            nullcontext() if shards is None else shards.restore_after(),
            step_count.count_step(),
        ):
            return self._required_run.step_optimizer(
                self,
                optimizer,
                step_count.follow(optimizer, closure),
                lambda closure: take_step(optimizer, closure, *args, **kwargs),
            )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return the context around `configure_model`.

        Within this context, `load_pretrained` postpones reading until each rank knows its layers.
        """
        with super().tensor_init_context(empty_init), reads_later(), all_processes():
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context for batches that accumulate gradients without an optimizer step.

        Their gradients accumulate and are not summed over ranks.
        """
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def on_validation_end(self) -> None:
        current = self._active_run
        if current is not None and current.run.is_fitting:
            current.stops.agree_on_stop()

    def _start_epoch(self) -> None:
        self.session.checkpointing.data.epoch_starts(self._trainer)
        broadcast_random_state(self.control, self.root_device)
        self.current_run.local_layers.buffers.start_epoch()

    # ---- for users and callbacks

    @property
    def report(self) -> PipelineReport:
        """The measured and predicted timelines of the last training batches, available on every rank after `fit`.

        Raises:
            PlanError: nothing has been trained.
        """
        return PipelineReport.from_windows(*self._reported)

    @property
    def flushes(self) -> bool:
        """Whether all stages finish a batch before the next batch begins."""
        return self.schedule.flushes

    def adopt(
        self, schedule: str | Schedule | Policy, microbatches: int | None = None, plan: Plan | None = None
    ) -> None:
        """Change the schedule, the number of micro-batches or the plan from the next training batch on.

        This method is collective: all ranks must call it with the same arguments after the same batch. Layers stay on
        their ranks, unless the plan assigns them to different stages. In this case, they move with their buffers,
        gradients and optimizer states before the next batch or during the following batches, depending on `relocation`.
        The trained weights do not change, except with `relocation="buffered"` and with schedules whose stages miss
        different numbers of updates.

        Args:
            schedule: the name of an installed schedule, or your own schedule object with its settings.
            microbatches: the number of micro-batches per batch. The default is the number that was passed to the
                strategy. If no number was passed, it is the default of the schedule.
            plan: how to cut batches of the size of this plan. Batches of other sizes are still cut evenly. If the plan
                has `layers`, the stages use them from now on; `planning.partition.with_layer` moves a single layer.

        Raises:
            PlanError: nothing is being trained, stages would move to other ranks, or only one of the two schedules
                flushes between batches. Layers would move although they share a parameter with other layers, or
                although siblings share the ranks. In all these cases, the run continues unchanged.
            PipelineError: the ranks pass different arguments.
        """
        run = None if self._active_run is None else self._active_run.run
        if run is None or not run.is_fitting:
            raise PlanError("a schedule can be adopted while trainer.fit runs only")
        adopt_plan(run, self.control, schedule, microbatches, plan)
        self.schedule = run.plans.schedule

    @property
    def decision(self) -> Decision:
        """The decision of the last run: schedule, micro-batches, recomputation and cut, and the reason for them.

        Raises:
            PlanError: nothing has run yet.
        """
        if self._decision is None:
            raise PlanError("the schedule and the cut are not known before the first run. Call trainer.fit first")
        return self._decision

    def last_timing(self) -> Timing | None:
        """Return how the time of the last window was spent on every rank, or None if no window has ended yet.

        This method is collective: all ranks must call it after the same batch.
        """
        windows = self.current_run.windows
        if not windows:
            return None
        return self.session.gather_timing(Share.from_events(windows[-1].events))

    @property
    def current_run(self) -> PipelineRun:
        """The current run, for the callbacks of this package."""
        return self._required_run.run

    @property
    def _scope(self) -> HookScope:
        """The scope that records which hook of the user's code is running."""
        assert self._cut is not None, "setup has not run"
        return self._cut.scope

    @property
    def _cut(self) -> ModuleCut | None:
        return None if self._session is None else self._session.cut

    @property
    def _active_run(self) -> ActiveRun | None:
        return None if self._session is None else self._session.active_run

    @property
    def _required_run(self) -> ActiveRun:
        assert self._active_run is not None, "setup has not run"
        return self._active_run

    # ---- state

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads the files of `checkpoint="full"`."""
        return self._writing.io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._writing.io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module, cut = self._module, self._cut or self._spread
        if cut is None or cut.module is not module:
            return module.state_dict()
        if self._is_isolated:
            return cut.local_state(outside=True)
        if self._active_run is not None:
            self._active_run.run.drain()
        elif cut.is_whole_elsewhere:
            return {}  # the first rank saves its module without other ranks
        return self.session.checkpointing.model_state(cut)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint at the path of rank 0.

        The path of rank 0 is used because Lightning's tuner chooses a random file name in each process. The learning
        rate finder also loads and removes its file while an error propagates. In this case, failures of other ranks are
        not reported here.
        """
        if sys.exc_info()[1] is None:
            self.session.status.check()
        checkpointing = self.session.checkpointing
        checkpointing.finish(self._is_isolated)
        path, running = self.broadcast(checkpoint_path), self._active_run is not None
        checkpoint = checkpointing.load(path, weights_only, self._module, running, super().load_checkpoint)
        if self._is_isolated:
            checkpointing.meet_after_failure()
        self.barrier()  # the caller may remove the file only after all ranks have read it
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._active_run is not None:
            load_model(self._active_run.run.cut, checkpoint["state_dict"], strict)
        elif has_meta(self._module) or has_shards(self._module):
            self.session.checkpointing.load_later(checkpoint["state_dict"], strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = private.plain_optimizer(optimizer)
        with nullcontext() if self._cut is None else self._scope.suspend_hooks():  # a hook may save a checkpoint
            if self._is_isolated:
                return plain.state_dict()
            number = next(n for n, o in enumerate(self.optimizers) if private.plain_optimizer(o) is plain)
            return self.session.checkpointing.optimizer_state(plain, self.session.layouts[number])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states, session = checkpoint["optimizer_states"], self.session
        with nullcontext() if self._cut is None else self._scope.suspend_hooks():  # a hook may search a learning rate
            session.checkpointing.load_optimizers(self.optimizers, session.layouts, states, self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        After a failure, each rank writes its own part. The first rank joins the parts into one checkpoint if all ranks
        are alive and have taken the same number of steps.
        """
        if isinstance(self._launcher, ForkLauncher) and self._launcher.is_failing:
            return  # the forked ranks have saved the weights, which this process does not have
        if self._session is None:  # nothing has run yet, so the module is complete
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        checkpointing, current = self._session.checkpointing, self._active_run
        if self._is_isolated and current is not None and self.world_size > 1:
            session, run = self._session, current.run
            raised = sys.exc_info()[1]
            if raised is not None:
                session.status.report_failure(raised)  # other ranks may wait for this one, and must save, too
            may_join = session.connections.n_siblings == 1 and not run.is_asynchronous and not has_shards(self._module)
            may_join = may_join and not run.relocation.is_moving
            checkpointing.save_after_failure(
                checkpoint,
                filepath,
                self._trainer,
                run.cut,
                session.layouts,
                session.step_count.describe() if may_join else None,
                storage_options,
            )
            return
        training = current is not None and current.run.is_fitting and not self._is_isolated
        cut = self._cut or self._spread
        checkpointing.save(checkpoint, filepath, self._trainer, cut, training, storage_options)
        self._session.connections.trim_memory_later()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, unless this rank has failed and its own part does not replace a complete checkpoint."""
        if self._session is None:  # nothing has run yet
            super().remove_checkpoint(filepath)
        elif self.is_global_zero and (not self._is_isolated or self._session.checkpointing.joins_parts):
            self._session.checkpointing.remove(filepath)

    # ---- collective calls; all stages hold the same values, so averages are over replicas

    def barrier(self, name: str | None = None) -> None:
        if self._is_isolated:
            return
        if is_in_step():
            self._replica_world.barrier()
        else:
            self._meet("trainer.strategy.barrier")
            self.session.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_isolated:
            return obj
        if private.caller_of_property(sys._getframe(1), "log_dir") is not None and self._log_dirs:
            return obj if self.is_global_zero else self._log_dirs[0]
        if is_in_step():
            return self._replica_world.broadcast(obj, self.grid.replica_of(src))
        self._meet("trainer.strategy.broadcast")
        return self.control.broadcast(obj, src)

    def _meet(self, call: str) -> None:
        """Wait for the other ranks if the user's code makes this call. All ranks make the calls of Lightning itself."""
        caller = sys._getframe(2)
        if find_user_frame(caller) is caller and self.session.connections.n_siblings == 1:
            self.control.watch.meet(call, user_line(caller))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._is_isolated else self.session.replicas.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_isolated:
            return decision
        if is_in_step():
            return self._replica_world.reduce_decision(decision, all, self.root_device)
        self._meet("trainer.strategy.reduce_boolean_decision")
        return self.session.reduce_decision(decision, all)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.session.replicas.all_gather(tensor, group, sync_grads)

    # ---- failures

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, SIGTERMException):
            as_terminated(exception)
            atexit.register(skip_final_gc)
        if isinstance(exception, PeerFailure):
            shorten_traceback(exception)
        if self._leaving_together and isinstance(exception, SIGTERMException):
            self.control.barrier()  # a launcher may end all processes once the first process has ended
        elif self._opened is not None:
            self._opened.status.report_failure(exception)

    @property
    def _is_isolated(self) -> bool:
        """Whether this rank must not rely on other ranks: before they are connected, and once this rank is failing."""
        session = self._session
        if session is None or session.status.error is not None:
            return True
        module = self.lightning_module
        if module is None or module._trainer is None:
            return False
        return module.trainer.state.status == TrainerStatus.INTERRUPTED and not self._leaving_together

    @property
    def _leaving_together(self) -> bool:
        """Whether all ranks end at the same batch because of a SIGTERM, so that they can save a complete checkpoint."""
        return self._active_run is not None and self._active_run.stops.terminated


def _batch_and_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    values = (*args, *kwargs.values())
    return values[0], values[1:]
