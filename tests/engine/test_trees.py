"""Objects of many types are flattened into the tensors that they contain, and rebuilt from them."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine import trees


@dataclass
class Fields:
    a: Any
    b: Any = None
    listed: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    a: Any


@dataclass(frozen=True, slots=True)
class Slots:
    a: Any


class Entries(list[Any]):
    pass


class Keys(dict[str, Any]):
    pass


class Pair(namedtuple("Pair", "a b")):
    __slots__ = ()


class Fixed(tuple[Any, ...]):
    __slots__ = ()


class Plain:
    def __init__(self, a: Any) -> None:
        self.a = a


class Own(Plain):
    """A class that defines its own pickled state."""

    def __getstate__(self) -> Any:
        return (self.a,)

    def __setstate__(self, state: Any) -> None:
        (self.a,) = state


def with_attribute(thing: Any, value: Any) -> Any:
    """Set the attribute `more` of an object, and return the object."""
    thing.more = value
    return thing


ONE = torch.ones(2, 3)
MAKERS = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 1),
    "dataclass": lambda t: Fields(t, "name", [t * 2]),
    "frozen": Frozen,
    "slots": Slots,
    "list": lambda t: with_attribute(Entries([t, "x"]), t + 1),
    "dict": lambda t: Keys(a=t, b=3),
    "OrderedDict": lambda t: OrderedDict(a=t),
    "UserDict": lambda t: UserDict(a=t),
    "deque": lambda t: deque([t], maxlen=3),
    "named tuple": lambda t: Pair(t, 2),
    "subclass of tuple": lambda t: Fixed([t, 2]),
    "set": lambda t: {t},
    "object": Plain,
    "object that pickles its own state": Own,
    "partial": lambda t: partial(torch.add, t),
    "nested": lambda t: [Fields(Entries([t]), {"a": Plain(Slots(t * 3))})],
}


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_found_changed_and_put_back(name):
    made = MAKERS[name](ONE.clone())
    before = trees.tensors_in(made)
    doubled = trees.map_tensors(lambda t: t * 2, made)
    assert type(doubled) is type(made)
    after = trees.tensors_in(doubled)
    assert before
    assert [t.tolist() for t in after] == [(2 * t).tolist() for t in before]


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_flow_through_what_was_opened(name):
    given = ONE.clone().requires_grad_()
    leaves, spec = trees.flatten(MAKERS[name](given * 1))
    again = trees.close_objects(pytree.tree_unflatten(leaves, spec))
    sum(t.sum() for t in trees.tensors_in(again)).backward()
    assert given.grad is not None


def test_structures_of_equal_objects_are_equal():
    specs = [trees.flatten([Fields(ONE + n, "name"), Plain(ONE)])[1] for n in (0, 1)]
    assert specs[0] == specs[1]
    assert specs[0] != trees.flatten([Fields(ONE, "name", [ONE]), Plain(ONE)])[1]


def test_an_object_in_two_places_is_one_object_afterwards():
    shared = Plain(ONE)
    first, (second, tensor) = trees.map_tensors(lambda t: t + 1, (shared, [shared, ONE]))
    assert first is second
    assert first.a is tensor


def test_objects_may_refer_to_themselves():
    parent, child = Plain(ONE), Plain(None)
    parent.child, child.parent = child, parent
    moved = trees.map_tensors(lambda t: t + 1, parent)
    assert moved is not parent
    assert moved.child.parent is moved
    assert torch.equal(moved.a, ONE + 1)


class Whole(trees.SentWhole):
    """An object that is sent whole, so that flattening it must not pickle it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("it is not opened")


def unpicklable() -> Any:
    """Return a generator, which cannot be pickled."""
    return (n for n in range(3))


@pytest.mark.parametrize(
    "make", [lambda: Plain("text"), lambda: [3, None], Whole, unpicklable, lambda: torch.nn.Linear]
)
def test_objects_without_tensors_stay_the_same(make):
    thing = make()
    assert trees.open_objects(thing) is thing
    held = trees.map_tensors(lambda t: t, (thing, Plain(ONE)))
    assert held[0] is thing or held[0] == thing


def test_copies_share_no_container():
    made = Fields(ONE, {"a": ONE}, [ONE])
    copied = trees.map_tensors(torch.clone, made)
    copied.listed.append(1)
    copied.b["c"] = 1
    assert len(made.listed) == 1
    assert made.b.keys() == {"a"}
    assert copy.copy(copied).a is copied.a
