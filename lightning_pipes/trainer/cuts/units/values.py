"""The numbering of the tensors of a step, which either depend on weights or are computed by every stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.sendable import check_sendable
from lightning_pipes.engine.private_torch import (
    FakeTensor,
    count_python_references,
    has_storage,
    storage_address,
    storage_key,
)
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.trace import KnownPure, KnownValue, KnownWeight, Made, map_leaves

DEVICE_ATTRIBUTE = "stands_on"
"""The attribute of a placeholder that contains the device of its value."""
_VALUES_PER_RELEASE = 64
"""After this number of new values, unreferenced values are released."""


class Values:
    """Numbers the tensors of one step. All stages assign the same numbers.

    A *value* depends on weights or random numbers, and belongs to the stage that makes it. All other tensors are
    *pure*: they depend on the batch and on buffers, and every stage computes them.

    Args:
        placed: ids of the buffers that belong to atomic modules. Like parameters, they are on one stage.
    """

    def __init__(self, placed: Collection[int]) -> None:
        self._placed = placed
        self._keys: dict[int, int] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._pure: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._with_attributes: set[int] = set()  # keys of values that units have returned with attributes
        self._limit = _VALUES_PER_RELEASE

    def is_placed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a weight, or a buffer that belongs to an atomic module."""
        is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)  # the second is slow
        return is_parameter or id(tensor) in self._placed

    def is_value(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor depends on weights or random numbers."""
        return id(tensor) in self._keys

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """Return the key of a value; None for a pure tensor."""
        return self._keys.get(id(tensor))

    def value(self, key: int) -> torch.Tensor:
        """Return the value with the given key."""
        return self._held[key]

    @property
    def next_key(self) -> int:
        """The key of the next value."""
        return self._next

    def holds(self, key: int) -> bool:
        """Return whether the value with the given key is still held."""
        return key in self._held

    def value_to_send(self, key: int, stage: int) -> torch.Tensor:
        """Return the value with the given key, in order to send it to another stage.

        Args:
            key: the key of the value.
            stage: the number of this stage, for messages.

        Raises:
            PipelineError: the value is of a subclass of torch.Tensor, or a unit has set attributes of it, and it can't
                be sent.
        """
        tensor = self._held[key]
        if key in self._with_attributes or type(tensor) is not torch.Tensor:
            check_sendable(tensor, f"a module of stage {stage} returns")
        return tensor

    def depends_on_weights(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a value or a weight, even within a transform of torch.func."""
        inner = torch.func.debug_unwrap(tensor)
        if self.is_value(inner) or self.is_placed(inner):
            return True
        where = storage_of(inner)  # jvp wraps an alias
        return where is not None and any(storage_of(held) == where for held in self._held.values())

    def lies_in(self, key: int, memory: Collection[int | None]) -> bool:
        """Return whether the value with the given key lies in memory that begins at one of the given locations."""
        return key in self._held and (where := storage_of(self._held[key])) is not None and where in memory

    def meet(self, tensors: Iterable[torch.Tensor]) -> None:
        """Number the tensors that no unit has made.

        These are tensors of the batch, buffers, and other tensors that the user's code holds.
        """
        for tensor in tensors:
            name = id(tensor)
            if name not in self._keys and name not in self._numbers and not self.is_placed(tensor):
                self.add_pure(tensor)

    def add_pure(self, tensor: torch.Tensor) -> None:
        """Number a pure tensor."""
        if id(tensor) not in self._keys and id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._pure)
            self._pure.append(tensor)

    def taint(self, number: int) -> int:
        """Turn a pure tensor into a value, because a unit of one stage has changed it, and return its key."""
        return self.add_value(self._pure[number])

    def sharing_pure(self, tensor: torch.Tensor) -> list[int]:
        """Return the numbers of the pure tensors that lie in the memory of `tensor`, including itself."""
        where = storage_of(tensor)
        return [
            number
            for number, pure in enumerate(self._pure)
            if id(pure) not in self._keys and (pure is tensor or (where is not None and storage_of(pure) == where))
        ]

    def describe(self, tensor: torch.Tensor, host: torch.device) -> Made | KnownValue | KnownPure:
        """Return the template leaf of a tensor that a unit of one stage has returned. A new tensor gets a key.

        Args:
            tensor: the tensor.
            host: the device of this stage.

        Raises:
            PipelineError: the tensor is of a kind that can't be sent between stages.
        """
        if id(tensor) in self._keys:
            return KnownValue(self._keys[id(tensor)])
        if id(tensor) in self._numbers:
            return KnownPure(self._numbers[id(tensor)])
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise PipelineError(
                f"a step makes a tensor of layout {kind} from weights, but only strided tensors can be sent between "
                "stages. Convert it with to_dense(), or create it in the module that uses it"
            )
        on_host = tensor.device.type == "cpu" and host.type != "cpu"
        key = self.add_value(tensor)
        if has_attributes(tensor):
            self._with_attributes.add(key)
        return Made(key, tuple(tensor.shape), tensor.stride(), tensor.dtype, on_host, tensor.requires_grad)

    def stand_for(self, out: Any, device: torch.device, weight: Callable[[str], torch.Tensor]) -> Any:
        """Return the result of a unit on another stage, with placeholders for its values.

        Args:
            out: the result, with template leaves.
            device: the device of this stage.
            weight: returns a parameter by its name.
        """

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, KnownWeight):
                return weight(leaf.name)
            if isinstance(leaf, Made):
                made = placeholder(leaf, device)
                self._register(leaf.key, made)
                return made
            if isinstance(leaf, KnownValue):
                return self._held[leaf.key]
            return self._pure[leaf.number] if isinstance(leaf, KnownPure) else leaf

        return map_leaves(out, fill)

    def alive(self) -> list[int]:
        """Return the keys of the values that the user's code still holds."""
        return [key for key in self._held if self._references(key) > 1]

    def prune(self) -> None:
        """Release values without other references, once enough new values have been added."""
        if len(self._held) < self._limit:
            return
        for key in [key for key in self._held if self._references(key) <= 1]:
            del self._keys[id(self._held[key])]
            del self._held[key]
        self._limit = 2 * len(self._held) + _VALUES_PER_RELEASE

    def _references(self, key: int) -> int:
        return count_python_references(self._held[key])

    def add_value(self, tensor: torch.Tensor) -> int:
        """Number a value, and return its key."""
        key = self._next
        self._register(key, tensor)
        return key

    def _register(self, key: int, tensor: torch.Tensor) -> None:
        self._next = max(self._next, key + 1)
        self._held[key] = tensor
        self._keys[id(tensor)] = key


def placeholder(made: Made, device: torch.device) -> torch.Tensor:
    """Return a tensor without values that has the properties of a tensor that another stage has made."""
    found = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    found.requires_grad_(made.requires_grad)
    found.__dict__[DEVICE_ATTRIBUTE] = torch.device("cpu") if made.on_host else device
    return found


def has_attributes(tensor: torch.Tensor) -> bool:
    """Return whether attributes of a tensor have been set."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, (nn.Parameter, FakeTensor)):
        return False
    return bool(tensor.__dict__)


def stands_on(tensor: torch.Tensor) -> torch.device | None:
    """Return the device of a placeholder's value; None for any other tensor."""
    found: torch.device | None = tensor.__dict__.get(DEVICE_ATTRIBUTE)
    return found


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the address at which the memory of a tensor begins; None if it has no memory."""
    tensor = torch.func.debug_unwrap(tensor)
    if isinstance(tensor, FakeTensor):
        return storage_key(tensor)
    if not has_storage(tensor) or not tensor.numel():
        return None
    return storage_address(tensor)
