"""Logs of hooks about gradients: every rank has those of its own layers, and the log is about the whole module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.step.hook_table import select_hooks
from lightning_pipes.trainer.step.logs import LogCall, LogReplay, recorded

GRADIENT_HOOKS = select_hooks(lambda hook: hook.merges_logs)

_TOTAL = re.compile(r"(?P<norms>.*grad_(?P<p>[0-9.]+|inf)_norm)_total")
"""How `lightning.pytorch.utilities.grad_norm` calls the norm of all norms, behind any prefix of the user's."""


class GradientLogs:
    """Makes every rank log what these hooks log on all ranks; hooks of the module, and of callbacks.

    Args:
        last_rank: the global rank whose value counts where ranks log different ones under one name.
        patches: the hooks are wrapped until they are closed.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        callbacks: Iterable[pl.Callback],
        control: Control,
        replay: LogReplay,
        last_rank: int,
        patches: Patches,
    ) -> None:
        self._module = module
        self._control = control
        self._replay = replay
        self._last = control.ranks.index(last_rank)
        self._warned = False
        for name in GRADIENT_HOOKS:
            if is_overridden(name, module):
                self._wrap(module, name, patches)
            for callback in callbacks:
                if is_overridden(name, callback, pl.Callback):
                    self._wrap(callback, name, patches)

    def _wrap(self, owner: object, name: str, patches: Patches) -> None:
        hook = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> None:
            with recorded(self._module) as calls:
                hook(*args, **kwargs)
            recordings = self._control.all_gather(self._replay.pack_calls(calls))
            merged, doubtful = over_ranks(recordings, self._last)
            if doubtful and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"{type(owner).__name__}.{name} logs {doubtful[0]!r}, which is another value on every stage: each "
                    "sees the gradients of its own layers; the last stage's is kept. For norms over the whole module "
                    "log all that lightning.pytorch.utilities.grad_norm returns: self.log_dict(grad_norm(self, 2))"
                )
            self._replay.replay_calls(merged)

        patches.replace_method(owner, name, run)


def over_ranks(recordings: Sequence[Sequence[LogCall]], last: int) -> tuple[list[LogCall], list[str]]:
    """Merge the log calls of all ranks by name; also return names without a value for the whole module.

    Names that one rank has are taken from there. Where several have one, as for parameters that several hold, the
    value of rank number `last` counts, or else the first; totals of `grad_norm` are computed again from all its norms.
    """
    calls: dict[str, LogCall] = {}
    doubtful: dict[str, None] = {}
    for recording in (recordings[last], *recordings):
        for call in recording:
            known = calls.setdefault(call.name, call)
            if not _equal(known.value, call.value):
                doubtful[call.name] = None
    for name, call in calls.items():
        norms = list(_norms_under(name, calls))
        if norms:
            doubtful.pop(name, None)
            p = float(_TOTAL.fullmatch(name)["p"])  # type: ignore[index]
            calls[name] = LogCall(name, torch.tensor(norms).norm(p), call.options)  # as grad_norm does
    return list(calls.values()), list(doubtful)


def _norms_under(name: str, calls: dict[str, LogCall]) -> Iterator[Any]:
    """The values of which `name` is the total."""
    total = _TOTAL.fullmatch(name)
    if total is not None:
        yield from (call.value for other, call in calls.items() if other.startswith(total["norms"]) and other != name)


def _equal(a: Any, b: Any) -> bool:
    """Whether two ranks have logged the same; they may compute on devices of different kinds."""
    if isinstance(a, (int, float, torch.Tensor)) and isinstance(b, (int, float, torch.Tensor)):
        return torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=1e-4, equal_nan=True)
    return True
