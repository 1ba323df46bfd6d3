"""The model to profile: its layers, their input, and the optimizer that trains them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.cost import ModelProfile
from lightning_pipes.engine.compute.profiler import Progress, profile_layers
from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.trainer.cuts.layers.pipelined import find_pipelined


@dataclass(frozen=True)
class Subject:
    """The layers to profile.

    Attributes:
        module: the module that contains the layers.
        layers: the layers, which run one after the other.
        example: an input of the module, with samples along axis 0.
    """

    module: nn.Module
    layers: nn.Sequential
    example: Any


def subject_from_factory(path: str) -> Subject:
    """Return the model that `package.module:factory` returns. The current directory is searched for the package, too.

    Args:
        path: the path of the factory.

    Raises:
        InputError: the path has another form, there is no such function, the function raises an error, or it does not
            return layers and an example.
    """
    sys.path.insert(0, str(Path.cwd()))
    where, _, name = path.partition(":")
    if not where or not name:
        raise InputError(
            f"model={path} is not the path of a function. Pass package.module:function, as in "
            "model=examples.models:make_gpt; the function returns a LightningModule, or a module and an example input"
        )
    try:
        factory = getattr(import_module(where), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"model={path}: {error}. Pass package.module:function; the package is searched in this folder, too"
        ) from error
    if not callable(factory):
        raise InputError(f"model={path} is {short_repr(factory)}, but must be a function that returns a model")
    try:
        made = factory()
    except Exception as error:
        raise InputError(f"model={path} fails: {type(error).__name__}: {error}") from error
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model={path} returned a {type(module).__name__}, not a module, or a module and an example input"
        )
    if example is None:
        example = getattr(module, "example_input_array", None)
    if example is None:
        raise InputError(
            f"model={path}: the input of {type(module).__name__} is unknown; set its example_input_array, or return "
            "the module and an example input from the function"
        )
    return _subject(module, example, f"model={path}")


def profile_subject(
    subject: Subject,
    rows: Sequence[int],
    device: str,
    threads: int,
    optimizer: str | None,
    split: bool,
    repeats: int,
    progress: Progress,
) -> ModelProfile:
    """Return the profile of `subject` for each number of samples in `rows`.

    Args:
        subject: the layers to profile.
        rows: the numbers of samples to measure.
        device: the device on which the layers run.
        threads: number of threads that a CPU uses.
        optimizer: the name of an optimizer of torch.optim. By default, it is the optimizer of a LightningModule, or
            AdamW for other modules.
        split: whether backwards are also measured in two parts, input gradients and weight gradients.
        repeats: number of measurements of each layer.
        progress: called with a text and the finished share of the work.

    Raises:
        InputError: there is no such device, or no such optimizer.
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={device} can't be used here: {str(error).splitlines()[0]}") from error
    torch.set_num_threads(threads)
    module = subject.module.to(where).train()
    optimizer_ = _optimizer(module, optimizer)
    inputs = {}
    for number in sorted(set(rows)):
        inputs[number] = _layers_input(subject, _rows(subject.example, number, where))
    names = [f"{name} {type(layer).__name__}" for name, layer in subject.layers.named_children()]
    return profile_layers(
        list(subject.layers),
        inputs,
        names=names,
        optimizer=optimizer_,
        device=where,
        split=split,
        repeats=repeats,
        progress=progress,
    )


def _subject(module: nn.Module, example: Any, what: str) -> Subject:
    if isinstance(module, nn.Sequential):
        return Subject(module, module, example)
    if isinstance(module, L.LightningModule):
        path = find_pipelined(module, None)
        layers = module.get_submodule(path)
        if isinstance(layers, nn.Sequential):
            return Subject(module, layers, example)
        raise InputError(
            f"{what}: {type(module).__name__}.{path} is a {type(layers).__name__}; only layers of an nn.Sequential can "
            "be measured one by one"
        )
    raise InputError(f"{what} returned a {type(module).__name__}; an nn.Sequential or a LightningModule is needed")


def _rows(example: Any, rows: int, device: torch.device) -> Any:
    """Return `rows` samples of the example on the device. The samples of the example are repeated if it has fewer."""

    def take_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % len(tensor)].to(device)

    return pytree.tree_map_only(torch.Tensor, take_rows, example)


class _LayersReachedError(Exception):
    """Raised to end a forward when it reaches the layers."""


def _layers_input(subject: Subject, x: Any) -> Any:
    """Return the input that the layers receive when the module is called with `x`."""
    if subject.module is subject.layers:
        return x
    seen: list[Any] = []

    def stop(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.extend(given)
        raise _LayersReachedError

    hook = subject.layers.register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            subject.module(*x) if isinstance(x, tuple) else subject.module(x)
    except _LayersReachedError:
        pass
    finally:
        hook.remove()
    if len(seen) != 1:
        raise InputError(
            f"forward of {type(subject.module).__name__} calls its layers with {len(seen)} arguments, not 1"
        )
    return seen[0]


def _optimizer(module: nn.Module, name: str | None) -> Optimizer:
    """Return the optimizer of torch.optim with this name, or by default the module's own optimizer or AdamW."""
    if not any(True for _ in module.parameters()):
        raise InputError(
            f"{type(module).__name__} has no parameters, so there is no training to measure. Return a module with "
            "parameters from the function that model= names"
        )
    if name is not None:
        kind = getattr(torch.optim, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise InputError(f"optimizer={name}: torch.optim has no such optimizer; set optimizer=AdamW")
        return kind(module.parameters())  # type: ignore[call-arg]
    if not isinstance(module, L.LightningModule):
        return torch.optim.AdamW(module.parameters())
    found: Any = module.configure_optimizers()
    while not isinstance(found, Optimizer):
        if not found:
            raise InputError(f"{type(module).__name__}.configure_optimizers returned no optimizer; set optimizer=AdamW")
        found = found["optimizer"] if isinstance(found, Mapping) else found[0]
    return found
