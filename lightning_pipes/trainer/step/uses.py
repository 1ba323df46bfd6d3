"""The layers that a batch uses, where the module says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from lightning_pipes.ir import PipelineError, Plan, Use
from lightning_pipes.trainer.module.proxy import Layers


@runtime_checkable
class SaysLayers(Protocol):
    """A LightningModule whose batches do not use all layers, as those of a supernet."""

    def layers_of_batch(self, batch: Any) -> Iterable[str] | Mapping[str, bool]:
        """The names of the layers that a training batch goes through, as they are called in the pipelined module: "5",
        or "5.2" for a part of one. A mapping says of each whether the batch steps it; without one it steps all.

        Called on every rank, which must all get the same.
        """


def use_of(module: pl.LightningModule, full: Layers, batch: Any, plan: Plan) -> Use | None:
    """The layers that `batch` uses on each stage of `plan`; None where the module does not say.

    Raises:
        PlanError: there is no such layer.
    """
    if not isinstance(module, SaysLayers):
        return None
    said = module.layers_of_batch(batch)
    numbers = {name: str(number) for number, name in enumerate(full._modules)}
    names = {name: ".".join((numbers.get(head, head), *rest)) for name in said for head, *rest in [name.split(".")]}
    steps = [names[name] for name, stepped in said.items() if stepped] if isinstance(said, Mapping) else None
    return Use.of(names.values(), plan.layers, steps)


def check_layers(module: pl.LightningModule, full: Layers) -> None:
    """Refuses parameters of which no batch could say that it uses them.

    Raises:
        PipelineError: the module says which layers batches use, and trains parameters outside of them, or in several.
    """
    if not isinstance(module, SaysLayers):
        return
    within = Counter(id(p) for layer in full for p in {id(p): p for p in layer.parameters()}.values())
    wrong = [name for name, p in module.named_parameters() if p.requires_grad and within[id(p)] != 1]
    if wrong:
        raise PipelineError(
            f"{', '.join(wrong[:5])}: these parameters are outside of the pipelined layers, or in several of them, and "
            "batches say by layers_of_batch which layers they step. Put each into one layer, or freeze it by "
            "requires_grad_(False)"
        )
