"""Functions that count, select and join the samples of batches, and that compare the batches of ranks."""

from __future__ import annotations

import copy
import hashlib
import sys
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import chain
from math import gcd
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.trees import close_objects, make_named, map_tensors, open_objects
from lightning_pipes.ir import PipelineError, Span

Path = tuple[int, ...]
"""The position of an entry in a nested batch: its number at each level."""

_PLAIN_TYPES = (str, bytes, int, float, bool, complex, type(None))


def rows_of(batch: Any, cut: bool = True) -> int:
    """Return the number of samples in a batch.

    This is the length of axis 0 of the first tensor that has an axis. If this tensor is in a list whose entries are
    samples, such as images of different sizes, it is the length of this list.

    Args:
        batch: the batch.
        cut: whether the batch is to be cut into micro-batches. If not, a batch without such a tensor, for example one
            of an unknown class, counts as one sample.

    Raises:
        PipelineError: the batch is to be cut, but no tensor in it has an axis.
    """
    rows = (
        len(batch) if _is_list(batch) and _are_samples(batch) and all(map(_is_sample, batch)) else _rows_of_parts(batch)
    )
    if not rows and cut:
        raise PipelineError(
            f"the number of samples in a batch of type {type(batch).__name__} is unknown, so the batch can't be cut "
            "into micro-batches; make it a dict, tuple, list or dataclass of tensors whose axis 0 counts samples. A "
            "batch that can't be cut, such as several graphs merged into one, needs PipelineStrategy(microbatches=1)"
        )
    return rows or 1


