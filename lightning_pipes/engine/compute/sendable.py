"""Checks whether tensors and objects can be sent from one stage to the next."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.trees import SentWhole
from lightning_pipes.ir import PipelineError

_SENDABLE_TYPES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size, SentWhole)
_TENSOR_TYPES = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))
_SENDABLE_WAY_OUT = "Only plain tensors and objects that can be pickled are sent between stages."


def check_sendable(leaf: Any, where: str) -> None:
    """Check that a leaf of a message arrives unchanged.

    Args:
        leaf: a leaf of a pytree.
        where: the beginning of the error message, which names the code that returns the leaf.

    Raises:
        PipelineError: the leaf is a tensor of a subclass or with attributes, an object that can't be pickled, or an
            object with tensors that require gradients and can't be sent separately.
    """
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in _TENSOR_TYPES:
            _refuse_subclass(leaf, where)
        if vars(leaf) and not isinstance(leaf, nn.Parameter | nn.Buffer):
            _refuse_attributes(leaf, where)
    elif not isinstance(leaf, _SENDABLE_TYPES):
        _check_object(leaf, where)


def _refuse_subclass(tensor: torch.Tensor, where: str) -> None:
    if is_distributed(tensor):
        raise PipelineError(
            f"{where} a DTensor, and between stages travel plain tensors, whole or of one "
            "shard; set use_local_output=True in the plan of parallelize_module, or return x.to_local()"
        )
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    raise PipelineError(
        f"{where} a tensor of the subclass {kind}, which the next stage would get as a plain torch.Tensor. "
        f"{_SENDABLE_WAY_OUT} "
        "Return x.as_subclass(torch.Tensor), and convert it again in the layer that needs the subclass"
    )


def _refuse_attributes(tensor: torch.Tensor, where: str) -> None:
    names = ", ".join(repr(name) for name in sorted(vars(tensor)))
    raise PipelineError(
        f"{where} a tensor of shape {tuple(tensor.shape)} with the attribute {names}, which the next stage would not "
        f"get. {_SENDABLE_WAY_OUT} Return the attribute's value next to the tensor, as in `return y, scale`, or in a "
        "dataclass"
    )


class _TensorFinder(pickle.Pickler):
    """Finds the tensors in an object that pickles itself, and whether any of them requires gradients."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.trained = False

    def persistent_id(self, thing: Any) -> str | None:
        if not isinstance(thing, torch.Tensor):
            return None
        self.trained = self.trained or thing.requires_grad
        return "tensor"


def _check_object(thing: Any, where: str) -> None:
    finder = _TensorFinder()
    kind = type(thing).__name__
    try:
        finder.dump(thing)
    except Exception as error:
        raise PipelineError(
            f"{where} a {kind}, which can't be pickled ({type(error).__name__}: {error}). {_SENDABLE_WAY_OUT} Define "
            "its class at the top of a module, or return the tensors in a tuple or dict"
        ) from error
    if finder.trained:
        raise PipelineError(
            f"{where} a {kind} that holds a tensor with a gradient, which can't be sent apart from it. The gradient "
            f"would be lost, and the stages before would not be trained. {_SENDABLE_WAY_OUT} Return the tensors in a "
            "tuple, dict or dataclass"
        )
