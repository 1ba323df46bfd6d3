"""Calls of torch's `backward` and `grad` by a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.mode import Function


@dataclass
class Differentiation:
    """The arguments of a call of torch's `backward` or `grad`."""

    roots: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    inputs: Sequence[torch.Tensor] | None
    retain: bool
    create: bool
    returns: bool
    may_be_unused: bool = False
    fills_unused: bool = False

    @classmethod
    def from_call(cls, function: Function, args: Any, kwargs: Any) -> Differentiation:
        """Return the arguments of a call of one of `GRAPH_FUNCTIONS`."""
        if function is torch.autograd.grad:
            return cls._from_grad(*args, **kwargs)
        if function is torch.Tensor.backward:
            return cls._from_method(*args, **kwargs)
        return cls._from_backward(*args, **kwargs)

    @classmethod
    def _from_grad(
        cls,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> Differentiation:
        if is_grads_batched:
            raise PipelineError(
                "torch.autograd.grad(is_grads_batched=True) does not work in stages. Call it once for each gradient"
            )
        return cls(
            _listed(outputs),
            _listed(grad_outputs, outputs),
            _listed(inputs),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            True,
            bool(allow_unused) or materialize_grads,
            materialize_grads,
        )

    @classmethod
    def _from_method(
        cls,
        root: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> Differentiation:
        return cls._from_backward(root, gradient, retain_graph, create_graph, inputs=inputs)

    @classmethod
    def _from_backward(
        cls,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> Differentiation:
        gradients = grad_variables if grad_tensors is None else grad_tensors
        retain = create_graph if retain_graph is None else retain_graph
        chosen = None if inputs is None else _listed(inputs)
        return cls(_listed(tensors), _listed(gradients, tensors), chosen, retain, create_graph, False, True)


def _listed(tensors: Any, like: Any = None) -> Sequence[Any]:
    """Return a list for an argument that is one tensor or several.

    For None, return a list with None for each entry of `like`.
    """
    if tensors is None and like is not None:
        return [None] * len(_listed(like))
    return [tensors] if isinstance(tensors, torch.Tensor) or tensors is None else list(tensors)
