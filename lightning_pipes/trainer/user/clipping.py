"""Agreement of all stages between backward and the optimizer step: on the gradient norm, and on a scaler's overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.reducer import is_distributed, local_part
from lightning_pipes.engine.private_torch import Clipping
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.private_lightning import replace_unscale_gradients, unscale_gradients
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope, RemoteTensor
from lightning_pipes.trainer.weights.sharding import holds_own_part


class GradientAgreement:
    """Makes the clipping of a precision plugin and the skipped steps of a gradient scaler the same for all stages.

    Gradients are clipped by their norm over all stages. Clipping by value needs no agreement. If a gradient overflows
    on one rank, all ranks skip the step.

    Args:
        precision: the precision plugin.
        holdings: the assignment of parameters to ranks.
        control: the control channel of all ranks with a part of the gradients, which are the ranks of all stages and of
            their shards. None if stages do not step at the same batch; each stage then clips by the norm of its own
            layers.
        device: the device of this rank.
        scope: records which hook is running.
        patches: the changes to the plugin, which are reverted when it is closed.
    """

    def __init__(
        self,
        precision: Precision,
        holdings: Holdings,
        control: Control | None,
        device: torch.device,
        scope: HookScope,
        patches: Patches,
    ) -> None:
        self._precision = precision
        self._holdings = holdings
        self._control = control
        self._device = device
        self._scope = scope
        patches.replace(precision, "clip_grad_by_norm", self._clip)
        scaler: torch.amp.GradScaler | None = None if control is None else getattr(precision, "scaler", None)
        if scaler is not None:
            self._unscale = unscale_gradients(scaler)
            replace_unscale_gradients(scaler, self._agreed_unscale)
            patches.callback(replace_unscale_gradients, scaler, None)

    def total_norm(self, optimizer: Optimizer) -> torch.Tensor:
        """Return the 2-norm of the gradients of all stages. Each shared parameter counts once."""
        grads = [p.grad for p in self._precision.main_params(optimizer) if p.grad is not None]
        dtype = torch.float64 if any(g.dtype.to_real() is torch.float64 for g in grads) else torch.float32
        mine = [
            (self._holdings.index_of(p), local_part(p.grad))
            for p in self._precision.main_params(optimizer)
            if p.grad is not None and _is_counted(p, self._holdings, self._control)
        ]
        return total_norm(mine, self._holdings.n_indices, 2.0, dtype, self._control)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        with self._scope.suspend_hooks():  # a hook may ask for clipping
            norm = self.total_norm(optimizer).to(self._device)
            parameters = list(map(_local, self._precision.main_params(optimizer)))
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    def _agreed_unscale(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with self._scope.suspend_hooks():  # a hook may ask for clipping
            found = self._unscale(*args, **kwargs)
        if not found:  # a rank without gradients must step and skip like the others
            found = {self._device: torch.zeros(1, device=self._device)}
        assert self._control is not None, "no scaler works without all stages"
        for overflow in found.values():
            agreed = self._control.all_reduce(overflow.cpu(), dist.ReduceOp.MAX)
            overflow.copy_(agreed)
        return found


def total_norm(
    mine: Sequence[tuple[int, torch.Tensor]], of: int, p: float, dtype: torch.dtype, control: Control | None
) -> torch.Tensor:
    """Return the p-norm of the p-norms of the tensors on all ranks, on the CPU.

    The result is equal, bit for bit, for any distribution of the tensors over ranks if the norm of each tensor is.

    Args:
        mine: the tensors of this rank, with their positions among all tensors.
        of: the number of positions.
        p: the order of the norm.
        dtype: the type of the norms, which is real even for complex tensors.
        control: the control channel of the ranks, or None to use only this rank's tensors.
    """
    infinite, least = math.isinf(p), math.isinf(p) and p < 0
    norms = torch.full((of,), math.inf if least else 0.0, dtype=torch.float64)
    if mine:
        at = torch.tensor([place for place, _ in mine])
        found = torch.stack([_vector_norm(t, p, dtype) for _, t in mine]).cpu().double()
        if infinite:
            norms.scatter_reduce_(0, at, found, "amin" if least else "amax")
        else:
            norms.index_add_(0, at, found.pow(p) if p else (found != 0).double())
    if control is not None:  # one rank has the tensor, or its shards, of each position; all get the same sum
        control.all_reduce(norms, dist.ReduceOp.MIN if least else dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    if infinite:
        return (norms.min() if least else norms.max()).to(dtype)
    return (norms.sum().pow(1 / p) if p else norms.sum()).to(dtype)


def _vector_norm(tensor: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    kind = dtype.to_complex() if tensor.is_complex() else dtype
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, p, dtype=kind)
    return norm


def _is_counted(parameter: torch.Tensor, holdings: Holdings, control: Control | None) -> bool:
    """Return whether this rank contributes its part of a parameter to a norm over the ranks of `control`."""
    over_shards = control is not None and control.size > holdings.grid.length
    return holdings.is_owner(parameter) and (not over_shards or holds_own_part(parameter, holdings.grid))


def _local(parameter: Any) -> Any:
    """Return the parameter, or for a sharded parameter an object with the gradient of this rank's shard."""
    if not is_distributed(parameter) or parameter.grad is None:
        return parameter
    return SimpleNamespace(grad=local_part(parameter.grad))


