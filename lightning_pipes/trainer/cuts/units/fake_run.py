"""Running units without values, if no process has the weights of a module."""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

import lightning_pipes
from lightning_pipes.engine.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from lightning_pipes.ir import PipelineError

_LIBRARY_PATHS = tuple(str(Path(str(each.__file__)).parent) for each in (torch, pl, lightning_pipes))
_STDLIB_PATH = sysconfig.get_paths()["stdlib"]


class FakeRun:
    """Runs the operations that depend on weights with shapes, data types and devices only.

    Tensors of the batch, and tensors that are computed from them alone, have values. Therefore control flow may depend
    on them, but not on weights.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        """A context in which tensors have no values."""
        self._device = device

    def replace_weights(self, module: nn.Module, atomic: Callable[[torch.Tensor], bool]) -> None:
        """Replace weights by tensors without values, and move other buffers to the device.

        Args:
            module: the module.
            atomic: returns whether a buffer belongs to a unit.
        """
        made: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = tensor.is_meta or isinstance(tensor, nn.Parameter) or atomic(tensor)
                    made[id(tensor)] = self._make_like(tensor) if fake else tensor.to(self._device)
                setattr(part, name, made[id(tensor)])  # nn.LSTM keeps a list of its parameters

    def _make_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Report the line of the user's code at which the block fails.

        Raises:
            PipelineError: the block fails.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # caused by LSTMs
                yield
        except PipelineError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not _is_of_library(frame.filename)] or frames
            raise PipelineError(
                "weights are on the meta device, so the step is traced without their values, but "
                f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line}) can't run without them: {_explain(error)}, or "
                "create the module outside of torch.device('meta')"
            ) from error


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of the result of {text} depends on values that come from weights. Keep shapes fixed, for "
            "example with torch.where or by multiplying with a mask"
        )
    if isinstance(error, DataDependentOutputException):
        return (
            f"{text} reads a value that comes from weights, to use it as a branch condition, an index or a number. Use "
            "only values of the batch for this purpose, use torch.where, log tensors instead of their item()"
        )
    return (
        f"{type(error).__name__}: {text}. Let branches, indices and numbers depend only on the batch, log tensors "
        "instead of their item()"
    )


def _is_of_library(path: str) -> bool:
    of_python = path.startswith(_STDLIB_PATH) and "site-packages" not in path
    return of_python or path.startswith(("<", *_LIBRARY_PATHS))


def list_places(index: Any) -> Any:
    """Return an index with lists of positions in place of masks with values.

    The lists determine the size of the result.
    """
    if not isinstance(index, tuple):
        index = (index,)
    found: list[Any] = []
    for each in index:
        is_mask = type(each) is torch.Tensor and each.dtype == torch.bool and each.ndim
        found += each.nonzero(as_tuple=True) if is_mask else [each]
    return tuple(found)
