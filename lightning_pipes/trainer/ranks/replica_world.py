"""torch's default process group as the user's code sees it during a run: the replicas of this rank's stages.

The stages of a pipeline run different parts of a step, and the layers of a stage run only on its own ranks. A
collective over all ranks would wait there for ranks that never call it. Therefore, the default group of
`torch.distributed` is a `ReplicaGroup` during a run. Its members are the ranks that run the same code on other parts of
the data, as all ranks do under DDP. With a single pipeline it has one member, and its collectives change nothing, as in
a single process.

Hooks run on the ranks of all stages. In a hook, a barrier waits for all of these ranks, and a broadcast reaches all of
them.

Groups that the user's code creates with `new_group` during the run have replicas as their ranks. In a step, a group
that was created before the run can be used if all of its ranks are replicas of this stage. Otherwise, an error is
raised.

Code of lightning_pipes that creates process groups, or that needs the number of a process, uses `all_processes` and
`process_rank`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.processes import all_processes, is_user_group, user_groups, whole_group
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.ranks.user_lines import user_line, warn_once_per_line

_TO_ALL = ("barrier", "monitored_barrier", "broadcast")
"""Collectives that reach the ranks of all stages if all of these ranks run the same code."""
_TO_ONE = ("send", "recv")
_COLLECTIVES = (
    *("all", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "reduce", "scatter", "send"),
    *("_allgather", "_reduce_scatter"),
)
"""Prefixes of the names of methods that send or receive."""


class _Place(threading.local):
    """The state of the code that this thread runs. Each sibling of a job array has its own thread.

    Attributes:
        control: the collectives of all ranks in a thread that runs a training; None in other threads.
        is_in_step: whether the stages run different code, as in `training_step` and in layers.
        is_cut: whether this code runs once for each micro-batch of a training batch.
        is_alone: whether this rank runs a step that other replicas may not run, for example to measure it.
    """

    control: Control | None = None
    is_in_step = False
    is_cut = False
    is_alone = False


_place = _Place()


@contextmanager
def _set_place(**changes: Any) -> Iterator[None]:
    before = {name: getattr(_place, name) for name in changes}
    vars(_place).update(changes)
    try:
        yield
    finally:
        vars(_place).update(before)


def in_step(is_cut: bool = False) -> Any:
    """Return a context for user code of which each stage runs a part.

    Args:
        is_cut: whether it runs once for each micro-batch of a training batch.
    """
    return _set_place(is_in_step=True, is_cut=is_cut)


def in_hook(on_all_ranks: bool) -> Any:
    """Return a context for a hook.

    Args:
        on_all_ranks: whether the ranks of all stages run the hook.
    """
    return _set_place(is_in_step=not on_all_ranks, is_cut=False)


def alone() -> Any:
    """Return a context for the user's steps that run on this rank independently of other ranks."""
    return _set_place(is_in_step=True, is_cut=False, is_alone=True)


def is_alone() -> bool:
    """Return whether this thread runs a step that other replicas may not run."""
    return _place.is_alone


def is_in_step() -> bool:
    """Return whether this thread runs code of which each stage runs a part."""
    return _place.is_in_step


