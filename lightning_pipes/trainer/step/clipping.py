"""What must be agreed over all stages between backward and step: the gradient norm, and a scaler's overflow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_pipes.trainer.private_lightning import replace_unscale_gradients, unscale_gradients
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings


class GradientAgreement:
    """Makes a precision plugin clip by the norm over all stages, and a gradient scaler skip on all or none.

    Clipping by value needs no agreement.
    """

    def __init__(self, precision: Precision, holdings: Holdings, control: Control, device: torch.device) -> None:
        self._precision = precision
        self._holdings = holdings
        self._control = control
        self._device = device
        self._scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
        precision.__dict__["clip_grad_by_norm"] = self._clip
        if self._scaler is not None:
            self._unscale = unscale_gradients(self._scaler)
            replace_unscale_gradients(self._scaler, self._agreed_unscale)

    def remove(self) -> None:
        """The plugin is as before."""
        self._precision.__dict__.pop("clip_grad_by_norm", None)
        if self._scaler is not None:
            replace_unscale_gradients(self._scaler, None)

    def total_norm(self, optimizer: Optimizer) -> torch.Tensor:
        """The 2-norm of the gradients of all stages; each shared parameter counts once."""
        grads = [p.grad for p in self._precision.main_params(optimizer) if p.grad is not None]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        total = torch.zeros(1, dtype=torch.float64)
        mine = [
            p.grad.detach()
            for p in self._precision.main_params(optimizer)
            if p.grad is not None and self._holdings.counts_here(p)
        ]
        if mine:
            norms = torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in mine])
            total[0] = norms.double().square().sum().item()
        self._control.all_reduce(total)
        return total.sqrt()[0].to(dtype)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        norm = self.total_norm(optimizer).to(self._device)
        torch.nn.utils.clip_grads_with_norm_(list(self._precision.main_params(optimizer)), clip_val, norm)

    def _agreed_unscale(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = self._unscale(*args, **kwargs)
        if not found:  # a rank without gradients steps and skips with the others
            found = {self._device: torch.zeros(1, device=self._device)}
        for overflow in found.values():
            agreed = self._control.all_reduce(overflow.cpu(), dist.ReduceOp.MAX)
            overflow.copy_(agreed)
        return found
