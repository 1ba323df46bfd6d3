"""Control-plane collectives outside of the pipeline. A failure of another rank interrupts every wait."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.local import PeerListener, host_id
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.trust import TRUSTED_SEAL, Seal
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.ranks.mesh import MAX_CONNECTED_RANKS, Mesh, MessageId, PackedObject, unpack_object
from lightning_pipes.trainer.ranks.processes import all_processes, process_rank

_WAIT_SLICE = timedelta(milliseconds=200)
_IDLE_SLICE = timedelta(milliseconds=2)
"""The slice of a wait with `idle`: the time in which other ranks answer if they have nothing else to do."""
_FIRST_MESSAGE_BYTES = 16384
"""The size in bytes of the first message of an object.

A longer object needs a second message. Random states and small reports fit into the first one.
"""
_LENGTH_BYTES = 8
_PIECE_BYTES = 16 << 20
"""The size in bytes of the pieces in which large objects are gathered."""
_MAX_LEAVING_MESSAGES = 8
"""The number of messages in flight to other ranks for which a rank does not wait."""
_PREPARED_KEY = "prepared"
_FLAGS, _AT_ONCE, _LATER = range(3)
"""Kinds of messages between ranks of one host."""
T = TypeVar("T")


class PendingGather(Generic[T]):
    """A gather in flight. Calling it waits for the answers of all ranks and returns them.

    Args:
        has_all: returns whether all answers have arrived.
        wait: returns when the given condition is true, or when a message has arrived.
        take: returns the answers, after it has waited for missing ones.
    """

    def __init__(
        self, has_all: Callable[[], bool], wait: Callable[[Callable[[], bool]], object], take: Callable[[], T]
    ) -> None:
        self._has_all = has_all
        self._wait = wait
        self._take = take
        self._answers: list[T] = []

    @classmethod
    def at_once(cls, result: T) -> PendingGather[T]:
        """Return a gather with an available result, as for a single rank."""
        return cls(lambda: True, lambda _: None, lambda: result)

    def has_arrived(self) -> bool:
        """Return whether a call returns immediately."""
        return bool(self._answers) or self._has_all()

    def __call__(self) -> T:
        if not self._answers:
            self._wait(self.has_arrived)
        if not self._answers:
            self._answers.append(self._take())
        return self._answers[0]


class Control:
    """Collectives over a group of ranks.

    They run on gloo, so that they work next to any backend. Small objects between ranks of one host are sent through a
    mesh of sockets. Every wait is cut into slices, between which signals are handled and a failure of another rank is
    noticed.

    Connections are made when they are first needed, so all ranks must make the same calls. They last until `close`.

    Args:
        ranks: the global ranks; all ranks of the job, except for a part that `split` creates.
        watch: notices failures of ranks.
        timeout: the timeout of a collective.
        connect: returns the process group for a purpose; by default a subgroup of `ranks`.
        idle: called with the awaited condition during waits, in order to do other work until it is true.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        watch: FailureWatch,
        timeout: timedelta,
        connect: Callable[[str], Any] | None = None,
        idle: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.watch = watch
        self._connect = connect or (lambda purpose: self.subgroup(self.ranks, purpose))
        self._timeout = timeout
        self._idle = idle
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._part: Control | None = None
        self._waiting = False
        self._sends: deque[dist.Work] = deque()
        """Broadcasts of this rank for which it has not waited, the oldest first."""
        self._group_of_purpose: dict[str, Any] = {}
        """Process groups of these ranks, by their purpose."""
        self._mesh: Mesh | None = None
        self._n_messages: Counter[int] = Counter()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def position(self) -> int:
        """The position of this process among the ranks."""
        return self.ranks.index(process_rank())

    def connect(self, purpose: str = "") -> Any:
        """Make the connections if they do not exist, and return their process group.

        All ranks of the job must call it.
        """
        if purpose not in self._group_of_purpose:
            group = self._group_of_purpose[purpose] = self._connect(purpose)
            if not purpose:
                self._mesh = self._make_mesh(group)
        return self._group_of_purpose[purpose]

    def connect_broadcasts(self) -> Any:
        """Make the connections of `prepare_broadcast` if they do not exist, and return their process group.

        All ranks of the job must call it.
        """
        self.connect()
        return self.connect(_PREPARED_KEY)

    def subgroup(self, ranks: Sequence[int], purpose: str = "") -> Any:
        """Return a process group of some ranks.

        All ranks of the job must request the same groups in the same order. Collectives in groups of different purposes
        may have different orders on different ranks.
        """
        key = purpose, tuple(sorted(ranks))
        if key not in self._groups:
            fault_point("new_group")
            new_group = partial(dist.new_group, list(key[1]), timeout=self._timeout, backend="gloo")
            with all_processes():
                self._groups[key] = self.watch.call(new_group)
            fault_point("new_group.made")
        return self._groups[key]

    def split(self, parts: Sequence[Sequence[int]]) -> Control:
        """Return the control of the part that contains this rank. All ranks must request the same parts.

        It lasts until this control is closed.
        """
        if len(parts) == 1:
            return self
        mine = next(part for part in parts if process_rank() in part)

        def connect(purpose: str) -> Any:
            groups = [self.subgroup(part, purpose) for part in parts]
            return groups[parts.index(mine)]

        self._part = Control(mine, self.watch, self._timeout, connect, self._idle)
        return self._part

    def ended(self, position: int) -> bool:
        """Return whether the process of a rank is known to have ended.

        For a process on another host, this is always False.
        """
        return self.watch.has_ended(self.ranks[position])

    def close(self) -> None:
        """Close the connections. A later call makes new ones.

        After a failure they stay open, because gloo would wait for the collective that was abandoned, which may never
        end.
        """
        close_all([self])

    def _release_groups(self) -> list[Any]:
        """Close the mesh, and destroy and return the process groups, unless a collective was abandoned."""
        controls = [control for control in (self, self._part) if control is not None]
        whole = [control._is_idle() for control in controls]
        for control in controls:
            control._forget()
        groups = [*self._groups.values()] if dist.is_initialized() and all(whole) else []
        for group in groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        return groups

    def _is_idle(self) -> bool:
        """Return whether no collective was abandoned, after waiting for the broadcasts that are still in flight."""
        if self._waiting or self.watch.error is not None:
            return False
        leaving, self._sends = self._sends, deque()
        return not any(map(_has_failed, leaving))

    def _make_mesh(self, group: Any) -> Mesh | None:
        """Return the mesh of the ranks; None if they are not all on this host, or if there are too many."""
        if not 1 < self.size <= MAX_CONNECTED_RANKS:
            return None
        here = host_id()
        listener = PeerListener() if here else None
        try:
            of_ranks = self._start_gather((here, listener.name if listener else ""), group)()
            if listener is None or {there for there, _ in of_ranks} != {here}:
                return None
            names = dict(zip(self.ranks, (name for _, name in of_ranks), strict=True))
            return Mesh(process_rank(), names, listener, self.watch)
        finally:
            if listener is not None:
                listener.close()

    def _forget(self) -> None:
        mesh, self._mesh = self._mesh, None
        self._group_of_purpose.clear()
        if mesh is not None:
            mesh.close()

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> torch.Tensor:
        """Reduce `tensor` in place over all ranks, or over a `subgroup`. The result is bitwise equal on all ranks."""
        if self.size > 1:
            self._finish(dist.all_reduce(tensor, op, group=group or self._group, async_op=True))
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, group: Any) -> Callable[[], None]:
        """Start to sum `tensor` in place over a group of any backend, and return a function that waits for the end."""
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return partial(self._finish, work) if dist.get_backend(group) == "gloo" else partial(_wait, work)

    def start_all_gather_into(self, found: torch.Tensor, own: torch.Tensor, group: Any) -> Callable[[], None]:
        """Start to gather the tensors `own` of all ranks into `found`, and return a function that waits for the end.

        Args:
            found: receives the tensors one after the other.
            own: the tensor of this rank.
            group: a process group of any backend.
        """
        work = dist.all_gather_into_tensor(found, own, group=group, async_op=True)
        assert work is not None
        return partial(self._finish, work) if dist.get_backend(group) == "gloo" else partial(_wait, work)

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        return self.start_any(*flags)()

    def start_any(self, *flags: bool) -> PendingGather[list[bool]]:
        """Start `any`, and return the gather of its answer."""
        if self.size == 1:
            return PendingGather.at_once(list(flags))
        group = self._group
        if self._mesh is not None:
            return self._start_any(self._mesh, flags)
        found = torch.tensor([int(f) for f in flags], dtype=torch.int32)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group, async_op=True)
        assert work is not None, "this process is not among the ranks"
        return PendingGather(work.is_completed, lambda _: self._finish(work), lambda: [bool(f) for f in found])

    def _start_any(self, mesh: Mesh, flags: Sequence[bool]) -> PendingGather[list[bool]]:
        message_id = self._next_message_id(_FLAGS)
        mesh.send(message_id, bytes(flags))

        def answer() -> list[bool]:
            of_ranks = self._receive_all(mesh, mesh.others, message_id)
            return [any(of_all) for of_all in zip(flags, *of_ranks, strict=True)]

        return PendingGather(
            partial(mesh.exchange_until, partial(mesh.has_messages, mesh.others, message_id)),
            partial(self._wait, mesh),
            answer,
        )

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with the tensor of global rank `source`."""
        if self.size > 1:
            self._finish(dist.broadcast(tensor, source, group=self._group, async_op=True))

    def broadcast(self, obj: Any, source: int) -> Any:
        """Return the `obj` of global rank `source`. The source does not block. Tensors arrive on the CPU."""
        return obj if self.size == 1 else self._broadcast(source, self._group, _AT_ONCE)(obj)

    def prepare_broadcast(self, source: int) -> Callable[[Any], Any]:
        """Prepare a later `broadcast`, and return a function that completes it.

        The function takes the object on `source`, and None on other ranks. A rank that prepares early does not have to
        wait, because the bytes arrive while it does other work. The source waits only for ranks that are several
        broadcasts behind. Other collectives may run in between, in the same order on all ranks.
        """
        return (lambda obj: obj) if self.size == 1 else self._broadcast(source, self.connect_broadcasts(), _LATER)

    def _broadcast(self, source: int, group: Any, kind: int) -> Callable[[Any], Any]:
        """Return a function that sends the object of `source`, or receives it."""
        mesh, message_id = self._mesh, self._next_message_id(kind)
        if source == (process_rank() if mesh is None else mesh.rank):
            return partial(self._send, source, group, message_id)
        if mesh is None:
            first = torch.empty(_FIRST_MESSAGE_BYTES, dtype=torch.uint8)
            return partial(self._receive_object, source, group, first, self._start_broadcast(first, source, group))

        def receive(_: Any) -> Any:
            (data,) = self._receive_all(mesh, [source], message_id)
            if data:
                return unpack_object(memoryview(data), TRUSTED_SEAL)
            first = torch.empty(_FIRST_MESSAGE_BYTES, dtype=torch.uint8)
            return self._receive_object(source, group, first, self._start_broadcast(first, source, group), None)

        return receive

    def _send(self, source: int, group: Any, message_id: MessageId, obj: Any) -> Any:
        mesh = self._mesh
        if mesh is not None:
            packed = PackedObject(obj, TRUSTED_SEAL)
            small = packed.size <= _FIRST_MESSAGE_BYTES
            mesh.send(message_id, b"".join(packed.parts) if small else b"")
            self._wait(mesh, lambda: mesh.is_sent)
            if small:
                return obj
        while self._sends and (len(self._sends) > _MAX_LEAVING_MESSAGES or self._sends[0].is_completed()):
            self._finish(self._sends.popleft())
        self._sends.extend(self._start_broadcast(m, source, group) for m in _split_message(obj, self._seal))
        return obj

    @staticmethod
    def _start_broadcast(tensor: torch.Tensor, source: int, group: Any) -> dist.Work:
        work: dist.Work | None = dist.broadcast(tensor, source, group=group, async_op=True)
        assert work is not None, "this process is not among the ranks"
        return work

    def _receive_object(self, source: int, group: Any, first: torch.Tensor, first_work: dist.Work, _: Any) -> Any:
        """Receive an object. `first_work` receives its first message."""
        self._finish(first_work)
        end = _message_end(first)
        rest = torch.empty(max(0, end - _FIRST_MESSAGE_BYTES), dtype=torch.uint8)
        if rest.numel():
            self._finish(self._start_broadcast(rest, source, group))
        return _unpack(torch.cat([first[_LENGTH_BYTES:end], rest]), self._seal)

    def gather(self, obj: Any, to: int) -> list[Any] | None:
        """Return the objects of all ranks in order on global rank `to`, and None on other ranks.

        Tensors arrive on the CPU. The tensors of rank `to` that are already there are not copied. Large objects arrive
        in pieces, so that no rank needs memory for more than the objects themselves.
        """
        if self.size == 1:
            return [obj]
        receives = process_rank() == to
        packed = PackedObject(None if receives else obj, self._seal)
        lengths = self._gather_lengths(packed.size)
        messages = [torch.empty(length if receives else 0, dtype=torch.uint8) for length in lengths]
        piece = torch.empty(min(max(lengths), _PIECE_BYTES), dtype=torch.uint8)
        into = [torch.empty_like(piece) for _ in lengths] if receives else None
        for begin in range(0, max(lengths), _PIECE_BYTES):
            packed.write(piece, begin)
            self._finish(dist.gather(piece, into, to, group=self._group, async_op=True))
            for message, part in zip(messages, into or (), strict=False):
                rest = message[begin : begin + _PIECE_BYTES]
                rest.copy_(part[: len(rest)])
        if into is None:
            return None
        found, messages = [], messages[::-1]
        for rank in self.ranks:
            message = messages.pop()  # its memory is freed before the next object is unpacked
            found.append(_to_cpu(obj) if rank == to else _unpack(message, self._seal))
        return found

    def all_gather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks in order, on every rank. Tensors arrive on the CPU."""
        return self.start_all_gather(obj)()

    def start_all_gather(self, obj: Any) -> PendingGather[list[Any]]:
        """Start `all_gather`, and return the gather of the objects.

        If an object does not fit into a first message, completing the gather is another collective call, and
        `has_arrived` stays False until then.
        """
        if self.size == 1:
            return PendingGather.at_once([obj])
        return self._start_gather(obj, self._group)

    def _start_gather(self, obj: Any, group: Any) -> PendingGather[list[Any]]:
        data = _pack_message(obj, self._seal)
        first = [torch.empty(_FIRST_MESSAGE_BYTES, dtype=torch.uint8) for _ in self.ranks]
        work = dist.all_gather(first, data[:_FIRST_MESSAGE_BYTES], group=group, async_op=True)

        def has_arrived() -> bool:
            return work.is_completed() and all(_message_end(message) <= _FIRST_MESSAGE_BYTES for message in first)

        return PendingGather(
            has_arrived, lambda _: self._finish(work), partial(self._collect_gathered, first, data, group)
        )

    def _collect_gathered(self, first: Sequence[torch.Tensor], data: torch.Tensor, group: Any) -> list[Any]:
        """Return the gathered objects after their first messages have arrived."""
        ends = [_message_end(message) for message in first]
        whole = list(first)
        if max(ends) > _FIRST_MESSAGE_BYTES:
            own = torch.zeros(max(ends) - _FIRST_MESSAGE_BYTES, dtype=torch.uint8)
            own[: len(data) - _FIRST_MESSAGE_BYTES] = data[_FIRST_MESSAGE_BYTES:]
            rest = [torch.empty_like(own) for _ in first]
            self._finish(dist.all_gather(rest, own, group=group, async_op=True))
            whole = [torch.cat(parts) for parts in zip(first, rest, strict=True)]
        return [_unpack(message[_LENGTH_BYTES:end], self._seal) for message, end in zip(whole, ends, strict=True)]

    @property
    def _group(self) -> Any:
        return self.connect()

    def _next_message_id(self, kind: int) -> MessageId:
        """Return the ID of the next message of this kind."""
        self._n_messages[kind] += 1
        return MessageId(kind, self._n_messages[kind])

    @property
    def _seal(self) -> Seal | None:
        return self.watch.seal

    def _gather_lengths(self, own: int) -> list[int]:
        """Return the lengths of the messages of all ranks in order."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        length = torch.tensor([own], dtype=torch.int64)
        self._finish(dist.all_gather(lengths, length, group=self._group, async_op=True))
        return [int(each) for each in lengths]

    def _raise_reason(self, error: Exception) -> NoReturn:
        """Raise the reason why a collective failed: a failure that the watch has noticed, or the end of a process."""
        for _ in range(2):  # a process that was killed may need some time to end
            for rank in self.ranks:
                if self.watch.has_ended(rank):
                    self.watch.report_lost_peer(rank, error)
            self.watch.raise_reason()
        raise PipelineError(
            f"another rank has ended without an error message while this rank waited for it: {error}"
        ) from error

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None, "this process is not among the ranks"
        self._waiting = True
        fault_point("collective")
        self.watch.doing = self._call
        patience = _WAIT_SLICE if self._idle is None else _IDLE_SLICE
        while True:
            try:
                work.wait(patience)
                self._waiting, self.watch.doing = False, None
                return
            except RuntimeError as error:
                ended = error
            self.watch.check()  # outside of `except`, so that the end of a slice is not its context
            if work.is_completed() and _has_failed(work):  # the work may have ended just after the slice
                self._raise_reason(ended)
            del ended
            if self._idle is not None:
                self._idle(work.is_completed)

    def _wait(self, mesh: Mesh, done: Callable[[], bool]) -> None:
        """Wait for messages of the mesh, in the same way as `_finish`."""
        fault_point("collective")
        if done():
            return
        self._waiting = True
        self.watch.doing = self._call
        patience, until = (
            _WAIT_SLICE if self._idle is None else _IDLE_SLICE,
            time.monotonic() + self._timeout.total_seconds(),
        )
        while not mesh.exchange_until(done, patience.total_seconds()):
            self.watch.check()
            if time.monotonic() > until:
                self._raise_reason(TimeoutError(f"no answer for {self._timeout.total_seconds():.0f} s"))
            if self._idle is not None:
                self._idle(partial(mesh.exchange_until, done))
        self._waiting, self.watch.doing = False, None

    def _receive_all(self, mesh: Mesh, sources: Sequence[int], message_id: MessageId) -> list[bytearray]:
        """Return the messages of these global ranks."""
        self._wait(mesh, partial(mesh.has_messages, sources, message_id))
        try:
            return [mesh.pop(source, message_id) for source in sources]
        except ConnectionError as error:
            self._waiting, self.watch.doing = True, self._call
            self._raise_reason(error)

    @property
    def _call(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back
        caller = "" if frame is None else f" in {frame.f_code.co_qualname}"
        return f"a collective call of {self.size} ranks{caller}"


def close_all(controls: Iterable[Control]) -> None:
    """Close the connections of all controls at the same time.

    Each connection takes 15 ms to close, until the threads of gloo end.
    """
    fault_point("control.close")
    groups = [group for control in controls for group in control._release_groups()]
    threads = [threading.Thread(target=groups.pop) for _ in groups]  # a group is closed with its last reference
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _pack_message(obj: Any, seal: Seal | None) -> torch.Tensor:
    """Pack the length and bytes of an object, padded to the size of a first message."""
    packed = PackedObject(obj, seal)
    data = torch.zeros(max(_FIRST_MESSAGE_BYTES, _LENGTH_BYTES + packed.size), dtype=torch.uint8)
    data[:_LENGTH_BYTES] = torch.tensor([packed.size], dtype=torch.int64).view(torch.uint8)
    packed.write(data[_LENGTH_BYTES:])
    return data


def _message_end(message: torch.Tensor) -> int:
    """Return the offset of the end of a message that begins with its length."""
    return _LENGTH_BYTES + int(message[:_LENGTH_BYTES].view(torch.int64))


def _to_cpu(obj: Any) -> Any:
    """Return an object with its tensors on the CPU and detached, as the objects of other ranks arrive."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), obj)


def _unpack(data: torch.Tensor, seal: Seal | None) -> Any:
    return unpack_object(data.numpy().data, seal)


def _split_message(obj: Any, seal: Seal | None) -> list[torch.Tensor]:
    """Return the tensors that `Control._receive_object` expects: a first message of fixed length, and the rest of the
    object if it is longer."""
    data = _pack_message(obj, seal)
    return [part for part in (data[:_FIRST_MESSAGE_BYTES], data[_FIRST_MESSAGE_BYTES:]) if part.numel()]


def _has_failed(work: dist.Work) -> bool:
    """Return whether a collective that has ended has failed."""
    try:
        work.wait(_WAIT_SLICE)
    except RuntimeError:
        return True
    return False


def _wait(work: dist.Work) -> None:
    work.wait()
