"""Batches: how many samples, which part of them, whether all ranks hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError, Span

_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def rows_of(batch: Any) -> int:
    """The number of samples: the entries on axis 0 of the first tensor that has an axis.

    Raises:
        PipelineError: the batch holds no tensor with an axis.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.size(0)
    raise PipelineError(
        f"can't tell how many samples a batch of type {type(batch).__name__} holds, so it can't be cut into "
        "micro-batches; let it hold tensors whose axis 0 counts samples"
    )


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in dicts, sequences and dataclasses, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    inside: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        inside = tuple(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        inside = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, field.name) for field in fields(batch)]
    for part in inside:
        yield from tensors_of(part)


def copied(batch: Any) -> Any:
    """The batch with new containers and copies of its tensors, so that work in place does not reach the original."""
    return apply_to_collection(batch, torch.Tensor, torch.clone)


def take(batch: Any, span: Span, rows: int, whole: Collection[int] = ()) -> Any:
    """The samples `span` of a batch of `rows` samples; tensors are views.

    Cut are tensors whose axis 0 has `rows` entries, except those whose id is in `whole`, and lists of that many
    numbers or strings; all else is shared by every micro-batch.
    """

    def cut(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if not part.ndim or part.size(0) != rows or id(part) in whole:
                return part
            # `data` counts versions by itself: autograd takes work in place on one view for work on all of them.
            return (part if part.requires_grad else part.data)[span.start : span.stop]
        if len(part) == rows and all(isinstance(e, _PLAIN) for e in part):
            return part[span.start : span.stop]
        return [apply_to_collection(e, (torch.Tensor, list), cut) for e in part]

    return apply_to_collection(batch, (torch.Tensor, list), cut)


def join(parts: Sequence[Any], spans: Sequence[Span], what: str) -> Any:
    """The whole of what was computed span by span: tensors are joined along axis 0, all else is that of the first, as
    are tensors that have not one entry for each sample and are the same in all parts.

    Raises:
        PipelineError: the parts have other shapes than their spans, so axis 0 does not count samples.
    """

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            return first
        for_samples = all(t.ndim and t.size(0) == span.rows for t, span in zip(leaves, spans, strict=True))
        if not for_samples and all(torch.equal(t, first) for t in leaves[1:]):
            return first
        for leaf, span in zip(leaves, spans, strict=True):
            if leaf.ndim == 0 or leaf.size(0) != span.rows:
                raise PipelineError(
                    f"{what} for {span.rows} samples has shape {tuple(leaf.shape)}; axis 0 must count samples"
                )
        return torch.cat(leaves) if len(leaves) > 1 else first

    return pytree.tree_map(joined, *parts)


def fingerprint(batch: Any) -> str:
    """A checksum of all tensors of a batch: shapes, types and values."""
    digest = hashlib.blake2b(digest_size=8)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = tensor.detach().cpu().to_dense() if tensor.is_sparse else tensor.detach().cpu()
        digest.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    apply_to_collection(batch, torch.Tensor, add)
    return digest.hexdigest()


def check_same(fingerprints: Sequence[str], ranks: Sequence[int], where: str) -> None:
    """Raises PipelineError unless all ranks hold the same batch."""
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {r}: {f}" for r, f in zip(ranks, fingerprints, strict=True))
        raise PipelineError(
            f"{where}: the ranks of one pipeline loaded different batches (checksums {listed}); the first stage would "
            "see other samples than the loss. Call lightning.seed_everything(...) before data are made, or give "
            "samplers, random_split and augmentation their own generator"
        )