class HookClipping:
    """Makes torch's `get_total_norm` and `clip_grad_norm_` in the user's hooks count all stages, and each weight once.

    Only the gradients of this rank are clipped. All ranks that run the hook must call these functions.

    Args:
        parameters: returns the parameters of this rank.
        scope: records which hook is running. This class sets its function that returns whether gradients exist.
        holdings: the assignment of parameters to ranks.
        control: the control channel of all ranks with a part of the gradients. None if stages do not step at the same
            batch, so that such a norm does not exist.
        patches: the changes to torch, which are reverted when it is closed.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        scope: HookScope,
        holdings: Holdings,
        control: Control | None,
        patches: Patches,
    ) -> None:
        self._parameters = parameters
        self._scope = scope
        self._holdings = holdings
        self._control = control
        scope.gradients = self._have_gradients
        patches.callback(Clipping.around(Clipping.NORM, self._norm))
        for name in (Clipping.BY_NORM, Clipping.BY_VALUE):
            patches.callback(Clipping.around(name, self._clip))

    def _have_gradients(self) -> bool:
        """Return whether gradients exist.

        If nothing is trained on this rank, the result is True, because other ranks may have gradients.
        """
        trained = [p for p in self._parameters() if p.requires_grad]
        return not trained or any(p.grad is not None for p in trained)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # With foreach=True torch refuses the device of remote tensors.
        here = [_local(p) for p in _listed(parameters) if not (self._scope.is_active and isinstance(p, RemoteTensor))]
        if all(p.grad is None for p in here):  # a stage may have no weights, and torch rejects an empty list
            return None
        return original(here, *args, **kwargs)

    def _norm(
        self,
        original: Callable[..., torch.Tensor],
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        found, scope = _listed(tensors), self._scope
        if not scope.is_active:
            return original(found, norm_type, *args, **kwargs)
        own = {id(t): p for p in self._parameters() for t in (p, p.grad) if t is not None}
        remote = [t for t in found if isinstance(t, RemoteTensor)]
        others = [t for t in found if not (t.is_weight_or_gradient if isinstance(t, RemoteTensor) else id(t) in own)]
        # The following decisions must be equal on all ranks; otherwise, some ranks would wait forever.
        if others and len(others) < len(found):
            raise PipelineError(
                f"{scope.hook} takes one norm over weights or gradients of the module and over other tensors, which "
                "may be computed from weights. Every process has the layers of its stages, and it is unknown which "
                "processes have the other tensors. Take a norm of each kind"
            )
        if remote and (others or not scope.on_all_ranks):
            remote[0].refuse_use("takes a norm of")
        if others or not scope.on_all_ranks:
            return original(found, norm_type, *args, **kwargs)
        if self._control is None:
            raise PipelineError(
                f"{scope.hook} takes a norm over the layers of all stages, which step at other times with this "
                "schedule; clip by value, or use a schedule that flushes between batches, such as '1f1b'"
            )
        here = [(own[id(t)], t) for t in found if not isinstance(t, RemoteTensor)]
        counted = [(p, t) for p, t in here if _is_counted(p, self._holdings, self._control)]
        mine = [(self._holdings.index_of(p), local_part(t)) for p, t in counted]
        dtype = reduce(torch.promote_types, (t.dtype.to_real() for t in found)) if found else torch.float32
        of = self._holdings.n_indices
        total = total_norm(mine, of, float(norm_type), dtype, self._control).to(scope.device)
        return original([total], norm_type or 2.0, *args, **kwargs)  # this checks whether the norm is finite


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