def _rows_of_parts(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    parts = _parts(batch)
    for number, part in enumerate(parts):
        rows = _rows_of_parts(part)
        if rows is not None:
            others = [other for n, other in enumerate(parts) if n != number]
            return len(part) if _is_list(part) and _holds_samples(part, rows, others) else rows
    return None


def _holds_samples(part: Sequence[Any], rows: int, others: Sequence[Any]) -> bool:
    """Return whether each entry of a list in a batch is one sample, as for images of different sizes.

    The alternative is that each entry is a tensor with `rows` samples, as for two views of the same images. `others`
    are the other parts of the batch.
    """
    if not _are_samples(part):
        return False
    if any(t.size(0) != rows for t in tensors_of(part) if t.ndim):
        return True
    sizes = [other.size(0) for other in others if isinstance(other, torch.Tensor) and other.ndim]
    if rows in sizes:
        return False
    return len(part) in sizes or any(per_sample(other, len(part)) for other in others)


def _is_sample(entry: Any) -> bool:
    """Return whether an entry of the outermost list is one sample, which contains tensors and at least one number."""
    parts = () if isinstance(entry, torch.Tensor) else _parts(entry)
    numbers = [p for p in parts if isinstance(p, (int, float)) or (isinstance(p, torch.Tensor) and not p.ndim)]
    return bool(numbers) and any(t.ndim for t in tensors_of(entry))


def per_sample(part: Any, rows: int, outermost: bool = False) -> bool:
    """Return whether `part` is a list or tuple with one entry for each of `rows` samples.

    Tensors with `rows` entries each are columns of a batch, not samples, even if the list has `rows` of them. The
    outermost list contains columns if any of its tensors is a column, or if its entries are lists. An inner list
    contains columns if all of its tensors are columns.

    Args:
        part: the batch or an entry in it.
        rows: the number of samples of the batch.
        outermost: whether `part` is the batch itself.
    """
    if not _is_list(part) or len(part) != rows or not _are_samples(part):
        return False
    columns = [t.size(0) == rows for t in tensors_of(part) if t.ndim]
    if not outermost:
        return not columns or not all(columns)
    return not any(columns) and (not _is_list(part[0]) or all(map(_is_sample, part)))


def _sample_lists(batch: Any, rows: int, known: Collection[Path] = (), path: Path = ()) -> Iterator[int]:
    """Yield the ids of the lists in a batch that have one entry for each sample.

    If the number of entries is equal to the length of the tensors, these may be columns or samples. Such a list is
    interpreted like the lists next to it. Lists at the `known` paths have one entry for each sample.
    """
    if per_sample(batch, rows, outermost=not path) or path in known:
        yield id(batch)
        return
    parts = () if isinstance(batch, torch.Tensor) else _parts(batch)
    columns = any(isinstance(p, torch.Tensor) and p.ndim and p.size(0) == rows for p in parts)
    samples = not columns and any(per_sample(p, rows) for p in parts)
    for number, part in enumerate(parts):
        if samples and _is_list(part) and len(part) == rows and _are_samples(part):
            yield id(part)
        else:
            yield from _sample_lists(part, rows, known, (*path, number))


class SampleLists:
    """The interpretation of the lists in the batches of a run as samples or columns.

    If the interpretation of a list is ambiguous in one batch, it is taken from an earlier batch.
    """

    def __init__(self) -> None:
        self._samples: dict[Path, bool] = {}

    def find_lists(self, batch: Any, rows: int) -> frozenset[Path]:
        """Return the paths of the ambiguous lists that have one entry for each of `rows` samples in earlier batches.

        A list is ambiguous if its tensors could also be columns, as in a batch of eight images with eight boxes each.
        If no earlier batch was unambiguous, the list is interpreted as columns, and a warning is issued.
        """
        found = set()
        for path, part, samples in _lists(batch, rows, frozenset(_sample_lists(batch, rows))) if rows > 1 else ():
            if samples is not None:
                self._samples[path] = samples
            elif path not in self._samples:
                self._samples[path] = False
                rank_zero_warn(
                    f"A batch of {rows} samples has a {type(part).__name__} of {rows} entries whose tensors have "
                    f"{rows} rows each. These may be columns with a row for each sample, or one entry for each sample, "
                    "as boxes of images are. It is taken for columns, until a later batch decides. If it has an entry "
                    "for each sample, have collate_fn return dicts with a tensor of one element, such as "
                    '"image_id"; these are never columns'
                )
            if self._samples[path] and samples is None:
                found.add(path)
        return frozenset(found)


def _lists(
    batch: Any, rows: int, decided: Collection[int], path: Path = ()
) -> Iterator[tuple[Path, Sequence[Any], bool | None]]:
    """Yield path and content of each list of tensors within a batch, and whether its entries are samples.

    None instead of a boolean means that it is unknown whether the entries are samples.
    """
    for number, part in enumerate(() if isinstance(batch, torch.Tensor) else _parts(batch)):
        where = (*path, number)
        columns = [t.size(0) == rows for t in tensors_of(part) if t.ndim] if _is_list(part) else []
        if id(part) in decided:
            yield where, part, True
        elif columns and all(columns):
            yield where, part, None if len(part) == rows and _are_samples(part) else False
        else:
            yield from _lists(part, rows, decided, where)


def _are_samples(entries: Sequence[Any]) -> bool:
    """Return whether the entries of a list can be samples.

    They can if all are plain values or all have the same structure. The shapes of tensors may differ on axis 0 only, as
    for boxes, or on all other axes, as for images.
    """
    if all(isinstance(e, _PLAIN_TYPES) for e in entries):
        return True
    first = entries[0]
    if any(type(e) is not type(first) for e in entries):
        return False
    if isinstance(first, torch.Tensor):
        same = all(e.dtype == first.dtype and e.ndim == first.ndim for e in entries)
        return same and (len({e.shape[1:] for e in entries}) == 1 or len({e.shape[:1] for e in entries}) == 1)
    return all(e.keys() == first.keys() for e in entries) if isinstance(first, Mapping) else True


def _is_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and not isinstance(part, torch.Size)


def _parts(batch: Any) -> Sequence[Any]:
    """Return the entries of a dict, sequence or dataclass."""
    if isinstance(batch, Mapping):
        return tuple(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, sequences and dataclasses in their order."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    for part in _parts(batch):
        yield from tensors_of(part)


def sample_tensors(batch: Any, rows: int, where: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with an entry for each sample, with their places in the batch."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim and batch.size(0) == rows:
            yield where, batch
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(batch, Mapping):
        parts = ((f"{where}[{key!r}]", part) for key, part in batch.items())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        parts = ((f"{where}[{number}]", part) for number, part in enumerate(batch))
    elif is_dataclass(batch):
        parts = ((f"{where}.{field.name}", getattr(batch, field.name)) for field in fields(batch))
    for place, part in parts:
        yield from sample_tensors(part, rows, place)


def copy_batch(batch: Any) -> Any:
    """Return a copy of the batch with new containers and tensors, so that in-place operations do not change the
    original.
    """
    return map_batch(torch.clone, batch)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`."""
    return map_batch(lambda tensor: tensor.to(device), batch)


def map_batch(change: Callable[[Any], Any], batch: Any, kinds: type[Any] | tuple[type[Any], ...] = torch.Tensor) -> Any:
    """Return a copy of the batch in which `change` is applied to all parts of the given classes.

    Parts are found in mappings, in sequences, in dataclasses, which may be frozen, and in other objects that contain
    tensors and can be pickled.

    Args:
        change: returns the replacement of a part.
        batch: the batch.
        kinds: the class or classes of the parts.
    """
    if isinstance(batch, kinds):
        return change(batch)
    if isinstance(batch, _PLAIN_TYPES):
        return batch
    if isinstance(batch, defaultdict):
        return defaultdict(batch.default_factory, {key: map_batch(change, part, kinds) for key, part in batch.items()})
    if isinstance(batch, Mapping):
        made: Any = type(batch)
        return made(OrderedDict((key, map_batch(change, part, kinds)) for key, part in batch.items()))
    if is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in fields(batch):
            if hasattr(batch, field.name):
                part = map_batch(change, getattr(batch, field.name), kinds)
                object.__setattr__(copied, field.name, part)
        return copied
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return make_named(batch, (map_batch(change, part, kinds) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_batch(change, part, kinds) for part in batch])
    return map_tensors(change, batch)


def take_samples(batch: Any, span: Span, rows: int, whole: Collection[int] = (), samples: Collection[Path] = ()) -> Any:
    """Return the samples `span` of a batch. The tensors are views of the tensors of the batch.

    All tensors with `rows` entries on axis 0 are cut, and so are lists and tuples with one entry for each sample.
    Everything else is shared by all micro-batches.

    Args:
        batch: the batch.
        span: the samples to return.
        rows: the number of samples of the batch.
        whole: the ids of tensors that are not cut.
        samples: the paths of lists that have one entry for each sample although their tensors could also be columns,
            see `SampleLists`.
    """
    return make_cutter(batch, rows, whole, samples)(span)


def make_cutter(
    batch: Any,
    rows: int,
    whole: Collection[int] = (),
    samples: Collection[Path] = (),
    narrow: Callable[[torch.Tensor, Span], tuple[slice, ...]] = lambda tensor, span: (),
) -> Callable[[Span], Any]:
    """Return a function that selects samples from one batch like `take_samples`.

    The search for the parts that must be cut is done only once, not in each call of the function.

    Args:
        batch: the batch.
        rows: see `take_samples`.
        whole: see `take_samples`.
        samples: see `take_samples`.
        narrow: returns the slices of the axes after axis 0 that are selected from a tensor of the batch.
    """

    def take(part: Any, span: Span) -> Any:
        if _is_block_mask(part):
            return _take_from_block_mask(part, torch.arange(*span))
        if not isinstance(part, torch.Tensor):
            return part[span.start : span.stop]
        if part.is_nested:
            return _take_nested(part, span, rows)
        # `data` returns a tensor with its own version counter. Otherwise, autograd would treat an in-place
        # operation on one view as a change of all views.
        return (part if part.requires_grad else part.data)[(slice(*span), *narrow(part, span))]

    return partial(_select_samples, batch, rows, whole, set(_sample_lists(batch, rows, samples)), take)


def reorder_samples(batch: Any, rows: int, order: Sequence[int], samples: Collection[Path] = ()) -> Any:
    """Return a batch with its samples in another order.

    Args:
        batch: the batch.
        rows: the number of samples of the batch.
        order: the present numbers of the samples, in the new order.
        samples: see `take_samples`.
    """

    def take(part: Any, numbers: torch.Tensor) -> Any:
        if _is_block_mask(part):
            return _take_from_block_mask(part, numbers)
        if not isinstance(part, torch.Tensor):
            return type(part)([part[number] for number in order])
        if part.is_nested:
            entries = part.unbind()
            return torch.nested.as_nested_tensor([entries[number] for number in order], layout=part.layout)
        return part[numbers.to(part.device)]

    return _select_samples(batch, rows, (), set(_sample_lists(batch, rows, samples)), take, torch.tensor(order))


def _select_samples(
    batch: Any, rows: int, whole: Collection[int], lists: Collection[int], take: Callable[[Any, Any], Any], which: Any
) -> Any:
    """Return a batch with the result of `take(part, which)` for each tensor and list that has entries for samples."""

    def cut(part: Any) -> Any:
        if _is_block_mask(part):
            return take(part, which) if part.shape[0] == rows else part  # otherwise, it is the same for all samples
        if isinstance(part, torch.Tensor):
            return part if not part.ndim or part.size(0) != rows or id(part) in whole else take(part, which)
        if id(part) in lists:
            return take(part, which)
        entries = [within(entry) for entry in part]
        if isinstance(part, list):
            return entries
        return make_named(part, entries) if hasattr(part, "_fields") else type(part)(entries)

    def within(part: Any) -> Any:
        if isinstance(part, (torch.Tensor, list, tuple)):
            return cut(part)
        return map_batch(cut, part, (torch.Tensor, list, tuple, *_block_mask_types()))

    return within(batch)


def find_block_masks(batch: Any) -> list[Any]:
    """Return the masks of flex attention (`BlockMask`) in a batch."""
    found = []

    def note(part: Any) -> Any:
        if _is_block_mask(part):
            found.append(part)
        return part

    types = _block_mask_types()
    if types:
        map_batch(note, batch, types)
    return found


def _block_mask_types() -> tuple[type[Any], ...]:
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # its import takes seconds
    return () if flex is None else (flex.BlockMask,)


def _is_block_mask(part: Any) -> bool:
    return isinstance(part, _block_mask_types())


def _take_from_block_mask(mask: Any, numbers: torch.Tensor) -> Any:
    """Return the mask of some samples of a batch. Its function still gets the numbers of the samples in the batch."""
    numbers = numbers.to(mask.kv_num_blocks.device)
    part, of_batch = mask[numbers], mask.mask_mod

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return of_batch(numbers[b], h, q, kv)

    part.mask_mod = mask_mod
    return part


def _take_nested(tensor: torch.Tensor, span: Span, rows: int) -> torch.Tensor:
    """Return samples of a nested tensor, which does not support slices on axis 0."""
    if span == Span(0, rows):
        return tensor
    parts = list(tensor.unbind()[span.start : span.stop])
    return torch.nested.as_nested_tensor(parts, layout=tensor.layout)


def join(parts: Sequence[Any], spans: Sequence[Span], what: str, average: bool = False) -> Any:
    """Join the results that were computed for the micro-batches of a batch.

    Tensors are concatenated along axis 0, and so are lists with one entry for each sample. For other values, the value
    of the first micro-batch is returned. This includes tensors without an entry for each sample that are equal for all
    micro-batches.

    Args:
        parts: the result for each micro-batch.
        spans: the samples of each micro-batch.
        what: the name of the results, for messages.
        average: whether tensors without an entry for each sample that differ between micro-batches, such as an
            auxiliary loss, are averaged over the samples.

    Raises:
        PipelineError: the length of axis 0 of a tensor, or of a list, is not the number of samples of the micro-batch.
    """

    rows, root = spans[0].rows, id(parts[0])

    def is_whole(part: Any) -> bool:  # without reference to the parts, because pytree keeps the function
        return per_sample(part, rows, id(part) == root)

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        if _is_list(first) and is_whole(first):
            lengths = [len(leaf) if _is_list(leaf) else None for leaf in leaves]
            if lengths != [span.rows for span in spans]:
                raise PipelineError(f"{what} has lists of {lengths} entries for {[s.rows for s in spans]} samples")
            return type(first)(chain.from_iterable(leaves))
        if not isinstance(first, torch.Tensor):
            return first
        for_samples = all(t.ndim and t.size(0) == span.rows for t, span in zip(leaves, spans, strict=True))
        if not for_samples and all(torch.equal(t, first) for t in leaves[1:]):
            return first
        if average and not for_samples and first.is_floating_point() and all(t.shape == first.shape for t in leaves):
            return weighted_sum(leaves, [span.rows / sum(s.rows for s in spans) for span in spans])
        for leaf, span in zip(leaves, spans, strict=True):
            if leaf.ndim == 0 or leaf.size(0) != span.rows:
                raise PipelineError(
                    f"{what} for {span.rows} samples has shape {tuple(leaf.shape)}; axis 0 must count samples"
                )
        return torch.cat(leaves) if len(leaves) > 1 else first

    if len(parts) == 1:
        return parts[0]
    return close_objects(pytree.tree_map(joined, *map(open_objects, parts), is_leaf=is_whole))


def weighted_sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum of tensors of one shape."""
    return sum((t * weight for t, weight in zip(tensors[1:], weights[1:], strict=True)), start=tensors[0] * weights[0])


def checksum_batch(batch: Any) -> str:
    """Return a checksum of the shapes, types and values of all tensors of a batch."""
    digest = hashlib.blake2b(digest_size=8)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        for dense in _dense_parts(tensor):
            digest.update(f"{tuple(dense.shape)}{dense.dtype}".encode())
            digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    map_batch(add, batch)
    return digest.hexdigest()


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor in strided layout. For a nested tensor, all its parts are returned."""
    if tensor.is_nested:
        return [dense for part in tensor.detach().unbind() for dense in _dense_parts(part)]
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return [tensor.resolve_conj().resolve_neg()]


N_SAMPLED_VALUES = 1024
"""The approximate number of values that `sample_fingerprint` reads of a tensor. Of a small tensor, it reads all."""


def sample_fingerprint(batch: Any) -> int:
    """Return a checksum of the shapes of all tensors and of a part of their values, which takes microseconds.

    The checksums of two batches differ, unless their tensors agree in about a thousand values spread over the tensor.
    """
    checksum = 0
    for values in chain.from_iterable(map(_dense_parts, tensors_of(batch))):
        shape = tuple(values.shape)
        step = _sampling_step(shape)
        taken = values.reshape(-1)[::step] if step > 1 else values
        data = taken.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(data, zlib.crc32(repr(shape).encode(), checksum))
    return checksum


@lru_cache
def _sampling_step(shape: tuple[int, ...]) -> int:
    """Return a step through a flattened tensor that does not stay within one row or column of the tensor."""
    size = torch.Size(shape).numel()
    if size <= 2 * N_SAMPLED_VALUES:
        return 1
    step = size // N_SAMPLED_VALUES
    while gcd(step, size) > 1:
        step += 1
    return step


def check_same(fingerprints: Sequence[object], ranks: Sequence[int], where: str) -> None:
    """Raise PipelineError unless all ranks have the same batch.

    Args:
        fingerprints: the checksum of the batch of each rank.
        ranks: the ranks, in the same order.
        where: the place in the run, for the message.
    """
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {r}: {f}" for r, f in zip(ranks, fingerprints, strict=True))
        raise PipelineError(
            f"{where}: the ranks of one pipeline loaded different batches (checksums {listed}). All stages train "
            "on the same batches; otherwise the first stage sees other samples than the loss. If your code gives each "
            "rank a part of the data, as DistributedSampler does, take that out: the Trainer shares out the data among "
            "pipelines. If ranks shuffle or augment the same data differently, call lightning.seed_everything(...) "
            "before data are made, give samplers, random_split and augmentation their own generator, or let one rank "
            "load by data='one'"
        )
