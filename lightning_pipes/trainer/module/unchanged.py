"""Running a user's module without leaving a trace in it."""

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
from lightning_pipes.trainer.module.hidden_state import CONTAINERS, list_entries, list_reachable
from lightning_pipes.trainer.ranks.replica_world import alone

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Give a generator what `state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def keep_unchanged(
    root: nn.Module, skip: nn.Module | None = None, weights: bool = True
) -> Iterator[list[nn.Parameter]]:
    """Afterwards a module, and what can be reached from it, is as it was: weights, buffers and gradients, bit by bit
    and as the same objects; attributes of its parts; random generators of its own; what lists, dicts and objects of the
    user's hold. The part `skip` of it, which the block does not run, is not looked at.

    Weights on the CPU are copied meanwhile, unless `weights` is false, and so are buffers. Weights that the block moves
    to another device come back without a copy. Objects of libraries are left alone, as are those that hold more than
    10 000 others.

    Yields:
        a list that has the parameters with other values in it when the block has ended.
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
    kept += [(p, _content(p)) for p in own if not is_distributed(p)]  # quantised weights have their scales there
    states = [(generator, state_of(generator)) for generator in _generators(things.values())]
    tensors = {id(t): (t, _copy(t)) for thing in things.values() for t in _tensors(thing)}
    for parameter, *_ in parameters:
        parameter.grad = None
    changed: list[nn.Parameter] = []
    try:
        with alone():  # other replicas may not run it
            yield changed
    finally:
        for thing, content in kept:
            _put_back(thing, content)
        for generator, state in states:
            set_state(generator, state)
        with torch.no_grad():
            for parameter, data, grad, before in parameters:
                parameter.data, parameter.grad = data, grad
                if _write(data, before):
                    changed.append(parameter)
            for tensor, before in tensors.values():
                _write(tensor.detach(), before)


def find_generators(root: nn.Module, skip: nn.Module | None = None) -> list[Any]:
    """Return the random generators that a module, or what can be reached from it without `skip`, has for itself."""
    return _generators([thing for _, thing in list_reachable(root, "self", skip)])


def _generators(things: Iterable[Any]) -> list[Any]:
    entries = [entry for thing in things for _, entry in list_entries(thing)]
    for entry in entries:  # it grows
        if isinstance(entry, tuple):
            entries += entry
    return list({id(entry): entry for entry in entries if isinstance(entry, GENERATORS)}.values())


def _tensors(thing: Any) -> Iterable[torch.Tensor]:
    """Yield tensors of an object and of its lists and dicts, except parameters."""
    for _, entry in list_entries(thing):
        inside = [part for _, part in list_entries(entry)] if isinstance(entry, CONTAINERS) else [entry]
        yield from (t for t in inside if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter))


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor; None for weights on a device, which may have no room, and for `meta`."""
    if tensor.is_meta or (isinstance(tensor, nn.Parameter) and tensor.device.type != "cpu"):
        return None
    return tensor.detach().clone()


def _write(tensor: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Return whether the tensor had changed; else nothing is written, for autograd counts that."""
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
    """Return a copy of an object's content, one level deeper for the tables of a module."""
    if isinstance(thing, CONTAINERS):
        return copy.copy(thing)
    return {name: (value, _copy_table(value) if _is_table(value) else None) for name, value in vars(thing).items()}


def _copy_table(table: Any) -> Any:
    return copy.copy(table) if table else ()  # most tables of a module are empty


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque))


def _put_back(thing: Any, content: Any) -> None:
    """Restore changed entries; other entries are not touched, as other threads may use them."""
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
