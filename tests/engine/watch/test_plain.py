"""Data from other ranks is deserialized as plain data, and everything else is refused."""

from __future__ import annotations

import collections
import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_pipes.cost import LayerProfile, Link, ModelProfile
from lightning_pipes.engine.watch import plain
from lightning_pipes.engine.watch.trust import TRUSTED_SEAL, ForgedError, Seal, dumps, loads, to_printable
from lightning_pipes.ir import Kind, Plan
from tests.ir.programs import pipedream

NUMBERS = np.arange(6.0).reshape(2, 3)
DATA = [
    {"a": [1, 2.5, None, True, "text", b"bytes"], 3: (4, {5}, frozenset([6])), "c": 1j},
    collections.OrderedDict(a=1),
    collections.deque([1, 2], 3),
    datetime.timedelta(seconds=3),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    Path("a/b"),
    torch.Size([1, 2]),
    torch.device("cpu"),
    torch.bfloat16,
    slice(1, 2),
    Kind.F,
    Plan.even(4, 2),
    Link(0.1, 1e-3),
]


@pytest.mark.parametrize("thing", DATA, ids=lambda thing: type(thing).__name__)
def test_data(thing: Any) -> None:
    found = plain.loads(plain.dumps(thing))
    assert (type(found), found) == (type(thing), thing)


def test_programs() -> None:
    """Programs are plain data, because ranks on several hosts without a shared secret exchange them."""
    program = pipedream()
    hash(program)
    assert plain.loads(plain.dumps(program)) == program


def test_tensors_and_arrays() -> None:
    things = [torch.arange(6).view(2, 3).t(), torch.ones(()), torch.empty(0, 2), nn.Parameter(torch.ones(2))]
    for aside in (False, True):
        buffers: list[Any] = []
        data = plain.dumps([things, NUMBERS.T, NUMBERS[0, 1], np.empty((0, 3))], buffers.append if aside else None)
        if not aside:
            found, array, number, nothing = plain.loads(data)
        else:
            found, array, number, nothing = plain.loads(data, [buffer.raw() for buffer in buffers])
        for one, other in zip(found, things, strict=True):
            assert torch.equal(one, other.detach())
            assert type(one) is torch.Tensor
        assert np.array_equal(array, NUMBERS.T)
        assert (type(number), number) == (np.float64, 1.0)
        assert nothing.shape == (0, 3)


def test_plans_of_torch_distributed_checkpoint() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(3)}, None, True)
    plan = planner.create_local_plan()
    assert plain.loads(plain.dumps(plan)) == plan


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


class Reached:
    """An object that reaches a function through an attribute of an allowed class."""

    def __reduce__(self) -> Any:
        return getattr, (Plan, "__init__")


def test_nothing_but_data(tmp_path: Path) -> None:
    """Pickles that call functions, import other classes or change allowed classes are refused and run no code."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(path)))
    assert path.exists()  # pickle itself runs the code
    path.unlink()
    refused = [
        *(pickle.dumps(thing) for thing in (Evil(path), [Evil(path)], Reached(), eval, np.dtype("O"), Path.touch)),
        b"cos\nsystem\n(S'touch %s'\ntR." % str(path).encode(),
        b"(S'touch %s'\nios\nsystem\n." % str(path).encode(),
        # changes an allowed class: its __reduce__ becomes text
        b"\x80\x02clightning_pipes.ir.plan\nPlan\n(N}U\nstagesqU\x01xstb.",
        b"",
        b"\x80\x05" + bytes(range(256)),
    ]
    for data in refused:
        with pytest.raises(plain.NotPlainError):
            plain.loads(data)
    assert not path.exists()


def test_objects_of_any_class_under_a_seal(tmp_path: Path) -> None:
    """Objects of any class are loaded if they have the right signature, and refused otherwise."""
    mine, others = Seal(b"a secret"), Seal(b"another")
    thing = Evil(tmp_path / "ran")
    with pytest.raises(ForgedError):
        loads(dumps(thing, others), mine)
    signed = dumps(thing, mine)
    for damaged in (signed[:-1], signed[:5], b"", signed[:40] + b"x" + signed[41:]):
        with pytest.raises(ForgedError):
            loads(damaged, mine)
    with pytest.raises(plain.NotPlainError, match=r"open is more than data; give all .* LIGHTNING_PIPES_SECRET"):
        loads(dumps(thing, None), None)
    assert not (tmp_path / "ran").exists()
    for seal in (mine, TRUSTED_SEAL):
        loads(dumps(thing, seal), seal).close()
        assert (tmp_path / "ran").exists()
        (tmp_path / "ran").unlink()


def test_a_name_is_signed_too() -> None:
    """A value that was signed for one key is refused under another key."""
    seal = Seal(b"a secret")
    signed = seal.sign(b"value", "key")
    assert seal.open(signed, "key") == b"value"
    with pytest.raises(ForgedError, match="other is not signed with the secret"):
        seal.open(signed, "other")


def test_text_that_a_terminal_would_obey() -> None:
    """Control characters are replaced in printed text, except for newlines and tabs."""
    assert to_printable("a\x1b[2Jb\r\x07\u202e\n\tc\x9bü") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\tc\ufffdü"


def test_a_profile_is_data_also_when_it_was_asked_for_prices() -> None:
    """A profile stays plain data after its cached arrays were computed."""
    profile = ModelProfile((LayerProfile("0", ((1, 0.1), (2, 0.2)), ((1, 0.2), (2, 0.4))),))
    assert profile.layer_arrays is profile.layer_arrays  # cached
    found = plain.loads(plain.dumps(profile))
    assert found == profile
    assert found.layer_arrays.seconds_at(Kind.F, 2).tolist() == profile.layer_arrays.seconds_at(Kind.F, 2).tolist()
