"""Parameters that several ranks hold: those outside the pipelined module, and those tied between stages.

Each holder keeps a copy and sees only its own part of the gradient. The parts are summed before the optimizer steps;
equal sums and equal optimizer states keep the copies equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.control import Control

Holders = dict[int, tuple[int, ...]]
"""By id of a parameter the global ranks that hold it, ascending; in the order of the whole module."""


def holders(module: pl.LightningModule, path: str, rank_of_layer: Sequence[int], ranks: Sequence[int]) -> Holders:
    """Who holds each parameter of the whole module: all `ranks` what is not inside `path`, the rank of its layer what
    is, and several ranks what occurs in several places."""
    layer_of = {name: number for number, (name, _) in enumerate(module.get_submodule(path).named_children())}
    found: dict[int, set[int]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}."):
            layer = name[len(path) + 1 :].partition(".")[0]
            found[id(parameter)].add(rank_of_layer[layer_of[layer]])
        else:
            found[id(parameter)].update(ranks)
    return {key: tuple(sorted(places)) for key, places in found.items()}


class SharedParameters:
    """The parameters of this rank that others hold too.

    A collective call: every rank of `control` makes it with the same `who`.

    Args:
        parameters: those of this rank.
        who: the holders of all parameters of the whole module.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], who: Holders, control: Control) -> None:
        self._control = control
        self._rank = dist.get_rank()
        self._who = who
        shared = sorted({ranks for ranks in who.values() if len(ranks) > 1})
        groups = {ranks: control.subgroup(ranks) for ranks in shared}
        here = {id(p): p for p in parameters}
        mine = [here[key] for key in who if key in here]  # in the order of the whole module, as on the other holders
        self._sets = [
            (group, [p for p in mine if who[id(p)] == ranks]) for ranks, group in groups.items() if self._rank in ranks
        ]

    def sum_gradients(self) -> None:
        """Replaces the gradient of every shared parameter by the sum over its holders; none stays none where nobody
        has one.

        Raises:
            PipelineError: a gradient is sparse.
        """
        for group, parameters in self._sets:
            has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
            self._control.all_reduce(has, dist.ReduceOp.MAX, group)
            wanted = [p for p, flag in zip(parameters, has.tolist(), strict=True) if flag]
            for dtype in sorted({p.dtype for p in wanted}, key=str):
                self._sum([p for p in wanted if p.dtype == dtype], group)

    def counts_here(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the one of the holders that answers for the parameter in a sum over all ranks."""
        return self._who.get(id(parameter), (self._rank,))[0] == self._rank

    def _sum(self, parameters: list[nn.Parameter], group: object) -> None:
        parts = []
        for p in parameters:
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise PipelineError(
                    f"a parameter of shape {tuple(p.shape)} that several ranks hold has a {p.grad.layout} gradient, "
                    "which can't be summed; use sparse=False"
                )
            parts.append((torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten())
        flat = torch.cat(parts)
        flat = self._control.all_reduce(flat.float() if flat.dtype.itemsize < 4 else flat, group=group)
        for p, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).to(p.dtype)
