"""A context in which a user's module can be run, and which restores the module afterwards."""

from __future__ import annotations

import copy
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.trainer.ranks.replica_world import alone
from lightning_pipes.trainer.user.user_objects import CONTAINER_TYPES, list_entries, list_reachable

GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator to a result of `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def keep_unchanged(
    root: nn.Module, skip: nn.Module | None = None, weights: bool = True, moves: bool = False
) -> Iterator[list[nn.Parameter]]:
    """Restore a module, and the objects that can be reached from it, after the block.

    The same objects are restored, bit by bit: weights, buffers and gradients, the attributes of all submodules, random
    generators, and the contents of the user's lists, dicts and other objects. Objects of libraries are not restored,
    and the search for objects ends after 10 000 of them.

    Weights on the CPU and buffers are copied for the duration of the block. Weights on another device are not copied,
    so that their values are not restored if the block changes them. If the block moves weights to another device, the
    original tensors are restored.

    Args:
        root: the module.
        skip: a submodule that the block does not run, and that is not restored.
        weights: whether to copy the weights on the CPU.
        moves: whether weights and buffers may get other memory in the block, like those of a sibling of a job array
            while other siblings compute. They keep the other memory, because the memory from before the block may
            already have another content.

    Yields:
        a list to which parameters whose values have changed in the block are added when the block has ended.
    """
    skipped = set() if skip is None else set(skip.modules())
    found = (
        *(m for m in root.modules() if m not in skipped),
        *(thing for _, thing in list_reachable(root, "self", skip)),
    )
    things = {id(thing): thing for thing in found}
    kept = [(thing, _content(thing)) for thing in things.values()]
    left_out = set() if skip is None else set(skip.parameters())
    own = [p for p in root.parameters() if p not in left_out]
    parameters = [(p, p.data, p.grad, _copy(p) if weights and not is_distributed(p) else None) for p in own]
    kept += [(p, _content(p)) for p in own if not is_distributed(p)]  # the scales of quantized weights are there
    states = [(generator, state_of(generator)) for generator in _generators(things.values())]
    tensors = {id(t): (t, _copy(t)) for thing in things.values() for t in _tensors(thing)}
    buffers = _moving_buffers(root, skipped) if moves else []
    for table, name, _ in buffers:
        tensors.pop(id(table[name]), None)
    for parameter, *_ in parameters:
        parameter.grad = None
    changed: list[nn.Parameter] = []
    try:
        with alone():  # other replicas may not run the block
            yield changed
    finally:
        moved = [table.get(name) for table, name, _ in buffers]
        for thing, content in kept:
            _put_back(thing, content)
        for generator, state in states:
            set_state(generator, state)
        with torch.no_grad():
            for parameter, data, grad, before in parameters:
                if not moves:
                    parameter.data = data
                parameter.grad = grad
                if _write(parameter.data, before):
                    changed.append(parameter)
            for (table, name, buffer), now in zip(buffers, moved, strict=True):
                table[name] = here = buffer if now is None or now.shape != buffer.shape else now
                _write(here, buffer)
            for tensor, before in tensors.values():
                _write(tensor.detach(), before)


@contextmanager
def evaluation_mode(root: nn.Module, skip: nn.Module | None = None) -> Iterator[None]:
    """Put all modules in `root` into evaluation mode for the block, without calls of their `train` methods.

    Args:
        root: the module.
        skip: a module in it that keeps its mode, with all modules in it.
    """
    kept = set[nn.Module]() if skip is None else {*skip.modules()}
    training = [part for part in root.modules() if part.training and part not in kept]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def find_generators(root: nn.Module, skip: nn.Module | None = None) -> list[Any]:
    """Return the random generators that can be reached from a module, except through the submodule `skip`."""
    return _generators([thing for _, thing in list_reachable(root, "self", skip)])


def _generators(things: Iterable[Any]) -> list[Any]:
    entries = [entry for thing in things for _, entry in list_entries(thing)]
    for entry in entries:  # the list grows in the loop
        if isinstance(entry, tuple):
            entries += entry
    return list({id(entry): entry for entry in entries if isinstance(entry, GENERATOR_TYPES)}.values())


def _tensors(thing: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors, but not the parameters, of an object and of its lists and dicts."""
    for _, entry in list_entries(thing):
        inside = [part for _, part in list_entries(entry)] if isinstance(entry, CONTAINER_TYPES) else [entry]
        yield from (t for t in inside if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter))


def _moving_buffers(
    root: nn.Module, skipped: set[nn.Module]
) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Return the buffers of a module, each as the dict that holds it, its name there, and a copy of it."""
    found = (
        (part._buffers, name, buffer)
        for part in root.modules()
        if part not in skipped
        for name, buffer in part._buffers.items()
    )
    return [(table, name, copied) for table, name, b in found if b is not None and (copied := _copy(b)) is not None]


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor, or None for tensors on `meta` and for weights on a device that may lack memory."""
    if tensor.is_meta or (isinstance(tensor, nn.Parameter) and tensor.device.type != "cpu"):
        return None
    return tensor.detach().clone()


def _write(tensor: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Write the earlier values to a tensor if it has changed, and return whether it has.

    An unchanged tensor is not written, because autograd counts writes.
    """
    if before is None or _equal(tensor, before):
        return False
    tensor.copy_(before)
    return True


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided or a.shape != b.shape:
        return False
    bits, before = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(bits, before)


def _content(thing: Any) -> Any:
    """Return a copy of the content of an object, including the content of its lists, dicts and sets."""
    if isinstance(thing, CONTAINER_TYPES):
        return copy.copy(thing)
    return {name: (value, _copy_table(value) if _is_table(value) else None) for name, value in vars(thing).items()}


def _copy_table(table: Any) -> Any:
    return copy.copy(table) if table else ()  # most tables of a module are empty


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque))


def _put_back(thing: Any, content: Any) -> None:
    """Restore the changed entries of an object. Other entries are not written, because other threads may use them."""
    if _is_table(thing):
        _refill(thing, content)
        return
    own = vars(thing)
    for name in own.keys() - content.keys():
        del own[name]
    for name, (value, inside) in content.items():
        if own.get(name, _put_back) is not value:
            own[name] = value
        if inside is not None:
            _refill(value, inside)


def _refill(table: Any, content: Any) -> None:
    if _has_entries(table, content):
        return
    table.clear()
    if isinstance(table, (dict, set)):
        table.update(content)
    else:
        table.extend(content)


def _has_entries(table: Any, content: Any) -> bool:
    if len(table) != len(content):
        return False
    if isinstance(table, dict) and content:
        return list(table) == list(content) and all(map(operator.is_, table.values(), content.values()))
    return all(map(operator.is_, table, content))
