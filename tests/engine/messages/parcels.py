"""Trees of tensors and other values for tests of messages."""

from __future__ import annotations

from typing import Any

import torch


def content(source: int, target: int) -> dict[str, Any]:
    """Return a tree with many kinds of tensors, which together are larger than a chunk."""
    generator = torch.Generator().manual_seed(10 * source + target)
    wide = torch.randn(300, 701, generator=generator)
    return {
        "weight": wide,
        "transposed": wide.t()[5:],
        "every other": wide[:, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(source + 0.5, dtype=torch.float64),
        "half": wide[:7].bfloat16(),
        "steps": torch.arange(100000, dtype=torch.int64) * source,
        "mask": wide > 0,
        "complex": torch.complex(wide[0], wide[1]).conj(),
        "parameter": torch.nn.Parameter(wide[:3].clone()),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "foreach": None, "maximize": False}, "text \N{SNOWMAN}"],
        "nothing": (),
        7: {"layer": target},
    }


def same(got: Any, wanted: Any) -> bool:
    """Return whether two trees are equal, except that received tensors require no gradient."""
    if isinstance(wanted, torch.Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted.detach()) and not got.requires_grad
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(same(got[k], v) for k, v in wanted.items())
    if isinstance(wanted, list | tuple):
        return type(got) is type(wanted) and len(got) == len(wanted) and all(map(same, got, wanted))
    return type(got) is type(wanted) and bool(got == wanted)
