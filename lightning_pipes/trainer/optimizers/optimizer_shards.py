"""Optimizer states sharded over the replicas of a stage (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, stage 1).

Every replica steps an equal part of the elements of each parameter, and stores the optimizer states of only these
elements. The parts are gathered after the step. Gradients are not sharded, so that clipping and hooks work as usual.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.reducer import group_by_bytes
from lightning_pipes.engine.private_torch import step_hooks
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope

_SHARDS_WAY_OUT = "use one that treats every element alone, such as AdamW or SGD, or leave shard_optimizer out"
_STEP_TOLERANCE = 1e-4
"""The maximum relative difference between two steps in float32 that differ only by rounding errors."""


class OptimizerShards:
    """Makes optimizers step only this replica's part of each parameter, until `patches` is closed.

    Parameters that have fewer elements than there are replicas, or that are not contiguous, are not sharded. All
    replicas step them.

    Args:
        optimizers: the optimizers of this rank, whose states are replaced by their parts.
        replicas: the ranks with the same stages.
        scope: specifies which hook is running.
        patches: the changes to the optimizers, which are reverted when it is closed.
    """

    def __init__(self, optimizers: Iterable[Optimizer], replicas: Replicas, scope: HookScope, patches: Patches) -> None:
        self._replicas = replicas
        self._scope = scope
        self._whole: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        """Each parameter that is currently replaced by its part, with its whole values and gradient."""
        for optimizer in optimizers:
            self.shard_states(optimizer)
            before = optimizer.register_step_pre_hook(self._before_step)
            after = optimizer.register_step_post_hook(self._after_step)
            step_hooks(optimizer)[1].move_to_end(after.id, last=False)  # type: ignore[attr-defined]
            patches.callback(before.remove)
            patches.callback(after.remove)

    def shard_states(self, optimizer: Optimizer) -> None:
        """Reduce the states of an optimizer for whole parameters to this replica's parts."""
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = self._shard_state(parameter, state)

    def gather_states(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the `state_dict` of an optimizer with the states of whole parameters. Collective over replicas."""
        local = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts: list[tuple[dict[Any, Any], Any, Tensor]] = []
        states: dict[int, Any] = {}
        for number, state in local["state"].items():
            parameter, states[number] = parameters[number], dict(state)
            if self._is_sharded(parameter):
                shape = (len(self._part(parameter, self._replicas.grid.replica)),)
                names = sorted(name for name, value in state.items() if _has_shape(value, shape))
                parts += [(states[number], name, parameter) for name in names]
        wholes = []
        for state, name, parameter in parts:
            whole = torch.empty(parameter.shape, dtype=state[name].dtype, device=state[name].device)
            wholes.append(whole)
            self._cut(whole).copy_(state[name])
            state[name] = whole
        self._gather(wholes)
        return {**local, "state": states}

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Return a context for a step that restores whole parameters even if the step fails."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        """Replace the parts of parameters and gradients by the whole tensors again."""
        for parameter, values, gradient in self._whole:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient
        self._whole = []

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace parameters by their parts once the gradients are available, which is after the closure if any."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._enter(optimizer)
            return None

        def run() -> Any:
            result = closure()
            self._enter(optimizer)
            return result

        if len(args) > 1:
            return (args[0], run, *args[2:]), kwargs
        return args, {**kwargs, "closure": run}

    def _enter(self, optimizer: Optimizer) -> None:
        self._restore()  # an optimizer may call the closure twice
        with self._scope.suspend_hooks():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or not self._is_sharded(parameter):
                continue
            self._whole.append((parameter, parameter.data, gradient))
            parameter.grad = None
            parameter.data = self._cut(parameter.data)
            parameter.grad = self._cut(gradient)

    def _after_step(self, *_: Any) -> None:
        with self._scope.suspend_hooks():
            stepped = [values for _, values, _ in self._whole]
            self._restore()
            self._gather(stepped)

    def _gather(self, tensors: Sequence[Tensor]) -> None:
        """Copy the parts of the other replicas into each tensor. Collective over replicas."""
        replicas, own = self._replicas.grid.replicas, self._replicas.grid.replica
        for group in group_by_bytes(tensors):
            length = sum(-(-t.numel() // replicas) for t in group)
            mine = torch.zeros(length, dtype=group[0].dtype, device=group[0].device)
            torch.cat([self._cut(t) for t in group], out=mine[: sum(len(self._part(t, own)) for t in group)])
            found = self._replicas.gather_flat(mine)
            for replica in range(replicas):
                if replica == own:
                    continue
                sizes = [len(self._part(t, replica)) for t in group]
                for tensor, part in zip(group, torch.split(found[replica][: sum(sizes)], sizes), strict=True):
                    self._cut(tensor, replica).copy_(part)

    def _shard_state(self, parameter: Tensor, state: Any) -> Any:
        """Return this replica's part of the state of a parameter."""
        if not self._is_sharded(parameter) or not isinstance(state, Mapping):
            return state
        return {
            name: self._cut(value.contiguous()).clone() if _has_shape(value, parameter.shape) else value
            for name, value in state.items()
        }

    def _is_sharded(self, parameter: Tensor) -> bool:
        return parameter.dim() > 0 and parameter.numel() >= self._replicas.grid.replicas and parameter.is_contiguous()

    def _part(self, tensor: Tensor, replica: int) -> range:
        """Return the range of elements of a flattened tensor that a replica steps."""
        elements, replicas = tensor.numel(), self._replicas.grid.replicas
        return range(elements * replica // replicas, elements * (replica + 1) // replicas)

    def _cut(self, tensor: Tensor, replica: int | None = None) -> Tensor:
        part = self._part(tensor, self._replicas.grid.replica if replica is None else replica)
        return tensor.reshape(-1)[part.start : part.stop]


def _has_shape(value: object, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def check_shardable(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Check that optimizers can step the parts of a parameter separately.

    For each parameter group, the values of a parameter after some steps are compared with the values of its two halves
    that are stepped separately. This parameter has the shape of a small parameter of the group, or a smaller fixed
    shape if the optimizer has no state for it.

    Args:
        optimizers: the optimizers.
        device: the device on which the steps are computed.

    Raises:
        PipelineError: the values of the halves differ from the values of the whole parameter, or an optimizer can't
            step a flat part of a parameter.
    """
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            why = _find_difference(optimizer, group, device) if group["params"] else ""
            if why:
                raise PipelineError(
                    f"{type(optimizer).__name__}, group {number}, can't be sharded over replicas: {why}; "
                    f"{_SHARDS_WAY_OUT}"
                )


def _find_difference(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> str:
    """Return the reason why the parts of a parameter can't be stepped separately, or an empty string."""
    like = max(group["params"], key=lambda p: (min(p.dim(), 2), -p.numel()))
    has_state = bool(optimizer.state.get(like))
    shape = like.shape if has_state or like.dim() != 2 else (4, 6)
    shape = (6,) if not has_state and like.dim() in (0, 1) else shape
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(shape, generator=generator).to(device, like.dtype) for _ in range(4))
    state = {} if not has_state else {k: _on(v, device) for k, v in optimizer.state[like].items()}
    half = values.numel() // 2
    pieces: list[Callable[[Tensor], Tensor]] = [lambda t: t.reshape(-1)[:half], lambda t: t.reshape(-1)[half:]]
    try:
        whole = _step_copy(optimizer, group, values, state, gradients, lambda t: t)
        parts = [_step_copy(optimizer, group, values, state, gradients, piece) for piece in pieces]
    except Exception as error:  # a user's optimizer may raise any error for flat tensors
        return f"a flat part of a parameter can't be stepped ({type(error).__name__}: {error})"
    moved = (whole - values).abs().max()
    apart = (torch.cat(parts) - whole.reshape(-1)).abs().max()
    if not apart <= _STEP_TOLERANCE * max(float(moved), 1e-12):
        return "a parameter in two parts is stepped to other values than in one, as by norms of whole parameters"
    return ""


def _step_copy(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Tensor,
    state: Mapping[str, Any],
    gradients: Sequence[Tensor],
    piece: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the values of a piece of a parameter after one step with each of the gradients.

    Args:
        optimizer: the optimizer, of which a copy is used.
        group: the settings of the parameter group.
        values: the values of the whole parameter.
        state: the state of the whole parameter; empty for none.
        gradients: the gradients of the whole parameter for each step.
        piece: selects the piece of a tensor.
    """
    parameter = nn.Parameter(piece(values).clone())
    own = copy.copy(optimizer)  # has all settings, but no hooks and no `step` of a scheduler
    own.param_groups = [{**group, "params": [parameter]}]
    own.state = defaultdict(dict)
    if state:
        own.state[parameter] = {k: piece(v).clone() if _has_shape(v, values.shape) else v for k, v in state.items()}
    for gradient in gradients:
        parameter.grad = piece(gradient).clone()
        own.step()
    return parameter.detach()


def _on(value: Any, device: torch.device) -> Any:
    return value.detach().to(device).clone() if isinstance(value, Tensor) else value