class ReplicaGroup(dist.ProcessGroup):
    """The ranks that hold the same stages as this rank, as torch's default process group.

    Its rank numbers are the numbers of the replicas. If there are several replicas, creating it is a collective call of
    all processes.

    Args:
        grid: the coordinates of this rank.
        whole: the default group of all processes.

    Attributes:
        whole: the default group of all processes.
        purpose: a name that differs between the groups of different stages.
    """

    def __init__(self, grid: Grid, whole: dist.ProcessGroup) -> None:
        super().__init__(grid.replica, grid.replicas)  # type: ignore[call-arg]  # the stub lacks this form
        self.whole = whole
        self._grid = grid
        self._ranks = grid.on_all_replicas((grid.position,))
        self.purpose = "-".join(map(str, self._ranks))
        self._made: dict[tuple[int, ...], Any] = {}
        if grid.replicas > 1:
            for position in range(grid.length):
                for shard in range(grid.shards):
                    ranks = grid.on_all_replicas((position,), shard)
                    with all_processes():
                        self._made[ranks] = dist.new_group(list(ranks))

    def rank(self) -> int:
        """Return the number of this rank's replica."""
        group = sys._getframe(1).f_locals.get("group") if sys._getframe(1).f_code is dist.get_rank.__code__ else None
        if group is not None and group is not self:  # get_rank looks up this rank by its number in the group
            return dist.get_global_rank(group, group.rank())  # group.rank() is 0 in `alone`
        if self._grid.length > 1 and not _place.is_in_step and get_worker_info() is None:
            caller = sys._getframe(1)
            if caller.f_code.co_name == "broadcast_object_list" and self._grid.position:
                return self._grid.replicas  # this rank receives the objects from the first rank of a pipeline
            if caller.f_back is not None and caller.f_back.f_code.co_name == "_get_distributed_info":
                return self.whole.rank()  # torch's profiler names the process in its traces
            self._warn_of_rank(caller)
        return 0 if _place.is_alone else self._grid.replica

    def size(self) -> int:
        """Return the number of replicas."""
        return 1 if _place.is_alone else self._grid.replicas

    @property
    def group_desc(self) -> str:
        """The description of the group. The profiler of torch reads it in a loop over groups, so none is made."""
        return "replicas"

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the group of the replicas, or of all ranks."""
        if name in _TO_ALL and not _place.is_in_step and _place.control is not None:
            _place.control.watch.meet(f"torch.distributed.{name}", user_line())
            return self._reach_all(name, _place.control, *args, **kwargs)
        if _is_collective(name) and name not in _TO_ALL:
            self.check(name)
        if name in _TO_ONE and args[1] not in range(self.size()):
            raise PipelineError(
                f"torch.distributed.{name} at {user_line()} names rank {args[1]}, but the default process group has "
                f"{self.size()} ranks while a pipeline runs: the replicas of this stage. Tensors travel between stages "
                "only through what layers return"
            )
        return getattr(self.inner, name)(*args, **kwargs)

    @property
    def inner(self) -> Any:
        """The process group of the replicas, or of this rank alone. It is created when it is first needed."""
        ranks = (self.whole.rank(),) if _place.is_alone else self._ranks
        if ranks not in self._made:
            with all_processes():
                self._made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]

    def _reach_all(self, name: str, control: Control, *args: Any, **kwargs: Any) -> Any:
        """Call a barrier or a broadcast over the ranks of all stages."""
        if name == "broadcast":
            tensors, options = args[0], args[1]
            first = self._grid.pipelines[options.rootRank * self._grid.shards]
            for tensor in tensors:
                on_host = tensor.detach().cpu().contiguous()
                control.broadcast_tensor(on_host, first[0])
                tensor.detach().copy_(on_host)
        with alone():  # the returned work has ended
            return None if name == "monitored_barrier" else self.inner.barrier()

    def check(self, name: str) -> None:
        """Check a collective call of the replicas.

        If its result can differ from the result in a single process, a warning is shown.

        Raises:
            PipelineError: the ranks of a stage share the samples of a micro-batch, so they are not replicas.
        """
        if self._grid.degrees and _place.is_in_step:
            raise PipelineError(
                f"a collective call of the replicas' process group ({name}) at {user_line()}: "
                f"data_parallel={list(self._grid.degrees)} shares out the samples of a micro-batch among the ranks of "
                "a stage, so that they can't be taken for replicas. Set data_parallel to a number"
            )
        if _place.is_cut and not _place.is_alone and self._grid.replicas > 1:
            warn_once_per_line(
                f"{{}} makes a collective call ({name}) in a step, which runs once for each micro-batch. The result "
                f"combines one micro-batch of all {self._grid.replicas} replicas instead of the whole batch. Training "
                "differs from one process if the result is not a mean over samples, for example if it is the number of "
                "boxes of a batch or a running average. In this case, set PipelineStrategy(microbatches=1)"
            )

    def check_ranks(self, name: str, ranks: Sequence[int]) -> None:
        """Check that all ranks of a collective call in a step run this stage.

        Raises:
            PipelineError: some of the ranks run another stage.
        """
        others = sorted(set(ranks) - set(self._ranks))
        if others:
            raise PipelineError(
                f"torch.distributed.{name} at {user_line()} uses a process group of ranks {sorted(ranks)}, which was "
                f"made before the run. This line runs on the ranks of one stage, here {list(self._ranks)}, and not on "
                f"{others}, so that the call would never end. Use the default process group there, which has the "
                "replicas of a stage as its ranks, or make the group during the run, as in setup() of the module"
            )

    def _warn_of_rank(self, caller: FrameType) -> None:
        if caller.f_code is dist.get_rank.__code__:
            warn_once_per_line(
                "{} reads torch.distributed.get_rank(), which is the number of the replica while a pipeline runs, and "
                f"the same on the {self._grid.length} ranks of all its stages, each of which runs this line. For what "
                "one process should do, such as writing a file, use trainer.is_global_zero or rank_zero_only",
                caller.f_back,
            )


def _is_collective(name: str) -> bool:
    """Return whether a method of process groups sends or receives, according to its name."""
    return name.startswith(_COLLECTIVES)


def _delegate() -> None:
    """Add the other methods and properties of a process group to `ReplicaGroup`."""

    def make_method(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: self.call(name, *args, **kwargs)

    for name, member in vars(dist.ProcessGroup).items():
        if name in vars(ReplicaGroup) or name.startswith("__"):
            continue
        if isinstance(member, property):
            setattr(ReplicaGroup, name, property(partial(lambda name, self: getattr(self.inner, name), name)))
        elif type(member).__name__ == "instancemethod":
            setattr(ReplicaGroup, name, make_method(name))


_delegate()


class _UserGroups:
    """The process groups that the user's code creates, from `__init__` to `remove`.

    In steps, their collectives are checked. In `alone`, they behave as if the group had one rank.

    Args:
        replicas: the default group.
    """

    _of_replicas: WeakSet[Any] = WeakSet()
    """Groups that were created in an earlier run, whose ranks are numbers of replicas."""

    def __init__(self, replicas: ReplicaGroup) -> None:
        self._replicas = replicas
        self._before = user_groups().difference(self._of_replicas)
        self._undo = ExitStack()
        for name, method in list(vars(dist.ProcessGroup).items()):
            if name in ("rank", "size") or _is_collective(name):
                self._undo.callback(setattr, dist.ProcessGroup, name, method)
                setattr(dist.ProcessGroup, name, self._make_method(name, getattr(dist.ProcessGroup, name)))
        self._undo.callback(private.redirect_functional_collectives(self._redirect))

    def remove(self) -> None:
        """Restore the methods of process groups."""
        self._undo.close()
        self._of_replicas.update(user_groups().difference(self._before))

    def _make_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not _place.is_in_step or not is_user_group(group):
                return method(group, *args, **kwargs)
            if not _is_collective(name):
                return {"rank": 0, "size": 1}[name] if _place.is_alone else method(group)
            found = self._redirect(group, name)
            if _place.is_alone and args and hasattr(args[-1], "rootRank"):
                args[-1].rootRank = 0
            return method(found, *args, **kwargs)

        return call

    def _redirect(self, group: Any, name: str = "functional collective") -> Any:
        """Return the group that runs a collective call of a user's group.

        Raises:
            PipelineError: not all ranks of the group make this call.
        """
        if not _place.is_in_step or not is_user_group(group):
            return group
        if group in self._before:
            self._replicas.check_ranks(name, dist.get_process_group_ranks(group))
        if name not in _TO_ALL:
            self._replicas.check(name)
        return self._replicas.inner if _place.is_alone else group


class ReplicaWorld:
    """Makes the replicas the default process group of a training, from `install` to `remove`.

    Trainings that share the ranks of one process also share the group. The last `remove` restores the default group.
    """

    _n_installed = 0
    _user_groups: _UserGroups | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._is_installed = False

    def install(self, grid: Grid, control: Control) -> None:
        """Make the group of the replicas the default process group. The training runs in the calling thread."""
        _place.control = control
        with self._lock:
            if self._is_installed:
                return
            self._is_installed = True
            ReplicaWorld._n_installed += 1
            if ReplicaWorld._n_installed == 1:
                replicas = _find_group(grid, whole_group())
                private.show_default_group(replicas, grid.replicas)
                ReplicaWorld._user_groups = _UserGroups(replicas)

    def remove(self) -> None:
        """Make the group of all processes the default process group again. A second call does nothing."""
        _place.control = None
        with self._lock:
            if not self._is_installed:
                return
            self._is_installed = False
            ReplicaWorld._n_installed -= 1
            if ReplicaWorld._user_groups is not None and not ReplicaWorld._n_installed:
                ReplicaWorld._user_groups.remove()
                ReplicaWorld._user_groups = None
                private.hide_default_group(whole_group())

    @staticmethod
    def barrier() -> None:
        """Wait for the replicas, in a step."""
        if dist.is_initialized():
            dist.barrier()

    @staticmethod
    def broadcast(obj: Any, replica: int) -> Any:
        """Return the object of a replica, in a step."""
        objects = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src=replica)
        return objects[0]

    @staticmethod
    def reduce_decision(decision: bool, all: bool, device: torch.device) -> bool:
        """Return whether all replicas, or any of them, have a True `decision`, in a step."""
        number = torch.tensor(int(decision), device=device)
        size = 1
        if dist.is_initialized():
            dist.all_reduce(number)
            size = dist.get_world_size()
        return int(number) >= (size if all else 1)


_groups: dict[tuple[int, ...], ReplicaGroup] = {}
"""The `ReplicaGroup` of each grid that was used. The process groups behind it last until the process ends."""


def _find_group(grid: Grid, whole: Any) -> ReplicaGroup:
    key = (id(whole), *grid.shape, *grid.degrees)
    if key not in _groups or _groups[key].whole is not whole:
        _groups[key] = ReplicaGroup(grid, whole)
    return _groups[key]
